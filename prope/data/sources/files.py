"""A folder or bucket of text: a .txt is one document, a .jsonl has one per line.

Both may be gzipped, as .txt.gz and .jsonl.gz.
"""

import functools
import gzip
import io
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures

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
from prope.errors import UsageError, usage_error
from prope.runtime.files import files_below, hash_file, is_url, retry_reads

_JSON_LINES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (".txt", ".txt.gz", *_JSON_LINES)
_GZIP_RATIO = 3  # about how much gzip shrinks text


def files(folder: epath.Path, rule: TextRule) -> Source:
    """Returns the files in a folder and below it, sorted by path, as a source.

    Raises UsageError where there is no such file, or the rule does not apply to it.
    """
    sizes = {
        folder / name: size
        for name, size in files_below(folder).items()
        if name.endswith(_SUFFIXES)
    }
    if not sizes:
        problem = "no .txt or .jsonl file (.gz or not) in it or below it"
        raise usage_error("config.data.data_dir", folder, problem)
    paths = sorted(sizes)
    if rule.template:
        for path in paths:
            if not path.name.endswith(_JSON_LINES):
                problem = "has no fields for config.data.template to name"
                raise UsageError(f"{path}: {problem}; keep it in another folder")
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(hash_file, paths))
    names = [path.relative_to(folder).as_posix() for path in paths]
    listing = list(zip(names, hashes, strict=True))
    identity = {"dataset": "files", "files": listing, **rule.identity}
    text_sizes = {
        path: sizes[path] * (_GZIP_RATIO if path.suffix == ".gz" else 1) for path in paths
    }
    return Source("files", identity, tuple(_chunks(folder, text_sizes, rule)))


def _chunks(folder: epath.Path, sizes: dict[epath.Path, int], rule: TextRule) -> Iterator[Chunk]:
    """Yields small text files in groups, and large .jsonl files in byte ranges."""
    limit = chunk_bytes(sum(sizes.values()))
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))

    def group_key(path: epath.Path) -> tuple[bool, int]:
        return path.name.endswith(_JSON_LINES), ends[path] // limit

    for (is_json_lines, _), group in itertools.groupby(sizes, group_key):
        paths = tuple(group)
        if not is_json_lines:
            key = f"{paths[0].relative_to(folder)} and {len(paths) - 1} more"
            size = sum(sizes[path] for path in paths)
            yield Chunk(key, size, functools.partial(_read_texts, paths))
            continue
        for path in paths:
            size = sizes[path]
            # Gzip cannot be entered in the middle.
            step = max(size, 1) if path.suffix == ".gz" else limit
            for start in range(0, size, step):
                stop = min(start + step, size)
                key = f"{path.relative_to(folder)} from byte {start} to {stop}"
                end = math.inf if stop == size else stop  # gzipped, its size is a guess
                read = functools.partial(_read_json_lines, path, rule, start, end)
                yield Chunk(key, stop - start, read)


def _read_texts(paths: tuple[epath.Path, ...]) -> Iterator[Document]:
    for path in paths:
        text = _retry(path, functools.partial(_read_text, path))
        yield Document(check_utf8(text, str(path)))


def _read_text(path: epath.Path) -> bytes:
    with _open(path) as file:
        return file.read(MAX_DOCUMENT + 1)


def _read_json_lines(
    path: epath.Path, rule: TextRule, start: int, stop: float
) -> Iterator[Document]:
    """Yields the documents of the lines that start at the bytes start .. stop - 1."""
    for offset, line in _read_lines(path, start, stop):
        if not line.strip():
            continue
        try:
            document = _json_document(line, rule)
        except UsageError as error:
            raise UsageError(f"{path} line {_line_number(path, offset)}: {error}") from None
        yield document


def _read_lines(path: epath.Path, start: int, stop: float) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) of the lines that start at the bytes start .. stop - 1."""
    offset = max(start - 1, 0)
    with _retry(path, functools.partial(_open, path)) as file:

        def next_line() -> bytes:
            if file.tell() != offset:  # at the beginning, or a read has failed within the line
                file.seek(offset)
            return file.readline(2 * MAX_DOCUMENT)

        if start:  # the rest of a line that starts before
            offset += len(_retry(path, next_line))
        while offset < stop:
            line = _retry(path, next_line)
            if not line:
                return
            yield offset, line
            offset += len(line)


def _json_document(line: bytes, rule: TextRule) -> Document:
    """Parses a line; raises UsageError with the reason alone."""
    if len(line) >= 2 * MAX_DOCUMENT:
        raise too_long("the line")
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text (byte {error.start}); convert or remove it") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a JSON value ({error})") from None
    values = {}
    for name in rule.features:
        value = record.get(name) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise UsageError(f"no text under {name!r}; name the key with {rule.option}")
        try:
            values[name] = value.encode()
        except UnicodeEncodeError:
            problem = "holds half a character (an unpaired surrogate)"
            raise UsageError(f"{problem}; repair or remove it") from None
    return rule.document(values, "its text")


def _line_number(path: epath.Path, offset: int) -> int:
    """Counts the lines up to the one that starts at this byte; called for an error only."""
    number = 1
    with _open(path) as file:
        while file.tell() < offset:
            file.readline()
            number += 1
    return number


def _open(path: epath.Path):
    """Opens a file to read its text, as bytes."""
    if not is_url(path):
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    file = io.BufferedReader(path.open("rb"), 2**20)
    return gzip.open(file) if path.suffix == ".gz" else file


def _retry(path: epath.Path, read: Callable):
    """Calls `read` with `retry_reads`; a damaged gzip file becomes a UsageError that names it."""

    def checked():
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{path}: is damaged or cut short ({error}); copy it again") from None

    return retry_reads(path, checked)
