"""Stage 1: where text comes from. Every source gives UTF-8 documents in a fixed order, and says what it is.

python_docs  the documentation in Python's own standard library: on every machine, about 2 MB
files        a folder of .txt (a document each) and .jsonl (a document per line)
NAME         a TFDS dataset such as wikipedia/20230601.en, prepared as ArrayRecord or as TFRecord, read without
             TensorFlow, Beam or a network
"""

import ast
import dataclasses
import hashlib
import json
import pathlib
import platform
import sysconfig
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from prope.errors import UsageError, nearest


@dataclasses.dataclass(frozen=True)
class Source:
    """A collection of documents.

    Attributes:
      name: as in config.data.dataset.
      identity: what makes it this collection and no other, JSON-able; the same wherever the text is the same.
      num_bytes: about how much text there is, to show progress by.
      documents: gives the documents, UTF-8, in a fixed order; raises UsageError where the data is broken.
    """

    name: str
    identity: dict
    num_bytes: int
    documents: Callable[[], Iterator[bytes]]


def find_source(config: ConfigDict) -> Source:
    """The source that a run's `config.data` names.

    Raises:
      UsageError: it is not there, or half there; the message says how to bring it.
    """
    if config.dataset == "python_docs":
        return _python_docs()
    if not pathlib.Path(config.data_dir).is_dir():
        bring = "" if config.dataset == "files" else _how_to_bring(config.dataset, config.data_dir)
        raise UsageError(f"config.data.data_dir={config.data_dir}: there is no such folder{bring}")
    if config.dataset == "files":
        return _files(pathlib.Path(config.data_dir), config.text_feature)
    return _tfds(config.dataset, pathlib.Path(config.data_dir), config.text_feature)


# --- The standard library ---------------------------------------------------------------------------------------

_NOT_DOCUMENTATION = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "idle_test",
}


