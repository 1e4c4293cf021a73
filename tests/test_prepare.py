"""Preparing a store: that it depends neither on workers nor on interruptions, and what is said of bad input."""

import errno
import gzip
import json
import logging
import multiprocessing
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT
from makers import WIKIPEDIA as NAME
from makers import articles, documents_of, write_text, write_tfds
from makers import data_config as settings
from makers import hash_files as digest
from makers import read_tokens as stream

from prope.data.sources import files
from prope.data.sources import tfds as tfds_files
from prope.data.store import arrays as store
from prope.data.store import build as prepare
from prope.data.store import lock, pack, workers
from prope.errors import RunFailed, UsageError

KILLS = int(os.environ.get("PROPE_KILLS", "1"))  # 10 and more by hand


# --- The same store, however it was made ------------------------------------------------------------------------


@pytest.mark.slow
def test_neither_the_format_nor_the_workers_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_files, "chunk_bytes", lambda total: 7_000)
    digests = set()
    for kind, numbers in (("array_record", (1, 4)), ("tfrecord", (2,))):
        write_tfds(tmp_path / kind, kind, articles(300))
        for number in numbers:
            config = settings(
                tmp_path / kind / str(number), NAME, tmp_path / kind, num_workers=number
            )
            made = {}
            found = prepare.open_store(config, 260, made)
            assert made["workers"] == number
            assert documents_of(found, "train") == [
                t for t in articles(300) if not pack.is_validation(t.encode(), 0.05)
            ]
            digests.add(digest(found.path))
    assert len(digests) == 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Arguments of the command: text and a tokenizer that keep two workers busy for seconds."""
    import sentencepiece

    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randrange(2, 9))) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=400)) for _ in range(3000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:100]),
        model_prefix=str(root / "sp"),
        vocab_size=500,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=True,
        minloglevel=2,
    )
    (root / "text").mkdir()
    (root / "text" / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return [
        f"--config={ROOT}/configs/quickstart.py",
        "--config.data.dataset=files",
        "--config.model.vocab_size=500",
        f"--config.data.data_dir={root}/text",
        f"--config.data.tokenizer={root}/sp.model",
        "--config.data.num_workers=2",
    ]


@pytest.mark.slow
def test_a_killed_preparation_goes_on_and_ends_in_the_same_store(tmp_path, corpus, run_command):
    straight = run_command(
        "prope.data.prepare", *corpus, f"--config.data.cache_dir={tmp_path}/straight"
    )
    assert straight.result["documents"] == 3000 and straight.result["workers"] == 2, straight.stderr
    expected = digest(straight.result["store"])
    reused = 0
    for attempt in range(KILLS):
        cache = tmp_path / str(attempt)
        command = [
            sys.executable,
            "-m",
            "prope.data.prepare",
            *corpus,
            f"--config.data.cache_dir={cache}",
        ]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while not list(cache.glob("*.chunks")) and process.poll() is None:
                time.sleep(0.01)
            # At random, from the start of the workers to after the end; the first one surely among the chunks.
            if attempt == 0:
                while not list(cache.glob("*.chunks/*.json")) and process.poll() is None:
                    time.sleep(0.01)
            else:
                time.sleep(random.uniform(0, straight.result["seconds"]))
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            orphans = [int(p) for p in children.read_text().split()] if children.exists() else []
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while (
            any(pathlib.Path(f"/proc/{p}").exists() for p in orphans)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not any(pathlib.Path(f"/proc/{p}").exists() for p in orphans), (
            "workers live on without their parent"
        )
        again = run_command("prope.data.prepare", *corpus, f"--config.data.cache_dir={cache}")
        assert again.code == 0, again.stderr
        reused += re.search(r" [1-9]\d* of \d+ chunks are there already", again.stderr) is not None
        assert digest(again.result["store"]) == expected
        kept = {pathlib.Path(again.result["store"]).name, "by_config"}
        assert {p.name for p in cache.iterdir()} == kept, "something was left"
    assert reused >= 1
    start = time.perf_counter()
    config = settings(tmp_path, "files", corpus[3].split("=")[1], tokenizer=corpus[4].split("=")[1])
    config.cache_dir = str(tmp_path / "straight")
    assert prepare.open_store(config, 500).path == straight.result["store"]
    assert time.perf_counter() - start < 1


def test_finished_chunks_are_not_packed_again(tmp_path, monkeypatch, said):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()), num_workers=1)
    whole = digest(
        prepare.open_store(settings(tmp_path / "whole", "files", tmp_path / "text"), 260).path
    )
    real, calls = pack.pack, []

    def breaks(chunk, folder, number):
        calls.append(number)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(chunk, folder, number)

    monkeypatch.setattr(pack, "pack", breaks)
    with pytest.raises(KeyboardInterrupt):
        prepare.open_store(config, 260)
    assert calls == list(range(8))
    (chunks,) = (tmp_path / "cache").glob("*.chunks")
    # As after a loss of power: a file that is shorter than its record says, and one that is gone.
    damaged = chunks / "3.train"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    with pytest.raises(
        RunFailed, match="chunk 3 is damaged and was dropped; run the same command again"
    ):
        prepare.open_store(config, 260)
    assert calls[8:] == list(range(7, max(calls) + 1))
    reports = [
        re.findall(r"(\d+) of \d+ chunks are there", line) for line in said if "packing" in line
    ]
    assert reports == [[], [], ["7"]]  # of the whole store, of the first try and of the second
    done = prepare.open_store(config, 260)
    assert calls[-1] == 3 and digest(done.path) == whole


def test_chunks_that_were_cut_otherwise_are_not_mixed_in(tmp_path, monkeypatch):
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()), num_workers=1)
    whole = digest(
        prepare.open_store(settings(tmp_path / "whole", "files", tmp_path / "text"), 260).path
    )
    real = workers._packed
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)

    def stops(todo, *arguments):
        yield from real(todo[:4], *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_packed", stops)
    with pytest.raises(KeyboardInterrupt):
        prepare.open_store(config, 260)
    monkeypatch.setattr(workers, "_packed", real)
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 9_000)
    assert digest(prepare.open_store(config, 260).path) == whole


def test_long_documents_are_tokenised_in_pieces_and_lose_nothing(tmp_path, monkeypatch):
    texts = [*articles(40), "数" * 500, "x" * 999, "é y\n" * 300]
    folder = write_text(tmp_path / "text", texts)
    whole = digest(prepare.open_store(settings(tmp_path, "files", folder), 260).path)
    for size in (7, 64, 1000):
        monkeypatch.setattr(pack, "_SEGMENT_BYTES", size)
        pieces = [list(pack._segments(text.encode())) for text in texts]
        assert max(len(p) for ps in pieces for p in ps) <= size
        assert [b"".join(ps).decode() for ps in pieces] == texts and all(
            p.decode() for ps in pieces for p in ps
        )
        assert (
            digest(prepare.open_store(settings(tmp_path / str(size), "files", folder), 260).path)
            == whole
        )


# --- One writer at a time ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_make_one_store(tmp_path, corpus):
    command = [
        sys.executable,
        "-m",
        "prope.data.prepare",
        *corpus,
        f"--config.data.cache_dir={tmp_path}/cache",
    ]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(result["prepared"] for result in results) == [False, True]
    waited = [
        err for (_, err), result in zip(outputs, results, strict=True) if not result["prepared"]
    ]
    assert "is preparing files-" in waited[0] and "waiting for it" in waited[0]
    assert (
        results[0]["store"] == results[1]["store"] and results[0]["tokens"] == results[1]["tokens"]
    )


@pytest.fixture
def said():
    """The lines that the data logs."""
    lines, ours = [], logging.getLogger("prope")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    ours.addHandler(handler)
    level, _ = ours.level, ours.setLevel(logging.INFO)
    yield lines
    ours.setLevel(level)
    ours.removeHandler(handler)


HOLD = """
import sys, time
from prope.data.store.lock import write_lock
with write_lock(sys.argv[1], sys.argv[2], lambda: False) as is_writer:
    print(is_writer, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("where", ["folder", "url"])
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, monkeypatch, said, where):
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "local"))
    monkeypatch.setattr(lock, "STALE", 60 if where == "folder" else 2.0)
    monkeypatch.setattr(lock, "POLL", 0.1)
    cache = tmp_path / "cache"
    cache.mkdir()
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()))
    path = pathlib.Path(
        prepare.open_store(settings(tmp_path / "first", "files", tmp_path / "text"), 260).path
    )
    config.cache_dir = str(cache) if where == "folder" else f"file://{cache}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, config.cache_dir, path.name], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"True\n"
        holder.kill()
    assert list(cache.glob("*.lock"))
    start = time.monotonic()
    assert prepare.open_store(config, 260).fingerprint == path.name.split("-")[-1]
    waited = time.monotonic() - start
    assert waited < 60 if where == "folder" else waited >= 2
    name = "another process" if where == "folder" else f"process {holder.pid} on "
    assert any(f"data: {name}" in line and "ended while it prepared" in line for line in said)
    assert not list(cache.glob("*.lock*"))


