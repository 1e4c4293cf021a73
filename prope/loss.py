"""Cross-entropy of the next token, without ever holding the [tokens, V] logits of a large vocabulary whole.

The gradient is computed in the forward pass, chunk by chunk, while the chunk's logits exist. Where every device holds
the whole embedding, chunks are of tokens and each logit is computed once. Where the embedding is split over devices,
chunks are of the vocabulary: a chunk of the embedding is all-gathered, used, and its gradient scattered, so that the
embedding never exists whole. Logits are then computed twice, because a softmax first needs those of all chunks.

Axes: B batch, T length, D embed_dim, V vocab, R = B * T tokens, C chunks, P shards of the vocabulary, v entries of a
chunk on one shard.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prope.sharding import constrain, constrain_like_param, num_shards

_MAX_LOGITS_WHOLE = 2**24  # logits of a device that exist at once without chunks: 64 MiB in float32
_ROWS_PER_CHUNK = 1024  # tokens of a device in a chunk of tokens, where _MAX_LOGITS_WHOLE allows no more
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

    losses = jax.lax.map(chunk_losses, _chunk_tokens((hidden, targets), len(table)))
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
    by_chunks = _by_tokens if num_shards("B") == num_shards("V") == 1 else _by_vocab
    losses, grad_hidden, grad_embedding = by_chunks(hidden, embedding, targets, weights)
    return (losses * weights).sum(), (losses, grad_hidden, grad_embedding.astype(embedding.dtype))


def _backward(residuals, cotangent):
    losses, *gradients = residuals
    grad_hidden, grad_embedding = ((gradient * cotangent).astype(gradient.dtype) for gradient in gradients)
    return grad_hidden, grad_embedding, None, losses * cotangent


weighted_loss.defvjp(_forward, _backward)


def _by_tokens(hidden, embedding, targets, weights):
    """Returns losses [B, T] and the gradients of hidden and embedding, computed by chunks of the tokens."""
    table = embedding.astype(hidden.dtype)

    def add_chunk(grad_table, chunk):
        (shape, rows), (_, targets), (_, weights) = ((x.shape, x.reshape(-1, *x.shape[2:])) for x in chunk)
        logits = jnp.einsum("RD,VD->RV", rows, table, preferred_element_type=jnp.float32)
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        is_target = jnp.arange(len(table))[None] == targets[:, None]
        losses = logsumexp - jnp.where(is_target, logits, 0).sum(axis=-1)
        grad_logits = (jnp.exp(logits - logsumexp[:, None]) - is_target) * weights[:, None]
        grad_logits = grad_logits.astype(rows.dtype)
        grad_table = grad_table + jnp.einsum("RV,RD->VD", grad_logits, rows, preferred_element_type=jnp.float32)
        return grad_table, (losses.reshape(shape[:2]), (grad_logits @ table).reshape(shape))

    chunks = _chunk_tokens((hidden, targets, weights), len(table))
    grad_table, stacked = jax.lax.scan(add_chunk, jnp.zeros(table.shape, jnp.float32), chunks)
    losses, grad_hidden = (x.swapaxes(0, 1).reshape(*targets.shape, *x.shape[3:]) for x in stacked)
    return losses, grad_hidden, grad_table


def _by_vocab(hidden, embedding, targets, weights):
    """Returns the same by chunks of the vocabulary; each device keeps its own columns of the embedding."""
    (B, T, D), V, shards = hidden.shape, len(embedding), num_shards("V")
    per_shard = V // shards
    logits_per_device = B * T // num_shards("B") * per_shard
    few = logits_per_device <= _MAX_LOGITS_WHOLE
    least = 1 if few else max(4, -(-logits_per_device // _MAX_LOGITS_PER_CHUNK))
    num_chunks = next((c for c in range(least, 16 * least) if per_shard % c == 0), 1)  # 1: V hardly divides
    length = per_shard // num_chunks
    tables = embedding.reshape(shards, num_chunks, length, D).swapaxes(0, 1)
    tables = constrain_like_param(tables, "CVvD")
    firsts = jnp.arange(num_chunks) * length
    offsets = jnp.arange(shards)[:, None] * per_shard + jnp.arange(length)[None]  # of a chunk's entries, from its first
    rows, targets_of_rows, weights_of_rows = hidden.reshape(-1, D), targets.reshape(-1), weights.reshape(-1)

    def score(table, first):
        table = constrain(table.astype(hidden.dtype), "VvD")
        logits = jnp.einsum("RD,PVD->RPV", rows, table, preferred_element_type=jnp.float32)
        return constrain(logits, "BVv"), table, targets_of_rows[:, None, None] == (first + offsets)[None]

    def accumulate_softmax(carry, chunk):
        largest, total, target_logits = carry
        logits, _, is_target = score(*chunk)
        larger = jnp.maximum(largest, logits.max(axis=(1, 2)))
        total = total * jnp.exp(largest - larger) + jnp.exp(logits - larger[:, None, None]).sum(axis=(1, 2))
        return (larger, total, target_logits + jnp.where(is_target, logits, 0).sum(axis=(1, 2))), None

    def accumulate_gradient(grad_rows, chunk):
        logits, table, is_target = score(*chunk)
        grad_logits = (jnp.exp(logits - logsumexp[:, None, None]) - is_target) * weights_of_rows[:, None, None]
        grad_logits = constrain(grad_logits.astype(rows.dtype), "BVv")
        grad_rows = grad_rows + jnp.einsum("RPV,PVD->RD", grad_logits, table, preferred_element_type=jnp.float32)
        grad_table = jnp.einsum("RPV,RD->PVD", grad_logits, rows, preferred_element_type=jnp.float32)
        return grad_rows, constrain_like_param(grad_table, "VvD")

    zeros, chunks = jnp.zeros(rows.shape[0], jnp.float32), (tables, firsts)
    (largest, total, target_logits), _ = jax.lax.scan(accumulate_softmax, (zeros - jnp.inf, zeros, zeros), chunks)
    logsumexp = largest + jnp.log(total)
    grad_rows, grad_tables = jax.lax.scan(accumulate_gradient, jnp.zeros(rows.shape, jnp.float32), chunks)
    losses = (logsumexp - target_logits).reshape(targets.shape)
    grad_hidden = grad_rows.astype(hidden.dtype).reshape(hidden.shape)
    return losses, grad_hidden, grad_tables.swapaxes(0, 1).reshape(V, D)


def _chunk_tokens(arrays, V: int):
    """Reshapes arrays [B, T, ...] to [C, B, T / C, ...]: a batch that is split over devices stays split."""
    B, T = arrays[0].shape[:2]
    longest = _MAX_LOGITS_WHOLE // V * num_shards("B") // B  # tokens of a sequence
    if longest < T:
        longest = min(max(longest, _ROWS_PER_CHUNK * num_shards("B") // B), T // 2)
    length = max(t for t in range(1, T + 1) if T % t == 0 and (t == 1 or t <= longest))
    return jax.tree.map(lambda x: x.reshape(B, T // length, length, *x.shape[2:]).swapaxes(0, 1), arrays)
