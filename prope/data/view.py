"""Shows a training batch as text, and how long documents are; what `prope.data.inspect` prints."""

import io
import itertools
import textwrap
from collections.abc import Iterator

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from prope.config import is_generated
from prope.data.batch import Batch
from prope.data.mixture import open_windows
from prope.data.sources.find import weighted_sources
from prope.data.store.arrays import Store, retry_tokens
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import load_tokenizer, token_name
from prope.data.windows import train_batch
from prope.errors import usage_error
from prope.runtime.files import write_output
from prope.runtime.validate import validate

_LINE_WIDTH = 110  # columns of text
_CONTEXT = 3  # tokens shown on either side of a border
SCAN_TOKENS = 2**20  # tokens searched at a time for documents
SCANS = 64  # such intervals of a long store
_QUANTILES = {
    "shortest": 0,
    "p10": 0.1,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p99": 0.99,
    "longest": 1,
}
_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee")


def show_batch(config: ConfigDict, step: int, rows: int, plot: str | None) -> dict:
    """Prints rows of a batch, and draws document lengths into `plot`.

    Returns what the command prints last.
    """
    validate(config)
    data = config.data
    if plot and all(is_generated(source.dataset) for _, source in weighted_sources(data)):
        problem = f"{data.dataset} has no documents whose lengths could be drawn"
        raise usage_error("--plot", plot, problem, "remove it")
    windows = open_windows(data, config.model.vocab_size, "train")
    rows = min(rows, config.batch_size)
    batch = train_batch(windows, config.seed, config.batch_size, step, range(rows))
    _print_rows(config, windows, step, batch)
    sources = []
    lengths = {}
    for weight, source in zip(windows.weights, windows.sources, strict=True):
        if not isinstance(source, GeneratedWindows):
            measured = document_lengths(source.store)
            lengths[source.name] = measured
            summary = _summarise_lengths(measured, data.seq_len)
            sources.append({"dataset": source.name, "weight": weight} | summary)
            quantiles = summary["document_tokens"].items()
            listed = ", ".join(f"{name} {value:,}" for name, value in quantiles)
            print(f"{source.name}: document lengths in tokens: {listed}")
    if plot:
        draw_lengths(lengths, data.seq_len, plot)
    segments = [np.unique(ids[ids > 0]) for ids in batch["segment_ids"]]
    return {
        "step": step,
        "rows": rows,
        "seq_len": data.seq_len,
        "windows": windows.count,
        "steps_per_epoch": round(windows.count / config.batch_size, 2),
        "documents_in_rows": sum(map(len, segments)),
        "weight_share": round(float(batch["weights"].mean()), 4),
        "last_position": int(batch["positions"].max()),
        "sources": sources,
        "fingerprint": windows.store.fingerprint,
        "plot": plot,
    }


def _print_rows(config: ConfigDict, windows, step: int, batch: Batch) -> None:
    tokenizer = load_tokenizer(config.data.tokenizer)
    for row in range(len(batch["tokens"])):
        window = windows.window_index(step * config.batch_size + row, config.seed)
        place = f"step {step}, row {row} of {config.batch_size}"
        print(f"=== {place}: window {window:,} of {windows.count:,} ===")
        if isinstance(windows, GeneratedWindows):
            lines = windows.describe(window)
        else:
            lines = describe({name: values[row] for name, values in batch.items()}, tokenizer)
        print("\n".join(lines), end="\n\n")


def _summarise_lengths(lengths: np.ndarray, seq_len: int) -> dict:
    """Returns what is printed about the documents of a source."""
    quantiles = list(_QUANTILES.values())
    values = np.quantile(lengths, quantiles, method="nearest").tolist()
    return {
        "documents_measured": len(lengths),
        "document_tokens": dict(zip(_QUANTILES, values, strict=True)),
        "mean_document_tokens": round(float(lengths.mean()), 1),
        "longer_than_window": round(float((lengths > seq_len).mean()), 4),
    }


def describe(row: Batch, tokenizer) -> Iterator[str]:
    """Yields lines that show one row of a batch: arrays [T] by name."""
    segments = row["segment_ids"]
    T = len(segments)
    starts = np.flatnonzero(np.diff(segments, prepend=-1))
    borders = [*starts.tolist(), T]
    for start, stop in itertools.pairwise(borders):
        if segments[start] == 0:
            yield f"--- padding: tokens {start}..{stop - 1}"
        else:
            yield from _describe_document(row, start, stop, tokenizer)
    yield "  place  position  segment  token                     target                    weight"
    shown = set()
    for border in borders:
        shown |= set(range(max(border - _CONTEXT, 0), min(border + _CONTEXT, T)))
    for place in sorted(shown):
        if place and place - 1 not in shown:
            yield "  ..."
        token = _id_and_text(tokenizer, row["tokens"][place])
        target = _id_and_text(tokenizer, row["targets"][place])
        position = row["positions"][place]
        weight = row["weights"][place]
        yield f"  {place:5d}  {position:8d}  {segments[place]:7d}  {token}  {target}  {weight:g}"


