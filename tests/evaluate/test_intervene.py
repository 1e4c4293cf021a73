"""Bands of pairs that are stopped, removed or interpolated, against models that are the same."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
from scipy import stats
from support.runs import edit_run, evaluate_run, save_checkpoints
from support.text import read_lines

from prope import model
from prope.config import default_config, from_dict
from prope.encodings import (
    INTERVENTIONS,
    LOGIT_SCALES,
    SCALINGS,
    in_band,
    layer_frequencies,
    logit_scale,
)
from prope.errors import UsageError
from prope.evaluate import _log_result
from prope.hf.rotation import write_rotations
from prope.inference.evaluation import LossOptions, evaluations
from prope.inference.opening import configs_by_length, parse_interventions
from prope.inference.options import ENCODINGS, Options, last_line
from prope.inference.paired import paired_difference
from prope.loss import token_losses
from prope.runtime.validate import validate
from prope.sweep import interventions
from prope.sweep.runs import Run
from prope.workdir.records import find_evaluation
from prope.workdir.run import open_run

P = 32  # pairs of the runs


def loss_of(workdir, intervene=None, **flags) -> float:
    (record,) = evaluate_run(workdir, intervene=intervene, **flags)
    return record["loss"]


def test_all_pairs_stopped_are_nope_and_removed_are_the_mean_of_all_values(runs):
    nope = loss_of(runs / "nope")
    stopped = loss_of(runs / "rope", f"stop:0-{P - 1}")
    assert stopped == pytest.approx(nope, rel=1e-6) != loss_of(runs / "rope")
    # Without logits it does not matter what rotates.
    removed = loss_of(runs / "rope", f"remove:0-{P - 1}")
    assert removed == pytest.approx(loss_of(runs / "nope", f"remove:0-{P - 1}"), rel=1e-6)
    assert abs(removed - nope) > 1e-4


def test_slow_pairs_stopped_are_p_rope_and_interpolated_ones_are_slower(runs, base):
    rope = runs / "rope"
    half = shutil.copytree(rope, runs / "half")
    edit_run(half, base, **{"model.rope_percentage": 0.5})
    # The weights of step 9 before.
    assert loss_of(rope, f"stop:{P // 2}-{P - 1}") == loss_of(half, step="7")
    interpolated = loss_of(rope, f"interpolate:0-{P - 1}", seq_len="2x")
    assert interpolated == loss_of(rope, seq_len="2x", encoding="linear")
    assert interpolated != loss_of(rope, seq_len="2x")


def test_a_removed_band_adds_nothing_to_logits(runs):
    """As if the queries' weights of its lanes were 0."""
    run = open_run(runs / "rope", 7)
    params = run.params()
    lanes = np.isin(np.arange(2 * P) % P, (1, 2))
    attention = params["layers"]["attn"]
    w = attention["q_einsum"]["w"]
    attention["q_einsum"]["w"] = jnp.where(lanes, 0, w)
    removed = loss_of(runs / "rope", "remove:1-2", step="7")
    plain = loss_of(runs / "rope", step="7")
    zeros = shutil.copytree(runs / "rope", runs / "zeros")
    shutil.rmtree(zeros / "checkpoints")
    (zeros / "eval.jsonl").unlink()
    save_checkpoints(zeros, run.config, {7: params})
    assert removed == pytest.approx(loss_of(zeros), rel=1e-7) != plain


def test_the_sums_of_an_intervention_stand_beside_those_of_the_plain_evaluation(runs):
    rope = runs / "rope"
    (plain,) = evaluate_run(rope)
    (stopped,) = evaluate_run(rope, intervene="stop:0-1")
    evaluate_run(rope, encoding="yarn", factor=4.0)
    for second, other in (({"encoding": "stop:0-1"}, stopped), ({}, plain)):
        found = paired_difference(rope, rope, {"step": 9}, second_fields=second)
        assert found.difference == pytest.approx(plain["loss"] - other["loss"], abs=1e-7)
    evaluate_run(runs / "nope")
    assert paired_difference(rope, runs / "nope", {"step": 9}).samples > 1
    records = read_lines(rope / "eval.jsonl")
    assert find_evaluation(records, step=9, seq_len=64) == plain, "others are not the run's"
    assert evaluate_run(rope, intervene="stop:0-1") == [stopped], "computed once"
    assert len(read_lines(rope / "eval.jsonl")) == 3


