"""Hashes of arrays by their bits: the same however these are spread over devices and processes."""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np


def hash_arrays(tree) -> str:
    """A hash of a tree of arrays of 16 or 32 bits, 16 hex digits; made on the devices, which send 4 bytes an array."""
    leaves = jax.tree_util.tree_leaves_with_path(_hash_leaves(tree))
    text = " ".join(f"{jax.tree_util.keystr(path)}={int(value)}" for path, value in leaves)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_batch(batch: dict[str, jax.Array]) -> jax.Array:
    """What a batch was, uint32 []: two runs that log the same were trained on the same."""
    return hash_bits(jnp.stack([batch[name].astype(jnp.int32) for name in sorted(batch)], axis=-1))


def hash_bits(leaf: jax.Array) -> jax.Array:
    """A hash of the bits of an array, uint32 []: a sum of integers, the same in any order."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = sum(
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        for axis in range(leaf.ndim)
    )
    mixed = (bits ^ (bits >> 15)) * (place * np.uint32(2654435761) | 1)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


@jax.jit
def _hash_leaves(tree):
    return jax.tree.map(hash_bits, tree)
