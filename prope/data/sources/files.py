"""A folder or bucket of text: a .txt is one document, a .jsonl has one per line; both also gzipped, as .txt.gz."""

import contextlib
import functools
import gzip
import io
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures

import fsspec
from etils import epath

from prope.data.sources.base import (
    MAX_DOCUMENT,
    Chunk,
    Document,
    Source,
    TextRule,
    check_utf8,
    chunk_bytes,
    too_long,
)
from prope.errors import UsageError
from prope.runtime.files import hash_file, is_url, local_cache, read_json, retry_reads, write_atomic

_JSON_LINES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (".txt", ".txt.gz", *_JSON_LINES)
_GZIP_RATIO = 3  # about how much gzip shrinks text
_ALWAYS_HASHED = (
    2**26
)  # bytes of all files; up to here hashing again is faster than it is worth caching


def files(folder: epath.Path, rule: TextRule) -> Source:
    """Returns the files in a folder and below it, sorted by path, as a source.

    Raises UsageError where there is no such file, or the rule does not apply to it.
    """
    if not (paths := _list(folder)):
        raise UsageError(
            f"config.data.data_dir={folder}: no .txt or .jsonl file (.gz or not) in it or below it"
        )
    texts = [p for p in paths if not p.name.endswith(_JSON_LINES)]
    if rule.template and texts:
        raise UsageError(
            f"{texts[0]}: has no fields for config.data.template to name; keep it in another folder"
        )
    listing = [
        (p.relative_to(folder).as_posix(), sha256) for p, sha256 in _hash_files(paths).items()
    ]
    return Source(
        "files",
        {"dataset": "files", "files": listing, **rule.identity},
        tuple(_chunks(folder, paths, rule)),
    )


def _list(folder: epath.Path) -> dict[epath.Path, tuple[int, str, float]]:
    """Returns (size, what changes with the content, time of the last change) by path, sorted by path."""
    system, root = fsspec.core.url_to_fs(str(folder))
    found = system.find(root, detail=True)  # of a bucket in few requests
    files = {
        folder / os.path.relpath(path, root): info
        for path, info in found.items()
        if path.endswith(_SUFFIXES)
    }
    if is_url(folder):
        return {
            p: (i["size"], f"{i.get('generation') or i.get('ETag') or i}", 0.0)
            for p, i in sorted(files.items())
        }
    stats = {path: os.stat(path) for path in sorted(files) if path.is_file()}
    return {
        path: (s.st_size, f"{s.st_mtime_ns} {s.st_ino}", s.st_mtime) for path, s in stats.items()
    }


def _chunks(folder: epath.Path, paths: dict[epath.Path, tuple], rule: TextRule) -> Iterator[Chunk]:
    """Yields small text files in groups, and large .jsonl files in byte ranges."""
    sizes = [
        size * (_GZIP_RATIO if path.suffix == ".gz" else 1) for path, (size, _, _) in paths.items()
    ]
    limit = chunk_bytes(sum(sizes))
    ends = zip(paths, sizes, itertools.accumulate(sizes), strict=True)
    groups = itertools.groupby(
        ends, lambda entry: (entry[0].name.endswith(_JSON_LINES), entry[2] // limit)
    )
    for (is_lines, _), group in groups:
        if not is_lines:
            texts, text_sizes, _ = zip(*group, strict=True)
            key = f"{texts[0].relative_to(folder)} and {len(texts) - 1} more"
            yield Chunk(key, sum(text_sizes), functools.partial(_read_texts, texts))
            continue
        for path, size, _ in group:
            whole = path.suffix == ".gz"  # cannot be entered in the middle
            for start in range(0, size, max(size, 1) if whole else limit):
                stop = size if whole else min(start + limit, size)
                read = functools.partial(
                    _read_lines, path, rule, start, math.inf if whole else stop
                )
                yield Chunk(
                    f"{path.relative_to(folder)} from byte {start} to {stop}", stop - start, read
                )


def _read_texts(paths: tuple[epath.Path, ...]) -> Iterator[Document]:
    def read(path: epath.Path) -> bytes:
        with _open(path) as file:
            return file.read(MAX_DOCUMENT + 1)

    for path in paths:
        yield Document(check_utf8(_retry(path, functools.partial(read, path)), str(path)))


def _read_lines(path: epath.Path, rule: TextRule, start: int, stop: float) -> Iterator[Document]:
    """Yields the documents of the lines that start at the bytes start .. stop - 1."""
    with _retry(path, functools.partial(_open, path)) as file:
        offset, number = start, 0

        def next_line() -> bytes:
            if file.tell() != offset:  # a read has failed within the line
                file.seek(offset)
            return file.readline(2 * MAX_DOCUMENT)

        if start:
            offset = start - 1
            offset += len(_retry(path, next_line))
        while offset < stop and (line := _retry(path, next_line)):
            offset, number = offset + len(line), number + 1
            if line.strip():
                try:
                    yield _json_document(line, rule)
                except UsageError as error:
                    raise UsageError(
                        f"{path} line {_lines_before(path, start) + number}: {error}"
                    ) from None


def _json_document(line: bytes, rule: TextRule) -> Document:
    """Parses a line; raises UsageError with the reason alone."""
    if len(line) >= 2 * MAX_DOCUMENT:
        raise too_long("the line")
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text (byte {error.start}); convert or remove it") from None
    except ValueError as error:
        raise UsageError(f"not a JSON value ({error})") from None
    for name in rule.features:
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            raise UsageError(f"no text under {name!r}; name the key with {rule.option}")
    try:
        return rule.document({name: record[name].encode() for name in rule.features}, "its text")
    except UnicodeEncodeError:
        raise UsageError(
            "holds half a character (an unpaired surrogate); repair or remove it"
        ) from None


def _lines_before(path: epath.Path, start: int) -> int:
    """Counts the lines that start before this byte; called for an error only."""
    with _open(path) as file:
        return next(n for n in itertools.count() if file.tell() >= start or not file.readline())


def _open(path: epath.Path):
    file = io.BufferedReader(path.open("rb"), 2**20) if is_url(path) else path
    return gzip.open(file) if path.suffix == ".gz" else file if is_url(path) else path.open("rb")


def _retry(path: epath.Path, read: Callable):
    """Calls `read`, again where the storage fails; a damaged gzip file becomes a UsageError that names it."""

    def checked():
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{path}: is damaged or cut short ({error}); copy it again") from None

    return retry_reads(path, checked)


def _hash_files(paths: dict[epath.Path, tuple]) -> dict[epath.Path, str]:
    """Returns the sha256 of every file; with many bytes, from a cache where size and version are the same."""
    cache = local_cache() / "hashes.json"
    large = sum(size for size, _, _ in paths.values()) >= _ALWAYS_HASHED
    keys = {
        p: f"{p if is_url(p) else os.path.abspath(p)} {size} {s}"
        for p, (size, s, _) in paths.items()
    }
    known = (read_json(cache) if large else None) or {}
    new = [path for path in paths if keys[path] not in known]
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = {
            keys[path]: value for path, value in zip(new, pool.map(hash_file, new), strict=True)
        }
    if large and new:
        # A file written this very moment could change again without its time showing it.
        settled = {p for p in new if paths[p][2] < time.time() - 2}
        with contextlib.suppress(OSError):  # the cache only saves time
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cache, json.dumps(known | {keys[p]: hashes[keys[p]] for p in settled}))
    return {path: (known | hashes)[keys[path]] for path in paths}
