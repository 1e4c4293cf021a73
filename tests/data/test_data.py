"""From text to batches: that nothing is lost, doubled or half used on the way."""

import gzip
import json
import math
import os
import pathlib

import numpy as np
import pytest
from etils import epath
from support.text import WIKIPEDIA as NAME
from support.text import articles, data_config, documents_of, write_text, write_tfds
from support.text import data_refused as refused
from support.text import read_tokens as stream

from prope.data.sources import tfds as tfds_files
from prope.data.sources.find import find_source
from prope.data.store import arrays, pack
from prope.data.store.build import open_store
from prope.data.tokenizer import GEMMA_IDS, load_tokenizer
from prope.data.windows import Windows, shuffled_index, train_batch
from prope.errors import UsageError


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text", articles())


@pytest.fixture
def config(tmp_path, text):
    """config.data of these files."""
    return data_config(tmp_path, "files", text)


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "files"])
def test_every_document_arrives_once_and_whole(tmp_path, kind):
    texts = articles()
    folder = tmp_path / "data"
    if kind == "files":
        write_text(folder, texts)
    else:
        write_tfds(folder, kind, texts)
    dataset = "files" if kind == "files" else NAME
    store = open_store(data_config(tmp_path, dataset, folder, validation_fraction=0.3), 260)
    expected = {"train": [], "validation": []}
    for document in texts:
        held_out = pack.is_validation(document.encode(), 0.3)
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


@pytest.mark.parametrize("size", [1000, 10**9])
def test_chunks_have_their_share_of_a_datasets_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(tfds_files, "chunk_bytes", lambda total: size)
    folder = write_tfds(tmp_path, "array_record", articles())
    info = json.loads((folder / "dataset_info.json").read_text())
    total = int(info["splits"][0]["numBytes"])
    source = find_source(data_config(tmp_path, NAME, tmp_path))
    assert total - len(source.chunks) <= source.num_bytes <= total  # each is rounded down
    assert max(chunk.num_bytes for chunk in source.chunks) <= size
    assert len(source.chunks) >= 2


def test_splits_that_are_not_read_are_told(tmp_path, caplog):
    caplog.set_level("INFO", "prope")
    folder = write_tfds(tmp_path, "tfrecord", articles())
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"] += [info["splits"][0] | {"name": name} for name in ("validation", "test")]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for _ in range(2):
        find_source(data_config(tmp_path, NAME, tmp_path))
    told = f"data: {folder}: split train read, 2 left out ['test', 'validation']"
    assert caplog.messages == [told]


def test_another_version_of_a_dataset_is_other_data(tmp_path):
    folder = write_tfds(tmp_path, "tfrecord", articles())
    config = data_config(tmp_path, NAME, tmp_path)
    first = open_store(config, 260)
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"version": "1.0.1"}))
    folder.rename(folder.with_name("1.0.1"))
    assert open_store(config, 260).fingerprint != first.fingerprint


@pytest.mark.parametrize("version", ["1.10.0", "2.0.0"])
def test_the_newest_version_is_the_greatest_by_number(tmp_path, version):
    for name in ("1.9.0", version):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "dataset_info.json").touch()
    assert tfds_files._version_folder("a", epath.Path(tmp_path)).name == version


def test_stores_of_older_versions_are_the_same_data(tmp_path):
    """So their runs can be resumed; only .txt files are read in another way since."""
    write_tfds(tmp_path / "data", "tfrecord", articles())
    tfds = data_config(tmp_path, NAME, tmp_path / "data")
    lines = data_config(tmp_path, "files", tmp_path / "lines")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n')
    store = open_store(tfds, 260)
    assert (store.fingerprint, open_store(lines, 260).fingerprint) == (
        "d8adaa55946c72fc",
        "f1e02052f662114c",
    )
    (tmp_path / "lines" / "a.txt").write_text("abc")
    assert open_store(lines, 260).fingerprint != "8ff8113e6df24c81"
    index = json.loads(pathlib.Path(store.path, "index.json").read_text())
    for split in ("train", "validation"):
        del index[split]["unk_tokens"]
    pathlib.Path(store.path, "index.json").write_text(json.dumps(index))
    assert open_store(tfds, 260).count("unk_tokens", "all") == 0


