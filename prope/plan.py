"""Compiles the real training step for TPUs or GPUs that are not here.

    python -m prope.plan --config=configs/gemma_2b_wiki.py --topology=v5e:4x4 --sequences_per_chip=2
    python -m prope.plan --config=configs/gemma_300m_wiki.py --topology=h100:1

Needs XLA's compiler, which is libtpu (pip install -e '.[tpu]') or JAX's CUDA plugin (pip install -e
'.[plan-gpu]'), and no TPU or GPU. What it reports is of two kinds:

    compiled   whether the step fits and what fills a chip's memory, the collectives, the kernels,
               the HBM traffic, also by class of kernel
    roofline   ideal_*: a lower bound of the step time, our own count of FLOPs and bytes against the
               chip's peaks, with perfect overlap. A real step takes longer. Of each class of
               kernels, such as attention or the optimizer: milliseconds, one kernel after another.

A topology is a TPU and the shape of a slice in chips, v5e:4x4, v5p:4x4x4, v6e:16x16, or a GPU and
nodes x GPUs of a node, a100:8, h100:8x8, h200:1, b200:8 (a100 has 80 GB). --slices=N joins N TPU
slices by the data-centre network, with a replica of the parameters on each, as on each node of
GPUs. What crosses that network is counted apart ("between slices"), at the speed of a host's
network cards. A GPU's memory is the share that JAX takes under `launch/run.sh gpu`. --search tries
every remat with more and more sequences per chip, and what is gathered whole (config.mesh.gather),
and plans the fastest that fits.
"""

import os

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import usage_error
from prope.runtime import xla_flags


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config("the run's config file, such as configs/gemma_2b_wiki.py")
    kinds = "TPU and shape of a slice, or GPU and nodes x GPUs: v5e:4x4, v5p:4x4x4, h100:8x8"
    flags.DEFINE_string("topology", None, kinds)
    flags.DEFINE_integer("slices", 1, "number of slices of that shape", lower_bound=1)
    per_chip = "sets config.batch_size to this many sequences per chip, with accumulation=1"
    flags.DEFINE_float("sequences_per_chip", None, per_chip, lower_bound=0.0)
    flags.DEFINE_boolean(
        "search", False, "find the batch, remat and gather that fit, and plan the fastest"
    )
    flags.DEFINE_boolean(
        "xla_flags", True, "compile with the platform's flags of prope/runtime/xla_flags.py"
    )
    flags.mark_flags_as_required(["config", "topology"])


def main() -> dict:
    """Compiles; returns the plan."""
    import jax

    from prope.cost.plan import plan, search
    from prope.cost.topology import as_if_attached, find_devices

    spec = command.read_spec()
    # The planned devices are not here, and those that are here stay untouched.
    jax.config.update("jax_platforms", "cpu")
    options = {}
    chip, _, _ = FLAGS.topology.partition(":")
    if FLAGS.xla_flags and chip in xla_flags.TPU:
        # The variable is read by libtpu and by the choice of blocks.
        users = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"], options = xla_flags.with_users(chip, users)
    devices = find_devices(FLAGS.topology, FLAGS.slices)
    if FLAGS.sequences_per_chip is not None:
        rows = FLAGS.sequences_per_chip * len(devices)
        if rows < 1 or rows % 1:  # also refuses inf
            problem = f"is {rows} on {len(devices)} chips"
            raise usage_error("--sequences_per_chip", FLAGS.sequences_per_chip, problem)
        spec = spec.replace({"batch_size": int(rows), "accumulation": 1})
    if FLAGS.xla_flags and chip not in xla_flags.TPU:
        options = xla_flags.GPU
        jax.config.update("jax_optimization_level", xla_flags.GPU_LEVEL)
    compute = search if FLAGS.search else plan
    with as_if_attached(devices):
        return compute(spec, FLAGS.topology, devices, options)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is planned for need not be installed, nor be here
    command.run(main, define_flags)
