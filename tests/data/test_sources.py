"""Kinds of text, instructions, and mixtures: that nothing is lost or doubled on the way."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import platform
import socket
import sysconfig

import numpy as np
import pytest
from etils import epath
from support.text import WIKIPEDIA as NAME
from support.text import (
    articles,
    data_config,
    documents_of,
    is_validation,
    read_tokens,
    texts_of,
    write_dataset,
    write_lines,
    write_text,
    write_tfds,
)

from prope.config import spec_from_dict
from prope.data.mixture import interleave_sources, open_windows
from prope.data.sources import base, files
from prope.data.sources.find import find_source
from prope.data.store import arrays
from prope.data.store.build import open_store, prepare
from prope.data.tokenizer import GEMMA_IDS
from prope.data.windows import train_batch
from prope.runtime.files import hash_file
from prope.spec.run import Spec, differences

assert_equal = np.testing.assert_array_equal
BOS = GEMMA_IDS.bos
EOS = GEMMA_IDS.eos


# --- Folders ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Every kind of file; the texts in order are those of articles(60)."""
    root = tmp_path / "text"
    (root / "d").mkdir(parents=True)
    texts = articles(60)
    lines = []
    for i, text in enumerate(texts):
        line = json.dumps({"text": text, "n": 1}, ensure_ascii=i % 2 == 0)
        lines.append(line + "\n" * (1 + i % 3))
    (root / "a.jsonl").write_text("".join(lines[:30]).rstrip("\n"))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:50]).encode()))
    (root / "c.txt").write_text(texts[50])
    (root / "c.txt.gz").write_bytes(gzip.compress(texts[51].encode()))
    for number in range(52, 60):
        (root / "d" / f"{number}.txt").write_text(texts[number])
    (root / "notes.md").write_text("not a document")
    return root


@pytest.mark.parametrize("size", [1, 37, 333, 5_000, 10**9])
def test_a_folder_is_the_same_documents_however_it_is_cut(tmp_path, folder, monkeypatch, size):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: size)
    source = find_source(data_config(tmp_path, "files", folder))
    assert [text.decode() for text in texts_of(source)] == articles(60)
    assert len(source.chunks) > 1 or size == 10**9
    assert len({chunk.key for chunk in source.chunks}) == len(source.chunks)


@pytest.fixture
def data_lines(caplog):
    """The lines about data that were logged since the last call."""
    caplog.set_level("INFO", "prope")
    base.log_once.cache_clear()

    def take():
        lines = [line for line in caplog.messages if line.startswith("data: ")]
        caplog.clear()
        return lines

    return take


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def json_line(text):
    return json.dumps({"text": text}) + "\n"


def test_files_that_are_not_read_are_counted(tmp_path, data_lines):
    folder = tmp_path / "text"
    for name in ("a.jsonl", "B.JSONL", "d/c.jsonl"):
        write(folder, name, json_line(name))
    write(folder, "D.TXT.GZ", gzip.compress(b"D"))
    hidden = ["._a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "__MACOSX/a.txt", ".git/x.txt"]
    for name in [*hidden, "e.csv", "f.csv", "g.md", "makefile", "txt", "h.txt~"]:
        write(folder, name, "not a document")
    os.mkfifo(folder / "pipe.txt")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(folder / "s.txt"))
        (folder / "device.txt").symlink_to("/dev/zero")
        (folder / "gone.txt").symlink_to(tmp_path / "nowhere")
        source = find_source(data_config(tmp_path, "files", folder))
    assert sorted(texts_of(source)) == [b"B.JSONL", b"D", b"a.jsonl", b"d/c.jsonl"]
    assert data_lines() == [
        f"data: {folder}: 4 files read, 14 left out (4 hidden, 3 pipes or devices, "
        "2 ending in .csv, 2 without an ending, 1 ending in .md ..)"
    ]


