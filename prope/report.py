"""Writes the HTML page of a run, of a sweep, or of any finished runs that are compared.

    python -m prope.report --workdir=runs/quickstart
    python -m prope.report --sweep=runs/sweep
    python -m prope.report --sweep=runs/sweep --contrast="p=0.75,rope" --contrast="p=0.5,p=0.75"
    python -m prope.report --runs=runs/quickstart,runs/other

The first writes W/report/index.html: losses, all evaluations, tasks and speed. The second writes
DIR/report/index.html, which compares the runs, and says which records it leaves out, why, and the
command that adds them. Both need no network; their pictures lie beside them as PNG files. --output
is another folder for them.

--runs compares runs, and those below folders such as a sweep's, with the first: by document on the
windows of validation text that all have been evaluated on, and over seeds where runs differ in
their seed only. Its page, in W/compared of the first, says which runs it leaves out, and why.

--contrast declares which groups of runs are to be compared, before any result is read: it is kept
in DIR/contrasts.jsonl, with the number of runs that had a result. Declare contrasts before the runs
are evaluated. Their p-values, by Student's t and by sign flips, are adjusted for the number of all
that were declared.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import UsageError, usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of a run: writes W/report/index.html")
    output = "folder for the pictures and the page instead, such as that of another user"
    command.define_place("output", output)
    contrast = "two groups of a sweep's runs, such as p=0.75,rope; may be given several times"
    flags.DEFINE_multi_string("contrast", [], contrast)
    command.define_place("sweep", "directory of a sweep: writes DIR/report/index.html")
    compared = "runs, with commas between them: compares them with the first, in W/compared of it"
    flags.DEFINE_string("runs", None, compared)


def main() -> dict:
    """Writes a page; returns its path and the runs it shows."""
    if [FLAGS.workdir, FLAGS.sweep, FLAGS.runs].count(None) != 2:
        raise UsageError(
            "give either --workdir, the directory of a run, or --sweep, the directory of a sweep, "
            "or --runs, the directories of several runs"
        )
    if FLAGS.contrast and FLAGS.sweep is None:
        problem = "compares runs of a sweep"
        raise usage_error("--contrast", FLAGS.contrast[0], problem, "give --sweep")
    import jax

    from prope.pages.run import report_run
    from prope.pages.sweep import report_runs, report_sweep
    from prope.workdir.run import find_listed

    # Only files are read, and an accelerator may be in use by another run.
    jax.config.update("jax_platforms", "cpu")
    if FLAGS.sweep is not None:
        return report_sweep(epath.Path(FLAGS.sweep), FLAGS.output, FLAGS.contrast)
    if FLAGS.runs is not None:
        return report_runs(find_listed(FLAGS.runs), FLAGS.output)
    workdir = epath.Path(FLAGS.workdir)
    if (workdir / "sweep.json").exists():
        remedy = f"give --sweep={workdir}"
        raise usage_error("--workdir", workdir, "holds a sweep, not a run", remedy)
    return report_run(workdir, FLAGS.output)


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
