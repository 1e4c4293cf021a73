"""W/lease.json: one training at a time writes a run, and notices where it has lost it.

A training that was killed leaves the file, and the next takes it over: at once where its process
is gone from this machine, else after a while without a renewal, by the next one's clock.
"""

import contextlib
import functools
import json
import os
import secrets
import threading
import time

from etils import epath

from prope.errors import LOST, RunFailed, Stopped, find_full, first_line, log
from prope.runtime import files

RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 40.0  # without a renewal, after which the holder counts as dead
LOCK_SECONDS = 60.0  # for a write on this machine, which waits for another's to end


class Lease:
    """The lease of one training on a run, which its first process holds.

    `saved` is the step of the newest checkpoint that is known to be complete, kept for the next
    training; None before the first one.
    """

    def __init__(self, workdir: epath.Path):
        self._path = workdir / "lease.json"
        self._folder = files.kvstore(workdir)
        self._own = {"pid": os.getpid(), "machine": _machine(), "id": secrets.token_hex(8)}
        self._has_ended = threading.Event()
        self.saved: int | None = None

    def acquire(self, on_loss) -> None:
        """Takes the lease and renews it in a thread, which calls `on_loss` once it is lost.

        Raises Stopped where another training holds it and is alive: a later start may go on.
        """
        files.check_regular(self._path)
        entry, holder, self.saved = files.retry_reads(self._path, self._read)
        seen = entry.value
        seen_at = time.monotonic()
        if holder:
            log.info("%s: waiting for a sign of life of %s", self._path, _name(holder))
        while True:
            is_dead = entry.value == seen and time.monotonic() - seen_at > EXPIRE_SECONDS
            is_here = holder.get("machine") == _machine()
            is_dead |= is_here and not os.path.exists(f"/proc/{holder['pid']}")
            if holder in ({}, self._own) or is_dead:
                if files.retry_reads(self._path, functools.partial(self._write, entry, self._own)):
                    break
            elif entry.value != seen:
                problem = f"another training is at work, {_name(holder)}"
                raise Stopped(f"{self._path}: {problem}; end it, or wait for it", LOST)
            time.sleep(0.5)
            entry, holder, self.saved = files.retry_reads(self._path, self._read)
        self._thread = threading.Thread(target=self._renew, args=[on_loss], daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Renews the lease, as soon as the storage answers; raises RunFailed where it is lost."""
        files.retry_reads(self._path, self._renew_once)

    def is_held(self) -> bool:
        """Returns whether this training may write, by the file as it is now."""
        return self._read()[1] == self._own

    def stop(self) -> None:
        """Ends the renewals: only `release` writes the file after it has returned."""
        self._has_ended.set()
        self._thread.join()

    def release(self) -> None:
        """Gives the lease back; one that is lost is left alone."""
        self.stop()
        with contextlib.suppress(Exception):  # a lease that stays expires
            entry, holder, _ = self._read()
            if holder == self._own:
                self._write(entry, {})

    def _read(self) -> tuple:
        """Returns the file, its holder and `saved`: {} and None where it is not a record."""
        with files.os_errors_of_tensorstore(find_full):
            entry = self._folder.read(self._path.name).result()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = files.parse_json(entry.value)
            return entry, dict(record["holder"]), record.get("saved")
        return entry, {}, None

    def _write(self, entry, holder: dict) -> bool:
        """Writes the file, unless it has changed since `entry` was read from it.

        Raises Stopped where a process was suspended amid a write of it, whose lock nobody can take.
        """
        record = {"holder": holder, "saved": self.saved, "time": time.time()}
        content = json.dumps(record).encode()
        unchanged = entry.stamp.generation
        written = self._folder.write(self._path.name, content, if_equal=unchanged)
        try:
            with files.os_errors_of_tensorstore(find_full):
                timeout = None if files.is_url(self._path) else LOCK_SECONDS
                return bool(written.result(timeout=timeout).generation)
        except TimeoutError as error:
            problem = f"a suspended process holds its lock, such as {_name(self._read()[1])}"
            raise Stopped(f"{self._path}: {problem}; end it, or let it go on", LOST) from error

    def _renew_once(self) -> None:
        while True:  # `check` and the thread may meet
            entry, holder, _ = self._read()
            if holder != self._own:
                problem = "was removed, or another training took it over"
                raise RunFailed(f"{self._path}: {problem}; this one writes nothing more")
            if self._write(entry, self._own):
                return

    def _renew(self, on_loss) -> None:
        while not self._has_ended.wait(RENEW_SECONDS):
            try:
                self._renew_once()
            except RunFailed:
                self._has_ended.set()
                on_loss()
            except Exception as error:  # of the storage; the next renewal may succeed
                log.warning("the lease of the run was not renewed: %s", first_line(error))


def _name(holder: dict) -> str:
    return f"process {holder.get('pid')} on {str(holder.get('machine')).split(' ')[0]}"


def _machine() -> str:
    """Names what numbers this process: each container, and each start of a machine, by itself."""
    try:
        boot = epath.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.uname().nodename} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on every system: equal to no other process's
        return f"{os.uname().nodename} {secrets.token_hex(8)}"
