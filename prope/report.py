"""Draws the loss curve of a run, or writes the HTML page of a sweep.

    python -m prope.report --workdir=runs/quickstart
    python -m prope.report --sweep=runs/sweep
    python -m prope.report --sweep=runs/sweep --contrast="p=0.75,rope" --contrast="p=0.5,p=0.75"

The first writes W/loss.png, and W/longcontext/ where tasks were evaluated. The second writes
DIR/report/index.html, which needs no network, and its pictures as PNG files. --output is another
folder for them.

--contrast declares which groups of runs are to be compared, before any result is read: it is kept
in DIR/contrasts.jsonl, with the number of runs that had a result. Declare contrasts before the runs
are evaluated. Their p-values are adjusted for the number of all that were declared.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import UsageError, usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", None, "directory of a run: draws W/loss.png")
    output = "folder for the pictures and the page instead, such as that of another user"
    command.define_place("output", None, output)
    contrast = "two groups of a sweep's runs, such as p=0.75,rope; may be given several times"
    flags.DEFINE_multi_string("contrast", [], contrast)
    command.define_place("sweep", None, "directory of a sweep: writes DIR/report/index.html")


def main() -> dict:
    """Draws; returns the output file and the runs it shows."""
    if (FLAGS.workdir is None) == (FLAGS.sweep is None):
        raise UsageError(
            "give either --workdir, the directory of a run, or --sweep, the directory of a sweep"
        )
    if FLAGS.contrast and FLAGS.sweep is None:
        problem = "compares runs of a sweep"
        raise usage_error("--contrast", FLAGS.contrast[0], problem, "give --sweep, not --workdir")
    import jax

    from prope.sweep.maps import draw_tasks
    from prope.sweep.page import report_sweep
    from prope.sweep.pictures import draw_loss

    # Only files are read, and an accelerator may be in use by another run.
    jax.config.update("jax_platforms", "cpu")
    if FLAGS.sweep is not None:
        return report_sweep(epath.Path(FLAGS.sweep), FLAGS.output, FLAGS.contrast)
    workdir = epath.Path(FLAGS.workdir)
    output = FLAGS.output
    if (workdir / "sweep.json").exists():
        remedy = f"give --sweep={workdir}"
        raise usage_error("--workdir", workdir, "holds a sweep, not a run", remedy)
    tasks, effective = draw_tasks(workdir, output)
    if not tasks:
        return {"output": str(draw_loss(workdir, output)), "runs": [str(workdir)]}
    shown = tasks[0]
    # An imported run was not trained here.
    if (workdir / "metrics.jsonl").exists():
        shown = str(draw_loss(workdir, output))
    return {
        "output": shown,
        "runs": [str(workdir)],
        "tasks": tasks,
        "effective_lengths": effective,
    }


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
