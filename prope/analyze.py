"""Analyses checkpoints as the paper does: frequency usage, head census, semantic channels.

    python -m prope.analyze --workdir=runs/quickstart
    python -m prope.analyze --workdir=runs/sweep --text=FILE --seq_len=512 --layers=0,3 --heads=0.0,3.1
    python -m prope.analyze --theory

Writes W/analysis/: index.html, which needs no network, its pictures as PNG, and analysis.json with every number.
A directory of runs also gets a page that compares them. The model runs one layer at a time, in float32, over the
beginnings of documents. Started on every host of a pod as training is, it uses all their devices; process 0 writes and
prints. --paper makes every figure and table of the paper for a checkpoint, in one run. --theory lists the paper's
statements instead and draws Figures 2 and 8.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import UsageError, log


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "workdir", None, "directory of a run, or one with runs below it: all are analysed"
    )
    flags.DEFINE_integer(
        "step", None, "checkpoint to analyse; the newest by default", lower_bound=0
    )
    flags.DEFINE_integer(
        "sequences", 8, "number of documents whose beginnings are read", lower_bound=1
    )
    flags.DEFINE_integer(
        "seq_len", None, "tokens of each, at least 3; the training length by default", lower_bound=3
    )
    flags.DEFINE_string("text", None, "file to read instead of documents")
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "folder of the dataset, as in config.data.data_dir")
    split = "documents to read; by default validation, and all of a text that the run was not trained on"
    flags.DEFINE_enum("split", None, ["validation", "train", "all"], split)
    flags.DEFINE_string("layers", None, "layers to measure, as in 0,3; all by default")
    flags.DEFINE_string(
        "heads", None, "heads to show, as in 0.2,3.1 for LAYER.HEAD; the strongest by default"
    )
    window = "tokens of the first sequence in maps, as in 100:148 for START:STOP; the first 48 by default"
    flags.DEFINE_string("window", None, window)
    flags.DEFINE_string(
        "tokens", None, "positions in tables, as in 0,17,41; the first 8 of the window by default"
    )
    head_of = "token, such as ', to find heads that look at it right after it, and elsewhere at the first token"
    flags.DEFINE_string("head_of", None, head_of)
    flags.DEFINE_string(
        "channel", None, "channels to show, as in 0.2.15 for LAYER.HEAD.PAIR; pair 0 is the fastest"
    )
    flags.DEFINE_integer(
        "channels", 4, "semantic channels to ablate; 0 saves that time", lower_bound=0
    )
    flags.DEFINE_boolean("again", False, "recompute what analysis.json has")
    flags.DEFINE_boolean(
        "paper", False, "make all figures and tables of the paper, of the heads that fit them best"
    )
    flags.DEFINE_boolean(
        "theory", False, "list the paper's statements and draw Figures 2 and 8, into --workdir"
    )


def main() -> dict:
    """Analyses; returns the output page and a summary."""
    given = [name for name in ("heads", "head_of", "channel", "theory") if FLAGS[name].value]
    if FLAGS.paper and (given := given + ["channels"] * (not FLAGS.channels)):
        raise UsageError(
            f"--{given[0]}={FLAGS[given[0]].value}: --paper chooses that itself; leave out one of the two"
        )
    if FLAGS.theory:
        from prope.analysis import theory_page
        from prope.runtime.processes import call_on_first

        result = call_on_first(lambda: theory_page.write(FLAGS.workdir or "runs/theory"))
        for row in result["statements"]:
            log.info("%s (%s): %s", row["statement"], row["source"], row["says"])
        return result
    from prope.analysis.analysis import analyse_all

    if FLAGS.workdir is None:
        raise UsageError(
            "--workdir: must be given: the directory of a run, or one with runs below it; or --theory"
        )
    return analyse_all(epath.Path(FLAGS.workdir), FLAGS)


if __name__ == "__main__":
    command.run(main, define_flags, joins=True)
