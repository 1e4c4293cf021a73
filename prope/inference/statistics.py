"""Statistics of losses: standard errors, intervals, corrections for many comparisons.

One rule for every comparison of two methods. Runs of one seed share initial weights and batches, so
what is compared are the paired differences, one per seed: their mean, with Student's t interval of
their own standard deviation. No variance is shared between comparisons, because deviations of
methods differ by a factor of ten and more. Of several comparisons the intervals hold together
(Bonferroni), and p-values are adjusted for their number (Holm). Beside Student's t stands an exact
test by sign flips where there are ten seeds or fewer.

Axes: S sources, C documents.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-12  # of float64 losses, and of differences of them
_MOST_FLIPPED = 10  # samples, up to which all their signs are tried


class Difference(NamedTuple):
    """Loss of the first minus that of the second, nats per token: a mean over samples."""

    difference: float
    stderr: float | None  # None: one sample, or several that are equal
    samples: int  # documents or seeds
    comparisons: int = 1  # whose intervals hold together
    values: tuple[float, ...] = ()  # of every seed

    @property
    def reach(self) -> float | None:
        """Half the width of the 95 % interval; None without a standard error."""
        from scipy import stats

        if self.stderr is None:
            return None
        critical = stats.t.ppf(1 - 0.025 / self.comparisons, self.samples - 1)
        return float(critical) * self.stderr

    def interval(self) -> tuple[float, float] | None:
        """Computes the 95 % interval of the difference; None without a standard error."""
        reach = self.reach
        return None if reach is None else (self.difference - reach, self.difference + reach)

    @property
    def distinguishable(self) -> bool:
        """Whether the 95 % interval leaves 0 out."""
        return bool(self.stderr) and abs(self.difference) > self.reach

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of Student's t test, of this difference alone."""
        from scipy import stats

        if not self.stderr:
            return None
        return float(2 * stats.t.sf(abs(self.difference / self.stderr), self.samples - 1))

    @property
    def sign_flip_p_value(self) -> float | None:
        """The exact two-sided p-value of the mean over all signs of the differences by seed.

        None of a single seed, and of more than ten.
        """
        from scipy import stats

        if not 2 <= len(self.values) <= _MOST_FLIPPED:
            return None
        test = stats.permutation_test([self.values], np.mean, permutation_type="samples")
        return float(test.pvalue)


def deviation(values: Sequence[float]) -> float | None:
    """Computes the standard deviation of samples: None of one, 0 where they differ by rounding."""
    if len(values) < 2:
        return None
    spread = statistics.stdev(values)
    return spread if spread > _ROUNDING * max(1.0, *map(abs, values)) else 0.0


def average_seeds(losses: Sequence[float]) -> Difference:
    """Averages independent samples, one per seed, such as paired differences."""
    spread = deviation(losses)
    stderr = spread / len(losses) ** 0.5 if spread else None
    return Difference(statistics.fmean(losses), stderr, len(losses), values=tuple(losses))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values for their number (Holm, 1979): at most level, and the test rejects."""
    p_values = np.asarray(p_values, np.float64)
    order = np.argsort(p_values)
    scaled = p_values[order] * np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted.tolist()


# --- Documents ------------------------------------------------------------------------------------


def mean_and_stderr(
    loss: np.ndarray, tokens: np.ndarray, source: np.ndarray, shares: Sequence[float]
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
      source: [C] indices into `shares`.
      shares: [S] of the predicted tokens.
    """
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
    return mean, float(np.sqrt((C - 1) / C * squares.sum()))
