"""Text, datasets on disk and what a store holds."""

import hashlib
import json
import pathlib
import re

import numpy as np

from prope.data.sources.base import check_bad_rows
from prope.spec.data import DataSpec
from support.commands import refusal

WIKIPEDIA = "wikipedia/20230601.en"


def articles(number=200):
    """Texts of very different lengths, some with more bytes than characters."""
    rng = np.random.default_rng(0)
    words = ["rope", "turn", "Zürich", "数学", "pair", "\n", "frequency", "é"]
    return [" ".join(rng.choice(words, rng.integers(1, 200))) + f" {i}" for i in range(number)]


def write_tfds(root, file_format, texts, name=WIKIPEDIA):
    """A dataset in TFDS's layout, two shards, written without TensorFlow."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorboardX.record_writer import RecordWriter

    folder = root / name / "1.0.0"
    folder.mkdir(parents=True)
    names = ("title", "text")
    features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
    features.save_config(str(folder))
    cut = len(texts) // 3
    shards = [texts[:cut], texts[cut:]]
    size = 0
    for number, shard in enumerate(shards):
        path = str(folder / f"wikipedia-train.{file_format}-{number:05d}-of-00002")
        if file_format == "array_record":
            writer = ArrayRecordWriter(path, "group_size:1")
        else:
            writer = RecordWriter(path)
        for text in shard:
            example = features.encode_example({"title": "t", "text": text})
            record = features.serialize_example(example)
            writer.write(record)
            size += len(record)
        writer.close()
    split = {
        "name": "train",
        "numBytes": str(size),
        "shardLengths": [str(len(shard)) for shard in shards],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {
        "name": "wikipedia",
        "configName": "20230601.en",
        "version": "1.0.0",
        "fileFormat": file_format,
        "moduleName": "tensorflow_datasets.text.wikipedia",
        "splits": [split],
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def write_text(root, texts):
    """Three files whose order by path is that of the texts, written in another order."""
    (root / "deeper").mkdir(parents=True)
    (root / "deeper" / "c.txt").write_text(texts[-1])
    lines = [json.dumps({"text": text, "id": 1}) + "\n\n" for text in texts[1:-1]]
    (root / "b.jsonl").write_text("".join(lines))
    (root / "a.txt").write_text(texts[0])
    return root


def write_dataset(folder, kind, texts):
    """Writes texts as "files" or in a format of TFDS; returns the name for config.data.dataset."""
    if kind == "files":
        write_text(folder, texts)
        return "files"
    write_tfds(folder, kind, texts)
    return WIKIPEDIA


def data_config(tmp_path, dataset="python_docs", data_dir="", **fields):
    """The spec of a dataset, with a cache below tmp_path."""
    places = {"data_dir": str(data_dir), "cache_dir": str(tmp_path / "cache")}
    return DataSpec(dataset=dataset, **places | fields)


def is_validation(text, fraction=0.05):
    """Whether a text is held out: by its hash, which README.md of prope/data names."""
    return int(hashlib.blake2b(text, digest_size=8).hexdigest(), 16) / 2**64 < fraction


def texts_of(source):
    """The texts of a source, in order; a bad row is a UsageError."""
    for document in source.documents():
        check_bad_rows([document.bad] if document.bad else [], 0)
        yield document.text


def read_tokens(store, split):
    """All tokens of a split of a store."""
    return np.asarray(store.tokens(split).read().result())


def documents_of(store, split):
    """The documents of a split, from its tokens alone."""
    from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer

    tokens = read_tokens(store, split)
    assert tokens[0] == GEMMA_IDS.bos and tokens[-1] == GEMMA_IDS.eos
    documents = np.split(tokens, np.flatnonzero(tokens == GEMMA_IDS.bos))[1:]
    assert all(document[-1] == GEMMA_IDS.eos for document in documents)
    return [ByteTokenizer().decode(document) for document in documents]


def data_refused(data, says, vocab_size=260):
    """Asserts that a store of a dataset is refused in one line, which a pattern finds."""
    from prope.data.store.build import open_store

    message = refusal(open_store, data, vocab_size)
    assert re.search(says, message), message


def hash_files(folder):
    """A hash of the names and the bytes of all files below a folder."""
    folder = pathlib.Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) >= 5  # two arrays, each with a shard, and the index
    listing = [(str(path.relative_to(folder)), path.read_bytes()) for path in files]
    return hashlib.sha256(repr(listing).encode()).hexdigest()


def write_lines(path, records):
    """Writes a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_lines(path):
    """Reads a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
