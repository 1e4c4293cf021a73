"""Bands of pairs in some layers: which pairs of which layers change, against the oracle decoder."""

import re
import shutil

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.heads import make_walk
from support.models import DENSE4, E4, KINDS_OF_LAYERS, draw_model, forward, small
from support.runs import edit_run, evaluate_run, make_run
from support.text import read_lines

from prope import model
from prope.config import default_config
from prope.encodings import layer_frequencies
from prope.errors import UsageError
from prope.inference.asking import AskOptions, answers
from prope.inference.generation import fill_cache, split_layers
from prope.inference.opening import parse_interventions, rescale
from prope.inference.options import last_line
from prope.inference.paired import paired_difference, sums_folder
from prope.runtime.validate import validate

# Layers 2 and 5 are full, with 16 pairs; the others have windows and 8 pairs.
BANDS = "1-6@full+0-2@sliding+5@1-2"
BY_LAYER = [{0, 1, 2}, {0, 1, 2, 5}, {1, 2, 3, 4, 5, 6}, {0, 1, 2}, {0, 1, 2}, {*range(1, 7)}]


def changed(fields, encoding, **others):
    """config.model of a small model with an intervention, as the flags set it."""
    config = default_config()
    config.model = small(**fields, **others)
    rescale(config, *parse_interventions(encoding, config.model))
    if encoding.startswith("interpolate"):
        config.model.rope_scaling_factor = 4.0
    validate(config)
    return config.model


def bands_by_layer(freqs) -> list[np.ndarray]:
    pairs = zip(BY_LAYER, freqs, strict=True)
    return [np.isin(np.arange(len(of_layer)), list(band)) for band, of_layer in pairs]


@pytest.mark.parametrize(
    ("kind", "scan_layers"),
    [("stop", True), ("interpolate", False), ("remove", True), ("remove", False)],
)
def test_pairs_change_in_the_layers_that_are_named(kind, scan_layers):
    """Heads of two widths and two wavelengths; layers of a kind are scanned, and yet differ."""
    config = changed(DENSE4, f"{kind}:{BANDS}", scan_layers=scan_layers)
    plain = small(**DENSE4)
    params, *inputs = draw_model(plain, T=24)
    freqs = oracles.layer_frequencies(plain)
    bands = bands_by_layer(freqs)
    divisor = {"stop": np.inf, "interpolate": 4.0, "remove": 1.0}[kind]
    freqs = [np.where(band, f / divisor, f) for band, f in zip(bands, freqs, strict=True)]
    np.testing.assert_allclose(
        np.concatenate(layer_frequencies(config)), np.concatenate(freqs), rtol=1e-14
    )
    layers_in_turn = iter(bands)

    def rotate(query, *others):
        lanes = np.tile(next(layers_in_turn), 2)
        query, *others = oracles.rotate_qkv(query, *others)
        return np.where(lanes & (kind == "remove"), 0, query), *others

    expected = oracles.decoder(plain, params, *inputs, freqs=freqs, rotate_fn=rotate)
    actual = forward(config, params, *inputs)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
    assert abs(forward(plain, params, *inputs) - expected).max() > 1e-3


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["stop", "remove"])
def test_a_cache_has_the_changed_keys(kind):
    """Tasks are asked with a cache, which the last layers share."""
    config = changed(E4, f"{kind}:0-5@full+2-3@sliding")
    params, tokens, positions = draw_model(config)
    layers = split_layers(config, params)
    lengths = jnp.full(len(tokens), tokens.shape[1])
    last, _ = fill_cache(config, layers, tokens, lengths)
    expected = model.hidden_states(config, params, tokens, positions)[:, -1:]
    np.testing.assert_allclose(last, expected, rtol=0, atol=1e-5)


def test_bands_and_layers_are_parsed():
    config = small(**DENSE4)
    eighths = [f"stop:{first}-{first + 1}@full" for first in range(0, 16, 2)]
    assert parse_interventions("stop@full", config) == eighths
    single = [f"remove:{pair}-{pair}@sliding" for pair in range(8)]
    assert parse_interventions("remove@sliding", config) == single
    text = "stop:9-15@full, interpolate:3@05,stop:0-3@0-5,remove:1@1-2+0@full,stop:8@1-2"
    encodings = ["stop:9-15@full", "interpolate:3-3@05", "stop:0-3", "remove:1-1@1-2+0-0@full"]
    assert parse_interventions(text, config) == [*encodings, "stop:8-8@1-2"]
    assert parse_interventions("stop:3@full", small()) == ["stop:3-3"], "all layers are full"


THERE_ARE = "there are no layers '.*', only 0 to 5, all sliding and full; give a list such as"
REFUSED = [
    ("stop:8@sliding", "'stop:8@sliding': '8@sliding' is not a band of pairs 0 to 7"),
    ("stop:0-16@full", "'0-16@full' is not a band of pairs 0 to 15"),
    ("stop:0@6", THERE_ARE),
    ("stop:0@0-6", THERE_ARE),
    ("stop:0@3-2", THERE_ARE),
    ("remove@local", THERE_ARE),
    ("stop@", THERE_ARE),
    ("stop:1@", THERE_ARE),
    ("stop:1@full_attention", THERE_ARE),
    ("stop@full:1", "'stop@full:1': is not stop, remove, interpolate, alone or with a band"),
    ("stop:1@full+", "'' is not a band of pairs 0 to 15"),
    ("halt@full", "'halt@full': is not stop, remove, interpolate"),
]


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_what_no_layer_has_is_refused(text, says):
    with pytest.raises(UsageError, match=f"^--intervene={re.escape(text)}: .*{says}"):
        parse_interventions(text, small(**DENSE4))


