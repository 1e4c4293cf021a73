"""A folder of text: .txt holds a document, .jsonl a document per line; either may be compressed, .txt.gz, .jsonl.gz."""

import contextlib
import functools
import gzip
import hashlib
import json
import os
import pathlib
import time
import zlib
from collections.abc import Iterator
from concurrent import futures

from prope.data.sources.base import MAX_DOCUMENT, Document, Part, Source, TextRule, part_bytes, too_long, utf8
from prope.errors import UsageError
from prope.runtime.files import read_json, write_atomic

_LINES = (".jsonl", ".jsonl.gz")
_ENDINGS = (".txt", ".txt.gz", *_LINES)
_GZIP = 3  # about how many times smaller text becomes
_FEW_BYTES = 2**26  # hashed again each time: faster than it is worth remembering


def files(folder: pathlib.Path, rule: TextRule, remembered: pathlib.Path) -> Source:
    """The files in a folder and the folders below it, sorted by path.

    Args:
      folder: the folder.
      rule: what of a JSON line is text.
      remembered: a file that keeps the hashes of large files, so that they are read once and not at every start.

    Raises:
      UsageError: there is no such file.
    """
    found = [p for p in sorted(folder.rglob("*")) if p.name.endswith(_ENDINGS) and p.is_file()]
    if not found:
        raise UsageError(f"config.data.data_dir={folder}: no .txt or .jsonl file (.gz or not) in it or below it")
    texts = [p for p in found if not p.name.endswith(_LINES)]
    if rule.template and texts:
        raise UsageError(f"{texts[0]}: has no fields for config.data.template to name; keep it in another folder")
    hashes = _hashes(found, remembered)
    listing = [(p.relative_to(folder).as_posix(), hashes[p]) for p in found]
    identity = {"dataset": "files", "files": listing, **rule.identity}
    return Source("files", identity, tuple(_parts(folder, found, rule)))


def _parts(folder: pathlib.Path, found: list[pathlib.Path], rule: TextRule) -> Iterator[Part]:
    sizes = {p: p.stat().st_size * (_GZIP if p.suffix == ".gz" else 1) for p in found}
    most = part_bytes(sum(sizes.values()))
    group: list[pathlib.Path] = []

    def grouped() -> Iterator[Part]:
        if group:
            key = f"{group[0].relative_to(folder)} and {len(group) - 1} more"
            yield Part(key, sum(sizes[p] for p in group), functools.partial(_read_texts, tuple(group)))
            group.clear()

    for path in found:
        if not path.name.endswith(_LINES):
            group.append(path)
            if sum(sizes[p] for p in group) >= most:
                yield from grouped()
            continue
        yield from grouped()
        name = str(path.relative_to(folder))
        if path.suffix == ".gz":  # cannot be entered in the middle
            yield Part(name, sizes[path], functools.partial(_read_lines, path, rule, 0, None))
            continue
        for start in range(0, sizes[path], most):
            stop = min(start + most, sizes[path])
            yield Part(
                f"{name} from byte {start}", stop - start, functools.partial(_read_lines, path, rule, start, stop)
            )
    yield from grouped()


def _read_texts(paths: tuple[pathlib.Path, ...]) -> Iterator[Document]:
    for path in paths:
        with _opened(path) as opened:
            text = _guarded(path, lambda: opened.read(MAX_DOCUMENT + 1))
        yield Document(utf8(text, str(path)))


def _read_lines(path: pathlib.Path, rule: TextRule, start: int, stop: int | None) -> Iterator[Document]:
    """The lines that start at the bytes start .. stop - 1."""
    with _opened(path) as opened:
        if start:
            opened.seek(start - 1)
            while (skipped := opened.readline(2**20)) and not skipped.endswith(b"\n"):
                pass
        at, read = opened.tell(), 0
        while stop is None or at < stop:
            line = _guarded(path, lambda: opened.readline(2 * MAX_DOCUMENT))
            if not line:
                return
            at, read = at + len(line), read + 1
            if line.strip():
                try:
                    yield _json_document(line, rule)
                except ValueError as error:
                    raise UsageError(f"{path} line {_lines_before(path, start) + read}: {error}") from None


def _json_document(line: bytes, rule: TextRule) -> Document:
    if len(line) >= 2 * MAX_DOCUMENT:
        raise ValueError(str(too_long("the line")))
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start}); convert or remove it") from None
    except ValueError as error:
        raise ValueError(f"not a JSON value ({error})") from None
    for name in rule.fields:
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            raise ValueError(f"no text under {name!r}; name the key with {rule.option}")
    try:
        return rule.document({name: record[name].encode() for name in rule.fields}, "its text")
    except UnicodeEncodeError:
        raise ValueError("holds half a character (an unpaired surrogate); repair or remove it") from None
    except UsageError as error:
        raise ValueError(str(error)) from None


def _lines_before(path: pathlib.Path, start: int) -> int:
    """Only an error asks for it: lines that start before this byte."""
    if not start:
        return 0
    lines, left = 0, start - 1
    with path.open("rb") as opened:
        while left > 0 and (block := opened.read(min(left, 2**20))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines + 1


def _opened(path: pathlib.Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _guarded(path: pathlib.Path, read):
    try:
        return read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path}: is damaged or cut short ({error}); bring it again") from None


def _hashes(paths: list[pathlib.Path], remembered: pathlib.Path) -> dict[pathlib.Path, str]:
    """The sha256 of every file. Those of many bytes are kept, and trusted while size and time stay as they were."""
    stats = {path: path.stat() for path in paths}
    large = sum(s.st_size for s in stats.values()) >= _FEW_BYTES
    keys = {p: f"{os.path.abspath(p)} {s.st_size} {s.st_mtime_ns} {s.st_ino}" for p, s in stats.items()}
    known = (read_json(remembered) if large else None) or {}
    new = [path for path in paths if keys[path] not in known]
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        hashes = {keys[path]: value for path, value in zip(new, pool.map(_sha256, new), strict=True)}
    if large and new:
        # A file written this very moment could change again without its time showing it.
        settled = {p for p in new if stats[p].st_mtime < time.time() - 2}
        with contextlib.suppress(OSError):  # it only saves time
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(remembered, json.dumps(known | {keys[p]: hashes[keys[p]] for p in settled}))
    return {path: (known | hashes)[keys[path]] for path in paths}


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
