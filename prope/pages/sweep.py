"""Reports on a sweep or other runs: results, what is shared, where they trained."""

from collections.abc import Sequence

from etils import epath

from prope import parameters
from prope.errors import RunFailed
from prope.inference.opening import check_folder, results_folder
from prope.inference.statistics import Difference
from prope.pages import interventions, page
from prope.pages.curves import pictures
from prope.pages.page import link_to, number
from prope.pages.run import duration, origin, training_seconds
from prope.sweep import context
from prope.sweep.comparisons import Comparison, compare_declared, compare_with_reference, declare
from prope.sweep.interventions import list_changes
from prope.sweep.recovery import recoveries
from prope.sweep.runs import (
    RUN,
    P,
    Run,
    check_equal,
    finished_runs,
    groups,
    have_same_seeds,
    read_entries,
    read_runs,
    read_sweep,
    reference,
    table,
    unfinished_entries,
)


def report_sweep(
    directory: epath.Path, output: str | None = None, contrasts: Sequence[str] = ()
) -> dict:
    """Writes the page of a sweep and its pictures; returns what the command prints.

    They are in DIR/report or, with `output`, in OUTPUT/report. `contrasts` are declared before any
    result is read.
    """
    read_entries(directory)
    folder = results_folder(directory, directory, output)
    check_folder(folder, output)
    if contrasts:
        declare(directory, folder, contrasts)
    runs = read_sweep(directory)
    unfinished = unfinished_entries(directory, runs)
    declared = compare_declared(runs, folder)
    return _report(
        folder / "report", runs, unfinished, declared, title=f"Sweep {directory.resolve().name}"
    )


def report_runs(workdirs: Sequence[epath.Path], output: str | None = None) -> dict:
    """Writes a page that compares runs with the first, as `report_sweep` does those of a sweep.

    It is in W/compared of the first or, with `output`, in OUTPUT/compared.
    """
    folder = results_folder(workdirs[0], workdirs[0], output)
    check_folder(folder, output)
    runs, left_out = read_runs(workdirs)
    names = ", ".join(run.name for run in runs)
    return _report(folder / "compared", runs, left_out, [], title=f"Runs {names}")


def _report(
    folder: epath.Path,
    runs: list[Run],
    unfinished: list[dict],
    contrasts: list[Comparison],
    title: str,
) -> dict:
    """Writes the page of runs into a folder; returns what the command prints."""
    rows = result_rows(runs, compare_with_reference(runs))
    found = {
        "contrasts": contrasts,
        "changes": list_changes(runs),
        "lengths": context.rows(runs),
        "recoveries": recoveries(runs),
    }
    path = _write(folder, runs, title=title, rows=rows, unfinished=unfinished, **found)
    means = table(runs)
    by_run = RUN in runs[0].values
    minus = "minus_first" if by_run else "minus_rope"
    for row, result in zip(means, rows, strict=True):
        row["selected_best"] = result["best"]
        row[minus] = None
        if result["difference"]:
            row[minus] = describe(result["difference"], "loss") | {
                "over": result["over"],
                "comparisons": result["difference"].comparisons,
            }
    record = {"output": str(path), "runs": [run.record() for run in runs], "table": means}
    record["left_out" if by_run else "unfinished"] = unfinished
    if by_run:
        record["differing"] = field_values(runs)
    printed = {
        "lengths": list(map(_describe_length, found["lengths"])),
        "recovery": [recovery._asdict() for recovery in found["recoveries"]],
        "contrasts": [
            contrast._asdict() | describe(contrast.difference, "difference")
            for contrast in contrasts
        ],
        "interventions": [
            change._asdict() | describe(change.difference, "difference")
            for change in found["changes"]
        ],
    }
    return record | {name: records for name, records in printed.items() if records}


def _describe_length(row: context.Row) -> dict:
    """Returns a row of losses by length as a record."""
    record = row._asdict() | describe(row.gain, "gain")
    return record if row.window else {name: record[name] for name in ("group", "seq_len", "loss")}


def describe(difference: Difference | None, name: str) -> dict:
    """Returns a difference and its interval as fields of a record."""
    mean = difference and difference.difference
    return {name: mean, "interval": difference and difference.interval()}


