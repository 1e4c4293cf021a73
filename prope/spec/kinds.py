"""Kinds of layers, and names of the stacks of their parameters."""

import itertools
import re
from collections.abc import Sequence

SLIDING = "sliding_attention"
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)
ATTENTION_SUFFIX = "_attention"  # of a kind's name
SHARING_SUFFIX = "_shared_kv"  # of the name of a stack whose layers have no keys and values
# Names of stacks, where there are several.
STACKS = (*LAYER_TYPES, *(f"{kind}{SHARING_SUFFIX}" for kind in LAYER_TYPES))


def parse_interval(text: str, end: int) -> range:
    """Parses numbers below `end`, such as 3 or 0-5; an empty range where these are none."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    return numbers if numbers.stop <= end else range(0)


def repeat_pattern(layer_types: Sequence[str], num_layers: int) -> list[str]:
    """Returns the kind of every layer, [L]; an empty pattern is of full attention."""
    pattern = tuple(layer_types) or (FULL,)
    return list(itertools.islice(itertools.cycle(pattern), num_layers))
