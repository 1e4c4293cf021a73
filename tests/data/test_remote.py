"""Text and stores in a bucket, on a real server, whatever happens to it; stores without text."""

import dataclasses
import errno
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import fsspec
import numpy as np
import pytest
from etils import epath
from support.commands import CONFIG, finish
from support.text import WIKIPEDIA as NAME
from support.text import (
    articles,
    data_config,
    refusal,
    texts_of,
    write_dataset,
    write_text,
    write_tfds,
)
from support.text import data_refused as refused
from support.text import hash_files as digest

from prope.data.mixture import open_windows
from prope.data.sources import files, tfds
from prope.data.sources.find import find_source
from prope.data.store import arrays, build, pack, workers
from prope.data.store.build import open_store
from prope.data.windows import train_batch
from prope.errors import RunFailed, StorageFailed, UsageError
from prope.runtime import files as places
from prope.runtime.files import files_below

SUSPENDS = int(os.environ.get("PROPE_SUSPENDS", "2"))  # 20 and more by hand


# --- Text in a bucket -------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "local"))
    return tmp_path / "local"


def write_both(tmp_path, bucket, kind, texts):
    """Writes texts to a folder and to the bucket; (config of the folder, config of the bucket)."""
    folder = tmp_path / kind
    dataset = write_dataset(folder, kind, texts)
    places.upload(folder, epath.Path(bucket) / kind)
    there = data_config(tmp_path / "there", dataset, folder)
    here = data_config(tmp_path / "here", dataset, f"{bucket}/{kind}")
    return there, here


def assert_same_store(data, other, vocab_size=260):
    stores = [build.open_store(data, vocab_size) for data in (data, other)]
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
def test_workers_share_the_copies_of_shards(tmp_path, bucket, local):
    there, here = write_both(tmp_path, bucket, "array_record", articles(20_000))
    here.num_workers = 3
    assert_same_store(there, here)
    assert shard_bytes(local) == shard_bytes(tmp_path / "array_record")


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
        list(texts_of(find_source(here)))
    assert len(downloads) == 3
    assert [len(data) for data in shard_bytes(local)] == [1000]
    fails = False

    def read_new_copies():
        """Reads all documents; returns how many shards are downloaded."""
        downloads.clear()
        assert list(texts_of(find_source(here))) == [text.encode() for text in texts]
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
    assert f"config.data.tokenizer={bucket}/other.model" in refusal(open_store, here, 300)
    model.copy(epath.Path(bucket) / "files" / "tokenizer.model")
    here.tokenizer = f"{bucket}/files/"
    assert_same_store(there, here, 300)


def test_what_is_not_in_a_bucket(tmp_path, bucket, local):
    _, here = write_both(tmp_path, bucket, "tfrecord", articles())
    source = find_source(here)
    name = "wikipedia-train.tfrecord-00001-of-00002"
    (shard,) = epath.Path(bucket).glob(f"tfrecord/wikipedia/*/*/{name}")
    shard.unlink()
    assert name in refusal(list, texts_of(source))
    for place, dataset, mentions in (
        (here.data_dir, NAME, name),
        (here.data_dir, "lm1b", "gcloud storage ls"),
        ("gs://other-bucket/x", NAME, "gcloud storage ls"),
        (f"{bucket}/none", "files", "gcloud storage ls"),
    ):
        says = refusal(open_store, data_config(tmp_path, dataset, place), 260)
        assert says.startswith(f"config.data.data_dir={place}") and mentions in says


@pytest.mark.parametrize("code", [401, pytest.param(403, marks=pytest.mark.slow)])
def test_a_bucket_that_may_not_be_read(storage, run_command, code):
    with storage.failing(code):
        outcome = run_command(
            "prope.data.prepare",
            CONFIG,
            f"--config.data.dataset={NAME}",
            "--config.data.data_dir=gs://private/datasets",
            **storage.environment,
        )
    assert "gs://private/datasets" in outcome.error
    assert "gcloud auth application-default login" in outcome.error
    assert outcome.stderr.count("trying again in") == outcome.stderr.count("\n") - 1 == 3


