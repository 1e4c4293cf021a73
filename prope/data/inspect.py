"""Shows what the model will see: python -m prope.data.inspect --config=F --step=12 [--rows=2] [--plot=lengths.png].

Of the batch that a checkpoint of step N reads next, row by row: the text of every document, the tokens around its
borders with their positions, targets and loss weights; then how long the training documents are.
"""

import itertools
import textwrap
from collections.abc import Iterator

import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from prope import command
from prope.data import synthetic
from prope.data.mixture import open_windows
from prope.data.sources.find import weighted
from prope.data.store.arrays import Store
from prope.data.store.build import open_store
from prope.data.synthetic import Synthetic
from prope.data.tokenizer import load_tokenizer, name_of
from prope.data.windows import Batch, train_batch
from prope.errors import UsageError
from prope.runtime.validate import validate

_WIDTH = 110  # of a line of text
_AROUND = 3  # tokens shown on either side of a border
_STRETCH = 2**20  # tokens looked at in one place for the lengths
_STRETCHES = 64  # such places in a long store
_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee")


def inspect(config: ConfigDict, step: int, rows: int, plot: str | None) -> dict:
    """Prints `rows` rows of a batch to stdout, draws `plot` if it is a path; returns what the command prints last.

    Raises:
      UsageError: what was given does not fit, or the picture cannot be written.
    """
    validate(config)
    if plot and config.data.dataset.startswith("synthetic/"):
        raise UsageError(
            f"--plot={plot}: {config.data.dataset} has no documents whose lengths could be drawn; remove it"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    windows = open_windows(config.data, config.model.vocab_size, "train")
    rows = min(rows, config.batch_size)
    batch = train_batch(windows, config.seed, config.batch_size, step, range(rows))
    for row in range(rows):
        window = windows.at(step * config.batch_size + row, config.seed)
        print(f"=== step {step}, row {row} of {config.batch_size}: window {window:,} of {windows.count:,} ===")
        if isinstance(windows, Synthetic):
            lines = synthetic.describe(windows.window(window))
        else:
            lines = describe({name: values[row] for name, values in batch.items()}, tokenizer)
        print("\n".join(lines), end="\n\n")
    sources, lengths = [], {}
    texts = [] if isinstance(windows, Synthetic) else weighted(config.data)
    for weight, data in texts:
        name = f"{data.dataset} {data.data_dir}" if data.dataset == "files" else data.dataset
        found = document_lengths(open_store(data, config.model.vocab_size), tokenizer.bos)
        lengths[name] = found
        sources.append({"dataset": name, "weight": weight, **_summary(found, config.data.seq_len)})
        quantiles = ", ".join(f"{key} {value:,}" for key, value in sources[-1]["document_tokens"].items())
        print(f"{name}: document lengths in tokens: {quantiles}")
    if plot:
        draw_lengths(lengths, config.data.seq_len, plot)
    return {
        "step": step,
        "rows": rows,
        "seq_len": config.data.seq_len,
        "windows": windows.count,
        "steps_per_epoch": round(windows.count / config.batch_size, 2),
        "documents_in_rows": sum(len(set(ids[ids > 0].tolist())) for ids in batch["segment_ids"]),
        "weight_share": round(float(batch["weights"].mean()), 4),
        "last_position": int(batch["positions"].max()),
        "sources": sources,
        "fingerprint": windows.store.fingerprint,
        "plot": plot,
    }


def _summary(lengths: np.ndarray, seq_len: int) -> dict:
    names = ("shortest", "p10", "p25", "median", "p75", "p90", "p99", "longest")
    values = np.quantile(lengths, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1], method="nearest")
    return {
        "documents_measured": len(lengths),
        "document_tokens": {name: int(length) for name, length in zip(names, values, strict=True)},
        "mean_document_tokens": round(float(lengths.mean()), 1),
        "longer_than_window": round(float((lengths > seq_len).mean()), 4),
    }


def describe(row: Batch, tokenizer) -> Iterator[str]:
    """Lines that show one row of a batch: arrays [T] by name."""
    T, segments = len(row["tokens"]), row["segment_ids"]
    borders = np.flatnonzero(np.diff(segments, prepend=-1)).tolist()
    for start, stop in zip(borders, [*borders[1:], T], strict=True):
        if segments[start] == 0:
            yield f"--- padding: tokens {start}..{stop - 1}"
            continue
        tokens, positions = row["tokens"][start:stop], row["positions"][start:stop]
        opens = "" if tokens[0] == tokenizer.bos else ", which began in the window before"
        ends = "" if tokens[-1] == tokenizer.eos else ", goes on in the next window" if stop == T else ""
        yield f"--- document {segments[start]}{opens}{ends}: tokens {start}..{stop - 1} at positions {_span(positions)}"
        for part, weighs in _by_weight(row, start, stop):
            text = tokenizer.decode(row["tokens"][part])
            yield from _wrapped(text, "    " if weighs else "    given, no loss | ")
    yield "  place  position  segment  token                     target                    weight"
    shown = {place for border in [*borders, T] for place in range(border - _AROUND, border + _AROUND)}
    before = -1
    for place in sorted(shown & set(range(T))):
        if place != before + 1:
            yield "  ..."
        token, target = (_piece(tokenizer, row[name][place]) for name in ("tokens", "targets"))
        position, weight = row["positions"][place], row["weights"][place]
        yield f"  {place:5d}  {position:8d}  {segments[place]:7d}  {token}  {target}  {weight:g}"
        before = place


