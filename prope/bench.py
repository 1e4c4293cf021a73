"""Measures the training step on this machine: python -m prope.bench --config=configs/quickstart.py

Warm steps of the real training step on random tokens. In the same run, in turns with the steps, a plain matmul of the
model's dtype: `matmul_fraction`, the model's FLOPs per second as a part of its rate, means something on any machine.

`mfu` counts 6 FLOPs per parameter of a matmul, the head's V x D counted and the embedding's lookup not, and causal
attention, 6 L N H T a token; recomputation is not counted. It is null where the device's peak is not known.

--rope times `apply_p_rope` beside the paper's listing instead, each as a multiple of a plain copy (x + 1).
"""

from absl import flags
from ml_collections import config_flags

from prope import command
from prope.cost.bench import bench_rope, bench_step
from prope.errors import UsageError
from prope.runtime.validate import validate


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/quickstart.py")
    flags.DEFINE_integer("steps", 10, "timed steps, after two that are not; the median counts", lower_bound=1)
    flags.DEFINE_boolean("rope", False, "time the rotation alone")
    flags.DEFINE_list("shape", ["2", "4096", "8", "256"], "with --rope: B,T,N,H of the array to rotate")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "with --rope: of the array")
    flags.DEFINE_float("rope_percentage", 0.75, "with --rope: p", lower_bound=0.0, upper_bound=1.0)


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    if not given.rope:
        if given.config is None:
            raise UsageError("prope.bench needs --config=FILE to measure its training step, or --rope")
        validate(given.config)
        return bench_step(given.config, given.steps)
    try:
        B, T, N, H = map(int, given.shape)
    except ValueError:
        raise UsageError(f"--shape={','.join(given.shape)}: must be four numbers B,T,N,H") from None
    return bench_rope((B, T, N, H), given.dtype, given.rope_percentage)


if __name__ == "__main__":
    command.run(main, define_flags)
