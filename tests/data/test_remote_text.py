"""Text in a bucket, on a real server: the store of a folder, whatever happens to the server."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest
from etils import epath
from support.commands import ROOT
from support.processes import free_port
from support.text import WIKIPEDIA as NAME
from support.text import articles, data_config, write_text, write_tfds
from support.text import data_refused as refused
from support.text import hash_files as digest

from prope.data import view
from prope.data.sources import files, tfds
from prope.data.sources.find import find_source
from prope.data.store import build, pack
from prope.errors import RunFailed, UsageError
from prope.runtime import files as places

TINY = f"--config={ROOT}/configs/quickstart.py:tiny"


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "local"))
    return tmp_path / "local"


def write_both(tmp_path, bucket, kind, texts):
    """Writes texts to a folder and to the bucket; (config of the folder, config of the bucket)."""
    folder = tmp_path / kind
    if kind == "files":
        write_text(folder, texts)
    else:
        write_tfds(folder, kind, texts)
    places.upload(folder, epath.Path(bucket) / kind)
    dataset = "files" if kind == "files" else NAME
    there = data_config(tmp_path / "there", dataset, folder)
    here = data_config(tmp_path / "here", dataset, f"{bucket}/{kind}")
    return there, here


def assert_same_store(config, other, vocab_size=260):
    stores = [build.open_store(data, vocab_size) for data in (config, other)]
    assert digest(stores[0].path) == digest(stores[1].path)


def shard_bytes(folder):
    """What the shards below a folder hold, without what fsspec and the locks keep beside them."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    others = (".json", ".lock", "cache", "lock")
    return sorted(path.read_bytes() for path in paths if not path.name.endswith(others))


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_a_bucket_gives_the_same_store_as_a_folder(tmp_path, bucket, local, kind, monkeypatch):
    for module in (files, tfds):
        monkeypatch.setattr(module, "chunk_bytes", lambda total: 7_000)
    there, here = write_both(tmp_path, bucket, kind, articles())
    assert len(find_source(here).chunks) > 4
    assert_same_store(there, here)
    copies = [] if kind == "files" else shard_bytes(tmp_path / kind)
    assert shard_bytes(local) == copies, "nothing else is left"
    here.cache_dir = f"{bucket}/stores"
    store = build.open_store(here, 260)
    assert len(places.files_below(epath.Path(store.path))) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_workers_share_the_copies_of_shards(tmp_path, bucket, local, kind):
    there, here = write_both(tmp_path, bucket, kind, articles(20_000))
    here.num_workers = 3
    made = {}
    build.open_store(here, 260, made)
    assert made["workers"] == 3
    assert_same_store(there, here)
    assert shard_bytes(local) == shard_bytes(tmp_path / kind)


def test_a_copy_of_a_shard_is_read_again_only_if_it_is_whole(tmp_path, bucket, local, monkeypatch):
    _, here = write_both(tmp_path, bucket, "tfrecord", articles())
    monkeypatch.setattr(places, "_PAUSES", (0, 0))
    system = type(fsspec.core.url_to_fs(bucket)[0])
    download = system._get_file
    downloads = []
    fails = True

    async def get_file(system, url, path, **options):
        downloads.append(url)
        await download(system, url, path, **options)
        if fails:
            os.truncate(path, 1000)
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    monkeypatch.setattr(system, "_get_file", get_file)
    shard = "wikipedia-train.tfrecord-00000-of-00002"
    with pytest.raises(RunFailed, match=f"{shard}: cannot be read: Connection reset by peer"):
        list(find_source(here).documents())
    assert len(downloads) == 3
    assert [len(data) for data in shard_bytes(local)] == [1000]
    fails = False

    def read_new_copies():
        """Reads all documents; returns how many shards are downloaded."""
        downloads.clear()
        assert list(find_source(here).documents()) == [text.encode() for text in texts]
        return len(downloads)

    texts = articles()
    assert read_new_copies() == 2
    assert read_new_copies() == 0
    whole = shard_bytes(tmp_path / "tfrecord")
    copies = [p for p in local.rglob("*") if p.is_file() and p.read_bytes() in whole]
    first, second = sorted(copies)
    first.write_bytes(first.read_bytes()[:-100])  # as after a loss of power
    second.unlink()
    assert read_new_copies() == 2
    assert shard_bytes(local) == whole
    texts = [text.swapcase() for text in articles()]
    write_tfds(tmp_path / "other", "tfrecord", texts)
    places.upload(tmp_path / "other", epath.Path(bucket) / "tfrecord")
    assert read_new_copies() == 2


def test_text_and_tokenizer_in_a_bucket(tmp_path, bucket, local, sentencepiece_model):
    there, here = write_both(tmp_path, bucket, "files", articles())
    model = epath.Path(bucket) / "sp.model"
    model.write_bytes(pathlib.Path(sentencepiece_model).read_bytes())
    there.tokenizer = sentencepiece_model
    here.tokenizer = str(model)
    assert_same_store(there, here, 300)
    here.tokenizer = f"{bucket}/other.model"
    refused(here, f"config.data.tokenizer={bucket}/other.model: cannot be read", 300)
    model.copy(epath.Path(bucket) / "files" / "tokenizer.model")
    here.tokenizer = f"{bucket}/files/"
    assert_same_store(there, here, 300)
    first = find_source(here).identity
    assert first == find_source(there).identity
    changed = epath.Path(bucket) / "files" / "a.txt"
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    assert find_source(here).identity != first


