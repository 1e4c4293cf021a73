"""Attention in plain XLA over pairs of a block of queries and a block of keys, for long or split sequences.

Only pairs in which some query sees some key are computed, one after the other in a loop, so that memory is linear in
the length. On every part of a split sequence the loop has the same length.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S keys, H head_dim, t and s of a block.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

_MASKED_SCORE = float(jnp.finfo(jnp.float32).min)
_BLOCK = 512


def list_pairs(positions: np.ndarray, window: int | None) -> tuple[int, np.ndarray]:
    """Lists the pairs of blocks that every part of a sequence computes: (tokens of a block, int32 [C, pairs, 2]).

    Args:
      positions: [C, T], indices in the sequence of the queries of each part, in which neighbouring ones make up chunks.
      window: how many keys a query sees at most, its own included; None: all up to its own.
    """
    (C, T), S = positions.shape, positions.size
    chunk = T if C == 1 else T // 2
    block = next(b for b in range(min(_BLOCK, chunk), 0, -1) if chunk % b == 0)
    first = positions[:, ::block] // block
    oldest = 0 * first if window is None else np.maximum(positions[:, ::block] - window + 1, 0) // block
    pairs = [[(q, k) for q in range(T // block) for k in range(oldest[c, q], first[c, q] + 1)] for c in range(C)]
    longest = max(map(len, pairs))
    # Where a window leaves a part less to do, its last pair is followed by ones whose keys nobody sees.
    return block, np.array([own + [(own[-1][0], S // block)] * (longest - len(own)) for own in pairs], np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_pairs(block, window, query, key, value, positions, pairs, segments):
    """Attends [B, K, G, T, H] to [B, K, S, H].

    Args:
      block: tokens of a block.
      window: as of `list_pairs`.
      query: scaled.
      positions: [T] of the queries; those of the keys are 0 .. S - 1.
      pairs: [pairs, 2], of `list_pairs`.
      segments: None, or segment ids of queries [B, T] and keys [B, S].
    """
    return _forward(block, window, query, key, value, positions, pairs, segments)[0]


def _forward(block, window, query, key, value, positions, pairs, segments):
    B, K, G, T, H = query.shape

    def add_pair(carry, pair):
        output, logsumexp, last, (largest, total, acc) = carry
        fresh = pair[0] != last
        largest = jnp.where(fresh, -jnp.inf, largest)
        scores = _scores(block, window, query, key, positions, pair, segments)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights, old = jnp.exp(scores - new_largest[..., None]), jnp.exp(largest - new_largest)
        total = jnp.where(fresh, 0, total * old) + weights.sum(axis=-1)
        v = _block_of(value, pair[1], block, axis=2)
        acc = jnp.where(fresh, 0, acc * old[..., None]) + _dot("BKRS,BKSH->BKRH", weights.astype(value.dtype), v)
        own = (acc / total[..., None]).astype(value.dtype).reshape(B, K, G, block, H)
        output = jax.lax.dynamic_update_slice_in_dim(output, own, pair[0] * block, axis=3)
        own = (new_largest + jnp.log(total)).reshape(B, K, G, block)
        logsumexp = jax.lax.dynamic_update_slice_in_dim(logsumexp, own, pair[0] * block, axis=3)
        return (output, logsumexp, pair[0], (new_largest, total, acc)), None

    rows = jnp.zeros((B, K, G * block), jnp.float32)
    start = jnp.zeros(query.shape, value.dtype), jnp.zeros((B, K, G, T), jnp.float32)
    start = *start, jnp.int32(-1), (rows, rows, jnp.zeros((*rows.shape, H), jnp.float32))
    (output, logsumexp, _, _), _ = jax.lax.scan(add_pair, start, pairs)
    output, logsumexp = checkpoint_name(output, "attention_out"), checkpoint_name(logsumexp, "attention_out")
    return output, (query, key, value, positions, pairs, segments, output, logsumexp)


def _backward(block, window, residuals, cotangent):
    query, key, value, positions, pairs, segments, output, logsumexp = residuals
    dtype = query.dtype
    mean = (cotangent.astype(jnp.float32) * output).sum(axis=-1)

    def add_pair(gradients, pair):
        grad_query, grad_key, grad_value = gradients
        q, g, row_lse, row_mean = (_rows(x, pair[0], block) for x in (query, cotangent, logsumexp, mean))
        k, v = (_block_of(x, pair[1], block, axis=2) for x in (key, value))
        scores = _scores(block, window, query, key, positions, pair, segments)
        weights = jnp.exp(scores - row_lse[..., None])
        grad_scores = weights * (_dot("BKRH,BKSH->BKRS", g, v) - row_mean[..., None])
        weights, grad_scores = weights.astype(dtype), grad_scores.astype(dtype)
        of_query = _dot("BKRS,BKSH->BKRH", grad_scores, k).reshape(*query.shape[:3], block, -1)
        grad_query = _add_block(grad_query, of_query, pair[0], block, axis=3)
        grad_key = _add_block(grad_key, _dot("BKRS,BKRH->BKSH", grad_scores, q), pair[1], block, axis=2)
        grad_value = _add_block(grad_value, _dot("BKRS,BKRH->BKSH", weights, g), pair[1], block, axis=2)
        return (grad_query, grad_key, grad_value), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    gradients, _ = jax.lax.scan(add_pair, zeros, pairs)
    return *(gradient.astype(dtype) for gradient in gradients), None, None, None


attend_pairs.defvjp(_forward, _backward)


def _scores(block, window, query, key, positions, pair, segments):
    """Scores of a pair, [B, K, G t, s], float32; _MASKED_SCORE where a query does not see a key."""
    B, K, G, _, _ = query.shape
    at, keys = _block_of(positions, pair[0], block, axis=0)[:, None], pair[1] * block + jnp.arange(block)[None]
    seen = (keys <= at) & (keys < key.shape[2])
    seen = jnp.expand_dims(seen if window is None else seen & (keys > at - window), (0, 1, 2))
    if segments is not None:
        own, others = (_block_of(ids, i, block, axis=1) for ids, i in zip(segments, pair, strict=True))
        seen = seen & (own[:, None, None, :, None] == others[:, None, None, None])
    scores = _dot("BKRH,BKSH->BKRS", _rows(query, pair[0], block), _block_of(key, pair[1], block, axis=2))
    scores = jnp.where(seen, scores.reshape(B, K, G, block, block), _MASKED_SCORE)
    return scores.reshape(B, K, G * block, block)


def _block_of(x, i, block, axis):
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _rows(x, i, block):
    """Block i of [B, K, G, T, ..] as rows [B, K, G t, ..]."""
    x = _block_of(x, i, block, axis=3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _add_block(total, x, i, block, axis):
    return jax.lax.dynamic_update_slice_in_dim(total, _block_of(total, i, block, axis) + x, i * block, axis)


def _dot(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