def _python_docs() -> Source:
    """The language reference (pydoc's topics) and, module by module, the docstrings of the standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if not _NOT_DOCUMENTATION & set(p.relative_to(root).parts)]
    listing = [(p.relative_to(root).as_posix(), p.stat().st_size) for p in files]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def documents() -> Iterator[bytes]:
        from pydoc_data.topics import topics

        for _, text in sorted(topics.items()):
            yield text.encode()
        for file in files:
            text = "\n\n".join(_docstrings(file))
            if text:
                yield text.encode()

    identity = {"dataset": "python_docs", "python": platform.python_version(), "files": digest}
    return Source("python_docs", identity, 2_100_000, documents)


def _docstrings(file: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a few files of the library are not meant to be compiled
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners)]
    return [text for text in found if text]


# --- A folder of text -------------------------------------------------------------------------------------------


def _files(folder: pathlib.Path, key: str) -> Source:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix in (".txt", ".jsonl")]
    if not files:
        raise UsageError(f"config.data.data_dir={folder}: no .txt or .jsonl file in it or in a folder below it")
    listing = []
    for path in files:
        with path.open("rb") as opened:
            listing.append((path.relative_to(folder).as_posix(), hashlib.file_digest(opened, "sha256").hexdigest()))

    def documents() -> Iterator[bytes]:
        for path in files:
            if path.suffix == ".txt":
                yield _utf8(path.read_bytes(), str(path))
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _json_text(line, key, f"{path} line {number}")

    identity = {"dataset": "files", "files": listing, "text_feature": key}
    return Source("files", identity, sum(p.stat().st_size for p in files), documents)


def _json_text(line: bytes, key: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not a JSON value ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise UsageError(f"{where}: no text under {key!r}; name the key with config.data.text_feature")
    return record[key].encode()


def _utf8(text: bytes, where: str) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text (byte {error.start}); convert or remove it") from None
    return text


# --- TFDS -------------------------------------------------------------------------------------------------------


def _tfds(name: str, data_dir: pathlib.Path, feature: str) -> Source:
    import tensorflow_datasets as tfds

    folder = _version_folder(name, data_dir)
    try:
        info = tfds.builder_from_directory(folder).info
    except Exception as error:
        raise _half_written(
            name, data_dir, f"its dataset_info.json or features.json cannot be read ({error})"
        ) from None
    if "train" not in info.splits or feature not in info.features:
        has = f"splits {sorted(info.splits)}, features {sorted(info.features)}"
        hint = nearest(feature, info.features)
        raise UsageError(f"{folder}: needs a split 'train' and a text feature {feature!r}{hint}; it has {has}")
    split = info.splits["train"]
    shards = [pathlib.Path(path) for path in split.filepaths]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise _half_written(name, data_dir, f"{len(missing)} of {len(shards)} shards are missing, first {missing[0]}")
    formats = tfds.core.FileFormat
    readers = {formats.ARRAY_RECORD: _array_record, formats.TFRECORD: _tfrecord}
    if info.file_format not in readers:
        raise UsageError(f"{folder}: is in {info.file_format.value} format; array_record and tfrecord can be read")

    def documents() -> Iterator[bytes]:
        for shard, length in zip(shards, split.shard_lengths, strict=True):
            read = 0
            try:
                for record in readers[info.file_format](str(shard)):
                    text = info.features.deserialize_example_np(record)[feature]
                    read += 1
                    yield _utf8(text, f"{shard} record {read}")
            except UsageError:
                raise
            except Exception as error:  # what the record readers raise on a damaged file has no common type
                raise _half_written(name, data_dir, f"{shard.name} is damaged after {read} records ({error})") from None
            if read != length:
                raise _half_written(name, data_dir, f"{shard.name} holds {read} of its {length} records")

    # Not the file format: the same records in another wrapping are the same documents.
    identity = {
        "dataset": name, "version": str(info.version), "text_feature": feature,
        "shard_lengths": list(split.shard_lengths), "num_bytes": int(split.num_bytes),
    }  # fmt: skip
    return Source(name, identity, int(split.num_bytes), documents)


def _array_record(path: str) -> Iterator[bytes]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    try:
        for start in range(0, reader.num_records(), 64):
            yield from reader.read(start, min(start + 64, reader.num_records()))
    finally:
        reader.close()


def _tfrecord(path: str) -> Iterator[bytes]:
    import grain

    return iter(grain.experimental.TFRecordIterDataset(path))


def _version_folder(name: str, data_dir: pathlib.Path) -> pathlib.Path:
    """The newest prepared version below data_dir/name; `name` may itself end in a version, as in TFDS."""
    folder = data_dir / name.replace(":", "/")
    if (folder / "dataset_info.json").is_file():
        return folder
    versions = [p for p in folder.glob("*.*.*") if (p / "dataset_info.json").is_file()]
    if versions:
        return max(versions, key=lambda p: [int(n) if n.isdigit() else 0 for n in p.name.split(".")])
    if folder.is_dir():
        raise _half_written(name, data_dir, f"there is no dataset_info.json in {folder} or in a version below it")
    raise UsageError(f"config.data.data_dir={data_dir}: no dataset {name} in it{_how_to_bring(name, data_dir)}")


def _half_written(name: str, data_dir: str | pathlib.Path, what: str) -> UsageError:
    return UsageError(f"config.data.data_dir={data_dir}: {name} is not whole: {what}{_how_to_bring(name, data_dir)}")


def _how_to_bring(name: str, data_dir: str | pathlib.Path) -> str:
    if not name.startswith("wikipedia"):
        return (
            f"; prepare it with TFDS (any machine): tfds build {name} --file_format=array_record --data_dir={data_dir}"
        )

    def copy(config: str) -> str:
        folder = f"wikipedia/{config}"
        return (
            f"mkdir -p {data_dir}/{folder} && "
            f"gcloud storage cp -r gs://tfds-data/datasets/{folder}/1.0.0 {data_dir}/{folder}/"
        )

    return (
        f"; bring the prepared copy (284 MB): {copy('20230601.simple')} "
        f"(config.data.dataset=wikipedia/20230601.simple), or all of English (21 GB): {copy('20230601.en')}"
    )
