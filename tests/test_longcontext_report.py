"""The maps of the long-context tasks: what they show is in the runs' records."""

import json
import pathlib
import re

import matplotlib.figure
import numpy as np
import pytest

from prope.config import default_config
from prope.html import drawing
from prope.inference.longcontext import RECORDS
from prope.runtime import files
from prope.sweep import maps, runs
from prope.sweep.page import report_sweep
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import write_config

LENGTHS, ROWS, TRAINED = (128, 256, 512), (0.0, 0.5, 1.0), 256


def share(p, seed, length, row) -> float:
    """Full marks up to a distance of 256 for p = 1, everywhere for p = 0.25, whose second seed is a little worse."""
    right = (1 - row) * length <= TRAINED or p == 0.25
    return (0.96 if right else 0.2) - 0.02 * seed


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    directory, entries = tmp_path_factory.mktemp("sweep"), []
    for p in (0.25, 1.0):
        for seed in (0, 1):
            values = {"rope_percentage": p, "seed": seed}
            workdir = directory / f"rope_percentage={p:g},seed={seed}"
            workdir.mkdir()
            config = default_config()
            config.update_from_flattened_dict(
                {"model.rope_percentage": p, "seed": seed, "num_steps": 10}
            )
            config.data.seq_len = TRAINED
            write_config(workdir, config)
            with Checkpoints(workdir) as checkpoints:
                identity = {"config": config.to_dict(), "init_hash": f"{seed:016x}"}
                checkpoints.save(
                    10, {"x": np.zeros(1)}, {"x": np.zeros(1)}, identity, {"examples": 0}
                )
            records = []
            for length in LENGTHS:
                right = {row: share(p, seed, length, row) for row in ROWS}
                cells = [
                    {
                        "row": row,
                        "rank_accuracy": right[row],
                        "distance": 1.4 * max((1 - row) * length, 4),
                    }
                    for row in ROWS
                ]
                record = {
                    "step": 10,
                    "task": "niah",
                    "form": "compact",
                    "seq_len": length,
                    "cells": cells,
                }
                mean = float(np.mean([cell["rank_accuracy"] for cell in cells]))
                records.append(
                    record | {"control": None, "chance": 0.125, "trials": 50, "rank_accuracy": mean}
                )
            others = [{"control": "removed"}, {"encoding": "yarn"}, {"step": 5}]  # not drawn
            wrong = [records[0] | other | {"rank_accuracy": 0.0, "cells": []} for other in others]
            lines = [json.dumps(record) + "\n" for record in [*records, *wrong]]
            (workdir / RECORDS).write_text("".join(lines))
            entries.append({"name": workdir.name, "values": values})
    (directory / "sweep.json").write_text(json.dumps({"runs": entries}))
    return directory


def test_a_map_shows_the_means_over_seeds(sweep):
    (picture,) = maps.maps(runs.read_sweep(sweep))
    figure = matplotlib.figure.Figure(figsize=picture.size)
    picture.draw(figure)
    assert [axes.get_title() for axes in figure.axes] == ["p = 0.25", "p = 1", "", ""]
    for axes, p in zip(figure.axes, (0.25, 1.0), strict=False):
        shown = {
            (round(text.get_position()[0]), round(text.get_position()[1])): text.get_text()
            for text in axes.texts
        }
        assert shown == {
            (x, y): f"{100 * (share(p, 0, length, row) - 0.01):.0f}"
            for x, length in enumerate(LENGTHS)
            for y, row in enumerate(ROWS)
        }
        (image,) = axes.images
        assert image.get_clim() == (0.125, 1)
        np.testing.assert_allclose(image.get_array()[0, 2], share(p, 0, 512, 0.0) - 0.01)
        dashed, training, period = axes.lines
        assert dashed.get_xdata()[0] == 1  # the training length is the second one
        x, y = training.get_data()  # depth 0 at 256 tokens, 0.5 at 512: rows 0 and 1
        assert np.isnan(y[x < 0.99]).all() and abs(y[-1] - 1) < 0.01
        turn = (
            2 * np.pi * 10_000 ** (2 * (int(32 * p) - 1) / 64)
        )  # tokens in which the slowest pair comes round
        np.testing.assert_allclose(
            period.get_ydata()[-1], 2 * (1 - turn / 512) if turn < 512 else np.nan
        )
        assert axes.get_ylim()[0] > axes.get_ylim()[1], "depth 0 is on top"


