"""One writer at a time: a file lock in a folder; below a URL, where there is none, a key that its holder renews.

Hosts that share a folder need a file system that locks for all of them, as NFS does.
"""

import contextlib
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import filelock

from prope.errors import log
from prope.runtime.files import is_url, kvstore

POLL = 0.5  # seconds between attempts; up to ten times as many after a while, as hundreds of hosts may be waiting
BEAT = 5.0  # seconds between renewals of a key
STALE = 60.0  # seconds without renewal after which a key's holder counts as dead; also between log lines


@contextlib.contextmanager
def write_lock(cache: str, name: str, ready: Callable[[], object]) -> Iterator[bool]:
    """Waits for the lock on writing `name` in a cache, and holds it; yields False, without it, once `ready()`.

    The lock of a killed process is taken over: in a folder at once, below a URL STALE seconds after its last renewal.
    """
    lock = (_KeyLock if is_url(cache) else _FileLock)(cache, f"{name}.lock")
    pause, next_line, held = POLL, 0.0, False
    try:
        while not ready() and not (held := lock.acquire()):
            if time.monotonic() >= next_line:
                log.info("data: %s is preparing %s; waiting for it", lock.holder, name)
                next_line = time.monotonic() + STALE
            time.sleep(pause)
            pause = min(1.2 * pause, 10 * POLL)
        is_writer = held and not ready()  # it may have become so before the lock was free
        if is_writer and lock.abandoned:
            log.warning(
                "data: %s ended while it prepared %s; going on from there", lock.holder, name
            )
        yield is_writer
    finally:
        if held:
            lock.release()


class _FileLock:
    """A lock of the operating system, which it releases when its holder dies."""

    holder = "another process"

    def __init__(self, folder: str, name: str):
        self._path = pathlib.Path(folder, name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(
            self._path, blocking=False, mode=0o666
        )  # users who share a cache wait, too

    def acquire(self) -> bool:
        self.abandoned = self._path.exists()  # the last holder did not release it
        with contextlib.suppress(filelock.Timeout):
            self._lock.acquire()
        return self._lock.is_locked

    def release(self) -> None:
        self._path.unlink(missing_ok=True)  # still held: filelock does not take over a deleted file
        self._lock.release()


class _KeyLock:
    """A key that its holder renews. Every write names the generation that it replaces, so only one succeeds."""

    holder = "another process"

    def __init__(self, url: str, key: str):
        self._store, self._key = kvstore(url), key
        self._seen: tuple[bytes | None, float] = (None, 0.0)  # generation; when it was first seen

    def acquire(self) -> bool:
        entry = self._store.read(self._key).result()
        if entry.stamp.generation != self._seen[0]:
            self._seen = entry.stamp.generation, time.monotonic()
        self.abandoned = entry.state == "value"
        if self.abandoned:
            self.holder = entry.value.decode(errors="replace").split("\n")[0]
            if time.monotonic() - self._seen[1] <= STALE:
                return False
        self._generation = self._write(entry.stamp.generation)
        if self._generation is None:
            return False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(
            Exception
        ):  # a full disk or a lost connection: the lock goes stale
            self._store.write(self._key, None, if_equal=self._generation).result()

    def _renew(self) -> None:
        while not self._stop.wait(BEAT):
            with contextlib.suppress(Exception):
                # Lost to another process, it is not written again: both go on, and what they write is the same.
                self._generation = self._write(self._generation) or self._generation

    def _write(self, generation: bytes) -> bytes | None:
        """Writes the key; returns the new generation, or None if another one than `generation` was there."""
        value = f"process {os.getpid()} on {socket.gethostname()}\nat {time.time()}"
        return (
            self._store.write(self._key, value.encode(), if_equal=generation).result().generation
            or None
        )
