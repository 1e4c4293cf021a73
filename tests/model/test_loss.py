"""The loss against -log softmax in float64, on one device and on meshes of eight."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import cross_entropy, divergence, float64
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


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("max_logits", "rows"), [(2**24, 1024), (1, 1024), (1, 8), (1, 1)])
def test_value_and_gradients_equal_the_formula(monkeypatch, max_logits, rows, cap):
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", max_logits)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": rows})
    check(draw(), cap=cap)


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


def distilled_and_gradients(arrays, teacher, cap, share):
    """The sums of a distilled loss; gradients of its total for hidden and embedding."""

    def run(hidden, embedding):
        sums = loss.distilled_loss(hidden, embedding, *arrays[2:], *teacher, cap, share)
        return sums.total, sums

    run_with_gradients = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
    (_, sums), gradients = run_with_gradients(*arrays[:2])
    return sums, gradients


def check_distilled(arrays, teacher, cap, share, place=lambda array: array):
    """Compares a distilled loss and its gradients with the formula."""
    hidden, embedding, _, weights = arrays
    losses, *gradients = cross_entropy(*arrays, cap)
    divergences, *others = divergence(hidden, embedding, *teacher, weights, cap)
    placed = [tuple(map(place, group)) for group in (arrays, teacher)]
    run = functools.partial(distilled_and_gradients, cap=cap, share=share)
    sums, found = jit_anew(run)(*placed)
    expected_loss = (losses * weights).sum()
    expected_kl = (divergences * weights).sum()
    expected_total = (1 - share) * expected_loss + share * expected_kl
    np.testing.assert_allclose(sums, (expected_total, expected_loss, expected_kl), rtol=1e-5)
    for gradient, of_loss, of_kl in zip(found, gradients, others, strict=True):
        expected = (1 - share) * of_loss + share * of_kl
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def draw_teacher(arrays):
    """The hidden states and the table of another model."""
    rng = np.random.default_rng(7)
    return tuple(
        array + jnp.asarray(rng.standard_normal(array.shape), np.float32) for array in arrays[:2]
    )


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize(("max_logits", "cap"), [(2**24, None), (1, 2.0)])
def test_distillation_equals_the_formula(monkeypatch, max_logits, cap, share):
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", max_logits)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 8})
    arrays = draw()
    check_distilled(arrays, draw_teacher(arrays), cap, share)


def test_a_model_does_not_differ_from_itself():
    """Neither in its next tokens nor in the way to them."""
    arrays = draw()
    sums, gradients = jit_anew(functools.partial(distilled_and_gradients, cap=2.0, share=1.0))(
        arrays, arrays[:2]
    )
    assert (sums.total, sums.kl) == (0, 0) and sums.loss > 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_large_logits_do_not_overflow():
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

    def plain(hidden, embedding, targets, weights):
        log_probabilities = jax.nn.log_softmax(hidden @ embedding.T)
        target_log_probabilities = jnp.take_along_axis(
            log_probabilities, targets[..., None], axis=-1
        )
        return (target_log_probabilities[..., 0] * weights).sum()

    assert largest_array(plain, *arrays) == 2 * T * V
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", 1)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 128})
    assert largest_array(loss.token_losses, *arrays[:3]) == 128 * V
    assert largest_array(loss_and_gradients, *arrays) == 128 * V


# --- On eight devices -------------------------------------------------------------------------


def set_chunks(max_logits, chunk, max_table):
    """Sets the sizes from which the loss is computed in chunks, in this process."""
    loss._MAX_LOGITS_WHOLE = max_logits
    loss._MAX_LOGITS_PER_CHUNK = chunk
    loss._ROWS_PER_CHUNK = {"": chunk}
    loss._MAX_TABLE_BYTES = max_table


# D, V, how the table is sharded, dtype, sizes of chunks
CASES = [
    # chunks of three tokens
    (16, 48, PartitionSpec("tensor"), np.float32, (1, 3, 2**30)),
    # six chunks of the vocabulary
    (16, 48, PartitionSpec("tensor"), np.float32, (1, 50, 0)),
    # as many chunks as entries, where tensor = 1; 8 does not divide D
    (12, 56, PartitionSpec(), jnp.bfloat16, (1, 6, 0)),
    # one chunk of all tokens
    (12, 56, PartitionSpec(), jnp.bfloat16, (2**20, 1, 2**30)),
]


def check_meshes():
    """Compares with the formula on every mesh of eight devices, in chunks of every kind."""
    for shape, (D, V, table_spec, dtype, chunks) in itertools.product(MESHES, CASES):
        mesh = sharding.make_mesh(shape[0], shape[2])
        assert mesh.devices[:, :, 0].shape == shape
        set_chunks(*chunks)

        def place(array, mesh=mesh, V=V, table_spec=table_spec):
            spec = table_spec if len(array) == V else ROWS
            return jax.device_put(array, NamedSharding(mesh, spec))

        rtol = 1e-5 if dtype == np.float32 else 0.02
        with sharding.use(mesh):
            check(draw(8, 6, D, V, dtype), rtol, place, cap=2.0 if dtype == np.float32 else None)
            if dtype == np.float32:
                arrays = draw(8, 6, D, V)
                check_distilled(arrays, draw_teacher(arrays), 2.0, 0.3, place)


def check_sizes():
    """Asserts that no device holds all its logits, nor the table where it is too large."""
    T = 128
    D = 32
    V = 1024
    arrays = draw(8, T, D, V)
    table_spec = PartitionSpec("tensor", "fsdp")
    shapes = [(1, 8, 1), (2, 2, 2)]
    by_vocab = (2**12, 0)
    by_tokens = (8, 2**30)
    for shape, (chunk, max_table) in itertools.product(shapes, [by_vocab, by_tokens]):
        mesh = sharding.make_mesh(shape[0], shape[2])
        set_chunks(1, chunk, max_table)
        with sharding.use(mesh):
            specs = (ROWS, table_spec, ROWS, ROWS)
            placed = [
                jax.device_put(array, NamedSharding(mesh, spec))
                for array, spec in zip(arrays, specs, strict=True)
            ]
            largest = largest_array(loss_and_gradients, *placed)
        logits = 8 * T * V // math.prod(shape)
        assert largest < logits, f"{shape}: the logits of a device exist whole"
        if not max_table:
            assert largest < V * D, f"{shape}: the table exists whole"


@pytest.mark.slow
@pytest.mark.parametrize("function", ["check_meshes", "check_sizes"])
def test_meshes_of_eight_devices_agree_with_the_formula(function):
    on_eight_devices(__file__, function)
