"""Surrounds the training loop: hears signals, watches for hangs, records the start.

`train` opens one session and asks it, between steps, whether to save and whether to stop.
"""

import contextlib

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from prope.errors import INTERRUPTED, PREEMPTED, Stopped
from prope.runtime import processes
from prope.runtime.files import append_jsonl
from prope.runtime.interrupts import Interrupts, Request
from prope.runtime.startup import Startup
from prope.runtime.watchdog import Watchdog


class Session(contextlib.ExitStack):
    """What a training run exchanges with its surroundings while it runs; its parts are explained in their files.

    Contexts that are entered by `enter_context` are left, last first, before the session ends.
    """

    def __init__(self, config: ConfigDict):
        super().__init__()
        self.startup = Startup()
        self.interrupts = self.enter_context(Interrupts(config.checkpoint.every_minutes))
        self.watchdog = self.enter_context(Watchdog(config.watchdog_minutes))
        self._num_steps = config.num_steps

    def attach(self, workdir: epath.Path, mesh: Mesh) -> None:
        """Checks that all processes see `workdir`, keeps compiled programs there, and polls over `mesh`."""
        processes.check_shared(workdir)
        self.startup.use_cache(workdir)
        self.interrupts.vote_over(mesh)
        self._starts = workdir / "starts.jsonl"

    def first_step(self, step: int, metrics) -> None:
        """Waits for the first step and adds this start to starts.jsonl."""
        jax.block_until_ready(metrics)
        if processes.is_first():
            append_jsonl(self._starts, self.startup.record(step))

    def poll(self, progress: str) -> bool:
        """Reports progress to the watchdog, in all processes at the same places; False once a stop is asked for."""
        self.watchdog.alive(progress)
        return self.interrupts.poll() <= Request.SAVE

    def stop_if_requested(self, step: int) -> None:
        """Raises Stopped where the last `poll` found SIGTERM or Ctrl-C; `step` is saved."""
        if self.interrupts.request > Request.SAVE:
            ctrl_c = self.interrupts.request == Request.INTERRUPT
            signal, code = ("Ctrl-C", INTERRUPTED) if ctrl_c else ("SIGTERM", PREEMPTED)
            raise Stopped(
                f"{signal}: step {step} of {self._num_steps} is saved; the same command goes on",
                code,
            )
