"""Checks on a GPU what the test suite checks on CPUs: rotation, attention and the decoder.

    python tests/on_gpu.py [TOKENS]

Rotation and attention (TOKENS long, 1024 by default), also within documents, are compared with
float64, the decoder's loss and gradients with the same program on this machine's CPU, and a prompt
and what follows with all read at once. Each line has an error relative to the largest expected
value, and its bound; the exit code is 1 if one is above its bound. It runs on a CPU too, without
cuDNN, and says what it leaves out. JAX_PLATFORMS, where it is set, must have the CPU, too:
cuda,cpu.
"""

import functools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from support import models

from prope.inference.generation import fill_cache
from prope.kernels.choice import choose_implementation, matmul_precision
from prope.kernels.mask import Mask
from prope.loss import token_losses
from prope.model import decode, head, hidden_states, logits
from prope.rope import apply_p_rope

FLOAT32 = 5e-6  # several sums in other orders
BFLOAT16 = 2e-2  # several roundings to 8 bits, each of up to 4e-3
SHAPES = ((8, 1, 256), (6, 1, 128), (9, 3, 64))  # N, K, H
Errors = Iterator[tuple[str, float, float]]  # what was computed, its error, the bound


def relative_error(ours, expected) -> float:
    """The largest difference over the largest expected value."""
    expected = oracles.float64(expected)
    difference = np.abs(oracles.float64(ours) - expected)
    return float(difference.max() / np.abs(expected).max())


def rotation_errors(T: int) -> Errors:
    """Yields those of the rotation at the last 1024 of T positions."""
    positions = np.arange(T - 1024, T, dtype=np.int32)[None]
    bounds = {"float32": 5e-7, "bfloat16": 4e-3}
    for dtype, bound in bounds.items():
        drawn = models.draw_inputs(256, positions)
        inputs = jnp.asarray(drawn, dtype)
        for p in (0.0, 0.25, 0.75, 1.0):
            rotate = functools.partial(apply_p_rope, head_dim=256, rope_percentage=p)
            ours = jax.jit(rotate)(inputs, positions)
            expected = oracles.rotation(inputs, positions, p=p)
            error = relative_error(ours, expected)
            yield f"rotation {dtype} p={p}", error, bound


def attention_errors(
    implementation: str, dtype: str, shape: tuple, T: int, windows=(None, 100), segment_ids=None
) -> Errors:
    """Yields those of attention and its gradients; window None: with all keys."""
    bound = FLOAT32 if dtype == "float32" else BFLOAT16
    N, K, H = shape
    query, key, value = models.draw_attention(T, T, N, K, H, dtype=dtype)
    query = query / 4  # scores of unit size, so that a softmax has more than one key
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.standard_normal(query.shape), dtype)
    arrays = (query, key, value)
    for window in windows:
        seen = oracles.causal_mask(T, segment_ids, window)
        expected = oracles.attention(*arrays, seen, cotangent)
        with matmul_precision(dtype):
            ours = models.attention_with_gradients(
                *arrays, cotangent, Mask(segment_ids, window), implementation=implementation
            )
        documents = "" if segment_ids is None else " in documents"
        name = f"{implementation} {dtype} N={N} K={K} H={H} window={window}{documents}"
        for index, part in enumerate(("output", "dq", "dk", "dv")):
            error = relative_error(ours[index], expected[index])
            yield f"{name} {part}", error, bound


def decoder_errors() -> Errors:
    """Yields those of a float32 decoder's loss and gradients, beside those on the CPU."""
    spec = models.small(num_layers=4, embed_dim=64, hidden_dim=256)
    params, tokens, positions = models.draw_model(spec, B=2, T=128)

    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]

    def loss(params):
        with matmul_precision("float32"):
            hidden = hidden_states(spec, params, inputs, positions[:, :-1])
            losses = token_losses(hidden, head(params), targets)
            return losses.mean()

    program = jax.jit(jax.value_and_grad(loss))
    found = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            there = jax.device_put(params, device)
            value, grads = program(there)
        leaves = jax.tree.leaves(grads)
        found.append([value, *leaves])
    errors = list(map(relative_error, *found))
    yield "decoder loss", errors[0], FLOAT32
    worst = float(np.max(errors[1:]))  # NaN, if one is
    yield "decoder gradients", worst, 1e-4


def prompt_errors(dtype: str) -> Errors:
    """Yields those of the logits of prompts and of what follows, beside all tokens at once."""
    spec = models.small(
        num_layers=2,
        embed_dim=64,
        head_dim=64,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=50,
        dtype=dtype,
        attention="auto",
    )
    more = 4
    longest = 700
    params, tokens, positions = models.draw_model(spec, B=2, T=longest + more)
    lengths = jnp.array([longest, 300], jnp.int32)
    places = lengths[:, None] + jnp.arange(-1, more)[None]
    following = jnp.take_along_axis(tokens, places[:, 1:], axis=1)

    @jax.jit
    def by_cache(params, tokens):
        last, cache = fill_cache(spec, params, tokens, lengths, more, at_once=more)
        rest, _ = decode(spec, params, following, cache, lengths)
        return logits(spec, params, jnp.concatenate([last, rest], axis=1))

    @jax.jit
    def at_once(params, tokens):
        hidden = hidden_states(spec, params, tokens, positions)
        return logits(spec, params, jnp.take_along_axis(hidden, places[..., None], axis=1))

    with matmul_precision(dtype):
        error = relative_error(by_cache(params, tokens[:, :longest]), at_once(params, tokens))
    yield f"prompts {dtype}", error, 1e-4 if dtype == "float32" else 2 * BFLOAT16


def all_errors(T: int) -> Errors:
    """What the device can compute, the quickest to compile first."""
    device = jax.devices()[0]
    print(device.device_kind, flush=True)
    yield from rotation_errors(131_072)
    packed = models.draw_segments(2, T)
    many = jnp.broadcast_to(1 + jnp.arange(T) // 8, (2, T))  # more than cuDNN takes
    cases = [("all tokens", None, shape, (None, 100)) for shape in SHAPES]
    cases += [("documents", packed, shape, (100,)) for shape in SHAPES]
    cases += [("documents", packed, SHAPES[0], (None,)), ("many", many, SHAPES[2], (100,))]
    for name, segment_ids, shape, windows in cases:
        workload = (device, T, shape[-1], "bfloat16", segment_ids is not None)
        try:
            choose_implementation("cudnn", *workload)
        except ValueError as error:
            print(f"{name} with H={shape[-1]}, left out: {error}", flush=True)
            continue
        yield from attention_errors("cudnn", "bfloat16", shape, T, windows, segment_ids)
    yield from prompt_errors("bfloat16")
    for dtype in ("bfloat16", "float32"):
        yield from attention_errors("xla", dtype, (6, 2, 64), T)
    yield from prompt_errors("float32")
    yield from decoder_errors()


def main(T: int = 1024) -> int:
    """Prints the errors; returns the exit code."""
    above = 0
    for name, error, bound in all_errors(T):
        is_above = not error <= bound
        above += is_above
        verdict = ", ABOVE" if is_above else ""
        print(f"{name}: {error:.1e} of {bound:.0e}{verdict}", flush=True)
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