@pytest.mark.parametrize("where", ["folder", "url"])
def test_one_writer_at_a_time_and_the_others_wait(tmp_path, monkeypatch, said, where):
    monkeypatch.setattr(lock, "STALE", 1.0)
    monkeypatch.setattr(lock, "POLL", 0.05)
    monkeypatch.setattr(lock, "BEAT", 0.1)
    cache = f"file://{tmp_path}" if where == "url" else str(tmp_path)
    held, order = threading.Event(), []

    def first():
        with lock.write_lock(cache, "a", lambda: False) as is_writer:
            assert is_writer
            held.set()
            time.sleep(2.5)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(60)
    with lock.write_lock(cache, "a", lambda: False) as is_writer:
        order.append("second")
        assert is_writer
    thread.join()
    assert order == ["first", "second"]
    name = "another process" if where == "folder" else f"process {os.getpid()} on"
    assert said[0].startswith(f"data: {name}") and said[0].endswith(
        "is preparing a; waiting for it"
    )
    with lock.write_lock(cache, "a", lambda: True) as is_writer:
        assert not is_writer
    became_ready = iter([False, True])  # while the lock was waited for
    with lock.write_lock(cache, "a", lambda: next(became_ready)) as is_writer:
        assert not is_writer
    assert not list(tmp_path.glob("*.lock"))


