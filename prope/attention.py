"""Causal attention by plain XLA, the TPU's splash kernel or cuDNN.

No implementation holds a T x S array of scores. Plain XLA computes them for one block of queries at a time, against
the keys up to the block's last query; in a long sequence, or one that is split over devices, for one block of keys too.

Of a sequence that is split into C parts (prope/sharding.py), a device computes the queries of one part and all-gathers
keys and values, in bfloat16 4 K H bytes a token: 1 KB for Gemma. Against the 2 N H T^2 / C FLOPs of its scores these
4 K H T bytes take less time from T = 2 C K / N x (FLOP/s) / (bytes/s) on: with C = 4 on v5p from some 2,500 tokens on.
A ring would pass as many bytes, beside the scores of the part before; it wins for shorter sequences, or where a
sequence's keys and values, 1 GB a layer at 2^20 tokens, do not fit.

Axes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head_dim.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from prope.kernels.choice import choose_implementation
from prope.kernels.pairs import attend_pairs, list_pairs
from prope.kernels.splash import splash
from prope.sharding import gather_parts, join_heads, num_parts, part_index, part_positions, shard_mapped, split_heads

_LONG = 8192  # tokens up to which plain XLA has a program for every block of queries, the faster way
_SMALLEST_BLOCK = 64  # of a long sequence whose length hardly divides
_MASKED_SCORE = float(jnp.finfo(jnp.float32).min)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    first_query: Int[Array, " B"] | None = None,
    window: int | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Computes softmax(query key^T / sqrt(H)) value, where a query sees the keys up to its own index.

    Each group of G = N / K query heads shares a key/value head: K = 1 is multi-query, K = N multi-head attention.

    Args:
      query: rotated, not scaled.
      key: rotated.
      value: not rotated.
      segment_ids: with it, a query sees the keys of its own segment only; needs T = S.
      window: how many keys a query sees at most, its own included; None: all up to its own.
      first_query: for keys from a cache, the key index of each row's first query; always computed by plain XLA.
      implementation: "xla", "splash" (TPU), "cudnn" (NVIDIA), or "auto": what `choose_implementation` returns for
        this machine. A named one is not checked: `choose_implementation` tells whether a device can run it.

    Returns:
      The output in value's dtype; scores and softmax are float32 for any input dtype.
    """
    if first_query is not None:
        return _attend_to_cache(query, key, value, first_query, window)
    if implementation == "auto":
        (T, N, H), K, segmented = query.shape[1:], key.shape[2], segment_ids is not None
        by_heads = N % num_parts() == 0 and (K == 1 or K % num_parts() == 0)
        device = jax.devices()[0]
        implementation, _ = choose_implementation("auto", device, T, H, query.dtype.name, segmented, by_heads)
    window = None if window is None or window >= num_parts() * query.shape[1] else window
    function = functools.partial({"xla": _xla, "splash": _splash, "cudnn": _cudnn}[implementation], window)
    arrays = [query, key, value] if segment_ids is None else [query, key, value, segment_ids]
    return shard_mapped(function, ["BTNH", "BSKH", "BSKH", "BS"][: len(arrays)])(*arrays)


def _xla(window, query, key, value, segment_ids=None):
    """Attends by blocks in plain XLA, for any device."""
    positions = _positions(query)
    block, pairs = list_pairs(positions, window)
    if (positions.size <= _LONG and len(positions) == 1) or block < _SMALLEST_BLOCK:
        return _heads_last(_attend(window, *_heads_first(query, key, value), segment_ids))
    own = (jnp.asarray(array)[part_index()] for array in (positions, pairs))
    arrays = _heads_first(query, gather_parts(key), gather_parts(value))
    return _heads_last(attend_pairs(block, window, *arrays, *own, _gather_segments(segment_ids)))


def _positions(query):
    """Returns the indices in their sequence of the queries of every part, [C, T]."""
    return part_positions(num_parts(), num_parts() * query.shape[1])


