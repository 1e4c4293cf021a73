"""Says that the training step is being compiled, which may take minutes."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

from prope.errors import log
from prope.runtime import processes


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Logs a line before the context; on a terminal it also shows how long it has taken."""
    log.info("compiling the training step; on a CPU this takes a minute or two")
    hidden = not (processes.is_first() and sys.stderr.isatty())
    done = threading.Event()
    with tqdm(bar_format="compiling for {elapsed}", leave=False, disable=hidden) as bar:

        def redraw() -> None:
            while not done.wait(1):
                bar.refresh()

        thread = threading.Thread(target=redraw, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
