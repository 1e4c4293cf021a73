"""Analyses checkpoints as the paper does: frequency usage, head census, semantic channels.

    python -m prope.analyze --workdir=runs/quickstart
    python -m prope.analyze --workdir=runs/sweep --text=FILE --seq_len=512 --layers=0,3
    python -m prope.analyze --theory

Writes W/analysis/: index.html, which needs no network, its pictures as PNG, and analysis.json with
every number. A directory of runs also gets a page that compares them. The model runs one layer at a
time, in float32, over the beginnings of documents; a layer is measured with its own window, cap and
frequencies. The page begins with what is strong. A head's kind is the place that gets over half of
its weight (itself, the token before, the first), or semantic: sharp, for what tokens are.
Heads of no kind are listed, and drawn only with --all_heads, --paper, --heads or --head_of.
Started on every host of a pod as training is, it uses all their devices; process 0 writes
and prints. --paper makes every figure and table of the paper for a checkpoint, in one run. --theory
makes a page of the paper's statements and of its Figures 2 and 8 instead.
"""

from absl import flags
from absl.flags import FLAGS
from etils import epath

from prope import command
from prope.errors import UsageError, log, usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    workdir = "directory of a run, or one with runs below it: all are analysed"
    command.define_place("workdir", None, workdir)
    step = "checkpoint to analyse; the newest by default"
    flags.DEFINE_integer("step", None, step, lower_bound=0)
    sequences = "number of documents whose beginnings are read"
    flags.DEFINE_integer("sequences", 8, sequences, lower_bound=1)
    seq_len = "tokens of each, at least 3; the training length by default"
    flags.DEFINE_integer("seq_len", None, seq_len, lower_bound=3)
    dataset = "another dataset, as in config.data.dataset; of an import python_docs by default"
    flags.DEFINE_string("dataset", None, dataset)
    command.define_place("data_dir", None, "folder of the dataset, as in config.data.data_dir")
    command.define_place("text", None, "file to read instead of documents")
    flags.DEFINE_string("layers", None, "layers to measure, as in 0,3; all by default")
    heads = "heads to show, as in 0.2,3.1 for LAYER.HEAD; the strongest by default"
    flags.DEFINE_string("heads", None, heads)
    window = "tokens of the first sequence in maps, as in 100:148; the first 48 by default"
    flags.DEFINE_string("window", None, window)
    tokens = "positions in tables, as in 0,17,41; the first 8 of the window by default"
    flags.DEFINE_string("tokens", None, tokens)
    head_of = "token, to find heads that attend to it right after it, elsewhere to the first one"
    flags.DEFINE_string("head_of", None, head_of)
    channel = "channels to show, as in 0.2.15 for LAYER.HEAD.PAIR; pair 0 is the fastest"
    flags.DEFINE_string("channel", None, channel)
    channels = "semantic channels to ablate; 0 saves that time"
    flags.DEFINE_integer("channels", 4, channels, lower_bound=0)
    every = "also draw all heads of no kind, which are only listed without it"
    flags.DEFINE_boolean("all_heads", False, every)
    paper = "make all figures and tables of the paper, of the heads that fit them best"
    flags.DEFINE_boolean("paper", False, paper)
    output = "folder for the results instead of --workdir, such as that of another user"
    command.define_place("output", None, output)
    theory = "list the paper's statements and draw Figures 2 and 8, into --output or --workdir"
    flags.DEFINE_boolean("theory", False, theory)


def main() -> dict:
    """Analyses; returns the output page and a summary."""
    if FLAGS.paper:
        _check_paper()
    if FLAGS.text is not None:
        _check_text()
    if FLAGS.theory:
        return _write_theory()
    if FLAGS.workdir is None:
        needed = "the directory of a run, or one with runs below it; or --theory"
        raise UsageError(f"--workdir: must be given: {needed}")
    from prope.analysis.analysis import analyse_all

    return analyse_all(epath.Path(FLAGS.workdir), FLAGS)


def _check_paper() -> None:
    """Raises UsageError where another flag chooses what --paper chooses."""
    conflicts = [name for name in ("heads", "head_of", "channel", "theory") if FLAGS[name].value]
    if FLAGS.channels == 0:
        conflicts.append("channels")
    _refuse(conflicts, "--paper chooses that itself")


def _check_text() -> None:
    """Raises UsageError where another flag names the text as well."""
    given = [name for name in ("dataset", "data_dir") if FLAGS[name].value is not None]
    _refuse(given, "--text is read instead")


def _refuse(names: list[str], problem: str) -> None:
    """Raises UsageError for the first of these flags."""
    for name in names:
        raise usage_error(f"--{name}", FLAGS[name].value, problem, "leave out one of the two")


def _write_theory() -> dict:
    """Writes the page of the paper's statements."""
    from prope.analysis import theory_page
    from prope.runtime.processes import call_on_first

    folder = FLAGS.output or FLAGS.workdir or "runs/theory"
    result = call_on_first(lambda: theory_page.write(folder))
    log.info("%d statements, Figures 2 and 8: %s", len(result["statements"]), result["output"])
    return result


if __name__ == "__main__":
    command.run(main, define_flags, joins=True, watches=True)
