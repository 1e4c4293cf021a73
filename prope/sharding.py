"""Where arrays live: the mesh, the mesh axes that shard each axis letter, and hashes that do not depend on them.

The mesh has four axes. `data` replicates the parameters: one replica per TPU slice or GPU node by default, because
only gradients pass between replicas. `fsdp` shards the parameters and the batch: a matrix is all-gathered when it is
used. `context` splits every sequence into C parts, and shards the parameters too. `tensor` shards heads, hidden units
and vocabulary. The model names axis letters, never mesh axes.

Context parallelism: with C parts a batch of B sequences of T tokens has B C rows of T / C tokens. Part i of a sequence
is its chunks i and 2C-1-i of 2C, so that all parts have as much causal attention to compute. Positions, targets and
weights are split alike. All layers but attention work on rows; attention all-gathers the keys and values of a sequence.
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

_AXES = ("data", "fsdp", "context", "tensor")
_FSDP = ("fsdp", "context")  # mesh axes over which a replica shards its parameters
# Mesh axes of activations, and of parameters while they are used. Other letters are not sharded.
_MESH_AXES = {
    "B": ("data", *_FSDP),
    "N": ("tensor",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
}
# Axes of a parameter, by a name in its path; the optimizer's moments have the same paths. C stacks key and value, or
# the two gates; L stacks layers. Neither is sharded, because loops run over them.
_PARAM_AXES = {
    "input_embedding": "VD",
    "q_einsum": "NDH",
    "kv_einsum": "CKDH",
    "attn_vec_einsum": "NHD",
    "gating_einsum": "CDF",
    "linear": "FD",
    "scale": "D",
}
_MIN_SHARD_SIZE = 2**16  # elements; smaller leaves are cheaper to replicate than to all-gather


def make_mesh(
    replicas: int | None = None, tensor: int = 1, devices: Sequence | None = None, context: int = 1
) -> Mesh:
    """Arranges the devices as (data=replicas, fsdp=the rest, context, tensor); by default a replica a slice or node."""
    devices = jax.devices() if devices is None else list(devices)
    slices = num_slices(devices)
    replicas = slices if replicas is None else replicas
    shape = (replicas, len(devices) // (replicas * context * tensor), context, tensor)
    if slices > 1 and replicas % slices == 0:
        within = (replicas // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(
            within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
        )
    elif slices > 1:  # replicas of several GPU nodes each
        grid = np.array(sorted(devices, key=lambda device: device.slice_index)).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * 4)


def num_slices(devices: Sequence) -> int:
    """Counts the TPU slices, or on GPUs the nodes: groups of devices that only a data-centre network joins."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def use(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Makes programs that are traced within this context shard over the mesh, by the rules of this file."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def num_shards(letter: str) -> int:
    """Counts the shards of an axis in use, on the mesh of the surrounding `use`; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else _size(mesh, _MESH_AXES.get(letter, ()))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as an activation with these axes, such as "BTNH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, axes, x.shape))


def constrain_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as a stored parameter with these axes is sharded, such as "NDH"."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        x if mesh.empty else jax.lax.with_sharding_constraint(x, _param_spec(mesh, axes, x.shape))
    )


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
        sizes = dict(
            pair
            for names, x in zip(axes, arrays, strict=True)
            for pair in zip(names, x.shape, strict=True)
        )

        def spec(names, rule=_spec):
            return rule(mesh, names, [sizes[letter] for letter in names])

        specs = tuple(map(spec, axes))
        out_specs = (
            tuple(spec(names, _spec if "B" in names else _param_spec) for names in results)
            or specs[0]
        )
        return jax.shard_map(function, in_specs=specs, out_specs=out_specs, check_vma=False)(
            *arrays
        )

    return run


def shard_axes(letter: str) -> tuple[str, ...]:
    """Returns the mesh axes over which a shard-mapped function reduces an axis in use; none on one device."""
    return _MESH_AXES[letter] if num_shards(letter) > 1 else ()


def sum_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Sums a shard-mapped gradient over the batch's shards by a reduce-scatter, sharded as its parameter is stored."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    spec = _param_spec(
        mesh, axes, [size * num_shards(letter) for letter, size in zip(axes, x.shape, strict=True)]
    )
    if _FSDP not in spec:
        return jax.lax.psum(x, _MESH_AXES["B"])
    return jax.lax.psum(
        jax.lax.psum_scatter(x, _FSDP, scatter_dimension=spec.index(_FSDP), tiled=True), "data"
    )


def embedding_lookup(
    table: jax.Array, tokens: jax.Array, finish: Callable = lambda rows: rows
) -> jax.Array:
    """Computes finish(table[tokens]), `finish` elementwise, for a stored table [V, D] and tokens [B, T].

    Every device looks up its own columns for all tokens of its replica and exchanges them, so that neither the table
    nor its gradient ever exists whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or table.shape[-1] % _size(mesh, _FSDP) or tokens.shape[0] % num_shards("B"):
        return constrain(finish(table[tokens]), "BTD")
    tokens = jax.lax.with_sharding_constraint(tokens, PartitionSpec("data"))
    rows = jax.lax.with_sharding_constraint(
        finish(table[tokens]), PartitionSpec("data", None, _FSDP)
    )
    return constrain(rows, "BTD")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Shards the rows of a batch [B, ...] over data, fsdp and context."""
    return NamedSharding(mesh, PartitionSpec(_MESH_AXES["B"]))


def batch_shape(mesh: Mesh, batch_size: int, seq_len: int) -> tuple[int, int]:
    """Returns the shape of a batch on the mesh: (rows, tokens of a row)."""
    return batch_size * mesh.shape["context"], seq_len // mesh.shape["context"]


def _parts_of_this_process(mesh: Mesh, batch_size: int) -> list[tuple[int, int]]:
    """Lists (sequence, part) of the rows of a batch that this process's devices hold, in order.

    A device has the same part of neighbouring sequences.
    """
    num_rows, C = batch_size * mesh.shape["context"], mesh.shape["context"]
    per_device = -(-num_rows // _size(mesh, _MESH_AXES["B"]))
    slices = batch_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
    rows = sorted({row for (rows,) in slices for row in range(*rows.indices(num_rows))})
    return [
        (row // (C * per_device) * per_device + row % per_device, row // per_device % C)
        for row in rows
    ]


def rows_of_this_process(mesh: Mesh, batch_size: int) -> list[int]:
    """Lists the sequences of a batch of which this process's devices hold parts, in order."""
    return sorted({sequence for sequence, _ in _parts_of_this_process(mesh, batch_size)})


