"""Ends a process that hangs, so that a scheduler restarts it: all hosts wait for a lost one."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time

from prope.errors import LOST

_ADVICE = (
    "the stacks of all threads are above. The same command goes on from the last checkpoint; "
    "config.watchdog_minutes says how long to wait"
)


class Watchdog(contextlib.AbstractContextManager):
    """Ends the process after `minutes` without a call of `alive`; None: never."""

    def __init__(self, minutes: float | None):
        self._seconds = 60 * minutes if minutes else None
        self._closed = threading.Event()
        self.alive("the start")

    def __enter__(self):
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error):
        self._closed.set()

    def alive(self, progress: str) -> None:
        """Restarts the timer; an error names the last progress."""
        self._progress = progress
        self._alive_at = time.monotonic()

    @contextlib.contextmanager
    def paused(self):
        """Stops the timer within the context."""
        self._alive_at = math.inf
        yield
        self.alive("a pause")

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._alive_at > self._seconds:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                minutes = f"{self._seconds / 60:g}"
                hang = f"nothing has happened for {minutes} minutes after {self._progress}"
                print(f"stopped: {hang}; {_ADVICE}", file=sys.stderr, flush=True)
                os._exit(LOST)
