"""Causal attention by plain XLA, the TPU's splash kernel or cuDNN.

No implementation holds a T x S array of scores: they compute those of a block of queries and keys
at a time.

Context parallelism (prope/sharding.py): a sequence is split over C devices. A device computes the
queries of its rows, and all-gathers keys and values: in bfloat16 4 K H bytes a token, 1 KB for
Gemma. These 4 K H T bytes take less time than the 2 N H T^2 / C FLOPs of its scores from
T = 2 C K / N x (FLOP/s) / (bytes/s) on: with C = 4 on v5p from some 2,500 tokens on. Ring attention
moves the same bytes but overlaps them with compute: it wins for shorter sequences, or where the
keys and values of a sequence, 1 GB a layer at 2^20 tokens, do not fit. cuDNN has no mask for such
rows, so it exchanges tokens for heads: of every sequence a device computes N / C heads.

Axes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K,
H head_dim.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # it has no public name
from jaxtyping import Array, Float, Int

from prope.kernels.blockwise import blockwise_attention
from prope.kernels.cache import attend_to_cache
from prope.kernels.choice import choose_implementation
from prope.kernels.documents import locate_documents
from prope.kernels.mask import CAUSAL, Mask
from prope.kernels.splash import splash
from prope.sharding import (
    all_gather_sequence,
    context_rank,
    context_size,
    join_heads,
    rank_positions,
    shard_mapped,
    split_heads,
)


@jax.named_scope("attention")
def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Mask = CAUSAL,
    cap: float | None = None,
    *,
    first_query: Int[Array, " B"] | None = None,
    newest_key: Int[Array, " B"] | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Computes softmax(query key^T) value; a query sees the keys up to its own index.

    Each group of G = N / K query heads shares a key/value head: K = 1 is multi-query, K = N
    multi-head attention.

    Args:
      query: rotated, and scaled: by 1 / sqrt(H), or the config's attention_scale.
      key: rotated.
      value: not rotated.
      mask: which of these keys a query does not see; its segment ids need T = S, and for cuDNN
        equal ids are neighbours.
      cap: soft cap on the scores, before the mask; None: none.
      first_query: for keys from a cache, the position of each row's first query; always computed
        by plain XLA. It needs newest_key.
      newest_key: the position of each row's last key in the cache. That at position m is in slot
        m % S.
      implementation: "xla", "splash" (TPU), "cudnn" (NVIDIA), or "auto": what
        `choose_implementation` returns for this machine. A named one is not checked:
        `choose_implementation` tells whether a device can run it.

    Returns:
      The output in value's dtype; scores and softmax are float32 for any input dtype.
    """
    if first_query is not None:
        arrays = _heads_first(query, key, value)
        return _heads_last(attend_to_cache(*arrays, mask, first_query, newest_key, cap))
    T, _, H = query.shape[1:]
    segmented = mask.segment_ids is not None
    if implementation == "auto":
        workload = (jax.devices()[0], T, H, query.dtype.name, segmented)
        implementation, _ = choose_implementation(
            "auto", *workload, capped=cap is not None, sinks=mask.sinks
        )
    if mask.window is not None and mask.window >= context_size() * T:
        mask = dataclasses.replace(mask, window=None)
    attend = functools.partial(_IMPLEMENTATIONS[implementation], mask, cap)
    if not segmented:
        return shard_mapped(attend, ["BTNH", "BSKH", "BSKH"])(query, key, value)
    mapped = shard_mapped(attend, ["BTNH", "BSKH", "BSKH", "BS"])
    return mapped(query, key, value, mask.segment_ids)


def _by_blocks(kernel, mask, cap, query, key, value, segment_ids=None):
    """Attends by `blockwise_attention` or `splash`, to the keys and values of whole sequences."""
    positions = rank_positions(context_size(), context_size() * query.shape[1])
    arrays = _heads_first(query, all_gather_sequence(key), all_gather_sequence(value))
    if segment_ids is not None:
        segment_ids = (segment_ids, all_gather_sequence(segment_ids))
    mask = dataclasses.replace(mask, segment_ids=segment_ids)
    return _heads_last(kernel(*arrays, mask, positions, context_rank(), cap))


def _cudnn(mask, cap, query, key, value, segment_ids=None):
    """Attends by NVIDIA's flash attention, causal without a mask array, which has no soft cap."""
    if cap is not None:
        raise ValueError("cuDNN has no soft cap on scores; take implementation=xla")
    if mask.sinks:
        raise ValueError("cuDNN has no mask for sinks; take implementation=xla")
    if segment_ids is not None:
        return _within_documents(mask, query, key, value, segment_ids)
    output = jax.nn.dot_product_attention(
        split_heads(query),
        split_heads(key),
        split_heads(value),
        is_causal=True,
        scale=1.0,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation="cudnn",
    )
    return join_heads(output)


def _within_documents(mask, query, key, value, segment_ids):
    """Attends by cuDNN within packed documents; by plain XLA where a row has too many for it."""
    lengths, starts, fits = locate_documents(segment_ids)
    if jax.__version_info__ < (0, 11, 1):
        # It reads keys and values as if they had the heads of the queries.
        G = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, G, axis=2) for x in (key, value))
    packed = functools.partial(
        cudnn.dot_product_attention,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=mask.window,
    )
    by_blocks = functools.partial(
        _by_blocks, blockwise_attention, mask, None, segment_ids=segment_ids
    )
    # Without the checkpoint a gradient would keep arrays for both.
    return jax.lax.cond(fits, packed, jax.checkpoint(by_blocks), query, key, value)


_IMPLEMENTATIONS = {
    "xla": functools.partial(_by_blocks, blockwise_attention),
    "splash": functools.partial(_by_blocks, splash),
    "cudnn": _cudnn,
}


def _heads_first(query, key, value):
    """Transposes queries to [B, K, G, T, H], keys and values to [B, K, S, H]."""
    B, T, N, H = query.shape
    K = key.shape[2]
    query = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return query, key.swapaxes(1, 2), value.swapaxes(1, 2)


def _heads_last(output):
    """Transposes [B, K, G, T, H] to [B, T, N, H]."""
    B, K, G, T, H = output.shape
    return output.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, H)
