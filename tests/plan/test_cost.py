"""FLOPs and the roofline against arithmetic done by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, AxisType
from support.models import SWITCHES

from prope import sharding
from prope.cost import flops
from prope.cost.traced import count_flops
from prope.optimizer import make_optimizer
from prope.spec.data import DataSpec
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.step import batch_shapes, init_state, make_train_step

# --- Closed formulas ----------------------------------------------------------------------------


def gemma_2b():
    return ModelSpec(
        num_layers=18,
        embed_dim=2048,
        num_heads=8,
        head_dim=256,
        hidden_dim=16_384,
        vocab_size=256_128,
    )


def test_gemma_2b_needs_the_flops_that_are_published_for_it():
    query_and_output = 2 * 2048 * 2048
    key_and_value = 2 * 2048 * 256
    mlp = 3 * 2048 * 16_384
    layers = 18 * (query_and_output + key_and_value + mlp)
    head = 256_128 * 2048
    attention = 18 * 2048 * 8192
    expected = 6 * (layers + head + attention)
    assert flops.model_flops_per_token(gemma_2b(), 8192) == expected
    for length, billions in ((8192, 16.85), (4096, 15.94), (2048, 15.49)):
        count = flops.model_flops_per_token(gemma_2b(), length)
        assert round(count / 1e9, 2) == billions


GEMMA_4 = {
    "global_head_dim": 512,
    "head_dim": 256,
    "post_norms": True,
    "use_qk_norm": True,
    "use_skip_scale": True,
    "use_value_norm": True,
    "vocab_size": 262144,
}
SHARED_KV = {"per_layer_input_dim": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
KEY_IS_VALUE = {"num_global_kv_heads": 1, "global_key_is_value": True}
OF_GEMMA_4 = {  # D, L, N, K, F, window, layers of a period; other fields
    "E2B": ((1536, 35, 8, 1, 6144, 512, 5), SHARED_KV),
    "12B": ((3840, 48, 16, 8, 15360, 1024, 6), KEY_IS_VALUE),
}


@pytest.mark.parametrize("name", OF_GEMMA_4)
def test_gemma_4_has_the_flops_of_its_matrices(name):
    """Layers with a window have heads of 256 lanes, the others of 512."""
    (D, L, N, K, F, W, period), fields = OF_GEMMA_4[name]
    pattern = ("sliding_attention",) * (period - 1) + ("full_attention",)
    sizes = {"embed_dim": D, "num_layers": L, "num_heads": N, "num_kv_heads": K, "hidden_dim": F}
    spec = ModelSpec(**GEMMA_4, **fields, **sizes, layer_types=pattern, sliding_window=W)
    T = 8192
    Q = spec.per_layer_input_dim
    matrices = 262144 * D + L * Q * D
    attention = 0
    for number in range(L):
        is_full = (number + 1) % period == 0
        shares = number >= L - spec.num_kv_shared_layers
        H = 512 if is_full else 256
        own = 0 if shares else 2 * K * H * D
        if is_full and name == "12B":
            own = H * D
        matrices += 2 * N * H * D + own + 3 * F * (1 + shares) * D + 2 * Q * D
        attention += 12 * N * H * (T / 2 if is_full else W - W * W / (2 * T))
    assert flops.model_flops_per_token(spec, T) == pytest.approx(6 * matrices + attention)


def test_layers_with_a_window_count_the_keys_that_it_shows():
    T = 64
    W = 24
    spec = gemma_2b()
    full = flops.model_flops_per_token(spec, T)
    pattern = ("sliding_attention", "sliding_attention", "full_attention")
    windowed = dataclasses.replace(spec, layer_types=pattern, sliding_window=W)
    # Half of a query's own key counts, as in T^2 / 2 for T x T pairs.
    keys = np.arange(T) + 0.5
    hidden_keys = (keys - np.minimum(keys, W)).mean()
    saved = full - flops.model_flops_per_token(windowed, T)
    assert saved == pytest.approx(12 * 12 * 8 * 256 * hidden_keys)
    wide = dataclasses.replace(windowed, sliding_window=2 * T)
    assert flops.model_flops_per_token(wide, T) == full


def test_chips_are_found_by_what_jax_calls_them():
    peaks = {
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "TPU v5 ultra": None,
        "cpu": None,
    }
    chips = {kind: flops.find_chip(kind) for kind in peaks}
    assert {kind: chip and chip.flops for kind, chip in chips.items()} == peaks


def test_the_roofline_divides_each_amount_by_its_peak():
    traffic = {
        "all-gather": {"bytes": 3e11},
        "all-reduce": {"bytes": 1e11},
        "all-reduce between slices": {"bytes": 25e9},
    }
    assert flops.roofline_seconds(197e12, 819e9 / 2, traffic, flops.CHIPS["v5e"]) == {
        "compute": 1.0,
        "memory": 0.5,
        "communication": 2.0,
        "between_slices": 8.0,  # one chip of 8 behind 25 GB/s
    }
    assert flops.roofline_seconds(3 * 989e12, 1.2e12, traffic, flops.CHIPS["h200"]) == {
        "compute": 3.0,
        "memory": 0.25,
        "communication": 4e11 / 450e9,
        "between_slices": 0.5,  # a network card for each GPU
    }
    unknown = flops.roofline_seconds(1.0, 1.0, traffic, flops.CHIPS["v4"])
    assert unknown["between_slices"] is None


# --- Traced programs ----------------------------------------------------------------------------


SQUARE = (8, 8)
MATMUL = 2 * 8**3  # FLOPs of a product of two squares


def flops_of(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return count_flops(jaxpr)


def flops_of_step(spec, mesh_shape):
    optimizer = make_optimizer(spec)
    mesh = AbstractMesh(
        mesh_shape, sharding.make_mesh().axis_names, axis_types=(AxisType.Auto,) * 4
    )
    state = jax.eval_shape(functools.partial(init_state, spec, optimizer))
    step = make_train_step(spec, optimizer)
    with sharding.use(mesh):
        batch = batch_shapes(spec, mesh)
        jaxpr = jax.make_jaxpr(step)(*state, batch)
    return count_flops(jaxpr)


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1, 1), (2, 8, 1, 4)])
@pytest.mark.parametrize("switches", [{}, SWITCHES], ids=("gemma", "switched"))
def test_without_remat_no_matmul_of_a_step_is_computed_twice_on_any_mesh(mesh_shape, switches):
    """In short sequences: a flash attention's backward pass computes its scores again."""
    fields = {"num_layers": 2, "dtype": "bfloat16", "remat": "none", "attention": "xla"}
    model = dataclasses.replace(gemma_2b(), **fields | switches)
    spec = Spec(batch_size=64, model=model, data=DataSpec(seq_len=128))
    model_flops = 64 * 128 * flops.model_flops_per_token(model, 128)
    assert 1 <= flops_of_step(spec, mesh_shape) / model_flops <= 1.01


