"""A folder or bucket of text: a .txt is one document, a .jsonl has one per line.

Both may be gzipped, as .txt.gz and .jsonl.gz. A .txt with separators has several documents. What is
left out is counted in the log.
"""

import collections
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import operator
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import fsspec
from etils import epath

from prope.data.sources.base import (
    LISTED,
    Chunk,
    Document,
    Source,
    TextRule,
    check_utf8,
    chunk_bytes,
    cut_words,
    log_once,
)
from prope.errors import UsageError, usage_error
from prope.runtime.files import (
    as_path,
    hash_file,
    is_url,
    parse_json,
    read_json,
    retry_reads,
    write_atomic,
)

_JSON_LINES = (".jsonl", ".jsonl.gz")
_SUFFIXES = (".txt", ".txt.gz", *_JSON_LINES)
_GZIP_RATIO = 3  # about how much gzip shrinks text
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which some editors begin UTF-8
_RULE = 3  # version of the rule that makes documents of files; in the fingerprint
PART_BYTES = 2**26  # a longer .txt is read in parts, so that a worker has enough memory
_SHOWN_REASONS = 5
# Files about a folder of text, which are no documents of it.
_ABOUT = re.compile(
    r"(?!.*\.jsonl)(readme|requirements|licen[cs]es?|copying|notice)([-_.].*)?", re.IGNORECASE
)
# Words in a file's path that name its split.
_SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<validation>valid(?:ation)?|val|dev)"
    r"|(?P<test>test(?:ing)?|eval(?:uation)?))(?![a-z])"
)


def files(folder: epath.Path, rule: TextRule, cache: str) -> Source:
    """Returns the files in a folder and below it, sorted by path, as a source.

    The hashes of files in a bucket are kept in `cache`. Raises UsageError where there is no such
    file, where most of the folder would be left out, or where the rule does not apply.
    """
    found = _list_bucket(folder) if is_url(folder) else _list_folder(folder)
    _check_listing(folder, found)
    splits = _named_splits(folder, [path for path, file in found.items() if not file.reason])
    paths = [path for path, split in splits.items() if split != "test"]
    texts = [path for path in paths if not _is_json_lines(path)]
    if rule.template and texts:
        problem = "has no fields for config.data.template to name"
        raise UsageError(f"{texts[0]}: {problem}; keep it in another folder")
    if rule.separator and not texts:
        problem = f"splits .txt files, and {folder} has none"
        raise usage_error("config.data.separator", rule.separator, problem, "remove it")
    names = [path.relative_to(folder).as_posix() for path in paths]
    stamps = [found[path].stamp for path in paths]
    hashes = _hash_files(folder, names, stamps, cache)
    listing = list(zip(names, hashes, strict=True))
    identity = {"dataset": "files", "files": listing, **rule.identity, "rule": _RULE}
    sizes = {
        path: found[path].size * (_GZIP_RATIO if path.suffix.lower() == ".gz" else 1)
        for path in paths
    }
    chunks = tuple(_chunks(folder, sizes, splits, rule))
    return Source("files", identity, chunks, is_divided=not any(splits.values()))


class _File(NamedTuple):
    """What a listing tells about a file."""

    size: int = 0  # bytes
    stamp: str = ""  # changes with the content; empty where nothing tells that
    reason: str = ""  # why it is not read; empty where it is


_Found = dict[epath.Path, _File]


def _list_bucket(folder: epath.Path) -> _Found:
    """Lists the files below a URL."""
    system, root = fsspec.core.url_to_fs(str(folder))
    found = {}
    for path, details in system.find(root, detail=True).items():
        name = os.path.relpath(path, root)
        marks = [details.get(mark) for mark in ("generation", "md5Hash", "etag", "ETag")]
        stamp = " ".join(str(mark) for mark in marks if mark)
        found[folder / name] = _File(details["size"], stamp, _reason_against(name))
    return dict(sorted(found.items()))


def _list_folder(folder: epath.Path) -> _Found:
    """Lists the files below a local folder, and the folders that are not entered.

    Links to folders are followed, each folder once: after those that are there themselves.
    """
    found = {}
    seen = set()
    links = []
    roots = [str(folder)]
    for root in roots:  # which grows
        for parent, folders, names in os.walk(root, onerror=_raise):
            if _seen_before(parent, seen):
                found[epath.Path(parent)] = _File(reason="linked twice")
                folders.clear()
                continue
            for name in filter(_is_hidden, folders):
                found[epath.Path(parent, name)] = _File(reason="hidden")
            folders[:] = [name for name in folders if not _is_hidden(name)]
            below = [os.path.join(parent, name) for name in sorted(folders)]
            roots += [path for path in below if os.path.islink(path)]
            for name in names:
                path = pathlib.Path(parent, name)
                reason = _reason_against(name) or _reason_against_kind(path)
                if path.is_symlink() and not reason:
                    links.append(path)
                    continue
                if not reason:
                    seen.add(os.path.realpath(path))
                size = path.stat().st_size if path.exists() else 0
                found[epath.Path(path)] = _File(size, reason=reason)
    for path in sorted(links):
        reason = "linked twice" if _seen_before(path, seen) else ""
        found[epath.Path(path)] = _File(path.stat().st_size, reason=reason)
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def _seen_before(path: str | pathlib.Path, seen: set[str]) -> bool:
    """Tells whether the file or folder to which a path leads is in `seen`; adds it."""
    real = os.path.realpath(path)
    is_seen = real in seen
    seen.add(real)
    return is_seen


