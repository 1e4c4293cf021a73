"""The training step as a pure function: what `train` runs, `bench` measures and `plan` compiles."""

import logging
import time

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from prope import model, sharding
from prope.attention import choose
from prope.errors import UsageError
from prope.loss import weighted_loss
from prope.sharding import hash_batch

log = logging.getLogger("prope")


def with_attention(config: ConfigDict, device) -> ConfigDict:
    """The config with "auto" attention replaced by what is best on this device; says which, and why.

    Raises:
      UsageError: the attention that the config asks for cannot run there.
    """
    c = config.model
    asked = (c.attention, device, config.data.seq_len, c.head_dim, c.dtype, config.data.mask_documents)
    try:
        name, why = choose(*asked)
    except ValueError as error:
        raise UsageError(f"config.model.{error}") from None
    log.info("attention: %s (%s)", name, why)
    config = config.copy_and_resolve_references()
    config.model.attention = name
    return config


def init_state(config: ConfigDict, optimizer: optax.GradientTransformation) -> tuple[model.Params, optax.OptState]:
    """(params, opt_state) before the first update: a function of the config alone."""
    params = model.init(config.model, jax.random.key(config.seed))
    return params, optimizer.init(params)


def batch_shapes(config: ConfigDict, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a training batch."""
    shape, place = (config.batch_size, config.data.seq_len), sharding.batch_sharding(mesh)
    whole = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    batch = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), whole)
    return batch | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)}


def batch_hidden(config: ConfigDict, params: model.Params, batch: dict[str, jax.Array]) -> jax.Array:
    """The decoder's output for every token of a batch, [B, T, D]."""
    segment_ids = batch["segment_ids"] if config.data.mask_documents else None
    return model.hidden_states(config.model, params, batch["tokens"], batch["positions"], segment_ids)


def make_train_step(config: ConfigDict, optimizer: optax.GradientTransformation):
    """(params, opt_state, batch) -> (params, opt_state, {"loss", "grad_norm", "batch_hash"}): one update."""

    def weighted_sum(params, batch):
        hidden = batch_hidden(config, params, batch)
        return weighted_loss(hidden, model.embedding(params), batch["targets"], batch["weights"])

    def step(params, opt_state, batch):
        loss, gradient = _accumulate(jax.value_and_grad(weighted_sum), params, batch, config.accumulation)
        tokens = jnp.maximum(batch["weights"].sum(), 1)  # of the whole batch: its parts need not weigh the same
        loss, gradient = jax.tree.map(lambda total: total / tokens, (loss, gradient))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        values = {"loss": loss, "grad_norm": optax.tree.norm(gradient), "batch_hash": hash_batch(batch)}
        return optax.apply_updates(params, updates), opt_state, values

    return step


def trace_step(
    config: ConfigDict, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, state
) -> jax.stages.Traced:
    """The training step for a mesh, whose devices need not be there, ready to be lowered and compiled.

    `state` is (params, opt_state) as shapes with shardings. The step takes over the memory of the state it is given.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(make_train_step(config, optimizer), donate_argnums=(0, 1), out_shardings=(*places, None))
    with sharding.use(mesh):
        return step.trace(*state, batch_shapes(config, mesh))


def compile_step(
    config: ConfigDict, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, state
) -> jax.stages.Compiled:
    """`trace_step`, compiled."""
    start = time.perf_counter()
    compiled = trace_step(config, optimizer, mesh, state).lower().compile()
    log.info("compiled in %.1f s", time.perf_counter() - start)
    return compiled


def _accumulate(function, params, batch, parts: int):
    """The sum of function(params, part) over the parts of a batch, one after the other."""
    if parts == 1:
        return function(params, batch)
    # Part i takes rows i, i + parts, ..: a device that holds rows of the batch holds rows of every part.
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    shapes = jax.eval_shape(function, params, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total, part):
        return jax.tree.map(jnp.add, total, function(params, part)), None

    return jax.lax.scan(add, zeros, split)[0]
