"""From text to batches: that nothing is lost, doubled or half used on the way."""

import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from makers import WIKIPEDIA as NAME
from makers import articles, documents_of, write_text, write_tfds
from makers import data_config as settings
from makers import data_refused as refused
from makers import read_tokens as stream

from prope.data.sources import files
from prope.data.sources import tfds as tfds_files
from prope.data.sources.find import find_source
from prope.data.store import arrays as store_lib
from prope.data.store import build as prepare
from prope.data.store import pack, workers
from prope.data.tokenizer import BOS, EOS, load_tokenizer
from prope.data.windows import Windows, prefetch, shuffled_index, train_batch
from prope.errors import UsageError


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_every_document_arrives_once_and_whole(tmp_path, kind):
    texts = articles()
    if kind == "files":
        config = settings(
            tmp_path, "files", write_text(tmp_path / "text", texts), validation_fraction=0.3
        )
    else:
        write_tfds(tmp_path / "data", kind, texts)
        config = settings(tmp_path, NAME, tmp_path / "data", validation_fraction=0.3)
    store = prepare.open_store(config, 260)
    found = {split: documents_of(store, split) for split in ("train", "validation")}
    held_out = [t for t in texts if pack.is_validation(t.encode(), 0.3)]
    assert found["validation"] == held_out
    assert found["train"] == [t for t in texts if t not in held_out]
    for split, documents in found.items():
        size = sum(len(d.encode()) for d in documents)
        expected = {
            "tokens": size + 2 * len(documents),
            "documents": len(documents),
            "bytes": size,
            "prompt_tokens": 0,
        }
        assert store.index[split] == expected
        assert store.targets(split) == size + len(documents)


@pytest.mark.parametrize("size", [1000, 10**9])
def test_chunks_have_their_share_of_a_datasets_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(tfds_files, "chunk_bytes", lambda total: size)
    folder = write_tfds(tmp_path, "array_record", articles())
    total = int(json.loads((folder / "dataset_info.json").read_text())["splits"][0]["numBytes"])
    source = find_source(settings(tmp_path, NAME, tmp_path))
    assert total - len(source.chunks) <= source.num_bytes <= total  # each is rounded down
    assert max(chunk.num_bytes for chunk in source.chunks) <= size and len(source.chunks) >= 2


def test_both_formats_are_the_same_data(tmp_path):
    stores = []
    for kind in ("array_record", "tfrecord"):
        write_tfds(tmp_path / kind, kind, articles())
        stores.append(prepare.open_store(settings(tmp_path / kind, NAME, tmp_path / kind), 260))
    assert stores[0].path != stores[1].path and stores[0].fingerprint == stores[1].fingerprint
    for split in ("train", "validation"):
        np.testing.assert_array_equal(stream(stores[0], split), stream(stores[1], split))


def test_another_version_of_a_dataset_is_other_data(tmp_path):
    folder = write_tfds(tmp_path, "tfrecord", articles())
    first = prepare.open_store(settings(tmp_path, NAME, tmp_path), 260)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"version": "1.0.1"}))
    folder.rename(folder.with_name("1.0.1"))
    assert (
        prepare.open_store(settings(tmp_path, NAME, tmp_path), 260).fingerprint != first.fingerprint
    )


def test_workers_do_not_change_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 1000)
    folder = write_text(tmp_path / "text", articles())
    stores = [
        prepare.open_store(settings(tmp_path / str(n), "files", folder, num_workers=n), 260)
        for n in (1, 2)
    ]
    for split in ("train", "validation"):
        np.testing.assert_array_equal(stream(stores[0], split), stream(stores[1], split))
    assert stores[0].index == stores[1].index


def test_shards_of_the_store_are_cut_anywhere(tmp_path, monkeypatch):
    folder = write_text(tmp_path / "text", articles())
    whole = stream(prepare.open_store(settings(tmp_path / "whole", "files", folder), 260), "train")
    monkeypatch.setattr(store_lib, "_READ_TOKENS", 128)
    monkeypatch.setattr(store_lib, "SHARD", 1024)
    cut = prepare.open_store(settings(tmp_path / "cut", "files", folder), 260)
    assert len(list((pathlib.Path(cut.path) / "train").rglob("*"))) > 5
    np.testing.assert_array_equal(stream(cut, "train"), whole)


