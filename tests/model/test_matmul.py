"""Matmuls of bfloat16: their values and gradients, and which devices they are arranged for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prope import sharding
from prope.kernels import matmul

EQUATIONS = (
    "BTD,NDH->BTNH",
    "BTNH,NHD->BTD",
    "BTD,CKDH->BTCKH",
    "CRD,CDF->CRF",
    "RF,FD->RD",
    "RF,RD->FD",
    "RD,VD->RV",
    "RPV,PVD->RPD",
    "RPV,RD->PVD",
    "BKRH,BKSH->BKRS",
    "BKRS,BKSH->BKRH",
    "BKRS,BKRH->BKSH",
)
# XLA on CPUs lacks some matmuls of bfloat16: it depends on sizes which.
SIZES = (1, 1, 2, 3, 5, 33, 64)
ROUNDING = 2.0**-8  # of bfloat16, relative: twice what rounding once may change
SUMS = 1e-5  # of float32, relative to the largest


def draw(rng, axes, sizes):
    shape = [sizes[axis] for axis in axes]
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def exact(equation, *arrays):
    return np.einsum(equation, *(np.asarray(x, np.float64) for x in arrays))


def assert_near(actual, expected, rounding):
    actual = np.asarray(actual, np.float64)
    magnitude = np.abs(expected)
    largest = max(1, magnitude.max())
    bound = rounding * magnitude + SUMS * largest
    assert (np.abs(actual - expected) <= bound).all()


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients_are_exact_sums_rounded_once(equation):
    rng = np.random.default_rng(0)
    x_axes, y_axes, axes = re.split(",|->", equation)
    for _ in range(6):
        sizes = {axis: int(rng.choice(SIZES)) for axis in x_axes + y_axes}
        x = draw(rng, x_axes, sizes)
        y = draw(rng, y_axes, sizes)
        cotangent = draw(rng, axes, sizes)
        expected = exact(equation, x, y)
        sum_products = functools.partial(matmul.einsum_to_float32, equation)
        sums = jax.jit(sum_products)(x, y)
        assert sums.dtype == jnp.float32
        assert_near(sums, expected, rounding=0)
        multiply = functools.partial(matmul.einsum, equation)
        rounded, pull_back = jax.vjp(jax.jit(multiply), x, y)
        grad_x, grad_y = pull_back(cotangent)
        assert rounded.dtype == grad_x.dtype == grad_y.dtype == jnp.bfloat16
        assert_near(rounded, expected, ROUNDING)
        expected_x = exact(f"{axes},{y_axes}->{x_axes}", cotangent, y)
        expected_y = exact(f"{x_axes},{axes}->{y_axes}", x, cotangent)
        assert_near(grad_x, expected_x, ROUNDING)
        assert_near(grad_y, expected_y, ROUNDING)


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [("cpu", "bfloat16", True), ("tpu", "bfloat16", False), ("cpu", "float32", False)],
)
def test_only_bfloat16_on_cpus_is_arranged(monkeypatch, platform, dtype, expected):
    monkeypatch.setattr(matmul, "platform", lambda: platform)
    x = jnp.zeros((4, 8), dtype)
    y = jnp.zeros((4, 6), dtype)
    to_float32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    for ours, plain in ((matmul.einsum, jnp.einsum), (matmul.einsum_to_float32, to_float32)):
        programs = set()
        for function in (ours, plain):
            multiply = functools.partial(function, "RD,RF->DF")
            program = jax.make_jaxpr(multiply)(x, y)
            programs.add(str(program))
        is_arranged = len(programs) == 2
        assert is_arranged == expected


def test_the_platform_is_that_of_the_mesh():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    sizes = (1, 1, 1, 1)
    names = ("data", "fsdp", "context", "tensor")
    for of_mesh, expected in ((device, "tpu"), (None, "")):
        mesh = jax.sharding.AbstractMesh(sizes, names, abstract_device=of_mesh)
        with jax.sharding.use_abstract_mesh(mesh):
            assert sharding.platform() == expected
    assert sharding.platform() == jax.devices()[0].platform


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("RDE,DF->RF", [(1, 3, 2), (3, 4)]),
        ("RD,DFE->RF", [(2, 3), (3, 4, 2)]),
        ("BD,BDF->BF", [(2, 3), (2, 3, 4)]),
        ("...D,DF->...F", [(2, 1, 3), (3, 4)]),
        ("bzD,Dz->bz", [(2, 5, 3), (3, 5)]),
    ],
)
def test_what_is_no_matmul_is_an_einsum(equation, shapes):
    x, y = (jnp.arange(np.prod(shape), dtype=jnp.bfloat16).reshape(shape) for shape in shapes)
    expected = exact(equation, x, y)
    assert_near(matmul.einsum_to_float32(equation, x, y), expected, rounding=0)
    assert_near(matmul.einsum(equation, x, y), expected, ROUNDING)