def global_batch(
    mesh: Mesh, sequences: dict[str, np.ndarray], batch_size: int
) -> dict[str, jax.Array]:
    """Assembles the global batch from the sequences of `rows_of_this_process`."""
    C, own = mesh.shape["context"], rows_of_this_process(mesh, batch_size)
    parts = [
        (own.index(sequence), part) for sequence, part in _parts_of_this_process(mesh, batch_size)
    ]

    def make(value):
        if C > 1:
            positions = part_positions(C, value.shape[1])
            value = np.stack([value[row, positions[part]] for row, part in parts])
        shape = (batch_size * C, *value.shape[1:])
        return jax.make_array_from_process_local_data(batch_sharding(mesh), value, shape)

    return {name: make(value) for name, value in sequences.items()}


def part_positions(C: int, T: int) -> np.ndarray:
    """Returns the indices of the tokens that each of C parts of a sequence of T tokens has, [C, T / C]."""
    if C == 1:
        return np.arange(T)[None]
    early, late = np.arange(T).reshape(2, C, -1)
    return np.concatenate([early, late[::-1]], axis=1)


def num_parts() -> int:
    """Returns C, the parts of a sequence, on the mesh of the surrounding `use`; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["context"]


def _join_parts(rows: jax.Array, sequences_per_device: int) -> jax.Array:
    """Joins the rows of a batch, [.., T / C, ..] on axis 1, to whole sequences [B, T, ..] in the order of the text."""
    C, (_, length, *rest) = num_parts(), rows.shape
    chunks = rows.reshape(-1, C, sequences_per_device, 2, length // 2, *rest)
    early, late = chunks[:, :, :, 0], chunks[:, ::-1, :, 1]
    return jnp.concatenate([early, late], axis=1).swapaxes(1, 2).reshape(-1, C * length, *rest)


def whole_sequences(rows: jax.Array) -> jax.Array:
    """Returns the rows of a whole batch as its sequences, [B, T, ..], in the order of the text."""
    if num_parts() == 1:
        return rows
    sequences = _join_parts(rows, len(rows) // num_shards("B"))
    return jax.lax.with_sharding_constraint(sequences, PartitionSpec(("data", "fsdp")))


def gather_parts(rows: jax.Array) -> jax.Array:
    """All-gathers, in a shard-mapped function, the sequences of a device's rows: [b, T / C, ..] to [b, T, ..]."""
    if num_parts() == 1:
        return rows
    with jax.named_scope("gather_parts"):
        return _join_parts(jax.lax.all_gather(rows, "context", tiled=True), len(rows))


