"""The paper's statements in the attention of a decoder, and the curves of Figures 2 and 8."""

import math

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.heads import head_weights
from support.models import scaled_attention

from prope import apply_p_rope
from prope.rope import frequencies

HEAD_DIM = 256
LENGTH = 1024
PERCENTAGES = [1.0, 0.75, 0.25]
HEADS = [(2, 1.0), (8, 0.5), (64, 0.75), (64, 0.0), (256, 1.0)]  # head_dim, p
SLOWEST = float(frequencies(HEAD_DIM)[-1])
SIGMAS = 4.5  # a standard normal is further out once in 150 000 times


def gaussians(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def decoder_weights(queries, keys, p, first=0):
    """Weights [T, T] that a decoder gives in float32: its outputs for values that are one-hot."""
    T, H = keys.shape
    heads = -(-T // H)

    def rotated(vectors):
        vectors = jnp.asarray(vectors, jnp.float32)[None, :, None]
        positions = first + jnp.arange(T)[None]
        vectors = apply_p_rope(vectors, positions, H, rope_percentage=p)
        return jnp.repeat(vectors, heads, axis=2)

    values = jnp.eye(T, heads * H).reshape(1, T, heads, H)
    outputs = scaled_attention(rotated(queries), rotated(keys), values)
    return np.asarray(outputs).reshape(T, -1)[:, :T]


# --- Any distance, and no decay -------------------------------------------------------------------


@pytest.mark.parametrize("p", PERCENTAGES)
@pytest.mark.parametrize("distance", [0, 17, LENGTH - 1])
def test_3_1_one_key_is_largest_at_the_distance_asked_for(p, distance):
    query = gaussians(HEAD_DIM)
    freqs = oracles.frequencies(HEAD_DIM, p=p)
    key = oracles.rotate(query[None, None, None], [[distance]], freqs).ravel()
    queries = np.tile(query, (LENGTH, 1))
    keys = np.tile(key, (LENGTH, 1))
    largest = decoder_weights(queries, keys, p)[distance:].argmax(-1)
    np.testing.assert_array_equal(largest, np.arange(LENGTH - distance))


def curve(queries, keys, positions, p):
    """Logits of queries at 0 and keys [draw, H] at positions [.., T]: mean, its standard error."""
    draws, H = keys.shape
    T = positions.shape[-1]
    keys = np.float32(np.repeat(keys[:, None, None], T, axis=1))
    positions = np.broadcast_to(positions, (draws, T))
    rotated = apply_p_rope(keys, positions, H, rope_percentage=p)
    logits = np.einsum("BH,BTNH->BT", queries, np.asarray(rotated, np.float64)) / math.sqrt(H)
    return logits.mean(0), logits.std(0, ddof=1) / math.sqrt(draws)


def mean_cosines(distances, d, p):
    return np.cos(np.outer(distances, oracles.frequencies(d, p=p))).mean(-1)


@pytest.mark.parametrize(("d", "p"), HEADS)
def test_3_2_gaussian_logits_are_0_on_average_at_every_distance(d, p):
    """Figure 2: those of ones decay."""
    draws = 2000
    distances = np.array([0, 1, 2, 10, 100, 5000])
    mean, error = curve(*gaussians(2, draws, d), -distances[None], p)
    assert (np.abs(mean) < SIGMAS * error).all()
    # q . k / sqrt(H) has variance 1.
    np.testing.assert_allclose(error, 1 / math.sqrt(draws), rtol=0.12)
    mean, _ = curve(*np.ones((2, 2, d)), -distances[None], p)
    np.testing.assert_allclose(mean / math.sqrt(d), mean_cosines(distances, d, p), atol=1e-6)


# --- Positional heads -----------------------------------------------------------------------------


def test_5_2_a_repeated_token_halves_every_head_without_rotation():
    tokens = gaussians(9, 64)
    tokens[:, 0] = 1
    tokens[-2] = tokens[-1]
    for seed, scale in enumerate(np.logspace(-2, 0, 10)):  # the last make the softmax sharp
        query_weights, key_weights = scale * gaussians(2, 64, HEAD_DIM, seed=seed)
        *_, previous, last = decoder_weights(tokens @ query_weights, tokens @ key_weights, 0.0)[-1]
        assert last == pytest.approx(previous, rel=1e-6)
        assert last <= 0.5 + 1e-6
    query_weights, key_weights = head_weights(1, 0.01, 9, frequencies(HEAD_DIM), 64)
    queries = tokens @ query_weights
    keys = tokens @ key_weights
    assert decoder_weights(queries, keys, 1.0)[-1, -2] > 0.99
    np.testing.assert_allclose(decoder_weights(queries, keys, 0.0)[-1], 1 / 9, rtol=1e-5)


@pytest.mark.parametrize("p", PERCENTAGES)
@pytest.mark.parametrize("distance", [0, 1, 5, 1000])
def test_5_3_a_head_attends_to_one_distance(p, distance):
    epsilon = 0.01
    freqs = frequencies(HEAD_DIM, rope_percentage=p)
    query_weights, key_weights = head_weights(distance, epsilon, LENGTH, freqs, 32)
    residual = gaussians(LENGTH, 32)
    residual[:, 0] = 1
    for first in (0, 100_000):  # only offsets count
        weights = decoder_weights(residual @ query_weights, residual @ key_weights, p, first)
        assert np.diagonal(weights, -distance).min() > 1 - epsilon


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-3])
@pytest.mark.parametrize(("distance", "length"), [(0, 2), (1, 3)])
def test_5_3_the_bound_is_met_if_all_others_are_nearest(distance, length, epsilon):
    weights = head_weights(distance, epsilon, length, frequencies(HEAD_DIM), 1)
    query, key = (np.tile(row, (length, 1)) for row in weights)
    least = np.diagonal(decoder_weights(query, key, 1.0), -distance).min()
    assert least == pytest.approx(1 / (1 + epsilon), rel=1e-5)


