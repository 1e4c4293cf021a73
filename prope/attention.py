"""Causal attention by plain XLA, the TPU's splash kernel or cuDNN.

No implementation holds a T x S array of scores: they compute those of a block of queries and keys at a time.

Of a sequence that is split into C parts (prope/sharding.py), a device computes the queries of one part, and all-gathers
keys and values: in bfloat16 4 K H bytes a token, 1 KB for Gemma. These 4 K H T bytes take less time than the
2 N H T^2 / C FLOPs of its scores from T = 2 C K / N x (FLOP/s) / (bytes/s) on: with C = 4 on v5p from some 2,500 tokens
on. A ring would pass as many bytes, beside the scores of the part before: it wins for shorter sequences, or where the
keys and values of a sequence, 1 GB a layer at 2^20 tokens, do not fit. cuDNN has no mask for parts, so it exchanges
them for heads: of every sequence a device computes N / C heads.

Axes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head_dim.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prope.kernels.choice import choose_implementation
from prope.kernels.pairs import attend_pairs
from prope.kernels.splash import splash
from prope.sharding import (
    gather_parts,
    join_heads,
    num_parts,
    part_index,
    part_positions,
    shard_mapped,
    split_heads,
)

_CACHE_BLOCK = 128  # queries whose scores with all keys of a cache exist at once


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    first_query: Int[Array, " B"] | None = None,
    window: int | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Computes softmax(query key^T / sqrt(H)) value, where a query sees the keys up to its own index.

    Each group of G = N / K query heads shares a key/value head: K = 1 is multi-query, K = N multi-head attention.

    Args:
      query: rotated, not scaled.
      key: rotated.
      value: not rotated.
      segment_ids: with it, a query sees the keys of its own segment only; needs T = S.
      window: how many keys a query sees at most, its own included; None: all up to its own.
      first_query: for keys from a cache, the key index of each row's first query; always computed by plain XLA.
      implementation: "xla", "splash" (TPU), "cudnn" (NVIDIA), or "auto": what `choose_implementation` returns for
        this machine. A named one is not checked: `choose_implementation` tells whether a device can run it.

    Returns:
      The output in value's dtype; scores and softmax are float32 for any input dtype.
    """
    if first_query is not None:
        return _attend_to_cache(query, key, value, first_query, window)
    if implementation == "auto":
        (T, _, H), device, segmented = query.shape[1:], jax.devices()[0], segment_ids is not None
        implementation, _ = choose_implementation("auto", device, T, H, query.dtype.name, segmented)
    window = None if window is None or window >= num_parts() * query.shape[1] else window
    by_pairs, by_splash = (functools.partial(_by_blocks, run) for run in (attend_pairs, splash))
    function = {"xla": by_pairs, "splash": by_splash, "cudnn": _cudnn}[implementation]
    function = functools.partial(function, window)
    arrays = [query, key, value] if segment_ids is None else [query, key, value, segment_ids]
    return shard_mapped(function, ["BTNH", "BSKH", "BSKH", "BS"][: len(arrays)])(*arrays)


def _by_blocks(run, window, query, key, value, segment_ids=None):
    """Attends by `attend_pairs` or `splash`, to the keys and values of all parts."""
    positions = part_positions(num_parts(), num_parts() * query.shape[1])
    arrays = _heads_first(query, gather_parts(key), gather_parts(value))
    segments = None if segment_ids is None else (segment_ids, gather_parts(segment_ids))
    return _heads_last(run(*arrays, positions, part_index(), segments, window))


def _heads_first(query, key, value):
    """Scales and transposes queries to [B, K, G, T, H], transposes keys and values to [B, K, S, H]."""
    B, T, N, H = query.shape
    K = key.shape[2]
    query = (query * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return query, key.swapaxes(1, 2), value.swapaxes(1, 2)


def _heads_last(output):
    """[B, K, G, T, H] -> [B, T, N, H]."""
    B, K, G, T, H = output.shape
    return output.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)


def _attend_to_cache(query, key, value, first_query, window):
    """Attends queries to each row's cache, in which `first_query` [B] keys precede them; has no efficient gradient."""
    query, key, value = _heads_first(query, key, value)
    (B, K, G, T, H), S, outputs = query.shape, key.shape[2], []
    for start in range(0, T, _CACHE_BLOCK):
        q = query[:, :, :, start : start + _CACHE_BLOCK]
        t = q.shape[3]
        # One matmul of a key/value head with the queries of all its G heads as rows.
        scores = jnp.einsum(
            "BKRH,BKSH->BKRS", q.reshape(B, K, G * t, H), key, preferred_element_type=jnp.float32
        )
        last_key = (first_query[:, None] + jnp.arange(start, start + t)[None])[
            :, None, None, :, None
        ]
        keys = jnp.arange(S)[None, None, None, None]
        seen = (
            keys <= last_key if window is None else (keys <= last_key) & (keys > last_key - window)
        )
        scores = jnp.where(seen, scores.reshape(B, K, G, t, S), jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype).reshape(B, K, G * t, S)
        output = jnp.einsum("BKRS,BKSH->BKRH", weights, value, preferred_element_type=jnp.float32)
        outputs.append(output.astype(value.dtype).reshape(B, K, G, t, H))
    return _heads_last(jnp.concatenate(outputs, axis=3))


def _cudnn(window, query, key, value):
    """Attends by NVIDIA's flash attention, causal without a mask array; of a split sequence, by heads."""
    local = None if window is None else (window - 1, 0)
    query, key, value = split_heads(query), split_heads(key), split_heads(value)
    output = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, local_window_size=local, implementation="cudnn"
    )
    return join_heads(output)


def save_policy(names: Sequence[str]) -> Callable[..., bool]:
    """Makes a checkpoint policy that saves the arrays of these names.

    "attention_out" includes cuDNN's output and softmax statistics: JAX names neither, so all that its primitive returns
    is saved.
    """
    by_name, cudnn = (
        jax.checkpoint_policies.save_only_these_names(*names),
        "dot_product_attention_fwd_wrapper",
    )
    return lambda primitive, *arguments, **parameters: (
        by_name(primitive, *arguments, **parameters)
        or ("attention_out" in names and primitive.name == cudnn)
    )
