"""Files and directories that appear under their name only when complete, and JSON files."""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from prope.errors import RunFailed, UsageError, first_line

log = logging.getLogger("prope")
T = TypeVar("T")

_PAUSES = (1, 2, 4, 8, 16)  # seconds before a failed read is tried again


def write_atomic(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it, so that readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def retry_reads(path: pathlib.Path, read: Callable[[], T]) -> T:
    """Calls `read`, and calls it again with growing pauses while the storage fails; a missing file is an answer.

    Raises:
      FileNotFoundError: the file is missing.
      RunFailed: the storage failed every time, or does not permit it.
    """
    pauses = iter(_PAUSES)
    while True:
        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = f"{path}: cannot be read: {error.strerror or first_line(error)}"
            pause = None if isinstance(error, PermissionError) else next(pauses, None)
            if pause is None:
                message = f"{reason}; nothing was changed: see to the storage, then run the same command again"
                raise RunFailed(message) from error
        log.warning("%s; trying again in %d s", reason, pause)
        time.sleep(pause)


def read_json(path: pathlib.Path, remedy: str | None = None):
    """Reads a JSON file; None if there is none.

    Args:
      path: the file.
      remedy: what the user can do about an unreadable file. None: it counts as missing, as in a cache.

    Raises:
      UsageError: the file cannot be read as JSON; only with a `remedy`.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(retry_reads(path, path.read_text) if remedy else path.read_text())
    except (OSError, ValueError) as error:
        if remedy is None:
            return None
        raise UsageError(f"{path}: not readable as JSON ({error}); {remedy}") from None


def append_jsonl(path: pathlib.Path, record: dict) -> None:
    """Appends one JSON object as a line of its own, also after a line that was cut short."""
    with path.open("a+b") as lines:
        if lines.tell():
            lines.seek(-1, os.SEEK_END)
            lines.write(b"" if lines.read() == b"\n" else b"\n")
        lines.write(json.dumps(record).encode() + b"\n")


def check_new(flag: str, path: pathlib.Path) -> None:
    """Raises UsageError if `path` exists and is not an empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        raise UsageError(f"--{flag}={path}: is there already, and is not overwritten; choose another, or remove it")


@contextlib.contextmanager
def new_directory(flag: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory next to `path` that becomes `path` on success and is deleted on an error."""
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.part")
    if temporary.exists():
        raise UsageError(
            f"{temporary}: another process writes there, or one was killed that did; in that case remove it"
        )
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--{flag}={path}: cannot be made: {error.strerror}") from error
    try:
        yield temporary
        check_new(flag, path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
