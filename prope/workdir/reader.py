"""Reads one checkpoint and verifies all that it returns by the hashes that were saved with it.

A checkpoint is a folder W/checkpoints/N with one folder per Orbax item, and hashes.json: a hash of
every array, one per layer where layers are stacked, of each JSON item, and of the file itself.
What is read is hashed again, so a flipped byte in any file is refused, or changes nothing.
"""

import errno
import functools
import json
import operator
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.tree_util import DictKey, keystr, tree_leaves_with_path, tree_map_with_path

from prope import parameters
from prope.config import spec_from_dict
from prope.errors import UsageError, first_line
from prope.runtime import processes
from prope.runtime.files import (
    absolute,
    is_url,
    parse_json,
    raise_storage_error,
    read_bytes,
    retry_reads,
    write_atomic,
)
from prope.spec.run import Spec
from prope.workdir.hashes import array_hashes, array_shapes, hash_json, hash_on_host

HASHES = "hashes.json"  # beside the items, written last


class Damaged(UsageError):
    """A checkpoint is not what was saved; the text names the file or the array.

    All processes raise it, or none.
    """


def write_hashes(folder: epath.Path, hashes: dict[str, Any]) -> None:
    """Writes a checkpoint's hashes.json: `hashes` of its items by name, and their own hash."""
    write_atomic(folder / HASHES, json.dumps({"items": hashes, "hash": hash_json(hashes)}))


class CheckpointReader:
    """Reads the items of a checkpoint; raises Damaged for what is not what was saved.

    A read that fails is repeated; where the storage goes on failing, StorageFailed tells it.
    """

    def __init__(self, folder: epath.PathLike):
        """Reads and verifies the JSON items."""
        self._folder = absolute(folder)
        self._stores = {}  # by item and key path
        # Its cache holds the indices of an item, so that its arrays do not each read them again.
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 2**24}})
        items = processes.call_on_first(self._read_items)
        if "damaged" in items:
            raise Damaged(items["damaged"])
        self._hashes = items["hashes"]
        self.data: dict[str, Any] = items["data"]
        self.spec: Spec = spec_from_dict(items["config"]["config"])
        self.init_hash: str = items["config"]["init_hash"]

    def _read_items(self) -> dict[str, Any]:
        """Reads the JSON files, as the first process does for all; or says what is damaged."""
        try:
            sealed = self._read_json(HASHES)
            hashes = sealed.get("items")
            if hash_json(hashes) != sealed.get("hash"):
                raise Damaged(f"{HASHES} is not what was saved")
            items = {"hashes": hashes}
            for item in ("config", "data"):
                items[item] = self._read_json(f"{item}/metadata")
                if hash_json(items[item]) != hashes[item]:
                    raise Damaged(f"{item}/metadata is not what was saved")
        except Damaged as error:
            return {"damaged": str(error)}
        return items

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        try:
            content = retry_reads(self._folder, lambda: read_bytes(path))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise Damaged(f"{name} is missing") from None
        try:
            values = parse_json(content)
        except ValueError as error:
            raise Damaged(f"{name} is not readable as JSON: {error}") from None
        if not isinstance(values, dict):
            raise Damaged(f"{name} is not a JSON object")
        return values

    def restore(self, **abstract) -> dict[str, Any]:
        """Reads whole items onto devices, by name.

        Arrays get the shapes, dtypes and shardings of `abstract`. Raises UsageError where these are
        not what was saved.
        """
        self.check(**abstract)

        def read_sharded(path, leaf):
            read = functools.partial(self._read_slice, path[0].key, path[1:], leaf)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

        with processes.raise_on_all(Damaged):  # before all hash together
            items = tree_map_with_path(read_sharded, abstract)
        for item, tree in items.items():
            saved = self._hashes.get(item, {})
            for path, hashes in array_hashes(tree).items():
                if saved.get(path) != hashes:
                    raise Damaged(f"{item}: {path} is not what was saved")
        return items

    def check(self, **abstract) -> None:
        """Raises UsageError where whole items are not of the names, shapes and dtypes saved."""
        for item, tree in abstract.items():
            ours = array_shapes(tree)
            saved = self._hashes["shapes"][item]
            for path in sorted(ours.keys() | saved.keys()):
                theirs = saved.get(path, "absent")
                here = ours.get(path, "absent")
                if theirs == here:
                    continue
                what = f"{path} is {theirs} in the checkpoint and {here} here"
                problem = f"{item} is of other code or another optimizer: {what}"
                remedy = "use the code that saved it"
                if item == "opt_state":  # the parameters may be read without it
                    remedy += ", or start in a new --workdir with --init_from"
                raise UsageError(f"{self._folder}: {problem}; {remedy}")

    def open(self, **abstract) -> None:
        """Opens the arrays of whole items, as `restore` does before it reads them."""
        for path, leaf in tree_leaves_with_path(abstract):
            self._read_slice(path[0].key, path[1:], leaf, None)

    @functools.cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters."""
        return parameters.shapes(self.spec.model)

    def read(self, path: tuple[str, ...], layer: int | None = None):
        """Reads the parameter at a path of the nested dict, or all below it, onto the host.

        With `layer`, only that layer is read, and verified.
        """

        def read_verified(keys, leaf):
            full_path = (*map(DictKey, path), *keys)
            hashes = self._hashes["params"][keystr(full_path)]
            if layer is None:
                array = self._read_slice("params", full_path, leaf, slice(None))
                intact = hash_on_host(array) == sum(hashes) % 2**32
            else:
                array = self._read_slice("params", full_path, leaf, layer)
                intact = hash_on_host(array, layer * array.size) == hashes[layer]
            if not intact:
                raise Damaged(f"params: {keystr(full_path)} is not what was saved")
            return array

        below = functools.reduce(operator.getitem, path, self.shapes)
        return tree_map_with_path(read_verified, below)

    def _read_slice(self, item: str, path, leaf: jax.ShapeDtypeStruct, index) -> np.ndarray:
        """Reads a slice of the array at a key path in an item; `leaf` has its shape and dtype.

        Where `index` is None the array is opened only.
        """

        def read():
            try:
                store = self._open(item, path, leaf)
                return None if index is None else store[index].read().result()
            except ValueError as error:  # TensorStore's, also for a storage that fails
                raise_storage_error(error)
                if not (is_url(self._folder) or self._folder.is_dir()):  # the first process saw it
                    raise OSError(errno.ESTALE, "this host does not see it") from None
                name = f"{item}: {keystr(path)}"
                raise Damaged(f"{name} cannot be read: {first_line(error)}") from error

        return retry_reads(self._folder / item, read)

    def _open(self, item: str, path, leaf: jax.ShapeDtypeStruct) -> ts.TensorStore:
        """Opens an array: Orbax stores an item as Zarr arrays in one key-value store, by path."""
        if (item, path) not in self._stores:
            kvstore = {
                "driver": "ocdbt",
                "base": f"{(self._folder / item).as_uri()}/",
                "path": keystr(path, simple=True, separator=".") + "/",
            }
            zarr = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
            store = ts.open(zarr, open=True, read=True, context=self._context).result()
            if (store.shape, store.dtype.numpy_dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(f"it is {store.dtype.name}{list(store.shape)}, not {leaf}")
            self._stores[item, path] = store
        return self._stores[item, path]
