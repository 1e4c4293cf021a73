"""The rotation of layers: rope_parameters of transformers, written for a run, and read."""

import json
import math

import numpy as np

from prope.encodings import SCALINGS, ntk_wavelength
from prope.errors import UsageError, shorten, usage_error
from prope.hf.families import (
    NO_PAIR,
    Family,
    at_least,
    positive,
    read_kinds,
    read_value,
    rotated_layers,
    wrong,
)
from prope.rope import frequencies, num_rotated_pairs
from prope.spec.kinds import FULL, LAYER_TYPES, SLIDING
from prope.spec.layers import Layer
from prope.spec.model import ModelSpec

# By rope_type of transformers, for those that scale every pair: its fields, and those of ModelSpec.
_HF_NAMES = {
    "rope_scaling_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
}
_SCALINGS = {
    kind: {_HF_NAMES.get(field, field): field for field in SCALINGS[kind]}
    for kind in ("linear", "yarn", "llama3")
}
_SCALINGS["dynamic"] = _SCALINGS["linear"]  # its length is max_position_embeddings

_PLAIN = ("default", "proportional")
# Where a file has no original_max_position_embeddings, it is max_position_embeddings.
_WITH_LENGTH = ("llama3", "yarn", "longrope")
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # where a file has none


# --- ModelSpec to config.json ---------------------------------------------------------------------


def write_rotations(model: ModelSpec) -> list[dict]:
    """Returns rope_parameters of every layer: of a named rope_type, or of longrope.

    longrope has a divisor for every pair. Raises UsageError where transformers has no rope_type.
    """
    if model.rope_scaling_type == "remove":
        problem = "no class of transformers removes pairs"
        remedy = "export the run with another scaling"
        raise usage_error("config.model.rope_scaling_type", "remove", problem, remedy)
    return [_write_rope(model, layer) for layer in model.layers]


def write_custom_rotation(model: ModelSpec) -> tuple[list[dict], dict]:
    """Returns rope_parameters of every layer, and the fields by which modeling_prope.py rotates.

    Its rope_type no class of transformers knows. Raises UsageError for a scaling that it has not.
    """
    scaling = model.rope_scaling_type
    if scaling in ("remove", "dynamic"):
        problem = "--custom_code does not have it; export the run with another scaling"
        raise UsageError(f"config.model.rope_scaling_type={scaling}: {problem}")
    rope = {"rope_type": "prope", "rope_theta": model.max_wavelength}
    return [rope] * model.num_layers, {
        "rope_frequencies": [layer.frequencies.tolist() for layer in model.layers],
        "rope_attention_factors": [math.sqrt(layer.logit_scale) for layer in model.layers],
    }


