"""The decoder: Gemma 1 (RMSNorm, MQA/GQA/MHA, GeGLU, tied embedding) with p-RoPE. The one file that imports Flax.

Axes: B batch, T query length, S key length, D embed_dim, N query heads, K key/value heads, H head_dim,
F hidden_dim, V vocab, L layers, P = H / 2 rotation pairs.

Parameters are float32 and have the names of DeepMind's Gemma. Those of the layers are stacked on a leading axis L,
scanned or unrolled, so that checkpoints do not depend on `scan_layers`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from prope.attention import attention, save_policy
from prope.encodings import layer_frequencies, layer_windows, logit_scale
from prope.rope import rotate, rotation_table
from prope.sharding import (
    all_gather_param,
    constrain,
    constrain_like_param,
    embedding_lookup,
    num_parts,
)

Params = dict[str, Any]
Cache = dict[
    str, jax.Array
]  # {"key", "value"}, each [L, B, K, S, H]: slot s holds the token at position s


class Captured(NamedTuple):
    """Inputs of one layer's attention: queries [B, T, N, H], keys and values [B, T, K, H].

    The softmax is of rotated_query rotated_key^T / sqrt(H).
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rotated_query: jax.Array
    rotated_key: jax.Array


# What a layer saves for its backward pass besides its input, by config.model.remat; the rest is recomputed.
# "attention_out" is attention's output with its logsumexp: with it, attention is not run again.
_SAVED_RESIDUALS = {
    "minimal": ("query", "key", "value", "attention_out", "gate", "up"),
    "save_qkv": ("query", "key", "value", "attention_out"),
    "full": (),
}


def init(config: ConfigDict, key: jax.Array) -> Params:
    """Initialises the parameters for `config` (a run's `config.model`), as a function of it and the key alone."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    plain = ConfigDict(
        config.to_dict() | {"attention": "xla"}
    )  # kernels need longer sequences; shapes are the same
    return Decoder(FrozenConfigDict(plain)).init(key, tokens, tokens)["params"]


def hidden_states(
    config: ConfigDict,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Runs the decoder: its normalised output for every token, in `config.dtype`, from which `logits` predicts."""
    return _run(config, params, tokens, positions, segment_ids)[0]


def decode(
    config: ConfigDict,
    params: Params,
    tokens: Int[Array, "B T"],
    cache: Cache,
    first: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Cache]:
    """Returns `hidden_states` of T more tokens, from position `first` of each row on, and the cache with them.

    A token sees the slots up to its own position; later slots may hold anything. `params` may have "layers" as a tuple.
    """
    positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return _run(config, params, tokens, positions, cache=cache, first=first)


