"""Draws the loss curve of a run, or writes the HTML page of a sweep.

    python -m prope.report --workdir=runs/quickstart
    python -m prope.report --sweep=runs/sweep

The first writes W/loss.png, and W/longcontext/ where tasks were evaluated. The second writes
DIR/report/index.html, which needs no network, and its pictures as PNG files.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import UsageError


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("workdir", None, "directory of a run: draws W/loss.png")
    flags.DEFINE_string(
        "sweep", None, "directory of a sweep: writes DIR/report/index.html, which needs no network"
    )


def main() -> dict:
    """Draws; returns the output file and the runs it shows."""
    if (FLAGS.workdir is None) == (FLAGS.sweep is None):
        raise UsageError(
            "give either --workdir, the directory of a run, or --sweep, the directory of a sweep"
        )
    import jax

    from prope.sweep.maps import draw_tasks
    from prope.sweep.page import report_sweep
    from prope.sweep.pictures import draw_loss

    jax.config.update(
        "jax_platforms", "cpu"
    )  # only files are read; an accelerator may be in use by another run
    if FLAGS.sweep is not None:
        return report_sweep(epath.Path(FLAGS.sweep))
    workdir = epath.Path(FLAGS.workdir)
    if (workdir / "sweep.json").exists():
        raise UsageError(f"--workdir={workdir}: holds a sweep, not a run; give --sweep={workdir}")
    tasks, effective = draw_tasks(workdir)
    output = (
        str(draw_loss(workdir)) if not tasks or (workdir / "metrics.jsonl").exists() else tasks[0]
    )  # imported
    result = {"output": output, "runs": [str(workdir)]}
    return result | ({"tasks": tasks, "effective_lengths": effective} if tasks else {})


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
