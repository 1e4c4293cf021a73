"""Where arrays live: the mesh, and which of its axes each axis letter may be split over; hashes that ignore the layout.

The mesh has three axes. `data` holds replicas of the parameters: one per slice, where there are several, because
only gradients pass between replicas. `fsdp` splits the parameters and the batch: a matrix is gathered when it is
used. `tensor` splits heads, hidden units and vocabulary. The model names axis letters, never mesh axes.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_AXES = ("data", "fsdp", "tensor")
# Of activations, and of parameters while they are used. A letter that is not here is never split.
_IN_USE = {"B": ("data", "fsdp"), "N": ("tensor",), "K": ("tensor",), "F": ("tensor",), "V": ("tensor",)}
# The axes of a parameter, by a name in its path; the optimizer's moments have the same paths. C counts what is
# stored side by side (key and value; the two gates), L layers; neither is ever split, since loops run over them.
_PARAMETERS = {
    "input_embedding": "VD", "q_einsum": "NDH", "kv_einsum": "CKDH", "attn_vec_einsum": "NHD",
    "gating_einsum": "CDF", "linear": "FD", "scale": "D",
}  # fmt: skip
_MIN_SHARD_SIZE = 2**16  # elements: below this a leaf is cheaper to keep everywhere than to gather


def make_mesh(replicas: int | None = None, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """All devices as (data=replicas, fsdp=the rest, tensor); by default one replica per slice."""
    devices = jax.devices() if devices is None else list(devices)
    slices = num_slices(devices)
    replicas = slices if replicas is None else replicas
    shape = (replicas, len(devices) // (replicas * tensor), tensor)
    if slices > 1:
        within = (replicas // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * 3)


def num_slices(devices: Sequence) -> int:
    """How many slices the devices are spread over: groups that only a data-centre network joins."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def use(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Within it, what is traced is split as the rules of this file say, over this mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def num_shards(letter: str) -> int:
    """How many parts an axis is split into, in use, on the mesh of the surrounding `use`; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else int(np.prod([mesh.shape[axis] for axis in _IN_USE.get(letter, ())]))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """x, an activation, split as its axes are in use, such as "BTNH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, axes, x.shape))


def constrain_like_param(x: jax.Array, axes: str) -> jax.Array:
    """x, split as a parameter with these axes is stored, such as "NDH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _stored(mesh, axes, x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_param(x: jax.Array, axes: str) -> jax.Array:
    """A stored parameter, gathered to be used; its gradient is summed and scattered in one go, never held whole."""
    return constrain(x, axes)


all_gather_param.defvjp(
    lambda x, axes: (constrain(constrain_like_param(x, axes), axes), None),
    lambda axes, _, pull: (constrain_like_param(pull, axes),),
)


def shard_mapped(function: Callable, axes: Sequence[str]) -> Callable:
    """`function` of arrays with these axes, run by every device on its own part; the result is split as the first."""

    def run(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return function(*arrays)
        specs = tuple(_spec(mesh, names, x.shape) for names, x in zip(axes, arrays, strict=True))
        return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)

    return run


def embedding_lookup(table: jax.Array, tokens: jax.Array, finish: Callable = lambda rows: rows) -> jax.Array:
    """finish(table[tokens]) for a stored table [V, D], its columns over fsdp, and tokens [B, T]; elementwise `finish`.

    Every device looks up its own columns for all the tokens of its replica, and these are exchanged: the table,
    and in the backward pass its gradient, never exist whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or table.shape[-1] % mesh.shape["fsdp"] or tokens.shape[0] % num_shards("B"):
        return constrain(finish(table[tokens]), "BTD")
    tokens = jax.lax.with_sharding_constraint(tokens, PartitionSpec("data"))
    rows = jax.lax.with_sharding_constraint(finish(table[tokens]), PartitionSpec("data", None, "fsdp"))
    return constrain(rows, "BTD")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch [B, ...] over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(_IN_USE["B"]))


