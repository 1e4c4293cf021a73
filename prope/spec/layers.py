"""The layers of a model: what is compiled for each, how it rotates, and where its parameters are.

Axes: H head_dim, K key/value heads, F hidden_dim, L layers, P = H / 2 rotation pairs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prope.encodings import layer_frequencies, logit_scale
from prope.spec.kinds import FULL, SHARING_SUFFIX, SLIDING, parse_interval


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer. Neighbours that are equal are one loop in the compiled program."""

    # Equal layers have these in common.
    kind: str  # of LAYER_TYPES
    window: int | None  # keys that a query sees, its own included; None: all before
    sinks: int  # with a window: first keys of the sequence that it also sees
    head_dim: int
    num_kv_heads: int
    hidden_dim: int
    key_is_value: bool  # values are the keys, before norm and rotation
    shares_kv: bool  # takes the keys and values of an earlier layer of its kind
    attention: str  # implementation, of ATTENTION
    logit_scale: float  # factor on the scores
    # They may differ in these.
    number: int = dataclasses.field(compare=False)
    stack: str = dataclasses.field(compare=False)  # of its parameters; "" where there is one
    row: int = dataclasses.field(compare=False)  # in the stack
    kv_source: int = dataclasses.field(compare=False)  # the layer whose keys and values it uses
    cache_index: int = dataclasses.field(compare=False)  # of those in the cache of its kind
    rope_percentage: float = dataclasses.field(compare=False)
    max_wavelength: float = dataclasses.field(compare=False)  # before any scaling
    # Radians per token of every pair of every key head, float64 [K, P], by which the queries of its
    # group rotate, too; and whether a pair adds nothing to scores.
    frequencies: np.ndarray = dataclasses.field(compare=False)
    removed: np.ndarray = dataclasses.field(compare=False)  # bool [P]

    @property
    def is_local(self) -> bool:
        """Whether it has a window."""
        return self.kind == SLIDING

    @property
    def num_rotated(self) -> int | list[int]:
        """How many pairs rotate; where heads differ, of every key head."""
        counts = np.count_nonzero(self.frequencies, axis=1).tolist()
        return counts[0] if len(set(counts)) == 1 else counts


def _head_dim(model, kind: str) -> int:
    return model.head_dim if kind == SLIDING else model.global_head_dim or model.head_dim


def _num_kv_heads(model, kind: str) -> int:
    return (kind == FULL and model.num_global_kv_heads) or model.num_kv_heads


def key_value_sources(model) -> list[int]:
    """Returns which layer's keys and values every layer uses, [L]: its own, or an earlier one's."""
    last_of_kind = {}
    sources = []
    for number, kind in enumerate(model.kinds):
        if number < model.first_sharing_layer:
            last_of_kind[kind] = number
        sources.append(last_of_kind[kind])
    return sources


@functools.lru_cache(256)
def build_layers(model, seq_len: int | None) -> tuple[Layer, ...]:
    """Builds every layer; those of a kind that have the same parameters' shapes are stacked.

    Raises ValueError, which begins with a field's name, where a frequency cannot be computed.
    """
    rotations = _rotations(model, seq_len)
    logit_scales = _logit_scales(model, rotations)
    sources = key_value_sources(model)
    layers = []
    for number, kind in enumerate(model.kinds):
        is_full = kind == FULL
        shares_kv = number >= model.first_sharing_layer
        is_wide = shares_kv and model.use_double_wide_mlp
        source = sources[number]
        layer = Layer(
            kind=kind,
            window=model.test_window if is_full else model.sliding_window,
            sinks=model.test_sinks if is_full else 0,
            head_dim=_head_dim(model, kind),
            num_kv_heads=_num_kv_heads(model, kind),
            hidden_dim=model.hidden_dim * (2 if is_wide else 1),
            key_is_value=is_full and model.global_key_is_value,
            shares_kv=shares_kv,
            attention=(is_full and model.global_attention) or model.attention,
            logit_scale=logit_scales[number],
            number=number,
            stack="",  # as it is where all have the same shapes
            row=number,
            kv_source=source,
            cache_index=model.kinds[:source].count(kind),
            **rotations[number],
        )
        layers.append(layer)
    shapes = {
        (x.head_dim, x.num_kv_heads, x.hidden_dim, x.key_is_value, x.shares_kv) for x in layers
    }
    if len(shapes) == 1:
        return tuple(layers)
    stacks = [layer.kind + (SHARING_SUFFIX if layer.shares_kv else "") for layer in layers]
    return tuple(
        dataclasses.replace(layer, stack=stack, row=stacks[: layer.number].count(stack))
        for layer, stack in zip(layers, stacks, strict=True)
    )


