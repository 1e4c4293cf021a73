"""Shows a training batch as text, and how long documents are; what `prope.data.inspect` prints."""

import itertools
import textwrap
from collections.abc import Iterator

import numpy as np

from prope.data.batch import Batch
from prope.data.mixture import open_windows
from prope.data.store.arrays import Store, retry_tokens
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import load_tokenizer, token_name
from prope.data.windows import train_batch
from prope.spec.run import Spec

_LINE_WIDTH = 110  # columns of text
_CONTEXT = 3  # tokens shown on either side of a border
SCAN_TOKENS = 2**20  # tokens searched at a time for documents
MEASURED_TOKENS = 2**26  # the documents of a longer store are measured up to here
_QUANTILES = {"shortest": 0, "p10": 0.1, "median": 0.5, "p90": 0.9, "longest": 1}


def show_batch(spec: Spec, step: int, rows: int) -> dict:
    """Prints rows of a batch; returns what the command prints last."""
    data = spec.data
    windows = open_windows(data, spec.model.vocab_size, "train")
    rows = min(rows, spec.batch_size)
    batch = train_batch(windows, spec.seed, spec.batch_size, step, range(rows))
    _print_rows(spec, windows, step, batch)
    sources = []
    for weight, source in zip(windows.weights, windows.sources, strict=True):
        if not isinstance(source, GeneratedWindows):
            measured = document_lengths(source.store)
            quantiles = np.quantile(measured, list(_QUANTILES.values()), method="nearest")
            sources.append(
                {
                    "dataset": source.name,
                    "weight": weight,
                    "documents_measured": len(measured),
                    "document_tokens": dict(zip(_QUANTILES, quantiles.tolist(), strict=True)),
                    "longer_than_window": round(float((measured > data.seq_len).mean()), 4),
                }
            )
    return {
        "step": step,
        "rows": rows,
        "seq_len": data.seq_len,
        "windows": windows.count,
        "steps_per_epoch": round(windows.count / spec.batch_size, 2),
        "documents_in_rows": int(batch["segment_ids"].max(axis=1).sum()),
        "weight_share": round(float(batch["weights"].mean()), 4),
        "sources": sources,
        "fingerprint": windows.store.fingerprint,
    }


def _print_rows(spec: Spec, windows, step: int, batch: Batch) -> None:
    tokenizer = load_tokenizer(spec.data.tokenizer)
    for row in range(len(batch["tokens"])):
        window = windows.window_index(step * spec.batch_size + row, spec.seed)
        place = f"step {step}, row {row} of {spec.batch_size}"
        print(f"=== {place}: window {window:,} of {windows.count:,} ===")
        if isinstance(windows, GeneratedWindows):
            lines = windows.describe(window)
        else:
            lines = describe({name: values[row] for name, values in batch.items()}, tokenizer)
        print("\n".join(lines), end="\n\n")


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
    if tokens[0] != tokenizer.special.start:
        heading += ", which began in the window before"
    places = f"tokens {start}..{stop - 1} at positions {positions[0]}..{positions[-1]}"
    yield f"{heading}: {places}"
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
    """Measures training documents in tokens, with <bos> and <eos>: those at the beginning."""
    tokens = store.tokens("train")
    total = min(tokens.shape[0], MEASURED_TOKENS)
    borders = []
    for start in range(0, total, SCAN_TOKENS):
        span = tokens[start : min(start + SCAN_TOKENS, total)]
        elements = retry_tokens(store.path, lambda span=span: span.read().result())
        borders.append(np.flatnonzero(elements == store.special.start) + start)
    starts = np.concatenate(borders)
    if total < tokens.shape[0] and len(starts) > 1:  # where the last one ends is not known
        return np.diff(starts)
    return np.diff(starts, append=total)
