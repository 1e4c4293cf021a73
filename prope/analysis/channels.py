"""Finds semantic channels, single slow pairs of single heads with large norms.

The paper (sections 6 and D.1; Figures 7, 9, 14) finds that Gemma 7B carries meaning in a few of the
slowest pairs, whose queries and keys are long: they distinguish, say, the first token from all
others. Here a channel is a pair of a query head in the slower half of the frequencies, or one that
p-RoPE does not rotate. Its use is the rise of the loss without it.

Axes: N query heads, K key/value heads, H head_dim, P = H / 2 pairs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from prope.analysis.measures import Measures, Scoring
from prope.analysis.walk import Stream, Walk
from prope.inference.statistics import average_seeds
from prope.model import Captured, rotate_qkv
from prope.rope import rotate
from prope.sharding import constrain
from prope.spec.layers import Layer


def strengths(measures: Measures, scoring: Scoring) -> np.ndarray:
    """Computes what a pair can add to a logit, by Cauchy-Schwarz on mean norms: [N, P].

    It is |q| |k| times the scale of logits, 1 / sqrt(H) by default; before a cap.
    """
    query = np.asarray(measures.query_norms, np.float64)
    key = np.asarray(measures.key_norms, np.float64)
    return query * by_query_head(key, query) * scoring.scale


def by_query_head(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Repeats rows of key heads for the query heads that attend to them."""
    return np.repeat(keys, len(queries) // len(keys), axis=0)


def strongest_channels(
    layer: Layer, measures: Measures, scoring: Scoring, seq_len: int, count: int
) -> list[dict]:
    """Finds the strongest `count` channels of a layer, strongest first.

    layer, head, pair       the pair counts from the fastest, 0
    frequency               radians a token; 0 where the pair is not rotated
    largest_rotation        radians between the two ends of `seq_len` tokens, or of the window
    strength, share         `strengths` of the pair, and its share of the sum over the head's pairs
    query_norm, key_norm    `Measures.query_norms` and `key_norms`
    to_first, to_others     contributions to the logit of the first token, and on average to those
                            of the others
    """
    strength = strengths(measures, scoring)
    P = strength.shape[1]
    freqs = by_query_head(layer.frequencies, strength)
    total = strength.sum(axis=1, keepdims=True)
    by_pair = {
        "strength": strength,
        "share": strength / np.maximum(total, 1e-30),
        "query_norm": measures.query_norms,
        "key_norm": by_query_head(measures.key_norms, strength),
        "to_first": measures.to_first,
        "to_others": measures.to_others,
    }
    is_slow = (np.arange(P)[None] >= P // 2) | (freqs == 0)
    order = np.argsort(-np.where(is_slow, strength, -1.0), axis=None, kind="stable")
    records = []
    for index in order[: min(count, is_slow.sum())].tolist():
        head, pair = divmod(index, P)
        record = {"layer": layer.number, "head": head, "pair": pair}
        record["frequency"] = float(freqs[head, pair])
        record["largest_rotation"] = record["frequency"] * (scoring.reach(seq_len) - 1)
        record |= {name: float(values[head, pair]) for name, values in by_pair.items()}
        records.append(record)
    return records


def ablate(walk: Walk, channels: list[dict], losses: np.ndarray) -> None:
    """Adds the losses without its rotation, `stopped`, and without it, `removed`, to each channel.

    Each is {"loss", "difference", "stderr"}, nats per token: the mean over sequences, its
    difference from that of the model as it is, whose `losses` by sequence are passed, and the
    standard error of the difference over sequences. `stopped` is None where the pair is not
    rotated.
    """
    x = walk.enter()
    for layer in range(max(channel["layer"] for channel in channels) + 1):
        for channel in channels:
            if channel["layer"] != layer:
                continue
            channel["stopped"] = None
            if channel["frequency"]:
                channel["stopped"] = _loss_change(walk, x, channel, stopped, losses)
            channel["removed"] = _loss_change(walk, x, channel, removed, losses)
        x, _ = walk.layer(layer, x)


def _loss_change(walk: Walk, x: Stream, channel: dict, rotate_fn, losses: np.ndarray) -> dict:
    """Runs the model from a channel's layer on with a channel changed."""
    changed = Partial(rotate_fn, channel["head"], channel["pair"])
    x, _ = walk.layer(channel["layer"], x, changed)
    changed_losses = walk.losses(x, channel["layer"] + 1)
    difference, stderr, *_ = average_seeds((changed_losses - losses).tolist())
    return {"loss": float(changed_losses.mean()), "difference": difference, "stderr": stderr}


def show_channels(walk: Walk, chosen: list[tuple[int, ...]], window: list[int]) -> list[dict]:
    """Describes each (layer, head, pair), as Figure 14 and Appendix D.1.

    layer, head, pair, frequency, sliding_window
    queries, keys           [t, 2] before rotation, of the positions `window` in the first sequence
    to_first, to_others     contributions to the logits of the first key, at distances 1 .. T-1, and
                            of the others, at distances 0 .. T-2, as far as the window reaches:
                            means over sequences and queries, of which the first one does not count
    first_alignment, others_alignment   cosine of the mean query with the first key, and with the
                            mean of the others
    breaking_rotation       radians after which the first key's advantage over the mean of the
                            others, at equal distances, is 0; None where there is no advantage at
                            distance 0
    breaking_distance       the same in tokens; None too where the pair does not rotate
    """
    if not chosen:
        return []
    x = walk.enter()
    records = {}
    for layer in range(max(layer for layer, *_ in chosen) + 1):
        places = [place for place in chosen if place[0] == layer]

        def on_layer(_, captured, places=places):
            return [walk.run(_lanes, captured, *place[1:]) for place in places]

        x, batches = walk.layer(layer, x, on_layer=on_layer)
        for index, place in enumerate(places):
            lanes = np.concatenate([batch[index] for batch in batches], axis=1)
            lanes = lanes[:, : len(walk.tokens)]
            records[place] = _describe_channel(walk, place, lanes, window)
    return [records[place] for place in chosen]


def _describe_channel(
    walk: Walk, place: tuple[int, ...], lanes: np.ndarray, window: list[int]
) -> dict:
    """Describes a channel from its lanes [5, B, T, 2].

    As complex numbers, pairs are multiplied by exp(i m frequency) at position m, and the advantage
    after a rotation by r is Re(conj(q) (k_first - k_others) exp(-i r)) of means, or
    |..| cos(psi - r): first 0 at r = psi + pi / 2.
    """
    layer, head, pair = place
    N = walk.spec.num_heads
    freqs = walk.layers[layer].frequencies
    frequency = float(freqs[head * len(freqs) // N, pair])
    vectors = lanes.astype(np.float64).view(complex)[..., 0]
    query, key, _, rotated_query, rotated_key = vectors
    mean = query[:, 1:].mean()
    first = key[:, 0].mean()
    others = key[:, 1:].mean()
    advantage = mean.conj() * (first - others)
    rotation = None
    if advantage.real > 0:
        rotation = float(np.angle(advantage) + np.pi / 2)
    scoring = walk.scoring[layer]
    reach = scoring.reach(query.shape[1])
    to_first, to_others = _added_by_distance(rotated_query[:, 1:], rotated_key)
    return {
        "layer": layer,
        "head": head,
        "pair": pair,
        "frequency": frequency,
        "sliding_window": scoring.sliding_window,
        "queries": lanes[0, 0, window].tolist(),
        "keys": lanes[1, 0, window].tolist(),
        "first_alignment": _cosine(mean, first),
        "others_alignment": _cosine(mean, others),
        "to_first": (scoring.scale * to_first)[: reach - 1].tolist(),
        "to_others": (scoring.scale * to_others)[:reach].tolist(),
        "breaking_rotation": rotation,
        "breaking_distance": rotation / frequency if rotation and frequency else None,
    }


def _added_by_distance(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Averages products of rotated queries [B, T - 1] and keys [B, T] by distance, [T - 1] each.

    Returns those with the first key, at distances 1, 2 .., and with the others, at 0, 1 ...
    """
    from scipy.signal import correlate  # takes half a second

    on_first = query.conj() * key[:, :1]
    pairs = zip(query, key[:, 1:], strict=True)
    products = np.mean([correlate(queries, keys) for queries, keys in pairs], axis=0)
    count = query.shape[1]
    counts = np.arange(count, 0, -1)  # at distances 0, 1 ..
    return on_first.real.mean(axis=0), products.real[count - 1 :] / counts


def _cosine(a: complex, b: complex) -> float:
    product = a.conj() * b
    return float(product.real / max(abs(a * b), 1e-30))


@jax.jit
def _lanes(captured: Captured, head: jax.Array, pair: jax.Array) -> jax.Array:
    """Takes a pair of a query head and its key head, of all arrays: [5, B, T, 2]."""
    N, H = captured.query.shape[2:]
    lanes = jnp.stack([pair, pair + H // 2])
    heads = [x[:, :, head * x.shape[2] // N] for x in captured]
    return constrain(jnp.stack(heads)[..., lanes], "TTTT")  # whole in all processes


def stopped(head, pair, query, key, value, table):
    """Rotates all but one pair of a query head and its keys; a `rotate_fn` of `run_layer`."""
    channel = _mask(query, head, pair)
    heads_per_key = query.shape[2] // key.shape[2]
    key = jnp.repeat(key, heads_per_key, axis=2)
    value = jnp.repeat(value, heads_per_key, axis=2)
    query = jnp.where(channel, query, rotate(query, table))
    key = jnp.where(channel, key, rotate(key, table))
    return query, key, value


def removed(head, pair, query, key, value, table):
    """Rotates likewise, and one pair of one query head adds nothing to logits."""
    query = jnp.where(_mask(query, head, pair), 0, query)
    return rotate_qkv(query, key, value, table)


def _mask(query, head, pair):
    """Masks the lanes of a head's pair, [1, 1, N, H]."""
    N, H = query.shape[2:]
    lanes = jnp.array([pair, pair + H // 2])
    mask = jnp.zeros((1, 1, N, H), bool)
    return mask.at[..., head, lanes].set(True)
