"""Bands of pairs that are stopped, removed or interpolated, in all layers or in some.

Against the oracle decoder, models that are the same, and what a sweep's page shows.
"""

import dataclasses
import itertools
import shutil

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import stats
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.heads import make_walk
from support.models import DENSE4, KINDS_OF_LAYERS, draw_model, forward, small
from support.runs import edit_run, evaluate_run, make_run
from support.sweeps import draw_picture
from support.text import read_lines

from prope.encodings import INTERVENTIONS, LOGIT_SCALES, SCALINGS
from prope.errors import UsageError
from prope.inference.asking import AskOptions, answers
from prope.inference.opening import parse_interventions, rescale, specs_by_length
from prope.inference.options import ENCODINGS, Options
from prope.inference.paired import paired_difference
from prope.pages.interventions import pictures
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.sweep.interventions import list_changes
from prope.sweep.runs import Run

P = 32  # pairs of the runs


def loss_of(workdir, intervene=None, **flags) -> float:
    (record,) = evaluate_run(workdir, intervene=intervene, **flags)
    return record["loss"]


# --- Which pairs of which layers change -------------------------------------------------------

# Layers 2 and 5 are full, with 16 pairs; the others have windows and 8 pairs.
BANDS = "1-6@full+0-2@sliding+5@1-2"
BY_LAYER = [{0, 1, 2}, {0, 1, 2, 5}, {1, 2, 3, 4, 5, 6}, {0, 1, 2}, {0, 1, 2}, {*range(1, 7)}]


def rotation(model, T=None) -> list[np.ndarray]:
    """The frequencies of every layer for T tokens, and their logit scales."""
    layers = model.layers_at(T)
    freqs = [layer.frequencies[0] for layer in layers]
    return [*freqs, [layer.logit_scale for layer in layers]]


def bands_by_layer(freqs) -> list[np.ndarray]:
    pairs = zip(BY_LAYER, freqs, strict=True)
    return [np.isin(np.arange(len(of_layer)), list(band)) for band, of_layer in pairs]


@pytest.mark.parametrize(
    ("kind", "scan_layers"),
    [("stop", True), ("interpolate", False), ("remove", True), ("remove", False)],
)
def test_pairs_change_in_the_layers_that_are_named(kind, scan_layers):
    """Heads of two widths and two wavelengths; layers of a kind are scanned, and yet differ."""
    plain = small(**DENSE4)
    (encoding,) = parse_interventions(f"{kind}:{BANDS}", plain)
    spec = rescale(small(**DENSE4, scan_layers=scan_layers), encoding, 256, factor=4.0)
    params, *inputs = draw_model(plain, T=24)
    freqs = oracles.layer_frequencies(plain)
    bands = bands_by_layer(freqs)
    divisor = {"stop": np.inf, "interpolate": 4.0, "remove": 1.0}[kind]
    freqs = [np.where(band, f / divisor, f) for band, f in zip(bands, freqs, strict=True)]
    np.testing.assert_allclose(
        np.concatenate(rotation(spec)[:-1]), np.concatenate(freqs), rtol=1e-14
    )
    layers_in_turn = iter(bands)

    def rotate(query, *others):
        lanes = np.tile(next(layers_in_turn), 2)
        query, *others = oracles.rotate_qkv(query, *others)
        return np.where(lanes & (kind == "remove"), 0, query), *others

    expected = oracles.decoder(plain, params, *inputs, freqs=freqs, rotate_fn=rotate)
    actual, movement = measure_rounding(lambda params: forward(spec, params, *inputs), params)
    assert_equal_but_rounding(actual, expected, movement)
    assert abs(forward(plain, params, *inputs) - expected).max() > 1e-3


def test_bands_and_layers_are_parsed():
    spec = small(**DENSE4)
    eighths = [f"stop:{first}-{first + 1}@full" for first in range(0, 16, 2)]
    assert parse_interventions("stop@full", spec) == eighths
    single = [f"remove:{pair}-{pair}@sliding" for pair in range(8)]
    assert parse_interventions("remove@sliding", spec) == single
    text = "stop:9-15@full, interpolate:3@05,stop:0-3@0-5,remove:1@1-2+0@full,stop:9-15@full"
    encodings = ["stop:9-15@full", "interpolate:3-3@05", "stop:0-3", "remove:1-1@1-2+0-0@full"]
    assert parse_interventions(text, spec) == encodings
    assert parse_interventions("stop:3@full", small()) == ["stop:3-3"], "all layers are full"


