"""Where arrays live: the mesh, and one rule by shape for parameters and optimizer state alike.

The mesh has two axes: `data`, over which the parameters are replicated, and `fsdp`, over which they are split.
A batch is split over both. The model names no mesh axis.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_SMALL = 2**16  # elements: below this a leaf is cheaper to keep everywhere than to gather


def make_mesh(replicas: int = 1) -> Mesh:
    """All devices as (replicas, the rest)."""
    shape = (replicas, jax.device_count() // replicas)
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch [B, ...] over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


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
    """A sharding for every leaf of a tree of arrays or shapes.

    A leaf is split over `fsdp` along its longest axis that divides, but never along the layers that a scan runs
    over; where none divides, and where a leaf is small, every device holds it whole.
    """

    def rule(path, leaf):
        stacked = any(getattr(key, "key", None) == "layers" for key in path)
        size = mesh.shape["fsdp"]
        axes = [a for a in range(int(stacked), leaf.ndim) if leaf.shape[a] % size == 0]
        spec = [None] * leaf.ndim
        if axes and leaf.size >= _SMALL:
            spec[max(axes, key=lambda axis: leaf.shape[axis])] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(rule, state)
