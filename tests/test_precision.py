"""float32 means float32 on TPUs and NVIDIA GPUs too: each matmul of a float32 program asks for all its bits."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from makers import analysis_options

from prope import sharding
from prope.analysis import analysis
from prope.config import default_config
from prope.inference import evaluation, generation
from prope.optimizer import make_optimizer
from prope.step import init_state, trace_step

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def traced_step(attention: str, dtype: str):
    config = default_config()
    config.batch_size = 2
    config.model.update(
        {"num_layers": 2, "embed_dim": 64, "num_heads": 2, "head_dim": 128, "hidden_dim": 64}
    )
    config.model.update({"attention": attention, "dtype": dtype})
    config.data.seq_len = 128
    mesh, optimizer = sharding.make_mesh(devices=jax.devices()[:1]), make_optimizer(config)
    state = sharding.with_shardings(
        jax.eval_shape(functools.partial(init_state, config, optimizer)), mesh
    )
    return trace_step(config, optimizer, mesh, state)


def precisions(jaxpr) -> list:
    """The precision of every matmul of float32 arrays, those in kernels and loops too."""
    found = []
    for equation in jaxpr.eqns:
        if (
            equation.primitive.name == "dot_general"
            and equation.invars[0].aval.dtype == jnp.float32
        ):
            found.append(equation.params["precision"])
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                found += precisions(getattr(inner, "jaxpr", inner))
    return found


def precisions_of_text(text: str) -> list[str]:
    """The precision of every matmul of float32 arrays in StableHLO."""
    dots = [
        line
        for line in text.splitlines()
        if "stablehlo.dot_general" in line and "xf32>" in line.split(" : ")[-1]
    ]
    return [
        (re.findall(r"precision = \[(.*?)\]", line) or ["DEFAULT, DEFAULT"])[0] for line in dots
    ]


@pytest.mark.parametrize(
    ("attention", "platform"), [("xla", "cuda"), ("xla", "tpu"), ("splash", "tpu")]
)
def test_a_float32_step_multiplies_in_float32(attention, platform):
    step = traced_step(attention, "float32")
    found = precisions(step.jaxpr.jaxpr)
    assert len(found) >= 20 and set(found) == {HIGHEST}
    if attention == "xla":
        text = step.lower(lowering_platforms=(platform,)).as_text()
        assert set(precisions_of_text(text)) == {"HIGHEST, HIGHEST"}


def test_a_bfloat16_step_is_as_fast_as_before():
    assert HIGHEST not in precisions(traced_step("xla", "bfloat16").jaxpr.jaxpr)


def evaluate(workdir):
    list(evaluation.evaluations(evaluation.LossOptions(str(workdir), max_windows=1, again=True)))


def sample(workdir):
    generation.continue_prompts(str(workdir), None, ["a"], generation.Sampling(3, 0.0), 0)


def analyse(workdir):
    analysis.analyse(workdir, analysis_options(sequences=1, seq_len=32, channels=1))


@pytest.mark.parametrize(
    "command",
    [evaluate, *(pytest.param(command, marks=pytest.mark.slow) for command in (sample, analyse))],
)
def test_commands_multiply_in_float32(whole, tmp_path, command):
    jax.clear_caches()  # of programs that other tests lowered
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        command(whole[0])
    finally:
        jax.config.update("jax_dump_ir_to", "")
    found = [
        precision
        for path in tmp_path.glob("*.mlir")
        for precision in precisions_of_text(path.read_text())
    ]
    assert len(found) >= 5 and set(found) == {"HIGHEST, HIGHEST"}
