"""p-RoPE: RoPE whose slowest frequencies are not rotated (Barbero et al., ICLR 2025).

Pair k = 0 .. P-1 of a head, with P = head_dim / 2, is lanes k and k + P (half-split layout). RoPE
rotates it at position m by the angle m * theta^(-2k / head_dim): pair 0 is the fastest (1 radian
per token), pair P-1 the slowest. p-RoPE rotates only the fastest int(p * head_dim // 2) pairs. The
exponent's denominator is head_dim for every p, so the pairs that p = 0.25 rotates have the same
frequencies as in RoPE.

Angles are exact at every 32-bit position. The float32 product m * frequency is off by 3e-4 radians
at position 8k and by 0.03 at a million. An angle is therefore stored as its phase, a binary
fraction of a turn; integer overflow performs the modulo.

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
      TypeError: an argument is no number, or it is traced.
      ValueError: head_dim is not a positive even number, or rope_percentage is not in [0, 1].
    """
    head_dim = _static("head_dim", head_dim)
    rope_percentage = _static("rope_percentage", rope_percentage)
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            "head_dim must be even and positive, because RoPE rotates pairs of lanes; "
            f"got {head_dim}"
        )
    if not 0 <= rope_percentage <= 1:  # also refuses nan
        raise ValueError(
            "rope_percentage must be a fraction in [0, 1] (1: RoPE, 0: NoPE); "
            f"got {rope_percentage}"
        )
    return int(rope_percentage * head_dim // 2)


def frequencies(
    head_dim: int, max_wavelength: float = 10_000, rope_percentage: float = 1.0
) -> np.ndarray:
    """Returns the radians per token of every pair, float64 [P], fastest first.

    Pairs that are not rotated have 0.

    Raises:
      TypeError: an argument is no number, or it is traced.
      ValueError: as `num_rotated_pairs`, or max_wavelength is not a finite number above 1.
    """
    head_dim = _static("head_dim", head_dim)
    max_wavelength = float(_static("max_wavelength", max_wavelength))
    if not 1 < max_wavelength < math.inf:
        raise ValueError(f"max_wavelength must be finite and greater than 1; got {max_wavelength}")
    pairs = np.arange(head_dim // 2)
    rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)
    return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)


def rotation_table(positions: ArrayLike, freqs: ArrayLike) -> jax.Array:
    """Computes cosine and sine of every pair's angle: float32 [2, ..., P] for integers [...].

    `freqs` [P] are radians per token in [0, 2 pi), such as those of `frequencies`; of several heads
    they are [K, P], and the table is [2, ..., K, P]. The error is at most 1.2e-7 at every 32-bit
    position, negative ones too; 64-bit positions beyond become nan. One table per step serves all
    layers of one encoding.

    Raises:
      TypeError: positions are not integers.
      ValueError: a position in an array of NumPy does not fit into 32 bits.
    """
    freqs = np.asarray(freqs, np.float64)
    phases = phase_per_token(tuple(freqs.ravel().tolist()))
    return phase_table(positions, phases.reshape(2, *freqs.shape))


def phase_table(positions: ArrayLike, phases: ArrayLike) -> jax.Array:
    """Computes `rotation_table` from phases, uint32 [2, P] or [2, K, P], which may be traced."""
    positions = _array("positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"positions must be integers; got {positions.dtype}. "
            "Floating positions round (bfloat16 from 257 on): pass jnp.int32"
        )
    narrow = positions.astype(_narrow(positions.dtype))
    high, low = (jnp.expand_dims(x, range(positions.ndim)) for x in phases)
    over_pairs = range(positions.ndim, high.ndim)
    cos, sin = _cos_sin(jnp.expand_dims(narrow, over_pairs), high, low)
    table = jnp.stack([cos, sin])
    if positions.dtype.itemsize > 4:
        fits = jnp.expand_dims(narrow.astype(positions.dtype) == positions, over_pairs)
        table = jnp.where(fits[None], table, jnp.nan)
    # Without the barrier XLA fuses the table into every rotation, and computes it for every head.
    return jax.lax.optimization_barrier(table)


