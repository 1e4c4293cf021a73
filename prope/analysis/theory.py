"""The paper's statements as vectors and weights that can be tried (Barbero et al., ICLR 2025, sections 3, 5, 6, B.2).

A proof by construction says what a head would have to hold. Here each is made; `analysis/statements.py` tries them all.
All is NumPy in float64, to be looked at, not trained; what is returned can be put into the decoder as it is. Wherever
`frequencies` [P] are asked for, they are those of `prope.rope.frequencies`, for any p.

A query at place i and a key at place j have the logit (R^i q) . (R^j k) / sqrt(H) = q . R^(j-i) k / sqrt(H), where R
turns pair k, lanes k and k + P, by frequency g_k. A key r tokens before the query therefore counts as R^(-r) k.

Axes: T queries, S keys, D embed_dim, H head_dim, P = H / 2 pairs, M distances.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def rotate(vectors: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """R^position times each vector: [..., H], by positions [...] and frequencies [P]; float64 [..., H]."""
    angles = np.asarray(positions, np.float64)[..., None] * np.asarray(frequencies, np.float64)
    first, second = np.split(np.asarray(vectors, np.float64), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def logits(
    queries: np.ndarray, keys: np.ndarray, frequencies: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """(R^i q_i) . (R^j k_j) / sqrt(H) where j <= i, and -inf elsewhere (equation 4, scaled): [T, S].

    Args:
      queries: [T, H], of the last T of the S places.
      keys: [S, H].
      frequencies: [P].
      positions: [S]; 0 .. S-1 where not given.
    """
    T, S = len(queries), len(keys)
    positions = np.arange(S) if positions is None else np.asarray(positions)
    scores = rotate(queries, positions[S - T :], frequencies) @ rotate(keys, positions, frequencies).T
    seen = np.arange(S) <= np.arange(S - T, S)[:, None]
    return np.where(seen, scores / math.sqrt(keys.shape[-1]), -np.inf)


def attention(
    queries: np.ndarray, keys: np.ndarray, frequencies: np.ndarray, positions: np.ndarray | None = None
) -> np.ndarray:
    """The causal softmax of `logits`, whose arguments it has: weights [T, S], rows of sum 1."""
    scores = logits(queries, keys, frequencies, positions)
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def by_distance(queries: np.ndarray, keys: np.ndarray, distances: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """q . R^(-m) k / sqrt(H), the logits of keys that stand m tokens before their queries.

    Args:
      queries: [..., H].
      keys: [..., H], one for each query.
      distances: [M].
      frequencies: [P].

    Returns:
      [..., M].
    """
    q, k = (np.split(np.asarray(vectors, np.float64), 2, axis=-1) for vectors in (queries, keys))
    angles = np.outer(frequencies, distances)
    aligned, across = q[0] * k[0] + q[1] * k[1], q[0] * k[1] - q[1] * k[0]
    return (aligned @ np.cos(angles) + across @ np.sin(angles)) / math.sqrt(2 * len(frequencies))


def key_for_distance(query: np.ndarray, distance: int, frequencies: np.ndarray) -> np.ndarray:
    """Proposition 3.1: the key that, at every place, has its largest weight `distance` tokens before the query.

    It is R^distance q: the place of the key turns it back, and only there every pair of the two is aligned.

    Args:
      query: [H].
      distance: tokens from the key to the query, >= 0.
      frequencies: [P].

    Returns:
      [H].

    Raises:
      ValueError: the query has nothing in a pair that turns, so that all distances are the same to it.
    """
    if not np.any(np.asarray(query).reshape(2, -1)[:, np.asarray(frequencies) != 0]):
        raise ValueError("the query is 0 in every pair that turns: all distances are the same to it")
    return rotate(query, distance, frequencies)


def margin(query: np.ndarray, key: np.ndarray, distance: int, length: int, frequencies: np.ndarray) -> float:
    """How far the logit at `distance` is above that at any other distance below `length`, for one key everywhere."""
    found = by_distance(query, key, np.arange(length), frequencies)
    return float(found[distance] - np.delete(found, distance).max())


def all_ones_curve(distances: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Figure 2 (a): q . R^(-m) k / H for q and k of ones, which is the mean of cos(g_k m) over the pairs: [M]."""
    return np.cos(np.outer(distances, frequencies)).mean(axis=-1)


