"""W/lease.json: one training at a time writes a run, and notices where it has lost it.

The first process of a training holds the lease and renews it. A training that ends gives it back.
One that was killed leaves it, and the next takes it over: at once where its process is gone
from this machine, else after a while without a renewal.
"""

import contextlib
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from etils import epath

from prope.errors import RunFailed, first_line, log, usage_error
from prope.runtime.files import kvstore, parse_json

_NAME = "lease.json"
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 40.0  # without a renewal, after which the holder counts as dead
_POLL_SECONDS = 0.5


class LeaseLost(RunFailed):
    """Another training has taken the run over: this one must not write to it any more."""


class Lease:
    """The lease of one training on a run.

    Attributes:
      saved: step of the newest checkpoint that is known to be complete, kept for the next training.
      is_lost: whether another training has taken the run over; then nothing may be written.
    """

    def __init__(self, workdir: epath.Path):
        self.saved = 0
        self.is_lost = False
        self._workdir = workdir
        self._folder = kvstore(workdir)
        self._holder = _this_process() | {"id": secrets.token_hex(8)}
        self._has_ended = threading.Event()
        self._lock = threading.Lock()

    def acquire(self, on_loss: Callable[[], None]) -> None:
        """Takes the lease and renews it in a thread, which calls `on_loss` once it is lost.

        Raises UsageError where another training holds it and is alive.
        """
        first_seen = None
        start = time.monotonic()
        while True:
            entry = self._folder.read(_NAME).result()
            record = _parse(entry.value)
            holder = record.get("holder")
            has_expired = time.monotonic() - start > EXPIRE_SECONDS
            if not holder or _is_gone(holder) or has_expired:
                self.saved = record.get("saved", 0)
                if self._write(entry, self._holder):
                    break
            elif first_seen is None:
                first_seen = entry.value
                log.info("%s: waiting for a sign of life of %s", self._workdir / _NAME, holder)
            elif entry.value != first_seen:
                where = f"process {holder.get('pid')} on {holder.get('host')}"
                problem = f"another training is at work there, {where}"
                raise usage_error("--workdir", self._workdir, problem, "end it, or wait for it")
            time.sleep(_POLL_SECONDS)
        threading.Thread(target=self._renew, args=[on_loss], name="lease", daemon=True).start()

    def check(self) -> None:
        """Renews the lease; raises LeaseLost where another training has taken the run over."""
        with self._lock:
            while self.is_held():
                entry = self._folder.read(_NAME).result()
                if self._write(entry, self._holder):
                    return
        problem = "another training has taken this run over"
        raise LeaseLost(f"--workdir={self._workdir}: {problem}; this one writes nothing more")

    def is_held(self) -> bool:
        """Tells whether this training may write, by the file as it is now."""
        if not self.is_lost:
            value = self._folder.read(_NAME).result().value
            holder = _parse(value).get("holder") or {}
            # Where somebody has removed the file, nobody else holds it.
            self.is_lost = bool(value) and holder.get("id") != self._holder["id"]
        return not self.is_lost

    def release(self) -> None:
        """Gives the lease back; one that is lost is left alone."""
        self._has_ended.set()
        with contextlib.suppress(Exception), self._lock:  # a lease that stays expires
            entry = self._folder.read(_NAME).result()
            if entry.value and self.is_held():
                self._write(entry, None)

    def _write(self, entry, holder: dict | None) -> bool:
        """Writes the file, unless it has changed since `entry` was read from it."""
        record = {"holder": holder, "saved": self.saved, "time": time.time()}
        generation = entry.stamp.generation
        content = json.dumps(record).encode()
        stamp = self._folder.write(_NAME, content, if_equal=generation).result()
        return bool(stamp.generation)  # empty where it has changed

    def _renew(self, on_loss: Callable[[], None]) -> None:
        while not self._has_ended.wait(RENEW_SECONDS):
            try:
                self.check()
            except LeaseLost:
                on_loss()
                return
            except Exception as error:  # of the storage; the next renewal may succeed
                log.warning("the lease of the run was not renewed: %s", first_line(error))


def _parse(content: bytes) -> dict:
    """Reads the file; what is not a record counts as no lease."""
    with contextlib.suppress(ValueError):
        record = parse_json(content)
        if isinstance(record, dict):
            return record
    return {}


def _this_process() -> dict:
    """Identifies this process; on another machine, or after a restart, no process is equal to it.

    `started` is in ticks since the machine's start; None where /proc does not tell.
    """
    pid = os.getpid()
    return _machine() | {"pid": pid, "started": _start_of(pid)}


def _machine() -> dict:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return {"host": socket.gethostname(), "boot": boot.read_text() if boot.exists() else ""}


def _start_of(pid: int) -> str | None:
    """Returns when a process of this machine was started; None where it has ended."""
    with contextlib.suppress(OSError):
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] != "Z":  # its parent has not noticed yet
            return fields[19]
    return None


def _is_gone(holder: dict) -> bool:
    """Tells whether a process was one of this machine, and has ended."""
    machine = _machine()
    is_here = machine["boot"] and machine.items() <= holder.items()
    return bool(is_here) and _start_of(holder["pid"]) != holder["started"]
