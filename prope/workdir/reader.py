"""Reads one checkpoint and verifies what it returns: sizes and checksums of files, hashes of arrays.

A checkpoint is a folder W/checkpoints/N with one folder per Orbax item. Its `config` item holds, beside the run's
config, a hash of every array, one per layer where layers are stacked: reading a layer verifies it. Older checkpoints
hold one hash of all parameters, or, if imported, their SHA-256 as init_hash: then all are read once to verify any.
"""

import functools
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from ml_collections import ConfigDict

from prope import config as config_lib
from prope import model
from prope.errors import UsageError
from prope.workdir.hashes import array_hashes, combine_hashes, hash_on_host

_FILES = "files.json"  # beside the items: the size of every file, and the CRC-32 of small ones
_SMALL = 2**16  # bytes; larger files hold arrays, which have hashes


class Damaged(UsageError):
    """A checkpoint cannot be read, or is not what was saved; the text names the file or the array."""


def list_files(folder: pathlib.Path) -> None:
    """Writes a checkpoint's files.json."""
    files = {}
    for path in sorted(folder.glob("*/**/*")):
        if path.is_file() and path.name != "commit_success.txt":  # Orbax writes that one last
            size = path.stat().st_size
            checksum = zlib.crc32(path.read_bytes()) if size <= _SMALL else None
            files[str(path.relative_to(folder))] = {"bytes": size, "crc32": checksum}
    (folder / _FILES).write_text(json.dumps(files, indent=0))


