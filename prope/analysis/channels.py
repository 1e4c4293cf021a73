"""Semantic channels: single slow pairs of single heads with high norms, and what hangs on them.

The paper (sections 6 and D.1; Figures 7, 9, 14) finds that Gemma 7B carries meaning in a few of the slowest pairs,
whose queries and keys are long: they tell, say, the first token from all others. Here a channel is a pair of a query
head in the slower half of the frequencies, or one that p-RoPE does not turn.

Axes: N query heads, K key/value heads, H head_dim, P = H / 2 pairs.
"""

import jax.numpy as jnp
import numpy as np

from prope.analysis.measures import Measures
from prope.analysis.walk import Walk
from prope.rope import rotate


def strengths(measures: Measures, head_dim: int) -> np.ndarray:
    """[N, P]: what a pair can add to a logit, by Cauchy-Schwarz on its mean norms: |q| |k| / sqrt(H)."""
    query, key = np.asarray(measures.query_norms, np.float64), np.asarray(measures.key_norms, np.float64)
    return query * np.repeat(key, len(query) // len(key), axis=0) / head_dim**0.5


def channels_of(
    layer: int, turned: int, measures: Measures, frequencies: np.ndarray, seq_len: int, count: int
) -> list[dict]:
    """The strongest `count` of a layer, strongest first, each with

    layer, head, pair       the pair counts from the fastest, 0
    frequency               radians a token; 0 where the pair is not turned
    largest_rotation        radians between the two ends of `seq_len` tokens
    strength, share         `strengths` of the pair, and its part of the sum over all pairs of the head
    query_norm, key_norm    `Measures.query_norms` and `key_norms`
    to_first, to_others     what it adds to the logit of the first token, and on average to that of the others
    """
    P = len(frequencies)
    strength = strengths(measures, 2 * P)
    slow = min(P // 2, turned)
    order = np.argsort(-strength[:, slow:], axis=None)[:count]
    found = []
    for head, pair in zip(*np.unravel_index(order, strength[:, slow:].shape), strict=True):
        head, pair = int(head), int(pair) + slow
        frequency = float(frequencies[pair]) if pair < turned else 0.0
        found.append({
            "layer": layer, "head": head, "pair": pair, "frequency": frequency,
            "largest_rotation": frequency * (seq_len - 1),
            "strength": float(strength[head, pair]),
            "share": float(strength[head, pair] / max(strength[head].sum(), 1e-30)),
            "query_norm": float(measures.query_norms[head, pair]),
            "key_norm": float(measures.key_norms[head * len(measures.key_norms) // len(strength), pair]),
            "to_first": float(measures.to_first[head, pair]),
            "to_others": float(measures.to_others[head, pair]),
        })  # fmt: skip
    return found


def ablate(walk: Walk, channels: list[dict], losses: np.ndarray) -> None:
    """Adds to every channel what the loss becomes without it: its `stopped` and `removed`.

    Each is {"loss", "difference", "stderr"}, nats per token: the mean over sequences, by how much it is above that of
    the model as it is, whose `losses` are given by sequence, and the standard error of the difference over sequences.
    `stopped` is None where the pair is not turned, for then there is nothing to stop.
    """
    x = walk.enter() if channels else None
    for layer in range(max((channel["layer"] for channel in channels), default=-1) + 1):
        for channel in (channel for channel in channels if channel["layer"] == layer):
            place = channel["head"], channel["pair"]
            for kind in (stopped, removed):
                channel[kind.__name__] = None
                if kind is removed or channel["frequency"]:
                    changed = np.concatenate([out for out, _ in walk.layer(layer, x, kind, *place)])
                    found = walk.losses(walk.through(layer + 1, changed))
                    channel[kind.__name__] = _compared(found, losses)
        x = np.concatenate([out for out, _ in walk.layer(layer, x)])


def _compared(losses: np.ndarray, before: np.ndarray) -> dict:
    apart = losses - before
    stderr = float(apart.std(ddof=1) / len(apart) ** 0.5) if len(apart) > 1 else None
    return {"loss": float(losses.mean()), "difference": float(apart.mean()), "stderr": stderr}


def stopped(head, pair):
    """For `model.layer`: rotation as usual, but for one pair of one query head, and of the keys that this head sees."""

    def turn(query, key, value, table):
        chosen, key, value = _apart(query, key, value, head, pair)
        return jnp.where(chosen, query, rotate(query, table)), jnp.where(chosen, key, rotate(key, table)), value

    return turn


def removed(head, pair):
    """For `model.layer`: rotation as usual, but one pair of one query head adds nothing to logits."""

    def turn(query, key, value, table):
        chosen, key, value = _apart(query, key, value, head, pair)
        return jnp.where(chosen, 0, rotate(query, table)), rotate(key, table), value

    return turn


def _apart(query, key, value, head, pair):
    """The lanes of a pair of a head among [N, H]; keys and values, of which every query head now has its own."""
    N, H = query.shape[2:]
    lanes = jnp.arange(H) % (H // 2) == pair
    heads = jnp.arange(N) == head
    own = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (key, value))
    return heads[:, None] & lanes, *own