def test_the_effective_length_ends_before_the_first_failure(sweep):
    (picture,) = maps.maps(runs.read_sweep(sweep))
    assert "p = 0.25: 512, 512; p = 1: 256, 256." in picture.alt
    of = {
        length: {"rank_accuracy": a}
        for length, a in ((128, 0.1), (256, 0.9), (512, 0.85), (1024, 0.8), (2048, 1.0))
    }
    assert maps.effective_length(256, of) == 512
    assert maps.effective_length(300, of) is None, "the training length was not evaluated"
    assert maps.effective_length(128, of) is None, "a run that fails there"
    assert maps.effective_length(256, {}) is None


def test_accuracy_by_distance_is_in_octaves_with_intervals_over_prompts(sweep):
    (picture,) = maps.maps(runs.read_sweep(sweep))
    figure = matplotlib.figure.Figure(figsize=picture.size)
    picture.draw(figure)
    axes = figure.axes[3]  # p = 1, below its map
    shares = {
        6: 0.95,
        96: 0.95,
        192: 0.95,
        384: 0.95,
        768: 0.19,
    }  # middles of octaves; means of two seeds
    curve, training = axes.lines  # the slowest pair comes round far beyond
    assert dict(zip(*curve.get_data(), strict=True)) == pytest.approx(shares)
    assert training.get_xdata()[0] == TRAINED
    prompts = {6: 300, 96: 100, 192: 200, 384: 200, 768: 100}  # 50 of every cell
    z, expected = 1.959963984540054, []
    for middle, share_right in shares.items():
        n = prompts[middle]
        centre, reach = (
            share_right + z * z / 2 / n,
            z * np.sqrt(share_right * (1 - share_right) / n + (z / 2 / n) ** 2),
        )
        expected += [
            (middle, (centre - reach) / (1 + z * z / n)),
            (middle, (centre + reach) / (1 + z * z / n)),
        ]
    drawn = {(x, round(y, 6)) for x, y in axes.collections[0].get_paths()[0].vertices}
    assert {(x, round(y, 6)) for x, y in expected} <= drawn


def test_curves_stand_below_their_maps_where_maps_wrap():
    figure = matplotlib.figure.Figure(figsize=(12, 12))
    above, below = drawing.panels(figure, 7, rows=2, wrap=5, height_ratios=(3, 2) * 2)
    figure.draw_without_rendering()
    for one, other in zip(above, below, strict=True):
        place, lower = one.get_position(), other.get_position()
        assert (
            place.x0 == lower.x0
            and 0 < place.y0 - lower.y1 < place.height
            and place.height > lower.height
        )
    assert [axes.get_visible() for axes in figure.axes].count(False) == 6


def test_a_run_of_its_own_gets_its_maps(sweep):
    (path,), effective = maps.draw_tasks(sweep / "rope_percentage=1,seed=1")
    assert effective == {"niah": "256"}
    assert path.endswith("rope_percentage=1,seed=1/longcontext/task-niah.png")
    assert pathlib.Path(path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (sweep / "none").mkdir()
    assert maps.draw_tasks(sweep / "none") == ([], {})


def test_the_page_has_effective_lengths_by_task_and_reads_records_once(sweep, monkeypatch):
    reads, retry = [], files.retry_reads
    monkeypatch.setattr(
        "prope.workdir.records.retry_reads",
        lambda path, *more: reads.append(path.name) or retry(path, *more),
    )
    page = pathlib.Path(report_sweep(sweep)["output"]).read_text()
    table = re.search(r"<h2[^>]*>Tasks</h2>.*?</table>", page, re.DOTALL)[0]
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
    ]
    assert rows == [["run", "niah"], ["p = 0.25", "512, 512"], ["p = 1", "256, 256"]]
    assert reads.count(RECORDS) == 4, "runs"
