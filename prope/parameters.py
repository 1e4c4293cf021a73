"""The table of the decoder's parameters: what all code needs to know of them, once.

Initial values, sharding, weight decay, names in Hugging Face files, FLOPs and counts are read from
`TABLE`. A new parameter is a row here, and a line in `prope/model.py` that uses it.

A parameter's path is that of its row, but where layers differ in shape: then the name of their
stack (`prope/spec/model.py`) follows "layers", as in "layers/full_attention/attn/q_einsum/w".

Axes: L layers, of one stack, D embed_dim, N query heads, K key/value heads, H head_dim, F
hidden_dim, V vocab, Q lanes of a layer's own input, M all layers, C two matrices in one array (key
and value, or the gate and what it multiplies), O one number.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prope.spec.kinds import STACKS
from prope.spec.model import ModelSpec


class Parameter(NamedTuple):
    """A row: an array of float32, of one layer where its path begins with "layers"."""

    axes: str
    fan_in: str  # axes that its matmul contracts; none: a bias or a scale, which is not drawn
    hf_names: str  # tensors in the files of transformers, one for each matrix of C
    hf_axes: str  # axes of such a tensor; in "NH D", N and H are one axis
    draw: int = 2  # which draw of its module gives the initial values, counted as Flax counts
    # Fields of a `ModelSpec` or a `Layer` that must be true, or with "not" false: all of them.
    exists_where: str = ""
    initial: float = 0.0  # where it is not drawn

    @property
    def is_matrix(self) -> bool:
        """Returns whether it is multiplied by, decays and counts for FLOPs; other arrays do not."""
        return bool(self.fan_in)


TABLE = {
    "embedder/input_embedding": Parameter("VD", "D", "embed_tokens", "V D", draw=1),
    "layers/pre_attention_norm/scale": Parameter("D", "", "input_layernorm", "D"),
    "layers/attn/q_einsum/w": Parameter("NDH", "D", "self_attn.q_proj", "NH D"),
    "layers/attn/kv_einsum/w": Parameter(
        "CKDH",
        "D",
        "self_attn.k_proj self_attn.v_proj",
        "KH D",
        exists_where="not shares_kv, not key_is_value",
    ),
    "layers/attn/k_einsum/w": Parameter(
        "KDH", "D", "self_attn.k_proj", "KH D", exists_where="not shares_kv, key_is_value"
    ),
    "layers/attn/q_einsum/b": Parameter(
        "NH", "", "self_attn.q_proj", "NH", exists_where="qkv_bias"
    ),
    "layers/attn/kv_einsum/b": Parameter(
        "CKH",
        "",
        "self_attn.k_proj self_attn.v_proj",
        "KH",
        exists_where="qkv_bias, not shares_kv, not key_is_value",
    ),
    "layers/attn/k_einsum/b": Parameter(
        "KH", "", "self_attn.k_proj", "KH", exists_where="qkv_bias, not shares_kv, key_is_value"
    ),
    "layers/attn/query_norm/scale": Parameter(
        "H", "", "self_attn.q_norm", "H", exists_where="use_qk_norm"
    ),
    "layers/attn/key_norm/scale": Parameter(
        "H", "", "self_attn.k_norm", "H", exists_where="use_qk_norm, not shares_kv"
    ),
    "layers/attn/attn_vec_einsum/w": Parameter("NHD", "NH", "self_attn.o_proj", "D NH"),
    "layers/post_attention_norm/scale": Parameter(
        "D", "", "post_attention_layernorm", "D", exists_where="post_norms"
    ),
    "layers/pre_ffw_norm/scale": Parameter("D", "", "post_attention_layernorm", "D"),
    "layers/mlp/gating_einsum": Parameter("CDF", "D", "mlp.gate_proj mlp.up_proj", "F D", draw=3),
    "layers/mlp/linear": Parameter("FD", "F", "mlp.down_proj", "D F", draw=4),
    "layers/post_ffw_norm/scale": Parameter(
        "D", "", "post_feedforward_layernorm", "D", exists_where="post_norms"
    ),
    "layers/per_layer_input_gate/w": Parameter(
        "DQ", "D", "per_layer_input_gate", "Q D", exists_where="has_layer_inputs"
    ),
    "layers/per_layer_projection/w": Parameter(
        "QD", "Q", "per_layer_projection", "D Q", exists_where="has_layer_inputs"
    ),
    "layers/post_per_layer_input_norm/scale": Parameter(
        "D", "", "post_per_layer_input_norm", "D", exists_where="has_layer_inputs"
    ),
    "layers/skip_scale": Parameter(
        "O", "", "layer_scalar", "O", exists_where="use_skip_scale", initial=1.0
    ),
    "embedder/per_layer_embeddings": Parameter(
        "VMQ", "Q", "embed_tokens_per_layer", "V MQ", draw=2, exists_where="has_layer_inputs"
    ),
    "embedder/per_layer_model_projection/w": Parameter(
        "DMQ", "D", "per_layer_model_projection", "MQ D", exists_where="has_layer_inputs"
    ),
    "embedder/per_layer_projection_norm/scale": Parameter(
        "Q", "", "per_layer_projection_norm", "Q", exists_where="has_layer_inputs"
    ),
    "final_norm/scale": Parameter("D", "", "norm", "D"),
    "head/w": Parameter("VD", "D", "lm_head", "V D", draw=1, exists_where="not tied"),
}


def parameters(model: ModelSpec) -> dict[str, Parameter]:
    """Returns the rows of the parameters that a model has, by path."""
    switches = vars(model) | {"has_layer_inputs": model.per_layer_input_dim > 0}
    rows = {}
    for path, row in TABLE.items():
        if not path.startswith("layers/"):
            if _exists(row, switches):
                rows[path] = row
            continue
        for stack, numbers in model.stacks.items():
            layer = model.layers[numbers[0]]
            if _exists(row, switches | vars(layer)):
                rows[path.replace("layers/", f"layers/{stack}/", 1) if stack else path] = row
    return rows


def _exists(row: Parameter, values: dict[str, Any]) -> bool:
    conditions = filter(None, row.exists_where.split(", "))
    return all(
        bool(values[field.removeprefix("not ")]) != field.startswith("not ") for field in conditions
    )


def stack_of(path: str) -> str | None:
    """Returns the stack of layers that a path names, "" for the only one; None: of no layer."""
    names = path.split("/")
    if names[0] != "layers":
        return None
    return names[1] if names[1] in STACKS else ""


def row_path(path: str) -> str:
    """Returns the path of a parameter's row in `TABLE`."""
    stack = stack_of(path)
    return path.replace(f"/{stack}/", "/", 1) if stack else path


