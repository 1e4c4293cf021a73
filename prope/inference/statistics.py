"""Statistics of losses: standard errors, intervals, corrections for many comparisons, power.

The runs of a sweep are methods (values of p, encodings) times seeds. Runs of one seed share initial
weights and batches, so a seed is a block: what it adds to all methods drops out of differences. The
variance that remains is pooled over methods, with (M - 1)(n - 1) degrees of freedom instead of the
n - 1 of a single paired difference. It must be about equal in all methods.

Axes: M methods, n or S seeds, C documents, K comparisons, R resamples.
"""

import bisect
import functools
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

CriticalValue = Callable[[float], float]  # of an interval, from degrees of freedom

RESAMPLES = 2000
_MAX_CLUSTERS = 1000  # documents are resampled in at most so many clusters
_MAX_SEEDS = 100_000


class Difference(NamedTuple):
    """Loss of the first minus that of the second, nats per token: a mean over samples."""

    difference: float
    stderr: float | None  # None: one sample
    samples: int  # documents or seeds
    degrees: float | None = None  # of freedom of stderr; None: samples - 1
    critical: float | None = None  # half width of the interval in stderr; None: Student's t

    def interval(self) -> tuple[float, float] | None:
        """Computes the 95 % interval of the difference; None for one sample."""
        from scipy import stats

        if self.stderr is None:
            return None
        critical = self.critical
        if critical is None:
            critical = float(stats.t.ppf(0.975, self.degrees or self.samples - 1))
        reach = critical * self.stderr
        return self.difference - reach, self.difference + reach

    @property
    def distinguishable(self) -> bool:
        """Whether the 95 % interval leaves 0 out."""
        if self.stderr is None:
            return False
        low, high = self.interval()
        return low * high > 0

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of Student's t test, of this difference alone."""
        from scipy import stats

        if self.stderr is None:
            return None
        if self.stderr == 0:
            return float(self.difference == 0)
        degrees = self.degrees or self.samples - 1
        return float(2 * stats.t.sf(abs(self.difference / self.stderr), degrees))


def average_seeds(losses: Sequence[float]) -> Difference:
    """Averages independent samples, one per seed, such as paired differences."""
    count = len(losses)
    stderr = None
    if count > 1:
        stderr = statistics.stdev(losses) / count**0.5
    return Difference(statistics.fmean(losses), stderr, count)


# --- Documents ------------------------------------------------------------------------------------


def mean_and_stderr(
    loss: np.ndarray,
    tokens: np.ndarray,
    source: np.ndarray | None = None,
    shares: Sequence[float] = (1.0,),
) -> tuple[float, float | None]:
    """Computes the loss per token and its standard error from sums by document.

    Of a mixture it is the mean over sources, weighted by their shares; sources without tokens do
    not count.

    The mean of a source is a ratio of two sums that both vary by document. Its standard error is
    the jackknife's (Efron and Tibshirani, An Introduction to the Bootstrap, eq. 11.5): with mean_c
    the mean without document c, sqrt((C - 1) / C * sum_c (mean_c - average of all mean_c)^2). Where
    few documents hold most of the tokens, the usual linear formula is much too small.

    Args:
      loss: [C] nats, summed over the tokens of a document.
      tokens: [C] numbers of tokens. Documents without tokens do not count; with fewer than two, the
        error is None.
      source: [C] indices into `shares`, by default one source.
      shares: [S] of the predicted tokens.
    """
    if source is None:
        source = np.zeros(len(tokens), int)
    weights = []
    means = []
    errors = []
    for s, share in enumerate(shares):
        rows = (source == s) & (tokens > 0)
        if rows.any():
            mean, error = _mean_of_source(loss[rows], tokens[rows])
            weights.append(share)
            means.append(mean)
            errors.append(error)
    weights = np.array(weights) / np.sum(weights)
    mean = float(np.dot(weights, means))
    if None in errors:
        return mean, None
    return mean, float(np.linalg.norm(weights * errors))


def _mean_of_source(loss, tokens) -> tuple[float, float | None]:
    loss = loss.astype(np.float64)
    tokens = tokens.astype(np.float64)
    C = len(tokens)
    mean = float(loss.sum() / tokens.sum())
    if C < 2:
        return mean, None
    left_out = (loss.sum() - loss) / (tokens.sum() - tokens)
    squares = (left_out - left_out.mean()) ** 2
    variance = (C - 1) / C * squares.sum()
    return mean, float(np.sqrt(variance))


