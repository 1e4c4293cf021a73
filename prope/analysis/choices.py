"""Parses the flags that choose layers, heads and tokens; what is wrong is a UsageError before a device is touched."""

import re

import numpy as np
from ml_collections import ConfigDict

from prope.analysis.measures import FROM
from prope.errors import UsageError

TABLE = 8  # tokens in a table: the first one and seven more, as in the paper's
SHOWN = 48  # tokens of a map
MOST = 128  # tokens that a map can show


def parse_layers(text: str | None, config: ConfigDict) -> list[int]:
    """Parses --layers, such as 0,3; all layers by default."""
    if text is None:
        return list(range(config.num_layers))
    allowed = f"a layer of this model, which has 0 to {config.num_layers - 1}"
    for entry in text.split(","):
        if not entry.strip().isdecimal() or int(entry) >= config.num_layers:
            raise UsageError(f"--layers={text}: {entry!r} is not {allowed}")
    return sorted(set(map(int, text.split(","))))


def parse_places(
    flag: str, text: str | None, layers: list[int], **counts: int
) -> list[tuple[int, ...]]:
    """Parses --heads, such as 0.2,3.1, as (layer, head), and --channel with the pair too; none by default."""
    places = {}
    for entry in text.split(",") if text is not None else []:
        match = re.fullmatch(r"\s*(\d+)" + r"\.(\d+)" * len(counts) + r"\s*", entry)
        place = tuple(map(int, match.groups())) if match else (-1,)
        if place[0] not in layers or any(
            i >= n for i, n in zip(place[1:], counts.values(), strict=True)
        ):
            ends = " and ".join(
                f"{name.lower()}s are 0 to {count - 1}" for name, count in counts.items()
            )
            form = ".".join(["LAYER", *counts])
            allowed = f"{form} of this model, whose {ends} and of which these layers are measured"
            raise UsageError(
                f"--{flag}={text}: {entry!r} is not {allowed}: {', '.join(map(str, layers))}"
            )
        places[place] = None
    return list(places)


def parse_window(text: str | None, length: int, around: int = 0) -> range:
    """Parses --window, such as 100:148, as positions among `length` tokens; by default 48 `around` one."""
    if text is None:
        start = max(min(around - SHOWN // 2, length - SHOWN), 0)
        return range(start, min(start + SHOWN, length))
    match = re.fullmatch(r"\s*(\d+):(\d+)\s*", text)
    window = range(int(match[1]), int(match[2])) if match else range(0)
    if not 0 < len(window) <= MOST or window.stop > length:
        allowed = f"START:STOP of the {length} tokens read, with 1 to {MOST} tokens"
        raise UsageError(
            f"--window={text}: is not {allowed}; give another one, or read more with --seq_len"
        )
    return window


def parse_tokens(text: str | None, window: range, length: int) -> list[int]:
    """Parses --tokens, such as 0,17,41, as positions among `length` tokens; the first 8 of the window by default."""
    if text is None:
        return list(window[:TABLE])
    for entry in (entries := text.split(",")):
        if not entry.strip().isdecimal() or int(entry) >= length or len(entries) > SHOWN:
            allowed = f"one of at most {SHOWN} positions from 0 to {length - 1}"
            raise UsageError(f"--tokens={text}: {entry!r} is not {allowed}")
    return sorted(set(map(int, entries)))


def find_after(text: str | None, names: np.ndarray, optional: bool = False) -> np.ndarray:
    """Finds the queries right after the token of --head_of, among names [B, T]: [B, T] booleans; none by default."""
    wanted = [] if text is None else [text, repr(text)]
    after = np.pad(np.isin(names[:, :-1], wanted), ((0, 0), (1, 0)))
    usable = 0 < after[:, FROM:].mean() < 1
    if text is not None and not optional and not usable:
        allowed = "must stand before some of the tokens read, and not before all"
        raise UsageError(
            f"--head_of={text}: {allowed}; give a token such as {names[0, 1]}, or a --text"
        )
    return after & usable
