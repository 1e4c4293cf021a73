"""The runs of a sweep as their files show them: how far each is, what it scored, whether they may be compared.

A sweep is a directory of runs with sweep.json beside them: the fields that differ and their values. Only files are
read here; no device is touched.
"""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from ml_collections import ConfigDict

from prope.config import flat
from prope.errors import RunFailed, UsageError
from prope.inference.paired import paired_difference
from prope.model import rotated_pairs
from prope.runtime.files import read_json
from prope.sweep.grid import text_of
from prope.workdir import checkpoints as checkpoint
from prope.workdir.records import read_jsonl

SEED, P = "seed", "rope_percentage"  # labels
# Fields of config.model that the initial weights do not depend on.
NOT_OF_INIT = tuple(f"model.{name}" for name in (
    "rope_percentage", "max_wavelength", "dtype", "attention", "remat", "scan_layers",
))  # fmt: skip
DAMAGED_SWEEP = "remove it, and start the sweep again"  # the remedy for a sweep.json that is not JSON
NOT_OF_BATCHES = ("data.cache_dir", "data.num_workers")
MEASURES = ("eval_loss", "perplexity", "bits_per_byte")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep: its directory's content, as far as it is there."""

    name: str
    workdir: pathlib.Path
    values: dict  # of the fields that the sweep varies, by label
    config: ConfigDict
    started: bool
    step: int  # of the newest checkpoint; 0 without one
    init_hash: str | None
    metrics: list[dict]
    evaluations: list[dict]

    @property
    def evaluation(self) -> dict | None:
        """The newest evaluation of the last step on the data and length that the run was trained on."""
        data, windows = self.config.data, self.config.eval.max_windows
        wanted = {"step": self.config.num_steps, "dataset": data.dataset, "seq_len": data.seq_len}
        found = [r for r in self.evaluations if wanted.items() <= r.items() and r.get("max_windows") == windows]
        return found[-1] if found else None

    @property
    def state(self) -> str:
        """new | unfinished | finished: it has a checkpoint of its last step, and an evaluation of that."""
        if self.step >= self.config.num_steps and self.evaluation:
            return "finished"
        return "unfinished" if self.started else "new"

    def record(self) -> dict:
        """What a sweep prints of the run; None for what is not there yet."""
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


def read_run(workdir: pathlib.Path, values: dict, config: ConfigDict) -> Run:
    """The run of `config` in `workdir`, which need not be there yet.

    Raises:
      UsageError: the directory holds another run, or its config.json and a checkpoint disagree.
    """
    there = checkpoint.read_config(workdir)
    step, init_hash = 0, None
    if there is not None:
        what = f"{workdir}: holds a run of another config"
        checkpoint.check_same(config, there, what, "; choose another --workdir, or the config it was started with")
        if (workdir / "checkpoints").is_dir() and checkpoint.Checkpoints(workdir).steps():
            _, step, init_hash = checkpoint.find_run(workdir)
    metrics, evaluations = (read_jsonl(workdir / name) for name in ("metrics.jsonl", "eval.jsonl"))
    return Run(workdir.name, workdir, values, config, there is not None, step, init_hash, metrics, evaluations)


def read_sweep(directory: pathlib.Path) -> list[Run]:
    """The runs that have started below a sweep's directory, in the order of its grid.

    Raises:
      UsageError: there is no sweep, or it has no run yet.
    """
    sweep = read_json(directory / "sweep.json", DAMAGED_SWEEP)
    if sweep is None:
        raise UsageError(f"--sweep={directory}: no sweep there (no sweep.json); give the --workdir of launch/sweep.py")
    runs = []
    for entry in sweep["runs"]:
        config = checkpoint.read_config(directory / entry["name"])
        if config is not None:
            runs.append(read_run(directory / entry["name"], entry["values"], config))
    if not runs:
        raise UsageError(f"--sweep={directory}: none of its {len(sweep['runs'])} runs has started; run it first")
    return runs


