"""Trains one run per value of a config field, and shows that they differ in nothing else.

    python launch/sweep.py --config=configs/quickstart.py --workdir=W --rope_percentage=0,0.25,0.5,0.75,1
    python launch/sweep.py --config=.. --workdir=W --grid=seed=0,1,2 --grid=model.rope_percentage=0,0.75,1

Runs are made one after the other, in W/rope_percentage=0.25 and so on. Started again with the same arguments it skips
finished runs and resumes the others; with more values it adds runs. Without --grid it takes the config file's own grid,
if that has a function get_sweep(). --config.FIELD=VALUE goes to every run.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import pathlib
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from prope import command
from prope.config import differences, flat, from_dict, validate
from prope.errors import RunFailed, UsageError, nearest
from prope.runs import check_equal, read_json, read_run, table, table_text

log = logging.getLogger("prope")

P = "model.rope_percentage"
CONFIG = "config"  # an axis whose values are config files
STOPPED, LOST, INTERRUPTED = 75, 76, 130  # exit codes of prope.train: asked to stop, start it again, Ctrl-C
STARTS_AGAIN = 3  # times that a run which was lost is started again
PATIENCE = 5.0  # seconds in which a run is to notice Ctrl-C itself


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that the sweep is to make."""

    name: str
    values: dict
    config: ConfigDict
    arguments: list[str]  # of prope.train, without --workdir


def read_grid(texts: list[str], percentages: str | None, file: str, base: ConfigDict, overrides: dict) -> dict:
    """The values of every field that is swept, {"model.rope_percentage": (0.0, 0.25)}: from flags, or the config file.

    Raises:
      UsageError: there is nothing to sweep, no such field, a value of another type, or one twice.
    """
    given = [("--grid", text) for text in texts]
    if percentages is not None:
        given.insert(0, ("--rope_percentage", f"{P}={percentages}"))
    grid: dict[str, list] = {}
    known = flat(base)
    for flag, text in given:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"{flag} {text}: must be a field and its values, such as seed=0,1,2")
        if name in grid:
            raise UsageError(f"{flag} {text}: {name} is given twice; give all its values at once")
        grid[name] = [value.strip() for value in values.split(",") if value.strip()]
    where = "--grid"
    if not given:
        path, _, argument = file.partition(":")
        get_sweep = runpy.run_path(path).get("get_sweep")
        if get_sweep is None:
            raise UsageError(
                f"--config={file}: has no get_sweep(), so say what to sweep: --rope_percentage=0,0.25,0.5,0.75,1 or "
                "--grid=FIELD=VALUE,VALUE"
            )
        where = f"get_sweep() of {path}:"
        grid = {name: list(values) for name, values in get_sweep(*([argument] if argument else [])).items()}
    for name, values in grid.items():
        if name != CONFIG and name not in known:
            raise UsageError(f"{where} {name}: there is no such config field{nearest(name, known)}")
        if name in overrides:
            raise UsageError(f"--config.{name}={overrides[name]}: {name} is swept; give it here or in the grid")
        if not values:
            raise UsageError(f"{where} {name}=: names no values; write {name}=VALUE,VALUE")
        grid[name] = [value if name == CONFIG else convert(name, value, base) for value in values]
        for value in grid[name]:
            if grid[name].count(value) > 1:
                raise UsageError(f"{where} {name}: the value {text_of(value)} is given twice; remove one")
    return grid


def convert(name: str, value, base: ConfigDict):
    """A value of a field, from a text or a number, in the field's own type."""
    *outer, last = name.split(".")
    kind = (base[outer[0]] if outer else base).get_type(last)
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind in (int, float, str):
            return kind(str(value))
    except (KeyError, ValueError):
        pass
    allowed = "only numbers, texts and booleans can be swept" if kind not in (bool, int, float, str) else "not a value"
    raise UsageError(f"--grid {name}: {value}: {allowed} (its type is {kind.__name__})")


