"""The runs of a sweep, read from their files: progress, losses, and whether the runs may be compared.

A sweep is a directory of runs beside sweep.json, which names the swept fields and their values. No device is touched.
"""

import contextlib
import dataclasses
import re
import statistics
from collections.abc import Container, Iterable, Iterator

from etils import epath
from ml_collections import ConfigDict

from prope.config import flat
from prope.encodings import FIELDS, rotated_pairs
from prope.errors import RunFailed, UsageError
from prope.inference.paired import Difference, average_seeds, paired_difference
from prope.runtime.files import read_json
from prope.sweep.grid import text_of
from prope.workdir import run as run_dir
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import (
    SAME_WINDOWS,
    evaluations_of_training,
    find_evaluation,
    find_pair,
    read_jsonl,
)

SEED, P, CONFIG = "seed", "rope_percentage", "config"  # names of swept fields
# Fields that the initial weights do not depend on; then those that the batches do not depend on.
NOT_OF_INIT = tuple(
    f"model.{name}" for name in (*FIELDS, "dtype", "attention", "remat", "scan_layers")
)
NOT_OF_BATCHES = ("data.cache_dir", "data.num_workers")
METRICS = ("eval_loss", "perplexity", "bits_per_byte")
UNEQUAL = {  # of two runs: the difference, and its remedy
    "init": (
        "did not start equal",
        "Train them anew with one version of the code, in new directories",
    ),
    "batch": (
        "saw other batches",
        "Bring back the data of the first, and train the second in a new directory",
    ),
}
DAMAGED_SWEEP = "remove it, and start the sweep again"  # remedy for an unreadable sweep.json


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep, as far as its directory shows it."""

    name: str
    workdir: epath.Path
    values: dict  # of the swept fields, by their short names
    config: ConfigDict
    started: bool
    step: int  # of the newest checkpoint; 0 without one
    init_hash: str | None
    metrics: list[dict]
    evaluations: list[dict]
    answers: list[dict]  # records of longcontext.jsonl

    @property
    def last_evaluations(self) -> list[dict]:
        """The evaluations of the last step on the data of training; none without training's own."""
        records = evaluations_of_training(self.evaluations, self.config, self.config.num_steps)
        return (
            records
            if any(r.get("max_windows") == self.config.eval.max_windows for r in records)
            else []
        )

    @property
    def evaluation(self) -> dict | None:
        """The fullest of `last_evaluations`."""
        return find_evaluation(self.last_evaluations)

    @property
    def state(self) -> str:
        """new | unfinished | finished; finished: with a checkpoint and an evaluation of the last step."""
        if self.step >= self.config.num_steps and self.evaluation:
            return "finished"
        return "unfinished" if self.started else "new"

    def record(self) -> dict:
        """Returns the run's entry in the sweep's result; None for numbers that are not there yet."""
        evaluation = self.evaluation or {}
        return {
            "workdir": str(self.workdir),
            "values": self.values,
            "step": self.step,
            "loss": self.metrics[-1]["loss"] if self.metrics else None,
            "eval_loss": evaluation.get("loss"),
            "perplexity": evaluation.get("perplexity"),
            "bits_per_byte": evaluation.get("bits_per_byte"),
            "init_hash": self.init_hash,
            "state": self.state,
        }


def read_run(workdir: epath.Path, values: dict, config: ConfigDict) -> Run:
    """Reads the run of `config` in `workdir`, which need not exist yet; another run there is a UsageError."""
    saved = run_dir.read_config(workdir)
    step, init_hash = 0, None
    if saved is not None:
        message = f"{workdir}: holds a run of another config"
        run_dir.check_same(
            config, saved, message, "; choose another --workdir, or the config it was started with"
        )
        if list_steps(workdir):
            opened = run_dir.open_run(workdir)
            step, init_hash = opened.step, opened.init_hash
    records = (read_jsonl(workdir / f"{name}.jsonl") for name in ("metrics", "eval", "longcontext"))
    return Run(workdir.name, workdir, values, config, saved is not None, step, init_hash, *records)


def on_common_windows(runs: Iterable[Run]) -> list[Run]:
    """Drops evaluations of the last step on windows that another finished run on the same data lacks."""
    common: dict[str | None, set] = {}  # numbers of windows, by fingerprint of the data
    for run in runs:
        if run.state == "finished":
            counts = {record.get("windows") for record in run.last_evaluations}
            fingerprint = run.evaluation.get("fingerprint")
            common[fingerprint] = common.get(fingerprint, counts) & counts

    def drop(run: Run) -> Run:
        extra = [
            r for r in run.last_evaluations if r.get("windows") not in common[r.get("fingerprint")]
        ]
        return dataclasses.replace(run, evaluations=[r for r in run.evaluations if r not in extra])

    return [drop(run) if run.state == "finished" else run for run in runs]


def read_sweep(directory: epath.Path) -> list[Run]:
    """Reads the runs of a sweep that have started, in the order of its grid."""
    if (sweep := read_json(directory / "sweep.json", DAMAGED_SWEEP)) is None:
        raise UsageError(
            f"--sweep={directory}: no sweep there (no sweep.json); give the --workdir of launch/sweep.py"
        )
    entries = [(directory / entry["name"], entry["values"]) for entry in sweep["runs"]]
    runs = [
        read_run(folder, values, config)
        for folder, values in entries
        if (config := run_dir.read_config(folder))
    ]
    if not runs:
        raise UsageError(
            f"--sweep={directory}: none of its {len(sweep['runs'])} runs has started; run it first"
        )
    return on_common_windows(runs)


