"""Runs a sweep, one run after the other, in a local process or through a launcher; skips finished runs."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence

from etils import epath
from ml_collections import ConfigDict

from prope.config import differences, from_dict
from prope.errors import INTERRUPTED, LOST, PREEMPTED, RunFailed, UsageError, log
from prope.runtime.files import (
    absolute,
    check_writable,
    is_url,
    local_cache,
    read_json,
    write_atomic,
)
from prope.runtime.startup import find_commit
from prope.sweep.grid import Planned, plan
from prope.sweep.runs import (
    DAMAGED_SWEEP,
    Run,
    check_equal,
    on_common_windows,
    read_run,
    table,
    table_text,
)

PROGRAMS = {
    "tpu_vm": "gcloud",
    "gke": "kubectl",
    "slurm": "sbatch",
    "sky": "sky",
}  # that launchers call
MAX_RETRIES = 3  # of a run that ended with LOST or by a signal


def record_sweep(
    directory: epath.Path, runs: list[Planned], grids: list[dict], base: ConfigDict, source: dict
) -> dict:
    """Returns the content of sweep.json; compared with an existing one, runs may only be added."""
    if (directory / "config.json").exists():
        raise UsageError(
            f"--workdir={directory}: holds a run, not a sweep; choose another --workdir"
        )
    if (saved := read_json(directory / "sweep.json", DAMAGED_SWEEP)) is not None:
        remedy = "; choose another --workdir, or the arguments that it was started with"
        message = f"--workdir={directory}: holds a sweep"
        planned = {run.name for run in runs}
        if missing := [run["name"] for run in saved["runs"] if run["name"] not in planned]:
            raise UsageError(
                f"{message} that has also the run {missing[0]}; name its values too{remedy}"
            )
        differing = differences(base, from_dict(saved["config"]))
        swept = {name for grid in grids for name in grid}
        if differing := [line for line in differing if line.partition(":")[0] not in swept]:
            raise UsageError(f"{message} of another config ({'; '.join(differing)}){remedy}")
    names = [{"name": run.name, "values": run.values} for run in runs]
    return {**source, "grids": grids, "runs": names, "config": base.to_dict()}


def state_folder(directory: epath.Path) -> pathlib.Path:
    """Returns the folder of what this machine knows of a sweep: its lock, and what was handed to a launcher."""
    return (
        local_cache()
        / "sweeps"
        / f"{directory.name}-{zlib.crc32(str(absolute(directory)).encode()):08x}"
    )


@contextlib.contextmanager
def locked(directory: epath.Path) -> Iterator[int]:
    """Locks a sweep on this machine; yields its descriptor, which runs inherit: those that outlive us hold it."""
    state = state_folder(directory)
    check_writable("PROPE_CACHE", state)
    with open(state / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            at_work = "a sweep, or a run of one, is at work there"
            raise UsageError(f"--workdir={directory}: {at_work}; wait for it") from None
        yield file.fileno()


class ChildProcesses:
    """Runs one child process at a time and forwards SIGTERM and SIGINT to it."""

    def __init__(self, lock: int):
        self._lock = lock
        self._child: subprocess.Popen | None = None
        self.stop_signal: int | None = None  # that the sweep has received
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    def run(self, line: list[str]) -> tuple[int, str, dict]:
        """Runs a command with its output on stderr; returns (exit code, last error line, printed JSON object)."""
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._child = subprocess.Popen(
            line, text=True, errors="replace", pass_fds=[self._lock], **pipe
        )
        if self.stop_signal:  # it came while the child was started
            self._child.send_signal(self.stop_signal)
        error, result = "", {}
        for text in self._child.stdout:
            sys.stderr.write(text)
            sys.stderr.flush()
            error = text.strip() if text.startswith(("error:", "stopped:")) else error
            with contextlib.suppress(ValueError):
                result = json.loads(text) if text.startswith("{") else result
        return self._child.wait(), error, result

    def exit_code(self, code: int) -> int:
        """Returns the exit code of a stopped sweep, given that of its child."""
        if code == 0:  # it had just finished
            return PREEMPTED if self.stop_signal == signal.SIGTERM else INTERRUPTED
        return code if code > 0 else 128 - code  # as shells do for a signal

    def _forward(self, number: int, frame) -> None:
        self.stop_signal = number
        if self._child is not None and (number == signal.SIGTERM or not in_foreground()):
            self._child.send_signal(number)  # which does nothing where it has ended


def in_foreground() -> bool:
    """Returns whether the terminal's Ctrl-C reaches runs by itself; a second signal would stop them from saving."""
    with contextlib.suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


