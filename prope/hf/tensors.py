"""Opens and writes the safetensors files of a checkpoint: one, or shards and their index."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from prope.errors import UsageError, usage_error
from prope.hf import config_json
from prope.hf.layout import HEAD, INDEX, WEIGHTS, Tensor
from prope.runtime import watchdog
from prope.workdir.run import check_disk

_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model|language_model|model)\.")
_NOT_TEXT = {
    *("vision_tower", "audio_tower", "multi_modal_projector"),
    *("embed_vision", "embed_audio", "vision_embedder"),
}
_MAX_SHARD = 2 * 10**9  # bytes; as much is in memory, since the library writes a file at once


class Stored(NamedTuple):
    """A tensor in a file."""

    file: epath.Path
    name: str  # there
    values: Any  # read from the file where it is indexed; has get_shape() and get_dtype()


def open_tensors(source: epath.Path) -> dict[str, Stored]:
    """Opens all tensors of the checkpoint in a directory, by the names that transformers uses.

    As there, buffers of frequencies are left out, and those of a model without a head lack their
    prefix. So are the parts of a model that read images and sounds. Raises UsageError where a file
    is not whole.
    """
    tensors = {}
    for name, tensor in _open_all(source).items():
        if name.endswith("rotary_emb.inv_freq") or _NOT_TEXT & set(name.split(".")):
            continue
        bare = _PREFIX.sub("", name)
        known = bare if bare == HEAD else f"model.{bare}"
        if known in tensors:
            raise UsageError(f"{tensor.file}: {name} is there twice; remove one")
        tensors[known] = tensor
    return tensors


def _open_all(source: epath.Path) -> dict[str, Stored]:
    if (source / WEIGHTS).is_file():
        return _open_file(source / WEIGHTS)
    index = source / INDEX
    if not index.is_file():
        problem = f"has neither {WEIGHTS} nor {INDEX}"
        remedy = "other formats are not read: load them with transformers and call save_pretrained"
        raise usage_error("--input", source, problem, remedy)
    weight_map = config_json.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        problem = "has no weight_map, which names every tensor's shard"
        raise UsageError(f"{index}: {problem}; download it again")
    stored = {}
    # A tied head may be named and not saved.
    shards = {
        str(file)
        for name, file in weight_map.items()
        if name != HEAD or (source / str(file)).is_file()
    }
    for shard in sorted(shards):
        if not (source / shard).is_file():
            problem = f"names the shard {shard}, which is not there"
            raise UsageError(f"{index}: {problem}; download it too")
        stored |= _open_file(source / shard)
    return stored


def _open_file(path: epath.Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        problem = f"not a whole safetensors file ({error})"
        raise UsageError(f"{path}: {problem}; download it again") from None
    return {name: Stored(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def write_tensors(
    folder: epath.Path, tensors: list[Tensor], read: Callable[..., np.ndarray], dtype: str
) -> None:
    """Writes model.safetensors, or, if it would be larger than 2 GB, shards and their index.

    `read(path, layer)` returns the parameter with a path, or one layer of it, and is called in the
    order of `tensors`. Raises UsageError where the disk has no room for them.
    """
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {tensor.name: math.prod(tensor.shape) * itemsize for tensor in tensors}
    total = sum(sizes.values())
    check_disk(folder, total, "the tensors need", "output")
    shards = _cut_shards(tensors, sizes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else WEIGHTS
        values = {}
        for tensor in shard:
            watchdog.alive(f"the tensors before {tensor.name}")
            values[tensor.name] = tensor.read(read(tensor.path, tensor.layer), jnp.dtype(dtype))
            weight_map[tensor.name] = file
        save_file(values, folder / file, {"format": "pt"})  # transformers requires this entry
        # For all whom the umask lets read the folder; the library makes it the owner's alone.
        os.chmod(folder / file, os.stat(folder).st_mode & 0o666)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _cut_shards(tensors: list[Tensor], sizes: dict[str, int]) -> list[list[Tensor]]:
    """Cuts a list of tensors so that those of a shard fit into its size."""
    shards = [[]]
    shard_size = 0
    for tensor in tensors:
        size = sizes[tensor.name]
        if shards[-1] and shard_size + size > _MAX_SHARD:
            shards.append([])
            shard_size = 0
        shards[-1].append(tensor)
        shard_size += size
    return shards


def check_found(
    source: epath.Path,
    found: dict[str, tuple[tuple[int, ...], str]],
    shapes: dict[str, tuple[int, ...]],
    dtypes: tuple[str, ...],
    remedy: str,
) -> None:
    """Raises UsageError where the shapes and dtypes that were found are not those of a model."""
    differing = []
    for name in found.keys() & shapes.keys():
        shape, dtype = found[name]
        if shape != shapes[name]:
            differing.append(f"{name} has shape {shape}, not {shapes[name]}")
        if dtype not in dtypes:
            differing.append(f"{name} has dtype {dtype}, not one of {' '.join(dtypes)}")
    problems = {
        "missing tensors: ": shapes.keys() - found.keys(),
        "unknown tensors: ": found.keys() - shapes.keys(),
        "": differing,
    }
    if any(problems.values()):
        texts = (f"{what}{some(names)}" for what, names in problems.items() if names)
        raise usage_error("--input", source, "; ".join(texts), remedy)


def some(names: Iterable[str]) -> str:
    """Returns the first three names, and how many more there are."""
    names = sorted(names)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
