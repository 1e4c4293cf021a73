"""Analyses checkpoints as the paper does: frequency usage, head census, semantic channels.

    python -m prope.analyze --workdir=runs/quickstart
    python -m prope.analyze --workdir=runs/sweep --text=FILE --seq_len=512 --layers=0,3

Writes W/analysis/ of every run: index.html, which needs no network, its pictures as PNG, and
analysis.json with every number. The model runs one layer at a time, in float32, over the beginnings
of documents; a layer is measured with its own window, cap and frequencies. The page begins with
what is strong. A head's kind is the place that gets over half of its weight (itself, the token
before, the first), or semantic: sharp, for what tokens are. Heads of no kind are listed, and drawn
only with --all_heads, --paper, --heads or --head_of. Started on every host of a pod as training is,
it uses all their devices; process 0 writes and prints. --paper makes every figure and table that
the paper has of a checkpoint, in one run.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place(
        "workdir", "directory of a run, or one with runs below it: all are analysed"
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
    dataset = "another dataset, as in config.data.dataset; of an import python_docs by default"
    flags.DEFINE_string("dataset", None, dataset)
    command.define_place("data_dir", "folder of the dataset, as in config.data.data_dir")
    command.define_place("text", "file to read instead of documents")
    flags.DEFINE_string("layers", None, "layers to measure, as in 0,3; all by default")
    flags.DEFINE_string(
        "heads", None, "heads to show, as in 0.2,3.1 for LAYER.HEAD; the strongest by default"
    )
    window = "tokens of the first sequence in maps, as in 100:148; the first 48 by default"
    flags.DEFINE_string("window", None, window)
    flags.DEFINE_string(
        "tokens", None, "positions in tables, as in 0,17,41; the first 8 of the window by default"
    )
    head_of = "token, to find heads that attend to it right after it, elsewhere to the first one"
    flags.DEFINE_string("head_of", None, head_of)
    flags.DEFINE_string(
        "channel", None, "channels to show, as in 0.2.15 for LAYER.HEAD.PAIR; pair 0 is the fastest"
    )
    flags.DEFINE_integer(
        "channels", 4, "semantic channels to ablate; 0 saves that time", lower_bound=0
    )
    flags.DEFINE_boolean(
        "all_heads", False, "also draw all heads of no kind, which are only listed without it"
    )
    paper = "make the paper's figures and tables of a checkpoint, of the heads that fit them best"
    flags.DEFINE_boolean("paper", False, paper)
    command.define_place(
        "output", "folder for the results instead of --workdir, such as that of another user"
    )
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Analyses; returns the output page and a summary."""
    if FLAGS.text is not None and (FLAGS.dataset or FLAGS.data_dir):
        problem = "is read instead of --dataset and --data_dir"
        raise usage_error("--text", FLAGS.text, problem, "leave out one of the two")
    from prope.analysis.analysis import analyse_all

    return analyse_all(epath.Path(FLAGS.workdir), FLAGS)


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
