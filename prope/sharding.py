"""Where arrays live: the mesh, the mesh axes that shard each axis letter, and hashes of arrays.

The mesh has four axes. `data` replicates the parameters: one replica per TPU slice or GPU node by
default, because only gradients pass between replicas. `fsdp` shards the parameters and the batch: a
matrix is all-gathered for its use. `context` splits every sequence over C devices, and shards
the parameters too. `tensor` shards heads, hidden units and vocabulary. The model names axis
letters, never mesh axes. Hashes do not depend on the mesh.

An array "in use" is an activation, or a parameter that was all-gathered for a matmul; a "stored"
parameter is sharded over `fsdp` as well.

Context parallelism: a batch of B sequences of T tokens has B * C rows of T / C tokens. The row of
rank i holds chunks i and 2C-1-i of the 2C chunks of a sequence, so that all ranks have equally
much causal attention to compute. Positions, targets and weights are split alike. All layers but
attention work on rows; attention all-gathers the keys and values of a sequence.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from prope import parameters
from prope.errors import usage_error
from prope.spec.run import Spec

_AXES = ("data", "fsdp", "context", "tensor")
_WITHIN_REPLICA = ("fsdp", "context")  # mesh axes over which a replica shards its parameters
# Mesh axes of arrays in use. Other letters are not sharded.
_MESH_AXES = {
    "B": ("data", *_WITHIN_REPLICA),
    "N": ("tensor",),
    "K": ("tensor",),
    "F": ("tensor",),
    "V": ("tensor",),
}
_MIN_SHARD_SIZE = 2**16  # elements; smaller leaves are cheaper to replicate than to all-gather


def make_mesh(
    replicas: int | None = None, tensor: int = 1, devices: Sequence | None = None, context: int = 1
) -> Mesh:
    """Arranges the devices as (data=replicas, fsdp=the rest, context, tensor).

    By default there is a replica for each TPU slice or GPU node.
    """
    devices = jax.devices() if devices is None else list(devices)
    slices = num_slices(devices)
    replicas = slices if replicas is None else replicas
    fsdp = len(devices) // (replicas * context * tensor)
    shape = (replicas, fsdp, context, tensor)
    if slices > 1 and replicas % slices == 0:
        grid = mesh_utils.create_hybrid_device_mesh(
            (replicas // slices, *shape[1:]),
            (slices, 1, 1, 1),
            devices,
            allow_split_physical_axes=True,
        )
    elif slices > 1:  # replicas of several GPU nodes each
        by_node = sorted(devices, key=lambda device: device.slice_index)
        grid = np.array(by_node).reshape(shape)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * 4)


def check_devices(spec: Spec, devices: Sequence) -> None:
    """Checks that devices and their slices can form the mesh and divide the batch.

    Raises UsageError, with the field, otherwise.
    """
    mesh = spec.mesh
    slices = num_slices(devices)
    replicas = mesh.data or slices
    if devices[0].platform == "tpu" and replicas % slices:
        problem = f"must be a multiple of the number of slices, {slices}"
        raise usage_error("config.mesh.data", replicas, problem)
    groups = len(devices)
    for axis, size in (("tensor", mesh.tensor), ("context", mesh.context), ("data", replicas)):
        if groups % size:
            problem = f"must divide the number of devices, or of groups of them, {groups}"
            raise usage_error(f"config.mesh.{axis}", size, problem)
        if axis != "data":
            groups //= size
    multiple = spec.accumulation * groups
    if spec.batch_size % multiple:
        product = f"(accumulation={spec.accumulation} x {groups} groups of devices)"
        problem = f"must be a multiple of {multiple} {product}"
        raise usage_error("config.batch_size", spec.batch_size, problem)


def num_slices(devices: Sequence) -> int:
    """Counts the TPU slices, or on GPUs the nodes: devices between them share a slower network."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def use(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Makes programs that are traced within this context shard over the mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def num_shards(letter: str) -> int:
    """Counts the shards of an axis in use, on the mesh of the surrounding `use`; 1 outside."""
    return _size(jax.sharding.get_abstract_mesh(), _MESH_AXES.get(letter, ()))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as an activation with these axes, such as "BTNH"."""
    return _constrain(x, axes, _spec)


def constrain_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Shards x as a stored parameter with these axes is sharded, such as "NDH"."""
    return _constrain(x, axes, _param_spec)


