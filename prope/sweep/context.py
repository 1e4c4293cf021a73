"""Reads how far back runs use their context: in their losses by length, and in tasks.

A loss that a truncated window reaches too says nothing about the use of what is outside of it: so
beside it stands that of the records of `prope.evaluate --window`, on the same tokens.
"""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from prope.inference.statistics import Difference
from prope.sweep.curves import by_length
from prope.sweep.runs import Run, average, find_changed, finished_runs, groups
from prope.workdir.records import find_evaluations

PASSED = 0.85  # least share of right answers up to the effective length


class Row(NamedTuple):
    """A group's mean loss at a length, and with the window that leaves the least gain.

    The window is of the layers that have none. Losses are in nats per token.
    """

    group: str
    seq_len: int
    loss: float
    window: int | None = None  # None without records of a window
    sinks: int | None = None
    window_loss: float | None = None  # of the same tokens
    # `window_loss` minus `loss`, over seeds; over documents for a single run
    gain: Difference | None = None


def rows(runs: list[Run]) -> list[Row]:
    """Makes a row for every group and length that all its finished runs were evaluated at."""
    made = []
    for name, group in groups(finished_runs(runs)).items():
        curves = [by_length(run) for run in group]
        compared = set.intersection(*map(set, curves))
        cut = {record["seq_len"] for record in group[0].evaluations if record.get("window")}
        for T in sorted(compared | cut):
            # By the gain, whose two losses are of the same tokens.
            best = min(_cuts(name, group, T), key=lambda row: row.gain.difference, default=None)
            if best:
                made.append(best)
            elif T in compared:
                made.append(Row(name, T, statistics.fmean(curve[T] for curve in curves)))
    return made


def _cuts(name: str, group: list[Run], T: int) -> Iterator[Row]:
    """Yields a row for every window that all runs of a group have records of, at a length."""
    cuts = {
        (record["window"], record["sinks"])
        for run in group
        for record in run.evaluations
        if record.get("window") and record["seq_len"] == T
    }
    for window, sinks in sorted(cuts):
        fields = {"seq_len": T, "window": window, "sinks": sinks}
        found = [find_changed(run, fields) for run in group]
        if () in found:
            continue
        gain, _ = average([(run, run, *records) for run, records in zip(group, found, strict=True)])
        loss = statistics.fmean(record["loss"] for record, _ in found)
        whole_loss = statistics.fmean(record["loss"] for _, record in found)
        yield Row(name, T, whole_loss, window, sinks, loss, gain)


# --- Tasks ----------------------------------------------------------------------------------------


def answers_by_task(run: Run) -> dict[str, dict[int, dict]]:
    """Selects the last step's newest records by task and length; in prose a task is another one."""
    tasks = {}
    for record in find_evaluations(run.answers, control=None, step=run.step):
        task = record["task"]
        if record["form"] == "prose":
            task += "-in-prose"
        tasks.setdefault(task, {})[record["seq_len"]] = record
    return tasks


def retrieves(record: dict) -> bool:
    """Returns whether 85 % are right, and their 95 % interval is above the best guess."""
    low, _ = record["accuracy_interval"]
    return record["accuracy"] >= PASSED and low > record["guess"]


def effective_length(trained: int, by_length: dict[int, dict]) -> int | None:
    """Returns the length up to which a run retrieves, from its training length on.

    None if it does not even retrieve at its training length.
    """
    effective = None
    for length in sorted(by_length):
        if length < trained:
            continue
        if not retrieves(by_length[length]):
            break
        effective = length
    return effective if trained in by_length else None


def effective_lengths(runs: list[Run]) -> dict[str, dict[str, str]]:
    """Lists the effective lengths of every group's runs, by group and task."""
    tasks = dict.fromkeys(task for run in runs for task in answers_by_task(run))
    return {
        name: {task: ", ".join(_length_text(run, task) for run in group) for task in tasks}
        for name, group in groups(runs).items()
    }


def _length_text(run: Run, task: str) -> str:
    """Formats a run's effective length; – where it was not asked at its training length."""
    trained = run.spec.data.seq_len
    by_length = answers_by_task(run).get(task, {})
    missing = "none" if trained in by_length else "–"
    return str(effective_length(trained, by_length) or missing)
