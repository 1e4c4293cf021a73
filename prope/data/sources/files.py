"""A folder or bucket of text: a .txt is one document, a .jsonl has one per line.

Both may be gzipped, as .txt.gz and .jsonl.gz. What is left out is counted in the log.
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
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

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
    cut_text,
    log_once,
    too_long,
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
_RULE = 2  # version of the rule that reads .txt files; in the fingerprint
FEW_TEXTS = 16  # so many documents can hardly be split into training and validation
_PIECES = 256  # into which they are cut, by a rule that makes each at least of ..
_LEAST_PIECE = 256  # bytes
_SHOWN_REASONS = 5


def files(folder: epath.Path, rule: TextRule, cache: str) -> Source:
    """Returns the files in a folder and below it, sorted by path, as a source.

    A folder of few .txt alone yields pieces of them as documents. The hashes of files in a bucket
    are kept in `cache`. Raises UsageError where there is no such file, or the rule does not apply.
    """
    found, left_out = _list_bucket(folder) if is_url(folder) else _list_folder(folder)
    log_once(f"data: {folder}: {len(found)} files read, {_describe(left_out)}")
    if not found:
        problem = f"no .txt or .jsonl file (.gz or not) in it or below it; {_describe(left_out)}"
        raise usage_error("config.data.data_dir", folder, problem)
    paths = sorted(found)
    texts = [path for path in paths if not _is_json_lines(path)]
    if rule.template and texts:
        problem = "has no fields for config.data.template to name"
        raise UsageError(f"{texts[0]}: {problem}; keep it in another folder")
    names = [path.relative_to(folder).as_posix() for path in paths]
    stamps = [found[path].stamp for path in paths]
    hashes = _hash_files(folder, names, stamps, cache)
    listing = list(zip(names, hashes, strict=True))
    identity = {"dataset": "files", "files": listing, **rule.identity}
    if texts:
        identity["rule"] = _RULE
    sizes = {
        path: found[path].size * (_GZIP_RATIO if path.suffix.lower() == ".gz" else 1)
        for path in paths
    }
    if texts == paths and len(texts) <= FEW_TEXTS:
        piece = max(sum(sizes.values()) // _PIECES, _LEAST_PIECE)
        piece = min(piece, MAX_DOCUMENT)
        read = functools.partial(_read_pieces, tuple(paths), piece)
        chunk = Chunk(f"pieces of {len(paths)} files", sum(sizes.values()), read)
        return Source("files", identity | {"piece": piece}, (chunk,))
    return Source("files", identity, tuple(_chunks(folder, sizes, rule)))


class _File(NamedTuple):
    """What a listing tells about a file."""

    size: int  # bytes
    stamp: str = ""  # changes with the content; empty where nothing tells that


_Found = tuple[dict[epath.Path, _File], collections.Counter]  # files; others by the reason


def _list_bucket(folder: epath.Path) -> _Found:
    """Lists the files with text below a URL, and counts the others by reason."""
    system, root = fsspec.core.url_to_fs(str(folder))
    found = {}
    left_out: collections.Counter[str] = collections.Counter()
    for path, details in system.find(root, detail=True).items():
        name = os.path.relpath(path, root)
        reason = _reason_against(name)
        if reason:
            left_out[reason] += 1
            continue
        marks = [details.get(mark) for mark in ("generation", "md5Hash", "etag", "ETag")]
        stamp = " ".join(str(mark) for mark in marks if mark)
        found[folder / name] = _File(details["size"], stamp)
    return found, left_out


def _list_folder(folder: epath.Path) -> _Found:
    """Lists the files with text below a local folder, and counts the others by reason.

    Links to folders are followed, each folder once: after those that are there themselves.
    """
    found = {}
    left_out: collections.Counter[str] = collections.Counter()
    seen = set()
    links = []
    roots = [str(folder)]
    for root in roots:  # which grows
        for parent, folders, names in os.walk(root, onerror=_raise):
            if _seen_before(parent, seen):
                left_out["linked twice"] += 1
                folders.clear()
                continue
            left_out["hidden"] += sum(map(_is_hidden, folders))
            folders[:] = [name for name in folders if not _is_hidden(name)]
            below = [os.path.join(parent, name) for name in sorted(folders)]
            roots += [path for path in below if os.path.islink(path)]
            for name in names:
                path = pathlib.Path(parent, name)
                reason = _reason_against(name) or _reason_against_kind(path)
                if reason:
                    left_out[reason] += 1
                elif path.is_symlink():
                    links.append(path)
                else:
                    seen.add(os.path.realpath(path))
                    found[epath.Path(path)] = _File(path.stat().st_size)
    for path in sorted(links):
        if _seen_before(path, seen):
            left_out["linked twice"] += 1
        else:
            found[epath.Path(path)] = _File(path.stat().st_size)
    return found, +left_out


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
    if any(map(_is_hidden, name.split("/"))):
        return "hidden"
    if name.lower().endswith(_SUFFIXES):
        return ""
    ending = os.path.splitext(name)[1]
    return f"ending in {ending}" if ending.isprintable() and ending else "without an ending"


def _reason_against_kind(path: pathlib.Path) -> str:
    if path.is_file():
        return ""
    return "pipes or devices" if path.exists() else "broken links"


def _describe(left_out: collections.Counter) -> str:
    """Formats how many files are left out, and the most frequent reasons."""
    reasons = [f"{count} {reason}" for reason, count in left_out.most_common(_SHOWN_REASONS)]
    others = " .." if len(left_out) > _SHOWN_REASONS else ""
    why = f" ({', '.join(reasons)}{others})" if reasons else ""
    return f"{left_out.total()} left out{why}"


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


def _chunks(folder: epath.Path, sizes: dict[epath.Path, int], rule: TextRule) -> Iterator[Chunk]:
    """Yields small text files in groups, and large .jsonl files in byte ranges."""
    limit = chunk_bytes(sum(sizes.values()))
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))

    def group_key(path: epath.Path) -> tuple[bool, int]:
        return _is_json_lines(path), ends[path] // limit

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
            step = max(size, 1) if path.suffix.lower() == ".gz" else limit
            for start in range(0, size, step):
                stop = min(start + step, size)
                key = f"{path.relative_to(folder)} from byte {start} to {stop}"
                end = math.inf if stop == size else stop  # gzipped, its size is a guess
                read = functools.partial(_read_json_lines, path, rule, start, end)
                yield Chunk(key, stop - start, read)


def _read_texts(paths: tuple[epath.Path, ...]) -> Iterator[Document]:
    for path in paths:
        text = _retry(path, functools.partial(_read_text, path))
        yield Document(_check_text(text, path))


def _read_text(path: epath.Path) -> bytes:
    with _open(path) as file:
        return file.read(MAX_DOCUMENT + 1).removeprefix(_BYTE_ORDER_MARK)


def _check_text(text: bytes, path: epath.Path) -> bytes:
    """Returns what a .txt holds; raises UsageError if it is not UTF-8 text or too long."""
    if b"\0" in text:
        raise UsageError(f"{path}: holds NUL bytes, as UTF-16 does; convert or remove it")
    return check_utf8(text, str(path))


def _read_pieces(paths: tuple[epath.Path, ...], limit: int) -> Iterator[Document]:
    """Yields texts in numbered pieces of at most `limit` bytes."""
    texts = itertools.chain.from_iterable(_cut_lines(path, limit) for path in paths)
    for number, text in enumerate(texts):
        key = text + b"%d" % number if number else text  # pieces may equal each other
        yield Document(text, split_by=key)


def _cut_lines(path: epath.Path, limit: int) -> Iterator[bytes]:
    """Yields a text in pieces of whole lines; of a line above `limit` bytes, in pieces of words."""
    lines: list[bytes] = []
    size = 0
    for _, line in _read_lines(path, 0, math.inf):
        if lines and size + len(line) > limit:
            yield b"".join(lines)
            lines.clear()
            size = 0
        find_space = functools.partial(line.rfind, b" ")
        pieces = list(cut_text(_check_text(line, path), limit, find_space))
        yield from pieces[:-1]
        lines += pieces[-1:]
        size += sum(map(len, pieces[-1:]))
    yield b"".join(lines)


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
            yield offset, line.removeprefix(b"" if offset else _BYTE_ORDER_MARK)
            offset += len(line)


def _json_document(line: bytes, rule: TextRule) -> Document:
    """Parses a line; raises UsageError with the reason alone."""
    if len(line) >= 2 * MAX_DOCUMENT:
        raise too_long("the line")
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
        value = record[name] if name in keys else None
        if not isinstance(value, str):
            listed = ", ".join(map(repr, keys))[:200] or "none"
            problem = f"no text under {name!r}; name the key with {rule.option}"
            raise UsageError(f"{problem}: it has {listed}")
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
        return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")
    file = io.BufferedReader(path.open("rb"), 2**20)
    return gzip.open(file) if path.suffix.lower() == ".gz" else file


def _retry(path: epath.Path, read: Callable):
    """Calls `read` with `retry_reads`; a damaged gzip file becomes a UsageError that names it."""

    def checked():
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{path}: is damaged or cut short ({error}); copy it again") from None

    return retry_reads(path, checked)
