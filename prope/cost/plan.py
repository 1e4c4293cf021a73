"""Compiles the training step for devices that are not here; searches the largest batch."""

import functools
import math
import re
import time
from collections.abc import Callable

import jax

from prope import sharding
from prope.cost import flops, hlo, traffic
from prope.cost.bench import describe
from prope.cost.classes import count_classes
from prope.cost.traced import count_flops
from prope.errors import log, vmem_error
from prope.runtime import xla_flags
from prope.runtime.memory import step_bytes
from prope.spec.model import REMAT
from prope.spec.run import Spec
from prope.step import ASYNC_FUSION, compiler_options, prepare, trace_step

# What is only known of a step that fits.
_COMPILED = (
    "bytes_per_chip",
    "collectives",
    "kernels",
    "classes",
    "ideal_step_seconds",
    "ideal_tokens_per_second",
    "ideal_mfu",
)


def plan(spec: Spec, topology: str, devices: list, flags: dict) -> dict:
    """Compiles the training step for these devices; returns what the command prints."""
    name, _, _ = topology.partition(":")
    is_gpu = name not in xla_flags.TPU
    chip = flops.CHIPS[name]
    slices = sharding.num_slices(devices)
    if is_gpu:  # JAX tells nodes apart, as slices, only of GPUs that are attached
        slices = len({gpu.process_index for gpu in devices})
    if spec.mesh.data is None:
        spec = spec.replace({"mesh.data": slices})
    sharding.check_devices(spec, devices)
    spec, mesh, optimizer, state = prepare(spec, devices)
    traced = trace_step(spec, optimizer, mesh, state)
    tokens = spec.batch_size * spec.data.seq_len
    step_flops = count_flops(traced.jaxpr)
    usable_memory = xla_flags.GPU_MEMORY_FRACTION if is_gpu else 1
    result = {
        "topology": topology,
        "slices": slices,
        "chips": len(devices),
        **describe(spec, mesh),
        "sequences_per_chip": spec.batch_size / len(devices),
        "hardware_flops_per_token": step_flops / tokens,
        "hbm_bytes_per_chip": int(chip.hbm_bytes * usable_memory),
    }
    # Tuning a GPU's kernels would need the GPU.
    options = flags | compiler_options(spec, mesh)
    result["xla_flags"] = dict(options)
    if is_gpu:
        options["xla_gpu_autotune_level"] = 0
    start = time.perf_counter()
    try:
        compiled = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        result |= _does_not_fit(str(error))
        compiled = None
    seconds = round(time.perf_counter() - start, 1)
    if compiled:
        result |= _memory_of_chip(compiled, state, result["hbm_bytes_per_chip"])
        module = hlo.parse(compiled.as_text())
        chips_per_node = len(devices) // slices if is_gpu else None
        result["collectives"] = traffic.collectives(module, chips_per_node)
        result["kernels"] = traffic.kernels(module)
        result["hbm_traffic_bytes"] = traffic.hbm_bytes(module)
        result["classes"] = count_classes(module, chip)
        result |= _ideal_speed(result, step_flops, chip)
    return result | {"compile_seconds": seconds}


def _does_not_fit(message: str) -> dict:
    """Reads the size in the compiler's error, such as "Used 17.66G of 15.75G hbm".

    Raises UsageError where it is a kernel's VMEM that is too small, which no smaller batch mends.
    """
    if vmem := vmem_error(message):
        raise vmem
    log.info("does not fit: %s", message.splitlines()[0])
    # Another one says "temporaries (49.06G) exceeds".
    match = re.search(r"(?:Used |temporaries \()([\d.]+)([KMG])(?: of|\) exceed)", message)
    size = match and round(float(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[match[2]])
    return {"fits": False, "peak_bytes_per_chip": size} | dict.fromkeys(_COMPILED)


def _memory_of_chip(compiled: jax.stages.Compiled, state: tuple, limit: int) -> dict:
    """Returns what fills a chip's memory."""
    params, opt_state = state
    memory = compiled.memory_analysis()
    program = memory.generated_code_size_in_bytes
    peak = step_bytes(memory) + program
    sizes = {
        "parameters": _bytes_per_chip(params),
        "optimizer_state": _bytes_per_chip(opt_state),
        "temporaries": memory.temp_size_in_bytes,
        "program": program,
    }
    return {
        "fits": peak <= limit,  # the compiler accepts slightly more
        "peak_bytes_per_chip": peak,
        "bytes_per_chip": sizes | {"batch_and_padding": peak - sum(sizes.values())},
    }


def _bytes_per_chip(shapes) -> int:
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(shapes)
    )