def gaussian_curve(
    distances: np.ndarray, frequencies: np.ndarray, draws: int = 4000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Proposition 3.2 and Figure 2 (b): logits of independent standard Gaussian queries and keys.

    Their expectation is 0 and their variance 1 at every distance.

    Returns:
      Mean and standard error over the draws, each [M]. All distances see the same draws.
    """
    drawn = np.random.default_rng(seed).standard_normal((2, draws, 2 * len(frequencies)))
    return _mean_and_error(by_distance(*drawn, distances, frequencies))


def repeated_token(
    query_weights: np.ndarray, key_weights: np.ndarray, embeddings: np.ndarray, frequencies: np.ndarray | None = None
) -> tuple[float, float]:
    """Proposition 5.2: what the last token gives itself and the one before, when these two are the same.

    Without rotation equal tokens have equal logits, so the two weights are equal and neither exceeds 1/2: no choice
    of weights is a diagonal head on this sequence, and none a previous-token head.

    Args:
      query_weights: [D, H].
      key_weights: [D, H].
      embeddings: [T, D]; the last is repeated once more.
      frequencies: [P]; 0 everywhere (NoPE) where not given.

    Returns:
      (weight on itself, weight on the token before).
    """
    tokens = np.concatenate([embeddings, embeddings[-1:]])
    still = np.zeros(query_weights.shape[-1] // 2)
    queries, keys = tokens[-1:] @ query_weights, tokens @ key_weights
    weights = attention(queries, keys, still if frequencies is None else frequencies)
    return float(weights[0, -1]), float(weights[0, -2])


class PositionalHead(NamedTuple):
    """Theorem 5.3: one query and one key, the same at every place, which attend to a distance."""

    query: np.ndarray  # [H]; holds the temperature
    key: np.ndarray  # [H]
    temperature: float
    gap: float  # by which the wanted q . k leads all others, at temperature 1 and before 1 / sqrt(H)


def positional_head(distance: int, epsilon: float, length: int, frequencies: np.ndarray) -> PositionalHead:
    """Theorem 5.3: a head that gives the token `distance` before more than 1 - epsilon (0: diagonal, 1: previous).

    The key u is 1 in the first lane of each pair that turns, the query temperature * R^(-distance) u. A key that is m
    places off the wanted one is behind by the sum over pairs of |u_k|^2 (1 - cos(g_k m)); the least of these is the
    gap. With temperature sqrt(H) log((length - 1) / epsilon) / gap, all others together weigh at most epsilon times
    as much as the wanted one, which is left with 1 / (1 + epsilon) > 1 - epsilon.

    Args:
      distance: of the token wanted, 0 <= distance < length.
      epsilon: in (0, 1).
      length: the longest sequence for which this must hold, at least 2. Every place from `distance` on attends.
      frequencies: [P], at least one of them not 0.

    Raises:
      ValueError: a value out of its range, or frequencies that cannot tell the wanted place from another.
    """
    _check(epsilon, length)
    if not 0 <= distance < length:
        raise ValueError(f"distance must be at least 0 and below length={length}; got {distance}")
    turns = np.asarray(frequencies) != 0
    if not turns.any():
        raise ValueError("no pair turns (p = 0): equal tokens get equal weights at all places (Proposition 5.2)")
    off = np.arange(1, max(distance, length - 1 - distance) + 1)
    gap = float((2 * np.sin(np.outer(off, frequencies) / 2) ** 2).sum(axis=-1).min())  # 1 - cos x, exact near 0
    if gap == 0:
        raise ValueError(f"these frequencies do not tell the wanted place from others within {length} tokens")
    key = np.concatenate([turns, np.zeros_like(turns)]).astype(np.float64)
    temperature = math.sqrt(key.size) * math.log((length - 1) / epsilon) / gap
    return PositionalHead(temperature * rotate(key, -distance, frequencies), key, temperature, gap)


def head_weights(
    distance: int, epsilon: float, length: int, frequencies: np.ndarray, embed_dim: int, constant: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Theorem 5.3 as weights (W_q, W_k), each [D, H], that read one feature of the residual stream, `constant`.

    Where x[:, constant] is 1, x @ W_q and x @ W_k are the vectors of `positional_head`, whatever else x holds:
    W_q = temperature * W_k R^distance, in rows. The other arguments and the errors are those of `positional_head`.
    """
    if not 0 <= constant < embed_dim:
        raise ValueError(f"constant must be one of the embed_dim={embed_dim} features; got {constant}")
    head = positional_head(distance, epsilon, length, frequencies)
    query_weights, key_weights = np.zeros((2, embed_dim, head.key.size))
    query_weights[constant], key_weights[constant] = head.query, head.key
    return query_weights, key_weights


class SemanticHead(NamedTuple):
    """A head of one pair (H = 2) that attends to one kind of token, wherever it stands."""

    query: np.ndarray  # [2]; holds the temperature
    target: np.ndarray  # [2], the key of the token that is looked for
    other: np.ndarray  # [2], the key of every other token: 0
    temperature: float
    longest: float  # the longest sequence for which any temperature suffices


def semantic_head(epsilon: float, length: int, frequency: float) -> SemanticHead:
    """The head that Theorem 6.1 is about: more than 1 - epsilon on the target at any place, while a length lasts.

    Query and target are aligned, so that the target's logit falls as cos(frequency * distance): the head works as
    long as the pair turns by less than a quarter, and for every length where frequency is 0.

    Raises:
      ValueError: a value out of its range, or a length beyond `longest`.
    """
    _check(epsilon, length)
    longest = math.ceil(math.pi / 2 / frequency) if frequency else math.inf
    if length > longest:
        raise ValueError(f"a pair of frequency {frequency:g} serves at most {longest} tokens, not {length}")
    temperature = math.sqrt(2) * math.log((length - 1) / epsilon) / math.cos(frequency * (length - 1))
    return SemanticHead(np.array([temperature, 0]), np.array([1.0, 0]), np.zeros(2), temperature, longest)


def defeating_swaps(
    query: np.ndarray, keys: np.ndarray, frequency: float, target: int, epsilon: float
) -> list[tuple[int, int]]:
    """Theorem 6.1: swaps of two tokens each, after which a head of one turning pair has lost its target.

    As in the proof: a target with a positive logit is moved to where it is negative; if it still leads, another token
    is moved to where its own logit is positive. Then the target is no longer the largest, and its weight below 1/2.

    Args:
      query: [2], of the last token.
      keys: [S, 2], by token.
      frequency: of the pair, in (0, 1].
      target: the token to attend to, before the last.
      epsilon: in (0, 1/2]: above, a weight of more than 1 - epsilon need not be the largest (Lemma A.3).

    Returns:
      Pairs of places, to be swapped one after the other (see `swapped`): one, or two, or none where the target's
      weight is not above 1 - epsilon to begin with.

    Raises:
      ValueError: a value out of its range, or a sequence so short that the pair does not turn far enough.
    """
    S, last = len(keys), len(keys) - 1
    if not 0 < frequency <= 1:
        raise ValueError(f"frequency must be in (0, 1], and no swap defeats a pair that does not turn; got {frequency}")
    if not 0 < epsilon <= 0.5:
        raise ValueError(f"epsilon must be in (0, 1/2], where a weight above 1 - epsilon is the largest; got {epsilon}")
    if not 0 <= target < last:
        raise ValueError(f"the target must stand before the last token, {last}, whose query it answers; got {target}")
    if attention(query[None], keys, [frequency])[0, target] <= 1 - epsilon:
        return []
    enough = math.ceil(2 * math.pi / frequency) + 3  # a whole turn, and a place to spare in each half of it
    too_short = f"{S} tokens turn a pair of frequency {frequency:g} too little to defeat this head; {enough} suffice"
    distances = last - np.arange(last)  # of the places that may be swapped; the last one holds the query
    swaps, place = [], target
    turned = by_distance(query, keys[target], distances, [frequency])
    if turned[place] > 0:
        place = int(turned.argmin())
        if turned[place] >= 0:
            raise ValueError(too_short)
        swaps.append((target, place))
    order = swapped(S, swaps)
    scores = logits(query[None], keys[order], [frequency])[0]
    if scores[place] < scores.max():
        return swaps
    movable = np.delete(np.arange(last), place)
    if movable.size:
        other = movable[np.linalg.norm(keys[order[movable]], axis=-1).argmax()]
        turned = by_distance(query, keys[order[other]], distances[movable], [frequency])
        if turned.max() > 0:
            return [*swaps, (int(other), int(movable[turned.argmax()]))]
    raise ValueError(too_short)


def swapped(length: int, swaps: Sequence[tuple[int, int]]) -> np.ndarray:
    """The tokens [S] by place, after swaps of the places in 0 .. length-1: `keys[swapped(S, swaps)]` are their keys."""
    order = np.arange(length)
    for a, b in swaps:
        order[[a, b]] = order[[b, a]]
    return order


def random_positions(length: int, bound: int, rng: np.random.Generator) -> np.ndarray:
    """Appendix B.2 (Ruoss et al., 2023): `length` different positions below `bound`, in their order: [length]."""
    if bound < length:
        raise ValueError(f"there are no {length} different positions below {bound}")
    return np.sort(rng.choice(bound, length, replace=False))


def randomised_curves(
    length: int, bound: int, frequencies: np.ndarray, draws: int = 256, seed: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Figure 8: what `all_ones_curve` and `gaussian_curve` become under random positions.

    Every draw is a new set of positions, and for "gaussian" also a new query and key.

    Returns:
      "ones" and "gaussian": mean and standard error over the draws, each [length], by the number of tokens from the
      key to the query, which is the last token.
    """
    rng, every = np.random.default_rng(seed), np.arange(bound)
    positions = np.stack([random_positions(length, bound, rng) for _ in range(draws)])
    distances = positions[:, -1:] - positions[:, ::-1]
    ones = all_ones_curve(every, frequencies)[distances]
    gaussian = by_distance(*rng.standard_normal((2, draws, 2 * len(frequencies))), every, frequencies)
    return {"ones": _mean_and_error(ones), "gaussian": _mean_and_error(np.take_along_axis(gaussian, distances, axis=1))}


def _check(epsilon: float, length: int) -> None:
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be in (0, 1); got {epsilon}")
    if length < 2:
        raise ValueError(f"length must be at least 2, or there is nothing else to attend to; got {length}")


def _mean_and_error(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first axis."""
    return draws.mean(axis=0), draws.std(axis=0, ddof=1) / math.sqrt(len(draws))
