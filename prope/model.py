"""The decoder, with p-RoPE: RMSNorm, MQA/GQA/MHA and a gated MLP.

By default it is Gemma 1; switches in `config.model` make it Gemma 2 or 3, Llama, Qwen or Mistral.

Read from top to bottom: norm, attention, MLP, block; then the forward pass, which runs blocks;
then initial values. No other module of prope imports Flax. Modules here only read parameters,
which `init` makes.

Axes: B batch, T query length, S key length, D embed_dim, N query heads, K key/value heads,
H head_dim, F hidden_dim, V vocab, L layers, P = H / 2 rotation pairs, C the two matrices in one
array (key and value, or gate and up).

Parameters are float32 and have the names of DeepMind's Gemma; their table is in
`prope/parameters.py`. Those of the layers are always stacked on a leading axis L, whether the loop
is scanned or unrolled, so checkpoints do not depend on `scan_layers`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.scope import LazyRng
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict, FrozenConfigDict

from prope import parameters
from prope.attention import attention, save_policy
from prope.encodings import layer_frequencies, layer_windows, logit_scale
from prope.kernels.gated_mlp import gated_mlp
from prope.kernels.softcap import softcap
from prope.rope import rotate, rotation_table
from prope.sharding import all_gather_param, constrain, context_size, embedding_lookup

PRNG = "threefry2x32"  # the kind of every random key, whatever JAX's default is
Params = dict[str, Any]
# {"key", "value"}, each [L, B, K, S, H]: slot s holds the token at position s
Cache = dict[str, jax.Array]

# What a layer saves for its backward pass besides its input, by config.model.remat; the rest is
# recomputed. "attention_out" is attention's output with its logsumexp, so that attention is not
# run again.
_SAVED_RESIDUALS = {
    "minimal": ("query", "key", "value", "attention_out", "gate", "up"),
    "save_qkv": ("query", "key", "value", "attention_out"),
    "full": (),
}


class Captured(NamedTuple):
    """Inputs of one layer's attention: queries [B, T, N, H], keys and values [B, T, K, H].

    `query` has the encoding's factor on logits. The softmax is of rotated_query rotated_key^T times
    the config's attention_scale, capped, within the layer's window.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rotated_query: jax.Array
    rotated_key: jax.Array


def rotate_qkv(query, key, value, table):
    """Rotates queries [B, T, N, H] and keys [B, T, K, H] by a table [2, B, T, P].

    Values are an argument only so that an analysis may replace this function.
    """
    return rotate(query, table), rotate(key, table), value


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * (1 + scale) over the last axis, in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x):
        scale = self.get_variable("params", "scale")
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.epsilon)
        # Explicit axes: tests forbid that ranks are promoted.
        factor = jnp.expand_dims(1 + scale, range(x.ndim - 1))
        return (normed * factor).astype(x.dtype)


class Einsum(nn.Module):
    """Computes einsum(equation, x, w) + b, with its parameter `w` all-gathered first."""

    use_bias: bool = False

    @nn.compact
    def __call__(self, equation, x):
        w = self.get_variable("params", "w").astype(x.dtype)
        w_axes = equation.split(",")[1].split("->")[0]
        out = jnp.einsum(equation, x, all_gather_param(w, w_axes))
        if not self.use_bias:
            return out
        bias = self.get_variable("params", "b").astype(x.dtype)
        return out + jnp.expand_dims(bias, range(out.ndim - bias.ndim))


