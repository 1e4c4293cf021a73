"""Commands in forks of a process that has imported everything: they start in a moment."""

import contextlib
import gc
import multiprocessing
import os
import pathlib
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import connection

PRELOADED = [
    "support.forks",
    "grain",
    "jinja2",
    "matplotlib.figure",
    "prope.inference.asking",
    "prope.train",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Command:
    """python -m MODULE, running; its output goes to files in `folder`."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        folder: pathlib.Path,
        patch: str = "",
    ):
        """Starts it, after the statements of `patch`."""
        self._stdout = folder / "stdout"
        self._stderr = folder / "stderr"
        files = [str(self._stdout), str(self._stderr)]
        inputs = (module, arguments, environment, files, patch)
        self._process = _context.Process(target=_run, args=inputs)
        self._process.start()

    def wait(self, seconds: float = 600) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) when it has ended."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"still running after {seconds} s:\n{self.stderr}")
        return self._process.exitcode, self._stdout.read_text(), self.stderr

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return self._stderr.read_text() if self._stderr.exists() else ""

    def wait_for(self, text: str) -> None:
        """Waits until it has said something that this pattern finds."""
        end = time.monotonic() + 300
        while not re.search(text, self.stderr):
            if time.monotonic() > end or not self._process.is_alive():
                raise TimeoutError(f"{text} was not said:\n{self.stderr}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is still there."""
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join()


def _settings(environment: dict[str, str]) -> dict:
    """Returns what JAX reads of the environment when it is imported."""
    get = environment.get
    return {
        "jax_platforms": get("JAX_PLATFORMS"),
        "jax_compilation_cache_dir": get("JAX_COMPILATION_CACHE_DIR"),
        "jax_enable_compilation_cache": get("JAX_ENABLE_COMPILATION_CACHE") != "false",
        "jax_disable_most_optimizations": get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true",
        "jax_persistent_cache_min_compile_time_secs": float(
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
        ),
    }


def _run(
    module: str, arguments: list[str], environment: dict[str, str], files: list[str], patch: str
) -> None:
    import jax

    assert threading.active_count() == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    for target, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    for name, value in _settings(environment).items():
        jax.config.update(name, value)
    gc.freeze()  # else each collection goes through all that was imported
    warnings.filterwarnings("error", category=DeprecationWarning, module=r"prope\.|__main__$")
    sys.argv = [module, *arguments]
    exec(patch, {})
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# A program `python` of which the commands of prope are forks; others are Python's.
CLIENT = """#!{python}
import os, sys
if sys.argv[1:2] != ["-m"] or not sys.argv[2].startswith("prope."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send((sys.argv[2], sys.argv[3:], dict(os.environ), os.getcwd()))
    code, stdout, stderr = server.recv()
sys.stdout.write(stdout)
sys.stderr.write(stderr)
sys.exit(code)
"""


@contextlib.contextmanager
def forking_python():
    """Runs the commands of the program, whose text is yielded, in forks."""
    with connection.Listener(family="AF_UNIX") as listener:
        server = threading.Thread(target=_serve, args=[listener])
        server.start()
        try:
            yield CLIENT.format(python=sys.executable, address=listener.address)
        finally:
            with connection.Client(listener.address) as client:
                client.send(None)
            server.join()


def _serve(listener: connection.Listener) -> None:
    while True:
        with listener.accept() as client, tempfile.TemporaryDirectory() as folder:
            request = client.recv()
            if request is None:
                return
            module, arguments, environment, cwd = request
            patch = f"import os\nos.chdir({cwd!r})"
            command = Command(module, arguments, environment, pathlib.Path(folder), patch)
            client.send(command.wait(1800))
