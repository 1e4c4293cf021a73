"""Where arrays live: the mesh, the mesh axes that shard each axis letter, and hashes that do not depend on them.

The mesh has three axes. `data` replicates the parameters: one replica per TPU slice or GPU node by default, because
only gradients pass between replicas. `fsdp` shards the parameters and the batch: a matrix is all-gathered when it is
used. `tensor` shards heads, hidden units and vocabulary. The model names axis letters, never mesh axes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_AXES = ("data", "fsdp", "tensor")
# Mesh axes of activations, and of parameters while they are used. Other letters are not sharded.
_MESH_AXES = {"B": ("data", "fsdp"), "N": ("tensor",), "K": ("tensor",), "F": ("tensor",), "V": ("tensor",)}
# Axes of a parameter, by a name in its path; the optimizer's moments have the same paths. C stacks key and value, or
# the two gates; L stacks layers. Neither is sharded, because loops run over them.
_PARAM_AXES = {
    "input_embedding": "VD", "q_einsum": "NDH", "kv_einsum": "CKDH", "attn_vec_einsum": "NHD",
    "gating_einsum": "CDF", "linear": "FD", "scale": "D",
}  # fmt: skip
_MIN_SHARD_SIZE = 2**16  # elements; smaller leaves are cheaper to replicate than to all-gather


def make_mesh(replicas: int | None = None, tensor: int = 1, devices: Sequence | None = None) -> Mesh:
    """Arranges the devices as (data=replicas, fsdp=the rest, tensor); by default one replica per slice or GPU node."""
    devices = jax.devices() if devices is None else list(devices)
    slices = num_slices(devices)
    replicas = slices if replicas is None else replicas
    shape = (replicas, len(devices) // (replicas * tensor), tensor)
    if slices > 1 and replicas % slices == 0:
        within = (replicas // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)
    elif slices > 1:  # replicas of several GPU nodes each
        grid = np.array(sorted(devices, key=lambda device: device.slice_index)).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * 3)


def num_slices(devices: Sequence) -> int:
    """Counts the TPU slices, or on GPUs the nodes: groups of devices that only a data-centre network joins."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def use(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Makes programs that are traced within this context shard over the mesh, by the rules of this file."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def num_shards(letter: str) -> int:
    """Counts the shards of an axis in use, on the mesh of the surrounding `use`; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _MESH_AXES.get(letter, ()))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as an activation with these axes, such as "BTNH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, axes, x.shape))


def constrain_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as a stored parameter with these axes is sharded, such as "NDH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _param_spec(mesh, axes, x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_param(x: jax.Array, axes: str) -> jax.Array:
    """All-gathers a stored parameter for use; its gradient is reduce-scattered, so it never exists whole."""
    return constrain(x, axes)


all_gather_param.defvjp(
    lambda x, axes: (constrain(constrain_like_param(x, axes), axes), None),
    lambda axes, _, cotangent: (constrain_like_param(cotangent, axes),),
)


def shard_mapped(function: Callable, axes: Sequence[str], results: Sequence[str] = ()) -> Callable:
    """Wraps a function of arrays with these axes in shard_map; by default the result is sharded as the first array.

    Results are named by their axes, from those of the arrays; one without B is a gradient from `sum_like_param`.
    """

    def run(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size <= 1:
            return function(*arrays)
        sizes = dict(pair for names, x in zip(axes, arrays, strict=True) for pair in zip(names, x.shape, strict=True))

        def spec(names, rule=_spec):
            return rule(mesh, names, [sizes[letter] for letter in names])

        specs = tuple(map(spec, axes))
        out_specs = tuple(spec(names, _spec if "B" in names else _param_spec) for names in results) or specs[0]
        return jax.shard_map(function, in_specs=specs, out_specs=out_specs, check_vma=False)(*arrays)

    return run


def shard_axes(letter: str) -> tuple[str, ...]:
    """Returns the mesh axes over which a shard-mapped function reduces an axis in use; none on one device."""
    return _MESH_AXES[letter] if num_shards(letter) > 1 else ()


def sum_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Sums a shard-mapped gradient over the batch's shards by a reduce-scatter, sharded as its parameter is stored."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    spec = _param_spec(mesh, axes, [size * num_shards(letter) for letter, size in zip(axes, x.shape, strict=True)])
    if "fsdp" not in spec:
        return jax.lax.psum(x, ("data", "fsdp"))
    return jax.lax.psum(jax.lax.psum_scatter(x, "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True), "data")


def embedding_lookup(table: jax.Array, tokens: jax.Array, finish: Callable = lambda rows: rows) -> jax.Array:
    """Computes finish(table[tokens]), `finish` elementwise, for a stored table [V, D] and tokens [B, T].

    Every device looks up its own columns for all tokens of its replica and exchanges them, so that neither the table
    nor its gradient ever exists whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or table.shape[-1] % mesh.shape["fsdp"] or tokens.shape[0] % num_shards("B"):
        return constrain(finish(table[tokens]), "BTD")
    tokens = jax.lax.with_sharding_constraint(tokens, PartitionSpec("data"))
    rows = jax.lax.with_sharding_constraint(finish(table[tokens]), PartitionSpec("data", None, "fsdp"))
    return constrain(rows, "BTD")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the rows of a batch [B, ...] over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(_MESH_AXES["B"]))


