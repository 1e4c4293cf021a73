"""The maps of the long-context tasks: what they show is in the runs' records."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from scipy import stats
from support.models import draw_model
from support.runs import save_checkpoints
from support.sweeps import draw_picture
from support.text import write_lines

from prope.config import default_config
from prope.errors import UsageError
from prope.inference.asking import RECORDS
from prope.runtime import files
from prope.sweep import maps, runs
from prope.sweep.page import report_sweep
from prope.sweep.run_page import report_run
from prope.workdir.run import write_config

LENGTHS = (128, 256, 512)
ROWS = (0.0, 0.5, 1.0)
TRAINED = 256


def share(p, seed, length, row) -> float:
    """High up to a distance of 256 for p = 1, everywhere for p = 0.25; seed 1 is a little worse."""
    right = 0.2
    if (1 - row) * length <= TRAINED or p == 0.25:
        right = 0.96
    return right - 0.02 * seed


def ask(p, seed, length) -> dict:
    """The record of a task."""
    cells = []
    for row in ROWS:
        cell = {
            "row": row,
            "distance": 1.4 * max((1 - row) * length, 4),
            "accuracy": share(p, seed, length, row),
        }
        cells.append(cell)
    accuracies = [cell["accuracy"] for cell in cells]
    return {
        "step": 10,
        "task": "niah",
        "form": "compact",
        "seq_len": length,
        "control": None,
        "chance": 0.125,
        "guess": 0.3,
        "trials": 50,
        "cells": cells,
        "accuracy": float(np.mean(accuracies)),
        "accuracy_interval": wilson(np.mean(accuracies), 150).tolist(),
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweep")
    entries = []
    for p in (0.25, 1.0):
        for seed in (0, 1):
            workdir = directory / f"rope_percentage={p:g},seed={seed}"
            workdir.mkdir()
            config = default_config()
            config.model.rope_percentage = p
            config.seed = seed
            config.num_steps = 10
            config.data.seq_len = TRAINED
            config.model.update({"num_layers": 1, "embed_dim": 8, "num_heads": 1, "hidden_dim": 8})
            write_config(workdir, config)
            save_checkpoints(workdir, config, {10: draw_model(config.model, seed=seed)[0]})
            records = [ask(p, seed, length) for length in LENGTHS]
            not_drawn = records[0] | {"accuracy": 0.0, "cells": []}
            for other in ({"control": "removed"}, {"encoding": "yarn"}, {"step": 5}):
                records.append(not_drawn | other)
            write_lines(workdir / RECORDS, records)
            values = {"rope_percentage": p, "seed": seed}
            entry = {"name": workdir.name, "values": values}
            entries.append(entry)
    (directory / "sweep.json").write_text(json.dumps({"runs": entries}))
    return directory


@pytest.fixture(scope="module")
def picture(sweep):
    (picture,) = maps.maps(runs.read_sweep(sweep))
    return picture


def test_a_map_shows_the_means_over_seeds(picture):
    axes = draw_picture(picture).axes
    assert [panel.get_title() for panel in axes] == ["p = 0.25", "p = 1", "", ""]
    for panel, p in zip(axes[:2], (0.25, 1.0), strict=True):
        shown = {text.get_position(): text.get_text() for text in panel.texts}
        expected = {}
        for x, length in enumerate(LENGTHS):
            for y, row in enumerate(ROWS):
                mean = share(p, 0, length, row) - 0.01
                expected[x, y] = f"{100 * mean:.0f}"
        assert shown == expected
        (image,) = panel.images
        assert image.get_clim() == (0.3, 1), "from the best guess on"
        mean = share(p, 0, 512, 0.0) - 0.01
        assert image.get_array()[0, 2] == pytest.approx(mean)
        bottom, top = panel.get_ylim()
        assert bottom > top, "depth 0 is on top"


def test_lines_of_a_map_are_the_training_length_and_the_slowest_pairs_period(picture):
    for panel, p in zip(draw_picture(picture).axes[:2], (0.25, 1.0), strict=True):
        dashed, training, period = panel.lines
        assert dashed.get_xdata()[0] == 1  # the training length is the second one
        x, y = training.get_data()  # depth 0 at 256 tokens, 0.5 at 512: rows 0 and 1
        assert np.isnan(y[x < 0.99]).all()
        assert abs(y[-1] - 1) < 0.01
        # Tokens in which the slowest pair comes round.
        turn = 2 * np.pi * 10_000 ** (2 * (int(32 * p) - 1) / 64)
        expected = 2 * (1 - turn / 512) if turn < 512 else np.nan
        np.testing.assert_allclose(period.get_ydata()[-1], expected)


def test_the_effective_length_ends_before_the_first_failure(picture):
    assert "p = 0.25: 512, 512; p = 1: 256, 256." in picture.alt
    accuracy = {128: 0.1, 256: 0.9, 512: 0.85, 1024: 0.8, 2048: 1.0}
    records = {}
    for length, right in accuracy.items():
        records[length] = {"accuracy": right, "accuracy_interval": (right, right), "guess": 0.125}
    assert maps.effective_length(256, records) == 512
    assert maps.effective_length(300, records) is None, "the training length was not evaluated"
    assert maps.effective_length(128, records) is None, "a run that fails there"
    assert maps.effective_length(256, {}) is None


@pytest.mark.parametrize(
    ("accuracy", "low", "guess", "expected"),
    [
        (0.9, 0.8, {"guess": 0.79}, True),
        (0.9, 0.8, {"guess": 0.8}, False),
        (0.84, 0.8, {"guess": 0.3}, False),
        (1.0, 0.9, {"guess": 1.0}, False),
    ],
)
def test_only_above_the_best_guess_is_a_score_retrieval(accuracy, low, guess, expected):
    record = {"accuracy": accuracy, "accuracy_interval": (low, 1.0), "chance": 0.125} | guess
    assert maps.retrieves(record) == expected


def test_maps_of_what_a_guess_answers(sweep):
    changed = []
    for run in runs.read_sweep(sweep):
        answers = [record | {"guess": 1.0} for record in run.answers]
        changed.append(dataclasses.replace(run, answers=answers))
    (picture,) = maps.maps(changed)
    panel, *_ = draw_picture(picture).axes
    (image,) = panel.images
    assert "cannot show retrieval" in panel.get_title()
    assert "p = 0.25: none, none; p = 1: none, none." in picture.alt
    assert {text.get_color() for text in panel.texts} == {"white"}, "on the darkest colour"
    assert image.get_clim() == (1, 1)


def test_an_effective_length_is_unknown_where_the_training_length_was_not_asked(sweep):
    changed = []
    for run in runs.read_sweep(sweep):
        longer = [record for record in run.answers if record["seq_len"] > TRAINED]
        changed.append(dataclasses.replace(run, answers=longer))
    lengths = maps.effective_lengths(changed)
    assert {text for tasks in lengths.values() for text in tasks.values()} == {"–, –"}


def wilson(share, prompts) -> np.ndarray:
    """Wilson's 95 % interval of a share."""
    return np.array(stats.binomtest(round(share * prompts), prompts).proportion_ci(method="wilson"))