def test_the_model_as_it_is_stands_beside_its_interventions(runs, caplog):
    """The command's table has it in the first row; a single evaluation is told in a line."""
    caplog.set_level("INFO", "prope")
    flags = {"workdir": str(runs / "rope"), "max_windows": 1}
    as_it_is, stopped = evaluations(LossOptions(**flags, intervene="stop:0-1"))
    assert as_it_is == evaluate_run(runs / "rope", max_windows=1)[0]
    assert "encoding" not in as_it_is and stopped["encoding"] == "stop:0-1"
    last_line([as_it_is, stopped], ("workdir", "loss"))
    head, *rows = caplog.messages[-1].splitlines()
    assert head.split() == ["workdir", "loss", "encoding"]
    assert rows[0].endswith("as it is") and rows[1].endswith("stop:0-1")
    _log_result(stopped)
    line = caplog.messages[-1]
    assert line.startswith(f"loss {stopped['loss']:.4f} nats per token, perplexity ")
    assert line.endswith(f", of {stopped['tokens']:,} tokens")


def test_a_single_record_is_a_table_too_and_a_window_stands_beside_none(caplog):
    caplog.set_level("INFO", "prope")
    record = {"workdir": "runs/a", "loss": 3.25}
    assert last_line([record], ("workdir", "loss")) == record
    assert caplog.messages[-1].split() == ["workdir", "loss", "a", "3.25"]
    records = [record | {"window": None}, record | {"window": 64}]
    last_line(records, ("workdir", "loss", "window"))
    head, plain, cut = caplog.messages[-1].splitlines()
    assert head.endswith("window") and plain.endswith("as it is") and cut.endswith("64")


def test_only_longer_windows_are_said_to_hold_more_text(runs, caplog):
    caplog.set_level("INFO", "prope")
    one, other = evaluate_run(runs / "rope", intervene="stop:0-1,stop:2-3", max_windows=1)
    assert one["loss"] != other["loss"], "each is evaluated with its own encoding"
    assert "hold more text" not in caplog.text
    evaluate_run(runs / "rope", seq_len="1x,2x", max_windows=1)
    assert "--max_windows: longer windows hold more text" in caplog.text


def test_bands_are_parsed():
    config = default_config().model
    eighths = []
    for kind in ("stop", "remove"):
        eighths += [f"{kind}:{start}-{start + 3}" for start in range(0, 32, 4)]
    assert parse_interventions("stop,remove", config) == eighths
    bands = parse_interventions("stop:3, remove:18-20,stop:3-3", config)
    assert bands == ["stop:3-3", "remove:18-20"]
    unknown = "is not stop, remove, interpolate, alone or with a band"
    outside = "'.*' is not a band of pairs 0 to 31"
    for bad in ("halt:1-2", "", "stop,"):
        with pytest.raises(UsageError, match=f"--intervene=.*: '.*': {unknown}"):
            parse_interventions(bad, config)
    for bad in ("stop:20-18", "stop:31-32", "stop:", "stop:-1"):
        with pytest.raises(UsageError, match=f"--intervene=.*: '.*': {outside}"):
            parse_interventions(bad, config)


