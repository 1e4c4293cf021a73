"""A folder of text, here, in a bucket or on the Hugging Face Hub.

Lines of JSON and rows of tables are documents; another file is one, or several with separators.
All but tables may be compressed. What is left out is counted in the log.
"""

import bz2
import collections
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import NamedTuple

import fsspec
from etils import epath
from fsspec.utils import glob_translate

from prope.data.sources.base import (
    LISTED,
    Chunk,
    Document,
    Source,
    TextRule,
    bad_row,
    check_utf8,
    chunk_bytes,
    cut_words,
    encode,
    log_once,
)
from prope.data.sources.remote import download, is_hub, local_file
from prope.data.sources.tables import table_chunks
from prope.errors import UsageError, first_line, usage_error
from prope.runtime.files import (
    as_path,
    hash_file,
    is_url,
    parse_json,
    read_json,
    retry_reads,
    write_atomic,
)

# A folder's files of the first of these kinds that it has are read, unless a pattern names others:
# .json beside text is about it, and what is beside .txt and .jsonl was never read.
_KINDS = re.compile(
    r".*\.(?:((?:txt|jsonl)(?:\.gz)?)"
    r"|(parquet|arrow|(?:txt|jsonl|ndjson)(?:\.(?:gz|bz2|xz|zst))?)"
    r"|(json(?:\.(?:gz|bz2|xz|zst))?))",
    re.IGNORECASE | re.DOTALL,
)
_TABLES = (".parquet", ".arrow")
_LINES = re.compile(r".*\.(jsonl|ndjson|json)(\.(gz|bz2|xz|zst))?", re.IGNORECASE)
_RATIO = 3  # about how much compression shrinks text
_DAMAGED = re.compile("Invalid data stream|ZSTD |Truncated compressed stream")  # of bz2 and pyarrow
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which some editors begin UTF-8
_RULE = 3  # version of the rule that makes documents of files; in the fingerprint
PART_BYTES = 2**26  # a longer .txt is read in parts, so that a worker has enough memory
_SHOWN_REASONS = 5
# Files about a folder of text, which are no documents of it.
_ABOUT = re.compile(
    r"(?!.*\.(?:jsonl|parquet|arrow))(readme|requirements|licen[cs]es?|copying|notice)([-_.].*)?"
    # What the library `datasets` writes beside a dataset.
    r"|(dataset_infos?|dataset_dict|state)\.json|cache-[0-9a-f_of]+\.arrow",
    re.IGNORECASE,
)
# Words in a file's path that name its split.
_SPLIT = re.compile(
    r"(?<![a-z])(?:(?P<train>train(?:ing)?)|(?P<validation>valid(?:ation)?|val|dev)"
    r"|(?P<test>test(?:ing)?|eval(?:uation)?))(?![a-z])|\Z"
)


def files(folder: epath.Path, rule: TextRule, pattern: str, cache: str) -> Source:
    """Returns the files in a folder and below it, sorted by path, as a source.

    With a pattern they are those that it matches. The hashes of files in a bucket are kept in
    `cache`. Raises UsageError where there is no such file, where most of the folder would be left
    out, or where the rule does not apply.
    """
    list_files = _list_bucket if is_url(folder) else _list_folder
    found = list_files(folder, _compile(pattern))
    found = dict(sorted(found.items(), key=lambda item: item[0].split("/")))
    if not pattern:
        _choose_kind(found)
    _check_listing(folder, found)
    splits = _named_splits(folder, [name for name, file in found.items() if not file.reason])
    names = [name for name, split in splits.items() if split != "test"]
    texts = [name for name in names if _form(name) == "text"]
    if rule.template and texts:
        problem = "has no fields for config.data.template to name"
        raise UsageError(f"{folder / texts[0]}: {problem}; keep it in another folder")
    if rule.separator and not texts:
        problem = f"splits .txt files, and {folder} has none"
        raise usage_error("config.data.separator", rule.separator, problem, "remove it")
    if is_hub(folder):
        folder = download(folder, names)
    hashes = _hash_files(folder, {name: found[name].stamp for name in names}, cache)
    identity = {"dataset": "files", "files": list(hashes.items()), **rule.identity, "rule": _RULE}
    identity |= {"pattern": pattern} if pattern else {}
    sizes = {name: found[name].size * (_RATIO if _is_compressed(name) else 1) for name in names}
    chunks = tuple(_chunks(folder, sizes, splits, rule))
    return Source("files", identity, chunks, is_divided=not any(splits.values()))


