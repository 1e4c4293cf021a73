"""The paper's figures of chosen heads: what they show of decoders whose heads are known."""

import base64
import hashlib
import pathlib
import re

import matplotlib.figure
import numpy as np
import pytest
from makers import KNOWN_HEAD_DIM as H
from makers import Page
from makers import analysis_options as asked
from makers import draw_picture as drawn
from makers import make_known_heads as constructed
from makers import map_values as images
from makers import text_with_q as text

from prope.analysis import analysis as analyze
from prope.analysis import choices, maps, page
from prope.data.tokenizer import BOS
from prope.html import drawing


def test_values_stand_beside_queries_and_keys_of_every_head():
    rng = np.random.default_rng(0)
    shapes = {"query_norms": (4, 16), "key_norms": (2, 16), "value_norms": (2, 16)}
    layers = [
        {
            "layer": n,
            "rotated_pairs": 8,
            **{k: rng.random(shape).tolist() for k, shape in shapes.items()},
        }
        for n in (0, 3)
    ]
    picture = page.usage_by_head({"layers": layers, "heads": [None] * 8})
    shown = images(picture)
    assert list(shown) == ["queries", "keys", "values (control)"]
    for values, name in zip(shown.values(), shapes, strict=True):
        np.testing.assert_array_equal(values, np.concatenate([layer[name] for layer in layers]))
    queries, keys, values = (axes for axes in drawn(picture).axes if axes.images)
    assert [label.get_text() for label in values.get_yticklabels()] == ["0.0", "0.1", "3.0", "3.1"]
    assert [len(axes.patches) for axes in (queries, keys, values)] == [1, 1, 0], (
        "values are not rotated"
    )


def mark_bos(rows: np.ndarray) -> None:
    """Writes into lane 2 of the residual stream whether the token is the first one."""
    rows[:, 2] = 0
    rows[:, 3:] *= np.sqrt((64 - 2) / (rows[:, 3:] ** 2).sum(axis=1))[:, None]
    rows[BOS, 3:] *= np.sqrt(61 / 62)
    rows[BOS, 2] = 1
    np.testing.assert_allclose((rows**2).mean(axis=1), 1)


def after_q_else_first(rows, query, key, turns):
    """Makes head 3 attend to the token before where that is a q, else to the first one."""
    mark_bos(rows)
    query[3], key[3, 0] = 3 * query[1], key[1, 0] / 2
    key[3, 1] = key[1, 0] / 2  # so that a q has the key of head 1, and the others 0
    before = np.vdot(query[3, 0], rotate_back(key[1, 0], turns)) / H**0.5
    query[3, 0, 12], key[3, 2, 12] = before - 12, H**0.5


def rotate_back(key, turns):
    cos, sin = np.cos(turns), np.sin(turns)
    return np.concatenate([key[:16] * cos + key[16:] * sin, key[16:] * cos - key[:16] * sin])


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A run whose head 3 is `after_q_else_first`."""
    base = tmp_path_factory.mktemp("altered")
    (base / "text.txt").write_text(text())
    constructed(base / "run", 0.75, alter=after_q_else_first)
    return base


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A diagonal, a previous-token, a semantic head that looks for q, and an even one; see `constructed`."""
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(text())
    constructed(base / "run", 0.75)
    return base


def analysed(run, **flags) -> dict:
    return analyze.analyse(
        run / "run", asked(**{"text": str(run / "text.txt"), "channels": 0} | flags)
    )


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_window_anywhere_is_shown_with_its_tokens_weights_and_logits(run):
    found = analysed(run, heads="0.1,0.2,0.3", window="120:150")
    positions, letters = [0, *range(120, 150)], text()
    assert found["window"]["positions"] == positions
    previous, semantic, even = (maps.maps(found, head)[0] for head in found["shown"])
    assert (previous.name, semantic.title) == ("head_0_1", "Head 0.2: weights and logits")
    weights = images(previous)["weights"]
    assert weights[2:].diagonal(1).min() > 0.9, "on the token before"
    assert np.isnan(weights[0, 1]) and np.isnan(weights[29, 30])
    weights = images(even)["weights"]  # over all tokens before, most of which are not shown
    for row, position in enumerate(positions):
        np.testing.assert_allclose(weights[row, : row + 1], 1 / (position + 1), rtol=1e-4)
    signs = [1 if i and letters[i - 1] == "q" else -1 for i in positions]
    assert signs.count(1) == 2
    logits = images(semantic)["logits"]
    for row in range(31):
        np.testing.assert_allclose(
            logits[row, : row + 1], np.multiply(signs, 200 / H**0.5)[: row + 1], rtol=1e-4
        )
        assert np.isnan(logits[row, row + 1 :]).all()
    axes = drawn(semantic).axes[0]
    assert (
        labels(axes.xaxis)
        == labels(axes.yaxis)
        == ["0 <bos>", *(f"{i} {letters[i - 1]!r}" for i in positions[1:])]
    )


