"""Cross-entropy of the next token, without ever holding the [tokens, V] logits of a large vocabulary whole.

Axes: B batch, T length, D embed_dim, V vocab.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

_CHUNK = 2**28  # logits of one sequence that exist at a time: 1 GiB of float32


def token_losses(
    hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """-log softmax(hidden embedding^T)[targets] in nats, float32.

    The matmul is in hidden's dtype with float32 sums. It runs over pieces of T, not of B, so that a batch that is
    split over devices stays split; the backward pass computes each piece's logits again.
    """
    table = embedding.astype(hidden.dtype)

    def piece(hidden, targets):
        logits = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    B, T, D = hidden.shape
    length = max(t for t in range(1, T + 1) if T % t == 0 and (t == 1 or t * len(embedding) <= _CHUNK))
    if length == T:
        return piece(hidden, targets)
    pieces = (
        hidden.reshape(B, T // length, length, D).swapaxes(0, 1),
        targets.reshape(B, T // length, length).swapaxes(0, 1),
    )
    losses = jax.lax.map(lambda part: jax.checkpoint(piece)(*part), pieces)
    return losses.swapaxes(0, 1).reshape(B, T)
