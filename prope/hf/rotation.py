"""The rotation of layers: rope_parameters of transformers, written for a run, and read."""

import json
import math

import numpy as np

from prope.encodings import SCALINGS, ntk_wavelength
from prope.errors import UsageError, usage_error
from prope.hf.families import Family, positive, read_kinds, read_value, rotated_layers, wrong
from prope.rope import frequencies, num_rotated_pairs
from prope.spec.model import FULL, SLIDING, Layer, ModelSpec

# By field of config.model: that of rope_parameters, where it has another name.
_HF_NAMES = {
    "rope_scaling_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
}
# By rope_type of transformers, for those that scale every pair: its fields, and config.model's.
_SCALINGS = {
    kind: {_HF_NAMES.get(field, field): field for field in SCALINGS[kind]}
    for kind in ("linear", "yarn", "llama3")
}
_SCALINGS["dynamic"] = _SCALINGS["linear"]  # its length is max_position_embeddings

_PLAIN = ("default", "proportional")
# Where a file has no original_max_position_embeddings, it is max_position_embeddings.
_WITH_LENGTH = ("llama3", "yarn", "longrope")
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # where a file has none


def write_rotations(model: ModelSpec) -> list[dict]:
    """Returns rope_parameters of every layer of a run's `config.model`.

    Raises UsageError where transformers has no rope_type for it.
    """
    return [_rope(model, layer) for layer in model.layers]