class Attention(nn.Module):
    """Projects to queries, keys and values, applies p-RoPE, attends, and projects back to D."""

    config: FrozenConfigDict
    window: int | None
    rotate_fn: Callable

    @nn.compact
    def __call__(self, x, cache, layer_index, table, segment_ids, first_query):
        config = self.config
        query = Einsum(config.qkv_bias, name="q_einsum")("BTD,NDH->BTNH", x)
        key_value = Einsum(config.qkv_bias, name="kv_einsum")("BTD,CKDH->BTCKH", x)
        key, value = jnp.unstack(key_value, axis=2)
        if config.use_qk_norm:
            query = RMSNorm(config.norm_epsilon, name="query_norm")(query)
            key = RMSNorm(config.norm_epsilon, name="key_norm")(key)
        # In float32, and rounded once: a factor that is no power of 2 would round once more.
        query = self._scale_query(query.astype(jnp.float32))
        unrotated = (query.astype(x.dtype), key, value)
        query, key, value = self.rotate_fn(query, key, value, table)
        self._capture(Captured(*unrotated, query.astype(x.dtype), key))
        scale = config.attention_scale or config.head_dim**-0.5
        query = (query * scale).astype(x.dtype)
        query = checkpoint_name(constrain(query, "BTNH"), "query")
        key = checkpoint_name(constrain(key, "BTKH"), "key")
        value = checkpoint_name(constrain(value, "BTKH"), "value")
        if cache is not None:
            cache = _write_cache(cache, layer_index, first_query, {"key": key, "value": value})
            key = cache["key"][layer_index].swapaxes(1, 2)
            value = cache["value"][layer_index].swapaxes(1, 2)
        out = attention(
            query,
            key,
            value,
            segment_ids=segment_ids,
            first_query=first_query,
            window=self.window,
            cap=config.attention_softcap,
            implementation=config.attention,
        )
        out = Einsum(name="attn_vec_einsum")("BTNH,NHD->BTD", out)
        return constrain(out, "BTD"), cache

    def _scale_query(self, query):
        """Scales queries, and so the logits, as the encoding says."""
        scale = logit_scale(self.config, is_local=self.window is not None)
        if np.all(scale == 1):
            return query
        return query * scale

    def _capture(self, captured: Captured) -> None:
        """Hands the inputs of attention to `layer`; elsewhere nothing is stored."""
        for name, array in captured._asdict().items():
            self.sow("captured", name, array, reduce_fn=lambda _, new: new)


def _write_cache(
    cache: Cache,
    layer_index,
    first_query,
    new: dict[str, jax.Array],
) -> Cache:
    """Writes keys and values [B, T, K, H] into the slots from `first_query` [B] on.

    The cache is [L, B, K, S, H]; indexing it here gives [B, T, K, H].
    """
    B, T = new["key"].shape[:2]
    rows = jnp.arange(B)[:, None]
    slots = first_query[:, None] + jnp.arange(T)[None]
    return {name: cache[name].at[layer_index, rows, :, slots].set(new[name]) for name in cache}


class MLP(nn.Module):
    """Projects act(x W0) * (x W1) back to D."""

    activation: str

    @nn.compact
    def __call__(self, x):
        gating = self.get_variable("params", "gating_einsum").astype(x.dtype)
        linear = self.get_variable("params", "linear").astype(x.dtype)
        weights = (all_gather_param(gating, "CDF"), all_gather_param(linear, "FD"))
        return gated_mlp(x, *weights, self.activation)


class Block(nn.Module):
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), for the residual stream x.

    With post_norms, what is added is normalised first.
    """

    config: FrozenConfigDict
    window: int | None = None
    rotate_fn: Callable = rotate_qkv

    @nn.compact
    def __call__(self, carry, layer_index, table, segment_ids=None, first_query=None):
        x, cache = carry
        norm = functools.partial(RMSNorm, self.config.norm_epsilon)
        normed = norm(name="pre_attention_norm")(x)
        attend = Attention(self.config, self.window, self.rotate_fn, name="attn")
        attended, cache = attend(normed, cache, layer_index, table, segment_ids, first_query)
        if self.config.post_norms:
            attended = norm(name="post_attention_norm")(attended)
        x = x + attended
        normed = norm(name="pre_ffw_norm")(x)
        projected = MLP(self.config.activation, name="mlp")(normed)
        if self.config.post_norms:
            projected = norm(name="post_ffw_norm")(projected)
        return x + projected, cache


def hidden_states(
    config: ConfigDict,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Runs the decoder: the normalised output of the last layer, in `config.dtype`.

    `logits` predicts the next tokens from it. `config` is a run's `config.model`.
    """
    hidden, _ = _run(config, params, tokens, positions, segment_ids)
    return hidden


