"""Statistics of losses: SciPy, published tables, and simulations in which nothing differs."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from prope.inference import statistics
from prope.inference.statistics import dunnett_critical

# Two-sided 5 % points of Dunnett (New tables for multiple comparisons with a control, 1964), by
# degrees of freedom, for 1 to 9 comparisons.
DUNNETT = """
 5  2.57 3.03 3.29 3.48 3.62 3.73 3.82 3.90 3.97
10  2.23 2.57 2.76 2.89 2.99 3.07 3.14 3.19 3.24
20  2.09 2.38 2.54 2.65 2.73 2.80 2.86 2.90 2.95
"""


def draw_losses(methods, seeds, rng, deviation=0.01, spread=0.1) -> np.ndarray:
    """Losses [method, seed] that differ by seed and by chance only."""
    by_seed = rng.normal(2, spread, seeds)
    return by_seed + rng.normal(0, deviation, (methods, seeds))


def pool(losses) -> statistics.Pooled:
    """Pools the variance of losses [method, seed]; NaN: no run."""
    runs = np.argwhere(np.isfinite(losses))
    values = losses[np.isfinite(losses)]
    methods, seeds = runs.T.tolist()
    return statistics.pool_variance(values.tolist(), methods, seeds)


def against_first(losses) -> list[statistics.Difference]:
    """Compares every method with the first."""
    pooled = pool(losses)
    critical = functools.partial(dunnett_critical, len(losses) - 1)
    return [
        statistics.pooled_difference((row - losses[0]).tolist(), pooled, critical)
        for row in losses[1:]
    ]


def test_dunnetts_critical_values_are_those_of_his_table():
    for degrees, *row in np.loadtxt(DUNNETT.strip().splitlines()):
        values = [dunnett_critical(count, degrees) for count in range(1, 10)]
        np.testing.assert_allclose(values, row, atol=0.0051)


def test_without_blocks_intervals_are_those_of_scipys_dunnett():
    losses = np.random.default_rng(0).normal(2, 0.1, (4, 6))
    expected = stats.dunnett(*losses[1:], control=losses[0], random_state=0).confidence_interval()
    pooled = statistics.pool_variance(losses.ravel(), np.arange(4).repeat(6), np.zeros(24))
    critical = functools.partial(dunnett_critical, 3)
    for i, row in enumerate(losses[1:]):
        difference = statistics.pooled_difference(row - losses[0], pooled, critical)
        ends = expected.low[i], expected.high[i]
        assert difference.interval() == pytest.approx(ends, abs=1e-3)


def test_two_methods_are_compared_by_the_paired_t_test():
    losses = draw_losses(2, 5, np.random.default_rng(1))
    (difference,) = against_first(losses)
    expected = stats.ttest_rel(losses[1], losses[0])
    assert difference.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert difference.p_value == pytest.approx(expected.pvalue)


def test_the_pooled_variance_is_that_of_residuals_from_methods_and_seeds():
    losses = draw_losses(4, 3, np.random.default_rng(2))
    residuals = losses - losses.mean(axis=0) - losses.mean(axis=1, keepdims=True) + losses.mean()
    pooled = pool(losses)
    assert pooled.degrees == 6
    assert pooled.variance == pytest.approx((residuals**2).sum() / 6)
    deviations = np.sqrt((residuals**2).sum(axis=1) / 6 * 4)
    assert (pooled.smallest, pooled.largest) == pytest.approx((min(deviations), max(deviations)))
    # A seed with one run, and a method with one run, tell nothing about the variance.
    wider = np.full((5, 4), np.nan)
    wider[:4, :3] = losses
    wider[4, 1] = 7.0
    wider[2, 3] = 9.0
    assert pool(wider)[:2] == pytest.approx(pooled[:2])
    assert pool(losses[:, :1]).degrees == 0


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected when Bonferroni rejects every intersection that has it."""
    p_values = np.array([0.03, 0.001, 0.04, 0.012, 0.9])
    expected = np.zeros(5)
    for size in range(1, 6):
        for subset in map(list, itertools.combinations(range(5), size)):
            of_subset = min(1, size * min(p_values[subset]))
            expected[subset] = np.maximum(expected[subset], of_subset)
    np.testing.assert_allclose(statistics.holm(p_values), expected)


def test_power_is_that_of_the_noncentral_t_distribution():
    degrees = 4 * 2
    critical = dunnett_critical(4, degrees)
    shift = 0.02 / (0.006 * math.sqrt(2 / 3))
    expected = stats.nct.sf(critical, degrees, shift) + stats.nct.cdf(-critical, degrees, shift)
    assert statistics.power(0.02, 0.006, 5, 3) == pytest.approx(expected, abs=1e-4)
    assert statistics.power(0, 0.006, 2, 3) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(("methods", "seeds", "level"), [(2, 2, 0.95), (5, 3, 0.95), (5, 3, 0.975)])
def test_detectable_differences_and_needed_seeds_answer_each_other(methods, seeds, level):
    """And nothing differs in 5 %, or 2.5 %, of what is called distinguishable."""
    difference = statistics.detectable_difference(0.006, methods, seeds, level)
    found = statistics.power(difference, 0.006, methods, seeds, level)
    assert found == pytest.approx(0.8)

    def needed(difference):
        return statistics.seeds_needed(difference, 0.006, methods, level)

    assert needed(difference * 1.001) == seeds
    assert needed(difference * 0.999) == seeds + 1
    false = statistics.power(0, 0.006, 2, seeds, level)
    assert false == pytest.approx(1 - level, abs=1e-4)