def _constrain(x, axes, rule):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, rule(mesh, axes, x.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def all_gather_param(x: jax.Array, axes: str) -> jax.Array:
    """All-gathers a stored parameter for use; its gradient is reduce-scattered, never whole."""
    return constrain(x, axes)


def _all_gather_forward(x, axes):
    return constrain(constrain_like_param(x, axes), axes), None


def _all_gather_backward(axes, _, cotangent):
    return (constrain_like_param(cotangent, axes),)


all_gather_param.defvjp(_all_gather_forward, _all_gather_backward)


def shard_mapped(function: Callable, axes: Sequence[str], results: Sequence[str] = ()) -> Callable:
    """Wraps a function of arrays with these axes in shard_map.

    `results` has the axes of each result, whose sizes are those of the arrays. A result without B
    is a parameter's gradient, from `sum_like_param`. By default there is one result, sharded as the
    first array.
    """

    def run(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size <= 1:
            return function(*arrays)
        shape = itertools.chain.from_iterable(x.shape for x in arrays)
        sizes = dict(zip("".join(axes), shape, strict=True))

        def spec(rule, letters):
            return rule(mesh, letters, [sizes[letter] for letter in letters])

        in_specs = tuple(spec(_spec, letters) for letters in axes)
        rules = [_spec if "B" in letters else _param_spec for letters in results]
        out_specs = tuple(map(spec, rules, results)) or in_specs[0]
        mapped = jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*arrays)

    return run


def shard_axes(letter: str) -> tuple[str, ...]:
    """Returns the mesh axes of an axis letter, over which a shard-mapped function sums; or ()."""
    if num_shards(letter) == 1:
        return ()
    return _MESH_AXES[letter]


def sum_like_param(x: jax.Array, axes: str) -> jax.Array:
    """Sums a shard-mapped gradient over the batch's shards; scatters it like its parameter."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return x
    whole_shape = [size * num_shards(letter) for letter, size in zip(axes, x.shape, strict=True)]
    spec = _param_spec(mesh, axes, whole_shape)
    if _WITHIN_REPLICA not in spec:
        return jax.lax.psum(x, _MESH_AXES["B"])
    scattered = jax.lax.psum_scatter(
        x, _WITHIN_REPLICA, scatter_dimension=spec.index(_WITHIN_REPLICA), tiled=True
    )
    return jax.lax.psum(scattered, "data")


def embedding_lookup(
    table: jax.Array, tokens: jax.Array, finish: Callable[[jax.Array], jax.Array], axes: str = "BTD"
) -> jax.Array:
    """Computes finish(table[tokens]), `finish` elementwise, for a table [V, .., D].

    `axes` are those of the result, for tokens [B, T]. Every device looks up its own columns for all
    tokens of its replica and exchanges them, so that neither the table nor its gradient ever exists
    whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    divides = not mesh.empty and table.shape[-1] % _size(mesh, _WITHIN_REPLICA) == 0
    if not divides or len(tokens) % num_shards("B"):
        return constrain(finish(table[tokens]), axes)
    tokens = jax.lax.with_sharding_constraint(tokens, PartitionSpec("data"))
    rows = finish(table[tokens])
    whole = [None] * (rows.ndim - 2)
    by_column = PartitionSpec("data", *whole, _WITHIN_REPLICA)
    rows = jax.lax.with_sharding_constraint(rows, by_column)
    return constrain(rows, axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch [B, ...]: rows over data, fsdp and context."""
    return NamedSharding(mesh, PartitionSpec(_MESH_AXES["B"]))


def _local_rows(mesh: Mesh, batch_size: int) -> list[tuple[int, int]]:
    """Lists (sequence, context rank) of a batch's rows on this process's devices, in order.

    A device has the same rank of neighbouring sequences: with C = 2 and two rows each, device 0 has
    rank 0 of sequences 0 and 1, device 1 has rank 1 of these.
    """
    C = mesh.shape["context"]
    num_rows = batch_size * C
    per_device = -(-num_rows // _size(mesh, _MESH_AXES["B"]))
    indices = batch_sharding(mesh).addressable_devices_indices_map((num_rows,))
    rows = {row for (part,) in indices.values() for row in range(num_rows)[part]}

    def place(row):
        device, offset = divmod(row, per_device)
        group, rank = divmod(device, C)
        return group * per_device + offset, rank

    return [place(row) for row in sorted(rows)]


def rows_of_this_process(mesh: Mesh, batch_size: int) -> list[int]:
    """Lists the sequences of a batch that this process's devices hold, or parts of, in order."""
    return sorted({sequence for sequence, _ in _local_rows(mesh, batch_size)})


def global_batch(
    mesh: Mesh, sequences: dict[str, np.ndarray], batch_size: int
) -> dict[str, jax.Array]:
    """Assembles the global batch from the sequences of `rows_of_this_process`."""
    C = mesh.shape["context"]
    local = rows_of_this_process(mesh, batch_size)
    rows = [(local.index(sequence), rank) for sequence, rank in _local_rows(mesh, batch_size)]

    def make(value):
        if C > 1:
            positions = rank_positions(C, value.shape[1])
            value = np.stack([value[index, positions[rank]] for index, rank in rows])
        shape = (batch_size * C, *value.shape[1:])
        return jax.make_array_from_process_local_data(batch_sharding(mesh), value, shape)

    return {name: make(value) for name, value in sequences.items()}


def rank_positions(C: int, T: int) -> np.ndarray:
    """Returns the positions of the tokens of each context rank in a sequence of T, [C, T / C]."""
    if C == 1:
        return np.arange(T)[None]
    early, late = np.arange(T).reshape(2, C, -1)
    return np.concatenate([early, late[::-1]], axis=1)


def device_kind() -> str:
    """Returns what the devices in use are, such as "TPU v5e"; "" outside `use`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "device_kind", "")


def on_gpu() -> bool:
    """Returns whether the devices in use are GPUs; False outside `use`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return getattr(device, "platform", "") == "gpu"


def context_size() -> int:
    """Returns C, over how many devices a sequence is split; 1 outside `use`."""
    return _size(jax.sharding.get_abstract_mesh(), ["context"])


def context_rank() -> jax.Array | int:
    """Returns, in a shard-mapped function, the rank of this device on the context axis."""
    if context_size() == 1:
        return 0
    return jax.lax.axis_index("context")


def _join_rows(rows: jax.Array, sequences_per_device: int) -> jax.Array:
    """Joins rows [.., T / C, ..] on axis 1 to sequences [B, T, ..] in the order of the text."""
    C = context_size()
    _, length, *rest = rows.shape
    # [device groups, C, sequences, early or late, tokens of a chunk, ..]
    chunks = rows.reshape(-1, C, sequences_per_device, 2, length // 2, *rest)
    early = chunks[:, :, :, 0]
    late = chunks[:, ::-1, :, 1]
    in_order = jnp.concatenate([early, late], axis=1)
    by_sequence = in_order.swapaxes(1, 2)
    return by_sequence.reshape(-1, C * length, *rest)


def whole_sequences(rows: jax.Array) -> jax.Array:
    """Returns the rows of a whole batch as its sequences, [B, T, ..], in the order of the text."""
    if context_size() == 1:
        return rows
    sequences = _join_rows(rows, len(rows) // num_shards("B"))
    return jax.lax.with_sharding_constraint(sequences, PartitionSpec(("data", "fsdp")))


def all_gather_sequence(rows: jax.Array) -> jax.Array:
    """All-gathers the sequences of a device's rows: [b, T / C, ..] to [b, T, ..].

    It is called in a shard-mapped function, as are `split_heads` and `join_heads`.
    """
    if context_size() == 1:
        return rows
    with jax.named_scope("all_gather_sequence"):
        return _join_rows(jax.lax.all_gather(rows, "context", tiled=True), len(rows))


def split_heads(rows: jax.Array) -> jax.Array:
    """Exchanges tokens for heads: [b, T / C, N, H] to [b, T, N / C, H].

    C divides N, or there is one head: nothing can be split, so its tokens are all-gathered.
    """
    if context_size() == 1 or rows.shape[2] == 1:
        return all_gather_sequence(rows)
    exchanged = jax.lax.all_to_all(rows, "context", split_axis=2, concat_axis=0, tiled=True)
    return _join_rows(exchanged, len(rows))


def join_heads(x: jax.Array) -> jax.Array:
    """Exchanges heads for tokens, the opposite of `split_heads` where N > 1."""
    C = context_size()
    if C == 1:
        return x
    b, T, *rest = x.shape
    chunks = x.reshape(b, 2, C, T // C // 2, *rest)  # [b, early or late, C, tokens, ..]
    early, late = jnp.unstack(chunks, axis=1)
    by_rank = jnp.concatenate([early, late[:, ::-1]], axis=2)
    rows = by_rank.swapaxes(0, 1).reshape(C * b, T // C, *rest)
    return jax.lax.all_to_all(rows, "context", split_axis=0, concat_axis=2, tiled=True)


def with_shardings(shapes, mesh: Mesh):
    """Adds the sharding of every leaf to a tree of `jax.ShapeDtypeStruct`."""

    def add(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(add, shapes, state_shardings(shapes, mesh))


def state_shardings(state, mesh: Mesh):
    """Chooses a sharding by its path for every leaf of parameters or optimizer state.

    Heads, hidden units and vocabulary are sharded over `tensor`, and the axis D over `fsdp`; where
    D does not divide, the longest other axis that does. Small leaves, and those with no axis that
    divides, are replicated.
    """

    def rule(keys, leaf):
        _, axes = parameters.find(keys) or (None, "")
        spec = PartitionSpec()
        # With other axes it is a sum over some, of Adafactor.
        if leaf.size >= _MIN_SHARD_SIZE and len(axes) == leaf.ndim:
            spec = _param_spec(mesh, axes, leaf.shape)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(rule, state)


def _param_spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of a stored parameter: as in use, and one more axis over fsdp.

    L and M of layers, and C of the two matrices in one array, are not sharded: loops run over them.
    """
    spec = list(_spec(mesh, axes, shape))
    free = [
        a
        for a, mesh_axis in enumerate(spec)
        if axes[a] not in "LMC"
        and (mesh_axis is None or mesh.shape[mesh_axis] == 1)
        and shape[a] % _size(mesh, _WITHIN_REPLICA) == 0
    ]
    if free:
        chosen = max(free, key=lambda a: (axes[a] == "D", shape[a]))
        spec[chosen] = _WITHIN_REPLICA
    return PartitionSpec(*spec)


def _spec(mesh, axes: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of an array in use; an axis that its mesh axes do not divide stays whole."""

    def shard(letter, size):
        mesh_axes = _MESH_AXES.get(letter, ())
        divides = size % _size(mesh, mesh_axes) == 0
        return mesh_axes if mesh_axes and divides else None

    return PartitionSpec(*map(shard, axes, shape))


def _size(mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def hash_batch(batch: dict[str, jax.Array]) -> jax.Array:
    """Hashes a batch to uint32 []: runs that log equal hashes were trained on equal batches."""
    arrays = [batch[name].astype(jnp.int32) for name in sorted(batch)]
    return hash_bits(whole_sequences(jnp.stack(arrays, axis=-1)))


def hash_bits(leaf: jax.Array, stacked: bool = False) -> jax.Array:
    """Hashes the bits of an array to uint32 [], by a sum over its elements.

    With `stacked` it hashes each layer of an array [L, ...] by itself, to [L].
    """
    bits_dtype = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(leaf, bits_dtype).astype(jnp.uint32)
    strides = [math.prod(leaf.shape[axis + 1 :]) % 2**32 for axis in range(leaf.ndim)]
    # The index of each element in the flattened array.
    index = sum(
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * np.uint32(stride)
        for axis, stride in enumerate(strides)
    )
    odd = index * np.uint32(2654435761) | 1
    mixed = (bits ^ (bits >> 15)) * odd
    mixed = mixed ^ (mixed >> 13)
    summed_axes = tuple(range(stacked, leaf.ndim))
    return jnp.sum(mixed, axis=summed_axes, dtype=jnp.uint32)
