"""Prints the shell exports that set a platform's XLA flags: v5e, v5p, v6e, gpu or cpu.

    python -m prope.runtime.xla_flags v5p

`launch/run.sh v5p COMMAND` runs a command with them, `prope.plan` compiles with them, and `prope.bench` reports
which are set. The source of every flag stands beside it in prope/runtime/xla_flags.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # to which the user's flags are appended
VARIABLES = (
    *_FLAGS,
    "JAX_OPTIMIZATION_LEVEL",
    "NCCL_NVLS_ENABLE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)

# Gathers and sums of parameters run beside the matmuls. Source: AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py, DATA_PARALLEL_OVERLAP and CF_FOR_ALL_GATHER, used for Gemma 2B on v5e.
_TPU = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
    # Else the gather of a weight is a synchronous all-reduce of its zero-padded shards (pytorch/xla#6528).
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    # More VMEM for one fusion, which the blocks of prope/kernels/splash.py need. Sources: maxtext, Llama-3.1-8B on v5e;
    # AI-Hypercomputer/tpu-recipes, training/trillium.
    "xla_tpu_scoped_vmem_limit_kib": 98304,
}
_V5P = {  # maxtext, src/maxtext/configs/tpu/v5p/llama2_7b.sh
    "xla_tpu_megacore_fusion_allow_ags": False,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
}
TPU = {"v5e": _TPU, "v5p": _TPU | _V5P, "v6e": _TPU}
# With these JAX's level O1: latency hiding, pipelined collectives, double-buffered loops. Source: NVIDIA/JAX-Toolbox,
# docs/GPU_performance.md. Collectives are combined up to one layer of Gemma 2B in bfloat16, 220 MB.
GPU = {
    f"xla_gpu_{kind}_combine_threshold_bytes": 2**28
    for kind in ("all_reduce", "all_gather", "reduce_scatter")
}
GPU["xla_gpu_enable_triton_gemm"] = False
GPU_LEVEL = "O1"
GPU_MEMORY_FRACTION = (
    0.92  # JAX's default of 0.75 leaves 20 of 80 GB to CUDA and NCCL, which take less than 6
)
PLATFORMS = (*TPU, "gpu", "cpu")


def environment(platform: str) -> dict[str, str]:
    """The environment variables that set a platform's flags; of a CPU there are none."""
    if platform in TPU:
        return {"LIBTPU_INIT_ARGS": _joined(TPU[platform])}
    if platform == "gpu":
        fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_MEMORY_FRACTION)}
        # On several Hopper GPUs one queue keeps the order in which XLA starts collectives. Source: as above.
        ordered = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if _several_hopper_gpus() else {}
        flags = {
            "XLA_FLAGS": _joined(GPU),
            "JAX_OPTIMIZATION_LEVEL": GPU_LEVEL,
            "NCCL_NVLS_ENABLE": "1",
        }
        return flags | fraction | ordered
    return {}


def with_users(chip: str, users: str) -> tuple[str, dict[str, object]]:
    """Returns LIBTPU_INIT_ARGS with a user's flags appended, and the chip's flags that the user leaves as they are."""
    left = {name: value for name, value in TPU[chip].items() if f"--{name}=" not in users}
    return f"{_joined(TPU[chip])} {users}".strip(), left


def _several_hopper_gpus() -> bool:
    """Tells whether the run is on several GPUs of compute capability 9, in one process or in more."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return False
    gpus = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return (
        all(gpu.startswith("9.") for gpu in gpus)
        and len(gpus) * int(os.environ.get("PROPE_PROCESSES", 1)) > 1
    )


def in_force(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that hold flags in this process."""
    return {name: environ[name] for name in VARIABLES if environ.get(name)}


def _joined(flags: Mapping[str, object]) -> str:
    return " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())


def _main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        return print(__doc__.strip())
    if len(arguments) != 1 or arguments[0] not in PLATFORMS:
        message = (
            f"give one platform of {', '.join(PLATFORMS)}; got {' '.join(arguments) or 'nothing'}"
        )
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    for name, value in environment(arguments[0]).items():
        both, users = (
            f"{value}${{{name}:+ ${name}}}",
            f"${{{name}:-{value}}}",
        )  # what the user has set wins
        print(f'export {name}="{both if name in _FLAGS else users}"')
    return None


if __name__ == "__main__":
    _main(sys.argv[1:])
