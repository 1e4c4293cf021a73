"""The decoder: Gemma 1 (RMSNorm, MQA/GQA/MHA, GeGLU, tied embedding) with p-RoPE. The one file that imports Flax.

Axes: B batch, T query length, S key length, D embed_dim, N query heads, K key/value heads, H head_dim,
F hidden_dim, V vocab, L layers, P = H / 2 rotation pairs.

Parameters are float32 and have the names of DeepMind's Gemma. Those of the layers are stacked on a leading L
whether the layers are scanned or unrolled, so that a checkpoint does not depend on which it was.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from prope.attention import attention
from prope.config import layer_percentages
from prope.rope import mask_slow_pairs, num_rotated_pairs, rotate, rotation_table
from prope.sharding import all_gather_param, constrain, constrain_like_param, embedding_lookup

Params = dict[str, Any]
Cache = dict[str, jax.Array]  # {"key", "value"}, each [L, B, K, S, H]: slot s holds the token at position s


class Captured(NamedTuple):
    """What attention is made of in one layer: queries [B, T, N, H], keys and values [B, T, K, H].

    The rotated ones are as attention sees them: rotated_query rotated_key^T / sqrt(H) is what its softmax takes.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rotated_query: jax.Array
    rotated_key: jax.Array


# What the backward pass of a layer finds kept besides its input, by config.model.remat; the rest it computes again.
# "attention_out" is the output of attention with its softmax's normaliser: with it, attention is not run again.
_SAVED_RESIDUALS = {
    "minimal": ("query", "key", "value", "attention_out", "gate", "up"),
    "save_qkv": ("query", "key", "value", "attention_out"),
    "full": (),
}


def init(config: ConfigDict, key: jax.Array) -> Params:
    """Initial parameters for `config` (a run's `config.model`): a function of it and the key, of nothing else."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    plain = ConfigDict(config.to_dict() | {"attention": "xla"})  # kernels want longer sequences; shapes are the same
    return _decoder(plain).init(key, tokens, tokens)["params"]


def hidden_states(
    config: ConfigDict,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """The decoder's normalised output for every token, in `config.dtype`; `logits` of it are the prediction."""
    return _decoder(config).apply({"params": params}, tokens, positions, segment_ids)[0]


def prefill(
    config: ConfigDict, params: Params, tokens: Int[Array, "B T"], cache: Cache
) -> tuple[Float[Array, "B T D"], Cache]:
    """`hidden_states` of tokens that open their sequences, and the cache with them in its first T slots.

    Rows may be padded on the right: no token sees what comes after it, and `decode` writes over the padding's slots.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return _decoder(config).apply({"params": params}, tokens, positions, None, cache)


def decode(
    config: ConfigDict, params: Params, tokens: Int[Array, "B T"], cache: Cache, first: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], Cache]:
    """`hidden_states` of T more tokens, a row's first of them at its position `first`, and the cache with them in it.

    A row sees the slots up to its own positions: what stands in later ones is of no account.
    """
    positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return _decoder(config).apply({"params": params}, tokens, positions, None, cache, first)


def empty_cache(config: ConfigDict, batch: int, length: int) -> Cache:
    """Room for the keys and values of `length` tokens of `batch` sequences."""
    shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
    return {name: jnp.zeros(shape, config.dtype) for name in ("key", "value")}


def embed(config: ConfigDict, table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """What enters the first layer. The table may be a part of the embedding, with tokens that count its rows."""
    part = FrozenConfigDict(ConfigDict(config.to_dict() | {"vocab_size": table.shape[0]}))
    return Embedder(part).apply({"params": {"input_embedding": table}}, tokens)


def layer(
    config: ConfigDict,
    params: Params,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    pairs: int | Int[Array, ""],
    rotate_fn: Callable | None = None,
) -> tuple[Float[Array, "B T D"], Captured]:
    """One layer by itself, as analysis runs them: the residual stream after it, and what its attention was made of.

    Args:
      config: as everywhere.
      params: of this layer alone: those of "layers" without their leading axis.
      x: the residual stream that enters.
      positions: of the tokens.
      pairs: how many of the fastest pairs this layer rotates.
      rotate_fn: replaces `rotate_qkv`, with its arguments and results.
    """
    table = mask_slow_pairs(rotation_table(positions, config.head_dim, config.max_wavelength), pairs)
    block = Block(FrozenConfigDict(config), rotate_fn or rotate_qkv)
    ((x, _), _), made = block.apply({"params": params}, (x, None), None, None, table, None, None, mutable="captured")
    return x, Captured(**made["captured"]["attn"])


def final_norm(params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The normalised output of the last layer, which `logits` scores; `params` are those of "final_norm"."""
    return RMSNorm().apply({"params": params}, x)


