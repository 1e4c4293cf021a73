"""Reads curves from the records of runs, averages them over seeds, and subtracts the reference's.

A curve is a dictionary from x to y. Curves come by group of runs that differ in their seed only,
and within a group by seed: {"p = 0.25": {0: {10: 5.1, 20: 4.9}}}. Seeds are averaged, and
differences from RoPE taken seed by seed, so that what runs of one seed have in common (initial
weights, batches, text) drops out.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from operator import itemgetter

from prope.inference.statistics import Difference, average_seeds
from prope.sweep.runs import SEED, Run, groups, shown_fields
from prope.workdir.records import find_evaluation, find_evaluations

Curve = dict[float, float]
Curves = dict[str, dict[int | None, Curve]]
Points = dict[float, tuple[float, float | None]]  # mean, and half its 95 % interval, by x
Means = dict[str, Points]


def by_step(run: Run) -> Curve:
    """Reads the training loss of every logged step."""
    return {record["step"]: record["loss"] for record in run.metrics}


def by_position(run: Run, read: Callable[[dict], float | None] = itemgetter("loss")) -> Curve:
    """Reads the last step's loss, or `reach`, by position in the window."""
    evaluation = run.evaluation or {}
    return curve_by_bucket_centre(evaluation.get("by_position", []), read)


def reach(bucket: dict) -> float | None:
    """Computes half the 95 % interval over documents; None of one document, or an old record."""
    stderr = bucket.get("loss_stderr")
    return stderr and Difference(bucket["loss"], stderr, bucket["documents"]).reach


def curve_by_bucket_centre(buckets: list[dict], read: Callable[[dict], float | None]) -> Curve:
    """Reads a measure by the middle of each bucket of positions or distances that has it."""
    curve = {(bucket["from"] + bucket["to"]) / 2: read(bucket) for bucket in buckets}
    return {middle: value for middle, value in curve.items() if value is not None}


def last_evaluations(run: Run) -> list[dict]:
    """Selects the last step's evaluations on the data of training, of all window lengths."""
    records = find_evaluations(run.evaluations, **shown_fields(run))
    if not run.metrics:
        return records
    # Not those of documents trained on.
    return [record for record in records if record.get("split") in (None, "validation")]


def by_length(run: Run) -> Curve:
    """Reads the last step's loss by window length: on the same text, else at the same max_windows.

    Fewer than two lengths are no curve.
    """
    by_text: dict[tuple, Curve] = {}
    for record in last_evaluations(run):
        text = record.get("max_windows") or math.inf, record.get("fingerprint")
        if record["loss"] is not None:
            by_text.setdefault(text, {})[record["seq_len"]] = record["loss"]

    several = [(text[0], losses) for text, losses in by_text.items() if len(losses) > 1]
    _, fullest = max(several, key=lambda one: (one[0], len(one[1])), default=(0, {}))
    return fullest


def by_octave(run: Run, read: Callable[[dict], float | None] = itemgetter("loss")) -> Curve:
    """Reads the last step's loss by octave of positions, in windows longer than training's.

    Averaging the `reach` of its buckets gives an upper bound for the octave.
    """
    trained = run.spec.data.seq_len
    records = [record for record in last_evaluations(run) if record.get("by_position")]
    longest = max(records, key=itemgetter("seq_len"), default={"seq_len": trained})
    if longest["seq_len"] <= trained:
        return {}
    means = {}
    by_octave = itertools.groupby(longest["by_position"], lambda b: b["from"].bit_length())
    for _, octave in by_octave:
        buckets = list(octave)
        middle = (buckets[0]["from"] + buckets[-1]["to"]) / 2
        tokens = [bucket["tokens"] for bucket in buckets]
        values = [read(bucket) for bucket in buckets]
        if None not in values:
            means[middle] = statistics.fmean(values, weights=tokens)
    return means


def accuracies(run: Run) -> list[dict]:
    """Reads the last step's accuracy by task and distance, in the longest windows."""
    records = find_evaluations(run.evaluations, step=run.last_step)
    records = [record for record in records if record.get("accuracy_by_distance")]
    longest = max((record["seq_len"] for record in records), default=None)
    evaluation = find_evaluation(records, seq_len=longest) or {}
    return evaluation.get("accuracy_by_distance", [])


def by_distance(run: Run, task: str) -> Curve:
    """Reads the last step's accuracy in a task by the distance from question to answer."""
    entries = [entry for entry in accuracies(run) if entry["task"] == task]
    return curve_by_bucket_centre(entries, itemgetter("accuracy"))


def read_curves(runs: list[Run], read: Callable[[Run], Curve]) -> Curves:
    """Reads the curves of all runs that have any points, by group and seed."""
    by_group: Curves = {}
    for name, group in groups(runs).items():
        for run in group:
            curve = read(run)
            if curve:
                by_group.setdefault(name, {})[run.values.get(SEED)] = curve
    return by_group


def average_curves(by_group: Curves, reaches: Curves) -> Means:
    """Averages the curves of each group over seeds, at every x that all of them have.

    A single seed has the interval of `reaches`, if there is one; groups without points are left
    out.
    """
    means: Means = {}
    for group, seeds in by_group.items():
        curves = list(seeds.values())
        points: Points = {}
        for x in sorted(set.intersection(*map(set, curves))):
            mean = average_seeds([curve[x] for curve in curves])
            of_one = next(iter(reaches.get(group, {}).values()), {}).get(x)
            points[x] = (mean.difference, of_one if len(curves) == 1 else mean.reach)
        if points:
            means[group] = points
    return means


def minus_reference(by_group: Curves, reference_of: dict) -> Curves:
    """Subtracts the curves of a group's reference, seed by seed, from its own."""
    differences: Curves = {}
    for group, seeds in by_group.items():
        other_seeds = by_group.get(reference_of.get(group), {})
        for seed in seeds.keys() & other_seeds.keys():
            curve = seeds[seed]
            other = other_seeds[seed]
            shared = {x: curve[x] - other[x] for x in curve.keys() & other.keys()}
            differences.setdefault(group, {})[seed] = shared
    return differences
