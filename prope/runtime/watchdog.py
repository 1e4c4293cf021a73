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


_open: list["Watchdog"] = []  # those of this process, which code far from them reports to


def alive(progress: str) -> None:
    """Reports progress to this process's watchdogs, if any."""
    for watchdog in _open:
        watchdog.alive(progress)


@contextlib.contextmanager
def paused():
    """Stops the timers of this process's watchdogs within the context."""
    with contextlib.ExitStack() as stack:
        for watchdog in _open:
            stack.enter_context(watchdog.paused())
        yield


class Watchdog(contextlib.AbstractContextManager):
    """Ends the process after `minutes` without a call of `alive`; None: never."""

    def __init__(self, minutes: float | None):
        self._seconds = 60 * minutes if minutes else None
        self._closed = threading.Event()
        self.alive("the start")

    def __enter__(self):
        _open.append(self)
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error):
        _open.remove(self)
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
