"""Cross-entropy of the next token, without ever holding the [tokens, V] logits whole.

The gradient is computed in the forward pass, chunk by chunk, while the chunk's logits exist.

Chunks of tokens: each logit is computed once. A device all-gathers the embedding, takes its own
tokens, and the gradients that all devices accumulate are reduce-scattered once.

Chunks of the vocabulary, where the embedding is too large for that, or memory too small: a chunk of
the embedding is all-gathered, used, and its gradient scattered. Logits are then computed twice,
because a softmax first needs those of all chunks.

Axes: B batch, T length, D embed_dim, V vocab, R = B * T tokens, C chunks, P shards of the
vocabulary, v entries of a chunk on one shard.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prope.kernels.matmul import einsum_to_float32
from prope.kernels.softcap import softcap, softcap_slope
from prope.sharding import (
    constrain,
    constrain_like_param,
    num_shards,
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
# The embedding in the dtype of the matmuls, all-gathered; its float32 gradient has as many entries.
_MAX_TABLE_BYTES = 2**30
_MAX_LOGITS_PER_CHUNK = 2**27  # logits of a device in a chunk of the vocabulary


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
    gather_table: bool = True,
) -> Float[Array, ""]:
    """Computes the sum of weights * `token_losses`, nats, float32.

    Matmuls are in hidden's dtype with float32 sums, those of the embedding's gradient too. With
    `gather_table` it goes by chunks of tokens, if a device's entries of the vocabulary have at most
    1 GiB in that dtype and the batch divides among the devices; otherwise by chunks of the
    vocabulary.
    """
    del gather_table
    return (token_losses(hidden, embedding, targets, cap) * weights).sum()


def _forward(hidden, embedding, targets, weights, cap, gather_table):
    table_bytes = embedding.size * hidden.dtype.itemsize
    table_fits = table_bytes <= _MAX_TABLE_BYTES * num_shards("V")
    one_device = num_shards("B") == num_shards("V") == 1
    divides = len(hidden) % num_shards("B") == 0
    if one_device or (gather_table and table_fits and divides):
        # The cast comes before the all-gather, which then moves fewer bytes.
        table = constrain_like_param(embedding.astype(hidden.dtype), "VD")
        by_tokens = shard_mapped(
            functools.partial(_by_tokens, cap, 0.0), ["BTD", "VD", "BT", "BT"], ["BT", "BTD", "VD"]
        )
        losses, grad_hidden, grad_embedding = by_tokens(hidden, table, targets, weights)
    else:
        losses, grad_hidden, grad_embedding = _by_vocab(cap, hidden, embedding, targets, weights)
    residuals = (losses, grad_hidden, grad_embedding.astype(embedding.dtype))
    return (losses * weights).sum(), residuals


def _backward(cap, gather_table, residuals, cotangent):
    del cap, gather_table
    return _scale_residuals(residuals, cotangent)


def _scale_residuals(residuals, cotangent):
    losses, grad_hidden, grad_embedding = residuals
    grad_hidden = (grad_hidden * cotangent).astype(grad_hidden.dtype)
    grad_embedding = (grad_embedding * cotangent).astype(grad_embedding.dtype)
    grad_weights = losses * cotangent
    return grad_hidden, grad_embedding, None, grad_weights


weighted_loss.defvjp(_forward, _backward)


class Distilled(NamedTuple):
    """Sums of weights times a loss of every token, nats; only `total` has a gradient."""

    total: jax.Array  # (1 - share) loss + share kl
    loss: jax.Array  # of `token_losses`
    kl: jax.Array  # KL(teacher || model) of the next token


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def distilled_loss(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher_hidden: Float[Array, "B T D"],
    teacher_embedding: Float[Array, "V D"],
    cap: float | None = None,
    share: float = 1.0,
) -> Distilled:
    """Computes `weighted_loss` and the divergence from a teacher, which has no gradient.

    Always by chunks of tokens: both tables are all-gathered, however large they are.
    """
    arrays = (hidden, embedding, targets, weights, teacher_hidden, teacher_embedding)
    return _forward_distilled(*arrays, cap, share)[0]


def _forward_distilled(
    hidden, embedding, targets, weights, teacher_hidden, teacher_embedding, cap, share
):
    tables = [
        constrain_like_param(array.astype(hidden.dtype), "VD")
        for array in (embedding, teacher_embedding)
    ]
    by_tokens = shard_mapped(
        functools.partial(_by_tokens, cap, share),
        ["BTD", "VD", "BT", "BT", "BTD", "VD"],
        ["BT", "BTD", "VD", "BT"],
    )
    losses, grad_hidden, grad_embedding, divergences = by_tokens(
        hidden, tables[0], targets, weights, teacher_hidden, tables[1]
    )
    totals = (1 - share) * losses + share * divergences
    residuals = (totals, grad_hidden, grad_embedding.astype(embedding.dtype))
    sums = [(array * weights).sum() for array in (totals, losses, divergences)]
    return Distilled(*sums), residuals


def _backward_distilled(cap, share, residuals, cotangents):
    del cap, share
    return *_scale_residuals(residuals, cotangents.total), None, None


distilled_loss.defvjp(_forward_distilled, _backward_distilled)


def _by_tokens(cap, share, hidden, table, targets, weights, *teacher):
    """Returns losses [B, T], gradients of hidden and table, by chunks of a device's tokens.

    A teacher's hidden and table replace this share of every target; last come divergences [B, T].
    """
    axes = shard_axes("V")  # with them, the table holds this device's entries of the vocabulary
    entries = jax.lax.axis_index(axes) * len(table) + jnp.arange(len(table))
    *teacher_hidden, teacher_table = teacher or (None,)
    add_chunk = functools.partial(_add_tokens, cap, share, entries, table, teacher_table)
    chunks = _chunk_tokens((hidden, targets, weights, *teacher_hidden), len(table))
    start = jnp.zeros(table.shape, jnp.float32)
    grad_table, results = jax.lax.scan(add_chunk, start, chunks)
    logsumexp, *to_sum = (x.swapaxes(0, 1).reshape(*targets.shape, *x.shape[3:]) for x in results)
    # Summed once, not in every chunk.
    target_logits, grad_hidden, *divergences = jax.lax.psum(to_sum, axes)
    losses = logsumexp - target_logits
    gradients = (grad_hidden.astype(hidden.dtype), sum_like_param(grad_table, "VD"))
    return losses, *gradients, *divergences


def _add_tokens(cap, share, entries, table, teacher_table, grad_table, chunk):
    """Adds a chunk of tokens to the table's gradient; returns that, and what each token has.

    `entries` are those of the vocabulary that the tables hold on this device.
    """
    axes = shard_axes("V")
    B, T = chunk[1].shape
    rows, targets, weights, *teacher_rows = (x.reshape(-1, *x.shape[2:]) for x in chunk)
    logits = _score_rows(cap, rows, table)
    logsumexp = _logsumexp_over_shards(logits, axes)
    is_target = entries[None] == targets[:, None]
    target_logits = jnp.where(is_target, logits, 0).sum(axis=-1)
    log_probabilities = logits - logsumexp[:, None]
    wanted = is_target
    divergences = []
    for other_rows in teacher_rows:
        log_wanted = _score_rows(cap, other_rows, teacher_table)
        log_wanted = log_wanted - _logsumexp_over_shards(log_wanted, axes)[:, None]
        divergence = jnp.exp(log_wanted) * (log_wanted - log_probabilities)
        divergences.append(divergence.sum(axis=-1))
        wanted = (1 - share) * is_target + share * jnp.exp(log_wanted)
    grad_losses = jnp.exp(log_probabilities) - wanted
    grad_logits = _grad_logits(cap, logits, grad_losses, weights[:, None]).astype(rows.dtype)
    grad_rows, chunk_grad_table = _matmul_gradients(grad_logits, rows, table, axes)
    results = (logsumexp, target_logits, grad_rows, *divergences)
    results = tuple(x.reshape(B, T, *x.shape[1:]) for x in results)
    return grad_table + chunk_grad_table, results


def _score_rows(cap, rows, table):
    """Scores all entries of a table [V, D] for rows [R, D]: logits [R, V], float32, capped."""
    logits = einsum_to_float32("RD,VD->RV", rows, table)
    return softcap(logits, cap)


def _grad_logits(cap, logits, grad_loss, weights):
    """Returns the gradient of logits before their cap, from that of a token's loss after it."""
    return grad_loss * weights * softcap_slope(logits, cap)


