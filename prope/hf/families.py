"""The families of models in transformers: a table that is read in both directions.

`FIELDS` has the fields of config.json that are one field of a `ModelSpec` each. A row of `FAMILIES`
has what a class of transformers reads of a file, with the value that an absent field takes, and the
fields of a `ModelSpec` that the class fixes. `read_fields` imports by them, `write_fields` exports;
a class computes a model that is read again from what is written of it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from prope import encodings
from prope.errors import UsageError, shorten, usage_error
from prope.spec.kinds import FULL, LAYER_TYPES, SLIDING, repeat_pattern
from prope.spec.model import ModelSpec

# --- Values of config.json ------------------------------------------------------------------------

# Takes a value; returns it as a `ModelSpec` has it, or raises ValueError with what is allowed.
Rule = Callable[[Any], Any]


def read_value(values: dict, name: str, rule: Rule) -> Any:
    """Reads a field by a rule; raises UsageError, which names it, where the rule does not hold."""
    try:
        return rule(values[name])
    except ValueError as error:
        raise wrong(values, name, str(error)) from None


def wrong(values: dict, name: str, problem: str) -> UsageError:
    """Makes the error for the value of a field."""
    return usage_error(name, json.dumps(values[name]), problem)


def boolean(value) -> bool:
    """Checks a switch."""
    if type(value) is not bool:
        raise ValueError("only true or false")
    return value


def positive(value) -> float:
    """Checks a positive number."""
    if type(value) not in (int, float) or not value > 0:
        raise ValueError("must be a positive number")
    return float(value)


def at_least(least: int) -> Rule:
    """Makes the rule of an integer from `least` on."""

    def integer(value):
        if type(value) is not int or value < least:
            raise ValueError(f"must be an integer of at least {least}")
        return value

    return integer


def _or_null(rule: Rule) -> Rule:
    return lambda value: None if value is None else rule(value)


def _epsilon(value) -> float:
    # The shortest number that is the same in float32, as GGUF files hold it: 1e-6 for 9.99..e-7.
    return float(str(np.float32(positive(value))))


# --- The table ------------------------------------------------------------------------------------

_SIZE = at_least(1)
# By field of config.json: that of a ModelSpec.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
# And the rule of its value.
FIELDS = {name: (ours, _SIZE) for name, ours in SIZES.items()} | {
    "rms_norm_eps": ("norm_epsilon", _epsilon),
    "tie_word_embeddings": ("tied", boolean),
    "attn_logit_softcapping": ("attention_softcap", _or_null(positive)),
    "final_logit_softcapping": ("final_softcap", _or_null(positive)),
    "global_head_dim": ("global_head_dim", _SIZE),
    "num_global_key_value_heads": ("num_global_kv_heads", _or_null(_SIZE)),
    "attention_k_eq_v": ("global_key_is_value", boolean),
    "num_kv_shared_layers": ("num_kv_shared_layers", at_least(0)),
    "use_double_wide_mlp": ("use_double_wide_mlp", boolean),
    "hidden_size_per_layer_input": ("per_layer_input_dim", at_least(0)),
    "query_pre_attn_scalar": ("attention_scale", lambda value: positive(value) ** -0.5),
}
# By activation of a ModelSpec.
ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "silu": "silu"}
_ACTIVATION = ("hidden_act", "hidden_activation")  # of which a class reads one
# The partial_rotary_factor of p = 0: it rotates no pair, and vLLM refuses 0.
NO_PAIR = 1e-6
# Fields of a ModelSpec that a class fixes, where its row does not name them.
_FIXED = {
    "scale_embedding": False,
    "post_norms": False,
    "qkv_bias": False,
    "use_qk_norm": False,
    "use_value_norm": False,
    "use_skip_scale": False,
}
# All fields of a ModelSpec that an export writes, and those that change nothing there.
MODEL_FIELDS = {
    *("activation", "test_window", "test_sinks"),
    *("dtype", "attention", "global_attention", "scan_layers", "remat"),
    *(ours for ours, _ in FIELDS.values()),
    *_FIXED,
    *encodings.FIELDS,
}
# Fields of configs that change what a class computes, unless they are null, false or 0.
_MUST_BE_UNSET = re.compile(
    "attention_bias|mlp_bias|quantization_config|bidirectional|softcapping|multiplier|experts"
    "|logits_scaling|interleaved|per_layer|kv_shared|k_eq_v|mrope|moe|mup|clip_qkv|chunk_size"
)


_NONE: Mapping[str, Any] = MappingProxyType({})


class Family(NamedTuple):
    """A class of transformers for causal language models."""

    hf_class: str
    # The fields of config.json that it reads, each with its value where a file has none. None is
    # num_attention_heads for num_key_value_heads, and for head_dim hidden_size over these.
    defaults: dict[str, Any]
    fixed: Mapping[str, Any] = _NONE  # fields of a ModelSpec that no file changes
    # Whether a layer has a window, by the fields of a file and its number, where layer_types does
    # not say.
    slides: Callable[[dict, int], bool] = lambda values, number: False
    last_is_full: bool = False  # whatever layer_types has
    needs_window: bool = False  # even where no layer slides
    needs_divisor: bool = False  # num_attention_heads has to divide hidden_size
    adds_one: bool = False  # norms multiply by 1 + w, as prope's do; otherwise by w
    names: Mapping[str, str] = _NONE  # by parameter: other tensors

    @property
    def rotates_by_kind(self) -> bool:
        """Whether sliding layers have a rotation of their own."""
        return not self.defaults.keys().isdisjoint(("rope_local_base_freq", "rope_parameters"))


def _slides_in_gemma_3(values: dict, number: int) -> bool:
    return (number + 1) % read_value(values, "sliding_window_pattern", positive) > 0


def _has_window(values: dict) -> bool:
    has_window = read_value(values, "use_sliding_window", boolean)
    return has_window and values["sliding_window"] is not None


def _slides_in_qwen(values: dict, number: int) -> bool:
    return _has_window(values) and number >= read_value(values, "max_window_layers", at_least(0))


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
_QWEN = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "layer_types": None,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_LATER_GEMMA = _GEMMA | {
    "hidden_activation": ACTIVATIONS["gelu"],
    "layer_types": None,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
}
_GEMMA_4 = _LATER_GEMMA | {
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,  # instead of these two, in files of later versions
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": None,
}
_ROW_GEMMA_2 = Family(
    "Gemma2ForCausalLM",
    _LATER_GEMMA
    | {
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1e4,
    },
    {"scale_embedding": True, "post_norms": True},
    slides=lambda values, number: (number + 1) % 2 > 0,
    needs_window=True,
    needs_divisor=True,
    adds_one=True,
    names={"layers/pre_ffw_norm/scale": "pre_feedforward_layernorm"},
)
_ROW_GEMMA_3 = _ROW_GEMMA_2._replace(
    hf_class="Gemma3ForCausalLM",
    defaults=_LATER_GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    fixed=_ROW_GEMMA_2.fixed | {"use_qk_norm": True},
    slides=_slides_in_gemma_3,
)
_ROW_GEMMA_4 = _ROW_GEMMA_3._replace(
    hf_class="Gemma4ForCausalLM",
    defaults=_GEMMA_4 | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
    fixed=_ROW_GEMMA_3.fixed
    | {"use_value_norm": True, "use_skip_scale": True, "attention_scale": 1.0},
    slides=lambda values, number: (number + 1) % 6 > 0,
    last_is_full=True,
    needs_divisor=False,
    adds_one=False,
)
# By model_type, in the order in which export tries them.
FAMILIES = {
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA
        | {
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "hidden_act": ACTIVATIONS["gelu"],
            "rope_theta": 1e4,
        },
        {"scale_embedding": True},
        adds_one=True,
    ),
    "gemma2": _ROW_GEMMA_2,
    "gemma3_text": _ROW_GEMMA_3,
    "gemma4_text": _ROW_GEMMA_4,
    "gemma4_unified_text": _ROW_GEMMA_4._replace(
        hf_class="Gemma4UnifiedForCausalLM",
        defaults=_GEMMA_4
        | {
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
    ),
    "llama": Family("LlamaForCausalLM", _LLAMA, needs_divisor=True),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, {"qkv_bias": True}, _slides_in_qwen),
    "qwen3": Family(
        "Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, {"use_qk_norm": True}, _slides_in_qwen
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        slides=lambda values, number: values["sliding_window"] is not None,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _LLAMA
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "layer_types": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        slides=lambda values, number: _has_window(values) and not rotated_layers(values)[number],
    ),
}


# --- config.json to ModelSpec ---------------------------------------------------------------------


def fill(family: Family, values: dict) -> tuple[dict, list[str]]:
    """Returns (values, problems): a file's fields with the class's defaults, and its bad sizes."""
    filled = family.defaults | values
    problems = []
    for name in (*SIZES, "max_position_embeddings"):
        if filled[name] is None and name == "num_key_value_heads":
            filled[name] = filled["num_attention_heads"]
        if filled[name] is None and name == "head_dim":
            filled[name] = filled["hidden_size"] // filled["num_attention_heads"]
        try:
            read_value(filled, name, _SIZE)
        except UsageError as error:
            problems.append(str(error))
            filled[name] = 1
    return filled, problems


def changed_fields(family: Family, values: dict) -> list[str]:
    """Describes the fields with which another model than the family's is computed."""
    return [
        f"{name}={json.dumps(value)}: only null or false"
        for name, value in values.items()
        if value and name not in family.defaults and _MUST_BE_UNSET.search(name)
    ]


