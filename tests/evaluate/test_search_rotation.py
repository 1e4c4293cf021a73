"""prope.evaluate --search_rotation, against planted pairs and all subsets by the oracle decoder."""

import itertools

import jax
import numpy as np
import oracles
import pytest
from support.runs import edit_run, make_run, save_checkpoints
from support.text import read_lines

from prope.data.windows import Windows
from prope.errors import UsageError
from prope.inference.evaluation import LossOptions
from prope.inference.losses import LossEvaluation
from prope.inference.search import search_rotation, slowest, stop_greedily
from prope.workdir.run import open_run

P = 32


def eighths(place: str) -> list[frozenset]:
    return [frozenset((place, 4 * i + j) for j in range(4)) for i in range(P // 4)]


@pytest.mark.parametrize("seed", range(20))
def test_no_single_pair_can_be_stopped_beside_those_of_the_greedy_search(seed):
    """Costs add up; planted pairs cost nothing."""
    rng = np.random.default_rng(seed)
    places = ("full", "sliding")
    every_pair = list(itertools.product(places, range(P)))
    costs = 0.02 * rng.random(len(every_pair)) * (rng.random(len(every_pair)) < 0.6)
    cost_of = dict(zip(every_pair, costs, strict=True))
    asked = []

    def added(stopped):
        asked.append(stopped)
        return sum(map(cost_of.get, stopped))

    stopped = stop_greedily(eighths("full") + eighths("sliding"), added, 0.05)
    assert added(stopped) <= 0.05
    kept = set(every_pair) - stopped
    assert kept and stopped
    assert min(map(cost_of.get, kept)) > 0.05 - added(stopped)
    # On each level a band is tried alone, and perhaps beside others.
    assert len(set(asked)) <= 2 * (16 + 32 + 64)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (1, {31}),
        (3, {31, 30, 29}),
        (4, {31, 30, 29, 28}),
        (7, {31, 30, 29, 28, 27, 26, 25}),
        (32, {*range(32)}),
    ],
)
def test_of_equal_costs_the_slowest_are_stopped(allowed, expected):
    stopped = stop_greedily(eighths(""), len, allowed)
    assert stopped == {("", pair) for pair in expected}


def test_p_rope_stops_as_many_of_the_same_layers():
    rotating = {"full": [0, 1, 2, 3], "sliding": [4, 5, 6]}
    stopped = frozenset([("full", 0), ("sliding", 4), ("sliding", 5)])
    expected = {("full", 3), ("sliding", 5), ("sliding", 6)}
    assert slowest(rotating, stopped) == expected


# --- A planted answer -------------------------------------------------------------------------

SIZES = {
    "num_layers": 2,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 16,
    "head_dim": 8,
    "num_heads": 2,
    "embed_dim": 32,
    "hidden_dim": 32,
}
# Of the sliding and of the full layer: pairs whose lanes the queries lack, so that it does not
# matter whether they rotate. By the draw of the queries, all others do.
UNUSED = ({1, 2, 3}, {0, 3})
SEED = 24


