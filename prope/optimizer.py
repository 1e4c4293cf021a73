"""The optimizer, AdamW with warmup, cosine decay and clipping: change it here."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from prope import parameters


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Makes the schedule: linear to the peak over warmup_steps, then cosine decay.

    It is one update ahead of Optax's: update 1 has a rate above 0, update num_steps has
    final_learning_rate.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        decay_steps=config.num_steps,  # the whole run, warmup included
        end_value=config.optimizer.final_learning_rate,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Makes the update rule: clips by the global norm, then AdamW with decay on matrices only."""
    c = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        b1=c.b1,
        b2=c.b2,
        eps=c.eps,
        mu_dtype=c.mu_dtype,
        weight_decay=c.weight_decay,
        mask=has_weight_decay,
    )
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw)


def has_weight_decay(params):
    """Marks the leaves that are matrices; the scales of norms do not decay."""

    def is_matrix(keys, _):
        row, _ = parameters.find(keys)
        return row.is_matrix

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def keep_unless(update: jax.Array, new, old):
    """Returns the state `new` where `update` is true, else `old`.

    The schedule counts the step either way.
    """

    def is_schedule(node):
        return isinstance(node, optax.ScaleByScheduleState)

    def select(new, old):
        return new if is_schedule(new) else jnp.where(update, new, old)

    return jax.tree.map(select, new, old, is_leaf=is_schedule)
