"""The class of transformers 5 that computes a run's decoder, with its fields for rotation and windows.

Gemma has one rotation and no windows; SmolLM3 has windows and layers without rotation; Mellum, here without experts,
windows, QK-norm and a rotation per kind of layer. Gemma 2 and 3 cannot: they normalise the output of attention and
MLP, so that its size is lost.
"""

import json
import math

import numpy as np
from ml_collections import ConfigDict

from prope.encodings import (
    SCALINGS,
    layer_frequencies,
    layer_percentages,
    layer_windows,
    logit_scale,
    ntk_wavelength,
)
from prope.errors import UsageError
from prope.rope import frequencies, num_rotated_pairs

_NAMES = {"rope_scaling_factor": "factor", "original_seq_len": "original_max_position_embeddings"}
# Of each rope_type that scales every pair: its fields, and those of config.model.
_SCALINGS = {
    kind: {_NAMES.get(name, name): name for name in SCALINGS[kind]}
    for kind in ("linear", "yarn", "llama3")
}
_SCALINGS["dynamic"] = _SCALINGS["linear"]  # its length is max_position_embeddings


def choose_class(model: ConfigDict) -> tuple[str, dict]:
    """Returns (class, fields of config.json) for a run's `config.model`; raises UsageError where there is none."""
    windows, percentages = layer_windows(model), layer_percentages(model)
    ropes = [
        _rope(model, *layer)
        for layer in zip(percentages, windows, layer_frequencies(model), strict=True)
    ]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    of_kind = dict(zip(kinds, ropes, strict=True))
    fields = {
        "layer_types": kinds,
        "sliding_window": model.sliding_window,
        "rope_parameters": of_kind,
    }
    if model.use_qk_norm and ropes == [of_kind[kind] for kind in kinds]:
        return "MellumForCausalLM", fields | {"mlp_layer_types": ["dense"] * model.num_layers}
    rotated = [rope for rope in ropes if rope.get("partial_rotary_factor") != 0] or ropes
    if not model.use_qk_norm and all(rope == rotated[0] for rope in rotated):
        if rotated == ropes and "sliding_attention" not in kinds:
            return "GemmaForCausalLM", {"rope_parameters": rotated[0]}
        fields |= {"rope_parameters": rotated[0], "use_sliding_window": True}
        return "SmolLM3ForCausalLM", fields | {
            "no_rope_layers": [int(rope in rotated) for rope in ropes]
        }  # 0: none
    names = ("local_max_wavelength", "local_rope_percentage", "rope_scaling_type", "logit_scale")
    names = names if isinstance(model.rope_percentage, int | float) else ("rope_percentage",)
    name = next(name for name in names if model[name] not in (None, "none"))
    allowed = (
        "of the same layer_types"
        if model.use_qk_norm
        else "without QK-norm that rotate or have logit_scale"
    )
    raise UsageError(
        f"config.model.{name}={model[name]}: in transformers, layers {allowed} must have one encoding"
    )


