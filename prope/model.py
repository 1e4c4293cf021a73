"""The decoder, with p-RoPE: RMSNorm, MQA/GQA/MHA and a gated MLP.

By default it is Gemma 1; fields of its `ModelSpec` make it Gemma 2, 3 or 4, Llama, Qwen or
Mistral.

Read from top to bottom: norm, attention, MLP, block; then the forward pass, which runs blocks;
then initial values. No other module of prope imports Flax. Modules here only read parameters,
which `init` makes.

Axes: B batch, T query length, S key length, D embed_dim, N query heads, K key/value heads,
H head_dim, F hidden_dim, V vocab, L layers, P = H / 2 rotation pairs, Q lanes of a layer's own
input, M all layers, C the two matrices in one array (key and value, or gate and up).

Parameters are float32 and have the names of DeepMind's Gemma; their table is in
`prope/parameters.py`. Those of layers of equal shape are always stacked on a leading axis L,
whether the loop is scanned or unrolled, so checkpoints do not depend on `scan_layers`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.scope import LazyRng
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from prope import parameters
from prope.attention import attention
from prope.encodings import Tables, rotation_tables
from prope.kernels.gated_mlp import ACTIVATIONS, gated_mlp
from prope.kernels.mask import Mask
from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap
from prope.rope import rotate
from prope.scan import scan_layers
from prope.sharding import all_gather_param, constrain, context_size, embedding_lookup
from prope.spec.layers import Layer
from prope.spec.model import ModelSpec

PRNG = "threefry2x32"  # the kind of every random key, whatever JAX's default is
Params = dict[str, Any]
# Keys and values by kind of layer: {"key", "value"}, each [n, B, K, S, H] for the n layers of the
# kind that have some. The token at position m is in slot m % S.
Cache = dict[str, dict[str, jax.Array]]
_NEW = "new "  # before the kind of keys and values that layers hand on beside a cache


class Captured(NamedTuple):
    """Inputs of one layer's attention: queries [B, T, N, H], keys and values [B, T, K, H].

    `query` has the layer's logit_scale. The softmax is of rotated_query rotated_key^T times
    the spec's attention_scale, capped, within the layer's window.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rotated_query: jax.Array
    rotated_key: jax.Array


