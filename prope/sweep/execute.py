"""Runs a sweep: one process per run, or a launcher of pods and clusters; finished runs are skipped, others resumed."""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from prope.config import differences, from_dict
from prope.errors import INTERRUPTED, LOST, PREEMPTED, RunFailed, UsageError
from prope.runtime.files import read_json, write_atomic
from prope.sweep.grid import Planned, text_of
from prope.sweep.runs import DAMAGED_SWEEP, Run, check_equal, read_run, table, table_text
from prope.workdir import checkpoints as checkpoint

log = logging.getLogger("prope")

STARTS_AGAIN = 3  # times that a run which was lost is started again


def record_sweep(directory: pathlib.Path, runs: list[Planned], grid: dict, base: ConfigDict, about: dict) -> dict:
    """What sweep.json is to hold; it may have more values than the one that is there, and nothing else may differ.

    Raises:
      UsageError: the directory holds a run, or another sweep.
    """
    if (directory / "config.json").exists():
        raise UsageError(f"--workdir={directory}: holds a run, not a sweep; choose another --workdir")
    grid = {name: list(values) for name, values in grid.items()}
    there = read_json(directory / "sweep.json", DAMAGED_SWEEP)
    if there is not None:
        remedy = "; choose another --workdir, or the arguments that it was started with"
        what = f"--workdir={directory}: holds a sweep"
        if there["grid"].keys() != grid.keys():
            raise UsageError(f"{what} of {', '.join(there['grid'])}, not of {', '.join(grid)}{remedy}")
        for name, values in there["grid"].items():
            if missing := [text_of(value) for value in values if value not in grid[name]]:
                raise UsageError(f"{what} that has also {name}={','.join(missing)}; name these values too{remedy}")
        differing = differences(base, from_dict(there["config"]))
        differing = [line for line in differing if line.partition(":")[0] not in grid]
        if differing:
            raise UsageError(f"{what} of another config ({'; '.join(differing)}){remedy}")
    names = [{"name": run.name, "values": run.values} for run in runs]
    return {**about, "grid": grid, "runs": names, "config": base.to_dict()}


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[int]:
    """Holds the sweep's directory; gives a descriptor that runs inherit, so that one left behind holds it as well."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--workdir={directory}: cannot be made: {error.strerror}") from error
    with (directory / "sweep.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--workdir={directory}: a sweep, or a run of one, is at work there; wait for it"
            ) from None
        yield file.fileno()


class Processes:
    """Starts runs one after the other, and hands on to them what only the sweep is told: to stop."""

    def __init__(self, lock: int):
        self._lock = lock
        self._child: subprocess.Popen | None = None
        self.told: int | None = None  # the signal that ends the sweep
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def run(self, line: list[str]) -> tuple[int, str, dict]:
        """(exit code, last error line, result that it printed) of a command; all its output goes to stderr."""
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._child = subprocess.Popen(line, text=True, errors="replace", pass_fds=[self._lock], **pipe)
        if self.told:  # between the last look and now
            self._child.send_signal(self.told)
        said, printed = "", {}
        for text in self._child.stdout:
            sys.stderr.write(text)
            sys.stderr.flush()
            said = text.strip() if text.startswith(("error:", "stopped:")) else said
            with contextlib.suppress(ValueError):
                printed = json.loads(text) if text.startswith("{") else printed
        return self._child.wait(), said, printed

    def exit_code(self, code: int) -> int:
        """The sweep's own, after a run that ended with `code` was asked to stop."""
        if code <= 0:  # it had just finished, or did not answer
            return {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}[self.told] if code == 0 else 128 - code
        return code

    def _tell(self, number: int, frame) -> None:
        self.told = number
        if self._child is None or self._child.poll() is not None:
            return
        if number == signal.SIGTERM or not in_foreground():
            self._child.send_signal(number)


def in_foreground() -> bool:
    """Whether Ctrl-C on a terminal goes to this process and to its runs; told twice, a run would not even save."""
    with contextlib.suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


