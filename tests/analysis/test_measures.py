"""Numbers of the analysis against float64: measures, channels, kinds of layers, several devices."""

import itertools
import json
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from etils import epath
from support.heads import (
    KNOWN_HEAD_DIM,
    analysis_options,
    assert_channel,
    compare_analyses,
    make_walk,
)
from support.models import ALL_SWITCHES, draw_model, run_layers, small
from support.processes import on_eight_devices
from support.runs import make_run
from support.sweeps import Page, draw_picture, map_values

from prope import model, sharding
from prope.analysis import analysis, census, channels, measures, walk
from prope.pages import analysis as page
from prope.pages import drawing
from prope.pages.heads import maps

SCORING = measures.Scoring(KNOWN_HEAD_DIM**-0.5)

# --- One layer ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_capture_costs_nothing_where_it_is_off(monkeypatch):
    spec = small()
    params, tokens, positions = draw_model(spec)

    def compiled():
        def loss(params):
            return model.hidden_states(spec, params, tokens, positions).sum()

        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        return lowered.as_text(), lowered.compile().cost_analysis()["flops"]

    program = compiled()
    monkeypatch.setattr(model.Attention, "sow", lambda *args, **kwargs: False)
    jax.clear_caches()
    assert compiled() == program


@pytest.mark.parametrize(
    ("p", "kv_heads", "block"), [(0.75, 1, 5), pytest.param(0, 2, 128, marks=pytest.mark.slow)]
)
def test_measures_are_those_of_the_formula(monkeypatch, p, kv_heads, block):
    spec = small(num_kv_heads=kv_heads, head_dim=KNOWN_HEAD_DIM, rope_percentage=float(p))
    params, tokens, positions = draw_model(spec)
    *_, (_, captured) = run_layers(spec, params, tokens, positions)
    monkeypatch.setattr(measures, "BLOCK", block)
    measures.measure.clear_cache()
    after = np.random.default_rng(0).random(tokens.shape) < 0.4
    by_sequence = measures.measure(captured, after, SCORING)._asdict()
    freqs = oracles.frequencies(KNOWN_HEAD_DIM, p=p)
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
    from scipy import stats

    shares, scores = np.random.default_rng(0).random((2, 20))
    expected = stats.spearmanr(shares, scores)
    found = census.rank_correlation(analysis_of(shares, scores))
    assert found["rho"] == pytest.approx(expected.statistic)
    assert found["heads"] == 20
    assert found["p_value"] == pytest.approx(expected.pvalue, abs=0.02)
    perfect = census.rank_correlation(analysis_of(shares, shares))
    assert perfect["rho"] == pytest.approx(1)
    assert perfect["p_value"] == pytest.approx(1e-4)  # never 0: 1 / (draws + 1)
    assert census.rank_correlation(analysis_of(np.zeros(20), scores)) is None


def test_heads_that_share_keys_are_no_independent_samples():
    """Against all permutations of the keys, whose two heads move together and are much alike."""
    from scipy import stats

    rng = np.random.default_rng(1)
    by_key = rng.random((2, 5, 1)) + 0.01 * rng.random((2, 5, 2))
    shares, scores = by_key
    scores += shares
    found = census.rank_correlation(analysis_of(shares.ravel(), scores.ravel(), 2))

    def rho(order):
        return stats.spearmanr(shares[list(order)].ravel(), scores.ravel()).statistic

    orders = itertools.permutations(range(5))
    by_chance = np.array(list(map(rho, orders)))
    assert found["rho"] == pytest.approx(by_chance[0])
    share_above = (np.abs(by_chance) >= found["rho"] - 1e-9).mean()
    assert found["p_value"] == pytest.approx(share_above, abs=0.02)


def test_heads_of_a_key_are_permuted_together_whatever_their_number():
    """Layers of two keys of two heads, and of one key of four."""
    layers = [{"query_norms": [0] * 4, "key_norms": [0] * keys} for keys in (2, 1, 2, 1)]
    permuted = census.permute_by_key(layers, np.arange(16.0), 50)
    assert len(np.unique(permuted, axis=0)) > 20
    expected = {2: [(0, 1), (2, 3), (8, 9), (10, 11)], 4: [(4, 5, 6, 7), (12, 13, 14, 15)]}
    for row in permuted.reshape(50, 4, 4):
        for size, first in ((2, 0), (4, 1)):
            blocks = row[first::2].reshape(-1, size)
            assert sorted(map(tuple, blocks)) == expected[size]


