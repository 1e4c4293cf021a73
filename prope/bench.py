"""Measures the training step, or the rotation alone, on this machine.

    python -m prope.bench --config=configs/quickstart.py
    python -m prope.bench --rope
    python -m prope.bench --workdir=runs/quickstart --peer=transformers

It times warm steps of the real training step on random tokens, alternating with a plain matmul of
the model's dtype. `matmul_fraction` is the model's FLOPs per second divided by the matmul's, and so
means something on any machine.

`mfu` counts 6 FLOPs per matmul parameter, with the head's V x D and without the embedding's lookup,
and causal attention, 6 L N H T per token. Recomputation is not counted. It is null if the device's
peak is not known. Started on every host of a pod as training is, it measures the step on all their
devices, and the matmul on one.

--rope times `apply_p_rope` beside the paper's listing, each as a multiple of a plain copy, x + 1.

--peer=transformers times a run beside the class of transformers that computes it: the loss of a
batch, a training step on it, prefill, and prefill with 64 new tokens. Both have the same weights
and AdamW with clipped gradients, on a CPU float32 and as many threads, on a GPU float32 parameters
and bfloat16 matmuls, and are called in turns. It needs the extra `hf`, and on a GPU memory that
JAX leaves to torch: XLA_PYTHON_CLIENT_MEM_FRACTION=0.45.
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
    flags.DEFINE_boolean("rope", False, "time the rotation alone")
    flags.DEFINE_list("shape", ["2", "4096", "8", "256"], "with --rope: shape B,T,N,H of the array")
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "with --rope: dtype of the array"
    )
    command.define_place("workdir", "with --peer: directory of the run")
    flags.DEFINE_enum("peer", None, ["transformers"], "time a run beside this program")
    flags.DEFINE_integer(
        "seq_len", None, "with --peer: tokens of the sequence; the run's by default", lower_bound=2
    )
    flags.DEFINE_integer("sequences", 1, "with --peer: sequences of the batch", lower_bound=1)
    flags.DEFINE_float("rope_percentage", 0.75, "with --rope: p", lower_bound=0.0, upper_bound=1.0)


def main() -> dict:
    """Measures; returns the times."""
    from prope.cost.bench import bench_rope, bench_step
    from prope.runtime import processes

    _refuse_other_modes()
    if FLAGS.rope:
        arguments = (_parse_shape(), FLAGS.dtype, FLAGS.rope_percentage)
        processes.check_count()
        return processes.call_on_first(lambda: bench_rope(*arguments))
    if FLAGS.peer:
        from prope.hf.peer import bench_peer

        if FLAGS.workdir is None:
            raise UsageError(f"--peer={FLAGS.peer} needs --workdir=W, a run to time")
        arguments = (FLAGS.workdir, FLAGS.seq_len, FLAGS.sequences, FLAGS.steps)
        return processes.call_on_first(lambda: bench_peer(*arguments))
    if FLAGS.config is None:
        what = "its training step, or --rope or --peer"
        raise UsageError(f"prope.bench needs --config=FILE to measure {what}")
    return bench_step(command.read_spec(), FLAGS.steps)


def _refuse_other_modes() -> None:
    """Raises UsageError where flags of two kinds of measurement are given."""
    modes = [f"--{name}" for name in ("rope", "peer", "config") if FLAGS[name].value]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(modes)} measure different things; give one of them")
    if not FLAGS.peer:
        for name in ("workdir", "seq_len", "sequences"):
            if FLAGS[name].present:
                raise UsageError(f"--{name} is of --peer=transformers; add that, or leave it out")


def _parse_shape() -> tuple[int, ...]:
    shape = tuple(int(size) if size.isdecimal() else 0 for size in FLAGS.shape)
    if len(shape) != 4 or 0 in shape or shape[-1] % 2:
        text = ",".join(FLAGS.shape)
        rule = "must be four numbers B,T,N,H from 1 on, the last one even"
        raise usage_error("--shape", text, rule)
    return shape


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True)
