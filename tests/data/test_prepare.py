"""Preparing a store: it depends neither on workers nor on interruptions, and refuses bad input."""

import dataclasses
import errno
import functools
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import sentencepiece
from support.commands import ROOT
from support.text import WIKIPEDIA as NAME
from support.text import (
    articles,
    data_config,
    documents_of,
    is_validation,
    write_dataset,
    write_text,
    write_tfds,
)
from support.text import data_refused as refused
from support.text import hash_files as digest
from support.text import read_tokens as stream

from prope.data.sources import base, files
from prope.data.sources import tfds as tfds_files
from prope.data.store import arrays, build, pack, workers
from prope.data.store.build import open_store
from prope.errors import RunFailed
from prope.spec.run import Spec

KILLS = int(os.environ.get("PROPE_KILLS", "1"))  # 10 and more by hand


@pytest.fixture
def data(tmp_path):
    """config.data of some text, which one worker packs."""
    folder = write_text(tmp_path / "text", articles())
    return data_config(tmp_path, "files", folder, num_workers=1)


@pytest.fixture
def whole(data, tmp_path):
    """A hash of the files of its store."""
    undisturbed = dataclasses.replace(data, cache_dir=str(tmp_path / "undisturbed"))
    return digest(build.open_store(undisturbed, 260).path)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)


# --- What is in a store -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_every_document_arrives_once_and_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(pack, "SEGMENT_BYTES", 64)  # long ones are tokenised in segments
    texts = articles()
    folder = tmp_path / "data"
    dataset = write_dataset(folder, kind, texts)
    store = open_store(data_config(tmp_path, dataset, folder, validation_fraction=0.3), 260)
    expected = {"train": [], "validation": []}
    for document in texts:
        held_out = is_validation(document.encode(), 0.3)
        expected["validation" if held_out else "train"].append(document)
    for split, documents in expected.items():
        assert documents_of(store, split) == documents
        size = sum(len(document.encode()) for document in documents)
        assert store.index[split] == {
            "tokens": size + 2 * len(documents),
            "documents": len(documents),
            "bytes": size,
            "prompt_tokens": 0,
            "unk_tokens": 0,
        }
        assert store.targets(split) == size + len(documents)


def test_fingerprints_of_older_versions_stay(tmp_path):
    """So their runs can be resumed."""
    write_tfds(tmp_path / "data", "tfrecord", articles())
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n')
    for dataset, folder, fingerprint in (
        (NAME, "data", "d8adaa55946c72fc"),
        ("files", "lines", "458b56897736079c"),
    ):
        data = data_config(tmp_path, dataset, tmp_path / folder)
        assert open_store(data, 260).fingerprint == fingerprint


def test_shards_of_the_store_are_cut_anywhere(tmp_path, data, monkeypatch):
    whole = stream(open_store(data, 260), "train")
    monkeypatch.setattr(arrays, "READ_TOKENS", 128)
    monkeypatch.setattr(arrays, "SHARD", 1024)
    cut = open_store(data_config(tmp_path / "cut", "files", data.data_dir), 260)
    paths = list(pathlib.Path(cut.path, "train").rglob("*"))
    assert len(paths) > 5
    np.testing.assert_array_equal(stream(cut, "train"), whole)


def test_a_store_is_written_once_and_named_by_what_is_in_it(tmp_path, data):
    store = open_store(data, 260)
    index = pathlib.Path(store.path, "index.json")
    before = index.stat().st_mtime_ns
    assert open_store(data, 260).path == store.path
    assert index.stat().st_mtime_ns == before
    other = data_config(tmp_path, "files", data.data_dir, validation_fraction=0.1)
    assert open_store(other, 260).fingerprint != store.fingerprint
    pathlib.Path(data.data_dir, "a.txt").write_text("another text")
    assert open_store(data, 260).fingerprint != store.fingerprint


def test_a_store_does_not_count_without_its_index(data, whole, monkeypatch):
    write_array = arrays.write_array

    def stop_after(*arguments):
        write_array(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arrays, "write_array", stop_after)
        with pytest.raises(KeyboardInterrupt):
            open_store(data, 260)
    assert [*pathlib.Path(data.cache_dir).rglob("zarr.json")], "half of it is there"
    assert digest(open_store(data, 260).path) == whole