def _write(folder: epath.Path, runs: list[Run], **found) -> epath.Path:
    """Writes index.html and its pictures; `found` are the title and tables of the page, by name."""
    spec = runs[0].spec
    # A run may lack the fields of another grid.
    swept = dict.fromkeys(name for run in runs for name in run.values)
    differing = field_values(runs)
    drawn = pictures(runs, found["rows"], found["recoveries"])
    return page.write(
        folder,
        "sweep",
        drawn + interventions.pictures(found["changes"]),
        by_run=RUN in runs[0].values,
        differing=differing,
        lead=lead(found["rows"]),
        spec=spec,
        parameters=parameters.count(spec.model),
        by_p=all(P in run.values for run in runs),
        swept=list(swept),
        windows=sorted({run.evaluation.get("windows") or 0 for run in finished_runs(runs)}),
        effective_lengths=context.effective_lengths(runs),
        left_out=sum(len(run.dropped) for run in runs),
        planned=len(finished_runs(runs)) + len(found["unfinished"]),
        equality=equality(runs),
        runs=[
            {"name": run.name, "link": link_to(run.workdir / "report" / "index.html", folder)}
            | run.record()
            | origin(run)
            for run in runs
        ],
        training_time=duration(sum(map(training_seconds, runs))),
        settings={name: value for name, value in spec.flat().items() if name not in differing},
        **found,
    )


def result_rows(runs: list[Run], comparisons: Sequence[Comparison]) -> list[dict]:
    """Extends the rows of `table` by what the page and its pictures show."""
    rows = table(runs)
    by_group = {comparison.group: comparison for comparison in comparisons}
    by_name = groups(runs)
    lowest = min((row["perplexity"] for row in rows if row["seeds"]), default=None)
    for row, (name, group) in zip(rows, by_name.items(), strict=True):
        model = group[0].spec.model
        other = reference(group[0].values, by_name)
        comparison = by_group.get(name, Comparison(name, other))
        row.update(
            group=name,
            values=group[0].values,
            pairs=model.rotated_share,
            reference=other,
            compared_with=rows[0]["run"] if RUN in group[0].values else "RoPE",
            difference=comparison.difference,
            over=comparison.over,
            best=bool(row["seeds"]) and row["perplexity"] == lowest and have_same_seeds(rows),
        )
    return rows


def lead(rows: list[dict]) -> str:
    """States the result in one sentence, with as much certainty as the runs give it."""
    best = next((row for row in rows if row["best"]), None)
    if not best:
        other = "The means are over different seeds, so they do not tell which is best."
        return other if any(row["seeds"] for row in rows) else "No run has finished yet."
    group = best["group"]
    difference = best["difference"]
    text = f"{group} has the lowest validation perplexity, {best['perplexity']:.4f}"
    compared = sum(row["perplexity"] is not None for row in rows)
    selected = f" It was selected as the best of {compared} after the results were seen."
    if difference is None:  # what others are compared with, or there is no such group
        return f"{text}.{_close(rows, group)}{selected}"
    side = "below" if difference.difference < 0 else "above"
    other = best["compared_with"]
    loss = f"its loss is {abs(difference.difference):.4f} nats per token {side} {other}’s"
    if difference.stderr is None or best["over"] == "documents":
        equal = difference.stderr is None and difference.samples > 1
        certainty = "One run of each cannot tell whether that is more than chance."
        if equal:
            certainty = "The differences of all seeds are equal, so there is no interval."
        return f"{text}; {loss}. {certainty}{selected}"
    shown = f"{_ends(difference)}, Bonferroni for {difference.comparisons}"
    over = f"over {best['over']}"
    if difference.distinguishable:
        return f"{text}; {loss} (95 % interval {over}: {shown}).{selected}"
    return (
        f"{text}, but is not distinguishable from {other}: the 95 % interval of the loss difference"
        f" {over} holds 0 ({shown}; nats per token).{selected}"
    )


def _ends(difference: Difference) -> str:
    """Formats the ends of an interval."""
    low, high = (number(end, "+.4f") for end in difference.interval())
    return f"{low} to {high}"


def _close(rows: list[dict], reference: str) -> str:
    """Lists the groups whose loss is not distinguishable from that of the reference."""
    compared = [row for row in rows if row["reference"] == reference and row["difference"]]
    close = [
        row["group"]
        for row in compared
        if row["difference"].stderr and not row["difference"].distinguishable
    ]
    return f" Not distinguishable from it: {', '.join(close)}." if close else ""


def field_values(runs: list[Run]) -> dict[str, list]:
    """Returns the values, by run, of the fields of the config that are not equal in all runs."""
    configs = [run.spec.flat() for run in runs]
    fields = {name: [spec[name] for spec in configs] for name in configs[0]}
    return {name: values for name, values in fields.items() if len(set(map(repr, values))) > 1}


def equality(runs: list[Run]) -> dict:
    """Compares configs and logged hashes.

    Returns:
      error: why the runs may not be compared, or None.
      fields: those that differ though they are not swept.
      init, batches, steps: those of `check_equal`.
    """
    try:
        equal = check_equal(runs)
    except RunFailed as error:
        return {"error": str(error)}
    swept = {name for run in runs for name in run.values}
    fields = [
        name for name in field_values(runs) if swept.isdisjoint((name, name.rpartition(".")[2]))
    ]
    return {"error": None, "fields": fields} | equal
