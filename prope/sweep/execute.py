"""Carries out a sweep: its runs here, one or several at a time, or each by a launcher's command."""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict

from prope.command import accelerators
from prope.config import as_given, flat, from_dict
from prope.errors import INTERRUPTED, LOST, PREEMPTED, RunFailed, log, usage_error
from prope.runtime.files import (
    absolute,
    as_path,
    check_writable,
    local_cache,
    read_json,
    write_atomic,
)
from prope.runtime.processes import list_cores
from prope.spec.run import differences
from prope.sweep.grid import Planned, plan
from prope.sweep.runs import (
    DAMAGED_SWEEP,
    Run,
    check_equal,
    have_same_seeds,
    on_common_windows,
    read_run,
    table,
    table_text,
)

MAX_RETRIES = 3  # restarts of a run that lost another process, or was killed
MAX_REASONS = 5  # failed runs that the error names
OTHER_SWEEP = "choose another --workdir, or the arguments that it was started with"


def check_same_sweep(
    directory: epath.Path,
    runs: list[Planned],
    grids: list[dict],
    base: ConfigDict,
    init_from: str | None = None,
) -> dict[str, str]:
    """Returns why runs of a sweep have failed before, by name.

    Raises UsageError where the directory holds a run, or a sweep that is not extended.
    """
    if (directory / "config.json").exists():
        problem = "holds a run, not a sweep"
        raise usage_error("--workdir", directory, problem, "choose another --workdir")
    saved = read_json(directory / "sweep.json", DAMAGED_SWEEP)
    if saved is None:
        return {}
    planned = {run.name for run in runs}
    missing = [run["name"] for run in saved["runs"] if run["name"] not in planned]
    if missing:
        problem = f"holds a sweep that has also the run {missing[0]}"
        remedy = f"name its values too; {OTHER_SWEEP}"
        raise usage_error("--workdir", directory, problem, remedy)
    begun_from = saved.get("init_from")
    if begun_from != init_from:
        problem = f"the runs of {directory} were begun from {begun_from or 'scratch'}"
        raise usage_error("--init_from", init_from, problem, OTHER_SWEEP)
    swept = {name for grid in grids for name in grid}
    lines = differences(flat(base), flat(from_dict(saved["config"])))
    differing = [line for line in lines if line.partition(":")[0] not in swept]
    if differing:
        problem = f"holds a sweep of another config ({'; '.join(differing)})"
        raise usage_error("--workdir", directory, problem, OTHER_SWEEP)
    return {run["name"]: run["reason"] for run in saved["runs"] if run.get("reason")}


