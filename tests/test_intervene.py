"""Bands of pairs that are stopped, removed or interpolated for an evaluation: other models that must be the same."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest
from makers import edit_run as edit
from makers import evaluate_run as ask
from scipy import stats

from prope import model
from prope.config import default_config
from prope.encodings import in_band, layer_frequencies
from prope.errors import UsageError
from prope.hf.rotation import choose_class
from prope.inference.evaluation import parse_interventions
from prope.inference.paired import paired_difference
from prope.loss import token_losses
from prope.runtime.validate import validate
from prope.sweep import interventions
from prope.sweep.runs import Run
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.records import find_evaluation, read_jsonl
from prope.workdir.run import open_run


def losses(workdir, intervene=None, **flags) -> list[float]:
    return [
        record["loss"]
        for record in ask(workdir, **({"intervene": intervene} | flags if intervene else flags))
    ]


def test_all_pairs_stopped_are_nope_and_removed_are_the_mean_of_all_values(runs):
    last = open_run(runs / "rope").config.model.head_dim // 2 - 1
    (nope,), (rope,) = losses(runs / "nope"), losses(runs / "rope")
    (stopped,) = losses(runs / "rope", f"stop:0-{last}")
    assert stopped == pytest.approx(nope, rel=1e-6) != rope
    removed = [losses(runs / name, f"remove:0-{last}")[0] for name in ("rope", "nope")]
    assert removed[0] == pytest.approx(removed[1], rel=1e-6), (
        "without logits it does not matter what rotates"
    )
    assert abs(removed[0] - nope) > 1e-4


def test_slow_pairs_stopped_are_p_rope_and_interpolated_ones_are_slower(runs, base):
    P = open_run(runs / "rope").config.model.head_dim // 2
    shutil.copytree(runs / "rope", runs / "half")
    edit(runs / "half", base, **{"model.rope_percentage": 0.5})
    (stopped,) = losses(runs / "rope", f"stop:{P // 2}-{P - 1}")
    assert stopped == losses(runs / "half", step="7")[0]  # the weights of step 9 before
    (interpolated,) = losses(runs / "rope", f"interpolate:0-{P - 1}", seq_len="2x")
    assert interpolated == losses(runs / "rope", seq_len="2x", encoding="linear")[0]
    assert interpolated != losses(runs / "rope", seq_len="2x")[0]


def test_a_removed_band_adds_nothing_to_logits(runs):
    """As if the queries' weights of its lanes were 0."""
    run = open_run(runs / "rope", 7)
    params, P = run.params(), run.config.model.head_dim // 2
    lanes = np.isin(np.arange(2 * P) % P, (1, 2))
    w = np.array(params["layers"]["attn"]["q_einsum"]["w"])
    w[..., lanes] = 0
    params["layers"]["attn"]["q_einsum"]["w"] = w
    (removed,), (plain,) = (
        losses(runs / "rope", "remove:1-2", step="7"),
        losses(runs / "rope", step="7"),
    )
    shutil.copytree(runs / "rope", runs / "zeros")
    shutil.rmtree(runs / "zeros" / "checkpoints")
    (runs / "zeros" / "eval.jsonl").unlink()
    with Checkpoints(runs / "zeros") as checkpoints:
        identity = {"config": run.config.to_dict(), "init_hash": ""}
        checkpoints.save(7, params, {"count": np.zeros(())}, identity, {"examples": 0})
    assert removed == pytest.approx(losses(runs / "zeros")[0], rel=1e-7) != plain


