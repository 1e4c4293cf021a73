"""Records every start of a run, and opens the cache of compiled programs.

A start becomes a line of W/starts.jsonl: time, step, commit, devices, environment variables, and
the seconds from when the run was opened to the end of its first step.
"""

import datetime
import os
import pathlib
import platform
import re
import subprocess
import time
import zlib

import jax

from prope.errors import UsageError, log
from prope.runtime import processes
from prope.runtime.environment import recorded_variables
from prope.runtime.files import user_cache


class Startup:
    """Tells of one start: how long it took, and whether programs came from the cache."""

    def __init__(self):
        self._cache = "miss"
        self._began = time.perf_counter()

    def use_cache(self) -> None:
        """Keeps compiled programs in the user's cache, unless JAX_COMPILATION_CACHE_DIR is set.

        They are executed, and so do not lie in W, which others may have written. Programs for a CPU
        depend on its instruction set, which JAX's cache key leaves out: each set has a folder.
        """
        if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            try:
                folder = _programs_folder()
            except (OSError, UsageError) as error:
                log.info("compiled programs are not kept: %s", error)
            else:
                jax.config.update("jax_compilation_cache_dir", str(folder))

        def listen(event, **_):
            if event == "/jax/compilation_cache/cache_hits":
                self._cache = "hit"

        jax.monitoring.register_event_listener(listen)

    def record(self, step: int) -> dict:
        """Logs that the first step is done; returns the line of W/starts.jsonl."""
        seconds = round(time.perf_counter() - self._began, 3)
        log.info("first step after %.1f s (compilation cache: %s)", seconds, self._cache)
        return {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "commit": find_commit(),
            "processes": processes.count(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "machine": _machine(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "environment": recorded_variables(),
            "seconds": seconds,
            "compilation_cache": self._cache,
        }


def _programs_folder() -> pathlib.Path:
    """Makes the folder of compiled programs; raises OSError where another user may write it."""
    folder = user_cache() / "prope" / "programs" / _machine()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not of this user alone")
    return folder


def _machine() -> str:
    """Names the device kind, of a CPU with its features: 'cpu-x86_64-1a2b3c4d', 'tpu-TPU-v5'."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return re.sub(r"\W+", "-", f"{device.platform}-{device.device_kind}")
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        match = re.search(r"^(flags|Features)\s*:(.*)$", text, re.MULTILINE)
        features = match[2] if match else ""
    except OSError:
        features = platform.processor()
    return f"cpu-{platform.machine()}-{zlib.crc32(features.encode()):08x}"


def find_commit() -> str | None:
    """Returns PROPE_COMMIT, or git's commit of this code, with '+changes' where files differ."""
    if "PROPE_COMMIT" in os.environ:
        return os.environ["PROPE_COMMIT"] or None
    try:
        changes = "+changes" if _git("status", "--porcelain", "--", ".") else ""
        return _git("rev-parse", "HEAD") + changes
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).parents[2]
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, timeout=20, check=True, capture_output=True, text=True)
    return done.stdout.strip()
