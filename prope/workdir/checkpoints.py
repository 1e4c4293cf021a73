"""The checkpoints of a run: saved by training and import, listed, and passed over where damaged.

W/checkpoints/N/ holds the state after N updates in four Orbax items: `params` (readable alone),
`opt_state`, `config` (JSON: the config and init_hash) and `data` (JSON: the position in the data);
and hashes.json, which tells whether all that is what was saved. Imported ones have no `opt_state`.
Restored arrays get today's shardings; how they were sharded when saved does not matter.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from prope.errors import (
    RunFailed,
    Stopped,
    StorageFailed,
    UsageError,
    find_full,
    first_line,
    is_denied,
    is_storage_error,
    log,
)
from prope.runtime import processes
from prope.runtime.files import absolute, is_url, os_errors_of_tensorstore, retry_reads
from prope.spec.run import CheckpointSpec
from prope.workdir.hashes import array_hashes, array_shapes, hash_json
from prope.workdir.reader import HASHES, CheckpointReader, Damaged, write_hashes

_CHUNK_BYTES = 2**24  # bytes of an array that are compressed, and read, together
_FILE_BYTES = 2**26  # that an import collects before it writes them
_ORBAX_MARK = "commit_success.txt"  # by which Orbax knows a finished checkpoint at a URL


def list_steps(workdir: epath.PathLike) -> list[int]:
    """Lists the steps of a run's finished checkpoints, damaged ones included, oldest first.

    The first process lists them for all: another host may see the directory as it was.
    """
    directory = epath.Path(workdir) / "checkpoints"
    return processes.call_on_first(lambda: finished_steps(directory))


def finished_steps(directory: epath.Path) -> list[int]:
    """Lists the steps of a folder of checkpoints, as this process sees them."""

    def finished():
        # When all is written, a folder gets its name, and one at a URL its hashes.json.
        folders = [path for path in directory.iterdir() if path.name.isdecimal()]
        return [int(path.name) for path in folders if not is_url(path) or (path / HASHES).exists()]

    return sorted(retry_reads(directory, finished, []))


def newest_undamaged(
    directory: epath.Path,
    steps: Sequence[int],
    read: Callable[[int], Any],
    remedy: str | None = None,
) -> tuple[int, Any]:
    """Returns (step, read(step)) of the first step whose `read` does not raise Damaged.

    All processes return the same. Raises UsageError where all steps are damaged.
    """
    reasons = []
    for step in steps:
        try:
            return step, read(step)
        except Damaged as error:
            reasons.append(f"checkpoint {step} is damaged ({error})")
        if step != steps[-1]:
            log.warning("%s: %s: passed over", directory, reasons[-1])
    remedy = remedy or "bring a checkpoint back from a copy, or start in a new --workdir"
    raise UsageError(f"{directory}: nothing whole to go on from: {'; '.join(reasons)}; {remedy}")


class Checkpoints(contextlib.AbstractContextManager):
    """Saves and restores the checkpoints of a run that trains."""

    def __init__(
        self, workdir: epath.PathLike, keep: CheckpointSpec | None = None, stable: int = 0
    ):
        """Opens W/checkpoints; `keep` is the run's `config.checkpoint`, by default all are kept.

        So is that of the step `stable`.
        """
        self.directory = absolute(workdir) / "checkpoints"
        self._saving = 0  # the last step saved
        self._hashes = {}  # hashes of its items
        self._unchecked = False  # whether that save may have failed in the background
        self._steps = list_steps(workdir)  # once: each step at a URL is a request
        if is_url(self.directory) and processes.is_first():
            # One copied here from a disk has no mark, and Orbax would delete it.
            for step in self._steps:
                (self.directory / str(step) / _ORBAX_MARK).touch()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_preservation_policy(keep, stable),
            cleanup_tmp_directories=True,  # which a killed process left
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finish),
        )
        self._manager = _open_manager(self.directory, options)

    def steps(self) -> list[int]:
        """Lists the steps that were finished when this was opened, and those saved since."""
        return list(self._steps)

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to N.damaged, so that its step can be saved again."""
        if processes.is_first():
            target = self.directory / f"{step}.damaged"
            for number in itertools.count(2):
                if not target.exists():
                    break
                target = self.directory / f"{step}.damaged-{number}"
            (self.directory / str(step)).rename(target)
        processes.wait()
        self._steps.remove(step)
        self._manager.reload()

    def save(self, step: int, params, opt_state, config: dict, data: dict) -> None:
        """Starts saving; returns when the arrays are copied.

        A failure is raised by the next call, or at exit. The first save of a run is waited for, and
        read back: RunFailed where that fails.
        """
        if step in self._steps:
            return
        arrays = {"params": params, "opt_state": opt_state}
        hashes = _hash_items(config, data, arrays)
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params, save_args=_chunks(params)),
            opt_state=ocp.args.PyTreeSave(opt_state),
            config=ocp.args.JsonSave(config),
            data=ocp.args.JsonSave(data),
        )
        with self._as_storage_failed():
            self._manager.wait_until_finished()  # until the one before has its hashes
            self._saving = step
            self._hashes = hashes
            self._manager.save(step, args=items, force=True)  # the caller has decided when
            if not self._steps:
                self._manager.wait_until_finished()
                folder = self.directory / str(step)
                processes.call_on_first(functools.partial(_read_back, folder, arrays))
        self._steps.append(step)
        self._unchecked = True

    def check(self) -> None:
        """Raises RunFailed where the last checkpoint could not be written meanwhile."""
        # Orbax's own check_for_errors does not see what its last thread has met.
        if self._unchecked and not self._manager.is_saving_in_progress():
            self._unchecked = False
            with self._as_storage_failed():
                self._manager.wait_until_finished()

    def __exit__(self, kind, *error):
        """Waits for what is being saved; raises RunFailed where it cannot be written."""
        # After an error here, the other processes may not come to where all wait for one another.
        if kind is None or processes.count() == 1 or issubclass(kind, Stopped):
            with self._as_storage_failed():
                self._manager.wait_until_finished()
            self._manager.close()

    @contextlib.contextmanager
    def _as_storage_failed(self):
        try:
            with os_errors_of_tensorstore(processes.is_peer_loss):
                yield
        except Exception as error:
            full = find_full(error)
            is_of_storage = full or is_storage_error(error)
            if isinstance(error, UsageError | RunFailed | Stopped) or not is_of_storage:
                raise
            failed = f"checkpoint {self._saving} could not be written to {self.directory}"
            remedy = "see to the storage, then run the same command again"
            reason = full or first_line(error)
            message = f"{failed} ({reason}); those before it are whole: {remedy}"
            is_final = full or is_denied(error)  # a person must change something
            kind = RunFailed if is_final else StorageFailed
            raise kind(message) from error

    def _finish(self) -> None:
        """Adds the hashes; Orbax calls this just before a local folder gets its name."""
        if not processes.is_first():
            return
        # Until then the folder's name is the step's with a suffix of Orbax.
        for folder in self.directory.iterdir():
            step, _, suffix = folder.name.partition(".")
            if step == str(self._saving) and not suffix.startswith("damaged"):
                write_hashes(folder, self._hashes)


