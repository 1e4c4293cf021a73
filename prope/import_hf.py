"""Creates a run from a checkpoint in Hugging Face format: Gemma, Llama, SmolLM, Qwen, Mistral.

    python -m prope.import_hf --input=DIR --workdir=runs/gemma
    python -m prope.import_hf --input=google/gemma-3-270m --workdir=runs/gemma
    python -m prope.import_hf --input=ORBAX --config=configs/gemma3_1b.py --workdir=runs/gemma

DIR is what transformers saves and the Hub has: config.json, model.safetensors, in one file or in
shards, and tokenizer.json or tokenizer.model. A name is fetched from the Hugging Face Hub, into
huggingface_hub's cache and with its token, unless a folder has that name. Families are Gemma 1 to 4
(of models with images, the text part), Llama 3, SmolLM2 and 3, Qwen2, 2.5 and 3, and Mistral. The
run has one checkpoint, of step 0, which evaluate, sample, analyze and train --init_from read; its
config has learning rates and a batch for fine-tuning. Tensors are copied one at a time. ORBAX is a
checkpoint of Gemma 1 to 4 in the form of DeepMind's gemma: it does not tell its model, which
--config gives. What this decoder does not compute is refused, all of it in one line.
"""

import os

from absl import flags
from absl.flags import FLAGS
from ml_collections import config_flags

from prope import command
from prope.inference import options


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place(
        "input", "directory of the checkpoint, or its name on the Hugging Face Hub: OWNER/NAME"
    )
    command.define_place("workdir", "directory of the run to create")
    command.define_place(
        "tokenizer",
        "if the input has none: tokenizer.json, a SentencePiece model, their folder, or 'byte'",
    )
    config_flags.DEFINE_config_file(
        "config",
        None,
        "for a checkpoint of Orbax, which has no config.json: the config file of its model, such "
        "as configs/gemma3_1b.py",
    )
    options.define_dtype()
    flags.mark_flags_as_required(["input", "workdir"])


def main() -> dict:
    """Imports; returns the run's directory and the number of parameters."""
    import jax

    from prope.config import resolve
    from prope.hf.importer import import_run

    # Nothing is computed, and a host holds more than a device.
    jax.config.update("jax_platforms", "cpu")
    spec = None if FLAGS.config is None else resolve(FLAGS.config)
    return import_run(FLAGS.input, FLAGS.workdir, FLAGS.tokenizer, spec, FLAGS.dtype)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # whatever a host asks for
    command.run(main, define_flags)
