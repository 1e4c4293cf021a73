"""A checkpoint's parameters without a second copy of them: read one by one, and written piece by piece."""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp

_PIECE = 2**24  # bytes of an array that are compressed at a time
_FILE = 2**26  # bytes that are collected before they are written


def read_parameter(workdir: pathlib.Path, step: int, path: tuple[str, ...]) -> np.ndarray:
    """The parameter with this path in the nested dictionary, on the host."""
    item, how = 0, ocp.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(path):
        item, how = {key: item}, {key: how}
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    directory = workdir.absolute() / "checkpoints" / str(step) / "params"
    args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
    (parameter,) = jax.tree.leaves(reader.restore(directory, args=args))
    return parameter


def save_parameters(workdir: pathlib.Path, params: dict, config: dict, data: dict) -> None:
    """Saves parameters on the host as a checkpoint of step 0, with its `config` and `data` items, as JSON.

    There is no optimizer state: `train --init_from` starts from these parameters, but no run goes on from them.
    """
    arrays = jax.device_put(params, may_alias=True)  # of NumPy's, Orbax makes copies
    pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_PIECE), arrays)
    handlers = {"params": ocp.PyTreeCheckpointHandler()}
    handlers |= {"config": ocp.JsonCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(workdir.absolute() / "checkpoints", item_handlers=handlers, options=options) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(arrays, save_args=pieces, ocdbt_target_data_file_size=_FILE),
                config=ocp.args.JsonSave(config),
                data=ocp.args.JsonSave(data),
            ),
        )
