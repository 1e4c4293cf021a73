"""Data that cannot be used: one line that names the place, and nothing is left."""

import gzip
import json

import pytest
from support.text import WIKIPEDIA as NAME
from support.text import articles, data_config, refusal, texts_of, write_text, write_tfds

from prope.data.sources import files
from prope.data.sources.find import find_source
from prope.data.store.build import open_store
from prope.data.windows import Windows
from prope.spec.run import Spec


def refused(data, *mentions, vocab_size=260):
    """Asserts that no store is made, and what the line mentions."""
    says = refusal(open_store, data, vocab_size)
    for mention in mentions:
        assert str(mention) in says, says
    return says


# --- Files of text ----------------------------------------------------------------------------


ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in articles())
# What is wrong in the third line of a file, and what the line that refuses it mentions.
WRONG_LINES = [
    (b'{"text": "a"', "JSON"),
    (b'{"text": "\xff"}', "byte 10"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"text": 3}', "config.data.text_feature"),
    (b'{"content": "a", "id": 1}', "'content', 'id'"),
    (b' [{"text": "a"},', "jq"),
    (b'{"text": ' + b"[" * 100_000, "JSON"),
]


@pytest.mark.parametrize(("line", "mentions"), WRONG_LINES)
def test_a_line_that_is_no_document(tmp_path, monkeypatch, line, mentions):
    for size in (10**9, 30):  # read as a whole, and in parts
        monkeypatch.setattr(files, "chunk_bytes", lambda total, size=size: size)
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}\n' + line + b"\n")
        refused(data_config(tmp_path, "files", folder), f"{folder}/a.jsonl line 3: ", mentions)
    assert not list(tmp_path.rglob("index.json"))


BAD_FILES = [
    *(("a.txt", "ein Stück".encode(encoding)) for encoding in ENCODINGS),
    *(("a.jsonl", '{"text": "ein Stück"}'.encode(encoding)) for encoding in ENCODINGS),
    ("a.txt.gz", gzip.compress(LINES.encode())[:5000]),
    ("a.jsonl.gz", gzip.compress(LINES.encode())[:5000]),
    ("a.jsonl.gz", b"not compressed"),
]


def test_a_file_that_is_damaged_or_in_another_encoding(tmp_path):
    for number, (name, content) in enumerate(BAD_FILES):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(content)
        refused(data_config(tmp_path, "files", folder), f"{folder}/{name}")
    assert not list(tmp_path.rglob("index.json"))


