"""The paper's figures of chosen heads: what they show of decoders whose heads are known."""

import matplotlib.figure
import numpy as np
import pytest
from test_analyze import H, asked, constructed, text

from prope.analysis import analysis as analyze
from prope.analysis import maps, page


def drawn(picture) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=picture.size, layout="constrained")
    picture.draw(figure)
    return figure


def images(picture) -> dict[str, np.ndarray]:
    """Values of a picture's maps, by title."""
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in drawn(picture).axes if axes.images}


def test_values_stand_beside_queries_and_keys_of_every_head():
    rng = np.random.default_rng(0)
    shapes = {"query_norms": (4, 16), "key_norms": (2, 16), "value_norms": (2, 16)}
    layers = [
        {"layer": n, "turned": 8, **{k: rng.random(shape).tolist() for k, shape in shapes.items()}} for n in (0, 3)
    ]
    picture = page.usage_by_head({"layers": layers, "heads": [None] * 8})
    shown = images(picture)
    assert list(shown) == ["queries", "keys", "values (control)"]
    for values, name in zip(shown.values(), shapes, strict=True):
        np.testing.assert_array_equal(values, np.concatenate([layer[name] for layer in layers]))
    queries, keys, values = (axes for axes in drawn(picture).axes if axes.images)
    assert [label.get_text() for label in values.get_yticklabels()] == ["0.0", "0.1", "3.0", "3.1"]
    assert [len(axes.patches) for axes in (queries, keys, values)] == [1, 1, 0], "values are not rotated"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A diagonal, a previous-token, a semantic head that looks for q, and an even one; see `constructed`."""
    base = tmp_path_factory.mktemp("known")
    (base / "text.txt").write_text(text())
    constructed(base / "run", 0.75)
    return base


def analysed(run, **flags) -> dict:
    return analyze.analyse(run / "run", asked(**{"text": str(run / "text.txt"), "channels": 0} | flags))


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_window_anywhere_is_shown_with_its_tokens_weights_and_logits(run):
    found = analysed(run, heads="0.1,0.2,0.3", window="120:150")
    positions, letters = [0, *range(120, 150)], text()
    assert found["window"]["positions"] == positions
    previous, semantic, even = (maps.maps(found, head)[0] for head in found["shown"])
    assert (previous.name, semantic.title) == ("head_0_1", "Head 0.2 by token")
    weights = images(previous)["weights, as square roots"] ** 2
    assert weights[2:].diagonal(1).min() > 0.9, "on the token before"
    assert np.isnan(weights[0, 1]) and np.isnan(weights[29, 30])
    weights = images(even)["weights, as square roots"] ** 2  # over all tokens before, most of which are not shown
    for row, position in enumerate(positions):
        np.testing.assert_allclose(weights[row, : row + 1], 1 / (position + 1), rtol=1e-4)
    signs = [1 if i and letters[i - 1] == "q" else -1 for i in positions]
    assert signs.count(1) == 2
    logits = images(semantic)["logits"]
    for row in range(31):
        np.testing.assert_allclose(logits[row, : row + 1], np.multiply(signs, 200 / H**0.5)[: row + 1], rtol=1e-4)
        assert np.isnan(logits[row, row + 1 :]).all()
    axes = drawn(semantic).axes[0]
    assert labels(axes.xaxis) == labels(axes.yaxis) == ["0 <bos>", *(f"{i} {letters[i - 1]!r}" for i in positions[1:])]


def test_tokens_that_have_no_room_are_left_out_and_dollars_are_no_formula(run):
    found = analysed(run, heads="0.0", window="0:120") | {"window": {"positions": range(120), "tokens": ["'$$'"] * 120}}
    axes = drawn(maps.maps(found, found["shown"][0])[0]).axes[0]
    assert 20 < len(labels(axes.xaxis)) < len(labels(axes.yaxis)) < 121
    assert labels(axes.xaxis)[0] == r"0 '\$\$'"


def test_a_page_is_written_with_the_heads_that_were_asked_for(run, tmp_path):
    found = analysed(run, heads="0.1", window="100:148")
    page.write(tmp_path, found)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"usage", "usage_by_head", "census", "heads", "head_0_1"}
    assert "Head 0.1 by token" in (tmp_path / "index.html").read_text()