def test_layers_that_share_keys_change_alike():
    says = "scaled_pairs=.*: layer 5 takes the keys of layer 2, which rotate once; give the same"
    for kind in ("stop", "remove", "interpolate"):
        with pytest.raises(UsageError, match=says):
            changed(E4, f"{kind}:0-1@5")
    says = "there are no layers 'sliding', only 0 to 2, all full"
    with pytest.raises(UsageError, match=says):
        parse_interventions("stop@sliding", small())


@pytest.mark.slow
def test_records_have_their_layers_and_are_used_again(runs, base):
    run = runs / "kinds"
    make_run(run, 1.0, **KINDS_OF_LAYERS | {"num_layers": 3, "global_head_dim": 32})
    edit_run(run, base)
    (plain,) = evaluate_run(run)
    flags = {"intervene": "stop:0-3@full,stop:0-3,stop:0-3@1"}
    full, all_layers, second = evaluate_run(run, **flags)
    assert full["encoding"] == "stop:0-3@full"
    assert full["rotated_pairs"] == [24, 24, 12]
    assert second["rotated_pairs"] == [24, 20, 16]
    losses = {record["loss"] for record in (plain, full, all_layers, second)}
    assert len(losses) == 4
    assert evaluate_run(run, **flags) == [full, all_layers, second]
    assert len(read_lines(run / "eval.jsonl")) == 4
    for record in (full, second):
        found = paired_difference(run, run, second_fields={"encoding": record["encoding"]})
        difference = plain["loss"] - record["loss"]
        assert found.difference == pytest.approx(difference, abs=1e-7)
    # The same weights, read with frequencies that a config has.
    same = shutil.copytree(run, runs / "same")
    stop = {"model.rope_scaling_type": "stop", "model.scaled_pairs": ("0-3@full",)}
    edit_run(same, base, **stop)
    (own,) = evaluate_run(same, step="7")
    assert own["loss"] == full["loss"]
    last = last_line([full, second], ("workdir", "loss"))
    assert last["evaluations"][0]["encoding"] == "stop:0-3@full"
    (one_kind,) = evaluate_run(runs / "rope", intervene="stop:0-1@1")
    assert one_kind["rotated_pairs"] == [32, 30]


def test_sums_of_many_bands_have_names_that_file_systems_take(tmp_path):
    bands = [f"{pair}-{pair}@sliding" for pair in range(0, 128, 2)]
    record = {"step": 1, "encoding": f"stop:{'+'.join(bands)}", "factor": 1.0}
    folder = sums_folder(tmp_path, record)
    folder.mkdir(parents=True)
    assert sums_folder(tmp_path, record | {"encoding": "stop:0-3"}).name == "stop-0-3-1.0"


def test_an_analysis_walks_through_layers_without_their_removed_pairs(tmp_path):
    run = tmp_path / "run"
    remove = {"rope_scaling_type": "remove", "scaled_pairs": ("0-20@1",)}
    config, params = make_run(run, 1.0, **remove)
    walk = make_walk(run)
    losses = walk.losses(walk.enter(), 0)
    positions = jnp.broadcast_to(jnp.arange(walk.tokens.shape[1]), walk.tokens.shape)
    logits = forward(config.model, params, jnp.asarray(walk.tokens), positions)
    np.testing.assert_allclose(losses, oracles.mean_losses(logits, walk.tokens), rtol=1e-5)
    config.model.update({"rope_scaling_type": "none", "scaled_pairs": ()})
    whole = forward(config.model, params, jnp.asarray(walk.tokens), positions)
    assert abs(losses - oracles.mean_losses(whole, walk.tokens)).max() > 1e-4


def test_tasks_are_asked_with_changed_layers(tmp_path):
    """Stopping all pairs of the full layers is asking a run without rotation there."""
    kinds = {
        "layer_types": KINDS_OF_LAYERS["layer_types"][1:],
        "sliding_window": 6,
        "local_rope_percentage": 1.0,
    }
    flags = {"tasks": "niah", "trials": 1, "depths": "0.5"}
    make_run(tmp_path / "rope", 1.0, **kinds)
    make_run(tmp_path / "nope", 0.0, **kinds)
    options = AskOptions(str(tmp_path / "rope"), **flags, intervene="stop:0-31@full")
    rope, stopped = answers(options)
    assert [record["logprob"] for record in answers(options)] == [
        rope["logprob"],
        stopped["logprob"],
    ]
    assert len(read_lines(tmp_path / "rope/longcontext.jsonl")) == 2, "asked once"
    (nope,) = answers(AskOptions(str(tmp_path / "nope"), **flags))
    assert stopped["encoding"] == "stop:0-31@full"
    assert stopped["logprob"] == pytest.approx(nope["logprob"], rel=1e-6)
    assert abs(stopped["logprob"] - rope["logprob"]) > 1e-4