def check_equal(runs: Iterable[Run]) -> dict:
    """Compares the logged hashes of initial weights, and of the batch of every step that two runs logged.

    Returns {"init": runs whose initial weights were compared with another's, "batches": the same for batches, "steps":
    the last step whose batches were compared}. Raises RunFailed where weights or batches that should be equal are not.
    """
    first: dict[tuple, tuple[Run, str]] = {}
    compared, last = {"init": set(), "batch": set()}, 0
    for run in runs:
        for kind, step, fields, hashed in _hashes(run):
            other, expected = first.setdefault((kind, step, fields), (run, hashed))
            if expected != hashed:
                difference, remedy = UNEQUAL[kind]
                unequal = f"{difference} at step {step}: {kind}_hash {expected} and {hashed}"
                raise RunFailed(
                    f"{other.name} and {run.name} {unequal}; they cannot be compared. {remedy}"
                )
            if other is not run:
                compared[kind] |= {other.name, run.name}
                last = max(last, step)
    return {"init": len(compared["init"]), "batches": len(compared["batch"]), "steps": last}


def _hashes(run: Run) -> Iterator[tuple[str, int, str, str]]:
    """Yields (kind, step, the fields that the hash depends on, hash) of all hashes that a run logged."""
    fields = flat(run.config).items()
    of_model = [
        field for field in fields if field[0].startswith("model.") and field[0] not in NOT_OF_INIT
    ]
    of_data = [
        field for field in fields if field[0].startswith("data.") and field[0] not in NOT_OF_BATCHES
    ]
    init, batches = (
        repr([run.config.seed, of_model]),
        repr([run.config.seed, run.config.batch_size, of_data]),
    )
    if run.init_hash is not None:
        yield "init", 0, init, run.init_hash
    for record in run.metrics:
        if record.get("batch_hash") is not None:
            yield "batch", record["step"], batches, record["batch_hash"]


def groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Groups runs that differ only in their seed, by `group_name`."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(group_name(run.values), []).append(run)
    return by_name


def group_name(values: dict) -> str:
    """Names a group by its values: 'p = 0.25' for {"rope_percentage": 0.25, "seed": 1}; a config by its own name."""
    short = {P: "p = ", CONFIG: ""}
    texts = [
        short.get(name, f"{name} = ") + text_of(value)
        for name, value in values.items()
        if name != SEED
    ]
    return ", ".join(texts) or "all runs"


def reference(values: dict, names: Container[str]) -> str | None:
    """Returns which of the groups is the RoPE to compare with: p = 1, or "rope" among configs that are methods.

    The other values are the same if there is such a group, else those of the encoding are left out. None for RoPE.
    """
    rope = dict(values)
    if P in values:
        rope[P] = 1.0
    elif CONFIG in values:
        rope[CONFIG] = re.sub("^[^-]*", "rope", values[CONFIG])  # cope-tiny: rope-tiny
    plain = {name: value for name, value in rope.items() if name == P or name not in FIELDS}
    found = [group_name(others) for others in (rope, plain) if others != values]
    return next((name for name in found if name in names), None)


def against_reference(group: list[Run], others: list[Run]) -> tuple[Difference | None, str]:
    """Computes `average` of a group's validation loss minus RoPE's: equal initial weights, batches and windows.

    The difference is None without finished runs of a common seed.
    """
    by_seed = {run.values.get(SEED): run for run in others if run.state == "finished"}
    pairs = []
    for run in group:
        other = by_seed.get(run.values.get(SEED))
        if (
            other
            and run.state == "finished"
            and (records := find_pair(run.last_evaluations, other.last_evaluations))
        ):
            pairs.append((run, other, *records))
    return average(pairs)


def average(pairs: list[tuple[Run, Run, dict, dict]]) -> tuple[Difference | None, str]:
    """Averages the losses of runs minus those of others, by two records of the same windows for every seed.

    Returns (difference, what its standard error is over): "3 seeds"; with one seed "documents", or "" if a run has kept
    no sums and there is no standard error.
    """
    losses = [record["loss"] - other_record["loss"] for *_, record, other_record in pairs]
    if len(losses) != 1:
        return (average_seeds(losses), f"{len(losses)} seeds") if losses else (None, "")
    run, other, record, other_record = pairs[0]
    fields = {
        name: record.get(name) for name in ("step", "dataset", "encoding", "factor", *SAME_WINDOWS)
    }
    but = {name: other_record.get(name) for name in ("encoding", "factor")}
    with contextlib.suppress(UsageError):  # a run without sums
        return paired_difference(run.workdir, other.workdir, fields, but=but), "documents"
    return average_seeds(losses), ""


def table(runs: Iterable[Run]) -> list[dict]:
    """Makes a row per group: means over its finished runs, and sample standard deviations, `eval_loss_sd` and so on.

    A standard deviation is None for a single run.
    """
    rows, by_name = [], groups(runs)
    fields = dict.fromkeys(k for group in by_name.values() for k in group[0].values if k != SEED)
    for group in by_name.values():
        records = [run.record() for run in group if run.state == "finished"]
        row = {k: group[0].values.get(k) for k in fields}
        row |= {"rotated_pairs": rotated_pairs(group[0].config.model), "runs": len(records)}
        for name in METRICS:
            values = [record[name] for record in records]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def table_text(rows: list[dict]) -> str:
    """Formats the table for a terminal: mean ± standard deviation."""
    columns = [name for name in rows[0] if not name.endswith("_sd")]

    def cell(row: dict, name: str) -> str:
        value, deviation = row[name], row.get(f"{name}_sd")
        if value is None:
            return "-"
        text = f"{value:.4f}" if name in METRICS else str(value)
        return f"{text} ± {deviation:.4f}" if deviation is not None else text

    lines = [columns, *([cell(row, name) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
