"""Where the documents of packed rows are, as cuDNN wants to be told.

Axes: B batch, T tokens of a row, M documents of a row.
"""

import jax
import jax.numpy as jnp

# cuDNN has statistics of M T queries: for M = 64 and head_dim 256 half as large as its output.
_MOST_DOCUMENTS = 64
_FEWEST_TOKENS = 128  # of a document, on average


def locate_documents(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Locates runs of equal ids [B, T], also that of padding at the end.

    Returns their lengths [B, M] and starts [B, M + 1], -1 after the last; and whether no row has
    more than M, bool []: otherwise the first M of a row are located.
    """
    T = segment_ids.shape[1]
    M = min(max(T // _FEWEST_TOKENS, 2), _MOST_DOCUMENTS)
    begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    number = jnp.cumsum(begins, axis=1)  # of a token's document, from 1
    starts = (number[..., None] <= jnp.arange(M + 1)[None, None]).sum(axis=1)  # tokens before
    lengths = jnp.diff(starts, axis=1)
    lengths = jnp.where(lengths > 0, lengths, -1)
    return lengths, jnp.where(starts < T, starts, -1), number.max() <= M
