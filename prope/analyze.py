"""Looks inside checkpoints, as the paper does: python -m prope.analyze --workdir=W [--sequences=N] [--text=FILE].

W is a run, or a directory with runs below it, such as a sweep. Every run gets W/analysis/: index.html, one file that
opens without a network, its pictures as PNG, and analysis.json with every number; a directory of runs gets a page that
compares them. The model is run one layer at a time, in float32, over the beginnings of validation documents.

python -m prope.analyze --theory [--workdir=DIR] checks the paper's statements and draws Figures 2 and 8.

Axes: B sequences, T length, N query heads, P pairs.
"""

import logging
import pathlib

from absl import flags

from prope import command
from prope.analysis.sequences import LEAST
from prope.errors import UsageError

log = logging.getLogger("prope")


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string(
        "workdir", None, "directory of the run, or one with runs below it: all are analysed, and compared"
    )
    flags.DEFINE_integer("step", None, "checkpoint to analyse; the newest by default", lower_bound=0)
    flags.DEFINE_integer("sequences", 8, "how many beginnings of validation documents are read", lower_bound=1)
    flags.DEFINE_integer("seq_len", None, "tokens of each; as in training by default", lower_bound=LEAST)
    flags.DEFINE_string("text", None, "a file to read instead of validation documents")
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "where the dataset is, as in config.data.data_dir")
    flags.DEFINE_string("layers", None, "layers that are measured, as in 0,3; all by default")
    flags.DEFINE_string("heads", None, "heads that are shown, as in 0.2,3.1 for LAYER.HEAD; the strongest by default")
    flags.DEFINE_integer("channels", 4, "semantic channels whose loss is looked at; 0 saves that time", lower_bound=0)
    flags.DEFINE_boolean("again", False, "analyse even what analysis.json already has")
    flags.DEFINE_boolean("theory", False, "check the paper's statements and draw Figures 2 and 8, into --workdir")


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    if given.theory:
        from prope.analysis import theory_page

        result = theory_page.write(given.workdir or "runs/theory")
        for found in result["statements"]:
            log.info("%s %s: %s", found["statement"], "holds" if found["holds"] else "DOES NOT HOLD", found["numbers"])
        return result
    from prope.analysis.analysis import analyse_all

    if given.workdir is None:
        raise UsageError("--workdir: must be given: the directory of a run, or one with runs below it; or --theory")
    return analyse_all(pathlib.Path(given.workdir), given)


if __name__ == "__main__":
    command.run(main, define_flags)
