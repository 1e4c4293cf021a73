"""The training step as a pure function.

`train` runs it, `bench` measures it, `plan` compiles it.
"""

import functools
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prope import model, sharding
from prope.attention import choose_implementation
from prope.encodings import Tables
from prope.errors import UsageError, log
from prope.kernels.choice import matmul_precision
from prope.loss import weighted_loss
from prope.optimizer import make_optimizer, skip_nonfinite
from prope.sharding import hash_batch, on_gpu
from prope.spec.kinds import FULL, SLIDING
from prope.spec.layers import Layer
from prope.spec.run import Spec

ASYNC_FUSION = "xla_tpu_enable_async_collective_fusion"  # libtpu's flag
_TPU_LANES = 128  # columns of a tile


def resolve_attention(spec: Spec, device) -> Spec:
    """Returns the spec with "auto" attention resolved for a device; logs the choice's reason.

    Raises:
      UsageError: the device cannot run the attention that the config names.
    """
    by_kind = {layer.kind: layer for layer in spec.model.layers}
    choices = {kind: _choose_attention(spec, layer, device) for kind, layer in by_kind.items()}
    for name, reason in dict.fromkeys(choices.values()):
        log.info("attention: %s (%s)", name, reason)
    names = {kind: name for kind, (name, _) in choices.items()}
    local = names.get(SLIDING, names.get(FULL))
    differ = len(set(names.values())) > 1
    fields = {"model.attention": local, "model.global_attention": names[FULL] if differ else None}
    return spec.replace(fields)


def _choose_attention(spec: Spec, layer: Layer, device) -> tuple[str, str]:
    """Chooses the implementation for the layers of a kind: its name, and the reason."""
    is_global = layer.kind == FULL and spec.model.global_attention is not None
    field = "global_attention" if is_global else "attention"
    try:
        return choose_implementation(
            layer.attention,
            device,
            spec.data.seq_len,
            layer.head_dim,
            spec.model.dtype,
            segmented=spec.data.mask_documents,
            fits_context=_fits_context(spec, layer),
            capped=spec.model.attention_softcap is not None,
        )
    except ValueError as error:
        raise UsageError(f"config.model.{str(error).replace('attention', field, 1)}") from None


def _fits_context(spec: Spec, layer: Layer) -> bool:
    """Returns whether cuDNN can compute a split sequence: by exchanged heads, without documents."""
    C = spec.mesh.context
    if C > 1 and spec.data.mask_documents:
        return False
    heads = spec.model.num_heads // spec.mesh.tensor
    kv_heads = layer.num_kv_heads // spec.mesh.tensor
    return heads % C == 0 and (kv_heads <= 1 or kv_heads % C == 0)


def init_state(
    spec: Spec, optimizer: optax.GradientTransformation
) -> tuple[model.Params, optax.OptState]:
    """Initialises (params, opt_state), as a function of the spec alone."""
    params = model.init(spec.model, jax.random.key(spec.seed, impl=model.PRNG))
    return params, optimizer.init(params)


def resolve_scan(spec: Spec, devices: Sequence) -> Spec:
    """Returns the spec with model.scan_layers resolved: a step on one GPU is unrolled.

    Estimated from its compiled text, one of Gemma 2B takes 252 ms on an H100 instead of 289 then;
    it takes 2 to 3 times as long to compile. For 8 of them XLA of JAX 0.11.2 crashes.
    """
    if spec.model.scan_layers is not None:
        return spec
    on_one_gpu = len(devices) == 1 and devices[0].platform == "gpu"
    return spec.replace({"model.scan_layers": not on_one_gpu})


class Prepared(NamedTuple):
    """What a training step is made from, for certain devices."""

    spec: Spec  # with its attention resolved
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    state: tuple  # (params, opt_state) as shapes with shardings


def prepare(spec: Spec, devices: Sequence) -> Prepared:
    """Resolves a spec for devices, which may be on no machine."""
    spec = resolve_scan(resolve_attention(spec, devices[0]), devices)
    mesh = sharding.make_mesh(spec.mesh.data, spec.mesh.tensor, devices, spec.mesh.context)
    optimizer = make_optimizer(spec)
    shapes = jax.eval_shape(functools.partial(init_state, spec, optimizer))
    return Prepared(spec, mesh, optimizer, sharding.with_shardings(shapes, mesh))


