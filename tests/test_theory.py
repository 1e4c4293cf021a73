"""The paper's constructions, against rotations written anew: a pair is a complex number, rotated by multiplication."""

import cmath
import itertools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from prope import apply_p_rope
from prope.analysis import statements, theory, theory_page
from prope.attention import attention as model_attention
from prope.rope import frequencies


def pairs(vectors):
    """Lanes k and k + P as one complex number: [..., H] to [..., P]."""
    vectors = np.asarray(vectors, np.float64)
    half = vectors.shape[-1] // 2
    return vectors[..., :half] + 1j * vectors[..., half:]


def freqs_of(d, p=1.0, max_wavelength=10_000.0):
    """Radians per token, from the definition."""
    return [max_wavelength ** (-2 * k / d) if k < int(p * d // 2) else 0.0 for k in range(d // 2)]


def logit(query, key, distance, freqs):
    """q . R^(-distance) k / sqrt(H), one pair after the other."""
    found = 0.0
    for q, k, g in zip(pairs(query), pairs(key), freqs, strict=True):
        found += (q.conjugate() * k * cmath.exp(-1j * g * distance)).real
    return found / math.sqrt(2 * len(freqs))


def curve(query, key, length, freqs):
    """`logit` at the distances 0 .. length-1."""
    angles = np.outer(np.arange(length), freqs)
    return (np.exp(-1j * angles) * (pairs(query).conj() * pairs(key))).real.sum(-1) / math.sqrt(
        2 * len(freqs)
    )


def weights_of(queries, keys, freqs, positions=None):
    """Attention weights of T queries, each of which sees the keys up to its own place."""
    positions = np.arange(len(keys)) if positions is None else positions
    angles = np.exp(1j * np.outer(positions, freqs))
    q, k = pairs(queries) * angles[len(keys) - len(queries) :], pairs(keys) * angles
    found = np.zeros((len(queries), len(keys)))
    for row, place in enumerate(range(len(keys) - len(queries), len(keys))):
        scores = (q[row].conj() * k[: place + 1]).real.sum(-1) / math.sqrt(2 * len(freqs))
        raised = np.exp(scores - scores.max())
        found[row, : place + 1] = raised / raised.sum()
    return found


def gaussians(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


HEADS = [(2, 1.0), (4, 1.0), (8, 0.5), (64, 0.75), (64, 0.25), (256, 1.0)]


def test_the_oracle_is_the_rotation_of_the_definition():
    angle = 3 * freqs_of(4)[1]
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    q, k = gaussians(2, 2)
    assert logit([0, q[0], 0, q[1]], [0, k[0], 0, k[1]], 3, freqs_of(4)) == pytest.approx(
        q @ matrix.T @ k / 2
    )
    assert curve(q, k, 9, [1.0])[5] == pytest.approx(logit(q, k, 5, [1.0]))


@pytest.mark.parametrize(("d", "p"), HEADS)
def test_rotation_logits_and_weights_are_those_of_complex_numbers(d, p):
    freqs, places = freqs_of(d, p), np.array([0, 1, 2, 7, 8, 4000])
    queries, keys = gaussians(2, 6, d)
    rotated = pairs(keys) * np.exp(1j * np.outer(places, freqs))
    np.testing.assert_allclose(pairs(theory.rotate(keys, places, freqs)), rotated, atol=1e-12)
    for positions in (None, places):
        for first in (0, 4):
            expected = weights_of(queries[first:], keys, freqs, positions)
            np.testing.assert_allclose(
                theory.attention(queries[first:], keys, freqs, positions), expected, atol=1e-12
            )
            scores = theory.logits(queries[first:], keys, freqs, positions)
            assert ((scores == -np.inf) == (expected == 0)).all()
    at = places if positions is None else positions
    assert scores[1, 2] == pytest.approx(logit(queries[5], keys[2], at[5] - at[2], freqs))
    by_distance = theory.by_distance(queries, keys, [0, 3, 100], freqs)
    for row, (m, column) in itertools.product(range(6), zip((0, 3, 100), range(3), strict=True)):
        assert by_distance[row, column] == pytest.approx(
            logit(queries[row], keys[row], m, freqs), abs=1e-12
        )


@pytest.mark.parametrize(("d", "p"), HEADS)
@pytest.mark.parametrize("distance", [0, 1, 13, 99])
def test_3_1_one_key_is_largest_at_the_distance_asked_for(d, p, distance):
    freqs, length, query = freqs_of(d, p), 100, gaussians(d)
    key = theory.key_for_distance(query, distance, freqs)
    np.testing.assert_allclose(
        pairs(key), pairs(query) * np.exp(1j * distance * np.array(freqs)), atol=1e-12
    )
    found = curve(query, key, length, freqs)
    assert found.argmax() == distance
    assert found[distance] == pytest.approx(
        query @ query / math.sqrt(d)
    )  # every pair is aligned: Cauchy-Schwarz
    runner_up = max(found[m] for m in range(length) if m != distance)
    assert theory.margin(query, key, distance, length, freqs) == pytest.approx(
        found[distance] - runner_up, abs=1e-10
    )
    assert (
        weights_of(query[None], np.tile(key, (length, 1)), freqs)[0].argmax()
        == length - 1 - distance
    )


def test_3_1_a_query_that_no_rotation_reaches_is_refused():
    still = np.zeros(8)
    still[[3, 7]] = 1  # the slowest pair, which p = 0.75 does not rotate
    with pytest.raises(ValueError, match="0 in every pair that rotates"):
        theory.key_for_distance(still, 1, freqs_of(8, 0.75))
    assert theory.key_for_distance(still, 1, freqs_of(8))[3] < 1
    with pytest.raises(ValueError, match="0 in every pair that rotates"):
        theory.key_for_distance(np.ones(8), 1, freqs_of(8, 0))


@pytest.mark.parametrize(("d", "p"), [(2, 1.0), (64, 0.75), (64, 0.0), (256, 1.0)])
def test_3_2_gaussian_logits_are_0_on_average_at_every_distance(d, p):
    draws, distances = 2000, np.array([0, 1, 2, 10, 100, 5000])
    mean, error = theory.gaussian_curve(distances, freqs_of(d, p), draws, seed=3)
    assert (np.abs(mean) < 4.5 * error).all()
    np.testing.assert_allclose(
        error, 1 / math.sqrt(draws), rtol=0.12
    )  # q . k / sqrt(H) has variance 1
    again = theory.gaussian_curve(distances, freqs_of(d, p), draws, seed=4)[0]
    assert not np.allclose(mean, again, atol=1e-6)


@pytest.mark.parametrize(("d", "p"), HEADS)
def test_figure_2_ones_have_their_closed_form(d, p):
    freqs, ones = freqs_of(d, p), np.ones(d)
    expected = [logit(ones, ones, m, freqs) / math.sqrt(d) for m in (0, 1, 17, 3000)]
    np.testing.assert_allclose(theory.all_ones_curve([0, 1, 17, 3000], freqs), expected, atol=1e-12)
    assert expected[0] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_5_2_a_repeated_token_halves_every_head_without_rotation(seed):
    weights, embeddings = 0.3 * gaussians(2, 16, 8, seed=seed), gaussians(6, 16, seed=seed + 10)
    diagonal, previous = theory.repeated_token(*weights, embeddings)
    assert diagonal == pytest.approx(previous, rel=1e-12) and 0 < diagonal <= 0.5
    tokens = np.concatenate([embeddings, embeddings[-1:]])
    expected = weights_of(tokens @ weights[0], tokens @ weights[1], [0.0] * 4)[-1]
    assert (diagonal, previous) == pytest.approx((expected[-1], expected[-2]), rel=1e-10)
    rotated = weights_of(tokens @ weights[0], tokens @ weights[1], freqs_of(8))[-1]
    with_rotation = theory.repeated_token(*weights, embeddings, freqs_of(8))
    assert with_rotation == pytest.approx((rotated[-1], rotated[-2]), rel=1e-10)
    assert with_rotation[0] != pytest.approx(with_rotation[1], rel=1e-3)


def gap_of(distance, length, freqs):
    """The least lead of the wanted place, by search."""
    off = [m - distance for m in range(length) if m != distance]
    return min(sum(1 - math.cos(g * m) for g in freqs if g) for m in off)


@pytest.mark.parametrize(("d", "p"), HEADS)
@pytest.mark.parametrize(
    ("distance", "length"), [(0, 2), (0, 200), (1, 3), (1, 64), (22, 24), (5, 100)]
)
@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-6])
def test_5_3_a_head_attends_to_one_distance(d, p, distance, length, epsilon):
    freqs = freqs_of(d, p)
    head = theory.positional_head(distance, epsilon, length, freqs)
    wanted = np.array([g != 0 for g in freqs])
    np.testing.assert_array_equal(
        np.abs(pairs(head.key)), wanted
    )  # every rotated pair takes part, alike
    assert head.gap == pytest.approx(gap_of(distance, length, freqs), rel=1e-9)
    least = np.diagonal(
        weights_of(np.tile(head.query, (length, 1)), np.tile(head.key, (length, 1)), freqs),
        -distance,
    ).min()
    assert least > 1 - epsilon
    best = head.temperature * wanted.sum() / math.sqrt(d)  # all pairs aligned
    assert logit(head.query, head.key, distance, freqs) == pytest.approx(best, rel=1e-9)
    assert head.temperature == pytest.approx(
        math.sqrt(d) * math.log((length - 1) / epsilon) / gap_of(distance, length, freqs), rel=1e-9
    )
    if (distance, length) in [
        (0, 2),
        (1, 3),
    ]:  # all others are as near as the gap allows: the bound is met
        assert least == pytest.approx(1 / (1 + epsilon), rel=1e-6)


def test_5_3_what_cannot_be_is_refused_in_one_line():
    freqs = freqs_of(8)
    for arguments, says in (
        ((1, 0.1, 8, freqs_of(8, 0)), r"no pair rotates \(p = 0\).*Proposition 5.2"),
        ((1, 0.1, 8, [1e-200]), "do not tell the target from other positions within 8 tokens"),
        ((8, 0.1, 8, freqs), "below length=8; got 8"),
        ((-1, 0.1, 8, freqs), "at least 0"),
        ((1, 0.0, 8, freqs), "epsilon"),
        ((1, 1.0, 8, freqs), "epsilon"),
        ((0, 0.1, 1, freqs), "length must be at least 2"),
    ):
        with pytest.raises(ValueError, match=says) as raised:
            theory.positional_head(*arguments)
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="embed_dim=4 features; got 4"):
        theory.head_weights(1, 0.1, 8, freqs, 4, constant=4)


