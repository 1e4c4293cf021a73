"""What a run is asked from outside while it trains: to save, or to save and stop.

SIGTERM is how schedulers, Kubernetes and a machine that is taken away give notice; Ctrl-C is SIGINT. A thread hears
them at once, whatever the main thread is busy with, such as compiling. JAX's own service for this hears SIGTERM only,
and nothing while the main thread is in C++.
"""

import contextlib
import enum
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
    """What is asked; of several, the greatest is done."""

    NOTHING = 0
    SAVE = 1  # the clock says that it is time
    INTERRUPT = 2  # save and stop: Ctrl-C
    STOP = 3  # save and stop: SIGTERM


class Interrupts(contextlib.AbstractContextManager):
    """Hears requests while the context is open; `poll` tells all processes of a run the same.

    Until `training` is set there is nothing to save, and a request ends the process at once.
    """

    def __init__(self, minutes_between_saves: float | None = None):
        self.training = False
        self.asked = Request.NOTHING  # what the last `poll` returned
        self._seconds = 60 * minutes_between_saves if minutes_between_saves else None
        self._heard, self._presses = Request.NOTHING, 0
        self._saved_at = time.monotonic()
        self._agreed: jax.Array | None = None

    def __enter__(self):
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = self.listen()
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="interrupts", daemon=True).start()
        return self

    def __exit__(self, *error):
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(self._write)

    def listen(self) -> dict:
        """Takes the signals; again after JAX's runtime has started, which takes SIGTERM for itself."""
        return {number: signal.signal(number, self._interrupt) for number in (signal.SIGTERM, signal.SIGINT)}

    def over(self, mesh: Mesh) -> None:
        """Asks the other processes, too, from now on, over the devices of a mesh."""
        if processes.count() > 1:
            self._votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._greatest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._shape = (mesh.devices.size,)

    def poll(self) -> Request:
        """What is asked now; of several processes, what any was asked when they polled before.

        All must call it at the same places. The votes go along with the training, so nobody waits for them.
        """
        due = self._seconds is not None and time.monotonic() - self._saved_at > self._seconds
        own = max(self._heard, Request.SAVE if due else Request.NOTHING)
        if processes.count() == 1:
            self.asked = own
            return own
        votes = np.full(jax.local_device_count(), own, np.int32)
        before = self._agreed
        self._agreed = self._greatest(jax.make_array_from_process_local_data(self._votes, votes, self._shape))
        self.asked = Request.NOTHING if before is None else Request(int(before))
        return self.asked

    def saved(self) -> None:
        """The clock for saving starts anew."""
        self._saved_at = time.monotonic()

    def _interrupt(self, number: int, _frame) -> None:
        """In the main thread: Ctrl-C before training is what it always is."""
        if number == signal.SIGINT and not self.training:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """In a thread of its own, as soon as a signal arrives."""
        while numbers := os.read(self._read, 1):
            number, training = numbers[0], self.training
            if number == signal.SIGTERM and not training:
                _leave("SIGTERM before the first step, so nothing was lost", PREEMPTED)
            if number == signal.SIGTERM:
                self._heard = Request.STOP
                _say("SIGTERM: saving, then stopping")
            if number == signal.SIGINT and training:
                self._presses += 1
                if self._presses > 1:
                    _leave("Ctrl-C twice", INTERRUPTED)
                self._heard = max(self._heard, Request.INTERRUPT)
                _say("Ctrl-C: saving, then stopping; once more leaves at once")
        os.close(self._read)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _leave(why: str, code: int) -> None:
    _say(f"stopped: {why}; the same command goes on from the last checkpoint")
    os._exit(code)
