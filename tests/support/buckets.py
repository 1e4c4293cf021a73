"""Starts and stops a Cloud Storage server on this machine: the program `bucket_server.py`."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

# A file in the server's folder: while it is there, every answer has the status in it.
FAILING = "failing"
REQUESTS = "requests"  # a line for each: TensorStore's token or gcsfs, method, path
PROGRAM = pathlib.Path(__file__).with_name("bucket_server.py")


class Server:
    """The server, in a process of its own; `folder` is for its log."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.log = folder / REQUESTS
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{self._port}"
        self.environment = {  # which TensorStore and gcsfs read
            "TENSORSTORE_GCS_HTTP_URL": self._url,
            "STORAGE_EMULATOR_HOST": self._url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        self.start()

    def start(self) -> None:
        with open(self._folder / "log", "a") as log:
            command = [sys.executable, str(PROGRAM), str(self._folder), str(self._port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self._url}/storage/v1/b/bucket", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < end and self._process.poll() is None, (
                    self._folder / "log"
                ).read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[str]:
        """The requests since the last call: TensorStore's token or gcsfs, method and path."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return lines

    @contextlib.contextmanager
    def failing(self, status: int = 503):
        """Has it answer everything with this status."""
        (self._folder / FAILING).write_text(str(status))
        try:
            yield
        finally:
            (self._folder / FAILING).unlink()
