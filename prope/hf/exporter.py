"""Writes a checkpoint in the format of the class of transformers that computes it."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator

from etils import epath

from prope.data.tokenizer import load_tokenizer
from prope.data.vocabulary import split_lines
from prope.errors import RunFailed, UsageError, log, usage_error
from prope.hf import config_json, engines
from prope.hf.families import FAMILIES
from prope.hf.layout import list_tensors, unread_parameters
from prope.hf.model_card import tokenizer_class, write_card
from prope.hf.tensors import write_tensors
from prope.hf.tokenizers import special_fields, write_tokenizer
from prope.inference.opening import keep_pairs
from prope.runtime.files import as_path, check_new, new_directory
from prope.spec.data import DataSpec
from prope.workdir.run import open_run

# In config.json: the classes of modeling_prope.py, which no class of transformers replaces.
_CUSTOM_CLASS = {
    "architectures": ["PropeForCausalLM"],
    "model_type": "prope",
    "auto_map": {
        "AutoConfig": "modeling_prope.PropeConfig",
        "AutoModelForCausalLM": "modeling_prope.PropeForCausalLM",
    },
}


def export(
    workdir: str,
    output: str,
    step: int | None = None,
    dtype: str = "float32",
    custom_code: bool = False,
    pairs: str | None = None,
    check: str | None = None,
) -> dict:
    """Writes the checkpoint of a step, by default the newest, to a new directory.

    Of its pairs those of `pairs` rotate, as in prope.evaluate; None: those that were trained.

    With `custom_code`, modeling_prope.py beside it where no class of transformers has the rotation.
    Returns the command's result. Raises UsageError where there is no such checkpoint, transformers
    has no class for it, or `output` exists; RunFailed where `check`, one of engines.PACKAGES, finds
    another result.
    """
    target = as_path("--output", output)
    check_new("output", target)
    run = open_run(workdir, step)
    spec = dataclasses.replace(run.spec, model=keep_pairs(run.spec.model, pairs))
    hf_config = config_json.to_hf(spec, dtype, custom_code)
    family = FAMILIES[hf_config["model_type"]]
    custom_class = _CUSTOM_CLASS if "rope_frequencies" in hf_config else {}
    hf_config |= custom_class
    unread = unread_parameters(spec.model, family)
    if unread:
        problem = f"transformers has no tensor for {', '.join(unread)}"
        raise usage_error("--workdir", workdir, problem, "an export would compute something else")
    tokenizer = load_tokenizer(spec.data.tokenizer)
    special = special_fields(tokenizer)
    if spec.data.stop_ids:
        special["eos_token_id"] = [special["eos_token_id"], *spec.data.stop_ids]
    texts = {"config.json": hf_config | special, "generation_config.json": special}
    if tokenizer_class(hf_config["model_type"], tokenizer) != "AutoTokenizer":
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
            if custom_class:
                _write_code(directory, family.hf_class)
            write_tokenizer(spec.data.tokenizer, tokenizer, directory, _lines(spec.data))
            write_tensors(directory, tensors, read, dtype)
            bound = engines.BOUNDS[dtype]
            if check == "mlx" and hf_config["model_type"] == "gemma3_text":
                bound = engines.BOUNDS["bfloat16"]  # it multiplies by sqrt(D) in bfloat16
            checked = engines.check(check, run, spec, tokenizer, directory, bound)
            found = checked if engines.is_there(check) else None
            card = write_card(target.name, run.step, spec, hf_config, tokenizer, found)
            (directory / "README.md").write_text(card)
            return checked

    run, checked = run.restore_newest_valid(write)
    return {
        "output": str(target),
        "class": hf_config["architectures"][0],
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtype": dtype,
        "checked": checked,
        "step": run.step,
        "rope_percentage": spec.model.rope_percentage,
        "rotated_pairs": spec.model.rotated_pairs,
        "workdir": str(workdir),
    }


def _write_code(directory: epath.Path, hf_class: str) -> None:
    """Writes modeling_prope.py, whose classes rotate otherwise than a class of transformers."""
    name = "modeling_prope.py"
    text = (epath.Path(__file__).parent / name).read_text()
    (directory / name).write_text(text.replace("LlamaForCausalLM", hf_class))


def _lines(data: DataSpec) -> Iterator[bytes]:
    """Yields lines of a run's text, if it is on this machine, and of Python's documentation."""
    for texts in engines.local_texts(data):
        with contextlib.suppress(RunFailed, UsageError):
            lines = itertools.chain.from_iterable(map(split_lines, texts))
            yield from itertools.islice(lines, 5_000)