def test_tokens_that_have_no_room_are_left_out_and_dollars_are_no_formula(run):
    found = analysed(run, heads="0.0", window="0:120") | {
        "window": {"positions": range(120), "tokens": ["'$$'"] * 120}
    }
    axes = drawn(maps.maps(found, found["shown"][0])[0]).axes[0]
    assert len(labels(axes.xaxis)) == len(labels(axes.yaxis)) == 60, "every other one"
    assert labels(axes.xaxis)[0] == r"0 '\$\$'"


def test_a_cell_is_read_out_with_its_names_and_its_weight(run):
    found = analysed(run, heads="0.3", window="120:150")
    picture = maps.maps(found, found["shown"][0])[0]
    weights, logits = drawing.cells(drawn(picture))
    assert weights["names"] == ("query", "key") and len(logits["values"]) == 31
    letters, position = text(), found["window"]["positions"]
    names = ["0 <bos>", *(f"{i} {letters[i - 1]!r}" for i in position[1:])]
    assert weights["labels"] == [names, names], "of every token, also where labels have no room"
    for row, values in enumerate(weights["values"]):  # even weights over all tokens before
        assert values.split(" ") == [f"{1 / (position[row] + 1):.3g}"] * (row + 1), (
            "nothing of later tokens"
        )


def test_cells_that_are_not_numbers_are_left_out_and_dollars_are_read_as_they_are():
    figure = matplotlib.figure.Figure()
    left, right = figure.subplots(1, 2)
    for axes, values in ((left, [[np.nan, 1e-9, -2.5]]), (right, [[0, 123.456, np.nan]])):
        drawing.show_image(axes, np.array(values), vmin=None)
        axes.set(xlabel="pair, fastest first", ylabel="layer" if axes is left else "")
        drawing.label_ticks(axes.yaxis, ["'$$'"])
    cells = drawing.cells(figure)
    assert [found["values"] for found in cells] == [[" 1e-09 -2.5"], ["0 123"]]
    assert [found["names"] for found in cells] == [("layer", "pair")] * 2
    assert cells[0]["labels"] == [["'$$'"], ["0", "1", "2"]]


