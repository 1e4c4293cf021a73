"""Splash attention's blocks: each chip's compile for it; matmuls of bfloat16."""

import functools
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.bounds import sum_bound
from support.commands import ROOT, needs_libtpu
from support.models import check_attention
from support.models import draw_attention as draw

from prope.kernels import splash
from prope.kernels.matmul import einsum_to_float32
from prope.runtime import xla_flags


@pytest.mark.parametrize("fused", [pytest.param(True, marks=pytest.mark.slow), False])
def test_blocks_do_not_change_what_is_computed(interpreted, monkeypatch, fused):
    fused_bytes = 2**30 if fused else 0
    blocks = splash.Blocks(256, 128, 128, 128, fused_bytes)
    monkeypatch.setattr(splash, "choose_blocks", lambda *_: blocks)
    check_attention(*draw(256, 256, 2, 1, H=128), implementation="splash")


EQUATIONS = ("RV,RD->VD", "RD,VD->RV", "BKRH,BKSH->BKRS")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_sums_of_bfloat16_products_are_float32(equation, rows):
    """One row too, for which a CPU has other programs."""
    sizes = dict(zip("BDHKRSV", (2, 33, 16, 2, rows, 7, 6), strict=True))
    rng = np.random.default_rng(0)
    axes, result = equation.split("->")
    shapes = [[sizes[axis] for axis in letters] for letters in axes.split(",")]
    x, y = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    sums = jax.jit(functools.partial(einsum_to_float32, equation))(x, y)
    assert sums.dtype == jnp.float32
    expected = np.einsum(equation, oracles.float64(x), oracles.float64(y))
    magnitude = np.einsum(equation, abs(oracles.float64(x)), abs(oracles.float64(y))).max()
    terms = math.prod(sizes[axis] for axis in set(axes) - {","} - set(result))
    np.testing.assert_allclose(sums, expected, rtol=0, atol=sum_bound(terms, magnitude))


@pytest.mark.parametrize(
    ("chip", "kind"), [("v5e", "TPU v5 lite"), ("v5p", "TPU v5"), ("v6e", "TPU v6 lite")]
)
def test_large_blocks_need_the_flags_that_give_them_memory(monkeypatch, chip, kind):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert splash.choose_blocks(kind, 256).queries == 1024
    assert splash.choose_blocks("", 256).queries == 1024
    flags = xla_flags.environment(chip)["LIBTPU_INIT_ARGS"]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
    assert splash.choose_blocks(kind, 256).queries == 2048
    assert splash.choose_blocks(kind, 512).queries == 1024, "an H that nobody has tried"


def test_a_plan_keeps_the_flags_that_its_user_sets():
    limit = "xla_tpu_scoped_vmem_limit_kib"
    flags = f"--{limit}=65536 --xla_another=1"
    variable, options = xla_flags.with_users("v5p", flags)
    defaults = xla_flags.environment("v5p")["LIBTPU_INIT_ARGS"]
    assert variable == f"{defaults} {flags}"
    expected = dict(xla_flags.TPU["v5p"])
    del expected[limit]
    assert options == expected


COMPILE = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from prope import sharding
from prope.attention import attention
from prope.cost.topology import find_devices
from prope.runtime import xla_flags

jax.config.update("jax_platforms", "cpu")
chip, head_dim = sys.argv[1:]
T = 2048
topology = "v5p:1x1x1" if chip == "v5p" else f"{chip}:1x1"
mesh = sharding.make_mesh(devices=find_devices(topology, 1))
place = NamedSharding(mesh, PartitionSpec())
arrays = [
    jax.ShapeDtypeStruct((1, T, heads, int(head_dim)), "bfloat16", sharding=place)
    for heads in (2, 1, 1)
]

def loss(*arrays):
    return attention(*arrays, implementation="splash").astype("float32").sum()

with sharding.use(mesh):
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays)
text = traced.lower().compile(compiler_options=xla_flags.TPU[chip]).as_text()
assert "splash_mqa_dq" in text or "splash_mqa_dkv" in text
"""


@pytest.mark.slow
@pytest.mark.optimized
@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "head_dim"), [("v5e", 256), ("v5p", 256), ("v6e", 256), ("v6e", 128)]
)
def test_every_chip_s_blocks_compile_for_it(chip, head_dim):
    environment = os.environ | xla_flags.environment(chip)
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, chip, str(head_dim)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_runs_on_a_cpu(tmp_path):
    """Every part of tests/on_gpu.sh, on tiny models."""
    done = subprocess.run(
        ["bash", f"{ROOT}/tests/on_gpu.sh", tmp_path, "tiny"],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = {path.stem: path.read_text() for path in tmp_path.glob("*.json")}
    assert printed.keys() - {"beside_transformers"} == {
        *("versions", "correctness", "profile_2b", "variants_2b"),
        *("rotation", "rotation_float32", "untrained"),
    }
    assert printed["correctness"].count(" of ") >= 26
    for name in printed.keys() - {"versions", "correctness"}:
        result = json.loads(printed[name].splitlines()[-1])
        assert "error" not in json.dumps(result), name
    assert "classes" in printed["profile_2b"]
