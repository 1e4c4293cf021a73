"""Measures the training step on this machine: python -m prope.bench --config=configs/quickstart.py

Warm steps of the real training step on random tokens. In the same run, in turns with the steps, a plain matmul of the
model's dtype: `matmul_fraction`, the model's FLOPs per second as a part of its rate, means something on any machine.

`mfu` counts 6 FLOPs per parameter of a matmul, the head's V x D counted and the embedding's lookup not, and causal
attention, 6 L N H T a token; recomputation is not counted. It is null where the device's peak is not known.

--rope times `apply_p_rope` beside the paper's listing instead, each as a multiple of a plain copy (x + 1).
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from prope import model, sharding
from prope.cost import flops as cost
from prope.optimizer import make_optimizer
from prope.rope import apply_p_rope
from prope.runtime import xla_flags
from prope.runtime.validate import validate_devices
from prope.step import compile_step, init_state, with_attention

log = logging.getLogger("prope")


def paper_listing(inputs, positions, head_dim, max_wavelength=10_000, rope_percentage=1.0):
    """The listing of the paper's appendix C, transcribed: float32 angles, infinite timescales for the others."""
    turned = int(rope_percentage * head_dim // 2)
    fraction = 2.0 * jnp.arange(0, turned) / head_dim
    timescale = jnp.pad(max_wavelength**fraction, (0, head_dim // 2 - turned), constant_values=jnp.inf)
    angle = (positions[..., None] / timescale)[..., None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(inputs, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(inputs.dtype)


def medians(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each program, run in turns; the first two rounds are not counted."""
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


def bench_rope(shape: tuple[int, int, int, int], dtype: str, p: float, rounds: int = 15) -> dict:
    """Times the rotation of [B, T, N, H]: forward, and forward with backward, each a multiple of a copy.

    `forward_backward` is the value and the gradient of sum(rotated * g); `output_and_gradient` writes both the rotated
    array and the gradient, where two plain copies are 2.
    """
    B, T, _, H = shape
    inputs, pull = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (0, 1))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    def both(rotate, x):
        rotated, back = jax.vjp(rotate, x)
        return rotated, back(pull)[0]

    programs = {"copy": jax.jit(lambda x: x + 1)}
    for name, function in (("prope", apply_p_rope), ("paper", paper_listing)):
        rotate = functools.partial(function, positions=positions, head_dim=H, rope_percentage=p)
        weighted = functools.partial(lambda rotate, x: (rotate(x) * pull).sum(), rotate)
        programs[f"{name} forward"] = jax.jit(rotate)
        programs[f"{name} forward_backward"] = jax.jit(jax.value_and_grad(weighted))
        programs[f"{name} output_and_gradient"] = jax.jit(functools.partial(both, rotate))
    seconds = medians({name: functools.partial(program, inputs) for name, program in programs.items()}, rounds)
    result = {"device": jax.devices()[0].device_kind, "shape": list(shape), "dtype": dtype, "rope_percentage": p}
    result["copy_seconds"] = seconds.pop("copy")
    for name, value in seconds.items():
        which, what = name.split()
        result.setdefault(which, {})[what] = round(value / result["copy_seconds"], 2)
        log.info("%-26s %6.2f x a copy", name, value / result["copy_seconds"])
    return result


def bench_step(config: ConfigDict, steps: int) -> dict:
    """Times warm steps of the training step on all devices, in turns with a plain matmul.

    Raises:
      UsageError: this machine's devices cannot divide the batch or the mesh, or run the attention that is asked for.
    """
    devices = jax.devices()
    validate_devices(config, len(devices), sharding.num_slices(devices))
    config = with_attention(config, devices[0])
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.tensor)
    optimizer = make_optimizer(config)
    start = functools.partial(init_state, config, optimizer)
    shapes = sharding.with_shardings(jax.eval_shape(start), mesh)
    began = time.perf_counter()
    update = compile_step(config, optimizer, mesh, shapes)
    compile_seconds = time.perf_counter() - began
    state = jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
    batch = random_batch(config, mesh)

    def train():
        nonlocal state
        *state, values = update(*state, batch)
        return values  # ready when the whole step is

    size = 2048 if devices[0].platform == "cpu" else 8192
    square = jax.random.normal(jax.random.key(0), (size, size), config.model.dtype)
    multiply = jax.jit(lambda x: x @ x)
    repeats = 8 if devices[0].platform == "cpu" else 64  # about a second: of one alone, the clock sees other things
    seconds = medians({"step": train, "matmul": lambda: [multiply(square) for _ in range(repeats)]}, steps)
    tokens = config.batch_size * config.data.seq_len
    per_token = cost.model_flops_per_token(config.model, config.data.seq_len)
    rate, peak = repeats * 2 * size**3 / seconds["matmul"], cost.peak_flops(devices[0].device_kind)
    per_device = per_token * tokens / seconds["step"] / len(devices)
    memory = update.memory_analysis()
    found = {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": model.num_parameters(shapes[0]),
        "batch_size": config.batch_size,
        "seq_len": config.data.seq_len,
        "dtype": config.model.dtype,
        "remat": config.model.remat,
        "attention": config.model.attention,
        "step_seconds": seconds["step"],
        "tokens_per_second": tokens / seconds["step"],
        "model_flops_per_token": per_token,
        "model_flops_per_second": per_device * len(devices),
        "matmul_flops_per_second": rate,
        "matmul_fraction": per_device / rate,
        "mfu": per_device / peak if peak else None,
        "peak_bytes": peak_bytes(devices[0], memory),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
        "xla_flags": xla_flags.in_force(),
    }
    log.info(
        "%.3f s a step, %s tokens/s; %.0f GFLOP/s of a device, %.0f %% of its matmul rate", seconds["step"],
        f"{found['tokens_per_second']:,.0f}", per_device / 1e9, 100 * per_device / rate,
    )  # fmt: skip
    return found


def random_batch(config: ConfigDict, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """A batch of random tokens, each document one window long."""
    B, T = config.batch_size, config.data.seq_len
    rows = sharding.rows_of_this_process(mesh, B)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (B, T + 1), np.int32)[rows]
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(T, dtype=np.int32), (len(rows), 1)),
        "segment_ids": np.ones((len(rows), T), np.int32),
        "weights": np.ones((len(rows), T), np.float32),
    }
    return sharding.global_batch(mesh, batch, B)


def peak_bytes(device: jax.Device, memory) -> int:
    """The most memory that the process has held on a device; on a CPU, which does not count, what the step needs."""
    counted = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if counted is not None:
        return counted
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return needed + memory.temp_size_in_bytes
