"""Opens and writes the safetensors files of a checkpoint: one, or several shards and their index."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from prope.errors import UsageError
from prope.hf import gemma
from prope.workdir.run import check_disk

_MAX_SHARD = 2 * 10**9  # bytes; as much is in memory, since the library writes a file at once


class Stored(NamedTuple):
    """A tensor in a file."""

    file: epath.Path
    values: Any  # read from the file where it is indexed; has get_shape() and get_dtype()


def open_tensors(source: epath.Path) -> dict[str, Stored]:
    """Opens all tensors of the checkpoint in a directory, by name; raises UsageError where a file is not whole."""
    whole, index = source / gemma.WEIGHTS, source / gemma.INDEX
    if whole.is_file():
        return _open_file(whole)
    if not index.is_file():
        remedy = "other formats are not read: load them with transformers and call save_pretrained"
        raise UsageError(f"--input={source}: has neither {whole.name} nor {index.name}; {remedy}")
    shards = gemma.read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise UsageError(
            f"{index}: has no weight_map, which names every tensor's shard; download it again"
        )
    stored = {}
    for shard in sorted(set(map(str, shards.values()))):
        if not (source / shard).is_file():
            raise UsageError(
                f"{index}: names the shard {shard}, which is not there; download it too"
            )
        tensors = _open_file(source / shard)
        named = {name for name, file in shards.items() if file == shard}
        if tensors.keys() != named:
            others = (
                f"{index.name} says that its tensors are others: {some(tensors.keys() ^ named)}"
            )
            raise UsageError(f"{source / shard}: {others}; download both again")
        stored |= tensors
    return stored


def _open_file(path: epath.Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: not a whole safetensors file ({error}); download it again"
        ) from None
    return {name: Stored(path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def write_tensors(
    folder: epath.Path, tensors: list[gemma.Tensor], read: Callable[..., np.ndarray], dtype: str
) -> None:
    """Writes model.safetensors, or, if it would be larger than 2 GB, shards and their index.

    `read(path, layer)` returns the parameter with a path, or one layer of it, and is called in the order of `tensors`.
    Raises UsageError where the disk has no room for them.
    """
    shards: list[list[gemma.Tensor]] = [[]]
    sizes = {tensor.name: math.prod(tensor.shape) * jnp.dtype(dtype).itemsize for tensor in tensors}
    for tensor in tensors:
        if (
            shards[-1]
            and sum(sizes[other.name] for other in shards[-1]) + sizes[tensor.name] > _MAX_SHARD
        ):
            shards.append([])
        shards[-1].append(tensor)
    total = sum(sizes.values())
    check_disk(folder, total, "the tensors need", "output")
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = (
            gemma.WEIGHTS
            if len(shards) == 1
            else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        values = {
            tensor.name: tensor.read(read(tensor.path, tensor.layer), jnp.dtype(dtype))
            for tensor in shard
        }
        save_file(values, folder / file, {"format": "pt"})  # transformers requires this entry
        del values  # before the next shard is read
        weight_map |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / gemma.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def some(names: Iterable[str]) -> str:
    """Returns the first three names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
