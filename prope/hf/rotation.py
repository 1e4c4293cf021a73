"""The class of transformers 5 that computes a run's decoder, with its fields for the encoding.

Gemma has one rotation and no windows; SmolLM3 has windows and layers without rotation; Mellum, here
without experts, windows, QK-norm and a rotation per kind of layer. Gemma 2 and 3 cannot: they
normalise the output of attention and MLP, so that its size is lost.
"""

import json
import math

import numpy as np
from ml_collections import ConfigDict

from prope.config import FIELDS, SWITCHES
from prope.encodings import (
    SCALINGS,
    layer_frequencies,
    layer_percentages,
    layer_windows,
    logit_factor,
    logit_scale,
    ntk_wavelength,
)
from prope.errors import UsageError, usage_error
from prope.rope import frequencies, num_rotated_pairs


def _hf_fields(scaling: str) -> dict[str, str]:
    """Maps a scaling's fields of rope_parameters to those of config.model."""
    names = {
        "rope_scaling_factor": "factor",
        "original_seq_len": "original_max_position_embeddings",
    }
    return {names.get(field, field): field for field in SCALINGS[scaling]}


# By rope_type of transformers, for those that scale every pair: its fields, and config.model's.
_SCALINGS = {
    "linear": _hf_fields("linear"),
    "yarn": _hf_fields("yarn"),
    "llama3": _hf_fields("llama3"),
    "dynamic": _hf_fields("linear"),  # its length is max_position_embeddings
}


def choose_class(model: ConfigDict) -> tuple[str, dict]:
    """Returns (class, fields of config.json) for a run's `config.model`.

    Raises UsageError where no class computes it.
    """
    for name in SWITCHES:
        default = FIELDS[f"model.{name}"].default
        default = None if isinstance(default, type) else default
        if model[name] != default and name != "use_qk_norm":
            problem = f"only {default} can be exported"
            remedy = "no class of transformers is written for it yet"
            raise usage_error(f"config.model.{name}", model[name], problem, remedy)
    windows = layer_windows(model)
    layers = zip(layer_percentages(model), windows, layer_frequencies(model), strict=True)
    ropes = [_rope(model, *layer) for layer in layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    rope_of_kind = dict(zip(kinds, ropes, strict=True))
    one_rope_per_kind = ropes == [rope_of_kind[kind] for kind in kinds]
    fields = {
        "layer_types": kinds,
        "sliding_window": model.sliding_window,
        "rope_parameters": rope_of_kind,
    }
    if model.use_qk_norm and one_rope_per_kind:
        return "MellumForCausalLM", fields | {"mlp_layer_types": ["dense"] * model.num_layers}
    rotated = [rope for rope in ropes if rope.get("partial_rotary_factor") != 0] or ropes
    one_rope = all(rope == rotated[0] for rope in rotated)
    if model.use_qk_norm or not one_rope:
        raise _no_class(model)
    if rotated == ropes and "sliding_attention" not in kinds:
        return "GemmaForCausalLM", {"rope_parameters": rotated[0]}
    return "SmolLM3ForCausalLM", fields | {
        "rope_parameters": rotated[0],
        "use_sliding_window": True,
        "no_rope_layers": [int(rope in rotated) for rope in ropes],  # 0: no rotation
    }


def _no_class(model: ConfigDict) -> UsageError:
    """Names the field that gives layers encodings which no class has together."""
    if isinstance(model.rope_percentage, int | float):
        fields = (
            "local_max_wavelength",
            "local_rope_percentage",
            "rope_scaling_type",
            "logit_scale",
        )
    else:
        fields = ("rope_percentage",)
    name = next(field for field in fields if model[field] not in (None, "none"))
    layers = "without QK-norm that rotate or have logit_scale"
    if model.use_qk_norm:
        layers = "of the same layer_types"
    problem = f"in transformers, layers {layers} must have one encoding"
    return usage_error(f"config.model.{name}", model[name], problem)


def _rope(model: ConfigDict, p: float, window: int | None, freqs: np.ndarray) -> dict:
    """Returns rope_parameters of a layer: of a named rope_type, or of longrope.

    longrope has a divisor for every pair.
    """
    theta = model.max_wavelength
    scaling = model.rope_scaling_type
    if scaling == "remove":
        problem = "no class of transformers removes pairs"
        remedy = "export the run with another scaling"
        raise usage_error("config.model.rope_scaling_type", scaling, problem, remedy)
    scale = logit_scale(model)
    if window is not None:
        theta = model.local_max_wavelength or theta
        scaling = "none"
        scale = 1.0
    plain_rope = model.rope_type == "proportional" and np.all(freqs > 0)
    scale_is_named = scale == 1 or scaling == "yarn"
    if scaling in _SCALINGS and plain_rope and scale_is_named:
        return _scaled_rope(model, scaling, theta, scale)
    if scaling == "dynamic":
        needs = "in transformers it needs rope_type=proportional, p=1 and logit_scale=none"
        got = f"{model.rope_type}, {p} and {model.logit_scale}"
        raise UsageError(f"config.model.rope_scaling_type=dynamic: {needs}; got {got}")
    if scaling == "ntk":
        theta = ntk_wavelength(model.head_dim, theta, model.rope_scaling_factor)
    plain = frequencies(model.head_dim, theta)
    num_rotated = int(np.count_nonzero(freqs))
    fastest = np.arange(len(freqs)) < num_rotated
    if scale == 1 and np.array_equal(freqs, np.where(fastest, plain, 0)):
        return {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": _share(model.head_dim, p, num_rotated),
        }
    # JSON has no infinity; after division by 1e30, float32 rotates no pair at any position.
    divisors = np.divide(plain, freqs, out=np.full(len(freqs), 1e30), where=freqs > 0).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": model.rope_scaling_factor,
        "attention_factor": math.sqrt(scale),
        # It chooses between the two lists, which are the same.
        "original_max_position_embeddings": model.original_seq_len or 1,
    }


