"""The analysis of a model that has all switches and several kinds of layers, against float64."""

import numpy as np
import oracles
import pytest
from support.heads import analysis_options, assert_channel
from support.models import ALL_SWITCHES
from support.runs import make_run
from support.sweeps import draw_picture, map_values

from prope.analysis import analysis, census, choices, compare, maps, page
from prope.errors import UsageError
from prope.html import drawing

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
    """The analysis, the config, the parameters, the tokens, and what every layer attends with."""
    run = tmp_path_factory.mktemp("kinds") / "run"
    config, params = make_run(run, 0.25, **FIELDS)
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
        found = analysis.analyse(run, options)
    losses = loss_of(config.model, params, tokens, capture)
    assert found["loss"]["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    return found, config.model, params, tokens, layers


def loss_of(config, params, tokens, rotate_fn):
    """The mean loss of every sequence, in float64."""
    positions = np.tile(np.arange(T), (B, 1))
    logits = oracles.decoder(
        config, params, tokens, positions, freqs=FREQUENCIES, rotate_fn=rotate_fn
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
def test_maps_and_tables_have_the_capped_logits_of_the_window(case, number):
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
    picture, _ = maps.maps(found, shown)
    is_hidden = np.isnan(map_values(picture)["logits"])
    np.testing.assert_array_equal(is_hidden, ~seen[square])


@pytest.mark.parametrize("number", range(2))
def test_tables_have_capped_logits_and_their_capped_bounds(case, number):
    found, _, _, _, layers = case
    shown = found["shown"][number]
    query, key = rotated(layers, shown)
    logits, _ = oracles.softcap(SCALE * query @ key.T, CAP)
    lengths = np.outer(np.linalg.norm(query, axis=1), np.linalg.norm(key, axis=1))
    bounds, _ = oracles.softcap(SCALE * lengths, CAP)
    table = shown["table"]
    rows = np.array(table["positions"])
    columns = {"upper_bound": bounds, "diagonal": logits}
    for name, values in columns.items():
        np.testing.assert_allclose(table[name], values[rows, rows], rtol=1e-4, atol=1e-5)
    columns = {"previous_upper_bound": bounds, "previous_token": logits}
    for name, values in columns.items():
        before = values[rows[1:], rows[1:] - 1]
        np.testing.assert_allclose(table[name][1:], before, rtol=1e-4)


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
    found, config, params, tokens, _ = case
    changes = []
    for channel in found["channels"]:
        for change in ("stopped", "removed"):
            if channel[change] is None:
                continue
            changes.append(change)
            expected = loss_of(config, params, tokens, changed(change, channel)).mean()
            assert channel[change]["loss"] == pytest.approx(expected, rel=1e-5)
            difference = expected - found["loss"]["loss"]
            assert channel[change]["difference"] == pytest.approx(difference, abs=3e-5)
    assert set(changes) == {"stopped", "removed"}


def test_the_page_shows_every_kind_of_layer(case, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing.Picture, "render", lambda self: (b"", []))
    found, *_ = case
    kinds = [(kind["layers"], kind["sliding_window"]) for kind in found["kinds"]]
    assert kinds == [([0, 1, 3, 4], W), ([2, 5], None)]
    by_kind = [(k["max_wavelength"], k["rope_percentage"]) for k in found["kinds"]]
    assert by_kind == [(100.0, 0.75), (10_000.0, 0.25)]
    written = page.write(tmp_path / "analysis", found).read_text()
    assert "2 kinds of layers" in written
    assert "6 of 8" in written and "3 of 12" in written
    assert "In layers with a window, on the first token: over the queries that see it." in written
    usage = draw_picture(page.usage(found)).axes[0]
    borders = [segment[0, 0] for segment in usage.collections[0].get_segments()]
    assert borders == [5.5, 5.5, 2.5, 5.5, 5.5, 2.5]
    by_head = draw_picture(
        page.usage_by_head(found, {(head["layer"], head["head"]) for head in found["heads"]})
    ).axes[1]
    shown = by_head.images[0].get_array()
    assert shown.shape == (4 * 2 + 2 * 1, 12), "rows of key heads"
    np.testing.assert_array_equal(shown.mask.sum(axis=1), [4, 4, 4, 4, 0, 4, 4, 4, 4, 0])


def test_a_comparison_has_a_line_for_each_window(case):
    found, *_ = case
    picture = compare.usage({"p = 1": [found, found]})
    names = ["p = 1, window 6", "p = 1, no window"]
    queries, keys = draw_picture(picture).axes
    assert [text.get_text() for text in queries.get_legend().get_texts()] == names
    for axes, kind in ((queries, "query_norms"), (keys, "key_norms")):
        by_layer = [np.mean(layer[kind], axis=0) for layer in found["layers"]]
        lines = [line.get_ydata() for line in axes.lines]
        local, unwindowed = [y for y in lines if len(y) in (8, 12)]
        np.testing.assert_allclose(local, np.mean([by_layer[i] for i in (0, 1, 3, 4)], axis=0))
        np.testing.assert_allclose(unwindowed, np.mean([by_layer[i] for i in (2, 5)], axis=0))


def test_a_pair_must_be_one_of_its_layer():
    counts = {"HEAD": [4] * 6, "PAIR": list(map(len, FREQUENCIES))}
    assert choices.parse_places("channel", "2.0.11", [0, 2], **counts) == [(2, 0, 11)]
    with pytest.raises(UsageError, match="pairs are 0 to 7 and"):
        choices.parse_places("channel", "0.0.8", [0, 2], **counts)


def test_heads_of_a_key_are_permuted_together_whatever_their_number():
    """Layers of two keys of two heads, and of one key of four."""
    layers = [{"query_norms": [0] * 4, "key_norms": [0] * keys} for keys in (2, 1, 2, 1)]
    rng = np.random.default_rng(0)
    permuted = census._permute_by_key(layers, np.arange(16.0), rng, 50)
    orders = {tuple(row) for row in permuted}
    assert len(orders) > 20
    for row in permuted:
        twos = row.reshape(4, 2, 2)[[0, 2]].reshape(4, 2)
        fours = row.reshape(4, 4)[[1, 3]]
        assert sorted(map(tuple, twos)) == [(0, 1), (2, 3), (8, 9), (10, 11)]
        assert sorted(map(tuple, fours)) == [(4, 5, 6, 7), (12, 13, 14, 15)]


def test_a_layer_with_fewer_pairs_has_no_border_where_they_end():
    freqs = [[1.0, 0.1], [1.0, 0.1, 0.0], [1.0, 0.0]]
    layers = [{"layer": layer} for layer in range(3)]
    rotated = page.rotated_by_layer({"frequencies": freqs, "layers": layers})
    assert rotated.tolist() == [[True, True, True], [True, True, False], [True, False, False]]