def _write_rope(model: ModelSpec, layer: Layer) -> dict:
    H = layer.head_dim
    theta = layer.max_wavelength
    freqs = layer.frequencies[0]
    if (layer.frequencies != freqs).any():
        problem = f"key heads of layer {layer.number} rotate different pairs"
        remedy = "choose pairs that all key heads of a layer have in common"
        field = "rope_pairs" if model.rope_pairs else "rope_frequencies"
        raise usage_error(f"config.model.{field}", shorten(getattr(model, field)), problem, remedy)
    scale = layer.logit_scale
    scaling = "none" if layer.is_local else model.rope_scaling_type
    is_rope = model.rope_type == "proportional" and np.all(freqs > 0)
    if scaling in _SCALINGS and is_rope and (scale == 1 or scaling == "yarn"):
        rope = {"rope_type": scaling, "rope_theta": theta}
        rope |= {theirs: getattr(model, ours) for theirs, ours in _SCALINGS[scaling].items()}
        logits = (model.logit_scale, model.logit_factor)
        if scaling == "yarn" and logits != ("yarn", model.rope_scaling_factor):
            # It multiplies cos and sin; without it, transformers takes yarn's.
            rope["attention_factor"] = math.sqrt(scale)
        return rope
    if scaling == "dynamic":
        needs = "in transformers it needs rope_type=proportional, p=1 and logit_scale=none"
        got = f"{model.rope_type}, {layer.rope_percentage} and {model.logit_scale}"
        raise UsageError(f"config.model.rope_scaling_type=dynamic: {needs}; got {got}")
    if scaling == "ntk":
        theta = ntk_wavelength(H, theta, model.rope_scaling_factor)
    plain = frequencies(H, theta)
    rotated = layer.num_rotated
    if scale == 1 and np.array_equal(freqs, np.where(np.arange(H // 2) < rotated, plain, 0)):
        # p, or another share of exactly these pairs: the plain one may lose a pair by rounding, and
        # MLX rotates half of int(H p), rounded up.
        shares = (layer.rope_percentage, 2 * rotated / H, (2 * rotated + 0.5) / H)
        share = next(p for p in shares if num_rotated_pairs(H, p) == rotated == -(-int(H * p) // 2))
        named = {"rope_type": "proportional", "rope_theta": theta}
        return named | {"partial_rotary_factor": float(share) if rotated else NO_PAIR}
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


# --- config.json to ModelSpec ---------------------------------------------------------------------


def read_rotation(family: Family, values: dict) -> dict:
    """Returns the fields of a ModelSpec for a file's fields, filled, as transformers reads them.

    Raises UsageError for a rotation that is not known, or that this decoder does not compute.
    """
    kinds = read_kinds(family, values)
    can_skip = "no_rope_layers" in family.defaults
    rotated = rotated_layers(values) if can_skip else [True] * len(kinds)
    ropes = _ropes_by_kind(family, values)
    fields = _read_rope(ropes[FULL if FULL in kinds else SLIDING], values)
    if SLIDING in kinds:
        local = _read_rope(ropes[SLIDING], values)
        if "rope_scaling_type" in local and (SLIDING, True) in zip(kinds, rotated, strict=True):
            problem = "this decoder scales no layers with a window"
            raise UsageError(f"the rotation is {json.dumps(ropes[SLIDING])}: {problem}")
        for name in ("max_wavelength", "rope_percentage"):
            if local[name] != fields[name]:
                fields[f"local_{name}"] = local[name]
    if not any(rotated):
        fields.pop("logit_scale", None)
    if not all(rotated):
        p = fields["rope_percentage"]
        fields["rope_percentage"] = tuple(p if rotates else 0.0 for rotates in rotated)
    return fields


def _ropes_by_kind(family: Family, values: dict) -> dict[str, dict]:
    """Returns the rotation of full and of sliding layers, which Gemma 3 and 4 have apart."""
    if not family.rotates_by_kind:
        return dict.fromkeys(LAYER_TYPES, _fill_rope(values))
    written = values.get("rope_parameters") or family.defaults.get("rope_parameters", {})
    if written and not (isinstance(written, dict) and written.keys() <= {FULL, SLIDING}):
        raise wrong(values, "rope_parameters", f"must be an object with {FULL} and {SLIDING}")
    name = "rope_local_base_freq"
    local = {"rope_theta": None, "rope_scaling": None, "rope_parameters": written.get(SLIDING)}
    if name in family.defaults:
        local["rope_theta"] = read_value(values, name, positive)
    full = {"rope_parameters": written.get(FULL)}
    return {FULL: _fill_rope(values | full), SLIDING: _fill_rope(values | local)}


def _fill_rope(values: dict) -> dict:
    """Returns rope_parameters, or rope_scaling of older files, with what is absent filled in."""
    names = ("rope_scaling", "rope_parameters")
    written = [values[name] for name in names if values.get(name)] or [{}]
    share = values.get("partial_rotary_factor")
    ropes = []
    for rope in written:
        if not isinstance(rope, dict):
            problem = "must be an object; restore the original file"
            raise UsageError(f"the rotation is {json.dumps(rope)}: {problem}")
        rope = {"rope_type" if name == "type" else name: value for name, value in rope.items()}
        kind = rope.get("rope_type", "default")
        filled = {
            "rope_type": kind,
            "rope_theta": values.get("rope_theta"),
            "partial_rotary_factor": 1 if share is None else share,
        }
        if kind in _PLAIN:
            filled["factor"] = 1
        if kind in _WITH_LENGTH:
            filled["original_max_position_embeddings"] = values["max_position_embeddings"]
        if kind == "yarn":
            filled |= _YARN
        ropes.append(filled | rope)
    if ropes[0] != ropes[-1]:
        differ = f"rope_scaling={written[0]} and rope_parameters={written[1]} differ"
        raise UsageError(f"{differ}; remove the wrong one")
    return ropes[0]


def _read_rope(rope: dict, values: dict) -> dict:
    """Returns the fields of a ModelSpec for rope_parameters.

    Raises UsageError for a rope_type that is not known, or with numbers missing or unknown.
    """
    kind = rope["rope_type"]
    p = rope["partial_rotary_factor"]
    is_plain = kind in _PLAIN and rope["factor"] == 1
    scaled_by = _SCALINGS.get(str(kind), {})
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
    missing = [name for name in scaled_by if type(rope.get(name)) not in (int, float)]
    unknown = sorted(rope.keys() - known - scaled_by.keys())
    problems = []
    if not (scaled_by or is_plain):
        kinds = f"default, proportional with factor 1, {', '.join(_SCALINGS)}"
        problems.append(f"only rope_type {kinds} can be imported")
    if missing:
        problems.append(f"{kind} needs the numbers {', '.join(missing)}")
    if unknown and (scaled_by or kind in _PLAIN):
        problems.append(f"unknown with {kind}: {', '.join(unknown)}")
    if kind == "yarn" and rope.get("attention_factor") not in (None, 1):
        problems.append("attention_factor must be absent or 1 with yarn")
    if problems:
        raise UsageError(f"the rotation is {json.dumps(rope)}: {'; '.join(problems)}")
    if type(p) not in (int, float) or not 0 <= p <= 1 or (kind != "proportional" and p != 1):
        problem = f"must be a fraction in [0, 1] with rope_type proportional, and 1 with {kind}"
        raise wrong(rope, "partial_rotary_factor", problem)
    theta = read_value(rope, "rope_theta", positive)
    fields = {"max_wavelength": theta, "rope_percentage": 0.0 if p == NO_PAIR else float(p)}
    if not is_plain:
        fields["rope_scaling_type"] = kind
        fields |= {ours: float(rope[theirs]) for theirs, ours in scaled_by.items()}
    if "original_seq_len" in fields:
        fields["original_seq_len"] = read_value(rope, _HF_NAMES["original_seq_len"], at_least(1))
    if kind == "dynamic":
        fields["original_seq_len"] = values["max_position_embeddings"]
    if kind == "yarn" and rope.get("attention_factor") is None:
        fields["logit_scale"] = "yarn"
    return fields
