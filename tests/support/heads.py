"""Analyses, and decoders whose heads are known."""

import math
import types

import jax
import numpy as np
import oracles
import pytest

from prope import parameters
from prope.rope import frequencies
from prope.spec.run import Spec
from prope.workdir.run import open_run
from support.runs import save_run


def analysis_options(**flags) -> types.SimpleNamespace:
    """The flags of prope.analyze."""
    from prope.analysis.analysis import _OPTIONS

    options = dict.fromkeys(("step", "output", *_OPTIONS))
    options |= {"sequences": 3, "channels": 2, "paper": False}
    return types.SimpleNamespace(**options | flags)


def make_walk(workdir, B=3, T=24):
    """A walk through the layers of a run of `make_run`, on random tokens [B, T]."""
    from prope.analysis.walk import Walk

    run = open_run(workdir, 7)
    tokens = np.random.default_rng(0).integers(0, run.spec.model.vocab_size, (B, T))
    return Walk(run, tokens.astype(np.int32))


def group_values(tree, place=(), groups=None) -> dict[str, list]:
    """The values of a JSON object, those of a list together, by their names."""
    groups = {} if groups is None else groups
    if isinstance(tree, list):
        for value in tree:
            group_values(value, place, groups)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            group_values(value, (*place, name), groups)
    elif place[-1] not in ("seconds", "device", "workdir", "output"):
        groups.setdefault(".".join(place), []).append(tree)
    return groups


def compare_analyses(one, two) -> float:
    """The largest difference of two analyses, at most 1e-5, relative to the largest of its array.

    Differences of losses and their standard errors are relative to the loss.
    """
    ones = group_values(one)
    twos = group_values(two)
    assert ones.keys() == twos.keys()
    largest = 0.0
    for name, values in ones.items():
        others = twos[name]
        if not any(isinstance(value, float) for value in values):
            assert values == others, name
            continue
        assert [value is None for value in values] == [value is None for value in others], name
        ours = np.array([value for value in values if value is not None])
        theirs = np.array([value for value in others if value is not None])
        scale = np.abs(ours).max()
        if name.endswith(("difference", "stderr")):
            scale = one["loss"]["loss"]
        apart = np.abs(ours - theirs).max() / max(scale, 1e-30)
        assert np.isfinite(ours).all() and apart <= 1e-5, f"{name}: {apart}"
        largest = max(largest, apart)
    return largest


def assert_channel(record, expected, **bounds):
    """Compares a channel of an analysis with `oracles.channel`."""
    for name in ("to_first", "to_others"):
        np.testing.assert_allclose(record[name], expected[name], **bounds)
    for name in ("first_alignment", "others_alignment", "breaking_rotation"):
        assert record[name] == pytest.approx(expected[name], abs=1e-4), name
    if record["breaking_rotation"] is None or record["frequency"] == 0:
        assert record["breaking_distance"] is None
    else:
        distance = record["breaking_rotation"] / record["frequency"]
        assert record["breaking_distance"] == pytest.approx(distance, rel=1e-4)


# Decoders whose heads are known.
KNOWN_HEAD_DIM = 32


Q = 4 + ord("q")  # the token that the semantic head looks for


def text_with_q() -> str:
    """256 letters; every twentieth is a q."""
    letters = np.random.default_rng(0).choice(list("abcdefgh "), 256)
    letters[5::20] = "q"
    return "".join(letters)


def head_weights(distance, epsilon, length, freqs, embed_dim):
    """Weights (W_q, W_k) [D, H] of a head with weight over 1 - epsilon at a distance: Theorem 5.3.

    Both read lane 0 of the residual stream, which is 1. The key is 1 in every rotated pair, and the
    query turns back by `distance`. A token m off the target is behind by the sum of 1 - cos(g_k m).
    With the least of these as `gap`, all others weigh at most epsilon times as much as the target.
    """
    rotated = freqs != 0
    key = np.concatenate([rotated, np.zeros_like(rotated)]).astype(float)
    off = np.arange(1, max(distance, length - 1 - distance) + 1)
    gap = (1 - np.cos(np.outer(off, freqs))).sum(-1).min()
    temperature = math.sqrt(key.size) * math.log((length - 1) / epsilon) / gap
    turned_back = oracles.rotate(key[None, None, None], [[-distance]], freqs)
    weights = np.zeros((2, embed_dim, key.size))
    weights[0, 0] = temperature * turned_back.ravel()
    weights[1, 0] = key
    return weights


def make_known_heads(workdir, p):
    """A layer with a diagonal, a previous-token, a semantic and an even head.

    Weights are for p = 0.75. The residual stream has a constant in lane 0, and in lane 1 whether
    the token is a q.
    """
    D = 64
    H = KNOWN_HEAD_DIM
    sizes = {
        "model.num_layers": 1,
        "model.embed_dim": D,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": H,
        "model.hidden_dim": 8,
        "model.vocab_size": 260,
        "model.rope_percentage": float(p),
        "data.seq_len": 256,
    }
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((260, D))
    rows[:, :2] = 0
    rows *= (np.sqrt(D - 2) / np.linalg.norm(rows, axis=1))[:, None]
    rows[:, :2] = 1, -1
    rows[Q, 1] = 1
    # So that the norm before attention leaves them as they are.
    np.testing.assert_allclose((rows**2).mean(axis=1), 1)
    freqs = frequencies(H, rope_percentage=0.75)
    query = np.zeros((4, D, H))
    key = np.zeros((4, D, H))
    query[0], key[0] = head_weights(0, 0.1, 257, freqs, D)
    query[1], key[1] = head_weights(1, 0.1, 257, freqs, D)
    still = np.flatnonzero(freqs == 0)[:2]
    query[2, 0, still] = 10.0  # 2 * 100 / sqrt(32) for a q, as much less for another
    key[2, 1, still] = 10.0
    value = rng.standard_normal((4, D, H)) / 8
    out = rng.standard_normal((4, H, D)) / 8
    write_decoder(workdir, sizes, rows, query[None], key[None], value[None], out[None])


def write_decoder(workdir, sizes, rows, query, key, value, out=0):
    """Saves a run with embedding `rows` [V, D] and attention's weights [L, ..]; MLPs are 0."""
    spec = Spec().replace(sizes)
    shapes = parameters.shapes(spec.model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    params["embedder"]["input_embedding"][:] = rows / np.sqrt(rows.shape[1])
    weights = params["layers"]["attn"]
    weights["q_einsum"]["w"][:] = query
    weights["kv_einsum"]["w"][:, 0] = key
    weights["kv_einsum"]["w"][:, 1] = value
    weights["attn_vec_einsum"]["w"][:] = out
    save_run(workdir, spec, params)


def head_kinds(analysis) -> list[str]:
    """What an analysis calls each head."""
    return [head["kind"] for head in analysis["heads"]]
