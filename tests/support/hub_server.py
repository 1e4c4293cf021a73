"""A small server that answers as the Hugging Face Hub does, with one model or dataset."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """The files of `folder`; a file's etag is its hash, as that of a large file there."""

    protocol_version = "HTTP/1.1"
    kind: str  # models or datasets
    name: str
    folder: pathlib.Path
    asked: list[tuple[str, str]]
    failing: dict[str, tuple[int, str]]  # by the path's beginning: (status, X-Error-Code)

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append((self.command, path))
        for start, (status, error) in self.failing.items():
            if path.startswith(start):
                return self.answer(status, b"", **{"X-Error-Code": error})
        api = f"/api/{self.kind}/{self.name}"
        files = f"{'/datasets' if self.kind == 'datasets' else ''}/{self.name}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            return self.answer(200, json.dumps({"id": self.name, "sha": COMMIT, "siblings": []}))
        if path.startswith(f"{api}/tree/{COMMIT}"):
            below = self.folder / path.partition(f"tree/{COMMIT}")[2].strip("/")
            if not below.is_dir():
                return self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
            is_deep = "recursive=true" in self.path.lower()
            entries = map(self.entry, below.rglob("*") if is_deep else below.iterdir())
            return self.answer(200, json.dumps(list(entries)))
        if path.startswith(files):
            data = (self.folder / path.removeprefix(files)).read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            return self.answer(200, data, **{"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        return self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

    def entry(self, path):
        data = path.read_bytes() if path.is_file() else b""
        entry = {"path": path.relative_to(self.folder).as_posix()}
        entry |= {"size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        return entry | {"type": "file" if path.is_file() else "directory"}

    def answer(self, status, data, **headers):
        data = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextlib.contextmanager
def serve(kind, name, folder, cache, monkeypatch):
    """Has huggingface_hub ask such a server, with an empty cache; yields the handler."""
    from huggingface_hub import HfFileSystem, constants

    fields = {"kind": kind, "name": name, "folder": folder, "asked": [], "failing": {}}
    handler = type("Served", (Hub,), fields)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, args=[0.01], daemon=True).start()
        handler.endpoint = f"http://127.0.0.1:{served.server_port}"
        urls = f"{handler.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", handler.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        HfFileSystem.clear_instance_cache()
        yield handler
        HfFileSystem.clear_instance_cache()
        served.shutdown()
