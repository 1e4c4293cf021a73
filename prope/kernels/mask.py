"""Which keys a query sees: one value, and one formula, for all attention of this folder.

Axes: b 1 or batch, T queries, S keys.
"""

import dataclasses

import jax
from jax.typing import ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query sees of the keys up to its own position; by default all of them.

    Attributes:
      segment_ids: of the tokens, [B, S]; a query sees the keys of its own segment only. Kernels
        take a pair: those of a device's queries [B, T] and those of all keys.
      window: how many keys a query sees at most, its own included.
      sinks: with a window, how many of the first keys of the sequence a query also sees.
    """

    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None
    window: int | None = jax.tree.static(default=None)
    sinks: int = jax.tree.static(default=0)


CAUSAL = Mask()


def attention_mask(mask: Mask, positions: ArrayLike, key_positions: ArrayLike) -> jax.Array:
    """Returns which keys at positions [b, S] the queries at positions [b, T] see: [b, T, S].

    The segment ids of `mask` are those of these queries and keys.
    """
    queries = positions[:, :, None]
    keys = key_positions[:, None]
    visible = keys <= queries
    if mask.window is not None:
        visible = visible & ((keys > queries - mask.window) | (keys < mask.sinks))
    if mask.segment_ids is not None:
        query_ids, key_ids = mask.segment_ids
        visible = visible & (query_ids[:, :, None] == key_ids[:, None])
    return visible
