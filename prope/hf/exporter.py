"""Writes a checkpoint in the format of transformers' GemmaForCausalLM, or of another class that computes it."""

import functools
import json
import math

from etils import epath

from prope.data.tokenizer import UNKNOWN, load_tokenizer
from prope.encodings import describe, rotated_pairs
from prope.errors import log
from prope.hf import gemma
from prope.hf.tensors import write_tensors
from prope.runtime.files import as_path, check_new, new_directory
from prope.workdir.run import Run, open_run


def export(workdir: str, output: str, step: int | None = None, dtype: str = "float32") -> dict:
    """Writes the checkpoint of a step, by default the newest, to a new directory; returns the command's result.

    Raises UsageError where there is no such checkpoint, transformers has no class for it, or `output` exists.
    """
    target = as_path("output", output)
    check_new("output", target)
    run = open_run(workdir, step)
    config, tokenizer = run.config, load_tokenizer(run.config.data.tokenizer)
    texts = {"config.json": gemma.to_hf(config, dtype), "generation_config.json": gemma.SPECIAL_IDS}
    if config.data.tokenizer == "byte":
        log.info(
            "transformers has no byte tokenizer: the ids of a text are 2, then 4 more than each of its bytes"
        )
    else:
        ids = gemma.SPECIAL_IDS | {"unk_token_id": UNKNOWN}
        pieces = {
            name.removesuffix("_id"): tokenizer.processor.id_to_piece(number)
            for name, number in ids.items()
        }
        # Without these, transformers takes Gemma's names of the pieces and leaves <bos> out.
        form = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
        texts["tokenizer_config.json"] = form | pieces | {"clean_up_tokenization_spaces": False}
    tensors = gemma.tensors(config.model)

    def write(run: Run) -> None:
        log.info(
            "exporting step %d of %s in %s; %s", run.step, workdir, dtype, describe(config.model)
        )
        with new_directory("output", target) as directory:
            for name, values in texts.items():
                (directory / name).write_text(json.dumps(values, indent=2) + "\n")
            if config.data.tokenizer != "byte":
                epath.Path(config.data.tokenizer).copy(directory / gemma.TOKENIZER)
            # The last array is kept: neighbours such as gate_proj and up_proj are cut from the same one.
            write_tensors(directory, tensors, functools.lru_cache(1)(run.checkpoint.read), dtype)

    run, _ = run.first_undamaged(write)
    return {
        "output": str(target),
        "class": texts["config.json"]["architectures"][0],
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtype": dtype,
        "step": run.step,
        "rope_percentage": config.model.rope_percentage,
        "rotated_pairs": rotated_pairs(config.model),
        "workdir": str(workdir),
    }