def text_of(value) -> str:
    """A value as it stands in a name and on a command line: 0.25, and 1 for 1.0."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value + 0.0).removesuffix(".0") if isinstance(value, float) else str(value)


def plan(grid: dict, file: str, base: ConfigDict, overrides: dict) -> list[Planned]:
    """The runs, the first field of the grid changing slowest; every config is checked.

    A run's name is made of its values alone, sorted by field: rope_percentage=0.25,seed=0.

    Raises:
      UsageError: a value that the config refuses, or two runs of one name.
    """
    last = [name.rpartition(".")[2] for name in grid]
    labels = {name: short if last.count(short) == 1 else name for name, short in zip(grid, last, strict=True)}
    runs = []
    for combination in itertools.product(*grid.values()):
        fields = dict(zip(grid, combination, strict=True))
        run_file = fields.pop(CONFIG, file)
        config = base.copy_and_resolve_references() if run_file == file else load(run_file, overrides)
        config.update_from_flattened_dict(fields)
        validate(config)
        values = {labels[name]: value for name, value in fields.items()}
        if CONFIG in grid:
            path, _, argument = run_file.partition(":")
            values = {CONFIG: pathlib.Path(path).stem + (f"_{argument}" if argument else ""), **values}
        name = ",".join(f"{label}={text_of(value)}" for label, value in sorted(values.items())).replace("/", "_")
        given = [f"--config.{name}={text_of(value)}" for name, value in (overrides | fields).items()]
        runs.append(Planned(name, values, config, [f"--config={run_file}", *given]))
    names = [run.name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two runs would be called {twice[0]}; give one of them another value")
    return runs


def load(file: str, overrides: dict) -> ConfigDict:
    """The config of a file, with overrides of its fields."""
    path, _, argument = file.partition(":")
    if not pathlib.Path(path).is_file():
        raise UsageError(f"--grid {CONFIG}={file}: there is no such file; the project's own are in configs/")
    config = runpy.run_path(path)["get_config"](*([argument] if argument else []))
    config.update_from_flattened_dict(overrides)
    return config


def record_sweep(directory: pathlib.Path, runs: list[Planned], grid: dict, base: ConfigDict, about: dict) -> dict:
    """What sweep.json is to hold; it may have more values than the one that is there, and nothing else may differ.

    Raises:
      UsageError: the directory holds a run, or another sweep.
    """
    if (directory / "config.json").exists():
        raise UsageError(f"--workdir={directory}: holds a run, not a sweep; choose another --workdir")
    grid = {name: list(values) for name, values in grid.items()}
    there = read_json(directory / "sweep.json")
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
    """Starts runs one after the other, and hands on what the sweep is told: SIGTERM at once, Ctrl-C if need be."""

    def __init__(self, lock: int):
        self._lock = lock
        self._child: subprocess.Popen | None = None
        self.told: int | None = None  # the signal that ends the sweep
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)

    def run(self, line: list[str]) -> tuple[int, str]:
        """(exit code, last error line) of a command; its output goes to stderr."""
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._child = subprocess.Popen(line, text=True, errors="replace", pass_fds=[self._lock], **pipe)
        if self.told:  # between the last look and now
            self._child.send_signal(self.told)
        said = ""
        for text in self._child.stdout:
            sys.stderr.write(text)
            sys.stderr.flush()
            said = text.strip() if text.startswith(("error:", "stopped:")) else said
        return self._child.wait(), said

    def exit_code(self, code: int) -> int:
        """The sweep's own, after a run that ended with `code` was asked to stop."""
        if code <= 0:  # it had just finished, or did not answer
            return {signal.SIGTERM: STOPPED, signal.SIGINT: INTERRUPTED}[self.told] if code == 0 else 128 - code
        return code

    def _tell(self, number: int, frame) -> None:
        self.told = number
        if self._child is None or self._child.poll() is not None:
            return
        if number == signal.SIGTERM:
            self._child.send_signal(number)
        else:  # a terminal tells every process of the sweep; another sender only this one
            later = threading.Timer(PATIENCE, self._child.send_signal, [number])
            later.daemon = True
            later.start()