def layer(x, w):
    return jnp.tanh(x @ w)


def layers(x, weights, layer=layer):
    def body(x, w):
        return layer(x, w), None

    return jax.lax.scan(body, x, weights)[0]


def repeat(step, times):
    def repeated(x, *others):
        def body(_, x):
            return step(x, *others)

        return jax.lax.fori_loop(0, times, body, x)

    return repeated


def test_a_scan_counts_as_often_as_it_runs():
    stack = (5, 8, 8)
    nested = functools.partial(layers, layer=layers)

    def unrolled(x, weights):
        for w in weights:
            x = layer(x, w)
        return x

    def mapped(x):
        return jax.lax.map(lambda row: row @ x.T, x)

    assert flops_of(layers, SQUARE, stack) == 5 * MATMUL
    assert flops_of(unrolled, SQUARE, stack) == 5 * MATMUL
    assert flops_of(nested, SQUARE, (7, *stack)) == 7 * 5 * MATMUL
    assert flops_of(mapped, (6, 8)) == 6 * (2 * 6 * 8)
    assert flops_of(repeat(jnp.matmul, 4), SQUARE, SQUARE) == 4 * MATMUL


@pytest.mark.parametrize("remat", [False, True])
def test_remat_adds_one_forward(remat):
    policy = jax.checkpoint_policies.nothing_saveable
    rematted = jax.checkpoint(layer, policy=policy)

    def loss(x, weights):
        return layers(x, weights, rematted if remat else layer).sum()

    training = jax.jit(jax.grad(loss, argnums=(0, 1)))
    forward = 5 * MATMUL
    assert flops_of(training, SQUARE, (5, 8, 8)) == (3 + remat) * forward


def test_batched_contractions():
    def batched(a, b):
        return jnp.einsum("bij,bjk->bik", a, b)

    def inner(a, b):
        return jnp.einsum("ij,ij->", a, b)

    assert flops_of(batched, (2, 3, 5), (2, 5, 7)) == 2 * (2 * 3 * 5 * 7)
    assert flops_of(inner, (3, 5), (3, 5)) == 2 * (3 * 5)