def test_a_damaged_store_is_an_error_and_not_other_text(data):
    store = open_store(data, 260)
    (shard,) = pathlib.Path(store.path, "train", "c").rglob("*")
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        stream(store, "train")


def test_tokens_for_unknown_text_are_counted_and_told(tmp_path, caplog):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["rope turn pair frequency 0123456789"] * 50),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        model_type="char",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    folder = write_text(tmp_path / "text", articles())
    fields = {"validation_fraction": 0.3, "tokenizer": str(tmp_path / "m.model")}
    data = data_config(tmp_path, "files", folder, **fields)
    store = open_store(data, 300)
    model = sentencepiece.SentencePieceProcessor(model_file=data.tokenizer)
    expected = {"train": 0, "validation": 0}
    for text in articles():
        split = "validation" if is_validation(text.encode(), 0.3) else "train"
        expected[split] += model.encode(text).count(model.unk_id())
    assert all(expected.values())
    assert {split: store.index[split]["unk_tokens"] for split in expected} == expected
    share = sum(expected.values()) / store.count("tokens", "all")
    assert f"{share:.2%} of the tokens are <unk>" in caplog.text


# --- The same store, however it was made ------------------------------------------------------


def test_neither_the_format_nor_the_workers_change_a_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_files, "chunk_bytes", lambda total: 7_000)
    stores = []
    for kind, number in (("array_record", 1), ("tfrecord", 2)):
        write_tfds(tmp_path / kind, kind, articles())
        data = data_config(tmp_path / kind, NAME, tmp_path / kind, num_workers=number)
        stores.append(build.open_store(data, 260))
    one, two = stores
    assert one.path != two.path
    assert one.fingerprint == two.fingerprint
    assert digest(one.path) == digest(two.path)
    predicted = [text for text in articles() if not is_validation(text.encode(), 0.05)]
    assert documents_of(one, "train") == predicted


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, sentencepiece_model):
    """Arguments of the command: text that keeps two workers busy for seconds."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randrange(2, 9))) for _ in range(2000)]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=400))}) for _ in range(3000)]
    (root / "a.jsonl").write_text("\n".join(lines))
    return [
        f"--config={ROOT}/configs/quickstart.py",
        "--config.data.dataset=files",
        "--config.model.vocab_size=300",
        f"--config.data.data_dir={root}",
        f"--config.data.tokenizer={sentencepiece_model}",
        "--config.data.num_workers=2",
    ]


def kill_preparation(corpus, cache, seconds):
    """Kills the command, by default among its chunks; asserts that its workers end as well."""
    arguments = [*corpus, f"--config.data.cache_dir={cache}"]
    command = [sys.executable, "-m", "prope.data.prepare", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        pattern = "*.chunks/*.json" if seconds is None else "*.chunks"
        while not list(cache.glob(pattern)) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds or 0)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        numbers = children.read_text().split() if children.exists() else []
        process.send_signal(signal.SIGKILL)
    orphans = [pathlib.Path(f"/proc/{number}") for number in numbers]
    deadline = time.monotonic() + 20
    while any(orphan.exists() for orphan in orphans):
        assert time.monotonic() < deadline, "workers live on without their parent"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_preparation_goes_on_and_ends_in_the_same_store(tmp_path, corpus, run_command):
    def prepare(cache):
        done = run_command("prope.data.prepare", *corpus, f"--config.data.cache_dir={cache}")
        assert done.code == 0, done.stderr
        return done

    straight = prepare(tmp_path / "straight").result
    assert straight["documents"] == 3000
    expected = digest(straight["store"])
    reused = 0
    for attempt in range(KILLS):
        cache = tmp_path / str(attempt)
        # At random, from the start of the workers to after the end.
        seconds = random.uniform(0, straight["seconds"]) if attempt else None
        kill_preparation(corpus, cache, seconds)
        again = prepare(cache)
        reused += re.search(r" [1-9]\d* of \d+ chunks are there already", again.stderr) is not None
        assert digest(again.result["store"]) == expected
        assert [str(path) for path in cache.iterdir()] == [again.result["store"]], "nothing else"
    assert reused >= 1


def test_finished_chunks_are_not_packed_again(data, whole, monkeypatch, small_chunks):
    pack_chunk = pack.pack
    calls = []

    def pack_or_break(chunk, folder, number):
        calls.append(number)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return pack_chunk(chunk, folder, number)

    monkeypatch.setattr(pack, "pack", pack_or_break)
    with pytest.raises(KeyboardInterrupt):
        build.open_store(data, 260)
    assert calls == list(range(8))
    (chunks,) = pathlib.Path(data.cache_dir).glob("*")
    assert chunks.suffix == ".chunks", "there is no store, and no lock"
    # As after a loss of power: a file is shorter than its record says.
    damaged = chunks / "3.train"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    remedy = "chunk 3 is damaged and was dropped; run the same command again"
    with pytest.raises(RunFailed, match=remedy):
        build.open_store(data, 260)
    assert calls[8:] == list(range(7, max(calls) + 1))
    done = build.open_store(data, 260)
    assert calls[-1] == 3
    assert digest(done.path) == whole


def test_chunks_that_were_cut_otherwise_are_not_mixed_in(data, whole, monkeypatch, small_chunks):
    packed = workers._packed

    def stop_early(chunks, *arguments):
        yield from packed(chunks[:4], *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers, "_packed", stop_early)
        with pytest.raises(KeyboardInterrupt):
            build.open_store(data, 260)
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 9_000)
    assert digest(build.open_store(data, 260).path) == whole


def test_long_documents_are_tokenised_in_segments_and_lose_nothing():
    for size in (2**22, 7, 64, 1000):
        for text in [*articles(40), "数" * 500, "x" * 999, "é y\n" * 300]:
            segments = list(base.cut_words(text.encode(), size))
            assert max(map(len, segments)) <= size
            assert "".join(segment.decode() for segment in segments) == text


# --- One writer at a time ---------------------------------------------------------------------


def test_a_second_preparation_waits_for_the_first(data, caplog, monkeypatch):
    caplog.set_level("INFO", "prope")
    monkeypatch.setattr(build, "POLL_SECONDS", 0.02)
    write = build._write_store
    begins = threading.Event()
    goes_on = threading.Event()
    stores = []

    def write_slowly(*arguments):
        assert not begins.is_set(), "there is one writer"
        begins.set()
        assert goes_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(build, "_write_store", write_slowly)

    def prepare():
        stores.append(build.open_store(data, 260))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while "waiting for it" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not stores
    goes_on.set()
    for thread in threads:
        thread.join()
    assert len(stores) == 2
    assert [str(path) for path in pathlib.Path(data.cache_dir).iterdir()] == [stores[0].path]


# --- What cannot be used ----------------------------------------------------------------------


def test_a_store_that_is_not_what_its_name_says(tmp_path):
    folder = write_text(tmp_path / "text", articles())
    data = data_config(tmp_path, "files", folder)
    other_config = data_config(tmp_path, "files", folder, validation_fraction=0.1)
    path = pathlib.Path(build.open_store(data, 260).path)
    other_index = pathlib.Path(build.open_store(other_config, 260).path, "index.json").read_text()
    index = (path / "index.json").read_text()
    other = json.loads(other_index)["fingerprint"]
    fields = json.loads(index)
    fields["train"]["tokens"] = 1
    for name, content, problem in (
        ("index.json", other_index, f"its fingerprint is {other}, not .* was changed or copied"),
        ("index.json", index.replace("0.05", "0.06"), "its fingerprint is .* or copied"),
        ("index.json", index[:100], "its index.json is damaged"),
        ("index.json", "[" * 100_000, "its index.json is damaged"),
        ("index.json", json.dumps(fields), "train has .* tokens, its index.json says 1"),
        ("train/zarr.json", None, "train/zarr.json is missing"),
        ("train/zarr.json", "{", "DATA_LOSS: .*train/zarr.json.*"),
    ):
        whole = (path / name).read_text()
        (path / name).unlink()
        if content is not None:
            (path / name).write_text(content)
        refused(data, f"{problem}; remove it to have it prepared again")
        (path / name).write_text(whole)
    assert build.open_store(data, 260).path == str(path)


@pytest.mark.parametrize("written", ["chunks", "arrays"])
def test_a_disk_that_fills_up(data, whole, monkeypatch, small_chunks, written):
    write_array = arrays.write_array

    def fill_disk(*arguments):
        if arguments[1] == "train":
            write_array(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = pathlib.Path(data.cache_dir)
    with monkeypatch.context() as patch:
        if written == "chunks":
            patch.setattr(pack, "write_atomic", fill_disk)
        else:
            patch.setattr(arrays, "write_array", fill_disk)
        remedy = "Finished chunks are kept: free some space"
        refused(data, f"cache_dir={cache}: the disk is full; .* {remedy}")
    assert not list(cache.rglob("index.json"))
    assert any(cache.glob("*.chunks/*.json")) == (written == "arrays")
    assert digest(build.open_store(data, 260).path) == whole


@pytest.mark.parametrize("written", ["chunks", "arrays"])
def test_files_that_may_not_grow_larger(tmp_path, monkeypatch, written):
    """As in a shell with ulimit -f, or on a file system with a limit."""
    data = data_config(tmp_path)
    if written == "arrays":  # of which a file is larger than that of any chunk
        texts = write_text(tmp_path / "text", [text * 20 for text in articles()])
        monkeypatch.setattr(files, "chunk_bytes", lambda total: 5_000)
        data = data_config(tmp_path, "files", texts)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would cut it off, too
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        refused(data, f"cache_dir={data.cache_dir}: a file would be larger than .*ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert any(pathlib.Path(data.cache_dir).glob("*.chunks/*.json")) == (written == "arrays")
    assert open_store(data, 260)


def test_a_worker_that_is_killed(data, monkeypatch):
    data = dataclasses.replace(data, num_workers=2)
    source = build.find_source(data)
    deadly = functools.partial(os._exit, 9)
    chunks = [chunk._replace(read=deadly) for chunk in source.chunks]
    killed = source._replace(chunks=chunks, is_divided=False)  # read by workers alone
    monkeypatch.setattr(build, "find_source", lambda data: killed)
    remedy = "a worker was killed, .* finished chunks are kept; .* a smaller config.data.num_wor"
    with pytest.raises(RunFailed, match=remedy):
        build.open_store(data, 260)


def test_a_cache_that_cannot_be_written(data, bucket, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    monkeypatch.setenv("PROPE_CACHE", str(blocked))
    for cache, problem in (
        (str(blocked), f"config.data.cache_dir={blocked}: cannot be written"),
        (f"{bucket}/stores", f"PROPE_CACHE={blocked}: cannot be written"),
        ("gs://other/stores", "config.data.cache_dir=gs://other/stores: cannot be made"),
        ("nothing://x", "config.data.cache_dir=nothing://x: must be a local path, or"),
    ):
        refused(dataclasses.replace(data, cache_dir=cache), f"^{problem}")


# --- Alone ------------------------------------------------------------------------------------


ALONE = """
import socket
class Refused(socket.socket):
    def __init__(self, *arguments, **named):
        raise RuntimeError("a socket was opened")
