"""W/lease.json: one training at a time writes a run, and notices where it has lost it.

The first process of a training holds the lease and renews it. A training that ends gives it back.
One that was killed leaves it, and the next takes it over: at once where its process is gone
from this machine, else after a while without a renewal.
"""

import contextlib
import functools
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from etils import epath

from prope.errors import LOST, RunFailed, Stopped, first_line, is_disk_full, log
from prope.runtime.files import (
    check_regular,
    kvstore,
    os_errors_of_tensorstore,
    parse_json,
    retry_reads,
)

_NAME = "lease.json"
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 40.0  # without a renewal, after which the holder counts as dead
_POLL_SECONDS = 0.5


class LeaseLost(RunFailed):
    """Another training has taken the run over: this one must not write to it any more."""


class Lease:
    """The lease of one training on a run.

    Attributes:
      saved: step of the newest checkpoint that is known to be complete, kept for the next training;
        0 before the first one; None where no training has told it.
      is_lost: whether another training has taken the run over; then nothing may be written.
    """

    def __init__(self, workdir: epath.Path):
        self.saved: int | None = None
        self.is_lost = False
        self._workdir = workdir
        self._path = workdir / _NAME
        self._folder = kvstore(workdir)
        self._holder = _this_process() | {"id": secrets.token_hex(8)}
        self._has_ended = threading.Event()
        self._lock = threading.Lock()

    def acquire(self, on_loss: Callable[[], None]) -> None:
        """Takes the lease and renews it in a thread, which calls `on_loss` once it is lost.

        Raises Stopped where another training holds it and is alive: a later start may go on;
        UsageError where lease.json is not a file.
        """
        check_regular(self._path)
        first_seen = None
        seen_at = 0.0
        while True:
            entry = retry_reads(self._path, self._read)
            record = _parse(entry.value)
            holder = record.get("holder")
            is_still = entry.value == first_seen
            has_expired = is_still and time.monotonic() - seen_at > EXPIRE_SECONDS
            if not holder or self._is_ours(holder) or _is_gone(holder) or has_expired:
                self.saved = record.get("saved")
                write = functools.partial(self._write, entry, self._holder)
                if retry_reads(self._path, write):
                    break
            elif first_seen is None:
                first_seen = entry.value
                seen_at = time.monotonic()
                log.info("%s: waiting for a sign of life of %s", self._path, holder)
            elif not is_still:
                where = f"process {holder.get('pid')} on {holder.get('host')}"
                problem = f"another training is at work there, {where}"
                message = f"--workdir={self._workdir}: {problem}; end it, or wait for it"
                raise Stopped(message, LOST)
            time.sleep(_POLL_SECONDS)
        self._thread = threading.Thread(
            target=self._renew, args=[on_loss], name="lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Renews the lease; raises LeaseLost where another training has taken the run over.

        While the storage fails it tries again; raises StorageFailed where that goes on.
        """
        retry_reads(self._path, self._renew_once)

    def is_held(self) -> bool:
        """Tells whether this training may write, by the file as it is now."""
        return not self.is_lost and self._holds(self._read())

    def stop(self) -> None:
        """Ends the renewals: only `release` writes the file after it has returned."""
        self._has_ended.set()
        self._thread.join()

    def release(self) -> None:
        """Gives the lease back; one that is lost is left alone."""
        self.stop()
        with contextlib.suppress(Exception):  # a lease that stays expires
            entry = self._read()
            if entry.value and self._holds(entry):
                self._write(entry, None)

    def _read(self):
        return _result(self._folder.read(_NAME))

    def _write(self, entry, holder: dict | None) -> bool:
        """Writes the file, unless it has changed since `entry` was read from it."""
        record = {"holder": holder, "saved": self.saved, "time": time.time()}
        generation = entry.stamp.generation
        content = json.dumps(record).encode()
        stamp = _result(self._folder.write(_NAME, content, if_equal=generation))
        return bool(stamp.generation)  # empty where it has changed

    def _is_ours(self, holder: dict) -> bool:
        return holder.get("id") == self._holder["id"]

    def _holds(self, entry) -> bool:
        """Tells whether this training may write, by what was read; one that may not never may."""
        holder = _parse(entry.value).get("holder") or {}
        # Where somebody has removed the file, nobody else holds it.
        self.is_lost |= bool(entry.value) and not self._is_ours(holder)
        return not self.is_lost

    def _renew_once(self) -> None:
        with self._lock:
            while True:
                entry = self._read()
                if not self._holds(entry):
                    problem = "another training has taken this run over"
                    message = f"--workdir={self._workdir}: {problem}; this one writes nothing more"
                    raise LeaseLost(message)
                if self._write(entry, self._holder):  # else what was read is no longer so
                    return

    def _renew(self, on_loss: Callable[[], None]) -> None:
        while not self._has_ended.wait(RENEW_SECONDS):
            try:
                self._renew_once()
            except LeaseLost:
                on_loss()
                return
            except Exception as error:  # of the storage; the next renewal may succeed
                log.warning("the lease of the run was not renewed: %s", first_line(error))


def _result(future):
    """Waits for the storage's answer; raises OSError where it fails, which is tried again.

    A full disk is not: a person must free space.
    """
    with os_errors_of_tensorstore(is_disk_full):
        return future.result()


def _parse(content: bytes) -> dict:
    """Reads the file; what is not a record counts as no lease."""
    with contextlib.suppress(ValueError):
        record = parse_json(content)
        if isinstance(record, dict) and isinstance(record.get("holder"), dict | None):
            return record
    return {}


def _this_process() -> dict:
    """Identifies this process; on another machine, or after a restart, no process is equal to it.

    `started` is in ticks since the machine's start; None where /proc does not tell.
    """
    pid = os.getpid()
    return _machine() | {"pid": pid, "started": _start_of(pid)}


def _machine() -> dict:
    """Identifies what numbers this process's siblings: containers of one machine are several."""
    machine = {"host": socket.gethostname(), "boot": "", "pids": ""}
    with contextlib.suppress(OSError):  # not on every system
        machine["boot"] = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        machine["pids"] = os.readlink("/proc/self/ns/pid")  # the namespace
    return machine


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
