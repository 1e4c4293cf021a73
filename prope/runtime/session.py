"""Surrounds the training loop: joins processes, hears signals, watches for hangs.

`train` opens one session and asks it, between steps, whether to save and whether to stop.
"""

import contextlib

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from prope.errors import INTERRUPTED, PREEMPTED, Stopped, warn_if_unwritten
from prope.runtime import processes
from prope.runtime.files import append_jsonl
from prope.runtime.interrupts import Interrupts, Request
from prope.runtime.startup import Startup
from prope.runtime.watchdog import Watchdog


class Session(contextlib.ExitStack):
    """Connects a training run with its surroundings while the context is open.

    Contexts that are entered by `enter_context` are left, last first, before the session ends; then
    it waits for all processes.
    """

    def __init__(self, config: ConfigDict):
        super().__init__()
        self.startup = Startup()
        self.interrupts = Interrupts(config.checkpoint.every_minutes)
        self.watchdog = Watchdog(config.watchdog_minutes)
        self._num_steps = config.num_steps

    def __enter__(self) -> "Session":
        super().__enter__()
        self.enter_context(self.interrupts)
        self.enter_context(self.watchdog)
        self.enter_context(processes.joined())
        return self

    def attach(self, workdir: epath.Path, mesh: Mesh) -> None:
        """Checks that all see `workdir`, caches compiled programs, polls over `mesh`."""
        processes.check_shared(workdir)
        self.startup.use_cache()
        self.interrupts.vote_over(mesh)
        self._starts = workdir / "starts.jsonl"

    def first_step(self, step: int, metrics) -> None:
        """Waits for the first step and adds this start to starts.jsonl."""
        jax.block_until_ready(metrics)
        if processes.is_first():
            record = self.startup.record(step)
            with warn_if_unwritten(self._starts):
                append_jsonl(self._starts, record)

    def poll(self, progress: str) -> bool:
        """Reports progress to the watchdog; returns False once a stop is asked for.

        All processes call it at the same places.
        """
        self.watchdog.alive(progress)
        return self.interrupts.poll() <= Request.SAVE

    @property
    def wants_save(self) -> bool:
        """Whether the last `poll` found any request: to stop needs a save, too."""
        return self.interrupts.request > Request.NONE

    def stop_if_requested(self, step: int) -> None:
        """Raises Stopped where the last `poll` found SIGTERM or Ctrl-C; `step` is saved."""
        saved = f"step {step} of {self._num_steps} is saved; the same command goes on"
        if self.interrupts.request == Request.STOP:
            raise Stopped(f"SIGTERM: {saved}", PREEMPTED)
        if self.interrupts.request == Request.INTERRUPT:
            raise Stopped(f"Ctrl-C: {saved}", INTERRUPTED)
