"""Hashes of arrays, equal on devices and on the host and for any sharding; hashes of JSON."""

import hashlib
import json

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from prope.sharding import hash_bits

_MULTIPLIER = 2654435761  # in `hash_bits` an element's index times this is its factor
_BLOCK = 2**16  # elements hashed at a time on the host: they stay in the processor's cache


def hash_arrays(tree) -> str:
    """Hashes a tree of arrays of 16 or 32 bits to 16 hex digits, whatever their sharding."""
    sums = [f"{path}={sum(layers) % 2**32}" for path, layers in array_hashes(tree).items()]
    return _digest(" ".join(sums))


def array_hashes(tree) -> dict[str, list[int]]:
    """Hashes the arrays of a tree, by path; each layer of those below "layers" by itself.

    The devices compute the hashes and send 4 bytes per array or layer to the host.
    """
    leaves = tree_leaves_with_path(_hash_leaves(tree))
    return {keystr(path): np.atleast_1d(hashes).tolist() for path, hashes in leaves}


def array_shapes(tree) -> dict[str, str]:
    """Describes the arrays of a tree, or their shapes, by path: {"['a']['b']": "float32[9, 4]"}."""
    return {
        keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in tree_leaves_with_path(tree)
    }


def hash_on_host(array: np.ndarray, first: int = 0) -> int:
    """Computes `hash_bits` of a NumPy array.

    The array may be a chunk that begins at element `first`: chunks add up modulo 2**32.
    """
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.itemsize}")
    places = np.arange(min(_BLOCK, bits.size), dtype=np.uint32)
    factors = places * np.uint32(_MULTIPLIER)
    total = 0
    for start in range(0, bits.size, _BLOCK):
        mixed = bits[start : start + _BLOCK].astype(np.uint32)
        offset = np.uint32((first + start) * _MULTIPLIER % 2**32)
        mixed ^= mixed >> 15
        mixed *= (factors[: mixed.size] + offset) | 1
        mixed ^= mixed >> 13
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**32


def hash_json(value) -> str:
    """Hashes a value of JSON's types to 16 hex digits; tuples count as lists."""
    return _digest(json.dumps(value, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@jax.jit
def _hash_leaves(tree):
    def hash_leaf(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        return hash_bits(leaf, "layers" in names)

    return tree_map_with_path(hash_leaf, tree)
