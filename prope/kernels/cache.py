"""Attention of new tokens to a cache of keys, in plain XLA, for any device.

The queries of a prompt read the keys by blocks, up to the last slot that one of them sees; a single
query reads all slots.

Axes: B batch, K key/value heads, G queries of a key/value head, T queries, S slots of the cache,
H head_dim; R = G T rows.
"""

import jax
import jax.numpy as jnp

from prope.kernels.mask import Mask, attention_mask
from prope.kernels.softmax import OnlineSoftmax, masked_scores

# Whose scores exist at once.
_QUERIES_OF_BLOCK = 128
_KEYS_OF_BLOCK = 512
_UNSEEN = jnp.iinfo(jnp.int32).max  # the position of a key that comes after every query


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    first_query: jax.Array,
    newest_key: jax.Array,
    cap: float | None = None,
) -> jax.Array:
    """Attends [B, K, G, T, H] to [B, K, S, H]; arguments as those of `prope.attention.attention`.

    It has no reverse-mode gradient.
    """
    B, K, G, T, H = query.shape
    S = key.shape[2]
    slot_positions = newest_key[:, None] - (newest_key[:, None] - jnp.arange(S)[None]) % S
    slot_positions = jnp.where(slot_positions < 0, _UNSEEN, slot_positions)  # an empty slot
    block = S if T == 1 else min(S, _KEYS_OF_BLOCK)

    def attend(start, end):
        """Attends the queries from `start` up to `end`."""
        positions = first_query[:, None] + jnp.arange(start, end)[None]
        # One matmul of a key/value head with the queries of all its G heads as rows.
        rows = query[:, :, :, start:end].reshape(B, K, -1, H)

        def add_block(index, softmax):
            # The last block is as long as the others: it begins before its place.
            first = jnp.minimum(index * block, S - block)
            keys, values = (
                jax.lax.dynamic_slice_in_dim(x, first, block, axis=2) for x in (key, value)
            )
            key_positions = jax.lax.dynamic_slice_in_dim(slot_positions, first, block, axis=1)
            was_read = first + jnp.arange(block) < index * block
            key_positions = jnp.where(was_read[None], _UNSEEN, key_positions)
            visible = attention_mask(mask, positions, key_positions)
            return softmax.update(masked_scores(rows, keys, visible, cap), values)

        softmax = OnlineSoftmax.empty(rows)
        if block == S:
            softmax = add_block(0, softmax)
        else:
            # A position below S is in the slot of its number, where no newer one has replaced it;
            # the queries see no newer ones. A GPU would wait for the host to read their number.
            slots = jax.lax.platform_dependent(
                jnp.minimum(positions.max() + 1, S),
                cuda=lambda _: jnp.int32(S),
                default=lambda seen: seen,
            )
            softmax = jax.lax.fori_loop(0, -(-slots // block), add_block, softmax)
        return softmax.output().astype(value.dtype).reshape(B, K, G, -1, H)

    starts = range(0, T, _QUERIES_OF_BLOCK)
    outputs = [attend(start, min(start + _QUERIES_OF_BLOCK, T)) for start in starts]
    return jnp.concatenate(outputs, axis=3)