@dataclasses.dataclass
class Sweep:
    """The runs of a sweep, what carries them out, and their outcomes so far."""

    directory: epath.Path
    runs: list[Planned]
    backend: str = "local"
    launcher_flags: Sequence[str] = ()
    printed: dict[str, dict] = dataclasses.field(
        default_factory=dict
    )  # results of commands, by run
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # reasons, by run

    @property
    def submits(self) -> bool:
        """Whether a command ends as soon as its run is in a queue."""
        return self.backend in ("gke", "slurm", "sky") and "--wait" not in self.launcher_flags

    @property
    def visible(self) -> bool:
        """Whether this machine sees the runs' files, which may be on a disk of the machines that train."""
        return (
            self.backend in ("local", "slurm") or is_url(self.directory) or self.directory.exists()
        )

    def read(self, planned: Planned) -> Run:
        """Reads a run from its files; from what it printed if it left no files on this machine."""
        run = read_run(self.directory / planned.name, planned.values, planned.config)
        result = self.printed.get(planned.name, {})
        if run.started or "eval_loss" not in result:
            return run
        step, data, windows = result["step"], planned.config.data, planned.config.eval.max_windows
        record = {
            "step": step,
            "dataset": data.dataset,
            "seq_len": data.seq_len,
            "max_windows": windows,
        }
        record |= {
            "loss": result["eval_loss"],
            **{name: result[name] for name in ("perplexity", "bits_per_byte")},
        }
        fields = {"metrics": [{"step": step, "loss": result["loss"]}], "evaluations": [record]}
        return dataclasses.replace(
            run, started=True, step=step, init_hash=result["init_hash"], **fields
        )

    def read_all(self) -> list[Run]:
        """Reads all runs, in the order of the grid."""
        return on_common_windows([self.read(run) for run in self.runs])

    def execute(self, processes: ChildProcesses) -> None:
        """Carries out every run that is not finished.

        Raises:
          RunFailed: initial weights or batches that must be equal are not.
          SystemExit: the sweep, or a run, was asked to stop.
        """
        for number, run in enumerate(self.runs, 1):
            for start in range(MAX_RETRIES + 1):
                if processes.stop_signal or self.read(run).state == "finished":
                    break
                log.info(
                    "run %d of %d, %s: starts%s",
                    number,
                    len(self.runs),
                    run.name,
                    " again" if start else "",
                )
                command = run_command(self.backend, self.launcher_flags, self.directory, run)
                if self.backend == "sky" and in_sky_queue(
                    job_name(f"{self.directory.name}-{run.name}")
                ):
                    log.info("%s: is in SkyPilot's queue already", run.name)
                    self.printed[run.name] = {}
                    break
                code, error, self.printed[run.name] = processes.run(command)
                if self.backend != "local":
                    write_atomic(
                        state_folder(self.directory) / "handed_out.json",
                        json.dumps(self.printed, indent=2),
                    )
                if processes.stop_signal or code in (PREEMPTED, INTERRUPTED, -signal.SIGINT):
                    log.info(
                        "stopped in %s; the same command goes on from its last checkpoint", run.name
                    )
                    sys.exit(processes.exit_code(code))
                self.failed.pop(run.name, None)
                if code:
                    reason = (
                        f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    )
                    self.failed[run.name] = f"{reason}{f', {error}' if error else ''}"
                elif not self.submits and self.read(run).state != "finished":
                    self.failed[run.name] = (
                        f"ended without an evaluation of step {run.config.num_steps}"
                    )
                if run.name in self.failed:
                    log.info("%s: %s", run.name, self.failed[run.name])
                if code != LOST and code >= 0:
                    break
            if processes.stop_signal:
                sys.exit(processes.exit_code(0))
            check_equal(self.read_all())

    def result(self) -> dict:
        """Returns the command's JSON object."""
        runs, records = self.read_all(), []
        for run in runs:
            submitted = self.submits and run.name in self.printed and run.state != "finished"
            state = "failed" if run.name in self.failed else "submitted" if submitted else run.state
            records.append(run.record() | {"state": state})
        return {"runs": records, "table": table(runs), "equal": check_equal(runs)}


