"""Measures a machine in about ten minutes: its rates, the parts of a step, whole steps, decoding, saving.

Every measurement is a line of suite.jsonl when it is done, so that an interrupted suite goes on where it was.
"""

import contextlib
import functools
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from ml_collections import ConfigDict, FrozenConfigDict

from prope import model
from prope.attention import attention
from prope.config import REMAT, default_config
from prope.cost.bench import bench_rope, bench_step, medians, repeat_matmul
from prope.cost.flops import num_parameters
from prope.errors import UsageError, first_line, log
from prope.html import page
from prope.html.drawing import Picture, line, styles
from prope.inference.generation import Sampling, decode, empty_cache
from prope.kernels.choice import choose_implementation
from prope.loss import weighted_loss
from prope.optimizer import make_optimizer
from prope.runtime import xla_flags
from prope.runtime.files import append_jsonl, as_path, check_writable
from prope.runtime.validate import validate
from prope.step import init_state
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.reader import CheckpointReader
from prope.workdir.records import read_jsonl

# L, D, N, H, F, V, T and sequences of a device; K is 1.
_40M = (6, 512, 4, 128, 2048, 32_768, 1024)


class Sizes(NamedTuple):
    """What is measured: sizes that take seconds on the machine."""

    dtype: str
    matmul: tuple[int, int]  # rows of a square matrix, and how often it is squared
    memory: int  # numbers of 4 bytes
    heads: tuple[int, int]  # N, H of attention
    head: tuple[int, int, int]  # tokens, D, V
    models: dict[str, tuple[int, ...]]
    by_length: tuple[str, str]  # the model whose step is measured at every length, and its remat
    saved: str  # the model that decodes, and whose state is saved
    tokens: int  # of a batch, at every length
    longest: int  # of a step; compiling longer ones takes a CPU minutes
    rotation: tuple[int, int, int, int] = (2, 4096, 8, 256)  # B, T, N, H
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)


CPU = Sizes(
    dtype="float32",
    matmul=(2048, 8),
    memory=2**25,
    heads=(2, 64),
    head=(4096, 512, 32_768),
    models={
        "1 M": (4, 128, 2, 64, 512, 260, 256, 8),
        "10 M": (6, 256, 4, 64, 1024, 16_384, 512, 4),
        "40 M": (*_40M, 2),
    },
    by_length=("1 M", "none"),
    saved="40 M",
    tokens=4096,
    longest=8192,
)
ACCELERATOR = Sizes(
    dtype="bfloat16",
    matmul=(8192, 64),
    memory=2**28,
    heads=(8, 256),
    head=(8192, 2048, 256_128),
    models={
        "40 M": (*_40M, 32),
        "300 M": (12, 768, 6, 128, 3072, 256_128, 2048, 8),
        "2.5 B": (18, 2048, 8, 256, 16_384, 256_128, 8192, 1),
    },
    by_length=("300 M", "save_qkv"),
    saved="300 M",
    tokens=32_768,
    longest=32_768,
)
_ROUNDS = 3  # timed repeats of what takes long
_GROUPS = {
    "machine": "Rates of the machine",
    "rotation": "Rotation",
    "attention": "Attention, forward and backward",
    "head": "Cross-entropy over the vocabulary, forward and backward",
    "step": "Training steps by size and remat",
    "length": "Training steps by length, at equal tokens",
    "decode": "Decoding with the KV cache",
    "checkpoint": "Saving and restoring",
}


def run_suite(output: str, minutes: float, sizes: Sizes | None = None) -> dict:
    """Measures what `output` does not hold yet, as long as there is time; returns all rows, and how many are left."""
    folder, end = as_path("output", output), time.monotonic() + 60 * minutes
    check_writable("--output", folder)
    file, machine = folder / "suite.jsonl", describe_machine()
    if not (lines := read_jsonl(file)):
        lines = [{"machine": machine}]
        append_jsonl(file, *lines)
    if lines[0]["machine"] != machine:
        other = f"holds figures of another machine or other versions ({lines[0]['machine']}; this is {machine})"
        raise UsageError(f"--output={output}: {other}; choose another --output")
    sizes = sizes or (CPU if machine["platform"] == "cpu" else ACCELERATOR)
    rows, done = lines[1:], {(row["group"], row["name"]) for row in lines[1:]}
    left = [entry for entry in measurements(sizes) if entry[:2] not in done]
    while left and time.monotonic() < end:
        group, name, measure = left.pop(0)
        row = {"group": group, "name": name} | _measure(measure)
        append_jsonl(file, row)
        rows.append(row)
        log.info(
            "%s, %s: %s",
            _GROUPS[group],
            name,
            row.get("error") or f"{row['value']:,.6g} {row['unit']}",
        )
    if left:
        log.info("%d measurements are left: the same command goes on", len(left))
    rates = {row["name"]: row["value"] for row in rows if row["group"] == "machine"}
    rows = [
        row | {"share": row["used"] / rates[row["of"]]} if "used" in row else row for row in rows
    ]
    written = write_page(folder, machine, rows, len(left))
    return {"output": str(written), "left": len(left), "machine": machine, "rows": rows}


