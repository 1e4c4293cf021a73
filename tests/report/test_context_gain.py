"""The sweep's table of losses by length: each beside that of the best truncated window."""

import dataclasses
import shutil

import numpy as np
import pytest
import scipy.stats
from support.sweeps import SWEEP_SEEDS as SEEDS
from support.sweeps import Page
from support.text import read_lines, write_lines

from prope.sweep import comparisons, context, runs
from prope.sweep import page as sweep_page

# Losses with a window minus those without, by seed: the second is the best.
CHANGES = {(64, 0): (0.5, 0.7), (128, 4): (0.1, 0.3), (192, 0): (0.9, -0.1)}


@pytest.fixture
def sweep(template, tmp_path):
    """A sweep whose runs of p = 0 have evaluations with windows, all but one of every seed."""
    copied = shutil.copytree(template, tmp_path / "sweep")
    for seed in SEEDS:
        path = copied / f"rope_percentage=0,seed={seed}/eval.jsonl"
        records = read_lines(path)
        plain = plain_record(records)
        for (window, sinks), changes in CHANGES.items():
            loss = plain["loss"] + changes[seed]
            cut = {"window": window, "sinks": sinks, "loss": loss}
            records.append(plain | cut)
        if seed == 0:
            alone = {"window": 8, "sinks": 0, "loss": 0.001}
            records.append(plain | alone)
        write_lines(path, records)
    return copied


def plain_record(records) -> dict:
    """The last step's evaluation of all windows at the longest length, as it is."""
    plain = []
    for record in records:
        is_whole = record["step"] == 10 and record.get("max_windows") is None
        if is_whole and "encoding" not in record:
            plain.append(record)
    return max(plain, key=lambda record: record["seq_len"])


def test_the_best_window_and_the_gain_from_context(sweep):
    """Means over seeds; a window that a seed lacks does not count; p = 1 has none."""
    plain = []
    for seed in SEEDS:
        records = read_lines(sweep / f"rope_percentage=0,seed={seed}/eval.jsonl")
        plain.append(plain_record(records))
    T = plain[0]["seq_len"]
    losses = [record["loss"] for record in plain]
    loss = np.mean(losses)
    by_place = {}
    for row in context.rows(runs.read_sweep(sweep)):
        by_place[row.group, row.seq_len] = row
    row = by_place["p = 0", T]
    assert row.loss == pytest.approx(loss)
    best = row.best
    assert best.window == 128
    assert best.sinks == 4
    changes = CHANGES[128, 4]
    mean = np.mean(changes)
    assert best.loss == pytest.approx(loss + mean)
    assert best.gain.difference == pytest.approx(mean)
    test = scipy.stats.ttest_1samp(changes, 0)
    expected = test.confidence_interval(0.95)
    assert best.gain.interval() == pytest.approx(tuple(expected))
    assert by_place["p = 1", T].best is None
    assert by_place["p = 0", T // 2].best is None


def test_one_length_alone_and_a_run_that_is_not_finished(sweep):
    """Its evaluations with windows are enough for a row; runs that go on do not hide it."""
    for seed in SEEDS:
        path = sweep / f"rope_percentage=0,seed={seed}/eval.jsonl"
        records = read_lines(path)
        T = plain_record(records)["seq_len"]
        at_one_length = [record for record in records if record["seq_len"] == T]
        trained = [record | {"seq_len": 256} for record in at_one_length]
        write_lines(path, trained)
    read = runs.read_sweep(sweep)
    going_on = dataclasses.replace(read[0], step=5, evaluations=[])
    assert going_on.state != "finished"
    for listed in (read, [*read, going_on]):
        (row,) = [row for row in context.rows(listed) if row.group == "p = 0"]
        assert row.seq_len == 256
        assert row.best.window == 128


def test_the_page_shows_them(sweep):
    read = runs.read_sweep(sweep)
    rows = sweep_page.result_rows(read, comparisons.compare_with_rope(read))
    page = Page(sweep_page.write(sweep, read, rows, [], lengths=context.rows(read)))
    (table,) = [table for table in page.tables if "gain from context" in table[0]]
    (best,) = [line for line in table[1:] if "128 and the first 4" in line]
    assert best[-1].startswith("+0.2000 (")
    printed = sweep_page.report_sweep(sweep)["lengths"]
    (record,) = [record for record in printed if record.get("window")]
    assert record["gain"] == pytest.approx(0.2)
