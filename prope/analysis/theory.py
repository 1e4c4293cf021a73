"""The paper's statements as vectors and weights that can be tried (Barbero et al., ICLR 2025, sections 3, 5, 6, B.2).

Each proof by construction names the vectors of a head; here they are computed, and `statements.py` tries them all.
Everything is NumPy in float64, for inspection, not training; the returned weights work in the decoder as they are.
`frequencies` [P] are those of `prope.rope.frequencies`, for any p.

A query at position i and a key at position j have the logit (R^i q) . (R^j k) / sqrt(H) = q . R^(j-i) k / sqrt(H),
where R rotates pair k, lanes k and k + P, by frequency g_k. A key m tokens before the query thus counts as R^(-m) k.

Axes: T queries, S keys, D embed_dim, H head_dim, P = H / 2 pairs, M distances.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.special
from numpy import ndarray as Array

Curve = tuple[Array, Array]  # mean and standard error over draws, by distance


def rotate(vectors: Array, positions: Array, frequencies: Array) -> Array:
    """Computes R^position x: float64 [..., H], of vectors [..., H], positions [...] and frequencies [P]."""
    angles = np.asarray(positions, np.float64)[..., None] * np.asarray(frequencies, np.float64)
    first, second = np.split(np.asarray(vectors, np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logits(
    queries: Array, keys: Array, frequencies: Array, positions: Array | None = None
) -> Array:
    """Computes (R^i q_i) . (R^j k_j) / sqrt(H), -inf where j > i (equation 4, scaled): [T, S].

    Queries [T, H] are of the last T of the S positions, keys [S, H] of all; positions [S] are 0 .. S-1 by default.
    """
    T, S = len(queries), len(keys)
    positions = np.arange(S) if positions is None else np.asarray(positions)
    scores = (
        rotate(queries, positions[S - T :], frequencies) @ rotate(keys, positions, frequencies).T
    )
    visible = np.arange(S) <= np.arange(S - T, S)[:, None]
    return np.where(visible, scores / math.sqrt(keys.shape[-1]), -np.inf)


def attention(
    queries: Array, keys: Array, frequencies: Array, positions: Array | None = None
) -> Array:
    """Computes the causal softmax of `logits`, with the same arguments: weights [T, S]."""
    return scipy.special.softmax(logits(queries, keys, frequencies, positions), axis=-1)


def by_distance(queries: Array, keys: Array, distances: Array, frequencies: Array) -> Array:
    """Computes q . R^(-m) k / sqrt(H): [..., M], of queries and keys [..., H], the keys m = distances [M] before."""
    q, k = (np.split(np.asarray(vectors, np.float64), 2, axis=-1) for vectors in (queries, keys))
    angles = np.outer(frequencies, distances)
    aligned, across = q[0] * k[0] + q[1] * k[1], q[0] * k[1] - q[1] * k[0]
    return (aligned @ np.cos(angles) + across @ np.sin(angles)) / math.sqrt(2 * len(frequencies))


def key_for_distance(query: Array, distance: int, frequencies: Array) -> Array:
    """Proposition 3.1: computes the key [H] whose logit is largest `distance` tokens before the query [H].

    It is R^distance q: at that distance, and only there, the key's position rotates every pair back onto the query.
    A query that is 0 in every rotated pair is a ValueError.
    """
    if not np.any(np.asarray(query).reshape(2, -1)[:, np.asarray(frequencies) != 0]):
        raise ValueError(
            "the query is 0 in every pair that rotates: all distances are the same to it"
        )
    return rotate(query, distance, frequencies)


def margin(query: Array, key: Array, distance: int, length: int, frequencies: Array) -> float:
    """Computes how far the logit at `distance` is above that at any other distance below `length`."""
    scores = by_distance(query, key, np.arange(length), frequencies)
    return float(scores[distance] - np.delete(scores, distance).max())


def all_ones_curve(distances: Array, frequencies: Array) -> Array:
    """Figure 2 (a): computes q . R^(-m) k / H for q and k of ones, the mean of cos(g_k m) over pairs: [M]."""
    return np.cos(np.outer(distances, frequencies)).mean(axis=-1)


def gaussian_curve(distances: Array, frequencies: Array, draws: int = 4000, seed: int = 0) -> Curve:
    """Proposition 3.2, Figure 2 (b): averages logits of independent standard Gaussian queries and keys.

    Their expectation is 0 and their variance 1 at every distance; all distances see the same draws.
    """
    vectors = np.random.default_rng(seed).standard_normal((2, draws, 2 * len(frequencies)))
    return _mean_and_error(by_distance(*vectors, distances, frequencies))


def repeated_token(
    query_weights: Array, key_weights: Array, embeddings: Array, frequencies: Array | None = None
) -> tuple[float, float]:
    """Proposition 5.2: computes the weights of the last token on itself and on an equal token before it.

    Without rotation equal tokens have equal logits, so the two weights are equal and neither exceeds 1/2: no choice
    of weights [D, H] is a diagonal head on this sequence, and none a previous-token head. The last of the embeddings
    [T, D] is repeated once more; frequencies are 0 (NoPE) by default.
    """
    tokens = np.concatenate([embeddings, embeddings[-1:]])
    frequencies = np.zeros(query_weights.shape[-1] // 2) if frequencies is None else frequencies
    weights = attention(tokens[-1:] @ query_weights, tokens @ key_weights, frequencies)
    return float(weights[0, -1]), float(weights[0, -2])


class PositionalHead(NamedTuple):
    """Theorem 5.3: one query and one key, the same at every position, which attend to a distance."""

    query: Array  # [H]; includes the temperature
    key: Array  # [H]
    temperature: float
    gap: float  # by which the target's q . k leads all others, at temperature 1 and before 1 / sqrt(H)


def positional_head(
    distance: int, epsilon: float, length: int, frequencies: Array
) -> PositionalHead:
    """Theorem 5.3: builds a head with weight over 1 - epsilon `distance` tokens back (0: diagonal, 1: previous).

    The key u is 1 in the first lane of each rotated pair, the query temperature * R^(-distance) u. A key m positions
    off the target is behind by the sum over pairs of |u_k|^2 (1 - cos(g_k m)); the least of these is the gap. With
    temperature sqrt(H) log((length - 1) / epsilon) / gap, all others together weigh at most epsilon times as much as
    the target, which is left with 1 / (1 + epsilon) > 1 - epsilon.

    It holds in sequences of up to `length` tokens, for queries from `distance` on. Values out of their range, and
    frequencies that cannot tell the target from another position, are a ValueError.
    """
    _check(epsilon, length)
    if not 0 <= distance < length:
        raise ValueError(f"distance must be at least 0 and below length={length}; got {distance}")
    rotated = np.asarray(frequencies) != 0
    if not rotated.any():
        raise ValueError(
            "no pair rotates (p = 0): equal tokens get equal weights at all positions (Proposition 5.2)"
        )
    off = np.arange(1, max(distance, length - 1 - distance) + 1)
    gap = float(
        (2 * np.sin(np.outer(off, frequencies) / 2) ** 2).sum(axis=-1).min()
    )  # 1 - cos x, exact near 0
    if gap == 0:
        raise ValueError(
            f"these frequencies do not tell the target from other positions within {length} tokens"
        )
    key = np.concatenate([rotated, np.zeros_like(rotated)]).astype(np.float64)
    temperature = math.sqrt(key.size) * math.log((length - 1) / epsilon) / gap
    return PositionalHead(temperature * rotate(key, -distance, frequencies), key, temperature, gap)


def head_weights(
    distance: int,
    epsilon: float,
    length: int,
    frequencies: Array,
    embed_dim: int,
    constant: int = 0,
) -> tuple[Array, Array]:
    """Theorem 5.3 as weights: builds (W_q, W_k), each [D, H], of a head that attends to a distance.

    Where feature `constant` of the residual stream x is 1, x @ W_q and x @ W_k are the vectors of `positional_head`,
    whatever else x holds: W_q = temperature * W_k R^distance, in rows.
    """
    if not 0 <= constant < embed_dim:
        raise ValueError(
            f"constant must be one of the embed_dim={embed_dim} features; got {constant}"
        )
    head = positional_head(distance, epsilon, length, frequencies)
    query_weights, key_weights = np.zeros((2, embed_dim, head.key.size))
    query_weights[constant], key_weights[constant] = head.query, head.key
    return query_weights, key_weights


class SemanticHead(NamedTuple):
    """A head of one pair (H = 2) that attends to one kind of token, wherever it stands."""

    query: Array  # [2]; includes the temperature
    target: Array  # [2], the key of the target token
    other: Array  # [2], the key of every other token: 0
    longest: float  # the longest sequence for which any temperature suffices


def semantic_head(epsilon: float, length: int, frequency: float) -> SemanticHead:
    """Theorem 6.1: builds a head with weight over 1 - epsilon on its target at any position below `length`.

    Query and target are aligned, so that the target's logit falls as cos(frequency * distance): the head works while
    the pair rotates by less than a quarter turn, and for every length where frequency is 0. Raises a ValueError for a
    length beyond `longest`.
    """
    _check(epsilon, length)
    longest = math.ceil(math.pi / 2 / frequency) if frequency else math.inf
    if length > longest:
        raise ValueError(
            f"a pair of frequency {frequency:g} serves at most {longest} tokens, not {length}"
        )
    temperature = (
        math.sqrt(2) * math.log((length - 1) / epsilon) / math.cos(frequency * (length - 1))
    )
    return SemanticHead(np.array([temperature, 0]), np.array([1.0, 0]), np.zeros(2), longest)


def defeating_swaps(
    query: Array, keys: Array, frequency: float, target: int, epsilon: float
) -> list[tuple[int, int]]:
    """Theorem 6.1: finds one or two swaps of tokens after which a head of one rotated pair loses its target.

    As in the proof: a target with a positive logit is moved to where it is negative; if it still leads, another token
    is moved to where its own logit is positive. Then the target is no longer the largest, and its weight below 1/2.

    Takes the query [2] of the last token, the keys [S, 2] of all, and the position of the target. Returns pairs of
    positions to swap in this order (see `swapped`); none if the target's weight is not above 1 - epsilon. A sequence so
    short that the pair does not rotate far enough, and values out of their range, are a ValueError; with an epsilon
    above 1/2 a weight of more than 1 - epsilon need not be the largest (Lemma A.3).
    """
    S, last = len(keys), len(keys) - 1
    if not 0 < frequency <= 1:
        raise ValueError(
            f"frequency must be in (0, 1], and no swap defeats an unrotated pair; got {frequency}"
        )
    if not 0 < epsilon <= 0.5:
        raise ValueError(
            f"epsilon must be in (0, 1/2], where a weight above 1 - epsilon is the largest; got {epsilon}"
        )
    if not 0 <= target < last:
        raise ValueError(
            f"the target must stand before the last token, {last}, whose query it answers; got {target}"
        )
    if attention(query[None], keys, [frequency])[0, target] <= 1 - epsilon:
        return []
    enough = (
        math.ceil(2 * math.pi / frequency) + 3
    )  # a whole turn, and a position to spare in each half of it
    too_short = f"{S} tokens rotate a pair of frequency {frequency:g} too little to defeat this head; {enough} suffice"
    distances = last - np.arange(
        last
    )  # of the positions that may be swapped; the last one holds the query
    swaps, position = [], target
    scores = by_distance(query, keys[target], distances, [frequency])
    if scores[position] > 0:
        position = int(scores.argmin())
        if scores[position] >= 0:
            raise ValueError(too_short)
        swaps.append((target, position))
    order = swapped(S, swaps)
    scores = logits(query[None], keys[order], [frequency])[0]
    if scores[position] < scores.max():
        return swaps
    movable = np.delete(np.arange(last), position)
    if movable.size:
        other = movable[np.linalg.norm(keys[order[movable]], axis=-1).argmax()]
        scores = by_distance(query, keys[order[other]], distances[movable], [frequency])
        if scores.max() > 0:
            return [*swaps, (int(other), int(movable[scores.argmax()]))]
    raise ValueError(too_short)


def swapped(length: int, swaps: list[tuple[int, int]]) -> Array:
    """Computes the order of tokens [S] after swaps of positions: `keys[swapped(S, swaps)]` are their keys."""
    order = np.arange(length)
    for a, b in swaps:
        order[[a, b]] = order[[b, a]]
    return order


def random_positions(length: int, bound: int, rng: np.random.Generator) -> Array:
    """Appendix B.2 (Ruoss et al., 2023): draws distinct sorted positions below `bound`: [length]."""
    if bound < length:
        raise ValueError(f"there are no {length} different positions below {bound}")
    return np.sort(rng.choice(bound, length, replace=False))


def randomised_curves(
    length: int, bound: int, frequencies: Array, draws: int = 256, seed: int = 0
) -> dict[str, Curve]:
    """Figure 8: computes `all_ones_curve` and `gaussian_curve` under random positions below `bound`.

    Every draw is a new set of positions, and for "gaussian" also a new query and key. The curves "ones" and "gaussian"
    are by the number of tokens from the key to the last token, [length].
    """
    rng, every = np.random.default_rng(seed), np.arange(bound)
    positions = np.stack([random_positions(length, bound, rng) for _ in range(draws)])
    distances = positions[:, -1:] - positions[:, ::-1]
    ones = all_ones_curve(every, frequencies)[distances]
    gaussian = by_distance(
        *rng.standard_normal((2, draws, 2 * len(frequencies))), every, frequencies
    )
    return {
        "ones": _mean_and_error(ones),
        "gaussian": _mean_and_error(np.take_along_axis(gaussian, distances, axis=1)),
    }


def _check(epsilon: float, length: int) -> None:
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be in (0, 1); got {epsilon}")
    if length < 2:
        raise ValueError(
            f"length must be at least 2, or there is nothing else to attend to; got {length}"
        )


def _mean_and_error(draws: Array) -> Curve:
    """Computes mean and standard error over the first axis."""
    return draws.mean(axis=0), draws.std(axis=0, ddof=1) / math.sqrt(len(draws))
