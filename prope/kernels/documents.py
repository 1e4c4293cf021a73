"""cuDNN's attention within documents that are packed in rows.

JAX calls it by a module without a public name. Axes: B batch, T length, N query heads, K key/value
heads, H head_dim, M documents of a row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

try:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
except ImportError:  # a JAX that has it elsewhere
    cudnn = None


def most_documents(T: int) -> int:
    """Returns M, how many documents of a row the kernel takes.

    It has statistics of M T queries: for 64 documents and head_dim 256 half as large as its output.
    """
    return min(max(T // 128, 2), 64)


def locate_documents(
    segment_ids: Int[Array, "B T"], M: int
) -> tuple[Int[Array, "B M"], Int[Array, "B M+1"], Int[Array, " B"]]:
    """Returns lengths and starts of the documents of each row, -1 after the last, and their number.

    A document is a run of equal ids, padding at the end too. Of a row with more than M the first
    ones are returned.
    """
    T = segment_ids.shape[1]
    begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    find = jax.vmap(lambda row: jnp.flatnonzero(row, size=M + 1, fill_value=T))
    starts = find(begins).astype(jnp.int32)
    lengths = jnp.diff(starts, axis=1)
    found = starts < T
    lengths = jnp.where(found[:, :M], lengths, -1)
    return lengths, jnp.where(found, starts, -1), begins.sum(axis=1)


def attend_to_documents(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    lengths: Int[Array, "B M"],
    starts: Int[Array, "B M+1"],
    window: int | None,
) -> Float[Array, "B T N H"]:
    """Attends causally within each document."""
    if jax.__version_info__ < (0, 11, 1):
        # It reads keys and values as if they had the heads of the queries.
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    return cudnn.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )
