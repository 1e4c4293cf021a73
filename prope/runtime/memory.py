"""How much memory a compiled program needs, and whether its devices have it."""

import os
import pathlib

import jax

from prope.errors import UsageError


def step_bytes(memory) -> int:
    """Sums what a compiled step needs on a device, from its `memory_analysis()`; the program itself not counted."""
    inputs_and_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
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
    needed, limit = step_bytes(compiled.memory_analysis()), device_bytes(jax.local_devices()[0])
    if limit is not None and needed > limit:
        sizes = f"{needed / 1e9:,.3f} GB on every device, which has {limit / 1e9:,.3f} GB"
        raise UsageError(f"out of memory: a step needs {sizes}: {remedy}")