def test_a_store_is_written_once_and_named_by_what_is_in_it(tmp_path):
    folder = write_text(tmp_path / "text", articles())
    config = settings(tmp_path, "files", folder)
    store = prepare.open_store(config, 260)
    before = (pathlib.Path(store.path) / "index.json").stat().st_mtime_ns
    assert prepare.open_store(config, 260).path == store.path
    assert (pathlib.Path(store.path) / "index.json").stat().st_mtime_ns == before
    other = settings(tmp_path, "files", folder, validation_fraction=0.1)
    assert prepare.open_store(other, 260).fingerprint != store.fingerprint
    (folder / "a.txt").write_text("another text")
    assert prepare.open_store(config, 260).fingerprint != store.fingerprint


def test_an_interrupted_preparation_is_never_used(tmp_path, monkeypatch):
    folder = write_text(tmp_path / "text", articles())
    config = settings(tmp_path, "files", folder)
    packed = workers._packed

    def interrupted(*arguments):
        yield from packed(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_packed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.open_store(config, 260)
    assert not list((tmp_path / "cache").rglob("index.json"))
    monkeypatch.setattr(workers, "_packed", packed)
    assert len(documents_of(prepare.open_store(config, 260), "train")) > 0


def test_a_damaged_store_is_an_error_and_not_other_text(tmp_path):
    store = prepare.open_store(
        settings(tmp_path, "files", write_text(tmp_path / "text", articles())), 260
    )
    (shard,) = (
        path for path in (pathlib.Path(store.path) / "train" / "c").rglob("*") if path.is_file()
    )
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        stream(store, "train")


def test_the_baseline_is_the_cross_entropy_of_token_frequencies(tmp_path):
    store = prepare.open_store(
        settings(tmp_path, "files", write_text(tmp_path / "text", articles())), 260
    )
    train, held_out = (s[s != BOS] for s in (stream(store, "train"), stream(store, "validation")))
    total = 0.0
    for token in held_out:
        total -= math.log((np.sum(train == token) + 1) / (len(train) + 260))
    assert math.isclose(store.index["unigram_loss"], total / len(held_out), rel_tol=1e-9)


@pytest.mark.slow
def test_python_documentation_is_there(tmp_path):
    store = prepare.open_store(settings(tmp_path), 260)
    assert store.index["train"]["bytes"] + store.index["validation"]["bytes"] > 1_000_000
    assert any(
        "The Python Debugger" in text
        for text in documents_of(store, "train") + documents_of(store, "validation")
    )


# --- Windows ----------------------------------------------------------------------------------------------------


@pytest.fixture
def windows(tmp_path):
    folder = write_text(tmp_path / "text", articles())

    def of(split="train", **fields):
        return Windows(settings(tmp_path, "files", folder, **{"seq_len": 64} | fields), 260, split)

    return of


@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_predict_every_token_once(windows, split):
    of = windows(split)
    batch = of.read(range(of.count))
    tokens = stream(of.store, split)
    predicted = batch["targets"][batch["weights"] > 0]
    np.testing.assert_array_equal(predicted, tokens[tokens != BOS])
    assert len(predicted) == of.store.targets(split)
    np.testing.assert_array_equal(batch["tokens"].ravel()[: len(tokens) - 1], tokens[:-1])
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(
        batch["positions"], np.broadcast_to(np.arange(64), batch["tokens"].shape)
    )


@pytest.mark.parametrize(("shorter", "count"), [(2, 2), (1, 1), (0, 1)])
def test_the_last_window_may_predict_one_token(windows, shorter, count):
    length = windows("validation").length
    of = windows("validation", seq_len=length - shorter)
    assert of.count == count and of.read(range(count))["weights"].sum() == of.store.targets(
        "validation"
    )


def test_segments_and_positions_follow_the_documents(windows):
    of = windows(mask_documents=True)
    batch = of.read(range(of.count))
    for row in range(of.count):
        segment, position = (1, 0)
        for t in range(64):
            token = batch["tokens"][row, t]
            if t and token == BOS:
                segment, position = segment + 1, 0
            if row * 64 + t >= of.store.index["train"]["tokens"]:
                segment = 0
            else:
                assert batch["positions"][row, t] == position, (row, t)
            assert batch["segment_ids"][row, t] == segment, (row, t)
            position += 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1237])
