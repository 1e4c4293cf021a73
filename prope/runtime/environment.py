"""Refuses settings of the environment that would change, or break, what a command computes."""

import locale
import os
import re

import jax

from prope.errors import usage_error

# Settings of JAX, each an environment variable in upper case: the value that results stand for, and
# what another one would do.
REQUIRED = {
    "jax_enable_x64": (False, "parameters would be float64"),
    "jax_threefry_partitionable": (True, "initial weights and samples would be others"),
    "jax_random_seed_offset": (0, "a seed would stand for another one"),
    "jax_high_dynamic_range_gumbel": (False, "samples would be others"),
    "jax_default_matmul_precision": (None, "matmuls would round otherwise than model.dtype says"),
    "jax_softmax_custom_jvp": (False, "gradients would round otherwise"),
    "jax_numpy_dtype_promotion": ("standard", "operations on two dtypes would fail"),
    "jax_disable_jit": (False, "no step would be compiled"),
    "jax_no_execution": (False, "nothing would be computed"),
    "jax_no_tracing": (False, "nothing could be compiled"),
    "jax_debug_nans": (False, "a nan would end a run before on_nonfinite is asked"),
    "jax_debug_infs": (False, "masked scores would end the run"),
    "jax_debug_key_reuse": (False, "a key that is used again would end the run"),
    "jax_error_checking_behavior_nan": ("ignore", "a nan would end the run"),
    "jax_error_checking_behavior_oob": ("ignore", "a masked index would end the run"),
    "jax_error_checking_behavior_divide": ("ignore", "a division by 0 would end the run"),
    "jax_check_tracer_leaks": (False, "a step would be traced anew again and again"),
}
_GUARDS = ("", "_host_to_device", "_device_to_host", "_device_to_device")
# Compiled programs with other sums, exponentials or minima than IEEE's.
_INEXACT_FLAG = re.compile(r"--(xla_\w*fast_m(?:ath|in)(?!_honor)\w*)(?:=(\w+))?")
# Under these a run is bit for bit the same; a test runs one with all of them.
HARMLESS = {
    "JAX_DEFAULT_PRNG_IMPL": "rbg",  # every key names its own
    "JAX_ENABLE_CUSTOM_PRNG": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_LOG_COMPILES": "1",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_TRANSFER_GUARD": "log",
    "JAX_ENABLE_CHECKS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
    "PYTHONHASHSEED": "7",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_ALL": "C",
    "TZ": "Asia/Kathmandu",
}


def check_environment(settings: dict | None = None) -> None:
    """Raises UsageError for a setting under which results would be others.

    Args:
      settings: of JAX; by default those that it has taken from the environment, or that a config
        file has set. No device is used.
    """
    settings = settings or jax.config.values
    for setting, (required, consequence) in REQUIRED.items():
        value = settings.get(setting, required)
        if value != required:
            _refuse(setting, value, consequence)
    for direction in _GUARDS:
        setting = f"jax_transfer_guard{direction}"
        value = settings.get(setting)
        if str(value).startswith("disallow"):
            _refuse(setting, value, "a copy between host and device would end the run")
    for flag, value in _INEXACT_FLAG.findall(os.environ.get("XLA_FLAGS", "")):
        if value.lower() not in ("false", "0"):
            remedy = f"remove --{flag} from XLA_FLAGS"
            raise usage_error("XLA_FLAGS", f"--{flag}", "results would be others", remedy)
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") != "utf8":
        remedy = "set PYTHONUTF8=1"
        raise usage_error("the locale's encoding", encoding, "texts are read as UTF-8", remedy)


def _refuse(setting: str, value, consequence: str) -> None:
    name = setting.upper()
    raise usage_error(
        name, value, f"{consequence}; results stand for JAX's default", f"unset {name}"
    )
