"""The loss against -log softmax in float64, on one device and on meshes of eight."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import cross_entropy, float64
from support.compiled import array_shapes
from support.processes import MESHES, on_eight_devices

from prope import loss, sharding

ROWS = PartitionSpec(("data", "fsdp"))


def draw(B=2, T=12, D=8, V=30, dtype=np.float32):
    """Hidden states, embedding, targets, and weights of which every fourth is zero."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((B, T, D))
    embedding = rng.standard_normal((V, D))
    targets = rng.integers(0, V, (B, T))
    weights = rng.uniform(0.5, 2, (B, T))
    weights.ravel()[::4] = 0
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(embedding, np.float32),
        jnp.asarray(targets, np.int32),
        jnp.asarray(weights, np.float32),
    )


def loss_and_gradients(hidden, embedding, targets, weights, cap=None):
    """Three times the weighted loss; its gradients for hidden, embedding and weights."""

    def three_times(hidden, embedding, weights):
        return 3 * loss.weighted_loss(hidden, embedding, targets, weights, cap)

    run = jax.value_and_grad(three_times, argnums=(0, 1, 2))
    return run(hidden, embedding, weights)


def jit_anew(function):
    """Compiles for the sizes of chunks that are set now, which are no key of JAX's cache."""
    return jax.jit(lambda *arrays: function(*arrays))


def check(arrays, rtol=1e-5, place=lambda array: array, cap=None):
    """Compares training's loss and gradients, and evaluation's losses, with the formula."""
    hidden, embedding, targets, weights = arrays
    rounded = embedding.astype(hidden.dtype)  # as matmuls read it
    losses, grad_hidden, grad_embedding = cross_entropy(hidden, rounded, targets, weights, cap)
    expected_gradients = (grad_hidden, grad_embedding, losses)
    placed = [place(array) for array in arrays]

    value, gradients = jit_anew(functools.partial(loss_and_gradients, cap=cap))(*placed)
    dtypes = [gradient.dtype for gradient in gradients]
    assert dtypes == [hidden.dtype, np.float32, np.float32]
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, 3 * (losses * weights).sum(), rtol=1e-5)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        bound = rtol * 3 * np.abs(expected).max()
        np.testing.assert_allclose(float64(gradient), 3 * expected, rtol=0, atol=bound)

    evaluated = jit_anew(functools.partial(loss.token_losses, cap=cap))(*placed[:3])
    np.testing.assert_allclose(evaluated, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("max_logits", "rows"), [(2**24, 1024), (1, 1024), (1, 8), (1, 1)])
def test_value_and_gradients_equal_the_formula(monkeypatch, max_logits, rows, cap, on_gpu):
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", max_logits)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": rows})
    monkeypatch.setattr(loss, "on_gpu", lambda: on_gpu)
    check(draw(), cap=cap)


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_rounded_where_that_is_asked_for(dtype):
    """Up to 1000, between which bfloat16 has every fourth number."""
    hidden, embedding, targets, weights = draw(D=3)
    hidden = jnp.round(8 * hidden).astype(dtype)
    embedding = jnp.round(16 * embedding)
    # Whole numbers, exact in float32.
    logits = jnp.einsum("BTD,VD->BTV", hidden.astype("float32"), embedding)
    rounded = float64(logits.astype(jnp.bfloat16))
    assert (rounded != float64(logits)).any()
    expected, _, _ = cross_entropy(rounded, np.eye(len(embedding)), targets, weights, 100.0)
    round_logits = jax.jit(lambda *arrays: loss.weighted_loss(*arrays, 100.0, "bfloat16"))
    arrays = (hidden, embedding, targets, weights)
    value, losses = jax.value_and_grad(round_logits, argnums=3)(*arrays)
    np.testing.assert_allclose(value, (expected * float64(weights)).sum(), rtol=1e-6)
    np.testing.assert_allclose(round_logits(*arrays), value, rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-5)


def test_narrow_hidden_states_are_summed_in_float32(monkeypatch):
    """In 384 chunks of a row: a gradient that is summed in bfloat16 would be off by 0.013."""
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", 1)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 1})
    check(draw(B=1, T=384, D=64, dtype=jnp.bfloat16), rtol=0.006)


