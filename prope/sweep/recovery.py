"""Tells when converted models are back: within 0.02 nats of one that was trained on unconverted."""

from typing import NamedTuple

from prope.encodings import FIELDS
from prope.sweep.runs import Run
from prope.workdir.records import (
    SAME_WINDOWS,
    UNCONVERTED,
    evaluations_of_training,
    find_evaluation,
)

WITHIN = 0.02  # nats per token


class Recovery(NamedTuple):
    """A converted run beside its control, which had the same batches and kept its encoding."""

    run: str
    control: str
    tokens: int | None  # of training, until the loss is back for good; None: it is not yet
    within: float  # nats per token
    gaps: list[tuple[int, float]]  # tokens of training, and loss minus the control's there


def recoveries(runs: list[Run], within: float = WITHIN) -> list[Recovery]:
    """Compares the runs of a sweep that were begun from another run with those left unconverted.

    A control has the same seed, and the same values of all but the encoding; others are left out.
    """
    controls = [run for run in runs if _is_control(run)]
    found = []
    for run in runs:
        alike = [control for control in controls if _values(control) == _values(run)]
        if run in controls or not alike or _at_start(run) is None:
            continue
        found.append(compare(run, alike[0], within))
    return found


def compare(run: Run, control: Run, within: float = WITHIN) -> Recovery:
    """Finds the first evaluation from which on a run's loss is at most `within` above another's.

    Steps count that both have evaluated in training on the same windows.
    """
    ours = _losses(run)
    theirs = _losses(control)
    tokens_per_step = run.config.batch_size * run.config.data.seq_len
    tokens = None
    gaps = []
    for step, windows in sorted(ours.keys() & theirs.keys()):
        gap = ours[step, windows] - theirs[step, windows]
        gaps.append((step * tokens_per_step, gap))
        if gap > within:
            tokens = None
        elif tokens is None:
            tokens = step * tokens_per_step
    return Recovery(run.name, control.name, tokens, within, gaps)


def _losses(run: Run) -> dict[tuple, float]:
    """Returns the losses of training's evaluations by step and windows."""
    losses = {}
    for record in list_evaluations(run):
        windows = tuple(record.get(field) for field in SAME_WINDOWS)
        losses[record["step"], windows] = record["loss"]
    return losses


def list_evaluations(run: Run) -> list[dict]:
    """Lists training's evaluations with a loss by step."""
    steps = sorted({record["step"] for record in run.evaluations})
    records = []
    for step in steps:
        record = _evaluation(run, step)
        if record and record["loss"] is not None:
            records.append(record)
    return records


def _evaluation(run: Run, step: int, encoding: str | None = None) -> dict | None:
    records = evaluations_of_training(run.evaluations, run.config, step, encoding)
    max_windows = run.config.eval.max_windows
    return find_evaluation(records, max_windows=max_windows, encoding=encoding)


def _at_start(run: Run) -> dict | None:
    """Returns the evaluation before the first step, with the run's encoding, of one begun so."""
    return _evaluation(run, 0)


def _is_control(run: Run) -> bool:
    """Tells whether a run that was begun from another keeps its encoding."""
    start = _at_start(run)
    before = _evaluation(run, 0, UNCONVERTED)
    return start is not None and (before is None or before["loss"] == start["loss"])


def _values(run: Run) -> dict:
    """Returns the swept values that a run and its control share."""
    return {name: value for name, value in run.values.items() if name not in FIELDS}
