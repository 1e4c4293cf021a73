"""Text as it is kept: every form of the same documents gives the same tokens and batches."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pytest
from etils import epath
from pyarrow import ipc, parquet
from support.commands import refusal
from support.text import articles, data_config, documents_of, texts_of

from prope.data.mixture import open_windows
from prope.data.sources import files
from prope.data.sources.find import find_source
from prope.data.store.build import open_store
from prope.data.windows import train_batch

TEXTS = articles(90)


def table(texts, kind=None):
    """A column of text between two others."""
    numbers = pa.array(range(len(texts)))
    nested = pa.array([{"a": [i]} for i in range(len(texts))])
    return pa.table({"id": numbers, "text": pa.array(texts, kind), "meta": nested})


def write_parquet(folder, texts, name="a.parquet", rows=7, **options):
    parquet.write_table(table(texts), folder / name, row_group_size=rows, **options)


def write_arrow(folder, texts, name="a.arrow", new=ipc.new_stream, **options):
    written = table(texts)
    with new(folder / name, written.schema, **options) as writer:
        writer.write_table(written, max_chunksize=11)


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def lines(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_two_frames(folder, texts):
    (folder / "a.jsonl.zst").write_bytes(zstd(lines(texts[:50])) + zstd(lines(texts[50:])))


def write_saved(folder, texts):
    """As Dataset.save_to_disk of the library `datasets` does, after a map that it has cached."""
    for number, part in enumerate((texts[:40], texts[40:])):
        write_arrow(folder, part, f"data-0000{number}-of-00002.arrow")
    write_arrow(folder, ["cached"], "cache-1b03f9aec47d2_00001_of_00002.arrow")
    for name in ("dataset_info.json", "state.json"):
        (folder / name).write_text('{"_split": null}')


def write_kinds(folder, texts):
    """Columns of every type that holds text."""
    kinds = [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(kinds):
        part = table(texts[number::4], pa.string())
        column = part.column("text").dictionary_encode() if number == 3 else None
        column = part.column("text").cast(kind) if column is None else column
        parquet.write_table(part.set_column(1, "text", column), folder / f"{number}.parquet")


LZ4 = ipc.IpcWriteOptions(compression="lz4")
FORMS = {
    "parquet": write_parquet,
    "one row group": lambda *to: write_parquet(*to, rows=1000, compression="zstd"),
    "arrow stream": write_arrow,
    "arrow file": lambda *to: write_arrow(*to, new=ipc.new_file),
    "compressed arrow": lambda *to: write_arrow(*to, options=LZ4),
    "save_to_disk": write_saved,
    "ndjson": lambda folder, texts: (folder / "a.ndjson").write_bytes(lines(texts)),
    "to_json": lambda folder, texts: (folder / "a.json").write_bytes(lines(texts)),
    "json.gz": lambda to, texts: (to / "a.json.gz").write_bytes(gzip.compress(lines(texts))),
    "bz2": lambda folder, texts: (folder / "a.jsonl.bz2").write_bytes(bz2.compress(lines(texts))),
    "xz": lambda folder, texts: (folder / "a.JSONL.xz").write_bytes(lzma.compress(lines(texts))),
    "zst": write_two_frames,
}  # fmt: skip


@pytest.mark.parametrize("size", [300, 4_000, 10**9])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_batches_of_jsonl(tmp_path, monkeypatch, form, size):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: size)
    windows = []
    for name, write in (("jsonl", None), ("other", FORMS[form])):
        folder = tmp_path / name
        folder.mkdir()
        if write is None:
            (folder / "a.jsonl").write_bytes(lines(TEXTS))
        else:
            write(folder, TEXTS)
        windows.append(
            open_windows(data_config(tmp_path, "files", folder, seq_len=32), 260, "train")
        )
    expected, other = windows
    assert {**other.store.index["rule"]["source"], "files": 0} == {
        **expected.store.index["rule"]["source"],
        "files": 0,
    }
    for split in ("train", "validation"):
        assert documents_of(other.store, split) == documents_of(expected.store, split)
    batches = [train_batch(each, 3, 8, 2) for each in windows]
    for field, values in batches[0].items():
        np.testing.assert_array_equal(batches[1][field], values)
    source = find_source(data_config(tmp_path, "files", tmp_path / "other"))
    assert [text.decode() for text in texts_of(source)] == TEXTS
    assert len({chunk.key for chunk in source.chunks}) == len(source.chunks)
    if form in ("parquet", "arrow stream", "arrow file") and size == 300:
        assert len(source.chunks) > 5


def test_columns_of_every_type_of_text(tmp_path):
    (tmp_path / "text").mkdir()
    write_kinds(tmp_path / "text", TEXTS)
    source = find_source(data_config(tmp_path, "files", tmp_path / "text"))
    assert sorted(texts_of(source)) == sorted(text.encode() for text in TEXTS)


def test_tables_and_compressed_lines_in_a_bucket(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "prope"))
    (tmp_path / "text").mkdir()
    write_parquet(tmp_path / "text", TEXTS[:20])
    write_arrow(tmp_path / "text", TEXTS[20:50], "b.arrow")
    (tmp_path / "text" / "c.jsonl.zst").write_bytes(zstd(lines(TEXTS[50:])))
    for file in (tmp_path / "text").iterdir():
        (epath.Path(bucket) / file.name).write_bytes(file.read_bytes())
    local, remote = (
        find_source(data_config(tmp_path, "files", place)) for place in (tmp_path / "text", bucket)
    )
    assert remote.identity == local.identity
    assert [text.decode() for text in texts_of(remote)] == TEXTS


def saved(table, **options):
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def column(values, name="text"):
    return saved(pa.table({"id": list(range(len(values))), name: values}), row_group_size=1)


GOOD = saved(table(TEXTS))
HALF = saved(table(TEXTS * 9), row_group_size=60, compression="zstd", write_page_checksum=True)
BAD = [
    ({"a.parquet": column(TEXTS, "texts")}, "(did you mean texts?); name it with config.data."),
    ({"a.parquet": column(TEXTS, "texts")}, "text_feature: it has 'id', 'texts'"),
    ({"a.parquet": GOOD, "b.parquet": column(["a"], "body")}, "/b.parquet: no column 'text'"),
    ({"a.parquet": column([{"en": "a"}])}, "column 'text' holds struct<en: string>, not strings"),
    ({"a.parquet": column([["a"]]), "b.parquet": GOOD}, "/a.parquet: column 'text' holds list<"),
    ({"a.parquet": GOOD, "b.parquet": column([1, 2])}, "/b.parquet: column 'text' holds int64"),
    ({"a.parquet": column([None, None])}, "has no document with text; 2 without it were left out"),
    ({"a.parquet": column(pa.nulls(2, pa.string()))}, "set config.data.text_feature"),
    ({"a.parquet": HALF[: len(HALF) // 2]}, "/a.parquet: is damaged or cut short ("),
    ({"a.parquet": b""}, "/a.parquet: is damaged or cut short ("),
    ({"a.arrow": b"", "b.parquet": GOOD}, "/a.arrow: is damaged or cut short ("),
    ({"a.parquet": column([b"fine", b"\xff"])}, "/a.parquet row 2: not UTF-8 text (byte 0)"),
    ({"a.jsonl.zst": zstd(lines(TEXTS))[:-3]}, "/a.jsonl.zst: is damaged or cut short (Truncated"),
    ({"a.jsonl.bz2": bz2.compress(lines(TEXTS))[:-3]}, "/a.jsonl.bz2: is damaged or cut short ("),
    ({"a.jsonl.xz": lzma.compress(lines(TEXTS))[:-3]}, "/a.jsonl.xz: is damaged or cut short ("),
    ({"a.jsonl.xz": b"no", "b.ndjson": lines(TEXTS)}, "/a.jsonl.xz: is damaged or cut short ("),
    ({"a.json": json.dumps([{"text": "a"}]).encode()}, "/a.json line 1: a JSON array, not"),
    ({"a.txt": b"a", "b.parquet": GOOD}, "or name it by config.data.pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "mentions"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, contents, mentions):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 100)
    (tmp_path / "text").mkdir()
    for name, content in contents.items():
        (tmp_path / "text" / name).write_bytes(content)
    line = refusal(open_store, data_config(tmp_path, "files", tmp_path / "text"), 260)
    assert mentions in line
    assert not list(tmp_path.rglob("index.json"))


def test_a_damaged_page_is_one_bad_row(tmp_path, monkeypatch):
    """What is before it and after it is read, if the user lets one row be left out."""
    (tmp_path / "text").mkdir()
    middle = len(HALF) // 2
    damaged = HALF[:middle] + bytes(200) + HALF[middle + 200 :]
    (tmp_path / "text" / "a.parquet").write_bytes(damaged)
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 1000)
    data = data_config(tmp_path, "files", tmp_path / "text")
    assert "/a.parquet: is damaged or cut short" in refusal(open_store, data, 260)
    store = open_store(data_config(tmp_path, "files", tmp_path / "text", max_bad_rows=1), 260)
    assert 700 < store.count("documents", "all") < 810 and len(store.index["bad_rows"]) == 1


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.md", "README.md b.md d/c.md"),
        ("*.md", "README.md b.md"),
        ("d/**", "d/c.md d/e.parquet"),
        ("**/*.rst.gz", "f.rst.gz"),
    ],
)
def test_a_pattern_names_the_files(tmp_path, pattern, expected):
    folder = tmp_path / "text"
    (folder / "d").mkdir(parents=True)
    for name in ("README.md", "b.md", "d/c.md", "g.txt", ".hidden.md"):
        (folder / name).write_text(name * (name != "g.txt" or 999))
    (folder / "d" / "e.parquet").write_bytes(column(["d/e.parquet"]))
    (folder / "f.rst.gz").write_bytes(gzip.compress(b"f.rst.gz"))
    source = find_source(data_config(tmp_path, "files", folder, pattern=pattern))
    assert b" ".join(texts_of(source)).decode() == expected
    assert source.identity["pattern"] == pattern
    assert "pattern" not in find_source(data_config(tmp_path, "files", folder)).identity


@pytest.mark.parametrize("pattern", ["**.md", "none/*"])
def test_a_pattern_that_names_nothing(tmp_path, pattern):
    (tmp_path / "a.txt").write_text("a")
    assert "config.data.pattern" in refusal(
        find_source, data_config(tmp_path, "files", tmp_path, pattern=pattern)
    )


def test_folders_of_splits_that_the_library_saves(tmp_path):
    """As DatasetDict.save_to_disk does; by the library itself where it is installed."""
    library = pytest.importorskip("datasets", reason="compares with the library datasets")
    splits = {"train": TEXTS[:70], "test": TEXTS[70:]}
    saved = {split: library.Dataset.from_dict({"text": texts}) for split, texts in splits.items()}
    library.DatasetDict(saved).save_to_disk(tmp_path / "arrow", num_shards={"train": 3, "test": 1})
    for split, dataset in saved.items():
        (tmp_path / "json").mkdir(exist_ok=True)
        dataset.to_json(tmp_path / "json" / f"{split}.json")
        dataset.to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    for form in ("arrow", "json", "parquet"):
        source = find_source(data_config(tmp_path, "files", tmp_path / form))
        for split, texts in {"train": TEXTS[:70], "validation": TEXTS[70:]}.items():
            assert [each.text.decode() for each in source.documents(split)] == texts
