"""Causal attention against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prope.attention import attention


def draw(T, S, N, K, H=16, B=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = ((T, N), (S, K), (S, K))
    return [jnp.asarray(2 * rng.standard_normal((B, length, heads, H)), dtype) for length, heads in shapes]


def reference(query, key, value, seen):
    """Loops over everything; seen(b, t) lists the keys that query t of sequence b may look at."""
    query, key, value = (np.asarray(part, np.float64) for part in (query, key, value))
    B, T, N, H = query.shape
    output = np.zeros_like(query)
    for b, t, n in np.ndindex(B, T, N):
        keys, k = seen(b, t), n * key.shape[2] // N
        scores = key[b, keys, k] @ query[b, t, n] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        output[b, t, n] = weights @ value[b, keys, k] / weights.sum()
    return output


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (4, 4), (1, 1), (6, 3)])
def test_heads_share_keys_in_groups(heads, kv_heads):
    q, k, v = draw(9, 9, heads, kv_heads)
    expected = reference(q, k, v, lambda b, t: range(t + 1))
    np.testing.assert_allclose(jax.jit(attention)(q, k, v), expected, rtol=0, atol=2e-6)


def test_segments_do_not_see_each_other():
    q, k, v = draw(9, 9, 4, 2)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2, 2, 0]], np.int32)
    expected = reference(q, k, v, lambda b, t: [s for s in range(t + 1) if segments[b, s] == segments[b, t]])
    np.testing.assert_allclose(attention(q, k, v, segment_ids=jnp.asarray(segments)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_queries_may_come_after_cached_keys(first):
    q, k, v = draw(3, 12, 4, 1)
    expected = reference(q, k, v, lambda b, t: range(first + t + 1))
    np.testing.assert_allclose(attention(q, k, v, first_query=jnp.int32(first)), expected, rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow():
    q, k, v = draw(9, 9, 2, 1)
    out = attention(q * 1e4, k * 1e4, v)
    np.testing.assert_allclose(out, reference(q * 1e4, k * 1e4, v, lambda b, t: range(t + 1)), rtol=0, atol=1e-4)


def test_softmax_is_float32_for_bfloat16_inputs():
    q, k, v = (jnp.asarray(part, jnp.bfloat16) for part in draw(64, 64, 2, 1))
    out = attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    expected = reference(*(part.astype(jnp.float32) for part in (q, k, v)), lambda b, t: range(t + 1))
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=0, atol=0.05)


def test_an_implementation_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="attention must be auto or xla; got 'splash'"):
        attention(*draw(2, 2, 1, 1), implementation="splash")
