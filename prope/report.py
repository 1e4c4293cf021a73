"""Shows what was trained: a sweep as a page, or the loss curve of one run.

python -m prope.report --sweep=DIR       DIR/report/index.html, one file that opens without a network
python -m prope.report --workdir=W       W/loss.png
"""

import pathlib

import jax
from absl import flags

from prope import command
from prope.sweep.report import draw_loss, report_sweep


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of a run: draws W/loss.png")
    flags.DEFINE_string("sweep", None, "directory of a sweep: writes DIR/report/index.html, and its pictures beside it")
    flags.mark_flags_as_mutual_exclusive(["workdir", "sweep"], required=True)


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # files are read here; an accelerator may be at work on another run
    if given.sweep is not None:
        return report_sweep(pathlib.Path(given.sweep))
    workdir = pathlib.Path(given.workdir)
    return {"output": str(draw_loss(workdir)), "runs": [str(workdir)]}


if __name__ == "__main__":
    command.run(main, define_flags)
