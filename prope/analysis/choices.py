"""Parses the flags that choose layers, heads and tokens, before a device is touched."""

import re
from typing import NamedTuple

import numpy as np

from prope.analysis.measures import FROM
from prope.errors import log, usage_error

TABLE = 8  # tokens in a table: the first one and seven more, as in the paper's
SHOWN = 48  # tokens of a map
MOST = 128  # tokens that a map can show


class Tokens(NamedTuple):
    """The tokens that an analysis shows, of the first sequence, and those of --head_of, of all."""

    names: list[str]  # names of all tokens of the first sequence
    window: list[int]  # positions in maps
    table: list[int]  # positions in tables
    after: np.ndarray  # [B, T], whether the token before is that of --head_of

    def positions(self) -> list[int]:
        """Lists the positions of both, with that before each in the table."""
        before = [position - 1 for position in self.table if position]
        return sorted({*self.window, *self.table, *before})


def choose_tokens(options, names: np.ndarray) -> Tokens:
    """Parses --window, --tokens and --head_of; `names` [B, T] are those of the tokens read."""
    length = names.shape[1]
    if options.paper:
        after = find_after(options.head_of or "'", names, optional=not options.head_of)
        if not after.any():
            log.info("no apostrophe in these tokens; Figures 7 and 9 need a --text with some")
        window = parse_window(options.window, length, int(after[0].argmax()))
        default = range(length)
    else:
        after = find_after(options.head_of, names)
        window = parse_window(options.window, length)
        default = window
    table = _parse_numbers("--tokens", options.tokens, length, most=SHOWN)
    return Tokens(names[0].tolist(), sorted({0, *window}), table or list(default[:TABLE]), after)


def parse_layers(text: str | None, count: int) -> list[int]:
    """Parses --layers, such as 0,3, of `count` layers; all of them by default."""
    return _parse_numbers("--layers", text, count, most=count) or list(range(count))


def _parse_numbers(flag: str, text: str | None, end: int, most: int) -> list[int]:
    """Parses at most `most` numbers below `end`, sorted; none by default."""
    entries = [] if text is None else text.split(",")
    for entry in entries:
        if not entry.strip().isdecimal() or int(entry) >= end or len(entries) > most:
            problem = f"{entry!r} is not one of at most {most} numbers from 0 to {end - 1}"
            raise usage_error(flag, text, problem)
    return sorted(set(map(int, entries)))


def parse_places(
    flag: str, text: str | None, layers: list[int], **counts: list[int]
) -> list[tuple[int, ...]]:
    """Parses --heads, such as 0.2,3.1, and --channel, with a pair too; none by default.

    `counts` are how many heads and pairs every layer of the model has, [L].
    """
    form = ".".join(["LAYER", *counts])
    places = []
    for entry in [] if text is None else text.split(","):
        numbers = [int(n) if n.isdecimal() else -1 for n in entry.strip().split(".")]
        layer, *indices = numbers
        is_known = layer in layers and len(indices) == len(counts)
        sizes = [count[layer] for count in counts.values()] if is_known else []
        if not is_known or not all(0 <= i < n for i, n in zip(indices, sizes, strict=True)):
            problem = f"{entry!r} is not {form} of a measured layer"
            last = [f"{name.lower()}s to {count[layers[0]] - 1}" for name, count in counts.items()]
            remedy = f"from 0, {', '.join(last)}, in layers {', '.join(map(str, layers))}"
            raise usage_error(f"--{flag}", text, problem, remedy)
        places.append(tuple(numbers))
    return list(dict.fromkeys(places))


def parse_window(text: str | None, length: int, around: int = 0) -> range:
    """Parses --window, such as 100:148, as positions; by default 48 `around` one."""
    if text is None:
        start = max(min(around - SHOWN // 2, length - SHOWN), 0)
        return range(start, min(start + SHOWN, length))
    match = re.fullmatch(r"\s*(\d+):(\d+)\s*", text)
    window = range(0)
    if match:
        window = range(int(match[1]), int(match[2]))
    if not 0 < len(window) <= MOST or window.stop > length:
        problem = f"is not START:STOP of the {length} tokens read, with 1 to {MOST} tokens"
        remedy = "give another one, or read more with --seq_len"
        raise usage_error("--window", text, problem, remedy)
    return window


def find_after(text: str | None, names: np.ndarray, optional: bool = False) -> np.ndarray:
    """Finds the queries right after the token of --head_of, among names [B, T].

    Returns booleans [B, T]; without --head_of, or where it is optional and of no use, all False.
    """
    wanted = [] if text is None else [text, repr(text)]
    is_wanted = np.isin(names[:, :-1], wanted)
    after = np.pad(is_wanted, ((0, 0), (1, 0)))
    is_usable = 0 < after[:, FROM:].mean() < 1
    if text is not None and not optional and not is_usable:
        problem = "must stand before some of the tokens read, and not before all"
        remedy = f"give a token such as {names[0, 1]}, or a --text"
        raise usage_error("--head_of", text, problem, remedy)
    return after & is_usable
