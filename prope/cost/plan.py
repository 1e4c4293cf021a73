"""Compiles the training step for devices that are not here, and finds the largest batch that fits them."""

import math
import re
import time

import jax
from ml_collections import ConfigDict

from prope import sharding
from prope.config import REMAT
from prope.cost import flops, hlo
from prope.cost.bench import describe
from prope.cost.traced import count_flops
from prope.errors import log
from prope.runtime import xla_flags
from prope.runtime.memory import step_bytes
from prope.runtime.validate import validate_devices
from prope.step import prepare, trace_step


def plan(config: ConfigDict, topology: str, devices: list, flags: dict) -> dict:
    """Compiles the training step for these devices; returns what the command prints."""
    name = topology.partition(":")[0]
    chip, gpu = flops.CHIPS[name], name not in xla_flags.TPU
    # JAX tells the nodes of GPUs apart, as slices, only where they are attached.
    slices = (
        len({device.process_index for device in devices}) if gpu else sharding.num_slices(devices)
    )
    if config.mesh.data is None:
        config = config.copy_and_resolve_references()
        config.mesh.data = slices
    limit = int(chip.hbm_bytes * (xla_flags.GPU_MEMORY_FRACTION if gpu else 1))
    validate_devices(config, devices)
    config, mesh, optimizer, state = prepare(config, devices)
    tokens = config.batch_size * config.data.seq_len
    traced = trace_step(config, optimizer, mesh, state)
    step_flops = count_flops(traced.jaxpr)
    result = {"topology": topology, "slices": slices, "chips": len(devices)} | describe(
        config, mesh, state[0]
    )
    result |= {
        "sequences_per_chip": config.batch_size / len(devices),
        "hardware_flops_per_token": step_flops / tokens,
        "busiest_part": flops.busiest_part(config.model, config.data.seq_len, config.mesh.context),
        "hbm_bytes_per_chip": limit,
        "xla_flags": flags,
    }
    # Tuning a GPU's kernels would need the GPU.
    options = flags | ({"xla_gpu_autotune_level": 0} if gpu else {})
    start = time.perf_counter()
    try:
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return (
            result
            | _does_not_fit(str(error))
            | {"compile_seconds": round(time.perf_counter() - start, 1)}
        )
    compile_seconds = round(time.perf_counter() - start, 1)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    sizes = {
        "parameters": _bytes_per_chip(state[0]),
        "optimizer_state": _bytes_per_chip(state[1]),
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    peak = step_bytes(memory) + memory.generated_code_size_in_bytes
    traffic = hlo.collectives(text, len(devices) // slices if gpu else None)
    hbm_bytes = hlo.hbm_bytes(text)
    seconds = flops.roofline_seconds(step_flops / len(devices), hbm_bytes, traffic, chip)
    ideal = seconds.pop("step")
    return result | {
        "fits": peak <= limit,  # the compiler accepts slightly more
        "peak_bytes_per_chip": peak,
        "bytes_per_chip": sizes | {"batch_and_padding": peak - sum(sizes.values())},
        "collectives": traffic,
        "kernels": hlo.kernels(text),
        "hbm_traffic_bytes": hbm_bytes,
        "ideal_basis": "roofline of traced FLOPs and compiled traffic: a lower bound, not a measurement",
        "ideal_step_seconds": ideal,
        "ideal_seconds_by": seconds,
        "ideal_tokens_per_second": tokens / ideal,
        "ideal_mfu": result["model_flops_per_token"] * tokens / len(devices) / chip.flops / ideal,
        "compile_seconds": compile_seconds,
    }


def _bytes_per_chip(shapes) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves
    )


def _does_not_fit(message: str) -> dict:
    """Reads the size in the compiler's error: "Used 17.66G of 15.75G hbm" or "temporaries (49.06G) exceeds"."""
    match = re.search(r"(?:Used |temporaries \()([\d.]+)([KMG])(?: of|\) exceed)", message)
    size = round(float(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[match[2]]) if match else None
    log.info("does not fit: %s", message.splitlines()[0])
    unknown = (
        "bytes_per_chip",
        "collectives",
        "kernels",
        "ideal_step_seconds",
        "ideal_tokens_per_second",
        "ideal_mfu",
    )
    return {"fits": False, "peak_bytes_per_chip": size} | dict.fromkeys(unknown)


def search(config: ConfigDict, topology: str, devices: list, flags: dict) -> dict:
    """Returns the plan with the most tokens per second, over every remat and the largest batch that fits.

    The last batch that fits and the one tried before or after it predict the largest, until that has been tried.
    """
    plans = []

    def attempt(remat: str, rows: int) -> dict:
        candidate = config.copy_and_resolve_references()
        candidate.model.remat, candidate.batch_size, candidate.accumulation = (
            remat,
            rows * groups,
            1,
        )
        plans.append(result := plan(candidate, topology, devices, flags))
        size = (
            f"{result['peak_bytes_per_chip'] / 2**30:.2f} GiB" if result["fits"] else "does not fit"
        )
        log.info(
            "remat=%s, %d sequences on %d chips: %s",
            remat,
            candidate.batch_size,
            len(devices),
            size,
        )
        return result

    groups = len(devices) // (config.mesh.tensor * config.mesh.context)
    for remat in REMAT:
        rows, too_many, sizes = (
            1,
            math.inf,
            [(0, 0)],
        )  # sizes: (rows, bytes) of the batches that fit
        while sizes[-1][0] < rows < too_many:
            result = attempt(remat, rows)
            limit = result["hbm_bytes_per_chip"]
            tried = (
                rows,
                result["peak_bytes_per_chip"] or 2 * limit,
            )  # the compiler does not always tell
            if result["fits"]:
                sizes.append(tried)
                tried = sizes[-2]
            else:
                too_many = rows
            last, size = sizes[-1]
            more = int((limit - size) * (last - tried[0]) / ((size - tried[1]) or 1))
            rows = min(2 if last == 1 else max(3, last + more), too_many - 1)
    fitting = [result for result in plans if result["fits"]]
    best = max(fitting, key=lambda result: result["ideal_tokens_per_second"], default=plans[-1])
    columns = ("remat", "sequences_per_chip", "fits", "peak_bytes_per_chip", "ideal_mfu")
    return best | {"search": [{name: result[name] for name in columns} for result in plans]}