def document_lengths(store: Store, bos: int) -> np.ndarray:
    """Tokens of the training documents, <bos> and <eos> included: of all, or of those that begin in 64 places."""
    tokens = store.tokens("train")
    total = tokens.shape[0]
    whole = total <= _STRETCH * _STRETCHES
    starts = range(0, total, _STRETCH) if whole else [i * total // _STRETCHES for i in range(_STRETCHES)]
    lengths = []
    for start in starts:
        stop = min(start + _STRETCH, total)
        borders = np.flatnonzero(tokens[start:stop].read().result() == bos) + start
        if len(borders):  # each document counts where it begins, so long ones are not missed
            lengths.append(np.diff(borders, append=_next_document(tokens, stop, bos)))
    return np.concatenate(lengths)


def _next_document(tokens, place: int, bos: int) -> int:
    while place < tokens.shape[0]:
        found = np.flatnonzero(tokens[place : min(place + _STRETCH, tokens.shape[0])].read().result() == bos)
        if len(found):
            return place + int(found[0])
        place += _STRETCH
    return tokens.shape[0]


def draw_lengths(lengths: dict[str, np.ndarray], seq_len: int, path: str) -> None:
    """A histogram of the document lengths of every source, and of one source where its tokens are; always the same."""
    import matplotlib.figure

    everything = np.concatenate(list(lengths.values()))
    edges = np.geomspace(everything.min(), everything.max() + 1, 49)
    lines = [(name, values, None) for name, values in lengths.items()]
    if len(lengths) == 1:
        lines = [("share of the documents", everything, None), ("share of the tokens", everything, everything)]
    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (label, values, weights) in enumerate(lines):
        counts, _ = np.histogram(values, edges, weights=weights)
        axes.stairs(counts / counts.sum(), edges, label=label, color=_COLOURS[number % len(_COLOURS)], lw=1.4)
    axes.axvline(seq_len, color="#777777", lw=1, ls="--", label=f"a window, {seq_len:,}")
    axes.set(xscale="log", xlabel="length of a document (tokens)", ylabel="share in a bin", ylim=(0, None))
    axes.set_title(f"{', '.join(lengths)}: {len(everything):,} training documents"[:100], fontsize=11, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150, metadata={"Software": None})
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--plot={path}: cannot be written: {reason}") from error


def _span(positions: np.ndarray) -> str:
    if (np.diff(positions) == 1).all():
        return f"{positions[0]}..{positions[-1]}"
    return f"{', '.join(map(str, positions[:4]))} .. {positions[-1]}"


def _by_weight(row: Batch, start: int, stop: int) -> Iterator[tuple[slice, bool]]:
    """The tokens of a document in runs that are predicted or not; what opens the window counts as what follows it."""
    predicted = np.append([True], row["weights"][:-1] > 0)[start:stop]  # a token's weight stands where it is a target
    predicted[0] = predicted[min(1, len(predicted) - 1)]
    cuts = [0, *(np.flatnonzero(np.diff(predicted)) + 1), stop - start]
    for begin, end in itertools.pairwise(cuts):
        yield slice(start + begin, start + end), bool(predicted[begin])


def _wrapped(text: str, indent: str) -> Iterator[str]:
    for line in text.splitlines():
        shown = _printable(line)
        yield from textwrap.wrap(shown, _WIDTH, initial_indent=indent, subsequent_indent=indent) or [indent.rstrip()]


def _piece(tokenizer, token: int) -> str:
    """Id and text of a token, 24 columns."""
    text = name_of(tokenizer, token)
    return f"{token:6d} {text if len(text) <= 17 else text[:16] + '…':17s}"


def _printable(text: str) -> str:
    """The text without what would move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/quickstart.py")
    flags.DEFINE_integer("step", 0, "show the batch that a checkpoint of this step reads next", lower_bound=0)
    flags.DEFINE_integer("rows", 2, "rows of the batch to show", lower_bound=1)
    flags.DEFINE_string("plot", None, "draw the lengths of the documents into this file, a .png")
    flags.mark_flags_as_required(["config"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    return inspect(given.config, given.step, given.rows, given.plot)


if __name__ == "__main__":
    command.run(main, define_flags)
