"""The loss against -log softmax in float64, on one device and on meshes of eight."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import array_shapes
from makers import MESHES, on_eight_devices
from oracles import cross_entropy as reference

from prope import loss, sharding


def draw(B=2, T=12, D=8, V=30, dtype=np.float32):
    """Hidden states, embedding, targets, and weights of which every fourth is zero."""
    rng = np.random.default_rng(0)
    hidden, embedding = rng.standard_normal((B, T, D)), rng.standard_normal((V, D))
    targets, weights = rng.integers(0, V, (B, T)), rng.uniform(0.5, 2, (B, T))
    weights.ravel()[::4] = 0
    arrays = (hidden, dtype), (embedding, np.float32), (targets, np.int32), (weights, np.float32)
    return [jnp.asarray(array, dtype) for array, dtype in arrays]


def check(arrays, tolerance=1e-5, place=lambda array: array):
    """Value and gradients of three times the weighted loss, and the losses of evaluation, equal the formula."""
    hidden, embedding, targets, weights = arrays
    narrow = embedding.astype(hidden.dtype)  # what the matmuls see
    losses, grad_hidden, grad_embedding = reference(
        hidden.astype(np.float32), narrow, targets, weights
    )

    def three_times(hidden, embedding, weights, targets):
        return 3 * loss.weighted_loss(hidden, embedding, targets, weights)

    run = jax.jit(jax.value_and_grad(three_times, argnums=(0, 1, 2)))
    value, gradients = run(*(place(array) for array in (hidden, embedding, weights, targets)))
    assert (
        value.dtype == gradients[1].dtype == gradients[2].dtype == np.float32
        and gradients[0].dtype == hidden.dtype
    )
    np.testing.assert_allclose(value, 3 * (losses * weights).sum(), rtol=1e-5)
    for gradient, expected in zip(gradients, (grad_hidden, grad_embedding, losses), strict=True):
        largest = 3 * np.abs(expected).max()
        np.testing.assert_allclose(
            gradient.astype(np.float32), 3 * expected, rtol=0, atol=tolerance * largest
        )
    evaluated = jax.jit(loss.token_losses)(
        *(place(array) for array in (hidden, embedding, targets))
    )
    np.testing.assert_allclose(evaluated, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("max_logits", "rows"), [(2**24, 1024), (1, 1024), (1, 8), (1, 1)])
def test_value_and_gradients_equal_the_formula(monkeypatch, max_logits, rows):
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", max_logits)
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": rows})
    check(draw())


def test_narrow_hidden_states_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 8})
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", 1)
    check(draw(D=64, dtype=jnp.bfloat16), tolerance=0.01)


def test_large_logits_do_not_overflow():
    hidden, embedding, targets, weights = draw()
    targets = jnp.argmax(hidden @ embedding.T, axis=-1)
    run = jax.value_and_grad(loss.weighted_loss, argnums=(0, 1))
    value, gradients = run(hidden * 1e4, embedding, targets, weights)
    assert 0 <= value < 10 and all(np.isfinite(gradient).all() for gradient in gradients)


def elements(run, *arrays):
    """The number of elements of the largest array of a compiled program."""
    return max(
        math.prod(dims) for _, dims in array_shapes(jax.jit(run).lower(*arrays).compile().as_text())
    )


def gradient(hidden, embedding, targets, weights):
    return jax.value_and_grad(loss.weighted_loss, argnums=(0, 1))(
        hidden, embedding, targets, weights
    )


def test_a_large_vocabulary_is_never_scored_whole(monkeypatch):
    arrays = draw(B=2, T=512, D=8, V=1000)

    def plain(hidden, embedding, targets, weights):
        logits = jax.nn.log_softmax(hidden @ embedding.T)
        return (jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] * weights).sum()

    assert elements(plain, *arrays) == 2 * 512 * 1000
    monkeypatch.setattr(loss, "_ROWS_PER_CHUNK", {"": 128})
    monkeypatch.setattr(loss, "_MAX_LOGITS_WHOLE", 1)
    for run in (loss.token_losses, gradient):
        assert elements(run, *arrays[: 3 if run is loss.token_losses else 4]) == 128 * 1000


# --- On eight devices ------------------------------------------------------------------------------------------


def over_meshes():
    """What `test_meshes_of_eight_devices_agree_with_the_formula` has eight devices do."""
    rows = functools.partial(jax.sharding.PartitionSpec, ("data", "fsdp"))
    for shape in MESHES:
        mesh = sharding.make_mesh(shape[0], shape[2])
        assert mesh.devices[:, :, 0].shape == shape
        for D, V, max_logits, chunk, max_table, dtype in (
            (16, 48, 1, 3, 2**30, np.float32),  # chunks of three tokens
            (16, 48, 1, 50, 0, np.float32),  # six chunks of the vocabulary
            (
                12,
                56,
                1,
                6,
                0,
                jnp.bfloat16,
            ),  # as many chunks as entries, where tensor = 1; D is not a multiple of 8
            (12, 56, 2**20, 1, 2**30, jnp.bfloat16),  # one chunk of all tokens
        ):
            loss._MAX_LOGITS_WHOLE, loss._MAX_LOGITS_PER_CHUNK, loss._ROWS_PER_CHUNK = (
                max_logits,
                chunk,
                {"": chunk},
            )
            loss._MAX_TABLE_BYTES = max_table

            def place(array, mesh=mesh, V=V):
                spec = jax.sharding.PartitionSpec("tensor") if len(array) == V == 48 else rows()
                spec = jax.sharding.PartitionSpec() if len(array) == V else spec
                return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

            with sharding.use(mesh):
                check(draw(8, 6, D, V, dtype), 1e-5 if dtype == np.float32 else 0.02, place)

    loss._MAX_LOGITS_WHOLE, loss._MAX_LOGITS_PER_CHUNK, loss._ROWS_PER_CHUNK = 1, 2**12, {"": 8}
    hidden, embedding, targets, weights = draw(8, 128, 32, 1024)
    for shape, max_table in itertools.product(((1, 8, 1), (2, 2, 2)), (0, 2**30)):
        mesh = sharding.make_mesh(shape[0], shape[2])
        loss._MAX_TABLE_BYTES = max_table
        by_rows, columns = (
            jax.sharding.NamedSharding(mesh, rows()),
            jax.sharding.PartitionSpec("tensor", "fsdp"),
        )
        with sharding.use(mesh):
            placed = [jax.device_put(array, by_rows) for array in (hidden, targets, weights)]
            placed.insert(1, jax.device_put(embedding, jax.sharding.NamedSharding(mesh, columns)))
            largest = elements(gradient, *placed)
        groups = shape[0] * shape[1]
        assert largest < 1024 // groups * 1024 // shape[2], (
            f"{shape}: the logits of a device exist whole"
        )
        assert largest < 1024 * 32 or max_table, f"{shape}: the table exists whole"


@pytest.mark.slow
def test_meshes_of_eight_devices_agree_with_the_formula():
    on_eight_devices("test_loss", "over_meshes")
