"""Softmax over keys that come block by block, as flash attention computes it.

Axes: B batch, K key/value heads, R rows: the queries of a key/value head, s keys of a block,
H head_dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap

MASKED_SCORE = float(jnp.finfo(jnp.float32).min)  # finite, for a row that sees no key of a block


def masked_scores(
    rows: jax.Array, key: jax.Array, visible: jax.Array, cap: float | None
) -> jax.Array:
    """Computes the capped scores of rows [B, K, R, H] for keys [B, K, s, H]: [B, K, R, s], float32.

    They are MASKED_SCORE where `visible` [b, t, s] is false, of t queries of each of R / t heads.
    """
    scores = softcap(einsum_to_float32("BKRH,BKSH->BKRS", rows, key), cap)
    by_query = scores.reshape(*scores.shape[:2], -1, *visible.shape[1:])
    return jnp.where(visible[:, None, None], by_query, MASKED_SCORE).reshape(scores.shape)


class OnlineSoftmax(NamedTuple):
    """The softmax of rows over the keys so far, [B, K, R] and [B, K, R, H], float32."""

    largest: jax.Array  # score; -inf before the first keys
    total: jax.Array  # sum of exp(score - largest)
    values: jax.Array  # weighted by exp(score - largest)

    @classmethod
    def empty(cls, rows: jax.Array) -> "OnlineSoftmax":
        """Returns that of rows [B, K, R, H] before the first keys."""
        zeros = jnp.zeros(rows.shape, jnp.float32)
        total = zeros[..., 0]
        return cls(largest=total - jnp.inf, total=total, values=zeros)

    def update(self, scores: jax.Array, values: jax.Array) -> "OnlineSoftmax":
        """Adds a block of keys, with scores [B, K, R, s], float32, and values [B, K, s, H]."""
        largest = jnp.maximum(self.largest, scores.max(axis=-1))
        weights = jnp.exp(scores - largest[..., None])
        decay = jnp.exp(self.largest - largest)
        weighted = einsum_to_float32("BKRS,BKSH->BKRH", weights.astype(values.dtype), values)
        return OnlineSoftmax(
            largest=largest,
            total=self.total * decay + weights.sum(axis=-1),
            values=self.values * decay[..., None] + weighted,
        )

    def output(self) -> jax.Array:
        """Returns the mean of the values, weighted by the softmax, [B, K, R, H]."""
        return self.values / self.total[..., None]
