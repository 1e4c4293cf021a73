"""Writes a checkpoint in the format of the class of transformers that computes it."""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator

from prope.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from prope.data.vocabulary import split_lines
from prope.errors import RunFailed, UsageError, log, usage_error
from prope.hf import config_json, engines
from prope.hf.families import FAMILIES
from prope.hf.layout import list_tensors, unread_parameters
from prope.hf.tensors import write_tensors
from prope.hf.tokenizers import special_fields, write_tokenizer
from prope.runtime.files import as_path, check_new, new_directory
from prope.spec.data import DataSpec
from prope.workdir.run import open_run


def export(workdir: str, output: str, step: int | None = None, dtype: str = "float32") -> dict:
    """Writes the checkpoint of a step, by default the newest, to a new directory.

    Returns the command's result. Raises UsageError where there is no such checkpoint, transformers
    has no class for it, or `output` exists.
    """
    target = as_path("--output", output)
    check_new("output", target)
    run = open_run(workdir, step)
    spec = run.spec
    hf_config = config_json.to_hf(spec, dtype)
    family = FAMILIES[hf_config["model_type"]]
    unread = unread_parameters(spec.model, family)
    if unread:
        problem = f"transformers has no tensor for {', '.join(unread)}"
        raise usage_error("--workdir", workdir, problem, "an export would compute something else")
    tokenizer = load_tokenizer(spec.data.tokenizer)
    special = special_fields(tokenizer)
    if spec.data.stop_ids:
        special["eos_token_id"] = [special["eos_token_id"], *spec.data.stop_ids]
    texts = {"config.json": hf_config | special, "generation_config.json": special}
    if hf_config["model_type"] == "qwen2" and isinstance(tokenizer, SentencePieceTokenizer):
        problem = "AutoTokenizer takes Qwen2Tokenizer for it, which gives other ids"
        log.warning("%s: %s; load it by PreTrainedTokenizerFast", output, problem)
    tensors = list_tensors(spec.model, family)

    def write(run):
        encoding = spec.model.describe_rotation()
        log.info("exporting step %d of %s in %s; %s", run.step, workdir, dtype, encoding)
        # The last array is kept: neighbours such as gate_proj and up_proj are cut from one.
        read = functools.lru_cache(1)(run.checkpoint.read)
        with new_directory("output", target) as directory:
            for name, values in texts.items():
                (directory / name).write_text(json.dumps(values, indent=2) + "\n")
            write_tokenizer(spec.data.tokenizer, tokenizer, directory, _lines(spec.data))
            write_tensors(directory, tensors, read, dtype)

    run, _ = run.restore_newest_valid(write)
    return {
        "output": str(target),
        "class": family.hf_class,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtype": dtype,
        "step": run.step,
        "rope_percentage": spec.model.rope_percentage,
        "rotated_pairs": spec.model.rotated_pairs,
        "workdir": str(workdir),
    }


def _lines(data: DataSpec) -> Iterator[bytes]:
    """Yields lines of a run's text, if it is on this machine, and of Python's documentation."""
    for texts in engines.local_texts(data):
        with contextlib.suppress(RunFailed, UsageError):
            lines = itertools.chain.from_iterable(map(split_lines, texts))
            yield from itertools.islice(lines, 5_000)