def _gather_segments(segment_ids):
    """Returns the segment ids of the queries and of the keys."""
    return None if segment_ids is None else (segment_ids, gather_parts(segment_ids))


def _heads_first(query, key, value):
    """Scales and transposes queries to [B, K, G, T, H], transposes keys and values to [B, K, S, H]."""
    B, T, N, H = query.shape
    K = key.shape[2]
    query = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return query, key.swapaxes(1, 2), value.swapaxes(1, 2)


def _heads_last(output):
    """[B, K, G, T, H] -> [B, T, N, H]."""
    B, K, G, T, H = output.shape
    return output.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window, query, key, value, segment_ids):
    """Attends [B, K, G, T, H] to [B, K, S, H] block by block; the gradient recomputes each block's scores."""
    return _attend_forward(window, query, key, value, segment_ids)[0]


def _attend_forward(window, query, key, value, segment_ids):
    outputs, logsumexps = [], []
    for block, keys in _blocks(query.shape[3], window):
        q = query[:, :, :, block]
        if outputs:  # blocks run one after the other, so that the scores of two are never alive together
            q, (outputs[-1], logsumexps[-1]) = jax.lax.optimization_barrier((q, (outputs[-1], logsumexps[-1])))
        scores = _scores(q, key[:, :, keys], _mask(block, keys, segment_ids, window))
        # Normalised after the second matmul, where the division is S / H times less work.
        largest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        output = _weighted_sum(weights.astype(value.dtype), value[:, :, keys]) / total
        outputs.append(output.astype(value.dtype))
        logsumexps.append((largest + jnp.log(total))[..., 0])
    output, logsumexp = jnp.concatenate(outputs, axis=3), jnp.concatenate(logsumexps, axis=3)
    output, logsumexp = checkpoint_name(output, "attention_out"), checkpoint_name(logsumexp, "attention_out")
    return output, (query, key, value, segment_ids, output, logsumexp)


def _attend_backward(window, residuals, cotangent):
    query, key, value, segment_ids, output, logsumexp = residuals
    dtype = query.dtype
    grad_query, grad_key, grad_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for block, keys in _blocks(query.shape[3], window):
        q, g = query[:, :, :, block], cotangent[:, :, :, block]
        q, g, grad_key, grad_value = jax.lax.optimization_barrier((q, g, grad_key, grad_value))
        scores = _scores(q, key[:, :, keys], _mask(block, keys, segment_ids, window))
        weights = jnp.exp(scores - logsumexp[:, :, :, block, None])
        mean = (g.astype(jnp.float32) * output[:, :, :, block]).sum(axis=-1, keepdims=True)
        grad_scores = weights * (_scores(g, value[:, :, keys]) - mean)
        weights, grad_scores = weights.astype(dtype), grad_scores.astype(dtype)
        grad_query.append(_weighted_sum(grad_scores, key[:, :, keys]).astype(dtype))
        grad_key = grad_key.at[:, :, keys].add(_sum_over_queries(grad_scores, q))
        grad_value = grad_value.at[:, :, keys].add(_sum_over_queries(weights, g))
    return jnp.concatenate(grad_query, axis=3), grad_key.astype(dtype), grad_value.astype(dtype), None


_attend.defvjp(_attend_forward, _attend_backward)


