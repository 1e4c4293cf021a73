"""The optimizer, AdamW with warmup, cosine decay and clipping: change it here."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Makes the schedule: linear to the peak over warmup_steps, then cosine decay.

    It is one update ahead of Optax's: update 1 has a rate above 0, update num_steps has final_learning_rate.
    """
    c = config.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=c.learning_rate,
        warmup_steps=c.warmup_steps,
        decay_steps=config.num_steps,  # of the whole run, warmup included
        end_value=c.final_learning_rate,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Makes the update rule: clips by the global norm, then AdamW with weight decay on matrices only."""
    c = config.optimizer
    decay = {"weight_decay": c.weight_decay, "mask": has_weight_decay}
    adamw = optax.adamw(
        learning_rate(config), b1=c.b1, b2=c.b2, eps=c.eps, mu_dtype=c.mu_dtype, **decay
    )
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw)


def has_weight_decay(params):
    """Marks every leaf but the norms' scales, by name: stacked over layers they have two axes as well."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)


def keep_unless(update: jax.Array, new, old):
    """Returns the state `new` where `update` is true, else `old`; the schedule counts the step either way."""

    def select(new, old):
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        return jnp.where(update, new, old)

    return jax.tree.map(
        select, new, old, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState)
    )
