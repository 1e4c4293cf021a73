"""What the layers of a decoder differ in: their kind, their window and their shapes.

A kind is sliding or full attention. Layers of equal shapes are stacked in one array per parameter.
Where all are alike there is one stack; otherwise there is one for each kind, and one for those of a
kind that have no keys and values of their own.

Axes: H head_dim, K key/value heads, F hidden_dim, L layers.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SLIDING = "sliding_attention"
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)
_ATTENTION = "_attention"  # ends the name of a kind
_SHARING = "_shared_kv"  # ends the name of a stack whose layers have no keys and values


class Layer(NamedTuple):
    """What one layer is built by, beside the fields of `config.model` that all share."""

    kind: str  # of LAYER_TYPES
    window: int | None  # keys that a query sees, its own included; None: all before
    sinks: int  # with a window: first keys of the sequence that it also sees
    head_dim: int
    num_kv_heads: int
    hidden_dim: int
    key_is_value: bool  # values are the keys, before norm and rotation
    shares_kv: bool  # takes the keys and values of an earlier layer of its kind

    @property
    def is_local(self) -> bool:
        """Tells whether it has a window."""
        return self.kind == SLIDING


class StackRow(NamedTuple):
    """Where the parameters of a layer are."""

    stack: str  # "" where all layers are in one
    row: int


def layer_kinds(model) -> list[str]:
    """Returns the kind of every layer of a run's `config.model`, [L]."""
    return repeat_pattern(model.layer_types, model.num_layers)


def select_layers(model, which: str | None = None) -> list[int]:
    """Returns the numbers of the layers that are named: full, sliding, 3 or 0-5; None: all.

    Raises ValueError, with the names that there are, where this names none.
    """
    kinds = layer_kinds(model)
    numbers = list(range(model.num_layers))
    if which is None:
        return numbers
    found = [number for number in numbers if kinds[number] == which + _ATTENTION]
    interval = re.fullmatch(r"(\d+)(?:-(\d+))?", which)
    if interval:
        first = int(interval[1])
        last = int(interval[2] or first)
        found = numbers[first : last + 1] if last < len(numbers) else []
    if not found:
        present = " and ".join(kind.removesuffix(_ATTENTION) for kind in dict.fromkeys(kinds))
        raise ValueError(f"there are no layers {which!r}, only 0 to {numbers[-1]}, all {present}")
    return found


def repeat_pattern(layer_types: Sequence[str], num_layers: int) -> list[str]:
    """Returns the kind of every layer, [L]; an empty pattern is of full attention."""
    pattern = tuple(layer_types) or (FULL,)
    return list(itertools.islice(itertools.cycle(pattern), num_layers))


def layer_windows(model) -> list[int | None]:
    """Returns how many keys a query of each layer sees, its own included, [L]; None: all before."""
    return [model.sliding_window if kind == SLIDING else None for kind in layer_kinds(model)]


def head_dim(model, is_local: bool) -> int:
    """Returns H of the layers with, or without, a window."""
    if is_local or model.global_head_dim is None:
        return model.head_dim
    return model.global_head_dim


def first_sharing_layer(model) -> int:
    """Returns the number of the first layer that shares keys and values; L where none does."""
    return model.num_layers - model.num_kv_shared_layers


def layers(model) -> list[Layer]:
    """Returns what every layer of a run's `config.model` is built by, [L]."""
    first_sharing = first_sharing_layer(model)
    result = []
    for number, kind in enumerate(layer_kinds(model)):
        is_full = kind == FULL
        shares_kv = number >= first_sharing
        is_wide = shares_kv and model.use_double_wide_mlp
        num_kv_heads = model.num_kv_heads
        if is_full and model.num_global_kv_heads is not None:
            num_kv_heads = model.num_global_kv_heads
        layer = Layer(
            kind=kind,
            window=model.test_window if is_full else model.sliding_window,
            sinks=model.test_sinks if is_full else 0,
            head_dim=head_dim(model, is_local=not is_full),
            num_kv_heads=num_kv_heads,
            hidden_dim=model.hidden_dim * (2 if is_wide else 1),
            key_is_value=is_full and model.global_key_is_value,
            shares_kv=shares_kv,
        )
        result.append(layer)
    return result


def stacks(model) -> dict[str, list[int]]:
    """Returns the numbers of the layers in every stack, by the stack's name."""
    all_layers = layers(model)
    shapes = {layer._replace(kind="", window=None, sinks=0) for layer in all_layers}
    if len(shapes) == 1:
        return {"": list(range(model.num_layers))}
    by_name: dict[str, list[int]] = {}
    for number, layer in enumerate(all_layers):
        name = layer.kind + (_SHARING if layer.shares_kv else "")
        by_name.setdefault(name, []).append(number)
    return by_name


# Names of stacks, where there are several.
STACKS = (*LAYER_TYPES, *(f"{kind}{_SHARING}" for kind in LAYER_TYPES))


def by_stack(model, layer_params: dict) -> dict[str, Any]:
    """Returns `params["layers"]` by stack: where all layers are in one, its name is ""."""
    return {"": layer_params} if "" in stacks(model) else layer_params


def stack_rows(model) -> list[StackRow]:
    """Returns where the parameters of every layer are, [L]."""
    by_number = {}
    for stack, numbers in stacks(model).items():
        by_number |= {number: StackRow(stack, row) for row, number in enumerate(numbers)}
    return [by_number[number] for number in range(model.num_layers)]


def key_value_sources(model) -> list[int]:
    """Returns which layer's keys and values every layer uses, [L]: its own, or an earlier one's."""
    last_of_kind = {}
    sources = []
    for number, layer in enumerate(layers(model)):
        if not layer.shares_kv:
            last_of_kind[layer.kind] = number
        sources.append(last_of_kind[layer.kind])
    return sources


def cache_indices(model) -> list[int]:
    """Returns for every layer which of its kind's keys and values in a cache it uses, [L]."""
    kinds = layer_kinds(model)
    return [kinds[:source].count(kinds[source]) for source in key_value_sources(model)]
