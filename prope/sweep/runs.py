"""Reads runs from their files: progress, losses, and whether they may be compared.

They are those of a sweep, a directory of runs beside sweep.json, which names the swept fields and
their values; or any others, whose only swept values are names. No device is touched.
"""

import dataclasses
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter

from etils import epath

from prope.encodings import FIELDS
from prope.errors import RunFailed, UsageError, usage_error
from prope.inference.options import text_table
from prope.inference.paired import paired_difference
from prope.inference.statistics import Difference, average_seeds, deviation
from prope.runtime.files import read_json
from prope.spec.run import Spec, differences
from prope.sweep.grid import text_of
from prope.workdir import run as run_dir
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import (
    SAME_WINDOWS,
    evaluations_of_training,
    find_evaluation,
    find_pair,
    read_jsonl,
    windows_of,
)
from prope.workdir.source import recorded_init_from

# Names of swept fields.
SEED = "seed"
P = "rope_percentage"
CONFIG = "config"
RUN = "run"  # of runs that are no sweep: their names
# Fields that the initial weights, and those that the batches, do not depend on.
NOT_OF_INIT = {f"model.{name}" for name in (*FIELDS, "dtype", "attention", "remat", "scan_layers")}
NOT_OF_BATCHES = {"data.cache_dir", "data.num_workers"}
METRICS = ("eval_loss", "perplexity", "bits_per_byte")
CHANGES = ("encoding", "factor", "window", "sinks")  # of a model, in a record; None: as it is
# What two runs with different hashes did, and the remedy.
UNEQUAL = {
    "init": ("did not start equal", "train them anew with one version of the code"),
    "batch": ("saw other batches", "bring back the data of the first, and train the second anew"),
}
DAMAGED_SWEEP = "remove it, and start the sweep again"  # remedy for an unreadable sweep.json


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep, as far as its directory shows it."""

    name: str
    workdir: epath.Path
    values: dict  # values of the swept fields, by their short names
    spec: Spec
    started: bool
    step: int  # step of the newest checkpoint; 0 without one
    init_hash: str | None
    metrics: list[dict]
    evaluations: list[dict]
    answers: list[dict]  # records of longcontext.jsonl
    init_from: str | None = None  # the run whose parameters it was begun from
    dropped: tuple = ()  # evaluations on windows that another run lacks

    @property
    def group(self) -> str:
        """The name of the group of runs that differ from it in their seed only."""
        return group_name(self.values)

    @property
    def last_step(self) -> int:
        """The step whose evaluations are shown: training's last, or the only one of an import."""
        return self.spec.num_steps if self.metrics else self.step

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in a batch."""
        return self.spec.batch_size * self.spec.data.seq_len

    @property
    def last_evaluations(self) -> list[dict]:
        """The evaluations of the last step on the data of training; none without training's own."""
        records = evaluations_of_training(self.evaluations, self.spec, self.spec.num_steps)
        max_windows = self.spec.eval.max_windows
        if any(record.get("max_windows") == max_windows for record in records):
            return records
        return []

    @property
    def evaluation(self) -> dict | None:
        """The fullest of `last_evaluations`."""
        return find_evaluation(self.last_evaluations)

    @property
    def state(self) -> str:
        """new | unfinished | finished: at the last step, and evaluated there."""
        if self.step >= self.spec.num_steps and self.evaluation:
            return "finished"
        return "unfinished" if self.started else "new"

    def record(self) -> dict:
        """Returns the run's entry in the sweep's result; None for numbers that are not there."""
        evaluation = self.evaluation or {}
        return {
            "workdir": str(self.workdir),
            "values": self.values,
            "step": self.step,
            "loss": self.metrics[-1]["loss"] if self.metrics else None,
            "eval_loss": evaluation.get("loss"),
            **{name: evaluation.get(name) for name in METRICS[1:]},
            "init_hash": self.init_hash,
            "state": self.state,
        }


Pair = tuple[Run, Run, dict, dict]  # two runs of a seed and their records on the same windows


