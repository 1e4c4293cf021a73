"""Says which evaluations the page of a sweep leaves out, why, and which command adds them."""

import collections

from prope.sweep import context, interventions
from prope.sweep.pictures import by_length
from prope.sweep.runs import Run, groups

_LIMITS = ("max_windows", "max_tokens")


def omissions(runs: list[Run]) -> list[str]:
    """Makes a sentence for every section of the page and every reason to leave out records."""
    counts = collections.Counter()
    for run in runs:
        if run.step >= run.config.num_steps and run.metrics and not run.evaluation:
            reason = f"which {run.name} has at no window count that all runs have"
            counts["Result", f"of the last step, {run.last_step}, {reason}"] += 1
        group = groups(runs)[run.group]
        for record in run.evaluations:
            section = _section(run, record)
            reason = section and _reason(group, run, record)
            if reason:
                counts[section, reason] += 1
        for record in run.answers:
            reason = _reason_of_answer(run, record)
            if reason:
                counts["Tasks", reason] += 1
    return [
        f"{section}: {count} left out, {reason}." for (section, reason), count in counts.items()
    ]


def _section(run: Run, record: dict) -> str | None:
    """Names the section that an evaluation belongs to; None for one that training makes."""
    kind = interventions.kind_of(record.get("encoding"))
    if kind:
        return interventions.WORDS[kind].title
    if record.get("window"):
        return "Gain from context"
    trained = run.config.data
    place = (record["seq_len"], record["dataset"])
    is_own = place == (trained.seq_len, trained.dataset) or record.get("encoding")
    return None if is_own else "Losses by length"


def _reason(group: list[Run], run: Run, record: dict) -> str | None:
    """Tells why an evaluation is left out; None if it is shown."""
    trained = run.config.data
    encoding = record.get("encoding")
    T = record["seq_len"]
    if record["step"] != run.last_step:
        return f"for they are not of the last step, {run.last_step}"
    if run.metrics and record["dataset"] != trained.dataset:
        return f"for they are not of {trained.dataset}; pages of single runs have them"
    if "+" in (encoding or ""):
        return "for they change several bands at once; pages of single runs have them"
    if record["loss"] is None:
        return "for they predict no token"
    limits = [f" --{name}={record[name]}" for name in _LIMITS if record.get(name)]
    command = f"python -m prope.evaluate --workdir={run.workdir.parent} --seq_len="
    if encoding:
        fields = {name: record[name] for name in ("encoding", "factor", "seq_len")}
        if interventions.find_records(run, fields):
            return None
        return (
            f"for nothing says the loss as it is on the same tokens: {command}{T}{''.join(limits)}"
        )
    if record.get("window"):
        place = (T, record["window"], record["sinks"])
        if all(context.find_records(other, *place) for other in group):
            return None
        cut = f" --window={record['window']} --sinks={record['sinks']}"
        return (
            f"for not all seeds have them and the loss as it is: {command}{T}{cut}{''.join(limits)}"
        )
    if all(T in by_length(other) for other in group):
        return None
    if by_length(run):
        limits = []
    lengths = f"{trained.seq_len},{T}"
    return (
        f"for not all seeds have several lengths of one text: {command}{lengths}{''.join(limits)}"
    )


def _reason_of_answer(run: Run, record: dict) -> str | None:
    """Tells why answers are left out; None if they are shown."""
    if record["step"] != run.step:
        return f"for they are not of the last step, {run.step}"
    if record.get("control"):
        return "for they are controls; the table of prope.ask has them"
    if record.get("encoding"):
        return "for they are of another encoding; the table of prope.ask has them"
    return None
