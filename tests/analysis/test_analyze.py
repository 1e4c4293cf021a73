"""The analysis: against the forward pass, against float64, and on decoders with known heads."""

import itertools
import re

import jax
import numpy as np
import oracles
import pytest
from etils import epath
from scipy import stats
from support.heads import (
    KNOWN_HEAD_DIM,
    analysis_options,
    head_kinds,
    make_known_heads,
    text_with_q,
)
from support.models import draw_model, run_layers, small
from support.runs import make_run

from prope import model
from prope.analysis import analysis, census, compare, measures, page
from prope.config import default_config, set_layer_percentages
from prope.kernels import blockwise

H = KNOWN_HEAD_DIM
SCORING = measures.Scoring(H**-0.5)

# --- Capture --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("p", [0, 0.25, 0.75, 1, (1, 0.25, 0)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_captured_logits_are_what_the_forward_pass_takes_the_softmax_of(monkeypatch, p, kv_heads):
    whole = default_config()
    whole.model = small(num_kv_heads=kv_heads, head_dim=H)
    set_layer_percentages(whole, p if isinstance(p, tuple) else (p, p, p))
    config = whole.model
    params, tokens, positions = draw_model(config)
    scores_by_layer = []
    original = blockwise.einsum_to_float32

    def record(scores):
        scores_by_layer.append(np.asarray(scores))

    def recording_dot(equation, x, y):
        product = original(equation, x, y)
        if equation == "BKRH,BKSH->BKRS":
            jax.debug.callback(record, product)
        return product

    with monkeypatch.context() as patch:
        patch.setattr(blockwise, "einsum_to_float32", recording_dot)
        hidden = jax.block_until_ready(model.hidden_states(config, params, tokens, positions))
        jax.effects_barrier()
    layers = list(run_layers(config, params, tokens, positions))
    assert len(scores_by_layer) == len(layers) == 3
    T = tokens.shape[1]
    for scores, (_, captured) in zip(scores_by_layer, layers, strict=True):
        for row in range(len(tokens)):
            query = captured.rotated_query[row]
            ours = measures.logits(query, captured.rotated_key[row], SCORING)
            np.testing.assert_allclose(ours, scores[row].reshape(4, T, T), rtol=0, atol=1e-5)
            assert np.abs(ours).max() > 0.5
    output = model.final_norm(config, params["final_norm"], layers[-1][0])
    np.testing.assert_allclose(output, hidden, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_capture_costs_nothing_where_it_is_off(monkeypatch):
    config = small()
    params, tokens, positions = draw_model(config)

    def compiled():
        def loss(params):
            return model.hidden_states(config, params, tokens, positions).sum()

        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        return lowered.as_text(), lowered.compile().cost_analysis()["flops"]

    program = compiled()
    monkeypatch.setattr(model.Attention, "sow", lambda *args, **kwargs: False)
    jax.clear_caches()
    assert compiled() == program


# --- Measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize(
    ("p", "kv_heads"),
    [
        (0.75, 1),
        pytest.param(0, 2, marks=pytest.mark.slow),
        pytest.param(0.25, 4, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
    ],
)
def test_measures_are_those_of_the_formula(monkeypatch, p, kv_heads, block):
    config = small(num_kv_heads=kv_heads, head_dim=H, rope_percentage=float(p))
    params, tokens, positions = draw_model(config)
    *_, (_, captured) = run_layers(config, params, tokens, positions)
    monkeypatch.setattr(measures, "BLOCK", block)
    measures.measure.clear_cache()
    after = np.random.default_rng(0).random(tokens.shape) < 0.4
    by_sequence = measures.measure(captured, after, SCORING)._asdict()
    freqs = oracles.frequencies(H, p=p)
    expected = oracles.attention_measures(*captured[:3], freqs, after)
    assert by_sequence.keys() == expected.keys()
    for name, values in by_sequence.items():
        mean = np.mean(values, axis=0)
        np.testing.assert_allclose(mean, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    if p == 0:
        np.testing.assert_allclose(by_sequence["overlap_without_rotation"], 1, atol=1e-5)


def analysis_of(shares, scores, heads_per_key=1):
    """What a rank correlation reads of an analysis."""
    heads = [
        {"high_frequency_share": share, "positional": score}
        for share, score in zip(shares, scores, strict=True)
    ]
    layer = {"query_norms": [[1.0]] * heads_per_key, "key_norms": [[1.0]]}
    return {"heads": heads, "layers": [layer] * (len(heads) // heads_per_key)}


def test_the_rank_correlation_is_spearmans():
    shares, scores = np.random.default_rng(0).random((2, 20))
    expected = stats.spearmanr(shares, scores)
    found = census.rank_correlation([analysis_of(shares, scores)])
    assert found["rho"] == pytest.approx(expected.statistic)
    assert found["heads"] == 20
    assert found["p_value"] == pytest.approx(expected.pvalue, abs=0.02)
    perfect = census.rank_correlation([analysis_of(shares, shares)])
    assert perfect["rho"] == pytest.approx(1)
    assert perfect["p_value"] == pytest.approx(1e-4)  # never 0: 1 / (draws + 1)
    assert census.rank_correlation([analysis_of(np.zeros(20), scores)]) is None


@pytest.mark.parametrize("heads_per_key", [1, 2])
def test_heads_that_share_keys_or_a_run_are_no_independent_samples(heads_per_key):
    """Against all permutations: of the keys of a run, whose heads move together."""
    rng = np.random.default_rng(1)
    # Run 1 is above run 0 in both.
    shares, scores = rng.random((2, 2, 4 * heads_per_key))
    shares[1] += 5
    scores[1] += 5
    runs = [analysis_of(*run, heads_per_key) for run in zip(shares, scores, strict=True)]
    found = census.rank_correlation(runs)
    blocks = shares.reshape(2, 4, heads_per_key)
    orders = list(itertools.permutations(range(4)))

    def rho(first, second):
        moved = np.concatenate([blocks[0, first], blocks[1, second]])
        return stats.spearmanr(moved.ravel(), scores.ravel()).statistic

    assert found["rho"] == pytest.approx(rho(orders[0], orders[0]))
    assert found["rho"] > 0.5
    by_chance = np.array([rho(*both) for both in itertools.product(orders, orders)])
    share_above = (np.abs(by_chance) >= found["rho"] - 1e-9).mean()
    assert found["p_value"] == pytest.approx(share_above, abs=0.02)
    assert found["p_value"] > 0.05
    as_if_independent = stats.spearmanr(shares.ravel(), scores.ravel()).pvalue
    assert as_if_independent < found["p_value"] / 2


@pytest.mark.parametrize(("rotated", "share"), [(0, 0), (2, 2 / 16), (4, 4 / 16), (16, 4 / 16)])
def test_the_high_frequency_share_counts_rotated_pairs_only(rotated, share):
    norms = np.ones((2, 16), np.float32)
    zeros = np.zeros(2)
    equal = measures.Measures(norms, norms, norms, *[zeros] * 6, norms, norms)
    head, _ = census.score_heads(0, oracles.frequencies(H, p=rotated / 16), equal, SCORING)
    assert head["high_frequency_share"] == pytest.approx(share)


# --- Decoders whose heads are known ---------------------------------------------------------------


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(text_with_q())
    (base / "runs").mkdir()
    for p in (0, 0.75):
        make_known_heads(base / "runs" / f"p={p}", p)
    return base


def test_the_census_names_exactly_the_constructed_heads(known):
    options = analysis_options(text=str(known / "text.txt"), channels=4)
    found = analysis.analyse(known / "runs" / "p=0.75", options)
    assert head_kinds(found) == ["diagonal", "previous_token", "semantic", ""]
    _, _, semantic, even = found["heads"]
    assert semantic["overlap_without_rotation"] > 0.99
    assert even["entropy"] == pytest.approx(1, abs=1e-4)
    reasons = [(head["head"], head["why"]) for head in found["shown"]]
    assert reasons[0] == (0, "diagonal")
    assert (1, "previous_token") in reasons
    # The semantic head's channels are its two pairs, which do not rotate.
    semantic_channels = [channel for channel in found["channels"] if channel["head"] == 2]
    assert [channel["pair"] for channel in semantic_channels] == [12, 13]
    for channel in semantic_channels:
        assert channel["frequency"] == 0
        assert channel["stopped"] is None
        assert channel["removed"]


def test_without_rotation_the_positional_heads_vanish(known):
    options = analysis_options(text=str(known / "text.txt"))
    found = analysis.analyse(known / "runs" / "p=0", options)
    assert head_kinds(found) == ["", "", "semantic", ""]
    assert max(head["positional"] for head in found["heads"][:2]) < 0.05
    assert {head["high_frequency_share"] for head in found["heads"]} == {0}


# --- Comparisons and pages ------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_below_a_directory_are_compared(known, run_command):
    arguments = [f"--workdir={known / 'runs'}", f"--text={known / 'text.txt'}", "--channels=1"]
    done = run_command("prope.analyze", *arguments)
    assert done.code == 0, done.stderr
    assert done.result.keys() >= {"output", "sequences", "heads"}
    assert len(done.result["heads"]) == 8
    kinds = {row["p"]: row["kinds"] for row in done.result["comparison"]}
    assert kinds["p = 0"]["previous_token"] == 0
    assert kinds["p = 0.75"]["previous_token"] == 1
    assert kinds["p = 0"]["semantic"] == kinds["p = 0.75"]["semantic"] == 1
    written = (known / "runs/analysis/index.html").read_text()
    assert "p = 0.75" in written
    links = re.sub(r"data:[^\"]*|http-equiv", "", written)
    assert "http" not in links


@pytest.mark.slow
def test_runs_of_different_encodings_are_no_seeds_of_one_another(tmp_path):
    (tmp_path / "a.txt").write_text("What turns, and what does not.")
    linear = {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}
    runs = {
        "a": (0.5, {}),
        "b": (1.0, {}),
        "c": (0.5, {"rope_type": "partial"}),
        "d": (1.0, linear),
    }
    for name, (p, fields) in runs.items():
        make_run(tmp_path / "runs" / name, p, num_layers=1, max_wavelength=500.0, **fields)
    options = analysis_options(text=str(tmp_path / "a.txt"), channels=0)
    rows = analysis.analyse_all(epath.Path(tmp_path) / "runs", options)["comparison"]
    of_linear = "p = 1, rope_scaling_factor = 4.0, rope_scaling_type = linear"
    names = ["p = 0.5", "p = 0.5, rope_type = partial", "p = 1", of_linear]
    assert [(row["p"], row["runs"]) for row in rows] == [(name, 1) for name in names]
    assert of_linear in (tmp_path / "runs/analysis/index.html").read_text()


@pytest.mark.parametrize(
    ("p", "fields", "wavelengths", "slower"),
    [
        ((1.0, 0.5), {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, [1e4, 1e4], 4),
        # In sequences twice as long as training's: 2309.00071, definition 1.
        (0.75, {"rope_scaling_type": "dynamic", "original_seq_len": 16}, [1e4 * 2 ** (64 / 62)], 1),
    ],
)
def test_the_frequencies_of_an_analysis_are_those_of_the_runs_layers(
    tmp_path, p, fields, wavelengths, slower
):
    (tmp_path / "a.txt").write_text("What turns, and what does not.." * 9)
    percentages = p if isinstance(p, tuple) else (p,)
    make_run(tmp_path / "run", p, num_layers=len(percentages), **fields)
    options = analysis_options(text=str(tmp_path / "a.txt"), seq_len=32, channels=0)
    found = analysis.analyse(epath.Path(tmp_path) / "run", options)
    expected = []
    for percentage, wavelength in zip(percentages, wavelengths, strict=True):
        expected.append(oracles.frequencies(64, wavelength, percentage) / slower)
    np.testing.assert_allclose(found["frequencies"], expected, rtol=1e-5)


HEADS = [
    {
        "layer": 0,
        "head": number,
        "kind": kind,
        "positional": 0.1 * number,
        "high_frequency_share": 0.2 * number,
        "diagonal": 0.1,
        "previous_token": 0.1 * number,
        "first_token": 0.0,
    }
    for number, kind in enumerate(["", "semantic", "previous_token", "previous_token"])
]


def test_heads_of_no_kind_are_chosen_and_drawn_on_request_only():
    """Head 2 and 3 are previous-token heads, of which 3 is the stronger; none is diagonal."""
    heads = [head | {"head_of": None} for head in HEADS]
    assert census.strongest(heads) == {(0, 3): "previous_token", (0, 2): "previous_token"}
    every = {(0, 0), (0, 1), (0, 2), (0, 3)}
    for flags in ({"any_kind": True}, {"paper": True}):
        assert census.strongest(heads, **flags).keys() == every
    found = {"heads": heads, "shown": [], "asked": {"all_heads": None, "paper": False}}
    assert page.drawn_heads(found) == every - {(0, 0)}, "the first one is of no kind"
    found["shown"] = [heads[0]]
    assert page.drawn_heads(found) == every, "it is asked for"
    found = found | {"shown": [], "asked": {"all_heads": True, "paper": False}}
    assert page.drawn_heads(found) == every
    assert [head["head"] for head in page.by_strength(heads)] == [3, 2, 1, 0]


def test_the_lead_of_a_page_says_what_was_found():
    related = {"rho": 1.0, "p_value": 0.01, "heads": 4}
    lead = page.lead({"heads": HEADS, "rank_correlation": related})
    assert lead.startswith(
        "Of 4 heads: 2 mostly on the token before, 1 semantic. The more positional"
    )
    assert "more it uses" in lead
    assert "correlation 1.00" in lead
    by_chance = {"rho": 0.4, "p_value": 0.6, "heads": 4}
    lead = page.lead({"heads": HEADS, "rank_correlation": by_chance})
    assert "No relation found" in lead
    assert not re.search(r"0\.[46]", lead)


def test_runs_of_a_p_are_summed_up():
    shared = {
        "heads": HEADS,
        "layers": [{"query_norms": [[1.0]] * 4, "key_norms": [[1.0]]}],
        "encoding": {},
        "rope_percentage": 0.75,
        "rotated_pairs": 24,
        "channels": [],
    }
    analyses = [shared | {"loss": {"loss": loss}} for loss in (2.0, 3.0)]
    ((p, group),) = compare.by_p(analyses).items()
    row = compare.row(p, group)
    assert row["p"] == "p = 0.75"
    assert row["loss"] == 2.5
    assert row["loss_sd"] == pytest.approx(0.5**0.5)
    kinds = {"diagonal": 0, "previous_token": 4, "first_token": 0, "semantic": 2, "none": 2}
    assert row["kinds"] == kinds
    assert row["previous_token"] == pytest.approx(0.3)
    assert row["removed"] is None