def sweep(directory: pathlib.Path, runs: list[Planned], processes: Processes) -> dict[str, str]:
    """Makes every run that is not finished; returns why, by name, for those that failed.

    Raises:
      RunFailed: runs that must have started equal or seen equal batches have not.
      SystemExit: the sweep, or a run, was asked to stop.
    """
    failed = {}
    for number, run in enumerate(runs, 1):
        for start in range(STARTS_AGAIN + 1):
            if processes.told or read_run(directory / run.name, run.values, run.config).state == "finished":
                break
            log.info("run %d of %d, %s: %s", number, len(runs), run.name, "starts" if not start else "starts again")
            code, said = processes.run(train_command(directory, run))
            stop = code in (STOPPED, INTERRUPTED, -signal.SIGINT)
            if processes.told or stop:
                code = processes.exit_code(code) if processes.told else abs(code)
                log.info("stopped in %s; the same command goes on from its last checkpoint", run.name)
                sys.exit(code)
            lost = code == LOST or code < 0
            failed.pop(run.name, None)
            if code:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                failed[run.name] = f"{how}{f', {said}' if said else ''}"
                log.info("%s ended early: %s", run.name, failed[run.name])
            if not lost:
                break
        if processes.told:
            sys.exit(processes.exit_code(0))
        check_equal(read_run(directory / run.name, run.values, run.config) for run in runs)
    return failed


def train_command(directory: pathlib.Path, run: Planned) -> list[str]:
    """The command that makes a run on this machine."""
    return [sys.executable, "-m", "prope.train", *run.arguments, f"--workdir={directory / run.name}"]


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "config file of all runs, such as configs/quickstart.py")
    flags.DEFINE_string("workdir", None, "directory of the sweep; a run's directory is below it")
    flags.DEFINE_string("rope_percentage", None, "values of config.model.rope_percentage: 0,0.25,0.5,0.75,1")
    flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE: a config field and its values; may be given again")
    flags.DEFINE_boolean("dry-run", False, "print the commands, one a line, and run nothing")
    flags.mark_flags_as_required(["config", "workdir"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    jax.config.update("jax_platforms", "cpu")  # this process reads files; the accelerator is for its runs
    directory = pathlib.Path(given.workdir)
    file = config_flags.get_config_filename(given["config"])
    base, overrides = given.config, config_flags.get_override_values(given["config"])
    grid = read_grid(given.grid, given.rope_percentage, file, base, overrides)
    runs = plan(grid, file, base, overrides)
    about = {"config_file": file, "overrides": overrides}
    record = record_sweep(directory, runs, grid, base, about)

    def read():
        return [read_run(directory / run.name, run.values, run.config) for run in runs]

    log.info("%d runs in %s:", len(runs), directory)
    for run in read():
        log.info("  %s: %s", run.name, f"resumes at step {run.step}" if run.state == "unfinished" else run.state)
    if given["dry-run"].value:
        for run in runs:
            print(shlex.join(train_command(directory, run)))
        return {"runs": [run.record() for run in read()], "table": table(read())}

    check_equal(read())
    with locked(directory) as lock:
        part = directory / "sweep.json.part"
        part.write_text(json.dumps(record, indent=2) + "\n")
        part.replace(directory / "sweep.json")
        failed = sweep(directory, runs, Processes(lock))
    done = read()
    equal = check_equal(done)
    records = [run.record() | ({"state": "failed"} if run.name in failed else {}) for run in done]
    result = {"runs": records, "table": table(done), "equal": equal}
    log.info("%s", table_text(result["table"]))
    if failed:
        print(json.dumps(result), flush=True)
        reasons = "; ".join(f"{name} ({why})" for name, why in failed.items())
        raise RunFailed(f"{len(failed)} of {len(runs)} runs failed: {reasons}; run the same command to try these again")
    return result


if __name__ == "__main__":
    command.run(main, define_flags)