def test_accuracy_by_distance_is_in_octaves_with_intervals_over_prompts(picture):
    axes = draw_picture(picture).axes[3]  # p = 1, below its map
    # By the middle of an octave: the share of seed 0, and prompts, 50 of every cell.
    expected = {6: (0.96, 150), 96: (0.96, 50), 192: (0.96, 100), 384: (0.96, 100), 768: (0.2, 50)}
    assert "(Wilson; 50 to 150 prompts a point)" in picture.caption
    *curves, guess, training = axes.lines  # the slowest pair comes round far beyond
    assert set(guess.get_ydata()) == {0.3}
    assert training.get_xdata()[0] == TRAINED
    bands = axes.collections
    for seed, curve, band in zip((0, 1), curves, bands, strict=True):
        x, y = curve.get_data()
        assert list(x) == list(expected)
        np.testing.assert_allclose(y, [right - 0.02 * seed for right, _ in expected.values()])
        (path,) = band.get_paths()
        x, y = path.vertices.T
        for middle, (right, prompts) in expected.items():
            ends = y[x == middle]
            low, high = wilson(right - 0.02 * seed, prompts)
            assert min(ends) == pytest.approx(low)
            assert max(ends) == pytest.approx(high)


def test_a_run_of_its_own_gets_its_maps(sweep, tmp_path):
    run = sweep / "rope_percentage=1,seed=1"
    result = report_run(run)
    assert result["effective_lengths"] == {"niah": "256"}
    picture = run / "report" / "task-niah.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "Effective length by task" in (run / "report" / "index.html").read_text()
    with pytest.raises(UsageError, match="no run there"):
        report_run(tmp_path)


def test_the_page_has_effective_lengths_by_task_and_reads_records_once(sweep, monkeypatch):
    names = []

    def retry_reads(path, *arguments):
        names.append(path.name)
        return files.retry_reads(path, *arguments)

    monkeypatch.setattr("prope.workdir.records.retry_reads", retry_reads)
    page = pathlib.Path(report_sweep(sweep)["output"]).read_text()
    table = re.search(r"<h2[^>]*>Tasks</h2>.*?</table>", page, re.DOTALL)[0]
    rows = []
    for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL):
        rows.append(re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row))
    assert rows == [["run", "niah"], ["p = 0.25", "512, 512"], ["p = 1", "256, 256"]]
    assert names.count(RECORDS) == 4, "runs"