def test_shards_of_the_store_are_cut_anywhere(tmp_path, config, text, monkeypatch):
    whole = stream(open_store(config, 260), "train")
    monkeypatch.setattr(arrays, "_READ_TOKENS", 128)
    monkeypatch.setattr(arrays, "SHARD", 1024)
    cut = open_store(data_config(tmp_path / "cut", "files", text), 260)
    paths = list(pathlib.Path(cut.path, "train").rglob("*"))
    assert len(paths) > 5
    np.testing.assert_array_equal(stream(cut, "train"), whole)


def test_a_store_is_written_once_and_named_by_what_is_in_it(tmp_path, config, text):
    store = open_store(config, 260)
    index = pathlib.Path(store.path, "index.json")
    before = index.stat().st_mtime_ns
    assert open_store(config, 260).path == store.path
    assert index.stat().st_mtime_ns == before
    other = data_config(tmp_path, "files", text, validation_fraction=0.1)
    assert open_store(other, 260).fingerprint != store.fingerprint
    (text / "a.txt").write_text("another text")
    assert open_store(config, 260).fingerprint != store.fingerprint


def test_a_damaged_store_is_an_error_and_not_other_text(config):
    store = open_store(config, 260)
    (shard,) = pathlib.Path(store.path, "train", "c").rglob("*")
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        stream(store, "train")


def test_the_baseline_is_the_cross_entropy_of_token_frequencies(config):
    store = open_store(config, 260)
    train = stream(store, "train")
    train = train[train != GEMMA_IDS.bos]
    for split, name in (("validation", "unigram_loss"), ("train", "train_unigram_loss")):
        predicted = stream(store, split)
        predicted = predicted[predicted != GEMMA_IDS.bos]
        total = 0.0
        for token in range(260):
            share = (np.sum(train == token) + 1) / (len(train) + 260)
            total -= np.sum(predicted == token) * math.log(share)
        assert math.isclose(store.index[name], total / len(predicted), rel_tol=1e-9)


@pytest.mark.slow
def test_python_documentation_is_there(tmp_path):
    store = open_store(data_config(tmp_path), 260)
    assert store.count("bytes", "all") > 1_000_000
    documents = documents_of(store, "train") + documents_of(store, "validation")
    assert any("The Python Debugger" in document for document in documents)


# --- Windows ----------------------------------------------------------------------------------


@pytest.fixture
def open_windows(tmp_path, text):
    def run(split="train", **fields):
        config = data_config(tmp_path, "files", text, **{"seq_len": 64} | fields)
        return Windows(config, 260, split)

    return run


@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_predict_every_token_once(open_windows, split):
    windows = open_windows(split)
    batch = windows.read(range(windows.count))
    tokens = stream(windows.store, split)
    predicted = batch["targets"][batch["weights"] > 0]
    np.testing.assert_array_equal(predicted, tokens[tokens != GEMMA_IDS.bos])
    assert len(predicted) == windows.store.targets(split)
    np.testing.assert_array_equal(batch["tokens"].ravel()[: len(tokens) - 1], tokens[:-1])
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (batch["positions"] == np.arange(64)).all()


@pytest.mark.parametrize(("shorter", "count"), [(2, 2), (1, 1), (0, 1)])
def test_the_last_window_may_predict_one_token(open_windows, shorter, count):
    length = open_windows("validation").length
    windows = open_windows("validation", seq_len=length - shorter)
    assert windows.count == count
    weights = windows.read(range(count))["weights"]
    assert weights.sum() == windows.store.targets("validation")


