"""p-RoPE: rotary position encodings whose slowest frequencies are not rotated (Barbero et al., ICLR 2025).

Pair k of a head, k = 0 .. P-1 with P = head_dim / 2, is made of lanes k and k + P. At position m it is turned by
the angle m * theta^(-2k / head_dim): pair 0 is the fastest (1 radian a token), pair P-1 the slowest. p-RoPE keeps
the fastest int(p * head_dim // 2) pairs and leaves the others alone. The exponent's denominator is head_dim for
every p: the pairs that p = 0.25 turns, it turns exactly as p = 1 does.

Angles are exact at every 32-bit position. A float32 product m * frequency has lost its last digits at 8k and is
wrong by 0.03 radians at a million, so the angle is held in turns, as a binary fraction that wraps around by itself:
what integer arithmetic drops are whole turns, and nothing else.

Axes: B batch, T length, N heads, H head_dim, P = H / 2 pairs.
"""

import decimal
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_TWO_PI = 2 * decimal.Decimal("3.14159265358979323846264338327950288419716939937511")


def num_rotated_pairs(head_dim: int, rope_percentage: float) -> int:
    """The number of pairs that p-RoPE turns, floored to whole pairs: 12 for head_dim 256 and p = 0.1.

    Raises:
      ValueError: head_dim is not a positive even number, or rope_percentage is not in [0, 1].
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, because RoPE turns pairs of lanes; got {head_dim}")
    if not 0 <= rope_percentage <= 1:  # also refuses nan
        raise ValueError(f"rope_percentage must be a fraction in [0, 1] (1: RoPE, 0: NoPE); got {rope_percentage}")
    return int(rope_percentage * head_dim // 2)


def frequencies(head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0) -> np.ndarray:
    """Radians per token of every pair, float64 [P], fastest first; 0 for the pairs that are not turned.

    Raises:
      ValueError: as `num_rotated_pairs`, or max_wavelength is not a finite number above 1.
    """
    if not 1 < max_wavelength < math.inf:
        raise ValueError(f"max_wavelength must be finite and greater than 1; got {max_wavelength}")
    pairs = np.arange(head_dim // 2)
    rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)
    return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)


def rotation_table(
    positions: ArrayLike, head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0
) -> jax.Array:
    """Cosine and sine of every pair's angle, for integer `positions` [...]: float32 [2, ..., P].

    Off by at most 1.2e-7 at every 32-bit position, negative ones too. It depends on no layer: make it once per step.

    Raises:
      TypeError: positions are not integers of at most 32 bits.
      ValueError: as `frequencies`.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.dtype.itemsize > 4:
        raise TypeError(
            f"positions must be integers of at most 32 bits; got {positions.dtype}. "
            "Floating positions round (bfloat16 from 257 on): pass jnp.int32"
        )
    wide = jnp.int32 if jnp.issubdtype(positions.dtype, jnp.signedinteger) else jnp.uint32
    turns = _turns_per_token(tuple(frequencies(head_dim, max_wavelength, rope_percentage)))
    cos, sin = _cos_sin(positions.astype(wide)[..., None], *turns)
    # Written into a buffer, not stacked: XLA fuses a stack into every rotation, and computes the table there anew.
    return jax.lax.empty((2, *cos.shape), cos.dtype).at[0].set(cos).at[1].set(sin)


def mask_slow_pairs(table: jax.Array, pairs: ArrayLike) -> jax.Array:
    """The table [2, ..., P] with only its first `pairs` pairs turned, as for a smaller p; `pairs` may be traced."""
    still = jnp.array([1.0, 0.0]).reshape(2, *[1] * (table.ndim - 1))
    return jnp.where(jnp.arange(table.shape[-1]) < pairs, table, still)


def rotate(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Turns `inputs` [B, T, N, H] of any float dtype by a table [2, B, T, P]; multiplies in float32, casts last."""
    cos, sin = table[:, :, :, None, :]
    first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)
    # A stack of halves, not their concatenation: on a CPU its loops are the ones that LLVM vectorises.
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.astype(inputs.dtype).reshape(inputs.shape)


@functools.partial(jax.jit, static_argnames=("head_dim", "max_wavelength", "rope_percentage"))
def apply_p_rope(
    inputs: ArrayLike, positions: ArrayLike, head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0
) -> jax.Array:
    """Applies p-RoPE to queries or keys: the listing of the paper's appendix C, exact at long range.

    Args:
      inputs: [B, T, N, H], any float dtype.
      positions: [B, T], integers.
      head_dim: H.
      max_wavelength: theta, the base wavelength.
      rope_percentage: p in [0, 1]: 1 is RoPE, 0 is NoPE.

    Returns:
      The rotated inputs, in their shape and dtype.

    Raises:
      TypeError, ValueError: positions that are not integers, a shape that does not fit, a value out of its range.
    """
    if inputs.ndim != 4 or inputs.shape[-1] != head_dim:
        raise ValueError(f"inputs must be [B, T, N, head_dim={head_dim}]; got shape {inputs.shape}")
    if positions.shape != inputs.shape[:2]:
        raise ValueError(f"positions must be [B, T]={inputs.shape[:2]}, as inputs are; got shape {positions.shape}")
    return rotate(inputs, rotation_table(positions, head_dim, max_wavelength, rope_percentage))


def interleaved_to_half_split(weights: ArrayLike) -> jax.Array:
    """Reorders the head axis [..., H] of a query or key projection that pairs lanes 2k and 2k + 1, as RoFormer does.

    With it `apply_p_rope` gives that layout's scores: q.k does not see a permutation of both.
    """
    return jnp.concatenate([weights[..., 0::2], weights[..., 1::2]], axis=-1)


@functools.cache
def _turns_per_token(radians: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies as 64-bit binary fractions of a turn: the high and the low 32 bits, two uint32 [P]."""
    with decimal.localcontext(prec=50):
        fractions = [int((decimal.Decimal(r) / _TWO_PI * 2**64).to_integral_value()) for r in radians]
    return np.array([f >> 32 for f in fractions], np.uint32), np.array([f % 2**32 for f in fractions], np.uint32)


def _cos_sin(positions: jax.Array, high: np.ndarray, low: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of 2 pi * positions * (high + low / 2^32) / 2^32, in 32-bit arithmetic; positions [..., 1]."""
    steps = jnp.abs(positions).astype(jnp.uint32)
    # The high word of steps * fraction, modulo a turn. Carries from the low word, 3e-9 radians at most, are left out.
    upper, lower = steps >> 16, steps & 0xFFFF
    turns = steps * high + upper * (low >> 16) + ((upper * (low & 0xFFFF)) >> 16) + ((lower * (low >> 16)) >> 16)
    # The nearest quarter turn, and the rest: at most an eighth of a turn, which a short polynomial serves (Cephes').
    quarter = (turns + np.uint32(1 << 29)) >> 30
    x = (turns - (quarter << 30)).astype(jnp.int32).astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    z = x * x
    near_sin = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    near_cos = 1 - z / 2 + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, near_sin, near_cos), jnp.where(odd, near_cos, near_sin)
    cos = jnp.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, jnp.where(((quarter & 2) == 2) != (positions < 0), -sin, sin)