def _describe_document(row: Batch, start: int, stop: int, tokenizer) -> Iterator[str]:
    """Yields a heading and the text of the document between two places of a row."""
    tokens = row["tokens"][start:stop]
    positions = row["positions"][start:stop]
    heading = f"--- document {row['segment_ids'][start]}"
    special = tokenizer.special
    if tokens[0] != special.start:
        heading += ", which began in the window before"
    has_end = special.bos is not None and tokens[-1] == special.eos
    if stop == len(row["tokens"]) and not has_end and row["targets"][-1] != special.start:
        heading += ", goes on in the next window"
    places = f"{positions[0]}..{positions[-1]}"
    if (np.diff(positions) != 1).any():
        places = f"{', '.join(map(str, positions[:4]))} .. {positions[-1]}"
    yield f"{heading}: tokens {start}..{stop - 1} at positions {places}"
    # A token's weight stands where it is the target.
    is_predicted = np.append([True], row["weights"][:-1] > 0)[start:stop]
    if stop - start > 1:
        is_predicted[0] = is_predicted[1]  # a window's first token counts as the next one
    changes = np.flatnonzero(np.diff(is_predicted)) + 1
    for begin, end in itertools.pairwise([0, *changes, stop - start]):
        indent = "    " if is_predicted[begin] else "    prompt, no loss | "
        for line in tokenizer.decode(tokens[begin:end]).splitlines():
            line = "".join(map(_printable, line))
            wrapped = textwrap.wrap(
                line, _LINE_WIDTH, initial_indent=indent, subsequent_indent=indent
            )
            yield from wrapped or [indent.rstrip()]


def _printable(character: str) -> str:
    """Replaces a character that would move the cursor or colour the terminal."""
    if character.isprintable():
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def _id_and_text(tokenizer, token: int) -> str:
    """Formats id and text of a token in 24 columns."""
    text = token_name(tokenizer, token)
    shortened = text if len(text) <= 17 else f"{text[:16]}…"
    return f"{token:6d} {shortened:17s}"


def document_lengths(store: Store) -> np.ndarray:
    """Measures training documents in tokens, with <bos> and <eos>.

    They are all documents, or those that begin in one of 64 intervals of a long store.
    """
    tokens = store.tokens("train")
    total = tokens.shape[0]

    def find_borders(start: int) -> np.ndarray:
        span = tokens[start : min(start + SCAN_TOKENS, total)]
        elements = retry_tokens(store.path, lambda: span.read().result())
        return np.flatnonzero(elements == store.special.start) + start

    starts = range(0, total, SCAN_TOKENS)
    if len(starts) > SCANS:
        starts = [number * total // SCANS for number in range(SCANS)]
    lengths = []
    for start in starts:
        borders = find_borders(start)
        # A document counts where it begins, so long ones are not missed.
        later = map(find_borders, range(start + SCAN_TOKENS, total, SCAN_TOKENS))
        end = next((found[0] for found in later if len(found)), total)
        lengths.append(np.diff(borders, append=end))
    return np.concatenate(lengths)


def draw_lengths(lengths: dict[str, np.ndarray], seq_len: int, path: str) -> None:
    """Draws a histogram of the document lengths of every source.

    For a single source it also shows in which documents the tokens are.
    """
    import matplotlib.figure

    def drawn(text: str) -> str:
        """Escapes what would be a formula, as a $ in a path."""
        return "".join(map(_printable, text)).replace("$", r"\$")

    pooled = np.concatenate(list(lengths.values()))
    edges = np.geomspace(pooled.min(), pooled.max() + 1, 49)
    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=_COLOURS)

    if len(lengths) == 1:
        curves = [("share of the documents", pooled, np.ones(len(pooled)))]
        curves.append(("share of the tokens", pooled, pooled))
    else:
        curves = [(drawn(name), values, np.ones(len(values))) for name, values in lengths.items()]
    for label, values, weights in curves:
        shares = weights / weights.sum()
        axes.hist(values, edges, weights=shares, label=label, histtype="step", lw=1.4)
    axes.axvline(seq_len, color="#777777", lw=1, ls="--", label=f"a window, {seq_len:,}")
    axes.set(xscale="log", xlabel="length of a document (tokens)", ylabel="share in a bin")
    title = f"{', '.join(lengths)}: {len(pooled):,} training documents"
    axes.set_title(drawn(title[:100]), fontsize=11, wrap=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    image = io.BytesIO()
    image_format = epath.Path(path).suffix[1:] or "png"
    try:
        figure.savefig(image, format=image_format, dpi=150, metadata={"Software": None})
    except ValueError as error:
        raise usage_error("--plot", path, f"cannot be written: {error}") from error
    write_output("plot", path, image.getvalue())
