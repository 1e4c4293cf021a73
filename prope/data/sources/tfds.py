"""TFDS datasets, as ArrayRecord or TFRecord, in a folder or a bucket.

They are read without TensorFlow or Beam.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from unittest import mock

from etils import epath

from prope.data.sources.base import (
    Chunk,
    Document,
    Source,
    TextRule,
    bad_row,
    chunk_bytes,
    log_once,
)
from prope.data.sources.remote import local_file
from prope.errors import UsageError, nearest, usage_error
from prope.runtime.files import hash_file, is_url

_FEATURES = "tensorflow_datasets.core.features."


def tfds_source(name: str, data_dir: epath.Path, rule: TextRule) -> Source:
    """Returns the `train` split of a prepared dataset.

    Raises UsageError where it is incomplete, which says how to download it.
    """
    folder = _version_folder(name, data_dir)
    fail = functools.partial(incomplete, name, data_dir)
    info = _read_info(folder, fail)
    _check_content(folder, info, rule)
    split = info.splits["train"]
    shards = [epath.Path(path) for path in split.filepaths]
    # Not by is_file of each, which is also false where the storage fails.
    present = {path.name for path in folder.iterdir()}
    missing = [shard.name for shard in shards if shard.name not in present]
    if missing:
        raise fail(f"{len(missing)} of {len(shards)} shards are missing, first {missing[0]}")

    read = functools.partial(_read, fail, info.features, info.file_format.value, rule)
    num_records = max(sum(split.shard_lengths), 1)
    num_bytes = int(split.num_bytes)
    step = max(1, chunk_bytes(num_bytes) * num_records // max(num_bytes, 1))  # records in a chunk
    chunks = []
    for shard, length in zip(shards, split.shard_lengths, strict=True):
        for start in range(0, max(length, 1), step):
            stop = min(start + step, length)
            chunks.append(
                Chunk(
                    key=f"{shard.name} from record {start} to {stop}",
                    num_bytes=(stop - start) * num_bytes // num_records,
                    read=functools.partial(read, shard, length, start, stop),
                    shard=str(shard) if is_url(shard) else "",
                )
            )
    # Without the file format: the same records in another container are the same documents.
    identity = {
        "dataset": name,
        "version": str(info.version),
        **rule.identity,
        "shard_lengths": list(split.shard_lengths),
        "num_bytes": num_bytes,
    }
    return Source(name, identity, tuple(chunks))


def _read_info(folder: epath.Path, fail: Callable[[str], UsageError]):
    """Returns the `DatasetInfo` of a prepared dataset."""
    import tensorflow_datasets as tfds

    for file in ("dataset_info.json", "features.json"):
        with contextlib.suppress(FileNotFoundError):
            hash_file(folder / file)  # raises where the storage fails, which TFDS would not tell
    try:
        with _known_features(folder):
            return tfds.builder_from_directory(folder).info
    except UsageError:
        raise
    except Exception as error:
        raise fail(f"its dataset_info.json or features.json cannot be read ({error})") from None


def _known_features(folder: epath.Path) -> contextlib.AbstractContextManager:
    """Has TFDS create its own features only: it would import whatever features.json names.

    TFDS has no setting for it, and names stand in several forms, also in JSON within JSON.
    """
    from tensorflow_datasets.core.features.feature import FeatureConnector

    find_any = FeatureConnector.cls_from_name

    def find_class(name: str):
        if not name.startswith(_FEATURES):
            problem = f"must begin with {_FEATURES}: another one would run code"
            raise usage_error(f"{folder}/features.json: pythonClassName", name, problem)
        return find_any(name)

    return mock.patch.object(FeatureConnector, "cls_from_name", find_class)


def _check_content(folder: epath.Path, info, rule: TextRule) -> None:
    """Raises UsageError where a dataset lacks the split, the features or a format that is read."""
    import tensorflow_datasets as tfds

    kinds = info.features.items()
    texts = [name for name, kind in kinds if isinstance(kind, tfds.features.Text)]
    content = f"it has splits {sorted(info.splits)}, text features {sorted(texts)}"
    if "train" not in info.splits:
        raise UsageError(f"{folder}: needs a split 'train'; {content}")
    others = sorted(set(info.splits) - {"train"})
    if others:
        log_once(f"data: {folder}: split train read, {len(others)} left out {others}")
    for feature in rule.features:
        if feature not in texts:
            problem = f"no text feature {feature!r}{nearest(feature, texts)}"
            raise UsageError(f"{folder}: {problem}; {content}; set {rule.option}")
    file_format = info.file_format.value
    if file_format not in READERS:
        readable = "array_record and tfrecord can be read"
        raise UsageError(f"{folder}: is in {file_format} format; {readable}")


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
    """Yields the documents of records start .. stop - 1 of a shard, which must have `length`.

    Where a record cannot be read, it is tried once more, if the storage permits the file to be read
    at all; a copy of a shard in a bucket is then downloaded again.
    """
    position = start
    failed_position = None
    read_to = None if stop == length else stop
    while True:
        try:
            path = str(local_file(shard))
        except FileNotFoundError:
            raise fail(f"{shard.name} is missing") from None
        try:
            for record in READERS[file_format](path, position, read_to):
                if position < stop:
                    example = features.deserialize_example_np(record)
                    try:
                        yield rule.document(example)
                    except UsageError as error:
                        yield bad_row(f"{shard} record {position + 1}", error)
                position += 1
            if position != stop:
                raise EOFError(f"it holds {position} of its {length} records")
            return
        except UsageError:
            raise
        except Exception as error:  # what the record readers raise has no common type
            if is_url(shard):
                epath.Path(path).unlink(missing_ok=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    hash_file(shard)
            if failed_position == position:
                reason = " ".join(str(error).split())[:200]  # one of them quotes the whole record
                raise fail(f"{shard.name} is damaged after {position} records ({reason})") from None
            failed_position = position


def array_record(path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields records start .. stop - 1 of an ArrayRecord file; to its end if stop is None."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    try:
        count = reader.num_records()
        end = count if stop is None else min(stop, count)
        for first in range(start, end, 16):  # few, as they may be long
            yield from reader.read(first, min(first + 16, end))
    finally:
        reader.close()


def tfrecord(path: str, start: int, stop: int | None) -> Iterator[bytes]:
    """Yields records start .. stop - 1 of a TFRecord file; to its end if stop is None."""
    numbers = itertools.count() if stop is None else range(stop)
    # Without a buffer, only 12 bytes of a skipped record are read.
    with open(path, "rb", buffering=0) as file:
        for number in numbers:
            header = file.read(12)  # the record's length, of 8 bytes, and its checksum
            if not header:
                return
            length = int.from_bytes(_checked(header), "little")
            if number < start:
                file.seek(length + 4, os.SEEK_CUR)
                continue
            record = file.read(length + 4)
            if len(record) < length + 4:
                raise EOFError("cut short")
            yield _checked(record)


def _checked(data: bytes) -> bytes:
    """Returns bytes without the TFRecord checksum that ends them; raises ValueError if it is wrong.

    The checksum is a rotated CRC-32C plus a constant.
    """
    import google_crc32c

    content = data[:-4]
    crc = google_crc32c.value(content)
    rotated = crc >> 15 | crc << 17
    expected = (rotated + 0xA282EAD8) % 2**32
    if int.from_bytes(data[-4:], "little") != expected:
        raise ValueError("a checksum is wrong")
    return content


READERS = {"array_record": array_record, "tfrecord": tfrecord}


def _version_folder(name: str, data_dir: epath.Path) -> epath.Path:
    """Returns the newest prepared version below data_dir/name.

    As in TFDS, `name` may itself end in a version.
    """
    from tensorflow_datasets.core.utils.version import list_all_versions

    folder = data_dir / name.replace(":", "/")
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        problem = f"no dataset {name} in it{download_hint(name, data_dir)}"
        raise usage_error("config.data.data_dir", data_dir, problem) from None
    if folder / "dataset_info.json" in entries:
        return folder
    paths = [folder / str(version) for version in list_all_versions(folder)]  # oldest first
    prepared = [path for path in paths if (path / "dataset_info.json").is_file()]
    if not prepared:
        reason = f"there is no dataset_info.json in {folder} or in a version below it"
        raise incomplete(name, data_dir, reason)
    return prepared[-1]


def incomplete(name: str, data_dir: epath.Path, reason: str) -> UsageError:
    """Returns the error for a dataset of which something is missing or damaged."""
    problem = f"{name} is incomplete: {reason}{download_hint(name, data_dir)}"
    return usage_error("config.data.data_dir", data_dir, problem)


def download_hint(name: str, data_dir: str | epath.Path) -> str:
    """Returns the end of an error message: the commands that download or prepare a dataset."""
    if is_url(data_dir):
        return f"; see what is there and may be read: gcloud storage ls {data_dir}"
    dataset, *configs = name.replace(":", "/").split("/")
    if dataset != "wikipedia":
        build = f"tfds build {name} --file_format=array_record --data_dir={data_dir}"
        return f"; prepare it with TFDS (any machine): {build}"

    def copy(config: str) -> str:
        source = f"gs://tfds-data/datasets/wikipedia/{config}/1.0.0"
        target = f"{data_dir}/wikipedia/{config}"
        return f"mkdir -p {target} && gcloud storage cp -r {source} {target}/"

    simple = "20230601.simple"
    english = "20230601.en"
    download = "; read gs://tfds-data/datasets, or download the prepared copy"
    if configs and configs[0] not in (simple, english):
        return f"{download}: {copy(configs[0])}"
    small = f"{copy(simple)} (config.data.dataset=wikipedia/{simple})"
    return f"{download} (284 MB): {small}, or all of English (21 GB): {copy(english)}"