def _rope(model: ConfigDict, p: float, window: int | None, freqs: np.ndarray) -> dict:
    """Returns rope_parameters of a layer: of a named rope_type, or of longrope, which has a divisor for every pair."""
    head_dim, pairs = model.head_dim, int(np.count_nonzero(freqs))
    theta, scaling, scale = model.max_wavelength, model.rope_scaling_type, logit_scale(model)
    if scaling == "remove":
        none = "no class of transformers removes pairs; export the run with another scaling"
        raise UsageError(f"config.model.rope_scaling_type=remove: {none}")
    if window is not None:
        theta, scaling, scale = model.local_max_wavelength or theta, "none", 1.0
    if (
        pairs < head_dim // 2
        or model.rope_type != "proportional"
        or (scale != 1 and scaling != "yarn")
    ):
        if scaling == "dynamic":
            needs = "in transformers it needs rope_type=proportional, p=1 and logit_scale=none"
            got = f"{model.rope_type}, {p} and {model.logit_scale}"
            raise UsageError(f"config.model.rope_scaling_type=dynamic: {needs}; got {got}")
    elif scaling in _SCALINGS:
        rope = {"rope_type": scaling, "rope_theta": theta}
        rope |= {theirs: model[ours] for theirs, ours in _SCALINGS[scaling].items()}
        if scaling == "yarn" and model.logit_scale != "yarn":
            rope["attention_factor"] = math.sqrt(
                scale
            )  # of cos and sin; without it, transformers takes yarn's
        return rope
    theta = (
        ntk_wavelength(head_dim, theta, model.rope_scaling_factor) if scaling == "ntk" else theta
    )
    plain = frequencies(head_dim, theta)
    if scale == 1 and np.array_equal(freqs, np.where(np.arange(head_dim // 2) < pairs, plain, 0)):
        shares = (
            p,
            2 * pairs / head_dim,
            (2 * pairs + 1) / head_dim,
        )  # the second may lose a pair by rounding
        p = next(float(share) for share in shares if num_rotated_pairs(head_dim, share) == pairs)
        return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": p}
    # JSON has no infinity; after division by 1e30, float32 rotates no pair at any position.
    divisors = np.divide(plain, freqs, out=np.full(head_dim // 2, 1e30), where=freqs > 0).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": model.rope_scaling_factor,
        "attention_factor": math.sqrt(scale),
        "original_max_position_embeddings": model.original_seq_len
        or 1,  # no effect: the lists are the same
    }


def read_rotation(values: dict) -> dict:
    """Returns the fields of config.model for config.json's, as transformers reads them: rope_scaling, older, first."""
    fields = [values[name] for name in ("rope_scaling", "rope_parameters") if values.get(name)] or [
        {}
    ]
    if other := [rope for rope in fields if not isinstance(rope, dict)]:
        raise UsageError(
            f"the rotation is {json.dumps(other[0])}: must be an object; restore the original file"
        )
    # The releases have only rope_theta: every pair is rotated.
    theta, p = values.get("rope_theta", 1e4), values.get("partial_rotary_factor", 1)
    absent = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": p, "factor": 1}
    ropes = [
        absent | {{"type": "rope_type"}.get(name, name): value for name, value in rope.items()}
        for rope in fields
    ]
    if ropes[0] != ropes[-1]:
        raise UsageError(
            f"rope_scaling={fields[0]} and rope_parameters={fields[1]} differ; remove the wrong one"
        )
    rope = ropes[0]
    kind, theta, p = (rope[name] for name in ("rope_type", "rope_theta", "partial_rotary_factor"))
    scaling, plain = (
        _SCALINGS.get(kind, {}),
        kind in ("default", "proportional") and rope["factor"] == 1,
    )
    temperature = rope.get("attention_factor") if kind == "yarn" else 1  # absent, it is yarn's
    known = plain or (scaling and all(type(rope.get(name)) in (int, float) for name in scaling))
    if (
        not known
        or rope.keys() - {*absent, *scaling, "attention_factor"}
        or temperature not in (None, 1)
    ):
        allowed = f"only rope_type default, proportional with factor 1, {', '.join(_SCALINGS)} can be imported"
        raise UsageError(
            f"the rotation is {json.dumps(rope)}: {allowed}, with all of their numbers and no others"
        )
    if type(p) not in (int, float) or not 0 <= p <= 1 or (kind != "proportional" and p != 1):
        allowed = f"must be a fraction in [0, 1] with rope_type proportional, and 1 with {kind}"
        raise UsageError(f"partial_rotary_factor={json.dumps(p)}: {allowed}")
    if type(theta) not in (int, float):
        raise UsageError(
            f"rope_theta={json.dumps(theta)}: must be a number; it is 10000.0 in Gemma 1"
        )
    model = {"max_wavelength": float(theta), "rope_percentage": float(p)}
    if not plain:
        model |= {"rope_scaling_type": kind} | {
            ours: rope[theirs] for theirs, ours in scaling.items()
        }
    if kind == "dynamic":
        model["original_seq_len"] = values.get("max_position_embeddings", 8192)
    return model | ({"logit_scale": "yarn"} if temperature is None else {})