@pytest.mark.parametrize("axes", [(), ("fsdp",)])
def test_gradients_of_a_chunk_that_are_still_to_be_summed_are_float32(axes):
    """The table's over chunks; the rows' where the vocabulary is split over devices."""
    rng = np.random.default_rng(0)
    sizes = {"grad_logits": (5, 7), "rows": (5, 6), "table": (7, 6)}
    arrays = {
        name: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for name, shape in sizes.items()
    }
    grad_rows, grad_table = loss._matmul_gradients(**arrays, axes=axes)
    assert grad_rows.dtype == (jnp.float32 if axes else jnp.bfloat16)
    expected = float64(arrays["grad_logits"]).T @ float64(arrays["rows"])
    np.testing.assert_allclose(grad_table, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_large_logits_do_not_overflow(monkeypatch, on_gpu):
    monkeypatch.setattr(loss, "on_gpu", lambda: on_gpu)
    hidden, embedding, _, weights = draw()
    most_likely = jnp.argmax(hidden @ embedding.T, axis=-1)
    value, gradients = loss_and_gradients(hidden * 1e4, embedding, most_likely, weights)
    assert 0 <= value < 3 * 10
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def largest_array(run, *arrays) -> int:
    """The number of elements of the largest array of a compiled program."""
    text = jit_anew(run).lower(*arrays).compile().as_text()
    return max(math.prod(dims) for _, dims in array_shapes(text))


def test_a_large_vocabulary_is_never_scored_whole(monkeypatch):
    T = 512
    V = 1000
    arrays = draw(B=2, T=T, V=V)
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", 1)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 128})
    assert largest_array(loss.token_losses, *arrays[:3]) == 128 * V
    assert largest_array(loss_and_gradients, *arrays) == 128 * V


# --- On eight devices -------------------------------------------------------------------------


def set_chunks(max_logits, rows):
    """Sets the sizes from which the loss is computed in chunks, in this process."""
    loss._MAX_LOGITS_WHOLE = max_logits
    loss._ROWS_PER_CHUNK = {"": rows}


# D, V, how the table is sharded, dtype, sizes of chunks
CASES = [
    # chunks of three tokens
    (16, 48, PartitionSpec("tensor"), np.float32, (1, 3)),
    # one chunk of all tokens; 8 does not divide D
    (12, 56, PartitionSpec(), jnp.bfloat16, (2**20, 1)),
]


def check_one_mesh():
    check_meshes([(2, 2, 2)])


def check_meshes(meshes=MESHES):
    """Compares with the formula on meshes of eight devices."""
    for shape, (D, V, table_spec, dtype, chunks) in itertools.product(meshes, CASES):
        mesh = sharding.make_mesh(shape[0], shape[2])
        assert mesh.devices[:, :, 0].shape == shape
        set_chunks(*chunks)

        def place(array, mesh=mesh, V=V, table_spec=table_spec):
            spec = table_spec if len(array) == V else ROWS
            return jax.device_put(array, NamedSharding(mesh, spec))

        rtol = 1e-5 if dtype == np.float32 else 0.02
        with sharding.use(mesh):
            check(draw(8, 6, D, V, dtype), rtol, place, cap=2.0 if dtype == np.float32 else None)


def check_sizes():
    """Asserts that no device holds all its logits."""
    T = 128
    D = 32
    V = 1024
    arrays = draw(8, T, D, V)
    table_spec = PartitionSpec("tensor", "fsdp")
    set_chunks(1, 8)
    for shape in [(1, 8, 1), (2, 2, 2)]:
        mesh = sharding.make_mesh(shape[0], shape[2])
        with sharding.use(mesh):
            specs = (ROWS, table_spec, ROWS, ROWS)
            placed = [
                jax.device_put(array, NamedSharding(mesh, spec))
                for array, spec in zip(arrays, specs, strict=True)
            ]
            largest = largest_array(loss_and_gradients, *placed)
        logits = 8 * T * V // math.prod(shape)
        assert largest < logits, f"{shape}: the logits of a device exist whole"


@pytest.mark.parametrize(
    "function",
    [
        "check_one_mesh",
        pytest.param("check_meshes", marks=pytest.mark.slow),
        pytest.param("check_sizes", marks=pytest.mark.slow),
    ],
)
def test_meshes_of_eight_devices_agree_with_the_formula(function):
    on_eight_devices(__file__, function)
