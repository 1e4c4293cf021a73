"""Prints the shell exports that set a platform's XLA flags: v5e, v5p, v6e, gpu or cpu.

    python -m prope.runtime.xla_flags v5p

`launch/run.sh v5p COMMAND` runs a command with them, `prope.plan` compiles with them, and
`prope.bench` reports which are set. The source of every flag stands beside it in
prope/runtime/xla_flags.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # to which the user's flags are appended
_VARIABLES = (
    *_FLAGS,
    "JAX_OPTIMIZATION_LEVEL",
    "NCCL_NVLS_ENABLE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)

# Gathers and sums of parameters run beside the matmuls. Source: AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py, DATA_PARALLEL_OVERLAP and CF_FOR_ALL_GATHER, used for Gemma 2B on
# v5e.
_TPU = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    # Else the gather of a weight is a synchronous all-reduce of its zero-padded shards
    # (pytorch/xla#6528).
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    # More VMEM for one fusion: the blocks of prope/kernels/splash.py need 40 MB. maxtext and
    # tpu-recipes (training/trillium) give 98304, which takes half as long again to compile.
    "xla_tpu_scoped_vmem_limit_kib": 49152,
}
# Source: maxtext, src/maxtext/configs/tpu/v5p/llama2_7b.sh.
_V5P = {
    "xla_tpu_megacore_fusion_allow_ags": False,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
}
TPU = {"v5e": _TPU, "v5p": _TPU | _V5P, "v6e": _TPU}

# For several GPUs. With these JAX's level O1: latency hiding, pipelined collectives, double
# buffering. Source: NVIDIA/JAX-Toolbox, docs/GPU_performance.md. Collectives are combined up to one
# layer of Gemma 2B in bfloat16, 220 MB.
GPU = {
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**28,
    "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
    "xla_gpu_enable_triton_gemm": False,
}
GPU_LEVEL = "O1"
# JAX's default of 0.75 leaves 20 of 80 GB to CUDA and NCCL, which take less than 6.
GPU_MEMORY_FRACTION = 0.92
PLATFORMS = (*TPU, "gpu", "cpu")


def environment(platform: str) -> dict[str, str]:
    """Returns the environment variables that set a platform's flags; a CPU has none."""
    if platform in TPU:
        return {"LIBTPU_INIT_ARGS": _flags_text(TPU[platform])}
    if platform != "gpu":
        return {}
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_MEMORY_FRACTION)}
    capabilities = _compute_capabilities()
    processes = os.environ.get("PROPE_PROCESSES") or "1"
    is_one_process = processes == "1" or processes.startswith("0/1@")
    if is_one_process and len(capabilities) == 1:
        # There is nothing to exchange, and the flags made a step take a tenth longer: of
        # gemma_300m_wiki.py 1.50 against 1.36 s (H100, JAX 0.11.2, 2026-11-27).
        return variables
    variables |= {
        "XLA_FLAGS": _flags_text(GPU),
        "JAX_OPTIMIZATION_LEVEL": GPU_LEVEL,
        "NCCL_NVLS_ENABLE": "1",
    }
    is_hopper = all(capability.startswith("9.") for capability in capabilities)
    if capabilities and is_hopper:
        # One queue keeps the order in which XLA starts collectives. Source: as above.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables


def with_users(chip: str, users: str) -> tuple[str, dict[str, object]]:
    """Appends a user's flags to a chip's LIBTPU_INIT_ARGS.

    Returns the variable's value, and the chip's flags that the user does not set.
    """
    chips = TPU[chip]
    unset = {name: value for name, value in chips.items() if f"--{name}=" not in users}
    return f"{_flags_text(chips)} {users}".strip(), unset


def _compute_capabilities() -> list[str]:
    """Returns that of each GPU that CUDA sees, such as 9.0; none where nvidia-smi fails."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return []
    capabilities = [line for line in done.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return capabilities[: len(visible.split(","))] if visible else capabilities


def in_force() -> dict[str, str]:
    """Returns the variables that hold flags in this process."""
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


def _flags_text(flags: Mapping[str, object]) -> str:
    return " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())


def _main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    if len(arguments) != 1 or arguments[0] not in PLATFORMS:
        got = " ".join(arguments) or "nothing"
        print(f"error: give one platform of {', '.join(PLATFORMS)}; got {got}", file=sys.stderr)
        sys.exit(2)
    for name, value in environment(arguments[0]).items():
        # What the user has set wins: the last of two equal flags counts.
        if name in _FLAGS:
            print(f'export {name}="{value}${{{name}:+ ${name}}}"')
        else:
            print(f'export {name}="${{{name}:-{value}}}"')


if __name__ == "__main__":
    _main(sys.argv[1:])
