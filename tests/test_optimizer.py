"""The update rule against the formulas of AdamW and of the schedule."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import adamw
from oracles import learning_rate as expected_rate

from prope.config import default_config
from prope.optimizer import has_weight_decay, learning_rate, make_optimizer


def config(**fields):
    config = default_config()
    config.num_steps = 100
    config.optimizer.update(
        {"warmup_steps": 10, "learning_rate": 1e-2, "final_learning_rate": 1e-3} | fields
    )
    return config


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_rate_rises_to_the_peak_and_ends_where_it_should(warmup):
    rate = learning_rate(config(warmup_steps=warmup))
    for update in (1, 2, 9, 10, 11, 50, 99, 100, 1100):
        expected = expected_rate(update, num_updates=100, warmup=warmup, peak=1e-2, final=1e-3)
        np.testing.assert_allclose(rate(update - 1), expected, rtol=1e-5)
    assert float(rate(0)) > 0 and math.isclose(float(rate(99)), 1e-3, rel_tol=1e-6)


def params():
    return {
        "layers": {
            "pre_ffw_norm": {"scale": jnp.full((2, 3), 0.5)},
            "mlp": {"linear": jnp.full((2, 3, 3), 0.5)},
        }
    }


def test_matrices_decay_and_scales_do_not():
    mask = has_weight_decay(params())
    assert mask == {"layers": {"pre_ffw_norm": {"scale": False}, "mlp": {"linear": True}}}
    optimizer = make_optimizer(config(warmup_steps=0))
    zeros = jax.tree.map(jnp.zeros_like, params())
    updates, _ = optimizer.update(zeros, optimizer.init(params()), params())
    rate = float(learning_rate(config(warmup_steps=0))(0))
    np.testing.assert_array_equal(updates["layers"]["pre_ffw_norm"]["scale"], 0)
    np.testing.assert_allclose(updates["layers"]["mlp"]["linear"], -rate * 0.1 * 0.5, rtol=1e-6)


def test_two_updates_equal_the_formula():
    c = config(warmup_steps=0, weight_decay=0.0, clip_norm=1.0)
    optimizer, w = make_optimizer(c), {"linear": jnp.zeros((4,))}
    state = optimizer.init(w)
    gradients = np.array([[3.0, -4, 0, 0], [0.1, 0.2, 0.3, 0.4]])
    rates = [float(learning_rate(c)(n)) for n in range(2)]
    formula = adamw(np.zeros(4), gradients, rates, clip_norm=1.0, weight_decay=0.0)
    for gradient, expected in zip(gradients, formula, strict=True):
        updates, state = optimizer.update({"linear": jnp.asarray(gradient, jnp.float32)}, state, w)
        w = jax.tree.map(jnp.add, w, updates)
        np.testing.assert_allclose(w["linear"], expected, rtol=1e-4, atol=1e-8)


def test_small_updates_are_not_lost_and_moments_have_their_dtypes():
    c = config(mu_dtype="bfloat16", learning_rate=6e-4, final_learning_rate=6e-4)
    optimizer, w = make_optimizer(c), {"linear": jnp.ones((50,))}
    state = optimizer.init(w)
    moments = {
        name: leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for name in ("mu", "nu")
        if f".{name}" in jax.tree_util.keystr(path)
    }
    assert moments == {"mu": jnp.bfloat16, "nu": jnp.float32}
    gradients = np.random.default_rng(0).normal(0.1, 1, (100, 50))
    rates = [float(learning_rate(c)(n)) for n in range(100)]
    options = (c.optimizer.clip_norm, c.optimizer.weight_decay)
    *_, expected = adamw(np.ones(50), gradients, rates, *options)
    for gradient in gradients:
        updates, state = optimizer.update({"linear": jnp.asarray(gradient, jnp.float32)}, state, w)
        w = jax.tree.map(jnp.add, w, updates)
    largest = np.abs(expected - 1).max()
    assert 0.005 < largest < 0.1, "a hundred updates, each of which bfloat16 weights would lose"
    np.testing.assert_allclose(w["linear"], expected, rtol=0, atol=0.02 * largest)
