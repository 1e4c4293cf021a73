"""Hashes of arrays, equal on devices and on the host and for any sharding."""

import hashlib

import jax
import numpy as np

from prope.sharding import hash_bits


def hash_arrays(tree) -> str:
    """Hashes a tree of arrays of 16 or 32 bits to 16 hex digits, whatever their sharding."""
    text = " ".join(f"{path}={sum(layers) % 2**32}" for path, layers in array_hashes(tree).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def array_hashes(tree) -> dict[str, list[int]]:
    """Hashes the arrays of a tree, by path; each layer of those below "layers" by itself.

    The devices compute the hashes and send 4 bytes per array or layer to the host.
    """
    leaves = jax.tree_util.tree_leaves_with_path(_hash_leaves(tree))
    return {jax.tree_util.keystr(path): np.atleast_1d(hashes).tolist() for path, hashes in leaves}


def hash_on_host(array: np.ndarray, first: int = 0) -> int:
    """Computes `hash_bits` of a NumPy array, or of a chunk from element `first` on; chunks add up modulo 2**32."""
    bits, total = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.itemsize}"), 0
    odd, size = 2654435761, 2**16  # elements at a time: they stay in the processor's cache
    places = np.arange(min(size, bits.size), dtype=np.uint32) * np.uint32(odd)
    for start in range(0, bits.size, size):
        mixed = bits[start : start + size].astype(np.uint32)
        mixed ^= mixed >> 15
        mixed *= (places[: mixed.size] + np.uint32((first + start) * odd % 2**32)) | 1
        mixed ^= mixed >> 13
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**32


@jax.jit
def _hash_leaves(tree):
    stacked = lambda path: any(getattr(key, "key", None) == "layers" for key in path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, leaf: hash_bits(leaf, stacked(path)), tree)
