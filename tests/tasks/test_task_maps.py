"""The maps of the long-context tasks: what they show is in the runs' records."""

import json
import pathlib
import re

import numpy as np
import pytest
from scipy import stats
from support.models import draw_model
from support.runs import save_checkpoints
from support.sweeps import draw_picture
from support.text import refusal, write_lines

from prope.inference.asking import RECORDS
from prope.pages.run import report_run
from prope.pages.sweep import report_sweep
from prope.pages.tasks import maps
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.sweep import context, runs
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
            sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 1, "hidden_dim": 8}
            model = ModelSpec(rope_percentage=p, **sizes)
            spec = Spec(seed=seed, num_steps=10, model=model, data=DataSpec(seq_len=TRAINED))
            write_config(workdir, spec)
            save_checkpoints(workdir, spec, {10: draw_model(spec.model, seed=seed)[0]})
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
    (picture,) = maps(runs.read_sweep(sweep))
    return picture


def test_a_map_shows_the_means_over_seeds(picture):
    axes = draw_picture(picture).axes
    for panel, p in zip(axes[:2], (0.25, 1.0), strict=True):
        expected = [[share(p, 0, T, row) - 0.01 for T in LENGTHS] for row in ROWS]
        (image,) = panel.images
        np.testing.assert_allclose(image.get_array(), expected)
        assert image.get_clim() == (0.3, 1), "from the best guess on"
        shown = {text.get_position(): text.get_text() for text in panel.texts}
        assert shown[2, 0] == f"{100 * expected[0][2]:.0f}"


def test_lines_are_the_training_length_and_the_slowest_pairs_period(picture):
    axes = draw_picture(picture).axes
    for above, below, p in zip(axes[:2], axes[2:], (0.25, 1.0), strict=True):
        (dashed,) = above.lines
        assert dashed.get_xdata()[0] == 1  # the training length is the second one
        # Tokens in which the slowest pair comes round, as far as there is evidence.
        turn = 2 * np.pi * 10_000 ** (2 * (int(32 * p) - 1) / 64)
        drawn = [line.get_xdata()[0] for line in below.lines if line.get_linestyle() == ":"]
        np.testing.assert_allclose(drawn, [turn] if turn < 1024 else [])


def test_the_effective_length_ends_before_the_first_failure():
    accuracy = {128: 0.1, 256: 0.9, 512: 0.85, 1024: 0.8, 2048: 1.0}
    records = {}
    for length, right in accuracy.items():
        records[length] = {"accuracy": right, "accuracy_interval": (right, right), "guess": 0.125}
    assert context.effective_length(256, records) == 512
    assert context.effective_length(300, records) is None, "the training length was not evaluated"
    assert context.effective_length(128, records) is None, "a run that fails there"
    assert context.effective_length(256, {}) is None


@pytest.mark.parametrize(
    ("accuracy", "low", "guess", "expected"),
    [(0.9, 0.8, 0.79, True), (0.9, 0.8, 0.8, False), (0.84, 0.8, 0.3, False)],
)
def test_only_above_the_best_guess_is_a_score_retrieval(accuracy, low, guess, expected):
    record = {"accuracy": accuracy, "accuracy_interval": (low, 1.0), "guess": guess}
    assert context.retrieves(record) == expected


def wilson(share, prompts) -> np.ndarray:
    """Wilson's 95 % interval of a share."""
    return np.array(stats.binomtest(round(share * prompts), prompts).proportion_ci(method="wilson"))


def test_accuracy_by_distance_is_in_octaves_with_intervals_over_prompts(picture):
    axes = draw_picture(picture).axes[3]  # p = 1, below its map
    # By the middle of an octave: the share of seed 0, and prompts, 50 of every cell.
    expected = {6: (0.96, 150), 96: (0.96, 50), 192: (0.96, 100), 384: (0.96, 100), 768: (0.2, 50)}
    *curves, guess, training = axes.lines  # the slowest pair comes round far beyond
    assert set(guess.get_ydata()) == {0.3}
    assert training.get_xdata()[0] == TRAINED
    for seed, curve, band in zip((0, 1), curves, axes.collections, strict=True):
        x, y = curve.get_data()
        assert list(x) == list(expected)
        np.testing.assert_allclose(y, [right - 0.02 * seed for right, _ in expected.values()])
        (path,) = band.get_paths()
        x, y = path.vertices.T
        for middle, (right, prompts) in expected.items():
            ends = (min(y[x == middle]), max(y[x == middle]))
            assert ends == pytest.approx(tuple(wilson(right - 0.02 * seed, prompts)))


def test_a_run_and_a_sweep_have_effective_lengths_and_maps(sweep, tmp_path):
    run = sweep / "rope_percentage=1,seed=1"
    assert report_run(run)["effective_lengths"] == {"niah": "256"}
    assert (run / "report" / "task-niah.png").is_file()
    page = pathlib.Path(report_sweep(sweep)["output"]).read_text()
    table = re.search(r"<h2[^>]*>Tasks</h2>.*?</table>", page, re.DOTALL)[0]
    assert re.findall(r"<td[^>]*>(\d+, \d+)</td>", table) == ["512, 512", "256, 256"]
    assert f"--workdir={tmp_path}: " in refusal(report_run, tmp_path)