def _open_manager(directory: epath.Path, options) -> ocp.CheckpointManager:
    """Opens Orbax's manager with handlers of our own for arrays.

    Processes that hold the same array save it together, in parts of _CHUNK_BYTES at least: each
    host would read as many small parts of every norm as there were hosts. There is no
    array_metadatas/: it repeats Zarr's, and the first process would read a file of every other one.
    """
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_CHUNK_BYTES, array_metadata_store=None
    )
    types = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ("params", "opt_state"):
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=types)
        handlers.add(item, ocp.args.PyTreeSave, handler)
    for item in ("config", "data"):
        handlers.add(item, ocp.args.JsonSave)
    return ocp.CheckpointManager(directory, options=options, handler_registry=handlers)


def save_imported(workdir: epath.Path, params, config: dict, data: dict) -> None:
    """Saves parameters on the host as the checkpoint of step 0, without a second copy of them.

    There is no optimizer state: `train --init_from` starts from these parameters, but the run
    cannot be resumed.
    """
    arrays = jax.device_put(params, may_alias=True)  # Orbax would copy NumPy's
    items = ocp.args.Composite(
        params=ocp.args.PyTreeSave(
            arrays, save_args=_chunks(arrays), ocdbt_target_data_file_size=_FILE_BYTES
        ),
        config=ocp.args.JsonSave(config),
        data=ocp.args.JsonSave(data),
    )
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    directory = absolute(workdir) / "checkpoints"
    with _open_manager(directory, options) as manager:
        manager.save(0, args=items)
    write_hashes(directory / "0", _hash_items(config, data, {"params": arrays}))
    _read_back(directory / "0", {"params": arrays})


def _read_back(folder: epath.Path, arrays: dict[str, Any]) -> None:
    """Opens the first checkpoint of a run as readers do; raises RunFailed where they cannot."""
    try:
        if int(folder.name) not in list_steps(folder.parent.parent):
            raise Damaged("it is not listed")
        CheckpointReader(folder).open(**arrays)
    except Damaged as error:
        problem = f"{folder}: was written, and cannot be read back ({error})"
        raise RunFailed(f"{problem}: see to the storage, or choose another --workdir") from error


def _preservation_policy(keep: CheckpointSpec | None, stable: int):
    """Keeps the newest checkpoints, one every `keep.keep_every` steps, and that of `stable`."""
    if keep is None:
        return None
    kept = [policies.LatestN(keep.max_to_keep), policies.CustomSteps([stable])]
    if keep.keep_every:
        kept.append(policies.EveryNSteps(keep.keep_every))
    return policies.AnyPreservationPolicy(kept)


def _hash_items(config: dict, data: dict, arrays: dict[str, Any]) -> dict[str, Any]:
    hashes = {item: array_hashes(tree) for item, tree in arrays.items()}
    shapes = {item: array_shapes(tree) for item, tree in arrays.items()}
    return hashes | {"config": hash_json(config), "data": hash_json(data), "shapes": shapes}


def _chunks(params):
    """Returns how parameters are cut in a checkpoint: layers apart, so that one is read alone."""

    def cut(path, _):
        axes = (0,) if path[0].key == "layers" else ()
        return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=axes)

    return jax.tree_util.tree_map_with_path(cut, params)
