"""A Cloud Storage server over HTTP, gcp-storage-emulator, which `buckets.py` starts.

    python tests/support/bucket_server.py FOLDER PORT

Here it also honours `ifGenerationMatch` and tells generations, for TensorStore's conditional
writes; moves objects, as gcsfs does; gives the last n bytes of one; fails while it is told to; and
writes down every request.
"""

import contextlib
import functools
import http
import json
import os
import pathlib
import re
import socketserver
import sys
import threading
import time

from buckets import FAILING, REQUESTS
from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

MOVE = (
    r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.*[^/]+)"
    r"/moveTo/o/(?P<dest_object_id>.*[^/]+)$"
)
LAST = "\U0010ffff"  # a name after all others
one_at_a_time = threading.Lock()
read_data = server._read_data


class Range:
    """The storage, with a list of the objects from `start` on and before `end`."""

    def __init__(self, storage, start: str, end: str):
        self._storage = storage
        self._start = start
        self._end = end or LAST

    def __getattr__(self, name: str):
        return getattr(self._storage, name)

    def get_file_list(self, *args, **kwargs):
        files, prefixes = self._storage.get_file_list(*args, **kwargs)
        files = [file for file in files if self._start <= file["name"] < self._end]
        return files, prefixes


def generation(request, storage) -> str:
    """Returns the generation of the object that a request names; 0 where there is none."""
    name = request.params.get("object_id") or request.query["name"][0]
    try:
        return storage.get_file_obj(request.params["bucket_name"], name)["generation"]
    except NotFound:
        return "0"


def count_from_start(request, storage) -> None:
    """Replaces the range of the last n bytes of an object by one from its start."""
    suffix = re.fullmatch(r"bytes=-(\d+)", request.get_header("range", ""))
    if suffix is None:
        return
    content = storage.get_file(request.params["bucket_name"], request.params["object_id"])
    start = max(0, len(content) - int(suffix[1]))
    request._request_handler.headers.replace_header("range", f"bytes={start}-")


def wrap(handler, folder: pathlib.Path):
    """Wraps an emulator's handler with what the emulator lacks."""
    reads = handler in (objects.get, objects.download)

    @functools.wraps(handler)
    def handle(request, response, storage, *args, **kwargs):
        with open(folder / REQUESTS, "a") as log:
            client = request.get_header("authorization", "gcsfs")
            log.write(f"{client} {request.method} {request._path}\n")
        with contextlib.suppress(FileNotFoundError):
            status = (folder / FAILING).read_text()
            response.status = http.HTTPStatus(int(status))
            return
        with one_at_a_time:
            (wanted,) = request.query.get("ifGenerationMatch", [None])
            if reads:
                current = generation(request, storage)
                if current == "0":
                    wanted = None  # what is not there is answered by 404
                else:
                    response["X-Goog-Generation"] = current
                    count_from_start(request, storage)
            if wanted and wanted != generation(request, storage):
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                return
            if handler is objects.ls:
                (start,) = request.query.get("startOffset", [""])
                (end,) = request.query.get("endOffset", [""])
                storage = Range(storage, start, end)
            handler(request, response, storage, *args, **kwargs)

    return handle


def read_whole(handler, query):
    """Reads both halves of an upload; the emulator drops a carriage return that ends the second."""
    content_type = handler.headers.get("Content-Type") or ""
    if not content_type.startswith("multipart/related"):
        return read_data(handler, query)
    raw = server._decode_raw_data(server._read_raw_data(handler), handler)
    boundary = re.search(r'boundary="?([^";]+)', content_type)[1]
    border = b"--" + boundary.encode()
    newline = b"\r\n" if raw.startswith(border + b"\r") else b"\n"
    _, meta, content, _ = (newline + raw).split(newline + border)
    _, _, meta = meta.partition(2 * newline)
    head, _, body = content.partition(2 * newline)
    kind = re.search(rb"(?i)content-type: *([^\r\n;]+)", head)
    return {
        "meta": json.loads(meta),
        "content": body,
        "content-type": kind[1].decode() if kind else "text/plain",
    }


def move(request, response, storage, *args, **kwargs):
    """Moves an object within its bucket."""
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    objects.delete(request, response, storage)


def exit_with(parent: int) -> None:
    """Exits when the tests are gone, killed ones too."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(folder: pathlib.Path, port: int) -> None:
    """Serves until it is killed."""
    socketserver.StreamRequestHandler.disable_nagle_algorithm = True  # else, 40 ms an answer
    server._read_data = read_whole
    server.HANDLERS = ((MOVE, {server.POST: move}), *server.HANDLERS)
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            handlers[method] = wrap(handler, folder)
    server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket").run()


if __name__ == "__main__":
    threading.Thread(target=exit_with, args=[os.getppid()], daemon=True).start()
    os.chdir(sys.argv[1])
    serve(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