def rows_of_this_process(mesh: Mesh, batch_size: int) -> list[int]:
    """The rows of a batch that this process's devices hold, in order."""
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (part,) in slices for row in range(*part.indices(batch_size))})


def global_batch(mesh: Mesh, rows: dict[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
    """The batch of all processes, from this process's rows of it."""
    place = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(place, value, (batch_size, *value.shape[1:]))
        for name, value in rows.items()
    }


def with_shardings(shapes, mesh: Mesh):
    """The tree of `jax.ShapeDtypeStruct` with the sharding that each leaf shall have."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        state_shardings(shapes, mesh),
    )


def state_shardings(state, mesh: Mesh):
    """A sharding for every leaf of a tree of parameters or optimizer state, of arrays or shapes, by its path.

    Heads, hidden units and vocabulary are split over `tensor`, then the axis D over `fsdp`; where D does not divide,
    the longest other axis that does. What divides by nothing is kept whole by every device, and so is what is small.
    """

    def rule(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        axes = next((_PARAMETERS[name] for name in names if name in _PARAMETERS), None)
        if axes is None or leaf.size < _MIN_SHARD_SIZE:
            return NamedSharding(mesh, PartitionSpec())
        axes = "L" * ("layers" in names) + axes
        return NamedSharding(mesh, _stored(mesh, axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(rule, state)


def _stored(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """How a parameter that no computation is using is split: as in use, and one more axis over fsdp."""
    spec = list(_spec(mesh, axes, shape))
    free = [a for a, part in enumerate(spec) if (part is None or mesh.shape[part] == 1) and axes[a] not in "LC"]
    free = [a for a in free if shape[a] % mesh.shape["fsdp"] == 0]
    if free:
        spec[max(free, key=lambda a: (axes[a] == "D", shape[a]))] = "fsdp"
    return PartitionSpec(*spec)


def _spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """How an array in use is split: an axis that its mesh axes do not divide is not."""
    parts = []
    for letter, size in zip(axes, shape, strict=True):
        over = _IN_USE.get(letter, ())
        divides = size % int(np.prod([mesh.shape[axis] for axis in over])) == 0
        parts.append((over if len(over) > 1 else over[0]) if over and divides else None)
    return PartitionSpec(*parts)


def hash_arrays(tree) -> str:
    """A hash of a tree of arrays of 16 or 32 bits, 16 hex digits; independent of how they are sharded."""
    return combine_hashes(array_hashes(tree))


def array_hashes(tree) -> dict[str, list[int]]:
    """Hashes of the arrays of a tree by path; of those below "layers", which are stacked, one hash per layer.

    They are computed on the devices, which send 4 bytes per array or layer.
    """
    leaves = jax.tree_util.tree_leaves_with_path(_hash_leaves(tree))
    return {jax.tree_util.keystr(path): np.atleast_1d(hashes).tolist() for path, hashes in leaves}


def combine_hashes(hashes: dict[str, list[int]]) -> str:
    """`hash_arrays` of a tree from its `array_hashes`."""
    text = " ".join(f"{path}={sum(layers) % 2**32}" for path, layers in hashes.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_batch(batch: dict[str, jax.Array]) -> jax.Array:
    """What a batch was, uint32 []: two runs that log the same were trained on the same."""
    return hash_bits(jnp.stack([batch[name].astype(jnp.int32) for name in sorted(batch)], axis=-1))


def hash_bits(leaf: jax.Array, stacked: bool = False) -> jax.Array:
    """A hash of the bits of an array, uint32 []: a sum over its elements. If `stacked`, one per layer: uint32 [L]."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = sum(
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        for axis in range(leaf.ndim)
    )
    mixed = (bits ^ (bits >> 15)) * (place * np.uint32(2654435761) | 1)
    return jnp.sum(mixed ^ (mixed >> 13), axis=tuple(range(stacked, leaf.ndim)), dtype=jnp.uint32)


def hash_on_host(array: np.ndarray, first: int = 0) -> int:
    """`hash_bits` of a NumPy array, or of a part of one that starts at element `first`; parts add up modulo 2**32."""
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
