"""Frequencies of the encodings that p-RoPE is compared with, as a run's `config.model` names them.

A function returns the radians per token of every pair, float64 [P], fastest first, 0 for pairs that
do not rotate; `prope.rope` rotates by any of them. P = head_dim / 2; `length` is that of training,
in tokens.

A cutoff and a hard clip are p-RoPE with another rule for p; the others are not.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prope.rope import frequencies, num_rotated_pairs, phase_per_token, phase_table
from prope.stack.layers import head_dim, layer_kinds, layer_windows, layers, select_layers


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


def least_wavelength(head_dim: int, length: int) -> float:
    """Finds the least base, in steps of 0.1 %, for which sum_k cos(m f_k) >= 0 at all m < length.

    Source: 2405.14591.
    """
    distances = np.arange(length)

    def negative_distances(wavelength: float, distances: np.ndarray) -> np.ndarray:
        angles = distances[:, None] * frequencies(head_dim, wavelength)
        return distances[np.cos(angles).sum(axis=1) < 0]

    wavelength = float(length)
    negative = negative_distances(wavelength, distances)
    while negative.size:
        # Most steps fail at the distance where the one before did: it is tried alone first.
        while negative_distances(wavelength, negative[-1:]).size:
            wavelength *= 1.001
        negative = negative_distances(wavelength, distances)
    return wavelength


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

    def pair_of_turns(turns: float) -> float:
        wavelengths = math.log(length / (2 * math.pi * turns))
        return head_dim * wavelengths / (2 * math.log(max_wavelength))

    first = max(math.floor(pair_of_turns(beta_fast)), 0)
    last = min(math.ceil(pair_of_turns(beta_slow)), head_dim - 1)
    pairs = np.arange(len(freqs))
    slowed = np.clip((pairs - first) / (last - first or 1e-3), 0, 1)
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
    *CHOICES,
    *(name for kinds in CHOICES.values() for fields in kinds.values() for name in fields),
}


def can_rescale(rope_type: str, scaling: str | None) -> bool:
    """Tells whether a scaling, some of which need a wavelength, applies to a rope_type."""
    _, fields = TYPES[rope_type]
    return scaling not in ("ntk", "dynamic", "yarn") or "max_wavelength" in fields


def layer_percentages(model) -> list[float]:
    """Returns rope_percentage of every layer, [L]; `config.model` holds one number, or a tuple."""
    p = model.rope_percentage
    percentages = [p] * model.num_layers if isinstance(p, int | float) else list(p)
    if model.local_rope_percentage is None:
        return percentages
    return [
        p if window is None else model.local_rope_percentage
        for p, window in zip(percentages, layer_windows(model), strict=True)
    ]


def layer_wavelengths(model) -> list[float]:
    """Returns max_wavelength of every layer, [L], before any scaling."""
    local = model.local_max_wavelength or model.max_wavelength
    return [model.max_wavelength if window is None else local for window in layer_windows(model)]


def layer_frequencies(model, seq_len: int | None = None) -> list[np.ndarray]:
    """Returns the frequencies of every layer of a run's `config.model`, float64 [L][P].

    Args:
      model: the config.
      seq_len: evaluated length, for the scaling "dynamic"; original_seq_len by default.

    Raises:
      ValueError: a field does not fit the type; the text names it.
    """
    is_local = [window is not None for window in layer_windows(model)]
    compute = functools.cache(functools.partial(_frequencies, model, seq_len))
    layers = zip(layer_percentages(model), layer_wavelengths(model), is_local, strict=True)
    by_layer = [compute(*layer) for layer in layers]
    divisors = {"stop": math.inf, "interpolate": model.rope_scaling_factor}
    if model.rope_scaling_type not in divisors:
        return by_layer
    slower = divisors[model.rope_scaling_type]
    both = zip(by_layer, in_band(model), strict=True)
    return [np.where(is_scaled, freqs / slower, freqs) for freqs, is_scaled in both]


class Tables(NamedTuple):
    """Tables of rotation: layers of one kind and encoding share one."""

    by_kind: dict[str, jax.Array]  # [2, B, T, P] where a kind has one encoding, or [n, 2, B, T, P]
    indices: np.ndarray | None  # [L], a layer's encoding of those of its kind; None: all have one

    def choose(self, kind: str, index) -> jax.Array:
        """Returns the table of a layer of this kind with `index`, its element of `indices`."""
        table = self.by_kind[kind]
        return table if table.ndim == 4 else table[index]


def rotation_tables(model, positions: jax.Array, seq_len: int) -> Tables:
    """Makes the tables of all layers for positions [B, T] in sequences of seq_len tokens.

    With the scaling "remove", cos and sin of the band are 0, so that its pairs add nothing.
    """
    freqs_by_layer = layer_frequencies(model, seq_len)
    removed_by_layer = [np.zeros(len(freqs), bool) for freqs in freqs_by_layer]
    if model.rope_scaling_type == "remove":
        removed_by_layer = in_band(model)
    by_kind = {kind: [] for kind in layer_kinds(model)}
    indices = []
    for kind, *arrays in zip(layer_kinds(model), freqs_by_layer, removed_by_layer, strict=True):
        encoding = tuple(map(tuple, arrays))
        if encoding not in by_kind[kind]:
            by_kind[kind].append(encoding)
        indices.append(by_kind[kind].index(encoding))

    def make_table(freqs, removed):
        table = phase_table(positions, phase_per_token(freqs))
        if not any(removed):
            return table
        is_removed = np.array(removed)[None, None, None]
        return jnp.where(is_removed, 0.0, table)

    tables = {}
    for kind, of_kind in by_kind.items():
        made = [make_table(*encoding) for encoding in of_kind]
        tables[kind] = jnp.stack(made) if len(made) > 1 else made[0]
    return Tables(tables, np.array(indices) if any(indices) else None)


def _frequencies(
    model, seq_len: int | None, p: float, wavelength: float, is_local: bool
) -> np.ndarray:
    """Returns the frequencies of a layer with this p and wavelength, with or without a window."""
    scaling = "none" if is_local else model.rope_scaling_type
    scaled_by = [model[name] for name in SCALINGS[scaling]]
    H = head_dim(model, is_local)
    # The denominator of the exponent.
    lanes = int(p * H) if model.rope_type == "partial" else H
    if scaling == "ntk":
        wavelength = ntk_wavelength(lanes, wavelength, *scaled_by)
    elif scaling == "dynamic":
        evaluated = seq_len or model.original_seq_len
        wavelength = dynamic_wavelength(lanes, wavelength, *scaled_by, evaluated)
    function, fields = TYPES[model.rope_type]
    values = model.to_dict() | {"max_wavelength": wavelength, "rope_percentage": p}
    freqs = function(H, *(values[name] for name in fields))
    if scaling == "linear":
        return freqs / model.rope_scaling_factor
    if scaling == "yarn":
        return yarn_frequencies(freqs, lanes, wavelength, *scaled_by)
    if scaling == "llama3":
        return llama3_frequencies(freqs, *scaled_by)
    return freqs


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
    numbers = select_layers(model, place if "@" in text else None)
    if len(numbers) == model.num_layers:
        place = ""
    all_layers = layers(model)
    num_pairs = max(all_layers[number].head_dim for number in numbers) // 2
    interval = re.fullmatch(r"(\d+)(?:-(\d+))?", pairs)
    first = int(interval[1]) if interval else 0
    last = int(interval[2] or first) if interval else -1
    if not first <= last < num_pairs:
        raise ValueError(f"{text!r} is not a band of pairs 0 to {num_pairs - 1}")
    return Band(first, last, place or None, numbers, num_pairs)


def in_band(model) -> list[np.ndarray]:
    """Tells of every pair of every layer whether `scaled_pairs` has it, bool [L][P].

    Raises ValueError where these are no bands of the model.
    """
    masks = [np.zeros(layer.head_dim // 2, bool) for layer in layers(model)]
    bands = tuple(model.scaled_pairs)
    if not bands or not isinstance(bands[0], str):
        missing = ("",) * (2 - len(bands))
        bands = ["-".join(map(str, bands + missing))]
    for text in map(str, bands):
        band = parse_band(model, text)
        for number in band.layers:
            masks[number][band.first : band.last + 1] = True
    return masks


def rotated_pairs(model) -> int | list[int]:
    """Returns how many pairs every layer rotates, [L]; one number where all have one encoding."""
    pairs = [int(np.count_nonzero(freqs)) for freqs in layer_frequencies(model)]
    one_p = isinstance(model.rope_percentage, int | float)
    one_encoding = one_p and not model.layer_types and len(set(pairs)) == 1
    return pairs[0] if one_encoding else pairs


def rotated_share(model) -> str:
    """Says how many pairs rotate: "24 of 32"; "8 or 32 of 32" where layers differ."""
    counts = {}
    for freqs in layer_frequencies(model):
        counts.setdefault(len(freqs), set()).add(int(np.count_nonzero(freqs)))
    parts = [f"{' or '.join(map(str, sorted(counts[P])))} of {P}" for P in sorted(counts)]
    return " and ".join(parts)


def describe(model) -> str:
    """Returns what rotates, for a log: "p-RoPE rotates 24 of 32 pairs"."""
    name = "p-RoPE" if model.rope_type == "proportional" else model.rope_type
    text = f"{name} rotates {rotated_share(model)} pairs"
    if model.rope_scaling_type == "none":
        return text
    return f"{text} (scaled by {model.rope_scaling_type})"


def logit_factor(model) -> float | None:
    """Returns s of the logit scale, by default rope_scaling_factor; None without a logit scale."""
    if model.logit_scale == "none":
        return None
    factor = model.logit_scale_factor
    return model.rope_scaling_factor if factor is None else factor


def logit_scale(model, is_local: bool = False, rotates=True):
    """Returns the factor on logits of a layer, with or without a window, by s = `logit_factor`.

    yarn: (0.1 ln s + 1)^2, whose root multiplies cos and sin in 2309.00071; drope: 1 + c ln s
    (2512.12167); layers with a window have neither. Where some of the others rotate, those that do
    not have no yarn's, as in SmolLM3: `rotates` tells which a layer is.
    """
    log = math.log(logit_factor(model) or 1.0)
    if model.logit_scale == "yarn" and not is_local:
        scale = (0.1 * log + 1) ** 2
        return 1 + (scale - 1) * rotates if _rotates_in_part(model) else scale
    if model.logit_scale == "drope" and not is_local:
        return 1 + model.logit_scale_coefficient * log
    return 1.0


def _rotates_in_part(model) -> bool:
    """Tells whether some layers without a window rotate, and others do not."""
    layers = zip(layer_frequencies(model), layer_windows(model), strict=True)
    return len({bool(freqs.any()) for freqs, window in layers if window is None}) > 1
