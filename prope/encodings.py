"""Frequencies of the encodings that p-RoPE is compared with, and the choice by a run's `config.model`.

A function returns the radians per token of every pair, float64 [P], fastest first, 0 for pairs that do not rotate;
`prope.rope` rotates by any of them. P = head_dim / 2; `length` is that of training, in tokens.

A cutoff and a hard clip are p-RoPE with another rule for p; the others are not.
"""

import math

import numpy as np

from prope.rope import frequencies, num_rotated_pairs


def partial_frequencies(head_dim: int, max_wavelength: float, rope_percentage: float) -> np.ndarray:
    """RoPE of the first int(p d) lanes alone, whose number is the denominator: GPT-J, GPT-NeoX, Phi, Qwen3-Next."""
    num_rotated_pairs(head_dim, rope_percentage)  # checks both
    lanes = int(rope_percentage * head_dim)
    if lanes % 2:
        odd = f"partial rotates {lanes} of {head_dim} lanes; must be even"
        raise ValueError(f"rope_percentage={rope_percentage}: {odd}")
    return np.pad(
        frequencies(lanes, max_wavelength) if lanes else np.empty(0), (0, (head_dim - lanes) // 2)
    )


def reversed_frequencies(
    head_dim: int, max_wavelength: float, rope_percentage: float
) -> np.ndarray:
    """As many pairs as p-RoPE rotates, but the slowest (Barbero et al., Table 2: 0.75-reversed)."""
    dropped = head_dim // 2 - num_rotated_pairs(head_dim, rope_percentage)
    return np.where(np.arange(head_dim // 2) < dropped, 0.0, frequencies(head_dim, max_wavelength))


def cutoff_frequencies(
    head_dim: int, max_wavelength: float, length: int, cutoff: float = 1.0
) -> np.ndarray:
    """RoPE of the pairs whose period is at most cutoff * length (FoPE, 2412.17739; HoPE, 2410.21216)."""
    freqs = frequencies(head_dim, max_wavelength)
    if not cutoff * length >= 2 * math.pi:
        raise ValueError(
            f"rope_cutoff={cutoff}: with original_seq_len={length} no pair rotates; for that, p is 0"
        )
    return np.where(2 * math.pi <= cutoff * length * freqs, freqs, 0.0)


def hard_clip_frequencies(head_dim: int, max_wavelength: float, clip_low_n: int) -> np.ndarray:
    """RoPE without its slowest n pairs (CoPE's HardClip, 2602.05258)."""
    freqs = frequencies(head_dim, max_wavelength)
    return np.where(np.arange(len(freqs)) < len(freqs) - clip_low_n, freqs, 0.0)


def clipped_frequencies(head_dim: int, max_wavelength: float, clip_low_n: int) -> np.ndarray:
    """RoPE whose slowest n pairs are slowed by a cosine of the index, down to 0 (CoPE, 2602.05258, by its code)."""
    freqs = frequencies(head_dim, max_wavelength)
    if clip_low_n == 1:
        raise ValueError(
            "clip_low_n=1: the taper needs two pairs or more; rope_type hard_clip drops one"
        )
    n = min(clip_low_n, len(freqs))
    taper = (1 + np.cos(np.pi * np.arange(n) / max(n - 1, 1))) / 2
    return freqs * np.pad(taper, (len(freqs) - n, 0), constant_values=1.0)


def rope_id_frequencies(head_dim: int, length: int) -> np.ndarray:
    """Half of the pairs, from a turn in 32 tokens to two in `length` (RoPE-ID, 2603.18017), geometrically."""
    rotated, rest = divmod(head_dim // 2, 2)
    if rotated < 2 or rest or length <= 64:
        needs = "rope_id needs > 64 and a multiple of 4, >= 8"
        raise ValueError(f"original_seq_len={length}, head_dim={head_dim}: {needs}")
    return np.pad(
        2 * math.pi / 32 * (64 / length) ** (np.arange(rotated) / (rotated - 1)), (0, rotated)
    )


def least_wavelength(head_dim: int, length: int) -> float:
    """The least base, in steps of 0.1 %, with sum_k cos(m f_k) >= 0 at every distance m < length (2405.14591)."""
    wavelength, distances = float(length), np.arange(length)

    def sums(at: np.ndarray) -> np.ndarray:
        return np.cos(at[:, None] * frequencies(head_dim, wavelength)).sum(axis=1)

    while (negative := distances[sums(distances) < 0]).size:
        while (
            sums(negative[-1:]).min() < 0
        ):  # most steps fail at the distance where the one before did
            wavelength *= 1.001
    return wavelength


def ntk_wavelength(head_dim: int, max_wavelength: float, factor: float) -> float:
    """The base at which the slowest pair is `factor` times slower and the fastest is as before (2309.00071, def. 1)."""
    if head_dim == 2:
        raise ValueError(
            "rope_scaling_type=ntk: one pair alone has no slower ones; rotate two or more"
        )
    return max_wavelength * factor ** (head_dim / (head_dim - 2))


def dynamic_wavelength(
    head_dim: int, max_wavelength: float, factor: float, length: int, seq_len: int
) -> float:
    """`ntk_wavelength` by the evaluated length; factor 1 is the paper's (2309.00071, section 3.3; transformers)."""
    return ntk_wavelength(
        head_dim, max_wavelength, factor * max(seq_len, length) / length - (factor - 1)
    )


def yarn_frequencies(
    freqs: np.ndarray,
    head_dim: int,
    max_wavelength: float,
    factor: float,
    length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> np.ndarray:
    """YaRN by index, as its code and transformers have it: from beta_fast to beta_slow turns a ramp from f to f / s."""

    def pair(turns):
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(max_wavelength))

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), head_dim - 1)
    slowed = np.clip((np.arange(len(freqs)) - low) / (high - low or 1e-3), 0, 1)
    return freqs + (freqs / factor - freqs) * slowed


def llama3_frequencies(
    freqs: np.ndarray,
    factor: float,
    length: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> np.ndarray:
    """Llama 3: a ramp over the turns in `length`, from f / s at low_freq_factor to f at high (llama-models)."""
    turns = length * freqs / (2 * math.pi)
    kept = np.clip((turns - low_freq_factor) / max(high_freq_factor - low_freq_factor, 1e-9), 0, 1)
    return freqs / factor + (freqs - freqs / factor) * kept


# Of each rope_type: its function, and the fields of config.model that this takes after head_dim.
TYPES = {
    "proportional": (frequencies, ("max_wavelength", "rope_percentage")),
    "partial": (partial_frequencies, ("max_wavelength", "rope_percentage")),
    "reversed": (reversed_frequencies, ("max_wavelength", "rope_percentage")),
    "cutoff": (cutoff_frequencies, ("max_wavelength", "original_seq_len", "rope_cutoff")),
    "hard_clip": (hard_clip_frequencies, ("max_wavelength", "clip_low_n")),
    "cope": (clipped_frequencies, ("max_wavelength", "clip_low_n")),
    "rope_id": (rope_id_frequencies, ("original_seq_len",)),
}
# Of each rope_scaling_type and logit_scale: the fields of config.model that it takes.
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
LOGIT_SCALES = {
    "none": (),
    "yarn": ("rope_scaling_factor",),
    "drope": ("rope_scaling_factor", "logit_scale_coefficient"),
}
INTERVENTIONS = (
    "stop",
    "remove",
    "interpolate",
)  # scalings of a band of pairs, whose part they show
LAYER_TYPES = ("sliding_attention", "full_attention")
# All fields of the encoding in config.model.
FIELDS = {
    "rope_type",
    "rope_scaling_type",
    "logit_scale",
    "layer_types",
    "sliding_window",
    "local_max_wavelength",
    "local_rope_percentage",
    *(name for _, names in TYPES.values() for name in names),
    *(name for names in (SCALINGS | LOGIT_SCALES).values() for name in names),
}


def can_rescale(rope_type: str, scaling: str | None) -> bool:
    """Tells whether a scaling, some of which change the wavelength or go by it, applies to a rope_type."""
    return scaling not in ("ntk", "dynamic", "yarn") or "max_wavelength" in TYPES[rope_type][1]


def layer_windows(model) -> list[int | None]:
    """Returns of every layer how many keys a query sees, its own included, [L]; None: all before it."""
    pattern = tuple(model.layer_types) or ("full_attention",)
    kinds = pattern * (model.num_layers // len(pattern))
    return [model.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def layer_percentages(model) -> list[float]:
    """Returns rope_percentage of every layer, [L]; `config.model` holds one number, or one per layer."""
    p, local, windows = model.rope_percentage, model.local_rope_percentage, layer_windows(model)
    percentages = [p] * model.num_layers if isinstance(p, int | float) else p
    return [
        p if local is None or window is None else local
        for p, window in zip(percentages, windows, strict=True)
    ]


def layer_frequencies(model, seq_len: int | None = None) -> np.ndarray:
    """Returns the frequencies of every layer of a run's `config.model`, float64 [L, P].

    Args:
      model: the config.
      seq_len: evaluated length, on which the scaling "dynamic" depends; that of training by default.

    Raises:
      ValueError: a field does not fit the type; the text names it.
    """
    layers = list(
        zip(layer_percentages(model), [w is not None for w in layer_windows(model)], strict=True)
    )
    of_layer = {layer: _frequencies(model, *layer, seq_len) for layer in set(layers)}
    return np.stack([of_layer[layer] for layer in layers])


def _frequencies(model, p: float, local: bool, seq_len: int | None) -> np.ndarray:
    wavelength, factor, length = (
        model.max_wavelength,
        model.rope_scaling_factor,
        model.original_seq_len,
    )
    scaling = "none" if local else model.rope_scaling_type
    if local and model.local_max_wavelength is not None:
        wavelength = model.local_max_wavelength
    lanes = (
        int(p * model.head_dim) if model.rope_type == "partial" else model.head_dim
    )  # of the exponent
    if scaling == "ntk":
        wavelength = ntk_wavelength(lanes, wavelength, factor)
    elif scaling == "dynamic":
        wavelength = dynamic_wavelength(lanes, wavelength, factor, length, seq_len or length)
    function, fields = TYPES[model.rope_type]
    values = {"max_wavelength": wavelength, "rope_percentage": p}
    freqs = function(model.head_dim, *(values.get(name, model[name]) for name in fields))
    if scaling == "linear":
        return freqs / factor
    if scaling == "yarn":
        return yarn_frequencies(
            freqs, lanes, wavelength, factor, length, model.beta_fast, model.beta_slow
        )
    if scaling == "llama3":
        return llama3_frequencies(
            freqs, factor, length, model.low_freq_factor, model.high_freq_factor
        )
    divisor = {"stop": math.inf, "interpolate": factor}.get(scaling, 1.0)
    return np.where(in_band(model), freqs / divisor, freqs)


def in_band(model) -> np.ndarray:
    """Tells of every pair whether it is one of `scaled_pairs`, (first, last), [P]; none by default."""
    first, last = model.scaled_pairs or (0, -1)
    pairs = np.arange(model.head_dim // 2)
    return (first <= pairs) & (pairs <= last)


def rotated_pairs_by_layer(model) -> list[int]:
    """Returns how many pairs every layer rotates, [L]."""
    return [int(np.count_nonzero(freqs)) for freqs in layer_frequencies(model)]


def rotated_pairs(model) -> int | list[int]:
    """Returns `rotated_pairs_by_layer` as commands print it: one number, where the config has one for all layers."""
    pairs = rotated_pairs_by_layer(model)
    return (
        pairs[0]
        if isinstance(model.rope_percentage, int | float) and not model.layer_types
        else pairs
    )


def describe(model) -> str:
    """Returns what rotates, for a log: "p-RoPE rotates 24 of 32 pairs"; a cutoff and a hard clip are p-RoPE, too."""
    name = {
        "proportional": "p-RoPE",
        "cutoff": "p-RoPE by cutoff",
        "hard_clip": "p-RoPE by hard_clip",
    }
    scaled = f" (scaled by {model.rope_scaling_type})" if model.rope_scaling_type != "none" else ""
    pairs = f"{rotated_pairs(model)} of {model.head_dim // 2} pairs"
    return f"{name.get(model.rope_type, model.rope_type)} rotates {pairs}{scaled}"


def logit_scale(model) -> float | np.ndarray:
    """Returns the factor on the logits of layers without a window, by the scaling factor s = rope_scaling_factor.

    yarn: (0.1 ln s + 1)^2, whose root multiplies cos and sin in 2309.00071; drope: 1 + c ln s (2512.12167). With the
    scaling "remove" it is that of every lane of the queries, [1, 1, 1, H]: 0 where the pair adds nothing.
    """
    log = math.log(model.rope_scaling_factor)
    scale = {"yarn": (0.1 * log + 1) ** 2, "drope": 1 + (model.logit_scale_coefficient or 0) * log}
    scale = scale.get(model.logit_scale, 1.0)
    return (
        np.where(np.tile(in_band(model), (1, 1, 1, 2)), 0.0, scale)
        if model.rope_scaling_type == "remove"
        else scale
    )
