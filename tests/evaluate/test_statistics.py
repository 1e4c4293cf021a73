"""Statistics of losses: SciPy, the closed test, and simulations in which nothing differs."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from prope.inference import statistics
from prope.inference.statistics import Difference, average_seeds


def test_a_difference_is_the_paired_t_test():
    losses = np.random.default_rng(1).normal(2, 0.01, (2, 5))
    expected = stats.ttest_rel(*losses)
    difference = average_seeds(list(losses[0] - losses[1]))
    assert difference.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert difference.p_value == pytest.approx(expected.pvalue)
    (low, high) = expected.confidence_interval(1 - 0.05 / 7)
    assert difference._replace(comparisons=7).interval() == pytest.approx((low, high))
    assert average_seeds([0.1]).interval() is None
    assert [average_seeds([mean] * 3).p_value for mean in (0.0, 0.1)] == [None, None]


@pytest.mark.parametrize("seeds", [2, 3, 4, 10])
def test_sign_flips_are_all_signs_of_the_differences(seeds):
    """The share of signs whose mean is as far from 0, at least 2 of 2^n; ties count."""
    rng = np.random.default_rng(seeds)
    signs = np.array(list(itertools.product((1, -1), repeat=seeds)))
    for differences in (rng.normal(0.1, 0.1, seeds), rng.integers(-2, 4, seeds) / 8):
        means = np.abs((signs * differences).mean(axis=1))
        p_value = (means >= abs(differences.mean()) - 1e-12).mean()
        assert average_seeds(differences.tolist()).sign_flip_p_value == pytest.approx(p_value)
    assert average_seeds([0.1] * seeds).sign_flip_p_value == pytest.approx(2 / 2**seeds)
    assert average_seeds([0.0] * seeds).sign_flip_p_value == 1


def test_sign_flips_are_of_two_to_ten_seeds():
    assert average_seeds([0.1]).sign_flip_p_value is None
    assert average_seeds([0.1] * 11).sign_flip_p_value is None
    assert Difference(0.1, 0.01, 5).sign_flip_p_value is None, "of documents"


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected when Bonferroni rejects every intersection that has it."""
    p_values = np.array([0.03, 0.001, 0.04, 0.012, 0.9])
    expected = np.zeros(5)
    for size in range(1, 6):
        for subset in map(list, itertools.combinations(range(5), size)):
            of_subset = min(1, size * min(p_values[subset]))
            expected[subset] = np.maximum(expected[subset], of_subset)
    np.testing.assert_allclose(statistics.holm(p_values), expected)


# --- Documents ------------------------------------------------------------------------------------


def of_one(count):
    """Which source each of `count` documents has, and the sources' shares: there is one."""
    return np.zeros(count, int), (1.0,)


def test_where_seeds_agree_documents_vary_as_the_jackknife_finds():
    """Equal variances over seeds and documents have twice the degrees of one (Satterthwaite)."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(100, 2000, 50)
    loss = rng.normal(0, 0.1, 50) * tokens
    source = np.repeat([0, 1], 25)
    for labels, shares in (of_one(50), (source, (0.3, 0.7))):
        mean, stderr = statistics.mean_and_stderr(loss, tokens, labels, shares)
        arguments = (np.stack([loss] * 31), tokens, labels, shares)
        (exact,) = {statistics.over_documents(Difference(mean, 0.0, 31), *arguments)}
        assert exact.stderr == pytest.approx(stderr)
        assert 30 < exact.degrees < 49
        both = statistics.over_documents(Difference(mean, stderr, 31), *arguments)
        assert both.stderr == pytest.approx(stderr * 2**0.5)
        assert both.degrees == pytest.approx(4 / (1 / 30 + 1 / exact.degrees))
    one = Difference(0.2, 0.01, 3)
    assert statistics.over_documents(one, np.ones((3, 1)), tokens[:1], *of_one(1)) is None


def test_documents_without_tokens_do_not_count():
    rng = np.random.default_rng(5)
    tokens = rng.integers(100, 2000, 6)
    loss = (rng.normal(0, 0.1, 6) + rng.normal(0, 0.05, (3, 6))) * tokens
    source, shares = np.array([0, 0, 0, 1, 1, 1]), (0.3, 0.7)
    of_seeds = Difference(0.1, 0.01, 3)
    found = []
    for more in (0, 9):
        several = np.pad(loss, ((0, 0), (0, more)))
        others = np.pad(tokens, (0, more)), np.pad(source, (0, more)), shares
        both = statistics.over_documents(of_seeds, several, *others)
        found.append((*both[:4], *statistics.mean_and_stderr(several[0], *others)))
    assert found[1] == pytest.approx(found[0])


def test_where_only_seeds_differ_documents_add_nothing():
    tokens = np.random.default_rng(4).integers(100, 2000, 50)
    seeds = average_seeds([0.1, 0.2, 0.4])
    loss = np.array([[0.1], [0.2], [0.4]]) * tokens
    both = statistics.over_documents(seeds, loss, tokens, *of_one(50))
    assert both[:4] == pytest.approx(seeds[:4])


# --- Simulations in which nothing differs ---------------------------------------------------------


def assert_share(share, trials, least, most) -> None:
    """Allows three standard errors of the simulation."""
    noise = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert least - noise <= share <= most + noise


@pytest.mark.parametrize(("methods", "seeds"), [(2, 3), (8, 3), (13, 10)])
def test_false_claims_are_rare_where_nothing_differs(methods, seeds):
    """Methods have deviations that differ by a factor of 30, beside one baseline."""
    trials = 600
    rng = np.random.default_rng(0)
    deviation = np.geomspace(0.001, 0.03, methods)[:, None]
    intervals = 0
    rejected = 0
    uncorrected = 0
    for _ in range(trials):
        losses = rng.normal(2, 0.1, seeds) + deviation * rng.normal(size=(methods, seeds))
        differences = [average_seeds(list(row - losses[0])) for row in losses[1:]]
        p_values = [one.p_value for one in differences]
        together = [one._replace(comparisons=methods - 1) for one in differences]
        intervals += any(one.distinguishable for one in together)
        rejected += min(statistics.holm(p_values)) <= 0.05
        uncorrected += min(p_values) <= 0.05
    assert_share(intervals / trials, trials, 0, 0.05)
    assert intervals == rejected
    if methods > 2:
        assert uncorrected > 0.15 * trials, "what the corrections are for"


# Deviations of what seeds, documents, and both together add to a difference by document.
PARTS = {
    "seeds": (0.3, 0, 0),
    "all": (0.3, 1, 1),
    "documents": (0, 3, 0.3),
    "interaction": (0.03, 0.1, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("seeds", "documents"), [(3, 200), (10, 60)])
def test_intervals_over_seeds_and_documents_cover_the_difference(parts, seeds, documents):
    """The mean over all seeds and documents is 0; the documents are of very unlike lengths."""
    trials = 1500
    of_seed, of_document, of_both = PARTS[parts]
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(trials):
        tokens = np.ceil(rng.lognormal(6, 0.7, documents))
        by_document = rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, of_document, documents)
        by_document = by_document + rng.normal(0, of_both, (seeds, documents))
        sums = by_document * tokens
        over_seeds = average_seeds(list(sums.sum(axis=1) / tokens.sum()))
        both = statistics.over_documents(over_seeds, sums, tokens, *of_one(documents))
        low, high = both.interval()
        covered += low <= 0 <= high
    print(parts, seeds, documents, covered / trials)
    assert_share(covered / trials, trials, 0.93, 0.97)
