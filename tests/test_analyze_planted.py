"""The paper's figures and tables of a model: what is planted in a decoder is found, in 20 of 20 random draws.

A draw has random filler weights in all heads, and at a random layer and head each

diagonal, previous  heads of Theorem 5.3 that use a few of the fastest pairs (Figures 5, 6, 12, 13; Tables 3 to 5)
apostrophe          a head that attends to an apostrophe right before it, else to the first token (Figures 7, 9)
channel             a slow or unrotated pair with the longest queries and keys, which tells the first token from all
                    others, as in Appendix D.1 (Figures 3, 4, 14)
semantic            a head that looks for the letter q
value               a pair of lanes in which values are longest, the control (Figure 11)
"""

import re
import types

import numpy as np
import pytest
from conftest import ROOT
from makers import analysis_options as asked
from makers import draw_picture as drawn
from makers import head_kinds as kinds
from makers import head_weights, write_decoder
from makers import map_values as images

from prope.analysis import analysis as analyze
from prope.analysis import channels, maps, page
from prope.config import default_config
from prope.data.tokenizer import BOS

L, N, K, T, D, H = 2, 6, 3, 64, 64, 32
P, ROTATED = H // 2, 12  # pairs, and those that p = 0.75 rotates
TURNS = np.where(np.arange(P) < ROTATED, 10_000.0 ** (-2 * np.arange(P) / H), 0)
EPSILON = 0.1


def draw_text(rng) -> str:
    """T - 1 letters: a q near the beginning and every 20 letters, and some apostrophes."""
    letters = rng.choice(list("abcdefgh"), T - 1)
    letters[rng.choice(np.arange(3, T - 1), 6, replace=False)] = "'"
    letters[rng.integers(0, 3) :: 20] = "q"
    return "".join(letters)


def draw_rows(rng) -> np.ndarray:
    """Embeddings of mean square 1, which the norm before attention keeps: 1, then +-1 for ', 1 for <bos>, +-1 for q."""
    rows = rng.standard_normal((260, D))
    rows[:, :4] = 1, -1, 0, -1
    rows[4 + ord("'"), 1] = rows[BOS, 2] = rows[4 + ord("q"), 3] = 1
    rows[:, 4:] *= np.sqrt((D - (rows[:, :4] ** 2).sum(axis=1)) / (rows[:, 4:] ** 2).sum(axis=1))[
        :, None
    ]
    return rows


def lanes(pair: int, z: complex) -> np.ndarray:
    """A vector [H] that has z in one pair."""
    vector = np.zeros(H)
    vector[[pair, pair + P]] = z.real, z.imag
    return vector


