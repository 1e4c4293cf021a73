"""safetensors files: what is in a checkpoint's, and how one is written, a tensor at a time.

The library reads them; it is not needed to write. A file is the length of a JSON header in 8 bytes, the header, and
the bytes of the tensors.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from prope.errors import UsageError
from prope.hf import gemma as gemma_hf

_NAMES = {"float32": "F32", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor is, and what its file's header says of it."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str


def find_tensors(source: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint, by name, from the files' headers.

    Raises:
      UsageError: there is no safetensors file, a shard is missing, or a file is not whole.
    """
    whole, index = source / gemma_hf.WEIGHTS, source / gemma_hf.INDEX
    if whole.is_file():
        return _header(whole)
    if not index.is_file():
        raise UsageError(
            f"--input={source}: has neither {whole.name} nor {index.name}; other formats are not read: load them with "
            "transformers and call save_pretrained"
        )
    shards = gemma_hf.read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise UsageError(f"{index}: has no weight_map, which names every tensor's shard; download it again")
    found: dict[str, Stored] = {}
    for shard in sorted(set(map(str, shards.values()))):
        if not (source / shard).is_file():
            raise UsageError(f"{index}: names the shard {shard}, which is not there; download it too")
        header = _header(source / shard)
        named = {name for name, file in shards.items() if file == shard}
        if header.keys() != named:
            raise UsageError(
                f"{source / shard}: {index.name} says that its tensors are others: {some(header.keys() ^ named)}; "
                "download both again"
            )
        found |= header
    return found


def write_tensors(
    path: pathlib.Path,
    tensors: list[gemma_hf.Tensor],
    read_parameter: Callable[[tuple[str, ...]], np.ndarray],
    dtype: str,
) -> None:
    """Writes the tensors in `dtype`, with the bytes of the library's own writer, which needs all of them at once.

    Args:
      path: of the file.
      tensors: in the file's order.
      read_parameter: gives the parameter with a path; it is called once for each, and let go before the next.
      dtype: float32 or bfloat16.

    Raises:
      UsageError: the disk has no room for them.
    """
    kind = jnp.dtype(dtype)
    header: dict = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for tensor in tensors:
        start, end = end, end + math.prod(tensor.shape) * kind.itemsize
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if (free := shutil.disk_usage(path.parent).free) < end:
        raise UsageError(
            f"{path.parent}: the disk is full: the tensors need {end / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; "
            "free some space and run the same command again, or choose another --output"
        )

    def write_from(parameter: np.ndarray, parts: list[gemma_hf.Tensor]) -> None:
        for tensor in parts:
            file.seek(8 + len(text) + header[tensor.name]["data_offsets"][0])
            file.write(tensor.read(parameter, kind).view(np.uint8))

    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for source in dict.fromkeys(tensor.path for tensor in tensors):
            write_from(read_parameter(source), [tensor for tensor in tensors if tensor.path == source])


def open_tensors(path: pathlib.Path):
    """The safetensors file, as its library opens it.

    Raises:
      UsageError: the library is not there, or the file is not whole.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError("safetensors is not installed, and is needed to import: pip install 'prope[hf]'") from None
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a whole safetensors file ({error}); download it again") from None


def _header(path: pathlib.Path) -> dict[str, Stored]:
    with open_tensors(path) as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: Stored(path, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def some(names: Iterable[str]) -> str:
    """The first of many names, and how many more there are."""
    first = sorted(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")
