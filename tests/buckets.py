"""A Cloud Storage server on this machine, over HTTP: gcp-storage-emulator.

Here it also honours `ifGenerationMatch` and tells generations, for TensorStore's conditional writes; moves objects, as
gcsfs does; gives the last n bytes of one; and fails while it is told to.
"""

import contextlib
import functools
import http
import json
import os
import pathlib
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request

_FAILING = (
    "failing"  # a file in the server's folder: while it is there, every answer has the status in it
)


class Server:
    """The server, in a process of its own; `folder` is for its log."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
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
            command = [sys.executable, __file__, str(self._folder), str(self._port)]
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

    @contextlib.contextmanager
    def failing(self, status: int = 503):
        """Has it answer everything with this status."""
        (self._folder / _FAILING).write_text(str(status))
        try:
            yield
        finally:
            (self._folder / _FAILING).unlink()


def _exit_with(parent: int) -> None:
    """Exits when the tests are gone, killed ones too."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _serve(folder: pathlib.Path, port: int) -> None:
    from gcp_storage_emulator import server
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    socketserver.StreamRequestHandler.disable_nagle_algorithm = True  # else, 40 ms an answer
    one_at_a_time = threading.Lock()

    def generation(request, storage) -> str:
        name = request.params.get("object_id") or request.query["name"][0]
        try:
            return storage.get_file_obj(request.params["bucket_name"], name)["generation"]
        except NotFound:
            return "0"

    class Range:
        """The storage, with a list of the objects from `start` on and before `end`."""

        def __init__(self, storage, start: str, end: str):
            self._storage, self._start, self._end = storage, start, end

        def __getattr__(self, name: str):
            return getattr(self._storage, name)

        def get_file_list(self, *args, **kwargs):
            files, prefixes = self._storage.get_file_list(*args, **kwargs)
            return [
                f for f in files if self._start <= f["name"] < (self._end or "\U0010ffff")
            ], prefixes

    def wrap(handler):
        @functools.wraps(handler)
        def handle(request, response, storage, *args, **kwargs):
            with contextlib.suppress(FileNotFoundError):
                response.status = http.HTTPStatus(int((folder / _FAILING).read_text()))
                return
            with one_at_a_time:
                wanted = request.query.get("ifGenerationMatch")
                if wanted and wanted[0] != generation(request, storage):
                    response.status = http.HTTPStatus.PRECONDITION_FAILED
                    return
                if (
                    handler in (objects.get, objects.download)
                    and (found := generation(request, storage)) != "0"
                ):
                    response["X-Goog-Generation"] = found
                suffix = re.fullmatch(r"bytes=-(\d+)", request.get_header("range", ""))
                if handler in (objects.get, objects.download) and suffix:
                    size = len(
                        storage.get_file(request.params["bucket_name"], request.params["object_id"])
                    )
                    headers = request._request_handler.headers
                    headers.replace_header("range", f"bytes={max(0, size - int(suffix[1]))}-")
                if handler is objects.ls:
                    storage = Range(
                        storage,
                        *(
                            request.query.get(name, [""])[0]
                            for name in ("startOffset", "endOffset")
                        ),
                    )
                handler(request, response, storage, *args, **kwargs)

        return handle

    read_data = server._read_data

    def read_whole(handler, query):
        """Reads the two parts of an upload; the emulator drops a carriage return at the end of the second."""
        content_type = handler.headers.get("Content-Type") or ""
        if not content_type.startswith("multipart/related"):
            return read_data(handler, query)
        raw = server._decode_raw_data(server._read_raw_data(handler), handler)
        border = b"--" + re.search(r'boundary="?([^";]+)', content_type)[1].encode()
        newline = b"\r\n" if raw.startswith(border + b"\r") else b"\n"
        _, meta, content, _ = (newline + raw).split(newline + border)
        head, _, body = content.partition(2 * newline)
        kind = re.search(rb"(?i)content-type: *([^\r\n;]+)", head)
        meta = json.loads(meta.partition(2 * newline)[2])
        return {
            "meta": meta,
            "content": body,
            "content-type": kind[1].decode() if kind else "text/plain",
        }

    server._read_data = read_whole

    def move(request, response, storage, *args, **kwargs):
        request.params["dest_bucket_name"] = request.params["bucket_name"]
        objects.copy(request, response, storage)
        objects.delete(request, response, storage)

    path = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)/moveTo/o/(?P<dest_object_id>.*[^/]+)$"
    server.HANDLERS = ((path, {server.POST: move}), *server.HANDLERS)
    for _, handlers in server.HANDLERS:
        handlers.update({method: wrap(handler) for method, handler in handlers.items()})
    server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket").run()


if __name__ == "__main__":
    threading.Thread(target=_exit_with, args=[os.getppid()], daemon=True).start()
    os.chdir(sys.argv[1])
    _serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
