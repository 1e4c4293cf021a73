"""Splash attention, JAX's flash attention for TPUs, with blocks for each chip."""

import functools
import math
import os
from typing import NamedTuple

import jax
import numpy as np


class Blocks(NamedTuple):
    """Sizes in tokens of the kernels' blocks, and how much memory one kernel that computes all gradients may take.

    With it attention is 7 matmuls of T S, in two kernels 9. But it writes a gradient of the queries for every block of
    keys.
    """

    queries: int
    keys: int
    keys_at_once: int  # of a block, in one matmul of the forward pass
    keys_at_once_backward: int
    fused_bytes: int  # of these gradients; 0: never


_SMALL = Blocks(1024, 1024, 512, 256, 2**30)  # within the VMEM that every chip gives without a flag
_LARGE = Blocks(2048, 2048, 2048, 2048, 2**30)
# By jax.Device.device_kind: the blocks up to each head_dim. Source: maxtext, Llama-3.1-8B (head_dim 128) on v5e and
# v6e, Gemma 2-9B (256) on v6e. On v5p it has 2048 with a backward pass in two kernels, 7 matmuls instead of 5.
_V5, _V6 = {256: _LARGE}, {128: _LARGE, 256: Blocks(2048, 512, 512, 512, 0)}
_V5P = {256: _LARGE._replace(fused_bytes=2**34)}
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
    fitting = (
        _BLOCKS.get(device_kind, {}) if _VMEM_FLAG in os.environ.get("LIBTPU_INIT_ARGS", "") else {}
    )
    return next((blocks for largest, blocks in fitting.items() if head_dim <= largest), _SMALL)


@functools.cache
def _mask_of_blocks(kind: type) -> type:
    """Makes a kind of mask that computes only blocks on its border: of 2^20 tokens there are 2^18 blocks."""

    class Mask(kind):
        def __getitem__(self, index):
            first, last = self.q_sequence[index[0]][[0, -1]]
            keys, left = index[1], getattr(self, "window_size", (math.inf,))[0]
            if keys.start > last or keys.stop - 1 < first - left:
                return np.zeros((1, 1), bool)
            if keys.stop - 1 <= first and keys.start >= last - left:
                return np.ones((1, 1), bool)
            return super().__getitem__(index)

    return Mask


def splash(
    query,
    key,
    value,
    positions,
    part,
    segments=None,
    window: int | None = None,
    blocks: Blocks | None = None,
):
    """Attends causally, [B, K, G, T, H] to [B, K, S, H]; with segment ids of queries and keys, within a segment only.

    With a window a query sees that many keys, its own included. `positions` [C, T] are those of the queries of every
    part of the sequence, of which this one is `part`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (G, T, H), S, C = query.shape[2:], key.shape[2], len(positions)
    kind = getattr(jax.sharding.get_abstract_mesh().abstract_device, "device_kind", "")
    *sizes, fused_bytes = blocks or choose_blocks(kind, H)
    # Larger blocks than the window would skip few of the keys that it hides.
    largest = S if window is None else 1 << max(9, (window - 1).bit_length())
    chunk = T if C == 1 else T // 2
    queries, keys, at_once, at_once_backward = (
        math.gcd(min(size, largest), chunk) for size in sizes
    )  # powers of two
    fused = query.size * query.dtype.itemsize * (S // keys) <= fused_bytes
    block_sizes = kernel.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=at_once,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=at_once_backward,
        block_q_dq=None if fused else queries,
        block_kv_dq=None if fused else keys,
        use_fused_bwd_kernel=fused,
    )
    arguments = (masks.CausalMask,) if window is None else (masks.LocalMask, (window - 1, 0), 0)
    own = _mask_of_blocks(arguments[0])((S, S), *arguments[1:])
    own.q_sequence = positions.reshape(-1).astype("int32")
    options = {"block_sizes": block_sizes, "residual_checkpoint_name": "attention_out"}
    run = kernel.make_splash_mqa(
        masks.MultiHeadMask([own] * G), head_shards=1, q_seq_shards=C, **options
    )
    if C > 1:  # the blocks that this part visits, of arrays [heads, blocks of queries, ..]

        def of_part(array):
            axis = min(array.ndim - 1, 1)
            size = array.shape[axis] // C
            return jax.lax.dynamic_slice_in_dim(array, part * size, size, axis)

        run = jax.tree.map(of_part, run)
    over_kv_heads = jax.vmap(run, in_axes=(0, 0, 0, None))
    return jax.vmap(over_kv_heads)(query, key, value, segments and kernel.SegmentIds(*segments))
