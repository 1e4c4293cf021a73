"""Matmuls of bfloat16 or float32 arrays with float32 sums and results."""

import functools

import jax.numpy as jnp

einsum_to_float32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