@pytest.mark.parametrize(
    ("dataset", "folder", "mentions"),
    [
        (NAME, "none", "mkdir -p {root}/none/wikipedia/20230601.en"),
        ("lm1b", "empty", "tfds build lm1b"),
        ("files", "none", "config.data.data_dir={root}/none"),
        ("files", "other", "2 left out (1 hidden, 1 ending in .csv)"),
        ("wikipedia", "none", "20230601.simple/1.0.0"),
        ("wikipedia/20230601.de", "none", "{root}/none/wikipedia/20230601.de"),
        ("wikipedia/20220620.simple:1.0.0", "none", "wikipedia/20220620.simple/1.0.0 "),
        ("wikipedia_toxicity_subtypes", "none", "tfds build wikipedia_toxicity_subtypes "),
    ],
)
def test_data_that_is_not_there(tmp_path, dataset, folder, mentions):
    """The line has what to do: the command that brings or makes it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / ".cache").mkdir(parents=True)
    (tmp_path / "other" / ".cache" / "a.txt").write_text("hidden")
    (tmp_path / "other" / "a.csv").write_bytes(b"a")
    data = data_config(tmp_path, dataset, tmp_path / folder)
    refused(data, tmp_path / folder, mentions.format(root=tmp_path))


# --- Datasets of TFDS -------------------------------------------------------------------------


@pytest.fixture(params=["array_record", "tfrecord"])
def dataset(request, tmp_path):
    """(folder of a prepared dataset, its config, the name of its second shard)."""
    texts = [*articles(), "long " * 9_000, "a text to change"]
    folder = write_tfds(tmp_path / "data", request.param, texts)
    name = f"wikipedia-train.{request.param}-00001-of-00002"
    return folder, data_config(tmp_path, NAME, tmp_path / "data"), name


def test_a_dataset_that_is_incomplete(tmp_path, dataset):
    folder, data, name = dataset
    jsons = "dataset_info.json or features.json"
    for file, kept, mention in (
        (name, None, name),
        (name, 0, name),
        (name, 0.5, name),
        (name, -9, name),
        ("dataset_info.json", 0.5, jsons),
        ("dataset_info.json", None, "dataset_info.json"),
        ("features.json", 0.5, jsons),
    ):
        path = folder / file
        whole = path.read_bytes()
        path.unlink()
        if kept is not None:
            path.write_bytes(whole[: kept if kept <= 0 else int(kept * len(whole))])
        says = refused(data, f"config.data.data_dir={tmp_path}/data", mention, "gcloud storage")
        assert len(says) < 1500, "the record is not quoted"
        if file.endswith("json"):
            path.write_text("[" * 100_000)
            refused(data, jsons)
        path.write_bytes(whole)
    assert open_store(data, 260).index["train"]["documents"] > 0


def test_changed_bytes_of_a_record(dataset):
    folder, data, name = dataset
    whole = (folder / name).read_bytes()
    text = whole.rindex(b"text to change")
    places = [text]
    if "tfrecord" in name:
        start = length = 0
        while start + length < text:  # a record has 16 bytes beside its own
            start += length
            length = int.from_bytes(whole[start : start + 8], "little") + 16
        # Of the last record the length, its checksum, and the checksum of the text.
        places += [start, start + 8, len(whole) - 4]
    for place in places:
        content = bytearray(whole)
        for byte in range(place, place + 3):
            content[byte] ^= 1
        (folder / name).write_bytes(content)
        refused(data, f"{name} is damaged")


@pytest.mark.parametrize("number", [1, 2])
def test_a_record_that_is_not_utf8(tmp_path, number):
    texts = articles()
    texts[150] = b"fine so far \xff\xfe"
    write_tfds(tmp_path / "data", "array_record", texts)
    data = data_config(tmp_path, NAME, tmp_path / "data", num_workers=number)
    refused(data, "wikipedia-train.array_record-00001-of-00002 record 85: ", "byte 12")
    assert not list(tmp_path.rglob("index.json"))


# Ways to name a class in features.json: its own form, the old form, and the old form within text.
EVIL = {"pythonClassName": "evil.Evil", "text": {}}


OLD_EVIL = {"type": "evil.Evil", "content": {}}


DICT = "tensorflow_datasets.core.features.features_dict.FeaturesDict"


SEQUENCE = "tensorflow_datasets.core.features.sequence_feature.Sequence"


CODE_RUNNERS = {
    "feature": lambda text: _features(text=text, more=EVIL),
    "top": lambda text: _features(text=text) | {"pythonClassName": "evil.Evil"},
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


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a file where it is imported."""
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    assert not ran.exists()


def test_no_code_is_run_that_the_info_names(tmp_path, trap):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    info = json.loads((folder / "dataset_info.json").read_text())
    info |= {"moduleName": "evil", "name": "evil", "configName": "evil.Evil"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for path in folder.glob("wikipedia-*"):
        path.rename(folder / path.name.replace("wikipedia", "evil"))
    assert open_store(data_config(tmp_path, NAME, tmp_path / "data"), 260)


@pytest.mark.parametrize("kind", CODE_RUNNERS)
def test_no_code_is_run_that_features_name(tmp_path, trap, kind):
    folder = write_tfds(tmp_path / "data", "tfrecord", articles())
    path = folder / "features.json"
    text = json.loads(path.read_text())["featuresDict"]["features"]["text"]
    path.write_text(json.dumps(CODE_RUNNERS[kind](text)))
    data = data_config(tmp_path, NAME, tmp_path / "data")
    refused(data, "features.json: pythonClassName=evil.Evil")


# --- Settings that do not fit -----------------------------------------------------------------


def test_features_that_are_not_there(tmp_path):
    write_tfds(tmp_path / "data", "tfrecord", articles(60))
    write_text(tmp_path / "text", articles(60))
    for dataset, folder, fields, mentions in (
        (NAME, "data", {"text_feature": "txt"}, ["did you mean text?", "config.data.text_feature"]),
        (NAME, "data", {"template": "{titel}"}, ["did you mean title?", "config.data.template"]),
        ("files", "text", {"template": "{a}{text}"}, ["a.txt", "config.data.template"]),
    ):
        refused(data_config(tmp_path, dataset, tmp_path / folder, **fields), *mentions)
    data = data_config(tmp_path, NAME, tmp_path / "data", text_feature="title")
    assert next(texts_of(find_source(data))) == b"t"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_file_without_a_byte(tmp_path, name):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / name).write_bytes(b"")
    data = data_config(tmp_path, "files", tmp_path / "text")
    says = refused(data, "has no document with text")
    assert says.startswith("files: ")
    assert not list(tmp_path.rglob("index.json"))
    (tmp_path / "text" / "b.txt").write_text("a text")
    assert open_store(data, 260).count("documents", "all") == 1


