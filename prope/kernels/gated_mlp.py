"""A gated MLP, act(x W0) * (x W1) projected back, fast on a CPU and saving memory.

Axes: B batch, T length, D embed_dim, F hidden_dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from prope.kernels.matmul import einsum
from prope.sharding import constrain, constrain_like_param

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
        halves = einsum("CRD,CDF->CRF", jnp.stack([rows, rows]), gating)
        gate = halves[0]
        up = halves[1]
    else:
        gate = einsum("RD,DF->RF", rows, gating[0])
        up = einsum("RD,DF->RF", rows, gating[1])
    gate = checkpoint_name(constrain(gate, "BF"), "gate")
    up = checkpoint_name(constrain(up, "BF"), "up")
    return constrain(_project(activation, gate, up, linear).reshape(x.shape), "BTD")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(activation, gate, up, linear):
    """Computes (act(gate) * up) @ linear; its gradient recomputes the product, not saving it."""
    return einsum("RF,FD->RD", _gated(activation, gate, up), linear)


def _gated(activation, gate, up):
    return ACTIVATIONS[activation](gate) * up


def _project_forward(activation, gate, up, linear):
    return _project(activation, gate, up, linear), (gate, up, linear)


def _project_backward(activation, residuals, cotangent):
    gate, up, linear = residuals
    gated = _gated(activation, gate, up)
    grad_linear = constrain_like_param(einsum("RF,RD->FD", gated, cotangent), "FD")
    grad_gated = constrain(einsum("RD,FD->RF", cotangent, linear), "BF")
    # This order frees the product before the gradients of gate and up, each as large, exist.
    grad_gated, grad_linear, gate, up = jax.lax.optimization_barrier(
        (grad_gated, grad_linear, gate, up)
    )
    _, vjp = jax.vjp(functools.partial(_gated, activation), gate, up)
    grad_gate, grad_up = vjp(grad_gated)
    return grad_gate, grad_up, grad_linear


_project.defvjp(_project_forward, _project_backward)