def test_the_sums_of_an_intervention_stand_beside_those_of_the_plain_evaluation(runs):
    (plain,), (stopped,) = ask(runs / "rope"), ask(runs / "rope", intervene="stop:0-1")
    ask(runs / "rope", encoding="yarn", factor=4.0)
    for but, other in (({"encoding": "stop:0-1"}, stopped), ({}, plain)):
        found = paired_difference(runs / "rope", runs / "rope", {"step": 9}, but=but)
        assert found.difference == pytest.approx(plain["loss"] - other["loss"], abs=1e-7)
    assert (
        paired_difference(
            runs / "rope", runs / "nope" if losses(runs / "nope") else "", {"step": 9}
        ).samples
        > 1
    )
    records = read_jsonl(runs / "rope" / "eval.jsonl")
    assert find_evaluation(records, step=9, seq_len=plain["seq_len"]) == plain, (
        "others do not count as the run's own"
    )
    assert json.dumps(ask(runs / "rope", intervene="stop:0-1")) == json.dumps([stopped]), (
        "computed once"
    )


def test_only_longer_windows_are_said_to_hold_more_text(runs, caplog):
    caplog.set_level("INFO", "prope")
    ask(runs / "rope", intervene="stop:0-1,stop:2-3", max_windows=1)
    assert "hold more text" not in caplog.text
    ask(runs / "rope", seq_len="1x,2x", max_windows=1)
    assert "--max_windows: longer windows hold more text" in caplog.text


def test_bands_are_parsed():
    config = default_config().model
    eighths = [
        f"{kind}:{start}-{start + 3}" for kind in ("stop", "remove") for start in range(0, 32, 4)
    ]
    assert parse_interventions("stop,remove", config) == eighths
    assert parse_interventions("stop:3, remove:18-20,stop:3-3", config) == [
        "stop:3-3",
        "remove:18-20",
    ]
    assert parse_interventions(None, config) == []
    for bad in ("halt:1-2", "stop:20-18", "stop:31-32", "", "stop:", "stop:-1", "stop,"):
        with pytest.raises(
            UsageError,
            match="--intervene=.*: .* is not stop, remove, interpolate, alone or with a band",
        ):
            parse_interventions(bad, config)


