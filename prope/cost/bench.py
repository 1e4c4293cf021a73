"""Times the step or the rotation; `prope.bench` says what the figures mean."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from prope import parameters, sharding
from prope.cost import flops, hlo
from prope.cost.timeline import profile
from prope.errors import log
from prope.rope import apply_p_rope
from prope.runtime import xla_flags
from prope.runtime.memory import step_bytes
from prope.runtime.processes import check_count
from prope.runtime.progress import compiling
from prope.spec.run import Spec
from prope.step import Prepared, compile_step, compiler_options, init_state, prepare

Shape = tuple[int, int, int, int]


def medians(programs: dict, rounds: int, *arguments, calls: int = 1) -> dict:
    """Times programs alternately, `calls` of each together; returns the median seconds of one.

    The first two rounds do not count.
    """
    seconds = {name: [] for name in programs}
    for _ in range(rounds + 2):
        for name, program in programs.items():
            start = time.perf_counter()
            for _ in range(calls):
                result = program(*arguments)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times[2:]) for name, times in seconds.items()}


def paper_listing(inputs, positions, head_dim, max_wavelength=10_000, rope_percentage=1.0):
    """Applies p-RoPE by the listing of the paper's appendix C.

    Its angles are float32, and the timescales of slow pairs infinite.
    """
    num_rotated = int(rope_percentage * head_dim // 2)
    num_slow = head_dim // 2 - num_rotated
    fraction = 2.0 * jnp.arange(0, num_rotated) / head_dim
    timescale = max_wavelength**fraction
    timescale = jnp.pad(timescale, (0, num_slow), constant_values=jnp.inf)
    angle = positions[..., None] / timescale[None, None]
    angle = angle[..., None, :]
    sin = jnp.sin(angle)
    cos = jnp.cos(angle)
    first, second = jnp.split(inputs, 2, axis=-1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    rotated = jnp.concatenate([rotated_first, rotated_second], axis=-1)
    return rotated.astype(inputs.dtype)


def bench_rope(shape: Shape, dtype: str, p: float) -> dict:
    """Times the rotation of [B, T, N, H], in multiples of a copy.

    `forward_backward` computes the value and the gradient of sum(rotated * cotangent).
    `output_and_gradient` writes the rotated array and the gradient.
    """
    B, T, _, H = shape
    inputs, cotangent = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in (0, 1))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    programs = {"copy": jax.jit(lambda x: x + 1)}
    for name, function in (("prope", apply_p_rope), ("paper", paper_listing)):
        rotate = functools.partial(function, positions=positions, head_dim=H, rope_percentage=p)
        for kind, program in _rotation_programs(rotate, cotangent).items():
            programs[name, kind] = program
    # A device goes on while the next call is made, so that dispatch does not count. A CPU waits.
    calls = 1 if jax.default_backend() == "cpu" else 20
    seconds = medians(programs, 15, inputs, calls=calls)
    copy = seconds.pop("copy")
    result = {
        "device": jax.devices()[0].device_kind,
        "shape": list(shape),
        "dtype": dtype,
        "rope_percentage": p,
        "copy_seconds": copy,
    }
    for (name, kind), value in seconds.items():
        copies = value / copy
        result.setdefault(name, {})[kind] = round(copies, 2)
        log.info("%s %s: %.2f x a copy", name, kind, copies)
    return result


def _rotation_programs(rotate: Callable, cotangent: jax.Array) -> dict[str, Callable]:
    def weighted_sum(x):
        return (rotate(x) * cotangent).sum()

    def output_and_gradient(x):
        rotated, vjp = jax.vjp(rotate, x)
        return rotated, vjp(cotangent)[0]

    return {
        "forward": jax.jit(rotate),
        "forward_backward": jax.jit(jax.value_and_grad(weighted_sum)),
        "output_and_gradient": jax.jit(output_and_gradient),
    }


def bench_step(spec: Spec, steps: int, with_profile: bool = False) -> dict:
    """Times warm steps of training on all devices, alternating with a plain matmul on one.

    Then, `with_profile`, it traces steps.
    """
    check_count()
    devices = jax.devices()
    first = devices[0]
    sharding.check_devices(spec, devices)
    prepared = prepare(spec, devices)
    spec, mesh, optimizer, shapes = prepared
    if with_profile:
        # A program from the cache might have the source paths of an earlier version.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    start = time.perf_counter()
    with compiling():
        step = compile_step(spec, optimizer, mesh, shapes)
    compile_seconds = time.perf_counter() - start
    # A CPU's clock is too coarse for one matmul: together the repeats take about a second.
    size, repeats = (2048, 8) if first.platform == "cpu" else (8192, 64)
    square = jax.random.normal(jax.random.key(0), (size, size), spec.model.dtype)
    programs = {"step": _repeat_step(step, prepared), "matmul": repeat_matmul(square, repeats)}
    seconds = medians(programs, steps)

    described = describe(spec, mesh)
    tokens = spec.batch_size * spec.data.seq_len
    tokens_per_second = tokens / seconds["step"]
    model_rate = described["model_flops_per_token"] * tokens_per_second
    matmul_rate = repeats * 2 * size**3 / seconds["matmul"]
    rate_of_device = model_rate / len(devices)
    share = rate_of_device / matmul_rate
    chip = flops.find_chip(first.device_kind)
    memory = step.memory_analysis()
    speed = f"{seconds['step']:.3f} s a step, {tokens_per_second:,.0f} tokens/s"
    log.info("%s; %.0f %% of the matmul rate", speed, 100 * share)
    result = {
        "device": first.device_kind,
        "devices": len(devices),
        **described,
        "step_seconds": seconds["step"],
        "tokens_per_second": tokens_per_second,
        "model_flops_per_second": model_rate,
        "matmul_flops_per_second": matmul_rate,
        "matmul_fraction": share,
        "mfu": chip and rate_of_device / chip.flops,
        "peak_bytes": peak_bytes(jax.local_devices()[0], memory),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": compile_seconds,
        "xla_flags": xla_flags.in_force(),
        "compiler_options": compiler_options(spec, mesh),
    }
    if with_profile:
        result["profile"] = profile(programs["step"], hlo.parse(step.as_text()), chip)
    return result


def _repeat_step(step: jax.stages.Compiled, prepared: Prepared) -> Callable[[], dict]:
    """Builds a program that takes the next step on one batch; its metrics are ready when all is."""
    spec, mesh, optimizer, shapes = prepared
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    state = jax.jit(functools.partial(init_state, spec, optimizer), out_shardings=shardings)()
    batch = random_batch(spec, mesh)

    def program():
        nonlocal state
        *state, metrics = step(*state, batch)
        return metrics

    return program


def repeat_matmul(square: jax.Array, repeats: int) -> Callable[[], jax.Array]:
    """Builds a program that squares a matrix `repeats` times, each time into the same memory."""
    matmul = jax.jit(
        lambda x, old: jnp.einsum("RD,DF->RF", x, x), donate_argnums=1, keep_unused=True
    )
    result = jnp.zeros_like(square)

    def program():
        nonlocal result
        for _ in range(repeats):
            result = matmul(square, result)
        return result

    return program


def describe(spec: Spec, mesh: jax.sharding.Mesh) -> dict:
    """Returns what bench and plan print of the step that they measure."""
    model = spec.model
    T = spec.data.seq_len
    return {
        "mesh": dict(mesh.shape),
        "parameters": parameters.count(model),
        "batch_size": spec.batch_size,
        "accumulation": spec.accumulation,
        "seq_len": T,
        "dtype": model.dtype,
        "remat": model.remat,
        "gather": spec.mesh.gather,
        "attention": model.attention,
        "model_flops_per_token": flops.model_flops_per_token(model, T),
    }


def random_batch(spec: Spec, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Draws a batch of random tokens in which every document is one window long."""
    B = spec.batch_size
    T = spec.data.seq_len
    rows = sharding.rows_of_this_process(mesh, B)
    tokens = np.random.default_rng(0).integers(0, spec.model.vocab_size, (B, T + 1), np.int32)
    ones = np.ones((len(rows), T), np.int32)
    sequences = {
        "tokens": tokens[rows, :-1],
        "targets": tokens[rows, 1:],
        "positions": ones * np.arange(T, dtype=np.int32),
        "segment_ids": ones,
        "weights": ones.astype(np.float32),
    }
    return sharding.global_batch(mesh, sequences, B)


def peak_bytes(device: jax.Device, memory) -> int:
    """Returns the process's peak memory on a device; on a CPU, what the step needs."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return step_bytes(memory) if peak is None else peak
