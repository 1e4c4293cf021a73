"""The page of a sweep: its numbers are those of the runs' files, and it asks for nothing."""

import base64
import io
import json
import math
import re
import runpy
import shutil
import statistics
from types import SimpleNamespace

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
import scipy.stats
from conftest import ROOT
from makers import SWEEP_PERCENTAGES as PERCENTAGES
from makers import SWEEP_SEEDS as SEEDS
from makers import SWEEP_STEPS as STEPS
from makers import Page, read_lines, write_lines

from prope.config import default_config
from prope.errors import RunFailed, UsageError
from prope.html import drawing
from prope.inference import paired
from prope.sweep import page as sweep_page
from prope.sweep import pictures, runs


@pytest.fixture
def made(template, tmp_path):
    """A copy of it that may be spoilt."""
    import shutil

    return shutil.copytree(template, tmp_path / "sweep")


def pictures_of(directory):
    found = runs.read_sweep(directory)
    return pictures.pictures(found, sweep_page.result_rows(found))


def page_of(directory):
    """The page without its pictures, which take time; they are drawn below."""
    found = runs.read_sweep(directory)
    for picture in pictures_of(directory):
        lines_of(picture)
    return Page(sweep_page.write(directory, found, sweep_page.result_rows(found), [])), [
        run.record() for run in found
    ]


def final(directory, p, seed, seq_len=256):
    found = read_lines(directory / f"rope_percentage={p:g},seed={seed}" / "eval.jsonl")
    (record,) = [r for r in found if r["step"] == 10 and r["seq_len"] == seq_len]
    return record


def test_the_numbers_of_the_page_are_those_of_the_files(made):
    page, _ = page_of(made)
    head, *rows = page.tables[0]
    assert (
        head[:3] == ["p", "rotated pairs", "runs"] and "paper" not in page.text
    )  # other data, another model
    for p, row in zip(PERCENTAGES, rows, strict=True):
        records = [final(made, p, seed) for seed in SEEDS]
        expected = [f"{p:g}", f"{int(32 * p)} of 32", "2"]
        for name in ("loss", "perplexity", "bits_per_byte"):
            values = [record[name] for record in records]
            spread = abs(values[0] - values[1]) / math.sqrt(2)
            digits = min(4, 1 - math.floor(math.log10(spread)))  # two digits of the spread
            expected.append(f"{sum(values) / 2:.{digits}f} ± {spread:.{digits}f}")
        losses, of_rope = ([final(made, q, seed)["loss"] for seed in SEEDS] for q in (p, 1.0))
        if p < 1:
            low, high = scipy.stats.ttest_rel(losses, of_rope).confidence_interval(0.95)
            apart = f"{(low + high) / 2:+.4f} ({low:+.4f} to {high:+.4f})".replace("-", "−")
            expected.append(apart + ("; not distinguishable" if low < 0 < high else ""))
        assert row == (expected if p < 1 else [*expected, "–"])
    best = min(PERCENTAGES, key=lambda p: sum(final(made, p, seed)["perplexity"] for seed in SEEDS))
    assert f"p = {best:g} has the lowest validation perplexity" in page.text
    marked = [
        i for i, attributes in enumerate(a for tag, a in page.tags if tag == "tr") if attributes
    ]
    assert marked == [1 + PERCENTAGES.index(best)]
    (runs_table,) = [table for table in page.tables if table[0][1] == "state"]
    first = final(made, 0, 0)
    last = read_lines(made / "rope_percentage=0,seed=0" / "metrics.jsonl")[-1]
    assert runs_table[1] == [
        "rope_percentage=0,seed=0",
        "finished",
        "10",
        f"{last['loss']:.4f}",
        f"{first['loss']:.4f}",
        f"{first['perplexity']:.4f}",
        f"{first['bits_per_byte']:.4f}",
        "0" * 16,
    ]
    (machines,) = [table for table in page.tables if table[0][1] == "devices"]
    code = "0123456789+changes"
    assert machines[1][1:] == ["8 × TPU v5p", "–", "0.10.2", code, "2", "4,096", "0:00:10"]
    assert machines[2][1:] == ["–", "–", "–", "–", "–", "4,096", "0:00:10"]
    assert page.text.count("equal. Those of 6 of 6 runs") == 2 and "up to 10." in page.text