@contextlib.contextmanager
def locked(directory: epath.Path) -> Iterator[int]:
    """Locks a sweep on this machine; yields the lock's descriptor, for runs that may outlive it."""
    folder = local_cache() / "sweeps"
    check_writable("PROPE_CACHE", folder)
    with open(folder / job_name(str(absolute(directory))), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "a sweep, or a run of one, is at work there"
            raise usage_error("--workdir", directory, problem, "wait for it") from None
        yield file.fileno()


class Share(NamedTuple):
    """The part of this machine that a run has; all of it by default."""

    gpus: str = ""  # CUDA_VISIBLE_DEVICES
    cores: Sequence[int] = ()


def split_machine(jobs: int) -> list[Share]:
    """Divides the GPUs, or without any the cores, into equal shares of as many runs at a time.

    Raises UsageError where there are fewer of them than runs.
    """
    if jobs == 1:
        return [Share()]
    found = accelerators()
    numbered = [path for path in found if re.fullmatch(r"nvidia\d+", path.name)]
    numbers = ",".join(str(i) for i in range(len(numbered)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", numbers) if numbered else ""
    gpus = [name for name in visible.split(",") if name]
    devices = gpus or list_cores()
    problem = f"there are {len(devices)} {'GPUs' if gpus else 'cores'} here for them"
    if found and not numbered:
        devices = []
        problem = f"{found[0]} cannot be divided"
    if jobs > len(devices):
        remedy = "give fewer, or train on the cores with JAX_PLATFORMS=cpu"
        raise usage_error("--jobs", jobs, problem, remedy)
    size = len(devices) // jobs
    parts = [devices[i * size : (i + 1) * size] for i in range(jobs)]
    return [Share(",".join(part)) if gpus else Share(cores=part) for part in parts]


class ChildProcesses:
    """Runs child processes and forwards SIGTERM and SIGINT to them.

    They hold the lock, if there is one, too, so that nothing else starts while one outlives this
    process.
    """

    def __init__(self, lock: int | None = None):
        self._held = [] if lock is None else [lock]
        self._children: set[subprocess.Popen] = set()
        self._lock = threading.RLock()  # a signal may come while this thread holds it
        self.stop_signal: int | None = None  # that this process has received
        signal.signal(signal.SIGTERM, self._forward)
        signal.signal(signal.SIGINT, self._forward)

    def run(self, command: list[str], share: Share, prefix: str = "") -> tuple[int, str]:
        """Runs a command with its output on stderr; returns its exit code and its last error.

        Every line of its output gets the prefix.
        """
        with self._lock:
            child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=self._held,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": share.gpus} if share.gpus else {}),
            )
            self._children.add(child)
            if self.stop_signal:  # it came before
                child.send_signal(self.stop_signal)
        if share.cores:  # before it starts threads: XLA has one for every core
            os.sched_setaffinity(child.pid, share.cores)
        error = ""
        for line in child.stdout:
            with self._lock:
                sys.stderr.write(prefix + line)
                sys.stderr.flush()
            if line.startswith(("error:", "stopped:")):
                error = line.strip()
        with self._lock:
            self._children.remove(child)
        return child.wait(), error

    def exit_code(self, code: int) -> int:
        """Returns the exit code of a stopped sweep, whose child ended with `code`."""
        if code == 0:  # it had just finished
            return PREEMPTED if self.stop_signal == signal.SIGTERM else INTERRUPTED
        return code if code > 0 else 128 - code  # as shells do for a signal

    def _forward(self, number: int, frame) -> None:
        with self._lock:
            self.stop_signal = number
            if number == signal.SIGTERM or not in_foreground():
                for child in self._children:
                    child.send_signal(number)  # which does nothing where it has ended


def in_foreground() -> bool:
    """Returns whether the terminal's Ctrl-C reaches runs too; a second one ends their saving."""
    with contextlib.suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def split_launcher(text: str | None) -> list[str]:
    """Splits a launcher's command into words, as a shell does; [] where there is none."""
    if text is None:
        return []
    try:
        words = shlex.split(text)
    except ValueError as error:
        problem = f"cannot be split into words: {error}"
        raise usage_error("--launcher", text, problem, "quote it as for a shell") from None
    if not words:
        remedy = "give one, such as --launcher='sbatch launch/slurm.sbatch --'"
        raise usage_error("--launcher", text, "names no command", remedy)
    return words


def job_name(text: str) -> str:
    """Makes a unique name of at most 40 small letters, digits and hyphens, a letter first."""
    plain = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}"
    return f"{plain[:31].rstrip('-')}-{zlib.crc32(text.encode()):08x}"


@dataclasses.dataclass
class Sweep:
    """The runs of a sweep and what carries them out: this machine, or a launcher's command.

    A launcher that exits with 0 has taken the run, or the run has ended; with another code the
    run is not going on. What was handed to it stands in `launched/RUN` until that is known.
    """

    directory: epath.Path
    runs: list[Planned]
    launcher: list[str]  # its words; empty: the runs are carried out here
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # reasons, by run
    record: dict = dataclasses.field(default_factory=dict)  # sweep.json without its runs
    shares: list[Share] = dataclasses.field(default_factory=lambda: [Share()])  # of runs at a time
    writing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def command(self, run: Planned) -> list[str]:
        """Returns the command that carries out a run.

        In a launcher's words {name} becomes a name of the run, {command} the command as one text
        for a shell. Where no word has {command}, the command's words follow the launcher's.
        """
        python = "python" if self.launcher else sys.executable
        workdir = f"--workdir={self.directory / run.name}"
        train = [python, "-m", "prope.train", *run.arguments, workdir]
        name = job_name(f"{self.directory.name}-{run.name}")
        text = shlex.join(train)
        words = [word.replace("{name}", name).replace("{command}", text) for word in self.launcher]
        is_filled_in = any("{command}" in word for word in self.launcher)
        return words if is_filled_in else [*words, *train]

    def read(self, planned: Planned) -> Run:
        """Reads a run from its files."""
        return read_run(self.directory / planned.name, planned.values, planned.spec)

    def read_all(self) -> list[Run]:
        """Reads all runs, in the order of the grid."""
        return on_common_windows([self.read(run) for run in self.runs])

    def launch_record(self, name: str) -> epath.Path:
        """Returns the file that is there from the moment a run is handed to a launcher."""
        return self.directory / "launched" / name

    def write(self) -> None:
        """Writes sweep.json, with the reasons why runs have failed."""
        runs = [
            {"name": run.name, "values": run.values, "reason": self.failed.get(run.name)}
            for run in self.runs
        ]
        content = json.dumps(self.record | {"runs": runs}, indent=2)
        with self.writing:
            write_atomic(self.directory / "sweep.json", content + "\n")

    def state(self, run: Run) -> str:
        """Returns new, submitted, unfinished, finished or failed."""
        if run.name in self.failed:
            return "failed"
        if run.state != "finished" and self.launch_record(run.name).exists():
            return "submitted"
        return run.state

    def execute(self, processes: ChildProcesses) -> None:
        """Carries out every run that is neither finished nor with a launcher.

        Raises:
          RunFailed: initial weights or batches that must be equal are not.
          SystemExit: the sweep, or a run, was asked to stop.
        """
        shares = queue.SimpleQueue()
        for share in self.shares:
            shares.put(share)
        ended: list[Planned] = []
        stopped = threading.Event()

        def carry_out(number: int, run: Planned) -> None:
            if stopped.is_set():
                return
            share = shares.get()
            try:
                state = self.state(self.read(run))
                if state == "submitted":
                    self._log_submitted(run.name)
                elif state != "finished":
                    log.info("run %d of %d, %s: starts", number, len(self.runs), run.name)
                    self._carry_out(run, processes, share)
                ended.append(run)
                if state not in ("submitted", "finished"):
                    check_equal(list(map(self.read, list(ended))))
                if processes.stop_signal:
                    sys.exit(processes.exit_code(0))
            except BaseException:  # runs at work go on to their end
                stopped.set()
                raise
            finally:
                shares.put(share)

        with futures.ThreadPoolExecutor(len(self.shares)) as pool:
            list(pool.map(carry_out, itertools.count(1), self.runs))

    def _log_submitted(self, name: str) -> None:
        """Logs since when a run is with a launcher, and how to start it again."""
        record = self.launch_record(name)
        log.info(
            "%s: was handed to a launcher at %s, and is not started twice; "
            "to start it again, see that it has ended, then remove %s",
            name,
            record.read_text().strip(),
            record,
        )

    def _carry_out(self, run: Planned, processes: ChildProcesses, share: Share) -> None:
        """Starts a run, and starts it again where it lost another process or was killed."""
        for start in range(MAX_RETRIES + 1):
            if start:
                log.info("%s: starts again", run.name)
            code = self._start(run, processes, share)
            was_killed = code < 0 and not self.launcher
            if not (code == LOST or was_killed) or self.read(run).state == "finished":
                return

    def _start(self, run: Planned, processes: ChildProcesses, share: Share) -> int:
        """Starts a run, or hands it to the launcher, and waits; returns the exit code."""
        record = self.launch_record(run.name)
        if self.launcher:
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(record, time.strftime("%Y-%m-%d %H:%M:%S UTC\n", time.gmtime()))
        else:
            self.failed[run.name] = "was started, and has not ended"
            self.write()
        prefix = f"{run.name}: " if len(self.shares) > 1 else ""
        code, error = processes.run(self.command(run), share, prefix)
        if self.launcher and code > 0 and not processes.stop_signal:
            record.unlink()
        if processes.stop_signal or code in (PREEMPTED, INTERRUPTED, -signal.SIGINT):
            log.info("stopped in %s; the same command goes on from its last checkpoint", run.name)
            if record.exists():
                self._log_submitted(run.name)
            sys.exit(processes.exit_code(code))
        self.failed.pop(run.name, None)
        if code:
            ending = f", {error}" if error else ""
            name = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            self.failed[run.name] = f"{name}{ending}"
        elif not self.launcher and self.read(run).state != "finished":
            steps = run.spec.num_steps
            self.failed[run.name] = f"ended without an evaluation of step {steps}"
        if run.name in self.failed:
            log.info("%s: %s", run.name, self.failed[run.name])
        self.write()
        return code

    def result(self) -> dict:
        """Returns the command's JSON object."""
        runs = self.read_all()
        records = [
            run.record() | {"state": self.state(run), "reason": self.failed.get(run.name)}
            for run in runs
        ]
        return {"runs": records, "table": table(runs), "equal": check_equal(runs)}


def run_sweep(
    workdir: str,
    file: str,
    base: ConfigDict,
    overrides: dict,
    grids: list[dict],
    launcher: str | None = None,
    dry_run: bool = False,
    init_from: str | None = None,
    jobs: int = 1,
) -> dict:
    """Carries out every run of a sweep that is not finished; returns the command's JSON object.

    All runs get the config `base` of `file` with `overrides`, and the values of `grids`, from
    `read_grids`. A dry run only prints the commands. `init_from` is that of every run;
    `jobs` of them are carried out at a time.

    Raises:
      UsageError: the directory holds a run or another sweep, or an argument is invalid.
      RunFailed: a run failed; the others are done.
    """
    directory = as_path("--workdir", workdir)
    runs = plan(grids, file, base, overrides, init_from)
    sweep = Sweep(directory, runs, split_launcher(launcher), shares=split_machine(jobs))
    if sweep.launcher and jobs > 1:
        raise usage_error("--jobs", jobs, "the runs of a launcher are not here", "leave one out")
    reasons = check_same_sweep(directory, runs, grids, base, init_from)
    log.info("runs in %s: %d", directory, len(runs))
    for run in sweep.read_all():
        state = sweep.state(run)
        if state == "unfinished":
            state = f"resumes at step {run.step}"
        log.info("  %s: %s", run.name, state)
    if dry_run:
        for run in runs:
            print(shlex.join(sweep.command(run)))
        return sweep.result()
    if sweep.launcher and shutil.which(sweep.launcher[0]) is None:
        remedy = "install it, or put it on PATH"
        raise usage_error("--launcher", sweep.launcher[0], "there is no such program", remedy)
    check_equal(sweep.read_all())
    sweep.record = {
        "config_file": as_given(file),
        "overrides": overrides,
        "grids": grids,
        "init_from": init_from,
        "config": base.to_dict(),
    }
    with locked(directory) as lock:
        check_writable("--workdir", directory)
        done = ("finished", "submitted")
        states = {run.name: sweep.state(run) for run in sweep.read_all()}
        sweep.failed = {name: reasons[name] for name in reasons if states[name] not in done}
        sweep.write()
        sweep.execute(ChildProcesses(None if sweep.launcher else lock))
    result = sweep.result()
    log.info("%s", table_text(result["table"]))
    if not have_same_seeds(result["table"]):
        log.warning("the means are over different seeds: they do not tell which run is best")
    if sweep.failed:
        print(json.dumps(result), flush=True)
        reasons = [f"{name} ({reason})" for name, reason in sweep.failed.items()]
        first = "; ".join(reasons[:MAX_REASONS])
        problem = f"{len(reasons)} of {len(runs)} runs failed"
        raise RunFailed(f"{problem}: {first}; the same command tries these again")
    return result
