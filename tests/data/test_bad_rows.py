"""Documents that cannot be read, and folders that hold something else than text."""

import dataclasses
import gzip
import json

import pytest
from support.text import WIKIPEDIA as NAME
from support.text import (
    articles,
    data_config,
    documents_of,
    hash_files,
    is_validation,
    refusal,
    texts_of,
    write_tfds,
)

from prope.data.sources import base, files
from prope.data.sources.find import find_source
from prope.data.store.build import open_store, prepare
from prope.data.vocabulary import _train_documents
from prope.spec.run import Spec


def refused(data, *mentions):
    """Asserts that no store is made or opened, and what the line mentions."""
    says = refusal(open_store, data, 260)
    for mention in mentions:
        assert mention in says, says
    return says


# --- Bad rows ---------------------------------------------------------------------------------

GOOD = [{"text": f"A good row, number {number}."} for number in range(50)]
BAD_ROWS = {
    "cut short": ('{"text": "a"', "not a JSON value"),
    "a list": ('{"text": ["a"]}', "'text' holds a value of type list, not a string"),
    "an object": ('{"text": {"en": "a"}}', "'text' holds a value of type dict, not a string"),
    "a number": ('{"text": 1.5}', "'text' holds a value of type float, not a string"),
    "another key": ('{"content": "a"}', "no text under 'text'"),
    "no object": ('"a"', "no text under 'text'"),
}


def write_rows(path, *places, bad='{"text": ["a"]}'):
    """Writes 50 good rows, with a bad one in the place of each of these lines."""
    lines = [bad if number in places else json.dumps(row) for number, row in enumerate(GOOD, 1)]
    path.parent.mkdir(exist_ok=True)
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith("gz") else content)


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_rows_are_refused_or_left_out(tmp_path, caplog, kind, name):
    caplog.set_level("INFO", "prope")
    line, reason = BAD_ROWS[kind]
    folder = tmp_path / "text"
    write_rows(folder / name, 7, 30, bad=line)
    places = f"{folder}/{name} line 7, {folder}/{name} line 30: {reason}"
    for limit in (0, 1):
        data = data_config(tmp_path, "files", folder, max_bad_rows=limit)
        refused(data, places, f"config.data.max_bad_rows={limit}")
        says = refusal(list, _train_documents(data))
        assert places in says
    for limit in (2, 3):
        base.log_once.cache_clear()
        data = dataclasses.replace(data, max_bad_rows=limit)
        store = open_store(data, 260)
        assert store.count("documents", "all") == 48
        assert f"2 bad rows are left out: {places}" in caplog.text
        caplog.clear()
    assert len(list(_train_documents(data))) == store.count("documents", "train")
    assert prepare(Spec(data=data))["bad_rows"] == 2
    data = dataclasses.replace(data, max_bad_rows=1)  # of a store that is there
    refused(data, places)
    refused(dataclasses.replace(data, store=store.path), places)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_bad_files_are_named_up_to_ten(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 300)
    folder = tmp_path / "text"
    write_rows(folder / "a.jsonl", 10, 20)
    write_rows(folder / "b.jsonl.gz", 3)
    damaged = folder / "c.jsonl.gz"
    write_rows(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-60])
    (folder / "d.txt").write_bytes("ein Stück".encode("latin-1"))
    (folder / "e.txt").write_text("fine")
    (folder / "f.txt").write_bytes("ein Stück".encode("utf-16"))
    (folder / "g.txt.gz").write_bytes(b"not compressed")
    data = data_config(tmp_path, "files", folder, num_workers=workers)
    places = ["a.jsonl line 10", "a.jsonl line 20", "b.jsonl.gz line 3", "c.jsonl.gz"]
    places += ["d.txt", "f.txt", "g.txt.gz"]
    says = refused(data, *places)
    assert "e.txt" not in says and " more" not in says
    if workers == 1:
        write_rows(folder / "0.jsonl", *range(1, 31))
        says = refused(data, "/0.jsonl line 1, ", "/0.jsonl line 10: ", " more; or raise config")
        assert "/0.jsonl line 11" not in says
        data = dataclasses.replace(data, max_bad_rows=36)
        refused(data, "/0.jsonl line 1, ", "; and more")
        data = dataclasses.replace(data, max_bad_rows=37)
        assert open_store(data, 260).index["train"]["documents"] > 100


def test_chunks_that_are_looked_through_for_bad_rows_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 300)
    folder = tmp_path / "text"
    write_rows(folder / "a.jsonl", 10, 20)
    data = data_config(tmp_path, "files", folder, num_workers=1)
    refused(data, "line 10, ", "line 20: ")
    data = dataclasses.replace(data, max_bad_rows=2)
    again = open_store(data, 260)
    data = dataclasses.replace(data, cache_dir=str(tmp_path / "other"))
    assert hash_files(again.path) == hash_files(open_store(data, 260).path)


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_bad_records_of_a_dataset_may_be_left_out(tmp_path, kind):
    texts = articles()
    texts[150] = b"fine so far \xff\xfe"
    write_tfds(tmp_path / "data", kind, texts)
    data = data_config(tmp_path, NAME, tmp_path / "data", max_bad_rows=1)
    store = open_store(data, 260)
    assert documents_of(store, "train") == [
        text for text in texts if isinstance(text, str) and not is_validation(text.encode())
    ]


# --- Folders that are mostly something else ---------------------------------------------------

PARQUET = b"PAR1" + bytes(2000)
OTHERS = {
    "a licence": {"LICENSE.txt": b"x" * 900, "data/train-00000.csv": PARQUET},
    "requirements": {"requirements.txt": b"jax\n", "a.csv": PARQUET, "README.txt": b"About."},
    "a vocabulary": {"vocab.txt": b"a\nb\n", "model.safetensors": PARQUET, "config.json": b"{}"},
    "a row": {"a.jsonl": b'{"text": "a"}\n', "a.arrow": PARQUET, "b.json.zst": PARQUET},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_folder_that_is_mostly_something_else(tmp_path, kind):
    folder = tmp_path / "text"
    for name, content in OTHERS[kind].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    data = data_config(tmp_path, "files", folder)
    other = [name for name, content in OTHERS[kind].items() if content is PARQUET]
    if kind in ("a licence", "requirements"):
        refused(
            data, f"config.data.data_dir={folder}: no file of text", "about the data", "1 ending in"
        )
    else:
        read, text = next(iter(OTHERS[kind].items()))
        size = sum(len(content) for name, content in OTHERS[kind].items() if name != read)
        refused(data, f"{len(text)} bytes of text", f"{size:,} bytes left out: ", *other)
    (folder / "novel.txt").write_text("A novel. " * 1000)
    texts = list(texts_of(find_source(data)))
    assert len(texts) == 1 + (kind in ("a vocabulary", "a row"))


ABOUT = ["README.txt", "readme.txt.gz", "LICENSE", "LICENSE-MIT.txt", "licence.txt", "License.md"]
ABOUT += ["requirements.txt", "requirements-dev.txt", "COPYING.txt", "NOTICE.txt"]
TEXTS = ["readmes.txt", "licensed_to_kill.txt", "LICENSE.jsonl", "my_readme.txt", "noticeable.txt"]


@pytest.mark.parametrize("name", [*ABOUT, *TEXTS])
def test_files_about_a_folder_are_no_documents(tmp_path, name):
    folder = tmp_path / "text"
    folder.mkdir()
    content = json.dumps({"text": "b"}).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (folder / "a.txt").write_text("a")
    source = find_source(data_config(tmp_path, "files", folder))
    assert len(list(texts_of(source))) == 1 + (name in TEXTS)