def test_calls_are_entered():
    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

    def loss(x):
        return square(x).sum()

    assert flops_of(jax.jit(square), SQUARE) == MATMUL
    assert flops_of(jax.value_and_grad(loss), SQUARE) == 3 * MATMUL


def test_the_costliest_branch_counts():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert flops_of(either, SQUARE) == 2 * MATMUL


def test_what_no_result_needs_is_not_counted():
    def unused(x):
        _ = x @ x
        return x

    @jax.checkpoint
    def matmul(x):
        return jnp.sin(x) @ x

    def rematted(x):
        return matmul(x).sum()

    assert flops_of(unused, SQUARE) == 0
    assert flops_of(jax.grad(rematted), SQUARE) == 2 * MATMUL


def test_a_loop_of_unknown_length_is_an_error_where_it_has_matmuls():
    def loop(body):
        return lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, body, x)

    assert flops_of(loop(jnp.sin), SQUARE) == 0
    with pytest.raises(ValueError, match="matmuls in a while cannot be counted"):
        flops_of(loop(lambda x: x @ x), SQUARE)


def test_a_kernel_of_unknown_flops_is_an_error():
    def square(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    result = jax.ShapeDtypeStruct(SQUARE, jnp.float32)
    kernel = pl.pallas_call(square, result, name="my_kernel")
    with pytest.raises(ValueError, match="kernel my_kernel are not known"):
        flops_of(repeat(kernel, 4), SQUARE)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID")

    with pytest.raises(ValueError, match="kernel conv_general_dilated are not known"):
        flops_of(convolve, (3, 4, 20), (6, 4, 5))


QUERY = (2, 3, 1024, 128)
KEY = (2, 1024, 128)
QKV = (QUERY, KEY, KEY)
BLOCK_MATMUL = 2 * 256 * 256 * 128  # FLOPs of a block of 256 queries and 256 keys


def splash_attention(block_kv=256, **sizes):
    sizes = splash.BlockSizes(
        block_q=256,
        block_kv=block_kv,
        block_kv_compute=128,
        block_q_dkv=256,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=128,
        **sizes,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((1024, 1024))] * 3)
    return splash.make_splash_mqa(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


@pytest.mark.parametrize(
    ("block_kv", "blocks"), [(256, 4 + 3 + 2 + 1), (512, 2 * (1 + 1 + 2 + 2)), (1024, 16)]
)
def test_splash_attention_counts_the_blocks_that_it_visits(block_kv, blocks):
    attend = jax.vmap(splash_attention(block_kv))
    heads = 2 * 3
    once = heads * blocks * 2 * BLOCK_MATMUL
    assert flops_of(attend, *QKV) == once
    assert flops_of(repeat(attend, 5), *QKV) == 5 * once


@pytest.mark.parametrize(
    ("matmuls", "sizes"),
    [(3 + 4, {"block_q_dq": 256, "block_kv_dq": 256}), (5, {"use_fused_bwd_kernel": True})],
)
def test_splash_attention_backward_in_scanned_remat(matmuls, sizes):
    attend = jax.checkpoint(jax.vmap(splash_attention(**sizes)))

    def loss(*arrays):
        return repeat(attend, 5)(*arrays).sum()

    heads = 2 * 3
    forward_twice = 2 + 2
    attention = heads * 10 * (forward_twice + matmuls) * BLOCK_MATMUL
    output_dot_cotangent = heads * 1024 * 128 * 2
    training = jax.grad(loss, argnums=(0, 1, 2))
    assert flops_of(training, *QKV) == 5 * (attention + output_dot_cotangent)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_ranks_of_a_split_sequence_share_its_blocks(scan_layers):
    sizes = {"head_dim": 128, "num_layers": 2}
    model = ModelSpec(attention="splash", scan_layers=scan_layers, **sizes)
    spec = Spec(batch_size=2, model=model, data=DataSpec(seq_len=4096))
    assert flops_of_step(spec, (1, 1, 2, 1)) == flops_of_step(spec, (1, 1, 1, 1))


def test_splash_attention_with_a_mask_that_is_not_a_constant_is_an_error():
    def attend(kernel, *arrays):
        return kernel(*arrays)

    shapes = [jax.ShapeDtypeStruct(shape[1:], jnp.float32) for shape in QKV]
    jaxpr = jax.make_jaxpr(attend)(splash_attention(), *shapes)
    with pytest.raises(ValueError, match="splash_mqa_fwd.* visits are not constant"):
        count_flops(jaxpr)
