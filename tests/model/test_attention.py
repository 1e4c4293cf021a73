"""Causal attention and its gradient against their formulas in float64, and what computes it."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.compiled import array_shapes
from support.models import (
    attention_with_gradients,
    check_attention,
    draw_inputs,
    draw_model,
    draw_segments,
    scaled_attention,
    small,
)
from support.models import draw_attention as draw

from prope import model
from prope.attention import attention, choose_implementation
from prope.cost.traced import count_flops
from prope.kernels import blockwise
from prope.kernels.mask import CAUSAL, Mask
from prope.rope import rotation_table
from prope.sharding import rank_positions
from prope.stack.layers import layers


def slow(*case):
    """A case of the slow tests."""
    return pytest.param(*case, marks=pytest.mark.slow)


def segmented(T, B=2, window=None, sinks=0):
    """A mask of a window, in rows of several documents."""
    return Mask(draw_segments(B, T), window, sinks)


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "mask"),
    [
        (9, 4, 1, CAUSAL),
        (9, 4, 4, segmented(9)),
        (9, 4, 2, Mask(window=2)),
        (9, 4, 2, segmented(9, window=3)),
        (9, 4, 2, segmented(9, window=2, sinks=1)),
        (128, 4, 2, CAUSAL),
        (300, 4, 2, segmented(300)),
        (300, 4, 2, Mask(window=40)),
        (300, 4, 2, segmented(300, window=129)),
        (300, 4, 2, Mask(window=300)),
        (300, 4, 2, Mask(window=40, sinks=3)),
        (300, 4, 2, segmented(300, window=40, sinks=130)),
        (1025, 4, 2, segmented(1025, B=1, window=200)),
        slow(9, 1, 1, CAUSAL),
        slow(9, 6, 3, CAUSAL),
        slow(300, 4, 1, CAUSAL),
        slow(300, 3, 3, segmented(300)),
        slow(1025, 4, 2, CAUSAL),
    ],
)
def test_blocks_of_queries_and_their_gradients_equal_the_formula(T, heads, kv_heads, mask):
    B = 1 if T > 300 else 2
    arrays = draw(T, T, heads, kv_heads, H=8 * B, B=B)
    check_attention(*arrays, mask, implementation="xla")


@pytest.mark.parametrize("mask", [CAUSAL, segmented(300, window=40)])
def test_capped_scores_and_their_gradients_equal_the_formula(mask):
    """Without a care for masked scores, their gradient would be infinite times 0."""
    check_attention(*draw(300, 300, 4, 2, H=8), mask, cap=0.5, implementation="xla")


@pytest.mark.parametrize("unrolled", [False, slow(True)])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "mask"),
    [(384, 4, 4, segmented(384, window=100)), (577, 6, 2, Mask(window=300))],
)
def test_loops_over_blocks_and_their_gradients_equal_the_formula(
    T, heads, kv_heads, mask, unrolled, monkeypatch
):
    monkeypatch.setattr(blockwise, "_MOST_UNROLLED", 100 if unrolled else 0)
    check_attention(*draw(T, T, heads, kv_heads, H=8), mask, implementation="xla")


@pytest.mark.parametrize("C", [1, 4])
@pytest.mark.parametrize(
    ("window", "sinks"),
    [(None, 0), (1, 0), (100, 0), (128, 0), (129, 0), (700, 0), (100, 4), (100, 300), (700, 128)],
)
def test_blocks_are_those_in_which_a_query_sees_a_key(C, window, sinks):
    T = 1024
    by_rank = rank_positions(C, T)
    block, blocks_by_rank = blockwise.visible_blocks(by_rank, Mask(window=window, sinks=sinks))
    (seen,) = oracles.causal_mask(T, window=window, sinks=sinks)
    counts = []
    for positions, listed in zip(by_rank, blocks_by_rank, strict=True):
        blocks = seen[positions].reshape(-1, block, T // block, block)
        expected = np.argwhere(blocks.any(axis=(1, 3)))
        filled = listed[listed[:, 1] < T // block]
        np.testing.assert_array_equal(filled, expected)
        counts.append(len(expected))
    assert max(counts) == blocks_by_rank.shape[1]
    if window is None:
        assert max(counts) == min(counts)


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "mask"),
    [
        (128, 4, 2, segmented(128)),
        (256, 2, 1, segmented(256, window=100)),
        slow(256, 2, 2, CAUSAL),
        slow(384, 2, 1, segmented(384)),
        slow(384, 2, 1, Mask(window=2)),
        slow(384, 2, 1, Mask(window=129)),
    ],
)
def test_splash_equals_the_formula(interpreted, T, heads, kv_heads, mask):
    arrays = draw(T, T, heads, kv_heads, H=128)
    check_attention(*arrays, mask, implementation="splash")


def gradients(query, key, value, **options):
    """The gradients of the output's sum of squares."""

    def square(query, key, value):
        output = attention(query, key, value, **options)
        return (output.astype(jnp.float32) ** 2).sum()

    return jax.grad(square, (0, 1, 2))(query, key, value)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_a_window_skips_the_keys_that_no_query_sees(implementation):
    arrays = draw(4096, 4096, 1, 1, H=128, B=1)

    def flops(window):
        run = functools.partial(gradients, implementation=implementation, mask=Mask(window=window))
        return count_flops(jax.make_jaxpr(run)(*arrays))

    assert flops(512) < 0.4 * flops(None)  # 0.23 where blocks are single queries


