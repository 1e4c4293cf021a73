"""Describes devices that are not here, for which XLA compiles: TPU slices, and nodes of NVIDIA GPUs."""

import importlib.util
import os
import pathlib
import re
import tomllib

from jax._src import (
    xla_bridge,
)  # two questions of JAX to the attached GPU, which have no public name
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from prope.cost import flops
from prope.errors import UsageError
from prope.runtime import xla_flags

GPUS = tomllib.loads(pathlib.Path(__file__).with_name("gpus.toml").read_text())
_FOR_ALL_GPUS = GPUS.pop("all")
# cuDNN and CUDA of launch/constraints.txt, as XLA asks for them.
_LIBRARIES = {"dnn_version_info": {"major": 9, "minor": 28}, "runtime_version": {"major": 13}}


def find_devices(topology: str, slices: int) -> list:
    """Describes the devices of TPU slices, or of nodes of GPUs."""
    name, _, shape = topology.partition(":")
    sizes = shape.split("x") if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if not (
        (name in GPUS and 1 <= len(sizes) <= 2) or (name in xla_flags.TPU and 2 <= len(sizes) <= 3)
    ):
        tpu = f"a TPU ({', '.join(xla_flags.TPU)}) and the shape of a slice, such as v5p:4x4x4"
        gpu = f"a GPU ({', '.join(GPUS)}) and nodes x GPUs of a node, such as h100:8x8"
        raise UsageError(f"--topology={topology}: must be {tpu}, or {gpu}")
    return _find_gpus(name, sizes, slices) if name in GPUS else _find_tpus(topology, sizes, slices)


def _find_tpus(topology: str, sizes: list[str], slices: int) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "prope.plan needs libtpu, XLA's compiler for TPUs: pip install -e '.[tpu]'; it needs no TPU"
        )
    # Without these, libtpu asks the cloud which machine it is on, and waits for minutes where there is no cloud.
    known_machine = {
        "SKIP_MDS_QUERY": "1",
        "ACCELERATOR_TYPE": "v5litepod-16",
        "WORKER_HOSTNAMES": "localhost",
    }
    for name, value in known_machine.items():
        os.environ.setdefault(f"TPU_{name}", value)
    bounds = [min(2, int(size)) for size in sizes[:2]] + [1]  # chips of a host: 2 x 2, or fewer
    options = {"chips_per_host_bounds": bounds} if 1 in bounds[:2] else {}
    try:
        return list(
            topologies.get_topology_desc(topology, "tpu", num_slices=slices, **options).devices
        )
    except Exception as error:
        raise UsageError(f"--topology={topology}: {str(error).splitlines()[0]}") from None


def _find_gpus(name: str, sizes: list[str], slices: int) -> list:
    if slices > 1:
        raise UsageError(
            f"--slices={slices}: is of TPUs; nodes are part of the topology: {name}:{slices}x{sizes[-1]}"
        )
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        remedy = "pip install -e '.[plan-gpu]' (4 GB); it needs no GPU"
        raise UsageError(
            f"prope.plan needs jax-cuda13-plugin, XLA's compiler for NVIDIA GPUs: {remedy}"
        )
    chip = flops.CHIPS[name]
    facts = _FOR_ALL_GPUS | GPUS[name]
    facts |= {
        "memory_bandwidth": int(chip.hbm_bandwidth),
        "device_memory_size": int(chip.hbm_bytes),
    }
    config = {"gpu_device_info": facts, "platform_name": '"CUDA"'} | _LIBRARIES
    text = _text_proto(config | {"device_description_str": f'"{chip.device_kinds[0]}"'})
    shape = "x".join(["1", "1", *sizes][-3:])  # partitions x nodes x GPUs of a node
    devices = list(
        topologies.get_topology_desc(name, "cuda", topology=shape, target_config=text).devices
    )
    # JAX (0.10 to 0.11) asks the attached GPU what "gpu" is and what its cuDNN can do. Here the topology answers.
    capability, canonicalize = devices[0].compute_capability, xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda platform: (
        "cuda" if platform == "gpu" else canonicalize(platform)
    )
    cudnn.check_compute_capability = lambda least: float(capability) >= float(least)
    cudnn.is_cuda_compute_capability_equal = lambda other: capability == other
    return devices


def _text_proto(message: dict) -> str:
    fields = {
        key: f"{{ {_text_proto(x)} }}" if isinstance(x, dict) else x for key, x in message.items()
    }
    return " ".join(f"{key}: {value}" for key, value in fields.items())
