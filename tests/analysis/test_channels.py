"""Semantic channels: which are chosen, and the loss without them, by changed models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.heads import KNOWN_HEAD_DIM, assert_channel, make_walk
from support.models import draw_model, layer_params, run_layers, small
from support.runs import make_run

from prope import model
from prope.analysis import channels, measures, walk
from prope.rope import rotation_table
from prope.stack.layers import layers

H = KNOWN_HEAD_DIM


def plain_losses(config, params, tokens):
    """Mean loss of every sequence by the whole forward pass."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = model.hidden_states(config, params, jnp.asarray(tokens), positions)
    logits = oracles.float64(model.logits(config, params, hidden))
    return oracles.mean_losses(logits, tokens)


def start(workdir, p, **fields):
    """A run, its walk, and losses that are those of the whole forward pass."""
    config, params = make_run(workdir, p, **fields)
    run = make_walk(workdir)
    losses = run.losses(run.enter(), 0)
    np.testing.assert_allclose(losses, plain_losses(config.model, params, run.tokens), atol=2e-5)
    return config.model, params, run, losses


def assert_change(change, apart):
    """Compares a change of the loss with differences by sequence."""
    assert change["difference"] == pytest.approx(apart.mean(), abs=1e-5)
    stderr = apart.std(ddof=1) / len(apart) ** 0.5
    assert change["stderr"] == pytest.approx(stderr, abs=1e-5)
    assert abs(apart.mean()) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [48, 8192])
