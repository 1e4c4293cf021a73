"""Measures the training step, or the rotation alone, on this machine.

    python -m prope.bench --config=configs/quickstart.py
    python -m prope.bench --rope

It times warm steps of the real training step on random tokens, alternating with a plain matmul of
the model's dtype. `matmul_fraction` is the model's FLOPs per second divided by the matmul's, and so
means something on any machine.

`mfu` counts 6 FLOPs per matmul parameter, with the head's V x D and without the embedding's lookup,
and causal attention, 6 L N H T per token. Recomputation is not counted. It is null if the device's
peak is not known. Started on every host of a pod as training is, it measures the step on all their
devices, and the matmul on one.

--profile also traces three steps: `profile` has the milliseconds of each class of kernels, such as
matmul MLP, attention or norms, as measured and as a roofline has them, and how long none ran.

--rope times `apply_p_rope` beside the paper's listing, each as a multiple of a plain copy, x + 1.
On a GPU or TPU 20 calls are timed together, so that the time to start a program does not count.
"""

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import UsageError, usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config()
    flags.DEFINE_integer(
        "steps", 10, "timed steps, after two untimed ones; the median counts", lower_bound=1
    )
    flags.DEFINE_boolean("profile", False, "also trace steps: milliseconds by class of kernel")
    flags.DEFINE_boolean("rope", False, "time the rotation alone")
    flags.DEFINE_list("shape", ["2", "4096", "8", "256"], "with --rope: shape B,T,N,H of the array")
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "with --rope: dtype of the array"
    )
    flags.DEFINE_float("rope_percentage", 0.75, "with --rope: p", lower_bound=0.0, upper_bound=1.0)


def main() -> dict:
    """Measures; returns the times."""
    if FLAGS.rope:
        if FLAGS.config is not None or FLAGS.profile:
            problem = "times the rotation alone; --config and --profile measure the training step"
            raise UsageError(f"--rope {problem}: leave out one or the other")
        arguments = (_parse_shape(), FLAGS.dtype, FLAGS.rope_percentage)
    elif FLAGS.config is None:
        raise UsageError("prope.bench needs --config=FILE to measure its training step, or --rope")
    from prope.cost.bench import bench_rope, bench_step
    from prope.runtime import processes

    if FLAGS.rope:
        processes.check_count()
        return processes.call_on_first(lambda: bench_rope(*arguments))
    return bench_step(command.read_spec(), FLAGS.steps, FLAGS.profile)


def _parse_shape() -> tuple[int, ...]:
    shape = tuple(int(size) if size.isdecimal() else 0 for size in FLAGS.shape)
    if len(shape) != 4 or 0 in shape or shape[-1] % 2:
        text = ",".join(FLAGS.shape)
        rule = "must be four numbers B,T,N,H from 1 on, the last one even"
        raise usage_error("--shape", text, rule)
    return shape


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True)
