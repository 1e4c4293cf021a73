"""Semantic channels: what is chosen, and the loss without it, against the whole forward pass of a changed model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from makers import KNOWN_HEAD_DIM as H
from makers import draw_model as draw
from makers import layer_params as at_layer
from makers import make_run, make_walk, small
from makers import run_layers as layers_of

from prope import model
from prope.analysis import channels, measures, walk
from prope.rope import frequencies, rotation_table


def plain_losses(config, params, tokens):
    """Mean loss of every sequence by the whole forward pass."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = model.hidden_states(config, params, jnp.asarray(tokens), positions)
    logits = np.asarray(model.logits(params, hidden), np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0].mean(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [24, 8192])
def test_removing_a_channel_is_zeroing_its_queries(tmp_path, monkeypatch, at_once):
    config, params = make_run(tmp_path / "run", 0.75)
    monkeypatch.setattr(walk, "_TOKENS", at_once)
    made = make_walk(tmp_path / "run")
    losses = made.losses(made.enter(), 0)
    np.testing.assert_allclose(losses, plain_losses(config.model, params, made.tokens), atol=2e-5)
    for layer, head, pair in ((0, 3, 30), (1, 1, 20)):
        channel = {"layer": layer, "head": head, "pair": pair, "frequency": 0.0}
        channels.ablate(made, [channel], losses)
        query = params["layers"]["attn"]["q_einsum"]["w"]
        zeroed = query.at[layer, head, :, jnp.array([pair, pair + 32])].set(0)
        other = jax.tree.map(lambda leaf: leaf, params)
        other["layers"]["attn"]["q_einsum"]["w"] = zeroed
        apart = plain_losses(config.model, other, made.tokens) - losses
        assert channel["stopped"] is None
        assert channel["removed"]["difference"] == pytest.approx(apart.mean(), abs=1e-5)
        assert channel["removed"]["stderr"] == pytest.approx(apart.std(ddof=1) / 3**0.5, abs=1e-5)
        assert abs(apart.mean()) > 1e-4


def test_dynamic_scaling_goes_by_the_length_that_is_read(tmp_path):
    fields = {"rope_scaling_type": "dynamic", "rope_scaling_factor": 1.0, "original_seq_len": 8}
    config, params = make_run(tmp_path / "run", 1.0, num_layers=1, **fields)
    made = make_walk(tmp_path / "run")
    losses = made.losses(made.enter(), 0)
    np.testing.assert_allclose(losses, plain_losses(config.model, params, made.tokens), atol=2e-5)


@pytest.mark.slow
def test_stopping_the_slowest_turned_pair_is_a_smaller_p(tmp_path):
    config, params = make_run(tmp_path / "run", 0.25, num_heads=1, num_layers=1)
    made = make_walk(tmp_path / "run")
    losses = made.losses(made.enter(), 0)
    channel = {"layer": 0, "head": 0, "pair": 7, "frequency": 1.0}  # the last of 8 that turn
    channels.ablate(made, [channel], losses)
    config.model.rope_percentage = 7 / 32
    apart = plain_losses(config.model, params, made.tokens) - losses
    assert channel["stopped"]["difference"] == pytest.approx(apart.mean(), abs=1e-5)
    assert abs(apart.mean()) > 1e-4


def test_only_the_head_that_is_stopped_changes():
    config = small(num_kv_heads=2, head_dim=H, rope_percentage=1.0)
    params, tokens, positions = draw(config)
    x = model.embed(config, model.embedding(params), tokens)
    table = rotation_table(positions, frequencies(config.head_dim, config.max_wavelength))
    run = lambda turn: model.layer(config, at_layer(params, 0), x, table, turn)[1]  # noqa: E731
    plain, changed = run(None), run(functools.partial(channels.stopped, 2, 3))
    own = np.repeat(np.asarray(plain.rotated_key), 2, axis=2)
    lanes = [3, 19]
    for name, before in (("rotated_query", np.asarray(plain.rotated_query)), ("rotated_key", own)):
        after = np.asarray(getattr(changed, name))
        moved = np.argwhere(np.abs(after - before).max(axis=(0, 1)) > 1e-6)
        assert {tuple(place) for place in moved.tolist()} == {(2, lane) for lane in lanes}, name
    np.testing.assert_array_equal(
        changed.rotated_query[:, :, 2, lanes], plain.query[:, :, 2, lanes]
    )