def test_documents_alone_vary_as_the_jackknife_finds():
    """Where all seeds find the same differences, they add nothing."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(100, 2000, 50)
    loss = rng.normal(0, 0.1, 50) * tokens
    source = np.repeat([0, 1], 25)
    for labels, shares in ((None, (1.0,)), (source, (0.3, 0.7))):
        variance, degrees = statistics.document_variance([loss] * 3, tokens, labels, shares)
        _, stderr = statistics.mean_and_stderr(loss, tokens, labels, shares)
        assert math.sqrt(variance) == pytest.approx(stderr, rel=0.05)
        assert 30 < degrees < 49
    assert statistics.document_variance([loss[:1]] * 3, tokens[:1]) is None


def test_documents_add_nothing_where_only_seeds_differ():
    tokens = np.random.default_rng(4).integers(100, 2000, 50)
    differences = np.array([[0.1], [0.2], [0.4]])
    variance, degrees = statistics.document_variance(differences * tokens, tokens)
    assert variance == pytest.approx(0, abs=1e-12)
    seeds = statistics.Difference(0.2, 0.01, 3, 8, 2.3)
    both = statistics.over_documents(seeds, variance, degrees, lambda degrees: degrees)
    assert both == pytest.approx((0.2, 0.01, 3, 8, 8))


def test_equal_variances_over_seeds_and_documents_have_degrees_of_both():
    """Satterthwaite: 8 and 8 degrees of equal variances are 16."""
    seeds = statistics.Difference(0.2, 0.01, 3, 8, 2.3)
    both = statistics.over_documents(seeds, 0.01**2, 8, lambda degrees: 2.1)
    assert both == pytest.approx((0.2, 0.01 * 2**0.5, 3, 16, 2.1))
    # More degrees of freedom do not make the interval narrower.
    both = statistics.over_documents(seeds, 0.001**2, 8, lambda degrees: 1.0)
    assert both.interval() == pytest.approx(seeds.interval())


# --- Simulations in which nothing differs ---------------------------------------------------------


def simulate(methods, seeds, trials, truth=0.0, rng_seed=0) -> dict[str, float]:
    """Shares of trials with any false claim: by Dunnett, by Holm, and of the best row alone."""
    rng = np.random.default_rng(rng_seed)
    false = {"dunnett": 0, "holm": 0, "best": 0, "uncorrected": 0}
    for _ in range(trials):
        losses = draw_losses(methods, seeds, rng)
        losses[1:] += truth
        differences = against_first(losses)
        missed = []
        for difference in differences:
            low, high = difference.interval()
            missed.append(not low <= truth <= high)
        best = int(np.argmin(losses[1:].mean(axis=1)))
        p_values = [difference.p_value for difference in differences]
        false["dunnett"] += any(missed)
        false["best"] += missed[best]
        false["holm"] += min(statistics.holm(p_values)) <= 0.05
        false["uncorrected"] += min(p_values) <= 0.05
    return {name: count / trials for name, count in false.items()}


def assert_at_most(share, trials, level=0.05) -> None:
    """Allows three standard errors of the simulation."""
    assert share <= level + 3 * math.sqrt(level * (1 - level) / trials)


def test_false_claims_are_rare_where_nothing_differs():
    shares = simulate(8, 3, 600)
    for name in ("dunnett", "holm", "best"):
        assert_at_most(shares[name], 600)
    assert shares["uncorrected"] > 0.15, "what the corrections are for"


@pytest.mark.slow
@pytest.mark.parametrize(("methods", "seeds"), [(2, 3), (5, 2), (8, 3), (13, 3), (8, 10)])
def test_false_claims_are_rare_for_any_number_of_methods_and_seeds(methods, seeds):
    trials = 8000
    shares = simulate(methods, seeds, trials)
    print(methods, seeds, shares)
    for name in ("dunnett", "holm", "best"):
        assert_at_most(shares[name], trials)
    # Simultaneous coverage of a difference that is not zero.
    shares = simulate(methods, seeds, trials, truth=0.05, rng_seed=1)
    assert 0.93 <= 1 - shares["dunnett"] <= 0.97


# Deviations of what seeds, documents, and both together add to a difference by document.
PARTS = {
    "seeds": (0.3, 0, 0),
    "all": (0.3, 1, 1),
    "documents": (0, 3, 0.3),
    "interaction": (0.03, 0.1, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("seeds", "documents"), [(3, 60), (10, 60), (3, 200)])
def test_intervals_over_seeds_and_documents_cover_the_difference(parts, seeds, documents):
    """The mean over all seeds and documents is 0; the documents are of very unlike lengths."""
    trials = 1500
    methods = 8
    of_seed, of_document, of_both = PARTS[parts]
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(trials):
        tokens = np.ceil(rng.lognormal(6, 0.7, documents))
        by_document = rng.normal(0, of_seed, (methods, seeds, 1))
        by_document = by_document + rng.normal(0, of_document, (methods, 1, documents))
        by_document += rng.normal(0, of_both, (methods, seeds, documents))
        sums = by_document * tokens
        losses = sums.sum(axis=2) / tokens.sum()
        single = functools.partial(dunnett_critical, 1)
        difference = statistics.pooled_difference(losses[1] - losses[0], pool(losses), single)
        added = statistics.document_variance(sums[1] - sums[0], tokens)
        low, high = statistics.over_documents(difference, *added, single).interval()
        covered += low <= 0 <= high
    print(parts, seeds, documents, covered / trials)
    noise = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert 0.93 - noise < covered / trials < 0.97 + noise