def test_links_are_followed_once(tmp_path, data_lines):
    folder = tmp_path / "text"
    write(folder, "b/a.jsonl", json_line("b"))
    write(tmp_path, "outside/o.jsonl", json_line("o"))
    write(tmp_path, "outside/deeper/p.jsonl", json_line("p"))
    write(tmp_path, "one.jsonl", json_line("one"))
    (folder / "a").symlink_to(folder / "b")  # read where it is
    (folder / "b" / "up").symlink_to(folder)
    (folder / "c").symlink_to(tmp_path / "outside")
    (folder / "d").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "loop").symlink_to(tmp_path / "outside")
    (folder / "e").symlink_to(tmp_path / "outside" / "deeper")
    (folder / "f.jsonl").symlink_to(tmp_path / "one.jsonl")
    (folder / "g.jsonl").symlink_to(folder / "b" / "a.jsonl")
    source = find_source(data_config(tmp_path, "files", folder))
    names = [name for name, _ in source.identity["files"]]
    assert names == ["b/a.jsonl", "c/deeper/p.jsonl", "c/o.jsonl", "f.jsonl"]
    assert list(texts_of(source)) == [b"b", b"p", b"o", b"one"]
    assert data_lines() == [f"data: {folder}: 4 files read, 6 left out (6 linked twice)"]


def test_files_in_a_bucket_are_hashed_once(tmp_path, bucket, monkeypatch, data_lines):
    """Not again on a host that has read none of them, unless they change."""
    hashed = []
    monkeypatch.setattr(
        files, "hash_file", lambda path: hashed.append(path.name) or hash_file(path)
    )
    folder = epath.Path(bucket)
    for name in ("a.txt", "b.txt", "x/c.JSONL", "._a.txt", ".ipynb_checkpoints/a.txt", "c.md"):
        (folder / name).write_text(json_line(name))
    data = data_config(tmp_path, "files", bucket, cache_dir=f"{bucket}-stores")
    source = find_source(data)
    left_out = "3 left out (2 hidden, 1 ending in .md)"
    assert data_lines() == [f"data: {bucket}: 3 files read, {left_out}"]
    assert list(texts_of(source))[2] == b"x/c.JSONL"
    assert sorted(hashed) == ["a.txt", "b.txt", "c.JSONL"]
    assert find_source(data).identity == source.identity
    assert len(hashed) == 3
    (folder / "b.txt").write_text(json_line("B.txt"))  # of the same size
    (folder / "d.txt").write_text("d")
    changed = find_source(data).identity
    assert sorted(hashed[3:]) == ["b.txt", "d.txt"]
    other_cache = data_config(tmp_path / "other", "files", bucket)
    assert find_source(other_cache).identity == changed != source.identity
    (hashes,) = epath.Path(data.cache_dir).iterdir()
    hashes.write_text("[" * 100_000)
    assert find_source(data).identity == changed


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = "One line.\n\ufeffTwo.\n"
    content = json_line(text) if "jsonl" in name else text
    content = content.encode("utf-8-sig")
    write(tmp_path / "text", name, gzip.compress(content) if name.endswith("gz") else content)
    write(tmp_path / "text", "b.txt", b"\xef\xbb\xbf")
    source = find_source(data_config(tmp_path, "files", tmp_path / "text"))
    assert list(texts_of(source)) == [text.encode(), b""]


def test_records_without_text_are_left_out_and_counted(tmp_path):
    records = [{"text": "a", "q": "1"}, {"text": None, "q": "2"}, {"q": None, "text": "b"}]
    folder = tmp_path / "text"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [*records, {"text": " \n", "q": ""}])
    for template, documents in (("", ["a", "b"]), ("{q}:{text}", ["1:a", ": \n"])):
        store = open_store(data_config(tmp_path, "files", folder, template=template), 260)
        assert documents_of(store, "all") == documents
        assert store.index["empty"] == 2


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_texts_of_a_dataset_that_are_empty_are_left_out_and_counted(tmp_path, data_lines, kind):
    texts = articles(50)
    stores = []
    for name, written in (("a", [*texts[:20], "", *texts[20:], " \n"]), ("b", texts)):
        write_tfds(tmp_path / name, kind, written)
        data = data_config(tmp_path / name, NAME, tmp_path / name, validation_fraction=0.2)
        stores.append(open_store(data, 260))
    with_empty, without = stores
    for split in arrays.SPLITS:
        assert_equal(read_tokens(with_empty, split), read_tokens(without, split))
    assert (with_empty.index["empty"], without.index["empty"]) == (2, 0)
    (line,) = [line for line in data_lines() if "left out" in line]
    count = "data: 2 documents without text were left out"
    assert line.startswith(f"{count}, the first in wikipedia-train.{kind}-00001")


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_a_folder_whose_name_is_a_pattern(tmp_path, kind):
    folder = tmp_path / "a[b]*?"
    dataset = write_dataset(folder / kind, kind, articles())
    source = find_source(data_config(tmp_path, dataset, folder / kind))
    assert [text.decode() for text in texts_of(source)] == articles()


