"""p-RoPE: rotary position encodings whose slowest frequencies are not rotated (Barbero et al., ICLR 2025).

Pair k = 0 .. P-1 of a head, with P = head_dim / 2, is lanes k and k + P (half-split layout). RoPE rotates it at
position m by the angle m * theta^(-2k / head_dim): pair 0 is the fastest (1 radian per token), pair P-1 the slowest.
p-RoPE rotates only the fastest int(p * head_dim // 2) pairs. The exponent's denominator is head_dim for every p, so
the pairs that p = 0.25 rotates have the same frequencies as in RoPE.

Angles are exact at every 32-bit position. The float32 product m * frequency is off by 3e-4 radians at position 8k and
by 0.03 at a million. An angle is therefore stored as its phase, a binary fraction of a turn; integer overflow performs
the modulo.

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
    """Returns how many pairs p-RoPE rotates, rounded down: 12 for head_dim 256 and p = 0.1.

    Raises:
      ValueError: head_dim is not a positive even number, or rope_percentage is not in [0, 1].
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, because RoPE rotates pairs of lanes; got {head_dim}")
    if rope_percentage is None or not 0 <= rope_percentage <= 1:  # also refuses nan
        raise ValueError(f"rope_percentage must be a fraction in [0, 1] (1: RoPE, 0: NoPE); got {rope_percentage}")
    return int(rope_percentage * head_dim // 2)


def frequencies(head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0) -> np.ndarray:
    """Returns the radians per token of every pair, float64 [P], fastest first; 0 for pairs that are not rotated.

    Raises:
      ValueError: as `num_rotated_pairs`, or max_wavelength is not a finite number above 1.
    """
    if not 1 < max_wavelength < math.inf:
        raise ValueError(f"max_wavelength must be finite and greater than 1; got {max_wavelength}")
    pairs = np.arange(head_dim // 2)
    rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)
    return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)


def rotation_table(positions: ArrayLike, freqs: np.ndarray) -> jax.Array:
    """Computes cosine and sine of every pair's angle: float32 [2, ..., P] for integer `positions` [...].

    `freqs` [P] are radians per token in [0, 2 pi), such as those of `frequencies`. The error is at most 1.2e-7 at every
    32-bit position, negative ones too. One table per step serves all layers of one encoding.

    Raises:
      TypeError: positions are not integers of at most 32 bits.
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.dtype.itemsize > 4:
        raise TypeError(
            f"positions must be integers of at most 32 bits; got {positions.dtype}. "
            "Floating positions round (bfloat16 from 257 on): pass jnp.int32"
        )
    wide = jnp.int32 if jnp.issubdtype(positions.dtype, jnp.signedinteger) else jnp.uint32
    per_token = _phase_per_token(tuple(map(float, freqs)))
    high, low = (word.reshape(*[1] * positions.ndim, -1) for word in per_token)
    cos, sin = _cos_sin(positions.astype(wide)[..., None], high, low)
    # Written into a buffer: XLA fuses a jnp.stack into every rotation and recomputes the table there.
    return jax.lax.empty((2, *cos.shape), cos.dtype).at[0].set(cos).at[1].set(sin)


def rotate(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates `inputs` [B, T, N, H] of any float dtype by a table [2, B, T, P], in float32; casts last."""
    cos, sin = table[:, :, :, None, None, :]
    # Halves are cut and joined along an axis of their own, in the gradient too: LLVM vectorises these loops on a CPU.
    halves = inputs.astype(jnp.float32).reshape(*inputs.shape[:-1], 2, -1)
    first, second = jnp.split(halves, 2, axis=-2)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.astype(inputs.dtype).reshape(inputs.shape)


@functools.partial(jax.jit, static_argnames=("head_dim", "max_wavelength", "rope_percentage"))
def apply_p_rope(
    inputs: ArrayLike, positions: ArrayLike, head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0
) -> jax.Array:
    """Applies p-RoPE to queries or keys: the listing of the paper's appendix C, accurate at long range.

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
    return rotate(inputs, rotation_table(positions, frequencies(head_dim, max_wavelength, rope_percentage)))


def interleaved_to_half_split(weights: ArrayLike) -> jax.Array:
    """Permutes the head axis [..., H] of a query or key projection from interleaved pairs (2k, 2k + 1) to half-split.

    `apply_p_rope` then gives the scores of the interleaved layout, as in RoFormer: q.k ignores a permutation of both.
    """
    return jnp.concatenate([weights[..., 0::2], weights[..., 1::2]], axis=-1)


@functools.cache
def _phase_per_token(freqs: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Converts radians per token to 64-bit fractions of a turn: their high and low 32 bits, two uint32 [P]."""
    with decimal.localcontext(prec=50):
        phases = [int((decimal.Decimal(freq) / _TWO_PI * 2**64).to_integral_value()) for freq in freqs]
    return np.array([f >> 32 for f in phases], np.uint32), np.array([f % 2**32 for f in phases], np.uint32)


def _cos_sin(positions: jax.Array, high: np.ndarray, low: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of 2 pi * positions * (high + low / 2^32) / 2^32, in 32-bit arithmetic; positions [..., 1]."""
    steps = jnp.abs(positions).astype(jnp.uint32)
    # The high word of steps * phase per token, modulo a turn, without the low word's carries: at most 3e-9 radians.
    upper, lower = steps >> 16, steps & 0xFFFF
    phase = steps * high + upper * (low >> 16) + ((upper * (low & 0xFFFF)) >> 16) + ((lower * (low >> 16)) >> 16)
    # The nearest quarter turn, and a remainder of at most an eighth, for which short polynomials suffice (Cephes').
    quarter = (phase + np.uint32(1 << 29)) >> 30
    x = (phase - (quarter << 30)).astype(jnp.int32).astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    z = x * x
    sin_x = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    cos_x = 1 - z / 2 + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, sin_x, cos_x), jnp.where(odd, cos_x, sin_x)
    cos = jnp.where(((quarter + 1) & 2) == 2, -cos, cos)
    return cos, jnp.where(((quarter & 2) == 2) != (positions < 0), -sin, sin)