def read_run(workdir: epath.Path, values: dict, planned: Spec | None = None) -> Run | None:
    """Reads the run in `workdir`; of a planned one, also before it starts. None: there is none.

    Raises UsageError where another run is there than the planned one.
    """
    saved = run_dir.read_config(workdir)
    spec = planned or saved
    if spec is None:
        return None
    evaluations = read_jsonl(workdir / "eval.jsonl")
    step = 0
    init_hash = None
    if saved is not None:
        message = f"{workdir}: holds a run of another config"
        remedy = "; choose another --workdir, or the config it was started with"
        run_dir.check_same(spec, saved, message, remedy)
        if list_steps(workdir):
            checkpoint = run_dir.open_run(workdir)
            step = checkpoint.step
            init_hash = checkpoint.init_hash
        elif evaluations_of_training(evaluations, spec, spec.num_steps):
            step = spec.num_steps  # its checkpoints were removed
    return Run(
        workdir.name,
        workdir,
        values,
        spec,
        started=saved is not None,
        step=step,
        init_hash=init_hash,
        metrics=read_jsonl(workdir / "metrics.jsonl"),
        evaluations=evaluations,
        answers=read_jsonl(workdir / "longcontext.jsonl"),
        init_from=recorded_init_from(workdir, None),
    )


def on_common_windows(runs: list[Run]) -> list[Run]:
    """Drops last evaluations on windows that another finished run on the same data lacks."""
    common: dict[tuple, set] = {}  # numbers of windows, by the documents and a window's length
    finished = finished_runs(runs)
    for run in finished:
        counts = {record.get("windows") for record in run.last_evaluations}
        data = _documents_and_length(run.evaluation)
        common[data] = common.get(data, counts) & counts

    def select(run: Run) -> Run:
        dropped = tuple(
            record
            for record in (run.last_evaluations if run in finished else ())
            if record.get("windows") not in common[_documents_and_length(record)]
        )
        kept = [record for record in run.evaluations if record not in dropped]
        return dataclasses.replace(run, evaluations=kept, dropped=dropped)

    return list(map(select, runs))


def read_entries(directory: epath.Path) -> list[dict]:
    """Reads the name and the swept values of every run of a sweep, in the order of its grid."""
    sweep = read_json(directory / "sweep.json", DAMAGED_SWEEP)
    if sweep is None:
        problem = "no sweep there (no sweep.json)"
        raise usage_error("--sweep", directory, problem, "give the --workdir of launch/sweep.py")
    return sweep["runs"]


def unfinished_entries(directory: epath.Path, runs: Iterable[Run]) -> list[dict]:
    """Selects the entries of planned runs that are not finished; a `reason` tells why, if known."""
    finished = {run.name for run in finished_runs(runs)}
    return [entry for entry in read_entries(directory) if entry["name"] not in finished]


def _documents_and_length(evaluation: dict) -> tuple[str | None, int | None]:
    return evaluation.get("fingerprint"), evaluation.get("seq_len")


def read_sweep(directory: epath.Path) -> list[Run]:
    """Reads the runs of a sweep that have started, in the order of its grid."""
    entries = read_entries(directory)
    found = [read_run(directory / entry["name"], entry["values"]) for entry in entries]
    runs = [run for run in found if run]
    if not runs:
        reasons = sorted({entry.get("reason") or "not begun" for entry in entries})
        problem = f"none of its {len(entries)} runs has started ({'; '.join(reasons)})"
        raise usage_error("--sweep", directory, problem, "run it first")
    return on_common_windows(runs)