def rotate(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Rotates `inputs` [B, T, N, H] by a table, in at least float32; casts last.

    The table is [2, b, T, P], or [2, b, T, K, P], of which N / K heads after one another take one;
    b is 1 or B. It has no gradient.
    """
    dtype = inputs.dtype if inputs.dtype == jnp.float64 else jnp.float32
    table = jax.lax.stop_gradient(table.astype(dtype))
    heads = inputs.shape[2:3]
    if table.ndim == 4:
        table = table[:, :, :, None]
    elif table.shape[3] > 1:  # a group of heads for each of the table's, which stays as it is
        heads = (table.shape[3], heads[0] // table.shape[3])
        table = table[:, :, :, :, None]
    cos, sin = table[..., None, :]
    # The two halves get an axis of their own: LLVM vectorises these loops and their gradient's.
    halves = inputs.reshape(*inputs.shape[:2], *heads, 2, table.shape[-1])
    rotated = jax.lax.platform_dependent(
        halves, cos, sin, cpu=_rotate_split, default=_rotate_reversed
    )
    return rotated.reshape(inputs.shape)


def _rotate_split(halves: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [..., 2, P] as a CPU does it fastest."""
    first, second = jnp.split(halves.astype(cos.dtype), 2, axis=-2)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-2)
    return rotated.astype(halves.dtype)