def test_the_scores_never_exist_whole():
    B = 2
    T = 1024
    N = 4
    arrays = draw(T, T, N, 2, H=8, B=B)
    mask = segmented(T)

    def whole(query, key, value):
        grouped = query.reshape(B, T, 2, 2, 8)
        scores = jnp.einsum("btngh,bsnh->bngts", grouped, key)
        return jnp.einsum("bngts,bsnh->btngh", jax.nn.softmax(scores), value)

    def measure(run):
        """The elements of the largest array; whether any has two axes of length T."""
        text = jax.jit(run).lower(*arrays).compile().as_text()
        shapes = [dims for _, dims in array_shapes(text)]
        assert len(shapes) > 10
        largest = max(map(math.prod, shapes))
        return largest, any(dims.count(T) > 1 for dims in shapes)

    assert measure(whole) == (B * N * T * T, True)
    largest, has_square = measure(functools.partial(gradients, mask=mask, implementation="xla"))
    assert largest <= B * N * T * T // 4
    assert not has_square


def test_memory_of_attention_grows_as_the_length():
    def total(query, key, value):
        return attention(query, key, value, implementation="xla").sum()

    def temporary_bytes(T):
        shapes = [jax.ShapeDtypeStruct((1, T, heads, 64), np.float32) for heads in (4, 1, 1)]
        gradient = jax.jit(jax.grad(total, (0, 1, 2)))
        compiled = gradient.lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    half = temporary_bytes(16_384)
    assert half < 100 * 2**20
    assert temporary_bytes(32_768) < 2.1 * half


def check_cache(arrays, first, mask=CAUSAL, slots=lambda x: x, multiple=8, **options):
    """Compares attention to a cache of keys with the formula.

    The queries [B, T, N, H] come from position `first` [B] on. `slots` makes the cache of all keys
    and values [B, S, K, H].
    """
    query, key, value = arrays
    first = np.array(first)
    positions = first[:, None, None] + np.arange(query.shape[1])[:, None]
    keys = np.arange(key.shape[1])
    seen = keys <= positions
    if mask.window is not None:
        seen = seen & ((keys > positions - mask.window) | (keys < mask.sinks))
    formula = functools.partial(oracles.attention, seen=seen, cap=options.get("cap"))
    expected, movement = measure_rounding(formula, *arrays)
    newest = jnp.asarray(first + query.shape[1] - 1)
    attend = functools.partial(
        scaled_attention, first_query=jnp.asarray(first), newest_key=newest, **options
    )
    output = attend(query, slots(key), slots(value), mask)
    assert_equal_but_rounding(output, expected, movement, multiple)


@pytest.mark.parametrize(
    ("T", "S", "kv_heads", "first", "implementation"),
    [
        (3, 12, 1, (0, 0), "auto"),
        (3, 12, 1, (1, 5), "auto"),
        (3, 12, 1, (9, 0), "auto"),
        (300, 400, 2, (70, 3), "splash"),  # whatever is requested
        (3, 1200, 1, (510, 3), "auto"),  # the last query sees the first slot of the second block
        (150, 1200, 2, (1050, 3), "auto"),  # three blocks of slots, of which the last two overlap
    ],
)
@pytest.mark.parametrize("window", [None, 1, 500])
def test_queries_may_come_after_cached_keys(T, S, kv_heads, first, implementation, window):
    arrays = draw(T, S, 4, kv_heads)
    check_cache(arrays, first, Mask(window=window), implementation=implementation)


