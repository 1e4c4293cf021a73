"""A checkpoint's parameters without a second copy of them: read one by one or layer by layer, written by pieces."""

import functools
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

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


class LayerByLayer:
    """The parameters of a checkpoint, of which no more than asked for is read and held.

    Attributes:
      shapes: of all parameters, a nested dictionary.
    """

    def __init__(self, workdir: pathlib.Path, step: int):
        self._directory = workdir.absolute() / "checkpoints" / str(step) / "params"
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        metadata = reader.metadata(self._directory).item_metadata.tree
        self.shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata)

    def layer(self, number: int) -> dict:
        """The parameters of one layer: those of "layers" without their leading axis."""
        return self._read(("layers",), self.shapes["layers"], lambda array: array[number])

    def final_norm(self) -> dict:
        """The parameters of the final norm."""
        return self._read(("final_norm",), self.shapes["final_norm"], lambda array: array)

    def embedding(self, rows: np.ndarray | slice = slice(None)) -> jax.Array:
        """The embedding [V, D], or some of its rows."""
        path = ("embedder", "input_embedding")
        return self._read(path, self.shapes[path[0]][path[1]], lambda array: array[rows])

    def _read(self, path, tree, part):
        if isinstance(tree, dict):
            return {name: self._read((*path, name), below, part) for name, below in tree.items()}
        return jax.device_put(part(self._open(path)).read().result())

    @functools.lru_cache  # noqa: B019  one for a command
    def _open(self, path: tuple[str, ...]) -> ts.TensorStore:
        # Orbax keeps an array as a Zarr array of this name, all of them in one key-value store, which can be cut.
        base = {"driver": "ocdbt", "base": f"{self._directory.as_uri()}/"}
        spec = {"driver": "zarr", "kvstore": base | {"path": ".".join(path) + "/"}}
        return ts.open(spec, open=True, read=True).result()


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