def embed(
    config: ConfigDict, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Computes the first layer's input. The table may hold some rows of the embedding, which tokens then index."""
    config = FrozenConfigDict(ConfigDict(config.to_dict() | {"vocab_size": table.shape[0]}))
    return Embedder(config).apply({"params": {"input_embedding": table}}, tokens)


def layer(
    config: ConfigDict,
    params: Params,
    x: Float[Array, "B T D"],
    table: Float[Array, "2 b T P"],
    rotate_fn: Callable | None = None,
) -> tuple[Float[Array, "B T D"], Captured]:
    """Runs one layer, for analysis: returns the residual stream after it and its attention's inputs.

    Args:
      config: a run's `config.model`.
      params: of this layer: those of "layers" without their leading axis.
      x: the residual stream before the layer.
      table: of this layer's rotation, with b = 1 or B.
      rotate_fn: replaces `rotate_qkv`, with the same arguments and results.
    """
    block = Block(FrozenConfigDict(config), None, rotate_fn or rotate_qkv)
    ((x, _), _), sown = block.apply({"params": params}, (x, None), None, table, mutable="captured")
    return x, Captured(**sown["captured"]["attn"])


def final_norm(params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Normalises the last layer's output for `logits`; `params` are those of "final_norm"."""
    return RMSNorm().apply({"params": params}, x)


def rotate_qkv(query, key, value, table):
    """Rotates queries [B, T, N, H] and keys [B, T, K, H], not values, by a table [2, B, T, P]."""
    return rotate(query, table), rotate(key, table), value


def logits(params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Scores the next token, float32: a matmul with the tied embedding in hidden's dtype."""
    table = embedding(params).astype(hidden.dtype)
    return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)


def embedding(params: Params) -> Float[Array, "V D"]:
    """Returns the tied embedding: it embeds tokens and, transposed, scores them."""
    return params["embedder"]["input_embedding"]


def _run(config, params, tokens, positions, segment_ids=None, cache=None, first=None):
    """Embeds tokens, runs the layers and normalises: (`hidden_states` [B, T, D], the cache)."""
    freqs, encoding = np.unique(
        layer_frequencies(config, num_parts() * tokens.shape[1]), axis=0, return_inverse=True
    )
    tables = [
        rotation_table(positions, own) for own in freqs
    ]  # once a step; layers of one encoding share one
    windows, carry = layer_windows(config), (embed(config, embedding(params), tokens), cache)

    def run_layer(carry, params, i, table, window):
        block = Block(FrozenConfigDict(config), window)
        return block.apply({"params": params}, carry, i, table, segment_ids, first)[0]

    if not isinstance(params["layers"], dict):  # split, for `decode`
        for i, of_layer in enumerate(params["layers"]):
            carry = run_layer(carry, of_layer, i, tables[encoding[i]], windows[i])
    else:
        carry = _scan_layers(config, run_layer, carry, params["layers"], tables, encoding, windows)
    return final_norm(params["final_norm"], carry[0]), carry[1]


def _scan_layers(config, run_layer, carry, params, tables, encoding, windows):
    """Runs the layers in a loop over the periods of `layer_types`, of one layer without them: windows are static."""
    if config.remat != "none":
        policy, prevent_cse = save_policy(_SAVED_RESIDUALS[config.remat]), not config.scan_layers
        run_layer = jax.checkpoint(
            run_layer, policy=policy, prevent_cse=prevent_cse, static_argnums=4
        )
    L, period = config.num_layers, len(config.layer_types) or 1
    # The whole cache is carried, so that a step writes the slots of its own tokens and copies no others.
    layers = (
        params,
        None if carry[1] is None else jnp.arange(L),
        None if len(tables) == 1 else jnp.asarray(encoding),
    )
    tables = tables[0] if len(tables) == 1 else jnp.stack(tables)

    def run_period(carry, layers):
        for j in range(period):
            of_layer, i, e = jax.tree.map(lambda x: x[j], layers) if period > 1 else layers  # noqa: B023
            carry = run_layer(carry, of_layer, i, tables if e is None else tables[e], windows[j])
        return carry, None

    if period > 1:
        layers = jax.tree.map(lambda x: x.reshape(L // period, period, *x.shape[1:]), layers)
    return jax.lax.scan(run_period, carry, layers, unroll=1 if config.scan_layers else L // period)[
        0
    ]


def _fan_in(in_axes: tuple[int, ...], ndim: int) -> nn.initializers.Initializer:
    """Makes a truncated normal of variance 1 / fan-in, the product of the sizes of the contracted axes."""
    out_axes = tuple(axis for axis in range(ndim) if axis not in in_axes)
    return nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=in_axes, out_axis=out_axes
    )


class Decoder(nn.Module):
    """Embedding, L layers, final norm: the tree of parameters and its initial values, which `_run` computes with."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, tokens, positions):
        cfg = self.config
        x = Embedder(cfg, name="embedder")(tokens)
        table = rotation_table(positions, np.zeros(cfg.head_dim // 2))
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(Block, **split, in_axes=nn.broadcast, length=cfg.num_layers)
        (x, _), _ = layers(cfg, name="layers")((x, None), None, table)
        return RMSNorm(name="final_norm")(x)


class Embedder(nn.Module):
    """Looks up the embedding and multiplies by sqrt(D), in float32; casts last."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        table = self.param("input_embedding", _fan_in((1,), 2), (cfg.vocab_size, cfg.embed_dim))
        return embedding_lookup(
            table, tokens, lambda rows: (rows * math.sqrt(cfg.embed_dim)).astype(cfg.dtype)
        )


class Block(nn.Module):
    """One layer: attention and MLP, each of the normalised residual stream and added to it."""

    config: FrozenConfigDict
    window: int | None = None
    rotate_fn: Callable = rotate_qkv

    @nn.compact
    def __call__(self, carry, layer, table, segment_ids=None, first_query=None):
        x, cache = carry
        normed = RMSNorm(name="pre_attention_norm")(x)
        attend = Attention(self.config, self.window, self.rotate_fn, name="attn")
        attended, cache = attend(normed, cache, layer, table, segment_ids, first_query)
        x = x + attended
        x = x + MLP(self.config, name="mlp")(RMSNorm(name="pre_ffw_norm")(x))
        return (x, cache), None


class Attention(nn.Module):
    """Projects to queries, keys and values, applies p-RoPE, attends, and projects back to D."""

    config: FrozenConfigDict
    window: int | None
    rotate_fn: Callable

    @nn.compact
    def __call__(self, x, cache, layer, table, segment_ids, first_query):
        cfg = self.config
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        query = Einsum((N, D, H), in_axes=(1,), name="q_einsum")("BTD,NDH->BTNH", x)
        key, value = jnp.unstack(
            Einsum((2, K, D, H), in_axes=(2,), name="kv_einsum")("BTD,CKDH->BTCKH", x), axis=2
        )
        if cfg.use_qk_norm:
            query, key = RMSNorm(name="query_norm")(query), RMSNorm(name="key_norm")(key)
        if self.window is None and np.any((scale := logit_scale(cfg)) != 1):
            query = (query.astype(jnp.float32) * scale).astype(query.dtype)
        captured = {"query": query, "key": key, "value": value}
        query, key, value = self.rotate_fn(query, key, value, table)
        for name, array in (captured | {"rotated_query": query, "rotated_key": key}).items():
            self.sow(
                "captured", name, array, reduce_fn=lambda _, new: new
            )  # no effect, except in `layer`
        query = checkpoint_name(constrain(query, "BTNH"), "query")
        key = checkpoint_name(constrain(key, "BTKH"), "key")
        value = checkpoint_name(constrain(value, "BTKH"), "value")
        if cache is not None:
            new = {"key": key, "value": value}
            rows, slots = (
                jnp.arange(len(x))[:, None],
                first_query[:, None] + jnp.arange(x.shape[1])[None],
            )
            cache = {name: cache[name].at[layer, rows, :, slots].set(new[name]) for name in cache}
            key, value = (cache[name][layer].swapaxes(1, 2) for name in ("key", "value"))
        options = {
            "first_query": first_query,
            "window": self.window,
            "implementation": cfg.attention,
        }
        out = attention(query, key, value, segment_ids=segment_ids, **options)
        out = Einsum((N, H, D), in_axes=(0, 1), name="attn_vec_einsum")("BTNH,NHD->BTD", out)
        return constrain(out, "BTD"), cache


class MLP(nn.Module):
    """GeGLU: projects gelu(x W0) * (x W1) back to D. The gelu is the tanh form, as in Gemma."""

    config: FrozenConfigDict

    @nn.compact
    def __call__(self, x):
        D, F = self.config.embed_dim, self.config.hidden_dim
        gating = self.param("gating_einsum", _fan_in((1,), 3), (2, D, F)).astype(x.dtype)
        linear = self.param("linear", _fan_in((0,), 2), (F, D)).astype(x.dtype)
        gating, linear = all_gather_param(gating, "CDF"), all_gather_param(linear, "FD")
        rows = x.reshape(-1, D)  # with one axis of tokens, the gradient is twice as fast on a CPU
        # A CPU copies each half of gating: of one token, as in `decode`, that would take longer than the matmuls.
        halves = (
            jnp.stack([rows, rows]) @ gating
            if x.shape[1] == 1
            else [rows @ gating[0], rows @ gating[1]]
        )
        gate = checkpoint_name(constrain(halves[0], "BF"), "gate")
        up = checkpoint_name(constrain(halves[1], "BF"), "up")
        return constrain(_geglu_out(gate, up, linear).reshape(x.shape), "BTD")


@jax.custom_vjp
def _geglu_out(gate, up, linear):
    """Computes (gelu(gate) * up) @ linear, whose gradient recomputes the product instead of saving it."""
    return _geglu(gate, up) @ linear


def _geglu(gate, up):
    return nn.gelu(gate, approximate=True) * up


def _geglu_out_backward(residuals, cotangent):
    gate, up, linear = residuals
    grad_linear = constrain_like_param(_geglu(gate, up).T @ cotangent, "FD")
    grad_active = constrain(cotangent @ linear.T, "BF")
    # In this order the product is freed before the gradients of gate and up, each as large, are computed.
    grad_active, grad_linear, gate, up = jax.lax.optimization_barrier(
        (grad_active, grad_linear, gate, up)
    )
    return *jax.vjp(_geglu, gate, up)[1](grad_active), grad_linear


_geglu_out.defvjp(lambda *residuals: (_geglu_out(*residuals), residuals), _geglu_out_backward)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + scale) over the last axis, in float32; scale starts at 0."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros_init(), (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(
            jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon
        )
        return (normed * jnp.expand_dims(1 + scale, range(x.ndim - 1))).astype(x.dtype)


class Einsum(nn.Module):
    """Multiplies by a parameter `w` of `shape`, contracting its `in_axes`."""

    shape: tuple[int, ...]
    in_axes: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        w = self.param("w", _fan_in(self.in_axes, len(self.shape)), self.shape)
        return jnp.einsum(
            equation, x, all_gather_param(w.astype(x.dtype), equation.split(",")[1].split("->")[0])
        )