@pytest.mark.slow
def test_a_server_that_fails_for_a_while_is_waited_for(
    tmp_path, bucket, local, storage, start_command
):
    there, _ = write_both(tmp_path, bucket, "array_record", articles(3000))
    expected = digest(build.open_store(there, 260).path)
    command = start_command(
        "prope.data.prepare",
        CONFIG,
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


# --- Stores in a bucket -----------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """config.data of some text."""
    folder = write_text(tmp_path / "text", articles())
    return data_config(tmp_path, "files", folder, seq_len=64)


@pytest.fixture
def in_bucket(data, bucket, tmp_path, monkeypatch):
    """The same, with the store in a bucket."""
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "local"))
    return dataclasses.replace(data, cache_dir=f"{bucket}/stores")


def read_files(folder) -> dict[str, bytes]:
    """The files below a folder or URL, by their path in it."""
    folder = epath.Path(folder)
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


def modified(folder) -> dict[str, float]:
    """The times at which the files below a folder or URL were written, but for zarr.json."""
    folder = epath.Path(folder)
    names = [name for name in files_below(folder) if not name.endswith("zarr.json")]
    return {name: (folder / name).stat().mtime for name in names}


def assert_same_batches(windows, expected):
    for step in range(3):
        batch = train_batch(expected, 1, 4, step)
        for name, values in train_batch(windows, 1, 4, step).items():
            np.testing.assert_array_equal(values, batch[name])


def test_a_store_in_a_bucket_is_that_of_a_folder(tmp_path, data, in_bucket):
    local = open_windows(data, 260, "train")
    windows = open_windows(in_bucket, 260, "train")
    stores = epath.Path(in_bucket.cache_dir)
    assert windows.store.path.startswith(in_bucket.cache_dir)
    assert read_files(stores) == read_files(data.cache_dir), "nothing else is left"
    assert_same_batches(windows, local)
    assert open_store(in_bucket, 260).path == windows.store.path
    assert not list((tmp_path / "local").iterdir())
    index = epath.Path(windows.store.path) / "index.json"
    index.write_bytes(index.read_bytes()[:50])
    refused(in_bucket, "index.json is damaged; remove it")


class NoLock:
    """A lock of a file system that has none, or has given it to another host meanwhile."""

    def __init__(self, *arguments, **options):
        pass

    def acquire(self, **options):
        pass

    release = acquire


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize("moment", ["chunks", "train", "validation", "index"])
def test_two_hosts_that_prepare_at_once_lose_nothing(
    tmp_path, data, in_bucket, monkeypatch, moment, place
):
    """One host writes all of the store while another is about to write what `moment` names."""
    expected = read_files(open_store(data, 260).path)
    if place == "folder":
        in_bucket.cache_dir = str(tmp_path / "shared")
        monkeypatch.setattr(build.filelock, "FileLock", NoLock)
    steps = {"chunks": (workers, "pack_chunks"), "index": (build, "_concatenate")}
    module, name = steps.get(moment, (arrays, "write_array"))
    step = getattr(module, name)
    found = []

    def prepare_on_other_host():
        patch.undo()
        with monkeypatch.context() as host:
            host.setenv("PROPE_CACHE", str(tmp_path / "other host"))
            store = open_store(in_bucket, 260)
        assert read_files(store.path) == expected
        found.append((store, modified(store.path)))

    def step_late(*arguments):
        if name == "write_array" and arguments[1] != moment:
            return step(*arguments)
        if moment == "index":
            losses = step(*arguments)
            prepare_on_other_host()
            return losses
        prepare_on_other_host()
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, step_late)
        store = open_store(in_bucket, 260)
    assert found == [(store, modified(store.path))], "what has an index is left as it is"
    assert read_files(store.path) == expected


