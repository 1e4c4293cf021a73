"""Shows a training batch as text, and how long the training documents are; what `prope.data.inspect` prints."""

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
from prope.data.store.arrays import Store
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import BOS, EOS, load_tokenizer, token_name
from prope.data.windows import train_batch
from prope.errors import UsageError
from prope.runtime.files import write_output
from prope.runtime.validate import validate

_LINE_WIDTH = 110  # of text
_CONTEXT = 3  # tokens shown on either side of a border
_SCAN_TOKENS = 2**20  # tokens searched at a time for documents
_SCANS = 64  # such intervals of a long store
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
    """Prints `rows` rows of a batch, and draws document lengths into `plot`; returns what the command prints last."""
    validate(config)
    if plot and all(is_generated(source.dataset) for _, source in weighted_sources(config.data)):
        none = f"{config.data.dataset} has no documents whose lengths could be drawn"
        raise UsageError(f"--plot={plot}: {none}; remove it")
    tokenizer = load_tokenizer(config.data.tokenizer)
    windows = open_windows(config.data, config.model.vocab_size, "train")
    generated, rows = isinstance(windows, GeneratedWindows), min(rows, config.batch_size)
    batch = train_batch(windows, config.seed, config.batch_size, step, range(rows))
    for row in range(rows):
        window = windows.window_index(step * config.batch_size + row, config.seed)
        print(
            f"=== step {step}, row {row} of {config.batch_size}: window {window:,} of {windows.count:,} ==="
        )
        of_row = {name: values[row] for name, values in batch.items()}
        lines = windows.describe(window) if generated else describe(of_row, tokenizer)
        print("\n".join(lines), end="\n\n")
    sources, lengths = [], {}
    for weight, source in zip(windows.weights, windows.sources, strict=True):
        if isinstance(source, GeneratedWindows):
            continue
        lengths[source.name] = measured = document_lengths(source.store)
        values = np.quantile(measured, list(_QUANTILES.values()), method="nearest").tolist()
        quantiles, longer = (
            dict(zip(_QUANTILES, values, strict=True)),
            float((measured > config.data.seq_len).mean()),
        )
        about = {"documents_measured": len(measured), "document_tokens": quantiles}
        about |= {
            "mean_document_tokens": round(float(measured.mean()), 1),
            "longer_than_window": round(longer, 4),
        }
        sources.append({"dataset": source.name, "weight": weight} | about)
        listed = ", ".join(f"{key} {value:,}" for key, value in quantiles.items())
        print(f"{source.name}: document lengths in tokens: {listed}")
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


def describe(row: Batch, tokenizer) -> Iterator[str]:
    """Yields lines that show one row of a batch: arrays [T] by name."""
    T, segments = len(row["tokens"]), row["segment_ids"]
    borders = np.flatnonzero(np.diff(segments, prepend=-1)).tolist()
    for start, stop in zip(borders, [*borders[1:], T], strict=True):
        if segments[start] == 0:
            yield f"--- padding: tokens {start}..{stop - 1}"
            continue
        tokens, positions = row["tokens"][start:stop], row["positions"][start:stop]
        opens = "" if tokens[0] == BOS else ", which began in the window before"
        ends = "" if tokens[-1] == EOS else ", goes on in the next window" if stop == T else ""
        places = f"{positions[0]}..{positions[-1]}"
        if (np.diff(positions) != 1).any():
            places = f"{', '.join(map(str, positions[:4]))} .. {positions[-1]}"
        yield f"--- document {segments[start]}{opens}{ends}: tokens {start}..{stop - 1} at positions {places}"
        for span, is_predicted in _by_weight(row, start, stop):
            indent = "    " if is_predicted else "    prompt, no loss | "
            for line in tokenizer.decode(row["tokens"][span]).splitlines():
                # Without what would move the cursor or colour the terminal.
                line = "".join(
                    c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in line
                )
                wrapped = textwrap.wrap(
                    line, _LINE_WIDTH, initial_indent=indent, subsequent_indent=indent
                )
                yield from wrapped or [indent.rstrip()]
    yield "  place  position  segment  token                     target                    weight"
    shown = {
        place for border in [*borders, T] for place in range(border - _CONTEXT, border + _CONTEXT)
    }
    for place in sorted(shown & set(range(T))):
        if place and place - 1 not in shown:
            yield "  ..."
        token, target = (
            _id_and_text(tokenizer, row[name][place]) for name in ("tokens", "targets")
        )
        position, weight = row["positions"][place], row["weights"][place]
        yield f"  {place:5d}  {position:8d}  {segments[place]:7d}  {token}  {target}  {weight:g}"


