"""Figures, tables and pages of decoders whose heads are known: what is planted is found.

It is found in 20 of 20 random draws. A draw has random filler weights in all heads, and at a random
layer and head each

diagonal, previous  heads of Theorem 5.3 that use a few of the fastest pairs (Figures 5, 6, 12, 13;
                    Tables 3 to 5)
apostrophe          a head that attends to an apostrophe right before it, else to the first token
                    (Figures 7, 9)
channel             a slow or unrotated pair with the longest queries and keys, which tells the
                    first token from all others, as in Appendix D.1 (Figures 3, 4, 14)
semantic            a head that looks for the letter q
value               a pair of lanes in which values are longest, the control (Figure 11)
"""

import pathlib
import types

import numpy as np
import oracles
import pytest
from support.heads import (
    analysis_options,
    assert_channel,
    head_kinds,
    head_weights,
    make_known_heads,
    text_with_q,
    write_decoder,
)
from support.sweeps import Page, draw_picture, map_values

from prope.analysis import analysis, census, channels
from prope.data.tokenizer import GEMMA_IDS
from prope.pages import analysis as page
from prope.pages.heads import maps

L, N, K, T, D, H = 2, 6, 3, 64, 64, 32
P = H // 2
ROTATED = 12  # pairs that p = 0.75 rotates
FREQS = oracles.frequencies(H, p=0.75)
EPSILON = 0.1
SCORES = {"diagonal": "diagonal", "previous": "previous_token", "apostrophe": "head_of"}


def draw_text(rng) -> str:
    """T - 1 letters: a q near the beginning and every 20 letters, and some apostrophes."""
    letters = rng.choice(list("abcdefgh"), T - 1)
    letters[rng.choice(np.arange(3, T - 1), 6, replace=False)] = "'"
    letters[rng.integers(0, 3) :: 20] = "q"
    return "".join(letters)


def draw_rows(rng) -> np.ndarray:
    """Embeddings of mean square 1, which the norm before attention keeps.

    They begin with 1, then +-1 for ', 1 for <bos>, +-1 for q.
    """
    rows = rng.standard_normal((260, D))
    rows[:, :4] = 1, -1, 0, -1
    rows[4 + ord("'"), 1] = 1
    rows[GEMMA_IDS.bos, 2] = 1
    rows[4 + ord("q"), 3] = 1
    free = D - (rows[:, :4] ** 2).sum(axis=1)
    rows[:, 4:] *= np.sqrt(free / (rows[:, 4:] ** 2).sum(axis=1))[:, None]
    return rows


def draw_places(rng) -> dict[str, tuple[int, int]]:
    """The layer and head of everything planted in queries and keys; no two share keys."""
    names = ("diagonal", "previous", "apostrophe", "channel", "semantic")
    places = {}
    for name, group in zip(names, rng.permutation(L * K).tolist(), strict=False):
        layer, key_head = divmod(group, K)
        places[name] = (layer, 2 * key_head + int(rng.integers(2)))
    return places


def lanes(pair: int, z: complex) -> np.ndarray:
    """A vector [H] that has z in one pair."""
    vector = np.zeros(H)
    vector[pair] = z.real
    vector[pair + P] = z.imag
    return vector