def through_the_model(queries, keys, d, p, first=0):
    """Weights [T, T] of the code that a decoder runs, in float32: values of one-hots show them."""
    T = len(keys)
    places = first + jnp.arange(T)[None]
    queries, keys = (
        apply_p_rope(jnp.asarray(x, jnp.float32)[None, :, None], places, d, rope_percentage=p)
        for x in (queries, keys)
    )
    return np.asarray(model_attention(queries, keys, jnp.eye(T, d)[None, :, None]))[0, :, 0, :T]


@pytest.mark.parametrize(("d", "p"), [(32, 1.0), (32, 0.25), (64, 0.75)])
@pytest.mark.parametrize("distance", [0, 1, 3])
def test_5_3_its_weights_work_in_the_model(d, p, distance):
    length, epsilon, constant = 32, 0.05, 5
    freqs = frequencies(d, rope_percentage=p)
    query_weights, key_weights = theory.head_weights(distance, epsilon, length, freqs, 16, constant)
    assert query_weights.shape == key_weights.shape == (16, d)
    residual = 10 * gaussians(length, 16)
    residual[:, constant] = 1
    for first in (0, 100_000):  # only offsets count
        weights = through_the_model(residual @ query_weights, residual @ key_weights, d, p, first)
        assert np.diagonal(weights, -distance).min() > 1 - epsilon
    flat = through_the_model(residual @ query_weights, residual @ key_weights, d, 0.0)
    np.testing.assert_allclose(
        flat[-1], 1 / length, rtol=1e-4
    )  # without rotation nothing is left of it