@jax.custom_jvp
def _rotate_reversed(halves: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [..., 2, P] in one pass over the array on a TPU or a GPU.

    XLA fuses a reversed array into that pass only where it is the input, not where it was computed.
    """
    reversed_halves = _reverse(halves).astype(cos.dtype)
    rotated = halves.astype(cos.dtype) * cos + reversed_halves * _signed(sin)
    return rotated.astype(halves.dtype)


@_rotate_reversed.defjvp
def _rotate_reversed_jvp(primals, tangents):
    """Reverses last, so that the transpose, the gradient, reverses the cotangent first."""
    _, cos, sin = primals
    tangent, _, _ = tangents
    dtype = tangent.dtype
    tangent = tangent.astype(cos.dtype)  # once: gradients are summed in this dtype
    tangent_out = (tangent * cos).astype(dtype) + _reverse((tangent * -_signed(sin)).astype(dtype))
    return _rotate_reversed(*primals), tangent_out


def _reverse(halves: jax.Array) -> jax.Array:
    return jax.lax.rev(halves, (halves.ndim - 2,))


def _signed(sin: jax.Array) -> jax.Array:
    """Returns -sin for the first half and sin for the second."""
    signs = np.array([[-1], [1]], sin.dtype)
    return sin * jnp.expand_dims(signs, range(sin.ndim - 2))


def apply_p_rope(
    inputs: ArrayLike,
    positions: ArrayLike,
    head_dim: int,
    max_wavelength: float = 10_000,
    rope_percentage: float = 1.0,
) -> jax.Array:
    """Applies p-RoPE to queries or keys (the paper's appendix C), accurate at long range.

    Args:
      inputs: [B, T, N, H], any float dtype; float64 is rotated in float64, others in float32.
      positions: [B, T], or [1, T] or [T] for all rows; integers within 32 bits.
      head_dim: H.
      max_wavelength: theta, the base wavelength.
      rope_percentage: p in [0, 1]: 1 is RoPE, 0 is NoPE.

    Returns:
      The rotated inputs, in their shape and dtype.

    Raises:
      TypeError: inputs are not floats, positions not integers, or another argument is traced.
      ValueError: a shape does not fit, or a value is out of its range.
    """
    return _apply_p_rope(
        _array("inputs", inputs),
        _array("positions", positions),
        _static("head_dim", head_dim),
        _static("max_wavelength", max_wavelength),
        _static("rope_percentage", rope_percentage),
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _apply_p_rope(inputs, positions, head_dim, max_wavelength, rope_percentage):
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(f"inputs must be floats, as their rotation is; got {inputs.dtype}")
    if inputs.ndim != 4 or inputs.shape[-1] != head_dim:
        raise ValueError(f"inputs must be [B, T, N, head_dim={head_dim}]; got shape {inputs.shape}")
    B, T = inputs.shape[:2]
    if positions.shape not in ((B, T), (1, T), (T,)):
        raise ValueError(
            f"positions must be [B, T]={(B, T)}, [1, T] or [T]; got shape {positions.shape}"
        )
    freqs = frequencies(head_dim, max_wavelength, rope_percentage)
    table = rotation_table(jnp.atleast_2d(positions), freqs)
    return rotate(inputs, table)


def _static(name: str, value):
    """Returns a number of Python or NumPy; refuses one that is not known while JAX traces."""
    if type(value) in (int, float):
        return value
    if isinstance(value, jax.core.Tracer):
        remedy = "give a Python number; under jax.jit, name it in static_argnames"
        raise TypeError(f"{name} must be known while JAX traces; got {value}: {remedy}")
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a number; got {value!r}")
    return number[()]


def _array(name: str, values: ArrayLike) -> jax.Array:
    """Converts what NumPy would; refuses integers of NumPy that do not fit into 32 bits."""
    if isinstance(values, jax.Array):
        return values
    if isinstance(values, np.ndarray | np.generic) and values.dtype.kind in "iu" and values.size:
        bounds = np.iinfo(_narrow(values.dtype))
        for value in (values.min(), values.max()):
            if not bounds.min <= value <= bounds.max:
                raise ValueError(f"{name} must fit into 32 bits; got {value}")
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array: {error}") from None


def _narrow(dtype) -> type:
    return jnp.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint32


@functools.cache
def phase_per_token(freqs: tuple[float, ...]) -> np.ndarray:
    """Converts radians per token to 64-bit fractions of a turn, as high and low words, [2, P]."""
    with decimal.localcontext(prec=50):
        turns = [decimal.Decimal(freq) / _TWO_PI for freq in freqs]
        phases = [int((turn * 2**64).to_integral_value()) for turn in turns]
    high = [phase >> 32 for phase in phases]
    low = [phase % 2**32 for phase in phases]
    return np.array([high, low], np.uint32)


def _phase(positions: jax.Array, high: np.ndarray, low: np.ndarray) -> jax.Array:
    """Computes |positions| * (high + low / 2^32) modulo 2^32, a binary fraction of a turn, uint32.

    The carries of the low word's products are left out: an error of at most 3e-9 radians.
    """
    steps = jnp.abs(positions).astype(jnp.uint32)
    upper = steps >> 16
    lower = steps & 0xFFFF
    low_upper = low >> 16
    low_lower = low & 0xFFFF
    carry = ((upper * low_lower) >> 16) + ((lower * low_upper) >> 16)
    return steps * high + upper * low_upper + carry


def _cos_sin(
    positions: jax.Array, high: np.ndarray, low: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of positions [..., 1] times a phase per token, in 32-bit arithmetic."""
    phase = _phase(positions, high, low)
    # The nearest quarter turn, and a remainder x of at most an eighth of a turn, for which short
    # polynomials suffice (those of the Cephes library).
    quarter = (phase + np.uint32(1 << 29)) >> 30
    remainder = (phase - (quarter << 30)).astype(jnp.int32)
    x = remainder.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    z = x * x
    sin_terms = -1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4)
    cos_terms = 4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5)
    sin_x = x + x * z * sin_terms
    cos_x = 1 - z / 2 + z * z * cos_terms
    # A quarter turn exchanges the two; their signs follow from the quarter and the direction.
    odd = (quarter & 1) == 1
    cos_magnitude = jnp.where(odd, sin_x, cos_x)
    sin_magnitude = jnp.where(odd, cos_x, sin_x)
    cos_negative = ((quarter + 1) & 2) == 2
    sin_negative = ((quarter & 2) == 2) != (positions < 0)
    cos = jnp.where(cos_negative, -cos_magnitude, cos_magnitude)
    sin = jnp.where(sin_negative, -sin_magnitude, sin_magnitude)
    return cos, sin