def read_fields(family: Family, values: dict) -> tuple[dict[str, Any], list[str]]:
    """Returns (fields, problems): those of a ModelSpec but for its rotation, and wrong values.

    A field that the class does not read has the value of a plain model. `values` are filled.
    """
    fields = _FIXED | {ours: getattr(ModelSpec, ours) for ours, _ in FIELDS.values()}
    fields |= {"layer_types": ()} | family.fixed
    problems = []
    for read in (_read_single, _read_activation, _read_layers, _read_gemma_4):
        try:
            fields |= read(family, values)
        except UsageError as error:
            problems.append(str(error))
    return _without_plain(fields), problems


def _without_plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields without sizes of full layers and a scale that are those of all layers."""
    plain = {
        "global_head_dim": fields["head_dim"],
        "num_global_kv_heads": fields["num_kv_heads"],
        "attention_scale": fields["head_dim"] ** -0.5,
    }
    return fields | {name: None for name in plain if _is_close(fields[name], plain[name])}


def _is_close(value, other) -> bool:
    are_floats = isinstance(value, float) and isinstance(other, float)
    return math.isclose(value, other, rel_tol=1e-9) if are_floats else value == other


def _read_single(family: Family, values: dict) -> dict:
    rows = {name: row for name, row in FIELDS.items() if name in family.defaults}
    if values.get("per_layer_config") is not None:  # in place of these
        rows = {name: row for name, row in rows.items() if row[0] not in _OF_FULL.values()}
    elif not values.get("attention_k_eq_v"):
        rows.pop("num_global_key_value_heads", None)
    return {ours: read_value(values, name, rule) for name, (ours, rule) in rows.items()}


def _read_activation(family: Family, values: dict) -> dict:
    read = next(name for name in _ACTIVATION if name in family.defaults)
    used = {name: values[name] for name in _ACTIVATION if values.get(name) is not None}
    used.setdefault(read, family.defaults[read])
    if family.adds_one and used.get("hidden_act") == "gelu":
        used["hidden_act"] = ACTIVATIONS["gelu"]  # as transformers reads the releases
    for ours, theirs in ACTIVATIONS.items():
        if all(name == theirs for name in used.values()):
            return {"activation": ours}
    written = " and ".join(f"{name}={json.dumps(value)}" for name, value in used.items())
    allowed = f"only {' or '.join(ACTIVATIONS.values())}, the same in all fields"
    raise UsageError(f"{written}: {allowed}; {family.hf_class} reads {read}")


def _read_layers(family: Family, values: dict) -> dict:
    kinds = read_kinds(family, values)
    if SLIDING not in kinds:
        return {}
    window = read_value(values, "sliding_window", _SIZE)
    # Qwen's classes have no window then, and stop. SmolLM3's mask has the kinds of layer_types.
    if "max_window_layers" in family.defaults and not values["use_sliding_window"]:
        raise wrong(values, "use_sliding_window", "must be true: some layers are sliding_attention")
    return {"layer_types": _pattern(kinds), "sliding_window": window}


def _pattern(kinds: list[str]) -> tuple[str, ...]:
    """Returns the shortest pattern of which kinds of layers are repeats; () for full ones alone."""
    if SLIDING not in kinds:
        return ()
    patterns = (kinds[: number + 1] for number in range(len(kinds)))
    return tuple(next(one for one in patterns if repeat_pattern(one, len(kinds)) == kinds))


def read_kinds(family: Family, values: dict) -> list[str]:
    """Returns sliding_attention or full_attention for every layer: layer_types, or by its rule."""
    numbers = range(values["num_hidden_layers"])
    kinds = [SLIDING if family.slides(values, number) else FULL for number in numbers]
    written = values.get("layer_types")
    if written is not None and written != kinds:
        if "layer_types" not in family.defaults:
            raise wrong(values, "layer_types", f"{family.hf_class} has {kinds[0]} in all layers")
        known = isinstance(written, list) and all(kind in LAYER_TYPES for kind in written)
        if not known or len(written) != len(kinds):
            raise wrong(
                values, "layer_types", f"must be {len(kinds)} of {' and '.join(LAYER_TYPES)}"
            )
        kinds = written
    return [*kinds[:-1], FULL] if family.last_is_full else kinds


def rotated_layers(values: dict) -> list[bool]:
    """Returns for every layer of a SmolLM3 whether it rotates at all."""
    layers = values["num_hidden_layers"]
    interval = read_value(values, "no_rope_layer_interval", positive)
    written = values["no_rope_layers"]  # 1: rotated
    if written is None:
        return [(number + 1) % interval > 0 for number in range(layers)]
    is_known = isinstance(written, list) and all(number in (0, 1) for number in written)
    if not is_known or len(written) < layers:
        raise wrong(values, "no_rope_layers", f"must be {layers} of 0 and 1")
    return [bool(rotated) for rotated in written[:layers]]


# By field of config.json: that of a ModelSpec for full layers.
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_kv_heads"}


def _read_gemma_4(family: Family, values: dict) -> dict:
    """Returns the sizes of full layers; checks that layers have inputs for all tokens."""
    if "per_layer_config" not in family.defaults:
        return {}
    name = "use_bidirectional_attention"
    if values[name] not in (None, False, "vision"):  # of images alone
        raise wrong(values, name, 'only null, false or "vision"')
    name = "vocab_size_per_layer_input"
    if values.get("hidden_size_per_layer_input") and values[name] != values["vocab_size"]:
        raise wrong(values, name, f"must be vocab_size={values['vocab_size']}")
    written = values["per_layer_config"]
    if written is None:
        return {} if values["attention_k_eq_v"] else {"num_global_kv_heads": None}
    kinds = read_kinds(family, values)
    full = [str(number) for number, kind in enumerate(kinds) if kind == FULL]
    sizes = written.get(full[0], {}) if isinstance(written, dict) else None
    is_known = isinstance(sizes, dict) and sizes.keys() <= _OF_FULL.keys()
    is_known = is_known and all(type(size) is int and size > 0 for size in sizes.values())
    if not is_known or written not in ({}, dict.fromkeys(full, sizes)):
        problem = f"must be the same {' and '.join(_OF_FULL)} for every {FULL} layer, and no other"
        raise wrong(values, "per_layer_config", problem)
    return {ours: sizes.get(name) for name, ours in _OF_FULL.items()}


# --- ModelSpec to config.json ---------------------------------------------------------------------


def write_fields(family: Family, model: ModelSpec, ropes: list[dict]) -> dict:
    """Returns the fields of config.json for a model; `ropes` are rope_parameters by layer."""
    kinds = model.kinds
    rotated = rotating(ropes)
    rope_of_kind = dict(zip(kinds, ropes, strict=True))
    rope_of_kind.setdefault(FULL, ropes[0])  # transformers reads it in a run of windows alone, too
    scale = model.attention_scale
    values = {name: getattr(model, ours) for name, (ours, _) in FIELDS.items()} | {
        # transformers takes it as an integer.
        "query_pre_attn_scalar": max(1, round(scale**-2)) if scale else model.head_dim,
        "global_head_dim": model.global_head_dim or model.head_dim,
        "vocab_size_per_layer_input": model.vocab_size,
        "layer_types": kinds,
        "sliding_window": model.sliding_window,
        "use_sliding_window": SLIDING in kinds,
        "no_rope_layers": [int(rope in rotated) for rope in ropes],  # 0: no rotation
        "rope_local_base_freq": rope_of_kind.get(SLIDING, ropes[0])["rope_theta"],
    }
    if family.needs_window and SLIDING not in kinds:
        del values["sliding_window"]  # the class's own
    values = {name: value for name, value in values.items() if name in family.defaults}
    if "sliding_window_pattern" in family.defaults:
        period = (*kinds, FULL).index(FULL) + 1
        regular = repeat_pattern((*[SLIDING] * (period - 1), FULL), len(kinds))
        local = rope_of_kind.get(SLIDING, {"partial_rotary_factor": 1})
        is_alike = kinds == regular and local.get("partial_rotary_factor") == 1
        # MLX reads this, by default 6, instead of layer_types, and rotates all pairs of layers with
        # a window. Where that would be wrong, a pattern longer than the model makes it stop.
        values["sliding_window_pattern"] = period if is_alike else len(kinds) + 1
    rope = rope_of_kind if family.rotates_by_kind else rotated[0]
    return (
        values
        | dict.fromkeys(_ACTIVATION, ACTIVATIONS[model.activation])
        | {"rope_parameters": rope, "rope_theta": rope.get(FULL, rope)["rope_theta"]}
    )


def choose_family(model: ModelSpec, ropes: list[dict]) -> str:
    """Returns the model_type of the first family whose class computes a model.

    Raises UsageError where there is none, with what the nearest computes instead.
    """
    changed = {name: _changed_by(family, model, ropes) for name, family in FAMILIES.items()}
    nearest, computed = min(changed.items(), key=lambda item: len(item[1]))
    if not computed:
        return nearest
    fields = ", ".join(f"config.model.{name}={shorten(getattr(model, name))}" for name in computed)
    problem = "no class of transformers computes this with the other fields"
    others = ", ".join(f"{name}={value}" for name, value in computed.items())
    remedy = f"the nearest, {FAMILIES[nearest].hf_class}, computes {others}"
    raise UsageError(f"{fields}: {problem}; {remedy}")


def _changed_by(family: Family, model: ModelSpec, ropes: list[dict]) -> dict[str, Any]:
    """Returns what the family's class has in the fields of a model that it does not compute."""
    values, _ = fill(family, write_fields(family, model, ropes))
    read, _ = read_fields(family, values)
    written = {name: getattr(model, name) for name in read}
    written = _without_plain(written | {"layer_types": _pattern(model.kinds)})
    # Every class has any epsilon, rounded to float32, and any window where layer_types fit.
    changed = {
        name: value
        for name, value in read.items()
        if name not in ("norm_epsilon", "sliding_window") and not _is_close(written[name], value)
    }
    if not _has_ropes(family, model.kinds, ropes):
        name = _rope_field(model)
        is_each = name in ("rope_percentage", "rope_pairs", "rope_frequencies")
        changed[name] = "one for all layers" if is_each else getattr(ModelSpec, name)
    if family.needs_divisor and model.embed_dim % model.num_heads:
        changed["num_heads"] = "a divisor of embed_dim"
    return changed


def _has_ropes(family: Family, kinds: list[str], ropes: list[dict]) -> bool:
    """Returns whether the family's class can rotate every layer by its own of `ropes`."""
    if family.rotates_by_kind:
        rope_of_kind = dict(zip(kinds, ropes, strict=True))
        return ropes == [rope_of_kind[kind] for kind in kinds]
    if "no_rope_layers" in family.defaults:
        ropes = rotating(ropes)
    return all(rope == ropes[0] for rope in ropes)


def _rope_field(model: ModelSpec) -> str:
    """Names the field that gives layers different rotations."""
    if isinstance(model.rope_percentage, tuple):
        return "rope_percentage"
    fields = ("rope_pairs", "rope_frequencies", "local_max_wavelength", "local_rope_percentage")
    fields += ("rope_scaling_type", "logit_scale")
    set_fields = (field for field in fields if getattr(model, field) not in (None, "none", "", ()))
    return next(set_fields, "global_head_dim")


def rotating(ropes: list[dict]) -> list[dict]:
    """Returns the rotations that are not NoPE; all where every one is."""
    return [rope for rope in ropes if rope.get("partial_rotary_factor") != NO_PAIR] or ropes
