"""Shows what runs gain from context: their loss by length, beside that of a truncated window.

What is read are the records of `prope.evaluate --window`, on the tokens of a plain evaluation. A
loss that a window reaches too says nothing about the use of what is outside of it.
"""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from prope.inference.statistics import Difference
from prope.sweep.pictures import by_length
from prope.sweep.runs import Run, average, find_changed, finished_runs, groups


class Cut(NamedTuple):
    """A group's loss with a window in the layers that have none, in nats per token."""

    loss: float
    whole_loss: float  # of the same tokens, without it
    window: int
    sinks: int
    gain: Difference  # `loss` minus `whole_loss`, over seeds; over documents for a single run


class Row(NamedTuple):
    """A group's mean loss at a length, and the cut that leaves the least gain."""

    group: str
    seq_len: int
    loss: float
    best: Cut | None  # None without records of a window


def rows(runs: list[Run]) -> list[Row]:
    """Makes a row for every group and length that all its finished runs were evaluated at."""
    made = []
    for name, group in groups(finished_runs(runs)).items():
        curves = [by_length(run) for run in group]
        compared = set.intersection(*map(set, curves))
        cut = {record["seq_len"] for record in group[0].evaluations if record.get("window")}
        for T in sorted(compared | cut):
            # By the gain, whose two losses are of the same tokens.
            best = min(_cuts(group, T), key=lambda cut: cut.gain.difference, default=None)
            if best:
                made.append(Row(name, T, best.whole_loss, best))
            elif T in compared:
                loss = statistics.fmean(curve[T] for curve in curves)
                made.append(Row(name, T, loss, None))
    return made


def _cuts(group: list[Run], T: int) -> Iterator[Cut]:
    """Yields the cuts that all runs of a group have records of, at a length."""
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
        yield Cut(loss, whole_loss, window, sinks, gain)