# --- Semantic heads -------------------------------------------------------------------------------


def pair_logits(query, keys, frequency):
    """Logits [S] of the last token in a head of one pair, as complex numbers; 0: not rotated."""
    S = len(keys)
    vectors = np.zeros((2, S, 1, 4), np.float32)  # queries and keys
    for row, z in enumerate((query, keys)):
        vectors[row, :, 0, 1] = np.real(z)
        vectors[row, :, 0, 3] = np.imag(z)
    positions = np.tile(np.arange(S), (2, 1))
    if frequency:
        vectors = apply_p_rope(vectors, positions, 4, max_wavelength=frequency**-2)
    else:
        vectors = apply_p_rope(vectors, positions, 4, rope_percentage=0.5)
    queries, keys = np.asarray(vectors, np.float64)[:, :, 0]
    return keys @ queries[-1] / math.sqrt(2)


def pair_weights(query, keys, frequency):
    return oracles.softmax(pair_logits(query, keys, frequency))


@pytest.mark.parametrize("epsilon", [0.5, 0.01])
@pytest.mark.parametrize(
    ("frequency", "length"), [(0.3, 5), (0.01, 150), (SLOWEST, 8192), (0.0, 50_000)]
)
def test_6_1_a_semantic_head_finds_its_target_within_a_quarter_turn(frequency, length, epsilon):
    aligned = math.cos(frequency * (length - 1))
    query = math.sqrt(2) * math.log((length - 1) / epsilon) / aligned
    least = 1.0
    for target in range(0, length, math.ceil(length / 16)):
        keys = np.zeros(length)
        keys[target] = 1
        least = min(least, pair_weights(query, keys, frequency)[target])
    assert least == pytest.approx(1 / (1 + epsilon), rel=1e-5)  # the first position's
    assert least > 1 - epsilon
    if frequency:
        quarter = math.ceil(math.pi / 2 / frequency)
        assert pair_logits(1, np.ones(quarter + 1), frequency)[0] <= 0