def _ideal_speed(result: dict, step_flops: float, chip: flops.Chip) -> dict:
    """Returns the roofline of the step's FLOPs and traffic."""
    chips = result["chips"]
    tokens = result["batch_size"] * result["seq_len"]
    seconds_by = flops.roofline_seconds(
        step_flops / chips, result["hbm_traffic_bytes"], result["collectives"], chip
    )
    seconds = max(filter(None, seconds_by.values()))
    model_flops = result["model_flops_per_token"] * tokens
    basis = "roofline of traced FLOPs and compiled traffic: a lower bound, not a measurement"
    return {
        "ideal_basis": basis,
        "ideal_step_seconds": seconds,
        "ideal_seconds_by": seconds_by,
        "ideal_tokens_per_second": tokens / seconds,
        "ideal_mfu": model_flops / chips / chip.flops / seconds,
    }


def search(spec: Spec, topology: str, devices: list, flags: dict) -> dict:
    """Returns the fastest plan over every remat and the largest batch that fits.

    `spec.mesh.gather` is "head"; the best plan gets "ahead" if that still fits, on TPUs where it
    makes another program.
    """
    groups = len(devices) // (spec.mesh.tensor * spec.mesh.context)

    def attempt(gather, remat, rows):
        fields = {"mesh.gather": gather, "model.remat": remat}
        fields |= {"batch_size": rows * groups, "accumulation": 1}
        result = plan(spec.replace(fields), topology, devices, flags)
        size = "does not fit"
        if result["fits"]:
            size = f"{result['peak_bytes_per_chip'] / 2**30:.2f} GiB"
        batch = f"{rows * groups} sequences on {len(devices)} chips"
        log.info("gather=%s, remat=%s, %s: %s", gather, remat, batch, size)
        return result

    plans = []
    for remat in REMAT:
        plans += _search_batch(functools.partial(attempt, "head", remat))
    fitting = [result for result in plans if result["fits"]]
    best = max(fitting, key=lambda result: result["ideal_tokens_per_second"], default=plans[-1])
    waits = best["xla_flags"].get(ASYNC_FUSION) is False
    if best["fits"] and waits:
        ahead = attempt("ahead", best["remat"], best["batch_size"] // groups)
        plans.append(ahead)
        best = ahead if ahead["fits"] else best
    columns = ("gather", "remat", "sequences_per_chip", "fits", "peak_bytes_per_chip", "ideal_mfu")
    return best | {"search": [{name: result[name] for name in columns} for result in plans]}


def _search_batch(attempt: Callable[[int], dict]) -> list[dict]:
    """Plans batches of so many rows until the largest that fits is found; returns all plans.

    A line through the last batch that fits and the one tried before or after it predicts the next.
    """
    plans = []
    fitting = [(0, 0)]  # rows and bytes of the batches that fit
    too_many = math.inf
    rows = 1
    while fitting[-1][0] < rows < too_many:
        result = attempt(rows)
        plans.append(result)
        limit = result["hbm_bytes_per_chip"]
        other = (rows, result["peak_bytes_per_chip"] or 2 * limit)  # not all compilers tell
        if result["fits"]:
            fitting.append(other)
            other = fitting[-2]
        else:
            too_many = rows
        last, size = fitting[-1]
        other_rows, other_size = other
        more = int((limit - size) * (last - other_rows) / ((size - other_size) or 1))
        rows = 2 if last == 1 else max(3, last + more)
        rows = min(rows, too_many - 1)
    return plans
