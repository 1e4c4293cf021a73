"""Cross-entropy of the next token, without ever holding the [tokens, V] logits of a large vocabulary whole.

The gradient is computed in the forward pass, chunk by chunk, while the chunk's logits exist. Chunks are of tokens, and
each logit is computed once: a device all-gathers the embedding, takes its own tokens, and the gradients that all
devices accumulate are reduce-scattered once. Where the embedding is too large for that, chunks are of the vocabulary: a
chunk of the embedding is all-gathered, used, and its gradient scattered. Logits are then computed twice, because a
softmax first needs those of all chunks.

Axes: B batch, T length, D embed_dim, V vocab, R = B * T tokens, C chunks, P shards of the vocabulary, v entries of a
chunk on one shard.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prope.sharding import (
    constrain,
    constrain_like_param,
    num_shards,
    shard_axes,
    shard_mapped,
    sum_like_param,
)

_MAX_LOGITS_WHOLE = 2**24  # logits of a device that exist at once without chunks: 64 MiB in float32
# Tokens R of a device in a chunk of tokens, where _MAX_LOGITS_WHOLE allows no more, by the start of a device's kind.
# Every chunk reads and writes the float32 gradient of the table, 8 V D bytes, to add a matmul of 2 R V D FLOPs to it.
# The matmul is the longer part from R = 4 FLOP/s / (bytes/s) on: 660 tokens on v5p, 960 on v5e, 1180 on H100, 2240 on
# v6e. Twice the tokens are twice the logits, 1 GB for 1024 tokens of a vocabulary of 256k.
_ROWS_PER_CHUNK = {"NVIDIA": 2048, "TPU v6": 2048, "": 1024}
_MAX_TABLE_BYTES = (
    2**30
)  # of the embedding in the dtype of the matmuls, all-gathered; float32 gradients are as many
_MAX_LOGITS_PER_CHUNK = 2**27  # logits of a device in a chunk of the vocabulary


def token_losses(
    hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Computes -log softmax(hidden embedding^T)[targets] in nats, float32, for evaluation.

    The matmul is in hidden's dtype with float32 sums. For training use `weighted_loss`, whose gradient is chunked too.
    """
    table = constrain(embedding.astype(hidden.dtype), "VD")

    def chunk_losses(chunk):
        hidden, targets = chunk
        logits = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target_logits

    losses = jax.lax.map(
        chunk_losses, _chunk_tokens((hidden, targets), len(table), num_shards("B"))
    )
    return losses.swapaxes(0, 1).reshape(targets.shape)