def test_the_page_allows_one_script_by_its_hash_and_nothing_else(run, tmp_path):
    found = analysed(run, heads="0.1")
    page.write(tmp_path, found)
    source = (tmp_path / "index.html").read_text()
    ((attributes, script),) = re.findall("<script(.*?)>(.*?)</script>", source, re.DOTALL)
    assert (
        attributes == ""
        and script == (pathlib.Path(drawing.__file__).parent / "cells.js").read_text()
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', source)
    assert (
        policy
        == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    tags = Page(tmp_path / "index.html").tags
    assert not any(
        name.startswith("on") or "javascript:" in (value or "")
        for _, a in tags
        for name, value in a.items()
    )
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and {
        "head-0.0",
        "head-0.1",
        "head_0_1",
        "norms_0_1",
        "logits-0.1",
    } < set(ids)
    assert {a["href"] for tag, a in tags if tag == "a" and "href" in a} <= {
        f"#{name}" for name in ids
    }


@pytest.mark.slow
def test_a_page_is_written_with_the_heads_that_were_asked_for(run, tmp_path):
    found = analysed(run, heads="0.1", window="100:148")
    page.write(tmp_path, found)
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "usage",
        "usage_by_head",
        "census",
        "heads",
        "head_0_1",
        "norms_0_1",
    }
    assert "Head 0.1: norms by token" in (tmp_path / "index.html").read_text()


def test_norms_by_token_and_pair_are_those_of_the_construction(known):
    found = analysed(known, heads="0.3", window="100:130")
    picture = maps.maps(found, found["shown"][0])[1]
    shown, positions = images(picture), [0, *range(100, 130)]
    is_q = np.array([i > 0 and text()[i - 1] == "q" for i in positions])
    keys = np.zeros((31, 16))
    keys[is_q, :12] = 1  # pairs that are rotated
    keys[0, 12] = H**0.5
    np.testing.assert_allclose(shown["norms of the key"], keys, atol=1e-4)
    queries = shown["norms of the query"]
    np.testing.assert_allclose(queries, np.broadcast_to(queries[0], queries.shape), rtol=1e-5)
    assert queries[0, :12].min() > 100 and queries[0, 13:].max() == 0
    axes = drawn(picture).axes[0]
    assert labels(axes.yaxis)[:2] == ["0 <bos>", f"100 {text()[99]!r}"]
    assert len(axes.patches) == 1, "where the rotated pairs end"


@pytest.mark.slow
def test_tables_are_of_any_tokens(run, tmp_path):
    """In heads 0 and 1 the logit to the token itself, or before, is its upper bound; head 2 tells where q stands."""
    found = analysed(run, heads="0.0,0.1,0.2", tokens="206,0,31,207")
    diagonal, previous, semantic = (head["table"] for head in found["shown"])
    letters = text()
    assert diagonal["positions"] == [0, 31, 206, 207] and letters[205] == "q"
    assert diagonal["tokens"] == ["<bos>", repr(letters[30]), "'q'", repr(letters[206])]
    np.testing.assert_allclose(diagonal["diagonal"], diagonal["upper_bound"], rtol=1e-4)
    np.testing.assert_allclose(
        previous["previous_token"][1:], previous["previous_upper_bound"][1:], rtol=1e-4
    )
    assert (
        previous["previous_token"][0] is None
        and previous["diagonal"][1] < 0.99 * previous["upper_bound"][1]
    )
    np.testing.assert_allclose(
        semantic["diagonal"], np.multiply([-1, -1, 1, -1], 200 / H**0.5), rtol=1e-4
    )
    np.testing.assert_allclose(
        semantic["previous_token"][1:], np.multiply([-1, -1, 1], 200 / H**0.5), rtol=1e-4
    )
    page.write(tmp_path, found)
    assert "for tokens 0, 31, 206, 207." in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_the_head_of_a_token_is_found_and_shown(known, tmp_path):
    found = analysed(known, head_of="q")
    scores = [head["head_of"] for head in found["heads"]]
    assert scores[3] > 0.99 and max(scores[:3]) < 0.1, (
        "the head before looks at every token before, also elsewhere"
    )
    best = found["shown"][0]
    assert (best["head"], best["why"]) == (3, "head_of") and len(found["shown"]) == 3
    weights = images(maps.maps(found, best)[0])["weights"]
    for row, letter in enumerate(text()[:46], 2):
        assert weights[row - 1, row - 2 if row > 2 and text()[row - 3] == "q" else 0] > 0.99, letter
    page.write(tmp_path, found)
    assert (tmp_path / "norms_0_3.png").exists() and ">head_of</th>" in (
        tmp_path / "index.html"
    ).read_text()


def test_the_paper_without_an_apostrophe_shows_the_rest(run, caplog):
    caplog.set_level("INFO", "prope")
    found = analysed(run, paper=True, channels=1)
    assert "no apostrophe in these tokens" in caplog.text and "'" not in text()
    assert {head["head_of"] for head in found["heads"]} == {None}
    assert [head["why"] for head in found["shown"]] == [
        "diagonal",
        "diagonal",
        "previous_token",
        "previous_token",
    ]
    assert found["window"]["positions"] == list(range(48)), "and all four heads are shown"
    (record,) = found["shown_channels"]
    assert (record["head"], record["pair"]) == (2, 12)
    # Few keys are of a q, so that the first one, which is not, has no advantage.
    assert record["breaking_rotation"] is None and record["first_alignment"] == -1
    assert "advantage is none" in maps.channel(record).caption


def test_the_papers_window_is_around_the_first_apostrophe():
    assert choices.parse_window(None, 200, 150) == range(126, 174)
    assert choices.parse_window(None, 200, 190) == range(152, 200)
    assert choices.parse_window(None, 200) == choices.parse_window(None, 200, 7) == range(48)
    assert choices.parse_window(None, 30, 20) == range(30)
