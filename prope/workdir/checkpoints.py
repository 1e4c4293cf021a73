"""Checkpoints: Orbax writes and reads them; this file says what is in one and how a run is found again.

W/checkpoints/N/ holds the state after N updates in four items: `params` (readable alone), `opt_state`, `config`
(JSON: the config, and what else the run is known by) and `data` (JSON: where the run stands in its data). Arrays
are restored onto today's devices; nothing is read about the devices that saved them.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint import checkpoint_managers as policies

from prope import config as config_lib
from prope import model, sharding
from prope.errors import RunFailed, Stopped, UsageError, is_disk_full
from prope.runtime import processes
from prope.runtime.files import read_json, write_atomic
from prope.sharding import hash_arrays

log = logging.getLogger("prope")
T = TypeVar("T")

_FILES = "files.json"  # beside a checkpoint's items: the size of every file


class Damaged(Exception):
    """A checkpoint is not whole any more: the text says why."""


class Checkpoints:
    """The checkpoints of the run in a directory.

    Orbax names a checkpoint's folder when all of it is written, so a name means that it was whole once. What its
    files' sizes were (`files.json`) and what its arrays hashed to (in `config`) tells whether it still is.
    """

    def __init__(self, workdir: str | os.PathLike, keep: ConfigDict | None = None):
        """To read; or, with a run's `config.checkpoint`, to write as well."""
        self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._saving, self._unseen = 0, False  # the last step that was saved; whether its failure would be news
        policy = None
        if keep is not None:
            kept = [policies.LatestN(keep.max_to_keep)]
            kept += [policies.EveryNSteps(keep.keep_every)] if keep.keep_every else []
            policy = policies.AnyPreservationPolicy(kept)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,  # what a killed process had begun to write
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._list_files),
        )
        handlers = {"params": ocp.StandardCheckpointHandler(), "opt_state": ocp.StandardCheckpointHandler()}
        handlers |= {"config": ocp.JsonCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, item_handlers=handlers, options=options)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first; damaged ones among them."""
        return sorted(self._manager.all_steps())

    def damage(self, step: int) -> str | None:
        """What is missing in the files of a checkpoint, or has another size than it had; None if nothing."""
        folder = self.directory / str(step)
        for name, size in (read_json(folder / _FILES) or {}).items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
        return None

    def newest(self, read: Callable[[int], T]) -> tuple[int, T]:
        """(step, read(step)) of the newest checkpoint that `read` does not find damaged; all processes take the same.

        Raises:
          UsageError: all of them are damaged.
        """
        found = []
        for step in reversed(self.steps()):
            reason, value = self.damage(step), None
            if not processes.any_process(reason is not None):  # before any waits for the others to read as well
                try:
                    value = read(step)
                except Damaged as error:
                    reason = str(error)
                if not processes.any_process(reason is not None):
                    return step, value
            found.append(f"checkpoint {step} is damaged ({reason or 'another process says so'})")
            log.warning("%s: passed over", found[-1])
        raise UsageError(
            f"{self.directory}: nothing whole to go on from: {'; '.join(found)}; bring a checkpoint back from a copy, "
            "or start in a new --workdir"
        )

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to N.damaged, so that its step can be saved again; deletes nothing."""
        if processes.is_first():
            folder = self.directory / str(step)
            names = itertools.chain([f"{step}.damaged"], (f"{step}.damaged-{n}" for n in itertools.count(2)))
            folder.rename(next(path for path in map(self.directory.joinpath, names) if not path.exists()))
        processes.broadcast_from_first(0)  # the others wait for it
        self._manager.reload()

    def save(self, step: int, params, opt_state, config: dict, data: dict) -> None:
        """Starts saving; returns when the arrays are copied. A failure is raised by the next `check`, or by `close`."""
        self.check()
        if step in self.steps():
            return
        config = config | {"hashes": {"params": hash_arrays(params), "opt_state": hash_arrays(opt_state)}}
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            opt_state=ocp.args.StandardSave(opt_state),
            config=ocp.args.JsonSave(config),
            data=ocp.args.JsonSave(data),
        )
        self._saving = step
        with self._named_errors():
            self._manager.save(step, args=args, force=True)  # whether it is time to, the caller has decided
        self._unseen = True

    def check(self) -> None:
        """Raises RunFailed where the last checkpoint could not be written in the background."""
        # Orbax's own check_for_errors does not see what its last thread has met: only waiting for that one raises it.
        if self._unseen and not self._manager.is_saving_in_progress():
            self._unseen = False
            with self._named_errors():
                self._manager.wait_until_finished()

    def restore(self, step: int, **abstract) -> dict[str, Any]:
        """Items of a checkpoint by name: arrays like `abstract` (shapes, dtypes, shardings), or None for JSON.

        Raises:
          Damaged: it cannot be read, or is not what was saved.
        """
        if reason := self.damage(step):
            raise Damaged(reason)
        names = {name: ocp.args.JsonRestore() for name, like in abstract.items() if like is None} | {
            name: ocp.args.StandardRestore(like) for name, like in abstract.items() if like is not None
        }
        names.setdefault("config", ocp.args.JsonRestore())
        for name in names:
            if not (self.directory / str(step) / name).is_dir():
                raise Damaged(f"{name} is missing")
        try:
            items = dict(self._manager.restore(step, args=ocp.args.Composite(**names)))
        except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise  # the checkpoint is not to blame
        except Exception as error:  # of many types, by which file it was
            raise Damaged(f"{type(error).__name__}: {_first_line(error)}") from error
        for name, saved in items["config"].get("hashes", {}).items():
            if name in abstract and hash_arrays(items[name]) != saved:
                raise Damaged(f"{name} is not what was saved")
        return {name: items[name] for name in abstract}

    def close(self) -> None:
        """Waits for what is being saved; raises RunFailed where it cannot be written."""
        with self._named_errors():
            self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        # After an error here, the other processes may not come to where all wait for one another.
        if kind is None or processes.count() == 1 or issubclass(kind, Stopped):
            self.close()

    @contextlib.contextmanager
    def _named_errors(self):
        try:
            yield
        except Exception as error:  # whatever the storage says
            if isinstance(error, jax.errors.JaxRuntimeError) and processes.count() > 1:
                raise  # another process is gone
            reason = os.strerror(errno.ENOSPC) if is_disk_full(error) else _first_line(error)
            raise RunFailed(
                f"checkpoint {self._saving} could not be written to {self.directory} ({reason}); those "
                "before it are whole: see to the storage, then run the same command again"
            ) from error

    def _list_files(self) -> None:
        """Orbax calls this when all is written, just before the folder gets its name."""
        if processes.is_first():
            for folder in self.directory.glob(f"{self._saving}.*tmp*"):
                # Of the items: the folder's own files, and the marks of success, are not final yet.
                files = [path for path in folder.glob("*/**/*") if path.is_file() and path.name != "commit_success.txt"]
                sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
                (folder / _FILES).write_text(json.dumps(sizes, indent=0))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run read from its directory: what evaluation, sampling and analysis start from."""

    workdir: pathlib.Path
    config: ConfigDict
    step: int
    params: model.Params
    init_hash: str


def load_run(workdir: str | os.PathLike, step: int | None = None) -> Run:
    """The run in `workdir` with the parameters of a checkpoint, on this machine's devices.

    Without a `step` it is the newest checkpoint that is whole; a damaged one is passed over with a warning.

    Raises:
      UsageError: as `find_run`.
    """

    def read(step: int, saved: dict, config: ConfigDict, checkpoints: Checkpoints) -> Run:
        params = checkpoints.restore(step, params=abstract_params(config, sharding.make_mesh()))["params"]
        return Run(pathlib.Path(workdir), config, step, params, saved["init_hash"])

    return _find(workdir, step, read)


def find_run(workdir: str | os.PathLike, step: int | None = None) -> tuple[ConfigDict, int, str]:
    """(config, step, init_hash) of a checkpoint of the run in `workdir`, as `load_run`; reads no parameters.

    Raises:
      UsageError: there is no run, no checkpoint, or not that step; or it is damaged, or config.json disagrees.
    """
    return _find(workdir, step, lambda step, saved, config, _: (config, step, saved["init_hash"]))


def find_runs(workdir: str | os.PathLike) -> list[pathlib.Path]:
    """The run in a directory, or all runs below it, sorted by path: folders with a config.json.

    Raises:
      UsageError: there is none.
    """
    found = []
    for folder, below, files in os.walk(workdir):
        below.sort()
        if "config.json" in files:
            found.append(pathlib.Path(folder))
            below.clear()  # nothing within a run is another
    if not found:
        raise UsageError(
            f"--workdir={workdir}: no run there (no config.json), nor below it; give the --workdir that prope.train had"
        )
    return found


def steps_of(run: pathlib.Path) -> list[int]:
    """The finished checkpoints of a run, oldest first; none where there is nothing."""
    return Checkpoints(run).steps() if (run / "checkpoints").is_dir() else []


def folder(workdir: str | os.PathLike) -> pathlib.Path:
    """--workdir as a path; raises UsageError where it is a URL."""
    if "://" in str(workdir):
        raise UsageError(
            f"--workdir={workdir}: must be a folder, not a URL; mount the bucket where every host sees it, such as by "
            "Cloud Storage FUSE, and give its path"
        )
    return pathlib.Path(workdir)


def _find(workdir, step, read):
    path = folder(workdir)
    config = read_config(path)
    if config is None:
        raise UsageError(f"--workdir={workdir}: no run there (no config.json); give the --workdir that prope.train had")
    checkpoints = Checkpoints(path) if (path / "checkpoints").is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if not steps:
        raise UsageError(f"--workdir={workdir}: holds a run without a finished checkpoint; train it first")
    if step is not None and step not in steps:
        raise UsageError(f"--step={step}: {workdir} has no such checkpoint; it has {', '.join(map(str, steps))}")

    def read_one(step: int):
        saved = checkpoints.restore(step, config=None)["config"]
        disagree = f"{workdir}: config.json and checkpoint {step} disagree"
        check_same(config, config_lib.from_dict(saved["config"]), disagree)
        return read(step, saved, config, checkpoints)

    if step is None:
        return checkpoints.newest(read_one)[1]
    try:
        return read_one(step)
    except Damaged as error:
        raise UsageError(
            f"--step={step}: checkpoint {step} of {workdir} is damaged ({error}); it has {', '.join(map(str, steps))}"
        ) from None


def read_numpy(workdir: str | os.PathLike, step: int) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint by path, "['final_norm']['scale']", as NumPy arrays: no device holds any."""
    item = pathlib.Path(workdir).absolute() / "checkpoints" / str(step) / "params"
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    like = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(item).item_metadata.tree)
    params = reader.restore(item, args=ocp.args.PyTreeRestore(restore_args=like))
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def abstract_params(config: ConfigDict, mesh: jax.sharding.Mesh):
    """Shapes, dtypes and today's shardings of the parameters of a config."""
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    return sharding.with_shardings(shapes, mesh)


def read_config(workdir: pathlib.Path) -> ConfigDict | None:
    """What W/config.json says, or None where there is none."""
    values = read_json(workdir / "config.json", "restore it from a checkpoint's config item")
    return None if values is None else config_lib.from_dict(values)


def write_config(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Writes W/config.json, whole or not at all."""
    write_atomic(workdir / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")


def check_same(config: ConfigDict, other: ConfigDict, message: str, remedy: str = "") -> None:
    """Raises UsageError with every field in which `other` is another run than `config`."""
    differing = config_lib.differences(config, other)
    if differing:
        raise UsageError(f"{message} ({'; '.join(differing)}){remedy}")


def check_disk(directory: pathlib.Path, num_bytes: int) -> None:
    """Raises UsageError where the disk has no room for one checkpoint."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UsageError(
            f"{directory}: the disk is full: a checkpoint needs {num_bytes / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are "
            "free; free some space and run the same command again, or choose another --workdir"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
