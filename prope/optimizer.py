"""The optimizer, of Optax, with warmup, cosine decay and clipping: change it here."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from prope import parameters
from prope.spec.run import OptimizerSpec, Spec


def learning_rate(spec: Spec) -> optax.Schedule:
    """Makes the schedule: linear to the peak over `warmup_steps`, then cosine decay.

    It is one update ahead of Optax's: update 1 has a rate above 0, update num_steps has
    final_learning_rate.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=spec.optimizer.learning_rate,
        warmup_steps=warmup_steps(spec),
        decay_steps=spec.num_steps,  # the whole run, warmup included
        end_value=spec.optimizer.final_learning_rate,
    )
    return lambda count: schedule(count + 1)


def warmup_steps(spec: Spec) -> int:
    """Returns the steps of warmup: the config's, or a tenth of a run that is not longer."""
    warmup = spec.optimizer.warmup_steps
    return warmup if warmup < spec.num_steps else spec.num_steps // 10


def make_optimizer(spec: Spec) -> optax.GradientTransformation:
    """Makes the update rule: clips by the global norm, then `spec.optimizer.name`.

    All have the schedule, and decay of matrices that is multiplied by the learning rate.
    """
    c = spec.optimizer
    rate = learning_rate(spec)
    clip = optax.clip_by_global_norm(c.clip_norm)
    if c.name in ("adamw", "lion"):
        options = {"b1": c.b1, "b2": c.b2, "mu_dtype": c.mu_dtype, "weight_decay": c.weight_decay}
        if c.name == "adamw":
            rule = optax.adamw(rate, eps=c.eps, mask=has_weight_decay, **options)
        else:
            rule = optax.lion(rate, mask=has_weight_decay, **options)
        return optax.chain(clip, rule)
    direction = optax.adafactor() if c.name == "adafactor" else _muon(c)
    decay = optax.add_decayed_weights(-c.weight_decay, has_weight_decay)
    return optax.chain(clip, direction, decay, optax.scale_by_schedule(rate))


def _muon(c: OptimizerSpec) -> optax.GradientTransformation:
    """Makes Muon for the matrices of layers, and Adam for the embedding and norms.

    Updates have the root mean square of AdamW's, so that it takes AdamW's learning rate.
    """
    return optax.contrib.muon(
        1.0,
        beta=c.b1,
        eps=c.eps,
        mu_dtype=c.mu_dtype,
        adam_b1=c.b1,
        adam_b2=c.b2,
        muon_weight_dimension_numbers=_matrix_axes,
        consistent_rms=0.2,
    )


def _matrix_axes(params):
    """Returns which axes of every parameter Muon takes as a matrix's rows and columns; None: Adam.

    Layers, in an array of all too, and the two matrices in one array are matrices of their own.
    """

    def find_axes(keys, _):
        row, axes = parameters.find(keys)
        if not row.is_matrix or "V" in axes:
            return None
        rows = tuple(axes.index(axis) for axis in row.fan_in)
        columns = tuple(i for i, axis in enumerate(axes) if axis not in f"{row.fan_in}LMC")
        return optax.contrib.MuonDimensionNumbers(rows, columns)

    return jax.tree_util.tree_map_with_path(find_axes, params)


def has_weight_decay(params):
    """Marks the leaves that are matrices; the scales of norms do not decay."""

    def is_matrix(keys, _):
        row, _ = parameters.find(keys)
        return row.is_matrix

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def skip_nonfinite(is_finite: jax.Array, new, old):
    """Returns the state `new` where the step `is_finite`, else `old`.

    The schedule counts the step either way.
    """

    def is_schedule(node):
        return isinstance(node, optax.ScaleByScheduleState)

    def select(new, old):
        return new if is_schedule(new) else jnp.where(is_finite, new, old)

    return jax.tree.map(select, new, old, is_leaf=is_schedule)