def batch_shapes(spec: Spec, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of a training batch."""
    C = mesh.shape["context"]
    shape = (spec.batch_size * C, spec.data.seq_len // C)
    rows = sharding.batch_sharding(mesh)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    return {
        "tokens": integers,
        "targets": integers,
        "positions": integers,
        "segment_ids": integers,
        "weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows),
    }


def batch_hidden(
    spec: Spec, params: model.Params, batch: dict[str, jax.Array], tables: Tables | None = None
) -> jax.Array:
    """Runs the decoder on a batch: its output for every token, [B, T, D]."""
    segment_ids = batch["segment_ids"] if spec.data.mask_documents else None
    return model.hidden_states(
        spec.model, params, batch["tokens"], batch["positions"], segment_ids, tables
    )


def make_train_step(spec: Spec, optimizer: optax.GradientTransformation):
    """Makes the update (params, opt_state, batch) -> (params, opt_state, metrics).

    The metrics are loss, grad_norm and batch_hash. A fourth argument replaces the tables of
    rotation, as in `model.hidden_states`; one table serves all rows.
    """

    def step(params, opt_state, batch, tables=None):
        # Microbatch i has rows i, i + accumulation, ..: each device holds rows of every microbatch.
        rows = len(batch["tokens"])
        microbatch_rows = rows // spec.accumulation if spec.accumulation > 1 else None
        accumulated = optax.microbatch(_loss_and_gradient(spec, tables), 1, microbatch_rows)
        sums = accumulated(_cast_once(spec, params), batch)
        # The mean is over the whole batch, because microbatches may differ in weight.
        num_tokens = jnp.maximum(batch["weights"].sum(), 1)
        loss, gradient = jax.tree.map(lambda total: total / num_tokens, sums)
        with jax.named_scope("optimizer"):
            metrics = {
                "loss": loss,
                "grad_norm": optax.tree.norm(gradient),
                "batch_hash": hash_batch(batch),
            }
            updates, new_opt_state = optimizer.update(gradient, opt_state, params)
            state = (optax.apply_updates(params, updates), new_opt_state)
        if spec.on_nonfinite == "skip":
            finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            state = skip_nonfinite(finite, state, (params, opt_state))
        return *state, metrics

    return step


def _loss_and_gradient(spec: Spec, tables):
    """Returns the function of (params, batch) that is summed over microbatches, in float32."""
    differentiate = jax.value_and_grad(functools.partial(_summed_loss, spec, tables))

    def loss_and_gradient(params, batch):
        return jax.tree.map(lambda x: x.astype(jnp.float32), differentiate(params, batch))

    return loss_and_gradient


def _cast_once(spec: Spec, params: model.Params) -> model.Params:
    """Casts the matrices of the layers for all microbatches, on GPUs.

    There a matrix would be cast for every microbatch, forward and backward. Its gradient is rounded
    to the matmuls' dtype either way.
    """
    if not on_gpu():
        return params

    def cast(x):
        return x.astype(spec.model.dtype) if x.ndim > 2 else x  # norms stay float32

    return params | {"layers": jax.tree.map(cast, params["layers"])}


def _summed_loss(spec, tables, params, batch):
    """Sums the losses of a batch's tokens."""
    hidden = batch_hidden(spec, params, batch, tables)
    cap = spec.model.final_softcap
    tokens = (batch["targets"], batch["weights"])
    with jax.named_scope("loss"):
        return weighted_loss(hidden, model.head(params), *tokens, cap, spec.loss_dtype)


def trace_step(
    spec: Spec, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, state
) -> jax.stages.Traced:
    """Traces the training step for a mesh, to be lowered and compiled.

    Its devices may be on no machine. `state` is (params, opt_state) as shapes with shardings. The
    step donates the buffers of its state.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        make_train_step(spec, optimizer), donate_argnums=(0, 1), out_shardings=(*shardings, None)
    )
    with sharding.use(mesh), matmul_precision(spec.model.dtype):
        return step.trace(*state, batch_shapes(spec, mesh))


def compiler_options(spec: Spec, mesh: jax.sharding.Mesh) -> dict[str, bool]:
    """Returns XLA's options for the training step, beside the flags of the process.

    On TPUs collectives run beside matmuls, unless only FSDP communicates and `spec.mesh.gather`
    is not "ahead". They also do where that would take memory instead of saving it, without splash,
    and where a device has too few of a parameter's columns for a tile: libtpu would make its
    gathers all-reduces of twice the bytes. A user's LIBTPU_INIT_ARGS decide if they have the flag.

    Args:
      spec: with its attention resolved.
      mesh: of the step.
    """
    users = os.environ.get("LIBTPU_INIT_ARGS", "")
    if mesh.devices.flat[0].platform != "tpu" or f"--{ASYNC_FUSION}=" in users:
        return {}
    shards = mesh.shape["fsdp"]
    only_fsdp = 1 < shards == mesh.size
    has_tiles = spec.model.embed_dim // shards >= _TPU_LANES
    saves_memory = only_fsdp and has_tiles and spec.model.attention == "splash"
    return {ASYNC_FUSION: not saves_memory or spec.mesh.gather == "ahead"}


def compile_step(
    spec: Spec, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, state
) -> jax.stages.Compiled:
    """Traces, lowers and compiles the training step; arguments as `trace_step`."""
    start = time.perf_counter()
    lowered = trace_step(spec, optimizer, mesh, state).lower()
    compiled = lowered.compile(compiler_options=compiler_options(spec, mesh))
    log.info("compiled in %.1f s", time.perf_counter() - start)
    return compiled
