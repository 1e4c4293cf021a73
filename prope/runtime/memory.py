"""Computes what memory a program needs, checks that devices have it, and reuses it on a CPU."""

import ctypes
import os
import pathlib

import jax

from prope.errors import UsageError

# Options of glibc's malloc, which take blocks of any size from a heap that never shrinks.
_M_MMAP_MAX = -4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE = 8  # a program's temporary memory, if it is more than this part of the machine's


def step_bytes(memory) -> int:
    """Sums what a compiled step needs on a device, without the program itself.

    `memory` is its `memory_analysis()`.
    """
    inputs_and_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return inputs_and_outputs - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def device_bytes(device: jax.Device) -> int | None:
    """Returns a device's memory, of a CPU its share of the host's; None where it is not known."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = pathlib.Path("/sys/fs/cgroup/memory.max")
    if container.is_file():
        text = container.read_text().strip()
        if text.isdecimal():
            host = min(host, int(text))
    return host // jax.local_device_count()


def check_memory(compiled: jax.stages.Compiled, remedy: str) -> None:
    """Raises UsageError where a compiled program needs more memory than a device has.

    On a CPU, one that needs much gives it back after every run: in a heap that it shares, a small
    block may take a piece of it, and the next run would need as much again.
    """
    memory = compiled.memory_analysis()
    device = jax.local_devices()[0]
    needed = step_bytes(memory)
    limit = device_bytes(device)
    if limit is not None and needed > limit:
        sizes = f"{needed / 1e9:,.3f} GB on every device, which has {limit / 1e9:,.3f} GB"
        raise UsageError(f"out of memory: a step needs at least {sizes}: {remedy}")
    libc = ctypes.CDLL(None)
    is_large = limit is not None and memory.temp_size_in_bytes * _LARGE > limit
    if device.platform == "cpu" and is_large and hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_MMAP_MAX, 1 << 16)
        libc.malloc_trim(0)


def reuse_memory() -> None:
    """Makes programs on a CPU reuse the memory of earlier ones.

    Else the kernel takes back and zeroes every page, which took a quarter of a small model's step.
    A program allocates in the thread that runs it: here in the calling one, whose arena of glibc's
    malloc, the first, is the only one that holds blocks above 64 MB.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # macOS has none
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