def plant(workdir, seed: int) -> types.SimpleNamespace:
    """Saves the decoder of a draw and its text; returns where everything is, and what float64 makes of it."""
    rng = np.random.default_rng(seed)
    rows, text = draw_rows(rng), draw_text(rng)
    query, key, value = (0.05 * rng.standard_normal((L, heads, D, H)) for heads in (N, K, K))
    groups = [
        divmod(int(group), K) for group in rng.permutation(L * K)
    ]  # (layer, key head): one thing in each
    names = ("diagonal", "previous", "apostrophe", "channel", "semantic")
    at = {
        name: (layer, 2 * own + int(rng.integers(2)))
        for name, (layer, own) in zip(names, groups, strict=False)
    }
    fast = {
        name: int(rng.integers(4, 8)) for name in names[:3]
    }  # pairs that a positional head uses

    def weights(name):
        layer, head = at[name]
        query[layer, head] *= 0.02
        key[layer, head // 2] *= 0.02
        return query[layer, head], key[layer, head // 2]

    for name, distance in (("diagonal", 0), ("previous", 1), ("apostrophe", 1)):
        q, k = head_weights(distance, EPSILON, T, np.where(np.arange(P) < fast[name], TURNS, 0), D)
        wq, wk = weights(name)
        if name != "apostrophe":
            wq += q
            wk += k
            continue
        # ' has the key of a previous-token head, <bos> one whose logit is a little less, and no other token has any.
        logit, band = (
            3 * np.linalg.norm(q[0]) * np.linalg.norm(k[0]) / H**0.5,
            int(rng.integers(ROTATED, P)),
        )
        wq[0] += 3 * q[0] + lanes(band, (logit - 12) / 4)
        wk[[0, 1]] += k[0] / 2
        wk[2] += lanes(band, 4 * H**0.5)

    wq, wk = weights("semantic")
    wq[0] += lanes(ROTATED, 10) + lanes(ROTATED + 1, 10)
    wk[3] += lanes(ROTATED, 2) + lanes(ROTATED + 1, 2)

    wq, wk = weights("channel")
    pair, angle, first, others = (
        int(rng.integers(P // 2, P)),
        *rng.uniform((-np.pi, -0.4, -0.4), (np.pi, 0.4, 0.4)),
    )
    wq[0] += lanes(pair, 600 * np.exp(1j * angle))
    wk[0] += (k_others := lanes(pair, -4 * np.exp(1j * (angle + others))))
    wk[2] += lanes(pair, 8 * np.exp(1j * (angle + first))) - k_others

    place = int(rng.integers(L)), int(rng.integers(K)), int(rng.integers(P))
    value[place[0], place[1], :, [place[2], place[2] + P]] *= 20

    config = default_config()
    config.model.update(
        {
            "num_layers": L,
            "embed_dim": D,
            "num_heads": N,
            "num_kv_heads": K,
            "head_dim": H,
            "hidden_dim": 8,
            "vocab_size": 260,
            "rope_percentage": 0.75,
        }
    )
    config.data.seq_len = T
    write_decoder(workdir, config, rows, query, key, value)
    (workdir / "text.txt").write_text(text)
    x = rows[[BOS, *(4 + ord(letter) for letter in text)]]
    q, k, v = (np.einsum("td,lndh->lnth", x, w) for w in (query, key, value))
    q, k, v = (
        y[..., :P] + 1j * y[..., P:] for y in (q, np.repeat(k, 2, axis=1), v)
    )  # [L, N or K, T, P]
    rotated_q, rotated_k = (y * np.exp(1j * np.arange(T)[:, None] * TURNS) for y in (q, k))
    parts = np.einsum("lnip,lnjp->lnijp", rotated_q.conj(), rotated_k).real / H**0.5
    return types.SimpleNamespace(
        at=at, fast=fast, band=band, pair=pair, value=place, text=text, q=q, k=k, v=v, parts=parts
    )


@pytest.fixture(
    scope="module", params=[[0, 4], pytest.param(range(20), marks=pytest.mark.slow)], ids=len
)
def draws(request, tmp_path_factory):
    """(what was planted, what --paper found) of every draw: of 0 the channel does not rotate, of 4 it does."""
    base, made = tmp_path_factory.mktemp("planted"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "ablate", lambda *args: None)  # losses are not what is planted
        for seed in request.param:
            planted = plant(base / str(seed), seed)
            given = asked(text=str(base / str(seed) / "text.txt"), paper=True)
            made.append((planted, analyze.analyse(base / str(seed), given)))
    return made


def shown(planted, found, name, why=None) -> dict:
    """What is shown of a planted head, which is the first one chosen for its score."""
    head = next(head for head in found["shown"] if head["why"] == (why or name))
    assert (head["layer"], head["head"]) == planted.at[name]
    return head


def place_of_largest(values) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(np.argmax(values), np.shape(values))))


def test_the_longest_pair_of_a_layer_is_the_planted_one(draws):  # Figure 3
    for planted, found in draws:
        layer, _ = planted.at["channel"]
        maps_of = images(page.usage(found))
        for kind, truth in (("queries", planted.q), ("keys", planted.k[:, ::2])):
            np.testing.assert_allclose(maps_of[kind], np.abs(truth).mean(axis=(1, 2)), rtol=1e-4)
            assert place_of_largest(maps_of[kind]) == (layer, planted.pair)


def test_the_longest_pair_of_a_head_is_the_planted_one(draws):  # Figure 4
    for planted, found in draws:
        layer, head = planted.at["channel"]
        maps_of = images(page.usage_by_head(found))
        for kind, truth, row in (
            ("queries", planted.q, head),
            ("keys", planted.k[:, ::2], head // 2),
        ):
            np.testing.assert_allclose(
                maps_of[kind], np.abs(truth).mean(axis=2).reshape(-1, P), rtol=1e-4
            )
            assert place_of_largest(maps_of[kind]) == (layer * truth.shape[1] + row, planted.pair)


def test_the_longest_pair_of_values_is_the_planted_one(draws):  # Figure 11
    for planted, found in draws:
        values = images(page.usage_by_head(found))["values (control)"]
        np.testing.assert_allclose(values, np.abs(planted.v).mean(axis=2).reshape(-1, P), rtol=1e-4)
        layer, own, pair = planted.value
        assert place_of_largest(values) == (layer * K + own, pair)
        assert place_of_largest(images(page.usage(found))["values (control)"]) == (layer, pair)


def test_the_census_names_exactly_the_planted_heads(draws):
    names = {"diagonal": "diagonal", "previous": "previous_token", "semantic": "semantic"}
    for planted, found in draws:
        truth = {place: names.get(name, "first_token") for name, place in planted.at.items()}
        assert kinds(found) == [
            truth.get((layer, head), "") for layer in range(L) for head in range(N)
        ]


def test_maps_of_positional_heads_are_diagonals(draws):  # Figures 5, 12, 13
    for planted, found in draws:
        for name, why, back in (("diagonal", "diagonal", 0), ("previous", "previous_token", 1)):
            picture, _ = maps.maps(found, shown(planted, found, name, why))
            positions, weights = found["window"]["positions"], images(picture)["weights"]
            assert (np.diagonal(weights, -back)[positions[1] != 1 :] > 1 - EPSILON).all()
            logits = planted.parts[planted.at[name]].sum(axis=-1)
            logits[np.triu_indices(T, 1)] = -np.inf
            truth = np.exp(logits - logits.max(axis=1, keepdims=True))
            truth = (truth / truth.sum(axis=1, keepdims=True))[np.ix_(positions, positions)]
            np.testing.assert_allclose(np.nan_to_num(weights), truth, atol=1e-4)


def test_positional_heads_use_the_planted_fast_pairs(draws):  # Figure 6; likewise 12 and 13
    for planted, found in draws:
        for name, why in (("diagonal", "diagonal"), ("previous", "previous_token")):
            _, picture = maps.maps(found, shown(planted, found, name, why))
            for norms in images(picture).values():
                used = norms.min(axis=0) > 0.5 * norms.max()
                assert np.flatnonzero(used).tolist() == list(range(planted.fast[name]))


def test_the_apostrophe_head_is_found_with_what_it_uses(draws):  # Figure 7
    for planted, found in draws:
        head = shown(planted, found, "apostrophe", "head_of")
        assert head == found["shown"][0]
        weights, norms = map(images, maps.maps(found, head))
        weights, positions = weights["weights"], found["window"]["positions"]
        after = [row for row, at in enumerate(positions) if row > 1 and planted.text[at - 2] == "'"]
        assert after, "the window is around an apostrophe"
        for row in range(2, len(positions)):
            assert weights[row, row - 1 if row in after else 0] > 0.9
        assert place_of_largest(norms["norms of the key"]) == (
            0,
            planted.band,
        )  # what <bos> is told by
        letters = [at for at, token in enumerate(found["window"]["tokens"]) if token == repr("'")]
        used = norms["norms of the key"][letters].min(axis=0) > 0.5
        assert np.flatnonzero(used).tolist() == list(range(planted.fast["apostrophe"]))


def test_raw_logits_of_the_apostrophe_head_are_those_of_the_formula(draws):  # Figure 9
    for planted, found in draws:
        logits = images(maps.maps(found, found["shown"][0])[0])["logits"]
        positions = found["window"]["positions"]
        truth = planted.parts[planted.at["apostrophe"]].sum(axis=-1)[np.ix_(positions, positions)]
        lower = np.tril_indices(len(positions))
        np.testing.assert_allclose(logits[lower], truth[lower], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "why", "reached"),
    [("diagonal", "diagonal", "diagonal"), ("previous", "previous_token", "previous_token")],
)
def test_tables_are_those_of_the_formula(draws, name, why, reached):  # Tables 3 and 4, Table 5
    for planted, found in draws:
        table = shown(planted, found, name, why)["table"]
        assert table["positions"] == list(range(8)) and table["tokens"][0] == "<bos>"
        place = planted.at[name]
        logits, q, k = (
            planted.parts[place].sum(axis=-1),
            *(np.linalg.norm(x[place], axis=-1) for x in (planted.q, planted.k)),
        )
        bounds = np.outer(q, k) / H**0.5
        for row, values, back in (
            ("diagonal", logits, 0),
            ("upper_bound", bounds, 0),
            ("previous_token", logits, 1),
            ("previous_upper_bound", bounds, 1),
        ):
            assert table[row][:back] == [None] * back
            np.testing.assert_allclose(
                table[row][back:], np.diagonal(values, -back)[: 8 - back], rtol=1e-4
            )
        bound = {"diagonal": "upper_bound", "previous_token": "previous_upper_bound"}
        reaches = {
            row: np.divide(table[row][1:], table[bound[row]][1:]).min() > 0.97 for row in bound
        }
        assert reaches == {row: row == reached for row in bound}


def test_the_strongest_channel_is_the_planted_one_and_is_shown(draws):  # Figure 14
    for planted, found in draws:
        place = *planted.at["channel"], planted.pair
        (record,) = found["shown_channels"]
        for channel in (record, found["channels"][0]):
            assert (channel["layer"], channel["head"], channel["pair"]) == place
            assert channel["frequency"] == pytest.approx(TURNS[planted.pair], rel=1e-5)
        layer, head, pair = place
        parts = planted.parts[layer, head, ..., pair]
        np.testing.assert_allclose(record["to_first"], parts[1:, 0], rtol=1e-4)
        others = [np.diagonal(parts[1:, 1:], -distance).mean() for distance in range(T - 1)]
        np.testing.assert_allclose(record["to_others"], others, rtol=1e-4)
        assert min(record["to_first"]) > 0 > max(record["to_others"]), "as in Appendix D.1"
        for name, truth in (("queries", planted.q), ("keys", planted.k)):
            truth = truth[layer, head, found["window"]["positions"], pair]
            np.testing.assert_allclose(
                record[name], np.stack([truth.real, truth.imag], axis=1), rtol=1e-4, atol=1e-4
            )
        axes = drawn(maps.channel(record)).axes
        np.testing.assert_allclose([line.get_xdata()[0] for line in axes[0].lines], [1, 0])
        np.testing.assert_allclose(axes[2].lines[-1].get_xydata()[0], record["keys"][0])


def test_where_the_channel_breaks(draws):  # Appendix D.1
    rotations = np.arange(0, 2 * np.pi, 1e-4)
    for planted, found in draws:
        (record,), place = found["shown_channels"], planted.at["channel"]
        q, k = (x[place][:, planted.pair] for x in (planted.q, planted.k))
        q, first, others = (np.array([z.real, z.imag]) for z in (q[1:].mean(), k[0], k[1:].mean()))
        for name, key in (("first_alignment", first), ("others_alignment", others)):
            assert record[name] == pytest.approx(
                q @ key / np.linalg.norm(q) / np.linalg.norm(key), abs=1e-4
            )
        cos, sin = np.cos(rotations), np.sin(rotations)
        advantage = np.stack([q[0] * cos - q[1] * sin, q[1] * cos + q[0] * sin], axis=1) @ (
            first - others
        )
        rotation = rotations[np.argmax(advantage <= 0)]
        assert advantage[0] > 0 and record["breaking_rotation"] == pytest.approx(rotation, abs=2e-4)
        distance = (
            record["breaking_rotation"] / TURNS[planted.pair] if planted.pair < ROTATED else None
        )
        assert record["breaking_distance"] == (distance and pytest.approx(distance, rel=1e-4))


def test_the_readme_names_a_test_for_every_item_that_is_computed():
    lines = (
        (ROOT / "prope/analysis/README.md")
        .read_text()
        .split("| what | command |")[1]
        .split("\n\n")[0]
        .splitlines()
    )
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    items = " ".join(row[0] for row in rows)
    assert len(rows) == 21 and re.findall(r"Figure (\d+)", items) == list(map(str, range(1, 15)))
    assert (
        re.findall(r"Table (\d)", items) == list("12345")
        and "Propositions 3.1" in items
        and "D.1" in items
    )
    for row in rows:
        named = re.findall(r"`([^`]+)`", row[3])
        file = named.pop(0) if named and named[0].endswith(".py") else "test_analyze_planted.py"
        tests = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE)
        assert all(any(name in test for test in tests) for name in named), row
