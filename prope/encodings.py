"""Frequencies of the encodings that p-RoPE is compared with, as a run's `config.model` names them.

A function returns the radians per token of every pair, float64 [P], fastest first, 0 for pairs that
do not rotate; `prope.rope` rotates by any of them. P = head_dim / 2; `length` is that of training,
in tokens.

A cutoff and a hard clip are p-RoPE with another rule for p; the others are not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from prope.rope import frequencies, num_rotated_pairs, rotation_table


def partial_frequencies(head_dim: int, max_wavelength: float, rope_percentage: float) -> np.ndarray:
    """Returns RoPE of the first int(p d) lanes alone, whose number is the denominator.

    Source: GPT-J, GPT-NeoX, Phi, Qwen3-Next.
    """
    num_rotated_pairs(head_dim, rope_percentage)  # checks both
    lanes = int(rope_percentage * head_dim)
    if lanes % 2:
        problem = f"partial rotates {lanes} of {head_dim} lanes; must be even"
        raise ValueError(f"rope_percentage={rope_percentage}: {problem}")
    freqs = frequencies(lanes, max_wavelength) if lanes else np.empty(0)
    return np.pad(freqs, (0, (head_dim - lanes) // 2))


def reversed_frequencies(
    head_dim: int, max_wavelength: float, rope_percentage: float
) -> np.ndarray:
    """Rotates as many pairs as p-RoPE, but the slowest (Barbero et al., Table 2: 0.75-reversed)."""
    dropped = head_dim // 2 - num_rotated_pairs(head_dim, rope_percentage)
    freqs = frequencies(head_dim, max_wavelength)
    freqs[:dropped] = 0.0
    return freqs


def cutoff_frequencies(
    head_dim: int, max_wavelength: float, length: int, cutoff: float = 1.0
) -> np.ndarray:
    """Rotates the pairs whose period is at most cutoff * length.

    Source: FoPE (2412.17739), HoPE (2410.21216).
    """
    freqs = frequencies(head_dim, max_wavelength)
    longest_period = cutoff * length
    if not longest_period >= 2 * math.pi:
        problem = f"with original_seq_len={length} no pair rotates; for that, p is 0"
        raise ValueError(f"rope_cutoff={cutoff}: {problem}")
    return np.where(2 * math.pi <= longest_period * freqs, freqs, 0.0)


def turning_share(length: int, max_wavelength: float, turns: float = 1.0) -> float:
    """Returns p*: pairs k <= p* P turn so often in `length` tokens, or more often; others do not.

    It is ln(length / 2 pi turns) / ln(max_wavelength), which may be below 0 or above 1.
    """
    return math.log(length / (2 * math.pi * turns)) / math.log(max_wavelength)


def hard_clip_frequencies(head_dim: int, max_wavelength: float, clip_low_n: int) -> np.ndarray:
    """Returns RoPE without its slowest n pairs (CoPE's HardClip, 2602.05258)."""
    freqs = frequencies(head_dim, max_wavelength)
    freqs[max(len(freqs) - clip_low_n, 0) :] = 0.0
    return freqs


def clipped_frequencies(head_dim: int, max_wavelength: float, clip_low_n: int) -> np.ndarray:
    """Slows the slowest n pairs by a cosine of the index, down to 0 (CoPE, 2602.05258)."""
    freqs = frequencies(head_dim, max_wavelength)
    if clip_low_n == 1:
        problem = "the taper needs two pairs or more; rope_type hard_clip drops one"
        raise ValueError(f"clip_low_n=1: {problem}")
    n = min(clip_low_n, len(freqs))
    taper = (1 + np.cos(np.pi * np.arange(n) / max(n - 1, 1))) / 2
    return freqs * np.pad(taper, (len(freqs) - n, 0), constant_values=1.0)


def rope_id_frequencies(head_dim: int, length: int) -> np.ndarray:
    """Rotates half of the pairs, geometrically from a turn in 32 tokens to two in `length`.

    Source: RoPE-ID (2603.18017).
    """
    rotated, rest = divmod(head_dim // 2, 2)
    if rotated < 2 or rest or length <= 64:
        problem = "rope_id needs > 64 and a multiple of 4, >= 8"
        raise ValueError(f"original_seq_len={length}, head_dim={head_dim}: {problem}")
    progress = np.arange(rotated) / (rotated - 1)
    freqs = 2 * math.pi / 32 * (64 / length) ** progress
    return np.pad(freqs, (0, rotated))


def custom_frequencies(head_dim: int, numbers: ArrayLike) -> np.ndarray:
    """Returns the numbers of one layer, [P], or [K, P] for its key heads."""
    try:
        freqs = np.asarray(numbers).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError):  # ragged, or no real numbers
        freqs = np.empty(0)
    if freqs.ndim not in (1, 2) or freqs.shape[-1] != head_dim // 2:
        problem = f"a layer needs {head_dim // 2} numbers, or as many for each of its key heads"
        shown = " ".join(repr(numbers).split())
        raise ValueError(f"rope_frequencies: {problem}; got {shown:.60}")
    if not ((freqs >= 0) & (freqs < 2 * math.pi)).all():
        problem = "radians per token must be in [0, 2 pi), where 0 does not rotate"
        raise ValueError(f"rope_frequencies: {problem}; got {freqs.min():g} to {freqs.max():g}")
    return freqs


def ntk_wavelength(head_dim: int, max_wavelength: float, factor: float) -> float:
    """Returns the base that slows the slowest pair by `factor` and the fastest not at all.

    Source: 2309.00071, definition 1.
    """
    if head_dim == 2:
        problem = "one pair alone has no slower ones; rotate two or more"
        raise ValueError(f"rope_scaling_type=ntk: {problem}")
    return max_wavelength * factor ** (head_dim / (head_dim - 2))


def dynamic_wavelength(
    head_dim: int, max_wavelength: float, factor: float, length: int, seq_len: int
) -> float:
    """Returns `ntk_wavelength` by the evaluated length; factor 1 is the paper's.

    Source: 2309.00071, section 3.3, and transformers.
    """
    growth = factor * max(seq_len, length) / length - (factor - 1)
    return ntk_wavelength(head_dim, max_wavelength, growth)


def yarn_frequencies(
    freqs: np.ndarray,
    head_dim: int,
    max_wavelength: float,
    factor: float,
    length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> np.ndarray:
    """Slows pairs by YaRN: a ramp by index, from f at beta_fast turns to f / s at beta_slow.

    Source: its code and transformers.
    """
    pair_of_fast = head_dim / 2 * turning_share(length, max_wavelength, beta_fast)
    pair_of_slow = head_dim / 2 * turning_share(length, max_wavelength, beta_slow)
    first = max(math.floor(pair_of_fast), 0)
    last = min(math.ceil(pair_of_slow), head_dim - 1)
    slowed = np.clip((np.arange(len(freqs)) - first) / (last - first or 1e-3), 0, 1)
    return freqs + (freqs / factor - freqs) * slowed


def llama3_frequencies(
    freqs: np.ndarray,
    factor: float,
    length: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> np.ndarray:
    """Slows pairs by Llama 3's ramp over the turns in `length`: f / s at low, f at high.

    Source: llama-models.
    """
    turns = length * freqs / (2 * math.pi)
    width = max(high_freq_factor - low_freq_factor, 1e-9)
    kept = np.clip((turns - low_freq_factor) / width, 0, 1)
    return freqs / factor + (freqs - freqs / factor) * kept


# By rope_type: the function, and the fields of config.model that it takes after head_dim.
TYPES = {
    "proportional": (frequencies, ("max_wavelength", "rope_percentage")),
    "partial": (partial_frequencies, ("max_wavelength", "rope_percentage")),
    "reversed": (reversed_frequencies, ("max_wavelength", "rope_percentage")),
    "cutoff": (cutoff_frequencies, ("max_wavelength", "original_seq_len", "rope_cutoff")),
    "hard_clip": (hard_clip_frequencies, ("max_wavelength", "clip_low_n")),
    "cope": (clipped_frequencies, ("max_wavelength", "clip_low_n")),
    "rope_id": (rope_id_frequencies, ("original_seq_len",)),
    "custom": (custom_frequencies, ("rope_frequencies",)),
}
# By rope_scaling_type: the fields of config.model that it takes.
SCALINGS = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "ntk": ("rope_scaling_factor",),
    "dynamic": ("rope_scaling_factor", "original_seq_len"),
    "yarn": ("rope_scaling_factor", "original_seq_len", "beta_fast", "beta_slow"),
    "llama3": ("rope_scaling_factor", "original_seq_len", "low_freq_factor", "high_freq_factor"),
    "stop": ("scaled_pairs",),
    "remove": ("scaled_pairs",),
    "interpolate": ("scaled_pairs", "rope_scaling_factor"),
}
INTERVENTIONS = ("stop", "remove", "interpolate")  # scalings of a band of pairs, which test its use
# By logit_scale: the fields of config.model that it takes.
LOGIT_SCALES = {
    "none": (),
    "yarn": ("logit_scale_factor",),
    "drope": ("logit_scale_factor", "logit_scale_coefficient"),
}
# By the field of config.model that names a kind of encoding: the fields that each kind takes.
CHOICES = {
    "rope_type": {name: fields for name, (_, fields) in TYPES.items()},
    "rope_scaling_type": SCALINGS,
    "logit_scale": LOGIT_SCALES,
}
# All fields of the encoding in config.model.
FIELDS = {
    "layer_types",
    "sliding_window",
    "local_max_wavelength",
    "local_rope_percentage",
    "rope_pairs",
    *CHOICES,
    *(name for kinds in CHOICES.values() for fields in kinds.values() for name in fields),
}


def can_rescale(rope_type: str, scaling: str | None) -> bool:
    """Returns whether a scaling, some of which need a wavelength, applies to a rope_type."""
    _, fields = TYPES[rope_type]
    return scaling not in ("ntk", "dynamic", "yarn") or "max_wavelength" in fields


def layer_frequencies(
    model,
    seq_len: int | None,
    head_dim: int,
    p: float,
    wavelength: float,
    is_local: bool,
    numbers: tuple,
) -> np.ndarray:
    """Returns the frequencies of a layer, float64 [P] or [K, P], by the fields of a `ModelSpec`.

    Args:
      model: the spec.
      seq_len: evaluated length, for the scaling "dynamic"; original_seq_len by default.
      head_dim: of the layer, as are the arguments after it.
      p: its rope_percentage.
      wavelength: its max_wavelength, before any scaling.
      is_local: whether it has a window; then it is not scaled.
      numbers: of rope_type "custom", those of the layer.

    Raises:
      ValueError: a field does not fit the type; the text names it.
    """
    scaling = "none" if is_local else model.rope_scaling_type
    scaled_by = [getattr(model, name) for name in SCALINGS[scaling]]
    # The denominator of the exponent.
    lanes = int(p * head_dim) if model.rope_type == "partial" else head_dim
    if scaling == "ntk":
        wavelength = ntk_wavelength(lanes, wavelength, *scaled_by)
    elif scaling == "dynamic":
        evaluated = seq_len or model.original_seq_len
        wavelength = dynamic_wavelength(lanes, wavelength, *scaled_by, evaluated)
    function, fields = TYPES[model.rope_type]
    of_layer = {"max_wavelength": wavelength, "rope_percentage": p, "rope_frequencies": numbers}
    freqs = function(head_dim, *(of_layer.get(name, getattr(model, name)) for name in fields))
    if scaling == "linear":
        return freqs / model.rope_scaling_factor
    if scaling == "yarn":
        return yarn_frequencies(freqs, lanes, wavelength, *scaled_by)
    if scaling == "llama3":
        return llama3_frequencies(freqs, *scaled_by)
    return freqs


def logit_scale(model, rotates: bool) -> float:
    """Returns the factor on logits of a layer without a window, by s = `model.logit_factor`.

    yarn: (0.1 ln s + 1)^2, whose root multiplies cos and sin in 2309.00071, and 1 where `rotates`
    is false, as in SmolLM3; drope: 1 + c ln s (2512.12167).
    """
    log = math.log(model.logit_factor or 1.0)
    if model.logit_scale == "yarn" and rotates:
        return (0.1 * log + 1) ** 2
    if model.logit_scale == "drope":
        return 1 + model.logit_scale_coefficient * log
    return 1.0


class Tables(NamedTuple):
    """Tables of rotation, each made once for all layers of a kind that it serves."""

    # [n, 2, B, T, P]; [n, 2, B, T, K, P] where key heads rotate a pair at different rates.
    by_kind: dict[str, jax.Array]
    # Arrays [L, ..]: "table", which of the n a layer takes; "rotates", [L, K, P], which pairs of a
    # key head do, filled up to the most heads and pairs; [L, 1, P] where the heads of every layer
    # are alike. Each is left out where it is the same.
    per_layer: dict[str, np.ndarray]

    def choose(self, layer, arrays: dict) -> jax.Array:
        """Returns the table of a `Layer`, by its elements of `per_layer`, for `prope.rope.rotate`.

        It is [2, B, T, P], or [2, B, T, K, P] where key heads differ.
        """
        tables = self.by_kind[layer.kind]
        table = tables[0] if len(tables) == 1 else tables[arrays["table"]]
        if "rotates" not in arrays:
            return table
        rotates = arrays["rotates"][: layer.num_kv_heads, : layer.head_dim // 2]
        if table.ndim == 4:
            table = table[:, :, :, None]
        unrotated = jnp.array([1.0, 0.0]).reshape(2, 1, 1, 1, 1)
        return jnp.where(rotates[None, None, None], table, unrotated)


def rotation_tables(layers: Sequence, positions: jax.Array) -> Tables:
    """Makes the tables of all layers, `Layer`s of a spec, for positions [B, T].

    Layers and heads that differ in which pairs rotate, and not in how fast, share a table. Cos and
    sin of a pair that a layer removes are 0, so that the pair adds nothing.
    """
    by_kind = {}
    table_of = {}
    rotates = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        of_kind = [layer for layer in layers if layer.kind == kind]
        freqs = np.stack([layer.frequencies for layer in of_kind])  # [n, K, P]
        rates = np.broadcast_to(freqs.max(axis=(0, 1)), freqs.shape)
        if not ((freqs == rates) | (freqs == 0)).all():
            rates = freqs
        if (rates == rates[:, :1]).all():
            rates = rates[:, 0]
        tables = {}
        for layer, rate in zip(of_kind, rates, strict=True):
            encoding = (rate.tobytes(), layer.removed.tobytes())
            if encoding not in tables:
                tables[encoding] = _make_table(positions, rate, layer.removed)
            table_of[layer.number] = list(tables).index(encoding)
            rotates[layer.number] = (layer.frequencies == rate) | layer.removed
        by_kind[kind] = jnp.stack(list(tables.values()))
    per_layer = {}
    if any(table_of.values()):
        per_layer["table"] = np.array([table_of[layer.number] for layer in layers])
    if all((rotating == rotating[:1]).all() for rotating in rotates.values()):
        rotates = {number: rotating[:1] for number, rotating in rotates.items()}
    if not all(rotating.all() for rotating in rotates.values()):
        most = np.max([rotating.shape for rotating in rotates.values()], axis=0)
        filled = per_layer["rotates"] = np.zeros((len(layers), *most), bool)
        for layer, row in zip(layers, filled, strict=True):
            K, P = rotates[layer.number].shape
            row[:K, :P] = rotates[layer.number]
    return Tables(by_kind, per_layer)


def _make_table(positions: jax.Array, freqs: np.ndarray, removed: np.ndarray) -> jax.Array:
    table = rotation_table(positions, freqs)
    if not removed.any():
        return table
    is_removed = jnp.expand_dims(removed, range(table.ndim - 1))
    return jnp.where(is_removed, 0.0, table)
