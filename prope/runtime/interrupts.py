"""Turns SIGTERM, Ctrl-C and the save timer into requests that the loop polls.

Schedulers, Kubernetes and preempted machines send SIGTERM; Ctrl-C is SIGINT. A thread reads them at
once, even while the main thread compiles. JAX's service for preemption knows neither Ctrl-C nor the
save timer; it needs several processes, and its answer waits until a step has ended.
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

from prope.errors import INTERRUPTED, PREEMPTED, Stopped
from prope.runtime import processes


class Request(enum.IntEnum):
    """A request to the loop; of several, the greatest counts."""

    NONE = 0
    SAVE = 1  # `minutes_between_saves` have passed
    INTERRUPT = 2  # save and stop: Ctrl-C
    STOP = 3  # save and stop: SIGTERM


class Interrupts(contextlib.AbstractContextManager):
    """Handles signals while the context is open; `poll` returns the same request in all processes.

    Attributes:
      training: whether there is something to save. Until the caller sets it, a signal ends the
        process at once.
      request: what the last `poll` returned.
    """

    def __init__(self, minutes_between_saves: float | None = None):
        self.training = False
        self.request = Request.NONE
        self._save_seconds = 60 * minutes_between_saves if minutes_between_saves else math.inf
        self._signalled = Request.NONE  # by a signal to this process
        self._ctrl_c_pressed = False
        self._saved_at = time.monotonic()
        self._last_vote: jax.Array | None = None
        self._saved_after_vote = False  # so that a vote to save is fulfilled

    def __enter__(self):
        self._hears = threading.current_thread() is threading.main_thread()
        if not self._hears:  # Python lets no other thread handle signals
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._interrupt)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, name="interrupts", daemon=True).start()
        return self

    def __exit__(self, *error):
        if not self._hears:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(self._write)

    def vote_over(self, mesh: Mesh) -> None:
        """Makes `poll` include the other processes' requests, by the devices of a mesh."""
        self._votes = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._greatest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def poll(self) -> Request:
        """Returns the request now; with several processes, the greatest at their previous poll.

        All must call it at the same places. The vote is computed along with training, so that
        nobody waits for it.
        """
        self.request = self._signalled
        if time.monotonic() - self._saved_at > self._save_seconds:
            self.request = max(self.request, Request.SAVE)
        if processes.count() > 1:
            last_vote = self._last_vote
            self._last_vote = self._vote(self.request)
            self.request = Request.NONE if last_vote is None else Request(int(last_vote))
            if self._saved_after_vote and self.request == Request.SAVE:
                self.request = Request.NONE
            self._saved_after_vote = False
        return self.request

    def ask_to_stop(self) -> None:
        """Makes the next `poll` ask to save and stop, as SIGTERM does."""
        self._signalled = Request.STOP

    @property
    def should_stop(self) -> bool:
        """Whether the last `poll` found SIGTERM or Ctrl-C."""
        return self.request > Request.SAVE

    @property
    def wants_save(self) -> bool:
        """Whether the last `poll` found any request: to stop needs a save, too."""
        return self.request > Request.NONE

    def stop_if_requested(self, saved: str) -> None:
        """Raises Stopped where the last `poll` found SIGTERM or Ctrl-C; `saved` says what is."""
        reasons = {Request.STOP: ("SIGTERM", PREEMPTED), Request.INTERRUPT: ("Ctrl-C", INTERRUPTED)}
        if self.should_stop:
            signal_name, code = reasons[self.request]
            raise Stopped(f"{signal_name}: {saved}; the same command goes on", code)

    def saved(self) -> None:
        """Restarts the save timer; all processes call it after the same `poll`."""
        self._saved_at = time.monotonic()
        self._saved_after_vote = True

    def _vote(self, request: Request) -> jax.Array:
        """Starts to compute the greatest request of all processes."""
        local = np.full(jax.local_device_count(), request, np.int32)
        return self._greatest(jax.make_array_from_process_local_data(self._votes, local))

    def _interrupt(self, number: int, frame) -> None:
        """Handles a signal in the main thread: Ctrl-C before training as before this context."""
        if number == signal.SIGTERM or self.training:
            return
        previous = self._previous[number]
        if not callable(previous):
            previous = signal.default_int_handler
        previous(number, frame)

    def _read_signals(self) -> None:
        """Reads signals from the wake-up pipe, in a thread, until the context ends."""
        while True:
            numbers = os.read(self._read, 1)
            if not numbers:
                break
            if numbers[0] == signal.SIGTERM:
                self._on_sigterm()
            if numbers[0] == signal.SIGINT and self.training:
                self._on_ctrl_c()
        os.close(self._read)

    def _on_sigterm(self) -> None:
        if not self.training:
            _exit("SIGTERM before the first step, so nothing was lost", PREEMPTED)
        self._signalled = Request.STOP
        _say("SIGTERM: saving, then stopping")

    def _on_ctrl_c(self) -> None:
        if self._ctrl_c_pressed:
            _exit("Ctrl-C twice", INTERRUPTED)
        self._ctrl_c_pressed = True
        self._signalled = max(self._signalled, Request.INTERRUPT)
        _say("Ctrl-C: saving, then stopping; once more leaves at once")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit(cause: str, code: int) -> None:
    _say(f"stopped: {cause}; the same command goes on from the last checkpoint, if there is one")
    os._exit(code)