def test_a_page_of_methods_compares_them_with_rope(made):
    """The same runs, had they been swept by config: of p = 0, 0.25 and 1."""
    sweep, by_p = json.loads((made / "sweep.json").read_text()), page_of(made)[0]
    methods = {0.0: "nope", 0.25: "cope", 1.0: "rope"}
    for entry in sweep["runs"]:
        if p := entry["values"]:
            entry["values"] = {"config": methods[p["rope_percentage"]], "seed": p["seed"]}
    (made / "sweep.json").write_text(json.dumps(sweep))
    page, _ = page_of(made)
    assert page.tables[0][0][0] == "run" and [row[0] for row in page.tables[0][1:]] == list(
        methods.values()
    )
    assert [row[1:] for row in page.tables[0][1:]] == [row[1:] for row in by_p.tables[0][1:]]
    drawn = {picture.name: picture for picture in pictures_of(made)}
    means = [
        statistics.mean(final(made, p, seed)["perplexity"] for seed in SEEDS) for p in PERCENTAGES
    ]
    axes, apart = lines_of(drawn["perplexity"])
    assert any(x == list(methods.values()) and np.allclose(y, means) for x, y in axes)
    losses = [np.mean([final(made, p, seed)["loss"] for seed in SEEDS]) for p in PERCENTAGES]
    assert any(
        x == ["nope", "cope"] and np.allclose(y, np.subtract(losses[:2], losses[2]))
        for x, y in apart
        if len(x) == 2
    )


def test_a_legend_stands_below_the_panels_in_as_many_columns_as_have_room():
    for width, columns in ((9.6, 4), (5, 2)):
        figure = matplotlib.figure.Figure(figsize=(width, 4), layout="constrained")
        axes = figure.subplots()
        names = [f"p = 0.{i}, a field" for i in range(6)]
        for name in names:
            axes.plot([0, 1], [0, 1], label=name)
        drawing.legend(axes)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == names
        assert len({text.get_window_extent().x0 for text in legend.get_texts()}) == columns
        assert legend.get_window_extent().y1 < axes.get_window_extent().y0


def test_a_row_of_panels_wraps():
    figure = matplotlib.figure.Figure(figsize=(12, 4))
    (row,) = drawing.panels(figure, 5, wrap=3)
    assert [axes.get_subplotspec().colspan.start for axes in row] == [0, 1, 2, 0, 1]
    assert [axes.get_visible() for axes in figure.axes] == [True] * 5 + [False]
    assert list(row) == figure.axes[:5]


def test_labels_in_cells_can_be_read_on_their_colours():
    axes = matplotlib.figure.Figure().subplots()
    values = np.array([[0.1, 0.9, np.nan]])
    drawing.label_cells(axes, values, "{:.1f} of it".format, bright=0.5)
    labels = [(text.get_text(), text.get_color()) for text in axes.texts]
    assert labels == [("0.1 of it", "white"), ("0.9 of it", "black")], "nan has no label"


def test_a_cell_of_a_map_is_where_the_page_is_told(tmp_path):
    """The colour of the picture in the middle of every cell is that of its value."""
    values = np.linspace(0, 1, 12).reshape(3, 4)

    def draw(figure) -> None:
        _, axes, square = figure.subplots(1, 3)
        drawing.heat(axes, values, "", "row", ["a", "b", "c"], rotated=None)
        drawing.show_image(square, values)

    png, maps = drawing.Picture("map", "", "", "", draw).render()
    image = matplotlib.image.imread(io.BytesIO(png))
    height, width, _ = image.shape
    assert len(maps) == 2
    for cells in maps:
        left, bottom, box_width, box_height = cells["box"]
        for (row, column), value in np.ndenumerate(values):
            x = left + (column + 0.5) / 4 * box_width
            y = 1 - bottom - box_height + (row + 0.5) / 3 * box_height
            expected = matplotlib.colormaps["viridis"](value)
            np.testing.assert_allclose(image[int(y * height), int(x * width)], expected, atol=0.01)