@pytest.mark.parametrize(("dtype", "multiple"), [("float32", 8), ("bfloat16", 0.5)])
def test_a_cache_of_several_blocks_has_sinks_beside_a_window_and_a_cap(dtype, multiple):
    arrays = draw(150, 1200, 4, 2, dtype=dtype)
    mask = Mask(window=40, sinks=3)
    check_cache(arrays, (1050, 3), mask, cap=5.0, multiple=multiple)


def test_slots_after_the_block_of_the_last_query_are_not_read():
    arrays = draw(3, 1200, 4, 2)
    check_cache(arrays, (400, 500), slots=lambda x: x.at[:, 512:].set(np.nan))


def test_a_cache_of_a_window_has_the_newest_keys_in_any_order():
    first = np.array([1500, 900])
    T = 20
    S = 1100
    newest = first[:, None] + T - 1
    age = (newest - np.arange(S)) % S
    in_slots = np.maximum(newest - age, 0)  # an empty slot holds anything
    rows = np.arange(2)[:, None]
    mask = Mask(window=700)
    check_cache(draw(T, 2000, 4, 2), first, mask, slots=lambda x: x[rows, in_slots])


def test_large_scores_do_not_overflow():
    query, key, value = draw(9, 9, 2, 1)
    query = query * 1e4
    key = key * 1e4
    expected = oracles.attention(query, key, value, oracles.causal_mask(9))
    results = attention_with_gradients(query, key, value, value.repeat(2, axis=2))
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=1e-4)
    assert all(np.isfinite(array).all() for array in results)


def test_softmax_is_float32_for_bfloat16_inputs():
    """A softmax in bfloat16 would be off by several units of the inputs."""
    check_attention(*draw(300, 300, 2, 1, dtype=jnp.bfloat16), multiple=0.5)


@pytest.mark.parametrize("head_dim", [32, pytest.param(64, marks=pytest.mark.slow), 128, 256])
def test_bfloat16_queries_are_rotated_and_scaled_with_one_rounding(head_dim, monkeypatch):
    """At 32 and 128 the scale is no power of 2; a second rounding would double the error."""
    config = small(head_dim=head_dim, dtype="bfloat16", num_layers=1, scan_layers=False)
    seen = {}

    def capture(query, *arguments, **options):
        seen["query"] = query
        return attention(query, *arguments, **options)

    monkeypatch.setattr(model, "attention", capture)
    params, _, positions = draw_model(config)
    x = jnp.asarray(draw_inputs(config.embed_dim, positions)[:, :, 0], jnp.bfloat16)
    layer_params = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    freqs = oracles.frequencies(head_dim, p=config.rope_percentage)
    table = jax.jit(lambda positions: rotation_table(positions, freqs))(positions)
    _, captured = model.run_layer(config, layer_params, x, table, layers(config)[0])
    rotated = oracles.rotate(captured.query, positions, freqs)
    expected = rotated / np.sqrt(head_dim)
    query = seen["query"]
    assert query.dtype == jnp.bfloat16
    half_ulp = 2.0**-9 * 2 ** np.ceil(np.log2(np.abs(expected) + 1e-30))
    error = np.abs(oracles.float64(query) - expected)
    assert (error <= half_ulp + 1e-6 * np.abs(expected).max()).all()