class _File(NamedTuple):
    """What a listing tells about a file."""

    size: int = 0  # bytes
    stamp: str = ""  # changes with the content; empty where nothing tells that
    reason: str = ""  # why it is not read; empty where it is


_Found = dict[str, _File]  # by their paths in the folder


def _compile(pattern: str) -> re.Pattern | None:
    """Returns what matches the paths that config.data.pattern names; None if it is not set."""
    try:
        return re.compile(glob_translate(pattern)) if pattern else None
    except ValueError as error:
        raise usage_error("config.data.pattern", pattern, first_line(error)) from None


def _list_bucket(folder: epath.Path, pattern: re.Pattern | None) -> _Found:
    """Lists the files below a URL."""
    system, root = fsspec.core.url_to_fs(str(folder))
    found = {}
    for path, details in system.find(root, detail=True).items():
        name = os.path.relpath(path, root)
        marks = [details.get(mark) for mark in ("generation", "md5Hash", "etag", "ETag")]
        stamp = " ".join(str(mark) for mark in marks if mark)
        found[name] = _File(details["size"], stamp, _reason_against(name, pattern))
    return found


def _list_folder(folder: epath.Path, pattern: re.Pattern | None) -> _Found:
    """Lists the files below a local folder, and the folders that are not entered.

    Links to folders are followed, each folder once: after those that are there themselves.
    """
    found = {}
    seen = set()
    paths = []
    roots = [str(folder)]
    for root in roots:  # which grows
        for parent, folders, names in os.walk(root, onerror=_raise):
            if _seen_before(parent, seen):
                found[os.path.relpath(parent, folder)] = _File(reason="linked twice")
                folders.clear()
                continue
            below = [pathlib.Path(parent, name) for name in sorted(folders)]
            for path in below:
                if _is_hidden(path.name):
                    found[os.path.relpath(path, folder)] = _File(reason="hidden")
                    folders.remove(path.name)
                elif path.is_symlink():
                    roots.append(str(path))
            paths += [pathlib.Path(parent, name) for name in names]
    for path in sorted(paths, key=lambda path: (path.is_symlink(), path)):
        name = os.path.relpath(path, folder)
        reason = _reason_against(name, pattern)
        if not reason and not path.is_file():
            reason = "pipes or devices" if path.exists() else "broken links"
        if not reason and _seen_before(path, seen):
            reason = "linked twice"
        size = path.stat().st_size if path.exists() else 0
        found[name] = _File(size, reason=reason)
    return found


def _raise(error: OSError) -> None:
    raise error


def _seen_before(path: str | pathlib.Path, seen: set[str]) -> bool:
    """Returns whether the file or folder to which a path leads is in `seen`; adds it."""
    real = os.path.realpath(path)
    is_seen = real in seen
    seen.add(real)
    return is_seen


def _is_hidden(name: str) -> bool:
    """Returns whether a name is of those that programs write for themselves."""
    return name.startswith(".") or name == "__MACOSX"


def _reason_against(path: str, pattern: re.Pattern | None) -> str:
    """Says why a file is not read, by its path in the folder; empty where it may be."""
    *folders, name = path.split("/")
    if any(map(_is_hidden, [*folders, name])):
        return "hidden"
    if pattern:
        return "" if pattern.fullmatch(path) else "not named by config.data.pattern"
    if _ABOUT.fullmatch(name):
        return "about the data"
    if _KINDS.fullmatch(name):
        return ""
    ending = os.path.splitext(name)[1]
    return f"ending in {ending}" if ending.isprintable() and ending else "without an ending"


