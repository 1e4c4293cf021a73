"""Pairs chosen by key head: rules and budgets by brute force, the command, its file in a run."""

import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.commands import refusal
from support.models import E4, KINDS_OF_LAYERS, run_layers, small
from support.runs import evaluate_run, make_run

from prope.analysis import pairs
from prope.config import default_config, resolve
from prope.spec.layers import format_pairs, parse_pairs
from prope.workdir.records import read_jsonl
from prope.workdir.run import open_run

OPTIONS = dict.fromkeys(("step", "dataset", "data_dir", "text", "dtype", "output"))
OPTIONS |= {"rule": ["change"], "keep": ["0.5"], "per": ["head"], "sequences": 4, "seq_len": 64}
OPTIONS |= {"max_windows": 8}


def draw_norms(spec, seed=0):
    """Mean norms of every layer, as analysis.json has them."""
    rng = np.random.default_rng(seed)
    return [
        {
            "query_norms": rng.uniform(1, 2, (spec.num_heads, layer.head_dim // 2)).tolist(),
            "key_norms": rng.uniform(1, 2, layer.frequencies.shape).tolist(),
        }
        for layer in spec.layers
    ]


def test_change_is_the_root_mean_square_of_what_a_rotation_adds_to_a_score():
    """Over the angles between a query and a key, all alike, and over distances d by 1 / d."""
    freqs = np.array([[1.0, 0.3, 0.01, 0.0]])
    query, key = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[2.0, 1.0, 0.5, 5.0]])
    expected = []
    for q, k, f in zip(query[0], key[0], freqs[0], strict=True):
        total = 0
        for d in range(1, 50):
            angles = 2 * np.pi * np.arange(100) / 100
            added = q * k * (np.cos(angles + f * d) - np.cos(angles))
            total += np.mean(added**2) / d
        expected.append(np.sqrt(total / sum(1 / d for d in range(1, 50))))
    actual = pairs.change(query, key, freqs, np.arange(1, 50))
    np.testing.assert_allclose(actual, [expected], rtol=1e-12)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_rules_that_need_no_text_keep_the_pairs_of_their_names(share):
    spec = small(num_layers=2, rope_percentage=1.0)
    r = round(8 * share)
    for rule, kept in {
        "fast": np.arange(r),
        "slow": np.arange(8 - r, 8),
        "uniform": np.arange(0, 8, 8 // r),
    }.items():
        for per in ("head", "layer", "model"):
            scores = pairs.score_pairs(spec, draw_norms(spec), rule, 64)
            for layer in pairs.keep_highest(spec, scores, share, per):
                for head in layer:
                    np.testing.assert_array_equal(np.flatnonzero(head), kept, f"{rule} {per}")


@pytest.mark.parametrize("fields", [KINDS_OF_LAYERS, E4])
@pytest.mark.parametrize("rule", ["change", "norm"])
def test_the_highest_scores_are_kept_of_heads_layers_or_the_model(rule, fields):
    spec = small(**fields | {"rope_percentage": 1.0, "local_rope_percentage": 1.0})
    norms = draw_norms(spec)
    T = 64
    scores = [np.zeros(layer.frequencies.shape) for layer in spec.layers]
    for layer, one in zip(spec.layers, norms, strict=True):
        K, P = layer.frequencies.shape
        for head in range(spec.num_heads):
            key_head = head * K // spec.num_heads
            for pair in range(P):
                key = norms[layer.kv_source]["key_norms"][key_head][pair]
                strength = one["query_norms"][head][pair] * key
                distances = np.arange(1, min(layer.window or T, T))
                turned = 1 - np.cos(layer.frequencies[key_head, pair] * distances)
                weight = np.sqrt(np.sum(turned / distances) / np.sum(1 / distances))
                scale = spec.attention_scale or layer.head_dim**-0.5
                score = scale * strength * (weight if rule == "change" else 1)
                scores[layer.kv_source][key_head, pair] += score * K / spec.num_heads
    scores = [scores[layer.kv_source] for layer in spec.layers]
    actual = pairs.score_pairs(spec, norms, rule, T)
    for ours, theirs in zip(actual, scores, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    for per in ("head", "layer", "model"):
        kept = pairs.keep_highest(spec, actual, 0.25, per)
        for layer, one, score in zip(spec.layers, kept, scores, strict=True):
            np.testing.assert_array_equal(one, kept[layer.kv_source])
            if per == "layer":
                assert (one == one[0]).all()
                score = np.broadcast_to(score.mean(axis=0), score.shape)
            if per != "model":
                assert (one.sum(axis=1) == one.shape[1] // 4).all()
                for head, of_head in zip(one, score, strict=True):
                    assert of_head[head].min() > of_head[~head].max()
        if per == "model":
            own = [n for n, layer in enumerate(spec.layers) if not layer.shares_kv]
            flat = np.concatenate([kept[n].ravel() for n in own])
            values = np.concatenate([scores[n].ravel() for n in own])
            assert flat.sum() == round(0.25 * len(flat))
            assert values[flat].min() > values[~flat].max()


def test_queries_that_share_keys_do_not_count_their_frequencies_twice():
    spec = small(**E4 | {"rope_percentage": 1.0, "local_rope_percentage": 1.0})
    for layer, fast in zip(
        spec.layers, pairs.score_pairs(spec, draw_norms(spec), "fast", 64), strict=True
    ):
        np.testing.assert_array_equal(fast, layer.frequencies)


def test_pairs_are_read_as_they_are_written():
    rng = np.random.default_rng(0)
    spec = small(**KINDS_OF_LAYERS | {"rope_percentage": 1.0, "local_rope_percentage": 1.0})
    kept = [rng.random(layer.frequencies.shape) < rng.random() for layer in spec.layers]
    kept[0][:] = False
    read = parse_pairs(dataclasses.replace(spec, rope_pairs=format_pairs(kept)))
    for ours, theirs in zip(read, kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_layer_that_takes_the_keys_of_another_rotates_as_they_do():
    plain = small(**E4 | {"rope_percentage": 1.0, "local_rope_percentage": 1.0})
    lines = "; ".join(map(str, range(plain.num_layers)))
    spec = dataclasses.replace(plain, rope_pairs=lines)
    assert any(layer.shares_kv for layer in spec.layers)
    for layer, whole in zip(spec.layers, plain.layers, strict=True):
        is_kept = np.arange(layer.head_dim // 2) == layer.kv_source
        np.testing.assert_array_equal(layer.frequencies, np.where(is_kept, whole.frequencies, 0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pairs") / "run"
    make_run(workdir, p=1.0, num_kv_heads=2)
    return workdir


def test_norms_are_those_of_the_formula(run):
    """Mean 2-norms of queries and keys before the rotation."""
    opened = open_run(run)
    sequences = np.random.default_rng(0).integers(0, 200, (3, 24)).astype(np.int32)
    norms = pairs.measure_norms(opened, sequences)
    params = opened.params()
    positions = np.arange(24, dtype=np.int32)[None].repeat(3, axis=0)
    arrays = (jnp.asarray(sequences), jnp.asarray(positions))
    walked = run_layers(opened.spec.model, params, *arrays)
    for one, (_, captured) in zip(norms, walked, strict=True):
        for name in ("query", "key"):
            lanes = oracles.float64(getattr(captured, name))
            first, second = np.split(lanes, 2, axis=-1)
            expected = np.hypot(first, second).mean(axis=(0, 1))
            np.testing.assert_allclose(one[f"{name}_norms"], expected, rtol=1e-5)


def test_a_choice_is_written_evaluated_and_trained_with(run, tmp_path):
    printed = pairs.choose_pairs(types.SimpleNamespace(**OPTIONS | {"workdir": str(run)}))
    chosen = json.loads((run / "pairs.json").read_text())
    P = open_run(run).spec.model.head_dim // 2
    assert printed["kept_pairs"] == printed["pairs"] // 2 == chosen["kept_pairs"]
    assert (run / "pairs.png").read_bytes().startswith(b"\x89PNG")
    assert chosen["text"]["split"] == "train"
    flags = {"split": "validation", "seq_len": "64", "max_windows": 8}
    (again,) = evaluate_run(run, pairs=str(run / "pairs.json"), **flags)
    assert again["loss"] == printed["loss"] != printed["loss_as_it_is"]
    (fastest,) = evaluate_run(run, pairs=f"0-{P // 2 - 1}", **flags)
    assert fastest["loss"] == printed["loss_p_rope"]
    (plain,) = evaluate_run(run, **flags)
    assert plain["loss"] == printed["loss_as_it_is"]
    # Elsewhere, where no record is yet; and with a budget that heads cannot share equally.
    output = tmp_path / "elsewhere"
    changed = {"workdir": str(run), "output": str(output), "per": ["model"], "keep": ["0.29"]}
    printed = pairs.choose_pairs(types.SimpleNamespace(**OPTIONS | changed))
    assert printed["loss_as_it_is"] == plain["loss"]
    *_, fastest = read_jsonl(output / "eval.jsonl")
    rotated = sum(np.broadcast_to(layer, 2).sum() for layer in fastest["rotated_pairs"])
    assert rotated == printed["kept_pairs"] == round(0.29 * printed["pairs"])
    records = evaluate_run(run, pairs="0-3", intervene="stop:0-3,stop:4-7", **flags)
    assert [record["encoding"] for record in records] == ["stop:0-3"]
    # A config names the file, and its spec has the pairs.
    config = default_config()
    config.model.update({"num_kv_heads": 2, "head_dim": 2 * P})
    config.model.num_layers = open_run(run).spec.model.num_layers
    config.model.rope_pairs = str(run / "pairs.json")
    assert resolve(config).model.rope_pairs == chosen["rope_pairs"]


def test_what_cannot_be_chosen_is_refused_in_one_line(run, tmp_path):
    def refused(**changed):
        options = types.SimpleNamespace(**OPTIONS | {"workdir": str(run)} | changed)
        return refusal(pairs.choose_pairs, options)

    assert refused(keep=["0.5", "0.01"]).startswith("--keep=0.01: keeps none of")
    assert refused(keep=["0"], per=["model"]).startswith("--keep=0: keeps none of")
    for share in ("-1", "1.1", "nan", "half"):
        assert refused(keep=[share]).startswith(f"--keep={share}: must be a share")
    assert refused(rule=["fast", "loud"]).startswith("--rule=loud: must be of change, norm, fast")
    assert refused(per=["kind"]).startswith("--per=kind: must be of head, layer, model")
    missing = str(tmp_path / "none.json")
    for given, problem in ((missing, "cannot be read"), ("0-99", "layer 0: '0-99' are no pairs")):
        error = refusal(evaluate_run, run, pairs=given)
        assert error.startswith(f"--pairs={given}: {problem}")
    stopped = tmp_path / "stopped"
    make_run(stopped, p=0.5)
    assert refused(workdir=str(stopped)).startswith(f"--workdir={stopped}: p-RoPE rotates")
    config = default_config()
    other = tmp_path / "analysis.json"
    for content in ("{}", "[]"):
        other.write_text(content)
        config.model.rope_pairs = str(other)
        assert refusal(resolve, config).startswith(f"config.model.rope_pairs={other}: is no file")
    config.model.rope_pairs = str(tmp_path / "none.json")
    assert "cannot be read" in refusal(resolve, config)