def test_an_analysis_walks_through_layers_without_their_removed_pairs(tmp_path):
    run = tmp_path / "run"
    remove = {"rope_scaling_type": "remove", "scaled_pairs": ("0-20@1",)}
    spec, params = make_run(run, 1.0, **remove)
    walk = make_walk(run)
    losses = walk.losses(walk.enter(), 0)
    positions = jnp.broadcast_to(jnp.arange(walk.tokens.shape[1]), walk.tokens.shape)

    def plain_losses(params):
        logits = forward(spec.model, params, jnp.asarray(walk.tokens), positions)
        return oracles.mean_losses(logits, walk.tokens)

    assert_equal_but_rounding(losses, *measure_rounding(plain_losses, params))
    spec = spec.replace({"model.rope_scaling_type": "none", "model.scaled_pairs": ()})
    assert abs(losses - plain_losses(params)).max() > 1e-4


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
    (nope,) = answers(AskOptions(str(tmp_path / "nope"), **flags))
    assert stopped["encoding"] == "stop:0-31@full"
    assert stopped["logprob"] == pytest.approx(nope["logprob"], rel=1e-6)
    assert abs(stopped["logprob"] - rope["logprob"]) > 1e-4


# --- Evaluations ------------------------------------------------------------------------------


def test_slow_pairs_stopped_are_p_rope_and_interpolated_ones_are_slower(runs, base):
    rope = runs / "rope"
    half = shutil.copytree(rope, runs / "half")
    edit_run(half, base, **{"model.rope_percentage": 0.5})
    # The weights of step 9 before.
    assert loss_of(rope, f"stop:{P // 2}-{P - 1}") == loss_of(half, step="7")
    # Without logits it does not matter what rotates.
    removed = loss_of(rope, f"remove:0-{P - 1}")
    assert removed == pytest.approx(loss_of(runs / "nope", f"remove:0-{P - 1}"), rel=1e-6)
    interpolated = loss_of(rope, f"interpolate:0-{P - 1}", seq_len="2x")
    assert interpolated == loss_of(rope, seq_len="2x", encoding="linear")
    assert interpolated != loss_of(rope, seq_len="2x")


def test_records_and_sums_of_interventions_stand_beside_those_of_the_plain_evaluation(runs, base):
    rope = runs / "rope"
    (plain,) = evaluate_run(rope)
    flags = {"intervene": "stop:0-1,stop:0-1@1"}
    stopped, second = evaluate_run(rope, **flags)
    assert second["encoding"] == "stop:0-1@1"
    assert (stopped["rotated_pairs"], second["rotated_pairs"]) == (P - 2, [P, P - 2])
    assert len({record["loss"] for record in (plain, stopped, second)}) == 3
    evaluate_run(rope, encoding="yarn", factor=4.0)
    for fields, other in (
        ({"encoding": "stop:0-1"}, stopped),
        ({"encoding": "stop:0-1@1"}, second),
        ({}, plain),
    ):
        found = paired_difference(rope, rope, {"step": 9}, second_fields=fields)
        assert found.difference == pytest.approx(plain["loss"] - other["loss"], abs=1e-7)
    assert evaluate_run(rope, **flags) == [stopped, second], "computed once"
    assert len(read_lines(rope / "eval.jsonl")) == 4


# --- A run's own encoding ---------------------------------------------------------------------

CHANGES = [name for name in SCALINGS if name != "none"]  # as --encoding, or with a band
BAND = (3, 5)


def encoded(scaling: str, logits: str, factor: float, logit_factor: float):
    """A spec with this scaling and this scale of logits, by separate factors."""
    fields = {"rope_percentage": 0.75, "rope_scaling_type": scaling, "logit_scale": logits}
    if scaling in INTERVENTIONS:
        fields["scaled_pairs"] = BAND
    if "rope_scaling_factor" in SCALINGS[scaling]:
        fields["rope_scaling_factor"] = factor
    if "original_seq_len" in SCALINGS[scaling]:
        fields["original_seq_len"] = 512
    if logits != "none":
        fields["logit_scale_factor"] = logit_factor
    if logits == "drope":
        fields["logit_scale_coefficient"] = 0.4
    return Spec(model=ModelSpec(**fields), data=DataSpec(seq_len=512))