# --- Datasets of TFDS -------------------------------------------------------------------------


def test_another_version_of_a_dataset_is_other_data(tmp_path):
    """The greatest of several by number is read, unless its name is given."""
    for version in ("1.0.0", "1.9.0", "1.10.0"):
        folder = write_tfds(tmp_path / version, "tfrecord", articles())
        info = json.loads((folder / "dataset_info.json").read_text())
        (folder / "dataset_info.json").write_text(json.dumps(info | {"version": version}))
        (tmp_path / "data" / NAME).mkdir(parents=True, exist_ok=True)
        folder.rename(tmp_path / "data" / NAME / version)
    sources = {}
    for name in (NAME, f"{NAME}:1.10.0", f"{NAME}/1.9.0"):
        identity = find_source(data_config(tmp_path, name, tmp_path / "data")).identity
        sources[name] = identity["version"]
    assert list(sources.values()) == ["1.10.0", "1.10.0", "1.9.0"]


# --- The library of Python --------------------------------------------------------------------


OTHERS = {
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "idlelib",
    "idle_test",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}


TAKEN = {"a.py": 50_000, "b/b.py": 199_999, "b.py": 200_000}


LEFT_OUT = {"short.py": 49_999, "long.py": 200_001, "_sysconfigdata__linux.py": 60_000}


NOT_LISTED = {"a.txt": 60_000} | {
    f"{folder}/{name}/a.py": 60_000 for folder in ("a", "b/c") for name in OTHERS
}