def read_runs(workdirs: Sequence[epath.Path]) -> tuple[list[Run], list[dict]]:
    """Reads runs of any sweeps, or of none, to compare them with the first.

    A run has the name of the first one that differs from it in the seed only. Where no two have
    the same name seeds do not count, and runs of two seeds are compared.

    Returns (finished runs with evaluations on the same windows as the first, {"name", "reason"} of
    the others). Fewer than two that compare are a UsageError.
    """
    names = [workdir.name for workdir in workdirs]
    if len(set(names)) < len(names):
        names = list(map(str, workdirs))
    runs: list[Run] = []
    for name, workdir in zip(names, workdirs, strict=True):
        spec = run_dir.read_config(workdir)
        fields = spec.replace({SEED: 0}).flat()
        values = {RUN: name, SEED: spec.seed}
        for other in runs:
            same = {**other.values, SEED: spec.seed}
            alike = not differences(fields, other.spec.replace({SEED: 0}).flat())
            if alike and same not in [run.values for run in runs]:
                values = same
                break
        runs.append(dataclasses.replace(read_run(workdir, values, spec), name=name))
    if len(groups(runs)) == len(runs):
        runs = [dataclasses.replace(run, values={RUN: run.name}) for run in runs]

    compared = []
    left_out = []
    common = set(map(windows_of, runs[0].last_evaluations))
    for run in runs:
        windows = {windows_of(one) for one in run.last_evaluations if one["loss"] is not None}
        if run.state == "finished" and windows & common:
            common &= windows
            compared.append(run)
            continue
        reason = f"step {run.step} of {run.spec.num_steps}, or not evaluated there"
        if run.state == "finished":
            names = ("dataset", *SAME_WINDOWS)
            ours, theirs = (
                ", ".join(f"{name} {one.evaluation.get(name)}" for name in names)
                for one in (run, runs[0])
            )
            reason = f"evaluated on {ours}, and the first run on {theirs}"
        left_out.append({"name": run.name, "reason": reason})
    if len(compared) < 2:
        reasons = [f"{entry['name']} ({entry['reason']})" for entry in left_out]
        problem = f"no two compare: {'; '.join(reasons) or 'it is one run'}"
        remedy = "name finished runs of one text; prope.evaluate --max_windows adds windows"
        raise usage_error("--runs", ",".join(map(str, workdirs)), problem, remedy)
    return on_common_windows(compared), left_out


def check_equal(runs: list[Run]) -> dict:
    """Compares the logged hashes of initial weights, and of batches that two runs logged.

    Returns {"init": runs whose initial weights were compared with another's, "batches": the same
    for batches, "steps": the last step whose batches were compared}. Raises RunFailed where weights
    or batches that should be equal are not.
    """
    first: dict[tuple, tuple[Run, str]] = {}
    compared = {"init": set(), "batch": set()}
    last_step = 0
    for run in runs:
        for kind, step, fields, hashed in _hashes(run):
            other, expected = first.setdefault((kind, step, fields), (run, hashed))
            if expected != hashed:
                difference, remedy = UNEQUAL[kind]
                hashes = f"{kind}_hash {expected} and {hashed}"
                text = f"{other.name} and {run.name} {difference} at step {step}: {hashes}"
                raise RunFailed(f"{text}; {remedy}")
            if other is not run:
                compared[kind] |= {other.name, run.name}
                last_step = max(last_step, step)
    counts = {"init": len(compared["init"]), "batches": len(compared["batch"])}
    return {**counts, "steps": last_step}


def _hashes(run: Run) -> Iterator[tuple[str, int, str, str]]:
    """Yields (kind, step, the fields that the hash depends on, hash) of all logged hashes."""
    spec = run.spec

    def fields(group: str, without: set[str]) -> list:
        return [
            (name, value)
            for name, value in spec.flat().items()
            if name.startswith(group) and name not in without
        ]

    if run.init_hash is not None:
        origin = [spec.seed, fields("model.", NOT_OF_INIT), run.init_from]
        yield "init", 0, repr(origin), run.init_hash
    batches = repr([spec.seed, spec.batch_size, fields("data.", NOT_OF_BATCHES)])
    for record in run.metrics:
        if record.get("batch_hash") is not None:
            yield "batch", record["step"], batches, record["batch_hash"]


def finished_runs(runs: Iterable[Run]) -> list[Run]:
    """Selects the runs that are at their last step, and evaluated there."""
    return [run for run in runs if run.state == "finished"]


def groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Groups runs that differ only in their seed, by `group_name`."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.group, []).append(run)
    return by_name


def group_name(values: dict) -> str:
    """Names a group by its values: 'p = 0.25' for {"rope_percentage": 0.25, "seed": 1}."""
    prefixes = {P: "p = ", CONFIG: "", RUN: ""}  # a config is named by itself
    texts = [
        prefixes.get(name, f"{name} = ") + text_of(value)
        for name, value in values.items()
        if name != SEED
    ]
    return ", ".join(texts) or "all runs"


def reference(values: dict, names: Collection[str]) -> str | None:
    """Returns which of the groups is the RoPE to compare with: p = 1, or "rope" among methods.

    The other values are the same if there is such a group, else those of the encoding are left out.
    None for RoPE. Of runs that are no sweep it is the first group.
    """
    if RUN in values:
        first = next(iter(names))
        return None if group_name(values) == first else first
    rope = dict(values)
    if P in values:
        rope[P] = 1.0
    elif CONFIG in values:
        rope[CONFIG] = re.sub("^[^-]*", "rope", values[CONFIG])  # cope-tiny: rope-tiny
    plain = {name: value for name, value in rope.items() if name == P or name not in FIELDS}
    for others in (rope, plain):
        if others != values and group_name(others) in names:
            return group_name(others)
    return None


