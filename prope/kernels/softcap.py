"""Soft caps, as in Gemma 2 (2408.00118, section 2)."""

import jax
import jax.numpy as jnp


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Computes cap * tanh(logits / cap), within (-cap, cap), for any shape; None: no cap."""
    if cap is None:
        return logits
    return cap * jnp.tanh(logits / cap)


def softcap_slope(capped: jax.Array, cap: float | None) -> jax.Array | float:
    """Returns the derivative of `softcap` where its result is `capped`.

    It is 0 beyond the cap: a masked score, far below, has a finite slope.
    """
    if cap is None:
        return 1.0
    share = jnp.clip(capped / cap, -1, 1)
    return 1 - jnp.square(share)
