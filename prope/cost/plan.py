"""Compiles the real training step for a TPU slice that is not there:

    python -m prope.plan --config=configs/gemma_2b_wiki.py --topology=v5e:4x4 --sequences_per_chip=2

Needs no TPU, only libtpu (pip install 'prope[tpu]'). It says whether the step fits, what fills the memory of a chip,
what passes between chips, and the least time that a step can take: our own count of FLOPs and bytes against the
chip's peaks. That time assumes that all of it overlaps perfectly; a real step takes longer.

A topology is a generation and the shape of a slice in chips: v5e:4x4, v5p:4x4x4, v6e:16x16. --slices=N joins N of
them by the data-centre network, with a replica of the parameters on each. --search tries every remat with ever more
sequences per chip and plans the fastest that fits.
"""

import functools
import importlib.util
import logging
import os
import re
import time

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from prope import model, sharding
from prope.config import REMAT
from prope.cost import flops as cost
from prope.cost import hlo
from prope.errors import UsageError
from prope.optimizer import make_optimizer
from prope.runtime import xla_flags
from prope.runtime.validate import validate_devices
from prope.step import init_state, trace_step, with_attention

log = logging.getLogger("prope")


def find_devices(topology: str, slices: int) -> list:
    """The devices of slices that are not there.

    Raises:
      UsageError: libtpu is missing, or there is no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("prope.plan needs libtpu, XLA's compiler for TPUs: pip install 'prope[tpu]'; it needs no TPU")
    generation, _, shape = topology.partition(":")
    if generation not in cost.CHIPS or generation not in xla_flags.TPU or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        known = ", ".join(xla_flags.TPU)
        raise UsageError(f"--topology={topology}: must be a generation ({known}) and a shape, such as v5p:4x4x4")
    # Without these libtpu asks the cloud which machine it is on: for minutes, where there is no cloud.
    for name, value in (
        ("SKIP_MDS_QUERY", "1"),
        ("ACCELERATOR_TYPE", "v5litepod-16"),
        ("WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(f"TPU_{name}", value)
    narrow = [min(2, int(size)) for size in shape.split("x")[:2]] + [1]  # chips of a host: 2 x 2, or what there is
    options = {"chips_per_host_bounds": narrow} if 1 in narrow[:2] else {}
    try:
        return list(topologies.get_topology_desc(topology, "tpu", num_slices=slices, **options).devices)
    except Exception as error:
        raise UsageError(f"--topology={topology}: {str(error).splitlines()[0]}") from None


def plan(config: ConfigDict, topology: str, devices: list, flags: dict) -> dict:
    """What the training step of a config needs on these devices; what the command prints.

    Raises:
      UsageError: the devices cannot divide the batch or the mesh, or cannot run the attention that is asked for.
    """
    chip = cost.CHIPS[topology.partition(":")[0]]
    slices = sharding.num_slices(devices)
    validate_devices(config, len(devices), slices)
    config = with_attention(config, devices[0])
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.tensor, devices)
    optimizer = make_optimizer(config)
    state = sharding.with_shardings(jax.eval_shape(functools.partial(init_state, config, optimizer)), mesh)
    tokens = config.batch_size * config.data.seq_len
    per_token = cost.model_flops_per_token(config.model, config.data.seq_len)
    traced = trace_step(config, optimizer, mesh, state)
    needed = cost.count_flops(traced.jaxpr)
    found = {
        "topology": topology,
        "slices": slices,
        "chips": len(devices),
        "mesh": dict(mesh.shape),
        "batch_size": config.batch_size,
        "seq_len": config.data.seq_len,
        "sequences_per_chip": config.batch_size / len(devices),
        "accumulation": config.accumulation,
        "remat": config.model.remat,
        "attention": config.model.attention,
        "parameters": model.num_parameters(state[0]),
        "model_flops_per_token": per_token,
        "hardware_flops_per_token": needed / tokens,
        "hbm_bytes_per_chip": int(chip.hbm_bytes),
        "xla_flags": flags,
    }
    start = time.perf_counter()
    try:
        compiled = traced.lower().compile(compiler_options=flags)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | _too_large(str(error)) | {"compile_seconds": round(time.perf_counter() - start, 1)}
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    parts = [sum(_bytes_per_chip(leaf) for leaf in jax.tree.leaves(part)) for part in state]
    peak = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip
    traffic, moved = hlo.collectives(text), hlo.hbm_bytes(text)
    times = cost.roofline_seconds(needed / len(devices), moved, traffic, chip)
    return found | {
        "fits": peak <= chip.hbm_bytes,  # the compiler lets a little more pass
        "peak_bytes_per_chip": peak,
        "bytes_per_chip": {
            "parameters": parts[0],
            "optimizer_state": parts[1],
            "temporaries": memory.temp_size_in_bytes,
            "program": memory.generated_code_size_in_bytes,
            "batch_and_padding": peak - sum(parts) - memory.temp_size_in_bytes - memory.generated_code_size_in_bytes,
        },
        "collectives": traffic,
        "hbm_traffic_bytes": moved,
        "ideal_step_seconds": times.pop("step"),
        "ideal_seconds_by": times,
        "ideal_tokens_per_second": tokens / max(filter(None, times.values())),
        "ideal_mfu": per_token * tokens / len(devices) / chip.flops / max(filter(None, times.values())),
        "compile_seconds": round(seconds, 1),
    }


def _bytes_per_chip(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return leaf.dtype.itemsize * functools.reduce(int.__mul__, shape, 1)


def _too_large(message: str) -> dict:
    """What the compiler's refusal says, "Used 17.66G of 15.75G hbm" or "temporaries (49.06G) exceeds"."""
    used = re.search(r"Used ([\d.]+)([KMG]) of|temporaries \(([\d.]+)([KMG])\) exceed", message)
    number, unit = (used[1] or used[3], used[2] or used[4]) if used else (None, None)
    size = round(float(number) * 2 ** {"K": 10, "M": 20, "G": 30}[unit]) if used else None
    log.info("does not fit: %s", message.splitlines()[0])
    unknown = ("bytes_per_chip", "collectives", "ideal_step_seconds", "ideal_tokens_per_second", "ideal_mfu")
    return {"fits": False, "peak_bytes_per_chip": size} | dict.fromkeys(unknown)


