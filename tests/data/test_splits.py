"""What is held out for validation: not what is trained on, and something of every text."""

import gzip
import json
import pathlib

import numpy as np
import pytest
from support.text import (
    articles,
    data_config,
    documents_of,
    is_validation,
    read_tokens,
    refusal,
    texts_of,
)

from prope.data.mixture import open_windows
from prope.data.sources import base, files
from prope.data.sources.find import find_source
from prope.data.store.build import open_store
from prope.data.store.split import find_rule
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer
from prope.data.vocabulary import _train_documents

BOS, EOS = GEMMA_IDS.bos, GEMMA_IDS.eos


def sentences(first, count):
    numbers = range(first, first + count)
    return "".join(f"Sentence {i} tells of {i * i % 997} things.\n" for i in numbers)


def rows(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write(folder, contents):
    """Writes files by name; those that end in .gz are compressed."""
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return folder


def text_of(store, split):
    return ByteTokenizer().decode(read_tokens(store, split))


@pytest.fixture
def logged(caplog):
    caplog.set_level("INFO", "prope")
    base.log_once.cache_clear()
    return caplog


# --- Copies -----------------------------------------------------------------------------------

A = sentences(0, 2000)
B = sentences(5000, 2000)
COPIES = {
    "beside it": ({"a.txt": A, "b.txt": A}, 0),
    "of several": ({"a.txt": A, "b.txt": B, "c/a.txt": A, "c/b.txt": B}, 0),
    "compressed": ({"a.txt": A, "a.txt.gz": A}, 0),
    "as a row": ({"a.txt": A, "a.jsonl": rows(A)}, 0),
    "many small ones": ({f"{i:03}.txt": f"Text {i % 30}.\n" for i in range(90)}, 0),
    "with a heading": ({"a.txt": A, "b.txt": f"A heading\n{A}"}, 0.15),
    "joined": ({"a.txt": A, "b.txt": B, "all.txt": A + B}, 0.15),
    "twice in a file": ({"a.txt": A + A}, 0.15),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_held_out_text_are_not_trained_on(tmp_path, kind):
    contents, allowed = COPIES[kind]
    folder = write(tmp_path / "text", contents)
    store = open_store(data_config(tmp_path, "files", folder), 260)
    held_out = set(filter(None, text_of(store, "validation").splitlines()))
    train = set(text_of(store, "train").splitlines())
    assert len(held_out & train) <= allowed * len(held_out)
    assert len(held_out) >= 1 and len(train) >= 20


# --- Names of splits --------------------------------------------------------------------------

TRAIN, VALIDATION, TEST = (sentences(first, 40) for first in (0, 1000, 2000))
NAMED = {
    "WikiText": {"train.txt": TRAIN, "valid.txt": VALIDATION, "test.txt": TEST},
    "the Hub": {
        "data/train-00000-of-00002.jsonl": rows(TRAIN[:300]),
        "data/train-00001-of-00002.jsonl": rows(TRAIN[300:]),
        "data/validation-00000-of-00001.jsonl": rows(VALIDATION),
        "data/test-00000-of-00001.jsonl.gz": rows(TEST),
    },
    "folders": {"train/a.txt": TRAIN, "train/b/test.txt": "More.", "dev/a.txt": VALIDATION},
    "in the middle": {"wiki.train.txt": TRAIN, "wiki.VAL.txt": VALIDATION, "wiki.test.txt": TEST},
    "test for validation": {"my_train.txt": TRAIN, "my_test.txt": VALIDATION},
    "others": {"train1.txt": TRAIN, "extra.txt": "More.", "eval.txt": VALIDATION},
    "no name for training": {"corpus.txt": TRAIN, "valid.txt": VALIDATION},
}


@pytest.mark.parametrize("kind", NAMED)
def test_names_of_splits_are_the_splits(tmp_path, logged, kind):
    folder = write(tmp_path / "text", NAMED[kind])
    data = data_config(tmp_path, "files", folder, seq_len=32)
    store = open_store(data, 260)
    train = "".join(documents_of(store, "train"))
    assert train.replace("More.", "") == TRAIN
    assert ("More." in train) == any("More." in text for text in NAMED[kind].values())
    assert documents_of(store, "validation") == [VALIDATION]
    assert "".join(map(bytes.decode, _train_documents(data))) == train
    (line,) = [line for line in logged.messages if "names of files tell their splits" in line]
    assert " train" in line and "1 validation" in line
    has_test = kind in ("WikiText", "the Hub", "in the middle")
    assert ("1 test" in line) == ("test is not read" in line) == has_test
    assert ("test is taken for validation" in line) == (kind in ("test for validation", "others"))
    assert "training text, too" not in logged.text


ORDINARY = {
    "one split": {"train-0.txt": TRAIN, "train-1.txt": VALIDATION},
    "no training text": {"valid.txt": TRAIN, "test.txt": VALIDATION},
    "other words": {"trains.txt": TRAIN, "contest.txt": VALIDATION, "developing.txt": TEST},
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_names_that_tell_no_splits(tmp_path, logged, kind):
    folder = write(tmp_path / "text", ORDINARY[kind])
    store = open_store(data_config(tmp_path, "files", folder), 260)
    assert sorted(documents_of(store, "all")) == sorted(ORDINARY[kind].values())
    assert "names of files" not in logged.text


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_lines_in_both_splits_are_counted(tmp_path, logged, kind):
    train = ["Only here.", "In both.", "Once more in both.", "", "Only here."]
    held_out = ["In both.", " Once more in both. ", "", "In both.", "Only there."]
    make = rows if kind == "jsonl" else lambda *lines: "\n".join(lines)
    contents = {f"train.{kind}": make(*train), f"valid.{kind}": make(*held_out)}
    open_store(data_config(tmp_path, "files", write(tmp_path / "text", contents)), 260)
    (line,) = [line for line in logged.messages if "training text, too" in line]
    assert "2 of 3 different lines of the validation text" in line


# --- Few documents ----------------------------------------------------------------------------

NOVEL = "".join(f"Line {i} of a novel, which goes on.\n" for i in range(4000))
FEW = {
    "one row": {"a.jsonl": rows(NOVEL)},
    "one compressed row": {"a.jsonl.gz": rows(NOVEL)},
    "one text": {"input.txt": NOVEL},
    "one compressed text": {"input.txt.gz": NOVEL},
    "one short text": {"a.txt": NOVEL[:893]},
    "one line": {"a.txt": "To be, or not to be."},
    "one long line": {"a.txt": " ".join(f"word{i}" for i in range(9000))},
    "no space": {"a.txt": "".join(chr(0x4E00 + i % 20_000) for i in range(30_000))},
    "lines of CRLF": {"a.txt": NOVEL.replace("\n", "\r\n\r\n")},
    "equal lines": {"a.txt": "To be, or not to be.\n" * 3000},
    "two words": {"a.txt": "a", "b.txt": "b"},
    "17 texts": {f"{i:02}.txt": f"Text {i}.\n" for i in range(17)},
    "17 rows": {"a.jsonl": rows(*(f"Text {i}.\n" for i in range(17)))},
    "a novel beside 40 notes": {"a.txt": NOVEL} | {f"b{i}.txt": f"Note {i}" for i in range(40)},
    "a novel among rows": {"a.jsonl": rows("Note.", NOVEL, "Another note.")},
}


def texts_in(contents):
    """The documents of files by name, read without prope."""
    texts = []
    for name, text in contents.items():
        is_rows = "jsonl" in name
        texts += [json.loads(row)["text"] for row in text.splitlines()] if is_rows else [text]
    return texts


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("fraction", [0.05, 1e-9, 0.999])
def test_something_of_few_documents_is_held_out(tmp_path, kind, fraction):
    folder = write(tmp_path / "text", FEW[kind])
    data = data_config(tmp_path, "files", folder, validation_fraction=fraction, seq_len=2)
    texts = texts_in(FEW[kind])
    store = open_store(data, 260)
    for split in ("train", "validation"):
        assert open_windows(data, 260, split).count > 0
        assert len(documents_of(store, split)) == store.count("documents", split) <= len(texts)
    # Every byte is in one of them, once.
    parts = [read_tokens(store, split) for split in ("train", "validation")]
    both = np.concatenate([part[part >= 4] - 4 for part in parts])
    every = np.frombuffer("".join(texts).encode(), np.uint8)
    np.testing.assert_array_equal(np.bincount(both), np.bincount(every))
    assert store.count("bytes", "train") + store.count("bytes", "validation") == len(every)
    if fraction == 0.05 and len(every) > 60_000:
        assert store.count("bytes", "validation") < 0.15 * len(every), "about 5 %"


@pytest.mark.parametrize("kind", FEW)
def test_where_nothing_is_split_nothing_is_cut(tmp_path, kind):
    data = data_config(tmp_path, "files", write(tmp_path / "text", FEW[kind]), seq_len=10**6)
    texts = texts_in(FEW[kind])
    windows = open_windows(data, 260, "all")
    assert sorted(documents_of(windows.store, "all")) == sorted(texts)
    assert windows.store.count("documents", "all") == len(texts)
    size = sum(len(text.encode()) for text in texts)
    assert windows.store.targets("all") == size + len(texts) == windows.read([0])["weights"].sum()
    tokens = read_tokens(windows.store, "all")
    train = read_tokens(windows.store, "train")
    shares = (np.bincount(train[train != BOS], minlength=260) + 1) / (sum(train != BOS) + 260)
    expected = -np.log(shares)[tokens[tokens != BOS]].mean()
    assert np.isclose(windows.store.unigram_loss("all"), expected, rtol=1e-9)


def test_pieces_are_no_documents(tmp_path):
    """The training text of a document has one <bos>, and goes on where pieces are held out."""
    store = open_store(data_config(tmp_path, "files", write(tmp_path, {"a.txt": NOVEL})), 260)
    (train,) = documents_of(store, "train")
    (held_out,) = documents_of(store, "validation")
    lines = NOVEL.splitlines(keepends=True)
    in_train = [line in set(train.splitlines(keepends=True)) for line in lines]
    assert train == "".join(line for line, here in zip(lines, in_train, strict=True) if here)
    assert held_out == "".join(line for line, here in zip(lines, in_train, strict=True) if not here)
    changes = np.count_nonzero(np.diff(in_train))
    assert changes >= 8, "pieces are held out all over the text"


def test_many_documents_are_split_as_before(tmp_path):
    texts = articles(300)
    data = data_config(tmp_path, "files", write(tmp_path, {"a.jsonl": rows(*texts)}))
    store = open_store(data, 260)
    expected = [text for text in texts if is_validation(text.encode())]
    assert documents_of(store, "validation") == expected
    assert find_rule(find_source(data), 0.05).total == 0


def test_text_that_cannot_be_split_can_be_evaluated(tmp_path):
    folder = write(tmp_path / "text", {"a.txt": "word", "b.txt": "word"})
    data = data_config(tmp_path, "files", folder, seq_len=4)
    assert documents_of(open_windows(data, 260, "all").store, "all") == ["word", "word"]


# --- Long documents ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("text", ["a" * 1001, "數" * 401, NOVEL[:2000], "a b\n" * 300])
def test_a_long_document_is_read_in_parts_and_is_one(tmp_path, monkeypatch, name, text):
    monkeypatch.setattr(files, "PART_BYTES", 100)
    folder = write(tmp_path / "text", {name: rows(text) if "jsonl" in name else text})
    write(folder, {"b.txt": "b" * 90, "c.txt": ""})
    data = data_config(tmp_path, "files", folder)
    if name.startswith("a.txt"):
        assert max(map(len, texts_of(find_source(data)))) <= 100
    store = open_store(data, 260)
    assert documents_of(store, "all") == [text, "b" * 90]


# --- Separators -------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [2**26, 64, 37])
@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "%%"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_separator_stands_between_documents(tmp_path, monkeypatch, part, separator, name):
    monkeypatch.setattr(files, "PART_BYTES", part)
    texts = [f"Story {i}.\nIts end." for i in range(30)]
    line = separator if separator == "\n\n" else f"\n{separator}\n"
    folder = write(tmp_path / "text", {name: line.join(texts) + line})
    data = data_config(tmp_path, "files", folder, separator=separator)
    store = open_store(data, 260)
    assert sorted(documents_of(store, "all")) == sorted(texts)
    other = data_config(tmp_path, "files", folder)
    assert open_store(other, 260).fingerprint != store.fingerprint
    assert pathlib.Path(store.path).is_dir()


def test_a_separator_without_texts_is_refused(tmp_path):
    folder = write(tmp_path / "text", {"a.jsonl": rows("a%%b")})
    says = refusal(find_source, data_config(tmp_path, "files", folder, separator="%%"))
    assert says.startswith("config.data.separator=%%: splits .txt files")