def test_runs_that_do_not_rotate_a_band_are_left_out(runs, base):
    with pytest.raises(UsageError, match="--intervene=stop:0-1: no run there rotates these pairs"):
        evaluate_run(runs / "nope", intervene="stop:0-1")
    (record,) = evaluate_run(runs, intervene="stop:0-1")
    assert record["workdir"] == str(runs / "rope")
    scaled = {"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 2.0}
    edit_run(runs / "nope", base, **scaled)
    says = "--intervene=remove:0-1: the run has rope_scaling_type=linear, which goes with no other"
    with pytest.raises(UsageError, match=says):
        evaluate_run(runs / "nope", intervene="remove:0-1")
    (again,) = evaluate_run(runs, intervene="stop:0-1")
    assert again == record, "of several runs, one that has a scaling is left out"


# --- A run's own encoding ---------------------------------------------------------------------

CHANGES = [name for name in SCALINGS if name != "none"]  # as --encoding, or with a band
BAND = (3, 5)


def encoded(scaling: str, logits: str, factor: float, logit_factor: float):
    """A config with this scaling and this scale of logits, by separate factors."""
    config = default_config()
    config.data.seq_len = 512
    model = config.model
    model.update({"rope_percentage": 0.75, "rope_scaling_type": scaling, "logit_scale": logits})
    if scaling in INTERVENTIONS:
        model.scaled_pairs = BAND
    if "rope_scaling_factor" in SCALINGS[scaling]:
        model.rope_scaling_factor = factor
    if "original_seq_len" in SCALINGS[scaling]:
        model.original_seq_len = 512
    if logits != "none":
        model.logit_scale_factor = logit_factor
    if logits == "drope":
        model.logit_scale_coefficient = 0.4
    return config


@pytest.mark.parametrize("logits", LOGIT_SCALES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("own", SCALINGS)
def test_an_encoding_is_put_on_a_runs_own_or_refused(own, change, logits):
    """Own factor 2, logits 3, and 4 times the training length: at that length nothing changes."""
    encoding = change
    if change in INTERVENTIONS:
        encoding = f"{change}:{BAND[0]}-{BAND[1]}"
    options = Options("", seq_len="1x,4x", encoding=encoding)
    config = encoded(own, logits, 2.0, 3.0)
    goes_on = own == change and own not in INTERVENTIONS
    if not (own == "none" or goes_on) or (change == "yarn" and logits == "drope"):
        with pytest.raises(UsageError, match="the run has (rope_scaling_type|logit_scale)="):
            configs_by_length(config, options, encoding)
        return
    configs = configs_by_length(config, options, encoding)
    for T, growth in ((512, 1.0), (2048, 4.0)):
        factor = growth if own == "none" else 2.0 * growth
        if change == "dynamic":
            factor /= growth
        by_change = logits
        logit_factor = 3.0
        if change == "yarn":
            by_change = "yarn"
            logit_factor = growth if logits == "none" else 3.0 * growth
        expected = encoded(change, by_change, factor, logit_factor).model
        actual = configs[T].model
        np.testing.assert_array_equal(layer_frequencies(actual, T), layer_frequencies(expected, T))
        np.testing.assert_array_equal(logit_scale(actual), logit_scale(expected))
        if goes_on and T == 512 and by_change == logits:
            freqs = layer_frequencies(config.model, T)
            np.testing.assert_array_equal(layer_frequencies(actual, T), freqs)
            assert logit_scale(actual) == logit_scale(config.model)


def test_scalings_are_refused_where_all_layers_have_a_window():
    config = default_config()
    config.model.update({"layer_types": ("sliding_attention",), "sliding_window": 4})
    for change in ENCODINGS:
        says = f"--encoding={change}: all its layers have a window"
        with pytest.raises(UsageError, match=says):
            configs_by_length(config, Options("", encoding=change), change)
    (stopped,) = configs_by_length(config, Options(""), "stop:0-1").values()
    assert not any(freqs[:2].any() for freqs in layer_frequencies(stopped.model))


def test_the_flag_offers_every_scaling_that_is_no_intervention():
    assert {"none", *ENCODINGS, *INTERVENTIONS} == set(SCALINGS)


def test_a_run_that_was_trained_slower_is_not_evaluated_unscaled(runs, base):
    """At the training length an encoding of the same kind is that of the run."""
    scaled = {"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 8.0}
    edit_run(runs / "rope", base, **scaled)
    (own,) = evaluate_run(runs / "rope")
    (record,) = evaluate_run(runs / "rope", encoding="linear")
    assert (record["factor"], record["loss"]) == (8.0, own["loss"])


@pytest.mark.parametrize("change", [*ENCODINGS, "interpolate:3-5", "stop:3-5"])
@pytest.mark.parametrize("logits", ["yarn", "drope"])
def test_logits_keep_a_factor_that_they_had_from_the_frequencies(change, logits):
    """As of a run whose config names one factor: what changes is the same as where it names two."""
    if (change, logits) == ("yarn", "drope"):
        return  # refused
    config = encoded("none", logits, 1.0, 3.0)
    one_factor = encoded("none", logits, 1.0, None)
    one_factor.model.rope_scaling_factor = 3.0
    options = Options("", seq_len="4x", encoding=change)
    (expected,) = configs_by_length(config, options, change).values()
    (actual,) = configs_by_length(one_factor, options, change).values()
    assert actual.model == expected.model


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
@pytest.mark.parametrize("logits", ["yarn", "drope"])
def test_a_config_without_a_factor_of_its_logits_has_that_of_the_frequencies(scaling, logits):
    """As configs were before there were two."""
    config = encoded(scaling, logits, 4.0, 4.0)
    values = config.to_dict()
    del values["model"]["logit_scale_factor"]
    values["model"]["rope_scaling_factor"] = 4.0
    old = from_dict(values)
    validate(old)
    assert logit_scale(old.model) == logit_scale(config.model)


# --- The config -------------------------------------------------------------------------------


def band_config(kind, band):
    config = default_config()
    config.model.update({"rope_scaling_type": kind, "scaled_pairs": band})
    if kind == "interpolate":
        config.model.rope_scaling_factor = 4.0
    return config


@pytest.mark.parametrize("band", [(), (1,), (3, 2), (0, 32), (-1, 2), (0, 1.5)])
def test_a_band_is_two_pairs(band):
    says = "config.model.scaled_pairs=.*: must be .* a band.*: '.*' is not a band of pairs 0 to 31"
    with pytest.raises(UsageError, match=says):
        validate(band_config("stop", band))


@pytest.mark.parametrize("kind", ["stop", "interpolate"])
@pytest.mark.parametrize("band", [(0, 3), (30, 31), (7, 7)])
def test_the_config_takes_a_band_of_its_pairs(kind, band):
    config = band_config(kind, band)
    validate(config)
    first, last = band
    freqs = 10_000.0 ** (-np.arange(32) / 32)
    freqs[first : last + 1] /= 4 if kind == "interpolate" else np.inf
    expected = np.tile(freqs, (4, 1))
    np.testing.assert_allclose(layer_frequencies(config.model), expected, rtol=1e-14)
    assert np.sum(in_band(config.model)) == 4 * (last - first + 1)


def test_a_band_needs_an_intervention_and_transformers_has_none():
    says = "config.model.scaled_pairs=.*: has no effect with rope_type=proportional"
    with pytest.raises(UsageError, match=says):
        validate(band_config("none", (0, 3)))
    says = "rope_scaling_type=remove: no class of transformers removes pairs"
    with pytest.raises(UsageError, match=says):
        write_rotations(band_config("remove", (0, 3)).model)


# --- A planted band ---------------------------------------------------------------------------

SIZES = {
    "num_layers": 1,
    "embed_dim": 16,
    "num_heads": 1,
    "head_dim": 16,
    "hidden_dim": 8,
    "vocab_size": 4,
    "max_wavelength": 100.0,
}


def planted(seed: int) -> tuple[dict, int]:
    """Parameters of a layer that copies the first token through a slow pair, and that pair."""
    rng = np.random.default_rng(seed)
    pair = int(rng.integers(4, 8))
    shapes = jax.eval_shape(lambda: model.init(breaking("none"), jax.random.key(0)))
    params = jax.tree.map(lambda leaf: 0.01 * rng.standard_normal(leaf.shape, np.float32), shapes)
    params["embedder"]["input_embedding"][:3] += np.eye(3, 16)  # a filler, and two letters
    attention = params["layers"]["attn"]
    attention["q_einsum"]["w"][0, 0, 0, pair] += 6
    key, value = attention["kv_einsum"]["w"][0, :, 0]
    key[:3, pair] += [-2, 2, 2]
    value[[1, 2], [0, 1]] += 1
    attention["attn_vec_einsum"]["w"][0, 0, [0, 1], [1, 2]] += 3
    return params, pair


def breaking(kind: str, pair: int = 0):
    config = default_config().model
    config.update(SIZES | {"rope_scaling_type": kind})
    if kind != "none":
        config.scaled_pairs = (pair, pair)
    if kind == "interpolate":
        config.rope_scaling_factor = 32.0
    return config


@pytest.mark.slow
def test_the_band_that_breaks_is_found_in_20_of_20_draws():
    """The planted pair works in windows of 8 tokens; in 256 it passes a quarter turn."""

    def make_loss(kind: str, pair: int = 0):
        @jax.jit
        def loss(params, tokens):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            hidden = model.hidden_states(breaking(kind, pair), params, tokens, positions)
            targets = jnp.broadcast_to(tokens[:, :1], tokens.shape)
            return token_losses(hidden, model.embedding(params), targets)[:, -1].mean()

        return loss

    letters = jnp.array([1, 2])
    short = jnp.zeros((2, 8), jnp.int32).at[:, 0].set(letters)
    long = jnp.zeros((2, 256), jnp.int32).at[:, 0].set(letters)
    plain = make_loss("none")
    changed = {}
    for kind in ("stop", "interpolate", "remove"):
        changed[kind] = [make_loss(kind, pair) for pair in range(8)]
    for seed in range(20):
        params, pair = planted(seed)
        broken = plain(params, long)
        assert plain(params, short) < 0.2 < 1 < broken, "it breaks"
        for kind in ("stop", "interpolate"):
            losses = [float(loss(params, long)) for loss in changed[kind]]
            assert np.argmin(losses) == pair
            assert losses[pair] < 0.2, f"{kind} mends it"
            assert min(np.delete(losses, pair)) > broken - 0.3, "and no other band does"
        losses = [float(loss(params, short)) for loss in changed["remove"]]
        assert np.argmax(losses) == pair


# --- The report -------------------------------------------------------------------------------

RECORD = {"dataset": "python_docs", "split": "validation", "fingerprint": "same", "windows": 3}
KINDS = ("stop", "remove")
BANDS = ("0-3", "4-7", "8-11")
LENGTHS = (256, 2048)


def make_sweep_run(folder, p, seed, losses):
    """A run of a sweep with records of these losses, {(seq_len, encoding, factor): loss}."""
    config = default_config()
    steps = config.num_steps
    records = []
    for (seq_len, encoding, factor), loss in losses.items():
        record = RECORD | {"step": steps, "seq_len": seq_len, "loss": loss}
        if encoding:
            record |= {"encoding": encoding, "factor": factor}
        else:  # plain evaluations on other windows do not count
            records.append(record | {"fingerprint": "other", "loss": 9.0, "windows": 9})
        records.append(record)
    values = {"rope_percentage": p, "seed": seed}
    return Run(f"{p}-{seed}", folder, values, config, True, steps, None, [], records, [])


def draw(picture):
    figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    return figure.axes


# [group, seed, length, kind, band]
CHANGED = np.random.default_rng(1).random((2, 3, 2, 2, 3))


@pytest.fixture
def changes(tmp_path):
    """What the report finds in the runs of a sweep, p = 0.5 and 1, of three seeds."""
    rng = np.random.default_rng(0)
    group = []
    for g, seed in itertools.product(range(2), range(3)):
        losses = {(256, "yarn", 2.0): 7.0}
        for t, T in enumerate(LENGTHS):
            plain = losses[T, None, None] = rng.random()
            for k, b in itertools.product(range(2), range(3)):
                encoding = f"{KINDS[k]}:{BANDS[b]}"
                losses[T, encoding, 1.0] = plain + CHANGED[g, seed, t, k, b]
        run = make_sweep_run(tmp_path, (0.5, 1.0)[g], seed, losses)
        group.append(run)
    return interventions.changes(group)


def test_the_report_has_the_changes_of_every_band(changes):
    """Means and Student's t intervals over seeds."""
    assert len(changes) == 2 * 2 * 2 * 3 + 2
    for change in changes[:-2]:
        g = ("p = 0.5", "p = 1").index(change.group)
        t = LENGTHS.index(change.seq_len)
        k = KINDS.index(change.kind)
        values = CHANGED[g, :, t, k, change.band[0] // 4]
        interval = stats.ttest_1samp(values, 0).confidence_interval()
        assert change.difference.difference == pytest.approx(values.mean())
        assert change.difference.interval() == pytest.approx(tuple(interval))


def test_the_report_shows_the_changes_of_every_band(changes):
    stop, remove, rescaled = interventions.pictures(changes)
    assert (stop.name, remove.name) == KINDS
    assert rescaled.title == "Encodings rescaled"
    means = CHANGED.mean(axis=1)[:, :, 0].swapaxes(1, 2)  # group, band, length
    for axes, values in zip(draw(stop), means, strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), values)
        labels = [f"{value:+.2f}" for value in values.ravel()]
        assert [text.get_text() for text in axes.texts] == labels


def test_bands_interpolated_by_several_factors_are_rows_of_their_own(tmp_path):
    """A run of one seed has no interval over seeds."""
    losses = {
        (512, None, None): 1.0,
        (512, "interpolate:0-3", 4.0): 1.5,
        (512, "interpolate:0-3", 2.0): 1.2,
        (512, "interpolate:4-7", 2.0): 1.1,
    }
    changes = interventions.changes([make_sweep_run(tmp_path, 1.0, 0, losses)])
    pairs = ["0-3 by 2", "0-3 by 4", "4-7"]
    assert [change.pairs for change in changes] == pairs
    assert [change.factor for change in changes] == [2.0, 4.0, 2.0]
    differences = [change.difference.difference for change in changes]
    np.testing.assert_allclose(differences, [0.2, 0.5, 0.1])
    (picture,) = interventions.pictures(changes)
    axes = draw(picture)[0]
    np.testing.assert_allclose(axes.images[0].get_array()[:, 0], differences)
    assert [text.get_text() for text in axes.get_yticklabels()] == pairs


@pytest.mark.parametrize("encoding", ["yarn", "interpolate:0-3"])
def test_a_factor_for_each_length_is_one_row(tmp_path, encoding):
    """That of the default, the length over that of training; every length has a change."""
    losses = {
        (256, None, None): 1.0,
        (256, encoding, 1.0): 2.0,
        (512, None, None): 1.0,
        (512, encoding, 2.0): 3.0,
        (2048, None, None): 1.0,
        (2048, encoding, 8.0): 9.0,
    }
    changes = interventions.changes([make_sweep_run(tmp_path, 1.0, 0, losses)])
    (picture,) = interventions.pictures(changes)
    axes = draw(picture)[0]
    shown = axes.images[0].get_array()
    np.testing.assert_allclose(shown, [[1, 2, 8]])
    (label,) = axes.get_yticklabels()
    name = encoding.removeprefix("interpolate:")
    assert label.get_text() == name
    assert picture.alt == "Changes of the loss from +1.0000 to +8.0000."


def test_bands_of_some_layers_are_rows_of_their_own(tmp_path):
    """Records of several bands at once are not drawn."""
    encodings = ["stop:4-7@sliding", "stop:4-7@full", "stop:4-7", "stop:0-3@full", "stop:0-3+4-7"]
    losses = {(512, encoding, 1.0): 1.5 + i for i, encoding in enumerate(encodings)}
    run = make_sweep_run(tmp_path, 1.0, 0, {(512, None, None): 1.0} | losses)
    changes = interventions.changes([run])
    assert {(change.band, change.layers) for change in changes} == {
        ((4, 7), ""),
        ((0, 3), "full"),
        ((4, 7), "full"),
        ((4, 7), "sliding"),
    }
    (picture,) = interventions.pictures(changes)
    axes = draw(picture)[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    assert rows == ["4-7", "0-3@full", "4-7@full", "4-7@sliding"]
    values = axes.images[0].get_array()[:, 0]
    np.testing.assert_allclose(values, [2.5, 3.5, 1.5, 0.5])


def test_an_imported_run_has_the_changes_of_its_only_step(tmp_path):
    run = make_sweep_run(tmp_path, 1.0, 0, {(512, None, None): 1.0, (512, "stop:0-3", 1.0): 1.5})
    imported = [record | {"step": 0} for record in run.evaluations]
    run = dataclasses.replace(run, step=0, evaluations=imported)
    (change,) = interventions.changes([run])
    assert change.difference.difference == pytest.approx(0.5)