def decode(
    config: ConfigDict,
    params: Params,
    tokens: Int[Array, "B T"],
    cache: Cache,
    first_query: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Cache]:
    """Runs the decoder on T more tokens, from position `first_query` of each row on.

    A token sees the slots up to its position; later slots may hold anything. `params["layers"]` may
    be a tuple with the parameters of each layer, as `prope.inference.generation` splits them.
    Encodings that depend on the length of the sequence, such as dynamic scaling, are not for this.

    Returns:
      `hidden_states` of these tokens, and the cache with their keys and values.
    """
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = first_query[:, None] + steps[None]
    return _run(config, params, tokens, positions, cache=cache, first_query=first_query)


def _run(
    config,
    params,
    tokens,
    positions,
    segment_ids=None,
    cache=None,
    first_query=None,
):
    """Embeds tokens, runs the layers and normalises: (`hidden_states` [B, T, D], the cache)."""
    seq_len = context_size() * tokens.shape[1]
    unique_freqs, table_indices = np.unique(
        layer_frequencies(config, seq_len), axis=0, return_inverse=True
    )
    # Layers of one encoding share a table.
    tables = [rotation_table(positions, freqs) for freqs in unique_freqs]
    windows = layer_windows(config)
    carry = (embed(config, embedding(params), tokens), cache)

    def run_layer(carry, layer_params, layer_index, table, window):
        block = Block(FrozenConfigDict(config), window)
        inputs = (carry, layer_index, table, segment_ids, first_query)
        return block.apply({"params": layer_params}, *inputs)

    layers = params["layers"]
    if isinstance(layers, dict):
        carry = _scan_layers(config, run_layer, carry, layers, tables, table_indices, windows)
    else:  # split, for `decode`
        for i, layer_params in enumerate(layers):
            table = tables[table_indices[i]]
            carry = run_layer(carry, layer_params, i, table, windows[i])
    x, cache = carry
    return final_norm(config, params["final_norm"], x), cache


def _scan_layers(config, run_layer, carry, layers, tables, table_indices, windows):
    """Scans over the layers; where `layer_types` repeats every n layers, a scan step runs n.

    So every layer of a step has a window that is known when it is compiled. Layers after the last
    whole repetition are run one by one.
    """
    if config.remat != "none":
        run_layer = jax.checkpoint(
            run_layer,
            policy=save_policy(_SAVED_RESIDUALS[config.remat]),
            prevent_cse=not config.scan_layers,
            static_argnums=4,  # window
        )
    L = config.num_layers
    period = len(config.layer_types) or 1
    repetitions = L // period
    _, cache = carry
    # The whole cache is carried: a step writes the slots of its tokens and copies no others.
    layer_indices = None if cache is None else jnp.arange(L)
    one_table = len(tables) == 1
    tables = tables[0] if one_table else jnp.stack(tables)
    table_indices = None if one_table else jnp.asarray(table_indices)
    by_layer = (layers, layer_indices, table_indices)
    num_scanned = repetitions * period

    def run_one(carry, layer, window):
        layer_params, layer_index, table_index = layer
        table = tables if one_table else tables[table_index]
        return run_layer(carry, layer_params, layer_index, table, window)

    def run_period(carry, scanned):
        for j in range(period):
            layer = jax.tree.map(lambda x: x[j], scanned) if period > 1 else scanned  # noqa: B023
            carry = run_one(carry, layer, windows[j])
        return carry, None

    def by_period(x):
        return x[:num_scanned].reshape(repetitions, period, *x.shape[1:])

    scanned = by_layer if period == 1 else jax.tree.map(by_period, by_layer)
    unroll = 1 if config.scan_layers else repetitions
    carry, _ = jax.lax.scan(run_period, carry, scanned, unroll=unroll)
    for i in range(num_scanned, L):
        layer = jax.tree.map(lambda x: x[i], by_layer)  # noqa: B023
        carry = run_one(carry, layer, windows[i])
    return carry


