"""Times the training step and the rotation on this machine; `prope.bench` says what the figures mean."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from prope import model, sharding
from prope.cost import flops
from prope.cost.flops import num_parameters
from prope.errors import UsageError, log
from prope.kernels.splash import Blocks, choose_blocks, splash
from prope.rope import apply_p_rope
from prope.runtime import xla_flags
from prope.runtime.memory import step_bytes
from prope.runtime.processes import check_count
from prope.runtime.validate import validate_devices
from prope.step import compile_step, init_state, prepare


def paper_listing(inputs, positions, head_dim, max_wavelength=10_000, rope_percentage=1.0):
    """Applies p-RoPE by the listing of the paper's appendix C: float32 angles, infinite timescales for slow pairs."""
    num_rotated = int(rope_percentage * head_dim // 2)
    fraction = 2.0 * jnp.arange(0, num_rotated) / head_dim
    timescale = jnp.pad(
        max_wavelength**fraction, (0, head_dim // 2 - num_rotated), constant_values=jnp.inf
    )
    angle = (positions[..., None] / timescale[None, None])[..., None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(inputs.dtype)


def medians(programs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Times the programs alternately; returns each one's median seconds, without the first two rounds."""
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


def bench_rope(shape: tuple[int, int, int, int], dtype: str, p: float) -> dict:
    """Times the rotation of [B, T, N, H], forward and with its gradient, in multiples of a copy.

    `forward_backward` computes the value and the gradient of sum(rotated * cotangent). `output_and_gradient` writes the
    rotated array and the gradient.
    """
    B, T, _, H = shape
    inputs, cotangent = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (0, 1))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    def output_and_gradient(rotate, x):
        rotated, vjp = jax.vjp(rotate, x)
        return rotated, vjp(cotangent)[0]

    programs = {"copy": jax.jit(lambda x: x + 1)}
    for name, function in (("prope", apply_p_rope), ("paper", paper_listing)):
        rotate = functools.partial(function, positions=positions, head_dim=H, rope_percentage=p)
        weighted_sum = functools.partial(lambda rotate, x: (rotate(x) * cotangent).sum(), rotate)
        programs[f"{name} forward"] = jax.jit(rotate)
        programs[f"{name} forward_backward"] = jax.jit(jax.value_and_grad(weighted_sum))
        programs[f"{name} output_and_gradient"] = jax.jit(
            functools.partial(output_and_gradient, rotate)
        )
    seconds = medians(
        {name: functools.partial(program, inputs) for name, program in programs.items()}, 15
    )
    result = {
        "device": jax.devices()[0].device_kind,
        "shape": list(shape),
        "dtype": dtype,
        "rope_percentage": p,
    }
    result["copy_seconds"] = copy = seconds.pop("copy")
    for name, value in seconds.items():
        function, program = name.split()
        result.setdefault(function, {})[program] = round(value / copy, 2)
        log.info("%-26s %6.2f x a copy", name, value / copy)
    return result


def bench_attention(shape: tuple[int, int, int, int]) -> dict:
    """Times multi-query splash attention [B, T, N, H] with its gradient, in bfloat16, for many block sizes of a TPU."""
    B, T, N, H = shape
    device, small, large = jax.devices()[0], (512, 1024, 2048), (512, 2048)
    if device.platform != "tpu":
        raise UsageError(
            f"--attention sweeps blocks of the TPU's splash attention, and this is a {device.platform}"
        )
    shapes = ((B, 1, N, T, H), (B, 1, T, H), (B, 1, T, H))
    arrays = [jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) for shape in shapes]
    positions = np.arange(T)[None]
    sweep = itertools.product(small, small, large, large, (2**40, 0))
    candidates = dict.fromkeys(
        [choose_blocks(device.device_kind, H), *itertools.starmap(Blocks, sweep)]
    )
    seconds = {}
    for blocks in (b for b in candidates if max(b.keys_at_once, b.keys_at_once_backward) <= b.keys):
        attend = functools.partial(splash, positions=positions, rank=0, blocks=blocks)
        loss = functools.partial(
            lambda attend, *qkv: attend(*qkv).astype(jnp.float32).sum(), attend
        )
        program = jax.jit(jax.grad(loss, (0, 1, 2)))
        try:
            seconds[blocks] = medians({"attention": functools.partial(program, *arrays)}, 5)[
                "attention"
            ]
        except jax.errors.JaxRuntimeError as error:  # they need more VMEM than there is
            log.info("%s: %s", blocks, str(error).splitlines()[0])
        else:
            log.info("%s: %.2f ms", blocks, 1e3 * seconds[blocks])
    if not seconds:
        raise UsageError(
            f"--shape={','.join(map(str, shape))}: no blocks of splash attention compile for it"
        )
    table = [
        blocks._asdict() | {"seconds": seconds[blocks]}
        for blocks in sorted(seconds, key=seconds.get)
    ]
    return {"device": device.device_kind, "shape": list(shape), "best": table[0], "blocks": table}


def bench_step(config: ConfigDict, steps: int) -> dict:
    """Times warm steps of the training step on all devices, alternating with a plain matmul."""
    check_count()
    devices = jax.devices()
    validate_devices(config, devices)
    config, mesh, optimizer, shapes = prepare(config, devices)
    start = time.perf_counter()
    update = compile_step(config, optimizer, mesh, shapes)
    compile_seconds = time.perf_counter() - start
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    state = jax.jit(functools.partial(init_state, config, optimizer), out_shardings=shardings)()
    batch = random_batch(config, mesh)

    def train():
        nonlocal state
        *state, metrics = update(*state, batch)
        return metrics  # ready when the whole step is

    # A CPU's clock is too coarse for one matmul: together the repeats take about a second.
    size, repeats = (2048, 8) if devices[0].platform == "cpu" else (8192, 64)
    square = jax.random.normal(jax.random.key(0), (size, size), config.model.dtype)
    seconds = medians({"step": train, "matmul": repeat_matmul(square, repeats)}, steps)
    result = {"device": devices[0].device_kind, "devices": len(devices)} | describe(
        config, mesh, shapes[0]
    )
    tokens = config.batch_size * config.data.seq_len
    per_device = result["model_flops_per_token"] * tokens / seconds["step"] / len(devices)
    matmul_rate, peak = (
        repeats * 2 * size**3 / seconds["matmul"],
        flops.peak_flops(devices[0].device_kind),
    )
    memory = update.memory_analysis()
    speed = f"{seconds['step']:.3f} s a step, {tokens / seconds['step']:,.0f} tokens/s"
    share = 100 * per_device / matmul_rate
    log.info(
        "%s; %.0f GFLOP/s of a device, %.0f %% of its matmul rate", speed, per_device / 1e9, share
    )
    return result | {
        "step_seconds": seconds["step"],
        "tokens_per_second": tokens / seconds["step"],
        "model_flops_per_second": per_device * len(devices),
        "matmul_flops_per_second": matmul_rate,
        "matmul_fraction": per_device / matmul_rate,
        "mfu": per_device / peak if peak else None,
        "peak_bytes": peak_bytes(jax.local_devices()[0], memory),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
        "xla_flags": xla_flags.in_force(),
    }


def repeat_matmul(square: jax.Array, repeats: int) -> Callable[[], jax.Array]:
    """Builds a program that squares a matrix `repeats` times, each result in the memory of the last."""
    matmul = jax.jit(lambda x, old: x @ x, donate_argnums=1, keep_unused=True)
    result = jnp.zeros_like(square)

    def program():
        nonlocal result
        for _ in range(repeats):
            result = matmul(square, result)
        return result

    return program


def describe(config: ConfigDict, mesh: jax.sharding.Mesh, parameters: model.Params) -> dict:
    """Returns what bench and plan print of the step that they measure."""
    of_model = {name: config.model[name] for name in ("dtype", "remat", "attention")}
    return {
        "mesh": dict(mesh.shape),
        "parameters": num_parameters(parameters),
        "batch_size": config.batch_size,
        "accumulation": config.accumulation,
        "seq_len": config.data.seq_len,
        **of_model,
        "model_flops_per_token": flops.model_flops_per_token(config.model, config.data.seq_len),
    }


def random_batch(config: ConfigDict, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Draws a batch of random tokens in which every document is one window long."""
    B, T = config.batch_size, config.data.seq_len
    rows = sharding.rows_of_this_process(mesh, B)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (B, T + 1), np.int32)[
        rows
    ]
    ones, positions = (
        np.ones((len(rows), T), np.int32),
        np.tile(np.arange(T, dtype=np.int32), (len(rows), 1)),
    )
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": positions,
        "segment_ids": ones,
    }
    return sharding.global_batch(mesh, batch | {"weights": ones.astype(np.float32)}, B)


def peak_bytes(device: jax.Device, memory) -> int:
    """Returns the process's peak memory on a device; where it does not count (CPU), what the step needs."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return step_bytes(memory) if peak is None else peak
