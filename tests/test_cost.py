"""FLOPs against arithmetic done by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh

from prope import model, sharding
from prope.config import default_config
from prope.cost import flops as cost
from prope.cost.flops import num_parameters
from prope.cost.traced import count_flops
from prope.optimizer import make_optimizer
from prope.step import batch_shapes, init_state, make_train_step


def flops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_flops(jax.make_jaxpr(function)(*arguments))


def gemma_2b():
    config = default_config().model
    config.update(
        num_layers=18,
        embed_dim=2048,
        num_heads=8,
        head_dim=256,
        hidden_dim=16_384,
        vocab_size=256_128,
    )
    return config


def test_gemma_2b_needs_the_flops_that_are_published_for_it():
    matmuls = 18 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 16_384) + 256_128 * 2048
    assert cost.model_flops_per_token(gemma_2b(), 8192) == 6 * matmuls + 6 * 18 * 2048 * 8192
    for length, billions in ((8192, 16.85), (4096, 15.94), (2048, 15.49)):
        assert round(cost.model_flops_per_token(gemma_2b(), length) / 1e9, 2) == billions


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_model_flops_are_six_per_parameter_and_attention(kv_heads):
    config = gemma_2b()
    config.num_kv_heads = kv_heads
    parameters = num_parameters(jax.eval_shape(lambda: model.init(config, jax.random.key(0))))
    norms = (2 * 18 + 1) * 2048
    assert cost.model_flops_per_token(config, 2) == 6 * (parameters - norms) + 6 * 18 * 2048 * 2


def test_layers_with_a_window_count_the_keys_that_it_shows():
    config, T, W = gemma_2b(), 64, 24
    full = cost.model_flops_per_token(config, T)
    config.layer_types, config.sliding_window = (
        ("sliding_attention", "sliding_attention", "full_attention"),
        W,
    )
    seen = np.array(
        [min(t + 0.5, W) for t in range(T)]
    )  # half of its own key, as half of T x T is what T^2 / 2 counts
    less = (T / 2 - (W - W * W / (2 * T))) * 12 * 8 * 256 * 12
    assert full - cost.model_flops_per_token(config, T) == pytest.approx(less)
    assert pytest.approx(seen.mean(), rel=0.02) == W - W * W / (2 * T)
    config.sliding_window = 2 * T
    assert cost.model_flops_per_token(config, T) == full


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 32, 1), (2, 8, 4)])
def test_without_remat_no_matmul_of_a_step_is_computed_twice_on_any_mesh(shape):
    """Short sequences: a flash attention's backward pass computes its scores again, which is 2 % at 8192 tokens."""
    config = default_config()
    config.model.update(gemma_2b().to_dict())
    config.model.update(num_layers=2, dtype="bfloat16", remat="none", attention="xla")
    config.batch_size, config.data.seq_len = 64, 128
    optimizer, mesh = (
        make_optimizer(config),
        AbstractMesh((*shape[:2], 1, shape[2]), sharding._AXES),
    )
    state = jax.eval_shape(functools.partial(init_state, config, optimizer))
    with sharding.use(mesh):
        step = jax.make_jaxpr(make_train_step(config, optimizer))(
            *state, batch_shapes(config, mesh)
        )
    ratio = count_flops(step) / 64 / 128 / cost.model_flops_per_token(config.model, 128)
    assert 1 <= ratio <= 1.01


def chain(x, weights, layer=lambda x, w: jnp.tanh(x @ w)):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def test_a_scan_counts_as_often_as_it_runs():
    def unrolled(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    assert (
        flops(chain, (3, 8), (5, 8, 8)) == flops(unrolled, (3, 8), (5, 8, 8)) == 5 * 2 * 3 * 8 * 8
    )
    nested = lambda x, weights: jax.lax.scan(lambda x, w: (chain(x, w), None), x, weights)[0]  # noqa: E731
    assert flops(nested, (3, 8), (7, 5, 8, 8)) == 7 * 5 * 2 * 3 * 8 * 8
    mapped = lambda x: jax.lax.map(lambda row: row @ x.T, x)  # noqa: E731
    assert flops(mapped, (6, 8)) == 6 * 2 * 6 * 8
    repeated = lambda x: jax.lax.fori_loop(0, 4, lambda i, x: x @ x, x)  # noqa: E731
    assert flops(repeated, (8, 8)) == 4 * 2 * 8**3


def test_remat_adds_one_forward():
    once = 5 * 2 * 3 * 8 * 8
    policy = jax.checkpoint_policies.nothing_saveable
    again = lambda x, w: chain(x, w, jax.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy))  # noqa: E731
    for function, forwards in ((chain, 1), (again, 2)):
        training = jax.jit(jax.grad(lambda x, w, f=function: f(x, w).sum(), argnums=(0, 1)))
        assert flops(training, (3, 8), (5, 8, 8)) == (forwards + 2) * once


def test_batched_contractions():
    assert (
        flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7))
        == 2 * 2 * 3 * 5 * 7
    )
    assert flops(lambda a, b: jnp.einsum("ij,ij->", a, b), (3, 5), (3, 5)) == 2 * 3 * 5


def test_calls_are_entered_and_of_branches_the_costliest_counts():
    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert flops(jax.jit(square), (8, 8)) == 2 * 8**3
    assert flops(jax.value_and_grad(lambda x: square(x).sum()), (8, 8)) == 3 * 2 * 8**3
    either = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)  # noqa: E731
    assert flops(either, (8, 8)) == 2 * 2 * 8**3