def test_segments_and_positions_follow_the_documents(open_windows):
    windows = open_windows(mask_documents=True)
    batch = windows.read(range(windows.count))
    total = windows.store.index["train"]["tokens"]
    for row in range(windows.count):
        segment = 1
        position = 0
        for t in range(64):
            if t and batch["tokens"][row, t] == GEMMA_IDS.bos:
                segment += 1
                position = 0
            if row * 64 + t >= total:
                segment = 0
            else:
                assert batch["positions"][row, t] == position, (row, t)
            assert batch["segment_ids"][row, t] == segment, (row, t)
            position += 1


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 1237])
def test_every_epoch_is_a_new_permutation(count):
    def order(epoch, seed=5):
        examples = range(epoch * count, (epoch + 1) * count)
        return [shuffled_index(example, count, seed) for example in examples]

    epochs = [order(0), order(1), order(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
    if count >= 100:
        others = [*epochs[1:], list(range(count)), order(0, seed=6)]
        assert epochs[0] not in others
        assert epochs[1] != epochs[2]


def test_a_batch_is_a_function_of_its_step(open_windows):
    late = train_batch(open_windows(), seed=1, batch_size=8, step=40)
    windows = open_windows()
    for step in (0, 3, 40):
        batch = train_batch(windows, seed=1, batch_size=8, step=step)
    halves = []
    for rows in (range(4), range(4, 8)):
        halves.append(train_batch(windows, 1, 8, 40, rows))
    # The batch size cuts one endless list.
    pair = [train_batch(windows, 1, 4, step) for step in (80, 81)]
    for name, values in batch.items():
        np.testing.assert_array_equal(values, late[name])
        for parts in (halves, pair):
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, values)
    other_seed = train_batch(windows, 2, 8, 40)
    assert np.any(other_seed["tokens"] != late["tokens"])


def test_sentencepiece_makes_a_store(config, sentencepiece_model):
    config.tokenizer = sentencepiece_model
    store = open_store(config, 300)
    texts = articles()
    tokens = np.concatenate([stream(store, split) for split in arrays.SPLITS])
    assert np.sum(tokens == 2) == np.sum(tokens == 1) == len(texts)
    size = sum(len(document.encode()) for document in texts)
    assert store.count("bytes", "all") == size
    train = stream(store, "train")
    first = train[1 : np.flatnonzero(train == 1)[0]]
    predicted = [t for t in texts if not pack.is_validation(t.encode(), 0.05)]
    expected = predicted[0]
    assert load_tokenizer(sentencepiece_model).decode(first) == expected


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_tokens_for_unknown_text_are_counted_and_told(tmp_path, caplog, byte_fallback):
    import sentencepiece

    learnt = ["rope turn pair frequency 0123456789"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(learnt),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300 if byte_fallback else 40,
        model_type="char",
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=byte_fallback,
        minloglevel=2,
    )
    folder = write_text(tmp_path / "text", articles())
    config = data_config(tmp_path, "files", folder, validation_fraction=0.3)
    config.tokenizer = str(tmp_path / "m.model")
    store = open_store(config, 300)
    model = sentencepiece.SentencePieceProcessor(model_file=config.tokenizer)
    expected = {"train": 0, "validation": 0}
    for text in articles():
        split = "validation" if pack.is_validation(text.encode(), 0.3) else "train"
        expected[split] += model.encode(text).count(3)
    assert all(expected.values()) != byte_fallback
    for split, count in expected.items():
        assert store.index[split]["unk_tokens"] == count
    share = sum(expected.values()) / store.count("tokens", "all")
    told = [line for line in caplog.messages if "<unk>" in line]
    assert len(told) == (not byte_fallback)
    for line in told:
        assert line.startswith(f"data: {share:.2%} of the tokens are <unk>, text that {tmp_path}")


# --- What cannot be used ----------------------------------------------------------------------


def test_data_that_is_not_there(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    copy = "gcloud storage cp -r gs://tfds-data/datasets/wikipedia/20230601"
    download = rf"{copy}.simple/1.0.0 .*20230601.en/1.0.0"
    for dataset, folder, problem in (
        (NAME, tmp_path / "none", f"data_dir=.*none: there is no such folder.*{download}"),
        (NAME, empty, f"no dataset {NAME} in it.*{download}"),
        ("lm1b", empty, "no dataset lm1b in it.*tfds build lm1b"),
        ("files", empty, "no .txt or .jsonl file"),
        ("files", tmp_path / "none", "data_dir=.*none: there is no such folder"),
    ):
        refused(data_config(tmp_path, dataset, folder), problem)


def test_data_that_is_half_written(tmp_path):
    folder = write_tfds(tmp_path / "data", "array_record", articles())
    config = data_config(tmp_path, NAME, tmp_path / "data")
    name = "wikipedia-train.array_record-00001"
    shard = folder / f"{name}-of-00002"
    info = folder / "dataset_info.json"
    for path, content, problem in (
        (shard, None, f"1 of 2 shards are missing, first {name}.*gcloud"),
        (shard, shard.read_bytes()[: shard.stat().st_size // 2], f"{name}-of-00002 .*gcloud"),
        (info, info.read_bytes()[:50], "its dataset_info.json or features.json cannot be read"),
        (info, None, "there is no dataset_info.json"),
    ):
        whole = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        refused(config, f"is incomplete: {problem}")
        path.write_bytes(whole)
    assert open_store(config, 260).index["train"]["documents"] > 0


def test_tfrecord_that_is_cut(tmp_path):
    folder = write_tfds(tmp_path / "data", "tfrecord", [*articles(), "long " * 9_000])
    name = "wikipedia-train.tfrecord-00001-of-00002"
    whole = (folder / name).read_bytes()
    for length in (len(whole) - 9, len(whole) // 2, 0):
        (folder / name).write_bytes(whole[:length])
        # The record is not quoted.
        problem = f"^.{{1,200}}is incomplete: {name}.{{1,1000}}$"
        refused(data_config(tmp_path, NAME, tmp_path / "data"), problem)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("tfrecord", "length"),
        ("tfrecord", "checksum of the length"),
        ("tfrecord", "text"),
        ("tfrecord", "checksum"),
        ("array_record", "text"),
    ],
)
def test_changed_bytes_of_a_record(tmp_path, kind, place):
    folder = write_tfds(tmp_path / "data", kind, [*articles(), "a text to change"])
    name = f"wikipedia-train.{kind}-00001-of-00002"
    content = bytearray((folder / name).read_bytes())
    text = content.rindex(b"text to change")
    start = 0
    if kind == "tfrecord":
        length = 0
        while start + length < text:  # a record has 16 bytes beside its own
            start += length
            length = int.from_bytes(content[start : start + 8], "little") + 16
    places = {"length": start, "checksum of the length": start + 8, "text": text, "checksum": -4}
    offset = places[place] % len(content)
    for byte in range(offset, offset + 3):
        content[byte] ^= 1
    (folder / name).write_bytes(content)
    problem = f"is incomplete: {name} is damaged after [0-9]+ records"
    refused(data_config(tmp_path, NAME, tmp_path / "data"), problem)


# Ways to name a class in features.json: its own form, the old form, and the old form within text.
EVIL = {"pythonClassName": "evil.Evil", "text": {}}
OLD_EVIL = {"type": "evil.Evil", "content": {}}
DICT = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
SEQUENCE = "tensorflow_datasets.core.features.sequence_feature.Sequence"
CODE_RUNNERS = {
    "feature": lambda text: _features(text=text, more=EVIL),
    "top": lambda text: _features(text=text) | {"pythonClassName": "evil.Evil"},
    "snake case": lambda text: _features(text=text, more={"python_class_name": "evil.Evil"}),
    "nested": lambda text: _features(text=text, more=_features(a=_features(b=EVIL))),
    "sequence": lambda text: _features(
        text=text, more={"pythonClassName": SEQUENCE, "sequence": {"feature": EVIL}}
    ),
    "old": lambda text: {"type": DICT, "content": {"more": OLD_EVIL}},
    "old in text": lambda text: _features(
        text=text,
        more={"pythonClassName": DICT, "jsonFeature": {"json": json.dumps({"more": OLD_EVIL})}},
    ),
}


def _features(**features):
    return {"pythonClassName": DICT, "featuresDict": {"features": features}}


def test_no_code_is_run_that_the_info_names(tmp_path, monkeypatch):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    info = json.loads((folder / "dataset_info.json").read_text())
    info |= {"moduleName": "evil", "name": "evil", "configName": "evil.Evil"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for path in folder.glob("wikipedia-*"):
        path.rename(folder / path.name.replace("wikipedia", "evil"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert open_store(data_config(tmp_path, NAME, tmp_path / "data"), 260)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", CODE_RUNNERS)
def test_no_code_is_run_that_features_name(tmp_path, monkeypatch, kind):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    path = folder / "features.json"
    text = json.loads(path.read_text())["featuresDict"]["features"]["text"]
    path.write_text(json.dumps(CODE_RUNNERS[kind](text)))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    problem = "features.json: pythonClassName=evil.Evil: must begin with tensorflow_datasets.core"
    refused(data_config(tmp_path, NAME, tmp_path / "data"), problem)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["features.json", "dataset_info.json", "wikipedia-train.tfrecord-00001-of-00002"]
)
def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path, name):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    (folder / name).unlink()
    os.mkfifo(folder / name)
    problem = f"is incomplete: ({name} is a pipe|1 of 2 shards are missing|there is no {name})"
    refused(data_config(tmp_path, NAME, tmp_path / "data"), problem)


@pytest.mark.parametrize("name", ["features.json", "dataset_info.json"])
def test_json_that_is_nested_too_deep(tmp_path, name):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    (folder / name).write_text("[" * 100_000)
    config = data_config(tmp_path, NAME, tmp_path / "data")
    refused(config, "its dataset_info.json or features.json cannot be read")


def test_another_text_feature(tmp_path):
    write_tfds(tmp_path / "data", "tfrecord", articles())
    config = data_config(tmp_path, NAME, tmp_path / "data", text_feature="txt")
    refused(config, r"text feature 'txt' \(did you mean text\?\)")
    config.text_feature = "title"
    assert next(find_source(config).documents()) == b"t"


LINES = "".join(json.dumps({"text": document}) + "\n" for document in articles())


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("z.txt", b"fine so far \xff\xfe", r"z.txt: not UTF-8 text \(byte 12\)"),
        ("y.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "y.jsonl line 2: no text under 'text'"),
        ("y.jsonl", b'{"text": "a"}\n{"text": "b\n', "y.jsonl line 2: not a JSON value"),
        ("y.jsonl", b'{"text": ' + b"[" * 100_000, "y.jsonl line 1: not a JSON value"),
        (
            "z.jsonl.gz",
            gzip.compress(LINES.encode())[:5000],
            "z.jsonl.gz: is damaged or cut short .*; copy it again",
        ),
    ],
)
def test_text_that_is_not_text(config, text, name, content, problem):
    (text / name).write_bytes(content)
    refused(config, problem)
    assert not list(pathlib.Path(config.cache_dir).rglob("index.json"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_file_without_a_byte(tmp_path, name):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / name).write_bytes(b"")
    config = data_config(tmp_path, "files", folder)
    refused(config, "files: has no document with text; add some")
    assert not list(tmp_path.rglob("index.json"))
    (folder / "b.txt").write_text("a text")
    assert documents_of(open_store(config, 260), "all") == ["a text"]


def test_a_split_without_documents(tmp_path):
    folder = write_text(tmp_path / "text", articles(3))
    config = data_config(tmp_path, "files", folder, validation_fraction=1e-9)
    setting = "config.data.validation_fraction=1e-09"
    problem = "no document of files falls into the validation split; change it"
    with pytest.raises(UsageError, match=f"{setting}: {problem}"):
        Windows(config, 260, "validation")
    assert len(documents_of(open_store(config, 260), "all")) == 3


def test_a_training_window_is_not_longer_than_the_text(open_windows):
    problem = "longer than the train split of files .*text, [0-9,]+ tokens; choose a shorter"
    with pytest.raises(UsageError, match=f"config.data.seq_len=100000000: {problem}"):
        open_windows(seq_len=10**8)


def test_tokenizers_that_do_not_fit(tmp_path, sentencepiece_model):
    bad = tmp_path / "bad.model"
    bad.write_text("not a model")
    for tokenizer, vocab_size, problem in (
        ("none.model", 260, "tokenizer=none.model: cannot be read: No such file"),
        (str(bad), 260, "bad.model: .*not a SentencePiece model"),
        ("byte", 259, "vocab_size=259: the tokenizer byte has 260 ids"),
        (sentencepiece_model, 299, "vocab_size=299: .* has 300 ids"),
    ):
        refused(data_config(tmp_path, tokenizer=tokenizer), problem, vocab_size)
