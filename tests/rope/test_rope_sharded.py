"""The rotation on eight devices, in a process that pretends to have them."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.processes import on_eight_devices

from prope import apply_p_rope

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce")


def over_devices():
    """Rotates arrays that are sharded over three axes."""
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        over_mesh(jax.make_mesh((2, 2, 2), ("b", "t", "n"), axis_types=(axis_type,) * 3))


def over_mesh(mesh):
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((4, 8, 6, 64)).astype(np.float32)
    positions = rng.integers(0, 2**20, (4, 8)).astype(np.int32)
    rotate = functools.partial(apply_p_rope, head_dim=64, rope_percentage=0.75)
    expected = np.asarray(rotate(inputs, positions))
    specs = (P("b", "t", "n"), P("b", "t"))
    placed_inputs = jax.device_put(inputs, NamedSharding(mesh, specs[0]))
    placed_positions = jax.device_put(positions, NamedSharding(mesh, specs[1]))

    rotated = rotate(placed_inputs, placed_positions)
    assert rotated.sharding.is_equivalent_to(placed_inputs.sharding, 4), rotated.sharding
    np.testing.assert_array_equal(rotated, expected)

    lowered = jax.jit(rotate).lower(placed_inputs, placed_positions)
    text = lowered.compile().as_text()
    assert not any(name in text for name in COLLECTIVES), text


def test_sharded_inputs_give_the_same_without_communication():
    on_eight_devices(__file__, "over_devices")