def run_command(
    backend: str, launcher_flags: Sequence[str], directory: epath.Path, run: Planned
) -> list[str]:
    """Returns the command that carries out a run: prope.train here, or a launcher with its flags."""
    folder = pathlib.Path(__file__).parents[2] / "launch"
    python = sys.executable if backend == "local" else "python"
    train = [python, "-m", "prope.train", *run.arguments, f"--workdir={directory / run.name}"]
    name = job_name(f"{directory.name}-{run.name}")
    if backend == "tpu_vm":
        return ["bash", f"{folder}/tpu_vm.sh", "run", *launcher_flags, "--", *train]
    if backend == "gke":
        return ["bash", f"{folder}/gke_jobset.sh", f"--name={name}", *launcher_flags, "--", *train]
    if backend == "sky":
        detach = [] if "--wait" in launcher_flags else ["--detach-run"]
        own = [flag for flag in launcher_flags if flag != "--wait"]
        given = [f"--env=COMMAND={shlex.join(train)}", f"--env=PROPE_COMMIT={find_commit() or ''}"]
        return [
            "sky",
            "jobs",
            "launch",
            "--yes",
            f"--name={name}",
            *detach,
            *own,
            *given,
            f"{folder}/sky.yaml",
        ]
    if backend == "slurm":  # a second job for a run waits until the first has ended
        of_script = [
            flag
            for flag in launcher_flags
            if flag.startswith(("--processes_per_node", "--max_restarts"))
        ]
        of_sbatch = [flag for flag in launcher_flags if flag not in of_script]
        sbatch = ["sbatch", f"--job-name={name}", "--dependency=singleton", *of_sbatch]
        return [*sbatch, f"{folder}/slurm.sbatch", *of_script, "--", *train]
    return train


def in_sky_queue(name: str) -> bool:
    """Tells whether SkyPilot has a job of this name that has not ended; a second one would write to the same files."""
    command = ["sky", "jobs", "queue", "--all", "--skip-finished", "--output=json"]
    return f'"{name}"' in subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout


def job_name(text: str) -> str:
    """Makes a unique name of at most 40 small letters, digits and hyphens from a text."""
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{plain[:31].rstrip('-')}-{zlib.crc32(text.encode()):08x}"


def run_sweep(
    workdir: str,
    file: str,
    base: ConfigDict,
    overrides: dict,
    grids: list[dict],
    backend: str = "local",
    launcher_flags: Sequence[str] = (),
    dry_run: bool = False,
) -> dict:
    """Carries out every run of a sweep that is not finished; returns the command's JSON object.

    All runs get the config `base` of `file` with `overrides`, and the values of `grids`, from `read_grids`. A dry run
    only prints the commands.

    Raises:
      UsageError: the directory holds a run or another sweep, or a config is invalid.
      RunFailed: a run failed; the others are done.
    """
    directory, runs = epath.Path(workdir), plan(grids, file, base, overrides)
    sweep, state = Sweep(directory, runs, backend, launcher_flags), state_folder(directory)
    if not sweep.visible:
        sweep.printed = read_json(state / "handed_out.json") or {}
        log.info("%s is not on this machine: what was handed out is in %s", directory, state)
    home = directory if sweep.visible else state
    record = record_sweep(home, runs, grids, base, {"config_file": file, "overrides": overrides})
    log.info("%d runs in %s:", len(runs), directory)
    for run in sweep.read_all():
        log.info(
            "  %s: %s",
            run.name,
            f"resumes at step {run.step}" if run.state == "unfinished" else run.state,
        )
    if dry_run:
        for run in runs:
            print(shlex.join(run_command(backend, launcher_flags, directory, run)))
        return sweep.result()
    if backend != "local" and shutil.which(PROGRAMS[backend]) is None:
        raise UsageError(
            f"--backend={backend}: needs the program {PROGRAMS[backend]}; install it, or put it on PATH"
        )
    check_equal(sweep.read_all())
    with locked(directory) as lock:
        check_writable("--workdir", home)
        write_atomic(home / "sweep.json", json.dumps(record, indent=2) + "\n")
        sweep.execute(ChildProcesses(lock))
    result = sweep.result()
    log.info("%s", table_text(result["table"]))
    if sweep.failed:
        print(json.dumps(result), flush=True)
        why = "; ".join(f"{name} ({reason})" for name, reason in sweep.failed.items())
        raise RunFailed(
            f"{len(sweep.failed)} of {len(runs)} runs failed: {why}; the same command tries these again"
        )
    return result