def search(config: ConfigDict, topology: str, devices: list, flags: dict) -> dict:
    """The plan with the most tokens per second, over every remat and the most sequences per chip that fit.

    Memory grows evenly with the batch: two small compilations say where to look for the largest that fits.
    """
    tried = []

    def attempt(remat: str, rows: int) -> dict:
        other = config.copy_and_resolve_references()
        other.model.remat, other.batch_size, other.accumulation = remat, rows * groups, 1
        found = plan(other, topology, devices, flags)
        size = f"{found['peak_bytes_per_chip'] / 2**30:.2f} GiB" if found["fits"] else "does not fit"
        log.info("remat=%s, %d sequences on %d chips: %s", remat, other.batch_size, len(devices), size)
        tried.append(found)
        return found

    groups = len(devices) // config.mesh.tensor
    for remat in REMAT:
        first = attempt(remat, 1)
        if not first["fits"]:
            continue
        second = attempt(remat, 2)
        if not second["fits"]:
            continue
        each = second["peak_bytes_per_chip"] - first["peak_bytes_per_chip"]
        rows = max(3, 1 + int((first["hbm_bytes_per_chip"] - first["peak_bytes_per_chip"]) // each))
        while rows > 2 and not attempt(remat, rows)["fits"]:
            rows -= 1
    fitting = [found for found in tried if found["fits"]]
    if not fitting:
        return tried[-1] | {"search": [_row(found) for found in tried]}
    best = max(fitting, key=lambda found: found["ideal_tokens_per_second"])
    return best | {"search": [_row(found) for found in tried]}


def _row(found: dict) -> dict:
    names = ("remat", "sequences_per_chip", "fits", "peak_bytes_per_chip", "ideal_mfu")
    return {name: found[name] for name in names}