def rows_of_this_process(mesh: Mesh, batch_size: int) -> list[int]:
    """Lists the rows of a batch that this process's devices hold, in order."""
    slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (rows,) in slices for row in range(*rows.indices(batch_size))})


def global_batch(mesh: Mesh, rows: dict[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
    """Assembles the global batch from this process's rows of it."""
    make = functools.partial(jax.make_array_from_process_local_data, batch_sharding(mesh))
    return {name: make(value, (batch_size, *value.shape[1:])) for name, value in rows.items()}


def with_shardings(shapes, mesh: Mesh):
    """Adds the sharding of every leaf to a tree of `jax.ShapeDtypeStruct`."""
    struct, shardings = jax.ShapeDtypeStruct, state_shardings(shapes, mesh)
    return jax.tree.map(lambda leaf, s: struct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings)


def state_shardings(state, mesh: Mesh):
    """Chooses a sharding by its path for every leaf of parameters or optimizer state, arrays or shapes.

    Heads, hidden units and vocabulary are sharded over `tensor`, and the axis D over `fsdp`; where D does not divide,
    the longest other axis that does. Small leaves, and those with no axis that divides, are replicated.
    """

    def rule(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        axes = next((_PARAM_AXES[name] for name in names if name in _PARAM_AXES), None)
        if axes is None or leaf.size < _MIN_SHARD_SIZE:
            return NamedSharding(mesh, PartitionSpec())
        axes = "L" * ("layers" in names) + axes
        return NamedSharding(mesh, _param_spec(mesh, axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(rule, state)


def _param_spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of a stored parameter: that of an array in use, and one more axis over fsdp."""
    spec = list(_spec(mesh, axes, shape))
    free = [a for a, name in enumerate(spec) if (name is None or mesh.shape[name] == 1) and axes[a] not in "LC"]
    free = [a for a in free if shape[a] % mesh.shape["fsdp"] == 0]
    if free:
        spec[max(free, key=lambda a: (axes[a] == "D", shape[a]))] = "fsdp"
    return PartitionSpec(*spec)


def _spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of an array in use; an axis that its mesh axes do not divide is not sharded."""
    spec = []
    for letter, size in zip(axes, shape, strict=True):
        mesh_axes = _MESH_AXES.get(letter, ())
        divides = size % math.prod(mesh.shape[axis] for axis in mesh_axes) == 0
        spec.append((mesh_axes if len(mesh_axes) > 1 else mesh_axes[0]) if mesh_axes and divides else None)
    return PartitionSpec(*spec)


def hash_batch(batch: dict[str, jax.Array]) -> jax.Array:
    """Hashes a batch to uint32 []: runs that log equal hashes were trained on equal batches."""
    return hash_bits(jnp.stack([batch[name].astype(jnp.int32) for name in sorted(batch)], axis=-1))


def hash_bits(leaf: jax.Array, stacked: bool = False) -> jax.Array:
    """Hashes the bits of an array to uint32 [], by a sum over its elements; to [L], one per layer, if `stacked`."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    index = sum(  # of each element in the flattened array
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        for axis in range(leaf.ndim)
    )
    mixed = (bits ^ (bits >> 15)) * (index * np.uint32(2654435761) | 1)
    return jnp.sum(mixed ^ (mixed >> 13), axis=tuple(range(stacked, leaf.ndim)), dtype=jnp.uint32)
