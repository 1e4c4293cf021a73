"""float32 means float32 on TPUs and NVIDIA GPUs too: its matmuls ask for all bits."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from support.heads import analysis_options

from prope import sharding
from prope.analysis import analysis
from prope.inference import generation, losses
from prope.optimizer import make_optimizer
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.step import init_state, trace_step

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def traced_step(attention: str, dtype: str):
    """A traced training step of a small model on one device."""
    fields = {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 2,
        "head_dim": 128,
        "hidden_dim": 64,
        "attention": attention,
        "dtype": dtype,
    }
    spec = Spec(batch_size=2, model=ModelSpec(**fields), data=DataSpec(seq_len=128))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    optimizer = make_optimizer(spec)
    shapes = jax.eval_shape(functools.partial(init_state, spec, optimizer))
    state = sharding.with_shardings(shapes, mesh)
    return trace_step(spec, optimizer, mesh, state)


def is_jaxpr(node) -> bool:
    """Whether a parameter of an equation is a program itself."""
    return hasattr(node, "eqns")


def precisions(jaxpr) -> list:
    """The precision of every matmul of float32 arrays, those in kernels and loops too."""
    found = []
    for equation in jaxpr.eqns:
        is_matmul = equation.primitive.name == "dot_general"
        if is_matmul and equation.invars[0].aval.dtype == jnp.float32:
            found.append(equation.params["precision"])
        values = list(equation.params.values())
        for value in jax.tree.leaves(values, is_leaf=is_jaxpr):
            inner = getattr(value, "jaxpr", value)
            if is_jaxpr(inner):
                found += precisions(inner)
    return found


def precisions_of_text(text: str) -> list[str]:
    """The precision of every matmul of float32 arrays in StableHLO."""
    found = []
    for line in text.splitlines():
        types = line.split(" : ")[-1]
        if "stablehlo.dot_general" not in line or "xf32>" not in types:
            continue
        precision = re.search(r"precision = \[(.*?)\]", line)
        found.append(precision[1] if precision else "DEFAULT, DEFAULT")
    return found


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_a_float32_step_multiplies_in_float32(attention):
    found = precisions(traced_step(attention, "float32").jaxpr.jaxpr)
    assert len(found) >= 20
    assert set(found) == {HIGHEST}


def test_a_bfloat16_step_is_as_fast_as_before():
    assert HIGHEST not in precisions(traced_step("xla", "bfloat16").jaxpr.jaxpr)


def evaluate(workdir):
    list(losses.evaluations(losses.LossOptions(str(workdir), max_windows=1, again=True)))


def sample(workdir):
    sampling = generation.Sampling(3, 0.0)
    generation.continue_prompts(str(workdir), None, ["a"], sampling, 0)


def analyse(workdir):
    options = analysis_options(sequences=1, seq_len=32, channels=1)
    analysis.analyse(workdir, options)


@pytest.mark.parametrize(
    "command",
    [
        evaluate,
        pytest.param(sample, marks=pytest.mark.slow),
        pytest.param(analyse, marks=pytest.mark.slow),
    ],
)
def test_commands_multiply_in_float32(whole, tmp_path, command):
    jax.clear_caches()  # other tests may have lowered the same programs
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        command(whole[0])
    finally:
        jax.config.update("jax_dump_ir_to", "")
    found = []
    for path in tmp_path.glob("*.mlir"):
        found += precisions_of_text(path.read_text())
    assert len(found) >= 5
    assert set(found) == {"HIGHEST, HIGHEST"}