def document_lengths(store: Store) -> np.ndarray:
    """Measures training documents in tokens, with <bos> and <eos>: all, or those that begin in 64 intervals."""
    tokens = store.tokens("train")
    total = tokens.shape[0]

    def borders(start: int) -> np.ndarray:
        return (
            np.flatnonzero(tokens[start : min(start + _SCAN_TOKENS, total)].read().result() == BOS)
            + start
        )

    starts = range(0, total, _SCAN_TOKENS)
    if len(starts) > _SCANS:
        starts = [i * total // _SCANS for i in range(_SCANS)]
    lengths = []
    for start in starts:  # each document counts where it begins, so long ones are not missed
        later = itertools.chain.from_iterable(
            map(borders, range(start + _SCAN_TOKENS, total, _SCAN_TOKENS))
        )
        lengths.append(np.diff(borders(start), append=next(later, total)))
    return np.concatenate(lengths)


def draw_lengths(lengths: dict[str, np.ndarray], seq_len: int, path: str) -> None:
    """Draws a histogram of the document lengths of every source; of a single one, where its tokens are as well."""
    import matplotlib.figure

    pooled = np.concatenate(list(lengths.values()))
    edges = np.geomspace(pooled.min(), pooled.max() + 1, 49)
    lines = [(name, values, None) for name, values in lengths.items()]
    if len(lengths) == 1:
        lines = [("share of the documents", pooled, None), ("share of the tokens", pooled, pooled)]
    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=_COLOURS)
    for label, values, weights in lines:
        counts, _ = np.histogram(values, edges, weights=weights)
        axes.stairs(counts / counts.sum(), edges, label=label, lw=1.4)
    axes.axvline(seq_len, color="#777777", lw=1, ls="--", label=f"a window, {seq_len:,}")
    axes.set(
        xscale="log",
        xlabel="length of a document (tokens)",
        ylabel="share in a bin",
        ylim=(0, None),
    )
    axes.set_title(
        f"{', '.join(lengths)}: {len(pooled):,} training documents"[:100], fontsize=11, wrap=True
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    image, kind = io.BytesIO(), epath.Path(path).suffix[1:] or "png"
    try:
        figure.savefig(image, format=kind, dpi=150, metadata={"Software": None})
    except ValueError as error:
        raise UsageError(f"--plot={path}: cannot be written: {error}") from error
    write_output("plot", path, image.getvalue())


def _by_weight(row: Batch, start: int, stop: int) -> Iterator[tuple[slice, bool]]:
    """Yields runs of a document's tokens that are predicted or not; a window's first token counts as the next one."""
    predicted = np.append([True], row["weights"][:-1] > 0)[
        start:stop
    ]  # a token's weight stands where it is a target
    predicted[0] = predicted[min(1, len(predicted) - 1)]
    for begin, end in itertools.pairwise(
        [0, *(np.flatnonzero(np.diff(predicted)) + 1), stop - start]
    ):
        yield slice(start + begin, start + end), bool(predicted[begin])


def _id_and_text(tokenizer, token: int) -> str:
    """Formats id and text of a token in 24 columns."""
    text = token_name(tokenizer, token)
    return f"{token:6d} {text if len(text) <= 17 else text[:16] + '…':17s}"
