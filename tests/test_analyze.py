"""The analysis: against the forward pass, against float64 written here, and on decoders whose heads are known."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from makers import KNOWN_HEAD_DIM as H
from makers import analysis_options as asked
from makers import draw_model as draw
from makers import head_kinds as kinds
from makers import make_known_heads as constructed
from makers import make_run, small
from makers import run_layers as layers_of
from makers import text_with_q as text
from scipy import stats

from prope import model
from prope.analysis import analysis as analyze
from prope.analysis import census, compare, measures, page
from prope.config import default_config, set_layer_percentages
from prope.kernels import pairs
from prope.rope import frequencies

# --- Capture ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1, (1, 0.25, 0)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_captured_logits_are_what_the_forward_pass_takes_the_softmax_of(monkeypatch, p, kv_heads):
    whole = default_config()
    whole.model = small(num_kv_heads=kv_heads, head_dim=H)
    set_layer_percentages(whole, p if isinstance(p, tuple) else (p, p, p))
    config = whole.model
    params, tokens, positions = draw(config)
    seen, original = [], pairs._dot

    def record(equation, x, y):
        if equation == "BKRH,BKSH->BKRS":
            jax.debug.callback(
                lambda scores: seen.append(np.asarray(scores)), original(equation, x, y)
            )
        return original(equation, x, y)

    monkeypatch.setattr(pairs, "_dot", record)
    hidden = jax.block_until_ready(model.hidden_states(config, params, tokens, positions))
    jax.effects_barrier()
    monkeypatch.setattr(pairs, "_dot", original)
    made = list(layers_of(config, params, tokens, positions))
    assert len(seen) == len(made) == 3
    T = tokens.shape[1]
    for scores, (_, captured) in zip(seen, made, strict=True):
        for row in range(len(tokens)):
            ours = measures.logits(captured.rotated_query[row], captured.rotated_key[row])
            np.testing.assert_allclose(ours, scores[row].reshape(4, T, T), rtol=0, atol=1e-5)
            assert np.abs(ours).max() > 0.5
    out = model.final_norm(params["final_norm"], made[-1][0])
    np.testing.assert_allclose(out, hidden, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_capture_costs_nothing_where_it_is_off(monkeypatch):
    config = small()
    params, tokens, positions = draw(config)

    def compiled():
        def loss(params):
            return model.hidden_states(config, params, tokens, positions).sum()

        made = jax.jit(jax.value_and_grad(loss)).lower(params)
        return made.as_text(), made.compile().cost_analysis()["flops"]

    program = compiled()
    monkeypatch.setattr(model.Attention, "sow", lambda *args, **kwargs: False)
    jax.clear_caches()
    assert compiled() == program


# --- Measures ---------------------------------------------------------------------------------------------------


def oracle(captured, turns, after):
    """Everything that `measure` says, in float64 by loops over heads and queries; rotation by complex numbers."""
    query, key, value = (np.asarray(x, np.float64) for x in captured[:3])
    B, T, N, H = query.shape
    K, P = key.shape[2], H // 2

    def pairs(x):
        return x[..., :P] + 1j * x[..., P:]

    found = {name: [] for name in measures.Measures._fields}
    for name, x in (("query_norms", query), ("key_norms", key), ("value_norms", value)):
        found[name] = np.abs(pairs(x)).mean(axis=(0, 1))
    for n in range(N):
        rows = {
            name: []
            for name in (*census.SCORES, "to_first", "to_others", "after_token", "elsewhere")
        }
        for b in range(B):
            k = pairs(key[b, :, n // (N // K)])
            for i in range(1, T):
                q = pairs(query[b, i, n])
                j = np.arange(i + 1)
                parts = (
                    q.conj() * k[: i + 1] * np.exp(1j * (j - i)[:, None] * turns)
                ).real / H**0.5
                rows["to_first"].append(parts[0])
                rows["to_others"].append(parts[1:].mean(axis=0))
                if i >= 2:
                    free = np.exp((q.conj() * k[: i + 1]).real.sum(axis=1) / H**0.5)
                    w = np.exp(parts.sum(axis=1))
                    w, free = w / w.sum(), free / free.sum()
                    rows["diagonal"].append(w[i])
                    rows["previous_token"].append(w[i - 1])
                    rows["first_token"].append(w[0])
                    rows["after_token"].append(w[i - 1] * after[b, i])
                    rows["elsewhere"].append(w[0] * (1 - after[b, i]))
                    rows["entropy"].append(-(w * np.log(w)).sum() / np.log(i + 1))
                    rows["distance"].append((w * (i - j)).sum())
                    rows["overlap_without_rotation"].append(np.minimum(w, free).sum())
        for name, values in rows.items():
            found[name].append(np.mean(values, axis=0))
    return measures.Measures(**{name: np.array(values) for name, values in found.items()})


@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize(
    ("p", "kv_heads"),
    [
        (0.75, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 2), (0.25, 4), (1, 2))),
    ],
)
def test_measures_are_those_of_the_formula(monkeypatch, p, kv_heads, block):
    config = small(num_kv_heads=kv_heads, head_dim=H, rope_percentage=float(p))
    params, tokens, positions = draw(config)
    *_, (_, captured) = layers_of(config, params, tokens, positions)
    monkeypatch.setattr(measures, "BLOCK", block)
    measures.measure.clear_cache()
    after = np.random.default_rng(0).random(tokens.shape) < 0.4
    ours = jax.tree.map(lambda values: values.mean(axis=0), measures.measure(captured, after))
    expected = oracle(captured, frequencies(H, rope_percentage=p), after)
    for name, values in ours._asdict().items():
        np.testing.assert_allclose(
            values, getattr(expected, name), rtol=2e-5, atol=2e-6, err_msg=name
        )
    if p == 0:
        np.testing.assert_allclose(ours.overlap_without_rotation, 1, atol=1e-5)


@pytest.mark.slow
def test_a_view_is_part_of_the_whole():
    config = small(head_dim=H)
    params, tokens, positions = draw(config)
    (_, captured), *_ = layers_of(config, params, tokens, positions)
    chosen = [0, 2, 5, 6, 11]
    view = jax.device_get(measures.view(captured, np.array(chosen)))
    whole = measures.weights(captured.rotated_query[0], captured.rotated_key[0], jnp.arange(12))
    np.testing.assert_allclose(view.weights, whole[:, chosen][:, :, chosen], atol=1e-6)
    names = [f"t{i}" for i in range(12)]
    for head in range(4):
        shown = census.show_head(view, head, [2, 5, 11], [0, 6], names)
        table = shown["table"]
        np.testing.assert_array_equal(shown["map"], view.weights[head][[1, 2, 4]][:, [1, 2, 4]])
        q = np.asarray(captured.query[0, :, head], np.float64)
        k = np.asarray(captured.key[0, :, head // 2], np.float64)
        bounds = [np.linalg.norm(q[i]) * np.linalg.norm(k[i]) / H**0.5 for i in (0, 6)]
        np.testing.assert_allclose(table["upper_bound"], bounds, rtol=1e-5)
        before = np.linalg.norm(q[6]) * np.linalg.norm(k[5]) / H**0.5
        assert table["previous_upper_bound"] == [None, pytest.approx(before)]
        apart = np.log(float(whole[head, 6, 6])) - np.log(float(whole[head, 6, 5]))
        assert table["diagonal"][1] - table["previous_token"][1] == pytest.approx(apart, abs=1e-4)
        assert table["previous_token"][0] is None and table["tokens"] == ["t0", "t6"]


def run_of(heads, sharing=1):
    """What a rank correlation reads of an analysis in which `sharing` query heads share a key head."""
    return {"heads": heads, "layers": [{"query_norms": [[1.0]] * sharing, "key_norms": [[1.0]]}]}


def test_the_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    shares, scores = rng.random(20), rng.random(20)
    heads = [
        {"high_frequency_share": a, "positional": b} for a, b in zip(shares, scores, strict=True)
    ]
    ranks = [np.argsort(np.argsort(x)) for x in (shares, scores)]
    expected = np.corrcoef(*ranks)[0, 1]
    found = census.rank_correlation([run_of(heads)])
    assert found["rho"] == pytest.approx(expected) and found["heads"] == 20
    assert found["p_value"] == pytest.approx(stats.pearsonr(*ranks).pvalue, abs=0.02)
    equal = [head | {"positional": head["high_frequency_share"]} for head in heads]
    perfect = census.rank_correlation([run_of(equal)])
    assert (perfect["rho"], perfect["p_value"]) == (
        pytest.approx(1),
        pytest.approx(1e-4),
    )  # never 0: 1 / (draws + 1)
    assert (
        census.rank_correlation([run_of([head | {"high_frequency_share": 0.0} for head in heads])])
        is None
    )


@pytest.mark.parametrize("sharing", [1, 2])
def test_heads_that_share_keys_or_a_run_are_no_independent_samples(sharing):
    """Against all permutations: of the keys of a run, whose heads move together, and in every run apart."""
    rng = np.random.default_rng(1)
    shares, scores = rng.random((2, 2, 4 * sharing)) + np.array(
        [[0.0], [5.0]]
    )  # run 1 is above run 0 in both
    runs = [
        run_of(
            [{"high_frequency_share": a, "positional": b} for a, b in zip(*run, strict=True)],
            sharing,
        )
        for run in zip(shares, scores, strict=True)
    ]
    found = census.rank_correlation(runs)
    ranks = stats.rankdata(scores)

    def rho(*orders):
        moved = [
            run.reshape(4, -1)[list(order)].ravel()
            for run, order in zip(shares, orders, strict=True)
        ]
        return np.corrcoef(stats.rankdata(moved), ranks)[0, 1]

    orders = list(itertools.permutations(range(4)))
    chances = np.abs([rho(a, b) for a in orders for b in orders]) >= abs(found["rho"]) - 1e-9
    assert found["rho"] == pytest.approx(rho(orders[0], orders[0])) and found["rho"] > 0.5
    assert found["p_value"] == pytest.approx(chances.mean(), abs=0.02) and found["p_value"] > 0.05
    assert stats.spearmanr(shares.ravel(), scores.ravel()).pvalue < found["p_value"] / 2, (
        "as if heads were independent"
    )


def test_the_high_frequency_share_counts_turned_pairs_only():
    norms = np.ones((2, 16), np.float32)
    zeros = np.zeros(2)
    made = measures.Measures(norms, norms, norms, *[zeros] * 6, norms, norms)
    shares = [
        census.score_heads(0, frequencies(H, rope_percentage=rotated / 16), made)[0][
            "high_frequency_share"
        ]
        for rotated in (0, 2, 4, 16)
    ]
    assert shares == pytest.approx([0, 2 / 16, 4 / 16, 4 / 16])


# --- Decoders whose heads are known -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(text())
    (base / "runs").mkdir()
    for p in (0, 0.75):
        constructed(base / "runs" / f"p={p}", p)
    return base


def test_the_census_names_exactly_the_constructed_heads(known):
    given = asked(text=str(known / "text.txt"), channels=4)
    found = analyze.analyse(known / "runs" / "p=0.75", given)
    assert kinds(found) == ["diagonal", "previous_token", "semantic", ""]
    diagonal, previous, semantic, even = found["heads"]
    assert diagonal["diagonal"] > 0.9 and previous["previous_token"] > 0.9  # epsilon = 0.1
    assert semantic["overlap_without_rotation"] > 0.99 and even["entropy"] == pytest.approx(
        1, abs=1e-4
    )
    assert [(head["head"], head["why"]) for head in found["shown"][:1]] == [(0, "diagonal")]
    assert (1, "previous_token") in [(head["head"], head["why"]) for head in found["shown"]]
    # The semantic head's channels are the two pairs that it was given, which are not turned.
    of_semantic = [c for c in found["channels"] if c["head"] == 2]
    assert [c["pair"] for c in of_semantic] == [12, 13] and all(
        c["frequency"] == 0 for c in of_semantic
    )
    assert all(c["stopped"] is None and c["removed"] for c in of_semantic)
    # In a head that is exactly diagonal the logit to itself is the upper bound (Theorem 5.3, Table 3).
    table = next(head["table"] for head in found["shown"] if head["head"] == 0)
    np.testing.assert_allclose(table["diagonal"], table["upper_bound"], rtol=1e-4)
    table = next(head["table"] for head in found["shown"] if head["head"] == 1)
    np.testing.assert_allclose(
        table["previous_token"][1:], table["previous_upper_bound"][1:], rtol=1e-4
    )


def test_without_rotation_the_positional_heads_vanish(known):
    found = analyze.analyse(known / "runs" / "p=0", asked(text=str(known / "text.txt")))
    assert kinds(found) == ["", "", "semantic", ""]
    assert max(head["positional"] for head in found["heads"][:2]) < 0.05
    assert all(head["high_frequency_share"] == 0 for head in found["heads"])


@pytest.mark.slow
def test_runs_below_a_directory_are_compared(known, run_command):
    arguments = [f"--workdir={known / 'runs'}", f"--text={known / 'text.txt'}", "--channels=1"]
    done = run_command("prope.analyze", *arguments)
    assert done.code == 0, done.stderr
    assert done.result.keys() >= {"output", "sequences", "heads"} and len(done.result["heads"]) == 8
    rows = {row["p"]: row for row in done.result["comparison"]}
    assert (
        rows["p = 0"]["kinds"]["previous_token"] == 0
        and rows["p = 0.75"]["kinds"]["previous_token"] == 1
    )
    assert rows["p = 0"]["kinds"]["semantic"] == rows["p = 0.75"]["kinds"]["semantic"] == 1
    written = (known / "runs/analysis/index.html").read_text()
    assert "p = 0.75" in written and "http" not in re.sub(r"data:[^\"]*", "", written).replace(
        "http-equiv", ""
    )


@pytest.mark.slow
def test_runs_of_different_encodings_are_no_seeds_of_one_another(tmp_path):
    (tmp_path / "a.txt").write_text("What turns, and what does not.")
    shared = {"num_layers": 1, "max_wavelength": 500.0}
    for name, p, fields in (
        ("a", 0.5, {}),
        ("b", 1.0, {}),
        ("c", 0.5, {"rope_type": "partial"}),
        ("d", 1.0, {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}),
    ):
        make_run(tmp_path / "runs" / name, p, **shared | fields)
    given = asked(text=str(tmp_path / "a.txt"), channels=0)
    rows = analyze.analyse_all(epath.Path(tmp_path) / "runs", given)["comparison"]
    linear = "p = 1, rope_scaling_factor = 4.0, rope_scaling_type = linear"
    assert [row["p"] for row in rows] == [
        "p = 0.5",
        "p = 0.5, rope_type = partial",
        "p = 1",
        linear,
    ]
    assert [row["runs"] for row in rows] == [1] * 4
    assert linear in (tmp_path / "runs/analysis/index.html").read_text()


def test_pages_say_what_was_found():
    heads = [
        {
            "layer": 0,
            "head": n,
            "kind": kind,
            "positional": 0.1 * n,
            "high_frequency_share": 0.2 * n,
            "diagonal": 0.1,
            "previous_token": 0.1 * n,
            "first_token": 0.0,
        }
        for n, kind in enumerate(["", "semantic", "previous_token", "previous_token"])
    ]
    found = {"heads": heads, "rank_correlation": {"rho": 1.0, "p_value": 0.01, "heads": 4}}
    assert page.lead(found).startswith(
        "Of 4 heads: 2 mostly the token before, 1 semantic. The more positional"
    )
    assert "more it uses" in page.lead(found) and "correlation 1.00" in page.lead(found)
    chance = page.lead(found | {"rank_correlation": {"rho": 0.4, "p_value": 0.6, "heads": 4}})
    assert "No relation found" in chance and "0.4" not in chance and "0.6" not in chance
    found |= {"layers": [{"query_norms": [[1.0]] * 4, "key_norms": [[1.0]]}], "encoding": {}}
    analysis = found | {
        "rope_percentage": 0.75,
        "rotated_pairs": 24,
        "loss": {"loss": 2.0},
        "channels": [],
    }
    (row,) = (
        compare.row(p, group)
        for p, group in compare.by_p([analysis, analysis | {"loss": {"loss": 3.0}}]).items()
    )
    assert (
        row["p"] == "p = 0.75" and row["loss"] == 2.5 and row["loss_sd"] == pytest.approx(0.5**0.5)
    )
    assert row["kinds"] == {
        "diagonal": 0,
        "previous_token": 4,
        "first_token": 0,
        "semantic": 2,
        "none": 2,
    }
    assert row["previous_token"] == pytest.approx(0.3) and row["removed"] is None