def rotate_qkv(query, key, value, table):
    """Queries [B, T, N, H], keys and values [B, T, K, H] as attention sees them: rotated by a table [2, B, T, P]."""
    return rotate(query, table), rotate(key, table), value


def logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Scores of the next token, float32: the product with the tied embedding, in hidden's dtype."""
    return jnp.einsum(
        "...D,VD->...V", hidden, embedding(params).astype(hidden.dtype), preferred_element_type=jnp.float32
    )


def embedding(params: Params) -> Float[Array, "V D"]:
    """The table that both embeds tokens and, transposed, scores them."""
    return params["embedder"]["input_embedding"]


def rotated_pairs(config: ConfigDict) -> int | list[int]:
    """How many pairs p-RoPE turns: a number, or one per layer where layers differ."""
    pairs = [num_rotated_pairs(config.head_dim, p) for p in layer_percentages(config)]
    return pairs if isinstance(config.rope_percentage, tuple) else pairs[0]


def num_parameters(params: Params) -> int:
    """The number of scalars in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _decoder(config: ConfigDict) -> "Decoder":
    return Decoder(FrozenConfigDict(config))


def _fan_in(in_axes: tuple[int, ...], ndim: int) -> nn.initializers.Initializer:
    """Truncated normal of variance 1 / (product of the sizes of the axes that the matrix is summed over)."""
    rest = tuple(axis for axis in range(ndim) if axis not in in_axes)
    return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=in_axes, out_axis=rest)


class Decoder(nn.Module):
    """Embedding, L layers, final norm."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, tokens, positions, segment_ids=None, cache=None, first_query=None):
        cfg = self.config
        x = Embedder(cfg, name="embedder")(tokens)
        # One table for all layers: it depends on the positions only. Where p differs, a layer leaves out some pairs.
        percentages = layer_percentages(cfg)
        table = rotation_table(positions, cfg.head_dim, cfg.max_wavelength, max(percentages))
        pairs = None
        if len(set(percentages)) > 1:
            pairs = jnp.array(rotated_pairs(cfg), jnp.int32)
        block = Block
        if cfg.remat != "none":
            policy = jax.checkpoint_policies.save_only_these_names(*_SAVED_RESIDUALS[cfg.remat])
            block = nn.remat(Block, policy=policy, prevent_cse=not cfg.scan_layers)
        # The cache is carried whole, so that a step writes its own tokens' slots and copies no others.
        layer = None if cache is None else jnp.arange(cfg.num_layers)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast, nn.broadcast, nn.broadcast),
            length=cfg.num_layers,
            unroll=1 if cfg.scan_layers else cfg.num_layers,
        )
        (x, cache), _ = layers(cfg, name="layers")((x, cache), layer, pairs, table, segment_ids, first_query)
        return RMSNorm(name="final_norm")(x), cache


class Embedder(nn.Module):
    """Looks tokens up and multiplies by sqrt(D), in float32; casts last."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        table = self.param("input_embedding", _fan_in((1,), 2), (cfg.vocab_size, cfg.embed_dim))
        return embedding_lookup(table, tokens, lambda rows: (rows * math.sqrt(cfg.embed_dim)).astype(cfg.dtype))


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised copy of the residual stream and added to it."""

    config: FrozenConfigDict
    rotate_fn: Callable = rotate_qkv

    @nn.compact
    def __call__(self, carry, layer, pairs, table, segment_ids, first_query):
        x, cache = carry
        table = table if pairs is None else mask_slow_pairs(table, pairs)
        normed = RMSNorm(name="pre_attention_norm")(x)
        attend = Attention(self.config, self.rotate_fn, name="attn")
        attended, cache = attend(normed, cache, layer, table, segment_ids, first_query)
        x = x + attended
        x = x + MLP(self.config, name="mlp")(RMSNorm(name="pre_ffw_norm")(x))
        return (x, cache), None


