"""Makes a run of a Gemma 1 checkpoint in HF format: python -m prope.import_hf --input=DIR --workdir=W.

DIR is what transformers saves and Google publishes: config.json and model.safetensors, whole or in shards, and a
tokenizer.model. The run has one checkpoint, of step 0, which `evaluate`, `sample` and `train --init_from` read. The
tensors are read one after the other into the parameters' arrays. Needs the safetensors library.
"""

import jax
from absl import flags

from prope import command
from prope.hf.reader import import_run


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("input", None, "directory of the checkpoint: config.json, model.safetensors, tokenizer.model")
    flags.DEFINE_string("workdir", None, "directory of the run to make")
    flags.DEFINE_string("tokenizer", None, "path of its SentencePiece model, or byte, where the directory has none")
    flags.mark_flags_as_required(["input", "workdir"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and a host holds more than a device
    return import_run(given.input, given.workdir, given.tokenizer)


if __name__ == "__main__":
    command.run(main, define_flags)
