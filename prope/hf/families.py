"""The families of models in transformers: what their classes compute, for import and for export.

A row of the table is read both ways. Its defaults are the fields of config.json that the class
reads, each with the value that it takes where a file has none.
"""

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from prope.encodings import FIELDS
from prope.errors import UsageError, usage_error
from prope.spec.model import FULL, LAYER_TYPES, SLIDING, ModelSpec, repeat_pattern

# By field of config.json: that of config.model, or of config.data for the last.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "seq_len",
}
# By config.model.activation.
ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "silu": "silu"}
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation")
# Switches of config.model that are part of a class; it has fields for the others.
_FLAGS = (
    "scale_embedding",
    "post_norms",
    "qkv_bias",
    "use_qk_norm",
    "use_value_norm",
    "use_skip_scale",
)
_CAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "final_softcap"}
# What layers of Gemma 4 differ in, by field of config.json.
_SHAPES = {
    "global_head_dim": "global_head_dim",
    "num_global_key_value_heads": "num_global_kv_heads",
    "attention_k_eq_v": "global_key_is_value",
    "num_kv_shared_layers": "num_kv_shared_layers",
    "use_double_wide_mlp": "use_double_wide_mlp",
    "hidden_size_per_layer_input": "per_layer_input_dim",
}
# By field of config.json: that of config.model for full layers.
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_kv_heads"}
# All fields of config.model that an export writes, and those that change nothing there.
MODEL_FIELDS = {
    *("activation", "norm_epsilon", "tied", "attention_scale", "test_window", "test_sinks"),
    *("dtype", "attention", "global_attention", "scan_layers", "remat"),
    *(*SIZES.values(), *_FLAGS, *_CAPS.values(), *_SHAPES.values(), *FIELDS),
}
_LOOKS_AHEAD = "use_bidirectional_attention"
_SCALAR = "query_pre_attn_scalar"  # = attention_scale ** -2
# Fields of configs that change what a class computes, unless they are null, false or 0.
_MUST_BE_UNSET = re.compile(
    "attention_bias|mlp_bias|quantization_config|bidirectional|softcapping|multiplier|experts"
    "|logits_scaling|interleaved|per_layer|kv_shared|k_eq_v|mrope|moe|mup|clip_qkv|chunk_size"
)


class Family(NamedTuple):
    """A row: a class of transformers for causal language models."""

    hf_class: str
    defaults: dict[str, Any]
    flags: tuple[str, ...] = ()  # which of _FLAGS are True
    activation: str = "silu"  # where a file names none
    activation_field: str = "hidden_act"  # the one that the class reads, of the two
    adds_one: bool = False  # norms multiply by 1 + w, as prope's do; otherwise by w
    names: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # by parameter: other tensors
    divides: bool = False  # the class demands that its heads divide hidden_size
    # Of so many layers, the last is full and the others slide, whatever the window. A file's
    # sliding_window_pattern, where the class reads it, goes first.
    full_every: int | None = None
    last_is_full: bool = False  # whatever layer_types has
    attention_scale: float | None = None  # None: of query_pre_attn_scalar or head_dim

    def reads(self, field: str) -> bool:
        """Returns whether the class reads a field of config.json."""
        return field in self.defaults

    @property
    def rotates_by_kind(self) -> bool:
        """Returns whether sliding layers have a rotation of their own."""
        return self.reads("rope_local_base_freq") or self.reads("rope_parameters")


def _defaults(*sizes: int | None, **fields) -> dict[str, Any]:
    """Returns a row's defaults: sizes in the order of SIZES, and fields beside the common ones."""
    common = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    if "rope_parameters" not in fields:
        common["rope_theta"] = 1e4
    return dict(zip(SIZES, sizes, strict=True)) | common | fields


_WINDOWS = {"layer_types": None, "sliding_window": 4096}
_LATER_GEMMA = {
    "activation": "gelu",
    "activation_field": "hidden_activation",
    "adds_one": True,
    "names": {"layers/pre_ffw_norm/scale": ("pre_feedforward_layernorm",)},
    "divides": True,
}
_GEMMA_4 = Family(
    "Gemma4ForCausalLM",
    _defaults(
        *(262144, 2304, 9216, 30, 8, 4, 256, 131072),
        layer_types=None,
        sliding_window=512,
        tie_word_embeddings=True,
        final_logit_softcapping=None,
        rope_parameters={
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        global_head_dim=512,
        num_global_key_value_heads=None,
        per_layer_config=None,  # instead of these two, in files of later versions
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        use_bidirectional_attention=None,
    ),
    ("scale_embedding", "post_norms", "use_qk_norm", "use_value_norm", "use_skip_scale"),
    **_LATER_GEMMA | {"adds_one": False, "divides": False},
    full_every=6,
    last_is_full=True,
    attention_scale=1.0,
)
_GEMMA_4_UNIFIED = {
    name: value for name, value in _GEMMA_4.defaults.items() if not name.endswith("per_layer_input")
}
_GEMMA_4_UNIFIED |= {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    _LOOKS_AHEAD: "vision",
}
_QWEN = _WINDOWS | {"use_sliding_window": False, "max_window_layers": 28}
# By model_type, in the order in which export tries them. None for K is N, and for H is D / N.
FAMILIES = {
    "gemma": Family(
        "GemmaForCausalLM",
        _defaults(256000, 3072, 24576, 28, 16, 16, 256, 8192, tie_word_embeddings=True),
        ("scale_embedding",),
        activation="gelu",
        adds_one=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _defaults(
            *(256000, 2304, 9216, 26, 8, 4, 256, 8192),
            **_WINDOWS,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        ("scale_embedding", "post_norms"),
        **_LATER_GEMMA,
        full_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _defaults(
            *(262208, 2304, 9216, 26, 8, 4, 256, 131072),
            **_WINDOWS,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256,
            final_logit_softcapping=None,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
        ),
        ("scale_embedding", "post_norms", "use_qk_norm"),
        **_LATER_GEMMA,
        full_every=6,
    ),
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4._replace(
        hf_class="Gemma4UnifiedForCausalLM", defaults=_GEMMA_4_UNIFIED
    ),
    "llama": Family(
        "LlamaForCausalLM", _defaults(32000, 4096, 11008, 32, 32, None, None, 2048), divides=True
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _defaults(151936, 4096, 22016, 32, 32, 32, None, 32768, **_QWEN),
        ("qkv_bias",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _defaults(151936, 4096, 22016, 32, 32, 32, 128, 32768, **_QWEN),
        ("use_qk_norm",),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _defaults(32000, 4096, 14336, 32, 32, 8, None, 131072, sliding_window=4096),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _defaults(
            *(128256, 2048, 11008, 36, 16, 4, None, 32768),
            tie_word_embeddings=True,
            rope_theta=2e6,
            layer_types=None,
            sliding_window=None,
            use_sliding_window=False,
            no_rope_layers=None,
            no_rope_layer_interval=4,
        ),
    ),
}


# --- config.json to config.model ----------------------------------------------------------------


def fill(family: Family, values: dict) -> tuple[dict, list[str]]:
    """Returns (fields, problems): a file's fields with the class's defaults, and its bad sizes."""
    filled = family.defaults | values
    problems = []
    for name in SIZES:
        value = filled[name]
        if value is None and name == "num_key_value_heads":
            value = filled["num_attention_heads"]
        if value is None and name == "head_dim":
            value = filled["hidden_size"] // filled["num_attention_heads"]
        if type(value) is not int or value < 1:
            problems.append(f"{name}={json.dumps(value)}: must be a positive integer")
            value = 1
        filled[name] = value
    return filled, problems


def changed_fields(family: Family, values: dict) -> list[str]:
    """Describes the fields with which another model than the family's is computed."""
    return [
        f"{name}={json.dumps(value)}: only null or false"
        for name, value in values.items()
        if value and not family.reads(name) and _MUST_BE_UNSET.search(name)
    ]


def read_switches(family: Family, values: dict) -> dict:
    """Returns the switches of config.model for the fields of a file, filled.

    Raises UsageError for a value that is no positive number, or an activation that is not known.
    """
    # The shortest number that is the same in float32, as GGUF files hold it: 1e-6 for 9.99..e-7.
    epsilon = str(np.float32(positive(values, "rms_norm_eps")))
    switches = {flag: flag in family.flags for flag in _FLAGS}
    switches |= {
        "activation": _read_activation(family, values),
        "norm_epsilon": float(epsilon),
        "tied": _boolean(values, "tie_word_embeddings"),
        "attention_scale": family.attention_scale,
    }
    for theirs, ours in _CAPS.items():
        if family.reads(theirs) and values[theirs] is not None:
            switches[ours] = float(positive(values, theirs))
    if family.reads(_SCALAR) and values[_SCALAR] != values["head_dim"]:
        switches["attention_scale"] = positive(values, _SCALAR) ** -0.5
    return switches


def wrong(values: dict, name: str, problem: str) -> UsageError:
    """Returns the error for the value of a field of config.json."""
    return usage_error(name, json.dumps(values[name]), problem)


def _boolean(values: dict, name: str) -> bool:
    if type(values[name]) is not bool:
        raise wrong(values, name, "only true or false")
    return values[name]


def _integer(values: dict, name: str, least: int) -> int:
    value = values[name]
    if type(value) is not int or value < least:
        raise wrong(values, name, f"must be an integer of at least {least}")
    return value


def positive(values: dict, name: str) -> int | float:
    """Returns a field's value; raises UsageError where it is no positive number."""
    value = values[name]
    if type(value) not in (int, float) or not value > 0:
        raise wrong(values, name, "must be a positive number")
    return value


def _read_activation(family: Family, values: dict) -> str:
    fields = {name: values[name] for name in _ACTIVATION_FIELDS if values.get(name) is not None}
    if family.adds_one and fields.get("hidden_act") == "gelu":
        fields["hidden_act"] = ACTIVATIONS["gelu"]  # as transformers reads the releases
    read = family.activation_field
    used = {read: ACTIVATIONS[family.activation]} | fields
    for ours, theirs in ACTIVATIONS.items():
        if all(name == theirs for name in used.values()):
            return ours
    problem = f"only {' or '.join(ACTIVATIONS.values())}, the same in all fields"
    problem += f"; {family.hf_class} reads {read}={json.dumps(used[read])}"
    raise usage_error(" and ".join(fields), json.dumps(list(fields.values())), problem)


def read_layers(family: Family, values: dict) -> dict:
    """Returns layer_types and sliding_window of config.model; none where no layer has a window.

    Raises UsageError for a kind of layer that is not known, or a window that is no length.
    """
    kinds = read_kinds(family, values)
    if SLIDING not in kinds:
        return {}
    window = _integer(values, "sliding_window", 1)
    # Qwen's classes have no window then, and stop. SmolLM3's mask has the kinds of layer_types.
    if family.reads("max_window_layers") and not values["use_sliding_window"]:
        raise wrong(values, "use_sliding_window", "must be true: some layers are sliding_attention")
    patterns = (kinds[: number + 1] for number in range(len(kinds)))
    pattern = next(one for one in patterns if repeat_pattern(one, len(kinds)) == kinds)
    return {"layer_types": tuple(pattern), "sliding_window": window}


def read_kinds(family: Family, values: dict) -> list[str]:
    """Returns sliding_attention or full_attention for every layer: layer_types, or by its rule."""
    kinds = _kinds_by_rule(family, values)
    written = values.get("layer_types")
    if written is None or written == kinds:
        return kinds
    if family.last_is_full and isinstance(written, list):
        written = written[:-1] + [FULL] * len(written[-1:])
    known = isinstance(written, list) and all(kind in LAYER_TYPES for kind in written)
    if not (family.reads("layer_types") and known and len(written) == len(kinds)):
        problem = f"must be {len(kinds)} of {' and '.join(LAYER_TYPES)}"
        if not family.reads("layer_types"):
            problem = f"{family.hf_class} has {kinds[0]} in all layers"
        raise wrong(values, "layer_types", problem)
    return written


def _kinds_by_rule(family: Family, values: dict) -> list[str]:
    numbers = range(values["num_hidden_layers"])
    window = values["sliding_window"] if family.reads("sliding_window") else None
    if family.reads("use_sliding_window") and not _boolean(values, "use_sliding_window"):
        window = None
    if family.full_every is not None:
        period = family.full_every
        if family.reads("sliding_window_pattern"):
            period = positive(values, "sliding_window_pattern")
        is_sliding = [(number + 1) % period > 0 for number in numbers]
        is_sliding[-1] &= not family.last_is_full
    elif family.reads("no_rope_layers"):
        is_sliding = [not rotated for rotated in rotated_layers(family, values)]
    else:
        name = "max_window_layers"
        first = _integer(values, name, 0) if family.reads(name) else 0
        is_sliding = [number >= first for number in numbers]
    has_windows = window is not None or family.full_every is not None
    return [SLIDING if has_windows and sliding else FULL for sliding in is_sliding]


def rotated_layers(family: Family, values: dict) -> list[bool]:
    """Returns for every layer whether it rotates at all: in SmolLM3, some do not."""
    layers = values["num_hidden_layers"]
    if not family.reads("no_rope_layers"):
        return [True] * layers
    interval = positive(values, "no_rope_layer_interval")
    written = values["no_rope_layers"]  # 1: rotated
    if written is None:
        return [(number + 1) % interval > 0 for number in range(layers)]
    is_known = isinstance(written, list) and all(number in (0, 1) for number in written)
    if not is_known or len(written) < layers:
        raise wrong(values, "no_rope_layers", f"must be {layers} of 0 and 1")
    return [bool(rotated) for rotated in written[:layers]]


def read_shapes(family: Family, values: dict) -> dict:
    """Returns the fields of config.model for what layers of Gemma 4 differ in.

    Raises UsageError for a value of another type, or attention that looks ahead.
    """
    if not family.reads("attention_k_eq_v"):
        return {}
    if values[_LOOKS_AHEAD] not in (None, False, "vision"):  # of images alone
        raise wrong(values, _LOOKS_AHEAD, 'only null, false or "vision"')
    fields = {
        "global_key_is_value": _boolean(values, "attention_k_eq_v"),
        "use_double_wide_mlp": _boolean(values, "use_double_wide_mlp"),
        "num_kv_shared_layers": _integer(values, "num_kv_shared_layers", 0),
    }
    if family.reads("hidden_size_per_layer_input"):
        fields["per_layer_input_dim"] = _integer(values, "hidden_size_per_layer_input", 0)
        rows = values["vocab_size_per_layer_input"]
        if fields["per_layer_input_dim"] and rows != values["vocab_size"]:
            problem = f"must be vocab_size={values['vocab_size']}"
            raise wrong(values, "vocab_size_per_layer_input", problem)
    for name, size in _sizes_of_full(family, values).items():
        if size != values[name]:
            fields[_OF_FULL[name]] = size
    return fields


def _sizes_of_full(family: Family, values: dict) -> dict[str, int]:
    """Returns head_dim and num_key_value_heads of full layers, as far as a file has them."""
    written = values["per_layer_config"]
    if written is None:
        sizes = {"head_dim": _integer(values, "global_head_dim", 1)}
        theirs = "num_global_key_value_heads"
        if values["attention_k_eq_v"] and values[theirs] is not None:
            sizes["num_key_value_heads"] = _integer(values, theirs, 1)
        return sizes
    kinds = read_kinds(family, values)
    full = [str(number) for number, kind in enumerate(kinds) if kind == FULL]
    sizes = written.get(full[0], {}) if isinstance(written, dict) else None
    is_known = isinstance(sizes, dict) and sizes.keys() <= _OF_FULL.keys()
    is_known = is_known and all(type(size) is int and size > 0 for size in sizes.values())
    if not is_known or written not in ({}, dict.fromkeys(full, sizes)):
        problem = f"must be the same {' and '.join(_OF_FULL)} for every {FULL} layer, and no other"
        raise wrong(values, "per_layer_config", problem)
    return sizes


# --- config.model to config.json ----------------------------------------------------------------


def write_fields(family: Family, model: ModelSpec, ropes: list[dict]) -> dict:
    """Returns the fields of config.json that not all classes have."""
    kinds = model.kinds
    rotated = rotating(ropes)
    rope_of_kind = dict(zip(kinds, ropes, strict=True))
    rope_of_kind.setdefault(FULL, ropes[0])  # transformers reads it in a run of windows alone, too
    fields = {
        _SCALAR: attention_scalar(model),
        **{theirs: getattr(model, ours) for theirs, ours in (_CAPS | _SHAPES).items()},
        "global_head_dim": model.global_head_dim or model.head_dim,
        "vocab_size_per_layer_input": model.vocab_size,
        "layer_types": kinds,
        "sliding_window": model.sliding_window,
        "use_sliding_window": SLIDING in kinds,
        "no_rope_layers": [int(rope in rotated) for rope in ropes],  # 0: no rotation
        "rope_local_base_freq": rope_of_kind.get(SLIDING, ropes[0])["rope_theta"],
    }
    fields = {name: value for name, value in fields.items() if family.reads(name)}
    if family.full_every is not None and SLIDING not in kinds:
        del fields["sliding_window"]  # Gemma 2 and 3 make the mask all the same
    fields["rope_parameters"] = rope_of_kind if family.rotates_by_kind else rotated[0]
    return fields


def choose_family(model: ModelSpec, ropes: list[dict]) -> str:
    """Returns the model_type of the first family whose class computes a run's `config.model`.

    Raises UsageError where there is none, with what the nearest computes instead.
    """
    needed = {name: _needed_fields(family, model, ropes) for name, family in FAMILIES.items()}
    nearest, computed = min(needed.items(), key=lambda item: len(item[1]))
    if not computed:
        return nearest
    fields = ", ".join(f"config.model.{name}={getattr(model, name)}" for name in computed)
    problem = "no class of transformers computes this with the other fields"
    others = ", ".join(f"{name}={value}" for name, value in computed.items())
    remedy = f"the nearest, {FAMILIES[nearest].hf_class}, computes {others}"
    raise UsageError(f"{fields}: {problem}; {remedy}")


def _needed_fields(family: Family, model: ModelSpec, ropes: list[dict]) -> dict[str, Any]:
    """Returns the fields of config.model that the family's class computes only of other values.

    Their values here are some that it computes.
    """
    kinds = model.kinds
    plain = ModelSpec()
    needed = {
        flag: flag in family.flags
        for flag in _FLAGS
        if getattr(model, flag) != (flag in family.flags)
    }
    for theirs, ours in (_CAPS | _SHAPES).items():
        if getattr(model, ours) and not family.reads(theirs):
            needed[ours] = getattr(plain, ours)
    if model.num_global_kv_heads and not model.global_key_is_value:
        needed["num_global_kv_heads"] = None  # Gemma 4 has it with keys that are values
    plain_scale = model.head_dim**-0.5
    computed = family.attention_scale or plain_scale
    if family.reads(_SCALAR):
        computed = attention_scalar(model) ** -0.5
    if not math.isclose(model.attention_scale or plain_scale, computed, rel_tol=1e-9):
        needed["attention_scale"] = family.attention_scale
    can_mix = family.reads("layer_types") or len(set(kinds)) == 1
    ends_full = kinds[-1] == FULL or not family.last_is_full
    if SLIDING in kinds and not (ends_full and family.reads("sliding_window") and can_mix):
        needed["layer_types"] = ()
    if not _has_ropes(family, kinds, ropes):
        name = _rope_field(model)
        needed[name] = "one number" if name == "rope_percentage" else getattr(plain, name)
    if family.divides and model.embed_dim % model.num_heads:
        needed["num_heads"] = "a divisor of embed_dim"
    return needed


def _has_ropes(family: Family, kinds: list[str], ropes: list[dict]) -> bool:
    """Returns whether the family's class can rotate every layer as told."""
    if family.rotates_by_kind:
        rope_of_kind = dict(zip(kinds, ropes, strict=True))
        return ropes == [rope_of_kind[kind] for kind in kinds]
    if family.reads("no_rope_layers"):
        ropes = rotating(ropes)
    return all(rope == ropes[0] for rope in ropes)


def _rope_field(model: ModelSpec) -> str:
    """Names the field that gives layers different rotations."""
    if isinstance(model.rope_percentage, tuple):
        return "rope_percentage"
    fields = ("local_max_wavelength", "local_rope_percentage", "rope_scaling_type", "logit_scale")
    return next(field for field in fields if getattr(model, field) not in (None, "none"))


def rotating(ropes: list[dict]) -> list[dict]:
    """Returns the rotations that are not NoPE; all where every one is."""
    return [rope for rope in ropes if rope.get("partial_rotary_factor") != 0] or ropes


def attention_scalar(model: ModelSpec) -> int:
    """Returns query_pre_attn_scalar, which transformers takes as an integer."""
    if model.attention_scale is None:
        return model.head_dim
    return max(1, round(model.attention_scale**-2))