class Attention(nn.Module):
    """Projections, p-RoPE on queries and keys, causal attention, and the way back to D."""

    config: FrozenConfigDict
    rotate_fn: Callable

    @nn.compact
    def __call__(self, x, cache, layer, table, segment_ids, first_query):
        cfg = self.config
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        query = Einsum((N, D, H), in_axes=(1,), name="q_einsum")("BTD,NDH->BTNH", x)
        key, value = Einsum((2, K, D, H), in_axes=(2,), name="kv_einsum")("BTD,CKDH->CBTKH", x)
        captured = {"query": query, "key": key, "value": value}
        query, key, value = self.rotate_fn(query, key, value, table)
        for name, array in (captured | {"rotated_query": query, "rotated_key": key}).items():
            self.sow("captured", name, array, reduce_fn=lambda _, new: new)  # nothing, unless `layer` asks for it
        query = checkpoint_name(constrain(query, "BTNH"), "query")
        key = checkpoint_name(constrain(key, "BTKH"), "key")
        value = checkpoint_name(constrain(value, "BTKH"), "value")
        if cache is not None:
            new = {"key": key, "value": value}
            cache = {name: _written(cache[name], new[name], layer, first_query) for name in cache}
            if first_query is not None:
                key, value = (cache[name][layer].swapaxes(1, 2) for name in ("key", "value"))
        mixed = attention(
            query, key, value, segment_ids=segment_ids, first_query=first_query, implementation=cfg.attention
        )
        out = Einsum((N, H, D), in_axes=(0, 1), name="attn_vec_einsum")("BTNH,NHD->BTD", mixed)
        return constrain(out, "BTD"), cache


def _written(cache, new, layer, first):
    """The cache [L, B, K, S, H] with a layer's keys or values [B, T, K, H] in the slots from `first` [B], or from 0."""
    B, T = new.shape[:2]
    if first is None:
        return cache.at[layer, :, :, :T].set(new.swapaxes(1, 2))
    return cache.at[layer, jnp.arange(B)[:, None], :, first[:, None] + jnp.arange(T)].set(new)


class MLP(nn.Module):
    """GeGLU: gelu(x W0) * (x W1), then back to D. The gelu is the tanh form, as in Gemma."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, x):
        D, F = self.config.embed_dim, self.config.hidden_dim
        gating = self.param("gating_einsum", _fan_in((1,), 3), (2, D, F)).astype(x.dtype)
        linear = self.param("linear", _fan_in((0,), 2), (F, D)).astype(x.dtype)
        gating, linear = all_gather_param(gating, "CDF"), all_gather_param(linear, "FD")
        rows = x.reshape(-1, D)  # matmuls over one axis of tokens: on a CPU the gradient is twice as fast
        gate = checkpoint_name(constrain(rows @ gating[0], "BF"), "gate")
        up = checkpoint_name(constrain(rows @ gating[1], "BF"), "up")
        return constrain(_gated(gate, up, linear).reshape(x.shape), "BTD")


@jax.custom_vjp
def _gated(gate, up, linear):
    """(gelu(gate) * up) @ linear, of rows; the gelu is the tanh form."""
    return (nn.gelu(gate, approximate=True) * up) @ linear


def _gated_backward(residuals, pull):
    gate, up, linear = residuals
    active = nn.gelu(gate, approximate=True) * up
    pulled_linear = constrain_like_param(active.T @ pull, "FD")
    pulled = constrain(pull @ linear.T, "BF")
    # One after the other, so that `active` is gone before the two gradients that are as large come.
    pulled, pulled_linear, gate, up = jax.lax.optimization_barrier((pulled, pulled_linear, gate, up))
    _, back = jax.vjp(lambda gate, up: nn.gelu(gate, approximate=True) * up, gate, up)
    return *back(pulled), pulled_linear


_gated.defvjp(lambda *residuals: (_gated(*residuals), residuals), _gated_backward)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale) over the last axis, in float32; scale starts at 0."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + scale)).astype(x.dtype)


class Einsum(nn.Module):
    """A matrix `w` of `shape`, summed over its `in_axes` by an einsum."""

    shape: tuple[int, ...]
    in_axes: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        w = self.param("w", _fan_in(self.in_axes, len(self.shape)), self.shape)
        return jnp.einsum(equation, x, all_gather_param(w.astype(x.dtype), equation.split(",")[1].split("->")[0]))