# --- What cannot be used ----------------------------------------------------------------------------------------


def refused(config, says):
    with pytest.raises(UsageError, match=says) as caught:
        prepare.open_store(config, 260)
    assert "\n" not in str(caught.value)
    assert not list(pathlib.Path(config.cache_dir).rglob("index.json"))


@pytest.mark.parametrize("number", [1, 2])
def test_a_record_that_is_not_utf8(tmp_path, number):
    texts = articles()
    texts[150] = b"fine so far \xff\xfe"
    write_tfds(tmp_path / "data", "array_record", texts)
    config = settings(tmp_path, NAME, tmp_path / "data", num_workers=number)
    refused(
        config,
        r"wikipedia-train.array_record-00001-of-00002 record 85: not UTF-8 text \(byte 12\); convert or",
    )


def test_documents_without_text_are_left_out_and_counted(tmp_path, said):
    texts = articles(50)
    write_tfds(tmp_path / "a", "tfrecord", [*texts[:20], "", *texts[20:], " \n"])
    write_tfds(tmp_path / "b", "tfrecord", texts)
    with_empty, without = (
        prepare.open_store(settings(tmp_path / k, NAME, tmp_path / k, validation_fraction=0.2), 260)
        for k in "ab"
    )
    for split in store.SPLITS:
        np.testing.assert_array_equal(stream(with_empty, split), stream(without, split))
    assert with_empty.index["empty"] == 2 and without.index["empty"] == 0
    (line,) = [line for line in said if "left out" in line]
    assert line.startswith(
        "data: 2 documents without text were left out, the first in wikipedia-train.tfrecord-00001"
    )