def write_page(folder: epath.Path, machine: dict, rows: list[dict], left: int) -> epath.Path:
    """Writes the rows as tables by group, with curves over length; returns the page's path."""
    groups = {
        title: [row for row in rows if row["group"] == group] for group, title in _GROUPS.items()
    }
    return page.write(folder, "suite", pictures(rows), machine=machine, groups=groups, left=left)


def describe_machine() -> dict:
    """Returns what figures depend on: the devices, the versions and the XLA flags."""
    device = jax.devices()[0]
    versions = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "xla_flags": xla_flags.in_force(),
    }
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
    } | versions


def measurements(sizes: Sizes) -> Iterator[tuple[str, str, Callable[[], dict]]]:
    """Yields (group, name, function that measures)."""
    partial, dtype = functools.partial, sizes.dtype
    yield "machine", "matmul", partial(matmul_rate, dtype, *sizes.matmul)
    yield "machine", "memory", partial(memory_rate, sizes.memory)
    for of_array in ("float32", "bfloat16"):
        yield "rotation", of_array, partial(rotation, sizes.rotation, of_array)
    for kind in ("xla", "splash", "cudnn"):
        for T in sizes.lengths:
            with contextlib.suppress(ValueError):  # this machine cannot run it
                choose_implementation(kind, jax.devices()[0], T, sizes.heads[1], dtype, False)
                shape = (max(1, sizes.tokens // T), T, *sizes.heads)
                yield (
                    "attention",
                    f"{kind}, {T:,} tokens",
                    partial(attention_rate, kind, shape, dtype),
                )
    tokens, _, V = sizes.head
    yield "head", f"{tokens:,} tokens, {V:,} entries", partial(head_rate, *sizes.head, dtype)
    for name, shape in sizes.models.items():
        for remat in REMAT:
            yield (
                "step",
                f"{name}, {remat}",
                partial(step_rate, make_config(shape, dtype, remat), sizes.matmul),
            )
    name, remat = sizes.by_length
    for T in filter(sizes.longest.__ge__, sizes.lengths):
        config = make_config((*sizes.models[name][:-2], T, max(1, sizes.tokens // T)), dtype, remat)
        yield (
            "length",
            f"{name}, {T:,} tokens",
            partial(step_rate, config, sizes.matmul, series=name, x=T),
        )
    config = make_config(sizes.models[sizes.saved], dtype, "none")
    for batch in (1, 64):
        yield "decode", f"{sizes.saved}, batch {batch}", partial(decode_rate, config, batch)
    for action in ("save", "restore"):
        yield "checkpoint", f"{sizes.saved}, {action}", partial(checkpoint_rate, config, action)


def make_config(shape: tuple[int, ...], dtype: str, remat: str) -> ConfigDict:
    """Makes the config of a step; `shape` as in Sizes.models."""
    config, fields = (
        default_config(),
        ("num_layers", "embed_dim", "num_heads", "head_dim", "hidden_dim", "vocab_size"),
    )
    config.model.update(
        dict(zip(fields, shape, strict=False)), dtype=dtype, remat=remat, rope_percentage=0.75
    )
    config.model.scan_layers = shape[0] > 4
    config.data.seq_len, config.batch_size = shape[-2], shape[-1] * jax.device_count()
    validate(config)
    return config


def matmul_rate(dtype: str, size: int, repeats: int) -> dict:
    """Measures the FLOP/s of matrices of `size` on one device."""
    square = jax.random.normal(jax.random.key(0), (size, size), dtype)
    seconds = medians({"matmul": repeat_matmul(square, repeats)}, _ROUNDS)["matmul"]
    return {
        "seconds": seconds / repeats,
        "value": repeats * 2 * size**3 / seconds / 1e9,
        "unit": f"GFLOP/s, {dtype}",
    }


def memory_rate(size: int) -> dict:
    """Measures the bytes/s of memory: the faster of a sum, which reads, and of x + 1, which reads and writes."""
    x = jnp.ones(size, jnp.float32)
    read, add = jax.jit(jnp.sum), jax.jit(lambda x: x + 1)
    seconds = medians({"read": lambda: read(x), "copy": lambda: add(x)}, 9)
    rates = {"read": x.nbytes / seconds["read"], "copy": 2 * x.nbytes / seconds["copy"]}
    return {
        "seconds": seconds["copy"],
        "value": max(rates.values()) / 1e9,
        "unit": "GB/s",
        "GB/s": rates,
    }


def rotation(shape: tuple[int, int, int, int], dtype: str) -> dict:
    """Measures `apply_p_rope` with its gradient in multiples of a copy."""
    found = bench_rope(shape, dtype, 0.75, rounds=5)
    value, unit = found["prope"]["output_and_gradient"], "copies, output and gradient"
    return {
        "seconds": value * found["copy_seconds"],
        "value": value,
        "unit": unit,
        "multiples": found,
    }


def attention_rate(implementation: str, shape: tuple[int, int, int, int], dtype: str) -> dict:
    """Measures the FLOP/s of causal multi-query attention [B, T, N, H] with its gradient."""
    B, T, N, H = shape
    arrays = [
        jax.random.normal(jax.random.key(i), (B, T, heads, H), dtype)
        for i, heads in enumerate((N, 1, 1))
    ]
    function = functools.partial(attention, implementation=implementation)
    program = jax.jit(
        jax.grad(lambda q, k, v: function(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
    )
    seconds = medians({"attention": lambda: program(*arrays)}, _ROUNDS)["attention"]
    return _of_matmul(6 * B * N * H * T**2, seconds) | {"series": implementation, "x": T}


def head_rate(tokens: int, D: int, V: int, dtype: str) -> dict:
    """Measures the FLOP/s of the loss over the vocabulary with its gradients."""
    hidden = jax.random.normal(jax.random.key(0), (1, tokens, D), dtype)
    table = jax.random.normal(jax.random.key(1), (V, D)) / D**0.5
    targets, weights = jnp.zeros((1, tokens), jnp.int32), jnp.ones((1, tokens))
    program = jax.jit(jax.grad(weighted_loss, (0, 1)))
    seconds = medians({"head": lambda: program(hidden, table, targets, weights)}, _ROUNDS)["head"]
    return _of_matmul(6 * tokens * D * V, seconds)


def step_rate(config: ConfigDict, matmul: tuple[int, int], **of_picture) -> dict:
    """Measures the training step as `prope.bench --config` does."""
    found = bench_step(config, _ROUNDS, matmul)
    row = {
        "seconds": found["step_seconds"],
        "value": found["tokens_per_second"],
        "unit": "tokens/s",
    }
    row |= {
        "share": found["matmul_fraction"],
        "of": "matmul",
        "mfu": found["mfu"],
        "peak_bytes": found["peak_bytes"],
    }
    return row | of_picture


def decode_rate(config: ConfigDict, batch: int, prompt: int = 128, length: int = 65) -> dict:
    """Measures the seconds of a token of `batch` rows, of which each reads all parameters and its keys and values."""
    c = FrozenConfigDict(config.model)
    params = jax.jit(model.init, static_argnums=0)(c, jax.random.key(0))
    sampling = Sampling(length, temperature=0.0, eos=-1)  # no row ends early
    first, lengths = jnp.ones(batch, jnp.int32), jnp.full(batch, prompt, jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)

    def generate():
        return decode(
            c, sampling, params, first, empty_cache(c, batch, prompt + length - 1), lengths, keys
        )

    seconds = medians({"decode": generate}, _ROUNDS)["decode"] / (length - 1)
    width = jnp.dtype(c.dtype).itemsize
    cached = 2 * c.num_layers * batch * c.num_kv_heads * (prompt + length / 2) * c.head_dim
    used = width * (num_parameters(params) + cached) / seconds / 1e9
    return {
        "seconds": seconds,
        "value": batch / seconds,
        "unit": "tokens/s",
        "used": used,
        "of": "memory",
    }


def checkpoint_rate(config: ConfigDict, action: str) -> dict:
    """Measures the bytes/s of saving a training state in the temporary folder, or of restoring it, with its hashes."""
    state = jax.jit(functools.partial(init_state, config, make_optimizer(config)))()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, *state, {"config": config.to_dict(), "init_hash": ""}, {})
        if action == "restore":
            start, reader = (
                time.perf_counter(),
                CheckpointReader(epath.Path(folder, "checkpoints", "1")),
            )
            jax.block_until_ready(reader.restore(params=state[0], opt_state=state[1]))
        seconds = time.perf_counter() - start
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {"seconds": seconds, "value": size / seconds / 1e9, "unit": "GB/s"}


def pictures(rows: list[dict]) -> list[Picture]:
    """Draws the curves over length."""
    captions = {
        "attention": "Causal attention, forward and backward, at equal tokens.",
        "length": "The training step at equal tokens: what longer windows cost.",
    }
    drawn = []
    for group, caption in captions.items():
        if measured := [row for row in rows if row["group"] == group and "value" in row]:
            alt, draw = (
                f"{caption} The table has its numbers.",
                functools.partial(draw_curves, measured),
            )
            drawn.append(Picture(group, _GROUPS[group], alt, caption, draw))
    return drawn


def draw_curves(rows: list[dict], figure) -> None:
    """Draws the values of rows over length, a line for each series."""
    axes, series = figure.subplots(), list(dict.fromkeys(row["series"] for row in rows))
    for name, style in styles(series).items():
        line(
            axes,
            {row["x"]: (row["value"], None) for row in rows if row["series"] == name},
            style,
            name,
        )
    axes.set(xlabel="length (tokens)", ylabel=rows[0]["unit"], ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.legend()


def _of_matmul(flops: float, seconds: float) -> dict:
    rate = flops / seconds / 1e9
    return {"seconds": seconds, "value": rate, "unit": "GFLOP/s", "used": rate, "of": "matmul"}


def _measure(measure: Callable[[], dict]) -> dict:
    """Returns what is measured, or the error of a device that has too little memory."""
    try:
        return measure()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"error": f"does not fit in the device's memory: {first_line(error)}"}
