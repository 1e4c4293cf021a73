"""Causal attention: one function, and the choice of what computes it.

Axes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head_dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    first_query: int | jax.Array = 0,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(query key^T / sqrt(H)) value, where a query sees the keys up to its own index.

    Every group of G = N / K query heads shares a key/value head: K = 1 is multi-query, K = N multi-head attention.

    Args:
      query: already rotated, not yet scaled.
      key: already rotated.
      value: what is averaged.
      segment_ids: where given, queries and keys of different segments do not see each other. Needs T = S.
      first_query: the index among the keys of the first query; not 0 only where keys come from a cache.
      implementation: "auto" or "xla", which is what auto chooses on every platform today.

    Returns:
      The averaged values, in value's dtype; logits and softmax are float32 whatever the inputs are.
    """
    if implementation not in ("auto", "xla"):
        raise ValueError(f"attention must be auto or xla; got {implementation!r}")
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    # Two matmuls a key/value head, whose rows are the queries of all its G heads.
    rows = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    logits = jnp.einsum("BKRH,BSKH->BKRS", rows, key, preferred_element_type=jnp.float32)
    mask = jnp.arange(S)[None, :] <= first_query + jnp.arange(T)[:, None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, None, :, None] == segment_ids[:, None, None, None, :])
    logits = jnp.where(mask, logits.reshape(B, K, N // K, T, S), jnp.finfo(jnp.float32).min)
    # Softmax, with the division left until after the second matmul, where it is S / H times less work.
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest).reshape(B, K, -1, S)
    mixed = jnp.einsum("BKRS,BSKH->BKRH", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    mixed = (mixed / weights.sum(axis=-1, keepdims=True)).astype(value.dtype)
    return mixed.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
