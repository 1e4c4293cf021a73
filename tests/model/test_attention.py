"""Causal attention and its gradient against their formulas in float64, and what computes it."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import SingleDeviceSharding
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.commands import needs_cuda
from support.models import (
    attention_with_gradients,
    check_attention,
    documents_by_xla,
    draw_inputs,
    draw_model,
    draw_segments,
    scaled_attention,
    small,
)
from support.models import draw_attention as draw

from prope import model
from prope.attention import attention, choose_implementation
from prope.cost.topology import as_if_attached, find_devices
from prope.cost.traced import count_flops
from prope.kernels import blockwise, cache, documents
from prope.kernels.mask import CAUSAL, Mask
from prope.rope import rotation_table
from prope.scan import _save_policy
from prope.sharding import rank_positions

# A multiple of what one unit in the last place of bfloat16 inputs moves attention by; the results
# are rounded to bfloat16 as well. It is 0.004 to 0.013 of the largest element of an array.
BFLOAT16 = 0.24


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
        (9, 4, 2, segmented(9, window=2, sinks=1)),
        (128, 4, 2, CAUSAL),
        (300, 4, 2, segmented(300)),
        (300, 6, 3, Mask(window=40)),
        (300, 4, 2, segmented(300, window=129)),
        (300, 4, 2, Mask(window=300)),
        (300, 4, 2, segmented(300, window=40, sinks=130)),
        (1025, 4, 2, segmented(1025, B=1, window=200)),
    ],
)
def test_blocks_of_queries_and_their_gradients_equal_the_formula(T, heads, kv_heads, mask):
    B = 1 if T > 300 else 2
    arrays = draw(T, T, heads, kv_heads, H=8 * B, B=B)
    check_attention(*arrays, mask, implementation="xla")


@pytest.mark.parametrize("mask", [CAUSAL, segmented(300, window=40, sinks=130)])
def test_capped_scores_and_their_gradients_equal_the_formula(mask):
    """Without a care for masked scores, their gradient would be infinite times 0."""
    check_attention(*draw(300, 300, 4, 2, H=8), mask, cap=0.5, implementation="xla")


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "mask"),
    [(384, 4, 4, segmented(384, window=100)), (577, 6, 2, Mask(window=300))],
)
def test_loops_over_blocks_and_their_gradients_equal_the_formula(
    T, heads, kv_heads, mask, monkeypatch
):
    monkeypatch.setattr(blockwise, "_MOST_UNROLLED", 0)
    check_attention(*draw(T, T, heads, kv_heads, H=8), mask, implementation="xla")


@pytest.mark.parametrize("C", [1, 4])
@pytest.mark.parametrize(
    ("window", "sinks"), [(None, 0), (1, 0), (128, 0), (129, 0), (700, 0), (100, 300), (700, 128)]
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


def test_memory_of_attention_grows_as_the_length():
    """Scores that exist whole would take a GB, and a mask a quarter."""

    def total(query, key, value, segment_ids):
        return attention(query, key, value, Mask(segment_ids), implementation="xla").sum()

    def temporary_bytes(T):
        shapes = [jax.ShapeDtypeStruct((1, T, heads, 64), np.float32) for heads in (4, 1, 1)]
        segment_ids = jax.ShapeDtypeStruct((1, T), np.int32)
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes, segment_ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    half = temporary_bytes(16_384)
    assert half < 100 * 2**20
    assert temporary_bytes(32_768) < 2.1 * half


CACHE = 4  # in float32: at most 5e-6, of values near 1
# The sizes below are several of these.
assert (cache._QUERIES_OF_BLOCK, cache._KEYS_OF_BLOCK) == (128, 512)


def check_cache(arrays, first, mask=CAUSAL, slots=lambda x: x, multiple=CACHE, **options):
    """Compares attention to a cache of keys with the formula.

    The queries [B, T, N, H] come from position `first` [B] on. `slots` makes the cache of all keys
    and values [B, S, K, H].
    """
    query, key, value = arrays
    if query.dtype == np.float32:
        query = query / 4  # scores up to 12: one ulp of larger ones hides more
    first = np.array(first)
    positions = first[:, None, None] + np.arange(query.shape[1])[:, None]
    keys = np.arange(key.shape[1])
    seen = keys <= positions
    if mask.window is not None:
        seen = seen & ((keys > positions - mask.window) | (keys < mask.sinks))
    formula = functools.partial(oracles.attention, seen=seen, cap=options.get("cap"))
    expected, movement = measure_rounding(formula, query, key, value)
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


@pytest.mark.parametrize(("dtype", "multiple"), [("float32", CACHE), ("bfloat16", BFLOAT16)])
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
    check_attention(*draw(300, 300, 2, 1, dtype=jnp.bfloat16), multiple=BFLOAT16)


def test_bfloat16_queries_are_rotated_and_scaled_with_one_rounding(monkeypatch):
    """The scale is no power of 2: a second rounding would double the error."""
    head_dim = 32
    spec = small(head_dim=head_dim, dtype="bfloat16", num_layers=1, scan_layers=False)
    seen = {}

    def capture(query, *arguments, **options):
        seen["query"] = query
        return attention(query, *arguments, **options)

    monkeypatch.setattr(model, "attention", capture)
    params, _, positions = draw_model(spec)
    x = jnp.asarray(draw_inputs(spec.embed_dim, positions)[:, :, 0], jnp.bfloat16)
    layer_params = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    freqs = oracles.frequencies(head_dim, p=spec.rope_percentage)
    table = jax.jit(lambda positions: rotation_table(positions, freqs))(positions)
    _, captured = model.run_layer(spec, layer_params, x, table, spec.layers[0])
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


@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(4, 2, None), (4, 1, 7)])
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


@pytest.mark.parametrize(("fits", "window"), [(True, 40), (False, None)])
def test_documents_go_to_cudnn_where_it_takes_as_many(monkeypatch, fits, window):
    """A row has 6 documents, padding included; where it takes 5, plain XLA computes all rows."""
    mask = segmented(100, window=window)
    arrays = draw(100, 100, 4, 2)

    def poison(*_, **__):
        return jnp.full(arrays[0].shape, jnp.nan)

    kernel = documents_by_xla if fits else poison
    monkeypatch.setattr("prope.attention.cudnn.dot_product_attention", kernel)
    if fits:
        monkeypatch.setattr("prope.attention._by_blocks", poison)
    monkeypatch.setattr(documents, "_FEWEST_TOKENS", 16 if fits else 20)
    check_attention(*arrays, mask, implementation="cudnn")


@pytest.mark.parametrize("M", [7, 5])
def test_documents_are_runs_of_equal_ids(monkeypatch, M):
    monkeypatch.setattr(documents, "_MOST_DOCUMENTS", M)
    monkeypatch.setattr(documents, "_FEWEST_TOKENS", 1)
    ids = np.array(draw_segments(3, 300))
    lengths, starts, fits = documents.locate_documents(jnp.asarray(ids))
    assert lengths.dtype == starts.dtype == np.int32
    most = 0
    for row, *found in zip(ids, lengths, starts, strict=True):
        begins = [0, *np.flatnonzero(row[1:] != row[:-1]) + 1]
        sizes = np.diff([*begins, 300]).tolist()
        assert found[0].tolist() == (sizes + [-1] * M)[:M]
        assert found[1].tolist() == (begins + [-1] * (M + 1))[: M + 1]
        most = max(most, len(begins))
    assert fits == (most <= M)


@pytest.mark.slow
@needs_cuda
def test_cudnn_computes_documents_once_forward_and_once_backward():
    """Compiled for a GPU that is not here; remat saves what the primitive returns."""
    devices = find_devices("h100:1", 1)
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(devices[0]))
    arrays = [shape((1, 128, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]

    def run(query, key, value, segment_ids):
        mask = Mask(segment_ids, 100)
        attend = functools.partial(attention, mask=mask, implementation="cudnn")
        attend = jax.checkpoint(attend, policy=_save_policy(["attention_out"]))
        output, vjp = jax.vjp(attend, query, key, value)
        return vjp(output)

    with as_if_attached(devices):
        compiled = jax.jit(run).trace(*arrays, shape((1, 128), jnp.int32)).lower().compile()
    calls = re.findall('custom_call_target="__cudnn[$]fmhaSoftmax(.*?)"', compiled.as_text())
    assert sorted(calls) == ["", "Backward"]


# --- The choice -------------------------------------------------------------------------------


def make_gpu(compute_capability):
    """A GPU as `choose_implementation` sees it."""
    return SimpleNamespace(platform="gpu", compute_capability=compute_capability)


CPU = SimpleNamespace(platform="cpu")
TPU = SimpleNamespace(platform="tpu")
AMPERE = make_gpu("8.0")
HOPPER = make_gpu("9.0")

# The device, what differs from 8192 tokens of head_dim 128 in bfloat16 without documents, and what
# the refusal of the device's kernel must name; nothing: auto takes it.
CHOICES = [
    (TPU, {"H": 256}, ()),
    (TPU, {"T": 128, "dtype": "float32", "segmented": True}, ()),
    (TPU, {"T": 192, "H": 64}, ("sequence length", "192", "head_dim", "64")),
    (TPU, {"sinks": 4}, ("sinks",)),
    (AMPERE, {"T": 100, "H": 64}, ()),
    (AMPERE, {"H": 256}, ("head_dim", "128", "256")),
    (HOPPER, {"H": 256}, ()),
    (make_gpu("10.0"), {"H": 256}, ()),
    (HOPPER, {"H": 384}, ("head_dim", "256", "384")),
    (HOPPER, {"dtype": "float32"}, ("dtype", "float32")),
    (AMPERE, {"segmented": True}, ("Hopper", "data.mask_documents")),
    (HOPPER, {"fits_context": False}, ("mesh.context must divide",)),
    (HOPPER, {"segmented": True, "fits_context": False}, ("mesh.context must be 1",)),
    (HOPPER, {"capped": True}, ("model.attention_softcap",)),
    (HOPPER, {"sinks": 4}, ("sinks",)),
    (make_gpu("7.5"), {}, ("Ampere",)),
    (make_gpu("gfx942"), {}, ("Ampere",)),
]
WORKLOAD = {"T": 8192, "H": 128, "dtype": "bfloat16", "segmented": False}


def refuse(kernel, device, workload) -> str:
    """The one line with which a device refuses a kernel."""
    with pytest.raises(ValueError) as refused:
        choose_implementation(kernel, device, **workload)
    line = str(refused.value)
    assert line.startswith(f"attention={kernel} ") and "\n" not in line
    return line


@pytest.mark.parametrize(("device", "change", "obstacles"), CHOICES)
def test_a_device_takes_its_kernel_where_it_can(device, change, obstacles):
    kernel = "splash" if device is TPU else "cudnn"
    workload = WORKLOAD | change
    name, reason = choose_implementation("auto", device, **workload)
    if not obstacles:
        assert choose_implementation(kernel, device, **workload)[0] == name == kernel
        return
    assert name == "xla"
    line = refuse(kernel, device, workload)
    for words in obstacles:
        assert words in reason and words in line


def test_documents_by_cudnn_have_to_be_asked_for():
    workload = WORKLOAD | {"segmented": True}
    assert choose_implementation("cudnn", HOPPER, **workload)[0] == "cudnn"
    name, reason = choose_implementation("auto", HOPPER, **workload)
    assert name == "xla" and "attention=cudnn" in reason


def test_kernels_are_for_one_kind_of_device():
    assert choose_implementation("auto", CPU, **WORKLOAD)[0] == "xla"
    for device, kernel in ((CPU, "splash"), (AMPERE, "splash"), (CPU, "cudnn"), (TPU, "cudnn")):
        assert f"this is a {device.platform}" in refuse(kernel, device, WORKLOAD)
        assert choose_implementation("xla", device, **WORKLOAD)[0] == "xla"
