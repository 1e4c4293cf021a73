"""How much memory a compiled program needs, whether its devices have it, and its reuse on a CPU."""

import ctypes
import os
import pathlib

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from prope.errors import UsageError

_MALLOC_OPTIONS = {
    -4: 0,
    -1: -1,
}  # M_MMAP_MAX, M_TRIM_THRESHOLD: blocks of any size from a heap that never shrinks


def step_bytes(memory) -> int:
    """Sums what a compiled step needs on a device, from its `memory_analysis()`; the program itself not counted."""
    inputs_and_outputs = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    return inputs_and_outputs + memory.temp_size_in_bytes


def device_bytes(device: jax.Device) -> int | None:
    """Returns a device's memory, of a CPU its share of the host's; None where it is not known."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = pathlib.Path("/sys/fs/cgroup/memory.max")
    if container.is_file() and (text := container.read_text().strip()).isdecimal():
        host = min(host, int(text))
    return host // jax.local_device_count()


def check_memory(compiled: jax.stages.Compiled, remedy: str) -> None:
    """Raises UsageError where a compiled program needs more memory than a device has."""
    _check(step_bytes(compiled.memory_analysis()), remedy)


def check_activations(config: ConfigDict, remedy: str) -> None:
    """Raises UsageError, before a compilation of minutes, where not even what every layer keeps fits.

    That is its input [rows of a microbatch, seq_len, embed_dim], and two such arrays of hidden_dim where remat saves
    wide matmuls. Attention keeps more.
    """
    model, tensor = config.model, config.mesh.tensor
    tokens = (
        config.batch_size
        // config.accumulation
        * config.data.seq_len
        // (jax.device_count() // tensor)
    )
    width = model.embed_dim + (
        2 * model.hidden_dim // tensor if model.remat in ("none", "minimal") else 0
    )
    _check(model.num_layers * tokens * width * jnp.dtype(model.dtype).itemsize, remedy)


def reuse_memory() -> None:
    """Makes programs on a CPU reuse the memory of earlier ones; else the kernel takes back and zeroes every page.

    That took a quarter of a small model's step. A program allocates in the thread that runs it: here in the calling
    one, whose arena of glibc's malloc, the first, is the only one that holds blocks above 64 MB.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)  # macOS has none
    for option, value in _MALLOC_OPTIONS.items():
        mallopt(option, value)


def _check(needed: int, remedy: str) -> None:
    limit = device_bytes(jax.local_devices()[0])
    if limit is not None and needed > limit:
        sizes = f"{needed / 1e9:,.3f} GB on every device, which has {limit / 1e9:,.3f} GB"
        raise UsageError(f"out of memory: a step needs at least {sizes}: {remedy}")