@pytest.mark.parametrize("T", [512, 1024])
def test_splash_takes_its_largest_blocks(T):
    """Traced, not run: the kernel refuses blocks that do not divide one another."""
    arrays = [jax.ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    run = functools.partial(gradients, implementation="splash")
    results = jax.eval_shape(run, *arrays)
    for result, array in zip(results, arrays, strict=True):
        assert (result.shape, result.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(4, 1, None), (4, 2, None), (2, 2, None), (4, 1, 7)]
)
def test_cudnn_is_called_with_what_equals_the_formula(monkeypatch, heads, kv_heads, window):
    """JAX's function that calls NVIDIA's kernel, which is not here, computes the same by XLA."""
    function = jax.nn.dot_product_attention
    calls = []

    def by_xla(*arrays, implementation, **options):
        options = {name: value for name, value in options.items() if value is not None}
        calls.append((implementation, set(options)))
        return function(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    mask = Mask(window=window)
    check_attention(*draw(20, 20, heads, kv_heads), mask, implementation="cudnn")
    # No array of a mask, no bias, no lengths.
    options = {"is_causal", "scale", *(["local_window_size"] if window else [])}
    assert calls == [("cudnn", options)]


# --- The choice -------------------------------------------------------------------------------


def make_gpu(compute_capability):
    """A GPU as `choose_implementation` sees it."""
    return SimpleNamespace(platform="gpu", compute_capability=compute_capability)


CPU = SimpleNamespace(platform="cpu")
TPU = SimpleNamespace(platform="tpu")
TURING = make_gpu("7.5")
AMPERE = make_gpu("8.0")
HOPPER = make_gpu("9.0")
BLACKWELL = make_gpu("10.0")
AMD = make_gpu("gfx942")

NOT_A_TPU = ("is a TPU kernel",)

# The device, what differs from 8192 tokens of head_dim 128 in bfloat16 without documents, what auto
# takes, and what the refusals of splash and of cudnn must name; nothing: it can run.
CHOICES = [
    (CPU, {}, "xla", NOT_A_TPU, ("is an NVIDIA kernel",)),
    (TPU, {"H": 256}, "splash", (), ("is an NVIDIA kernel", "head_dim", "256")),
    (
        TPU,
        {"T": 128, "dtype": "float32", "segmented": True},
        "splash",
        (),
        ("dtype", "mask_documents"),
    ),
    (TPU, {"T": 192}, "xla", ("sequence length", "192"), ("is an NVIDIA kernel",)),
    (TPU, {"T": 256, "H": 64}, "xla", ("head_dim", "64"), ("is an NVIDIA kernel",)),
    (TPU, {"sinks": 4}, "xla", ("sinks",), ("is an NVIDIA kernel", "sinks")),
    (AMPERE, {}, "cudnn", NOT_A_TPU, ()),
    (AMPERE, {"T": 100, "H": 64}, "cudnn", (*NOT_A_TPU, "100", "64"), ()),
    (AMPERE, {"H": 256}, "xla", NOT_A_TPU, ("head_dim", "128", "256")),
    (HOPPER, {"H": 256}, "cudnn", NOT_A_TPU, ()),
    (BLACKWELL, {"H": 256}, "cudnn", NOT_A_TPU, ()),
    (HOPPER, {"H": 384}, "xla", NOT_A_TPU, ("head_dim", "256", "384")),
    (HOPPER, {"dtype": "float32"}, "xla", NOT_A_TPU, ("dtype", "float32")),
    (HOPPER, {"segmented": True}, "xla", NOT_A_TPU, ("data.mask_documents",)),
    (HOPPER, {"heads_divide": False}, "xla", NOT_A_TPU, ("mesh.context",)),
    (HOPPER, {"capped": True}, "xla", NOT_A_TPU, ("model.attention_softcap",)),
    (HOPPER, {"sinks": 4}, "xla", NOT_A_TPU, ("sinks",)),
    (TURING, {}, "xla", NOT_A_TPU, ("Ampere",)),
    (AMD, {}, "xla", NOT_A_TPU, ("Ampere",)),
]


@pytest.mark.parametrize(
    ("device", "change", "choice", "splash", "cudnn"), CHOICES, ids=range(len(CHOICES))
)
def test_the_choice_and_its_reason(device, change, choice, splash, cudnn):
    workload = {"T": 8192, "H": 128, "dtype": "bfloat16", "segmented": False}
    choose = functools.partial(choose_implementation, device=device, **(workload | change))
    named = {"splash": splash, "cudnn": cudnn}
    name, reason = choose("auto")
    assert name == choice
    native = {"tpu": "splash", "gpu": "cudnn"}.get(device.platform)
    for words in named[native] if native else ("cpu",):
        assert words in reason
    assert choose("xla")[0] == "xla"
    for name, obstacles in named.items():
        if not obstacles:
            assert choose(name)[0] == name
            continue
        with pytest.raises(ValueError) as refused:
            choose(name)
        line = str(refused.value)
        assert line.startswith(f"attention={name} ") and "\n" not in line
        for words in obstacles:
            assert words in line