def _matmul_gradients(grad_logits, rows, table, axes):
    """Returns the gradients of rows [R, D] and table [V, D] from those of their logits."""
    # Float32 where a gradient is still to be summed over the vocabulary's shards.
    multiply = einsum_to_float32 if axes else jnp.einsum
    grad_rows = multiply("RV,VD->RD", grad_logits, table)
    grad_table = einsum_to_float32("RV,RD->VD", grad_logits, rows)
    return grad_rows, grad_table


def _logsumexp_over_shards(logits, axes):
    """Computes logsumexp over the whole vocabulary, whose shards lie on the mesh axes `axes`."""
    local = jax.nn.logsumexp(logits, axis=-1)
    largest = jax.lax.pmax(local, axes)
    total = jax.lax.psum(jnp.exp(local - largest), axes)
    return largest + jnp.log(total)


class _VocabChunks(NamedTuple):
    """The embedding cut into C chunks of every shard's part of the vocabulary."""

    tables: jax.Array  # [C, P, v, D]
    firsts: jax.Array  # [C], entries of a shard before the chunk
    offsets: jax.Array  # [P, v], entry of the vocabulary less `firsts`


def _chunk_vocab(embedding, num_tokens: int) -> _VocabChunks:
    V, D = embedding.shape
    shards = num_shards("V")
    per_shard = V // shards
    logits_per_device = num_tokens // num_shards("B") * per_shard
    least = max(4, -(-logits_per_device // _MAX_LOGITS_PER_CHUNK))
    divisors = [c for c in range(least, 16 * least) if per_shard % c == 0]
    num_chunks = divisors[0] if divisors else 1  # 1 where V hardly divides
    length = per_shard // num_chunks
    tables = embedding.reshape(shards, num_chunks, length, D).swapaxes(0, 1)
    starts_of_shards = jnp.arange(shards)[:, None] * per_shard
    return _VocabChunks(
        tables=constrain_like_param(tables, "CVvD"),
        firsts=jnp.arange(num_chunks) * length,
        offsets=starts_of_shards + jnp.arange(length)[None],
    )


class _Rows(NamedTuple):
    """All tokens of a batch."""

    hidden: jax.Array  # [R, D]
    targets: jax.Array  # [R, 1, 1]
    weights: jax.Array  # [R, 1, 1]


def _by_vocab(cap, hidden, embedding, targets, weights):
    """Returns the same by chunks of the vocabulary; each device keeps its columns of the table."""
    B, T, D = hidden.shape
    rows = _Rows(
        hidden=hidden.reshape(-1, D),
        targets=targets.reshape(-1)[:, None, None],
        weights=weights.reshape(-1)[:, None, None],
    )
    chunks = _chunk_vocab(embedding, B * T)
    # Each shard of the vocabulary has its own sums, which are added up once, not in every chunk.
    zeros = constrain(jnp.zeros((B * T, num_shards("V"), D), jnp.float32), "BVD")
    logsumexp, target_logits = _softmax_by_vocab(cap, rows, chunks, zeros[:, :, 0])
    grad_rows, grad_tables = _gradients_by_vocab(cap, rows, chunks, zeros, logsumexp)
    losses = (logsumexp - target_logits).reshape(targets.shape)
    grad_hidden = grad_rows.astype(hidden.dtype).reshape(hidden.shape)
    grad_embedding = grad_tables.swapaxes(0, 1).reshape(embedding.shape)
    return losses, grad_hidden, grad_embedding


def _softmax_by_vocab(cap, rows: _Rows, chunks: _VocabChunks, zeros):
    """Returns the logsumexp and the logit of the target of every row, [R]; zeros are [R, P]."""

    def add_chunk(carry, chunk):
        logsumexp, target_logits = carry
        logits, _, is_target = _score_chunk(cap, rows, chunks, *chunk)
        logsumexp = jnp.logaddexp(logsumexp, jax.nn.logsumexp(logits, axis=2))
        target_logits = target_logits + jnp.where(is_target, logits, 0).sum(axis=2)
        return (logsumexp, target_logits), None

    start = (zeros - jnp.inf, zeros)
    scanned = (chunks.tables, chunks.firsts)
    (logsumexp, target_logits), _ = jax.lax.scan(add_chunk, start, scanned)
    return jax.nn.logsumexp(logsumexp, axis=1), target_logits.sum(axis=1)


def _gradients_by_vocab(cap, rows: _Rows, chunks: _VocabChunks, zeros, logsumexp):
    """Returns the gradients of rows [R, D] and of the chunks' tables; zeros are [R, P, D]."""

    def add_chunk(grad_rows, chunk):
        logits, table, is_target = _score_chunk(cap, rows, chunks, *chunk)
        probabilities = jnp.exp(logits - logsumexp[:, None, None])
        grad_logits = _grad_logits(cap, logits, probabilities - is_target, rows.weights)
        grad_logits = constrain(grad_logits.astype(rows.hidden.dtype), "BVv")
        grad_rows = grad_rows + einsum_to_float32("RPV,PVD->RPD", grad_logits, table)
        grad_table = einsum_to_float32("RPV,RD->PVD", grad_logits, rows.hidden)
        return grad_rows, constrain_like_param(grad_table, "VvD")

    scanned = (chunks.tables, chunks.firsts)
    grad_rows, grad_tables = jax.lax.scan(add_chunk, zeros, scanned)
    return grad_rows.sum(axis=1), grad_tables


def _score_chunk(cap, rows: _Rows, chunks: _VocabChunks, table, first):
    """Scores a chunk's entries: capped logits [R, P, v], the table, which entry is the target."""
    table = constrain(table.astype(rows.hidden.dtype), "VvD")
    logits = einsum_to_float32("RD,PVD->RPV", rows.hidden, table)
    is_target = rows.targets == (first + chunks.offsets)[None]
    return constrain(softcap(logits, cap), "BVv"), table, is_target


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
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = getattr(device, "device_kind", "")
    return next(rows for start, rows in _ROWS_PER_CHUNK.items() if kind.startswith(start))
