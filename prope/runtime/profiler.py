"""Traces a range of training steps with jax.profiler, for xprof and Perfetto."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
from etils import epath

from prope.errors import first_line, is_storage_error, log
from prope.runtime import processes
from prope.runtime.files import upload


class Profiler(AbstractContextManager):
    """Traces the steps first .. last in the first process and writes the trace to W/profile.

    jax.profiler writes to a local folder, whose files are copied to W, which may be a URL. Storage
    that fails then ends no run.
    """

    def __init__(
        self,
        steps: Sequence[int],
        workdir: epath.PathLike,
        pause: Callable[[], AbstractContextManager],
    ):
        """`steps` is config.profile; time within `pause` is not counted as training."""
        self._steps = range(0)
        if steps and processes.is_first():
            first, last = steps
            self._steps = range(first, last + 1)
        self._target = epath.Path(workdir) / "profile"
        self._pause = pause
        self._traced = []  # steps in the open trace

    def run(self, step: int, update: Callable, *arguments):
        """Returns update(*arguments); names the step in the trace, if it is to be traced."""
        if step not in self._steps:
            return update(*arguments)
        if not self._traced:
            jax.block_until_ready(arguments)  # earlier steps stay out of the trace
            self._scratch = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(self._scratch.name)
        self._traced.append(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            result = update(*arguments)
        if step == self._steps[-1]:
            jax.block_until_ready(result)
            self._write()
        return result

    def _write(self) -> None:
        """Ends the trace and copies it to W."""
        first = self._traced[0]
        last = self._traced[-1]
        self._traced = []
        with self._pause(), self._scratch as folder:
            jax.profiler.stop_trace()
            try:
                upload(folder, self._target)
            except Exception as error:
                if not is_storage_error(error):
                    raise
                log.warning("%s: the trace cannot be written: %s", self._target, first_line(error))
            else:
                log.info("steps %d to %d are traced: %s", first, last, self._target)

    def __exit__(self, *error):
        """Writes the trace of a range that the end of the run, or an error, has cut short."""
        if self._traced:
            self._write()