def _choose_kind(found: _Found) -> None:
    """Leaves out the files that are not of the first of _KINDS of which there are any."""
    read = [name for name, file in found.items() if not file.reason]
    kinds = {name: _KINDS.fullmatch(name).lastindex for name in read}
    first = min(kinds.values(), default=0)
    for name, kind in kinds.items():
        if kind != first:
            reason = f"ending in {os.path.splitext(name)[1]} beside others"
            found[name] = found[name]._replace(reason=reason)


def _check_listing(folder: epath.Path, found: _Found) -> None:
    """Logs how many files are read; raises UsageError if none is, or less than is left out."""
    reasons = collections.Counter(file.reason for file in found.values() if file.reason)
    shown = [f"{count} {reason}" for reason, count in reasons.most_common(_SHOWN_REASONS)]
    more = " .." if len(reasons) > _SHOWN_REASONS else ""
    why = f" ({', '.join(shown)}{more})" if shown else ""
    read = [name for name, file in found.items() if not file.reason]
    left_out = f"{reasons.total()} left out{why}"
    log_once(f"data: {folder}: {len(read)} files read, {left_out}")
    if not read:
        problem = f"no file of text in it or below it; {left_out}"
        remedy = "it reads .parquet, .arrow, .jsonl, .ndjson, .json and .txt, also compressed, or "
        remedy += "what config.data.pattern names, such as **/*.md"
        raise usage_error("config.data.data_dir", folder, problem, remedy)
    others = [name for name in found if found[name].reason.startswith("ending")]
    text_bytes, other_bytes = (sum(found[name].size for name in names) for names in (read, others))
    if text_bytes < other_bytes:
        listed = ", ".join(others[:LISTED])
        problem = f"{text_bytes:,} bytes of text, and {other_bytes:,} bytes left out: {listed}"
        remedy = "move the text into a folder of its own, or name it by config.data.pattern"
        raise usage_error("config.data.data_dir", folder, problem, remedy)


def _named_splits(folder: epath.Path, files: list[str]) -> dict[str, str]:
    """Returns the split that the path of each file names: train, validation, test, or "".

    Where there is no validation, test is taken for it. Names count if some files are held out and
    others are training text, which those without a split are beside validation.
    """
    splits = {file: _SPLIT.search(file.lower()).lastgroup or "" for file in files}
    kinds = set(splits.values())
    held_out = "validation" if "validation" in kinds else "test"
    has_train = "train" in kinds or {"", "validation"} <= kinds
    if held_out not in kinds or not has_train:
        return dict.fromkeys(files, "")
    names = {"": "train", held_out: "validation"}
    splits = {file: names.get(split, split) for file, split in splits.items()}
    counts = collections.Counter(splits.values())
    listed = ", ".join(f"{count} {split}" for split, count in counts.items())
    note = "; test is not read" if "test" in counts else ""
    note = "; test is taken for validation" if held_out == "test" else note
    log_once(f"data: {folder}: the names of files tell their splits: {listed}{note}")
    return splits


def _hash_files(folder: epath.Path, stamps: dict[str, str], cache: str) -> dict[str, str]:
    """Returns the sha256 of files; those that have stamps are read again when these change."""
    known = {}
    has_stamps = any(stamps.values())
    if has_stamps:
        place = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        file = as_path("config.data.cache_dir", cache) / f"hashes-{place}.json"
        known = read_json(file) or {}

    def find_hash(name: str) -> str:
        if stamps[name] and known.get(name, [])[:1] == [stamps[name]]:
            return known[name][1]
        return hash_file(folder / name)

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = dict(zip(stamps, pool.map(find_hash, stamps), strict=True))
    stamped = {name: [stamp, hashes[name]] for name, stamp in stamps.items()}
    if has_stamps and stamped != known:
        with contextlib.suppress(OSError):  # a cache that cannot be written: they are read again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(stamped))
    return hashes


def _form(name: str) -> str:
    """Returns how the documents of a file are found: table, lines or text."""
    if name.lower().endswith(_TABLES):
        return "table"
    return "lines" if _LINES.fullmatch(name) else "text"


def _is_compressed(name: str) -> bool:
    return name.lower().endswith((*_OPENERS, ".parquet"))


