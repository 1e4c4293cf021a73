"""Refuses settings of the environment that would change what a command computes."""

import functools
import locale
import os
import pathlib
import re

import jax

from prope.errors import log, usage_error

# Settings of JAX, each an environment variable in upper case: the value that results stand for, and
# what another one would do. Others are noted in the record of a start.
REQUIRED = {
    "jax_enable_x64": (False, "parameters would be float64"),
    "jax_threefry_partitionable": (True, "would change initial weights and samples"),
    "jax_random_seed_offset": (0, "a seed would stand for another one"),
    "jax_disable_jit": (False, "no step would be compiled"),
}
# Compiled programs with other sums, exponentials or minima than IEEE's.
_INEXACT_FLAG = re.compile(r"--(xla_\w*fast_m(?:ath|in)(?!_honor)\w*)(?:=(\w+))?")
_RECORDED = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "CUDA_", "PROPE_PROCESSES")  # prefixes


def check_environment(settings: dict | None = None) -> None:
    """Raises UsageError for a setting that would change results.

    Args:
      settings: of JAX; by default those that it has taken from the environment, or that a config
        file has set. No device is used.
    """
    settings = settings or jax.config.values
    for setting, (required, consequence) in REQUIRED.items():
        value = settings.get(setting, required)
        if value != required:
            name = setting.upper()
            problem = f"{consequence}; results stand for JAX's default"
            raise usage_error(name, value, problem, f"unset {name}")
    for flag, value in _INEXACT_FLAG.findall(os.environ.get("XLA_FLAGS", "")):
        if value.lower() not in ("false", "0"):
            remedy = f"remove --{flag} from XLA_FLAGS"
            raise usage_error("XLA_FLAGS", f"--{flag}", "would change results", remedy)
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") != "utf8":
        remedy = "set PYTHONUTF8=1"
        raise usage_error("the locale's encoding", encoding, "texts are read as UTF-8", remedy)


@functools.cache  # one line, whatever the number of evaluations
def advise_dtype(dtype: str) -> None:
    """Logs that float32 is faster, where a bfloat16 model meets a CPU without bfloat16 units."""
    if dtype != "bfloat16" or jax.default_backend() != "cpu":
        return
    about = pathlib.Path("/proc/cpuinfo")
    flags = about.read_text() if about.exists() else "bf16"
    if "bf16" not in flags:
        remedy = "give --dtype=float32, or import the checkpoint with it for all commands"
        log.info("this CPU has no units for bfloat16, and is faster in float32: %s", remedy)


def recorded_variables() -> dict[str, str]:
    """Returns the environment variables that tell how JAX, XLA and the devices are set."""
    variables = sorted(os.environ.items())
    return {name: value for name, value in variables if name.startswith(_RECORDED)}