def _rope(model: ModelSpec, layer: Layer) -> dict:
    """Returns rope_parameters of a layer: of a named rope_type, or of longrope.

    longrope has a divisor for every pair.
    """
    H = layer.head_dim
    p = layer.rope_percentage
    theta = layer.max_wavelength
    freqs = layer.frequencies
    scale = layer.logit_scale
    scaling = model.rope_scaling_type
    if scaling == "remove":
        problem = "no class of transformers removes pairs"
        remedy = "export the run with another scaling"
        raise usage_error("config.model.rope_scaling_type", scaling, problem, remedy)
    if layer.is_local:
        scaling = "none"
    plain_rope = model.rope_type == "proportional" and np.all(freqs > 0)
    scale_is_named = scale == 1 or scaling == "yarn"
    if scaling in _SCALINGS and plain_rope and scale_is_named:
        return _scaled_rope(model, scaling, theta, scale)
    if scaling == "dynamic":
        needs = "in transformers it needs rope_type=proportional, p=1 and logit_scale=none"
        got = f"{model.rope_type}, {p} and {model.logit_scale}"
        raise UsageError(f"config.model.rope_scaling_type=dynamic: {needs}; got {got}")
    if scaling == "ntk":
        theta = ntk_wavelength(H, theta, model.rope_scaling_factor)
    plain = frequencies(H, theta)
    num_rotated = int(np.count_nonzero(freqs))
    fastest = np.arange(len(freqs)) < num_rotated
    if scale == 1 and np.array_equal(freqs, np.where(fastest, plain, 0)):
        return {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": _share(H, p, num_rotated),
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


def _scaled_rope(model: ModelSpec, scaling: str, theta: float, scale: float) -> dict:
    """Returns rope_parameters of a scaling that transformers has by name."""
    rope = {"rope_type": scaling, "rope_theta": theta}
    rope |= {theirs: getattr(model, ours) for theirs, ours in _SCALINGS[scaling].items()}
    if scaling == "yarn" and (model.logit_scale, model.logit_factor) != ("yarn", rope["factor"]):
        # It multiplies cos and sin; without it, transformers takes yarn's.
        rope["attention_factor"] = math.sqrt(scale)
    return rope


def _share(head_dim: int, p: float, num_rotated: int) -> float:
    """Returns p, or another share that rotates exactly this many pairs."""
    # The plain share may lose a pair by rounding.
    shares = (p, 2 * num_rotated / head_dim, (2 * num_rotated + 1) / head_dim)
    fitting = (share for share in shares if num_rotated_pairs(head_dim, share) == num_rotated)
    return float(next(fitting))


def read_rotation(family: Family, values: dict) -> dict:
    """Returns the fields of config.model for a file's fields, filled, as transformers reads them.

    Raises UsageError for a rotation that is not known, or that this decoder does not compute.
    """
    kinds = read_kinds(family, values)
    by_kind = _ropes_by_kind(family, values)
    main = FULL if FULL in kinds or SLIDING not in by_kind else SLIDING
    model = _read_rope(by_kind[main], values)
    is_scaled = "rope_scaling_type" in model
    rotated = [True] * len(kinds)
    if "no_rope_layers" in family.defaults:
        rotated = rotated_layers(values)
    if SLIDING in kinds and SLIDING in by_kind:
        local = _read_rope(by_kind[SLIDING], values)
        is_scaled = "rope_scaling_type" in local
        for name in ("max_wavelength", "rope_percentage"):
            if local[name] != model[name]:
                model[f"local_{name}"] = local[name]
    if is_scaled and (SLIDING, True) in zip(kinds, rotated, strict=True):
        problem = "this decoder scales no layers with a window"
        raise UsageError(f"the rotation is {json.dumps(by_kind)}: {problem}")
    if not any(rotated):
        model.pop("logit_scale", None)
    if not all(rotated):
        p = model["rope_percentage"]
        model["rope_percentage"] = tuple(p if rotates else 0.0 for rotates in rotated)
    return model


def _read_rope(rope: dict, values: dict) -> dict:
    """Returns the fields of config.model for rope_parameters."""
    kind = rope["rope_type"]
    p = rope["partial_rotary_factor"]
    _check_known(rope)
    if type(p) not in (int, float) or not 0 <= p <= 1 or (kind != "proportional" and p != 1):
        problem = f"must be a fraction in [0, 1] with rope_type proportional, and 1 with {kind}"
        raise wrong(rope, "partial_rotary_factor", problem)
    model = {
        "max_wavelength": read_value(rope, "rope_theta", positive),
        "rope_percentage": float(p),
    }
    if not _is_plain(rope):
        model["rope_scaling_type"] = kind
        model |= {ours: rope[theirs] for theirs, ours in _SCALINGS[kind].items()}
    if kind == "dynamic":
        model["original_seq_len"] = values["max_position_embeddings"]
    if kind == "yarn" and rope.get("attention_factor") is None:
        model["logit_scale"] = "yarn"
    return model


def _ropes_by_kind(family: Family, values: dict) -> dict[str, dict]:
    """Returns the rotation of full layers, and in Gemma 3 and 4 that of sliding ones."""
    if not family.rotates_by_kind:
        return {FULL: _rope_parameters(values)}
    written = values.get("rope_parameters") or family.defaults.get("rope_parameters", {})
    if written and not (isinstance(written, dict) and written.keys() <= {FULL, SLIDING}):
        raise wrong(values, "rope_parameters", f"must be an object with {FULL} and {SLIDING}")
    name = "rope_local_base_freq"
    local_theta = read_value(values, name, positive) if name in family.defaults else None
    local = values | {"rope_theta": local_theta, "rope_scaling": None}
    return {
        FULL: _rope_parameters(values | {"rope_parameters": written.get(FULL)}),
        SLIDING: _rope_parameters(local | {"rope_parameters": written.get(SLIDING)}),
    }


def _rope_parameters(values: dict) -> dict:
    """Returns rope_parameters, or rope_scaling of older files, with what is absent filled in."""
    names = ("rope_scaling", "rope_parameters")
    written = [values[name] for name in names if values.get(name)] or [{}]
    share = values.get("partial_rotary_factor")
    absent = {
        "rope_type": "default",
        "rope_theta": values.get("rope_theta"),
        "partial_rotary_factor": 1 if share is None else share,
    }
    ropes = []
    for rope in written:
        if not isinstance(rope, dict):
            problem = "must be an object; restore the original file"
            raise UsageError(f"the rotation is {json.dumps(rope)}: {problem}")
        renamed = {"rope_type" if name == "type" else name: rope[name] for name in rope}
        kind = renamed.get("rope_type", "default")
        numbers = {"factor": 1} if kind in _PLAIN else {}
        if kind in _WITH_LENGTH:
            numbers["original_max_position_embeddings"] = values["max_position_embeddings"]
        if kind == "yarn":
            numbers |= _YARN
        ropes.append(absent | numbers | renamed)
    if ropes[0] != ropes[-1]:
        differ = f"rope_scaling={written[0]} and rope_parameters={written[1]} differ"
        raise UsageError(f"{differ}; remove the wrong one")
    return ropes[0]


def _is_plain(rope: dict) -> bool:
    return rope["rope_type"] in _PLAIN and rope["factor"] == 1


def _check_known(rope: dict) -> None:
    """Raises UsageError for a rope_type that is not known, or with numbers missing or unknown."""
    kind = rope["rope_type"]
    fields = _SCALINGS.get(str(kind), {})
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
    missing = [name for name in fields if type(rope.get(name)) not in (int, float)]
    unknown = sorted(rope.keys() - known - fields.keys())
    problems = []
    if not (fields or _is_plain(rope)):
        kinds = f"default, proportional with factor 1, {', '.join(_SCALINGS)}"
        problems.append(f"only rope_type {kinds} can be imported")
    if missing:
        problems.append(f"{kind} needs the numbers {', '.join(missing)}")
    if unknown and (fields or kind in _PLAIN):
        problems.append(f"unknown with {kind}: {', '.join(unknown)}")
    if kind == "yarn" and rope.get("attention_factor") not in (None, 1):
        problems.append("attention_factor must be absent or 1 with yarn")
    if problems:
        raise UsageError(f"the rotation is {json.dumps(rope)}: {'; '.join(problems)}")
