"""Writes a checkpoint as a GGUF file, which llama.cpp runs.

    python -m prope.export_gguf --workdir=runs/quickstart --output=model.gguf --check=llama.cpp

An architecture of llama.cpp computes the run, whatever its p: the file says, as the architecture
has it, which pairs stand still. A run that none computes is refused in one line. With
--check=llama.cpp the file is compared there with the run before it appears under its name.
One tensor at a time is in memory. On a pod, process 0 writes and the others wait. It needs the
extra gguf: pip install -e '.[gguf]'.
"""

import os

from absl import flags
from absl.flags import FLAGS

from prope import command

_DTYPES = ("float32", "float16", "bfloat16", "q8_0")


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to export; the newest by default")
    command.define_place("output", "file to create, such as model.gguf")
    flags.DEFINE_enum(
        "dtype", "float32", _DTYPES, "of matrices: float32 is exact, q8_0 takes a quarter of it"
    )
    flags.DEFINE_enum(
        "check", None, ["llama.cpp"], "compare five texts there, where xllamacpp is installed"
    )
    flags.DEFINE_string("pairs", None, "pairs that rotate: of a file of prope.choose, or 0-15,20")
    flags.mark_flags_as_required(["workdir", "output"])


def main() -> dict:
    """Exports in the first process; returns the file, its architecture and what was checked."""
    from prope.hf.gguf_file import export
    from prope.runtime.processes import call_on_first

    names = ("workdir", "output", "step", "dtype", "check", "pairs")
    return call_on_first(lambda: export(**{name: FLAGS[name].value for name in names}))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # a host holds more than a device
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
