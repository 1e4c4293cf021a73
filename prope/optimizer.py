"""The optimizer, of Optax, with a schedule, and clipping: change it here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from prope import parameters
from prope.errors import usage_error
from prope.spec.run import EXTENDABLE, SCHEDULES, OptimizerSpec, Spec
from prope.user_code import load_function

_SCHEDULE = "config.optimizer.schedule"


def learning_rate(spec: Spec) -> optax.Schedule:
    """Makes the schedule: linear to the peak over `warmup_steps`, then as config says.

    It is one update ahead of Optax's: update 1 has a rate above 0, update num_steps has
    final_learning_rate. One of the user's own is taken as it is, from the count 0 of update 1.
    """
    c = spec.optimizer
    if c.schedule not in SCHEDULES:
        return _own_schedule(spec)
    warmup = warmup_steps(spec)
    if c.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=c.learning_rate,
            warmup_steps=warmup,
            decay_steps=spec.num_steps,  # the whole run, warmup included
            end_value=c.final_learning_rate,
        )
    else:
        begin = decay_begin(spec)
        parts = [
            optax.linear_schedule(0.0, c.learning_rate, warmup),
            optax.constant_schedule(c.learning_rate),
            optax.linear_schedule(c.learning_rate, c.final_learning_rate, spec.num_steps - begin),
        ]
        schedule = optax.join_schedules(parts, [warmup, begin])
    return lambda count: schedule(count + 1)


def decay_begin(spec: Spec) -> int:
    """Returns the last step before the decay of wsd; the last step of other schedules."""
    share = spec.optimizer.decay_share if spec.optimizer.schedule == "wsd" else 0
    return max(warmup_steps(spec), spec.num_steps - round(share * spec.num_steps))


def check_extension(spec: Spec, before: Spec, step: int) -> None:
    """Raises UsageError where the `step` updates that are done had other rates than in `spec`."""
    if spec.optimizer.schedule not in EXTENDABLE:  # there `differences` has compared all
        return
    counts = np.arange(step)
    is_same = learning_rate(before)(counts) == learning_rate(spec)(counts)
    if not is_same.all():
        last = is_same.argmin()
        problem = f"checkpoint {step} had other learning rates from step {last + 1} on"
        remedy = "keep num_steps and optimizer.decay_share, or go on in a copy of --workdir "
        remedy += f"without its checkpoints after step {last}"
        raise usage_error("config.num_steps", spec.num_steps, problem, remedy)


def _own_schedule(spec: Spec) -> optax.Schedule:
    """Makes the schedule of the user's own; raises UsageError where it is none.

    Its rates are computed for up to 512 updates, evenly spread, and have to be finite and >= 0.
    """
    name = spec.optimizer.schedule.partition("@")[0]
    function = load_function(_SCHEDULE, name)
    counts = np.unique(np.linspace(0, spec.num_steps - 1, 512, dtype=np.int32))
    try:
        schedule = function.call(spec)

        def rate(count):
            return jnp.asarray(schedule(jnp.asarray(count)), jnp.float32)

        with jax.ensure_compile_time_eval():  # also where the caller is traced
            rates = jax.jit(functools.partial(jax.lax.map, rate))(counts)
    except Exception as error:
        remedy = "it takes a Spec and returns a function, in jax.numpy, of the count of updates"
        raise usage_error(_SCHEDULE, name, function.describe(error), remedy) from error
    for count, value in zip(counts, np.asarray(rates), strict=True):
        if value.shape or not 0 <= value < np.inf:
            problem = f"the learning rate of step {count + 1} is {value.tolist()}"
            raise usage_error(_SCHEDULE, name, problem, "return one number, finite and >= 0")
    return rate


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