def test_what_cannot_be_asked_for(runs, base):
    for flags, says in (
        (
            {"intervene": "stop:0-1", "encoding": "yarn"},
            "--encoding=yarn and --intervene=stop:0-1: give one of them",
        ),
        (
            {"intervene": "stop:0-1", "factor": 2.0},
            "--factor=2.0: goes with --encoding, such as yarn, or --intervene=int",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            ask(runs, **flags)
    edit(
        runs / "nope",
        base,
        **{"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 2.0},
    )
    with pytest.raises(
        UsageError,
        match="--intervene=remove:0-1: the run has rope_scaling_type=linear; only runs without",
    ):
        ask(runs / "nope", intervene="remove:0-1")
    edit(
        runs / "nope", base, **{"model.rope_scaling_type": "none", "model.rope_scaling_factor": 1.0}
    )
    with pytest.raises(UsageError, match="--intervene=stop:0-1: no run there rotates these pairs"):
        ask(runs / "nope", intervene="stop:0-1")
    assert [r["workdir"] for r in ask(runs, intervene="stop:0-1")] == [str(runs / "rope")], (
        "the other one is left out"
    )
    for name in ("nope", "rope"):
        shutil.rmtree(runs / name / "checkpoints")
    with pytest.raises(UsageError, match="no run there has a finished checkpoint; train one first"):
        ask(runs, intervene="stop:0-1")


def test_the_config_takes_a_band_of_its_pairs():
    config = default_config()
    config.model.rope_scaling_type = "stop"
    for band in ((), (1,), (3, 2), (0, 32), (-1, 2), (0, 1.5)):
        config.model.scaled_pairs = band
        with pytest.raises(
            UsageError, match="config.model.scaled_pairs=.*: must be two pairs of 0 to 31"
        ):
            validate(config)
    for kind, band in itertools.product(("stop", "interpolate"), ((0, 3), (30, 31), (7, 7))):
        config.model.update({"rope_scaling_type": kind, "scaled_pairs": band})
        config.model.rope_scaling_factor = 4.0 if kind == "interpolate" else 1.0
        validate(config)
        expected = 10_000.0 ** (-np.arange(32) / 32)
        expected[band[0] : band[1] + 1] /= 4 if kind == "interpolate" else np.inf
        np.testing.assert_allclose(
            layer_frequencies(config.model), np.tile(expected, (4, 1)), rtol=1e-14
        )
        assert in_band(config.model).sum() == band[1] - band[0] + 1
    config.model.update({"rope_scaling_type": "none", "rope_scaling_factor": 1.0})
    with pytest.raises(
        UsageError, match="config.model.scaled_pairs=.*: has no effect with rope_type=proportional"
    ):
        validate(config)


def test_transformers_has_no_class_with_removed_pairs():
    config = default_config()
    config.model.update({"rope_scaling_type": "remove", "scaled_pairs": (0, 3)})
    with pytest.raises(
        UsageError, match="rope_scaling_type=remove: no class of transformers removes pairs"
    ):
        choose_class(config.model)


def planted(seed: int) -> tuple[dict, int]:
    """Parameters of a layer that copies the first token's letter through one slow pair; and that pair."""
    rng, config = np.random.default_rng(seed), breaking("none")
    pair, shapes = (
        int(rng.integers(4, 8)),
        jax.eval_shape(lambda: model.init(config, jax.random.key(0))),
    )
    params = jax.tree.map(lambda leaf: 0.01 * rng.standard_normal(leaf.shape, np.float32), shapes)
    params["embedder"]["input_embedding"][:3] += np.eye(3, 16)  # a filler, and two letters
    attention = params["layers"]["attn"]
    attention["q_einsum"]["w"][0, 0, 0, pair] += 6
    attention["kv_einsum"]["w"][0, 0, 0, [0, 1, 2], pair] += [-2, 2, 2]
    attention["kv_einsum"]["w"][0, 1, 0, [1, 2], [0, 1]] += 1
    attention["attn_vec_einsum"]["w"][0, 0, [0, 1], [1, 2]] += 3
    return params, pair


def breaking(kind: str, pair: int = 0):
    config = default_config().model
    sizes = {
        "num_layers": 1,
        "embed_dim": 16,
        "num_heads": 1,
        "head_dim": 16,
        "hidden_dim": 8,
        "vocab_size": 4,
    }
    band = {"scaled_pairs": (pair, pair)} if kind != "none" else {}
    factor = 32.0 if kind == "interpolate" else 1.0
    config.update(
        sizes
        | band
        | {"max_wavelength": 100.0, "rope_scaling_type": kind, "rope_scaling_factor": factor}
    )
    return config


@pytest.mark.slow
def test_the_band_that_breaks_is_found_in_20_of_20_draws():
    """The planted pair works in windows of 8 tokens, and passes a quarter turn in windows of 256."""

    def loss_of(kind: str, pair: int = 0):
        @jax.jit
        def loss(params, tokens):
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            hidden = model.hidden_states(breaking(kind, pair), params, tokens, positions)
            targets = jnp.broadcast_to(tokens[:, :1], tokens.shape)
            return token_losses(hidden, model.embedding(params), targets)[:, -1].mean()

        return loss

    texts = {T: jnp.zeros((2, T), jnp.int32).at[:, 0].set(jnp.array([1, 2])) for T in (8, 256)}
    plain, kinds = loss_of("none"), ("stop", "interpolate", "remove")
    changed = {kind: [loss_of(kind, pair) for pair in range(8)] for kind in kinds}
    for seed in range(20):
        params, pair = planted(seed)
        short, long = (float(plain(params, texts[T])) for T in (8, 256))
        assert short < 0.2 < 1 < long, "it breaks"
        for kind in ("stop", "interpolate"):
            losses = [float(loss(params, texts[256])) for loss in changed[kind]]
            assert np.argmin(losses) == pair and losses[pair] < 0.2, f"{kind} mends it"
            assert min(np.delete(losses, pair)) > long - 0.3, "and no other band does"
        assert np.argmax([float(loss(params, texts[8])) for loss in changed["remove"]]) == pair


def test_the_report_shows_the_changes_of_every_band(tmp_path):
    """Means and Student's t intervals over seeds; plain evaluations on other windows do not count."""
    rng, group = np.random.default_rng(0), []
    plain, changed = (
        rng.random((2, 3, 2)),
        rng.random((2, 3, 2, 2, 3)),
    )  # group, seed, length; and kind, band
    for g, s in itertools.product(range(2), range(3)):
        config, records = default_config(), []
        common = {
            "step": config.num_steps,
            "dataset": "python_docs",
            "split": "validation",
            "windows": 3,
        }
        for t, T in enumerate((256, 2048)):
            record = common | {"seq_len": T, "fingerprint": "same"}
            records += [
                record | {"loss": plain[g, s, t]},
                record | {"fingerprint": "other", "loss": 9.0, "windows": 9},
            ]
            for (k, kind), (b, band) in itertools.product(
                enumerate(("stop", "remove")), enumerate(("0-3", "4-7", "8-11"))
            ):
                loss = plain[g, s, t] + changed[g, s, t, k, b]
                records.append(record | {"encoding": f"{kind}:{band}", "factor": 1.0, "loss": loss})
        records.append(
            common
            | {
                "seq_len": 256,
                "fingerprint": "same",
                "encoding": "yarn",
                "factor": 2.0,
                "loss": 7.0,
            }
        )
        values = {"rope_percentage": (0.5, 1.0)[g], "seed": s}
        group.append(
            Run(f"{g}{s}", tmp_path, values, config, True, config.num_steps, None, [], records, [])
        )
    found = interventions.changes(group)
    assert len(found) == 2 * 2 * 2 * 3
    for change in found:
        at = (
            ("p = 0.5", "p = 1").index(change.group),
            slice(None),
            (256, 2048).index(change.seq_len),
        )
        values = changed[at][:, ("stop", "remove").index(change.kind), change.band[0] // 4]
        expected = stats.ttest_1samp(values, 0).confidence_interval()
        assert change.difference.difference == pytest.approx(values.mean())
        assert change.difference.interval() == pytest.approx(tuple(expected))
    stop, remove = interventions.pictures(found)
    assert (stop.name, remove.name) == ("stop", "remove")
    figure = matplotlib.figure.Figure(figsize=stop.size, layout="constrained")
    stop.draw(figure)
    means = changed.mean(axis=1)[:, :, 0].swapaxes(1, 2)  # group, band, length
    for axes, values in zip(figure.axes, means, strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), values)
        assert [text.get_text() for text in axes.texts] == [
            f"{value:+.2f}" for value in values.ravel()
        ]


def test_bands_interpolated_by_several_factors_are_rows_of_their_own(tmp_path):
    """Factors are no seeds: a run of one seed has no interval over seeds. Pairs 4 to 7 have one factor only."""
    config, losses = default_config(), {("0-3", 4.0): 1.5, ("0-3", 2.0): 1.2, ("4-7", 2.0): 1.1}
    record = {
        "step": config.num_steps,
        "dataset": "python_docs",
        "seq_len": 512,
        "fingerprint": "same",
        "windows": 3,
    }
    records = [record | {"loss": 1.0}]
    records += [
        record | {"encoding": f"interpolate:{b}", "factor": f, "loss": loss}
        for (b, f), loss in losses.items()
    ]
    run = Run(
        "a",
        tmp_path,
        {"rope_percentage": 1.0},
        config,
        True,
        config.num_steps,
        None,
        [],
        records,
        [],
    )
    found = interventions.changes([run])
    assert [(c.pairs, c.factor) for c in found] == [
        ("0-3 by 2", 2.0),
        ("0-3 by 4", 4.0),
        ("4-7", 2.0),
    ]
    np.testing.assert_allclose([c.difference.difference for c in found], [0.2, 0.5, 0.1])
    (picture,) = interventions.pictures(found)
    figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), [[0.2], [0.5], [0.1]])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        c.pairs for c in found
    ]
