"""Cross-entropy of the next token, without ever holding the [tokens, V] logits of a large vocabulary whole.

The gradient is made in the forward pass, piece by piece, while the logits of a piece are at hand. Where a device
holds the whole table, pieces are of tokens, and every logit is computed once. Where the table is split over devices,
pieces are of the vocabulary: a piece of the table is gathered, used and gives its gradient back, so that the table
never exists whole; its logits are computed twice, because a softmax first needs those of every piece.

Axes: B batch, T length, D embed_dim, V vocab, C pieces; rows are tokens of the whole batch, [B * T].
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
    """-log softmax(hidden embedding^T)[targets] in nats, float32, for evaluation.

    The matmul is in hidden's dtype with float32 sums. `weighted_loss` is what has an affordable gradient.
    """
    table = constrain(embedding.astype(hidden.dtype), "VD")

    def piece(part):
        hidden, targets = part
        logits = jnp.einsum("BTD,VD->BTV", hidden, table, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    losses = jax.lax.map(piece, _pieces_of_tokens((hidden, targets), len(table)))
    return losses.swapaxes(0, 1).reshape(targets.shape)


@jax.custom_vjp
def weighted_loss(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> Float[Array, ""]:
    """The sum of weights * -log softmax(hidden embedding^T)[targets], in nats, float32.

    Matmuls are in hidden's dtype with float32 sums, those of the embedding's gradient too.
    """
    return (token_losses(hidden, embedding, targets) * weights).sum()


def _forward(hidden, embedding, targets, weights):
    by_pieces = _by_tokens if num_shards("B") == num_shards("V") == 1 else _by_vocab
    losses, pulled, given = by_pieces(hidden, embedding, targets, weights)
    return (losses * weights).sum(), (losses, pulled, given.astype(embedding.dtype))


def _backward(residuals, pull):
    losses, hidden, embedding = residuals
    return (hidden * pull).astype(hidden.dtype), (embedding * pull).astype(embedding.dtype), None, losses * pull


weighted_loss.defvjp(_forward, _backward)


def _by_tokens(hidden, embedding, targets, weights):
    """(losses [B, T], gradient of hidden, gradient of embedding), a piece of the tokens at a time."""
    table = embedding.astype(hidden.dtype)

    def piece(total, part):
        (shape, rows), (_, right), (_, weight) = ((x.shape, x.reshape(-1, *x.shape[2:])) for x in part)
        logits = jnp.einsum("RD,VD->RV", rows, table, preferred_element_type=jnp.float32)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        hit = jnp.arange(len(table)) == right[:, None]
        losses = normaliser - jnp.where(hit, logits, 0).sum(axis=-1)
        pull = ((jnp.exp(logits - normaliser[:, None]) - hit) * weight[:, None]).astype(rows.dtype)
        total = total + jnp.einsum("RV,RD->VD", pull, rows, preferred_element_type=jnp.float32)
        return total, (losses.reshape(shape[:2]), (pull @ table).reshape(shape))

    parts = _pieces_of_tokens((hidden, targets, weights), len(table))
    total, whole = jax.lax.scan(piece, jnp.zeros(table.shape, jnp.float32), parts)
    losses, pulled = (x.swapaxes(0, 1).reshape(*targets.shape, *x.shape[3:]) for x in whole)
    return losses, pulled, total


def _by_vocab(hidden, embedding, targets, weights):
    """The same, a piece of the vocabulary at a time; every device keeps its own columns of the table."""
    (B, T, D), V, parts = hidden.shape, len(embedding), num_shards("V")
    each = V // parts  # entries that one device holds
    logits = B * T // num_shards("B") * each  # of one device
    least = 1 if logits <= _MAX_LOGITS_WHOLE else max(4, -(-logits // _MAX_LOGITS_PER_CHUNK))
    count = next((c for c in range(least, 16 * least) if each % c == 0), 1)  # 1: a V that hardly divides
    length = each // count
    tables = embedding.reshape(parts, count, length, D).swapaxes(0, 1)
    tables = constrain_like_param(tables, "CVvD")
    first = jnp.arange(count) * length
    names = jnp.arange(parts)[:, None] * each + jnp.arange(length)  # of entries, less `first`
    rows, right, weight = hidden.reshape(-1, D), targets.reshape(-1), weights.reshape(-1)

    def score(table, first):
        table = constrain(table.astype(hidden.dtype), "VvD")
        logits = jnp.einsum("RD,PVD->RPV", rows, table, preferred_element_type=jnp.float32)
        return constrain(logits, "BVv"), table, right[:, None, None] == first + names

    def normalise(carry, piece):
        largest, total, picked = carry
        logits, _, hit = score(*piece)
        larger = jnp.maximum(largest, logits.max(axis=(1, 2)))
        total = total * jnp.exp(largest - larger) + jnp.exp(logits - larger[:, None, None]).sum(axis=(1, 2))
        return (larger, total, picked + jnp.where(hit, logits, 0).sum(axis=(1, 2))), None

    def pull_back(total, piece):
        logits, table, hit = score(*piece)
        pull = (jnp.exp(logits - normaliser[:, None, None]) - hit) * weight[:, None, None]
        pull = constrain(pull.astype(rows.dtype), "BVv")
        total = total + jnp.einsum("RPV,PVD->RD", pull, table, preferred_element_type=jnp.float32)
        given = jnp.einsum("RPV,RD->PVD", pull, rows, preferred_element_type=jnp.float32)
        return total, constrain_like_param(given, "VvD")

    zeros = jnp.zeros(rows.shape[0], jnp.float32)
    (largest, total, picked), _ = jax.lax.scan(normalise, (zeros - jnp.inf, zeros, zeros), (tables, first))
    normaliser = largest + jnp.log(total)
    pulled, given = jax.lax.scan(pull_back, jnp.zeros(rows.shape, jnp.float32), (tables, first))
    losses = (normaliser - picked).reshape(targets.shape)
    return losses, pulled.astype(hidden.dtype).reshape(hidden.shape), given.swapaxes(0, 1).reshape(V, D)


def _pieces_of_tokens(arrays, V: int):
    """Arrays [B, T, ...] as [C, B, T / C, ...]: a batch that is split over devices stays split."""
    B, T = arrays[0].shape[:2]
    most = _MAX_LOGITS_WHOLE // V * num_shards("B") // B  # tokens of a sequence
    if most < T:
        most = min(max(most, _ROWS_PER_CHUNK * num_shards("B") // B), T // 2)
    length = max(t for t in range(1, T + 1) if T % t == 0 and (t == 1 or t <= most))
    return jax.tree.map(lambda x: x.reshape(B, T // length, length, *x.shape[2:]).swapaxes(0, 1), arrays)
