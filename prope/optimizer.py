"""AdamW with warmup, cosine decay and clipping: the one place to change for another optimizer."""

import jax
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """The rate of update n + 1 as a function of n = 0, 1, ...: up to the peak in warmup_steps, then a cosine.

    The first update is not wasted on a rate of 0, and update num_steps has final_learning_rate exactly.
    """
    c = config.optimizer
    ramp = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=c.learning_rate,
        warmup_steps=c.warmup_steps,
        decay_steps=config.num_steps,  # of the whole run, warmup included
        end_value=c.final_learning_rate,
    )
    return lambda count: ramp(count + 1)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """The update rule: clip by the global norm, AdamW, decay on matrices only."""
    c = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(c.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=c.b1,
            b2=c.b2,
            eps=c.eps,
            weight_decay=c.weight_decay,
            mask=is_matrix,
            mu_dtype=c.mu_dtype,
        ),
    )


def is_matrix(params):
    """True for every leaf but the norms' scales (whose stack over layers also has two axes: the name decides)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
