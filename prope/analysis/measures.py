"""Measures one layer's attention: frequencies it uses, tokens it attends to, bounds of its logits.

All are means over sequences; arrays of T x T exist for a block of queries at a time only.

Axes: B sequences, T length, N query heads, K key/value heads, G = N / K, H head_dim, P = H / 2
pairs, t chosen tokens.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from prope.kernels.softcap import softcap
from prope.model import Captured
from prope.sharding import constrain, shard_mapped

BLOCK = 128  # queries whose weights exist at a time
FROM = 2  # the first query that counts: it, the token before it and the first one are three tokens
_OF_FIRST = (2, 7)  # of `_score_queries`: first_token and elsewhere


class Scoring(NamedTuple):
    """How a layer makes weights of queries and keys: the softmax of softcap(scale q.k, cap)."""

    scale: float
    cap: float | None = None
    sliding_window: int | None = None  # keys that a query sees, its own included; None: all before

    def reach(self, length: int) -> int:
        """Returns how many keys a query sees at most, in sequences of `length` tokens."""
        return min(self.sliding_window or length, length)


class Measures(NamedTuple):
    """Means of one layer over tokens, later over sequences too.

    Those of weights are over queries from the third token on. Those of the first token are over
    the queries that see it, which in a layer with a window are the first ones; 0 without any.
    """

    # The 2-norm of the two lanes of every pair, fastest first (Figures 3, 4, 11). Values are not
    # rotated, so theirs, of lanes that would be pairs, is the control.
    query_norms: Array  # [N, P]
    key_norms: Array  # [K, P]
    value_norms: Array  # [K, P]
    # Weights on the token itself, the token before and the first token.
    diagonal: Array  # [N]
    previous_token: Array  # [N]
    first_token: Array  # [N]
    entropy: Array  # [N], of the weights, divided by that of equal weights: 0 to 1
    distance: Array  # [N], mean distance of the attended tokens, in tokens
    # The sum of min(weight, weight without rotation): attention that needs no position.
    overlap_without_rotation: Array  # [N]
    # Contributions of a pair to the logit of the first token, of queries after it, and on average
    # to the logits of all visible tokens after the first; before a cap.
    to_first: Array  # [N, P]
    to_others: Array  # [N, P]
    # previous_token, counted where that token is the one of --head_of, and first_token, counted at
    # the other queries that see it (Figure 7).
    after_token: Array = 0  # [N]
    elsewhere: Array = 0  # [N]


class View(NamedTuple):
    """Attention among t chosen tokens of the first sequence, as tables and maps show it."""

    positions: Array  # [t], ascending
    logits: Array  # [N, t, t], before the softmax, capped; unmasked (Figure 9)
    weights: Array  # [N, t, t], of a softmax over all visible tokens (Figures 5, 7, 12, 13)
    query_norms: Array  # [N, t, P], of every pair
    key_norms: Array  # [N, t, P], of the key head that the query head attends to


def logits(query: Array, key: Array, scoring: Scoring) -> Array:
    """Computes the unmasked logits [N, t, S] of queries [t, N, H] and keys [S, K, H]."""
    scaled = query * scoring.scale
    key = _by_query_head(key, query)
    scores = jnp.einsum("TNH,SNH->NTS", scaled, key, preferred_element_type=jnp.float32)
    return softcap(scores, scoring.cap)


def weights(query: Array, key: Array, rows: Array, scoring: Scoring) -> Array:
    """Computes causal attention [N, t, S] of queries at positions `rows` [t] to all keys."""
    distances = rows[:, None] - jnp.arange(len(key))[None]
    visible = (distances >= 0) & (distances < scoring.reach(len(key)))
    masked = jnp.where(visible[None], logits(query, key, scoring), -jnp.inf)
    return jax.nn.softmax(masked, axis=-1)


@jax.jit(static_argnums=2)
def measure(captured: Captured, after: Array, scoring: Scoring) -> Measures:
    """Measures every sequence; the fields are [B, ...], whole on every device.

    The arrays are [B, T, ., H] with T >= 3; `after` [B, T] is that of `choices.find_after`.
    """
    axes = ["BTNH", "BTKH", "BTKH", "BTNH", "BTKH", "BT"]
    results = ["BNH", "BKH", "BKH", *["BN"] * 6, "BNH", "BNH", "BN", "BN"]
    measure_one = functools.partial(_measure_sequence, scoring)
    sharded = shard_mapped(lambda *arrays: jax.lax.map(measure_one, arrays), axes, results)
    return Measures(*map(_replicate, sharded(*captured, after)))


def _measure_sequence(scoring: Scoring, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    captured = Captured(*arrays[:-1])
    after = arrays[-1]
    T = len(captured.query)
    block_size = min(BLOCK, T)

    def sum_block(start):
        rows = start + jnp.arange(block_size)
        is_counted = ((rows >= FROM) & (rows < T))[None]
        # The last block may run over the end.
        scores = _score_queries(captured, after, jnp.minimum(rows, T - 1), scoring)
        counted = [jnp.where(is_counted, score, 0) for score in scores]
        return jnp.stack([score.sum(axis=-1) for score in counted])

    sums = jax.lax.map(sum_block, jnp.arange(0, T, block_size))
    sums = sums.sum(axis=0)
    # Queries beyond the window add 0 to the scores of the first token.
    see_first = max(scoring.reach(T) - FROM, 1)
    means = [x / (see_first if i in _OF_FIRST else T - FROM) for i, x in enumerate(sums)]
    norms = [_pair_norms(x).mean(axis=0) for x in captured[:3]]
    contributions = _contributions(captured.rotated_query, captured.rotated_key, scoring)
    return *norms, *means[:6], *contributions, *means[6:]


def _score_queries(
    captured: Captured, after: Array, rows: Array, scoring: Scoring
) -> tuple[Array, ...]:
    """Computes the measures of weights for the queries at some positions, each [N, t]."""
    rotated = weights(captured.rotated_query[rows], captured.rotated_key, rows, scoring)
    unrotated = weights(captured.query[rows], captured.key, rows, scoring)
    queries = jnp.arange(len(rows))
    diagonal = rotated[:, queries, rows]
    previous_token = rotated[:, queries, rows - 1]
    first_token = rotated[:, :, 0]
    negative_entropy = jax.scipy.special.xlogy(rotated, rotated).sum(axis=-1)
    seen = jnp.minimum(rows + 1, scoring.reach(len(captured.key)))
    entropy = -negative_entropy / jnp.log(jnp.maximum(seen, 2))[None]
    distances = rows[:, None] - jnp.arange(len(captured.key))[None]
    distance = (rotated * distances[None]).sum(axis=-1)
    overlap = jnp.minimum(rotated, unrotated).sum(axis=-1)
    after_token = jnp.where(after[rows], previous_token, 0)
    elsewhere = jnp.where(after[rows], 0, first_token)
    return (
        diagonal,
        previous_token,
        first_token,
        entropy,
        distance,
        overlap,
        after_token,
        elsewhere,
    )


def _contributions(query: Array, key: Array, scoring: Scoring) -> list[Array]:
    """Computes `Measures.to_first` and `to_others` of a sequence's rotated queries and keys."""
    T = len(key)
    reach = scoring.reach(T)
    key = _by_query_head(key, query)
    sums = jnp.cumsum(key[1:], axis=0)
    if reach < T:
        sums = sums.at[reach:].add(-sums[: T - 1 - reach])
    counts = jnp.minimum(jnp.arange(1, T), reach)[:, None, None]
    scaled = query[1:] * scoring.scale
    to_first = (scaled[: reach - 1] * key[:1]).sum(axis=0) / max(reach - 1, 1)
    to_others = (scaled * (sums / counts)).mean(axis=0)
    return [sum(jnp.split(lanes, 2, axis=-1)) for lanes in (to_first, to_others)]


@jax.jit(static_argnums=2)
def view(captured: Captured, positions: Array, scoring: Scoring) -> View:
    """Computes attention among the tokens at `positions` [t] of the first sequence."""
    query = captured.rotated_query[0, positions]
    all_keys = captured.rotated_key[0]
    key = _by_query_head(all_keys[positions], query)
    chosen = View(
        positions,
        logits(query, key, scoring),
        weights(query, all_keys, positions, scoring)[:, :, positions],
        _pair_norms(query).swapaxes(0, 1),
        _pair_norms(key).swapaxes(0, 1),
    )
    return View(*map(_replicate, chosen))


def _by_query_head(key: Array, query: Array) -> Array:
    """Repeats keys [S, K, H] for the query heads that attend to them: [S, N, H]."""
    heads_per_key = query.shape[1] // key.shape[1]
    return jnp.repeat(key, heads_per_key, axis=1)


def _replicate(x: Array) -> Array:
    return constrain(x, "T" * x.ndim)


def _pair_norms(x: Array) -> Array:
    """Computes the 2-norms of the pairs of lanes, [..., P]."""
    return jnp.hypot(*jnp.split(x, 2, axis=-1))