def test_the_page_shows_the_fullest_evaluation_everywhere(made):
    """Of one seed, after evaluations on a few windows, on other documents, and on more of one run only."""
    rng = np.random.default_rng(1)
    entries = [
        {"name": f"rope_percentage={p:g},seed=0", "values": {"rope_percentage": p}}
        for p in PERCENTAGES
    ]
    (made / "sweep.json").write_text(json.dumps({"runs": entries}))
    full = {}
    for p, entry in zip(PERCENTAGES, entries, strict=True):
        records = []
        more = [("a", 500, 500)] if p == PERCENTAGES[0] else []
        for fingerprint, windows, max_windows in (
            ("a", 100, None),
            ("a", 48, 48),
            ("b", 200, None),
            *more,
        ):
            losses, tokens = rng.uniform(100, 200, (30, 2)), np.full((30, 2), 64)
            record = {
                "fingerprint": fingerprint,
                "seq_len": 256,
                "windows": windows,
                "max_windows": max_windows,
            }
            loss = float(losses.sum() / tokens.sum())
            record |= {"step": 10, "dataset": "python_docs", "split": "validation", "loss": loss}
            record |= {"perplexity": math.exp(loss)}
            records.append(
                record
                | {"bits_per_byte": loss, "by_position": [{"from": 0, "to": 256, "loss": loss}]}
            )
            others = {
                "edges": np.array([0, 128, 256]),
                "source": np.zeros(30, int),
                "shares": [1.0],
            }
            paired.write_sums(
                made / entry["name"] / "eval" / "10", record, losses, tokens, **others
            )
        write_lines(made / entry["name"] / "eval.jsonl", records)
        full[p] = records[0]["loss"]
    page, records = page_of(made)
    for p, row in zip(PERCENTAGES, page.tables[0][1:], strict=True):
        assert row[3] == f"{full[p]:.4f}"
        apart = f"{full[p] - full[1.0]:+.4f}".replace("-", "−")
        assert row[6] == "–" if p == 1 else row[6].startswith(f"{apart} (")
    assert [record["eval_loss"] for record in records] == list(full.values())
    (position,) = [picture for picture in pictures_of(made) if picture.name == "position"]
    assert [line[1] for line in lines_of(position)[0]] == [[loss] for loss in full.values()]
    path = made / entries[0]["name"] / "eval.jsonl"
    write_lines(path, read_lines(path)[1:2])
    assert runs.read_sweep(made)[0].state == "unfinished", "training's own evaluation is missing"


