"""prope.evaluate --window: layers without a window get one, as a control."""

import dataclasses

import jax.numpy as jnp
import pytest
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.models import ALL_SWITCHES, E4, draw_model, small
from support.runs import edit_run, evaluate_run

from prope import model
from prope.inference import generation
from prope.inference.generation import fill_cache, split_layers


def test_a_window_is_that_of_a_model_which_has_it(runs, base):
    """The same weights with windows in all layers, read without the flag."""
    run = runs / "rope"
    plain, cut = evaluate_run(run, window=["16", "64"])
    (own,) = evaluate_run(run)
    assert plain == own, "a window of the whole text hides nothing"
    assert (cut["window"], cut["sinks"]) == (16, 0)
    assert evaluate_run(run, window=["16"]) == [own, cut], "computed once"
    windows = {"model.layer_types": ("sliding_attention",), "model.sliding_window": 16}
    edit_run(run, base, **windows)
    # The weights of step 9 before.
    (expected,) = evaluate_run(run, step="7")
    assert cut["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert cut["loss"] != own["loss"]
    (unchanged,) = evaluate_run(run, step="7", window=["8"])
    assert unchanged["loss"] == expected["loss"]
    assert "window" not in unchanged


def test_sinks_are_records_of_their_own_beside_another_encoding_too(runs):
    _, plain = evaluate_run(runs / "rope", window=["8"])
    flags = {"encoding": "linear", "factor": 2.0}
    records = evaluate_run(runs / "rope", window=["8"], sinks=["0", "4", "60"], **flags)
    assert [record.get("sinks") for record in records] == [None, 0, 4]
    losses = {record["loss"] for record in records}
    assert len(losses | {plain["loss"]}) == 4
    folders = {path.parent.name for path in (runs / "rope/eval/9/linear-2.0").glob("*/*.npz")}
    assert folders == {"window-8-0", "window-8-4"}


SINKS = {"test_window": 20, "test_sinks": 3}
REMOVED = {"rope_scaling_type": "remove", "scaled_pairs": ("0-5@full", "2-3@sliding")}


@pytest.mark.parametrize(
    ("fields", "changed", "first"),
    [
        ({}, SINKS, 0),
        pytest.param(ALL_SWITCHES, SINKS, 300, marks=pytest.mark.slow),
        pytest.param(E4, REMOVED, 0, marks=pytest.mark.slow),  # whose last layers share keys
    ],
)
def test_a_cache_has_what_is_changed(monkeypatch, fields, changed, first):
    """Read in three chunks, or in one, and without a cache: windows are smaller than the text."""
    monkeypatch.setattr(generation, "_CHUNK", 50)
    monkeypatch.setattr(generation, "_FIRST_CHUNK", {"cpu": first})
    spec = small(**fields)
    params, tokens, positions = draw_model(spec, T=150)

    def whole(params):
        return model.hidden_states(spec, params, tokens, positions)[:, -1:]

    plain = whole(params)
    spec = dataclasses.replace(spec, **changed)
    expected, movement = measure_rounding(whole, params)
    lengths = jnp.full(len(tokens), tokens.shape[1])
    last, _ = fill_cache(spec, split_layers(spec, params), tokens, lengths)
    assert_equal_but_rounding(last, expected, movement)
    assert abs(plain - expected).max() > 1e-3