def rotate_qkv(query, key, value, table):
    """Rotates queries [B, T, N, H] and keys [B, T, K, H] by a table that `rotate` takes.

    Values are an argument only so that an analysis may replace this function. Keys and values are
    None in `decode`, in a layer that takes those of another: these are rotated.
    """
    rotated_key = None if key is None else rotate(key, table)
    return rotate(query, table), rotated_key, value


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * (1 + scale) over the last axis, in float32."""

    epsilon: float
    use_scale: bool = True

    @nn.compact
    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        square = jnp.square(x32)
        mean_square = jnp.mean(square, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.epsilon)
        if not self.use_scale:
            return normed.astype(x.dtype)
        scale = self.get_variable("params", "scale")
        factor = jnp.expand_dims(1 + scale, range(x.ndim - 1))  # tests forbid promotion of ranks
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
        missing_axes = range(out.ndim - bias.ndim)
        return out + jnp.expand_dims(bias, missing_axes)


class Decoding(NamedTuple):
    """What a layer needs to read and write a cache."""

    first_query: jax.Array | None  # [B], position of each row's first token; None: cache is empty
    newest_key: jax.Array  # [B], the position of each row's last token; later ones are padding
    index: jax.Array | int  # of the layer in the cache of its kind


class Attention(nn.Module):
    """Projects to queries, keys and values, applies p-RoPE, attends, and projects back to D.

    `memory` holds the keys and values that layers hand on: a `Cache` with `decoding`, otherwise
    {kind: {"key", "value"}}, each [B, T, K, H], not rotated; None where no layer needs them. The
    first tokens of a cache have both.
    """

    spec: ModelSpec
    layer: Layer
    rotate_fn: Callable

    @nn.compact
    def __call__(self, x, memory, table, logit_scale, segment_ids, decoding):
        spec = self.spec
        kind = self.layer.kind
        query = Einsum(spec.qkv_bias, name="q_einsum")("BTD,NDH->BTNH", x)
        if spec.use_qk_norm:
            query = RMSNorm(spec.norm_epsilon, name="query_norm")(query)
        key, value, memory = self._keys_and_values(x, memory, decoding)
        # In float32, and rounded once: a factor that is no power of 2 would round once more.
        query = query.astype(jnp.float32) * logit_scale
        unrotated = (query.astype(x.dtype), key, value)
        query, key, value = self.rotate_fn(query, key, value, table)
        if key is not None:  # for `run_layer`; elsewhere nothing is stored
            captured = Captured(*unrotated, query.astype(x.dtype), key)
            self.sow("captured", "inputs", captured, reduce_fn=lambda _, new: new)
        scale = spec.attention_scale or self.layer.head_dim**-0.5
        query = (query * scale).astype(x.dtype)
        query = checkpoint_name(constrain(query, "BTNH"), "query")
        if not self.layer.shares_kv:
            key = checkpoint_name(constrain(key, "BTKH"), "key")
            value = checkpoint_name(constrain(value, "BTKH"), "value")
        cached = {}
        if decoding is not None and not self.layer.shares_kv:
            written = _write_cache(memory[kind], {"key": key, "value": value}, decoding)
            memory = memory | {kind: written}
        if decoding is not None and decoding.first_query is not None:
            cached = {"first_query": decoding.first_query, "newest_key": decoding.newest_key}
            stored = {name: array[decoding.index] for name, array in memory[kind].items()}
            key = stored["key"].swapaxes(1, 2)
            value = stored["value"].swapaxes(1, 2)
        out = attention(
            query,
            key,
            value,
            Mask(segment_ids, self.layer.window, self.layer.sinks),
            spec.attention_softcap,
            **cached,
            implementation=self.layer.attention,
        )
        out = Einsum(name="attn_vec_einsum")("BTNH,NHD->BTD", out)
        return constrain(out, "BTD"), memory

    def _keys_and_values(self, x, memory, decoding):
        """Returns keys and values [B, T, K, H] before the rotation, and the memory with them."""
        place = self.layer.kind if decoding is None else _NEW + self.layer.kind
        if self.layer.shares_kv:
            new = memory.get(place, {"key": None, "value": None})  # they are in the cache
            return new["key"], new["value"], memory
        key, value = self._project_keys_and_values(x)
        if memory is not None and place in memory:
            memory = memory | {place: {"key": key, "value": value}}
        return key, value, memory

    def _project_keys_and_values(self, x):
        spec = self.spec
        if self.layer.key_is_value:
            key = Einsum(spec.qkv_bias, name="k_einsum")("BTD,KDH->BTKH", x)
            value = key
        else:
            both = Einsum(spec.qkv_bias, name="kv_einsum")("BTD,CKDH->BTCKH", x)
            key, value = jnp.unstack(both, axis=2)
        if spec.use_qk_norm:
            key = RMSNorm(spec.norm_epsilon, name="key_norm")(key)
        if spec.use_value_norm:
            value = RMSNorm(spec.norm_epsilon, use_scale=False)(value)
        return key, value


def _write_cache(cache: dict[str, jax.Array], new: dict[str, jax.Array], decoding: Decoding):
    """Writes keys and values [B, T, K, H] of a layer into the cache of its kind.

    That is [n, B, K, S, H]; indexing it here gives [B, T, K, H].
    """
    B, T = new["key"].shape[:2]
    S = cache["key"].shape[3]
    newest = decoding.newest_key[:, None]
    if decoding.first_query is None:
        positions = newest - (newest - jnp.arange(S)[None]) % S  # of every slot

        def fill(array, new):
            kept = jnp.take_along_axis(new, positions[..., None, None], axis=1, mode="clip")
            return array.at[decoding.index].set(kept.swapaxes(1, 2))

        return jax.tree.map(fill, cache, new)
    rows = jnp.arange(B)[:, None]
    positions = decoding.first_query[:, None] + jnp.arange(T)[None]
    # Of padding nothing is written: S is beyond the cache.
    slots = jnp.where(positions > newest, S, positions % S)
    return {
        name: array.at[decoding.index, rows, :, slots].set(new[name], mode="drop")
        for name, array in cache.items()
    }


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

    With post_norms, what is added is normalised first. A layer with an input [B, T, Q] of its own
    then adds that, and one with a skip scale multiplies all by it.
    """

    spec: ModelSpec
    layer: Layer
    rotate_fn: Callable = rotate_qkv

    @nn.compact
    def __call__(
        self, x, memory, table, logit_scale=1.0, segment_ids=None, decoding=None, layer_input=None
    ):
        spec = self.spec
        norm = functools.partial(RMSNorm, spec.norm_epsilon)
        normed = norm(name="pre_attention_norm")(x)
        attend = Attention(spec, self.layer, self.rotate_fn, name="attn")
        attended, memory = attend(normed, memory, table, logit_scale, segment_ids, decoding)
        if spec.post_norms:
            attended = norm(name="post_attention_norm")(attended)
        x = x + attended
        normed = norm(name="pre_ffw_norm")(x)
        projected = MLP(spec.activation, name="mlp")(normed)
        if spec.post_norms:
            projected = norm(name="post_ffw_norm")(projected)
        x = x + projected
        if layer_input is not None:
            gate = Einsum(name="per_layer_input_gate")("BTD,DQ->BTQ", x)
            gated = ACTIVATIONS[spec.activation](gate) * layer_input
            added = Einsum(name="per_layer_projection")("BTQ,QD->BTD", gated)
            x = x + norm(name="post_per_layer_input_norm")(added)
        if spec.use_skip_scale:
            skip_scale = self.get_variable("params", "skip_scale")
            factor = jnp.expand_dims(skip_scale, (0, 1))
            x = x * factor.astype(x.dtype)
        return x, memory


