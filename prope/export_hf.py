"""Writes a checkpoint in the format of Hugging Face transformers.

    python -m prope.export_hf --workdir=runs/quickstart --output=runs/hf

`AutoModelForCausalLM.from_pretrained(DIR)` of transformers 5 loads the result: config.json,
model.safetensors (above 2 GB, shards and their index), generation_config.json, the tokenizer's
files, unless it is byte, and README.md, a model card. The class is the first that computes the run,
of Gemma 1 to 4, Llama, Qwen 2 and 3, Mistral and SmolLM3; p is the partial_rotary_factor of
rope_type proportional.

Where key heads, or layers of one kind, rotate different pairs, no class has the rotation:
`--custom_code` writes modeling_prope.py, too, which `from_pretrained(DIR, trust_remote_code=True)`
loads.

One shard at a time is in memory, 2 GB or one larger tensor; with --check the whole model, twice. On
a pod, process 0 writes and the others wait.
"""

import os

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.spec.model import DTYPES


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to export; the newest by default")
    command.define_place("output", "directory to create")
    flags.DEFINE_enum(
        "dtype", "float32", DTYPES, "of the tensors: float32 is exact, bfloat16 halves the file"
    )
    flags.DEFINE_bool(
        "custom_code",
        False,
        "where no class of transformers rotates as the run does, write modeling_prope.py, which "
        "from_pretrained(DIR, trust_remote_code=True) loads",
    )
    flags.DEFINE_string("pairs", None, "pairs that rotate: of a file of prope.choose, or 0-15,20")
    flags.DEFINE_enum(
        "check", None, ["mlx", "transformers", "vllm"], "compare five texts there, if installed"
    )
    flags.mark_flags_as_required(["workdir", "output"])


def main() -> dict:
    """Exports in the first process; returns output directory, class and number of parameters."""
    from prope.hf.exporter import export
    from prope.runtime.processes import call_on_first

    names = ("workdir", "output", "step", "dtype", "custom_code", "pairs", "check")
    return call_on_first(lambda: export(**{name: FLAGS[name].value for name in names}))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # a host holds more than a device
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