@pytest.mark.slow
def test_a_host_that_is_suspended_while_another_prepares(
    tmp_path, bucket, data, storage, start_command
):
    """At a random moment; PROPE_SUSPENDS times."""
    expected = read_files(open_store(data, 260).path)
    chance = random.Random(SUSPENDS)
    suspended = 0
    for attempt in range(10 * SUSPENDS):  # some hosts are done before they can be stopped
        arguments = (
            CONFIG,
            "--config.data.dataset=files",
            f"--config.data.data_dir={tmp_path}/text",
            f"--config.data.cache_dir={bucket}/{attempt}",
        )
        hosts = []
        for name in ("one", "two"):
            host = storage.environment | {"PROPE_CACHE": str(tmp_path / f"{name}{attempt}")}
            hosts.append(start_command("prope.data.prepare", *arguments, **host))
            if name == "one":
                hosts[0].wait_for("packing")
                time.sleep(chance.random() / 10)
                suspended += hosts[0]._process.is_alive()
                hosts[0].signal(signal.SIGSTOP)
        results = [finish(hosts[1])]
        (store,) = epath.Path(f"{bucket}/{attempt}").iterdir()
        assert read_files(store) == expected
        hosts[0].signal(signal.SIGCONT)
        results.append(finish(hosts[0]))
        assert [result.code for result in results] == [0, 0], results
        assert read_files(store) == expected
        if suspended == SUSPENDS:
            break
    assert suspended == SUSPENDS