def find_damage(folder: pathlib.Path) -> str | None:
    """Describes the first file of a checkpoint that differs from its files.json; None if none does."""
    if not (folder / _FILES).is_file():  # of a checkpoint older than these lists
        return None
    try:
        listed = json.loads((folder / _FILES).read_bytes())
    except ValueError:
        return f"{_FILES} is not readable as JSON"
    for name, saved in listed.items():
        path = folder / name
        saved = saved if isinstance(saved, dict) else {"bytes": saved, "crc32": None}  # older lists have sizes only
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != saved["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes of {saved['bytes']:,}"
        if saved["crc32"] is not None and zlib.crc32(path.read_bytes()) != saved["crc32"]:
            return f"{name} is not what was saved"
    return None


class CheckpointReader:
    """Reads the items of a checkpoint; raises Damaged for what cannot be read, or is not what was saved.

    Attributes:
      config, init_hash: of the run.
    """

    def __init__(self, folder: pathlib.Path):
        """Opens the checkpoint in this folder, whose files `find_damage` has checked."""
        self._folder = folder.absolute()
        self._verified = False  # of an older checkpoint
        self._stores: dict[tuple[str, ...], ts.TensorStore] = {}
        self._saved = self.read_json("config")
        self.config: ConfigDict = config_lib.from_dict(self._saved["config"])
        self.init_hash: str = self._saved["init_hash"]

    def read_json(self, item: str) -> dict:
        """Reads a JSON item."""
        try:
            return json.loads((self._folder / item / "metadata").read_bytes())
        except FileNotFoundError:
            raise Damaged(f"{item} is missing") from None
        except ValueError as error:
            raise Damaged(f"{item}/metadata is not readable as JSON: {error}") from None

    def restore(self, **abstract) -> dict[str, Any]:
        """Reads whole items onto devices: by name, arrays with the shapes, dtypes and shardings of `abstract`."""
        items = {}
        for name, like in abstract.items():
            if not (self._folder / name).is_dir():
                raise Damaged(f"{name} is missing")
            try:
                with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                    items[name] = checkpointer.restore(self._folder / name, args=ocp.args.StandardRestore(like))
            except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
                raise  # the checkpoint is not to blame
            except Exception as error:  # of many types, by which file it was
                raise Damaged(f"{name}: {type(error).__name__}: {first_line(error)}") from error
            hashes = array_hashes(items[name])
            for path, layers in self._saved.get("array_hashes", {}).get(name, {}).items():
                if hashes.get(path) != layers:
                    raise Damaged(f"{name}: {path} is not what was saved")
            combined = self._saved.get("hashes", {}).get(name)
            if combined not in (None, combine_hashes(hashes)):
                raise Damaged(f"{name} is not what was saved")
            if combined is None and name == "params":
                self._verify_together()
        return items

    @functools.cached_property
    def shapes(self) -> model.Params:
        """Shapes and dtypes of the parameters."""
        return jax.eval_shape(lambda: model.init(self.config.model, jax.random.key(0)))

    def read_layer(self, path: tuple[str, ...], layer: int) -> np.ndarray:
        """Reads one layer of a parameter [L, ...]."""
        array = self._read(path, layer)
        self._check(path, layer, hash_on_host(array, layer * array.size))
        return array

    def read_rows(self, path: tuple[str, ...], rows: np.ndarray | None = None) -> np.ndarray:
        """Reads a parameter, or only some of its rows; to verify these, all are read, a chunk at a time."""
        store = self._open(path)
        rows = np.arange(store.shape[0]) if rows is None else rows
        result, total = np.empty((len(rows), *store.shape[1:]), store.dtype.numpy_dtype), 0
        for start, chunk in self._read_chunks(path):
            total += hash_on_host(chunk, start * chunk[0].size)
            wanted = (rows >= start) & (rows < start + len(chunk))
            result[wanted] = chunk[rows[wanted] - start]
        self._check(path, 0, total % 2**32)
        return result

    def _check(self, path: tuple[str, ...], layer: int, found: int) -> None:
        hashes = self._saved.get("array_hashes", {}).get("params")
        if hashes is None:
            self._verify_together()
        elif hashes[_path_text(path)][layer] != found:
            raise Damaged(f"params: {_path_text(path)} is not what was saved")

    def _verify_together(self) -> None:
        """Checks all parameters against the one hash of an older checkpoint, a chunk at a time; once."""
        combined = self._saved.get("hashes", {}).get("params")
        if self._verified or (combined is None and "imported_from" not in self.read_json("data")):
            return  # or nothing was saved to check them against
        hashes, digest = {}, hashlib.sha256()
        for path, _ in jax.tree_util.tree_leaves_with_path(self.shapes):
            names, total = tuple(key.key for key in path), 0
            for start, chunk in self._read_chunks(names):
                if combined is None:
                    digest.update(np.ascontiguousarray(chunk).view(np.uint8))
                else:
                    total += hash_on_host(chunk, start * chunk[0].size)
            hashes[_path_text(names)] = [total]
        expected, found = combined, combine_hashes(hashes)
        if combined is None:
            expected, found = self._saved["init_hash"], digest.hexdigest()[:16]
        if found != expected:
            raise Damaged("params is not what was saved")
        self._verified = True

    def _read_chunks(self, path: tuple[str, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) of a parameter, as many rows at a time as were written together."""
        store = self._open(path)
        rows = store.chunk_layout.read_chunk.shape[0]
        for start in range(0, store.shape[0], rows):
            yield start, self._read(path, slice(start, min(start + rows, store.shape[0])))

    def _read(self, path: tuple[str, ...], rows: int | slice) -> np.ndarray:
        try:
            return self._open(path)[rows].read().result()
        except ValueError as error:
            raise Damaged(f"params: {_path_text(path)} cannot be read: {first_line(error)}") from error

    def _open(self, path: tuple[str, ...]) -> ts.TensorStore:
        # Orbax stores an item as Zarr arrays, named by path, in one key-value store.
        if path not in self._stores:
            base = {"driver": "ocdbt", "base": f"{(self._folder / 'params').as_uri()}/"}
            kvstore = base | {"path": ".".join(path) + "/"}
            spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
            expected = functools.reduce(lambda tree, name: tree[name], path, self.shapes)
            try:
                store = ts.open(spec, open=True, read=True).result()
            except ValueError as error:
                raise Damaged(f"params: {_path_text(path)} cannot be read: {first_line(error)}") from error
            if (store.shape, store.dtype.numpy_dtype) != (expected.shape, expected.dtype):
                raise Damaged(f"params: {_path_text(path)} is {store.dtype.name}{store.shape}, not {expected}")
            self._stores[path] = store
        return self._stores[path]


def _path_text(path: tuple[str, ...]) -> str:
    return "".join(f"[{name!r}]" for name in path)  # as jax.tree_util.keystr


def first_line(error: Exception) -> str:
    """The first line of an error's text, shortened."""
    return (str(error).strip().splitlines() or [""])[0][:200]
