"""Describes devices that are not here, for which XLA compiles: TPU slices and nodes of GPUs."""

import contextlib
import importlib.util
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator
from unittest import mock

# JAX asks the attached GPU two questions by these modules, which have no public name.
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from prope.cost import flops
from prope.errors import UsageError, usage_error
from prope.runtime import xla_flags

GPUS = tomllib.loads(pathlib.Path(__file__).with_name("gpus.toml").read_text())
_FOR_ALL_GPUS = GPUS.pop("all")
# cuDNN and CUDA of launch/constraints.txt, as XLA asks for them.
_LIBRARIES = {"dnn_version_info": {"major": 9, "minor": 28}, "runtime_version": {"major": 13}}
# Without the others, libtpu asks the cloud which machine it is on, and waits minutes where there is
# no cloud.
_OF_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # several plans at a time, or one beside training
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def find_devices(topology: str, slices: int) -> list:
    """Describes the devices of TPU slices, or of nodes of GPUs."""
    name, _, shape = topology.partition(":")
    sizes = shape.split("x") if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    if name in GPUS and len(sizes) in (1, 2):
        return _find_gpus(name, sizes, slices)
    if name in xla_flags.TPU and len(sizes) in (2, 3):
        return _find_tpus(topology, sizes, slices)
    tpu = f"a TPU ({', '.join(xla_flags.TPU)}) and the shape of a slice, such as v5p:4x4x4"
    gpu = f"a GPU ({', '.join(GPUS)}) and nodes x GPUs of a node, such as h100:8x8"
    raise usage_error("--topology", topology, f"must be {tpu}, or {gpu}")


def _find_tpus(topology: str, sizes: list[str], slices: int) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            "prope.plan needs libtpu, XLA's compiler for TPUs: pip install -e '.[tpu]'; "
            "it needs no TPU"
        )
    for name, value in _OF_LIBTPU.items():
        os.environ.setdefault(name, value)
    options = {}
    if "1" in sizes[:2]:
        # A host has 2 x 2 chips, or fewer.
        options["chips_per_host_bounds"] = [min(2, int(size)) for size in sizes[:2]] + [1]
    try:
        description = topologies.get_topology_desc(topology, "tpu", num_slices=slices, **options)
    except Exception as error:
        raise usage_error("--topology", topology, str(error).splitlines()[0]) from None
    return list(description.devices)


def _find_gpus(name: str, sizes: list[str], slices: int) -> list:
    if slices > 1:
        as_nodes = f"nodes are in the topology: {name}:{slices}x{sizes[-1]}"
        raise usage_error("--slices", slices, "TPUs have slices", as_nodes)
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UsageError(
            "prope.plan needs jax-cuda13-plugin, XLA's compiler for NVIDIA GPUs: "
            "pip install -e '.[plan-gpu]' (4 GB); it needs no GPU"
        )
    chip = flops.CHIPS[name]
    target = {
        "gpu_device_info": {
            **_FOR_ALL_GPUS,
            **GPUS[name],
            "memory_bandwidth": int(chip.hbm_bandwidth),
            "device_memory_size": int(chip.hbm_bytes),
        },
        "platform_name": '"CUDA"',
        **_LIBRARIES,
        "device_description_str": f'"{chip.device_kinds[0]}"',
    }
    partitions_nodes_gpus = "x".join(["1", "1", *sizes][-3:])
    description = topologies.get_topology_desc(
        name, "cuda", topology=partitions_nodes_gpus, target_config=_text_proto(target)
    )
    return list(description.devices)


@contextlib.contextmanager
def as_if_attached(devices: list) -> Iterator[None]:
    """Answers, within the context, what JAX (0.10 to 0.11) asks the attached GPU.

    That is what the platform "gpu" is, and what its cuDNN can do. TPUs are not asked.
    """
    capability = getattr(devices[0], "compute_capability", None)
    if capability is None:
        yield
        return
    canonicalize = xla_bridge.canonicalize_platform

    def canonicalize_platform(platform):
        return "cuda" if platform == "gpu" else canonicalize(platform)

    def check_compute_capability(least):
        return float(capability) >= float(least)

    with (
        mock.patch.object(xla_bridge, "canonicalize_platform", canonicalize_platform),
        mock.patch.object(cudnn, "check_compute_capability", check_compute_capability),
        mock.patch.object(cudnn, "is_cuda_compute_capability_equal", capability.__eq__),
    ):
        yield


def _text_proto(message: dict) -> str:
    fields = []
    for key, value in message.items():
        text = f"{{ {_text_proto(value)} }}" if isinstance(value, dict) else value
        fields.append(f"{key}: {text}")
    return " ".join(fields)