def _blocks(T: int, window: int | None = None) -> list[tuple[slice, slice]]:
    """Splits the queries into blocks: (queries, the keys that any of them sees), in order."""
    length = min(512, max(128, T // 4 if window is None else window // 2))
    starts = [(a, 0 if window is None else max(0, a - window + 1)) for a in range(0, T, length)]
    return [(slice(a, min(a + length, T)), slice(first, min(a + length, T))) for a, first in starts]


def _mask(block: slice, keys: slice, segment_ids, window: int | None):
    """Tells which keys a query sees: [1, 1, 1, t, s], or [B, 1, 1, t, s] with segments."""
    query, key = jnp.arange(block.start, block.stop)[:, None], jnp.arange(keys.start, keys.stop)[None, :]
    causal = key <= query if window is None else (key <= query) & (key > query - window)
    causal = jnp.expand_dims(causal, (0, 1, 2))
    if segment_ids is None:
        return causal
    return causal & (segment_ids[:, None, None, block, None] == segment_ids[:, None, None, None, keys])


# Matmuls of one key/value head with the queries of all its G heads as rows.


def _scores(query, key, mask=None):
    """[B, K, G, t, H] x [B, K, s, H] -> [B, K, G, t, s], float32; _MASKED_SCORE where the mask is False."""
    B, K, G, t, H = query.shape
    rows = query.reshape(B, K, G * t, H)
    scores = jnp.einsum("BKRH,BKSH->BKRS", rows, key, preferred_element_type=jnp.float32).reshape(B, K, G, t, -1)
    return scores if mask is None else jnp.where(mask, scores, _MASKED_SCORE)


def _weighted_sum(weights, value):
    """[B, K, G, t, s] x [B, K, s, H] -> [B, K, G, t, H], float32."""
    B, K, G, t, s = weights.shape
    rows = weights.reshape(B, K, G * t, s)
    return jnp.einsum("BKRS,BKSH->BKRH", rows, value, preferred_element_type=jnp.float32).reshape(B, K, G, t, -1)


def _sum_over_queries(weights, query):
    """[B, K, G, t, s] x [B, K, G, t, H] -> [B, K, s, H], float32."""
    B, K, G, t, s = weights.shape
    rows, query = weights.reshape(B, K, G * t, s), query.reshape(B, K, G * t, -1)
    return jnp.einsum("BKRS,BKRH->BKSH", rows, query, preferred_element_type=jnp.float32)


def _attend_to_cache(query, key, value, first_query, window):
    """Attends queries to each row's cache, in which `first_query` [B] keys precede them; has no efficient gradient."""
    query, key, value = _heads_first(query, key, value)
    T, S, outputs = query.shape[3], key.shape[2], []
    for block, _ in _blocks(T):
        last_key = first_query[:, None] + jnp.arange(block.start, block.stop)[None]
        keys, last_key = jnp.arange(S)[None, None, None, None], last_key[:, None, None, :, None]
        mask = keys <= last_key if window is None else (keys <= last_key) & (keys > last_key - window)
        weights = jax.nn.softmax(_scores(query[:, :, :, block], key, mask), axis=-1)
        outputs.append(_weighted_sum(weights.astype(value.dtype), value).astype(value.dtype))
    return _heads_last(jnp.concatenate(outputs, axis=3))


def _splash(window, query, key, value, segment_ids=None):
    """Attends by the TPU's kernel."""
    arrays = _heads_first(query, gather_parts(key), gather_parts(value))
    of_part = _positions(query), part_index(), _gather_segments(segment_ids)
    return _heads_last(splash(*arrays, *of_part, window))


def _cudnn(window, query, key, value):
    """Attends by NVIDIA's flash attention, causal without a mask array; of a split sequence, by heads."""
    local = None if window is None else (window - 1, 0)
    query, key, value = split_heads(query), split_heads(key), split_heads(value)
    output = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, local_window_size=local, implementation="cudnn"
    )
    return join_heads(output)


def save_policy(names: Sequence[str]) -> Callable[..., bool]:
    """Makes a checkpoint policy that saves the arrays of these names.

    "attention_out" includes cuDNN's output and softmax statistics: JAX names neither, so all that its primitive returns
    is saved.
    """
    by_name, cudnn = jax.checkpoint_policies.save_only_these_names(*names), "dot_product_attention_fwd_wrapper"
    return lambda primitive, *arguments, **parameters: (
        by_name(primitive, *arguments, **parameters) or ("attention_out" in names and primitive.name == cudnn)
    )
