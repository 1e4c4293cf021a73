"""Splash attention, JAX's flash attention for TPUs, with blocks several times faster than its default of 128."""

import jax


def splash(query, key, value, segment_ids):
    """Attends causally, [B, K, G, T, H] to [B, K, T, H]; with segment_ids [B, T], within a segment only."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    G, T = query.shape[2:4]
    block = next(size for size in (1024, 512, 256, 128) if T % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(block, 512),
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 256),  # more overflows a v5p's VMEM
        use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * G)
    run = kernel.make_splash_mqa_single_device(mask, block_sizes=sizes, residual_checkpoint_name="attention_out")
    segments = None if segment_ids is None else kernel.SegmentIds(segment_ids, segment_ids)
    over_kv_heads = jax.vmap(run, in_axes=(0, 0, 0, None))
    return jax.vmap(over_kv_heads)(query, key, value, segments)