def test_the_page_asks_for_nothing_and_can_be_read_aloud(made):
    result = sweep_page.report_sweep(made)
    assert result["output"] == str(made / "report" / "index.html") and len(result["runs"]) == 6
    losses = [[final(made, p, seed)["loss"] for seed in SEEDS] for p in (0, 1)]
    expected = scipy.stats.ttest_rel(*losses).confidence_interval()
    assert result["table"][0]["minus_rope"]["interval"] == pytest.approx(tuple(expected))
    assert (
        result["table"][0]["minus_rope"]["over"] == "2 seeds"
        and result["table"][2]["minus_rope"] is None
    )
    page = Page(made / "report" / "index.html")
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "video", "audio", "form", "base")
        for name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
            assert attributes.get(name, "data:").startswith(("data:", "#")), (tag, name)
        assert not any(name.startswith("on") for name in attributes)
        assert not any("http" in (value or "") for value in attributes.values())
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
    source = (made / "report" / "index.html").read_text()
    assert (
        re.findall(r"url\((?!#)", source) == []
        and "@import" not in source
        and "default-src 'none'" in source
    )
    texts = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert len(texts) == 7 and min(map(len, texts)) > 40
    assert ("html", {"lang": "en"}) in page.tags and sum(tag == "h1" for tag, _ in page.tags) == 1
    assert "'<b>.model'" not in source and "&lt;b&gt;.model" in source
    files = sorted(path.name for path in (made / "report").iterdir())
    names = ["accuracy-copy", "accuracy-recall", "far", "length", "loss", "perplexity", "position"]
    assert files == sorted(["index.html", *(f"{name}.png" for name in names)])
    png = (made / "report" / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert source.count(base64.b64encode(png).decode()) == 1


def lines_of(picture):
    """x and y of what is drawn, by panel and label."""
    figure = matplotlib.figure.Figure()
    picture.draw(figure)
    return [
        [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
        for axes in figure.axes
    ]


def test_the_pictures_show_what_the_files_say(made):
    drawn = {picture.name: picture for picture in pictures_of(made)}
    names = ["perplexity", "loss", "position", "length", "far"]
    assert list(drawn) == [*names, "accuracy-copy", "accuracy-recall"]

    def logged(p, seed):
        return [
            r["loss"]
            for r in read_lines(made / f"rope_percentage={p:g},seed={seed}" / "metrics.jsonl")
        ]

    left, right = lines_of(drawn["loss"])
    for i, p in enumerate(PERCENTAGES):
        assert left[i][0] == list(STEPS)
        np.testing.assert_allclose(left[i][1], np.mean([logged(p, seed) for seed in SEEDS], axis=0))
        if p < 1:
            apart = [np.subtract(logged(p, seed), logged(1.0, seed)) for seed in SEEDS]
            np.testing.assert_allclose(right[i][1], np.mean(apart, axis=0))
    left, _ = lines_of(drawn["position"])
    expected = np.mean(
        [[b["loss"] for b in final(made, 0.25, seed)["by_position"]] for seed in SEEDS], axis=0
    )
    assert left[1][0] == [32, 96]
    np.testing.assert_allclose(left[1][1], expected)
    left, _ = lines_of(drawn["length"])
    assert left[0][0] == [256, 512]
    np.testing.assert_allclose(
        left[0][1][0], np.mean([final(made, 0, seed)["loss"] for seed in SEEDS])
    )
    left, _ = lines_of(drawn["far"])
    buckets = [final(made, 0, seed, 512)["by_position"] for seed in SEEDS]
    assert left[0][0] == [(b["from"] + b["to"]) / 2 for b in buckets[0]]
    np.testing.assert_allclose(
        left[0][1], np.mean([[b["loss"] for b in of_seed] for of_seed in buckets], axis=0)
    )
    copy, recall = (lines_of(drawn[f"accuracy-{task}"])[0] for task in ("copy", "recall"))
    assert copy[0][0] == recall[0][0] == [12, 24]
    found = [final(made, 0, seed, 512)["accuracy_by_distance"] for seed in SEEDS]
    expected = np.mean([[entry["accuracy"] for entry in record] for record in found], axis=0)
    np.testing.assert_allclose([*copy[0][1], *recall[0][1]], expected)
    means = [
        statistics.mean(final(made, p, seed)["perplexity"] for seed in SEEDS) for p in PERCENTAGES
    ]
    assert all(
        f"p = {p:g}: {mean:.4f}" in drawn["perplexity"].alt
        for p, mean in zip(PERCENTAGES, means, strict=True)
    )
    axes, _ = lines_of(drawn["perplexity"])
    assert any(x == list(PERCENTAGES) and np.allclose(y, means) for x, y in axes)


def test_positions_in_long_windows_are_put_together_by_octaves():
    config = default_config()
    config.num_steps, config.data.seq_len = 10, 256
    record = {"step": 10, "dataset": "python_docs", "seq_len": 8192}
    buckets = [
        {"from": a, "to": a + 1024, "tokens": 1 + a // 1024, "loss": float(a)}
        for a in range(0, 8192, 1024)
    ]
    others = [record | {"seq_len": 16_384}, record | {"seq_len": 256, "by_position": buckets[:1]}]
    shorter = record | {"seq_len": 512, "by_position": buckets[1:2]}
    run = SimpleNamespace(
        config=config, evaluations=[shorter, record | {"by_position": buckets}, *others]
    )
    shares = [
        (0, 0, 512),
        (1, 1, 1536),
        (2, 3, 3072),
        (4, 7, 6144),
    ]  # first and last bucket of an octave, its middle
    expected = {
        x: 1024 * sum(k * (1 + k) for k in range(a, b + 1)) / sum(1 + k for k in range(a, b + 1))
        for a, b, x in shares
    }
    assert pictures.by_octave(run) == pytest.approx(expected)
    assert pictures.by_octave(SimpleNamespace(config=config, evaluations=others)) == {}


def test_runs_of_a_grid_without_p_have_their_place(made):
    """As of a get_sweep() with two grids, one of p and one of another field."""
    sweep = json.loads((made / "sweep.json").read_text())
    for entry in sweep["runs"][2:4]:  # p = 0.25
        entry["values"] = {"rope_type": "partial", "seed": entry["values"]["seed"]}
    (made / "sweep.json").write_text(json.dumps(sweep))
    page, _ = page_of(made)
    names = ["p = 0", "rope_type = partial", "p = 1"]
    assert [row[0] for row in page.tables[0]] == ["run", *names]
    perplexity = pictures_of(made)[0]
    assert re.findall("|".join(names), perplexity.alt) == names


def test_what_is_missing_is_left_out(made):
    for path in made.glob("rope_percentage=1,*/eval.jsonl"):
        path.unlink()
    (made / "rope_percentage=0,seed=1" / "metrics.jsonl").unlink()
    page, records = page_of(made)
    assert [row[2] for row in page.tables[0][1:]] == ["2", "2", "0"]
    assert page.tables[0][3][3:7] == ["–"] * 4 and page.tables[0][1][6] == "–"
    assert [record["state"] for record in records].count("unfinished") == 2
    for path in [*made.glob("*/eval.jsonl"), *made.glob("*/metrics.jsonl")]:
        path.unlink()
    page, _ = page_of(made)
    assert "No run has finished yet." in page.text and pictures_of(made) == []
    assert "Initial weights: equal" in page.text and "Batches: not proven" in page.text


def test_runs_that_may_not_be_compared_are_said_to_be_so(made):
    path = made / "rope_percentage=0.25,seed=1" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"batch_hash": "15"', '"batch_hash": "99"'))
    page, _ = page_of(made)
    says = "rope_percentage=0,seed=1 and rope_percentage=0.25,seed=1 saw other batches at step 5: batch_hash 15 and 99"
    assert f"No: {says}" in page.text
    with pytest.raises(RunFailed, match=says):
        runs.check_equal(runs.read_sweep(made))


@pytest.mark.parametrize(
    ("page", "changes", "expected"),
    [
        ("wiki", {}, ("Wikipedia", 4.4414)),
        ("wiki", {"model.rope_percentage": 1.0}, ("Wikipedia", 4.4627)),
        ("wiki", {"model.rope_percentage": 0.5}, None),  # not in the paper's table
        ("wiki", {"data.seq_len": 4096}, None),
        ("wiki", {"model.num_layers": 6}, None),
        ("wiki", {"model.hidden_dim": 8192}, None),
        ("wiki", {"model.max_wavelength": 1e6}, None),
        (
            "wiki",
            {"model.rope_percentage": 1.0, "model.max_wavelength": 5e5},
            ("Wikipedia", 4.4485),
        ),
        ("wiki", {"model.rope_type": "partial"}, ("Wikipedia", 4.4537)),
        ("wiki", {"model.rope_type": "reversed"}, ("Wikipedia", 4.4592)),
        ("wiki", {"model.use_qk_norm": True}, None),
        ("wiki", {"model.layer_types": ("sliding_attention",), "model.sliding_window": 4096}, None),
        ("wiki", {"data.tokenizer": "byte"}, None),
        ("wiki", {"data.dataset": "wikipedia/20230601.simple"}, None),
        ("flan", {}, ("FlanV2", 6.4422)),
        ("flan", {"model.rope_type": "reversed"}, ("FlanV2", 6.4683)),
        (
            "flan",
            {"data.mixture": ({"weight": 1.0, "dataset": "files", "data_dir": "data/flan_v2/t0"},)},
            None,
        ),
        ("wiki", {"data.dataset": "mixture"}, None),
    ],
)
def test_the_papers_numbers_stand_beside_its_own_runs_only(page, changes, expected):
    config = runpy.run_path(f"{ROOT}/configs/gemma_2b_{page}.py")["get_config"]()
    config.update_from_flattened_dict(changes)
    assert sweep_page.paper_result(config) == expected


def test_the_papers_perplexities_are_those_of_its_table_2():
    """Rows of the paper: NoPE, RoPE, 0.25-RoPE, 0.75-RoPE, RoPE 5e5, 0.75-reversed, 0.75-partial; Wiki, FlanV2."""
    wiki = (4.8594, 4.4627, 4.5302, 4.4414, 4.4485, 4.4592, 4.4537)
    flan = (6.6429, 6.4429, 6.5111, 6.4422, 6.4593, 6.4683, 6.4562)
    rows = [("proportional", 1e4, p) for p in (0.0, 1.0, 0.25, 0.75)] + [("proportional", 5e5, 1.0)]
    rows += [("reversed", 1e4, 0.75), ("partial", 1e4, 0.75)]
    assert dict(zip(rows, zip(wiki, flan, strict=True), strict=True)) == sweep_page.PAPER


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        (
            [-0.006, -0.007, -0.008],
            "its loss is 0.0070 nats per token below RoPE’s (95 % interval over 3 seeds:",
        ),
        (
            [-0.001, -0.010, -0.001],
            "but is not distinguishable from RoPE: the 95 % interval of the loss difference",
        ),
        ([-0.007], "One run of each cannot tell whether that is more than chance."),
        (
            [+0.001, +0.010, +0.001],
            "p = 1 has the lowest validation perplexity, 5.0000. Not distinguishable",
        ),
        ([+0.006, +0.007, +0.008], "p = 1 has the lowest validation perplexity, 5.0000."),
    ],
)
def test_the_headline_claims_no_more_than_the_interval(differences, says):
    """−0.001, −0.010, −0.001: the mean is 1.33 standard errors below 0, where 4.3 are needed; two would not do."""
    found = paired.average_seeds(differences)
    row = {"group": "p = 0.75", "reference": "p = 1", "difference": found, "over": "3 seeds"}
    row["perplexity"] = 4.9 if found.difference < 0 else 5.1
    rows = [
        row,
        {"perplexity": 5.0, "difference": None, "over": "", "group": "p = 1", "reference": None},
    ]
    least = min(rows, key=lambda row: row["perplexity"])
    assert says in sweep_page.lead([row | {"best": row is least} for row in rows])


def test_three_seeds_have_two_degrees_of_freedom():
    for values in ([-0.0062, -0.0101, -0.0021], [0.3, 0.3, 0.31, 0.29]):
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
        found = paired.average_seeds(values)
        np.testing.assert_allclose(found.interval(), expected, rtol=1e-9)
        assert found.distinguishable == (expected.low * expected.high > 0)
    assert (
        paired.average_seeds([0.1]).interval() is None
        and not paired.average_seeds([0.1]).distinguishable
    )


def test_runs_that_share_one_logged_step_are_drawn(made):
    for path in made.glob("rope_percentage=0,*"):  # then the difference from RoPE is a single point
        shutil.rmtree(path)
    for path in made.glob("*/metrics.jsonl"):
        write_lines(path, read_lines(path)[:1])
    (loss,) = [picture for picture in pictures_of(made) if picture.name == "loss"]
    assert [line[0] for line in lines_of(loss)[0]] == [[1]] * 2


def test_one_bad_run_does_not_flatten_the_others(made):
    """NoPE's perplexity is 30 times that of the others: they stay apart, as the axis is logarithmic."""
    for path in made.glob("rope_percentage=0,*/eval.jsonl"):
        records = [record for record in read_lines(path) if "perplexity" in record]
        write_lines(
            path, [record | {"perplexity": 30 * record["perplexity"]} for record in records]
        )
    (picture,) = [picture for picture in pictures_of(made) if picture.name == "perplexity"]
    figure = matplotlib.figure.Figure()
    picture.draw(figure)
    perplexity, difference = figure.axes
    assert perplexity.get_yscale() == "log"
    apart = [final(made, 0.25, seed)["loss"] - final(made, 1.0, seed)["loss"] for seed in SEEDS]
    points = difference.lines[0]
    assert list(points.get_xdata()) == [0.0, 0.25]
    mean = points.get_ydata()[1]
    assert mean == pytest.approx(np.mean(apart))


def test_a_directory_that_is_no_sweep_gets_one_line(run_command, made, tmp_path):
    missing = run_command("prope.report", f"--sweep={tmp_path}/none")
    assert missing.code == 2 and "no sweep there (no sweep.json)" in missing.error
    assert "sweep" in run_command("prope.report").error
    error = run_command("prope.report", f"--workdir={made}").error
    assert f"--workdir={made}: holds a sweep, not a run; give --sweep={made}" in error
    for path in made.glob("*/config.json"):
        path.unlink()
    with pytest.raises(UsageError, match="none of its 7 runs has started"):
        runs.read_sweep(made)
    (made / "sweep.json").write_text("{")
    with pytest.raises(UsageError, match=re.escape("sweep.json: not readable as JSON")):
        runs.read_sweep(made)
