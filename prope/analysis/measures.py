"""Numbers of one layer's attention: which frequencies it uses, where it looks, and how near its logits come to bounds.

All are means over sequences; nothing that is as long as T x T outlives a block of queries.

Axes: B sequences, T length, N query heads, K key/value heads, G = N / K, H head_dim, P = H / 2 pairs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prope.model import Captured

BLOCK = 128  # queries whose weights are there at a time
FROM = 2  # the first query that counts: it, the token before it and the first one are three tokens


class Measures(NamedTuple):
    """Of one layer, means over sequences and over tokens; of queries from the third on, where weights are concerned.

    Attributes:
      query_norms: [N, P], 2-norm of the two lanes of every pair, fastest first (Figures 3, 4, 6, 11 of the paper).
      key_norms: [K, P].
      value_norms: [K, P], of the lanes that would be pairs: values are not turned, so this is the control.
      diagonal: [N], weight on the token itself.
      previous_token: [N], weight on the token before.
      first_token: [N], weight on the first token.
      entropy: [N], of the weights, as a part of the greatest there can be, that of equal weights: 0 to 1.
      distance: [N], how many tokens back the weight lies.
      unturned_overlap: [N], sum of min(weight, weight without any rotation): what of the attention needs no position.
      to_first: [N, P], what a pair adds to the logit of the first token, of queries after it.
      to_others: [N, P], what it adds on average to those of all tokens after the first that a query sees.
    """

    query_norms: jax.Array
    key_norms: jax.Array
    value_norms: jax.Array
    diagonal: jax.Array
    previous_token: jax.Array
    first_token: jax.Array
    entropy: jax.Array
    distance: jax.Array
    unturned_overlap: jax.Array
    to_first: jax.Array
    to_others: jax.Array


class Opening(NamedTuple):
    """Of the first tokens, t, of the first sequence: what a table or a map shows.

    Attributes:
      logits: [N, t, t], what the softmax takes; of keys that a query does not see, too.
      weights: [N, t, t].
      query_norms: [N, t].
      key_norms: [N, t], of the key head that the query head looks at.
    """

    logits: jax.Array
    weights: jax.Array
    query_norms: jax.Array
    key_norms: jax.Array


def logits(query: jax.Array, key: jax.Array) -> jax.Array:
    """What the softmax takes, of queries [t, N, H] and keys [S, K, H]: [N, t, S], unmasked."""
    N, H = query.shape[1:]
    key = jnp.repeat(key, N // key.shape[1], axis=1)
    return jnp.einsum("TNH,SNH->NTS", query * H**-0.5, key, preferred_element_type=jnp.float32)


def weights(query: jax.Array, key: jax.Array, rows: jax.Array) -> jax.Array:
    """Attention of the queries [t, N, H] at places `rows` [t] to keys [S, K, H]: [N, t, S]."""
    seen = jnp.arange(len(key)) <= rows[:, None]
    return jax.nn.softmax(jnp.where(seen, logits(query, key), -jnp.inf), axis=-1)


def pair_norms(x: jax.Array) -> jax.Array:
    """2-norms of the pairs of lanes k and k + P of [..., H]: [..., P]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.hypot(first, second)


@jax.jit
def measure(captured: Captured) -> Measures:
    """Measures of a layer, of arrays [B, T, ., H] with T >= 3."""
    of_each = jax.lax.map(_measure_one, captured)
    return jax.tree.map(lambda values: values.mean(axis=0), of_each)


def _measure_one(captured: Captured) -> Measures:
    T = len(captured.query)
    size = min(BLOCK, T)

    def block(start):
        rows = start + jnp.arange(size)
        at = jnp.minimum(rows, T - 1)  # the last block may run over the end
        seen = weights(captured.rotated_query[at], captured.rotated_key, at)
        free = weights(captured.query[at], captured.key, at)
        surprise = -jax.scipy.special.xlogy(seen, seen).sum(axis=-1)
        back = (seen * (at[:, None] - jnp.arange(T))).sum(axis=-1)
        one = seen[:, jnp.arange(size), at], seen[:, jnp.arange(size), at - 1], seen[:, :, 0]
        rest = surprise / jnp.log(jnp.maximum(at, 1) + 1), back, jnp.minimum(seen, free).sum(axis=-1)
        counted = (rows >= FROM) & (rows < T)
        return jnp.stack([jnp.where(counted, values, 0).sum(axis=-1) for values in (*one, *rest)])

    sums = jax.lax.map(block, jnp.arange(0, T, size)).sum(axis=0) / (T - FROM)
    norms = (pair_norms(x).mean(axis=0) for x in (captured.query, captured.key, captured.value))
    return Measures(*norms, *sums, *_contributions(captured.rotated_query, captured.rotated_key))


def _contributions(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`Measures.to_first` and `to_others`, of a sequence's turned queries and keys."""
    T, N, H = query.shape
    key = jnp.repeat(key, N // key.shape[1], axis=1)
    others = jnp.cumsum(key[1:], axis=0) / jnp.arange(1, T)[:, None, None]
    added = (query[1:] * H**-0.5 * of_keys for of_keys in (key[:1], others))
    return tuple(sum(jnp.split(lanes.mean(axis=0), 2, axis=-1)) for lanes in added)


@functools.partial(jax.jit, static_argnames="shown")
def opening(captured: Captured, shown: int) -> Opening:
    """What attention does at the start of the first sequence, as far as `shown` tokens."""
    query, key = (x[0, :shown] for x in (captured.rotated_query, captured.rotated_key))
    N, K = query.shape[1], key.shape[1]
    norms = (jnp.linalg.norm(x, axis=-1).T for x in (query, jnp.repeat(key, N // K, axis=1)))
    return Opening(logits(query, key), weights(query, key, jnp.arange(len(query))), *norms)
