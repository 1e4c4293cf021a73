"""A run's directory: config.json, and the checkpoints read from it, which are verified."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from prope import config as config_lib
from prope import model, sharding
from prope.errors import UsageError
from prope.runtime import processes
from prope.runtime.files import as_path, check_writable, is_url, read_json, write_atomic
from prope.workdir.checkpoints import list_steps, newest_undamaged
from prope.workdir.reader import CheckpointReader
from prope.workdir.records import read_jsonl

_REMEDY = "give the --workdir that prope.train had"


class Run:
    """A run opened at one of its checkpoints, the one of `step`; the reader `checkpoint` verifies what it reads."""

    def __init__(
        self, workdir: epath.Path, config: ConfigDict, steps: list[int], remedy: str | None = None
    ):
        """Opens the first of `steps`; the others are older ones that `first_undamaged` may try, as `remedy` says."""
        self.workdir, self.config, self.step = workdir, config, steps[0]
        self._steps, self._remedy = steps, remedy
        self.checkpoint = CheckpointReader(workdir / "checkpoints" / str(self.step))
        check_same(
            config,
            self.checkpoint.config,
            f"{workdir}: config.json and checkpoint {self.step} disagree",
        )
        self.init_hash: str = self.checkpoint.init_hash

    def first_undamaged(self, read: Callable[["Run"], Any]) -> tuple["Run", Any]:
        """(run, read(run)) of this checkpoint, or of the newest older one for which `read` does not raise Damaged.

        Where --step named this one, no other is tried. Raises UsageError where all are damaged.
        """

        def read_one(step: int) -> tuple[Run, Any]:
            run = self if step == self.step else Run(self.workdir, self.config, [step])
            return run, read(run)

        return newest_undamaged(self.workdir / "checkpoints", self._steps, read_one, self._remedy)[
            1
        ]

    def params(self, abstract: model.Params | None = None) -> model.Params:
        """Reads all parameters onto devices, sharded as `abstract` is; by default over all devices."""
        processes.check_count()
        if abstract is None:
            abstract = sharding.with_shardings(self.checkpoint.shapes, sharding.make_mesh())
        return self.checkpoint.restore(params=abstract)["params"]


def open_run(workdir: epath.PathLike, step: int | None = None) -> Run:
    """Opens the run in a directory at a checkpoint, by default the newest one whose files are whole.

    Raises UsageError where there is no run, no checkpoint, or not that step; it is damaged; or config.json disagrees.
    """
    path = as_path("workdir", workdir)
    with processes.raise_on_all():
        if (config := read_config(path)) is None:
            raise UsageError(f"--workdir={workdir}: no run there (no config.json); {_REMEDY}")
    if not (steps := list_steps(path)):
        raise UsageError(
            f"--workdir={workdir}: holds a run without a finished checkpoint; train it first"
        )
    remedy = None  # training's
    if step is not None:
        if step not in steps:
            raise UsageError(
                f"--step={step}: {workdir} has no such checkpoint; it has {', '.join(map(str, steps))}"
            )
        others = ", ".join(str(other) for other in steps if other != step)
        remedy, steps = f"--step={step} names it; the run also has {others or 'no other'}", [step]

    def open_at(newest: int) -> Run:
        return Run(path, config, [step for step in reversed(steps) if step <= newest], remedy)

    return newest_undamaged(path / "checkpoints", steps[::-1], open_at, remedy)[1]


@contextlib.contextmanager
def open_workdir(path: epath.Path, config: ConfigDict) -> Iterator[None]:
    """Creates the directory, unless it holds another run; removes it where the run is refused before its first step."""
    path = epath.Path(path)
    if (existing := read_config(path)) is not None:
        error = f"--workdir={path}: holds a run of another config"
        remedy = "; choose another --workdir, or the config that it was started with"
        if config.num_steps > existing.num_steps:  # which the learning rate depends on
            remedy += f"; --init_from={path} in another --workdir trains its parameters for longer"
        check_same(config, existing, error, remedy)
    is_new, local = not path.exists(), pathlib.Path(path)
    created = (
        []
        if is_url(path)
        else [folder for folder in (local, *local.parents) if not folder.exists()]
    )
    check_writable("--workdir", path)
    try:
        yield
    except UsageError:
        if is_new and not read_jsonl(path / "metrics.jsonl"):
            path.rmtree(missing_ok=True)
        for folder in created:
            with contextlib.suppress(OSError):  # not empty, or another process has removed it
                folder.rmdir()
        raise


def find_runs(workdir: epath.PathLike) -> list[epath.Path]:
    """Finds the run in a directory, or all below it, by path: folders with a config.json; UsageError if none has."""

    def find(folder: epath.Path) -> Iterator[epath.Path]:
        if (folder / "config.json").exists():
            yield folder  # nothing within a run is another
        elif folder.is_dir():
            for below in sorted(folder.iterdir()):
                yield from find(below)

    if not (runs := list(find(as_path("workdir", workdir)))):
        raise UsageError(
            f"--workdir={workdir}: no run there (no config.json), nor below it; {_REMEDY}"
        )
    return runs


def read_config(workdir: epath.Path) -> ConfigDict | None:
    """Reads W/config.json; None where there is none."""
    values = read_json(workdir / "config.json", "restore it from a checkpoint's config item")
    return None if values is None else config_lib.from_dict(values)


def write_config(workdir: epath.Path, config: ConfigDict) -> None:
    """Writes W/config.json, whole or not at all."""
    write_atomic(workdir / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")


def check_same(config: ConfigDict, other: ConfigDict, message: str, remedy: str = "") -> None:
    """Raises UsageError with every field in which `other` is another run than `config`."""
    if differing := config_lib.differences(config, other):
        raise UsageError(f"{message} ({'; '.join(differing)}){remedy}")


def check_disk(
    directory: epath.Path, num_bytes: int, what="a checkpoint needs", flag="workdir"
) -> None:
    """Raises UsageError where the disk has no room for what is to be written there."""
    if is_url(directory):
        return
    if (free := shutil.disk_usage(directory).free) < num_bytes:
        sizes = f"{what} {num_bytes / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free"
        remedy = f"free some space and run the same command again, or choose another --{flag}"
        raise UsageError(f"{directory}: the disk is full: {sizes}; {remedy}")