def test_what_no_result_needs_is_not_counted():
    assert flops(lambda x: (x @ x, x)[1], (8, 8)) == 0
    assert (
        flops(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x) @ x)(x).sum()), (8, 8))
        == 2 * 2 * 8**3
    )


def test_a_loop_of_unknown_length_is_an_error_where_it_has_matmuls():
    counting = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x)  # noqa: E731
    assert flops(counting, (8, 8)) == 0
    with pytest.raises(ValueError, match="matmuls in a while cannot be counted"):
        flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), (8, 8))


def test_a_kernel_of_unknown_flops_is_an_error():
    def double(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    kernel = pl.pallas_call(double, jax.ShapeDtypeStruct((8, 8), jnp.float32), name="my_kernel")
    repeated = lambda x: jax.lax.fori_loop(0, 4, lambda i, x: kernel(x), x)  # noqa: E731
    with pytest.raises(ValueError, match="kernel my_kernel are not known"):
        flops(repeated, (8, 8))
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID")  # noqa: E731
    with pytest.raises(ValueError, match="kernel conv_general_dilated are not known"):
        flops(convolve, (3, 4, 20), (6, 4, 5))


def attention(block_kv=256, heads=3, T=1024, **sizes):
    sizes = splash.BlockSizes(
        block_q=256,
        block_kv=block_kv,
        block_kv_compute=128,
        block_q_dkv=256,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=128,
        **sizes,
    )
    return splash.make_splash_mqa(
        masks.MultiHeadMask([masks.CausalMask((T, T))] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
    )


QKV = (2, 3, 1024, 128), (2, 1024, 128), (2, 1024, 128)
MATMUL = 2 * 256 * 256 * 128  # of one block of 256 queries and 256 keys


@pytest.mark.parametrize(
    ("block_kv", "blocks"), [(256, 4 + 3 + 2 + 1), (512, 2 * (1 + 1 + 2 + 2)), (1024, 16)]
)
def test_splash_attention_counts_the_blocks_that_it_visits(block_kv, blocks):
    run = jax.vmap(attention(block_kv))
    assert flops(run, *QKV) == 2 * 3 * blocks * 2 * MATMUL
    layers = lambda q, k, v: jax.lax.scan(lambda q, _: (run(q, k, v), None), q, length=5)[0]  # noqa: E731
    assert flops(layers, *QKV) == 5 * 2 * 3 * blocks * 2 * MATMUL


@pytest.mark.parametrize(
    ("matmuls", "sizes"),
    [(3 + 4, {"block_q_dq": 256, "block_kv_dq": 256}), (5, {"use_fused_bwd_kernel": True})],
)
def test_splash_attention_backward_in_scanned_remat(matmuls, sizes):
    run = jax.vmap(attention(**sizes))
    layer = jax.checkpoint(lambda q, k, v: run(q, k, v))
    training = jax.grad(
        lambda q, k, v: jax.lax.scan(lambda q, _: (layer(q, k, v), None), q, length=5)[0].sum(),
        argnums=(0, 1, 2),
    )
    dots_of_output_and_pull = 2 * 3 * 1024 * 128 * 2
    assert flops(training, *QKV) == 5 * (
        2 * 3 * 10 * (2 + 2 + matmuls) * MATMUL + dots_of_output_and_pull
    )


def test_splash_attention_with_a_mask_that_is_not_a_constant_is_an_error():
    kernel = attention()
    shapes = [jax.ShapeDtypeStruct(shape[1:], jnp.float32) for shape in QKV]
    with pytest.raises(ValueError, match="splash_mqa_fwd.* visits are not constant"):
        count_flops(jax.make_jaxpr(lambda kernel, q, k, v: kernel(q, k, v))(kernel, *shapes))


# A loop of 8 / 2 runs whose length only its condition tells; an array in VMEM; an update in place; a permute in two
# halves; an all-gather that one fusion starts, another runs beside, and a third ends; one all-reduce of two arrays.


def test_chips_are_found_by_what_jax_calls_them():
    assert [cost.peak_flops(kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite")] == [
        197e12,
        459e12,
        918e12,
    ]
    assert cost.peak_flops("NVIDIA H200") == cost.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert (
        cost.peak_flops("cpu")
        is cost.peak_flops("NVIDIA H100 PCIe")
        is cost.peak_flops("TPU v5 ultra")
        is None
    )


def test_the_roofline_is_the_slowest_part():
    traffic = {"all-gather": {"count": 2, "bytes": 3e11}, "all-reduce": {"count": 1, "bytes": 1e11}}
    parts = {"compute": 1.0, "memory": 0.5, "communication": 2.0, "between_slices": 0.0}
    assert (
        cost.roofline_seconds(197e12, 819e9 / 2, traffic, cost.CHIPS["v5e"])
        == {"step": 2.0} | parts
    )
    slow = traffic | {
        "all-reduce between slices": {"count": 1, "bytes": 25e9}
    }  # of one chip of 8 behind 25 GB/s
    found = cost.roofline_seconds(197e12, 819e9 / 2, slow, cost.CHIPS["v5e"])
    assert found == {"step": 8.0} | parts | {"between_slices": 8.0}
    parts |= {
        "compute": 3.0,
        "communication": 4e11 / 450e9,
        "memory": 0.25,
        "between_slices": 0.5,
    }  # one card a GPU
    assert (
        cost.roofline_seconds(3 * 989e12, 1.2e12, slow, cost.CHIPS["h200"]) == {"step": 3.0} | parts
    )