def test_channels_are_slow_or_unturned_and_the_strongest():
    rng = np.random.default_rng(0)
    query, key = rng.random((4, 16)), rng.random((2, 16))
    query[:, :6] += 2  # the fast ones would be chosen, if they could
    rest = [np.zeros(4)] * 6
    made = measures.Measures(query, key, key, *rest, query, query)
    freqs = frequencies(H)
    for rotated, slow in ((16, 8), (4, 4), (0, 0)):
        found = channels.strongest_channels(
            5, np.where(np.arange(16) < rotated, freqs, 0), made, 100, 3
        )
        strength = query * np.repeat(key, 2, axis=0) / H**0.5
        order = sorted(
            ((strength[n, k], n, k) for n in range(4) for k in range(slow, 16)), reverse=True
        )[:3]
        assert [(c["strength"], c["head"], c["pair"]) for c in found] == order
        for c in found:
            expected = freqs[c["pair"]] if c["pair"] < rotated else 0
            assert c["frequency"] == expected and c["largest_rotation"] == pytest.approx(
                99 * expected
            )
            assert c["key_norm"] == key[c["head"] // 2, c["pair"]]


@pytest.mark.parametrize("at_once", [24, pytest.param(8192, marks=pytest.mark.slow)])
def test_shown_channels_are_those_of_loops_over_all_sequences(tmp_path, monkeypatch, at_once):
    config, params = make_run(tmp_path / "run", 0.75, num_kv_heads=2)
    monkeypatch.setattr(walk, "_TOKENS", at_once)
    made = make_walk(tmp_path / "run")
    positions = np.broadcast_to(np.arange(24), (3, 24))
    seen = [
        captured
        for _, captured in layers_of(
            config.model, params, jnp.asarray(made.tokens), jnp.asarray(positions)
        )
    ]
    chosen, window = [(1, 3, 20), (0, 1, 2), (1, 2, 30)], [0, 5, 6]
    found = channels.show_channels(made, chosen, window)
    for record, (layer, head, pair) in zip(found, chosen, strict=True):
        assert (record["layer"], record["head"], record["pair"]) == (layer, head, pair)
        turn = 1e4 ** (-2 * pair / 64) if pair < 24 else 0
        assert record["frequency"] == pytest.approx(turn)
        pairs = [np.asarray(x, np.float64) for x in seen[layer][:2]]
        q, k = (
            x[:, :, n, pair] + 1j * x[:, :, n, pair + 32]
            for x, n in zip(pairs, (head, head // 2), strict=True)
        )
        np.testing.assert_allclose(
            record["queries"], [[q[0, i].real, q[0, i].imag] for i in window], atol=1e-5
        )
        np.testing.assert_allclose(
            record["keys"], [[k[0, i].real, k[0, i].imag] for i in window], atol=1e-5
        )
        first, others = ({m: [] for m in range(24)} for _ in range(2))
        for b in range(3):
            for i in range(1, 24):
                for j in range(i + 1):
                    part = (q[b, i].conj() * k[b, j] * np.exp(1j * (j - i) * turn)).real / 8
                    (others if j else first)[i - j].append(part)
        np.testing.assert_allclose(
            record["to_first"], [np.mean(first[m]) for m in range(1, 24)], atol=1e-5
        )
        np.testing.assert_allclose(
            record["to_others"], [np.mean(others[m]) for m in range(23)], atol=1e-5
        )
        mean, key, rest = q[:, 1:].mean(), k[:, 0].mean(), k[:, 1:].mean()
        for name, z in (("first_alignment", key), ("others_alignment", rest)):
            assert record[name] == pytest.approx(
                (mean.conj() * z).real / abs(mean) / abs(z), abs=1e-4
            )
        psi = np.angle(mean.conj() * (key - rest))
        rotation = psi + np.pi / 2 if abs(psi) < np.pi / 2 else None
        assert record["breaking_rotation"] == (rotation and pytest.approx(rotation, abs=1e-4))
        distance = rotation / turn if rotation and turn else None
        assert record["breaking_distance"] == (distance and pytest.approx(distance, rel=1e-3))
    assert {record["breaking_rotation"] is None for record in found} == {True, False}
