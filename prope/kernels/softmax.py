"""Softmax over keys that come block by block, as flash attention computes it.

Axes: B batch, K key/value heads, R rows: the queries of a key/value head, s keys of a block,
H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prope.kernels.matmul import einsum_to_float32

MASKED_SCORE = float(jnp.finfo(jnp.float32).min)  # finite, for a row that sees no key of a block


class Sums(NamedTuple):
    """The softmax of rows over the keys so far, [B, K, R] and [B, K, R, H], float32."""

    largest: jax.Array  # score; -inf before the first keys
    total: jax.Array  # sum of exp(score - largest)
    values: jax.Array  # weighted by exp(score - largest)


def no_keys(rows: jax.Array) -> Sums:
    """Returns the sums of rows [B, K, R, H] before the first keys."""
    zeros = jnp.zeros(rows.shape, jnp.float32)
    total = zeros[..., 0]
    return Sums(largest=total - jnp.inf, total=total, values=zeros)


def add_keys(sums: Sums, scores: jax.Array, values: jax.Array) -> Sums:
    """Adds a block of keys, with scores [B, K, R, s], float32, and values [B, K, s, H]."""
    largest = jnp.maximum(sums.largest, scores.max(axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    decay = jnp.exp(sums.largest - largest)
    weighted = einsum_to_float32("BKRS,BKSH->BKRH", weights.astype(values.dtype), values)
    return Sums(
        largest=largest,
        total=sums.total * decay + weights.sum(axis=-1),
        values=sums.values * decay[..., None] + weighted,
    )
