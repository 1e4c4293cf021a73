"""p-RoPE against its formula in float64, and its laws."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import float64
from oracles import rotation as oracle
from support.models import draw_inputs as draw
from support.models import needs_dtype

from prope import apply_p_rope
from prope.rope import frequencies, num_rotated_pairs

pytestmark = pytest.mark.optimized

BOUND = 3e-7  # relative to max|input|, for float32
LANDMARKS = np.array([[0, 1, 255, 256, 257, 4095, 8191, 131071, 1048575]], np.int32)
PERCENTAGES = [0, 0.1, 0.25, 0.5, 0.7, 0.75, 1]


def rotate_one_by_one(*arguments):
    """Rotates with every operation compiled by itself."""
    with jax.disable_jit():
        return apply_p_rope(*arguments)


def assert_close(actual, expected, bound=BOUND):
    """Compares by the largest difference."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("p", PERCENTAGES)
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
def test_equals_the_formula_at_every_range(d, p, max_wavelength):
    inputs = draw(d, LANDMARKS)
    expected = oracle(inputs, LANDMARKS, max_wavelength, p)
    bound = BOUND * np.abs(inputs).max()
    for rotate in (apply_p_rope, rotate_one_by_one):
        rotated = rotate(inputs, LANDMARKS, d, max_wavelength, p)
        assert_close(rotated, expected, bound)


@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
@pytest.mark.parametrize(
    "d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256, 512))]
)
def test_equals_the_formula_at_random_positions(d, max_wavelength):
    rng = np.random.default_rng(1)
    positions = rng.integers(0, 2**20, (1, 10_000)).astype(np.int32)
    inputs = draw(d, positions, heads=1)
    all_rotated = oracle(inputs, positions, max_wavelength, 1.0)
    pair_of_lane = np.arange(d) % (d // 2)
    bound = BOUND * np.abs(inputs).max()
    for p in PERCENTAGES:
        is_rotated = pair_of_lane < int(p * d // 2)
        expected = np.where(is_rotated, all_rotated, inputs)
        for rotate in (apply_p_rope, rotate_one_by_one):
            rotated = rotate(inputs, positions, d, max_wavelength, p)
            assert_close(rotated, expected, bound)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_round_once(dtype):
    needs_dtype(dtype)
    inputs = jnp.asarray(draw(256, LANDMARKS), dtype)
    rotated = apply_p_rope(inputs, LANDMARKS, 256, rope_percentage=0.75)
    assert rotated.dtype == dtype
    expected = oracle(inputs, LANDMARKS, p=0.75)
    magnitude = np.maximum(np.abs(expected), 2**-8)
    half_ulp = float(jnp.finfo(dtype).eps) / 2 * magnitude
    error = np.abs(float64(rotated) - expected)
    assert np.all(error <= half_ulp + BOUND)


@pytest.mark.parametrize(("first_position", "p"), [(1, 0.0), (1, 0), (0, 1.0)])
def test_p_zero_and_position_zero_are_the_identity(first_position, p):
    positions = first_position * np.arange(1, 9, dtype=np.int32)[None]
    inputs = draw(64, positions)
    rotated = apply_p_rope(inputs, positions, 64, rope_percentage=p)
    np.testing.assert_array_equal(rotated, inputs)


@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1])
def test_the_right_lanes_move(p):
    """A one-hot input moves its lane and that lane's partner, half a head away, or nothing."""
    d = 32
    positions = np.full((1, d), 3, np.int32)
    one_hot = np.eye(d, dtype=np.float32)[None, :, None, :]
    rotated = apply_p_rope(one_hot, positions, d, rope_percentage=p)
    rotated = np.asarray(rotated)[0, :, 0]
    for lane in range(d):
        pair = lane % (d // 2)
        touched = {pair, pair + d // 2} if pair < p * d / 2 else {lane}
        assert set(np.flatnonzero(rotated[lane])) == touched


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.75])
def test_smaller_p_keeps_the_fastest_frequencies_as_they_are(p):
    every = frequencies(256)
    kept = frequencies(256, rope_percentage=p)
    pairs = num_rotated_pairs(256, p)
    np.testing.assert_array_equal(kept[:pairs], every[:pairs])
    np.testing.assert_array_equal(kept[pairs:], 0)
    assert every[0] == 1.0
    assert np.all(np.diff(every) < 0)
    assert math.isclose(every[-1], 10_000 ** (-254 / 256), rel_tol=1e-15)


