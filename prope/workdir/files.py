"""A new directory that is whole or not there: it is written under another name and renamed at the end."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

from prope.errors import UsageError


def check_new(flag: str, path: pathlib.Path) -> None:
    """Raises UsageError where something stands at `path`; an empty directory may."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        raise UsageError(f"--{flag}={path}: is there already, and is not overwritten; choose another, or remove it")


@contextlib.contextmanager
def new_directory(flag: str, path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory next to `path` to write into: at the end it becomes `path`, or, where writing fails, goes away."""
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    if part.exists():
        raise UsageError(f"{part}: another process writes there, or one was killed that did; in that case remove it")
    try:
        part.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--{flag}={path}: cannot be made: {error.strerror}") from error
    try:
        yield part
        check_new(flag, path)
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