def _is_hidden(name: str) -> bool:
    """Tells whether a name is of those that programs write for themselves."""
    return name.startswith(".") or name == "__MACOSX"


def _reason_against(name: str) -> str:
    """Says why a file is not read, by its path in the folder; empty where it is read."""
    *folders, name = name.split("/")
    if any(map(_is_hidden, [*folders, name])):
        return "hidden"
    if _ABOUT.fullmatch(name):
        return "about the data"
    if name.lower().endswith(_SUFFIXES):
        return ""
    ending = os.path.splitext(name)[1]
    return f"ending in {ending}" if ending.isprintable() and ending else "without an ending"


def _reason_against_kind(path: pathlib.Path) -> str:
    if path.is_file():
        return ""
    return "pipes or devices" if path.exists() else "broken links"


def _check_listing(folder: epath.Path, found: _Found) -> None:
    """Logs how many files are read; raises UsageError if none is, or less than is left out."""
    reasons = collections.Counter(file.reason for file in found.values() if file.reason)
    shown = [f"{count} {reason}" for reason, count in reasons.most_common(_SHOWN_REASONS)]
    more = " .." if len(reasons) > _SHOWN_REASONS else ""
    why = f" ({', '.join(shown)}{more})" if shown else ""
    read = [path for path, file in found.items() if not file.reason]
    left_out = f"{reasons.total()} left out{why}"
    log_once(f"data: {folder}: {len(read)} files read, {left_out}")
    if not read:
        problem = f"no .txt or .jsonl file (.gz or not) in it or below it; {left_out}"
        raise usage_error("config.data.data_dir", folder, problem)
    others = [path for path in found if found[path].reason.startswith("ending")]
    text_bytes, other_bytes = (sum(found[path].size for path in paths) for paths in (read, others))
    if text_bytes < other_bytes:
        names = ", ".join(path.relative_to(folder).as_posix() for path in others[:LISTED])
        problem = f"{text_bytes:,} bytes of text, and {other_bytes:,} bytes left out: {names}"
        remedy = "move the text into a folder of its own"
        raise usage_error("config.data.data_dir", folder, problem, remedy)


def _named_splits(folder: epath.Path, paths: list[epath.Path]) -> dict[epath.Path, str]:
    """Returns the split that the path of each file names: train, validation, test, or "".

    Where there is no validation, test is taken for it. Names count only if some are of training
    text and some are not; files without a split are then training text.
    """
    splits = {}
    for path in paths:
        match = _SPLIT.search(path.relative_to(folder).as_posix().lower())
        splits[path] = match.lastgroup if match else ""
    kinds = set(splits.values())
    held_out = "validation" if "validation" in kinds else "test"
    if not {"train", held_out} <= kinds:
        return dict.fromkeys(paths, "")
    names = {"": "train", held_out: "validation"}
    splits = {path: names.get(split, split) for path, split in splits.items()}
    counts = collections.Counter(splits.values())
    listed = ", ".join(f"{count} {split}" for split, count in counts.items())
    log_once(f"data: {folder}: the names of files tell their splits: {listed}; test is not read")
    return splits


def _hash_files(folder: epath.Path, names: list[str], stamps: list[str], cache: str) -> list[str]:
    """Returns the sha256 of files; those that have stamps are read again when these change."""
    known = {}
    if any(stamps):
        place = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        file = as_path("config.data.cache_dir", cache) / f"hashes-{place}.json"
        known = read_json(file) or {}

    def find_hash(name: str, stamp: str) -> str:
        if stamp and known.get(name, [])[:1] == [stamp]:
            return known[name][1]
        return hash_file(folder / name)

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = list(pool.map(find_hash, names, stamps))
    pairs = [list(pair) for pair in zip(stamps, hashes, strict=True)]
    stamped = dict(zip(names, pairs, strict=True))
    if any(stamps) and stamped != known:
        with contextlib.suppress(OSError):  # a cache that cannot be written: they are read again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(stamped))
    return hashes


def _is_json_lines(path: epath.Path) -> bool:
    return path.name.lower().endswith(_JSON_LINES)


