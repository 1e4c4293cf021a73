"""Causal attention and its gradient against their formulas in float64, and what computes it."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
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
from prope.rope import rotation_table
from prope.stack.layers import layers

MASKED = pytest.mark.parametrize("masked", [False, True])


def slow(*case):
    """A case of the slow tests."""
    return pytest.param(*case, marks=pytest.mark.slow)


@MASKED
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "window"),
    [
        (9, 4, 1, None),
        (9, 4, 2, None),
        (9, 4, 4, None),
        (128, 4, 2, None),
        (300, 4, 2, None),
        (1025, 4, 2, None),
        (9, 4, 2, 2),
        (9, 4, 2, 3),
        (300, 4, 2, 40),
        (300, 4, 2, 129),
        (300, 4, 2, 300),
        (1025, 4, 2, 200),
        slow(9, 1, 1, None),
        slow(9, 6, 3, None),
        slow(300, 4, 1, None),
        slow(300, 3, 3, None),
    ],
)
def test_blocks_of_queries_and_their_gradients_equal_the_formula(
    T, heads, kv_heads, window, masked
):
    B = 1 if T > 300 else 2
    arrays = draw(T, T, heads, kv_heads, H=8 * B, B=B)
    segments = draw_segments(B, T) if masked else None
    check_attention(*arrays, segments, window=window, implementation="xla")


@MASKED
@pytest.mark.parametrize(("T", "window", "sinks"), [(9, 2, 1), (300, 40, 3), (300, 40, 130)])
def test_the_first_keys_stay_visible_beside_a_window(T, window, sinks, masked):
    arrays = draw(T, T, 4, 2, H=8)
    segments = draw_segments(2, T) if masked else None
    check_attention(*arrays, segments, window=window, sinks=sinks, implementation="xla")


@MASKED
@pytest.mark.parametrize("window", [None, 40])
def test_capped_scores_and_their_gradients_equal_the_formula(window, masked):
    """Without a care for masked scores, their gradient would be infinite times 0."""
    arrays = draw(300, 300, 4, 2, H=8)
    segments = draw_segments(2, 300) if masked else None
    check_attention(*arrays, segments, window=window, cap=0.5, implementation="xla")


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "window", "masked"),
    [
        (128, 4, 2, None, True),
        (256, 2, 2, None, False),
        (256, 2, 1, 100, True),
        slow(128, 4, 2, None, False),
        slow(256, 2, 2, None, True),
        slow(384, 2, 1, None, False),
        slow(384, 2, 1, None, True),
        slow(384, 2, 1, 2, False),
        slow(384, 2, 1, 129, False),
    ],
)
def test_splash_equals_the_formula(interpreted, T, heads, kv_heads, window, masked):
    arrays = draw(T, T, heads, kv_heads, H=128)
    segments = draw_segments(2, T) if masked else None
    check_attention(*arrays, segments, window=window, implementation="splash")


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
        run = functools.partial(gradients, implementation=implementation, window=window)
        return count_flops(jax.make_jaxpr(run)(*arrays))

    assert flops(512) < 0.4 * flops(None)  # 0.23 where blocks are single queries


@MASKED
def test_the_scores_never_exist_whole(masked):
    B = 2
    T = 1024
    N = 4
    arrays = draw(T, T, N, 2, H=8, B=B)
    segments = draw_segments(B, T) if masked else None

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
    for function in (attention, gradients):
        run = functools.partial(function, segment_ids=segments, implementation="xla")
        largest, has_square = measure(run)
        assert largest <= B * N * T * T // 4
        assert not has_square


def seen_keys(first, T, S, window=None, sinks=0):
    """Which of S keys the T queries from position `first` [B] on see: [B, T, S]."""
    positions = np.array(first)[:, None, None] + np.arange(T)[:, None]
    keys = np.arange(S)
    seen = keys <= positions
    if window is None:
        return seen
    return seen & ((keys > positions - window) | (keys < sinks))


def attend_to_cache(query, key, value, first, **options):
    """The output of queries [B, T, N, H] from position `first` [B] on, whose keys are cached."""
    first = jnp.array(first)
    return scaled_attention(
        query, key, value, first_query=first, newest_key=first + query.shape[1] - 1, **options
    )


def draw_cache_case(T, S, kv_heads):
    """Queries, keys and values with scores up to 12.

    At 50, float32 alone is off by 2e-6, and by how much depends on the CPU.
    """
    query, key, value = draw(T, S, 4, kv_heads)
    return query / 4, key, value


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
@pytest.mark.parametrize("window", [None, 1, 4, 500])
def test_queries_may_come_after_cached_keys(T, S, kv_heads, first, implementation, window):
    arrays = draw_cache_case(T, S, kv_heads)
    expected = oracles.attention(*arrays, seen_keys(first, T, S, window))
    output = attend_to_cache(*arrays, first, window=window, implementation=implementation)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_a_cache_of_several_blocks_has_sinks_beside_a_window_and_a_cap(dtype, error):
    first = (1050, 3)
    arrays = [x.astype(dtype) for x in draw_cache_case(150, 1200, 2)]
    seen = seen_keys(first, 150, 1200, window=40, sinks=3)
    expected = oracles.attention(*arrays, seen, cap=5.0)
    output = attend_to_cache(*arrays, first, window=40, sinks=3, cap=5.0)
    np.testing.assert_allclose(output.astype(np.float32), expected, rtol=0, atol=error)


def test_slots_after_the_block_of_the_last_query_are_not_read():
    first = (400, 500)
    query, key, value = draw_cache_case(3, 1200, 2)
    expected = oracles.attention(query, key, value, seen_keys(first, 3, 1200))
    unread_key = key.at[:, 512:].set(np.nan)
    unread_value = value.at[:, 512:].set(np.nan)
    output = attend_to_cache(query, unread_key, unread_value, first)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def test_a_cache_of_a_window_has_the_newest_keys_in_any_order():
    first = np.array([1500, 900])
    T = 20
    S = 1100
    query, key, value = draw_cache_case(T, 2000, 2)
    expected = oracles.attention(query, key, value, seen_keys(first, T, 2000, window=700))
    newest = first[:, None] + T - 1
    age = (newest - np.arange(S)) % S
    in_slots = np.maximum(newest - age, 0)  # an empty slot holds anything
    rows = np.arange(2)[:, None]
    output = attend_to_cache(query, key[rows, in_slots], value[rows, in_slots], first, window=700)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow():
    query, key, value = draw(9, 9, 2, 1)
    query = query * 1e4
    key = key * 1e4
    expected = oracles.attention(query, key, value, oracles.causal_mask(9))
    results = attention_with_gradients(query, key, value, value.repeat(2, axis=2))
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=1e-4)
    assert all(np.isfinite(array).all() for array in results)


def test_softmax_is_float32_for_bfloat16_inputs():
    check_attention(*draw(300, 300, 2, 1, dtype=jnp.bfloat16), rtol=0.015)


@pytest.mark.parametrize("head_dim", [32, pytest.param(64, marks=pytest.mark.slow), 128, 256])
def test_bfloat16_queries_are_rotated_and_scaled_with_one_rounding(head_dim, monkeypatch):
    """At 32 and 128 the scale is no power of 2; a second rounding would double the error."""
    config = small(head_dim=head_dim, dtype="bfloat16", num_layers=1, scan_layers=False)
    seen = {}

    def capture(query, key, value, **options):
        seen["query"] = query
        return attention(query, key, value, **options)

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
    check_attention(*draw(20, 20, heads, kv_heads), implementation="cudnn", window=window)
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

NEEDS_TPU = "it is a TPU kernel, and this is a gpu"
NEEDS_NVIDIA = "it is an NVIDIA kernel, and this is a tpu"
NEEDS_AMPERE = "it needs an Ampere GPU or a later one"
BFLOAT16 = "dtype must be bfloat16; got float32"
DENSE_MASK = "it needs a dense mask to keep documents apart (data.mask_documents)"

# The device, what differs from 8192 tokens of head_dim 128 in bfloat16 without documents, what auto
# takes, and what stands in the way of splash and of cudnn.
CHOICES = [
    (
        CPU,
        {},
        "xla",
        ["it is a TPU kernel, and this is a cpu"],
        ["it is an NVIDIA kernel, and this is a cpu"],
    ),
    (
        TPU,
        {"H": 256},
        "splash",
        [],
        [NEEDS_NVIDIA, "head_dim must be a multiple of 8 up to 128; got 256"],
    ),
    (
        TPU,
        {"T": 128, "dtype": "float32", "segmented": True},
        "splash",
        [],
        [NEEDS_NVIDIA, BFLOAT16, DENSE_MASK],
    ),
    (
        TPU,
        {"T": 192},
        "xla",
        ["the sequence length must be a multiple of 128; got 192"],
        [NEEDS_NVIDIA],
    ),
    (
        TPU,
        {"T": 256, "H": 64},
        "xla",
        ["head_dim must be a multiple of 128; got 64"],
        [NEEDS_NVIDIA],
    ),
    (AMPERE, {}, "cudnn", [NEEDS_TPU], []),
    (
        AMPERE,
        {"T": 100, "H": 64},
        "cudnn",
        [
            NEEDS_TPU,
            "the sequence length must be a multiple of 128; got 100",
            "head_dim must be a multiple of 128; got 64",
        ],
        [],
    ),
    (
        AMPERE,
        {"H": 256},
        "xla",
        [NEEDS_TPU],
        ["head_dim must be a multiple of 8 up to 128; got 256"],
    ),
    (HOPPER, {"H": 256}, "cudnn", [NEEDS_TPU], []),
    (BLACKWELL, {"H": 256}, "cudnn", [NEEDS_TPU], []),
    (
        HOPPER,
        {"H": 384},
        "xla",
        [NEEDS_TPU],
        ["head_dim must be a multiple of 8 up to 256; got 384"],
    ),
    (HOPPER, {"dtype": "float32"}, "xla", [NEEDS_TPU], [BFLOAT16]),
    (HOPPER, {"segmented": True}, "xla", [NEEDS_TPU], [DENSE_MASK]),
    (TURING, {}, "xla", [NEEDS_TPU], [NEEDS_AMPERE]),
    (AMD, {}, "xla", [NEEDS_TPU], [NEEDS_AMPERE]),
]


@pytest.mark.parametrize(
    ("device", "change", "choice", "splash", "cudnn"), CHOICES, ids=range(len(CHOICES))
)
def test_the_choice_and_its_reason(device, change, choice, splash, cudnn):
    workload = {"T": 8192, "H": 128, "dtype": "bfloat16", "segmented": False}
    choose = functools.partial(choose_implementation, device=device, **(workload | change))
    refusals = {
        "splash": f"splash cannot be used: {'; '.join(splash)}",
        "cudnn": f"cudnn cannot be used: {'; '.join(cudnn)}",
    }
    reasons = {
        "cpu": "there is no kernel for a cpu",
        "tpu": refusals["splash"],
        "gpu": refusals["cudnn"],
    }
    reason = reasons[device.platform]
    if choice != "xla":
        reason = f"the fastest on a {device.platform}"
    assert choose("auto") == (choice, reason)
    assert choose("xla") == ("xla", "as asked")
    for name, obstacles in (("splash", splash), ("cudnn", cudnn)):
        if not obstacles:
            assert choose(name) == (name, "as asked")
            continue
        with pytest.raises(ValueError) as refused:
            choose(name)
        assert str(refused.value) == f"attention={refusals[name]}; take auto or xla"


def test_auto_is_what_this_machine_has():
    """On the CPU, where there is no kernel: the result is that of "xla", bit for bit."""
    arrays = draw(9, 9, 4, 2)
    expected = attention(*arrays, implementation="xla")
    np.testing.assert_array_equal(attention(*arrays), expected)