def write_library(folder, sizes, monkeypatch):
    """Writes files of these sizes, and makes them Python's library."""
    folder.mkdir()
    for name, size in sizes.items():
        write(folder, name, f"# {name}\n".ljust(size, "x"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    return folder


def test_source_files_are_taken_by_size_and_place(tmp_path, monkeypatch, data_lines):
    sizes = TAKEN | LEFT_OUT | NOT_LISTED
    library = write_library(tmp_path / "a", sizes, monkeypatch)
    data = data_config(tmp_path, "python_source")
    first = find_source(data)
    documents = list(texts_of(first))
    assert documents == [(library / name).read_bytes() for name in TAKEN]
    assert first.num_bytes == sum(TAKEN.values())
    assert data_lines() == ["data: python_source: 3 files of 50 to 200 KB, 3 left out"]

    assert first.identity["python"] == platform.python_version()
    library = write_library(tmp_path / "b", dict(reversed(sizes.items())), monkeypatch)
    assert find_source(data).identity == first.identity, "whatever the place, order and date"
    write(library, "short.py", "# other text")
    assert find_source(data).identity == first.identity, "whatever is left out"
    write(library, "a.py", "y" * TAKEN["a.py"])
    assert find_source(data).identity != first.identity, "of equal size"


def test_the_fingerprint_of_the_documentation_stays(tmp_path, monkeypatch):
    sizes = {"b.py": 90, "b/tkinter/c.py": 80, "test/d.py": 80}
    write_library(tmp_path / "library", sizes, monkeypatch)
    listing = b'[["b/tkinter/c.py", 80], ["b.py", 90]]'
    assert find_source(data_config(tmp_path)).identity == {
        "dataset": "python_docs",
        "python": platform.python_version(),
        "files": hashlib.sha256(listing).hexdigest(),
    }


def test_source_files_are_split_by_their_paths(tmp_path):
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = {"train": [], "validation": []}
    for path in sorted(library.glob("**/*.py")):
        name = path.relative_to(library)
        text = path.read_bytes()
        if not 50_000 <= len(text) <= 200_000 or OTHERS & set(name.parts):
            continue
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=8).hexdigest()
        held_out = int(digest, 16) / 2**64 < 0.25
        texts["validation" if held_out else "train"].append(text.decode())
    store = open_store(data_config(tmp_path, "python_source", validation_fraction=0.25), 260)
    for split, expected in texts.items():
        assert documents_of(store, split) == expected
        assert store.count("documents", split) == len(expected)
    assert len(texts["train"]) >= 25 and len(texts["validation"]) >= 8, "enough for a mean"


# --- Instructions -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "array_record", "tfrecord"])
def test_the_loss_may_fall_on_targets_only(tmp_path, kind):
    texts = articles(60)
    if kind == "files":
        write_lines(tmp_path / "a.jsonl", [{"title": "t", "text": text} for text in texts])
    else:
        write_tfds(tmp_path, kind, texts)
    fields = {"template": "Q: {title}\nA: {text}", "loss_on": "targets"}
    fields |= {"seq_len": 50, "validation_fraction": 0.2}
    data = data_config(tmp_path, "files" if kind == "files" else NAME, tmp_path, **fields)
    prompt = b"Q: t\nA: "
    expected_tokens = []
    expected_weights = []
    num_bytes = 0
    for predicted in map(str.encode, texts):
        if not is_validation(prompt + predicted, 0.2):
            expected_tokens += [BOS, *(byte + 4 for byte in prompt + predicted), EOS]
            expected_weights += [0] * (1 + len(prompt)) + [1] * (len(predicted) + 1)
            num_bytes += len(predicted)
    windows = open_windows(data, 260, "train")
    store = windows.store
    batch = windows.read(range(windows.count))
    last = len(expected_tokens) - 1
    assert_equal(batch["targets"].ravel()[:last], expected_tokens[1:])
    assert_equal(batch["tokens"].ravel()[:last], expected_tokens[:-1])
    assert_equal(batch["weights"].ravel()[:last], expected_weights[1:])
    num_documents = expected_tokens.count(BOS)
    assert batch["weights"].sum() == num_bytes + num_documents == store.targets("train")
    assert store.index["train"]["bytes"] == num_bytes

    def predicted_ids(split):
        ids, is_prompt = store.decode(read_tokens(store, split))
        return ids[~is_prompt & (ids != BOS)]

    train = predicted_ids("train")
    for name, ids in (("train_unigram_loss", train), ("unigram_loss", predicted_ids("validation"))):
        losses = [-math.log((np.sum(train == t) + 1) / (len(train) + 260)) for t in ids]
        assert math.isclose(store.index[name], np.mean(losses), rel_tol=1e-9)
    loss_on_all = open_store(dataclasses.replace(data, loss_on="all"), 260)
    assert loss_on_all.fingerprint != store.fingerprint
    assert_equal(read_tokens(loss_on_all, "train"), expected_tokens)


@pytest.mark.parametrize(
    ("vocab_size", "has_prompts", "dtype"),
    [
        (2**15, True, "uint16"),
        (2**15 + 1, True, "uint32"),
        (2**16, False, "uint16"),
        (2**16 + 1, False, "uint32"),
    ],
)
def test_the_mark_of_prompts_leaves_every_id_as_it_is(vocab_size, has_prompts, dtype):
    assert arrays.element_dtype(vocab_size, has_prompts=has_prompts) == dtype
    if has_prompts:
        expected = [0, 1, vocab_size - 1, vocab_size - 1]
        elements = np.array(expected, dtype)
        elements[[1, 3]] |= arrays.prompt_bit(elements.dtype)
        store = arrays.Store("", "", {"rule": {"has_prompts": True}})
        ids, is_prompt = store.decode(elements)
        assert ids.dtype == np.int32
        assert ids.tolist() == expected
        assert is_prompt.tolist() == [False, True, False, True]


FILES = {"weight": 1, "dataset": "files", "data_dir": "a"}


# --- Mixtures ---------------------------------------------------------------------------------


def mixture(tmp_path, weights=(3, 1)):
    """A config of two folders; the configs of the folders."""
    first = write_text(tmp_path / "text", articles(100))
    second = write_text(tmp_path / "other", [text.upper() for text in articles(40)])
    entries = [FILES | {"data_dir": str(folder)} for folder in (first, second)]
    data = mixed(tmp_path, entries, weights)
    alone = [data_config(tmp_path, "files", folder, seq_len=64) for folder in (first, second)]
    return data, alone


def mixed(tmp_path, entries, weights):
    weighted = [entry | {"weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    return data_config(tmp_path, "mixture", seq_len=64, mixture=tuple(weighted))


@pytest.mark.parametrize("shares", [[1], [9, 1], [1, 1], [3, 2, 5], [9997, 1, 2], [333, 667]])
def test_turns_are_spread_evenly(shares):
    turn, before = interleave_sources(shares)
    order = np.tile(turn, 3)
    for index, share in enumerate(shares):
        counts = np.concatenate([[0], np.cumsum(order == index)])
        expected = np.arange(len(counts)) * share / sum(shares)
        assert np.abs(counts - expected).max() <= 1.5
        assert counts[len(turn)] == share
        assert_equal(before[turn == index], np.arange(share))


def test_a_mixture_takes_from_each_source_its_share_and_order(tmp_path):
    data, alone = mixture(tmp_path, weights=(0.75, 0.25))
    windows = open_windows(data, 260, "train")
    first, second = (open_windows(source, 260, "train") for source in alone)
    indices = [windows.window_index(example, seed=5) for example in range(4 * first.count)]
    from_first = [index for index in indices if index < first.count]
    from_second = [index - first.count for index in indices if index >= first.count]
    assert len(from_first) == 3 * len(from_second)
    for source, order in ((first, from_first), (second, from_second)):
        assert order == [source.window_index(example, seed=5) for example in range(len(order))]
    batch = train_batch(windows, 5, 8, 3)
    half = train_batch(open_windows(data, 260, "train"), 5, 8, 3, rows=range(4, 8))
    for row, index in enumerate(indices[24:32]):
        is_first = index < first.count
        expected = first.read([index]) if is_first else second.read([index - first.count])
        for name, values in batch.items():
            assert_equal(values[row], expected[name][0])
    for name, values in half.items():
        assert_equal(values, batch[name][4:])


def test_a_mixture_is_evaluated_on_all_of_its_sources(tmp_path):
    data, alone = mixture(tmp_path)
    prepared = prepare(Spec(data=data))
    stores = [open_store(source, 260) for source in alone]
    assert prepared["documents"] == 140
    assert prepared["store"] == [store.path for store in stores]
    windows = open_windows(data, 260, "validation")
    assert windows.store.fingerprint == prepared["fingerprint"]
    batch = windows.read(range(windows.count))
    tokens = np.concatenate([read_tokens(store, "validation") for store in stores])
    assert_equal(batch["targets"][batch["weights"] > 0], tokens[tokens != BOS])
    other = mixed(tmp_path, data.mixture, weights=(1, 1))
    fingerprint = open_windows(other, 260, "validation").store.fingerprint
    assert fingerprint != windows.store.fingerprint


@pytest.mark.parametrize("seed", [2**26, 2**63])
@pytest.mark.parametrize("first", ["files", "longcontext/passkey"])
def test_a_generated_source_of_a_mixture_has_windows_for_every_seed(tmp_path, seed, first):
    folder = str(write_text(tmp_path / "text", articles(60)))
    entries = [{"dataset": "longcontext/passkey"}, {"dataset": "files", "data_dir": folder}]
    entries.sort(key=lambda entry: entry["dataset"] != first)
    windows = open_windows(mixed(tmp_path, entries, weights=(1, 1)), 260, "train")
    batch = train_batch(windows, seed, 4, 0)
    for number, entry in enumerate(entries):
        data = data_config(tmp_path, seq_len=64, **entry)
        expected = train_batch(open_windows(data, 260, "train"), seed, 2, 0)
        for name, values in expected.items():
            assert_equal(batch[name][number::2], values)


def test_a_mixture_in_a_saved_config():
    spec = Spec().replace({"data.dataset": "mixture", "data.mixture": (FILES,)})
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    moved = spec.replace({"data.mixture": (FILES | {"data_dir": "b"},)})
    assert differences(spec.flat(), moved.flat()) == []
    other = spec.replace({"data.mixture": ({"weight": 1, "dataset": "python_docs"},)})
    assert differences(spec.flat(), other.flat()) != []
