"""Measures one layer's attention: frequencies it uses, tokens it attends to, bounds of its logits.

All are means over sequences; arrays of T x T exist for a block of queries at a time only.

Axes: B sequences, T length, N query heads, K key/value heads, G = N / K, H head_dim, P = H / 2 pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from prope.model import Captured
from prope.sharding import constrain, shard_mapped

BLOCK = 128  # queries whose weights exist at a time
FROM = 2  # the first query that counts: it, the token before it and the first one are three tokens


class Measures(NamedTuple):
    """Means of one layer over tokens, later over sequences too; of weights, over queries from the third token on."""

    query_norms: (
        jax.Array
    )  # [N, P], 2-norm of the two lanes of every pair, fastest first (Figures 3, 4, 11)
    key_norms: jax.Array  # [K, P]
    value_norms: (
        jax.Array
    )  # [K, P], of lanes that would be pairs: values are not rotated, so this is the control
    diagonal: jax.Array  # [N], weight on the token itself
    previous_token: jax.Array  # [N], weight on the token before
    first_token: jax.Array  # [N], weight on the first token
    entropy: jax.Array  # [N], of the weights, divided by that of equal weights: 0 to 1
    distance: jax.Array  # [N], mean distance of the attended tokens, in tokens
    unturned_overlap: (
        jax.Array
    )  # [N], sum of min(weight, weight without rotation): attention that needs no position
    to_first: (
        jax.Array
    )  # [N, P], contribution of a pair to the logit of the first token, of queries after it
    to_others: (
        jax.Array
    )  # [N, P], its mean contribution to the logits of all visible tokens after the first
    after_token: jax.Array = (
        0  # [N], previous_token, counted where that token is the one of --head_of
    )
    elsewhere: jax.Array = 0  # [N], first_token, counted at the other queries (Figure 7)


class View(NamedTuple):
    """Attention among t chosen tokens of the first sequence, as tables and maps show it."""

    positions: jax.Array  # [t], ascending
    logits: jax.Array  # [N, t, t], before the softmax; unmasked (Figure 9)
    weights: jax.Array  # [N, t, t], of a softmax over all visible tokens (Figures 5, 7, 12, 13)
    query_norms: jax.Array  # [N, t, P], of every pair
    key_norms: jax.Array  # [N, t, P], of the key head that the query head attends to


def logits(query: jax.Array, key: jax.Array) -> jax.Array:
    """Computes the unmasked logits [N, t, S] of queries [t, N, H] and keys [S, K, H]."""
    N, H = query.shape[1:]
    key = jnp.repeat(key, N // key.shape[1], axis=1)
    return jnp.einsum("TNH,SNH->NTS", query * H**-0.5, key, preferred_element_type=jnp.float32)


def weights(query: jax.Array, key: jax.Array, rows: jax.Array) -> jax.Array:
    """Computes causal attention [N, t, S] of queries [t, N, H] at positions `rows` [t] to keys [S, K, H]."""
    visible = jnp.arange(len(key))[None] <= rows[:, None]
    return jax.nn.softmax(jnp.where(visible[None], logits(query, key), -jnp.inf), axis=-1)


@jax.jit
def measure(captured: Captured, after: jax.Array) -> Measures:
    """Measures every sequence, fields [B, ..], of arrays [B, T, ., H], T >= 3; `after` [B, T]: `choices.find_after`."""
    axes = ["BTNH", "BTKH", "BTKH", "BTNH", "BTKH", "BT"]
    results = ["BNH", "BKH", "BKH", *["BN"] * 6, "BNH", "BNH", "BN", "BN"]
    own = shard_mapped(lambda *arrays: jax.lax.map(_measure_sequence, arrays), axes, results)(
        *captured, after
    )
    return Measures(*(constrain(x, "T" * x.ndim) for x in own))  # whole on every device


def _measure_sequence(sequence: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    captured, after = Captured(*sequence[:-1]), sequence[-1]
    T = len(captured.query)
    size = min(BLOCK, T)

    def sum_block(start):
        rows = start + jnp.arange(size)
        at = jnp.minimum(rows, T - 1)  # the last block may run over the end
        rotated = weights(captured.rotated_query[at], captured.rotated_key, at)
        unrotated = weights(captured.query[at], captured.key, at)
        entropy = (
            -jax.scipy.special.xlogy(rotated, rotated).sum(axis=-1)
            / jnp.log(jnp.maximum(at, 1) + 1)[None]
        )
        distance = (rotated * (at[:, None] - jnp.arange(T)[None])[None]).sum(axis=-1)
        query = jnp.arange(size)
        on_tokens = rotated[:, query, at], rotated[:, query, at - 1], rotated[:, :, 0]
        measured = *on_tokens, entropy, distance, jnp.minimum(rotated, unrotated).sum(axis=-1)
        measured += jnp.where(after[at], on_tokens[1], 0), jnp.where(after[at], 0, on_tokens[2])
        counted = ((rows >= FROM) & (rows < T))[None]
        return jnp.stack([jnp.where(counted, values, 0).sum(axis=-1) for values in measured])

    means = jax.lax.map(sum_block, jnp.arange(0, T, size)).sum(axis=0) / (T - FROM)
    norms = (_pair_norms(x).mean(axis=0) for x in (captured.query, captured.key, captured.value))
    return (
        *norms,
        *means[:6],
        *_contributions(captured.rotated_query, captured.rotated_key),
        *means[6:],
    )


def _contributions(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `Measures.to_first` and `to_others` of a sequence's rotated queries and keys."""
    T, N, H = query.shape
    key = jnp.repeat(key, N // key.shape[1], axis=1)
    others = jnp.cumsum(key[1:], axis=0) / jnp.arange(1, T)[:, None, None]
    products = (query[1:] * H**-0.5 * keys for keys in (key[:1], others))
    return tuple(sum(jnp.split(lanes.mean(axis=0), 2, axis=-1)) for lanes in products)


@jax.jit
def view(captured: Captured, positions: jax.Array) -> View:
    """Computes attention among the tokens at `positions` [t] of the first sequence."""
    query, key = captured.rotated_query[0, positions], captured.rotated_key[0]
    to_chosen = weights(query, key, positions)[:, :, positions]
    keys = jnp.repeat(key[positions], query.shape[1] // key.shape[1], axis=1)
    own = View(
        positions,
        logits(query, keys),
        to_chosen,
        *(_pair_norms(x).swapaxes(0, 1) for x in (query, keys)),
    )
    return View(*(constrain(x, "T" * x.ndim) for x in own))


def _pair_norms(x: jax.Array) -> jax.Array:
    """Computes the 2-norms of the pairs of lanes, [..., P]."""
    return jnp.hypot(*jnp.split(x, 2, axis=-1))
