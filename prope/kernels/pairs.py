"""Attention in plain XLA, for any device, over pairs of a block of queries and a block of keys.

Only pairs in which some query sees some key are computed, one after the other, so memory is linear in the length. The
parts of a split sequence compute as many pairs each. The gradient computes the scores again.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S keys, H head_dim, C parts; of a block t
queries and s keys, R = G t rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

_MASKED_SCORE = float(jnp.finfo(jnp.float32).min)
_MOST_UNROLLED = 10  # pairs, up to which a loop is slower than a program for each


def attend_pairs(query, key, value, positions, part, segments=None, window: int | None = None):
    """Attends causally, [B, K, G, T, H] to [B, K, S, H]; arguments as those of `splash`."""
    T = query.shape[3]
    block, pairs = list_pairs(positions, window)
    if padding := -T % block:  # later queries are cut off, and no others see later keys
        query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
        key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (key, value))
        segments = segments and tuple(jnp.pad(ids, ((0, 0), (0, padding))) for ids in segments)
        positions = np.arange(T + padding)[None]
    of_part = (jnp.asarray(array)[part] for array in (positions, pairs))
    return _attend(block, window, query, key, value, *of_part, segments)[:, :, :, :T]


def list_pairs(positions: np.ndarray, window: int | None) -> tuple[int, np.ndarray]:
    """Lists the pairs of blocks that every part of a sequence computes: (tokens of a block, int32 [C, pairs, 2]).

    Args:
      positions: [C, T], indices in the sequence of the queries of each part, in increasing chunks.
      window: how many keys a query sees at most, its own included; None: all up to its own.
    """
    C, T = positions.shape
    widest = T if window is None else min(window, T)
    block = next(size for size in (512, 256, 128) if 8 * size <= widest or size == 128)
    block = min(block, T) if C == 1 else math.gcd(block, T // 2)
    first = positions[:, ::block]
    oldest = 0 * first if window is None else np.maximum(first - window + 1, 0)
    starts = [
        [(q, k) for q in range(first.shape[1]) for k in range(old[q] // block, new[q] // block + 1)]
        for new, old in zip(first, oldest, strict=True)
    ]
    longest = max(map(len, starts))
    # Where a window leaves a part less to do, its last pair is followed by ones whose keys nobody sees.
    padded = [own + [(own[-1][0], -(-C * T // block))] * (longest - len(own)) for own in starts]
    return block, np.array(padded, np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(block, window, query, key, value, positions, pairs, segments):
    """Attends to whole blocks; `positions` [T] and `pairs` [pairs, 2] are those of this part."""
    return _forward(block, window, query, key, value, positions, pairs, segments)[0]


def _forward(block, window, query, key, value, positions, pairs, segments):
    B, K, G, T, H = query.shape

    def add_pair(carry, pair):
        output, logsumexp, last, (largest, total, sums) = carry
        scores = _scores(block, window, query, key, positions, pair, segments)
        largest = jnp.where(
            pair[0] == last, largest, -jnp.inf
        )  # else the first keys of a block of queries
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights, old = jnp.exp(scores - new_largest[..., None]), jnp.exp(largest - new_largest)
        total = total * old + weights.sum(axis=-1)
        v = _block(block, value, pair[1], 2)
        sums = sums * old[..., None] + _dot("BKRS,BKSH->BKRH", weights.astype(v.dtype), v)
        of_block = (sums / total[..., None]).astype(value.dtype).reshape(B, K, G, block, H)
        output = jax.lax.dynamic_update_slice_in_dim(output, of_block, pair[0] * block, axis=3)
        of_block = (new_largest + jnp.log(total)).reshape(B, K, G, block)
        logsumexp = jax.lax.dynamic_update_slice_in_dim(
            logsumexp, of_block, pair[0] * block, axis=3
        )
        return (output, logsumexp, pair[0], (new_largest, total, sums)), None

    rows = jnp.zeros((B, K, G * block), jnp.float32)
    start = jnp.zeros(query.shape, value.dtype), jnp.zeros((B, K, G, T), jnp.float32)
    start = *start, jnp.int32(-1), (rows, rows, jnp.zeros((*rows.shape, H), jnp.float32))
    output, logsumexp, *_ = _scan(add_pair, start, pairs)
    output, logsumexp = (
        checkpoint_name(output, "attention_out"),
        checkpoint_name(logsumexp, "attention_out"),
    )
    return output, (query, key, value, positions, pairs, segments, output, logsumexp)


def _backward(block, window, residuals, cotangent):
    query, key, value, positions, pairs, segments, output, logsumexp = residuals
    mean = (cotangent.astype(jnp.float32) * output).sum(axis=-1)

    def add_pair(gradients, pair):
        q, g, row_logsumexp, row_mean = (
            _rows(block, x, pair[0]) for x in (query, cotangent, logsumexp, mean)
        )
        k, v = (_block(block, x, pair[1], 2) for x in (key, value))
        weights = _scores(block, window, query, key, positions, pair, segments)
        weights = jnp.exp(weights - row_logsumexp[..., None])
        grad_scores = weights * (_dot("BKRH,BKSH->BKRS", g, v) - row_mean[..., None])
        weights, grad_scores = weights.astype(query.dtype), grad_scores.astype(query.dtype)
        of_query = _dot("BKRS,BKSH->BKRH", grad_scores, k).reshape(*query.shape[:3], block, -1)
        of_key, of_value = (
            _dot("BKRS,BKRH->BKSH", grad_scores, q),
            _dot("BKRS,BKRH->BKSH", weights, g),
        )
        added = []
        for total, x, i, axis in zip(
            gradients, (of_query, of_key, of_value), (0, 1, 1), (3, 2, 2), strict=True
        ):
            x = _block(block, total, pair[i], axis) + x
            added.append(jax.lax.dynamic_update_slice_in_dim(total, x, pair[i] * block, axis))
        return tuple(added), None

    gradients = _scan(
        add_pair, tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value)), pairs
    )
    return *(gradient.astype(query.dtype) for gradient in gradients), None, None, None


_attend.defvjp(_forward, _backward)


def _scores(block, window, query, key, positions, pair, segments):
    """Scores of a pair, [B, K, R, s], float32; _MASKED_SCORE where a query does not see a key."""
    at, keys = (
        _block(block, positions, pair[0], 0)[:, None],
        pair[1] * block + jnp.arange(block)[None],
    )
    seen = keys <= at if window is None else (keys <= at) & (keys > at - window)
    seen = jnp.expand_dims(seen, (0, 1, 2))
    if segments is not None:
        own, others = (_block(block, ids, i, 1) for ids, i in zip(segments, pair, strict=True))
        seen = seen & (own[:, None, None, :, None] == others[:, None, None, None])
    scores = _dot("BKRH,BKSH->BKRS", _rows(block, query, pair[0]), _block(block, key, pair[1], 2))
    of_query = scores.reshape(*query.shape[:3], block, block)
    return jnp.where(seen, of_query, _MASKED_SCORE).reshape(scores.shape)


def _scan(function, start, pairs):
    """Calls a function with every pair in turn; returns what it carries."""
    return jax.lax.scan(
        function, start, pairs, unroll=len(pairs) if len(pairs) <= _MOST_UNROLLED else 1
    )[0]


def _block(block, x, i, axis):
    """Block i of an axis; beyond its end, the last one."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _rows(block, x, i):
    """Block i of [B, K, G, T, ..] as rows [B, K, R, ..]."""
    x = _block(block, x, i, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _dot(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
