"""Cross-entropy of the next token, without ever holding the [tokens, V] logits whole.

The gradient is computed in the forward pass, chunk by chunk, while the chunk's logits exist.

By chunks of tokens, each logit is computed once. A device all-gathers the embedding, however large
it is, takes its own tokens, and the gradients that all devices accumulate are reduce-scattered
once.

Axes: B batch, T length, D embed_dim, V vocab, R tokens of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap, softcap_slope
from prope.sharding import (
    constrain,
    constrain_like_param,
    device_kind,
    num_shards,
    on_gpu,
    shard_axes,
    shard_mapped,
    sum_like_param,
)

_MAX_LOGITS_WHOLE = 2**24  # logits of a device that exist at once without chunks: 64 MiB in float32
# Tokens R of a device in a chunk of tokens, where _MAX_LOGITS_WHOLE allows no more, by the start of
# a device's kind. Every chunk reads and writes the float32 gradient of the table, 8 V D bytes, to
# add a matmul of 2 R V D FLOPs to it. The matmul takes longer from R = 4 FLOP/s / (bytes/s) on: 660
# tokens on v5p, 960 on v5e, 1180 on H100, 2240 on v6e. Twice the tokens are twice the logits, 1 GB
# for 1024 tokens of a vocabulary of 256k.
_ROWS_PER_CHUNK = {"NVIDIA": 2048, "TPU v6": 2048, "": 1024}


def token_losses(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    cap: float | None = None,
) -> Float[Array, "B T"]:
    """Computes -log softmax(softcap(hidden embedding^T, cap))[targets], nats, float32.

    The matmul is in hidden's dtype with float32 sums. This is for evaluation; for training use
    `weighted_loss`, whose gradient is chunked too.
    """
    table = constrain(embedding.astype(hidden.dtype), "VD")

    def chunk_losses(chunk):
        hidden, targets = chunk
        logits = einsum_to_float32("BTD,VD->BTV", hidden, table)
        logits = softcap(logits, cap)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target_logits

    chunks = _chunk_tokens((hidden, targets), len(table), num_shards("B"))
    losses = jax.lax.map(chunk_losses, chunks)
    return losses.swapaxes(0, 1).reshape(targets.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def weighted_loss(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    cap: float | None = None,
    logits_dtype: str = "float32",
) -> Float[Array, ""]:
    """Computes the sum of weights * `token_losses`, nats, float32.

    Matmuls are in hidden's dtype with float32 sums, those of the embedding's gradient too. Logits
    are rounded to `logits_dtype`. B divides among the devices that share the batch.
    """
    loss, _ = _forward(hidden, embedding, targets, weights, cap, logits_dtype)
    return loss


def _forward(hidden, embedding, targets, weights, cap, logits_dtype):
    # The cast comes before the all-gather, which then moves fewer bytes.
    table = constrain_like_param(embedding.astype(hidden.dtype), "VD")
    by_chunks = shard_mapped(
        functools.partial(_loss_by_chunks, cap, logits_dtype),
        ["BTD", "VD", "BT", "BT"],
        ["BT", "BTD", "VD"],
    )
    losses, grad_hidden, grad_embedding = by_chunks(hidden, table, targets, weights)
    residuals = (losses, grad_hidden, grad_embedding.astype(embedding.dtype))
    return (losses * weights).sum(), residuals


def _backward(cap, logits_dtype, residuals, cotangent):
    del cap, logits_dtype
    losses, grad_hidden, grad_embedding = residuals
    grad_hidden = (grad_hidden * cotangent).astype(grad_hidden.dtype)
    grad_embedding = (grad_embedding * cotangent).astype(grad_embedding.dtype)
    grad_weights = losses * cotangent
    return grad_hidden, grad_embedding, None, grad_weights


weighted_loss.defvjp(_forward, _backward)


def _loss_by_chunks(cap, logits_dtype, hidden, table, targets, weights):
    """Returns losses [B, T], gradients of hidden and table, by chunks of a device's tokens."""
    axes = shard_axes("V")  # with them, the table holds this device's entries of the vocabulary
    entries = jax.lax.axis_index(axes) * len(table) + jnp.arange(len(table))
    add_chunk = functools.partial(_add_chunk, cap, logits_dtype, entries, table)
    chunks = _chunk_tokens((hidden, targets, weights), len(table))
    start = jnp.zeros(table.shape, jnp.float32)
    grad_table, results = jax.lax.scan(add_chunk, start, chunks)
    logsumexp, *to_sum = (x.swapaxes(0, 1).reshape(*targets.shape, *x.shape[3:]) for x in results)
    # Summed once, not in every chunk.
    target_logits, grad_hidden = jax.lax.psum(to_sum, axes)
    losses = logsumexp - target_logits
    return losses, grad_hidden.astype(hidden.dtype), sum_like_param(grad_table, "VD")


