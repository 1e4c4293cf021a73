"""Ends a process that hangs, so that a scheduler restarts it: all hosts wait for a lost one."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time

from prope.errors import LOST

MINUTES = 60.0  # without progress, after which a command that has no config ends

_ADVICE = (
    "the stacks of all threads are above. Run the same command again: a training goes on from its "
    "last checkpoint, and waits for config.watchdog_minutes"
)


_progress = ""
_alive_at = 0.0  # when that was reported; infinite in a pause


def alive(progress: str) -> None:
    """Restarts the timer; the error of a hang names the last progress."""
    global _progress, _alive_at
    _progress = progress
    _alive_at = time.monotonic()


@contextlib.contextmanager
def paused():
    """Stops the timer within the context."""
    global _alive_at
    _alive_at = math.inf
    yield
    alive("a pause")


@contextlib.contextmanager
def watching(minutes: float | None):
    """Ends the process where `minutes` pass without `alive` in the context; None: never."""
    alive("the start")
    ended = threading.Event()
    if minutes:
        watch = threading.Thread(target=_watch, args=[minutes, ended], daemon=True)
        watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(minutes: float, ended: threading.Event) -> None:
    seconds = 60 * minutes
    while not ended.wait(min(1.0, seconds / 4)):
        if time.monotonic() - _alive_at > seconds:
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            hang = f"nothing has happened for {minutes:g} minutes after {_progress}"
            print(f"stopped: {hang}; {_ADVICE}", file=sys.stderr, flush=True)
            os._exit(LOST)