def _scaled_rope(model: ConfigDict, scaling: str, theta: float, scale: float) -> dict:
    """Returns rope_parameters of a scaling that transformers has by name."""
    rope = {"rope_type": scaling, "rope_theta": theta}
    rope |= {theirs: model[ours] for theirs, ours in _SCALINGS[scaling].items()}
    if scaling == "yarn" and (model.logit_scale, logit_factor(model)) != ("yarn", rope["factor"]):
        # It multiplies cos and sin; without it, transformers takes yarn's.
        rope["attention_factor"] = math.sqrt(scale)
    return rope


def _share(head_dim: int, p: float, num_rotated: int) -> float:
    """Returns p, or another share that rotates exactly this many pairs."""
    # The plain share may lose a pair by rounding.
    shares = (p, 2 * num_rotated / head_dim, (2 * num_rotated + 1) / head_dim)
    fitting = (share for share in shares if num_rotated_pairs(head_dim, share) == num_rotated)
    return float(next(fitting))


def read_rotation(values: dict) -> dict:
    """Returns the fields of config.model for config.json's, as transformers reads them."""
    rope = _rope_parameters(values)
    kind = rope["rope_type"]
    theta = rope["rope_theta"]
    p = rope["partial_rotary_factor"]
    _check_known(rope)
    if type(p) not in (int, float) or not 0 <= p <= 1 or (kind != "proportional" and p != 1):
        problem = f"must be a fraction in [0, 1] with rope_type proportional, and 1 with {kind}"
        raise usage_error("partial_rotary_factor", json.dumps(p), problem)
    if type(theta) not in (int, float):
        problem = "must be a number; it is 10000.0 in Gemma 1"
        raise usage_error("rope_theta", json.dumps(theta), problem)
    model = {"max_wavelength": float(theta), "rope_percentage": float(p)}
    if not _is_plain(rope):
        model["rope_scaling_type"] = kind
        model |= {ours: rope[theirs] for theirs, ours in _SCALINGS[kind].items()}
    if kind == "dynamic":
        model["original_seq_len"] = values.get("max_position_embeddings", 8192)
    if kind == "yarn" and rope.get("attention_factor") is None:
        model["logit_scale"] = "yarn"
    return model


def _rope_parameters(values: dict) -> dict:
    """Returns rope_parameters, or rope_scaling of older files, with what is absent filled in."""
    names = ("rope_scaling", "rope_parameters")
    written = [values[name] for name in names if values.get(name)] or [{}]
    # The releases of Gemma 1 have only rope_theta: every pair is rotated.
    absent = {
        "rope_type": "default",
        "rope_theta": values.get("rope_theta", 1e4),
        "partial_rotary_factor": values.get("partial_rotary_factor", 1),
        "factor": 1,
    }
    ropes = []
    for rope in written:
        if not isinstance(rope, dict):
            problem = "must be an object; restore the original file"
            raise UsageError(f"the rotation is {json.dumps(rope)}: {problem}")
        renamed = {"rope_type" if name == "type" else name: rope[name] for name in rope}
        ropes.append(absent | renamed)
    if ropes[0] != ropes[-1]:
        differ = f"rope_scaling={written[0]} and rope_parameters={written[1]} differ"
        raise UsageError(f"{differ}; remove the wrong one")
    return ropes[0]


def _is_plain(rope: dict) -> bool:
    return rope["rope_type"] in ("default", "proportional") and rope["factor"] == 1


def _check_known(rope: dict) -> None:
    """Raises UsageError for a rope_type that is not known, or with numbers missing or unknown."""
    kind = rope["rope_type"]
    fields = _SCALINGS.get(kind, {})
    has_numbers = all(type(rope.get(name)) in (int, float) for name in fields)
    supported = _is_plain(rope) or (fields and has_numbers)
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
    temperature = rope.get("attention_factor") if kind == "yarn" else 1
    if not supported or rope.keys() - known - fields.keys() or temperature not in (None, 1):
        kinds = f"only rope_type default, proportional with factor 1, {', '.join(_SCALINGS)}"
        allowed = f"{kinds} can be imported, with all of their numbers and no others"
        raise UsageError(f"the rotation is {json.dumps(rope)}: {allowed}")
