"""Splash attention, JAX's flash attention for TPUs, with blocks for each chip."""

import functools
import math
import os
from typing import NamedTuple

import jax
import numpy as np

from prope.kernels.mask import Mask
from prope.sharding import device_kind


class Blocks(NamedTuple):
    """Sizes in tokens of the kernels' blocks, and when one kernel computes all gradients.

    With one kernel attention is 7 matmuls of T S, with two 9. But it writes a gradient of the
    queries for every block of keys.
    """

    queries: int
    keys: int
    keys_at_once: int  # keys of a block in one matmul of the forward pass
    keys_at_once_backward: int
    fused_bytes: int  # the most that these gradients may take; 0: two kernels


_SMALL = Blocks(1024, 1024, 512, 256, 2**30)  # within the VMEM that every chip gives without a flag
_LARGE = Blocks(2048, 2048, 2048, 2048, 2**30)
# By jax.Device.device_kind: the blocks up to each head_dim. Source: maxtext, Llama-3.1-8B (head_dim
# 128) on v5e and v6e, Gemma 2-9B (256) on v6e. On v5p maxtext has 2048 with a backward pass in two
# kernels, 7 matmuls instead of 5.
_V5 = {256: _LARGE}
_V5P = {256: _LARGE._replace(fused_bytes=2**34)}
_V6 = {128: _LARGE, 256: Blocks(2048, 512, 512, 512, 0)}
_BLOCKS = {
    "TPU v5 lite": _V5,
    "TPU v5e": _V5,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6,
    "TPU v6e": _V6,
}
_VMEM_FLAG = "xla_tpu_scoped_vmem_limit_kib"  # launch/run.sh sets it


def choose_blocks(device_kind: str, head_dim: int) -> Blocks:
    """Chooses the blocks for a chip; small ones where its flags leave it the default VMEM."""
    if _VMEM_FLAG not in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return _SMALL
    by_head_dim = _BLOCKS.get(device_kind, {})
    return next((blocks for largest, blocks in by_head_dim.items() if head_dim <= largest), _SMALL)


@functools.cache
def _compact_mask(kind: type) -> type:
    """Subclasses a mask so that all-zero and all-one blocks are not materialised.

    Of 2^20 tokens there are 2^18 blocks.
    """

    class Mask(kind):
        def __getitem__(self, index):
            queries, keys = index
            first_query, last_query = self.q_sequence[queries][[0, -1]]
            left, *_ = getattr(self, "window_size", (math.inf,))
            last_key = keys.stop - 1
            if keys.start > last_query or last_key < first_query - left:
                return np.zeros((1, 1), bool)
            if last_key <= first_query and keys.start >= last_query - left:
                return np.ones((1, 1), bool)
            return super().__getitem__(index)

    return Mask


def splash(query, key, value, mask: Mask, positions, rank, cap: float | None = None):
    """Attends causally, [B, K, G, T, H] to [B, K, S, H].

    Args:
      query: scaled.
      key: not scaled.
      value: not scaled.
      mask: without sinks: LocalMask has none.
      positions: [C, T], positions in the sequence of the queries of every context rank.
      rank: which of them this device has.
      cap: soft cap on the scores; None: none.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if mask.sinks:
        raise ValueError("splash has no mask for sinks; take implementation=xla")
    G = query.shape[2]
    S = key.shape[2]
    C = len(positions)
    if mask.window is None:
        lazy_mask = _compact_mask(masks.CausalMask)((S, S))
    else:
        lazy_mask = _compact_mask(masks.LocalMask)((S, S), (mask.window - 1, 0), 0)
    lazy_mask.q_sequence = positions.reshape(-1).astype("int32")
    attend = kernel.make_splash_mqa(
        masks.MultiHeadMask([lazy_mask] * G),
        head_shards=1,
        q_seq_shards=C,
        block_sizes=_block_sizes(kernel, query, S, C, mask.window),
        residual_checkpoint_name="attention_out",
        attn_logits_soft_cap=cap,
    )
    if C > 1:
        attend = _rows_of_rank(attend, C, rank)
    over_kv_heads = jax.vmap(attend, in_axes=(0, 0, 0, None))
    segment_ids = None if mask.segment_ids is None else kernel.SegmentIds(*mask.segment_ids)
    return jax.vmap(over_kv_heads)(query, key, value, segment_ids)


def _block_sizes(kernel, query, S: int, C: int, window: int | None):
    """Cuts the blocks of a chip to powers of two that divide the rows of a rank."""
    T, H = query.shape[3:]
    blocks = choose_blocks(device_kind(), H)
    # Larger blocks than the window would skip few of the keys that it hides.
    largest = S if window is None else 1 << max(9, (window - 1).bit_length())
    chunk = T if C == 1 else T // 2

    def cut(size):
        return math.gcd(min(size, largest), chunk)

    queries = cut(blocks.queries)
    keys = cut(blocks.keys)
    gradient_bytes = query.size * query.dtype.itemsize * (S // keys)
    fused = gradient_bytes <= blocks.fused_bytes
    return kernel.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=cut(blocks.keys_at_once),
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=cut(blocks.keys_at_once_backward),
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else keys,
        use_fused_bwd_kernel=fused,
    )


def _rows_of_rank(attend, C: int, rank):
    """Selects the blocks that a rank visits, in the kernel's arrays [heads, query blocks, ..]."""

    def select(array):
        axis = min(array.ndim - 1, 1)
        size = array.shape[axis] // C
        return jax.lax.dynamic_slice_in_dim(array, rank * size, size, axis)

    return jax.tree.map(select, attend)