def document_variance(
    loss: np.ndarray,
    tokens: np.ndarray,
    source: np.ndarray | None = None,
    shares: Sequence[float] = (1.0,),
) -> tuple[float, float] | None:
    """Bootstraps seeds and documents together: what other documents add to the variance.

    With V the variances of the mean over resamples of seeds, of documents and of both, it is
    2 V_documents + V_seeds - V_both, at least 0. That is V_documents less the variance of the
    interaction, which the variance over seeds has already (Cameron, Gelbach and Miller, Robust
    inference with multiway clustering, 2011). A resample is of one less than there are, which makes
    its variance unbiased (Rao and Wu, Resampling inference with complex survey data, 1988).

    Args:
      loss: [S, C] differences of two methods by seed and document, nats summed over tokens; at
        least two seeds.
      tokens: [C] numbers of tokens.
      source: [C] indices into `shares`, by default one source.
      shares: of the predicted tokens, by source.

    Returns:
      (variance in nats^2 per token^2, its degrees of freedom), or None where a source has fewer
      than two documents. The degrees are one less than the effective number of documents,
      (sum of tokens)^2 / sum of tokens^2.
    """
    if source is None:
        source = np.zeros(len(tokens), int)
    generator = np.random.default_rng(0)
    loss = np.asarray(loss)
    S = len(loss)
    seed_weights = generator.multinomial(S - 1, np.full(S, 1 / S), RESAMPLES) / (S - 1)
    weights = []
    means = []
    documents = 0.0
    for s, share in enumerate(shares):
        rows = (source == s) & (tokens > 0)
        if not rows.any():
            continue
        if rows.sum() < 2:
            return None
        resampled, effective = _resample(loss[:, rows], tokens[rows], seed_weights, generator)
        weights.append(share)
        means.append(resampled)
        documents += effective
    seeds, documents_alone, both = np.average(means, axis=0, weights=weights).var(axis=1)
    variance = max(float(2 * documents_alone + seeds - both), 0.0)
    return variance, max(documents - 1, 1.0)


def _resample(loss, tokens, seed_weights, generator) -> tuple[list[np.ndarray], float]:
    """Computes means over resamples of seeds, documents and both; the effective documents."""
    C = min(len(tokens), _MAX_CLUSTERS)
    cluster = np.arange(len(tokens)) % C
    counts = np.bincount(cluster, tokens)
    sums = np.stack([np.bincount(cluster, row) for row in loss], axis=1)
    drawn = generator.multinomial(C - 1, np.full(C, 1 / C), RESAMPLES)
    by_seed = drawn @ sums / (drawn @ counts)[:, None]  # [R, S]
    of_seeds = seed_weights @ (sums.sum(axis=0) / counts.sum())
    of_documents = by_seed.mean(axis=1)
    of_both = (by_seed * seed_weights).sum(axis=1)
    effective = counts.sum() ** 2 / (counts**2).sum()
    return [of_seeds, of_documents, of_both], float(effective)


# --- Methods and seeds ----------------------------------------------------------------------------


class Pooled(NamedTuple):
    """The variance of a run's loss about what its method and its block explain."""

    variance: float
    degrees: int  # of freedom; 0: no block has two methods, or no method two blocks
    smallest: float  # standard deviations of the methods with the smallest and largest residuals
    largest: float

    @property
    def deviation(self) -> float:
        """The pooled standard deviation."""
        return math.sqrt(self.variance)


def pool_variance(
    losses: Sequence[float], methods: Sequence[Hashable], blocks: Sequence[Hashable]
) -> Pooled:
    """Pools the variance of losses over methods, with blocks (two-way layout, no interaction).

    Args:
      losses: of all runs, nats per token. Not every method needs a run in every block.
      methods: of the runs.
      blocks: of the runs, such as their seeds.
    """
    design = np.hstack([_indicators(methods), _indicators(blocks)])
    losses = np.asarray(losses, np.float64) - np.mean(losses)
    effects, _, rank, _ = np.linalg.lstsq(design, losses)
    squares = (losses - design @ effects) ** 2
    degrees = int(len(losses) - rank)
    if degrees == 0:
        return Pooled(0.0, 0, 0.0, 0.0)
    by_method = squares @ _indicators(methods) / _indicators(methods).sum(axis=0)
    deviations = np.sqrt(by_method * len(losses) / degrees)
    variance = float(squares.sum() / degrees)
    return Pooled(variance, degrees, float(deviations.min()), float(deviations.max()))


def _indicators(labels: Sequence[Hashable]) -> np.ndarray:
    """Makes the columns of a factor: 1 where a run has the level, else 0."""
    levels = {label: level for level, label in enumerate(dict.fromkeys(labels))}
    return np.eye(len(levels))[[levels[label] for label in labels]]