def _add_chunk(cap, logits_dtype, entries, table, grad_table, chunk):
    """Adds a chunk of tokens to the table's gradient; returns that, and what each token has.

    `entries` are those of the vocabulary that the table holds on this device.
    """
    axes = shard_axes("V")
    B, T = chunk[1].shape
    rows, targets, weights = (x.reshape(-1, *x.shape[2:]) for x in chunk)
    logits = jnp.einsum("RD,VD->RV", rows, table, preferred_element_type=logits_dtype)
    logits = logits.astype(jnp.float32)
    if logits_dtype == "bfloat16":  # XLA may leave out a cast to it and back, and not this
        logits = jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
    logits = softcap(logits, cap)
    logsumexp = _logsumexp_over_shards(logits, axes)
    is_target = entries[None] == targets[:, None]
    target_logits = jnp.where(is_target, logits, 0).sum(axis=-1)
    grad_losses = jnp.exp(logits - logsumexp[:, None]) - is_target
    grad_logits = grad_losses * weights[:, None] * softcap_slope(logits, cap)
    grad_logits = grad_logits.astype(rows.dtype)
    grad_rows, chunk_grad_table = _matmul_gradients(grad_logits, rows, table, axes)
    results = (logsumexp, target_logits, grad_rows)
    results = tuple(x.reshape(B, T, *x.shape[1:]) for x in results)
    return grad_table + chunk_grad_table, results


def _matmul_gradients(grad_logits, rows, table, axes):
    """Returns the gradients of rows [R, D] and table [V, D] from those of their logits."""
    # Float32 where a gradient is still to be summed over the vocabulary's shards.
    multiply = einsum_to_float32 if axes else jnp.einsum
    grad_rows = multiply("RV,VD->RD", grad_logits, table)
    grad_table = einsum_to_float32("RV,RD->VD", grad_logits, rows)
    return grad_rows, grad_table


def _logsumexp_over_shards(logits, axes):
    """Computes logsumexp over the whole vocabulary, whose shards lie on the mesh axes `axes`."""
    local = _logsumexp_in_one_pass(logits) if on_gpu() else jax.nn.logsumexp(logits, axis=-1)
    largest = jax.lax.pmax(local, axes)
    total = jax.lax.psum(jnp.exp(local - largest), axes)
    return largest + jnp.log(total)


def _logsumexp_in_one_pass(logits):
    """Computes logsumexp [R] of [R, V], which XLA's GPU compiler reads twice for jax.nn's."""

    def combine(one, other):
        largest = jnp.maximum(one[0], other[0])
        totals = (total * jnp.exp(high - largest) for high, total in (one, other))
        return largest, sum(totals)

    least = jnp.finfo(logits.dtype).min  # from -inf, the difference of two would be nan
    start = (jnp.array(least, logits.dtype), jnp.zeros((), logits.dtype))
    terms = (logits, jnp.ones_like(logits))
    largest, total = jax.lax.reduce(terms, start, combine, dimensions=(1,))
    return largest + jnp.log(total)


def _chunk_tokens(arrays, V: int, shards: int = 1):
    """Reshapes arrays [B, T, ...], B in this many shards, to [C, B, T / C, ...], sharded alike."""
    B, T = arrays[0].shape[:2]
    longest = _MAX_LOGITS_WHOLE // V * shards // B  # tokens of a sequence
    if longest < T:
        longest = max(longest, _rows_per_chunk() * shards // B)
        longest = min(longest, T // 2)
    length = max(t for t in range(1, T + 1) if T % t == 0 and (t == 1 or t <= longest))

    def chunk(x):
        return x.reshape(B, T // length, length, *x.shape[2:]).swapaxes(0, 1)

    return jax.tree.map(chunk, arrays)


def _rows_per_chunk() -> int:
    kind = device_kind()
    return next(rows for start, rows in _ROWS_PER_CHUNK.items() if kind.startswith(start))
