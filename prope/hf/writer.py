"""Writes a checkpoint for transformers: python -m prope.export_hf --workdir=W --output=DIR.

DIR then holds what `GemmaForCausalLM.from_pretrained(DIR)` loads: config.json, where p is the partial_rotary_factor
of rope_type proportional, model.safetensors, generation_config.json, and the tokenizer if it is a SentencePiece
model. The parameters are read and written one after the other: the model is never whole in memory.
"""

import functools
import json
import logging
import math
import pathlib
import shutil

from ml_collections import ConfigDict

from prope import model
from prope.data.tokenizer import load_tokenizer
from prope.hf import gemma as gemma_hf
from prope.hf.tensors import write_tensors
from prope.runtime.files import check_new, new_directory
from prope.workdir import checkpoints as checkpoint
from prope.workdir.parameters import read_parameter

log = logging.getLogger("prope")


def export(workdir: str, output: str, step: int | None = None, dtype: str = "float32") -> dict:
    """Writes the checkpoint of a step, the newest by default, to the new directory `output`; returns the last line.

    Raises:
      UsageError: there is no such checkpoint, transformers' Gemma cannot express it, or `output` is there already.
    """
    path, target = pathlib.Path(workdir), pathlib.Path(output)
    check_new("output", target)
    config, step, _ = checkpoint.find_run(path, step)
    texts = describe(config, dtype)
    tensors = gemma_hf.tensors(config.model)
    pairs = model.rotated_pairs(config.model)
    log.info(
        "exporting step %d of %s in %s; p-RoPE turns %s of %d pairs", step, path, dtype, pairs,
        config.model.head_dim // 2,
    )  # fmt: skip
    with new_directory("output", target) as part:
        for name, values in texts.items():
            (part / name).write_text(json.dumps(values, indent=2) + "\n")
        if config.data.tokenizer == "byte":
            log.info("transformers has no byte tokenizer: the ids of a text are 2, then 4 more than each of its bytes")
        else:
            shutil.copyfile(config.data.tokenizer, part / gemma_hf.TOKENIZER)
        write_tensors(part / gemma_hf.WEIGHTS, tensors, functools.partial(read_parameter, path, step), dtype)
    return {
        "output": str(target),
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtype": dtype,
        "step": step,
        "rope_percentage": config.model.rope_percentage,
        "rotated_pairs": pairs,
        "workdir": str(path),
    }


def describe(config: ConfigDict, dtype: str) -> dict[str, dict]:
    """The JSON files beside the tensors, by name."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    ids = {name: getattr(tokenizer, name) for name in ("bos", "eos", "pad")}
    special = {f"{name}_token_id": number for name, number in ids.items()}
    files = {"config.json": gemma_hf.to_hf(config, special, dtype), "generation_config.json": special}
    if config.data.tokenizer != "byte":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=config.data.tokenizer)
        pieces = {f"{name}_token": processor.id_to_piece(number) for name, number in ids.items()}
        pieces["unk_token"] = processor.id_to_piece(processor.unk_id())
        # Without these, transformers takes Gemma's names of the pieces and leaves <bos> out.
        form = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
        files["tokenizer_config.json"] = form | pieces | {"clean_up_tokenization_spaces": False}
    return files