@pytest.fixture(scope="module")
def planted(base):
    """A run, and its oracle: the loss with pairs of both layers stopped."""
    run = base / "planted"
    make_run(run, 1.0, **SIZES)
    edit_run(run, base)
    opened = open_run(run, 7)
    params = jax.tree.map(np.array, opened.params())
    query = params["layers"]["attn"]["q_einsum"]["w"]
    query[:] = np.random.default_rng(SEED).standard_normal(query.shape)
    for of_layer, unused in zip(query, UNUSED, strict=True):
        of_layer[..., np.isin(np.arange(8) % 4, list(unused))] = 0
    save_checkpoints(run, opened.config, {11: params})
    config = opened.config
    windows = Windows(config.data, config.model.vocab_size, "validation")
    batch = windows.read([0, windows.count // 2])

    def loss(*stopped) -> float:
        freqs = oracles.layer_frequencies(config.model)
        for of_layer, pairs in zip(freqs, stopped, strict=True):
            of_layer[list(pairs)] = 0
        inputs = (params, batch["tokens"], batch["positions"])
        logits = oracles.decoder(config.model, *inputs, freqs=freqs)
        chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        losses = np.logaddexp.reduce(logits, -1) - chosen
        return np.average(losses, weights=batch["weights"])

    return run, loss


def test_no_smaller_set_than_the_planted_one_keeps_the_loss(planted):
    _, loss = planted
    unchanged = loss((), ())
    assert loss(*UNUSED) == pytest.approx(unchanged, abs=1e-12)
    for sliding, full in itertools.product(((), (0,)), ((), (1,), (2,), (1, 2))):
        if sliding or full:
            growth = loss({*sliding} | UNUSED[0], {*full} | UNUSED[1]) - unchanged
            assert growth > 0.01


@pytest.mark.slow
def test_the_planted_set_is_found_and_an_interrupted_search_goes_on(planted, monkeypatch):
    run, loss = planted
    options = LossOptions(str(run), search_rotation=["all"], max_windows=2)
    evaluate = LossEvaluation.evaluate
    computed = []

    def fail_once(self, *arguments):
        computed.append(self)
        if len(computed) == 6:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    monkeypatch.setattr(LossEvaluation, "evaluate", fail_once)
    with pytest.raises(KeyboardInterrupt):
        search_rotation(options)
    assert len(read_lines(run / "eval.jsonl")) == 5
    result = search_rotation(options)
    encodings = [record.get("encoding") for record in read_lines(run / "eval.jsonl")]
    assert len(set(encodings)) == len(encodings) == result["evaluations"]
    assert len(computed) == 1 + len(encodings)
    assert search_rotation(options) == result, "all of it is in eval.jsonl"
    assert len(computed) == 1 + len(encodings)
    assert result["encoding"] == "stop:0-0@full+3-3@full+1-3@sliding"
    unchanged = pytest.approx(loss((), ()), rel=1e-6)
    assert result["loss"] == unchanged
    assert result["unchanged_loss"] == unchanged


def test_what_rotates_stands_beside_p_rope_with_as_many(planted):
    run, loss = planted
    result = search_rotation(LossOptions(str(run), search_rotation=["all"], max_windows=2))
    names = ("layers", "num_layers", "rotating", "of", "pairs")
    rows = [[row[name] for name in names] for row in result["rotating"]]
    sliding = ["sliding", 1, 1, 4, "0-0"]
    full = ["full", 1, 2, 4, "1-2"]
    assert rows == [sliding, full]
    p_rope = loss((1, 2, 3), (2, 3))
    assert result["p_rope"]["encoding"] == "stop:2-3@full+1-3@sliding"
    assert result["p_rope"]["loss"] == pytest.approx(p_rope, rel=1e-6)
    minus_found = result["p_rope"]["minus_found"]
    difference = p_rope - loss((), ())
    assert minus_found["difference"] == pytest.approx(difference, abs=1e-5)
    low, high = minus_found["interval"]
    assert low < difference < high


ONE = "--search_rotation=.*: "
REFUSED = [
    ({"search_rotation": ["local"]}, f"{ONE}there are no layers 'local', only 0 to 1, all sliding"),
    ({"search_rotation": ["0-2"]}, f"{ONE}there are no layers '0-2'"),
    ({"search_rotation": ["full", "1"]}, f"{ONE}layers of 1 are named twice; give each of them"),
    ({"seq_len": "1x,2x"}, f"{ONE}is at one length, and --seq_len names 2; rerun the command"),
    ({"step": "all"}, f"{ONE}is of one checkpoint, and the flags name 3; give --workdir of one"),
    ({"encoding": "yarn"}, f"{ONE}--encoding is given, too"),
    ({"intervene": "stop"}, f"{ONE}--intervene is given, too"),
    ({"window": ["8"]}, f"{ONE}--window is given, too"),
    ({"search_rotation": None, "tolerance": 0.1}, "--tolerance=0.1: goes with --search_rotation"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_what_cannot_be_searched(planted, flags, says, monkeypatch):
    monkeypatch.setattr(jax, "devices", None)  # which would initialise them
    run, _ = planted
    with pytest.raises(UsageError, match=says):
        search_rotation(LossOptions(**{"workdir": str(run), "search_rotation": ["all"]} | flags))


def test_a_run_must_rotate_and_have_no_scaling(runs, base):
    options = LossOptions(str(runs / "nope"), search_rotation=["all"])
    with pytest.raises(UsageError, match=f"{ONE}no pair of these layers rotates; name others"):
        search_rotation(options)
    scaled = {"model.rope_scaling_type": "linear", "model.rope_scaling_factor": 2.0}
    edit_run(runs / "nope", base, **scaled)
    with pytest.raises(UsageError, match=f"{ONE}the run has rope_scaling_type=linear"):
        search_rotation(options)
