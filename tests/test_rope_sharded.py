"""The rotation on eight devices, in a process of its own that pretends to have them."""

import os
import subprocess
import sys

from conftest import ROOT

PROGRAM = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from prope import apply_p_rope

mesh = jax.make_mesh((2, 2, 2), ("b", "t", "n"), axis_types=(AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
inputs = rng.standard_normal((4, 8, 6, 64)).astype(np.float32)
positions = rng.integers(0, 2**20, (4, 8)).astype(np.int32)
expected = np.asarray(apply_p_rope(inputs, positions, 64, rope_percentage=0.75))
specs = P("b", "t", "n"), P("b", "t")
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((inputs, positions), specs)]

def turn(inputs, positions):
    return apply_p_rope(inputs, positions, 64, rope_percentage=0.75)

spread = turn(*placed)
assert spread.sharding.is_equivalent_to(placed[0].sharding, 4), spread.sharding
assert np.array_equal(spread, expected)
mapped = jax.shard_map(turn, mesh=mesh, in_specs=specs, out_specs=specs[0])
assert np.array_equal(jax.jit(mapped)(*placed), expected)
text = jax.jit(turn).lower(*placed).compile().as_text()
assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")), text
pull = jax.grad(lambda x: (mapped(x, placed[1]) ** 2).sum())(placed[0])
assert np.allclose(pull, 2 * inputs, atol=1e-5), "the gradient of a norm that the rotation keeps"
print("eight devices agree")
"""


def test_sharded_inputs_and_shard_map_give_the_same_without_communication():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("eight devices agree\n"), done.stderr