def axis_sizes(model: ModelSpec, path: str) -> dict[str, int]:
    """Returns the size of every axis letter, for the parameter at `path`."""
    numbers = model.stacks.get(stack_of(path) or "", range(model.num_layers))
    layer = model.layers[numbers[0]]
    return {
        "L": len(numbers),
        "M": model.num_layers,
        "D": model.embed_dim,
        "N": model.num_heads,
        "K": layer.num_kv_heads,
        "H": layer.head_dim,
        "F": layer.hidden_dim,
        "V": model.vocab_size,
        "Q": model.per_layer_input_dim,
        "C": 2,
        "O": 1,
    }


def stacked_axes(path: str) -> str:
    """Returns the axes of a parameter as it is stored: layers are stacked on a leading axis L."""
    axes = TABLE[row_path(path)].axes
    return f"L{axes}" if path.startswith("layers/") else axes


def stacked_shape(model: ModelSpec, path: str) -> tuple[int, ...]:
    """Returns the shape of a parameter as it is stored."""
    sizes = axis_sizes(model, path)
    return tuple(sizes[axis] for axis in stacked_axes(path))


def shapes(model: ModelSpec) -> dict[str, Any]:
    """Returns the tree of all parameters as `jax.ShapeDtypeStruct`."""

    def shape(path):
        return jax.ShapeDtypeStruct(stacked_shape(model, path), jnp.float32)

    return nest({path: shape(path) for path in parameters(model)})


def count(model: ModelSpec, matrices_only: bool = False) -> int:
    """Counts the scalars of all parameters, or of those that a token is multiplied by.

    A tied embedding is one of these: as the head, not as the lookup.
    """
    lookups = {"embedder/per_layer_embeddings"}
    if not model.tied:
        lookups.add("embedder/input_embedding")
    total = 0
    for path, row in parameters(model).items():
        if not matrices_only or (row.is_matrix and path not in lookups):
            total += math.prod(stacked_shape(model, path))
    return total


def find(keys: Sequence) -> tuple[Parameter, str] | None:
    """Finds the row of a leaf by its key path, and the leaf's axes, with L where it is stacked.

    The leaf may be a parameter, one of a single layer (without "layers" in its path), or a moment
    of the optimizer.
    """
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in keys]
    names = [name for name in names if name not in STACKS]
    for path, row in TABLE.items():
        row_names = path.split("/")
        length = min(len(names), len(row_names))
        if length and names[-length:] == row_names[-length:]:
            return row, f"L{row.axes}" if "layers" in names else row.axes
    return None


def nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """Makes nested dicts of values by path."""
    tree = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def by_stack(model: ModelSpec, layer_params: dict) -> dict[str, Any]:
    """Returns `params["layers"]` by stack: where all layers are in one, its name is ""."""
    return {"": layer_params} if "" in model.stacks else layer_params
