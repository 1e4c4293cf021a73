"""The checkpoints of a run: saved by training and import, listed, and passed over where damaged.

W/checkpoints/N/ holds the state after N updates in four Orbax items: `params` (readable alone), `opt_state`, `config`
(JSON: the config, init_hash, and hashes of all arrays) and `data` (JSON: the position in the data). Imported ones have
no `opt_state`. Restored arrays get today's shardings; how they were sharded when saved does not matter.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict
from orbax.checkpoint import checkpoint_managers as policies

from prope.errors import RunFailed, Stopped, UsageError, first_line, is_disk_full, log
from prope.runtime import processes
from prope.runtime.files import absolute, is_url, retry_reads
from prope.workdir.hashes import array_hashes
from prope.workdir.reader import FILES, Damaged, list_files

_CHUNK = 2**24  # bytes of an array that are compressed, and read, together
_MARK = "commit_success.txt"  # by which Orbax knows a finished checkpoint at a URL
_FILE = 2**26  # bytes that an import collects before it writes them


def list_steps(workdir: epath.PathLike) -> list[int]:
    """Lists the steps of a run's finished checkpoints, damaged ones included, oldest first.

    Several processes take the first one's list: another host may see the directory as it was.
    """
    directory = epath.Path(workdir) / "checkpoints"

    def finished() -> list[int]:
        # When all is written, a folder gets its name, and one at a URL its list of files.
        paths = [path for path in directory.iterdir() if path.name.isdecimal()]
        return [int(path.name) for path in paths if not is_url(path) or (path / FILES).exists()]

    return processes.broadcast_from_first(sorted(retry_reads(directory, finished, [])))


def newest_undamaged(
    directory: epath.Path,
    steps: Sequence[int],
    read: Callable[[int], Any],
    remedy: str | None = None,
) -> tuple[int, Any]:
    """Returns (step, read(step)) of the first of `steps` for which `read` does not raise Damaged, in all processes.

    Raises UsageError where all of them are damaged.
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

    def __init__(self, workdir: epath.PathLike, keep: ConfigDict | None = None):
        """Opens W/checkpoints; `keep` is the run's `config.checkpoint`, by default all checkpoints are kept."""
        self.directory = absolute(workdir) / "checkpoints"
        self._saving, self._unchecked = (
            0,
            False,
        )  # the last step saved; whether it may have failed in the background
        kept = [] if keep is None else [policies.LatestN(keep.max_to_keep)]
        kept += [policies.EveryNSteps(keep.keep_every)] if keep and keep.keep_every else []
        for step in self.steps() if is_url(self.directory) else ():
            if (
                processes.is_first()
            ):  # one copied here from a disk has no mark, and Orbax would delete it
                (self.directory / str(step) / _MARK).touch()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept) if kept else None,
            cleanup_tmp_directories=True,  # which a killed process left
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._list_files),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Lists the steps of finished checkpoints, damaged ones included, oldest first."""
        return list_steps(self.directory.parent)

    def set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint to N.damaged, so that its step can be saved again; deletes nothing."""
        if processes.is_first():
            folder = self.directory / str(step)
            names = itertools.chain(
                [f"{step}.damaged"], (f"{step}.damaged-{n}" for n in itertools.count(2))
            )
            folder.rename(
                next(path for path in map(self.directory.joinpath, names) if not path.exists())
            )
        processes.broadcast_from_first(0)  # the others wait for it
        self._manager.reload()

    def save(self, step: int, params, opt_state, config: dict, data: dict) -> None:
        """Starts saving; returns when the arrays are copied. A failure is raised by the next call, or at exit."""
        if step in self.steps():
            return
        items = _json_items(config, data, {"params": params, "opt_state": opt_state})
        items["params"] = ocp.args.StandardSave(params, save_args=_chunks(params))
        items["opt_state"] = ocp.args.StandardSave(opt_state)
        with self._as_run_failed():
            self._manager.wait_until_finished()  # until `_list_files` has listed the one before
            self._saving = step
            self._manager.save(
                step, args=ocp.args.Composite(**items), force=True
            )  # the caller has decided when
        self._unchecked = True

    def check(self) -> None:
        """Raises RunFailed where the last checkpoint could not be written in the background."""
        # Orbax's own check_for_errors does not see what its last thread has met: only waiting for that one raises it.
        if self._unchecked and not self._manager.is_saving_in_progress():
            self._unchecked = False
            with self._as_run_failed():
                self._manager.wait_until_finished()

    def __exit__(self, kind, *error):
        """Waits for what is being saved; raises RunFailed where it cannot be written."""
        # After an error here, the other processes may not come to where all wait for one another.
        if kind is None or processes.count() == 1 or issubclass(kind, Stopped):
            with self._as_run_failed():
                self._manager.wait_until_finished()
            self._manager.close()

    @contextlib.contextmanager
    def _as_run_failed(self):
        try:
            yield
        except Exception as error:  # whatever the storage raises
            if isinstance(error, jax.errors.JaxRuntimeError) or processes.is_peer_loss(error):
                raise  # of a device, or because another process is gone
            reason = os.strerror(errno.ENOSPC) if is_disk_full(error) else first_line(error)
            failed = (
                f"checkpoint {self._saving} could not be written to {self.directory} ({reason})"
            )
            remedy = (
                "those before it are whole: see to the storage, then run the same command again"
            )
            raise RunFailed(f"{failed}; {remedy}") from error

    def _list_files(self) -> None:
        """Orbax calls this when all is written, just before a local folder gets its name."""
        if processes.is_first():
            for folder in (
                self.directory.iterdir()
            ):  # until then its name is the step's and a suffix of Orbax
                step, _, suffix = folder.name.partition(".")
                if step == str(self._saving) and not suffix.startswith("damaged"):
                    list_files(folder)


def save_imported(workdir: epath.Path, params, config: dict, data: dict) -> None:
    """Saves parameters on the host as the checkpoint of step 0, without a second copy of them.

    There is no optimizer state: `train --init_from` starts from these parameters, but the run cannot be resumed.
    """
    arrays = jax.device_put(params, may_alias=True)  # Orbax would copy NumPy's
    items = _json_items(config, data, {"params": arrays})
    items["params"] = ocp.args.PyTreeSave(
        arrays, save_args=_chunks(arrays), ocdbt_target_data_file_size=_FILE
    )
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    directory = absolute(workdir) / "checkpoints"
    with ocp.CheckpointManager(directory, options=options) as manager:
        manager.save(0, args=ocp.args.Composite(**items))
    list_files(directory / "0")


def _json_items(
    config: dict, data: dict, arrays: dict[str, Any]
) -> dict[str, ocp.args.CheckpointArgs]:
    """The JSON items of a checkpoint; hashes of its arrays go into `config`."""
    config = config | {"array_hashes": {name: array_hashes(tree) for name, tree in arrays.items()}}
    return {"config": ocp.args.JsonSave(config), "data": ocp.args.JsonSave(data)}


def _chunks(params):
    """How parameters are cut in a checkpoint: layers apart, so that one can be read alone."""
    by_layer, whole = (ocp.SaveArgs(chunk_byte_size=_CHUNK, shard_axes=axes) for axes in ((0,), ()))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: by_layer if path[0].key == "layers" else whole, params
    )