def defeat(query, keys, frequency, target):
    """Swaps tokens as in the proof of Theorem 6.1; returns their order after each of 1 or 2 swaps.

    The target goes where its logit is least. If it leads even so, the longest other key goes where
    its logit is largest. The last token, whose query this is, stays.
    """
    positions = np.arange(len(keys) - 1)
    place = pair_logits(query, np.full(keys.shape, keys[target]), frequency)[:-1].argmin()
    first = np.arange(len(keys))
    first[[target, place]] = first[[place, target]]
    if pair_logits(query, keys[first], frequency).argmax() != place:
        return [first]
    others = np.delete(positions, place)
    other = others[np.abs(keys[first[others]]).argmax()]
    logits = pair_logits(query, np.full(keys.shape, keys[first[other]]), frequency)
    best = others[logits[others].argmax()]
    second = first.copy()
    second[[other, best]] = second[[best, other]]
    return [first, second]


def assert_defeated(query, keys, frequency, target):
    """Asserts that swaps defeat a head of a rotated pair and not of an unrotated one: how many."""
    orders = defeat(query, keys, frequency, target)
    place = orders[-1].tolist().index(target)
    weights = pair_weights(query, keys[orders[-1]], frequency)
    assert weights[place] < 0.5
    assert weights[place] < weights.max()
    unrotated = pair_weights(query, keys, 0)[target]
    after = pair_weights(query, keys[orders[-1]], 0)[place]
    assert after == pytest.approx(unrotated, rel=1e-9)
    return len(orders)


@pytest.mark.parametrize(
    ("frequency", "length"), [(0.9, 10), (0.31, 24), (0.01, 2000), (SLOWEST, 58_472)]
)
@pytest.mark.parametrize(("kind", "swaps"), [("silent", 1), ("opposed", 2)])
def test_6_1_swaps_take_the_target_from_a_rotated_pair(frequency, length, kind, swaps):
    phase = np.exp(2j)
    distances = np.arange(length)[::-1]
    if kind == "silent":
        target = length - 2
        keys = np.zeros(length, complex)
    else:
        # The others stay opposed to the query where the target comes from.
        target = length - 1 - int(0.9 * math.pi / 2 / frequency)
        keys = -100 * phase * np.exp(1j * (frequency * distances - math.pi / 4))
    keys[target] = phase
    assert pair_weights(40 * phase, keys, frequency)[target] > 0.99
    assert assert_defeated(40 * phase, keys, frequency, target) == swaps


@pytest.mark.parametrize("frequency", [0.4, 0.05])
def test_6_1_a_whole_turn_is_long_enough_for_any_keys(frequency):
    length = math.ceil(2 * math.pi / frequency) + 3
    rng = np.random.default_rng(0)
    swaps = []
    for _ in range(100):
        lengths = rng.choice([0.01, 1, 50], length)
        keys = lengths * (rng.standard_normal((2, length)).T @ [1, 1j])
        weights = pair_weights(30, keys, frequency)
        target = int(weights.argmax())
        if target < length - 1 and weights[target] > 0.5:
            swaps.append(assert_defeated(30, keys, frequency, target))
    assert len(swaps) > 25


# --- Random positions -----------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [12, 40, 300])
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_figure_8_curves_have_their_exact_expectation(bound, p):
    """By the number of tokens to the last one: sorted positions, drawn below a bound."""
    length = 12
    draws = 2000
    H = 16
    rng = np.random.default_rng(1)
    sets = [np.sort(rng.choice(bound, length, replace=False)) for _ in range(draws)]
    positions = np.stack(sets)[:, ::-1]
    positions = positions - positions[:, :1]
    mean, error = (moment / math.sqrt(H) for moment in curve(*np.ones((2, draws, H)), positions, p))
    assert mean[0] == pytest.approx(1)
    assert (error.max() < 1e-12) == (bound == length)
    distances = np.arange(1, bound)
    for r in range(1, length):
        # The share of all sets of positions with the r-th token before the last m away.
        counts = [math.comb(m - 1, r - 1) * math.comb(bound - m, length - r) for m in distances]
        chances = np.array(counts) / math.comb(bound, length)
        assert chances.sum() == pytest.approx(1)
        expected = chances @ mean_cosines(distances, H, p)
        assert abs(mean[r] - expected) <= SIGMAS * error[r] + 1e-6
    mean, error = curve(*gaussians(2, draws, H), positions, p)
    assert (np.abs(mean) < SIGMAS * error).all()
    np.testing.assert_allclose(error, 1 / math.sqrt(draws), rtol=0.12)