def test_what_is_not_in_a_bucket(tmp_path, bucket, local):
    see = "gcloud storage ls"
    nowhere = "gs://other-bucket/x"
    refused(data_config(tmp_path, NAME, nowhere), f"{nowhere}: there is no such folder; .*{see}")
    none = f"{bucket}/none"
    refused(
        data_config(tmp_path, "files", none), f"{none}: there is no such folder; .*{see} {bucket}"
    )
    _, here = write_both(tmp_path, bucket, "tfrecord", articles())
    here.dataset = "lm1b"
    refused(here, f"no dataset lm1b in it; .*{see} {bucket}")
    here.dataset = NAME
    source = find_source(here)
    name = "wikipedia-train.tfrecord-00001-of-00002"
    (shard,) = epath.Path(bucket).glob(f"tfrecord/wikipedia/*/*/{name}")
    shard.unlink()
    refused(here, f"is incomplete: 1 of 2 shards are missing, first {name}.*{see}")
    with pytest.raises(UsageError, match=f"is incomplete: {name} is missing"):
        list(source.documents())


DENIES = """
import http.server, json, sys
port, code = map(int, sys.argv[1:])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        error = {"code": code, "message": "Anonymous caller does not have access"}
        body = json.dumps({"error": error})
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize("code", [401, pytest.param(403, marks=pytest.mark.slow)])
def test_a_bucket_that_may_not_be_read(tmp_path, run_command, code):
    port = free_port()
    server = [sys.executable, "-c", DENIES, str(port), str(code)]
    with subprocess.Popen(server, stderr=subprocess.DEVNULL) as server:
        try:
            outcome = run_command(
                "prope.data.prepare",
                TINY,
                f"--config.data.dataset={NAME}",
                "--config.data.data_dir=gs://private/datasets",
                STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{port}",
                GOOGLE_AUTH_TOKEN_FOR_TESTING="any",
                GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
            )
        finally:
            server.kill()
    assert "gs://private/datasets" in outcome.error
    assert "gcloud auth application-default login" in outcome.error
    assert "gcloud storage ls gs://private" in outcome.error
    assert outcome.stderr.count("trying again in") == outcome.stderr.count("\n") - 1 == 3


@pytest.mark.slow
def test_a_server_that_fails_for_a_while_is_waited_for(
    tmp_path, bucket, local, storage, start_command
):
    there, _ = write_both(tmp_path, bucket, "array_record", articles(3000))
    expected = digest(build.open_store(there, 260).path)
    command = start_command(
        "prope.data.prepare",
        TINY,
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
    result = json.loads(stdout.splitlines()[-1])
    assert digest(result["store"]) == expected


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="fills a disk of 64 KB: mounting it needs root")
def test_a_disk_too_small_for_copies(tmp_path, bucket, local):
    local.mkdir()
    _, here = write_both(tmp_path, bucket, "tfrecord", articles(3000))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(local)], check=True)
    full = f"PROPE_CACHE={local}: the disk is full; it needs room for a copy of the dataset"
    try:
        with pytest.raises(RunFailed, match=full):
            build.open_store(here, 260)
    finally:
        subprocess.run(["umount", str(local)], check=True)


def test_a_local_disk_that_is_full(tmp_path, bucket, local, monkeypatch):
    _, here = write_both(tmp_path, bucket, "files", articles())
    here.cache_dir = f"{bucket}/stores"

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack, "write_atomic", no_space)
    kept = "Finished chunks are kept: free some space"
    refused(here, f"PROPE_CACHE={local}: the disk is full; .* {kept}")


def test_a_plot_that_cannot_be_written_to_a_bucket(bucket, storage):
    def refused_plot(path, reason):
        with pytest.raises(UsageError, match=f"^--plot={path}: cannot be written: {reason}"):
            view.draw_lengths({"a": np.arange(1, 300)}, 64, path)

    refused_plot("gs://other/a.png", "No such file or directory$")
    with storage.failing(403):
        refused_plot(f"{bucket}/a.png", "Forbidden")


@pytest.mark.slow
def test_tokenizers_and_plots_are_written_to_a_bucket(bucket, storage, run_command):
    def run(module, *flags):
        outcome = run_command(f"prope.data.{module}", TINY, *flags, **storage.environment)
        assert outcome.code == 0, outcome.stderr
        return outcome.result

    run("inspect", f"--plot={bucket}/lengths.png")
    plot = epath.Path(f"{bucket}/lengths.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    model = f"{bucket}/docs.model"
    flags = ["--vocab_size=400", "--sample_bytes=100000", f"--output={model}"]
    assert run("train_tokenizer", *flags)["model"] == model
    run("inspect", "--config.model.vocab_size=400", f"--config.data.tokenizer={model}")
