"""What the rotation reads and writes on devices that are not here, by their compilers."""

import json
import os
import subprocess
import sys

import pytest
from support.commands import ROOT, needs_cuda, needs_libtpu

COMPILE = """
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from prope import apply_p_rope
from prope.cost import hlo, traffic
from prope.cost.topology import find_devices

shape = (4, 8192, 8, 256)
place = SingleDeviceSharding(find_devices(sys.argv[1], 1)[0])
positions = jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=place)


def forward(x, positions):
    return apply_p_rope(x, positions, shape[-1], rope_percentage=0.75)


def value_and_gradient(x, positions, cotangent):
    return jax.value_and_grad(lambda x: (forward(x, positions) * cotangent).sum())(x)


def output_and_gradient(x, positions, cotangent):
    output, vjp = jax.vjp(lambda x: forward(x, positions), x)
    return output, vjp(cotangent)[0]


copies = {}
for dtype in ("bfloat16", "float32"):
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    copy = 2 * x.size * x.dtype.itemsize
    for function, arrays in (
        (forward, (x, positions)),
        (value_and_gradient, (x, positions, x)),
        (output_and_gradient, (x, positions, x)),
    ):
        text = jax.jit(function).trace(*arrays).lower().compile().as_text()
        copies.setdefault(dtype, []).append(round(traffic.hbm_bytes(hlo.parse(text)) / copy, 2))
print(json.dumps(copies))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "most"),
    [
        # One pass forward. A gradient of a sum reads the cotangent and writes the gradient, and
        # the sum reads both; an output with a gradient is two passes.
        pytest.param("v5e:2x2", [1.0, 2.2, 2.2], marks=needs_libtpu),
        pytest.param("h100:1", [1.25, 1.75, 2.25], marks=needs_cuda),
    ],
)
def test_a_rotation_is_one_pass_over_the_array(topology, most):
    environment = os.environ | {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, topology],
        cwd=ROOT,
        env=environment | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    copies = json.loads(done.stdout.splitlines()[-1])
    for dtype, counted in copies.items():
        assert [min(pair) for pair in zip(counted, most, strict=True)] == counted, dtype
