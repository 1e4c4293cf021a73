"""The table of the decoder's parameters: what all code needs to know of them, once.

Initial values, sharding, weight decay, names in Hugging Face files, FLOPs and counts are read from
`TABLE`. A new parameter is a row here, and a line in `prope/model.py` that uses it.

Axes: L layers, D embed_dim, N query heads, K key/value heads, H head_dim, F hidden_dim, V vocab,
C two matrices in one array (key and value, or the gate and what it multiplies).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict


class Parameter(NamedTuple):
    """A row: an array of float32, of one layer where its path begins with "layers"."""

    axes: str
    fan_in: str  # axes that its matmul contracts; none: a bias or a norm's scale, which start at 0
    hf_names: tuple[str, ...]  # tensors in the files of transformers, one for each matrix of C
    hf_axes: str  # axes of such a tensor; in "NH D", N and H are one axis
    draw: int = 2  # which draw of its module gives the initial values, counted as Flax counts
    exists_where: tuple[str, bool] | None = None  # a field of config.model and its value

    @property
    def is_matrix(self) -> bool:
        """Tells whether it is multiplied by, decays and counts for FLOPs; other arrays do not."""
        return bool(self.fan_in)


TABLE = {
    "embedder/input_embedding": Parameter("VD", "D", ("embed_tokens",), "V D", draw=1),
    "layers/pre_attention_norm/scale": Parameter("D", "", ("input_layernorm",), "D"),
    "layers/attn/q_einsum/w": Parameter("NDH", "D", ("self_attn.q_proj",), "NH D"),
    "layers/attn/kv_einsum/w": Parameter(
        "CKDH", "D", ("self_attn.k_proj", "self_attn.v_proj"), "KH D"
    ),
    "layers/attn/q_einsum/b": Parameter(
        "NH", "", ("self_attn.q_proj",), "NH", exists_where=("qkv_bias", True)
    ),
    "layers/attn/kv_einsum/b": Parameter(
        "CKH", "", ("self_attn.k_proj", "self_attn.v_proj"), "KH", exists_where=("qkv_bias", True)
    ),
    "layers/attn/query_norm/scale": Parameter(
        "H", "", ("self_attn.q_norm",), "H", exists_where=("use_qk_norm", True)
    ),
    "layers/attn/key_norm/scale": Parameter(
        "H", "", ("self_attn.k_norm",), "H", exists_where=("use_qk_norm", True)
    ),
    "layers/attn/attn_vec_einsum/w": Parameter("NHD", "NH", ("self_attn.o_proj",), "D NH"),
    "layers/post_attention_norm/scale": Parameter(
        "D", "", ("post_attention_layernorm",), "D", exists_where=("post_norms", True)
    ),
    "layers/pre_ffw_norm/scale": Parameter("D", "", ("post_attention_layernorm",), "D"),
    "layers/mlp/gating_einsum": Parameter(
        "CDF", "D", ("mlp.gate_proj", "mlp.up_proj"), "F D", draw=3
    ),
    "layers/mlp/linear": Parameter("FD", "F", ("mlp.down_proj",), "D F", draw=4),
    "layers/post_ffw_norm/scale": Parameter(
        "D", "", ("post_feedforward_layernorm",), "D", exists_where=("post_norms", True)
    ),
    "final_norm/scale": Parameter("D", "", ("norm",), "D"),
    "head/w": Parameter("VD", "D", ("lm_head",), "V D", draw=1, exists_where=("tied", False)),
}


def parameters(model: ConfigDict) -> dict[str, Parameter]:
    """Returns the rows of the parameters that a run's `config.model` has, by path."""

    def exists(row: Parameter) -> bool:
        if row.exists_where is None:
            return True
        field, value = row.exists_where
        return model[field] == value

    return {path: row for path, row in TABLE.items() if exists(row)}


def axis_sizes(model: ConfigDict) -> dict[str, int]:
    """Returns the size of every axis letter."""
    return {
        "L": model.num_layers,
        "D": model.embed_dim,
        "N": model.num_heads,
        "K": model.num_kv_heads,
        "H": model.head_dim,
        "F": model.hidden_dim,
        "V": model.vocab_size,
        "C": 2,
    }


def stacked_axes(path: str) -> str:
    """Returns the axes of a parameter as it is stored: layers are stacked on a leading axis L."""
    axes = TABLE[path].axes
    return f"L{axes}" if path.startswith("layers/") else axes


def shapes(model: ConfigDict) -> dict[str, Any]:
    """Returns the tree of all parameters as `jax.ShapeDtypeStruct`."""
    sizes = axis_sizes(model)

    def shape(path: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([sizes[axis] for axis in stacked_axes(path)], jnp.float32)

    return nest({path: shape(path) for path in parameters(model)})


def count(model: ConfigDict, matrices_only: bool = False) -> int:
    """Counts the scalars of all parameters, or of those that a token is multiplied by.

    A tied embedding is one of these: as the head, not as the lookup.
    """
    sizes = axis_sizes(model)
    total = 0
    for path, row in parameters(model).items():
        is_lookup = path == "embedder/input_embedding" and not model.tied
        if not matrices_only or (row.is_matrix and not is_lookup):
            total += math.prod(sizes[axis] for axis in stacked_axes(path))
    return total


def embedding_factor(model: ConfigDict) -> float:
    """Returns what embeddings are multiplied by: 1, or sqrt(D) rounded to the compute dtype."""
    factor = math.sqrt(model.embed_dim) if model.scale_embedding else 1.0
    return float(jnp.dtype(model.dtype).type(factor))


def find(keys: Sequence) -> tuple[Parameter, str] | None:
    """Finds the row of a leaf by its key path, and the leaf's axes, with L where it is stacked.

    The leaf may be a parameter, one of a single layer (without "layers" in its path), or a moment
    of the optimizer.
    """
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in keys]
    for path, row in TABLE.items():
        row_names = path.split("/")
        length = min(len(names), len(row_names))
        if length and names[-length:] == row_names[-length:]:
            return row, f"L{row.axes}" if "layers" in names else row.axes
    return None


def nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """Makes nested dicts of values by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree
