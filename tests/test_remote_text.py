"""Text in a bucket, on a real server: the same store as from disk, whatever happens to the server meanwhile."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT
from etils import epath
from makers import WIKIPEDIA as NAME
from makers import articles, free_port, write_text, write_tfds
from makers import data_config as settings
from makers import data_refused as refused
from makers import hash_files as digest

from prope.data import view
from prope.data.sources import files, tfds
from prope.data.sources.find import find_source
from prope.data.store import build as prepare
from prope.data.store import pack
from prope.errors import RunFailed, UsageError
from prope.runtime import files as places
from prope.runtime.files import upload


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "local"))
    return tmp_path / "local"


def write_both(tmp_path, bucket, kind, texts):
    """Writes texts to a folder and to the bucket; (config of the folder, config of the bucket)."""
    if kind == "files":
        write_text(tmp_path / kind, texts)
    else:
        write_tfds(tmp_path / kind, kind, texts)
    upload(tmp_path / kind, epath.Path(bucket) / kind)
    dataset = "files" if kind == "files" else NAME
    return (
        settings(tmp_path / "there", dataset, tmp_path / kind),
        settings(tmp_path / "here", dataset, f"{bucket}/{kind}"),
    )


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_a_bucket_gives_the_same_store_as_a_folder(tmp_path, bucket, local, kind, monkeypatch):
    for module in (files, tfds):
        monkeypatch.setattr(module, "chunk_bytes", lambda total: 7_000)
    there, here = write_both(tmp_path, bucket, kind, articles())
    assert len(find_source(here).chunks) > 4
    assert digest(prepare.open_store(there, 260).path) == digest(prepare.open_store(here, 260).path)
    assert not [path for path in local.rglob("*") if path.is_file()], (
        "nothing is left of the copies"
    )
    here.cache_dir = f"{bucket}/stores"
    places_of_store = places.files_below(epath.Path(prepare.open_store(here, 260).path))
    assert len(places_of_store) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_workers_share_the_shards_of_a_bucket(tmp_path, bucket, local, kind):
    there, here = write_both(tmp_path, bucket, kind, articles(20_000))
    here.num_workers = 3
    seen, done = [], threading.Event()

    def watch():
        while not done.wait(0.02):
            seen.append(copies(local))

    thread = threading.Thread(target=watch)
    thread.start()
    made = {}
    store = prepare.open_store(here, 260, made)
    done.set()
    thread.join()
    assert made["workers"] == 3 and digest(store.path) == digest(
        prepare.open_store(there, 260).path
    )
    assert 1 <= max(map(len, seen)) <= 3 and not copies(local), "one for each worker"


def copies(folder) -> set:
    """The files without a name in a folder that a process below this one holds."""
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            links = [
                (os.readlink(link), os.stat(link).st_ino) for link in (process / "fd").iterdir()
            ]
        except OSError:
            continue
        found |= {
            inode
            for target, inode in links
            if target.startswith(str(folder)) and target.endswith("(deleted)")
        }
    return found


def test_a_damaged_copy_of_a_shard_is_never_read(tmp_path, bucket, local, monkeypatch):
    _, here = write_both(tmp_path, bucket, "tfrecord", articles())
    monkeypatch.setattr(places, "_PAUSES", (0, 0))
    source, opened = find_source(here), []
    real = epath.Path(bucket)._backend.fs(bucket).__class__.open

    def cut(system, path, *arguments, **options):
        file = real(system, path, *arguments, **options)
        if len(opened) < limit and "-of-" in path:
            opened.append(path)
            file.seek(
                1000 * (len(opened) % 2) or file.size
            )  # its beginning is missing, or all of it
        return file

    monkeypatch.setattr(epath.Path(bucket)._backend.fs(bucket).__class__, "open", cut)
    limit = 2
    assert list(source.documents()) == [text.encode() for text in articles()] and len(opened) == 2
    limit = 100
    tfds._copies.popitem()[1].close()
    with pytest.raises(
        RunFailed, match="wikipedia-train.tfrecord-00000.*: its copy is not what the bucket lists"
    ):
        list(source.documents())


def test_text_and_tokenizer_in_a_bucket(tmp_path, bucket, local, sentencepiece_model):
    there, here = write_both(tmp_path, bucket, "files", articles())
    (epath.Path(bucket) / "sp.model").write_bytes(pathlib.Path(sentencepiece_model).read_bytes())
    there.tokenizer, here.tokenizer = sentencepiece_model, f"{bucket}/sp.model"
    assert digest(prepare.open_store(there, 300).path) == digest(prepare.open_store(here, 300).path)
    here.tokenizer = f"{bucket}/other.model"
    refused(here, f"config.data.tokenizer={bucket}/other.model: cannot be read", 300)


def test_large_objects_are_hashed_once(tmp_path, bucket, local, monkeypatch):
    monkeypatch.setattr(files, "_ALWAYS_HASHED", 0)
    real, hashed = files.hash_file, []
    monkeypatch.setattr(files, "hash_file", lambda path: hashed.append(path) or real(path))
    _, here = write_both(tmp_path, bucket, "files", articles())
    first = find_source(here).identity
    assert find_source(here).identity == first and len(hashed) == 3
    changed = epath.Path(bucket) / "files" / "a.txt"
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    assert find_source(here).identity != first and hashed[3:] == [changed]


def test_what_is_not_in_a_bucket(tmp_path, bucket, local):
    see = "gcloud storage ls"
    refused(
        settings(tmp_path, NAME, "gs://other-bucket/x"),
        f"gs://other-bucket/x: there is no such folder; .*{see}",
    )
    refused(
        settings(tmp_path, "files", f"{bucket}/none"),
        f"{bucket}/none: there is no such folder; .*{see} {bucket}",
    )
    _, here = write_both(tmp_path, bucket, "tfrecord", articles())
    here.dataset = "lm1b"
    refused(here, f"no dataset lm1b in it; .*{see} {bucket}")
    here.dataset = NAME
    shard = next(epath.Path(bucket).glob("tfrecord/wikipedia/*/*/*-00001-of-00002"))
    source = find_source(here)
    shard.unlink()
    refused(
        here,
        "is incomplete: 1 of 2 shards are missing, first wikipedia-train.tfrecord-00001.*gcloud storage ls",
    )
    with pytest.raises(
        prepare.UsageError,
        match="is incomplete: wikipedia-train.tfrecord-00001-of-00002 is missing",
    ):
        list(source.documents())


DENIES = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"error": {"code": int(sys.argv[2]), "message": "Anonymous caller does not have access"}})
        self.send_response(int(sys.argv[2]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("code", [401, 403])
def test_a_bucket_that_may_not_be_read(tmp_path, run_command, code):
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", DENIES, str(port), str(code)], stderr=subprocess.DEVNULL
    ) as server:
        try:
            outcome = run_command(
                "prope.data.prepare",
                f"--config={ROOT}/configs/quickstart.py:tiny",
                f"--config.data.dataset={NAME}",
                "--config.data.data_dir=gs://private/datasets",
                STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{port}",
                GOOGLE_AUTH_TOKEN_FOR_TESTING="any",
                GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
            )
        finally:
            server.kill()
    assert (
        "gs://private/datasets" in outcome.error
        and "gcloud auth application-default login" in outcome.error
    )
    assert "gcloud storage ls gs://private" in outcome.error and outcome.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_server_that_fails_for_a_while_is_waited_for(
    tmp_path, bucket, local, storage, start_command
):
    there, _ = write_both(tmp_path, bucket, "array_record", articles(3000))
    expected = digest(prepare.open_store(there, 260).path)
    command = start_command(
        "prope.data.prepare",
        f"--config={ROOT}/configs/quickstart.py:tiny",
        f"--config.data.dataset={NAME}",
        f"--config.data.data_dir={bucket}/array_record",
        f"--config.data.cache_dir={tmp_path}/again",
        "--config.data.num_workers=2",
        **storage.environment,
    )
    with storage.failing():
        time.sleep(20)
    code, stdout, stderr = command.wait()
    assert code == 0, stderr
    assert digest(json.loads(stdout.splitlines()[-1])["store"]) == expected


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="fills a disk of 64 KB: mounting it needs root")
def test_a_scratch_disk_that_is_full(tmp_path, bucket, local):
    local.mkdir()
    _, here = write_both(tmp_path, bucket, "tfrecord", articles(3000))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(local)], check=True)
    try:
        with pytest.raises(
            RunFailed, match=f"PROPE_CACHE={local}: the disk is full; it needs room for a shard"
        ):
            prepare.open_store(here, 260)
    finally:
        subprocess.run(["umount", str(local)], check=True)


def test_a_local_disk_that_is_full(tmp_path, bucket, local, monkeypatch):
    _, here = write_both(tmp_path, bucket, "files", articles())
    here.cache_dir = f"{bucket}/stores"

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack, "write_atomic", no_space)
    refused(
        here, f"PROPE_CACHE={local}: the disk is full; .* Finished chunks are kept: free some space"
    )


def test_a_plot_that_cannot_be_written_to_a_bucket(bucket, storage):
    def write(path):
        view.draw_lengths({"a": np.arange(1, 300)}, 64, path)

    with pytest.raises(
        UsageError, match="^--plot=gs://other/a.png: cannot be written: No such file or directory$"
    ):
        write("gs://other/a.png")
    with (
        storage.failing(403),
        pytest.raises(UsageError, match=f"^--plot={bucket}/a.png: cannot be written: Forbidden"),
    ):
        write(f"{bucket}/a.png")


@pytest.mark.slow
def test_tokenizers_and_plots_are_written_to_a_bucket(bucket, storage, run_command):
    config = f"--config={ROOT}/configs/quickstart.py:tiny"
    plot = run_command(
        "prope.data.inspect", config, f"--plot={bucket}/lengths.png", **storage.environment
    )
    assert plot.code == 0 and epath.Path(f"{bucket}/lengths.png").read_bytes().startswith(
        b"\x89PNG"
    ), plot.stderr
    learned = [config, "--vocab_size=400", "--sample_bytes=100000", f"--output={bucket}/docs.model"]
    trained = run_command("prope.data.train_tokenizer", *learned, **storage.environment)
    assert trained.code == 0 and trained.result["model"] == f"{bucket}/docs.model", trained.stderr
    model = "--config.model.vocab_size=400", f"--config.data.tokenizer={bucket}/docs.model"
    shown = run_command("prope.data.inspect", config, *model, **storage.environment)
    assert shown.code == 0, shown.stderr