def test_removing_a_channel_is_zeroing_its_queries(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(walk, "_TOKENS", at_once)
    config, params, run, losses = start(tmp_path / "run", 0.75)
    for layer, head, pair in ((0, 3, 30), (1, 1, 20)):
        channel = {"layer": layer, "head": head, "pair": pair, "frequency": 0.0}
        channels.ablate(run, [channel], losses)
        changed = jax.tree.map(lambda leaf: leaf, params)
        query = changed["layers"]["attn"]["q_einsum"]
        lanes = np.array([pair, pair + 32])
        query["w"] = query["w"].at[layer, head, :, lanes].set(0)
        assert channel["stopped"] is None
        assert_change(channel["removed"], plain_losses(config, changed, run.tokens) - losses)


@pytest.mark.slow
def test_stopping_the_slowest_rotated_pair_is_a_smaller_p(tmp_path):
    config, params, run, losses = start(tmp_path / "run", 0.25, num_heads=1, num_layers=1)
    channel = {"layer": 0, "head": 0, "pair": 7, "frequency": 1.0}  # the last of 8 that rotate
    channels.ablate(run, [channel], losses)
    config.rope_percentage = 7 / 32
    assert_change(channel["stopped"], plain_losses(config, params, run.tokens) - losses)


def test_dynamic_scaling_goes_by_the_length_that_is_read(tmp_path):
    fields = {"rope_scaling_type": "dynamic", "rope_scaling_factor": 1.0, "original_seq_len": 8}
    start(tmp_path / "run", 1.0, num_layers=1, **fields)


def test_only_the_head_that_is_stopped_changes():
    config = small(num_kv_heads=2, head_dim=H, rope_percentage=1.0)
    params, tokens, positions = draw_model(config)
    x = model.embed(config, model.embedding(params), tokens)
    table = rotation_table(positions, oracles.frequencies(H))
    run_layer = functools.partial(
        model.run_layer, config, layer_params(params, 0), x, table, layers(config)[0]
    )
    _, plain = run_layer(None)
    _, changed = run_layer(functools.partial(channels.stopped, 2, 3))
    lanes = [3, 19]
    before = {
        "rotated_query": plain.rotated_query,
        "rotated_key": np.repeat(plain.rotated_key, 2, axis=2),
    }
    for name, array in before.items():
        change = np.abs(getattr(changed, name) - array)
        moved = np.argwhere(change.max(axis=(0, 1)) > 1e-6)
        assert moved.tolist() == [[2, lane] for lane in lanes], name
    stopped = changed.rotated_query[:, :, 2, lanes]
    np.testing.assert_array_equal(stopped, plain.query[:, :, 2, lanes])


def test_channels_may_be_fast_pairs_that_do_not_rotate():
    freqs = oracles.frequencies(H) * (np.arange(16) >= 2)  # as rope_type=reversed
    norms = np.arange(16, 0, -1.0)[None]
    equal = measures.Measures(norms, norms, norms, *[np.zeros(1)] * 6, norms, norms)
    scoring = measures.Scoring(1.0, sliding_window=5)
    found = channels.strongest_channels(0, freqs, equal, scoring, 100, 4)
    assert [channel["pair"] for channel in found] == [0, 1, 8, 9]
    assert found[2]["largest_rotation"] == pytest.approx(4 * freqs[8])


@pytest.mark.parametrize(("rotated", "slow"), [(16, 8), (4, 4), (0, 0)])
def test_channels_are_slow_or_unrotated_and_the_strongest(rotated, slow):
    rng = np.random.default_rng(0)
    query = rng.random((4, 16))
    key = rng.random((2, 16))
    query[:, :6] += 2  # the fast ones would be chosen, if they could
    scores = [np.zeros(4)] * 6
    found = channels.strongest_channels(
        5,
        oracles.frequencies(H, p=rotated / 16),
        measures.Measures(query, key, key, *scores, query, query),
        measures.Scoring(H**-0.5),
        100,
        3,
    )
    strength = query * np.repeat(key, 2, axis=0) * H**-0.5
    strengths = {place: value for place, value in np.ndenumerate(strength) if place[1] >= slow}
    strongest = sorted(strengths, key=strengths.get, reverse=True)[:3]
    assert [(channel["head"], channel["pair"]) for channel in found] == strongest
    assert [channel["strength"] for channel in found] == [strengths[key] for key in strongest]
    for channel in found:
        pair = channel["pair"]
        frequency = oracles.frequencies(H)[pair] if pair < rotated else 0
        assert channel["frequency"] == frequency
        assert channel["largest_rotation"] == pytest.approx(99 * frequency)
        assert channel["key_norm"] == key[channel["head"] // 2, pair]


@pytest.mark.parametrize("at_once", [48, pytest.param(8192, marks=pytest.mark.slow)])
def test_shown_channels_are_those_of_all_sequences(tmp_path, monkeypatch, at_once):
    """Of three sequences of 24 tokens, two at a time: the last batch is filled up."""
    monkeypatch.setattr(walk, "_TOKENS", at_once)
    config, params = make_run(tmp_path / "run", 0.75, num_kv_heads=2)
    run = make_walk(tmp_path / "run")
    positions = jnp.broadcast_to(jnp.arange(24), (3, 24))
    layers = list(run_layers(config.model, params, jnp.asarray(run.tokens), positions))
    chosen = [(1, 3, 20), (0, 1, 2), (1, 2, 30)]
    window = [0, 5, 6]
    records = channels.show_channels(run, chosen, window)
    for record, (layer, head, pair) in zip(records, chosen, strict=True):
        assert (record["layer"], record["head"], record["pair"]) == (layer, head, pair)
        frequency = oracles.frequencies(64, p=0.75)[pair]
        assert record["frequency"] == pytest.approx(frequency)
        _, captured = layers[layer]
        query = oracles.float64(captured.query)[:, :, head, pair::32]
        key = oracles.float64(captured.key)[:, :, head // 2, pair::32]
        np.testing.assert_allclose(record["queries"], query[0, window], atol=1e-5)
        np.testing.assert_allclose(record["keys"], key[0, window], atol=1e-5)
        expected = oracles.channel(query @ [1, 1j], key @ [1, 1j], frequency, 64)
        assert_channel(record, expected, atol=1e-5)
    assert {record["breaking_rotation"] is None for record in records} == {True, False}
