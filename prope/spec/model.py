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

from prope.errors import UsageError, nearest, shorten, usage_error
from prope.spec.fields import (
    ABOVE_1,
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    changeable,
    check_fields,
    one_of,
    rule,
    setting,
)
from prope.spec.kinds import ATTENTION_SUFFIX, LAYER_TYPES, SLIDING, parse_interval, repeat_pattern

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "minimal", "save_qkv", "full")
ACTIVATIONS = ("gelu", "silu")
ATTENTION = ("auto", "xla", "splash", "cudnn")

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
        "prope/encodings.py; or custom: rope_frequencies, or those that my_module:function returns "
        "for (head_dim, layer), which config.json then has",
    )
    rope_frequencies: tuple = setting(
        (),
        "for rope_type=custom: radians per token of the P pairs; or for each layer these, or those "
        "of each of its key heads",
    )
    rope_pairs: str = setting(
        "",
        "which of these pairs rotate, as in 0-15,20; by key head, with spaces between, and by "
        "layer, with semicolons; or a file of prope.choose, whose pairs config.json then has; "
        "empty: all",
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
    attention: str = changeable(
        "auto", "auto | xla | splash (TPU) | cudnn (NVIDIA)", one_of(*ATTENTION)
    )
    global_attention: str | None = changeable(
        None, "attention of layers without a window, if it is another", one_of(*ATTENTION)
    )
    scan_layers: bool | None = changeable(
        None,
        "compile one layer and loop, or unroll all; parameters and result are the same. None: "
        "unroll a training step on one GPU",
    )
    remat: str = changeable(
        "none",
        "what a layer saves for its backward pass, fastest first: none (everything) | minimal "
        "(wide matmuls and attention) | save_qkv (q, k, v and the output of attention) | full "
        "(only the layer's input)",
        one_of(*REMAT),
    )
    # No config has these: evaluation makes full layers see the last keys and the first ones only.
    test_window: int | None = None
    test_sinks: int = 0

    def __post_init__(self):
        check_fields(self, "config.model.")
        self._check_layers()
        self._check_encoding()

    @functools.cached_property
    def kinds(self) -> list[str]:
        """The kind of every layer, [L]."""
        return repeat_pattern(self.layer_types, self.num_layers)

    @property
    def layers(self):
        """All layers, [L]."""
        return self.layers_at(None)

    def layers_at(self, seq_len: int | None):
        """Returns the layers for sequences of this length; None: original_seq_len.

        It matters to the scaling `dynamic` only.
        """
        from prope.spec.layers import build_layers  # imports JAX, which --help does not wait for

        return build_layers(self, seq_len if self.rope_scaling_type == "dynamic" else None)

    @functools.cached_property
    def stacks(self) -> dict[str, list[int]]:
        """The numbers of the layers in every stack, by the stack's name."""
        by_name = {}
        for layer in self.layers:
            by_name.setdefault(layer.stack, []).append(layer.number)
        return by_name

    @property
    def first_sharing_layer(self) -> int:
        """The number of the first layer that shares keys and values; L where none does."""
        return self.num_layers - self.num_kv_shared_layers

    def select_layers(self, which: str | None) -> list[int]:
        """Returns the numbers of the layers that are named: full, sliding, 3 or 0-5; None: all.

        Raises ValueError, with the names that there are, where this names none.
        """
        numbers = range(self.num_layers)
        if which is None:
            return list(numbers)
        found = [number for number in numbers if self.kinds[number] == which + ATTENTION_SUFFIX]
        found = found or list(parse_interval(which, self.num_layers))
        if not found:
            kinds = [kind.removesuffix(ATTENTION_SUFFIX) for kind in dict.fromkeys(self.kinds)]
            known = f"0 to {numbers[-1]}, all {' and '.join(kinds)}"
            raise ValueError(f"there are no layers {which!r}, only {known}")
        return found

    @property
    def rotated_pairs(self) -> int | list[int]:
        """How many pairs every layer rotates, [L]; one number where all have one encoding.

        Where its heads differ, that of a layer is a list.
        """
        pairs = [layer.num_rotated for layer in self.layers]
        one_p = not isinstance(self.rope_percentage, tuple)
        one_encoding = one_p and not self.layer_types and pairs == pairs[:1] * len(pairs)
        return pairs[0] if one_encoding else pairs

    @property
    def rotated_share(self) -> str:
        """How many pairs rotate: "24 of 32"; where they differ "8 or 32 of 32", "3 to 19 of 32"."""
        counts = {}
        for layer in self.layers:
            rotated = (layer.frequencies > 0).sum(axis=1).tolist()
            counts.setdefault(layer.head_dim // 2, set()).update(rotated)
        parts = []
        for P, values in sorted(counts.items()):
            words = " or ".join(map(str, sorted(values)))
            text = words if len(values) < 3 else f"{min(values)} to {max(values)}"
            parts.append(f"{text} of {P}")
        return " and ".join(parts)

    def describe_rotation(self) -> str:
        """Returns what rotates, for a log: "p-RoPE rotates 24 of 32 pairs"."""
        name = "p-RoPE" if self.rope_type == "proportional" else self.rope_type
        name = "rope_pairs" if self.rope_pairs else name
        verb = "rotate" if self.rope_pairs else "rotates"
        text = f"{name} {verb} {self.rotated_share} pairs"
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
        value = shorten(getattr(self, field))
        raise usage_error(f"config.model.{field}", value, problem, remedy)

    def _check_layers(self) -> None:
        """Checks that key heads divide query heads, and fields of some layers have such layers."""
        L = self.num_layers
        if self.num_heads % self.num_kv_heads:
            problem = f"must be a multiple of model.num_kv_heads={self.num_kv_heads}"
            self._refuse("num_heads", problem)
        if self.num_global_kv_heads and self.num_heads % self.num_global_kv_heads:
            self._refuse("num_global_kv_heads", f"must divide model.num_heads={self.num_heads}")
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
        from prope import encodings
        from prope.spec import layers

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
            try:
                layers.check_bands(self)
            except ValueError as error:
                problem, _, remedy = str(error).partition("; ")
                self._refuse("scaled_pairs", problem, remedy)
        try:
            _ = self.layers
        except ValueError as error:  # which begins with the field, and perhaps its value
            name, _, problem = str(error).partition(": ")
            if name in encodings.FIELDS:
                self._refuse(name, problem)
            raise UsageError(f"config.model.{error}") from None

    def _check_fields_of_encoding(self, encodings) -> None:
        """Checks that the fields which rope_type and the like take have values, and no others."""
        required = {*encodings.CHOICES, "layer_types", "rope_pairs"}
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
        names = (*encodings.CHOICES, "layer_types")
        chosen = [f"{field}={getattr(self, field)}" for field in names]
        for name in sorted(encodings.FIELDS):
            value, default = getattr(self, name), getattr(ModelSpec, name)
            is_set = value is not None and value != default
            if name in required and value is None:
                self._refuse(name, "must have a value: its type needs it")
            if is_set and name not in allowed:
                takes = ", ".join(sorted(allowed))
                problem = f"has no effect with {', '.join(chosen)}, which take {takes}"
                self._refuse(name, problem, f"set it to {default}")
