"""prope.evaluate --window: layers without a window get one, as a control."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.models import ALL_SWITCHES
from support.runs import edit_run, evaluate_run, make_run

from prope import model
from prope.inference.generation import fill_cache, split_layers


def test_a_window_is_that_of_a_model_which_has_it(runs, base):
    """The same weights with windows in all layers, read without the flag."""
    run = runs / "rope"
    plain, cut = evaluate_run(run, window=["16", "64"])
    (own,) = evaluate_run(run)
    assert plain == own, "a window of the whole text hides nothing"
    assert cut["window"] == 16
    assert cut["sinks"] == 0
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


def test_sinks_are_records_of_their_own(runs):
    records = evaluate_run(runs / "rope", window=["8"], sinks=["0", "4", "60"])
    assert [record.get("sinks") for record in records] == [None, 0, 4]
    losses = {record["loss"] for record in records}
    assert len(losses) == 3
    sums = runs / "rope/eval/9"
    folders = {path.parent.name for path in sums.glob("*/*.npz")}
    assert folders == {"window-8-0", "window-8-4"}


@pytest.mark.parametrize("fields", [{}, pytest.param(ALL_SWITCHES, marks=pytest.mark.slow)])
def test_a_cache_keeps_the_sinks(tmp_path, fields):
    """Read in chunks and whole: two programs, with windows far smaller than the text."""
    config, params = make_run(tmp_path / "run", 0.5, **fields)
    config.model.test_window = 20
    config.model.test_sinks = 3
    rng = np.random.default_rng(0)
    drawn = rng.integers(1, config.model.vocab_size, (2, 300))
    tokens = jnp.asarray(drawn)
    lengths = jnp.array([300, 300])
    positions = jnp.arange(300)
    positions = jnp.broadcast_to(positions, tokens.shape)

    def whole(params):
        return model.hidden_states(config.model, params, tokens, positions)[:, -1:]

    expected, movement = measure_rounding(whole, params)
    layers = split_layers(config.model, params)
    last, _ = fill_cache(config.model, layers, tokens, lengths)
    assert_equal_but_rounding(last, expected, movement)
    config.model.test_sinks = 0
    assert abs(whole(params) - expected).max() > 1e-3