def _chunks(
    folder: epath.Path, sizes: dict[str, int], splits: dict[str, str], rule: TextRule
) -> Iterator[Chunk]:
    """Yields small text files in groups, large files of lines in byte ranges, and row groups."""
    limit = chunk_bytes(sum(sizes.values()))
    ends = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))

    def group_key(name: str) -> tuple[str, str, int]:
        return _form(name), splits[name], ends[name] // limit

    for (form, split, _), group in itertools.groupby(sizes, group_key):
        names = list(group)
        if form == "text":
            key = f"{names[0]} and {len(names) - 1} more"
            size = sum(sizes[name] for name in names)
            paths = tuple(folder / name for name in names)
            read = functools.partial(_read_texts, paths, rule.separator.encode())
            yield Chunk(key, size, read, split=split)
            continue
        for name in names:
            size = sizes[name]
            if form == "table":
                yield from table_chunks(folder / name, name, split, size, limit, rule)
                continue
            # What is compressed cannot be entered in the middle.
            step = max(size, 1) if _is_compressed(name) else limit
            for start in range(0, size, step):
                stop = min(start + step, size)
                key = f"{name} from byte {start} to {stop}"
                end = math.inf if stop == size else stop  # compressed, its size is a guess
                read = functools.partial(_read_json_lines, folder / name, rule, start, end)
                yield Chunk(key, stop - start, read, split=split)


def _read_texts(paths: tuple[epath.Path, ...], separator: bytes) -> Iterator[Document]:
    for path in paths:
        try:
            yield from _read_text(path, separator)
        except UsageError as error:
            yield bad_row(path, error)


def _read_text(path: epath.Path, separator: bytes) -> Iterator[Document]:
    """Yields the texts between separators, those above PART_BYTES in parts."""
    rest = b""
    for _, block in _read_blocks(path, 0, math.inf, PART_BYTES):
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
    try:
        for count, (offset, line) in enumerate(_read_blocks(path, start, stop)):
            if not line.strip():
                continue
            try:
                yield _json_document(line, rule)
            except UsageError as error:
                first = first or _line_number(path, offset) - count
                yield bad_row(f"{path} line {first + count}", error)
    except UsageError as error:
        yield bad_row(path, error)


def _read_blocks(
    path: epath.Path, start: int, stop: float, size: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of the lines of the file that begin at start .. stop - 1.

    With `size` they are blocks of so many bytes, and `start` is 0.
    """
    offset = max(start - 1, 0)
    is_there = not offset  # whether the file is at the offset
    with _retry(path, functools.partial(_open, path)) as file:

        def next_block() -> bytes:
            nonlocal is_there
            if not is_there:  # at the beginning, or a read has failed within the block
                file.seek(offset)
            is_there = False
            block = file.read(size) if size else file.readline()
            is_there = True
            return block

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
        record = parse_json(check_utf8(line).decode())
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
        values[name] = encode(record[name])
    return rule.document(values)


def _line_number(path: epath.Path, offset: int) -> int:
    """Counts the lines up to the one that starts at this byte; called for an error only."""
    number = 1
    position = 0
    with _open(path) as file:
        while position < offset:
            position += len(file.readline())
            number += 1
    return number


def _open(path: epath.Path):
    """Opens a file to read its text, as bytes."""
    decompress = _OPENERS.get(path.suffix.lower())
    if decompress is _open_zstd:
        path = local_file(path)  # in which a failed read cannot go back
    if not is_url(path):
        return decompress(path) if decompress else path.open("rb")
    file = io.BufferedReader(path.open("rb"), 2**20)
    return decompress(file) if decompress else file


def _open_zstd(file) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def _retry(path: epath.Path, read: Callable):
    """Calls `read` with `retry_reads`; a damaged file becomes a UsageError with the reason."""

    def checked():
        try:
            return read()
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            is_damaged = isinstance(error, gzip.BadGzipFile) or _DAMAGED.match(str(error))
            if isinstance(error, OSError) and not is_damaged:
                raise
            raise UsageError(f"is damaged or cut short ({error}); copy it again") from None

    return retry_reads(path, checked)
