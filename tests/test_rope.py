"""p-RoPE against its formula in float64, and its laws."""

import ast
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from makers import draw_inputs as draw
from oracles import rotation as oracle

from prope import apply_p_rope
from prope.rope import frequencies, interleaved_to_half_split, num_rotated_pairs

pytestmark = pytest.mark.optimized

BOUND = 3e-7  # of max|input|, for float32
LANDMARKS = [0, 1, 255, 256, 257, 4095, 8191, 131071, 1048575]


@pytest.mark.parametrize("p", [0, 0.1, 0.25, 0.5, 0.7, 0.75, 1])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
def test_equals_the_formula_at_every_range(d, p, max_wavelength):
    positions = np.array([LANDMARKS], np.int32)
    inputs = draw(d, positions)
    rotated = apply_p_rope(inputs, positions, d, max_wavelength, p)
    with jax.disable_jit():
        outside = apply_p_rope(inputs, positions, d, max_wavelength, p)
    expected = oracle(inputs, positions, max_wavelength, p)
    for result in (rotated, outside):
        np.testing.assert_allclose(result, expected, rtol=0, atol=BOUND * np.abs(inputs).max())


@pytest.mark.parametrize("max_wavelength", [1e4, 1e6])
@pytest.mark.parametrize(
    "d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (128, 256, 512))]
)
def test_equals_the_formula_at_random_positions(d, max_wavelength):
    positions = np.random.default_rng(1).integers(0, 2**20, (1, 10_000)).astype(np.int32)
    inputs = draw(d, positions, heads=1)
    whole = oracle(inputs, positions, max_wavelength, 1.0)
    for p in (0, 0.1, 0.25, 0.5, 0.7, 0.75, 1):
        expected = np.where(
            np.arange(d) % (d // 2) < int(p * d // 2), whole, inputs
        )  # lane by lane, as the oracle does
        rotated = apply_p_rope(inputs, positions, d, max_wavelength, p)
        np.testing.assert_allclose(rotated, expected, rtol=0, atol=BOUND * np.abs(inputs).max())
        with jax.disable_jit():
            outside = apply_p_rope(inputs, positions, d, max_wavelength, p)
        np.testing.assert_allclose(outside, expected, rtol=0, atol=BOUND * np.abs(inputs).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_round_once(dtype):
    positions = np.array([LANDMARKS], np.int32)
    inputs = jnp.asarray(draw(256, positions), dtype)
    rotated = apply_p_rope(inputs, positions, 256, rope_percentage=0.75)
    assert rotated.dtype == dtype
    expected = oracle(inputs.astype(jnp.float32), positions, p=0.75)
    half_ulp = np.asarray(jnp.finfo(dtype).eps) / 2 * np.maximum(np.abs(expected), 2**-8)
    assert np.all(np.abs(np.asarray(rotated, np.float64) - expected) <= half_ulp + BOUND)


def test_p_zero_is_the_identity_and_p_one_rotates_every_pair():
    positions = np.arange(1, 9, dtype=np.int32)[None]
    inputs = draw(64, positions)
    np.testing.assert_array_equal(apply_p_rope(inputs, positions, 64, rope_percentage=0.0), inputs)
    np.testing.assert_array_equal(apply_p_rope(inputs, positions, 64, rope_percentage=0), inputs)
    assert np.all(np.asarray(apply_p_rope(inputs, positions, 64, rope_percentage=1.0)) != inputs)


def test_position_zero_rotates_nothing():
    positions = np.zeros((1, 3), np.int32)
    inputs = draw(128, positions)
    np.testing.assert_array_equal(apply_p_rope(inputs, positions, 128), inputs)


@pytest.mark.parametrize("p", [0.25, 0.75])
def test_the_right_lanes_move(p):
    """A one-hot input moves its lane and that lane's partner, half a head away, or nothing at all."""
    d = 32
    positions = np.full((1, d), 3, np.int32)
    one_hot = np.eye(d, dtype=np.float32)[None, :, None, :]
    rotated = np.asarray(apply_p_rope(one_hot, positions, d, rope_percentage=p))[0, :, 0]
    for lane in range(d):
        pair, rotated_pair = lane % (d // 2), lane % (d // 2) < p * d / 2
        touched = {pair, pair + d // 2} if rotated_pair else {lane}
        assert set(np.flatnonzero(rotated[lane])) == touched


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.5, 0.75])
def test_smaller_p_keeps_the_fastest_frequencies_as_they_are(p):
    whole, kept = frequencies(256), frequencies(256, rope_percentage=p)
    pairs = num_rotated_pairs(256, p)
    np.testing.assert_array_equal(kept[:pairs], whole[:pairs])
    np.testing.assert_array_equal(kept[pairs:], 0)
    assert np.all(np.diff(whole) < 0) and whole[0] == 1.0
    assert math.isclose(whole[-1], 10_000 ** (-254 / 256), rel_tol=1e-15)


def test_pairs_are_floored():
    assert [num_rotated_pairs(256, p) for p in (0, 0.1, 0.25, 0.3, 0.7, 0.75, 0.9, 1)] == [
        0,
        12,
        32,
        38,
        89,
        96,
        115,
        128,
    ]


def test_norms_are_kept():
    positions = np.random.default_rng(2).integers(0, 2**20, (2, 50)).astype(np.int32)
    inputs = draw(64, positions)
    rotated = np.asarray(apply_p_rope(inputs, positions, 64, rope_percentage=0.5), np.float64)
    np.testing.assert_allclose(
        np.linalg.norm(rotated, axis=-1), np.linalg.norm(inputs, axis=-1), rtol=3e-7
    )


@pytest.mark.parametrize("shift", [1, 1000, 500_000])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_scores_depend_on_the_offset_only(shift, p):
    q, k = draw(64, np.zeros((1, 1)), 3, 1), draw(64, np.zeros((1, 1)), 4, 1)

    def score(m, n):
        rotate = lambda x, at: apply_p_rope(x, np.array([[at]], np.int32), 64, rope_percentage=p)  # noqa: E731
        return float(
            np.sum(np.asarray(rotate(q, m), np.float64) * np.asarray(rotate(k, n), np.float64))
        )

    for m, n in ((0, 0), (5, 2), (2, 5), (4000, 17)):
        assert abs(score(m + shift, n + shift) - score(m, n)) < 64 * BOUND


def test_every_int32_position_is_exact():
    """Negative positions and those beyond a million too: angles wrap, they do not round."""
    positions = np.array([[-1, -255, -(2**20), 2**24 + 1, 2**31 - 1, -(2**31)]], np.int64)
    inputs = draw(64, positions)
    # float64 frequencies are off by 1e-16 of a radian a token: 2e-7 at 2^31.
    expected = oracle(inputs, positions, 1e4, 1.0)
    rotated = apply_p_rope(inputs, positions.astype(np.int32), 64)
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=BOUND + 5e-7)
    near = apply_p_rope(inputs[:, :4], positions[:, :4].astype(np.int32), 64)
    np.testing.assert_allclose(near, expected[:, :4], rtol=0, atol=BOUND)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_integer_dtypes_agree(dtype):
    positions = np.array([[0, 1, 100, 127]], np.int32)
    inputs = draw(64, positions)
    expected = apply_p_rope(inputs, positions, 64)
    np.testing.assert_array_equal(apply_p_rope(inputs, positions.astype(dtype), 64), expected)


def test_the_gradient_is_the_inverse_rotation():
    positions = np.array([[0, 3, 70_000]], np.int32)
    inputs, cotangent = draw(64, positions), draw(64, positions, 5)
    _, vjp = jax.vjp(lambda x: apply_p_rope(x, positions, 64, rope_percentage=0.5), inputs)
    np.testing.assert_allclose(
        vjp(jnp.asarray(cotangent))[0], oracle(cotangent, -positions, p=0.5), rtol=0, atol=BOUND
    )


def test_vmap_is_a_loop():
    positions = np.array([[0, 3, 70_000]], np.int32)
    inputs = np.stack([draw(64, positions, seed) for seed in range(3)])
    mapped = jax.vmap(lambda x: apply_p_rope(x, positions, 64))(inputs)
    np.testing.assert_array_equal(
        mapped, np.stack([apply_p_rope(x, positions, 64) for x in inputs])
    )


def test_the_interleaved_layout_is_a_permutation_of_the_weights():
    """RoFormer's pairs (2k, 2k + 1), rotated in float64, score as its permuted weights do under `apply_p_rope`."""
    d, T = 16, 9
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((T, 12))
    projections = rng.standard_normal((2, 12, d))
    positions = np.arange(T, dtype=np.int32)[None] * 1000
    rotated = tokens @ projections  # q and k, [2, T, d]
    for k in range(d // 2):
        angle = positions[0] * 10_000.0 ** (-2 * k / d)
        even, odd = rotated[..., 2 * k].copy(), rotated[..., 2 * k + 1].copy()
        rotated[..., 2 * k] = even * np.cos(angle) - odd * np.sin(angle)
        rotated[..., 2 * k + 1] = odd * np.cos(angle) + even * np.sin(angle)
    expected = rotated[0] @ rotated[1].T
    permuted = [interleaved_to_half_split(part) for part in projections]
    q, k = (
        apply_p_rope((jnp.float32(tokens) @ part)[None, :, None], positions, d)[0, :, 0]
        for part in permuted
    )
    scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("error", "change", "says"),
    [
        (ValueError, {"rope_percentage": 1.5}, "rope_percentage .*1.5"),
        (ValueError, {"rope_percentage": -0.1}, "rope_percentage .*-0.1"),
        (ValueError, {"rope_percentage": math.nan}, "rope_percentage .*nan"),
        (ValueError, {"rope_percentage": None}, "rope_percentage must be a fraction .*None"),
        (ValueError, {"max_wavelength": 1}, "max_wavelength .*1"),
        (ValueError, {"max_wavelength": math.inf}, "max_wavelength .*inf"),
        (ValueError, {"head_dim": 32}, "head_dim=32.*64"),
        (
            ValueError,
            {"inputs": np.ones((1, 2, 1, 63), np.float32), "head_dim": 63},
            "head_dim must be even.*63",
        ),
        (
            ValueError,
            {"positions": np.arange(2, dtype=np.int32)},
            r"positions must be \[B, T\]=\(1, 2\).*\(2,\)",
        ),
        (
            TypeError,
            {"positions": np.ones((1, 2), np.float32)},
            "positions must be integers.*float32",
        ),
        (
            TypeError,
            {"positions": jnp.ones((1, 2), jnp.bfloat16)},
            "positions must be integers.*bfloat16",
        ),
    ],
)
def test_bad_input_is_refused_with_its_value(error, change, says):
    good = {
        "inputs": np.ones((1, 2, 1, 64), np.float32),
        "positions": np.array([[0, 1]], np.int32),
        "head_dim": 64,
    }
    with pytest.raises(error, match=says):
        apply_p_rope(**(good | change))


def test_the_file_stands_alone():
    source = pathlib.Path(__file__).parent.parent / "prope" / "rope.py"
    tree = ast.parse(source.read_text())
    imported = {
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} == {
        "jax",
        "numpy",
        "decimal",
        "functools",
        "math",
    }
