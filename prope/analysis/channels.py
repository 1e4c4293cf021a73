"""Finds semantic channels, single slow pairs of single heads with large norms, and the loss without them.

The paper (sections 6 and D.1; Figures 7, 9, 14) finds that Gemma 7B carries meaning in a few of the slowest pairs,
whose queries and keys are long: they distinguish, say, the first token from all others. Here a channel is a pair of a
query head in the slower half of the frequencies, or one that p-RoPE does not rotate.

Axes: N query heads, K key/value heads, H head_dim, P = H / 2 pairs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from prope.analysis.measures import Measures
from prope.analysis.walk import Walk
from prope.inference.paired import average_seeds
from prope.model import Captured, rotate_qkv
from prope.rope import rotate
from prope.sharding import constrain


def strengths(measures: Measures) -> np.ndarray:
    """Computes what a pair can add to a logit, by Cauchy-Schwarz on mean norms, |q| |k| / sqrt(H): [N, P]."""
    query, key = (
        np.asarray(measures.query_norms, np.float64),
        np.asarray(measures.key_norms, np.float64),
    )
    return query * np.repeat(key, len(query) // len(key), axis=0) / (2 * query.shape[1]) ** 0.5


def strongest_channels(
    layer: int, frequencies: np.ndarray, measures: Measures, seq_len: int, count: int
) -> list[dict]:
    """Finds the strongest `count` channels of a layer with these frequencies [P], strongest first, each with

    layer, head, pair       the pair counts from the fastest, 0
    frequency               radians a token; 0 where the pair is not rotated
    largest_rotation        radians between the two ends of `seq_len` tokens
    strength, share         `strengths` of the pair, and its share of the sum over all pairs of the head
    query_norm, key_norm    `Measures.query_norms` and `key_norms`
    to_first, to_others     contributions to the logit of the first token, and on average to those of the others
    """
    P, strength = len(frequencies), strengths(measures)
    slow = min(P // 2, int(np.count_nonzero(frequencies)))
    key_norms = np.repeat(measures.key_norms, len(strength) // len(measures.key_norms), axis=0)
    share = strength / np.maximum(strength.sum(axis=1, keepdims=True), 1e-30)
    of_pairs = {
        "strength": strength,
        "share": share,
        "query_norm": measures.query_norms,
        "key_norm": key_norms,
    }
    of_pairs |= {"to_first": measures.to_first, "to_others": measures.to_others}
    records = []
    for index in np.argsort(-strength[:, slow:], axis=None)[:count]:
        head, pair = divmod(int(index), P - slow)
        pair += slow
        record = {"layer": layer, "head": head, "pair": pair, "frequency": float(frequencies[pair])}
        record["largest_rotation"] = record["frequency"] * (seq_len - 1)
        records.append(
            record | {name: float(values[head, pair]) for name, values in of_pairs.items()}
        )
    return records


def ablate(walk: Walk, channels: list[dict], losses: np.ndarray) -> None:
    """Adds the loss without it to each of several channels: `stopped`, without its rotation, and `removed`.

    Each is {"loss", "difference", "stderr"}, nats per token: the mean over sequences, its difference from that of the
    model as it is, whose `losses` by sequence are passed, and the standard error of the difference over sequences.
    `stopped` is None where the pair is not rotated.
    """
    x = walk.enter()
    for layer in range(max(channel["layer"] for channel in channels) + 1):
        for channel in (channel for channel in channels if channel["layer"] == layer):
            for kind in (stopped, removed):
                channel[kind.__name__] = None
                if kind is removed or channel["frequency"]:
                    changed = walk.layer(layer, x, Partial(kind, channel["head"], channel["pair"]))
                    after = walk.losses(changed, layer + 1)
                    difference, stderr, _ = average_seeds((after - losses).tolist())
                    channel[kind.__name__] = {
                        "loss": float(after.mean()),
                        "difference": difference,
                        "stderr": stderr,
                    }
        x = walk.layer(layer, x)


def show_channels(walk: Walk, chosen: list[tuple[int, ...]], window: list[int]) -> list[dict]:
    """Describes each (layer, head, pair), as Figure 14 and Appendix D.1: its place, its frequency, and

    queries, keys           [t, 2] before rotation, of the positions `window` in the first sequence
    to_first, to_others     contributions to the logits of the first key, at distances 1 .. T-1, and of the others, at
                            distances 0 .. T-2: means over sequences and queries, of which the first one does not count
    first_alignment, others_alignment   cosine of the mean query with the first key, and with the mean of the others
    breaking_rotation       radians after which the first key's advantage over the mean of the others, at equal
                            distances, is 0; None where there is no advantage at distance 0
    breaking_distance       the same in tokens; None too where the pair does not rotate

    As complex numbers, pairs are multiplied by exp(i m frequency) at position m, and the advantage after a rotation by
    r is Re(conj(q) (k_first - k_others) exp(-i r)) of means, or |..| cos(psi - r): first 0 at r = psi + pi / 2.
    """
    from scipy.signal import correlate  # takes half a second

    x, scale, (B, T) = (
        walk.enter() if chosen else None,
        walk.config.head_dim**-0.5,
        walk.tokens.shape,
    )
    lanes, records = {place: [] for place in chosen}, []

    def look(layer: int, _: int, captured: Captured) -> None:
        for place in chosen:
            if place[0] == layer:
                lanes[place].append(np.asarray(walk.run(_lanes, captured, *place[1:]), np.float64))

    for layer in range(max((layer for layer, *_ in chosen), default=-1) + 1):
        x = walk.layer(layer, x, look=look)
    for (layer, head, pair), batches in lanes.items():
        query, key, _, rotated_query, rotated_key = np.concatenate(batches, axis=1)[:, :B].view(
            complex
        )[..., 0]
        mean, first, others = query[:, 1:].mean(), key[:, 0].mean(), key[:, 1:].mean()
        cosines = [
            float((mean.conj() * k).real / max(abs(mean * k), 1e-30)) for k in (first, others)
        ]
        advantage, frequency = mean.conj() * (first - others), float(walk.frequencies[layer][pair])
        end = float(np.angle(advantage) + np.pi / 2) if advantage.real > 0 else None
        to_first = (rotated_query[:, 1:].conj() * rotated_key[:, :1]).real.mean(axis=0)
        products = np.mean(list(map(correlate, rotated_query[:, 1:], rotated_key[:, 1:])), axis=0)
        to_others = products.real[T - 2 :] / np.arange(T - 1, 0, -1)  # from distance 0 on
        planes = [
            np.stack([z.real, z.imag], axis=1).tolist() for z in (query[0, window], key[0, window])
        ]
        records.append(
            {
                "layer": layer,
                "head": head,
                "pair": pair,
                "frequency": frequency,
                "queries": planes[0],
                "keys": planes[1],
                "first_alignment": cosines[0],
                "others_alignment": cosines[1],
                "to_first": (scale * to_first).tolist(),
                "to_others": (scale * to_others).tolist(),
                "breaking_rotation": end,
                "breaking_distance": end / frequency if end and frequency else None,
            }
        )
    return records


@jax.jit
def _lanes(captured: Captured, head: jax.Array, pair: jax.Array) -> jax.Array:
    """Takes a pair of a query head and its key head, of all arrays: [5, B, T, 2]."""
    N, P = captured.query.shape[2], captured.query.shape[3] // 2
    own = [x[:, :, head * x.shape[2] // N][..., jnp.stack([pair, pair + P])] for x in captured]
    return constrain(jnp.stack(own), "TTTT")  # whole in all processes


def stopped(head, pair, query, key, value, table):
    """Rotates all but one pair of one query head, and its keys: with a head and a pair, `model.layer`'s `rotate_fn`."""
    channel = _mask(query, head, pair)
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    return (
        jnp.where(channel, query, rotate(query, table)),
        jnp.where(channel, key, rotate(key, table)),
        value,
    )


def removed(head, pair, query, key, value, table):
    """Rotates likewise, and one pair of one query head adds nothing to logits."""
    return rotate_qkv(jnp.where(_mask(query, head, pair), 0, query), key, value, table)


def _mask(query, head, pair):
    """Masks the lanes of a head's pair, [1, 1, N, H]."""
    N, H = query.shape[2:]
    return jnp.zeros((1, 1, N, H), bool).at[..., head, jnp.array([pair, pair + H // 2])].set(True)