def test_every_epoch_is_a_new_permutation(count):
    epochs = [
        [shuffled_index(epoch * count + place, count, seed=5) for place in range(count)]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count >= 100:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(count))
        assert epochs[0] != [shuffled_index(place, count, seed=6) for place in range(count)]


def test_a_batch_is_a_function_of_its_step(windows):
    of, again = windows(), windows()
    late = train_batch(again, seed=1, batch_size=8, step=40)
    for step in (0, 3, 40):
        batch = train_batch(of, seed=1, batch_size=8, step=step)
    for name, values in batch.items():
        np.testing.assert_array_equal(values, late[name])
        halves = [train_batch(of, 1, 8, 40, rows) for rows in (range(4), range(4, 8))]
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), values)
        pair = [train_batch(of, 1, 4, step)[name] for step in (80, 81)]
        (
            np.testing.assert_array_equal(np.concatenate(pair), values),
            "the batch size cuts one endless list",
        )
    assert np.any(train_batch(of, 2, 8, 40)["tokens"] != late["tokens"])


def test_reading_ahead_keeps_the_order():
    assert list(prefetch(lambda step: step * step, 3, 9)) == [9, 16, 25, 36, 49, 64]
    assert list(prefetch(lambda step: step, 3, 3)) == []


# --- Tokenizers -------------------------------------------------------------------------------------------------


def test_bytes_come_back():
    tokenizer = load_tokenizer("byte")
    text = "".join(map(chr, range(1, 1000))) + "数学 🧭"
    ids = tokenizer.encode(text.encode())
    assert ids.min() >= 4 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode([BOS, *ids, EOS]) == text


