"""Finds when converted models are back: within 0.02 nats of one that was trained on unconverted."""

from typing import NamedTuple

from prope.encodings import FIELDS
from prope.sweep.runs import Run
from prope.workdir.records import UNCONVERTED, find_validation, windows_of

WITHIN = 0.02  # nats per token


class Recovery(NamedTuple):
    """A converted run beside its control, which had the same batches and kept its encoding."""

    run: str
    control: str
    tokens: int | None  # of training, until the loss is back for good; None: it is not yet
    within: float  # nats per token
    gaps: list[tuple[int, float]]  # tokens of training, and loss minus the control's there


def recoveries(runs: list[Run]) -> list[Recovery]:
    """Compares the runs of a sweep that were begun from another run with those left unconverted.

    A control has the same seed, and the same values of all but the encoding. Runs without one are
    left out.
    """
    controls = [run for run in runs if _is_control(run)]
    found = []
    for run in runs:
        alike = [control for control in controls if _values(control) == _values(run)]
        if run not in controls and alike and _validation(run, 0) is not None:
            found.append(compare(run, alike[0]))
    return found


def compare(run: Run, control: Run, within: float = WITHIN) -> Recovery:
    """Finds the first evaluation from which on a run's loss is at most `within` above another's.

    Steps count that both have evaluated in training on the same windows.
    """
    ours = _losses(run)
    theirs = _losses(control)
    tokens = None
    gaps = []
    for step, windows in sorted(ours.keys() & theirs.keys()):
        gap = ours[step, windows] - theirs[step, windows]
        gaps.append((step * run.tokens_per_step, gap))
        if gap > within:
            tokens = None
        elif tokens is None:
            tokens = step * run.tokens_per_step
    return Recovery(run.name, control.name, tokens, within, gaps)


def _losses(run: Run) -> dict[tuple, float]:
    """Returns the losses of training's evaluations by step and windows."""
    records = list_evaluations(run)
    return {(record["step"], windows_of(record)): record["loss"] for record in records}


def list_evaluations(run: Run) -> list[dict]:
    """Lists training's evaluations with a loss, by step."""
    steps = sorted({record["step"] for record in run.evaluations})
    records = [_validation(run, step) for step in steps]
    return [record for record in records if record and record["loss"] is not None]


def _validation(run: Run, step: int, encoding: str | None = None) -> dict | None:
    return find_validation(run.evaluations, run.spec, step, encoding)


def _is_control(run: Run) -> bool:
    """Returns whether a run that was begun from another keeps its encoding."""
    start = _validation(run, 0)
    before = _validation(run, 0, UNCONVERTED)
    return start is not None and (before is None or before["loss"] == start["loss"])


def _values(run: Run) -> dict:
    """Returns the swept values that a run and its control share."""
    return {name: value for name, value in run.values.items() if name not in FIELDS}
