"""The decoder as a value: what a run's `config.model` means, layer by layer.

Building a `ModelSpec` checks it. Another encoding, a stopped band or a window at test time is the
same spec with other fields: `dataclasses.replace(spec, ..)` builds and checks the changed one.

A layer is of sliding or of full attention. Layers of equal shapes are stacked in one array per
parameter: all layers where they are alike, otherwise those of each kind, and apart from them those
of a kind that share keys and values with an earlier layer.

Axes: H head_dim, K key/value heads, F hidden_dim, L layers, P = H / 2 rotation pairs.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prope.errors import UsageError, nearest, usage_error
from prope.spec.fields import (
    ABOVE_1,
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    check_fields,
    one_of,
    rule,
    setting,
)

SLIDING = "sliding_attention"
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)
DTYPES = ("float32", "bfloat16")
REMAT = ("none", "minimal", "save_qkv", "full")
ACTIVATIONS = ("gelu", "silu")
ATTENTION = ("auto", "xla", "splash", "cudnn")
_ATTENTION = "_attention"  # ends the name of a kind
_SHARING = "_shared_kv"  # ends the name of a stack whose layers have no keys and values
# Names of stacks, where there are several.
STACKS = (*LAYER_TYPES, *(f"{kind}{_SHARING}" for kind in LAYER_TYPES))

_EVEN = rule(lambda x: x % 2 == 0, "must be even: RoPE rotates pairs of lanes")
_FRACTION = rule(
    lambda p: all(0 <= x <= 1 for x in (p if isinstance(p, tuple) else [p])),
    "must be a fraction in [0, 1], where 1 is RoPE and 0 is NoPE",
)


def _known_layers(value):
    for kind in value:
        if kind not in LAYER_TYPES:
            remedy = f"give a pattern such as {','.join(LAYER_TYPES)}"
            return f"there is no {kind}{nearest(str(kind), LAYER_TYPES)}; {remedy}"
    return None


def repeat_pattern(layer_types: Sequence[str], num_layers: int) -> list[str]:
    """Returns the kind of every layer, [L]; an empty pattern is of full attention."""
    pattern = tuple(layer_types) or (FULL,)
    return list(itertools.islice(itertools.cycle(pattern), num_layers))


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer. Layers are equal that are compiled alike, whatever their place and rotation."""

    kind: str  # of LAYER_TYPES
    window: int | None  # keys that a query sees, its own included; None: all before
    sinks: int  # with a window: first keys of the sequence that it also sees
    head_dim: int
    num_kv_heads: int
    hidden_dim: int
    key_is_value: bool  # values are the keys, before norm and rotation
    shares_kv: bool  # takes the keys and values of an earlier layer of its kind
    attention: str  # implementation, of ATTENTION
    number: int = dataclasses.field(compare=False)
    stack: str = dataclasses.field(compare=False)  # of its parameters; "" where there is one
    row: int = dataclasses.field(compare=False)  # in the stack
    kv_source: int = dataclasses.field(compare=False)  # the layer whose keys and values it uses
    cache_index: int = dataclasses.field(compare=False)  # of those in the cache of its kind
    rope_percentage: float = dataclasses.field(compare=False)
    max_wavelength: float = dataclasses.field(compare=False)  # before any scaling
    # Radians per token of every pair, float64 [P], and whether a pair adds nothing to scores.
    frequencies: np.ndarray = dataclasses.field(compare=False)
    removed: np.ndarray = dataclasses.field(compare=False)  # bool [P]
    logit_scale: float = 1.0  # factor on the scores

    @property
    def is_local(self) -> bool:
        """Whether it has a window."""
        return self.kind == SLIDING

    @property
    def num_rotated(self) -> int:
        """How many pairs rotate."""
        return int(np.count_nonzero(self.frequencies))


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The decoder. Fields with a meaning are those of `config.model`."""

    num_layers: int = setting(4, "L, layers of the decoder", AT_LEAST_1)
    embed_dim: int = setting(256, "D, width of the residual stream", AT_LEAST_1)
    num_heads: int = setting(4, "N, query heads of a layer", AT_LEAST_1)
    num_kv_heads: int = setting(
        1, "K, key/value heads: 1 is multi-query, num_heads is multi-head attention", AT_LEAST_1
    )
    head_dim: int = setting(64, "H, lanes of a head, even", AT_LEAST_1, _EVEN)
    hidden_dim: int = setting(1024, "F, hidden units of the gated MLP", AT_LEAST_1)
    vocab_size: int = setting(260, "V, at least the tokenizer's size", AT_LEAST_1)
    max_wavelength: float = setting(10000.0, "theta, the base wavelength of RoPE", ABOVE_1)
    rope_percentage: float | tuple = setting(
        1.0, "p in [0, 1]: 1 is RoPE, 0 is NoPE; per layer: set_layer_percentages", _FRACTION
    )
    rope_type: str = setting(
        "proportional",
        "proportional (p-RoPE) | partial | reversed | cutoff | hard_clip | cope | rope_id: see "
        "prope/encodings.py",
    )
    rope_cutoff: float | None = setting(
        None, "for rope_type=cutoff: pairs rotate whose period is at most this x original_seq_len"
    )
    clip_low_n: int | None = setting(
        None,
        "for rope_type=hard_clip and cope: how many of the slowest pairs are clipped",
        NOT_NEGATIVE,
    )
    rope_scaling_type: str = setting(
        "none",
        "scaling of layers without a window: none | linear | ntk | dynamic | yarn | llama3; or "
        "an intervention on scaled_pairs: stop | remove | interpolate",
    )
    rope_scaling_factor: float = setting(1.0, "s, by how much the length grows", AT_LEAST_1)
    scaled_pairs: tuple = setting(
        (),
        "for stop, remove and interpolate: first and last pair of the band, as in 0,3, or bands "
        "with layers, as in 0-3@full,4-5",
    )
    original_seq_len: int | None = setting(
        None, "length of training that types and scalings go by", AT_LEAST_1
    )
    beta_fast: float = setting(
        32.0, "for yarn: pairs of more turns in original_seq_len keep their frequency"
    )
    beta_slow: float = setting(1.0, "for yarn: pairs of fewer turns are slowed down by s")
    low_freq_factor: float = setting(1.0, "for llama3: pairs of fewer turns are slowed down by s")
    high_freq_factor: float = setting(4.0, "for llama3: pairs of more turns keep their frequency")
    logit_scale: str = setting(
        "none",
        "factor on the logits of layers without a window: none | yarn (of those that rotate, "
        "where some do) | drope",
    )
    logit_scale_factor: float | None = setting(
        None, "for yarn and drope: s of logit_scale; None: rope_scaling_factor", AT_LEAST_1
    )
    logit_scale_coefficient: float | None = setting(None, "for drope: c in 1 + c ln s")
    layer_types: tuple = setting(
        (),
        "pattern that the layers repeat, the last time perhaps in part, as in "
        "sliding_attention,full_attention; empty: all full",
        _known_layers,
    )
    sliding_window: int | None = setting(
        None, "keys that a query of a sliding layer sees, its own included", AT_LEAST_1
    )
    local_max_wavelength: float | None = setting(
        None, "max_wavelength of sliding layers; None: that of all", ABOVE_1
    )
    local_rope_percentage: float | None = setting(
        None, "rope_percentage of sliding layers; None: that of all", _FRACTION
    )
    activation: str = setting(
        "gelu", "of the gated MLP: gelu (its tanh form) | silu", one_of(*ACTIVATIONS)
    )
    norm_epsilon: float = setting(1e-06, "added to the mean square in every RMSNorm", POSITIVE)
    scale_embedding: bool = setting(True, "embeddings times sqrt(embed_dim)")
    tied: bool = setting(True, "the embedding also scores tokens; False: head/w does")
    post_norms: bool = setting(
        False, "RMSNorm of what attention and MLP add to the residual stream"
    )
    attention_scale: float | None = setting(
        None, "factor on the scores of attention; None: 1 / sqrt(head_dim)", POSITIVE
    )
    attention_softcap: float | None = setting(
        None, "c in c tanh(score / c), for the scores of attention; None: none", POSITIVE
    )
    final_softcap: float | None = setting(
        None, "c in c tanh(logit / c), for the logits of tokens; None: none", POSITIVE
    )
    qkv_bias: bool = setting(False, "biases of queries, keys and values")
    use_qk_norm: bool = setting(
        False, "RMSNorm of every head's queries and keys, before the rotation"
    )
    use_value_norm: bool = setting(False, "RMSNorm, without a scale, of every head's values")
    use_skip_scale: bool = setting(
        False, "a learned number that multiplies each layer's output, residual stream included"
    )
    global_head_dim: int | None = setting(
        None, "head_dim of layers without a window; None: that of all", AT_LEAST_1, _EVEN
    )
    num_global_kv_heads: int | None = setting(
        None, "num_kv_heads of layers without a window; None: that of all", AT_LEAST_1
    )
    global_key_is_value: bool = setting(
        False, "layers without a window have no values: these are the keys, before their norm"
    )
    num_kv_shared_layers: int = setting(
        0,
        "last layers, which take keys and values of the last layer of their kind before them",
        NOT_NEGATIVE,
    )
    use_double_wide_mlp: bool = setting(
        False, "layers that share keys and values have 2 x hidden_dim"
    )
    per_layer_input_dim: int = setting(
        0, "Q, lanes of the embedding that every layer has of its own; 0: none", NOT_NEGATIVE
    )
    dtype: str = setting(
        "float32",
        "dtype of activations and matmuls, float32 | bfloat16; parameters are always float32",
        one_of(*DTYPES),
    )
    attention: str = setting(
        "auto",
        "auto | xla | splash (TPU) | cudnn (NVIDIA)",
        one_of("auto", "xla", "splash", "cudnn"),
        may_change=True,
    )
    global_attention: str | None = setting(
        None,
        "attention of layers without a window, if it is another",
        one_of("auto", "xla", "splash", "cudnn"),
        may_change=True,
    )
    scan_layers: bool = setting(
        True,
        "compile one layer and loop, or unroll all; parameters and result are the same",
        may_change=True,
    )
    remat: str = setting(
        "none",
        "what a layer saves for its backward pass, fastest first: none (everything) | minimal "
        "(wide matmuls and attention) | save_qkv (q, k, v and the output of attention) | full "
        "(only the layer's input)",
        one_of(*REMAT),
        may_change=True,
    )
    # Of full layers in evaluation, where they see the last keys and the first ones only.
    test_window: int | None = None
    test_sinks: int = 0

    def __post_init__(self):
        check_fields(self, "config.model.")
        self._check_heads()
        self._check_layers()
        self._check_encoding()

    @functools.cached_property
    def kinds(self) -> list[str]:
        """The kind of every layer, [L]."""
        return repeat_pattern(self.layer_types, self.num_layers)

    @property
    def layers(self) -> "tuple[Layer, ...]":
        """All layers, [L]."""
        return self.layers_at(None)

    def layers_at(self, seq_len: int | None) -> "tuple[Layer, ...]":
        """Returns the layers for sequences of this length, by which `dynamic` scales them.

        None stands for original_seq_len.
        """
        return _build_layers(self, seq_len if self.rope_scaling_type == "dynamic" else None)

    @functools.cached_property
    def stacks(self) -> dict[str, list[int]]:
        """The numbers of the layers in every stack, by the stack's name."""
        by_name: dict[str, list[int]] = {}
        for layer in self.layers:
            by_name.setdefault(layer.stack, []).append(layer.number)
        return by_name

    @property
    def first_sharing_layer(self) -> int:
        """The number of the first layer that shares keys and values; L where none does."""
        return self.num_layers - self.num_kv_shared_layers

    def select_layers(self, which: str | None = None) -> list[int]:
        """Returns the numbers of the layers that are named: full, sliding, 3 or 0-5; None: all.

        Raises ValueError, with the names that there are, where this names none.
        """
        numbers = list(range(self.num_layers))
        if which is None:
            return numbers
        found = [number for number in numbers if self.kinds[number] == which + _ATTENTION]
        interval = re.fullmatch(r"(\d+)(?:-(\d+))?", which)
        if interval:
            first = int(interval[1])
            last = int(interval[2] or first)
            found = numbers[first : last + 1] if last < len(numbers) else []
        if not found:
            present = " and ".join(
                kind.removesuffix(_ATTENTION) for kind in dict.fromkeys(self.kinds)
            )
            raise ValueError(
                f"there are no layers {which!r}, only 0 to {numbers[-1]}, all {present}"
            )
        return found

    @property
    def rotated_pairs(self) -> int | list[int]:
        """How many pairs every layer rotates, [L]; one number where all have one encoding."""
        pairs = [layer.num_rotated for layer in self.layers]
        one_p = not isinstance(self.rope_percentage, tuple)
        one_encoding = one_p and not self.layer_types and len(set(pairs)) == 1
        return pairs[0] if one_encoding else pairs

    @property
    def rotated_share(self) -> str:
        """How many pairs rotate: "24 of 32"; "8 or 32 of 32" where layers differ."""
        counts: dict[int, set[int]] = {}
        for layer in self.layers:
            counts.setdefault(layer.head_dim // 2, set()).add(layer.num_rotated)
        parts = [f"{' or '.join(map(str, sorted(counts[P])))} of {P}" for P in sorted(counts)]
        return " and ".join(parts)

    def describe_rotation(self) -> str:
        """Returns what rotates, for a log: "p-RoPE rotates 24 of 32 pairs"."""
        name = "p-RoPE" if self.rope_type == "proportional" else self.rope_type
        text = f"{name} rotates {self.rotated_share} pairs"
        if self.rope_scaling_type == "none":
            return text
        return f"{text} (scaled by {self.rope_scaling_type})"

    @property
    def logit_factor(self) -> float | None:
        """The s of the logit scale, by default rope_scaling_factor; None without a logit scale."""
        if self.logit_scale == "none":
            return None
        factor = self.logit_scale_factor
        return self.rope_scaling_factor if factor is None else factor

    def _refuse(self, field: str, problem: str, remedy: str = "") -> None:
        raise usage_error(
            f"config.model.{field}", getattr(self, field), problem, *filter(None, [remedy])
        )

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            self._refuse(
                "num_heads", f"must be a multiple of model.num_kv_heads={self.num_kv_heads}"
            )
        if self.num_global_kv_heads and self.num_heads % self.num_global_kv_heads:
            self._refuse("num_global_kv_heads", f"must divide model.num_heads={self.num_heads}")

    def _check_layers(self) -> None:
        """Checks that fields of some layers alone have such layers."""
        L = self.num_layers
        if len(self.layer_types) > L:
            self._refuse("layer_types", f"must be a pattern of at most model.num_layers={L} layers")
        first = self.first_sharing_layer
        if first < 1 or not set(self.kinds[first:]) <= set(self.kinds[:first]):
            needs = "each layer that shares needs an earlier one of its kind that does not"
            self._refuse("num_kv_shared_layers", f"is too many of model.num_layers={L}: {needs}")
        for field in (
            "global_head_dim",
            "num_global_kv_heads",
            "global_key_is_value",
            "global_attention",
        ):
            if getattr(self, field) and set(self.kinds) != set(LAYER_TYPES):
                problem = "has no effect unless some layers have a window and others have none"
                self._refuse(field, problem, "see layer_types")
        if self.use_double_wide_mlp and not self.num_kv_shared_layers:
            self._refuse("use_double_wide_mlp", "has no effect without num_kv_shared_layers")
        if isinstance(self.rope_percentage, tuple):
            if len(self.rope_percentage) != L:
                problem = f"must be one number, or one for each of model.num_layers={L}"
                self._refuse("rope_percentage", problem)
            if self.num_kv_shared_layers:
                problem = "must be one number where layers share keys, which rotate once"
                self._refuse("rope_percentage", problem)

    def _check_encoding(self) -> None:
        """Checks the fields of the encoding, and that its frequencies can be computed."""
        from prope import encodings  # imports JAX, which --help does not wait for

        for field, kinds in encodings.CHOICES.items():
            kind = getattr(self, field)
            if kind not in kinds:
                problem = f"there is none{nearest(kind, kinds)}; must be one of {', '.join(kinds)}"
                self._refuse(field, problem)
        self._check_fields_of_encoding(encodings)
        if not encodings.can_rescale(self.rope_type, self.rope_scaling_type):
            problem = f"needs a wavelength, which rope_type={self.rope_type} has not"
            self._refuse("rope_scaling_type", problem)
        if self.rope_scaling_type in encodings.INTERVENTIONS:
            self._check_bands()
        try:  # a ValueError begins with the field
            _ = self.layers
        except ValueError as error:
            raise UsageError(f"config.model.{error}") from None

    def _check_fields_of_encoding(self, encodings) -> None:
        """Checks that the fields which rope_type and the like take have values, and no others."""
        required = {*encodings.CHOICES, "layer_types"}
        for field, kinds in encodings.CHOICES.items():
            required |= set(kinds[getattr(self, field)])
        optional = set()
        if "logit_scale_factor" in required and self.logit_scale_factor is None:
            required.remove("logit_scale_factor")
            optional.add("logit_scale_factor")
            required.add("rope_scaling_factor")
        if SLIDING in self.layer_types:
            required.add("sliding_window")
            optional |= {"local_max_wavelength", "local_rope_percentage"}
        allowed = required | optional
        chosen = [
            f"{field}={getattr(self, field)}" for field in (*encodings.CHOICES, "layer_types")
        ]
        fields = {field.name: field for field in dataclasses.fields(self)}
        for name in sorted(encodings.FIELDS):
            value = getattr(self, name)
            is_set = value is not None and value != fields[name].default
            if name in required and value is None:
                self._refuse(name, "must have a value: its type needs it")
            if is_set and name not in allowed:
                takes = ", ".join(sorted(allowed))
                self._refuse(name, f"has no effect with {', '.join(chosen)}; it takes {takes}")

    def _check_bands(self) -> None:
        try:
            masks = pairs_in_bands(self)
        except ValueError as error:
            problem = f"must be the first and the last of a band, or bands with layers: {error}"
            self._refuse("scaled_pairs", problem, "give such as (0, 3) or ('0-3@full',)")
        sources = _key_value_sources(self)
        for number, source in enumerate(sources):
            if not np.array_equal(masks[number], masks[source]):
                problem = f"layer {number} takes the keys of layer {source}, which rotate once"
                remedy = "give the same band to both, as @full and @sliding do"
                self._refuse("scaled_pairs", problem, remedy)


# --- Layers ---------------------------------------------------------------------------------------


def _head_dim(model: ModelSpec, kind: str) -> int:
    return model.head_dim if kind == SLIDING else model.global_head_dim or model.head_dim


def _key_value_sources(model: ModelSpec) -> list[int]:
    """Returns which layer's keys and values every layer uses, [L]: its own, or an earlier one's."""
    last_of_kind = {}
    sources = []
    for number, kind in enumerate(model.kinds):
        if number < model.first_sharing_layer:
            last_of_kind[kind] = number
        sources.append(last_of_kind[kind])
    return sources


@functools.lru_cache(256)
def _build_layers(model: ModelSpec, seq_len: int | None) -> tuple[Layer, ...]:
    """Builds every layer; those of a kind that have the same parameters' shapes are stacked.

    Raises ValueError, which begins with a field's name, where a frequency cannot be computed.
    """
    rotations = _rotations(model, seq_len)
    sources = _key_value_sources(model)
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
            num_kv_heads=(is_full and model.num_global_kv_heads) or model.num_kv_heads,
            hidden_dim=model.hidden_dim * (2 if is_wide else 1),
            key_is_value=is_full and model.global_key_is_value,
            shares_kv=shares_kv,
            attention=(is_full and model.global_attention) or model.attention,
            number=number,
            stack="",
            row=number,
            kv_source=source,
            cache_index=model.kinds[:source].count(kind),
            **rotations[number]._asdict(),
        )
        layers.append(layer)
    shapes = {
        (x.head_dim, x.num_kv_heads, x.hidden_dim, x.key_is_value, x.shares_kv) for x in layers
    }
    if len(shapes) == 1:
        return tuple(layers)
    stacks = [layer.kind + (_SHARING if layer.shares_kv else "") for layer in layers]
    return tuple(
        dataclasses.replace(layer, stack=stack, row=stacks[: layer.number].count(stack))
        for layer, stack in zip(layers, stacks, strict=True)
    )