@dataclasses.dataclass
class Sweep:
    """The runs in a directory, the commands that make them, and what has come of it so far."""

    directory: pathlib.Path
    runs: list[Planned]
    command: Callable[[pathlib.Path, Planned], list[str]]
    submits: bool = False  # the command ends when the run is in a queue
    printed: dict[str, dict] = dataclasses.field(default_factory=dict)  # by name, where it cannot be read from files
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # why, by name

    def read(self, planned: Planned) -> Run:
        """A run by its files; one that another machine made, and whose files are not seen here, by what it printed."""
        run = read_run(self.directory / planned.name, planned.values, planned.config)
        result = self.printed.get(planned.name, {})
        if run.started or "eval_loss" not in result:
            return run
        data, windows = planned.config.data, planned.config.eval.max_windows
        record = {"step": result["step"], "dataset": data.dataset, "seq_len": data.seq_len, "max_windows": windows}
        record |= {"loss": result["eval_loss"], **{name: result[name] for name in ("perplexity", "bits_per_byte")}}
        steps = [{"step": result["step"], "loss": result["loss"]}]
        known = {"started": True, "step": result["step"], "init_hash": result["init_hash"], "metrics": steps}
        return dataclasses.replace(run, **known, evaluations=[record])

    def read_all(self) -> list[Run]:
        """All runs, in their order."""
        return [self.read(run) for run in self.runs]

    def make(self, processes: Processes) -> None:
        """Makes every run that is not finished.

        Raises:
          RunFailed: runs that must have started equal or seen equal batches have not.
          SystemExit: the sweep, or a run, was asked to stop.
        """
        for number, run in enumerate(self.runs, 1):
            for start in range(STARTS_AGAIN + 1):
                if processes.told or self.read(run).state == "finished":
                    break
                log.info(
                    "run %d of %d, %s: %s", number, len(self.runs), run.name, "starts again" if start else "starts"
                )
                code, said, printed = processes.run(self.command(self.directory, run))
                if processes.told or code in (PREEMPTED, INTERRUPTED, -signal.SIGINT):
                    log.info("stopped in %s; the same command goes on from its last checkpoint", run.name)
                    sys.exit(processes.exit_code(code) if processes.told else INTERRUPTED if code < 0 else code)
                self.printed[run.name] = printed
                self.failed.pop(run.name, None)
                if code:
                    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    self.failed[run.name] = f"{how}{f', {said}' if said else ''}"
                elif not self.submits and self.read(run).state != "finished":
                    self.failed[run.name] = f"ended without an evaluation of step {run.config.num_steps}"
                if run.name in self.failed:
                    log.info("%s: %s", run.name, self.failed[run.name])
                if code != LOST and code >= 0:
                    break
            if processes.told:
                sys.exit(processes.exit_code(0))
            check_equal(self.read_all())

    def result(self) -> dict:
        """What the command prints."""
        runs = self.read_all()
        records = [run.record() | ({"state": "failed"} if run.name in self.failed else {}) for run in runs]
        if self.submits:
            records = [r | {"state": "submitted"} if r["state"] in ("new", "unfinished") else r for r in records]
        return {"runs": records, "table": table(runs), "equal": check_equal(runs)}


def launcher(backend: str, given: list[str]) -> Callable[[pathlib.Path, Planned], list[str]]:
    """A function that gives the command for a run: one process here, or a launcher with the flags `given`."""
    folder = pathlib.Path(__file__).parents[2] / "launch"

    def line(directory: pathlib.Path, run: Planned) -> list[str]:
        python = sys.executable if backend == "local" else "python"
        train = [python, "-m", "prope.train", *run.arguments, f"--workdir={directory / run.name}"]
        name = job_name(f"{directory.name}-{run.name}")
        if backend == "tpu_vm":
            return ["bash", f"{folder}/tpu_vm.sh", "run", *given, "--", *train]
        if backend == "gke":
            return ["bash", f"{folder}/gke_jobset.sh", f"--name={name}", *given, "--", *train]
        if backend == "slurm":  # a second job for a run waits until the first has ended
            own = [flag for flag in given if flag.startswith(("--processes_per_node", "--max_restarts"))]
            others = [flag for flag in given if flag not in own]
            once = [f"--job-name={name}", "--dependency=singleton"]
            return ["sbatch", *once, *others, f"{folder}/slurm.sbatch", *own, "--", *train]
        return train

    return line


def job_name(text: str) -> str:
    """A name of at most 40 small letters, digits and hyphens, another one for every text."""
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{plain[:31].rstrip('-')}-{zlib.crc32(text.encode()):08x}"


def run_sweep(
    workdir: str, runs: list[Planned], grid: dict, base: ConfigDict, about: dict, backend: str,
    launcher_flags: list[str], dry_run: bool,
) -> dict:  # fmt: skip
    """Makes every run of a sweep that is not finished; returns what the command prints.

    Args:
      workdir: directory of the sweep.
      runs: of the grid, all checked.
      grid: the values of every field that is swept.
      base: the config that they start from.
      about: the config file and its overrides, for sweep.json.
      backend: local, tpu_vm, gke or slurm.
      launcher_flags: of the backend's launcher.
      dry_run: print the commands only.

    Raises:
      UsageError: the directory holds a run, or another sweep.
      RunFailed: a run failed; the others are done.
    """
    directory = checkpoint.folder(workdir)
    record = record_sweep(directory, runs, grid, base, about)
    submits = backend in ("gke", "slurm") and "--wait" not in launcher_flags
    sweep = Sweep(directory, runs, launcher(backend, launcher_flags), submits)

    log.info("%d runs in %s:", len(runs), directory)
    for run in sweep.read_all():
        log.info("  %s: %s", run.name, f"resumes at step {run.step}" if run.state == "unfinished" else run.state)
    if dry_run:
        for run in runs:
            print(shlex.join(sweep.command(directory, run)))
        sweep.submits = False
        return sweep.result()

    check_equal(sweep.read_all())
    with locked(directory) as lock:
        write_atomic(directory / "sweep.json", json.dumps(record, indent=2) + "\n")
        sweep.make(Processes(lock))
    result = sweep.result()
    log.info("%s", table_text(result["table"]))
    if sweep.failed:
        print(json.dumps(result), flush=True)
        why = "; ".join(f"{name} ({reason})" for name, reason in sweep.failed.items())
        raise RunFailed(f"{len(sweep.failed)} of {len(runs)} runs failed: {why}; the same command tries these again")
    return result