def test_3_1_works_in_the_model():
    d, p, length = 64, 0.75, 64
    query = gaussians(d)
    for distance in (0, 1, 40):
        key = theory.key_for_distance(query, distance, frequencies(d, rope_percentage=p))
        weights = through_the_model(np.tile(query, (length, 1)), np.tile(key, (length, 1)), d, p)
        assert (weights[distance:].argmax(-1) == np.arange(length - distance)).all()


def planted(head, length, place):
    keys = np.tile(head.other, (length, 1))
    keys[place] = head.target
    return keys


@pytest.mark.parametrize("frequency", [0.0, 1e-4, 0.01, 0.3])
@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-4])
def test_6_1_a_semantic_head_finds_its_target_within_a_quarter_turn(frequency, epsilon):
    for length in (2, 3, 5) if frequency == 0.3 else (2, 50, 150):
        head = theory.semantic_head(epsilon, length, frequency)
        least = min(
            weights_of(head.query[None], planted(head, length, place), [frequency])[0, place]
            for place in range(length)
        )
        assert (
            least == pytest.approx(1 / (1 + epsilon)) and least > 1 - epsilon
        )  # met at the first place
    if frequency:
        assert frequency * (head.longest - 1) < math.pi / 2 <= frequency * head.longest
        theory.semantic_head(epsilon, head.longest, frequency)
        with pytest.raises(
            ValueError, match=f"serves at most {head.longest} tokens, not {head.longest + 1}"
        ):
            theory.semantic_head(epsilon, head.longest + 1, frequency)
    else:
        assert head.longest == math.inf