def pooled_difference(
    differences: Sequence[float], pooled: Pooled, critical: CriticalValue
) -> Difference:
    """Averages the differences of two methods by block, with the pooled variance of a run.

    `critical` computes the critical value of the interval from degrees of freedom.
    """
    count = len(differences)
    return Difference(
        statistics.fmean(differences),
        math.sqrt(2 * pooled.variance / count),
        count,
        pooled.degrees,
        critical(pooled.degrees),
    )


def over_documents(
    difference: Difference, variance: float, degrees: float, critical: CriticalValue
) -> Difference:
    """Adds the variance that `document_variance` computes to that over seeds (Satterthwaite).

    The interval is at least as wide as that over seeds.
    """
    seeds = difference.stderr**2
    total = seeds + variance
    if total:
        degrees = total**2 / (seeds**2 / difference.degrees + variance**2 / degrees)
    stderr = math.sqrt(total)
    value = critical(degrees)
    if total:
        value = max(value, difference.critical * difference.stderr / stderr)
    return difference._replace(stderr=stderr, degrees=degrees, critical=value)


def bonferroni_critical(comparisons: int, degrees: float, level: float = 0.95) -> float:
    """Computes the critical value of Student's t for intervals that hold together."""
    from scipy import stats

    return float(stats.t.ppf(1 - (1 - level) / 2 / comparisons, degrees))


@functools.cache
def dunnett_critical(comparisons: int, degrees: float, level: float = 0.95) -> float:
    """Computes the two-sided critical value of Dunnett's test against one baseline.

    It is the c for which P(max |t_k| <= c) = level, for K statistics of Student's t of correlation
    1/2: with z normal and s^2 chi-squared / degrees, the mean of
    (Phi(z + sqrt(2) c s) - Phi(z - sqrt(2) c s))^K, by Gaussian quadrature. One comparison is
    Student's t.
    """
    from scipy import optimize, stats

    single = bonferroni_critical(1, degrees, level)
    if comparisons == 1:
        return single
    s, s_weights = _deviation_nodes(degrees)
    z, z_weights = np.polynomial.hermite_e.hermegauss(64)
    z_weights /= z_weights.sum()

    def excess(critical: float) -> float:
        reach = math.sqrt(2) * critical * s[:, None]
        inside = (stats.norm.cdf(z + reach) - stats.norm.cdf(z - reach)) ** comparisons
        return float(s_weights @ inside @ z_weights) - level

    largest = bonferroni_critical(comparisons, degrees, level)
    return float(optimize.brentq(excess, single, largest))


def _deviation_nodes(degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights of a mean over the estimate of a standard deviation of 1."""
    from scipy import stats

    u, weights = np.polynomial.legendre.leggauss(128)
    return np.sqrt(stats.chi2.ppf((u + 1) / 2, degrees) / degrees), weights / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values for their number (Holm, 1979): at most level, and the test rejects."""
    p_values = np.asarray(p_values, np.float64)
    order = np.argsort(p_values)
    scaled = p_values[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted.tolist()


# --- What a number of seeds can tell --------------------------------------------------------------


def power(
    difference: float, deviation: float, methods: int, seeds: int, level: float = 0.95
) -> float:
    """Computes how probably Dunnett's test sees a true difference from the baseline.

    Args:
      difference: of a method's loss from the baseline's, nats per token.
      deviation: of a run's loss, pooled.
      methods: with the baseline.
      seeds: of every method, at least 2.
      level: of the intervals.
    """
    from scipy import stats

    degrees = (methods - 1) * (seeds - 1)
    critical = dunnett_critical(methods - 1, degrees, level)
    shift = abs(difference) / (deviation * math.sqrt(2 / seeds))
    # The noncentral t distribution; that of SciPy is NaN for some large shifts.
    s, weights = _deviation_nodes(degrees)
    inside = stats.norm.cdf(critical * s - shift) - stats.norm.cdf(-critical * s - shift)
    return float(1 - weights @ inside)


def detectable_difference(
    deviation: float, methods: int, seeds: int, level: float = 0.95, probability: float = 0.8
) -> float:
    """Computes the least true difference from the baseline that is seen with a probability."""
    from scipy import optimize

    def excess(size: float) -> float:
        return power(size, 1, methods, seeds, level) - probability

    degrees = (methods - 1) * (seeds - 1)
    largest = 5 + 3 * dunnett_critical(methods - 1, degrees, level)
    return deviation * float(optimize.brentq(excess, 0, largest))


def seeds_needed(
    difference: float, deviation: float, methods: int, level: float = 0.95, probability: float = 0.8
) -> int:
    """Computes how many seeds of every method a difference takes to be seen with a probability."""

    def probability_of(seeds: int) -> float:
        return power(difference, deviation, methods, seeds, level)

    numbers = range(2, _MAX_SEEDS)
    place = bisect.bisect_left(numbers, probability, key=probability_of)
    return numbers.start + place