def hidden_states(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    tables: Tables | None = None,
) -> Float[Array, "B T D"]:
    """Runs the decoder: the normalised output of the last layer, in `spec.dtype`.

    `logits` predicts the next tokens. `tables` replace those of the spec, and may be traced.
    """
    memory = _empty_memory(spec, *tokens.shape) if spec.num_kv_shared_layers else None
    hidden, _ = _run(spec, params, tokens, positions, memory, segment_ids, tables=tables)
    return hidden


def decode(
    spec: ModelSpec,
    params: Params,
    tokens: Int[Array, "B T"],
    cache: Cache,
    first_query: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Runs the decoder on T more tokens.

    A token sees the slots up to its position; later slots may hold anything. `params["layers"]` may
    be a tuple with the parameters of each layer, as `prope.inference.generation` splits them.
    Encodings that depend on the length of the sequence, such as dynamic scaling, are not for this.

    Args:
      first_query: position of each row's first token; None: tokens begin at position 0, and see one
        another by the layer's kernel, and not the cache, which they fill.
      cache: where a layer with a window has fewer slots than there are positions, it must have at
        least window + T - 1, for first tokens window.
      lengths: of the rows; tokens from there on are padding, which does not get into the cache.

    Returns:
      `hidden_states` of these tokens, and the cache with their keys and values.
    """
    B, T = tokens.shape
    start = jnp.zeros(B, jnp.int32) if first_query is None else first_query
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    end = start + T
    newest_key = (end if lengths is None else jnp.minimum(end, lengths)) - 1
    decoding = Decoding(first_query, newest_key, index=0)
    memory = cache
    if first_query is None and spec.num_kv_shared_layers:
        memory = cache | {_NEW + kind: kv for kind, kv in _empty_memory(spec, B, T).items()}
    hidden, memory = _run(spec, params, tokens, positions, memory, decoding=decoding)
    return hidden, {kind: memory[kind] for kind in cache}


def _empty_memory(spec, B: int, T: int):
    """Returns zeros for the keys and values of every kind, which the layers replace."""
    memory = {}
    for layer in spec.layers:
        zeros = jnp.zeros((B, T, layer.num_kv_heads, layer.head_dim), spec.dtype)
        memory[layer.kind] = {"key": zeros, "value": zeros}
    return memory


def _run(spec, params, tokens, positions, memory, segment_ids=None, decoding=None, tables=None):
    """Embeds tokens, runs the layers and normalises: (`hidden_states` [B, T, D], the memory)."""
    x = embed(spec, embedding(params), tokens)
    layers = spec.layers_at(context_size() * positions.shape[1])
    tables = rotation_tables(layers, positions) if tables is None else tables
    per_layer = dict(tables.per_layer)
    scales = [layer.logit_scale for layer in layers]
    if len(set(scales)) > 1:
        per_layer["logit_scale"] = np.array(scales, np.float32)
    if spec.per_layer_input_dim:
        per_layer["input"] = layer_inputs(spec, params, tokens, x)
    if decoding is not None:
        per_layer["cache"] = np.array([layer.cache_index for layer in layers])

    def apply_layer(carry, params, layer_arrays, number):
        layer = layers[number]
        block = Block(spec, layer)
        table = tables.choose(layer, layer_arrays)
        layer_decoding = None
        if decoding is not None:
            layer_decoding = decoding._replace(index=layer_arrays["cache"])
        logit_scale = layer_arrays.get("logit_scale", layer.logit_scale)
        inputs = (table, logit_scale, segment_ids, layer_decoding, layer_arrays.get("input"))
        return block.apply({"params": params}, *carry, *inputs)

    carry = (x, memory)
    if isinstance(params["layers"], dict):
        carry = scan_layers(spec, apply_layer, carry, params["layers"], per_layer)
    else:  # split, for `decode`
        for number, layer_params in enumerate(params["layers"]):
            layer_arrays = jax.tree.map(lambda x: x[number], per_layer)  # noqa: B023
            carry = apply_layer(carry, layer_params, layer_arrays, number)
    x, memory = carry
    return final_norm(spec, params["final_norm"], x), memory


def embed(
    spec: ModelSpec, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Computes the first layer's input: embeddings, with scale_embedding times sqrt(D).

    The factor is rounded to `spec.dtype`, as Google's code does; the product is cast last. The
    table may also hold some rows of the embedding only; tokens then index these.
    """
    factor = math.sqrt(spec.embed_dim) if spec.scale_embedding else 1.0
    factor = float(jnp.dtype(spec.dtype).type(factor))

    def scale(rows):
        return (rows * factor).astype(spec.dtype)

    return embedding_lookup(table, tokens, scale)


def layer_inputs(
    spec: ModelSpec, params: Params, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
) -> Float[Array, "L B T Q"]:
    """Computes every layer's own input, of the tokens and of `x`, their `embed`.

    `params` has at least "embedder".
    """
    embedder = params["embedder"]
    projection = {"params": embedder["per_layer_model_projection"]}
    context = Einsum().apply(projection, "BTD,DMQ->BTMQ", x)
    context = context * spec.embed_dim**-0.5
    norm = {"params": embedder["per_layer_projection_norm"]}
    context = RMSNorm(spec.norm_epsilon).apply(norm, context)

    def scale(rows):
        return (rows * spec.per_layer_input_dim**0.5).astype(spec.dtype)

    identity = embedding_lookup(embedder["per_layer_embeddings"], tokens, scale, "BTMQ")
    mixed = (context + identity) * 2**-0.5
    return mixed.transpose(2, 0, 1, 3)


def embedding(params: Params) -> Float[Array, "V D"]:
    """Returns the table that embeds tokens."""
    return params["embedder"]["input_embedding"]


def head(params: Params) -> Float[Array, "V D"]:
    """Returns the table that, transposed, scores tokens: the embedding, where they are tied."""
    return params["head"]["w"] if "head" in params else embedding(params)


def final_norm(spec: ModelSpec, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Normalises the last layer's output for `logits`; `params` are those of "final_norm"."""
    return RMSNorm(spec.norm_epsilon).apply({"params": params}, x)


def logits(spec: ModelSpec, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Scores the next token, float32: a matmul with `head` in hidden's dtype, capped."""
    table = head(params).astype(hidden.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    scores = einsum_to_float32("RD,VD->RV", rows, table)
    scores = scores.reshape(*hidden.shape[:-1], len(table))
    return softcap(scores, spec.final_softcap)


def run_layer(
    spec: ModelSpec,
    params: Params,
    x: Float[Array, "B T D"],
    table: Float[Array, "2 b T *P"],
    layer: Layer,
    rotate_fn: Callable | None = None,
    memory: dict | None = None,
    layer_input: Float[Array, "B T Q"] | None = None,
) -> tuple[Float[Array, "B T D"], Captured]:
    """Runs one layer, for analysis: the residual stream after it and its attention's inputs.

    Args:
      spec: the model.
      params: of this layer: those of "layers" without their leading axis.
      x: the residual stream before the layer.
      table: of this layer's rotation, [2, b, T, P] or [2, b, T, K, P], with b = 1 or B.
      layer: of `spec.layers`.
      rotate_fn: replaces `rotate_qkv`, with the same arguments and results.
      memory: for a layer that shares them, {layer.kind: {"key", "value"}}, not rotated.
      layer_input: of this layer, from `layer_inputs`, if it has one.
    """
    block = Block(spec, layer, rotate_fn or rotate_qkv)
    scale = layer.logit_scale
    (x, _), sown = block.apply(
        {"params": params}, x, memory, table, scale, layer_input=layer_input, mutable="captured"
    )
    return x, sown["captured"]["attn"]["inputs"]


def init(spec: ModelSpec, key: jax.Array) -> Params:
    """Initialises the parameters of a model, as a function of its spec and the key alone.

    Matrices are truncated normals of variance 1 / fan-in, the product of the contracted axes; the
    scales of norms are 0.
    """
    layer_keys = jax.random.split(key, spec.num_layers)
    leaves = {}
    for path, row in parameters.parameters(spec).items():
        draw = functools.partial(_draw, spec, path, row)
        stack = parameters.stack_of(path)
        if stack is None:
            leaves[path] = draw(key)
        else:
            numbers = np.array(spec.stacks[stack])
            leaves[path] = jax.lax.map(draw, layer_keys[numbers])
    return parameters.nest(leaves)


def _draw(spec, path, row, key):
    """Draws initial values, of one layer, with the key that Flax would give this parameter."""
    sizes = parameters.axis_sizes(spec, path)
    shape = tuple(sizes[axis] for axis in row.axes)
    if not row.is_matrix:
        return jnp.full(shape, row.initial, jnp.float32)
    contracted = tuple(row.axes.index(axis) for axis in row.fan_in)
    initializer = nn.initializers.variance_scaling(
        1.0,
        "fan_in",
        "truncated_normal",
        in_axis=contracted,
        out_axis=tuple(axis for axis in range(len(shape)) if axis not in contracted),
    )
    *module_path, _ = path.split("/")
    parameter_key = LazyRng.create(key, *module_path, row.draw).as_jax_rng()
    return initializer(parameter_key, shape)
