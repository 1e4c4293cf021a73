"""The paper's figures of chosen heads: what they show of decoders whose heads are known."""

import matplotlib.figure
import numpy as np

from prope.analysis import page


def drawn(picture) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=picture.size)
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
