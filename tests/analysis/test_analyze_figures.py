"""The paper's figures of chosen heads: what they show of decoders whose heads are known."""

import base64
import hashlib
import html
import pathlib
import re

import matplotlib.figure
import numpy as np
import pytest
from support.heads import KNOWN_HEAD_DIM, analysis_options, make_known_heads, text_with_q
from support.sweeps import Page, draw_picture, map_values

from prope.analysis import analysis, choices, compare, maps, page
from prope.html import drawing

LETTERS = text_with_q()
SEMANTIC_LOGIT = 200 / KNOWN_HEAD_DIM**0.5  # logit of a q; that of other tokens is its negative


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A diagonal, a previous-token, a semantic head that looks for q, and an even one."""
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(LETTERS)
    make_known_heads(base / "run", 0.75)
    return base


def analysed(run, **flags) -> dict:
    flags = {"text": str(run / "text.txt"), "channels": 0} | flags
    return analysis.analyse(run / "run", analysis_options(**flags))


def tick_texts(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def token_names(positions) -> list[str]:
    """Names in the window: the first token, and letters by position."""
    return ["0 <bos>", *(f"{i} {LETTERS[i - 1]!r}" for i in positions[1:])]


def semantic_logits(positions) -> list[float]:
    is_q = [i > 0 and LETTERS[i - 1] == "q" for i in positions]
    return np.where(is_q, SEMANTIC_LOGIT, -SEMANTIC_LOGIT)


# --- Pictures -------------------------------------------------------------------------------------


def test_values_stand_beside_queries_and_keys_of_every_head():
    rng = np.random.default_rng(0)
    layers = []
    for number in (0, 3):
        norms = {
            "query_norms": rng.random((4, 16)).tolist(),
            "key_norms": rng.random((2, 16)).tolist(),
            "value_norms": rng.random((2, 16)).tolist(),
        }
        layers.append({"layer": number} | norms)
    freqs = [[1.0] * 8 + [0.0] * 8] * 4
    analysis = {"layers": layers, "heads": [None] * 8, "frequencies": freqs}
    heads = {(0, 0), (0, 1), (0, 2), (0, 3), (3, 0), (3, 1), (3, 2), (3, 3)}
    picture = page.usage_by_head(analysis, heads)
    shown = map_values(picture)
    assert list(shown) == ["queries", "keys", "values (control)"]
    for values, name in zip(shown.values(), norms, strict=True):
        np.testing.assert_array_equal(values, np.concatenate([layer[name] for layer in layers]))
    panels = [axes for axes in draw_picture(picture).axes if axes.images]
    assert tick_texts(panels[2].yaxis) == ["0.0", "0.1", "3.0", "3.1"]
    # Where the rotated pairs end; values are not rotated.
    borders = [
        [segment[0, 0] for c in axes.collections for segment in c.get_segments()] for axes in panels
    ]
    assert borders == [[7.5] * 8, [7.5] * 4, []]


def test_a_window_anywhere_is_shown_with_its_tokens_weights_and_logits(run):
    found = analysed(run, heads="0.1,0.2,0.3", window="120:150")
    positions = [0, *range(120, 150)]
    assert found["window"]["positions"] == positions
    previous, semantic, even = [maps.maps(found, head) for head in found["shown"]]
    assert previous[0].name == "head_0_1"
    weights = map_values(previous[0])["weights"]
    assert weights[2:].diagonal(1).min() > 0.9, "on the token before"
    assert np.isnan(weights[np.triu_indices(31, 1)]).all()
    even_weights = map_values(even[0])["weights"]
    assert semantic[0].title == "Head 0.2: weights and logits"
    logits = map_values(semantic[0])["logits"]
    expected = semantic_logits(positions)
    assert (expected > 0).sum() == 2
    for row, position in enumerate(positions):
        seen = slice(row + 1)
        # Over all tokens before, most of which are not shown.
        np.testing.assert_allclose(even_weights[row, seen], 1 / (position + 1), rtol=1e-4)
        np.testing.assert_allclose(logits[row, seen], expected[seen], rtol=1e-4)
        assert np.isnan(logits[row, row + 1 :]).all()
    axes = draw_picture(semantic[0]).axes[0]
    assert tick_texts(axes.xaxis) == tick_texts(axes.yaxis) == token_names(positions)
    norms = draw_picture(previous[1]).axes[0]
    assert tick_texts(norms.yaxis)[:2] == token_names(positions)[:2]
    assert len(norms.collections) == 1, "where the rotated pairs end"


def test_tokens_that_have_no_room_are_left_out_and_dollars_are_no_formula(run):
    found = analysed(run, heads="0.0", window="0:120")
    found["window"] = {"positions": range(120), "tokens": ["'$$'"] * 120}
    picture, _ = maps.maps(found, found["shown"][0])
    axes = draw_picture(picture).axes[0]
    assert len(tick_texts(axes.xaxis)) == len(tick_texts(axes.yaxis)) == 60, "every other one"
    assert tick_texts(axes.xaxis)[0] == "0 '$$'"


def test_a_cell_is_read_out_with_its_names_and_its_weight(run):
    found = analysed(run, heads="0.3", window="120:150")
    picture, _ = maps.maps(found, found["shown"][0])
    weights, logits = drawing.cells(draw_picture(picture))
    assert weights["names"] == ("query", "key")
    assert len(logits["values"]) == 31
    positions = found["window"]["positions"]
    # Every token has one, also where labels have no room.
    assert weights["labels"] == [token_names(positions)] * 2
    for row, values in enumerate(weights["values"]):
        even = f"{1 / (positions[row] + 1):.3g}"
        assert values.split(" ") == [even] * (row + 1), "nothing of later tokens"


def test_cells_that_are_not_numbers_are_left_out_and_dollars_are_read_as_they_are():
    figure = matplotlib.figure.Figure()
    left, right = figure.subplots(1, 2)
    left.set_ylabel("layer")
    values = np.array([[[np.nan, 1e-9, -2.5]], [[0, 123.456, np.nan]]])
    for axes, image in zip((left, right), values, strict=True):
        drawing.show_image(axes, image, vmin=None)
        axes.set_xlabel("pair, fastest first")
        drawing.label_ticks(axes.yaxis, ["'$$'"])
    cells = drawing.cells(figure)
    assert [panel["values"] for panel in cells] == [[" 1e-09 -2.5"], ["0 123"]]
    assert [panel["names"] for panel in cells] == [("layer", "pair")] * 2
    assert cells[0]["labels"] == [["'$$'"], ["0", "1", "2"]]


# --- The page -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_tokens_and_names_are_text(run, tmp_path):
    """A token is named by its Python text, so that it has no characters that are not seen."""
    hostile = "<script>alert(1)</script> \"q\" 'q' & $\\frac$ \0\u202e\ud800"
    found = analysed(run, heads="0.1")
    found |= {"source": hostile, "workdir": f"runs/{hostile}"}
    for tokens in (found["window"], *(head["table"] for head in found["shown"])):
        tokens["tokens"] = [hostile] * len(tokens["tokens"])
    source = page.write(tmp_path, found).read_bytes().decode()
    assert "<script>alert" not in source
    assert all(character.isprintable() or character == "\n" for character in source)
    shown = hostile.replace("\0\u202e\ud800", "\\x00\\u202e\\ud800")
    assert html.unescape(source).count(shown) > 3


def test_pictures_have_short_texts_with_their_main_figures(run, tmp_path):
    """They are read aloud, and the caption after them."""
    found = analysed(run, heads="0.1")
    source = page.write(tmp_path, found).read_text()
    drawn = re.findall('<img alt="(.*?)".*?<figcaption>(.*?)</figcaption>', source, re.DOTALL)
    groups = compare.by_p([found])
    compared = [compare.usage(groups), compare.scores(groups), compare.losses(groups)]
    drawn += [(picture.alt, picture.caption) for picture in compared]
    assert len(drawn) > 8
    for alt, caption in drawn:
        assert alt != caption
        assert re.search(r"\d", alt)
    norms = [layer["query_norms"] for layer in found["layers"]]
    pair = np.mean(norms, axis=(0, 1)).argmax()
    assert f"queries, pair {pair};" in page.usage(found).alt


def test_the_page_allows_one_script_by_its_hash_and_nothing_else(run, tmp_path):
    page.write(tmp_path, analysed(run, heads="0.1", window="20:36"))
    source = (tmp_path / "index.html").read_text()
    ((attributes, script),) = re.findall("<script(.*?)>(.*?)</script>", source, re.DOTALL)
    assert attributes == ""
    assert script == (pathlib.Path(drawing.__file__).parent / "cells.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', source)
    assert policy == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    tags = Page(tmp_path / "index.html").tags
    for _, attributes in tags:
        assert not any(name.startswith("on") for name in attributes)
        assert not any("javascript:" in (value or "") for value in attributes.values())
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"head-0.0", "head-0.1", "head_0_1", "norms_0_1", "logits-0.1"} < set(ids)
    links = {attributes.get("href") for tag, attributes in tags if tag == "a"} - {None}
    assert links <= {f"#{name}" for name in ids}


@pytest.mark.slow
def test_tables_are_of_any_tokens(run, tmp_path):
    """In heads 0 and 1 the logit to the token itself, or before, is its upper bound."""
    found = analysed(run, heads="0.0,0.1,0.2", tokens="206,0,31,207")
    diagonal, previous, semantic = (head["table"] for head in found["shown"])
    positions = [0, 31, 206, 207]
    assert diagonal["positions"] == positions
    assert LETTERS[205] == "q"
    assert diagonal["tokens"] == ["<bos>", repr(LETTERS[30]), "'q'", repr(LETTERS[206])]
    np.testing.assert_allclose(diagonal["diagonal"], diagonal["upper_bound"], rtol=1e-4)
    before = {name: previous[name][1:] for name in previous if "previous" in name}
    np.testing.assert_allclose(*before.values(), rtol=1e-4)
    assert previous["previous_token"][0] is None
    assert previous["diagonal"][1] < 0.99 * previous["upper_bound"][1]
    expected = semantic_logits(positions)
    np.testing.assert_allclose(semantic["diagonal"], expected, rtol=1e-4)
    expected = semantic_logits([30, 205, 206])
    np.testing.assert_allclose(semantic["previous_token"][1:], expected, rtol=1e-4)
    page.write(tmp_path, found)
    assert "for tokens 0, 31, 206, 207." in (tmp_path / "index.html").read_text()


# --- --paper --------------------------------------------------------------------------------------


def test_the_paper_without_an_apostrophe_shows_the_rest(run, caplog):
    assert "'" not in LETTERS
    caplog.set_level("INFO", "prope")
    found = analysed(run, paper=True, channels=1)
    assert "no apostrophe in these tokens" in caplog.text
    assert {head["head_of"] for head in found["heads"]} == {None}
    reasons = [head["why"] for head in found["shown"]]
    assert reasons == ["diagonal"] * 2 + ["previous_token"] * 2, "all four heads"
    assert found["window"]["positions"] == list(range(48))
    (record,) = found["shown_channels"]
    assert (record["head"], record["pair"]) == (2, 12)
    # Few keys are of a q, so that the first one, which is not, has no advantage.
    assert record["breaking_rotation"] is None
    assert record["first_alignment"] == -1
    assert "advantage is none" in maps.channel(record).caption


@pytest.mark.parametrize(
    ("length", "apostrophe", "window"),
    [
        (200, 150, range(126, 174)),
        (200, 190, range(152, 200)),
        (200, 7, range(48)),
        (200, 0, range(48)),
        (30, 20, range(30)),
    ],
)
def test_the_papers_window_is_around_the_first_apostrophe(length, apostrophe, window):
    assert choices.parse_window(None, length, apostrophe) == window
