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