def moved(keys, target, swaps):
    """Keys and the target's place after the swaps, one after the other."""
    tokens = list(range(len(keys)))
    for a, b in swaps:
        tokens[a], tokens[b] = tokens[b], tokens[a]
    assert tokens[-1] == len(keys) - 1  # the query's own token stays
    return keys[tokens], tokens.index(target)


def sequence(kind, length, frequency, seed):
    """A query, and keys of which `target` has by far the largest logit: (query, keys, target)."""
    rng, phase = np.random.default_rng(seed), cmath.exp(1j * seed)
    if kind == "neutral":  # the others are silent
        target, own, logits = length - 2, 1.0, np.zeros(length, complex)
    elif kind in (
        "negative",
        "askew",
    ):  # all logits are negative, the target's least so: short or askew
        target, own = length // 2, -0.1 + 50j * (kind == "askew")
        logits = -rng.uniform(1, 2, length) * np.exp(1j * rng.uniform(-1, 1, length))
    else:  # the others stay negative where the target comes from, most of a quarter turn from where it goes
        target, own = length - 1 - int(0.9 * math.pi / 2 / frequency), math.cos(0.1)
        logits = np.full(length, -100 * cmath.exp(-1j * math.pi / 4))
    logits[target] = own
    keys = logits * phase * np.exp(1j * frequency * np.arange(length)[::-1])
    keys[target] = phase if kind == "opposed" else keys[target]
    return 40 * np.array([phase.real, phase.imag]), np.stack([keys.real, keys.imag], -1), target


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-3])
@pytest.mark.parametrize(
    ("kind", "count", "frequency"),
    [
        ("neutral", 1, 1.0),
        ("neutral", 1, 0.31),
        ("neutral", 1, 0.01),
        ("negative", 1, 1.0),
        ("negative", 1, 0.01),
        ("askew", 1, 1.0),
        ("askew", 1, 0.01),
        ("opposed", 2, 0.31),
        ("opposed", 2, 0.01),
    ],
)
def test_6_1_swaps_take_the_target_from_a_rotated_pair(frequency, epsilon, kind, count):
    for seed, times in itertools.product(range(4), (1, 3)):
        length = times * (math.ceil(2 * math.pi / frequency) + 3)
        query, keys, target = sequence(kind, length, frequency, seed)
        assert weights_of(query[None], keys, [frequency])[0, target] > 1 - epsilon
        swaps = theory.defeating_swaps(query, keys, frequency, target, epsilon)
        assert len(swaps) == count
        after, place = moved(keys, target, swaps)
        weights = weights_of(query[None], after, [frequency])[0]
        assert weights[place] < 1 - epsilon and weights[place] < weights.max()
        np.testing.assert_array_equal(keys[theory.swapped(length, swaps)], after)
        # With the first of two alone it still leads.
        for fewer in range(count):
            after, place = moved(keys, target, swaps[:fewer])
            assert weights_of(query[None], after, [frequency])[0].argmax() == place
        # The unrotated pair of p-RoPE: the same weight, wherever the tokens stand.
        before = theory.attention(query[None], keys, [0.0])[0, target]
        after, place = moved(keys, target, swaps)
        assert theory.attention(query[None], after, [0.0])[0, place] == pytest.approx(
            before, rel=1e-9
        )


