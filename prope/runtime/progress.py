"""Decides where progress is shown as a bar; says that the training step is being compiled."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

from prope.errors import log
from prope.runtime import processes


def has_bars() -> bool:
    """Returns whether the first process shows bars: on a terminal that has a width and a cursor."""
    if not (processes.is_first() and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Logs a line before the context; on a terminal it also shows how long it has taken."""
    log.info(
        "compiling the training step: minutes on a CPU. XLA's 'Very slow compile?' is no error"
    )
    hidden = not has_bars()
    done = threading.Event()
    with tqdm(bar_format="compiling for {elapsed}", leave=False, disable=hidden) as bar:

        def redraw():
            while not done.wait(1):
                bar.refresh()

        thread = threading.Thread(target=redraw, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
