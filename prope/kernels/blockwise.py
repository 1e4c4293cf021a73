"""Attention in plain XLA, for any device, over blocks of queries and blocks of keys.

Only blocks in which some query sees some key are computed, one after the other, so memory is linear
in the length. The devices of a split sequence compute as many blocks each. The gradient computes
the scores again.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S keys, H head_dim,
C context ranks; of a block t queries and s keys, R = G t rows.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from prope.kernels.mask import Mask, attention_mask
from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap_slope
from prope.kernels.softmax import OnlineSoftmax, masked_scores

_MOST_UNROLLED = 10  # blocks, up to which a loop is slower than a program for each


def blockwise_attention(query, key, value, mask: Mask, positions, rank, cap: float | None = None):
    """Attends causally, [B, K, G, T, H] to [B, K, S, H]; arguments as those of `splash`."""
    T = query.shape[3]
    block, blocks = visible_blocks(positions, mask)
    padding = -T % block
    if padding:  # padded queries are cut off again, and no others see the padded keys

        def pad(x, axis):
            return jnp.pad(x, [(0, padding * (i == axis)) for i in range(x.ndim)])

        query, key, value = pad(query, 3), pad(key, 2), pad(value, 2)
        positions = np.arange(T + padding)[None]
        if mask.segment_ids is not None:
            padded_ids = tuple(pad(ids, 1) for ids in mask.segment_ids)
            mask = dataclasses.replace(mask, segment_ids=padded_ids)
    rank_positions = jnp.asarray(positions)[rank]
    rank_blocks = jnp.asarray(blocks)[rank]
    output = _attend(block, cap, query, key, value, mask, rank_positions, rank_blocks)
    return output[:, :, :, :T]


def visible_blocks(positions: np.ndarray, mask: Mask) -> tuple[int, np.ndarray]:
    """Lists what every rank computes: the tokens of a block, and int32 [C, n, 2].

    Each of the n rows is a block of queries, and a block of keys of which one is seen.

    Args:
      positions: [C, T], indices in the sequence of the queries of each rank, in increasing chunks.
      mask: its segments do not matter.
    """
    C, T = positions.shape
    window = C * T if mask.window is None else mask.window
    block = _block_size(C, T, window)
    num_key_blocks = -(-C * T // block)
    sink_blocks = -(-mask.sinks // block)

    def blocks_of_rank(positions):
        blocks = []
        for query_block, first_query in enumerate(positions[::block]):
            first_block = max(first_query - window + 1, 0) // block
            of_sinks = range(min(sink_blocks, first_block))
            in_window = range(first_block, first_query // block + 1)
            blocks += [(query_block, key_block) for key_block in (*of_sinks, *in_window)]
        return blocks

    by_rank = [blocks_of_rank(rank) for rank in positions]
    longest = max(map(len, by_rank))
    for blocks in by_rank:
        # Where a window leaves a rank less to do, its last queries are followed by keys that nobody
        # sees.
        last_query_block, _ = blocks[-1]
        blocks += [(last_query_block, num_key_blocks)] * (longest - len(blocks))
    return block, np.array(by_rank, np.int32)


def _block_size(C: int, T: int, window: int) -> int:
    """Chooses 512, 256 or 128 tokens, so that some blocks are skipped; fewer in short sequences."""
    visible = min(window, T)
    block = next(size for size in (512, 256, 128) if 4 * size <= visible or size == 128)
    if C == 1:
        return min(block, T)
    return math.gcd(block, T // 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(block, cap, query, key, value, mask, positions, blocks):
    """Attends to whole blocks; `positions` [T] and `blocks` [n, 2] are those of this rank."""
    output, _ = _forward(block, cap, query, key, value, mask, positions, blocks)
    return output


def _forward(block, cap, query, key, value, mask, positions, blocks):
    B, K, G, T, H = query.shape

    def add_block(carry, indices):
        output, logsumexp, last_query_block, softmax = carry
        query_block, key_block = indices
        scores = _scores(block, cap, query, key, mask, positions, indices)
        block_values = _read(block, value, key_block, axis=2)
        same_queries = query_block == last_query_block
        largest = jnp.where(same_queries, softmax.largest, -jnp.inf)  # new queries start anew
        softmax = softmax._replace(largest=largest).update(scores, block_values)
        normalised = softmax.output().astype(value.dtype).reshape(B, K, G, block, H)
        output = _write_rows(block, output, normalised, query_block)
        block_logsumexp = softmax.largest + jnp.log(softmax.total)
        logsumexp = _write_rows(
            block, logsumexp, block_logsumexp.reshape(B, K, G, block), query_block
        )
        return (output, logsumexp, query_block, softmax), None

    start = (
        jnp.zeros(query.shape, value.dtype),
        jnp.zeros((B, K, G, T), jnp.float32),
        jnp.int32(-1),
        OnlineSoftmax.empty(_read_rows(block, query, 0)),
    )
    output, logsumexp, _, _ = _scan(add_block, start, blocks)
    output = checkpoint_name(output, "attention_out")
    logsumexp = checkpoint_name(logsumexp, "attention_out")
    return output, (query, key, value, mask, positions, blocks, output, logsumexp)


def _backward(block, cap, residuals, cotangent):
    query, key, value, mask, positions, blocks, output, logsumexp = residuals
    mean = (cotangent.astype(jnp.float32) * output).sum(axis=-1)

    def add_block(gradients, indices):
        grad_query, grad_key, grad_value = gradients
        query_block, key_block = indices
        q = _read_rows(block, query, query_block)
        g = _read_rows(block, cotangent, query_block)
        row_logsumexp = _read_rows(block, logsumexp, query_block)
        row_mean = _read_rows(block, mean, query_block)
        k = _read(block, key, key_block, axis=2)
        v = _read(block, value, key_block, axis=2)
        scores = _scores(block, cap, query, key, mask, positions, indices)
        weights = jnp.exp(scores - row_logsumexp[..., None])
        grad_weights = einsum_to_float32("BKRH,BKSH->BKRS", g, v)
        grad_capped = weights * (grad_weights - row_mean[..., None])
        grad_scores = grad_capped * softcap_slope(scores, cap)
        weights = weights.astype(query.dtype)
        grad_scores = grad_scores.astype(query.dtype)
        block_grad_query = einsum_to_float32("BKRS,BKSH->BKRH", grad_scores, k)
        block_grad_query = block_grad_query.reshape(*query.shape[:3], block, -1)
        block_grad_key = einsum_to_float32("BKRS,BKRH->BKSH", grad_scores, q)
        block_grad_value = einsum_to_float32("BKRS,BKRH->BKSH", weights, g)
        added = (
            _add(block, grad_query, block_grad_query, query_block, axis=3),
            _add(block, grad_key, block_grad_key, key_block, axis=2),
            _add(block, grad_value, block_grad_value, key_block, axis=2),
        )
        return added, None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    gradients = _scan(add_block, start, blocks)
    return *(gradient.astype(query.dtype) for gradient in gradients), None, None, None


_attend.defvjp(_forward, _backward)


def _scores(block, cap, query, key, mask, positions, indices):
    """Computes a block's capped scores [B, K, R, s], float32; MASKED_SCORE where hidden."""
    query_block, key_block = indices
    query_positions = _read(block, positions, query_block, axis=0)
    key_positions = key_block * block + jnp.arange(block)
    if mask.segment_ids is not None:
        query_ids, key_ids = mask.segment_ids
        ids = (_read(block, query_ids, query_block, axis=1), _read(block, key_ids, key_block, 1))
        mask = dataclasses.replace(mask, segment_ids=ids)
    visible = attention_mask(mask, query_positions[None], key_positions[None])
    rows = _read_rows(block, query, query_block)
    return masked_scores(rows, _read(block, key, key_block, axis=2), visible, cap)


def _scan(function, start, blocks):
    """Calls a function with every row of `blocks` in turn; returns what it carries."""
    unroll = len(blocks) if len(blocks) <= _MOST_UNROLLED else 1
    carry, _ = jax.lax.scan(function, start, blocks, unroll=unroll)
    return carry


def _read(block, x, i, axis):
    """Reads block i of an axis; beyond its end, the last one."""
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _read_rows(block, x, i):
    """Reads block i of [B, K, G, T, ..] as rows [B, K, R, ..]."""
    x = _read(block, x, i, axis=3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _write_rows(block, x, values, i):
    """Replaces block i of [B, K, G, T, ..]."""
    return jax.lax.dynamic_update_slice_in_dim(x, values, i * block, axis=3)


def _add(block, total, values, i, axis):
    """Adds values to block i of an axis."""
    added = _read(block, total, i, axis) + values
    return jax.lax.dynamic_update_slice_in_dim(total, added, i * block, axis)