def paired_runs(group: list[Run], others: list[Run]) -> list[Pair]:
    """Pairs the finished runs of two groups by seed, with their evaluations on the same windows.

    Evaluations without a loss are left out.
    """
    by_seed = {run.values.get(SEED): run for run in finished_runs(others)}
    pairs = []
    for run in finished_runs(group):
        other = by_seed.get(run.values.get(SEED))
        if other is not None:
            records = find_pair(run.last_evaluations, other.last_evaluations)
            if records and None not in map(itemgetter("loss"), records):
                pairs.append((run, other, *records))
    return pairs


def shown_fields(run: Run) -> dict:
    """Returns values of the last step's records on the run's data, which an import has not."""
    data = {"dataset": run.spec.data.dataset} if run.metrics else {}
    return {"step": run.last_step} | data


def find_changed(run: Run, record: dict) -> tuple[dict, ...]:
    """Finds the run's fullest last evaluation with the change of a record, and the plain one.

    They are on the same windows; () without both, or without their losses.
    """
    fields = {name: record.get(name) for name in ("seq_len", *CHANGES)} | shown_fields(run)
    plain = [*run.dropped, *run.evaluations]
    found = find_pair(run.evaluations, plain, dict.fromkeys(CHANGES), **fields)
    return found if found and None not in map(itemgetter("loss"), found) else ()


def average(pairs: list[Pair]) -> tuple[Difference | None, str]:
    """Averages losses minus those of other runs, by two records of the same windows for every seed.

    Returns (difference, what its standard error is over): "3 seeds"; with one seed "documents", or
    "" if a run has kept no sums and there is no standard error. Without pairs it is None.
    """
    losses = [record["loss"] - other_record["loss"] for *_, record, other_record in pairs]
    if not losses:
        return None, ""
    if len(losses) > 1:
        return average_seeds(losses), f"{len(losses)} seeds"
    run, other, record, other_record = pairs[0]
    about = {name: record.get(name) for name in ("step", "dataset", *CHANGES, *SAME_WINDOWS)}
    changes = {name: other_record.get(name) for name in CHANGES}
    try:
        difference = paired_difference(run.workdir, other.workdir, about, second_fields=changes)
        return difference, "documents"
    except UsageError:  # a run without sums
        return average_seeds(losses), ""


def table(runs: Iterable[Run]) -> list[dict]:
    """Makes a row per group: means over its finished runs, and their standard deviations.

    A standard deviation, such as `eval_loss_sd`, is None for a single run. `runs` counts those with
    a loss; `seeds` are theirs: means over other seeds do not compare.
    """
    by_name = groups(runs)
    fields = {name: None for group in by_name.values() for name in group[0].values if name != SEED}
    rows = []
    for group in by_name.values():
        scored = [run for run in finished_runs(group) if run.evaluation["loss"] is not None]
        records = [run.record() for run in scored]
        row = {name: group[0].values.get(name) for name in fields}
        row["rotated_pairs"] = group[0].spec.model.rotated_pairs
        row["runs"] = len(records)
        row["seeds"] = sorted(run.spec.seed for run in scored)
        for name in METRICS:
            values = [record[name] for record in records if record[name] is not None]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_sd"] = deviation(values)
        rows.append(row)
    return rows


def have_same_seeds(rows: Iterable[dict]) -> bool:
    """Returns whether all rows with a loss are means over the same seeds."""
    return len({tuple(row["seeds"]) for row in rows if row["seeds"]}) < 2


def table_text(rows: list[dict]) -> str:
    """Formats the table for a terminal: mean ± standard deviation."""
    columns = [name for name in rows[0] if not name.endswith("_sd")]

    def cell(row: dict, name: str) -> str:
        value = row[name]
        deviation = row.get(f"{name}_sd")
        if value is None:
            return "-"
        text = f"{value:.4f}" if name in METRICS else str(value)
        return text if deviation is None else f"{text} ± {deviation:.4f}"

    return text_table([columns, *([cell(row, name) for name in columns] for row in rows)])