@pytest.mark.parametrize("factor", [1, 2])
def test_6_1_the_second_swap_may_take_the_token_that_the_first_has_moved(factor):
    query, keys, target = sequence("opposed", 200, 0.05, 1)
    ((_, destination), _) = theory.defeating_swaps(query, keys, 0.05, target, 0.1)
    keys[destination] *= factor
    swaps = theory.defeating_swaps(query, keys, 0.05, target, 0.1)
    assert swaps[0] == (target, destination) and (swaps[1][0] == target) == (factor == 2)
    after, place = moved(keys, target, swaps)
    weights = weights_of(query[None], after, [0.05])[0]
    assert weights[place] < 0.1 and weights.argmax() == swaps[1][1]
    np.testing.assert_array_equal(keys[theory.swapped(200, swaps)], after)
    own = (
        query @ query / 1600 * 100 * factor * 40 / math.sqrt(2)
    )  # the longest key, aligned with the query
    assert theory.logits(query[None], after, [0.05])[0, swaps[1][1]] == pytest.approx(own, rel=1e-2)


@pytest.mark.parametrize("frequency", [0.4, 0.05])
def test_6_1_the_length_that_is_said_to_suffice_does(frequency):
    query = np.array([30.0, 0])
    enough = math.ceil(2 * math.pi / frequency) + 3
    # Too short for the target to turn negative; were it tried all the same, the other token could not outdo it.
    for other in (0, 1):
        with pytest.raises(
            ValueError, match=f"4 tokens rotate .* too little to defeat this head; {enough} suffice"
        ) as raised:
            theory.defeating_swaps(
                query, np.array([[other, 0], [0, 0], [10.0, 0], [0, 0]]), frequency, 2, 0.1
            )
        assert "\n" not in str(raised.value)
    rng, tried = np.random.default_rng(0), 0
    for _ in range(200):
        keys = rng.standard_normal((enough, 2)) * rng.choice([0.01, 1, 50], (enough, 1))
        target = int(weights_of(query[None], keys, [frequency])[0].argmax())
        if target == enough - 1:
            continue
        swaps = theory.defeating_swaps(query, keys, frequency, target, 0.5)
        after, place = moved(keys, target, swaps)
        tried += bool(swaps)
        weights = weights_of(query[None], after, [frequency])[0]
        assert weights[place] <= 0.5 and (not swaps or weights[place] < weights.max())
    assert tried > 50


def test_6_1_what_cannot_be_is_refused():
    query, keys = np.array([30.0, 0]), np.array([[0.0, 0], [1, 0], [0, 0]])
    assert (
        theory.defeating_swaps(np.zeros(2), keys, 0.1, 1, 0.5) == []
    )  # it does not attend in the first place
    for arguments, says in (
        ((0.0, 1, 0.1), "no swap defeats an unrotated pair"),
        ((1.5, 1, 0.1), r"frequency must be in \(0, 1\]"),
        ((0.1, 1, 0.6), "Lemma|1/2"),
        ((0.1, 2, 0.1), "before the last token, 2"),
    ):
        with pytest.raises(ValueError, match=says):
            theory.defeating_swaps(query, keys, *arguments)
    with pytest.raises(ValueError, match="too little"):  # two tokens, and nothing to swap
        theory.defeating_swaps(query, keys[1:], 0.1, 0, 0.1)


def test_figure_8_positions_are_sorted_distinct_and_bounded():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(200):
        positions = theory.random_positions(5, 9, rng)
        assert (np.diff(positions) > 0).all() and positions.min() >= 0 and positions.max() < 9
        seen |= set(positions.tolist())
    assert seen == set(range(9))
    np.testing.assert_array_equal(theory.random_positions(7, 7, rng), np.arange(7))
    with pytest.raises(ValueError, match="no 7 different positions below 6"):
        theory.random_positions(7, 6, rng)