def _chunks(
    folder: epath.Path, sizes: dict[epath.Path, int], splits: dict[epath.Path, str], rule: TextRule
) -> Iterator[Chunk]:
    """Yields small text files in groups, and large .jsonl files in byte ranges."""
    limit = chunk_bytes(sum(sizes.values()))
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))

    def group_key(path: epath.Path) -> tuple[bool, str, int]:
        return _is_json_lines(path), splits[path], ends[path] // limit

    for (is_json_lines, split, _), group in itertools.groupby(sizes, group_key):
        paths = tuple(group)
        if not is_json_lines:
            key = f"{paths[0].relative_to(folder)} and {len(paths) - 1} more"
            size = sum(sizes[path] for path in paths)
            read = functools.partial(_read_texts, paths, rule.separator.encode())
            yield Chunk(key, size, read, split=split)
            continue
        for path in paths:
            size = sizes[path]
            # Gzip cannot be entered in the middle.
            step = max(size, 1) if path.suffix.lower() == ".gz" else limit
            for start in range(0, size, step):
                stop = min(start + step, size)
                key = f"{path.relative_to(folder)} from byte {start} to {stop}"
                end = math.inf if stop == size else stop  # gzipped, its size is a guess
                read = functools.partial(_read_json_lines, path, rule, start, end)
                yield Chunk(key, stop - start, read, split=split)


def _read_texts(paths: tuple[epath.Path, ...], separator: bytes) -> Iterator[Document]:
    for path in paths:
        try:
            yield from _read_text(path, separator)
        except UsageError as error:
            yield Document(b"", bad=(str(path), str(error)))


def _read_text(path: epath.Path, separator: bytes) -> Iterator[Document]:
    """Yields the texts between separators, those above PART_BYTES in parts."""
    rest = b""
    read = operator.methodcaller("read", PART_BYTES)
    for _, block in _read_blocks(path, 0, math.inf, read):
        *texts, rest = (rest + block).split(separator) if separator else [rest + block]
        for text in texts:
            yield _text_document(text, separator)
        *parts, rest = cut_words(rest, PART_BYTES)
        for part in parts:
            yield _text_document(part)._replace(goes_on=True)
    yield _text_document(rest, separator)


def _text_document(text: bytes, separator: bytes = b"") -> Document:
    """Checks what a .txt holds; raises UsageError with the reason alone if it is not UTF-8 text."""
    if b"\0" in text:
        raise UsageError("holds NUL bytes, as UTF-16 does; convert or remove it")
    return Document(check_utf8(text.strip(b"\r\n") if separator else text))


def _read_json_lines(
    path: epath.Path, rule: TextRule, start: int, stop: float
) -> Iterator[Document]:
    """Yields the documents of the lines that start at the bytes start .. stop - 1."""
    first = 0  # number of the line at `start`, which is counted for an error only
    lines = _read_blocks(path, start, stop, operator.methodcaller("readline"))
    try:
        for count, (offset, line) in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield _json_document(line, rule)
            except UsageError as error:
                first = first or _line_number(path, offset) - count
                yield Document(b"", bad=(f"{path} line {first + count}", str(error)))
    except UsageError as error:
        yield Document(b"", bad=(str(path), str(error)))


def _read_blocks(
    path: epath.Path, start: int, stop: float, read: Callable[[Any], bytes]
) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of what `read` reads of the file, from start .. stop - 1 on.

    A block that begins before `start` is left out: `read` reads lines, or `start` is 0.
    """
    offset = max(start - 1, 0)
    with _retry(path, functools.partial(_open, path)) as file:

        def next_block() -> bytes:
            if file.tell() != offset:  # at the beginning, or a read has failed within the block
                file.seek(offset)
            return read(file)

        if start:  # the rest of a line that starts before
            offset += len(_retry(path, next_block))
        while offset < stop:
            block = _retry(path, next_block)
            if not block:
                return
            yield offset, block.removeprefix(b"" if offset else _BYTE_ORDER_MARK)
            offset += len(block)


def _json_document(line: bytes, rule: TextRule) -> Document:
    """Parses a line; raises UsageError with the reason alone."""
    if line.lstrip().startswith(b"["):
        problem = "a JSON array, not an object"
        raise UsageError(f"{problem}; write one object a line, as jq -c '.[]' does")
    try:
        record = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text (byte {error.start}); convert or remove it") from None
    except ValueError as error:
        problem = f"not a JSON value ({error})"
        raise UsageError(f"{problem}; write one object a line, as jq -c does") from None
    keys = list(record) if isinstance(record, dict) else []
    values = {}
    for name in rule.features:
        if name in keys and record[name] is None:
            return Document(b"")  # which is left out, and counted
        if name not in keys:
            listed = ", ".join(map(repr, keys))[:200] or "none"
            problem = f"no text under {name!r}; name the key with {rule.option}"
            raise UsageError(f"{problem}: it has {listed}")
        if not isinstance(record[name], str):
            problem = f"{name!r} holds a value of type {type(record[name]).__name__}, not a string"
            raise UsageError(f"{problem}; mend it, or name another key with {rule.option}")
        try:
            values[name] = record[name].encode()
        except UnicodeEncodeError:
            problem = "holds half a character (an unpaired surrogate)"
            raise UsageError(f"{problem}; repair or remove it") from None
    return rule.document(values)


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
        return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")
    file = io.BufferedReader(path.open("rb"), 2**20)
    return gzip.open(file) if path.suffix.lower() == ".gz" else file


def _retry(path: epath.Path, read: Callable):
    """Calls `read` with `retry_reads`; a damaged gzip file becomes a UsageError with the reason."""

    def checked():
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"is damaged or cut short ({error}); copy it again") from None

    return retry_reads(path, checked)
