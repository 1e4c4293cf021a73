"""Lists the paper's statements and computes the curves of its Figures 2 and 8, in float64.

The paper is Barbero et al., ICLR 2025. `tests/analysis/test_theory.py` confirms each
statement in prope's attention, with the queries and keys of its proof.

A query and a key m tokens before it have the logit q . R^(-m) k / sqrt(H), where R rotates pair k,
lanes k and k + P, by frequency g_k: `frequencies` [P] of `prope.rope.frequencies`.

Axes: H head_dim, P = H / 2 pairs, M distances.
"""

import math

import numpy as np
from numpy import ndarray as Array

Curve = tuple[Array, Array]  # mean and standard error over draws, by distance


def logits_by_distance(queries: Array, keys: Array, distances: Array, frequencies: Array) -> Array:
    """Computes q . R^(-m) k / sqrt(H) for queries and keys [..., H] and distances m: [..., M]."""
    first_q, second_q = np.split(queries, 2, axis=-1)
    first_k, second_k = np.split(keys, 2, axis=-1)
    aligned = first_q * first_k + second_q * second_k
    across = first_q * second_k - second_q * first_k
    angles = np.outer(frequencies, distances)
    scores = aligned @ np.cos(angles) + across @ np.sin(angles)
    return scores / math.sqrt(2 * len(frequencies))


def all_ones_curve(distances: Array, frequencies: Array) -> Array:
    """Computes q . R^(-m) k / H of ones, the mean of cos(g_k m) over pairs, [M]: Figure 2 (a)."""
    return np.cos(np.outer(distances, frequencies)).mean(axis=-1)


def gaussian_curve(distances: Array, frequencies: Array, draws: int = 4000, seed: int = 0) -> Curve:
    """Averages logits of independent standard Gaussian queries and keys: Figure 2 (b).

    Their expectation is 0 and their variance 1 at every distance; all distances see the same draws.
    """
    rng = np.random.default_rng(seed)
    queries, keys = rng.standard_normal((2, draws, 2 * len(frequencies)))
    return _mean_and_error(logits_by_distance(queries, keys, distances, frequencies))


def randomised_curves(
    length: int, bound: int, frequencies: Array, draws: int = 256, seed: int = 0
) -> dict[str, Curve]:
    """Computes "ones" and "gaussian" for distinct random positions below `bound`: Figure 8.

    Each draw is a sorted set of positions (Ruoss et al., 2023), with a query and key of its own for
    "gaussian". Curves are by the number of tokens from the key to the last token, [length].
    """
    rng = np.random.default_rng(seed)
    sets = [rng.choice(bound, length, replace=False) for _ in range(draws)]
    positions = np.sort(sets)
    distances = positions[:, -1:] - positions[:, ::-1]
    every = np.arange(bound)
    ones = all_ones_curve(every, frequencies)[distances]
    queries, keys = rng.standard_normal((2, draws, 2 * len(frequencies)))
    gaussian = logits_by_distance(queries, keys, every, frequencies)
    gaussian = np.take_along_axis(gaussian, distances, axis=1)
    return {"ones": _mean_and_error(ones), "gaussian": _mean_and_error(gaussian)}


def _mean_and_error(draws: Array) -> Curve:
    """Computes mean and standard error over the first axis."""
    mean = draws.mean(axis=0)
    error = draws.std(axis=0, ddof=1) / math.sqrt(len(draws))
    return mean, error