def _rotations(model, seq_len: int | None) -> list[dict[str, Any]]:
    """Computes how every layer rotates, [L]: the last four fields of `Layer`."""
    p = model.rope_percentage
    percentages = p if isinstance(p, tuple) else (p,) * model.num_layers
    compute = functools.cache(functools.partial(layer_frequencies, model, seq_len))
    no_pairs = [np.zeros(_head_dim(model, kind) // 2, bool) for kind in model.kinds]
    bands = pairs_in_bands(model) if model.scaled_pairs else no_pairs
    divisors = {"stop": np.inf, "interpolate": model.rope_scaling_factor}  # of frequencies
    divisor = divisors.get(model.rope_scaling_type, 1.0)
    removes = model.rope_scaling_type == "remove"
    numbers = _custom_numbers(model)
    kept = parse_pairs(model) if model.rope_pairs else []
    sources = key_value_sources(model)
    rotations = []
    for number, kind in enumerate(model.kinds):
        is_local = kind == SLIDING
        wavelength = model.max_wavelength
        layer_p = percentages[number]
        if is_local and model.local_max_wavelength is not None:
            wavelength = model.local_max_wavelength
        if is_local and model.local_rope_percentage is not None:
            layer_p = model.local_rope_percentage
        freqs = compute(_head_dim(model, kind), layer_p, wavelength, is_local, numbers[number])
        K = _num_kv_heads(model, kind)
        if freqs.ndim == 2 and len(freqs) != K:
            problem = f"layer {number} has {K} key heads; got numbers of {len(freqs)}"
            raise ValueError(f"rope_frequencies: {problem}")
        freqs = np.broadcast_to(freqs, (K, freqs.shape[-1]))
        if kept:
            rotates = kept[sources[number]]
            standing = np.argwhere(rotates & (freqs == 0))
            if len(standing):
                problem = f"layer {number}: pair {standing[0][1]} has no frequency to rotate by"
                raise ValueError(f"rope_pairs: {problem}; set config.model.rope_percentage=1.0")
            freqs = np.where(rotates, freqs, 0.0)
        if divisor != 1.0:
            freqs = np.where(bands[number], freqs / divisor, freqs)
        removed = bands[number] if removes else no_pairs[number]
        rotation = {"rope_percentage": layer_p, "max_wavelength": wavelength}
        rotations.append(rotation | {"frequencies": freqs, "removed": removed})
    return rotations


def _custom_numbers(model) -> Sequence[tuple]:
    """Returns the `rope_frequencies` of every layer, [L]."""
    numbers = model.rope_frequencies
    if not (numbers and isinstance(numbers[0], tuple)):
        return [numbers] * model.num_layers
    if len(numbers) != model.num_layers:
        problem = f"needs numbers for all layers or for each of {model.num_layers}"
        raise ValueError(f"rope_frequencies: {problem}; got those of {len(numbers)} layers")
    for number, source in enumerate(key_value_sources(model)):
        if numbers[number] != numbers[source]:
            problem = f"layer {number} takes the keys of layer {source}, which rotate once"
            raise ValueError(f"rope_frequencies: {problem}; give both the same numbers")
    return numbers


def _logit_scales(model, rotations: list[dict[str, Any]]) -> list[float]:
    """Computes the factor on the scores of every layer, [L]; layers with a window have none."""
    rotate = np.array([rotation["frequencies"].any() for rotation in rotations])
    is_full = np.array(model.kinds) == FULL
    rotate |= not (rotate & is_full).any()  # where none rotates, all have yarn's
    scales = [logit_scale(model, rotates) for rotates in rotate]
    return np.where(is_full, scales, 1.0).tolist()


# --- Chosen pairs ---------------------------------------------------------------------------------


def parse_pairs(model) -> list[np.ndarray]:
    """Parses `rope_pairs`: which pairs of every key head of every layer it keeps, bool [L][K, P].

    It has a text such as 0-7,12 for every key head of a layer, with spaces between, or one for all;
    and such a line for every layer, with semicolons between, or one for all. - keeps no pair.

    Raises ValueError, which begins with the field's name, where it does not fit the model.
    """
    lines = model.rope_pairs.split(";")
    if len(lines) not in (1, model.num_layers):
        problem = f"has {len(lines)} layers, and the model {model.num_layers}"
        raise ValueError(f"rope_pairs: {problem}; choose pairs of this model")
    kept = []
    for number, kind in enumerate(model.kinds):
        heads = lines[number if len(lines) > 1 else 0].split()
        K = _num_kv_heads(model, kind)
        if len(heads) not in (1, K):
            problem = f"layer {number} has {len(heads)} key heads, and in the model {K}"
            raise ValueError(f"rope_pairs: {problem}; choose pairs of this model")
        P = _head_dim(model, kind) // 2
        rows = [_parse_pairs_of_head(head, P, number) for head in heads]
        kept.append(np.broadcast_to(rows, (K, P)))
    return kept


def _parse_pairs_of_head(text: str, num_pairs: int, layer: int) -> np.ndarray:
    kept = np.zeros(num_pairs, bool)
    for part in [] if text == "-" else text.split(","):
        pairs = parse_interval(part, num_pairs)
        if not pairs:
            problem = f"layer {layer}: {part!r} are no pairs of 0 to {num_pairs - 1}"
            raise ValueError(f"rope_pairs: {problem}; give such as 0-7,12, or - for none")
        kept[pairs] = True
    return kept


def format_pairs(kept: Sequence[np.ndarray]) -> str:
    """Writes pairs that are kept, bool [L][K, P], as `parse_pairs` reads them."""
    return "; ".join(" ".join(map(_format_pairs_of_head, heads)) for heads in kept)


def _format_pairs_of_head(kept: np.ndarray) -> str:
    edges = np.flatnonzero(np.diff(np.pad(kept, 1).astype(int))).reshape(-1, 2)  # first, last + 1
    runs = [f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in edges]
    return ",".join(runs) or "-"


# --- Bands of pairs -------------------------------------------------------------------------------


class Band(NamedTuple):
    """A band of pairs, from first to last, in some layers."""

    first: int
    last: int
    place: str | None  # of the layers, as `select_layers` takes it; None: all
    layers: list[int]
    num_pairs: int  # that a head of these layers has, at most

    def __str__(self):
        pairs = f"{self.first}-{self.last}"
        return pairs if self.place is None else f"{pairs}@{self.place}"


def parse_band(model, text: str) -> Band:
    """Parses pairs, and perhaps layers: 3, 16-19, 64-127@full, 8-15@3 or 8-15@0-5.

    Raises ValueError where there are no such pairs in these layers, or no such layers.
    """
    pairs, _, place = text.partition("@")
    numbers = model.select_layers(place if "@" in text else None)
    if len(numbers) == model.num_layers:
        place = ""
    num_pairs = max(_head_dim(model, model.kinds[number]) for number in numbers) // 2
    band = parse_interval(pairs, num_pairs)
    if not band:
        raise ValueError(f"{text!r} is not a band of pairs 0 to {num_pairs - 1}")
    return Band(band[0], band[-1], place or None, numbers, num_pairs)


def pairs_in_bands(model) -> list[np.ndarray]:
    """Returns for every pair of every layer whether `scaled_pairs` has it, bool [L][P].

    Raises ValueError where these are no bands of the model.
    """
    masks = [np.zeros(_head_dim(model, kind) // 2, bool) for kind in model.kinds]
    bands = tuple(model.scaled_pairs)
    if not bands or not isinstance(bands[0], str):
        missing = ("",) * (2 - len(bands))
        bands = ["-".join(map(str, bands + missing))]
    for text in map(str, bands):
        band = parse_band(model, text)
        for number in band.layers:
            masks[number][band.first : band.last + 1] = True
    return masks


def check_bands(model) -> None:
    """Raises ValueError, with a remedy after "; ", where `scaled_pairs` are no bands of a model."""
    try:
        masks = pairs_in_bands(model)
    except ValueError as error:
        problem = f"must be the first and the last of a band, or bands with layers: {error}"
        raise ValueError(f"{problem}; give such as (0, 3) or ('0-3@full',)") from None
    for number, source in enumerate(key_value_sources(model)):
        if not np.array_equal(masks[number], masks[source]):
            problem = f"layer {number} takes the keys of layer {source}, which rotate once"
            raise ValueError(f"{problem}; give the same band to both, as @full and @sliding do")