@pytest.mark.parametrize("bound", [12, 40, 300])
@pytest.mark.parametrize("p", [1.0, 0.5])
def test_figure_8_curves_have_their_exact_expectation(bound, p):
    length, freqs = 12, freqs_of(16, p)
    curves = theory.randomised_curves(length, bound, freqs, draws=2000, seed=1)
    mean, error = curves["ones"]
    for r in range(length):
        # Of all sets of positions, those in which the r-th token before the last is m away.
        chances = {
            m: math.comb(m - 1, r - 1) * math.comb(bound - m, length - r) / math.comb(bound, length)
            for m in range(1, bound)
            if r
        } or {0: 1.0}
        assert sum(chances.values()) == pytest.approx(1)
        expected = sum(
            chance * sum(math.cos(g * m) for g in freqs) / len(freqs)
            for m, chance in chances.items()
        )
        assert abs(mean[r] - expected) <= 4.5 * error[r] + 1e-12
    assert mean[0] == 1 and (error.max() == pytest.approx(0, abs=1e-12)) == (bound == length)
    mean, error = curves["gaussian"]
    assert (np.abs(mean) < 4.5 * error).all()
    np.testing.assert_allclose(error, 1 / math.sqrt(2000), rtol=0.12)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theory") / "new"
    return theory_page.write(folder), folder


def test_the_page_holds_every_statement_and_every_number(page):
    result, folder = page
    assert result["output"] == str(folder / "index.html")
    assert {path.name for path in folder.iterdir()} == {
        "index.html",
        "theory.json",
        "figure_2.png",
        "figure_8.png",
    }
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    text = (folder / "index.html").read_text()
    assert "http" not in text.split("</head>")[1] and text.count("<img") == 2
    written = json.loads((folder / "theory.json").read_text())
    assert written["statements"] == json.loads(json.dumps(result["statements"]))
    names = [
        "Proposition 3.1",
        "Proposition 3.2",
        "Proposition 5.2",
        "Theorem 5.3",
        "Theorem 6.1",
        "Appendix B.2",
    ]
    assert [found["statement"] for found in result["statements"]] == names
    for found in result["statements"]:
        assert found["holds"] is True
        assert found["statement"] in text and found["says"] in text
    semantic = {
        name: value
        for name, value in result["statements"][4]["numbers"].items()
        if "before and after" in name
    }
    assert len(semantic) == 2
    for before, after in semantic.values():  # weights of the target, and nothing else
        assert 0.9 < before <= 1 and 0 <= after < 0.5
    curves = written["figures"]["figure_2"]
    assert [curve["p"] for curve in curves["ones"]] == [1, 0.75, 0.25, 0]
    for drawn in curves["ones"]:
        expected = [
            logit(np.ones(256), np.ones(256), m, freqs_of(256, drawn["p"])) / 16
            for m in (0, 3, 1000)
        ]
        assert [drawn["logit"][m] for m in (0, 3, 1000)] == pytest.approx(expected)
    for drawn in written["figures"]["figure_8"]["ones"]:
        assert len(drawn["mean"]) == len(drawn["standard_error"]) == 256


BROKEN = {
    "maximal": (
        "key_for_distance",
        lambda query, distance, freqs: theory.rotate(query, -distance, freqs),
    ),
    "gaussian": ("gaussian_curve", lambda distances, freqs, draws: (np.ones(len(distances)),) * 2),
    "repeated": ("repeated_token", lambda weights, *others: (0.9, 0.1)),
    # Equal weights above a half, but for the head of Theorem 5.3, which reads a constant feature.
    "repeated, twice": (
        "repeated_token",
        lambda q, k, tokens, *f: (0.5, 0.5) if tokens[0, 0] == 1 else (0.9, 0.9),
    ),
    "positional": ("head_weights", lambda *arguments: np.zeros((2, 32, 256))),
    "semantic": ("defeating_swaps", lambda *arguments: []),
    "randomised": ("random_positions", lambda length, bound, rng: np.arange(length)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_statement_whose_construction_is_broken_does_not_hold(name, monkeypatch):
    monkeypatch.setattr(theory, *BROKEN[name])
    *_, holds = getattr(statements, name.partition(",")[0])()
    assert holds is False