def part_index() -> jax.Array | int:
    """Returns, in a shard-mapped function, which part of its sequences a device has."""
    return 0 if num_parts() == 1 else jax.lax.axis_index("context")


def split_heads(rows: jax.Array) -> jax.Array:
    """Exchanges, in a shard-mapped function, parts for heads: [b, T / C, N, H] to [b, T, N / C, H]; one is gathered."""
    C = num_parts()
    if C == 1 or rows.shape[2] == 1:
        return gather_parts(rows)
    return _join_parts(
        jax.lax.all_to_all(rows, "context", split_axis=2, concat_axis=0, tiled=True), len(rows)
    )


def join_heads(x: jax.Array) -> jax.Array:
    """Does the opposite of `split_heads` for several heads: [b, T, N / C, H] to [b, T / C, N, H]."""
    C, (b, T, *rest) = num_parts(), x.shape
    if C == 1:
        return x
    early, late = jnp.unstack(x.reshape(b, 2, C, T // C // 2, *rest), axis=1)
    parts = (
        jnp.concatenate([early, late[:, ::-1]], axis=2).swapaxes(0, 1).reshape(C * b, T // C, *rest)
    )
    return jax.lax.all_to_all(parts, "context", split_axis=0, concat_axis=2, tiled=True)


def with_shardings(shapes, mesh: Mesh):
    """Adds the sharding of every leaf to a tree of `jax.ShapeDtypeStruct`."""
    struct, shardings = jax.ShapeDtypeStruct, state_shardings(shapes, mesh)
    return jax.tree.map(
        lambda leaf, s: struct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings
    )


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
    free = [
        a
        for a, name in enumerate(spec)
        if (name is None or mesh.shape[name] == 1) and axes[a] not in "LC"
    ]
    free = [a for a in free if shape[a] % _size(mesh, _FSDP) == 0]
    if free:
        spec[max(free, key=lambda a: (axes[a] == "D", shape[a]))] = _FSDP
    return PartitionSpec(*spec)


def _spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of an array in use; an axis that its mesh axes do not divide is not sharded."""
    spec = []
    for letter, size in zip(axes, shape, strict=True):
        mesh_axes = _MESH_AXES.get(letter, ())
        divides = size % _size(mesh, mesh_axes) == 0
        spec.append(
            (mesh_axes if len(mesh_axes) > 1 else mesh_axes[0]) if mesh_axes and divides else None
        )
    return PartitionSpec(*spec)


def _size(mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def hash_batch(batch: dict[str, jax.Array]) -> jax.Array:
    """Hashes a batch to uint32 []: runs that log equal hashes were trained on equal batches."""
    stacked = jnp.stack([batch[name].astype(jnp.int32) for name in sorted(batch)], axis=-1)
    return hash_bits(whole_sequences(stacked))


def hash_bits(leaf: jax.Array, stacked: bool = False) -> jax.Array:
    """Hashes the bits of an array to uint32 [], by a sum over its elements; to [L], one per layer, if `stacked`."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(
        jnp.uint32
    )
    index = sum(  # of each element in the flattened array
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        * np.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        for axis in range(leaf.ndim)
    )
    mixed = (bits ^ (bits >> 15)) * (index * np.uint32(2654435761) | 1)
    return jnp.sum(mixed ^ (mixed >> 13), axis=tuple(range(stacked, leaf.ndim)), dtype=jnp.uint32)
