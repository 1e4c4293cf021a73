"""Says which evaluations the page of a sweep leaves out, why, and which command adds them."""

import collections
import shlex

from prope.sweep import interventions
from prope.sweep.pictures import by_length, is_validation
from prope.sweep.runs import Run, find_changed, groups

_OPTIONS = ("window", "sinks", "max_windows", "max_tokens", "split")
_ON_ITS_PAGE = "shown on the page of the run"
_BY_ASK = "control prompts and rescaled encodings are shown by prope.ask only"


def omissions(runs: list[Run]) -> list[tuple[str, str]]:
    """Lists what is left out and why, by section of the page, with a command for it or ""."""
    counts = collections.Counter()
    sentences = []
    by_group = groups(runs)
    for run in runs:
        is_done = run.step >= run.config.num_steps and run.metrics
        if is_done and not (run.evaluation or run.dropped):
            sentences.append((f"Result: {run.name}: not evaluated at step {run.step}", ""))
        for record in (*run.evaluations, *run.dropped):
            reason = _reason(by_group[run.group], run, record)
            command = _command(run, record) if reason.endswith("run:") else ""
            counts[_section(run, record), reason, command] += 1
        for record in run.answers:
            if record["step"] != run.step:
                counts["Tasks", f"not of the last step, {run.step}", ""] += 1
            elif record.get("control") or record.get("encoding"):
                counts["Tasks", _BY_ASK, ""] += 1
    for (section, reason, command), count in counts.items():
        if section and reason:
            sentences.append((f"{section}: {count} left out: {reason}", command))
    return sentences


def _section(run: Run, record: dict) -> str | None:
    """Names the section that an evaluation belongs to; None for one that training makes."""
    if record in run.dropped:
        return "Result"
    kind = interventions.kind_of(record.get("encoding"))
    if kind:
        return interventions.WORDS[kind][0]
    if record.get("window"):
        return "Gain from context"
    trained = run.config.data
    place = (record["seq_len"], record.get("dataset"))
    is_own = place == (trained.seq_len, trained.dataset) and is_validation(run, record)
    return None if is_own or record.get("encoding") else "Losses by length"


def _reason(group: list[Run], run: Run, record: dict) -> str:
    """Tells why an evaluation is left out, "run:" last for a command; "" if it is shown."""
    encoding = record.get("encoding")
    if record in run.dropped:
        is_used = any(record in find_changed(run, other) for other in run.evaluations)
        return "" if is_used else "on windows that another run lacks; run:"
    if record["step"] != run.last_step:
        return f"not of the last step, {run.last_step}"
    if run.metrics and record.get("dataset") != run.config.data.dataset:
        return f"not of {run.config.data.dataset}; {_ON_ITS_PAGE}"
    if "+" in (encoding or ""):
        return f"of several bands at once; {_ON_ITS_PAGE}"
    if encoding:
        is_shown = find_changed(run, record)
        return "" if is_shown else "no plain evaluation of the same windows; run:"
    if record.get("window"):
        is_shown = all(find_changed(other, record) for other in group)
        return "" if is_shown else "not all seeds have it and a plain one of the same windows; run:"
    if not is_validation(run, record):
        return f"of split {record['split']}; {_ON_ITS_PAGE}"
    is_shown = all(record["seq_len"] in by_length(other) for other in group)
    return "" if is_shown else "not all seeds have several lengths of one text; run:"


def _command(run: Run, record: dict) -> str:
    """Returns the command that evaluates all runs as a record needs."""
    lengths = record["seq_len"]
    trained = run.config.data.seq_len
    if not (record.get("encoding") or record.get("window") or lengths == trained):
        lengths = f"{trained},{lengths}"
        if by_length(run):  # of a fuller text
            record = {}
    command = f"python -m prope.evaluate --workdir={shlex.quote(str(run.workdir.parent))}"
    command += f" --seq_len={lengths}"
    for name in _OPTIONS:
        if record.get(name) not in (None, "validation"):
            command += f" --{name}={record[name]}"
    return command
