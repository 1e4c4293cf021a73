"""Attention in plain XLA, for any device, over pairs of a block of queries and a block of keys.

Only pairs in which some query sees some key are computed, one after the other, so memory is linear
in the length. The devices of a split sequence compute as many pairs each. The gradient computes the
scores again.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S keys, H head_dim,
C context ranks; of a block t queries and s keys, R = G t rows.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap, softcap_slope
from prope.kernels.softmax import MASKED_SCORE, add_keys, no_keys

_MOST_UNROLLED = 10  # pairs, up to which a loop is slower than a program for each


def attend_pairs(
    query,
    key,
    value,
    positions,
    rank,
    segments=None,
    window: int | None = None,
    cap: float | None = None,
    sinks: int = 0,
):
    """Attends causally, [B, K, G, T, H] to [B, K, S, H]; arguments as those of `splash`.

    With a window, a query also sees the first `sinks` keys of the sequence.
    """
    T = query.shape[3]
    block, pairs = list_pairs(positions, window, sinks)
    rule = _Rule(block, window, sinks, cap)
    padding = -T % block
    if padding:  # padded queries are cut off again, and no others see the padded keys
        after = (0, padding)
        query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), after, (0, 0)))
        key = jnp.pad(key, ((0, 0), (0, 0), after, (0, 0)))
        value = jnp.pad(value, ((0, 0), (0, 0), after, (0, 0)))
        positions = np.arange(T + padding)[None]
        if segments is not None:
            segments = tuple(jnp.pad(ids, ((0, 0), after)) for ids in segments)
    rank_positions = jnp.asarray(positions)[rank]
    rank_pairs = jnp.asarray(pairs)[rank]
    output = _attend(rule, query, key, value, rank_positions, rank_pairs, segments)
    return output[:, :, :, :T]


def list_pairs(positions: np.ndarray, window: int | None, sinks: int = 0) -> tuple[int, np.ndarray]:
    """Lists the pairs of blocks that every rank computes: (tokens of a block, int32 [C, pairs, 2]).

    Args:
      positions: [C, T], indices in the sequence of the queries of each rank, in increasing chunks.
      window: how many keys a query sees at most, its own included; None: all up to its own.
      sinks: first keys of the sequence that it also sees.
    """
    C, T = positions.shape
    block = _block_size(C, T, window)
    num_key_blocks = -(-C * T // block)

    def pairs_of_rank(positions: np.ndarray) -> list[tuple[int, int]]:
        pairs = []
        for query_block, first_query in enumerate(positions[::block]):
            oldest_key = 0 if window is None else max(first_query - window + 1, 0)
            first_block = oldest_key // block
            in_window = range(first_block, first_query // block + 1)
            sink_blocks = -(-sinks // block)
            of_sinks = range(min(sink_blocks, first_block))
            for key_block in (*of_sinks, *in_window):
                pairs.append((query_block, key_block))
        return pairs

    by_rank = [pairs_of_rank(rank) for rank in positions]
    longest = max(map(len, by_rank))
    for pairs in by_rank:
        # Where a window leaves a rank less to do, its last pair is followed by ones whose keys
        # nobody sees.
        last_query_block, _ = pairs[-1]
        pairs += [(last_query_block, num_key_blocks)] * (longest - len(pairs))
    return block, np.array(by_rank, np.int32)


def _block_size(C: int, T: int, window: int | None) -> int:
    """Chooses 512, 256 or 128 tokens, so that some blocks are skipped; fewer in short sequences."""
    visible = T if window is None else min(window, T)
    block = next(size for size in (512, 256, 128) if 4 * size <= visible or size == 128)
    if C == 1:
        return min(block, T)
    return math.gcd(block, T // 2)


class _Rule(NamedTuple):
    """Which keys a query sees, and how scores are made."""

    block: int  # tokens
    window: int | None
    sinks: int
    cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule, query, key, value, positions, pairs, segments):
    """Attends to whole blocks; `positions` [T] and `pairs` [pairs, 2] are those of this rank."""
    output, _ = _forward(rule, query, key, value, positions, pairs, segments)
    return output


def _forward(rule, query, key, value, positions, pairs, segments):
    B, K, G, T, H = query.shape
    block = rule.block

    def add_pair(carry, pair):
        output, logsumexp, last_query_block, sums = carry
        query_block, key_block = pair
        scores = _scores(rule, query, key, positions, pair, segments)
        block_values = _block(block, value, key_block, axis=2)
        same_queries = query_block == last_query_block
        largest = jnp.where(same_queries, sums.largest, -jnp.inf)  # new queries start anew
        sums = add_keys(sums._replace(largest=largest), scores, block_values)
        normalised = (sums.values / sums.total[..., None]).astype(value.dtype)
        output = _write_rows(block, output, normalised.reshape(B, K, G, block, H), query_block)
        block_logsumexp = sums.largest + jnp.log(sums.total)
        logsumexp = _write_rows(
            block, logsumexp, block_logsumexp.reshape(B, K, G, block), query_block
        )
        return (output, logsumexp, query_block, sums), None

    start = (
        jnp.zeros(query.shape, value.dtype),
        jnp.zeros((B, K, G, T), jnp.float32),
        jnp.int32(-1),
        no_keys(_rows(block, query, 0)),
    )
    output, logsumexp, _, _ = _scan(add_pair, start, pairs)
    output = checkpoint_name(output, "attention_out")
    logsumexp = checkpoint_name(logsumexp, "attention_out")
    return output, (query, key, value, positions, pairs, segments, output, logsumexp)


def _backward(rule, residuals, cotangent):
    block = rule.block
    query, key, value, positions, pairs, segments, output, logsumexp = residuals
    mean = (cotangent.astype(jnp.float32) * output).sum(axis=-1)

    def add_pair(gradients, pair):
        grad_query, grad_key, grad_value = gradients
        query_block, key_block = pair
        q = _rows(block, query, query_block)
        g = _rows(block, cotangent, query_block)
        row_logsumexp = _rows(block, logsumexp, query_block)
        row_mean = _rows(block, mean, query_block)
        k = _block(block, key, key_block, axis=2)
        v = _block(block, value, key_block, axis=2)
        scores = _scores(rule, query, key, positions, pair, segments)
        weights = jnp.exp(scores - row_logsumexp[..., None])
        grad_weights = einsum_to_float32("BKRH,BKSH->BKRS", g, v)
        grad_capped = weights * (grad_weights - row_mean[..., None])
        grad_scores = grad_capped * softcap_slope(scores, rule.cap)
        weights = weights.astype(query.dtype)
        grad_scores = grad_scores.astype(query.dtype)
        block_grad_query = einsum_to_float32("BKRS,BKSH->BKRH", grad_scores, k)
        block_grad_query = block_grad_query.reshape(*query.shape[:3], block, -1)
        block_grad_key = einsum_to_float32("BKRS,BKRH->BKSH", grad_scores, q)
        block_grad_value = einsum_to_float32("BKRS,BKRH->BKSH", weights, g)
        added = (
            _add_block(block, grad_query, block_grad_query, query_block, axis=3),
            _add_block(block, grad_key, block_grad_key, key_block, axis=2),
            _add_block(block, grad_value, block_grad_value, key_block, axis=2),
        )
        return added, None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    gradients = _scan(add_pair, start, pairs)
    return *(gradient.astype(query.dtype) for gradient in gradients), None, None, None


_attend.defvjp(_forward, _backward)


def _scores(rule, query, key, positions, pair, segments):
    """Computes a pair's capped scores [B, K, R, s], float32; MASKED_SCORE where hidden."""
    block = rule.block
    query_block, key_block = pair
    query_positions = _block(block, positions, query_block, axis=0)[:, None]
    key_positions = key_block * block + jnp.arange(block)[None]
    visible = key_positions <= query_positions
    if rule.window is not None:
        in_window = key_positions > query_positions - rule.window
        visible = visible & (in_window | (key_positions < rule.sinks))
    visible = jnp.expand_dims(visible, (0, 1, 2))
    if segments is not None:
        query_ids = _block(block, segments[0], query_block, axis=1)
        key_ids = _block(block, segments[1], key_block, axis=1)
        visible = visible & (query_ids[:, None, None, :, None] == key_ids[:, None, None, None])
    rows = _rows(block, query, query_block)
    scores = einsum_to_float32("BKRH,BKSH->BKRS", rows, _block(block, key, key_block, axis=2))
    by_query = softcap(scores, rule.cap).reshape(*query.shape[:3], block, block)
    return jnp.where(visible, by_query, MASKED_SCORE).reshape(scores.shape)


def _scan(function, start, pairs):
    """Calls a function with every pair in turn; returns what it carries."""
    unroll = len(pairs) if len(pairs) <= _MOST_UNROLLED else 1
    carry, _ = jax.lax.scan(function, start, pairs, unroll=unroll)
    return carry


def _block(block, x, i, axis):
    """Reads block i of an axis; beyond its end, the last one."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _rows(block, x, i):
    """Reads block i of [B, K, G, T, ..] as rows [B, K, R, ..]."""
    x = _block(block, x, i, axis=3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _write_rows(block, x, values, i):
    """Replaces block i of [B, K, G, T, ..]."""
    return jax.lax.dynamic_update_slice_in_dim(x, values, i * block, axis=3)


def _add_block(block, total, values, i, axis):
    """Adds values to block i of an axis."""
    added = _block(block, total, i, axis) + values
    return jax.lax.dynamic_update_slice_in_dim(total, added, i * block, axis)