def test_sentencepiece_makes_a_store(tmp_path, sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    texts = articles()
    config = settings(
        tmp_path, "files", write_text(tmp_path / "text", texts), tokenizer=sentencepiece_model
    )
    store = prepare.open_store(config, 300)
    tokens = np.concatenate([stream(store, split) for split in ("train", "validation")])
    assert np.sum(tokens == 2) == np.sum(tokens == 1) == len(texts)
    assert store.index["train"]["bytes"] + store.index["validation"]["bytes"] == sum(
        len(t.encode()) for t in texts
    )
    first = stream(store, "train")
    first = first[1 : np.flatnonzero(first == 1)[0]]
    assert tokenizer.decode(first) == next(
        t for t in texts if not pack.is_validation(t.encode(), 0.05)
    )


# --- What cannot be used ----------------------------------------------------------------------------------------


def test_data_that_is_not_there(tmp_path):
    bring = r"gcloud storage cp -r gs://tfds-data/datasets/wikipedia/20230601.simple/1.0.0 .*20230601.en/1.0.0"
    refused(
        settings(tmp_path, NAME, tmp_path / "none"),
        f"data_dir=.*none: there is no such folder.*{bring}",
    )
    (tmp_path / "none").mkdir()
    refused(settings(tmp_path, NAME, tmp_path / "none"), f"no dataset {NAME} in it.*{bring}")
    refused(settings(tmp_path, "lm1b", tmp_path / "none"), "no dataset lm1b in it.*tfds build lm1b")
    refused(settings(tmp_path, "files", tmp_path / "none"), "no .txt or .jsonl file")


def test_data_that_is_half_written(tmp_path):
    folder = write_tfds(tmp_path / "data", "array_record", articles())
    config = settings(tmp_path, NAME, tmp_path / "data")
    shard = folder / "wikipedia-train.array_record-00001-of-00002"
    whole = shard.read_bytes()
    shard.unlink()
    refused(
        config,
        "is incomplete: 1 of 2 shards are missing, first wikipedia-train.array_record-00001.*gcloud",
    )
    shard.write_bytes(whole[: len(whole) // 2])
    refused(config, "is incomplete: wikipedia-train.array_record-00001-of-00002 .*gcloud")
    shard.write_bytes(whole)
    info = (folder / "dataset_info.json").read_text()
    (folder / "dataset_info.json").write_text(info[:50])
    refused(config, "is incomplete: its dataset_info.json or features.json cannot be read")
    (folder / "dataset_info.json").unlink()
    refused(config, "is incomplete: there is no dataset_info.json")
    (folder / "dataset_info.json").write_text(info)
    assert prepare.open_store(config, 260).index["train"]["documents"] > 0


def test_tfrecord_that_is_cut(tmp_path):
    folder = write_tfds(tmp_path / "data", "tfrecord", [*articles(), "long " * 9_000])
    shard = folder / "wikipedia-train.tfrecord-00001-of-00002"
    whole = shard.read_bytes()
    for length in (len(whole) - 9, len(whole) // 2, 0):
        shard.write_bytes(whole[:length])
        refused(
            settings(tmp_path, NAME, tmp_path / "data"),
            "^.{1,200}is incomplete: wikipedia-train.tfrecord-00001-of-00002.{1,1000}$",  # without quoting the record
        )


def test_another_text_feature(tmp_path):
    write_tfds(tmp_path / "data", "tfrecord", articles())
    wrong = settings(tmp_path, NAME, tmp_path / "data", text_feature="txt")
    refused(wrong, r"text feature 'txt' \(did you mean text\?\)")
    assert (
        next(
            find_source(
                settings(tmp_path, NAME, tmp_path / "data", text_feature="title")
            ).documents()
        )
        == b"t"
    )


def test_text_that_is_not_text(tmp_path):
    folder = write_text(tmp_path / "text", articles())
    (folder / "z.txt").write_bytes(b"fine so far \xff\xfe")
    refused(settings(tmp_path, "files", folder), r"z.txt: not UTF-8 text \(byte 12\)")
    (folder / "z.txt").unlink()
    (folder / "y.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    refused(settings(tmp_path, "files", folder), "y.jsonl line 2: no text under 'text'")
    (folder / "y.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    refused(settings(tmp_path, "files", folder), "y.jsonl line 2: not a JSON value")


def test_a_split_without_documents(tmp_path):
    folder = write_text(tmp_path / "text", articles(3))
    config = settings(tmp_path, "files", folder, validation_fraction=1e-9)
    with pytest.raises(
        UsageError,
        match="files: no document falls into the validation split with .*=1e-09; change it",
    ):
        Windows(config, 260, "validation")
    assert len(documents_of(prepare.open_store(config, 260), "all")) == 3


def test_a_training_window_is_not_longer_than_the_text(tmp_path):
    folder = write_text(tmp_path / "text", articles(30))
    longer = "config.data.seq_len=100000000: longer than the train split of files .*text, [0-9,]+ tokens; choose a shorter"
    with pytest.raises(UsageError, match=longer):
        Windows(settings(tmp_path, "files", folder, seq_len=10**8), 260, "train")


def test_tokenizers_that_do_not_fit(tmp_path, sentencepiece_model):
    refused(
        settings(tmp_path, tokenizer="none.model"),
        "tokenizer=none.model: cannot be read: No such file",
    )
    (tmp_path / "bad.model").write_text("not a model")
    refused(
        settings(tmp_path, tokenizer=str(tmp_path / "bad.model")),
        "bad.model: .*not a SentencePiece model",
    )
    refused(settings(tmp_path), "vocab_size=259: the tokenizer byte has 260 ids", vocab_size=259)
    refused(
        settings(tmp_path, tokenizer=sentencepiece_model),
        "vocab_size=299: .* has 300 ids",
        vocab_size=299,
    )


def test_a_cache_that_cannot_be_written(tmp_path):
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(UsageError, match="cache_dir=.*cache: cannot be written"):
        prepare.open_store(settings(tmp_path), 260)
