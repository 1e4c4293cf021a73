"""The loss against -log softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prope import loss


def draw(B=2, T=12, D=8, V=30):
    rng = np.random.default_rng(0)
    hidden, embedding = rng.standard_normal((B, T, D)), rng.standard_normal((V, D))
    targets = rng.integers(0, V, (B, T))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(embedding, jnp.float32), jnp.asarray(targets, jnp.int32)


def reference(hidden, embedding, targets):
    """Losses, and the gradients of their sum times `ramp`."""
    hidden, embedding = np.asarray(hidden, np.float64), np.asarray(embedding, np.float64)
    logits = hidden @ embedding.T
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    right = np.eye(len(embedding))[targets]
    pull = (share - right) * ramp(targets)[..., None]
    return -np.log((share * right).sum(-1)), pull @ embedding, np.einsum("btv,btd->vd", pull, hidden)


def ramp(targets):
    return np.arange(targets.size).reshape(targets.shape) / targets.size


@pytest.mark.parametrize("chunk", [2**28, 4 * 30, 30, 1])
def test_losses_and_gradients_equal_the_formula(monkeypatch, chunk):
    monkeypatch.setattr(loss, "_CHUNK", chunk)
    hidden, embedding, targets = draw()
    expected, hidden_pull, embedding_pull = reference(hidden, embedding, targets)
    np.testing.assert_allclose(loss.token_losses(hidden, embedding, targets), expected, rtol=2e-6, atol=1e-6)
    weighted = lambda h, e: (loss.token_losses(h, e, targets) * ramp(targets)).sum()  # noqa: E731
    pulls = jax.grad(weighted, argnums=(0, 1))(hidden, embedding)
    np.testing.assert_allclose(pulls[0], hidden_pull, rtol=0, atol=1e-6 * np.abs(hidden_pull).max())
    np.testing.assert_allclose(pulls[1], embedding_pull, rtol=0, atol=1e-6 * np.abs(embedding_pull).max())


def test_a_large_vocabulary_is_never_scored_whole(monkeypatch):
    hidden, embedding, targets = draw(T=64, V=100)
    monkeypatch.setattr(loss, "_CHUNK", 800)
    text = str(jax.make_jaxpr(jax.grad(lambda h: loss.token_losses(h, embedding, targets).sum()))(hidden))
    assert "f32[2,8,100]" in text and "f32[2,64,100]" not in text


def test_narrow_hidden_states_are_summed_in_float32():
    hidden, embedding, targets = draw()
    losses = loss.token_losses(jnp.asarray(hidden, jnp.bfloat16), embedding, targets)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, reference(hidden, embedding, targets)[0], atol=0.1)
