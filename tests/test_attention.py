"""Causal attention and its gradient against their formulas in float64, and the choice of what computes it."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import array_shapes
from makers import assert_attention_close as assert_close
from makers import attention_with_gradients as with_gradients
from makers import cotangent_of
from makers import draw_attention as draw
from makers import draw_segments as documents
from oracles import attention as reference
from oracles import causal_mask as causal

from prope.attention import attention, choose_implementation
from prope.cost.traced import count_flops


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("T", "heads", "kv_heads"),
    [
        (9, 4, 1),
        (9, 4, 2),
        (9, 4, 4),
        (128, 4, 2),
        (300, 4, 2),
        (1025, 4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((9, 1, 1), (9, 6, 3), (300, 4, 1), (300, 3, 3))
        ),
    ],
)
def test_blocks_of_queries_and_their_gradients_equal_the_formula(T, heads, kv_heads, masked):
    q, k, v = draw(T, T, heads, kv_heads, H=8 if T > 300 else 16, B=1 if T > 300 else 2)
    segments = documents(len(q), T) if masked else None
    expected = reference(q, k, v, causal(T, segments), cotangent_of(q))
    assert_close(with_gradients(q, k, v, cotangent_of(q), segments), expected, 5e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("T", "window"), [(9, 2), (9, 3), (300, 40), (300, 129), (300, 300), (1025, 200)]
)
def test_a_window_and_its_gradients_equal_the_formula(T, window, masked):
    q, k, v = draw(T, T, 4, 2, H=8, B=1)
    segments = documents(1, T) if masked else None
    expected = reference(q, k, v, causal(T, segments, window), cotangent_of(q))
    assert_close(with_gradients(q, k, v, cotangent_of(q), segments, window=window), expected, 5e-6)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_a_window_skips_the_keys_that_no_query_sees(implementation):
    q, k, v = draw(4096, 4096, 1, 1, H=128, B=1)
    flops = []
    for window in (None, 512):
        run = functools.partial(attention, implementation=implementation, window=window)
        step = jax.make_jaxpr(jax.grad(lambda q, k, v, run=run: run(q, k, v).sum(), (0, 1, 2)))(
            q, k, v
        )
        flops.append(count_flops(step))
    assert flops[1] < 0.4 * flops[0]  # 0.23 where blocks are single queries


@pytest.mark.parametrize("masked", [False, True])
def test_the_scores_never_exist_whole(masked):
    B, T, N = 2, 1024, 4
    q, k, v = draw(T, T, N, 2, H=8, B=B)
    segments = documents(B, T) if masked else None

    def whole(query, key, value):
        scores = jnp.einsum("btngh,bsnh->bngts", query.reshape(B, T, 2, 2, 8), key)
        return jnp.einsum("bngts,bsnh->btngh", jax.nn.softmax(scores), value)

    def largest(run):
        shapes = [dims for _, dims in array_shapes(jax.jit(run).lower(q, k, v).compile().as_text())]
        assert len(shapes) > 10
        return max(map(math.prod, shapes)), any(dims.count(T) > 1 for dims in shapes)

    blocks = functools.partial(attention, segment_ids=segments, implementation="xla")
    gradient = jax.grad(lambda *parts: (blocks(*parts) ** 2).sum(), argnums=(0, 1, 2))
    assert largest(whole) == (B * N * T * T, True)
    for run in (blocks, gradient):
        elements, square = largest(run)
        assert elements <= B * N * T * T // 4 and not square


@pytest.mark.parametrize("first", [(0, 0), (1, 5), (9, 0)])
def test_queries_may_come_after_cached_keys(first):
    q, k, v = draw(3, 12, 4, 1)
    seen = np.arange(12) <= np.array(first)[:, None, None] + np.arange(3)[:, None]
    out = attention(q, k, v, first_query=jnp.array(first))
    np.testing.assert_allclose(out, reference(q, k, v, seen), rtol=0, atol=2e-6)


def test_many_queries_may_come_after_cached_keys_whatever_is_asked_for():
    q, k, v = draw(300, 400, 4, 2)
    q = (
        q / 4
    )  # scores up to 12: at 50, float32 alone is off by 2e-6, and by how much depends on the CPU
    seen = np.arange(400) <= np.array([70, 3])[:, None, None] + np.arange(300)[:, None]
    out = attention(q, k, v, first_query=jnp.array([70, 3]), implementation="splash")
    np.testing.assert_allclose(out, reference(q, k, v, seen), rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow():
    q, k, v = draw(9, 9, 2, 1)
    q, k = q * 1e4, k * 1e4
    expected = reference(q, k, v, causal(9), cotangent_of(q))
    actual = with_gradients(q, k, v, cotangent_of(q))
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-4)
    assert all(np.isfinite(part).all() for part in actual)


def test_softmax_is_float32_for_bfloat16_inputs():
    q, k, v = (jnp.asarray(part, jnp.bfloat16) for part in draw(300, 300, 2, 1))
    actual = with_gradients(q, k, v, cotangent_of(q))
    assert {part.dtype for part in actual} == {jnp.dtype("bfloat16")}
    wide = [part.astype(jnp.float32) for part in (q, k, v, cotangent_of(q))]
    expected = reference(*wide[:3], causal(300), wide[3])
    assert_close([part.astype(jnp.float32) for part in actual], expected, 0.015)


@pytest.mark.parametrize(
    ("T", "heads", "kv_heads", "masked", "window"),
    [
        (128, 4, 2, True, None),
        (256, 2, 2, False, None),
        (256, 2, 1, True, 100),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (128, 4, 2, False, None),
                (256, 2, 2, True, None),
                (384, 2, 1, False, None),
                (384, 2, 1, True, None),
                (384, 2, 1, False, 2),
                (384, 2, 1, False, 129),
            )
        ),
    ],
)
def test_splash_equals_the_formula(interpreted, T, heads, kv_heads, masked, window):
    q, k, v = draw(T, T, heads, kv_heads, H=128)
    segments = documents(2, T) if masked else None
    expected = reference(q, k, v, causal(T, segments, window), cotangent_of(q))
    options = {"implementation": "splash", "window": window}
    assert_close(with_gradients(q, k, v, cotangent_of(q), segments, **options), expected, 5e-6)


@pytest.mark.parametrize("T", [512, 1024])
def test_splash_takes_its_largest_blocks(T):
    """Traced, not run: the kernel refuses blocks that do not divide one another."""
    arrays = [jax.ShapeDtypeStruct((1, T, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    loss = lambda *given: attention(*given, implementation="splash").astype(jnp.float32).sum()  # noqa: E731
    gradients = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *arrays)
    assert [(g.shape, g.dtype) for g in gradients] == [(a.shape, a.dtype) for a in arrays]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"), [(4, 1, None), (4, 2, None), (2, 2, None), (4, 1, 7)]
)
def test_cudnn_is_given_what_equals_the_formula(monkeypatch, heads, kv_heads, window):
    """NVIDIA's kernel is not here: the function of JAX that calls it is, and computes the same by XLA."""
    function, asked = jax.nn.dot_product_attention, []

    def by_xla(*arrays, implementation, **options):
        asked.append(
            (implementation, {name for name, value in options.items() if value is not None})
        )
        return function(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v = draw(20, 20, heads, kv_heads)
    expected = reference(q, k, v, causal(20, window=window), cotangent_of(q))
    assert_close(
        with_gradients(q, k, v, cotangent_of(q), implementation="cudnn", window=window),
        expected,
        5e-6,
    )
    options = {"is_causal", *(["local_window_size"] if window else [])}
    assert asked == [("cudnn", options)], "and no mask array, no bias, no lengths"


# --- The choice ------------------------------------------------------------------------------------------------

CPU, TPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu")
TURING, AMPERE, HOPPER, BLACKWELL = (
    SimpleNamespace(platform="gpu", compute_capability=value)
    for value in ("7.5", "8.0", "9.0", "10.0")
)
AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942")
NO_TPU = "attention=splash cannot be used: it is a TPU kernel, and this is a {}; take auto or xla"
NO_GPU = (
    "attention=cudnn cannot be used: it is an NVIDIA kernel, and this is a {}; take auto or xla"
)
OLD = "it needs an Ampere GPU or a later one"
DENSE = "it needs a dense mask to keep documents apart (data.mask_documents)"

# device, T, H, dtype, masked -> what auto takes, why, and what "splash" and "cudnn" are answered (None: as asked)
CHOICES = [
    (
        CPU,
        8192,
        128,
        "bfloat16",
        False,
        "xla",
        "there is no kernel for a cpu",
        NO_TPU.format("cpu"),
        NO_GPU.format("cpu"),
    ),
    (
        TPU,
        8192,
        256,
        "bfloat16",
        False,
        "splash",
        "the fastest on a tpu",
        None,
        "attention=cudnn cannot be used: "
        "it is an NVIDIA kernel, and this is a tpu; head_dim must be a multiple of 8 up to 128; got 256; "
        "take auto or xla",
    ),
    (
        TPU,
        128,
        128,
        "float32",
        True,
        "splash",
        "the fastest on a tpu",
        None,
        "attention=cudnn cannot be used: "
        f"it is an NVIDIA kernel, and this is a tpu; dtype must be bfloat16; got float32; {DENSE}; take auto or xla",
    ),
    (
        TPU,
        192,
        128,
        "bfloat16",
        False,
        "xla",
        "splash cannot be used: the sequence length must be a multiple of 128; got 192",
        "attention=splash cannot be used: the sequence length must be a multiple of 128; got 192; take auto or xla",
        NO_GPU.format("tpu"),
    ),
    (
        TPU,
        256,
        64,
        "bfloat16",
        False,
        "xla",
        "splash cannot be used: head_dim must be a multiple of 128; got 64",
        "attention=splash cannot be used: head_dim must be a multiple of 128; got 64; take auto or xla",
        NO_GPU.format("tpu"),
    ),
    (
        AMPERE,
        8192,
        128,
        "bfloat16",
        False,
        "cudnn",
        "the fastest on a gpu",
        NO_TPU.format("gpu"),
        None,
    ),
    (
        AMPERE,
        100,
        64,
        "bfloat16",
        False,
        "cudnn",
        "the fastest on a gpu",
        "attention=splash cannot be used: it is a "
        "TPU kernel, and this is a gpu; the sequence length must be a multiple of 128; got 100; head_dim must be a "
        "multiple of 128; got 64; take auto or xla",
        None,
    ),
    (
        AMPERE,
        8192,
        256,
        "bfloat16",
        False,
        "xla",
        "cudnn cannot be used: head_dim must be a multiple of 8 up to 128; got 256",
        NO_TPU.format("gpu"),
        "attention=cudnn cannot be used: head_dim must be a multiple of 8 up to 128; got 256; take auto or xla",
    ),
    (
        HOPPER,
        8192,
        256,
        "bfloat16",
        False,
        "cudnn",
        "the fastest on a gpu",
        NO_TPU.format("gpu"),
        None,
    ),
    (
        BLACKWELL,
        8192,
        256,
        "bfloat16",
        False,
        "cudnn",
        "the fastest on a gpu",
        NO_TPU.format("gpu"),
        None,
    ),
    (
        HOPPER,
        8192,
        384,
        "bfloat16",
        False,
        "xla",
        "cudnn cannot be used: head_dim must be a multiple of 8 up to 256; got 384",
        NO_TPU.format("gpu"),
        "attention=cudnn cannot be used: head_dim must be a multiple of 8 up to 256; got 384; take auto or xla",
    ),
    (
        HOPPER,
        8192,
        128,
        "float32",
        False,
        "xla",
        "cudnn cannot be used: dtype must be bfloat16; got float32",
        NO_TPU.format("gpu"),
        "attention=cudnn cannot be used: dtype must be bfloat16; got float32; take auto or xla",
    ),
    (
        HOPPER,
        8192,
        128,
        "bfloat16",
        True,
        "xla",
        f"cudnn cannot be used: {DENSE}",
        NO_TPU.format("gpu"),
        f"attention=cudnn cannot be used: {DENSE}; take auto or xla",
    ),
    (
        TURING,
        8192,
        128,
        "bfloat16",
        False,
        "xla",
        f"cudnn cannot be used: {OLD}",
        NO_TPU.format("gpu"),
        f"attention=cudnn cannot be used: {OLD}; take auto or xla",
    ),
    (
        AMD,
        8192,
        128,
        "bfloat16",
        False,
        "xla",
        f"cudnn cannot be used: {OLD}",
        NO_TPU.format("gpu"),
        f"attention=cudnn cannot be used: {OLD}; take auto or xla",
    ),
]


@pytest.mark.parametrize(
    ("device", "T", "H", "dtype", "masked", "choice", "why", "splash", "cudnn"),
    CHOICES,
    ids=range(len(CHOICES)),
)
def test_the_choice_and_its_reason(device, T, H, dtype, masked, choice, why, splash, cudnn):
    about = (device, T, H, dtype, masked)
    assert choose_implementation("auto", *about) == (choice, why)
    assert choose_implementation("xla", *about) == ("xla", "as asked")
    for asked, refusal in (("splash", splash), ("cudnn", cudnn)):
        if refusal is None:
            assert choose_implementation(asked, *about) == (asked, "as asked")
        else:
            with pytest.raises(ValueError) as refused:
                choose_implementation(asked, *about)
            assert str(refused.value) == refusal


def test_auto_is_what_this_machine_has():
    """Tests run on the CPU, where there is no kernel: the result is that of "xla", bit for bit."""
    q, k, v = draw(9, 9, 4, 2)
    np.testing.assert_array_equal(attention(q, k, v), attention(q, k, v, implementation="xla"))