def clear(query, key, place) -> tuple[np.ndarray, np.ndarray]:
    """Makes the weights of a head small; returns them, each [D, H]."""
    layer, head = place
    weights = (query[layer, head], key[layer, head // 2])
    for array in weights:
        array *= 0.02
    return weights


def plant_apostrophe(query, key, previous, band) -> None:
    """Gives ' the key of a `previous`-token head, and <bos> one whose logit is a little less."""
    previous_query, previous_key = (weights[0] for weights in previous)
    logit = 3 * np.linalg.norm(previous_query) * np.linalg.norm(previous_key) / H**0.5
    query[0] += 3 * previous_query + lanes(band, (logit - 12) / 4)
    key[:2] += previous_key / 2
    key[2] += lanes(band, 4 * H**0.5)


def plant_positional(weights, fast, rng) -> int:
    """Plants the heads of Theorem 5.3; returns the pair that tells <bos> in the apostrophe head."""
    positional = {}
    for name, distance in (("diagonal", 0), ("previous", 1), ("apostrophe", 1)):
        freqs = np.where(np.arange(P) < fast[name], FREQS, 0)
        positional[name] = head_weights(distance, EPSILON, T, freqs, D)
    for name in ("diagonal", "previous"):
        for array, added in zip(weights[name], positional[name], strict=True):
            array += added
    band = int(rng.integers(ROTATED, P))
    plant_apostrophe(*weights["apostrophe"], positional["apostrophe"], band)
    return band


def plant_channel(query, key, pair, rng) -> None:
    """Aligns the long queries of a pair with the first key, and opposes the other keys."""
    angle, first, others = rng.uniform((-np.pi, -0.4, -0.4), (np.pi, 0.4, 0.4))
    query[0] += lanes(pair, 600 * np.exp(1j * angle))
    key_of_others = lanes(pair, -4 * np.exp(1j * (angle + others)))
    key[0] += key_of_others
    key[2] += lanes(pair, 8 * np.exp(1j * (angle + first))) - key_of_others


def plant(workdir, seed: int) -> types.SimpleNamespace:
    """Saves the decoder of a draw and its text; returns where everything is, and its vectors."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng)
    text = draw_text(rng)
    query, key, value = (0.05 * rng.standard_normal((L, heads, D, H)) for heads in (N, K, K))
    places = draw_places(rng)
    fast = {name: int(rng.integers(4, 8)) for name in SCORES}  # pairs that the head uses
    weights = {name: clear(query, key, place) for name, place in places.items()}
    band = plant_positional(weights, fast, rng)
    semantic_query, semantic_key = weights["semantic"]
    semantic_query[0] += lanes(ROTATED, 10) + lanes(ROTATED + 1, 10)
    semantic_key[3] += lanes(ROTATED, 2) + lanes(ROTATED + 1, 2)
    pair = int(rng.integers(P // 2, P))
    plant_channel(*weights["channel"], pair, rng)
    value_place = tuple(int(rng.integers(count)) for count in (L, K, P))
    layer, value_head, value_pair = value_place
    value[layer, value_head, :, value_pair::P] *= 20
    save(workdir, rows, text, query, key, value)
    x = rows[[GEMMA_IDS.bos, *(4 + ord(letter) for letter in text)]]
    return types.SimpleNamespace(
        places=places,
        fast=fast,
        band=band,
        pair=pair,
        value=value_place,
        text=text,
        **vectors(x, query, key, value),
    )


def save(workdir, rows, text, query, key, value) -> None:
    sizes = {
        "model.num_layers": L,
        "model.embed_dim": D,
        "model.num_heads": N,
        "model.num_kv_heads": K,
        "model.head_dim": H,
        "model.hidden_dim": 8,
        "model.vocab_size": 260,
        "model.rope_percentage": 0.75,
        "data.seq_len": T,
    }
    write_decoder(workdir, sizes, rows, query, key, value)
    (workdir / "text.txt").write_text(text)


def vectors(x, query, key, value) -> dict[str, np.ndarray]:
    """What x [T, D] is projected to, before rotation: q, k, v [L, N or K, T, P], complex pairs.

    Also `logits` and `weights` [L, N, T, T].
    """

    def project(weights):
        lanes = np.einsum("td,lndh->lnth", x, weights)
        return lanes[..., :P] + 1j * lanes[..., P:]

    q = project(query)
    k = np.repeat(project(key), 2, axis=1)
    turns = np.exp(1j * np.arange(T)[:, None] * FREQS)
    products = np.einsum("lnip,lnjp->lnij", (q * turns).conj(), k * turns)
    logits = products.real / H**0.5
    seen = np.where(np.tri(T), logits, -np.inf)
    weights = oracles.softmax(seen)
    return {"q": q, "k": k, "v": project(value), "logits": logits, "weights": weights}


@pytest.fixture(
    scope="module", params=[[0, 4], pytest.param(range(20), marks=pytest.mark.slow)], ids=len
)
def draws(request, tmp_path_factory):
    """(what was planted, what --paper found); of 0 the channel does not rotate, of 4 it does."""
    base = tmp_path_factory.mktemp("planted")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "ablate", lambda *args: None)  # losses are not what is planted
        for seed in request.param:
            run = base / str(seed)
            planted = plant(run, seed)
            options = analysis_options(text=str(run / "text.txt"), paper=True)
            found.append((planted, analysis.analyse(run, options)))
    return found


def shown(planted, found, name) -> dict:
    """What is shown of a planted head, which is the first one chosen for its score."""
    head = next(head for head in found["shown"] if head["why"] == SCORES[name])
    assert (head["layer"], head["head"]) == planted.places[name]
    return head


def place_of_largest(values) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(np.argmax(values), np.shape(values))))


def test_the_longest_pairs_are_the_planted_ones(draws):  # Figures 3, 4, 11
    for planted, found in draws:
        by_layer = map_values(page.usage(found))
        by_head = map_values(
            page.usage_by_head(found, {(head["layer"], head["head"]) for head in found["heads"]})
        )
        layer, head = planted.places["channel"]
        truth = {
            "queries": (planted.q, (layer, head, planted.pair)),
            "keys": (planted.k[:, ::2], (layer, head // 2, planted.pair)),
            "values (control)": (planted.v, planted.value),
        }
        for kind, (x, (layer, head, pair)) in truth.items():
            norms = np.abs(x).mean(axis=2)
            np.testing.assert_allclose(by_layer[kind], norms.mean(axis=1), rtol=1e-4)
            np.testing.assert_allclose(by_head[kind], norms.reshape(-1, P), rtol=1e-4)
            assert place_of_largest(by_layer[kind]) == (layer, pair)
            assert place_of_largest(by_head[kind]) == (layer * norms.shape[1] + head, pair)


def test_the_census_names_exactly_the_planted_heads(draws):
    kinds = {"diagonal": "diagonal", "previous": "previous_token", "semantic": "semantic"}
    for planted, found in draws:
        truth = [""] * (L * N)
        for name, (layer, head) in planted.places.items():
            truth[layer * N + head] = kinds.get(name, "first_token")
        assert head_kinds(found) == truth


def test_maps_and_raw_logits_are_those_of_the_formula(draws):  # Figures 5, 7, 9, 12, 13
    for planted, found in draws:
        positions = found["window"]["positions"]
        square = np.ix_(positions, positions)
        lower = np.tril_indices(len(positions))
        for name in SCORES:
            picture, _ = maps(found, shown(planted, found, name))
            drawn = map_values(picture)
            place = planted.places[name]
            weights = planted.weights[place][square]
            np.testing.assert_allclose(np.nan_to_num(drawn["weights"]), weights, atol=1e-4)
            logits = planted.logits[place][square][lower]
            np.testing.assert_allclose(drawn["logits"][lower], logits, rtol=1e-4, atol=1e-3)
            if name != "apostrophe":
                back = ("diagonal", "previous").index(name)
                weights = np.diagonal(drawn["weights"], -back)
                assert (weights[positions[1] != 1 :] > 1 - EPSILON).all()


def test_heads_use_the_planted_fast_pairs(draws):  # Figures 6, 7, 12, 13
    for planted, found in draws:
        positions = found["window"]["positions"]
        for name in SCORES:
            _, picture = maps(found, shown(planted, found, name))
            place = planted.places[name]
            truth = {"query": planted.q[place], "key": planted.k[place]}
            for kind, norms in map_values(picture).items():
                x = truth[kind.removeprefix("norms of the ")]
                np.testing.assert_allclose(norms, np.abs(x[positions]), rtol=1e-4, atol=1e-4)
                if name != "apostrophe":
                    used = norms.min(axis=0) > 0.5 * norms.max()
                    assert np.flatnonzero(used).tolist() == list(range(planted.fast[name]))


def test_the_apostrophe_head_is_found_with_what_it_uses(draws):  # Figure 7
    for planted, found in draws:
        head = shown(planted, found, "apostrophe")
        assert head == found["shown"][0]
        weights, norms = map(map_values, maps(found, head))
        positions = found["window"]["positions"]
        after = [row for row, at in enumerate(positions) if row > 1 and planted.text[at - 2] == "'"]
        assert after, "the window is around an apostrophe"
        for row in range(2, len(positions)):
            column = row - 1 if row in after else 0
            assert weights["weights"][row, column] > 0.9
        keys = norms["norms of the key"]
        assert place_of_largest(keys) == (0, planted.band)  # what <bos> is told by
        apostrophes = np.array(found["window"]["tokens"]) == repr("'")
        used = keys[apostrophes].min(axis=0) > 0.5
        assert np.flatnonzero(used).tolist() == list(range(planted.fast["apostrophe"]))


@pytest.mark.slow
def test_the_head_of_a_token_is_chosen_by_its_flag(tmp_path):  # Figure 7
    run = tmp_path / "run"
    planted = plant(run, 0)
    options = analysis_options(text=str(run / "text.txt"), head_of="'", channels=0)
    found = analysis.analyse(run, options)
    shown(planted, found, "apostrophe")
    assert [head["why"] for head in found["shown"]] == ["head_of"] * 3
    scores = {(head["layer"], head["head"]): head["head_of"] for head in found["heads"]}
    assert scores.pop(planted.places["apostrophe"]) > 0.9
    assert max(scores.values()) < 0.5


def test_tables_are_those_of_the_formula(draws):  # Tables 3 and 4, Table 5
    """A head reaches the bounds of the place that it attends to, and no others."""
    for planted, found in draws:
        for name in ("diagonal", "previous"):
            table = shown(planted, found, name)["table"]
            assert table["positions"] == list(range(8))
            assert table["tokens"][0] == "<bos>"
            place = planted.places[name]
            on_itself = np.diagonal(planted.logits[place])[:8]
            np.testing.assert_allclose(table["diagonal"], on_itself, rtol=1e-4)
            norms = [np.linalg.norm(x[place], axis=-1) for x in (planted.q, planted.k)]
            bounds = np.prod(norms, axis=0)[:8] / H**0.5
            np.testing.assert_allclose(table["upper_bound"], bounds, rtol=1e-4)
            reached = np.divide(table["diagonal"][1:], table["upper_bound"][1:])
            assert (reached.min() > 0.97) == (name == "diagonal")
            reached = np.divide(table["previous_token"][1:], table["previous_upper_bound"][1:])
            assert (reached.min() > 0.97) == (name == "previous")


def test_the_strongest_channel_is_the_planted_one(draws):  # Figure 14, Appendix D.1
    for planted, found in draws:
        layer, head = planted.places["channel"]
        (record,) = found["shown_channels"]
        for channel in (record, found["channels"][0]):
            place = (channel["layer"], channel["head"], channel["pair"])
            assert place == (layer, head, planted.pair)
            assert channel["frequency"] == pytest.approx(FREQS[planted.pair], rel=1e-5)
        q, k = (x[layer, head, :, planted.pair] for x in (planted.q, planted.k))
        expected = oracles.channel(q[None], k[None], FREQS[planted.pair], H)
        assert_channel(record, expected, rtol=1e-4)
        assert min(record["to_first"]) > 0 > max(record["to_others"]), "as in Appendix D.1"
        assert record["breaking_rotation"]
        for name, x in (("queries", q), ("keys", k)):
            x = x[found["window"]["positions"]]
            expected = np.stack([x.real, x.imag], axis=1)
            np.testing.assert_allclose(record[name], expected, rtol=1e-4, atol=1e-4)


# --- A diagonal, a previous-token, a semantic head that looks for q, and an even one --------------

LETTERS = text_with_q()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of these heads, and one where they do not rotate."""
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(LETTERS)
    make_known_heads(base / "run", 0.75)
    make_known_heads(base / "nope", 0)
    return base


def analysed(run, name="run", **flags) -> dict:
    flags = {"text": str(run / "text.txt"), "channels": 0} | flags
    return analysis.analyse(run / name, analysis_options(**flags))


def test_the_known_heads_have_their_kinds_and_channels(run):
    found = analysed(run, channels=4)
    assert head_kinds(found) == ["diagonal", "previous_token", "semantic", ""]
    _, _, semantic, even = found["heads"]
    assert semantic["overlap_without_rotation"] > 0.99
    assert even["entropy"] == pytest.approx(1, abs=1e-4)
    # The semantic head's channels are its two pairs, which do not rotate.
    semantic_channels = [channel for channel in found["channels"] if channel["head"] == 2]
    assert [channel["pair"] for channel in semantic_channels] == [12, 13]
    for channel in semantic_channels:
        assert channel["frequency"] == 0
        assert channel["stopped"] is None
        assert channel["removed"]


def test_without_rotation_the_positional_heads_vanish(run):
    found = analysed(run, "nope")
    assert head_kinds(found) == ["", "", "semantic", ""]
    assert max(head["positional"] for head in found["heads"][:2]) < 0.05
    assert {head["high_frequency_share"] for head in found["heads"]} == {0}
    assert found["rank_correlation"] is None


def test_maps_are_labelled_with_the_tokens_of_the_window(run):
    found = analysed(run, heads="0.1", window="120:130")
    positions = [0, *range(120, 130)]
    assert found["window"]["positions"] == positions
    names = ["0 <bos>", *(f"{i} {LETTERS[i - 1]!r}" for i in positions[1:])]
    attention, norms = [draw_picture(one).axes[0] for one in maps(found, *found["shown"])]
    for axis in (attention.xaxis, attention.yaxis, norms.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == names


# --- The page -------------------------------------------------------------------------------------


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
    asked = {"all_heads": None, "paper": False}
    for shown, all_heads, drawn in (
        ([], None, every - {(0, 0)}),  # the first one is of no kind
        (heads[:1], None, every),
        ([], True, every),
    ):
        found = {"heads": heads, "shown": shown, "asked": asked | {"all_heads": all_heads}}
        assert page.drawn_heads(found) == drawn


def test_the_lead_of_a_page_tells_a_relation_from_chance():
    for p_value, is_claimed in ((0.01, True), (0.6, False)):
        correlation = {"rho": 0.4, "p_value": p_value, "heads": 4}
        lead = page.lead({"heads": HEADS, "rank_correlation": correlation})
        assert ("0.40" in lead) == is_claimed


def test_the_paper_without_an_apostrophe_shows_the_rest(run, caplog):
    assert "'" not in LETTERS
    caplog.set_level("INFO", "prope")
    found = analysed(run, paper=True, channels=1)
    assert "no apostrophe" in caplog.text
    assert {head["head_of"] for head in found["heads"]} == {None}
    reasons = [head["why"] for head in found["shown"]]
    assert reasons == ["diagonal"] * 2 + ["previous_token"] * 2, "all four heads"
    assert found["window"]["positions"] == list(range(48))
    (record,) = found["shown_channels"]
    assert (record["head"], record["pair"]) == (2, 12)
    # Few keys are of a q, so that the first one, which is not, has no advantage.
    assert record["breaking_rotation"] is None
    assert record["first_alignment"] == -1


@pytest.mark.slow
def test_runs_below_a_directory_are_analysed(run, run_command):
    flags = (f"--workdir={run}", f"--text={run}/text.txt", "--channels=1")
    done = run_command("prope.analyze", *flags)
    assert done.code == 0, done.stderr
    runs = [str(run / "nope"), str(run / "run")]
    assert (done.result["output"], done.result["runs"]) == (str(run), runs)
    assert done.result["pages"] == [f"{one}/analysis/index.html" for one in runs]
    kinds = [(head["run"], head["kind"]) for head in done.result["heads"]]
    assert len(kinds) == 8 and (runs[1], "previous_token") in kinds
    for one in done.result["pages"]:
        assert Page(pathlib.Path(one)).tables
