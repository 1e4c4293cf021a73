"""p-RoPE under JAX's transformations, for every dtype and kind of mesh, against its formula.

The rotation R is linear and keeps norms: its Jacobian times x is R x, and the Hessian of
|R x|^2 / 2 is the identity.
"""

import functools
import itertools
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import float64
from oracles import rotation as oracle
from support.models import draw_inputs, needs_dtype
from support.processes import on_eight_devices

from prope import apply_p_rope

H = 8
SPECS = (P("b", "t", "n"), P("b", "t"))
MESHES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
DTYPES = ["float32", "bfloat16", "float16", "float64"]
POSITIONS = ["int32", "uint8", "int16", "int64"]  # the dtype beside each of these
rotate = functools.partial(apply_p_rope, head_dim=H, rope_percentage=0.75)


def rotate_all(x, positions):
    """R x."""
    return rotate(x, positions)


def compile_donating(x, positions):
    """R x, by a compiled program that may overwrite x."""
    donated = jnp.copy(x)
    compiled = jax.jit(rotate, donate_argnums=0).lower(donated, positions).compile()
    return compiled(donated, positions)


def export(x, positions):
    """R x, by a program that was exported."""
    exported = jax.export.export(jax.jit(rotate))(x, positions)
    return jax.jit(exported.call)(x, positions)


def jvp(x, positions):
    """R x, as a derivative along x."""
    _, tangent = jax.jvp(lambda y: rotate(y, positions), (jnp.ones_like(x),), (x,))
    return tangent


def vmap_in(x, positions):
    """R x, each sequence by itself."""
    return jax.vmap(rotate)(x[:, None], positions[:, None])[:, 0]


def vmap_inputs(x, positions):
    """R x, of heads that share the positions."""
    return jax.vmap(rotate, (2, None), 2)(x[:, :, :, None], positions)[:, :, :, 0]


def vmap_out(x, positions):
    """R x, beside a mapped argument that it does not depend on."""
    return jax.vmap(lambda _: rotate(x, positions), out_axes=None)(jnp.arange(3))


def scan(x, positions):
    """R x, in every step of a loop."""

    def step(carry, _):
        return carry, rotate(carry, positions)

    _, rotated = jax.lax.scan(step, x, None, length=2)
    return rotated[1]


def shard_map(x, positions, function=rotate):
    """R x, by each device its part."""
    mesh = x.sharding.mesh
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0]))(
        x, positions
    )


def pallas(x, positions):
    """R x, by an interpreted kernel on each device."""

    def kernel(x, positions, rotated):
        rotated[...] = rotate(x[...], positions[...])

    def call(x, positions):
        return pl.pallas_call(kernel, jax.typeof(x), interpret=True)(x, positions)

    return shard_map(x, positions, call)


def jacobian(differentiate):
    """R x, as the Jacobian times x."""

    def multiply(x, positions):
        matrix = differentiate(lambda y: rotate(y, positions))(x)
        return np.tensordot(float64(matrix), float64(x), x.ndim)

    return multiply


def half_square(x, positions):
    return jnp.sum(rotate(x, positions).astype(jnp.float32) ** 2) / 2


def hessian(x, positions):
    """x, as the Hessian of |R x|^2 / 2 times x."""
    matrix = jax.hessian(half_square)(x, positions)
    return np.tensordot(float64(matrix), float64(x), x.ndim)


FORWARD = {
    "call": rotate_all,
    "jit": jax.jit(rotate),
    "donate": compile_donating,
    "export": export,
    "jvp": jvp,
    "vmap in": vmap_in,
    "vmap inputs": vmap_inputs,
    "vmap out": vmap_out,
    "scan": scan,
    "shard_map": shard_map,
    "pallas": pallas,
    "jacfwd": jacobian(jax.jacfwd),
    "jacrev": jacobian(jax.jacrev),
}
# These give back x.
IDENTITIES = {
    "grad": jax.jit(jax.grad(half_square)),
    "checkpoint": jax.jit(jax.grad(jax.checkpoint(half_square))),
    "hessian": hessian,
}
ALL = FORWARD | IDENTITIES


def check(transform, dtype, mesh, sizes=(1, 1, 1)):
    """Compares a transformation of the rotation with the formula."""
    positions = np.array([[0, 1, 100, 127], [3, 2, 1, 0]])
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(draw_inputs(H, positions), dtype)
        placed = [x, jnp.asarray(positions, POSITIONS[DTYPES.index(dtype)])]
        devices = jax.make_mesh(sizes, ("b", "t", "n"), axis_types=(MESHES[mesh],) * 3)
        shardings = [NamedSharding(devices, spec) for spec in SPECS]
        placed = jax.device_put(placed, shardings)
        actual = ALL[transform](*placed)
        expected = oracle(x, positions, p=0.75) if transform in FORWARD else float64(x)
        bound = 3e-7 + 4 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(float64(actual), expected, rtol=0, atol=bound)


@pytest.fixture
def as_accelerators():
    """Computes what is compiled for TPUs and GPUs."""

    def choose_default(*arguments, default, **by_platform):
        return default(*arguments)

    with mock.patch.object(jax.lax, "platform_dependent", choose_default):
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("transform", ALL)
def test_every_transformation_gives_the_rotation(transform, mesh):
    check(transform, "float32", mesh)


@pytest.mark.parametrize("transform", ALL)
def test_accelerators_compute_the_same(transform, as_accelerators):
    check(transform, "float32", "explicit")
    check(transform, "bfloat16", "auto")


# A dtype and a transformation meet in the last cast, and in the positions' dtype.
@pytest.mark.parametrize(
    "transform",
    ["call", *(pytest.param(t, marks=pytest.mark.slow) for t in ("jacrev", "shard_map", "pallas"))],
)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_dtype_is_rotated(dtype, transform):
    with jax.enable_x64(dtype == "float64"):
        needs_dtype(dtype)
    check(transform, dtype, "explicit")


@pytest.mark.slow
def test_every_transformation_is_the_same_on_eight_devices():
    on_eight_devices(__file__, "over_devices")


def over_devices():
    """Checks every transformation where each axis of the mesh has two devices."""
    for transform, mesh in itertools.product(ALL, MESHES):
        check(transform, "float32", mesh, (2, 2, 2))