def test_a_store_that_is_not_what_its_name_says(tmp_path):
    folder = write_text(tmp_path / "text", articles())
    config, other = (
        settings(tmp_path, "files", folder),
        settings(tmp_path, "files", folder, validation_fraction=0.1),
    )
    path, from_elsewhere = (pathlib.Path(prepare.open_store(c, 260).path) for c in (config, other))
    index = (path / "index.json").read_text()

    def says(text):
        with pytest.raises(UsageError, match=text) as caught:
            prepare.open_store(config, 260)
        assert "remove it to have it prepared again" in str(caught.value) and "\n" not in str(
            caught.value
        )

    theirs = (from_elsewhere / "index.json").read_text()
    (path / "index.json").write_text(theirs)
    says(
        f"its fingerprint is {json.loads(theirs)['fingerprint']}, not {json.loads(index)['fingerprint']}"
    )
    (path / "index.json").write_text(
        index.replace('"validation_fraction": 0.05', '"validation_fraction": 0.06')
    )
    says("its fingerprint is")
    (path / "index.json").write_text(index[:100])
    says("index.json is damaged")
    (path / "index.json").write_text(index)
    (path / "train").rename(path / "train2")
    (from_elsewhere / "train").rename(path / "train")
    says("train has .* tokens, its index.json says")
    (path / "train").rename(from_elsewhere / "train")
    says("train cannot be read")
    (path / "train2").rename(path / "train")
    assert prepare.open_store(config, 260).path == str(path)


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()), num_workers=1)
    full = "cache_dir=.*: the disk is full; .* Finished chunks are kept: free some space"

    real = store.write_array

    def no_space(*arguments):
        if arguments[1] == "train":
            real(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((pack, "write_atomic"), (store, "write_array")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, no_space)
            refused(config, full)
        left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert all(path.parent.suffix == ".chunks" for path in left), left
    assert list((tmp_path / "cache").glob("*.chunks/*.json"))
    assert len(documents_of(prepare.open_store(config, 260), "train")) > 100


def test_a_worker_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()), num_workers=2)
    real = workers._packed

    def kills(*arguments):
        packed = real(*arguments)
        yield next(packed)
        for child in multiprocessing.active_children():
            child.kill()
        yield from packed

    monkeypatch.setattr(workers, "_packed", kills)
    try:
        prepare.open_store(config, 260)  # they may have been faster
    except RunFailed as error:
        assert "a worker was killed" in str(error) and "smaller config.data.num_workers" in str(
            error
        )


def test_a_compressed_file_that_is_cut(tmp_path):
    folder = write_text(tmp_path / "text", articles())
    packed = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in articles()).encode())
    (folder / "z.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    refused(
        settings(tmp_path, "files", folder), "z.jsonl.gz: is damaged or cut short .*; copy it again"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_file_without_a_byte(tmp_path, name):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(b"")
    refused(
        settings(tmp_path, "files", tmp_path / "text"), "files: has no document with text; add some"
    )
    (tmp_path / "text" / "b.txt").write_text("a text")
    store = prepare.open_store(settings(tmp_path, "files", tmp_path / "text"), 260)
    assert documents_of(store, "all") == ["a text"]


# --- Alone ------------------------------------------------------------------------------------------------------

ALONE = """
import socket
class Refused(socket.socket):
    def __init__(self, *arguments, **named):
        raise RuntimeError("a socket was opened")
socket.socket = Refused
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "tensorflow" else find(name, *rest)
"""


@pytest.mark.parametrize(
    "kind, number", [pytest.param("array_record", 2, marks=pytest.mark.slow), ("tfrecord", 1)]
)
def test_no_socket_and_no_tensorflow(tmp_path, run_command, kind, number):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ALONE)  # for the workers too
    alone = {"PYTHONPATH": str(tmp_path / "site")}
    for code, says in (
        ("import tensorflow", "No module named 'tensorflow'"),
        ("import socket; socket.socket()", "opened"),
    ):
        options = {"env": os.environ | alone, "capture_output": True, "text": True}
        assert says in subprocess.run([sys.executable, "-c", code], **options).stderr
    write_tfds(tmp_path / "data", kind, articles(400))
    arguments = [
        f"--config={ROOT}/configs/quickstart.py:tiny",
        f"--config.data.dataset={NAME}",
        f"--config.data.data_dir={tmp_path}/data",
        f"--config.data.cache_dir={tmp_path}/cache",
    ]
    prepared = run_command(
        "prope.data.prepare", *arguments, f"--config.data.num_workers={number}", **alone
    )
    assert prepared.code == 0 and prepared.result["workers"] == number, prepared.stderr
    assert prepared.result["documents"] == 400
    if kind == "tfrecord":
        seen = run_command("prope.data.inspect", *arguments, "--step=3", **alone)
        assert seen.code == 0 and seen.result["step"] == 3, seen.stderr
