"""The table of parameters against the tree that the model initialises."""

import dataclasses
import functools
import runpy

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from support.commands import ROOT
from support.models import initial_params, leaves_by_path, num_parameters, small

from prope import model, parameters, sharding
from prope.config import resolve

SWITCHES = {"use_qk_norm": True, "qkv_bias": True, "post_norms": True, "tied": False}
FSDP = ("fsdp", "context")
# In a small model with these switches: the shape, and the mesh axes that shard each axis where they
# divide it.
EXPECTED = {
    "embedder/input_embedding": ((50, 32), ("tensor", FSDP)),
    "final_norm/scale": ((32,), (FSDP,)),
    "head/w": ((50, 32), ("tensor", FSDP)),
    "layers/attn/attn_vec_einsum/w": ((3, 4, 16, 32), (None, "tensor", None, FSDP)),
    "layers/attn/key_norm/scale": ((3, 16), (None, FSDP)),
    "layers/attn/kv_einsum/w": ((3, 2, 2, 32, 16), (None, None, "tensor", FSDP, None)),
    "layers/attn/kv_einsum/b": ((3, 2, 2, 16), (None, None, "tensor", FSDP)),
    "layers/attn/q_einsum/b": ((3, 4, 16), (None, "tensor", FSDP)),
    "layers/attn/q_einsum/w": ((3, 4, 32, 16), (None, "tensor", FSDP, None)),
    "layers/attn/query_norm/scale": ((3, 16), (None, FSDP)),
    "layers/mlp/gating_einsum": ((3, 2, 32, 48), (None, None, FSDP, "tensor")),
    "layers/mlp/linear": ((3, 48, 32), (None, "tensor", FSDP)),
    "layers/post_attention_norm/scale": ((3, 32), (None, FSDP)),
    "layers/post_ffw_norm/scale": ((3, 32), (None, FSDP)),
    "layers/pre_attention_norm/scale": ((3, 32), (None, FSDP)),
    "layers/pre_ffw_norm/scale": ((3, 32), (None, FSDP)),
}


def initial_shapes(spec):
    """What the model initialises, without computing it."""
    return jax.eval_shape(functools.partial(model.init, spec), jax.random.key(0))


def is_matrix(path: str) -> bool:
    """Whether a parameter is neither a norm's scale nor a bias."""
    return not path.endswith(("/scale", "/b"))


def test_names_shapes_and_counts_are_those_of_the_model():
    spec = small(**SWITCHES, dtype="bfloat16")
    tree = initial_shapes(spec)
    assert parameters.shapes(spec) == tree
    leaves = leaves_by_path(tree)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: shape for path, (shape, _) in EXPECTED.items()
    }
    assert {leaf.dtype for leaf in leaves.values()} == {np.dtype(np.float32)}
    assert parameters.count(spec) == num_parameters(tree)
    multiplied = {path: leaf for path, leaf in leaves.items() if is_matrix(path)}
    del multiplied["embedder/input_embedding"]  # here the head is another matrix
    assert parameters.count(spec, matrices_only=True) == num_parameters(multiplied)
    tied = dataclasses.replace(spec, tied=True)
    assert parameters.count(tied, matrices_only=True) == num_parameters(multiplied)


def test_what_a_switch_adds_is_there_where_the_config_has_it():
    added = {
        ("use_qk_norm", True): {f"layers/attn/{name}_norm/scale" for name in ("query", "key")},
        ("qkv_bias", True): {"layers/attn/q_einsum/b", "layers/attn/kv_einsum/b"},
        ("post_norms", True): {f"layers/post_{name}_norm/scale" for name in ("attention", "ffw")},
        ("tied", False): {"head/w"},
    }
    plain = EXPECTED.keys() - set().union(*added.values())
    for (field, value), paths in added.items():
        spec = small(**{field: value})
        assert leaves_by_path(initial_shapes(spec)).keys() == plain | paths
    assert leaves_by_path(initial_shapes(small())).keys() == plain


def test_parameters_and_moments_are_sharded_by_their_axes(monkeypatch):
    monkeypatch.setattr(sharding, "_MIN_SHARD_SIZE", 0)
    mesh = AbstractMesh((1, 2, 2, 2), sharding._AXES)
    params = initial_shapes(small(**SWITCHES))
    state = jax.eval_shape(optax.scale_by_adam().init, params)
    expected = {path: PartitionSpec(*axes) for path, (_, axes) in EXPECTED.items()}

    def specs(shardings):
        return {path: leaf.spec for path, leaf in leaves_by_path(shardings).items()}

    moments = sharding.state_shardings(state, mesh)
    assert specs(moments.mu) == specs(moments.nu) == expected
    assert specs(sharding.state_shardings(params, mesh)) == expected
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    assert specs(sharding.state_shardings(layer["layers"]["mlp"], mesh)) == {
        "gating_einsum": PartitionSpec(None, FSDP, "tensor"),
        "linear": PartitionSpec("tensor", FSDP),
    }


def read_spec(name, *arguments):
    """The spec of a page in configs/."""
    page = runpy.run_path(ROOT / "configs" / f"{name}.py")
    return resolve(page["get_config"](*arguments))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("gemma4_like", "tiny"), 0.3212342),
        pytest.param(("quickstart",), -1.0015192, marks=pytest.mark.slow),
    ],
)
def test_initial_values_are_those_of_every_version(arguments, expected):
    """By a random projection of all values, because a processor without FMA rounds some apart."""
    spec = read_spec(*arguments)
    leaves = jax.tree.leaves(initial_params(spec.model, spec.seed))
    values = np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])
    projected = np.random.default_rng(0).standard_normal(values.size) @ values
    assert projected / np.linalg.norm(values) == pytest.approx(expected, abs=1e-6)


def test_gemma_2b_has_gemma_s_parameters():
    spec = dataclasses.replace(read_spec("gemma_2b_wiki").model, vocab_size=256_128)
    assert parameters.count(spec) == 2_506_434_560
    assert num_parameters(initial_shapes(spec)) == 2_506_434_560
