"""Matmuls with float32 sums. Those of bfloat16 are several times as fast so on a CPU that has AMX.

On CPUs XLA hands matmuls to YNNPACK, and in bfloat16, for which it has the processor's
instructions, where all of this holds: the result is float32, axes that both arrays keep come first,
the first array is summed over its last axes, and it has two rows or more. Otherwise XLA converts
both arrays to float32, or stops with "Unsupported element type for DotThunk".

Axes of an equation are capital letters.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp

from prope.sharding import platform


def einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays of a dtype, in that dtype.

    In bfloat16 on a CPU, the result and the gradients are summed in float32 and rounded once; then
    only reverse-mode derivatives exist.
    """
    if _is_bfloat16_on_cpu(x, y) and _is_matmul(equation):
        return _round_sums(equation, x, y)
    return jnp.einsum(equation, x, y)


def einsum_to_float32(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` of two arrays of a dtype, in float32."""
    if _is_bfloat16_on_cpu(x, y):
        return _einsum_on_cpu(equation, x, y)
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _is_bfloat16_on_cpu(x, y) -> bool:
    dtypes = {x.dtype, y.dtype}
    return dtypes == {jnp.dtype(jnp.bfloat16)} and platform() == "cpu"


def _is_matmul(equation) -> bool:
    """Tells whether each axis is in two places or three, and the first array has rows."""
    arrays = _split(equation)
    letters = "".join(arrays)
    each_in_two = all(letters.count(axis) > 1 for axis in letters)
    without_repeats = all(len(set(axes)) == len(axes) for axes in arrays)
    x_axes, y_axes, _ = arrays
    has_rows = not set(x_axes) <= set(y_axes)
    return letters.isupper() and each_in_two and without_repeats and has_rows


def _einsum_on_cpu(equation, x, y):
    """Computes an einsum of bfloat16 arrays in float32, as a matmul that YNNPACK takes."""
    multiply = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    x_axes, y_axes, axes = _split(equation)
    in_both = [axis for axis in x_axes if axis in y_axes]
    batch = "".join(axis for axis in in_both if axis in axes)
    summed = "".join(axis for axis in in_both if axis not in axes)
    rows = [axis for axis in x_axes if axis not in y_axes]
    batch_is_first = x_axes.startswith(batch) and y_axes.startswith(batch)
    if not (batch_is_first and _is_matmul(equation)):
        x = x.astype(jnp.float32)
        y = y.astype(jnp.float32)
        return multiply(equation, x, y)
    last_row = rows[-1]
    sizes = dict(zip(x_axes, x.shape, strict=True))
    num_rows = math.prod(sizes[axis] for axis in rows)
    if num_rows == 1:
        x = jnp.concatenate([x, x], axis=x_axes.index(last_row))
        products = multiply(equation, x, y)
        return jax.lax.slice_in_dim(products, 0, 1, axis=axes.index(last_row))
    if not x_axes.endswith(summed):
        # Summed over one more axis, of length 1, so that XLA transposes x and does not undo it.
        equation = f"z{x_axes},z{y_axes}->{axes}"
        x = x[None]
        y = y[None]
    return multiply(equation, x, y)


def _split(equation: str) -> list[str]:
    """Returns the axes of the two arrays and of the result."""
    return re.split(",|->", equation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _round_sums(equation, x, y):
    sums = einsum_to_float32(equation, x, y)
    return sums.astype(x.dtype)


def _round_sums_forward(equation, x, y):
    return _round_sums(equation, x, y), (x, y)


def _round_sums_backward(equation, residuals, cotangent):
    x, y = residuals
    x_axes, y_axes, axes = _split(equation)
    grad_x = _round_sums(f"{axes},{y_axes}->{x_axes}", cotangent, y)
    grad_y = _round_sums(f"{x_axes},{axes}->{y_axes}", x, cotangent)
    return grad_x, grad_y


_round_sums.defvjp(_round_sums_forward, _round_sums_backward)