socket.socket = Refused
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_other(name, *rest):
    return None if name.split(".")[0] == "tensorflow" else find(name, *rest)
PathFinder.find_spec = find_other
"""


WITHIN = """
import json, socket, sys
for needs in (lambda: __import__("tensorflow"), socket.socket):
    try:
        needs()
    except (ModuleNotFoundError, RuntimeError) as error:
        print(error)
from prope.config import spec_from_dict
from prope.data.store.build import prepare
from prope.data.view import show_batch
from prope.data.vocabulary import train_tokenizer
spec = spec_from_dict(json.loads(sys.argv[1]))
prepared = prepare(spec)
shown = show_batch(spec, 3, 2)
learnt = train_tokenizer(spec, sys.argv[2], 288, "unigram", 50_000)
print(json.dumps([prepared, shown, learnt]))
"""


@pytest.mark.parametrize("kind", [pytest.param("array_record", marks=pytest.mark.slow), "tfrecord"])
def test_no_socket_and_no_tensorflow(tmp_path, kind):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ALONE)  # for the workers too
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    write_tfds(tmp_path / "data", kind, articles(400))
    spec = Spec(data=data_config(tmp_path, NAME, tmp_path / "data", num_workers=2))
    model = str(tmp_path / "m.model")
    done = subprocess.run(
        [sys.executable, "-c", WITHIN, json.dumps(spec.to_dict()), model],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tensorflow, opened, *_, results = done.stdout.splitlines()
    assert "tensorflow" in tensorflow and "opened" in opened, "both are refused there"
    prepared, shown, learnt = json.loads(results)
    assert prepared["documents"] == 400
    assert shown["step"] == 3
    assert (learnt["model"], learnt["vocab_size"]) == (model, 288)
