"""One writer at a time, on one host or many: a lock is a file in a folder or below a URL, renewed while it is held."""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import tensorstore as ts

log = logging.getLogger(__name__)

BEAT = 5.0  # seconds between renewals
STALE = 60.0  # seconds without one after which the holder is taken for dead
POLL = 0.5  # seconds between looks; up to ten times as many after a while, as hundreds of hosts may be waiting


@contextlib.contextmanager
def locked(store: ts.KvStore, key: str, what: str, done: Callable[[], bool]) -> Iterator[bool]:
    """Holds the lock `key`, after waiting for whoever holds it; gives False, without it, as soon as `done()`.

    The lock of a process that died is taken over: at once where that can be seen, on the same host, and else
    after it has not been renewed for STALE seconds. `what` is the thing that is locked, for the log.
    """
    held = None
    seen, seen_at, said_at, pause = None, time.monotonic(), -STALE, POLL
    while held is None:
        if done():
            yield False
            return
        found = store.read(key).result()
        if found.state != "value":
            held = _write(store, key, 0, found.stamp.generation)  # if it is still absent
            continue
        if found.stamp.generation != seen:
            seen, seen_at = found.stamp.generation, time.monotonic()
        holder = _parse(found.value)
        if _is_dead(holder) or time.monotonic() - seen_at > STALE:
            held = _write(store, key, 0, seen)
            if held is not None:
                log.warning("data: %s ended while it prepared %s; going on from there", _name(holder), what)
            continue
        if time.monotonic() - said_at > STALE:
            log.info("data: %s is preparing %s; waiting for it", _name(holder), what)
            said_at = time.monotonic()
        time.sleep(pause)
        pause = min(1.2 * pause, 10 * POLL)
    stop = threading.Event()
    beats = threading.Thread(target=_beat, args=(store, key, held, stop), daemon=True)
    beats.start()
    try:
        yield True
    finally:
        stop.set()
        beats.join()
        with contextlib.suppress(Exception):  # a full disk or a lost connection: the lock goes stale
            if _parse(store.read(key).result().value) | {"beat": 0} == _me(0):
                store.write(key, None).result()


def _beat(store: ts.KvStore, key: str, generation: bytes, stop: threading.Event) -> None:
    number = 0
    while not stop.wait(BEAT):
        number += 1
        with contextlib.suppress(Exception):
            # Lost to another process, it is not written again: both go on, and what they write is the same.
            generation = _write(store, key, number, generation) or generation


def _write(store: ts.KvStore, key: str, beat: int, generation: bytes) -> bytes | None:
    """The new generation, or None where another was there than expected."""
    return store.write(key, json.dumps(_me(beat)).encode(), if_equal=generation).result().generation or None


def _me(beat: int) -> dict:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # the process ids of another container mean nothing here
    except OSError:
        namespace = ""
    return {"host": socket.gethostname(), "namespace": namespace, "pid": os.getpid(), "beat": beat}


def _parse(value: bytes) -> dict:
    try:
        holder = json.loads(value)
    except ValueError:
        holder = None
    return holder if isinstance(holder, dict) else {}


def _name(holder: dict) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"


def _is_dead(holder: dict) -> bool:
    me = _me(0)
    if not isinstance(holder.get("pid"), int) or any(holder.get(k) != me[k] for k in ("host", "namespace")):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
