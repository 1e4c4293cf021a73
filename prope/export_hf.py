"""Writes a checkpoint for transformers: python -m prope.export_hf --workdir=W --output=DIR.

DIR then holds what `GemmaForCausalLM.from_pretrained(DIR)` loads: config.json, where p is the partial_rotary_factor
of rope_type proportional, model.safetensors, generation_config.json, and the tokenizer if it is a SentencePiece
model. The parameters are read and written one after the other: the model is never whole in memory.
"""

import jax
from absl import flags

from prope import command
from prope.config import DTYPES
from prope.hf.writer import export


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to export; the newest by default")
    flags.DEFINE_string("output", None, "directory to make, for transformers")
    flags.DEFINE_enum("dtype", "float32", DTYPES, "of the tensors: float32 keeps every bit, bfloat16 halves the file")
    flags.mark_flags_as_required(["workdir", "output"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and a host holds more than a device
    return export(given.workdir, given.output, given.step, given.dtype)


if __name__ == "__main__":
    command.run(main, define_flags)
