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
            counts["Result", f"for {run.name} has no evaluation of step {run.step}"] += 1
        group = groups(runs)[run.group]
        for record in run.evaluations:
            section = _section(run, record)
            counts[section, section and _reason(group, run, record)] += 1
        for record in run.answers:
            reason = None
            if record["step"] != run.step:
                reason = f"for they are not of the last step, {run.step}"
            elif record.get("control") or record.get("encoding"):
                reason = "for they are controls or rescaled; the table of prope.ask has them"
            counts["Tasks", reason] += 1
    return [f"{name}: {count} left out, {why}." for (name, why), count in counts.items() if why]


def _section(run: Run, record: dict) -> str | None:
    """Names the section that an evaluation belongs to; None for one that training makes."""
    kind = interventions.kind_of(record.get("encoding"))
    if kind:
        return interventions.WORDS[kind][0]
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
    limits = "".join(f" --{name}={record[name]}" for name in _LIMITS if record.get(name))
    command = f"python -m prope.evaluate --workdir={run.workdir.parent} --seq_len="
    if encoding:
        fields = {name: record[name] for name in ("encoding", "factor", "seq_len")}
        if interventions.find_records(run, fields):
            return None
        return f"for nothing says the loss as it is on the same tokens: {command}{T}{limits}"
    if record.get("window"):
        place = (T, record["window"], record["sinks"])
        if all(context.find_records(other, *place) for other in group):
            return None
        cut = f" --window={record['window']} --sinks={record['sinks']}"
        return f"for not all seeds have them and the loss as it is: {command}{T}{cut}{limits}"
    if all(T in by_length(other) for other in group):
        return None
    if by_length(run):  # of a fuller text
        limits = ""
    lengths = f"{trained.seq_len},{T}"
    return f"for not all seeds have several lengths of one text: {command}{lengths}{limits}"
