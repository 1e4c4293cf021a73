"""Measures on this machine: python -m prope.bench --rope times `apply_p_rope` beside the paper's listing.

Every figure is a multiple of the time that a plain copy (x + 1) of the same array takes, measured in turns in the same
run: that ratio means something on any machine.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import flags

from prope import command
from prope.errors import UsageError
from prope.rope import apply_p_rope

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


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_boolean("rope", False, "time the rotation alone")
    flags.DEFINE_list("shape", ["2", "4096", "8", "256"], "B,T,N,H of the array to rotate")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the array")
    flags.DEFINE_float("rope_percentage", 0.75, "p", lower_bound=0.0, upper_bound=1.0)


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    if not given.rope:
        raise UsageError("prope.bench measures the rotation only, so far: give --rope")
    try:
        B, T, N, H = map(int, given.shape)
    except ValueError:
        raise UsageError(f"--shape={','.join(given.shape)}: must be four numbers B,T,N,H") from None
    return bench_rope((B, T, N, H), given.dtype, given.rope_percentage)


if __name__ == "__main__":
    command.run(main, define_flags)
