"""Compiles the real training step for a TPU slice that is not there:

    python -m prope.plan --config=configs/gemma_2b_wiki.py --topology=v5e:4x4 --sequences_per_chip=2

Needs no TPU, only libtpu (pip install 'prope[tpu]'). It says whether the step fits, what fills the memory of a chip,
what passes between chips, and the least time that a step can take: our own count of FLOPs and bytes against the
chip's peaks. That time assumes that all of it overlaps perfectly; a real step takes longer.

A topology is a generation and the shape of a slice in chips: v5e:4x4, v5p:4x4x4, v6e:16x16. --slices=N joins N of
them by the data-centre network, with a replica of the parameters on each. --search tries every remat with ever more
sequences per chip and plans the fastest that fits.
"""

import jax
from absl import flags
from ml_collections import config_flags

from prope import command
from prope.cost.plan import find_devices, plan, search
from prope.errors import UsageError
from prope.runtime import xla_flags
from prope.runtime.validate import validate


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/gemma_2b_wiki.py")
    flags.DEFINE_string("topology", None, "generation and shape of a slice, such as v5e:4x4, v5p:4x4x4, v6e:16x16")
    flags.DEFINE_integer("slices", 1, "slices of that shape", lower_bound=1)
    per_chip = "sets batch_size to this many sequences for each chip, with accumulation=1"
    flags.DEFINE_float("sequences_per_chip", None, per_chip, lower_bound=0.0)
    flags.DEFINE_boolean("search", False, "find the remat and the largest batch that fit, and plan the fastest")
    flags.DEFINE_boolean("xla_flags", True, "compile with the generation's flags of prope/runtime/xla_flags.py")
    flags.mark_flags_as_required(["config", "topology"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    config = given.config
    validate(config)
    jax.config.update("jax_platforms", "cpu")  # what is planned for is not here; what is here is left alone
    devices = find_devices(given.topology, given.slices)
    if given.sequences_per_chip is not None:
        rows = given.sequences_per_chip * len(devices)
        if rows < 1 or rows != int(rows):
            raise UsageError(f"--sequences_per_chip={given.sequences_per_chip}: is {rows} on {len(devices)} chips")
        config.batch_size, config.accumulation = int(rows), 1
    options = xla_flags.TPU[given.topology.partition(":")[0]] if given.xla_flags else {}
    return (search if given.search else plan)(config, given.topology, devices, options)


if __name__ == "__main__":
    command.run(main, define_flags)