def assert_same_rotation(ours, theirs, T):
    for actual, expected in zip(rotation(ours, T), rotation(theirs, T), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("logits", LOGIT_SCALES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("own", SCALINGS)
def test_an_encoding_is_put_on_a_runs_own_or_refused(own, change, logits):
    """Own factor 2, logits 3, and 4 times the training length: at that length nothing changes."""
    encoding = change
    if change in INTERVENTIONS:
        encoding = f"{change}:{BAND[0]}-{BAND[1]}"
    options = Options("", seq_len="1x,4x", encoding=encoding)
    spec = encoded(own, logits, 2.0, 3.0)
    goes_on = own == change and own not in INTERVENTIONS
    if not (own == "none" or goes_on) or (change == "yarn" and logits == "drope"):
        with pytest.raises(UsageError, match="the run has (rope_scaling_type|logit_scale)="):
            specs_by_length(spec, options, encoding)
        return
    specs = specs_by_length(spec, options, encoding)
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
        actual = specs[T].model
        assert_same_rotation(actual, expected, T)
        if goes_on and T == 512 and by_change == logits:
            assert_same_rotation(actual, spec.model, T)


def test_scalings_are_refused_where_all_layers_have_a_window():
    spec = Spec(model=ModelSpec(layer_types=("sliding_attention",), sliding_window=4))
    with pytest.raises(UsageError, match="--encoding=ntk: "):
        specs_by_length(spec, Options("", encoding="ntk"), "ntk")
    (stopped,) = specs_by_length(spec, Options(""), "stop:0-1").values()
    assert not any(layer.frequencies[:, :2].any() for layer in stopped.model.layers)


def test_the_flag_offers_every_scaling_that_is_no_intervention():
    assert {"none", *ENCODINGS, *INTERVENTIONS} == set(SCALINGS)


@pytest.mark.parametrize(("change", "logits"), [("yarn", "yarn"), ("ntk", "drope")])
def test_logits_keep_a_factor_that_they_had_from_the_frequencies(change, logits):
    """As of a run whose config names one factor: what changes is the same as where it names two."""
    spec = encoded("none", logits, 1.0, 3.0)
    one_factor = encoded("none", logits, 1.0, None).replace({"model.rope_scaling_factor": 3.0})
    options = Options("", seq_len="4x", encoding=change)
    (expected,) = specs_by_length(spec, options, change).values()
    (actual,) = specs_by_length(one_factor, options, change).values()
    assert actual.model == expected.model


# --- The report -------------------------------------------------------------------------------

RECORD = {"dataset": "python_docs", "split": "validation", "fingerprint": "same", "windows": 3}
THIRDS = ("0-3", "4-7", "8-11")


def make_sweep_run(folder, p, seed, losses):
    """A run of a sweep with records of these losses, {(seq_len, encoding, factor): loss}."""
    spec = Spec()
    steps = spec.num_steps
    records = []
    for (seq_len, encoding, factor), loss in losses.items():
        record = RECORD | {"step": steps, "seq_len": seq_len, "loss": loss}
        if encoding:
            record |= {"encoding": encoding, "factor": factor}
        else:  # plain evaluations on other windows do not count
            records.append(record | {"fingerprint": "other", "loss": 9.0, "windows": 9})
        records.append(record)
    values = {"rope_percentage": p, "seed": seed}
    return Run(f"{p}-{seed}", folder, values, spec, True, steps, None, [], records, [])


def test_the_report_has_the_changes_of_every_band(tmp_path):
    """A sweep over p = 0.5 and 1, of three seeds: means and Student's t intervals."""
    changed = np.random.default_rng(1).random((2, 3, 3))  # [group, seed, band]
    group = []
    for (g, p), seed in itertools.product(enumerate((0.5, 1.0)), range(3)):
        losses = {(256, None, None): 2.0 + g + seed}
        for b, band in enumerate(THIRDS):
            losses[256, f"stop:{band}", 1.0] = 2.0 + g + seed + changed[g, seed, b]
        group.append(make_sweep_run(tmp_path, p, seed, losses))
    changes = list_changes(group)
    assert len(changes) == 2 * 3
    for change in changes:
        g = ("p = 0.5", "p = 1").index(change.group)
        values = changed[g, :, change.band[0] // 4]
        interval = stats.ttest_1samp(values, 0).confidence_interval()
        assert change.difference.difference == pytest.approx(values.mean())
        assert change.difference.interval() == pytest.approx(tuple(interval))
    (picture,) = pictures(changes)
    shown = draw_picture(picture).axes[0].images[0].get_array()
    np.testing.assert_allclose(shown[:, 0], changed[0].mean(axis=0))


# By (length, encoding, factor) how much is added, and the rows that a picture has then.
ROWS = [
    (
        {
            (512, "interpolate:0-3", 4.0): 0.5,
            (512, "interpolate:0-3", 2.0): 0.2,
            (512, "interpolate:4-7@full", 2.0): 0.1,
            (512, "interpolate:0-3+4-7", 2.0): 0.3,  # several bands at once are not drawn
        },
        {"0-3 by 2": [0.2], "0-3 by 4": [0.5], "4-7@full": [0.1]},
    ),
    # The default factor of each length is one row.
    ({(256, "yarn", 1.0): 1.0, (2048, "yarn", 8.0): 8.0}, {"yarn": [1.0, 8.0]}),
]


@pytest.mark.parametrize(("added", "rows"), ROWS)
def test_what_is_changed_has_a_row_of_its_own(tmp_path, added, rows):
    """An import has one seed, and only the step 0."""
    losses = {(length, None, None): 1.0 for length, *_ in added}
    run = make_sweep_run(tmp_path, 1.0, 0, losses | {key: 1 + add for key, add in added.items()})
    records = [record | {"step": 0} for record in run.evaluations]
    run = dataclasses.replace(run, step=0, evaluations=records)
    (picture,) = pictures(list_changes([run]))
    axes = draw_picture(picture).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == list(rows)
    np.testing.assert_allclose(axes.images[0].get_array(), list(rows.values()))