def check_equal(runs: Iterable[Run]) -> dict:
    """Compares what the runs have logged: initial weights, and the batch of every step that two of them logged.

    Returns:
      {"init": runs whose initial weights were compared with another's, "batches": the same for batches, "steps": the
      last step whose batches were compared}.

    Raises:
      RunFailed: two runs that should have started equal, or seen the same batch, did not.
    """
    first_init: dict[str, Run] = {}
    first_batch: dict[tuple[str, int], tuple[Run, str]] = {}
    same_init, same_batches, last = set(), set(), 0
    for run in runs:
        fields = flat(run.config)
        init = [(k, v) for k, v in fields.items() if k.startswith("model.") and k not in NOT_OF_INIT]
        batches = [(k, v) for k, v in fields.items() if k.startswith("data.") and k not in NOT_OF_BATCHES]
        init, batches = repr([run.config.seed, init]), repr([run.config.seed, run.config.batch_size, batches])
        if run.init_hash is not None:
            other = first_init.setdefault(init, run)
            if other.init_hash != run.init_hash:
                raise RunFailed(
                    f"{other.name} and {run.name} did not start equal at step 0: init_hash {other.init_hash} and "
                    f"{run.init_hash}; they cannot be compared. Train them anew with one version of the code, in new "
                    "directories"
                )
            same_init |= {other.name, run.name} if other is not run else set()
        for record in run.metrics:
            step, found = record["step"], record.get("batch_hash")
            if found is None:
                continue
            other, expected = first_batch.setdefault((batches, step), (run, found))
            if expected != found:
                raise RunFailed(
                    f"{other.name} and {run.name} saw other batches at step {step}: batch_hash {expected} and {found}; "
                    "they cannot be compared. Bring back the data of the first, and train the second in a new directory"
                )
            if other is not run:
                same_batches |= {other.name, run.name}
                last = max(last, step)
    return {"init": len(same_init), "batches": len(same_batches), "steps": last}


def groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs that differ in their seed only, by what they are called: 'p = 0.25'."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(group_name(run.values), []).append(run)
    return found


def group_name(values: dict) -> str:
    """'p = 0.25' for {"rope_percentage": 0.25, "seed": 1}; other fields by their names."""
    named = {P: "p"}
    parts = [f"{named.get(k, k)} = {text_of(v)}" for k, v in values.items() if k != SEED]
    return ", ".join(parts) or "all runs"


def reference(run_values: dict) -> str | None:
    """The name of the group with RoPE, p = 1, that a group is compared with; None for that itself, or without p."""
    if run_values.get(P, 1.0) == 1.0:
        return None
    return group_name(run_values | {P: 1.0})


class Difference(NamedTuple):
    """A loss minus RoPE's on the same text, nats per token, and its standard error over seeds or documents."""

    mean: float
    stderr: float | None
    over: str


def against_reference(group: list[Run], others: list[Run]) -> Difference | None:
    """The validation loss of a group minus RoPE's, seed by seed: runs of one seed start equal and see equal batches.

    The standard error is that over seeds; with one seed, that over documents, where both runs have kept their sums.
    """
    by_seed = {run.values.get(SEED): run for run in others if run.state == "finished"}
    pairs = [(run, by_seed[run.values.get(SEED)]) for run in group if run.values.get(SEED) in by_seed]
    pairs = [(run, other) for run, other in pairs if run.state == "finished"]
    apart = [run.evaluation["loss"] - other.evaluation["loss"] for run, other in pairs]
    if not apart:
        return None
    if len(apart) > 1:
        return Difference(statistics.fmean(apart), statistics.stdev(apart) / len(apart) ** 0.5, f"{len(apart)} seeds")
    run, other = pairs[0]
    about = {name: run.evaluation[name] for name in ("step", "dataset", "seq_len")}
    with contextlib.suppress(UsageError):  # one of them has kept no sums
        return Difference(*paired_difference(run.workdir, other.workdir, about), "documents")
    return Difference(apart[0], None, "")


def table(runs: Iterable[Run]) -> list[dict]:
    """A row for each combination of values but the seed: means over its finished runs, and their spread.

    The spread, `eval_loss_sd` and so on, is the sample standard deviation over runs; None for a single run.
    """
    made = []
    for group in groups(runs).values():
        records = [run.record() for run in group if run.state == "finished"]
        row = {k: v for k, v in group[0].values.items() if k != SEED}
        row["rotated_pairs"] = rotated_pairs(group[0].config.model)
        row["runs"] = len(records)
        for name in MEASURES:
            values = [record[name] for record in records]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        made.append(row)
    return made


def table_text(rows: list[dict]) -> str:
    """The table for a terminal; with more than one run in a row, each mean with its spread."""
    columns = [name for name in rows[0] if not name.endswith("_sd")]

    def cell(row: dict, name: str) -> str:
        value, spread = row[name], row.get(f"{name}_sd")
        if value is None:
            return "-"
        text = f"{value:.4f}" if name in MEASURES else str(value)
        return f"{text} ± {spread:.4f}" if spread is not None else text

    lines = [columns, *([cell(row, name) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
