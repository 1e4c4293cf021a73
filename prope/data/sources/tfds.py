"""TFDS datasets, as ArrayRecord or TFRecord, in a folder or a bucket; read without TensorFlow or Beam."""

import base64
import contextlib
import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

import fsspec
from etils import epath

from prope.data.sources.base import Chunk, Document, MissingText, Source, TextRule, chunk_bytes
from prope.errors import RunFailed, UsageError, is_disk_full, nearest
from prope.runtime.files import hash_file, is_url, local_cache, retry_reads


def tfds_source(name: str, data_dir: epath.Path, rule: TextRule) -> Source:
    """Returns the `train` split of a prepared dataset; where it is incomplete, a UsageError says how to download it."""
    import tensorflow_datasets as tfds

    folder, fail = _version_folder(name, data_dir), functools.partial(incomplete, name, data_dir)
    with contextlib.suppress(FileNotFoundError):
        for file in ("dataset_info.json", "features.json"):
            hash_file(folder / file)  # what TFDS raises would not tell a storage that fails
    try:
        info = tfds.builder_from_directory(folder).info
    except Exception as error:
        raise fail(f"its dataset_info.json or features.json cannot be read ({error})") from None
    texts = [
        feature for feature, kind in info.features.items() if isinstance(kind, tfds.features.Text)
    ]
    has = f"splits {sorted(info.splits)}, text features {sorted(texts)}"
    if "train" not in info.splits:
        raise UsageError(f"{folder}: needs a split 'train'; it has {has}")
    for feature in rule.features:
        if feature not in texts:
            hint = nearest(feature, texts)
            raise UsageError(
                f"{folder}: no text feature {feature!r}{hint}; it has {has}; set {rule.option}"
            )
    split = info.splits["train"]
    shards = [epath.Path(path) for path in split.filepaths]
    present = {
        path.name for path in folder.iterdir()
    }  # where is_file is false, storage may have failed
    if missing := [shard.name for shard in shards if shard.name not in present]:
        raise fail(f"{len(missing)} of {len(shards)} shards are missing, first {missing[0]}")
    if info.file_format.value not in _READERS:
        raise UsageError(
            f"{folder}: is in {info.file_format.value} format; array_record and tfrecord can be read"
        )

    read = functools.partial(_read, fail, info.features, info.file_format.value, rule)
    number, size = max(sum(split.shard_lengths), 1), int(split.num_bytes)
    step = max(1, chunk_bytes(size) * number // max(size, 1))  # records in a chunk
    chunks = []
    for shard, length in zip(shards, split.shard_lengths, strict=True):
        for start in range(0, max(length, 1), step):
            stop = min(start + step, length)
            read_chunk = functools.partial(read, shard, length, start, stop)
            key, copied = (
                f"{shard.name} from record {start} to {stop}",
                str(shard) if is_url(shard) else "",
            )
            chunks.append(Chunk(key, (stop - start) * size // number, read_chunk, copied))
    # Not the file format: the same records in another container are the same documents.
    identity = {"dataset": name, "version": str(info.version), **rule.identity}
    identity |= {"shard_lengths": list(split.shard_lengths), "num_bytes": size}
    return Source(name, identity, tuple(chunks))


_copies: dict[str, BinaryIO] = {}  # the shard that this process reads, by URL


def _copy(shard: epath.Path) -> str:
    """Returns a path at which this process reads a shard of a bucket; it replaces the shard before.

    The copy is a file without a name, so that nobody else reads it, and a killed process leaves nothing.
    """
    if str(shard) not in _copies:
        while _copies:
            _copies.popitem()[1].close()
        _copies[str(shard)] = retry_reads(shard, functools.partial(_download, shard))
    return f"/dev/fd/{_copies[str(shard)].fileno()}"


def _download(shard: epath.Path) -> BinaryIO:
    """Copies a shard whole; raises OSError where size or hash are not what the bucket lists."""
    scratch = local_cache() / "shards"
    system, path = fsspec.core.url_to_fs(str(shard))
    info, md5 = system.info(path), hashlib.md5(usedforsecurity=False)
    with contextlib.ExitStack() as on_error, system.open(path, "rb", cache_type="none") as source:
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            file = on_error.enter_context(tempfile.TemporaryFile(dir=scratch))
            while block := source.read(2**24):
                file.write(block)
                md5.update(block)
            file.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
            full = f"the disk is full; it needs room for a shard of {info['size']:,} bytes for each worker"
            remedy = "free some space, or choose another folder, and run the same command again"
            raise RunFailed(f"PROPE_CACHE={scratch.parent}: {full}: {remedy}") from None
        copied = base64.b64encode(md5.digest()).decode()
        if file.tell() != info["size"] or copied != info.get(
            "md5Hash", copied
        ):  # which composite objects do not have
            raise OSError("its copy is not what the bucket lists")
        on_error.pop_all()
    return file


def _read(
    fail: Callable[[str], UsageError],
    features,
    file_format: str,
    rule: TextRule,
    shard: epath.Path,
    length: int,
    start: int,
    stop: int,
) -> Iterator[Document]:
    """Yields the documents of records start .. stop - 1 of a shard, which must have `length` records.

    Where a record cannot be read, it is tried once more, if the storage permits the file to be read at all.
    """
    try:
        path = _copy(shard) if is_url(shard) else str(shard)
    except FileNotFoundError:
        raise fail(f"{shard.name} is missing") from None
    position, failed = start, None
    while True:
        try:
            for record in _READERS[file_format](path, position, None if stop == length else stop):
                if position < stop:
                    yield rule.document(
                        features.deserialize_example_np(record), f"{shard} record {position + 1}"
                    )
                position += 1
            break
        except UsageError:
            raise
        except Exception as error:  # what the record readers raise has no common type
            with contextlib.suppress(FileNotFoundError):
                hash_file(epath.Path(path))
            if failed == position:
                reason = " ".join(str(error).split())[:200]  # one of them quotes the whole record
                raise fail(f"{shard.name} is damaged after {position} records ({reason})") from None
            failed = position
    if position != stop:
        raise fail(f"{shard.name} holds {position} of its {length} records")


def array_record(path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields records start .. stop - 1 of an ArrayRecord file; to its end if stop is None."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    try:
        stop = reader.num_records() if stop is None else min(stop, reader.num_records())
        for first in range(start, stop, 16):  # few, as they may be long
            yield from reader.read(first, min(first + 16, stop))
    finally:
        reader.close()


def tfrecord(path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields records start .. stop - 1 of a TFRecord file; to its end if stop is None."""
    with open(
        path, "rb", buffering=0
    ) as file:  # of skipped records it reads the 12 bytes before them only
        file.seek(0)  # on macOS, a path in /dev/fd shares the place with the descriptor
        for number in itertools.count() if stop is None else range(stop):
            if not (header := file.read(12)):  # its length, of 8 bytes, and 4 more
                return
            length = int.from_bytes(header[:8], "little")
            if number < start:
                file.seek(length + 4, os.SEEK_CUR)
            elif len(record := file.read(length + 4)) == length + 4:
                yield record[:-4]
            else:
                raise EOFError("cut short")


_READERS = {"array_record": array_record, "tfrecord": tfrecord}


def _version_folder(name: str, data_dir: epath.Path) -> epath.Path:
    """Returns the newest prepared version below data_dir/name; `name` may itself end in a version, as in TFDS."""
    folder = data_dir / name.replace(":", "/")
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        hint = download_hint(name, data_dir)
        raise MissingText(
            f"config.data.data_dir={data_dir}: no dataset {name} in it{hint}"
        ) from None
    if folder / "dataset_info.json" in entries:
        return folder
    if versions := [p for p in entries if p.match("*.*.*") and (p / "dataset_info.json").is_file()]:
        return max(
            versions, key=lambda p: [int(n) if n.isdigit() else 0 for n in p.name.split(".")]
        )
    raise incomplete(
        name, data_dir, f"there is no dataset_info.json in {folder} or in a version below it"
    )


def incomplete(name: str, data_dir: epath.Path, reason: str) -> UsageError:
    """Returns the error for a dataset of which something is missing or damaged."""
    return UsageError(
        f"config.data.data_dir={data_dir}: {name} is incomplete: {reason}{download_hint(name, data_dir)}"
    )


def download_hint(name: str, data_dir: str | epath.Path) -> str:
    """Returns the end of an error message: the commands that download or prepare a dataset."""
    if is_url(data_dir):
        return f"; see what is there and may be read: gcloud storage ls {data_dir}"
    dataset, *config = name.replace(":", "/").split("/")
    if dataset != "wikipedia":
        build = f"tfds build {name} --file_format=array_record --data_dir={data_dir}"
        return f"; prepare it with TFDS (any machine): {build}"
    from tensorflow_datasets.text.wikipedia import Wikipedia

    known = [known.name for known in Wikipedia.BUILDER_CONFIGS]
    if config and config[0] not in known:
        hint = nearest(config[0], known)
        return f"; there is no wikipedia/{config[0]}{hint}: give one of {len(known)} such as wikipedia/20230601.simple"

    def copy(config: str) -> str:
        target = f"{data_dir}/wikipedia/{config}"
        return f"mkdir -p {target} && gcloud storage cp -r gs://tfds-data/datasets/wikipedia/{config}/1.0.0 {target}/"

    if config and config[0] not in ("20230601.simple", "20230601.en"):
        return f"; read gs://tfds-data/datasets, or download the prepared copy: {copy(config[0])}"
    simple = f"{copy('20230601.simple')} (config.data.dataset=wikipedia/20230601.simple)"
    both = f"the prepared copy (284 MB): {simple}, or all of English (21 GB): {copy('20230601.en')}"
    return f"; read gs://tfds-data/datasets, or download {both}"