def test_pairs_are_floored():
    pairs = {p: num_rotated_pairs(256, p) for p in (*PERCENTAGES, 0.3, 0.9)}
    assert pairs == {0: 0, 0.1: 12, 0.25: 32, 0.3: 38, 0.5: 64, 0.7: 89, 0.75: 96, 0.9: 115, 1: 128}


@pytest.mark.parametrize("shift", [1, 1000, 500_000])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_scores_depend_on_the_offset_only(shift, p):
    origin = np.zeros((1, 1))
    query = draw(64, origin, seed=3, heads=1)
    key = draw(64, origin, seed=4, heads=1)

    def rotate(x, position):
        positions = np.array([[position]], np.int32)
        return float64(apply_p_rope(x, positions, 64, rope_percentage=p))

    def score(m, n):
        return np.sum(rotate(query, m) * rotate(key, n))

    for m, n in ((0, 0), (5, 2), (2, 5), (4000, 17)):
        shifted = score(m + shift, n + shift)
        assert abs(shifted - score(m, n)) < 64 * BOUND


@pytest.mark.parametrize(
    ("positions", "bound"),
    [
        ([-1, -255, -(2**20), 2**24 + 1], BOUND),
        # The oracle's float64 frequencies are off by 1e-16 radians a token: 2e-7 at 2^31.
        ([2**31 - 1, -(2**31)], BOUND + 5e-7),
    ],
)
def test_every_int32_position_is_exact(positions, bound):
    """Negative positions and those beyond a million too: angles wrap, they do not round."""
    positions = np.array([positions], np.int64)
    inputs = draw(64, positions)
    rotated = apply_p_rope(inputs, positions.astype(np.int32), 64)
    assert_close(rotated, oracle(inputs, positions), bound)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32])
def test_integer_dtypes_agree(dtype):
    positions = np.array([[0, 1, 100, 127]], np.int32)
    inputs = draw(64, positions)
    expected = apply_p_rope(inputs, positions, 64)
    rotated = apply_p_rope(inputs, positions.astype(dtype), 64)
    np.testing.assert_array_equal(rotated, expected)