def embed(
    config: ConfigDict, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Computes the first layer's input: embeddings, with scale_embedding times sqrt(D).

    The factor is rounded to `config.dtype`, as Google's code does; the product is cast last. The
    table may also hold some rows of the embedding only; tokens then index these.
    """
    factor = parameters.embedding_factor(config)

    def scale(rows):
        return (rows * factor).astype(config.dtype)

    return embedding_lookup(table, tokens, scale)


def embedding(params: Params) -> Float[Array, "V D"]:
    """Returns the table that embeds tokens."""
    return params["embedder"]["input_embedding"]


def head(params: Params) -> Float[Array, "V D"]:
    """Returns the table that, transposed, scores tokens: the embedding, where they are tied."""
    return params["head"]["w"] if "head" in params else embedding(params)


def final_norm(
    config: ConfigDict,
    params: Params,
    x: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """Normalises the last layer's output for `logits`; `params` are those of "final_norm"."""
    return RMSNorm(config.norm_epsilon).apply({"params": params}, x)


def logits(
    config: ConfigDict,
    params: Params,
    hidden: Float[Array, "... D"],
) -> Float[Array, "... V"]:
    """Scores the next token, float32: a matmul with `head` in hidden's dtype, capped."""
    table = head(params).astype(hidden.dtype)
    scores = jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)
    return softcap(scores, config.final_softcap)


def layer(
    config: ConfigDict,
    params: Params,
    x: Float[Array, "B T D"],
    table: Float[Array, "2 b T P"],
    rotate_fn: Callable | None = None,
    window: int | None = None,
) -> tuple[Float[Array, "B T D"], Captured]:
    """Runs one layer, for analysis: the residual stream after it and its attention's inputs.

    Args:
      config: a run's `config.model`.
      params: of this layer: those of "layers" without their leading axis.
      x: the residual stream before the layer.
      table: of this layer's rotation, with b = 1 or B.
      rotate_fn: replaces `rotate_qkv`, with the same arguments and results.
      window: keys that a query sees, its own included; None: all before.
    """
    block = Block(FrozenConfigDict(config), window, rotate_fn or rotate_qkv)
    (x, _), sown = block.apply(
        {"params": params},
        (x, None),
        None,
        table,
        mutable="captured",
    )
    return x, Captured(**sown["captured"]["attn"])


def init(config: ConfigDict, key: jax.Array) -> Params:
    """Initialises the parameters of a run's `config.model`, as a function of it and the key alone.

    Matrices are truncated normals of variance 1 / fan-in, the product of the contracted axes; the
    scales of norms are 0.
    """
    leaves = {}
    for path, row in parameters.parameters(config).items():
        *module_path, _ = path.split("/")
        draw = functools.partial(_draw, config, row, module_path)
        if path.startswith("layers/"):
            leaves[path] = jax.lax.map(draw, jax.random.split(key, config.num_layers))
        else:
            leaves[path] = draw(key)
    return parameters.nest(leaves)


def _draw(config, row, module_path, key):
    """Draws initial values, of one layer, with the key that Flax would give this parameter."""
    sizes = parameters.axis_sizes(config)
    shape = tuple(sizes[axis] for axis in row.axes)
    if not row.is_matrix:
        return jnp.zeros(shape)
    contracted = tuple(row.axes.index(axis) for axis in row.fan_in)
    initializer = nn.initializers.variance_scaling(
        1.0,
        "fan_in",
        "truncated_normal",
        in_axis=contracted,
        out_axis=tuple(axis for axis in range(len(shape)) if axis not in contracted),
    )
    parameter_key = LazyRng.create(key, *module_path, row.draw).as_jax_rng()
    return initializer(parameter_key, shape)
