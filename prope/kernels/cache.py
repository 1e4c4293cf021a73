"""Attention of new tokens to a cache of keys, in plain XLA, for any device.

The queries of a prompt read the keys by blocks, up to the last slot that one of them sees; a single
query reads all slots.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S slots of the cache,
H head_dim; R = G T rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap
from prope.kernels.softmax import MASKED_SCORE, add_keys, no_keys

# Whose scores exist at once.
_QUERIES_OF_BLOCK = 128
_KEYS_OF_BLOCK = 512


class _Keys(NamedTuple):
    """The cache, or a block of its slots."""

    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, H]
    positions: jax.Array  # [B, S]; below 0 where a slot is empty, or was in the block before


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_query: jax.Array,
    newest_key: jax.Array,
    window: int | None = None,
    cap: float | None = None,
    sinks: int = 0,
) -> jax.Array:
    """Attends [B, K, G, T, H] to [B, K, S, H]; arguments as those of `prope.attention.attention`.

    It has no reverse-mode gradient.
    """
    T = query.shape[3]
    S = key.shape[2]
    age = (newest_key[:, None] - jnp.arange(S)[None]) % S
    keys = _Keys(key, value, newest_key[:, None] - age)
    keys_of_block = S if T == 1 else min(S, _KEYS_OF_BLOCK)
    outputs = []
    for start in range(0, T, _QUERIES_OF_BLOCK):
        end = min(start + _QUERIES_OF_BLOCK, T)
        output = _attend_block(
            query[:, :, :, start:end],
            keys,
            first_query[:, None] + jnp.arange(start, end)[None],
            keys_of_block,
            window,
            cap,
            sinks,
        )
        outputs.append(output)
    return jnp.concatenate(outputs, axis=3)


def _attend_block(query, keys: _Keys, positions, block, window, cap, sinks):
    """Attends queries [B, K, G, T, H] at `positions` [B, T] to the slots that they may see."""
    B, K, G, T, H = query.shape
    S = keys.key.shape[2]
    # One matmul of a key/value head with the queries of all its G heads as rows.
    rows = query.reshape(B, K, G * T, H)

    def add_block(index, sums):
        of_block = _read_block(keys, index, block)
        scores = einsum_to_float32("BKRH,BKSH->BKRS", rows, of_block.key)
        capped = softcap(scores, cap)
        visible = _sees(positions, of_block.positions, window, sinks)
        visible_scores = jnp.where(
            visible[:, None, None], capped.reshape(B, K, G, T, block), MASKED_SCORE
        )
        return add_keys(sums, visible_scores.reshape(scores.shape), of_block.value)

    sums = no_keys(rows)
    if block == S:
        sums = add_block(0, sums)
    else:
        # A position below S is in the slot of its number, where no newer one has replaced it; the
        # queries see no newer ones.
        slots_seen = jnp.minimum(positions.max() + 1, S)
        num_blocks = -(-slots_seen // block)
        sums = jax.lax.fori_loop(0, num_blocks, add_block, sums)
    output = sums.values / sums.total[..., None]
    return output.astype(keys.value.dtype).reshape(query.shape)


def _read_block(keys: _Keys, index, length: int) -> _Keys:
    """Reads a block of slots. The last one is as long as the others: it begins before its place."""
    first = jnp.minimum(index * length, keys.key.shape[2] - length)

    def read(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, first, length, axis)

    was_read = first + jnp.arange(length) < index * length
    positions = read(keys.positions, axis=1)
    return _Keys(
        key=read(keys.key, axis=2),
        value=read(keys.value, axis=2),
        positions=jnp.where(was_read[None], -1, positions),
    )


def _sees(positions, key_positions, window, sinks):
    """Tells which keys [B, S] the queries at `positions` [B, T] see: [B, T, S]."""
    queries = positions[:, :, None]
    keys = key_positions[:, None]
    visible = (keys >= 0) & (keys <= queries)
    if window is None:
        return visible
    return visible & ((keys > queries - window) | (keys < sinks))