def rotate_interleaved(x, positions):
    """RoFormer's rotation of x [T, d] in float64, whose pairs are lanes 2k and 2k + 1."""
    d = x.shape[-1]
    rotated = np.empty_like(x)
    for k in range(d // 2):
        angle = positions * 10_000.0 ** (-2 * k / d)
        even = x[:, 2 * k]
        odd = x[:, 2 * k + 1]
        rotated[:, 2 * k] = even * np.cos(angle) - odd * np.sin(angle)
        rotated[:, 2 * k + 1] = odd * np.cos(angle) + even * np.sin(angle)
    return rotated


def test_the_interleaved_layout_is_a_permutation_of_the_weights():
    d = 16
    T = 9
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((T, 12))
    projections = rng.standard_normal((2, 12, d))
    positions = np.arange(T, dtype=np.int32) * 1000
    query, key = (rotate_interleaved(tokens @ weights, positions) for weights in projections)
    expected = query @ key.T

    def rotate_permuted(weights):
        permuted = jnp.concatenate([weights[..., 0::2], weights[..., 1::2]], axis=-1)
        projected = jnp.float32(tokens) @ permuted
        rotated = apply_p_rope(projected[None, :, None], positions[None], d)
        return float64(rotated[0, :, 0])

    query, key = map(rotate_permuted, projections)
    assert_close(query @ key.T, expected, 1e-5 * np.abs(expected).max())


GOOD_INPUT = {
    "inputs": np.ones((1, 2, 1, 64), np.float32),
    "positions": np.array([[0, 1]], np.int32),
    "head_dim": 64,
}


# The error, what it must say beside the name of the argument, and what is given.
REFUSED = [
    (ValueError, "1.5", {"rope_percentage": 1.5}),
    (ValueError, "-0.1", {"rope_percentage": -0.1}),
    (ValueError, "nan", {"rope_percentage": math.nan}),
    (TypeError, "None", {"rope_percentage": None}),
    (TypeError, "'0.5'", {"rope_percentage": "0.5"}),
    (TypeError, "[0.5]", {"rope_percentage": [0.5]}),
    (TypeError, "'1e4'", {"max_wavelength": "1e4"}),
    (ValueError, "1.0", {"max_wavelength": 1}),
    (ValueError, "inf", {"max_wavelength": math.inf}),
    (ValueError, "64", {"head_dim": 32}),
    (TypeError, "'64'", {"head_dim": "64"}),
    (ValueError, "0", {"head_dim": 0, "inputs": np.ones((1, 2, 1, 0))}),
    (ValueError, "63", {"head_dim": 63, "inputs": np.ones((1, 2, 1, 63), np.float32)}),
    (ValueError, "(1, 3)", {"positions": np.arange(3, dtype=np.int32)[None]}),
    (ValueError, "(2, 2)", {"positions": np.ones((2, 2), np.int32)}),
    (ValueError, "(1, 2, 1)", {"positions": np.ones((1, 2, 1), np.int32)}),
    (TypeError, "float32", {"positions": np.ones((1, 2), np.float32)}),
    (TypeError, "bfloat16", {"positions": jnp.ones((1, 2), jnp.bfloat16)}),
    (TypeError, "float32", {"positions": [[0.0, 1.0]]}),
    (TypeError, "bool", {"positions": [[True, False]]}),
    (TypeError, "'0'", {"positions": [["0", "1"]]}),
    (TypeError, "shape", {"positions": [[0], [1, 2]]}),
    (TypeError, "None", {"positions": None}),
    (ValueError, "2147483648", {"positions": np.array([[0, 2**31]])}),
    (ValueError, "-1099511627776", {"positions": np.array([[0, -(2**40)]])}),
    (TypeError, "1099511627776", {"positions": [[0, 2**40]]}),
    *(
        (TypeError, dtype, {"inputs": np.ones((1, 2, 1, 64), dtype)})
        for dtype in ("int32", "uint8", "bool", "complex64")
    ),
    (TypeError, "must be an array", {"inputs": np.ones((1, 2, 1, 64), object)}),
    (ValueError, "(1, 2, 64)", {"inputs": np.ones((1, 2, 64), np.float32)}),
]


@pytest.mark.parametrize(("error", "value", "change"), REFUSED)
def test_bad_input_is_refused_with_its_name_and_value(error, value, change):
    with pytest.raises(error) as refused:
        apply_p_rope(**(GOOD_INPUT | change))
    message = str(refused.value)
    assert next(iter(change)) in message
    assert value in message


def test_all_rows_may_share_positions():
    inputs = np.concatenate([draw(64, LANDMARKS)] * 2)
    expected = apply_p_rope(inputs, np.concatenate([LANDMARKS] * 2), 64)
    for shared in (LANDMARKS, LANDMARKS[0], LANDMARKS[0].tolist()):
        np.testing.assert_array_equal(apply_p_rope(inputs, shared, 64), expected)


@pytest.mark.parametrize("shape", [(0, 2, 1, 64), (1, 0, 1, 64), (1, 2, 0, 64)])
def test_empty_arrays_stay_empty(shape):
    rotated = apply_p_rope(np.ones(shape, np.float32), np.ones(shape[:2], np.int32), 64)
    assert rotated.shape == shape


def test_lists_and_scalars_of_jax_are_numbers():
    inputs, positions, head_dim = GOOD_INPUT.values()
    expected = apply_p_rope(inputs, positions, head_dim, 1e4, 0.5)
    lists = apply_p_rope(inputs.tolist(), positions.tolist(), head_dim, 1e4, 0.5)
    np.testing.assert_array_equal(lists, expected)
    scalars = (jnp.int32(head_dim), jnp.float32(1e4), jnp.float32(0.5))
    np.testing.assert_array_equal(apply_p_rope(inputs, positions, *scalars), expected)
    with jax.enable_x64(True):
        positions = jnp.asarray(positions, int)
        assert positions.dtype == jnp.int64
        np.testing.assert_array_equal(apply_p_rope(inputs, positions, 64, 1e4, 0.5), expected)


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        ("int64", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31, 2**62]),
        ("uint64", [0, 2**32 - 1], [2**32, 2**63]),
    ],
)
def test_positions_beyond_32_bits_become_nan(dtype, within, beyond):
    positions = np.array([within + beyond], dtype)
    with jax.enable_x64(True):
        rotated = apply_p_rope(draw(64, positions), jnp.asarray(positions), 64)
    is_nan = np.isnan(rotated)
    assert not is_nan[:, : len(within)].any()
    assert is_nan[:, len(within) :].all()


@pytest.mark.parametrize("name", ["head_dim", "max_wavelength", "rope_percentage"])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_a_traced_number_is_refused(transform, name):
    def rotate(value):
        return apply_p_rope(**(GOOD_INPUT | {name: value})).sum()

    with pytest.raises(TypeError, match=f"{name} must be known while JAX traces.*static_argnames"):
        transform(rotate)(jnp.float32(1))