class _Rotation(NamedTuple):
    """What `Layer` has of these names."""

    rope_percentage: float
    max_wavelength: float
    frequencies: np.ndarray
    removed: np.ndarray
    logit_scale: float


def _rotations(model: ModelSpec, seq_len: int | None) -> list[_Rotation]:
    """Computes how every layer rotates, [L]."""
    from prope.encodings import layer_frequencies, logit_scale

    p = model.rope_percentage
    percentages = p if isinstance(p, tuple) else (p,) * model.num_layers
    compute = functools.cache(functools.partial(layer_frequencies, model, seq_len))
    bands = [np.zeros(_head_dim(model, kind) // 2, bool) for kind in model.kinds]
    none = bands
    if model.scaled_pairs:
        bands = pairs_in_bands(model)
    slower = {"stop": np.inf, "interpolate": model.rope_scaling_factor}.get(
        model.rope_scaling_type, 1.0
    )
    rotations = []
    for number, kind in enumerate(model.kinds):
        is_local = kind == SLIDING
        wavelength = model.max_wavelength
        p = percentages[number]
        if is_local and model.local_max_wavelength is not None:
            wavelength = model.local_max_wavelength
        if is_local and model.local_rope_percentage is not None:
            p = model.local_rope_percentage
        freqs = compute(_head_dim(model, kind), p, wavelength, is_local)
        if slower != 1.0:
            freqs = np.where(bands[number], freqs / slower, freqs)
        removed = bands[number] if model.rope_scaling_type == "remove" else none[number]
        rotations.append(_Rotation(p, wavelength, freqs, removed, 1.0))
    full = [r for r, kind in zip(rotations, model.kinds, strict=True) if kind == FULL]
    some_rotate = any(r.frequencies.any() for r in full)
    return [
        r._replace(logit_scale=logit_scale(model, r.frequencies.any() or not some_rotate))
        if kind == FULL
        else r
        for r, kind in zip(rotations, model.kinds, strict=True)
    ]


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


def parse_band(model: ModelSpec, text: str) -> Band:
    """Parses pairs, and perhaps layers: 3, 16-19, 64-127@full, 8-15@3 or 8-15@0-5.

    Raises ValueError where there are no such pairs in these layers, or no such layers.
    """
    pairs, _, place = text.partition("@")
    numbers = model.select_layers(place if "@" in text else None)
    if len(numbers) == model.num_layers:
        place = ""
    num_pairs = max(_head_dim(model, model.kinds[number]) for number in numbers) // 2
    interval = re.fullmatch(r"(\d+)(?:-(\d+))?", pairs)
    first = int(interval[1]) if interval else 0
    last = int(interval[2] or first) if interval else -1
    if not first <= last < num_pairs:
        raise ValueError(f"{text!r} is not a band of pairs 0 to {num_pairs - 1}")
    return Band(first, last, place or None, numbers, num_pairs)


def pairs_in_bands(model: ModelSpec) -> list[np.ndarray]:
    """Returns for every pair of every layer whether `scaled_pairs` has it, bool [L][P].

    Raises ValueError where these are no bands of the model.
    """
    masks = [np.zeros(_head_dim(model, kind) // 2, bool) for kind in model.kinds]
    bands: Sequence[Any] = tuple(model.scaled_pairs)
    if not bands or not isinstance(bands[0], str):
        missing = ("",) * (2 - len(bands))
        bands = ["-".join(map(str, bands + missing))]
    for text in map(str, bands):
        band = parse_band(model, text)
        for number in band.layers:
            masks[number][band.first : band.last + 1] = True
    return masks