def test_a_bucket_that_refuses_writes(data, in_bucket, storage, monkeypatch):
    """What it has by then of the arrays is written again, the same."""
    write_array = arrays.write_array

    def refuse(*arguments):
        write_array(*arguments)
        with storage.failing(403):
            write_array(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(arrays, "write_array", refuse)
        problem = f"^{in_bucket.cache_dir}: the store cannot be prepared: .*; finished chunks are"
        with pytest.raises(StorageFailed, match=problem) as caught:
            open_store(in_bucket, 260)
    assert "\n" not in str(caught.value)
    assert any(name.endswith("/c/0") for name in files_below(epath.Path(in_bucket.cache_dir)))
    expected = read_files(open_store(data, 260).path)
    monkeypatch.setattr(pack, "pack", None)
    assert read_files(open_store(in_bucket, 260).path) == expected, "its chunks were kept"


def test_a_folder_that_may_not_be_written_is_told_and_not_tried_again(data, monkeypatch):
    """Launchers restart what failed with the storage: here a person must change something."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(arrays, "write_array", refuse)
    with pytest.raises(UsageError, match="cache_dir=.*: cannot be written: Permission denied"):
        open_store(data, 260)


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_shards_that_are_missing_or_cut_short(request, data, place, monkeypatch):
    """A missing shard would read as padding."""
    monkeypatch.setattr(arrays, "READ_TOKENS", 128)
    monkeypatch.setattr(arrays, "SHARD", 1024)
    if place == "bucket":
        data = request.getfixturevalue("in_bucket")
    windows = open_windows(data, 260, "train")
    folder = epath.Path(windows.store.path)

    def check(problem):
        refused(data, f"^the store {folder}: {problem}; remove it to have it prepared again$")

    first, second = (folder / f"train/c/{number}" for number in (0, 2))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    check(f"train/c/0 has {len(whole) - 1} bytes, not {len(whole)}")
    first.unlink()
    second.unlink()
    check("train/c/0 is missing, train/c/2 is missing")
    with pytest.raises(UsageError, match=f"the store {folder}: .*train/c/0.* is missing"):
        windows.read([0])  # opened before
    first.write_bytes(whole)
    second.write_bytes(whole)
    last = max((folder / "validation/c").iterdir(), key=lambda path: int(path.name))
    last.unlink()
    check(f"validation/c/{last.name} is missing")


# What TensorStore says of a storage that fails, and what it ends with after the last retry.
FAILURES = [
    "UNAVAILABLE: the server is busy",
    "RESOURCE_EXHAUSTED: the server is busy",
    "FAILED_PRECONDITION: Failed to read [os_error_code='107']",
    "OUT_OF_RANGE: Failed to read [os_error_code='107']",
]


@pytest.mark.parametrize("text", FAILURES)
def test_a_storage_that_fails_while_tokens_are_read(data, monkeypatch, text):
    windows = open_windows(data, 260, "train")
    expected = windows.read([1])
    tokens = windows._tokens
    monkeypatch.setattr(places, "_PAUSES", (0, 0))

    class Failing:
        """Fails for as many reads as there are errors."""

        def __getitem__(self, span):
            if errors:
                raise errors.pop()
            return tokens[span]

    windows._tokens = Failing()
    errors = 2 * [ValueError(text)]
    np.testing.assert_array_equal(windows.read([1])["tokens"], expected["tokens"])
    errors = 3 * [ValueError(text)]
    problem = re.escape(f"{windows.store.path}: cannot be read: {text}")
    with pytest.raises(StorageFailed, match=problem):
        windows.read([1])
    errors = [ValueError("an error of ours")]
    with pytest.raises(ValueError, match="an error of ours"):
        windows.read([1])


# --- Stores without their text ----------------------------------------------------------------


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_store_is_opened_by_its_place(request, tmp_path, data, place, monkeypatch):
    if place == "bucket":
        data = request.getfixturevalue("in_bucket")
    expected = open_windows(data, 260, "train")
    shutil.rmtree(tmp_path / "text")
    refused(data, "there is no such folder")
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "another host"))
    path = expected.store.path
    alone = data_config(tmp_path / "x", "files", store=path, seq_len=64)
    windows = open_windows(alone, 260, "train")
    assert windows.store == expected.store
    assert not (tmp_path / "another host").exists()
    assert_same_batches(windows, expected)
    sources = tuple({"weight": weight, "dataset": "files", "store": path} for weight in (1, 2))
    mixture = data_config(tmp_path / "x", "mixture", mixture=sources, seq_len=64)
    mixed = open_windows(mixture, 260, "train")
    assert [source.store for source in mixed.sources] == 2 * [expected.store]


def test_a_store_that_does_not_fit(tmp_path, sentencepiece_model):
    write_tfds(tmp_path / "data", "tfrecord", articles())
    settings = {
        "dataset": NAME,
        "template": "{title}: {text}",
        "loss_on": "targets",
        "validation_fraction": 0.1,
    }
    data = data_config(tmp_path, data_dir=tmp_path / "data", **settings)
    place = open_store(data, 260).path
    data = dataclasses.replace(data, data_dir="", store=place)
    assert open_store(data, 260).path == place
    for field, value, mentions in (
        ("dataset", "files", NAME),
        ("template", "{text}", "{title}: {text}"),
        ("loss_on", "all", "targets"),
        ("validation_fraction", 0.05, "0.1"),
        ("tokenizer", sentencepiece_model, "with byte "),
        ("store", str(tmp_path), "prope.data.prepare"),
    ):
        wrong = dataclasses.replace(data, **{field: value})
        says = refusal(open_store, wrong, 300)
        assert says.startswith(f"config.data.{field}={value}: ") and mentions in says


@pytest.mark.slow
def test_a_run_goes_on_without_its_text(tmp_path, bucket, storage, run_command):
    """On another host, which sees the bucket only."""
    write_text(tmp_path / "text", articles())
    data = ["--config.data.dataset=files", "--config.data.seq_len=64"]
    raw = [f"--config.data.data_dir={tmp_path}/text", f"--config.data.cache_dir={bucket}/stores"]
    prepared = run_command("prope.data.prepare", CONFIG, *data, *raw, **storage.environment)
    assert prepared.code == 0, prepared.stderr
    place = prepared.result["store"]
    train = ["prope.train", CONFIG, f"--workdir={tmp_path}/run", "--config.log_every=1", *data]
    first = run_command(*train, *raw, "--stop_at_step=10", **storage.environment)
    assert first.code == 0, first.stderr
    shutil.rmtree(tmp_path / "text")
    elsewhere = storage.environment | {"PROPE_CACHE": str(tmp_path / "another host")}
    by_place = run_command(*train, f"--config.data.store={place}", **elsewhere)
    assert by_place.code == 0, by_place.stderr
    assert "resumed from step 10" in by_place.stderr
    evaluate = ["prope.evaluate", f"--workdir={tmp_path}/run", "--max_windows=8"]
    evaluated = run_command(*evaluate, **elsewhere)
    assert evaluated.code == 0, evaluated.stderr
    assert evaluated.result["loss"] == by_place.result["eval_loss"]
