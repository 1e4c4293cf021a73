"""From the start of a process to its first step: what each part takes, and whether compiled programs are found again.

Every start leaves a line in W/starts.jsonl: when, from which step, by which commit, on what, and the seconds.
"""

import datetime
import logging
import os
import pathlib
import platform
import re
import subprocess
import time
import zlib

import jax

from prope.runtime import processes

log = logging.getLogger("prope")

_CACHE = "/jax/compilation_cache/cache_"


class Startup:
    """Measures the parts of one start."""

    def __init__(self):
        self._seconds = {"import": _age()}
        self._at = time.perf_counter()
        self._events = {"hits": 0, "misses": 0}
        self.cache = "off"

    def done(self, part: str) -> None:
        """The time since the last call was for this part."""
        now = time.perf_counter()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._at
        self._at = now

    def use_cache(self, workdir: pathlib.Path) -> None:
        """Keeps compiled programs in W/compilation_cache, unless JAX_COMPILATION_CACHE_DIR names another place.

        What is compiled for a CPU depends on its kind, which JAX does not look at: each kind has its own folder.
        """
        if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            jax.config.update("jax_compilation_cache_dir", str(workdir / "compilation_cache" / _machine()))

        def listen(event: str, **_) -> None:
            name = event.removeprefix(_CACHE)
            if name in self._events:
                self._events[name] += 1

        jax.monitoring.register_event_listener(listen)

    def compiled(self) -> None:
        """The training step is compiled: the time since the last call of `done` was for this."""
        self.done("compile")
        self.cache = "hit" if self._events["hits"] else "miss"

    def first_step(self, step: int) -> dict:
        """Logs the seconds of every part; returns the line for W/starts.jsonl."""
        self.done("first step")
        seconds = {part: round(value, 3) for part, value in self._seconds.items()}
        log.info(
            "first step after %.1f s: %s (compilation cache: %s)", sum(seconds.values()),
            ", ".join(f"{part} {value:.1f}" for part, value in seconds.items()), self.cache,
        )  # fmt: skip
        return {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "commit": _commit(),
            "processes": processes.count(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "machine": _machine(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "seconds": seconds,
            "compilation_cache": self.cache,
        }


def _age() -> float:
    """Seconds since this process was started, where Linux tells; else 0."""
    try:
        started = float(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, AttributeError):
        return 0.0


def _machine() -> str:
    """The kind of device, and of a CPU what it can do: 'cpu-x86_64-1a2b3c4d', 'tpu-TPU-v5-lite'."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return re.sub(r"\W+", "-", f"{device.platform}-{device.device_kind}")
    try:
        flags = re.search(r"^(flags|Features)\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        able = flags[2] if flags else ""
    except OSError:
        able = platform.processor()
    return f"cpu-{platform.machine()}-{zlib.crc32(able.encode()):08x}"


def _commit() -> str | None:
    """The commit of this code, with '+changes' where files differ from it: PROPE_COMMIT, or what git says."""
    if "PROPE_COMMIT" in os.environ:
        return os.environ["PROPE_COMMIT"] or None

    def git(*arguments: str) -> str:
        here = pathlib.Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.SubprocessError):
        return None
