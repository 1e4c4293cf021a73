"""Turns SIGTERM, Ctrl-C and the save timer into requests that the loop polls.

Schedulers, Kubernetes and preempted machines send SIGTERM; Ctrl-C is SIGINT. A thread reads them at once, even while
the main thread compiles. JAX's own service for preemption handles SIGTERM only, and not while the main thread compiles.
"""

import contextlib
import enum
import math
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prope.errors import INTERRUPTED, PREEMPTED
from prope.runtime import processes


class Request(enum.IntEnum):
    """A request to the loop; of several, the greatest counts."""

    NONE = 0
    SAVE = 1  # `minutes_between_saves` have passed
    INTERRUPT = 2  # save and stop: Ctrl-C
    STOP = 3  # save and stop: SIGTERM


class Interrupts(contextlib.AbstractContextManager):
    """Handles signals while the context is open; `poll` returns the same request in all processes of a run."""

    def __init__(self, minutes_between_saves: float | None = None):
        self.training = False  # until the caller sets it there is nothing to save: a signal ends the process at once
        self.request = Request.NONE  # what the last `poll` returned
        self._save_seconds = 60 * minutes_between_saves if minutes_between_saves else math.inf
        self._signalled, self._presses = Request.NONE, 0  # by signals to this process
        self._saved_at = time.monotonic()
        self._last_vote: jax.Array | None = None

    def __enter__(self):
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {
            number: signal.signal(number, self._interrupt)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, name="interrupts", daemon=True).start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(self._write)

    def vote_over(self, mesh: Mesh) -> None:
        """Makes `poll` include the other processes' requests, exchanged over the devices of a mesh."""
        self._votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._greatest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def poll(self) -> Request:
        """Returns the request now; with several processes, the greatest request at their previous poll.

        All must call it at the same places. The vote is computed along with training, so that nobody waits for it.
        """
        due = time.monotonic() - self._saved_at > self._save_seconds
        self.request = max(self._signalled, Request.SAVE if due else Request.NONE)
        if processes.count() > 1:
            votes, last = np.full(jax.local_device_count(), self.request, np.int32), self._last_vote
            self._last_vote = self._greatest(
                jax.make_array_from_process_local_data(self._votes, votes)
            )
            self.request = Request.NONE if last is None else Request(int(last))
        return self.request

    def saved(self) -> None:
        """Restarts the save timer."""
        self._saved_at = time.monotonic()

    def _interrupt(self, number: int, frame) -> None:
        """Handles a signal in the main thread: before training, Ctrl-C is handled as before this context."""
        if number == signal.SIGINT and not self.training:
            previous = self._previous[number]
            (previous if callable(previous) else signal.default_int_handler)(number, frame)

    def _read_signals(self) -> None:
        """Reads signals from the wake-up pipe, in a thread."""
        while numbers := os.read(self._read, 1):
            number, training = numbers[0], self.training
            if number == signal.SIGTERM:
                if not training:
                    _exit("SIGTERM before the first step, so nothing was lost", PREEMPTED)
                self._signalled = Request.STOP
                print("SIGTERM: saving, then stopping", file=sys.stderr, flush=True)
            if number == signal.SIGINT and training:
                self._presses += 1
                if self._presses > 1:
                    _exit("Ctrl-C twice", INTERRUPTED)
                self._signalled = max(self._signalled, Request.INTERRUPT)
                print(
                    "Ctrl-C: saving, then stopping; once more leaves at once",
                    file=sys.stderr,
                    flush=True,
                )
        os.close(self._read)


def _exit(why: str, code: int) -> None:
    print(
        f"stopped: {why}; the same command goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(code)