def test_splits_and_windows_that_the_text_is_too_short_for(tmp_path):
    folder = write_text(tmp_path / "text", articles(3))
    write_tfds(tmp_path / "data", "tfrecord", articles(3))
    few = data_config(tmp_path, NAME, tmp_path / "data", validation_fraction=1e-9)
    assert "validation_fraction=1e-09" in refusal(Windows, few, 260, "validation")
    long = data_config(tmp_path, "files", folder, seq_len=10**8, validation_fraction=0.5)
    assert "config.data.seq_len=100000000" in refusal(Windows, long, 260, "train")


def test_tokenizers_with_more_ids_than_the_model(tmp_path, sentencepiece_model):
    for tokenizer, ids in (("byte", 260), (sentencepiece_model, 300)):
        data = data_config(tmp_path, tokenizer=tokenizer)
        refused(data, f"config.model.vocab_size={ids - 1}", ids, vocab_size=ids - 1)


FILES = {"weight": 1, "dataset": "files", "data_dir": "a"}
MIXTURE = {"dataset": "mixture", "data_dir": ""}
STORE = {"dataset": NAME, "store": "gs://bucket/a", "data_dir": ""}


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        ({"template": "{a"}, "data.template={a"),
        ({"template": "{a.b}"}, "data.template={a.b}"),
        ({"template": "a"}, "data.template=a"),
        ({"template": "{}"}, "data.template={}"),
        ({"loss_on": "targets"}, "data.loss_on=targets"),
        ({"loss_on": "x"}, "data.loss_on=x"),
        ({"loss_on": "targets", "template": "{a}."}, "data.template={a}."),
        ({"dataset": "python_source"}, "data.data_dir=x"),
        ({"dataset": NAME, "separator": "##"}, "data.separator=##: has no effect with"),
        ({"max_bad_rows": -1}, "data.max_bad_rows=-1"),
        (MIXTURE, "data.mixture=()"),
        (MIXTURE | {"mixture": (FILES | {"data_dir": ""},)}, "data.mixture[0].data_dir="),
        (MIXTURE | {"mixture": (FILES | {"weight": 0},)}, "data.mixture[0]={'weight': 0, "),
        (MIXTURE | {"mixture": ({"weight": 1},)}, "data.mixture[0]={'weight': 1}: "),
        (MIXTURE | {"mixture": (FILES | {"data_dri": "a"},)}, "did you mean data_dir?"),
        (MIXTURE | {"mixture": (FILES | {"dataset": 3},)}, "data.mixture[0].dataset=3"),
        (MIXTURE | {"mixture": (FILES,), "store": "gs://bucket/a"}, "data.store=gs://bucket/a"),
        (STORE | {"dataset": "synthetic/copy"}, "data.store=gs://bucket/a"),
        (STORE | {"store": ""}, "data.data_dir="),
        *(({"position_range": value}, f"position_range={value}") for value in (255, 0, -1, 2**32)),
    ],
)
def test_fields_that_do_not_fit(fields, mentions):
    data = {"dataset": "files", "data_dir": "x"} | fields
    fields = {f"data.{name}": value for name, value in data.items()}
    assert mentions in refusal(Spec().replace, fields)