@jax.custom_vjp
def weighted_loss(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Computes the sum of weights * -log softmax(hidden embedding^T)[targets], in nats, float32.

    Matmuls are in hidden's dtype with float32 sums, those of the embedding's gradient too.
    """
    return (token_losses(hidden, embedding, targets) * weights).sum()


def _forward(hidden, embedding, targets, weights):
    fits = embedding.size * hidden.dtype.itemsize <= _MAX_TABLE_BYTES * num_shards("V")
    if num_shards("B") == num_shards("V") == 1 or (fits and len(hidden) % num_shards("B") == 0):
        table = constrain_like_param(
            embedding.astype(hidden.dtype), "VD"
        )  # before it is all-gathered
        run = shard_mapped(_by_tokens, ["BTD", "VD", "BT", "BT"], ["BT", "BTD", "VD"])
        losses, grad_hidden, grad_embedding = run(hidden, table, targets, weights)
    else:
        losses, grad_hidden, grad_embedding = _by_vocab(hidden, embedding, targets, weights)
    return (losses * weights).sum(), (losses, grad_hidden, grad_embedding.astype(embedding.dtype))


def _backward(residuals, cotangent):
    losses, *gradients = residuals
    grad_hidden, grad_embedding = (
        (gradient * cotangent).astype(gradient.dtype) for gradient in gradients
    )
    return grad_hidden, grad_embedding, None, losses * cotangent


weighted_loss.defvjp(_forward, _backward)


def _by_tokens(hidden, table, targets, weights):
    """Returns losses [B, T] and the gradients of hidden and table, computed by chunks of a device's tokens."""
    axes = shard_axes("V")  # with them, the table holds this device's entries of the vocabulary
    entries = jax.lax.axis_index(axes) * len(table) + jnp.arange(len(table))
    partial_dtype = (
        jnp.float32 if axes else hidden.dtype
    )  # of what is still to be summed over the vocabulary

    def add_chunk(grad_table, chunk):
        (shape, rows), (_, targets), (_, weights) = (
            (x.shape, x.reshape(-1, *x.shape[2:])) for x in chunk
        )
        logits = jnp.einsum("RD,VD->RV", rows, table, preferred_element_type=jnp.float32)
        local = jax.nn.logsumexp(logits, axis=-1)
        largest = jax.lax.pmax(local, axes)
        logsumexp = largest + jnp.log(jax.lax.psum(jnp.exp(local - largest), axes))
        is_target = entries[None] == targets[:, None]
        target_logits = jnp.where(is_target, logits, 0).sum(axis=-1)
        grad_logits = (jnp.exp(logits - logsumexp[:, None]) - is_target) * weights[:, None]
        grad_logits = grad_logits.astype(rows.dtype)
        grad_rows = jnp.einsum(
            "RV,VD->RD", grad_logits, table, preferred_element_type=partial_dtype
        )
        grad_table = grad_table + jnp.einsum(
            "RV,RD->VD", grad_logits, rows, preferred_element_type=jnp.float32
        )
        return grad_table, tuple(
            x.reshape(*shape[:2], *x.shape[1:]) for x in (logsumexp, target_logits, grad_rows)
        )

    chunks = _chunk_tokens((hidden, targets, weights), len(table))
    grad_table, stacked = jax.lax.scan(add_chunk, jnp.zeros(table.shape, jnp.float32), chunks)
    logsumexp, *stacked = (x.swapaxes(0, 1).reshape(*targets.shape, *x.shape[3:]) for x in stacked)
    target_logits, grad_hidden = jax.lax.psum(stacked, axes)  # once, not in every chunk
    return (
        logsumexp - target_logits,
        grad_hidden.astype(hidden.dtype),
        sum_like_param(grad_table, "VD"),
    )


def _by_vocab(hidden, embedding, targets, weights):
    """Returns the same by chunks of the vocabulary; each device keeps its own columns of the embedding."""
    (B, T, D), V, shards = hidden.shape, len(embedding), num_shards("V")
    per_shard = V // shards
    logits_per_device = B * T // num_shards("B") * per_shard
    least = max(4, -(-logits_per_device // _MAX_LOGITS_PER_CHUNK))
    num_chunks = next(
        (c for c in range(least, 16 * least) if per_shard % c == 0), 1
    )  # 1: V hardly divides
    length = per_shard // num_chunks
    tables = embedding.reshape(shards, num_chunks, length, D).swapaxes(0, 1)
    tables = constrain_like_param(tables, "CVvD")
    firsts = jnp.arange(num_chunks) * length
    offsets = (
        jnp.arange(shards)[:, None] * per_shard + jnp.arange(length)[None]
    )  # of a chunk's entries, from its first
    rows, targets_of_rows, weights_of_rows = (
        hidden.reshape(-1, D),
        targets.reshape(-1),
        weights.reshape(-1),
    )

    def score(table, first):
        table = constrain(table.astype(hidden.dtype), "VvD")
        logits = jnp.einsum("RD,PVD->RPV", rows, table, preferred_element_type=jnp.float32)
        return (
            constrain(logits, "BVv"),
            table,
            targets_of_rows[:, None, None] == (first + offsets)[None],
        )

    def accumulate_softmax(carry, chunk):
        logits, _, is_target = score(*chunk)
        logsumexp = jnp.logaddexp(carry[0], jax.nn.logsumexp(logits, axis=2))
        return (logsumexp, carry[1] + jnp.where(is_target, logits, 0).sum(axis=2)), None

    def accumulate_gradient(grad_rows, chunk):
        logits, table, is_target = score(*chunk)
        grad_logits = (jnp.exp(logits - logsumexp[:, None, None]) - is_target) * weights_of_rows[
            :, None, None
        ]
        grad_logits = constrain(grad_logits.astype(rows.dtype), "BVv")
        grad_rows = grad_rows + jnp.einsum(
            "RPV,PVD->RPD", grad_logits, table, preferred_element_type=jnp.float32
        )
        grad_table = jnp.einsum(
            "RPV,RD->PVD", grad_logits, rows, preferred_element_type=jnp.float32
        )
        return grad_rows, constrain_like_param(grad_table, "VvD")

    # Each shard of the vocabulary has its own sums, which are added up once, not in every chunk.
    zeros, chunks = (
        constrain(jnp.zeros((len(rows), shards, D), jnp.float32), "BVD"),
        (tables, firsts),
    )
    start = zeros[:, :, 0] - jnp.inf, zeros[:, :, 0]
    (logsumexp, target_logits), _ = jax.lax.scan(accumulate_softmax, start, chunks)
    logsumexp = jax.nn.logsumexp(logsumexp, axis=1)
    grad_rows, grad_tables = jax.lax.scan(accumulate_gradient, zeros, chunks)
    losses = (logsumexp - target_logits.sum(axis=1)).reshape(targets.shape)
    grad_hidden = grad_rows.sum(axis=1).astype(hidden.dtype).reshape(hidden.shape)
    return losses, grad_hidden, grad_tables.swapaxes(0, 1).reshape(V, D)


def _chunk_tokens(arrays, V: int, shards: int = 1):
    """Reshapes arrays [B, T, ...], where B is in this many shards, to [C, B, T / C, ...], sharded alike."""
    B, T = arrays[0].shape[:2]
    kind = getattr(jax.sharding.get_abstract_mesh().abstract_device, "device_kind", "")
    rows = next(rows for start, rows in _ROWS_PER_CHUNK.items() if kind.startswith(start))
    longest = _MAX_LOGITS_WHOLE // V * shards // B  # tokens of a sequence
    if longest < T:
        longest = min(max(longest, rows * shards // B), T // 2)
    length = max(t for t in range(1, T + 1) if T % t == 0 and (t == 1 or t <= longest))
    return jax.tree.map(
        lambda x: x.reshape(B, T // length, length, *x.shape[2:]).swapaxes(0, 1), arrays
    )
