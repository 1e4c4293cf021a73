"""Reads one checkpoint and verifies what it returns: sizes and checksums of files, hashes of arrays.

A checkpoint is a folder W/checkpoints/N with one folder per Orbax item. Its `config` item holds, beside the run's
config, a hash of every array, one per layer where layers are stacked: reading a layer verifies it.
"""

import errno
import functools
import json
import operator
import re
import zlib
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.tree_util import keystr
from ml_collections import ConfigDict

from prope import config as config_lib
from prope import model
from prope.errors import UsageError, first_line
from prope.runtime import processes
from prope.runtime.files import absolute, files_below, retry_reads
from prope.workdir.hashes import array_hashes, hash_on_host

FILES = "files.json"  # beside the items: {file: [bytes, CRC-32 of a small one]}
_SMALL = 2**16  # bytes; larger files hold arrays, which have hashes


class Damaged(UsageError):
    """A checkpoint is not what was saved; the text names the file or the array. All processes raise it, or none."""


def list_files(folder: epath.Path) -> None:
    """Writes a checkpoint's files.json."""
    files = {}
    for name, size in files_below(folder).items():
        if "/" in name and not name.endswith(
            "/commit_success.txt"
        ):  # of an item; Orbax writes those last
            files[name] = [
                size,
                zlib.crc32((folder / name).read_bytes()) if size <= _SMALL else None,
            ]
    (folder / FILES).write_text(json.dumps(files, indent=0))


def find_damage(folder: epath.Path) -> str | None:
    """Describes the first file of a checkpoint that differs from its files.json; None if none does."""
    if processes.count() > 1 and not folder.is_dir():  # the first process has listed it
        raise OSError(errno.ESTALE, "this host does not see it, process 0 does")
    try:
        listed = (folder / FILES).read_bytes()
    except FileNotFoundError:  # it was not saved to the end, or removed: arrays have their hashes
        return None
    found = files_below(folder)
    try:
        for name, (size, checksum) in json.loads(listed).items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]:,} bytes of {size:,}"
            if checksum is not None and zlib.crc32((folder / name).read_bytes()) != checksum:
                return f"{name} is not what was saved"
    except (AttributeError, TypeError, ValueError):
        return f"{FILES} is not what was saved"
    return None


class CheckpointReader:
    """Reads the items of a checkpoint; raises Damaged for what is missing, or is not what was saved.

    A read that fails otherwise is tried again, then raises RunFailed: the checkpoint is not to blame. `config` and
    `init_hash` are the run's, `data` its position in the data.
    """

    def __init__(self, folder: epath.Path):
        """Opens the checkpoint in this folder, and checks its files."""
        self._folder = absolute(folder)
        self._stores: dict[tuple, ts.TensorStore] = {}  # by item and key path
        with processes.raise_on_all(Damaged):
            if damage := retry_reads(self._folder, lambda: find_damage(self._folder)):
                raise Damaged(damage)
            saved, self.data = self._read_json("config"), self._read_json("data")
            try:
                self.config: ConfigDict = config_lib.from_dict(saved["config"])
                self.init_hash: str = saved["init_hash"]
                self._hashes: dict[str, dict[str, list[int]]] = saved["array_hashes"]
            except KeyError as error:
                raise Damaged(f"config/metadata has no {error}") from None

    def _read_json(self, item: str) -> dict:
        path = self._folder / item / "metadata"
        try:
            return json.loads(retry_reads(path, path.read_bytes))
        except FileNotFoundError:
            raise Damaged(f"{item} is missing") from None
        except ValueError as error:
            raise Damaged(f"{item}/metadata is not readable as JSON: {error}") from None

    def restore(self, **abstract) -> dict[str, Any]:
        """Reads whole items onto devices: by name, arrays with the shapes, dtypes and shardings of `abstract`."""

        def read_sharded(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            read = functools.partial(self._read, path[0].key, path[1:], leaf)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

        with processes.raise_on_all(Damaged):  # before all hash together
            items = jax.tree_util.tree_map_with_path(read_sharded, abstract)
        for name, tree in items.items():
            for path, found in array_hashes(tree).items():
                if self._hashes.get(name, {}).get(path) != found:
                    raise Damaged(f"{name}: {path} is not what was saved")
        return items

    @functools.cached_property
    def shapes(self) -> model.Params:
        """Shapes and dtypes of the parameters."""
        return jax.eval_shape(lambda: model.init(self.config.model, jax.random.key(0)))

    def read(self, path: tuple[str, ...], layer: int | None = None) -> np.ndarray | model.Params:
        """Reads the parameter at this path in the nested dictionary, or all below it, onto the host; or one layer."""
        below = functools.reduce(operator.getitem, path, self.shapes)

        def verified(keys, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            full_path = (*map(jax.tree_util.DictKey, path), *keys)
            array = self._read("params", full_path, leaf, slice(None) if layer is None else layer)
            hashes = self._hashes["params"][keystr(full_path)]
            saved = sum(hashes) % 2**32 if layer is None else hashes[layer]
            if hash_on_host(array, (layer or 0) * array.size) != saved:
                raise Damaged(f"params: {keystr(full_path)} is not what was saved")
            return array

        return jax.tree_util.tree_map_with_path(verified, below)

    def _read(self, item: str, path, leaf: jax.ShapeDtypeStruct, part=slice(None)) -> np.ndarray:
        """Reads a part of the array at a key path in an item; `leaf` has its shape and dtype."""
        return retry_reads(self._folder / item, lambda: self._read_once(item, path, leaf, part))

    def _read_once(self, item: str, path, leaf: jax.ShapeDtypeStruct, part) -> np.ndarray:
        try:
            if (item, path) not in self._stores:
                # Orbax stores an item as Zarr arrays, named by path, in one key-value store.
                base = f"{(self._folder / item).as_uri()}/"
                kvstore = {
                    "driver": "ocdbt",
                    "base": base,
                    "path": keystr(path, simple=True, separator=".") + "/",
                }
                spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
                store = ts.open(spec, open=True, read=True).result()
                if (store.shape, store.dtype.numpy_dtype) != (leaf.shape, leaf.dtype):
                    raise ValueError(f"it is {store.dtype.name}{list(store.shape)}, not {leaf}")
                self._stores[item, path] = store
            return self._stores[item, path][part].read().result()
        except (
            ValueError
        ) as error:  # TensorStore's, with the operating system's or a network's error as text
            failed = re.search(
                r"os_error_code='(\d+)'|^(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)", str(error)
            )
            if failed and failed[1] != str(errno.ENOENT):
                raise OSError(int(failed[1] or errno.EIO), first_line(error)) from error
            raise Damaged(f"{item}: {keystr(path)} cannot be read: {first_line(error)}") from error
