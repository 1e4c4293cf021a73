"""A gated MLP, act(x W0) * (x W1) projected back.

Axes: B batch, T length, D embed_dim, F hidden_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from prope.sharding import constrain

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),  # the tanh form, as in Gemma
    "silu": jax.nn.silu,
}


def gated_mlp(
    x: Float[Array, "B T D"],
    gating: Float[Array, "2 D F"],
    linear: Float[Array, "F D"],
    activation: str = "gelu",
) -> Float[Array, "B T D"]:
    """Computes (act(x gating[0]) * (x gating[1])) linear, by one of `ACTIVATIONS`.

    Its matmuls are saved for the backward pass as "gate" and "up".
    """
    # With one axis of tokens, the gradient is twice as fast on a CPU.
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[1] == 1:
        # A CPU copies each half of gating: for one token that takes longer than the matmuls.
        halves = jnp.einsum("CRD,CDF->CRF", jnp.stack([rows, rows]), gating)
        gate = halves[0]
        up = halves[1]
    else:
        gate = jnp.einsum("RD,DF->RF", rows, gating[0])
        up = jnp.einsum("RD,DF->RF", rows, gating[1])
    gate = checkpoint_name(constrain(gate, "BF"), "gate")
    up = checkpoint_name(constrain(up, "BF"), "up")
    gated = ACTIVATIONS[activation](gate) * up
    return constrain(jnp.einsum("RF,FD->RD", gated, linear).reshape(x.shape), "BTD")
