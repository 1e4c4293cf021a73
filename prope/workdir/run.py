"""A run's directory: config.json, and the checkpoints read from it, which are verified."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from prope import sharding
from prope.config import spec_from_dict
from prope.errors import Stopped, UsageError, usage_error
from prope.runtime import processes
from prope.runtime.files import (
    as_path,
    check_writable,
    is_url,
    read_json,
    tokenizer_file,
    write_atomic,
)
from prope.spec.run import Spec, differences
from prope.workdir.checkpoints import finished_steps, list_steps, newest_undamaged
from prope.workdir.lease import Lease
from prope.workdir.reader import CheckpointReader
from prope.workdir.records import read_jsonl

FORMAT = 3  # version of a run's directory; raise it where older ones cannot be read
_LAST_COMMIT = "dfe6f76"  # that reads format 2

_REMEDY = "give the --workdir that prope.train had"


class Run:
    """A run opened at one of its checkpoints; its reader `checkpoint` verifies what it reads."""

    def __init__(
        self, workdir: epath.Path, spec: Spec, steps: list[int], remedy: str | None = None
    ):
        """Opens the first of `steps`; `restore_newest_valid` may try the others, which are older.

        `remedy` is what it tells where all are damaged.
        """
        self.workdir = workdir
        self.spec = spec
        self.step = steps[0]
        self._steps = steps
        self._remedy = remedy
        self.checkpoint = CheckpointReader(workdir / "checkpoints" / str(self.step))
        self.init_hash = self.checkpoint.init_hash
        disagreement = f"{workdir}: config.json and checkpoint {self.step} disagree"
        check_same(spec, self.checkpoint.spec, disagreement)
        self.checkpoint.check(params=self.checkpoint.shapes)

    def restore_newest_valid(self, read: Callable[["Run"], Any]) -> tuple["Run", Any]:
        """Returns (run, read(run)) of the newest checkpoint whose `read` does not raise Damaged.

        Where --step named this one, no other is tried. Raises UsageError where all are damaged.
        """

        def read_one(step):
            run = self if step == self.step else Run(self.workdir, self.spec, [step])
            return run, read(run)

        directory = self.workdir / "checkpoints"
        _, result = newest_undamaged(directory, self._steps, read_one, self._remedy)
        return result

    def params(self, abstract: dict[str, Any] | None = None) -> dict[str, Any]:
        """Reads all parameters onto devices, sharded as `abstract`, or over all devices."""
        processes.check_count()
        if abstract is None:
            abstract = sharding.with_shardings(self.checkpoint.shapes, sharding.make_mesh())
        return self.checkpoint.restore(params=abstract)["params"]


def open_run(workdir: epath.PathLike, step: int | None = None) -> Run:
    """Opens the run in a directory at a checkpoint, by default the newest that can be opened.

    Raises UsageError where there is no run, no checkpoint, or not that step; it is damaged; or
    config.json disagrees.
    """
    path = as_path("--workdir", workdir)
    with processes.raise_on_all():
        spec = read_config(path)
        if spec is None:
            raise usage_error("--workdir", workdir, "no run there (no config.json)", _REMEDY)
    steps = list_steps(path)
    if not steps:
        problem = "holds a run without a finished checkpoint"
        raise usage_error("--workdir", workdir, problem, "train it first")
    remedy = None
    if step is not None:
        if step not in steps:
            known = ", ".join(map(str, steps))
            problem = f"{workdir} has no such checkpoint"
            raise usage_error("--step", step, problem, f"it has {known}")
        others = ", ".join(str(other) for other in steps if other != step)
        remedy = f"--step={step} names it; the run also has {others or 'no other'}"
        steps = [step]

    def open_at(newest):
        older = [step for step in reversed(steps) if step <= newest]
        return Run(path, spec, older, remedy)

    _, run = newest_undamaged(path / "checkpoints", steps[::-1], open_at, remedy)
    return run


@contextlib.contextmanager
def open_workdir(
    path: epath.Path, spec: Spec, on_loss: Callable[[], None] = lambda: None
) -> Iterator[Lease | None]:
    """Creates the directory, unless it holds another run; yields its lease in the first process.

    Removes it again where the run is refused before its first step. `on_loss` is called in another
    thread where another training has taken the run over.
    """
    _read_same(path, spec)
    is_new = not path.exists()
    created = []
    if not is_url(path):
        folder = pathlib.Path(path)
        created = [folder for folder in (folder, *folder.parents) if not folder.exists()]
    lease = None
    if processes.is_first():  # several would remove what another one writes to try it
        check_writable("--workdir", path)
        lease = Lease(path)
        lease.acquire(on_loss)
    try:
        if lease:
            # Another training may have begun and ended while this one waited.
            is_new = is_new and not (path / "config.json").exists()
            _check_records(path, _read_same(path, spec), lease)
        yield lease
        _note_saved(path, lease)
    except Stopped:
        _note_saved(path, lease)
        raise
    except UsageError:
        if lease and is_new and not read_jsonl(path / "metrics.jsonl"):
            lease.stop()
            path.rmtree(missing_ok=True)
        for folder in created:
            with contextlib.suppress(OSError):  # not empty, or another process has removed it
                folder.rmdir()
        raise
    finally:
        if lease:
            lease.release()


def _read_same(path: epath.Path, spec: Spec) -> Spec | None:
    """Reads the config of a run, if any; raises UsageError where it is another than `spec`."""
    existing = read_config(path)
    if existing is not None:
        problem = f"--workdir={path}: holds a run of another config"
        remedy = "; choose another --workdir, or the config that it was started with"
        if spec.num_steps > existing.num_steps:  # which the learning rate depends on
            remedy += f"; --init_from={path} in another --workdir trains its parameters for longer"
        check_same(spec, existing, problem, remedy)
    return existing


def _check_records(path: epath.Path, spec: Spec | None, lease: Lease) -> None:
    """Raises UsageError where training would start anew over records that no checkpoint explains.

    Those of a run that was killed before its first checkpoint are computed again. Where some
    checkpoints are left, training goes on from the newest, and computes the later records again.
    """
    folder = path / "checkpoints"
    steps = finished_steps(folder)
    if steps:
        lease.saved = steps[-1]
        return
    records = read_jsonl(path / "metrics.jsonl") + read_jsonl(path / "eval.jsonl")
    last = max((record["step"] for record in records), default=0)
    # Training makes the folder before it writes records, and waits for its first checkpoint.
    is_young = spec is not None and not lease.saved and last <= spec.checkpoint_every
    if records and not (is_young and (is_url(path) or folder.exists())):
        problem = f"has records up to step {last}, and no checkpoint"
        remedy = "bring its checkpoints/ back from a copy; to train anew, move it away"
        raise usage_error("--workdir", path, problem, remedy)


def _note_saved(path: epath.Path, lease: Lease | None) -> None:
    """Tells the next training of the newest checkpoint, once all are complete."""
    if lease:
        lease.saved = max(finished_steps(path / "checkpoints"), default=lease.saved)


def find_runs(workdir: epath.PathLike, flag: str = "--workdir") -> list[epath.Path]:
    """Finds the run in a directory, or all below it, by path: folders with a config.json.

    Raises UsageError where there is none.
    """

    def find(folder):
        if (folder / "config.json").exists():
            yield folder  # nothing within a run is another
        elif folder.is_dir():
            for below in sorted(folder.iterdir()):
                yield from find(below)

    runs = list(find(as_path(flag, workdir)))
    if not runs:
        problem = "no run there (no config.json), nor below it"
        raise usage_error(flag, workdir, problem, _REMEDY)
    return runs


def find_listed(text: str) -> list[epath.Path]:
    """Finds the runs that --runs names, and all below its folders; names of runs may hold commas.

    Raises UsageError for a place that is not there, or has no run.
    """
    parts = text.split(",")
    found = {}
    while parts:
        for end in range(len(parts), 0, -1):
            place = as_path("--runs", ",".join(parts[:end]))
            if place.exists():
                break
        found |= dict.fromkeys(find_runs(place, "--runs"))
        del parts[:end]
    return list(found)


def read_config(workdir: epath.Path) -> Spec | None:
    """Reads W/config.json; None where there is none.

    A tokenizer that lies in W, file or folder, is taken from there: the run may have been moved.
    """
    spec = read_config_file(workdir / "config.json")
    if spec is not None and spec.data.tokenizer != "byte":
        beside = workdir / os.path.basename(spec.data.tokenizer.rstrip("/"))
        if tokenizer_file(beside).is_file():
            spec = spec.replace({"data.tokenizer": str(beside)})
    return spec


def read_config_file(path: epath.Path) -> Spec | None:
    """Reads the config.json of a run; None where there is none."""
    values = read_json(path, "restore it from a checkpoint's config item")
    if values is None:
        return None
    saved_format = values.pop("format", "none")
    if saved_format != FORMAT:
        problem = f"this version of prope reads format {FORMAT}"
        remedy = f"use commit {_LAST_COMMIT}, or train again in a new --workdir"
        raise usage_error(f"{path}: format", saved_format, problem, remedy)
    try:
        return spec_from_dict(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def write_config(workdir: epath.Path, spec: Spec) -> None:
    """Writes W/config.json, whole or not at all."""
    values = {"format": FORMAT} | spec.to_dict()
    write_atomic(workdir / "config.json", json.dumps(values, indent=2) + "\n")


def check_same(spec: Spec, other: Spec, message: str, remedy: str = "") -> None:
    """Raises UsageError with every field in which `other` is another run than `spec`."""
    differing = "; ".join(differences(spec.flat(), other.flat()))
    if differing:
        hint = "; after @ stands a hash of the function's file" if "@" in differing else ""
        raise UsageError(f"{message} ({differing}{hint}){remedy}")


def check_disk(
    directory: epath.Path, num_bytes: int, what="a checkpoint needs", flag="workdir"
) -> None:
    """Raises UsageError where the disk has no room for what is to be written there."""
    if is_url(directory):
        return
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        sizes = f"{what} {num_bytes / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free"
        remedy = f"free some space and run the same command again, or choose another --{flag}"
        raise UsageError(f"{directory}: the disk is full: {sizes}; {remedy}")
