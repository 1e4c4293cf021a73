"""Checkpoints: Orbax writes and reads them; this file says what is in one and how a run is found again.

W/checkpoints/N/ holds the state after N updates in four items: `params` (readable alone), `opt_state`, `config`
(JSON: the config, and what else the run is known by) and `data` (JSON: where the run stands in its data). Arrays
are restored onto today's devices; nothing is read about the devices that saved them.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from prope import config as config_lib
from prope import model, sharding
from prope.errors import UsageError


class Checkpoints:
    """The checkpoints of the run in a directory."""

    def __init__(self, workdir: str | os.PathLike, max_to_keep: int | None = None):
        self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            create=False,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=False,
        )
        handlers = {"params": ocp.StandardCheckpointHandler(), "opt_state": ocp.StandardCheckpointHandler()}
        handlers |= {"config": ocp.JsonCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, item_handlers=handlers, options=options)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, params, opt_state, config: dict, data: dict) -> None:
        """Starts saving; returns when the arrays are copied. A failure is raised by the next call or by `close`."""
        self._manager.check_for_errors()
        if step in self.steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                opt_state=ocp.args.StandardSave(opt_state),
                config=ocp.args.JsonSave(config),
                data=ocp.args.JsonSave(data),
            ),
        )

    def restore(self, step: int, **abstract) -> dict[str, Any]:
        """Items of a checkpoint by name: arrays like `abstract` (shapes, dtypes, shardings), or None for JSON."""
        args = {
            name: ocp.args.JsonRestore() if like is None else ocp.args.StandardRestore(like)
            for name, like in abstract.items()
        }
        return dict(self._manager.restore(step, args=ocp.args.Composite(**args)))

    def close(self) -> None:
        """Waits for what is being saved."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()


@dataclasses.dataclass(frozen=True)
class Run:
    """A run read from its directory: what evaluation, sampling and analysis start from."""

    workdir: pathlib.Path
    config: ConfigDict
    step: int
    params: model.Params
    init_hash: str


def load_run(workdir: str | os.PathLike, step: int | None = None) -> Run:
    """The run in `workdir` with the parameters of a checkpoint, the newest by default, on this machine's devices.

    Raises:
      UsageError: as `find_run`.
    """
    config, step, init_hash = find_run(workdir, step)
    params = Checkpoints(workdir).restore(step, params=abstract_params(config, sharding.make_mesh()))["params"]
    return Run(pathlib.Path(workdir), config, step, params, init_hash)


def find_run(workdir: str | os.PathLike, step: int | None = None) -> tuple[ConfigDict, int, str]:
    """(config, step, init_hash) of a checkpoint of the run in `workdir`, the newest by default; reads no parameters.

    Raises:
      UsageError: there is no run, no checkpoint, or not that step; or config.json and checkpoint disagree.
    """
    path = pathlib.Path(workdir)
    config = read_config(path)
    if config is None:
        raise UsageError(f"--workdir={workdir}: no run there (no config.json); give the --workdir that prope.train had")
    checkpoints = Checkpoints(path) if (path / "checkpoints").is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if not steps:
        raise UsageError(f"--workdir={workdir}: holds a run without a finished checkpoint; train it first")
    if step is not None and step not in steps:
        raise UsageError(f"--step={step}: {workdir} has no such checkpoint; it has {', '.join(map(str, steps))}")
    step = steps[-1] if step is None else step
    saved = checkpoints.restore(step, config=None)["config"]
    check_same(
        config,
        config_lib.from_dict(saved["config"]),
        f"{workdir}: config.json and checkpoint {step} disagree",
    )
    return config, step, saved["init_hash"]


def abstract_params(config: ConfigDict, mesh: jax.sharding.Mesh):
    """Shapes, dtypes and today's shardings of the parameters of a config."""
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    return sharding.with_shardings(shapes, mesh)


def read_config(workdir: pathlib.Path) -> ConfigDict | None:
    """What W/config.json says, or None where there is none."""
    path = workdir / "config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(
            f"{path}: not readable as JSON ({error}); restore it from a checkpoint's config item"
        ) from None
    return config_lib.from_dict(values)


def write_config(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Writes W/config.json, whole or not at all."""
    part = workdir / "config.json.part"
    part.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    part.replace(workdir / "config.json")


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
