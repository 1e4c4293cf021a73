"""A model of transformers whose key heads and layers rotate by frequencies of their own.

`prope.export_hf --custom_code` writes it beside config.json, which has `rope_frequencies`, radians
per token of every pair, [layers][key heads][pairs], and `rope_attention_factors`, by which a layer
multiplies cos and sin. All else is as in the class named here.
"""

import importlib.util
import sys

import torch
import transformers

CLASS = "LlamaForCausalLM"


def positions(x, position_ids, *args):
    """Returns what layers get for cos and sin [B, T, H]: twice the positions [B, T, 1]."""
    position_ids = position_ids[..., None]
    return position_ids, position_ids


class Positions:
    """Takes the place of a rotary embedding, which the library would initialise."""

    def __new__(cls, *args, **kwargs):
        """Returns a function, not a module."""
        return positions


def with_own_tables(attention, args, kwargs):
    """Calls a layer's attention with cos and sin [B, K, T, P] of its own instead of positions."""
    m, _ = kwargs["position_embeddings"]
    dtype = torch.float32 if m.device.type == "mps" else torch.float64
    layer = attention.layer_idx
    freqs = attention.config.rope_frequencies[layer]
    freqs = torch.tensor(freqs, dtype=dtype, device=m.device)
    angles = m[:, None] * freqs[:, None]
    factor = attention.config.rope_attention_factors[layer]
    tables = tuple((table * factor).float() for table in (angles.cos(), angles.sin()))
    return args, kwargs | {"position_embeddings": tables}


def rotate(*args, unsqueeze_dim=1):
    """Rotates queries and keys by cos and sin; the queries of a group take their key head's.

    Heads are the axis `unsqueeze_dim` of queries and keys, 1 or 2.
    """
    *inputs, cos, sin = args
    axis = unsqueeze_dim
    cos, sin = (table.transpose(1, axis).unsqueeze(axis + 1) for table in (cos, sin))
    rotated = []
    for x in inputs:
        first, second = x.unflatten(axis, (cos.shape[axis], -1)).chunk(2, dim=-1)
        lanes = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        rotated.append(lanes.flatten(axis, axis + 1).to(x.dtype))
    return rotated if len(rotated) > 1 else rotated[0]


# A second copy of the library's module, in which these functions are used. The library's stays.
original = importlib.util.find_spec(getattr(transformers, CLASS).__module__)
copy = f"{original.name}_of_{__name__.replace('.', '_')}"
spec = importlib.util.spec_from_file_location(copy, original.origin)
modeling = sys.modules[copy] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(modeling)
modeling.apply_rotary_pos_emb = rotate
for name in [*vars(modeling)]:
    if name.endswith("RotaryEmbedding"):
        setattr(modeling, name, Positions)
Base = getattr(modeling, CLASS)


class PropeConfig(Base.config_class):
    """The class's config, with a model_type and a rope_type that no other class loads."""

    model_type = "prope"

    def _validate_prope_rope_parameters(self, rope_parameters, ignore_keys=None):
        pass


class PropeForCausalLM(Base):
    """The class, with these rotations."""

    config_class = PropeConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(with_own_tables, with_kwargs=True)