def measures_of(query, key) -> measures.Measures:
    """Measures of these norms [N, P] and [K, P], of which nothing else is read."""
    scores = [np.zeros(len(query))] * 6
    return measures.Measures(query, key, key, *scores, query, query)


# --- Channels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotates", [range(16), range(4), range(2, 16)])
def test_channels_are_slow_or_unrotated_and_the_strongest(rotates):
    """The last ones as of rope_type=reversed: the fastest pairs do not rotate."""
    rng = np.random.default_rng(0)
    query = rng.random((4, 16))
    key = rng.random((2, 16))
    query[:, :6] += 2  # the fast ones would be chosen, if they could
    freqs = np.where(np.isin(np.arange(16), rotates), oracles.frequencies(KNOWN_HEAD_DIM), 0)
    freqs = np.stack([freqs, np.where(np.arange(16) == 1, 0, freqs)])  # the second key head's
    scoring = measures.Scoring(SCORING.scale, sliding_window=5)
    layer = types.SimpleNamespace(number=5, frequencies=freqs)
    found = channels.strongest_channels(layer, measures_of(query, key), scoring, 100, 3)
    strength = query * np.repeat(key, 2, axis=0) * SCORING.scale
    strengths = {}
    for (head, pair), value in np.ndenumerate(strength):
        if pair >= 8 or freqs[head // 2, pair] == 0:
            strengths[head, pair] = value
    strongest = sorted(strengths, key=strengths.get, reverse=True)[:3]
    assert [(channel["head"], channel["pair"]) for channel in found] == strongest
    for channel, place in zip(found, strongest, strict=True):
        assert channel["strength"] == strengths[place]
        assert channel["largest_rotation"] == pytest.approx(4 * freqs[place[0] // 2, place[1]])


DYNAMIC = {"rope_scaling_type": "dynamic", "original_seq_len": 8}
YARN = {"logit_scale": "yarn", "logit_scale_factor": 8.0}  # of the layer that rotates


@pytest.mark.parametrize(("p", "fields"), [((1.0,), DYNAMIC), ((1.0, 0.0), YARN)])
def test_a_layer_runs_as_in_the_model(tmp_path, p, fields):
    """With the scaling for the length that is read, and a logit scale of its own."""
    spec, params = make_run(tmp_path / "run", p, num_layers=len(p), **fields)
    run = make_walk(tmp_path / "run")
    tokens = jnp.asarray(run.tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = model.hidden_states(spec.model, params, tokens, positions)
    logits = oracles.float64(model.logits(spec.model, params, hidden))
    expected = oracles.mean_losses(logits, run.tokens)
    np.testing.assert_allclose(run.losses(run.enter(), 0), expected, atol=2e-5)


def test_the_frequencies_of_an_analysis_are_those_of_the_runs_layers(tmp_path):
    (tmp_path / "a.txt").write_text("What turns, and what does not.." * 9)
    # In sequences twice as long as training's: 2309.00071, definition 1.
    fields = {"rope_scaling_type": "dynamic", "original_seq_len": 16}
    make_run(tmp_path / "run", (1.0, 0.5), num_layers=2, **fields)
    options = analysis_options(text=str(tmp_path / "a.txt"), seq_len=32, channels=0)
    found = analysis.analyse(epath.Path(tmp_path) / "run", options)
    expected = [oracles.frequencies(64, 1e4 * 2 ** (64 / 62), p) for p in (1.0, 0.5)]
    np.testing.assert_allclose(found["frequencies"], expected, rtol=1e-5)
    assert [layer["rotated_pairs"] for layer in found["layers"]] == [32, 16]
    assert found["loss"] is None and found["channels"] == []


# --- Six layers of two kinds, with all switches ---------------------------------------------------

B = 3
T = 20
H = 16
W = 6
SCALE = ALL_SWITCHES["attention_scale"]
CAP = 3.0
FIELDS = ALL_SWITCHES | {"attention_softcap": CAP, "head_dim": H, "embed_dim": 32}
# Layers 4 and 5 have the keys and values of layers 3 and 2.
WINDOWS = [W, W, None, W, W, None]
LOCAL = oracles.frequencies(H, 100.0, 0.75)
GLOBAL = oracles.frequencies(24, p=0.25)
FREQUENCIES = [LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL]
PLACES = [(4, 2, 5), (5, 1, 11), (0, 3, 1)]  # layer, head, pair
SHOWN = ("4.2", "5.3")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The analysis, the model, the parameters, the tokens, and what every layer attends with."""
    run = tmp_path_factory.mktemp("kinds") / "run"
    spec, params = make_run(run, 0.25, **FIELDS)
    tokens = np.random.default_rng(0).integers(3, 12, (B, T)).astype(np.int32)
    names = [[f"t{token}" for token in row] for row in tokens]
    options = analysis_options(
        head_of="t5",
        channels=5,
        heads=",".join(SHOWN),
        channel=",".join(".".join(map(str, place)) for place in PLACES),
        tokens="0,1,9,15",
        window="4:18",
    )
    layers = []

    def capture(query, key, value, positions, freqs):
        rotated = oracles.rotate_qkv(query, key, value, positions, freqs)
        layers.append((query, key, value, *rotated[:2]))
        return rotated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            analysis,
            "read_sequences",
            lambda run, options: (tokens, names, {"source": "drawn", "split": None}),
        )
        patch.setattr(walk, "_TOKENS", 2 * T)  # of two batches, of which the second is filled up
        found = analysis.analyse(run, options)
    losses = loss_of(spec.model, params, tokens, capture)
    assert found["loss"]["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    return found, spec.model, params, tokens, layers


def loss_of(spec, params, tokens, rotate_fn):
    """The mean loss of every sequence, in float64."""
    positions = np.tile(np.arange(T), (B, 1))
    logits = oracles.decoder(
        spec, params, tokens, positions, freqs=FREQUENCIES, rotate_fn=rotate_fn
    )
    return oracles.mean_losses(logits, tokens)


@pytest.mark.parametrize("layer", range(6))
def test_a_layer_is_measured_with_its_own_window_scale_cap_and_frequencies(case, layer):
    found, _, _, tokens, layers = case
    after = np.pad(tokens[:, :-1] == 5, ((0, 0), (1, 0)))
    window = WINDOWS[layer]
    freqs = FREQUENCIES[layer]
    np.testing.assert_allclose(found["frequencies"][layer], freqs, rtol=1e-5)
    query, key, value, *_ = layers[layer]
    expected = oracles.attention_measures(query, key, value, freqs, after, SCALE, CAP, window)
    record = found["layers"][layer]
    assert record["sliding_window"] == window
    for name in ("query_norms", "key_norms", "value_norms"):
        np.testing.assert_allclose(record[name], expected[name], rtol=2e-5)
    heads = [head for head in found["heads"] if head["layer"] == layer]
    after_token = expected["after_token"] / after[:, 2:].mean()
    elsewhere = expected["elsewhere"] / (~after[:, 2:window]).mean()
    expected["head_of"] = np.minimum(after_token, elsewhere)
    strength = strengths(expected)
    quarter = len(freqs) // 4
    fast = strength[:, :quarter] * (freqs[:quarter] > 0)
    expected["high_frequency_share"] = fast.sum(1) / strength.sum(1)
    for name in (*census.SCORES, "head_of", "high_frequency_share"):
        np.testing.assert_allclose(
            [head[name] for head in heads], expected[name], rtol=1e-4, err_msg=name
        )
    for channel in found["channels"]:
        if channel["layer"] == layer:
            assert_contributions(channel, expected, freqs, min(window or T, T))


def strengths(expected):
    """What pairs can add to logits, [N, P]."""
    keys = expected["key_norms"]
    return SCALE * expected["query_norms"] * np.repeat(keys, 4 // len(keys), axis=0)


def assert_contributions(channel, expected, freqs, reach):
    """Compares a channel with what is expected of its layer."""
    pair = channel["pair"]
    place = (channel["head"], pair)
    assert pair >= len(freqs) // 2 or freqs[pair] == 0
    assert channel["strength"] == pytest.approx(strengths(expected)[place], rel=1e-4)
    rotation = freqs[pair] * (reach - 1)
    assert channel["largest_rotation"] == pytest.approx(rotation, rel=1e-4)
    for name in ("to_first", "to_others"):
        assert channel[name] == pytest.approx(expected[name][place], abs=1e-5), name


def rotated(layers, shown):
    """Rotated queries and keys of a head, [T, H] each, of the first sequence."""
    *_, query, key = layers[shown["layer"]]
    head = shown["head"]
    return query[0, :, head], key[0, :, key_head(key, head)]


def key_head(key, head):
    """Which head of keys [B, T, K, H] one of four query heads attends to."""
    return head * key.shape[2] // 4


@pytest.mark.parametrize("number", range(2))
def test_maps_and_tables_have_the_capped_logits_of_the_window_and_capped_bounds(case, number):
    found, _, _, _, layers = case
    window = found["window"]["positions"]
    assert window == [0, *range(4, 18)]
    shown = found["shown"][number]
    query, key = rotated(layers, shown)
    logits, _ = oracles.softcap(SCALE * query @ key.T, CAP)
    seen = oracles.causal_mask(T, window=WINDOWS[shown["layer"]])[0]
    weights = oracles.softmax(np.where(seen, logits, -np.inf))
    square = np.ix_(window, window)
    np.testing.assert_allclose(shown["logits"], logits[square], atol=1e-4)
    np.testing.assert_allclose(shown["map"], weights[square], atol=1e-5)
    picture, _ = maps(found, shown)
    is_hidden = np.isnan(map_values(picture)["logits"])
    np.testing.assert_array_equal(is_hidden, ~seen[square])
    lengths = np.outer(np.linalg.norm(query, axis=1), np.linalg.norm(key, axis=1))
    bounds, _ = oracles.softcap(SCALE * lengths, CAP)
    table = shown["table"]
    rows = np.array(table["positions"])
    assert rows.tolist() == [0, 1, 9, 15]
    for name, values in (("upper_bound", bounds), ("diagonal", logits)):
        np.testing.assert_allclose(table[name], values[rows, rows], rtol=1e-4, atol=1e-5)
    for name, values in (("previous_upper_bound", bounds), ("previous_token", logits)):
        before = values[rows[1:], rows[1:] - 1]
        np.testing.assert_allclose(table[name][1:], before, rtol=1e-4, atol=1e-5)
        assert table[name][0] is None


def test_channels_are_described_as_far_as_the_window_reaches(case):
    found, _, _, _, layers = case
    for record, (layer, head, pair) in zip(found["shown_channels"], PLACES, strict=True):
        query, key, *_ = layers[layer]
        lanes = [1, 1j]
        freqs = FREQUENCIES[layer]
        expected = oracles.channel(
            query[:, :, head, pair :: len(freqs)] @ lanes,
            key[:, :, key_head(key, head), pair :: len(freqs)] @ lanes,
            freqs[pair],
            1 / SCALE**2,
        )
        reach = min(WINDOWS[layer] or T, T)
        expected["to_first"] = expected["to_first"][: reach - 1]
        expected["to_others"] = expected["to_others"][:reach]
        assert_channel(record, expected, atol=1e-4)
        assert record["sliding_window"] == WINDOWS[layer]


def changed(change, channel):
    """A `rotate_fn` that stops or removes a channel."""
    lanes = [channel["pair"], channel["pair"] + len(FREQUENCIES[channel["layer"]])]
    head = channel["head"]
    layers = iter(range(6))

    def rotate_fn(query, key, value, positions, freqs):
        rotated = oracles.rotate_qkv(query, key, value, positions, freqs)
        if next(layers) != channel["layer"]:
            return rotated
        rotated_query, *keys_and_values = rotated
        heads_per_key = 4 // key.shape[2]
        rotated_key, value = [np.repeat(x, heads_per_key, axis=2) for x in keys_and_values]
        if change == "removed":
            rotated_query[:, :, head, lanes] = 0
        else:
            rotated_query[:, :, head, lanes] = query[:, :, head, lanes]
            rotated_key[:, :, head, lanes] = key[:, :, key_head(key, head), lanes]
        return rotated_query, rotated_key, value

    return rotate_fn


def test_losses_without_a_channel_are_those_of_the_changed_formula(case):
    found, spec, params, tokens, _ = case
    changes = []
    for channel in found["channels"]:
        for change in ("stopped", "removed"):
            if channel[change] is None:
                continue
            changes.append(change)
            expected = loss_of(spec, params, tokens, changed(change, channel)).mean()
            assert channel[change]["loss"] == pytest.approx(expected, rel=1e-5)
            difference = expected - found["loss"]["loss"]
            assert channel[change]["difference"] == pytest.approx(difference, abs=3e-5)
    assert set(changes) == {"stopped", "removed"}


def test_the_page_shows_every_kind_of_layer(case, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing.Picture, "render", lambda self: b"")
    found, *_ = case
    kinds = [
        (kind["layers"], kind["sliding_window"], kind["max_wavelength"], kind["rope_percentage"])
        for kind in found["kinds"]
    ]
    assert kinds == [([0, 1, 3, 4], W, 100.0, 0.75), ([2, 5], None, 10_000.0, 0.25)]
    (table,) = [t for t in Page(page.write(tmp_path, found)).tables if "wavelength" in t[0]]
    assert [row[-1] for row in table[1:]] == ["6 of 8", "3 of 12"]
    usage = draw_picture(page.usage(found)).axes[0]
    borders = [segment[0, 0] for segment in usage.collections[0].get_segments()]
    assert borders == [5.5, 5.5, 2.5, 5.5, 5.5, 2.5]
    heads = {(head["layer"], head["head"]) for head in found["heads"]}
    shown = map_values(page.usage_by_head(found, heads))["keys"]
    assert shown.shape == (4 * 2 + 2 * 1, 12), "rows of key heads"


# --- Several devices -----------------------------------------------------------------------------

ROWS, LENGTH = 5, 24


def analyse_on(run, shape):
    """Analyses a run on a mesh (data, fsdp, tensor); several take one sequence a device at a time.

    Patches prope, as its process ends after it.
    """
    data, fsdp, tensor = shape
    size = data * fsdp * tensor
    mesh = sharding.make_mesh(data, tensor, jax.devices()[:size])
    walks = []

    class RecordedWalk(walk.Walk):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            walks.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", lambda: mesh)
        patch.setattr(analysis, "Walk", RecordedWalk)
        if size > 1:
            patch.setattr(walk, "_TOKENS", LENGTH)
        patch.setattr(walk, "_KEPT", 0 if size == 1 else 2**30)
        options = analysis_options(channels=8, head_of="t5", layers="0,2")
        found = analysis.analyse(run, options)
        batches = 1 if size == 1 else -(-ROWS // (data * fsdp))
        assert len(walks[-1].enter()) == batches
        layer = walks[-1].layers[1]
        path = ("layers", layer.stack) if layer.stack else ("layers",)
        linear = walks[-1]._params(path, layer.row)["mlp"]["linear"]
        shard = linear.addressable_shards[0].data
        assert shard.size * fsdp * tensor == linear.size, "not sharded"
    return found


def over_meshes(fields, *shapes):
    """Compares analyses on meshes of these shapes with that on one device."""
    sharding._MIN_SHARD_SIZE = 1
    ids = np.random.default_rng(0).integers(3, 40, (ROWS, LENGTH)).astype(np.int32)
    names = [[f"t{token}" for token in row] for row in ids]
    text = {"source": "drawn", "split": None}
    analysis.read_sequences = lambda run, options: (ids, names, text)
    # Not rounded.
    loads = lambda text, parse_float: json.loads(text)  # noqa: E731
    analysis.json = types.SimpleNamespace(dumps=json.dumps, loads=loads)
    with tempfile.TemporaryDirectory() as folder:
        run = epath.Path(folder) / "run"
        make_run(run, 0.75, **{"num_layers": 3} | fields)
        alone = analyse_on(run, (1, 1, 1))
        assert alone["sequences"] == ROWS
        assert alone["heads"][0]["head_of"] is not None
        assert len(alone["channels"]) == 8
        assert any(channel["stopped"] for channel in alone["channels"])
        for shape in shapes:
            print(fields, shape, compare_analyses(alone, analyse_on(run, shape)))


def on_four_devices():
    over_meshes(ALL_SWITCHES, (1, 2, 2))


def on_other_meshes():
    over_meshes({}, (2, 2, 1), (1, 8, 1), (2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["on_four_devices", "on_other_meshes"])
def test_several_devices_find_what_one_does(function):
    on_eight_devices(__file__, function)


def test_one_layer_and_one_batch_are_on_the_devices_at_a_time(tmp_path, monkeypatch):
    make_run(tmp_path / "run", 0.75, num_layers=3, hidden_dim=104, vocab_size=308)
    monkeypatch.setattr(walk, "_KEPT", 0)
    monkeypatch.setattr(walk, "_TOKENS", 2 * LENGTH)
    run = make_walk(tmp_path / "run", ROWS, LENGTH)
    calls = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*arguments, **options):
            live = [array.shape for array in jax.live_arrays()]
            params = live.count((2, 48, 104)) + live.count((308, 48))
            queries = sum(shape[1:] == (LENGTH, 4, 64) for shape in live)
            calls.append((name, params, queries))
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(run._checkpoint, "read")
    watch(run, "_layer")
    analysis.measure_layers(run, [0, 1, 2], 0, [0, 1], np.zeros((ROWS, LENGTH), bool))
    of_a_layer = [("read", 0, 0), *[("_layer", 1, 0)] * 3]
    assert calls == [("read", 0, 0), *of_a_layer * 3]
