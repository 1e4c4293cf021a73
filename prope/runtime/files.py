"""Files in places, which are local paths or URLs; a file appears under its name when complete.

`etils.epath.Path` is the type of both. A URL such as gs://bucket/run is read and written by gcsfs,
without a mount.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import stat
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TypeVar

import fsspec
import tensorstore as ts
from etils import epath

from prope.errors import (
    RunFailed,
    StorageFailed,
    UsageError,
    first_line,
    is_denied,
    is_storage_error,
    log,
    usage_error,
)

T = TypeVar("T")

_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Seconds before a failed read is tried again: an outage of 4 minutes is outlasted.
_PAUSES = (1, 2, 4, 8, 16, *[32] * 7)
_OUTAGE_SECONDS = 300  # after which nothing is tried again: a library may have repeated, too
_MAX_REFUSALS = 3  # tries again where a login or a permission may be missing for a moment

# How TensorStore's errors begin that may tell of what is stored, unless a code of the operating
# system or of HTTP says otherwise; it leaves INVALID_ARGUMENT out. All others tell of the storage.
_CONTENT = re.compile(r"NOT_FOUND:|DATA_LOSS:|OUT_OF_RANGE:|FAILED_PRECONDITION:|(?![A-Z_]+:)")
_CODE = re.compile(r"\[(os_error|http_response)_code='(\d+)'\]")
_CONTENT_CODES = {"os_error": (errno.ENOENT,), "http_response": (404, 410, 416)}

# One for the process: its cache holds the indices of a token store's shards, and tokens that
# windows share.
CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # of a folder, the first that is there
_PACKAGES = {"gs://": "gcsfs", "s3://": "s3fs"}  # which read and write URLs that begin so
_READERS = _PACKAGES | {"hf://datasets/": "huggingface_hub"}  # of text
# Flags and fields whose places are written.
_WRITTEN = ("workdir", "output", "sweep", "cache_dir")
_URL_NAMES = re.compile(r"\w[\w.~/=,+@!()-]*", re.ASCII)
# Other hosts write to a bucket, too: what it lists is asked for every time.
for _scheme in ("gcs", "gs", "s3"):
    fsspec.config.conf.setdefault(_scheme, {})["use_listings_cache"] = False


def is_url(place: epath.PathLike) -> bool:
    """Returns whether a place is a URL; otherwise it is a local path."""
    return "://" in str(place)


def as_path(field: str, place: epath.PathLike) -> epath.Path:
    """Returns the place that a flag, a config field or a variable names as a path.

    `~` is expanded, and file:///folder is /folder. Raises UsageError for what is empty, another
    kind of URL, a URL that libraries would read as a pattern or cut, or a path to write to with
    [ ] * or ? in it.
    """
    text = os.fspath(place)
    if text.startswith("file:/"):
        host, slash, below = text.removeprefix("file:").removeprefix("//").partition("/")
        if not slash or host not in ("", "localhost"):
            raise usage_error(field, text, "names a host", "write file:///FOLDER, or /FOLDER")
        text = f"/{urllib.parse.unquote(below)}"
    if not text or not text.isprintable():
        problem = "must be a path or a URL, without control characters"
        raise usage_error(field, ascii(text)[1:-1], problem)
    text = os.path.expanduser(text)
    if text.startswith("~"):
        remedy = "write the whole path, or ./~NAME"
        raise usage_error(field, text, "the home folder is not known", remedy)
    if "://" in text or re.match(r"[\w+.-]+:/", text):
        packages = _READERS if field.endswith("data_dir") else _PACKAGES
        package = next((packages[start] for start in packages if text.startswith(start)), None)
        if package is None:
            problem = f"must be a local path, or a URL of {' or '.join(packages)}"
            raise usage_error(field, text, problem, "a path with a colon begins with ./")
        if not _URL_NAMES.fullmatch(text.partition("://")[2]) or ".." in text.split("/"):
            problem = "a URL must be BUCKET/NAME/.. of ASCII letters, digits and ._~=,+@!()-"
            raise usage_error(field, text, problem)
        if not importlib.util.find_spec(package):
            raise usage_error(field, text, f"needs a package: pip install {package}")
    written = field.rpartition(".")[2].lstrip("-") in _WRITTEN
    if written and not is_url(text) and re.search(r"[][*?]", os.path.abspath(text)):
        problem = "has one of [ ] * ?, which libraries that write there read as a pattern"
        raise usage_error(field, os.path.abspath(text), problem, "choose a path without them")
    path = epath.Path(text)
    return path.resolve() if text.startswith("./") else path  # which keeps ./~NAME apart


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns a place from which it is found in any directory."""
    return epath.Path(path) if is_url(path) else epath.Path(path).resolve()


def local_cache() -> pathlib.Path:
    """Returns the folder for what prope keeps between runs on this machine."""
    return _local_folder("PROPE_CACHE") or user_cache() / "prope"


def user_cache() -> pathlib.Path:
    """Returns the user's cache folder; raises UsageError where there is no home folder."""
    home = os.path.expanduser("~")
    folder = _local_folder("XDG_CACHE_HOME")
    if folder is None and home == "~":
        raise UsageError("HOME: there is no home folder; set HOME or XDG_CACHE_HOME")
    return folder or pathlib.Path(home, ".cache")


def _local_folder(variable: str) -> pathlib.Path | None:
    place = os.environ.get(variable)
    if not place:
        return None
    path = as_path(variable, place)
    if is_url(path):
        raise usage_error(variable, path, "must be a local folder")
    return pathlib.Path(path)


def kvstore(folder: epath.PathLike) -> ts.KvStore:
    """Opens a folder or URL as a key-value store of the files below it."""
    url = str(folder) if is_url(folder) else absolute(folder).as_uri()
    return ts.KvStore.open(f"{url.rstrip('/')}/", context=CONTEXT).result()


def write_atomic(path: epath.Path, content: str | bytes) -> None:
    """Writes a file so that readers see the old one or the new one."""
    data = content.encode() if isinstance(content, str) else content
    if is_url(path):  # an object is there when all of it is
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def retry_reads(path: epath.PathLike, read: Callable[[], T], missing: T | None = None) -> T:
    """Calls `read`, again with growing pauses while the storage fails.

    Returns its value; `missing` where there is no file.

    Raises:
      FileNotFoundError, NotADirectoryError, IsADirectoryError: no file, and `missing` is None.
      RunFailed: a local file system does not permit it.
      StorageFailed: the storage failed every time.
    """
    end = time.monotonic() + _OUTAGE_SECONDS
    failures = 0
    while True:
        try:
            return read()
        except _NO_FILE:
            if missing is None:
                raise
            return missing
        except Exception as error:
            if not is_storage_error(error):
                raise
            place = getattr(error, "filename", None) or path  # such as a folder below it
            problem = f"{place}: cannot be read: {_reason(error)}"
            is_final = is_denied(error) and not is_url(path)
            is_refused = _is_refused(error) and failures >= _MAX_REFUSALS
            is_last = failures >= len(_PAUSES) or time.monotonic() > end
            if is_final or is_refused or is_last:
                remedy = f"{_remedy(path)}, then run the same command again"
                kind = RunFailed if is_final else StorageFailed
                raise kind(f"{problem}; nothing was changed: {remedy}") from error
        log.warning("%s; trying again in %d s", problem, _PAUSES[failures])
        time.sleep(_PAUSES[failures])
        failures += 1


def _is_refused(error: Exception) -> bool:
    """Returns whether the storage refuses what was tried, so that a retry hardly helps."""
    if isinstance(error, PermissionError):
        return True
    # Errors of gcsfs, which has no kind for these.
    refusals = ("Forbidden", "Bad Request")
    return getattr(error, "code", None) in (400, 401, 403) or str(error).startswith(refusals)


@contextlib.contextmanager
def os_errors_of_tensorstore(
    passes: Callable[[Exception], bool] = lambda _: False,
) -> Iterator[None]:
    """Raises OSError for TensorStore's errors of the storage, except those for which `passes`."""
    try:
        yield
    except ValueError as error:
        if not passes(error):
            raise_storage_error(error)
        raise


def raise_storage_error(error: ValueError) -> None:
    """Raises OSError where TensorStore's error is of the storage, not of what is stored."""
    text = str(error)
    code = _CODE.search(text)
    if code and int(code[2]) not in _CONTENT_CODES[code[1]]:
        number = int(code[2]) if code[1] == "os_error" else errno.EIO
        raise OSError(number, first_line(error)) from error
    if not _CONTENT.match(text):
        raise OSError(errno.EIO, first_line(error)) from error


def hash_file(path: epath.Path) -> str:
    """Returns the sha256 of a file, with `retry_reads`."""

    def read() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return retry_reads(path, read)


def _reason(error: Exception) -> str:
    if getattr(error, "strerror", None):
        return error.strerror
    if isinstance(error, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    return first_line(error)


def _remedy(path: epath.PathLike) -> str:
    if not str(path).startswith("gs://"):
        return "see to the storage"
    bucket = "/".join(str(path).split("/")[:3])
    login = "log in with gcloud auth application-default login"
    return f"{login}, and see whether gcloud storage ls {bucket} answers"


def check_writable(setting: str, path: epath.PathLike) -> None:
    """Creates a directory; raises UsageError about `setting` if nothing can be written there.

    Raises StorageFailed where a bucket fails for longer than requests are repeated.
    """
    path = epath.Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)  # does nothing at a URL
        if is_url(path):
            probe = path / ".writable"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)  # another process may check the same place
    except Exception as error:
        if not is_storage_error(error):
            raise
        remedy = _remedy(path) if is_url(path) else ""
        if is_url(path) and not (_is_refused(error) or isinstance(error, FileNotFoundError)):
            problem = f"cannot be written: {_reason(error)}"
            raise StorageFailed(
                f"{path}: {problem}; {remedy}, then run the same command again"
            ) from error
        raise usage_error(setting, path, f"cannot be made: {_reason(error)}", remedy) from error


def read_text(flag: str, path: str, remedy: str) -> str:
    """Reads the text file that a flag names, without a BOM; a UsageError ends with `remedy`."""
    try:
        text = read_bytes(as_path(f"--{flag}", path)).decode().removeprefix("\ufeff")
        return io.StringIO(text, newline=None).read()  # lines end in \n, whatever they end in there
    except Exception as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        if is_text and not is_storage_error(error):
            raise
        reason = _reason(error) if is_text else "it is not UTF-8"
        raise usage_error(f"--{flag}", path, f"cannot be read: {reason}", remedy) from None


def write_output(flag: str, path: epath.PathLike, content: bytes) -> None:
    """Writes the file that a flag names; raises UsageError where it cannot be written."""
    try:
        write_atomic(as_path(f"--{flag}", path), content)
    except Exception as error:
        if not is_storage_error(error):
            raise
        raise usage_error(f"--{flag}", path, f"cannot be written: {_reason(error)}") from error


def read_json(path: epath.Path, remedy: str | None = None):
    """Reads a JSON file; None if there is none.

    Where it cannot be read as JSON, a UsageError ends with `remedy`, what the user can do; without
    a remedy the file counts as missing, as in a cache.
    """
    try:
        read = functools.partial(read_bytes, path)
        return parse_json(retry_reads(path, read) if remedy else read())
    except _NO_FILE:
        return None
    except (OSError, ValueError) as error:
        if remedy is None:
            return None
        raise UsageError(f"{path}: not readable as JSON ({error}); {remedy}") from None


def read_bytes(path: epath.Path) -> bytes:
    """Reads a file; raises UsageError for a pipe or a device, which would be waited for."""
    local = pathlib.Path(path)  # etils says that a pipe is a file
    if not is_url(path) and local.exists() and not (local.is_file() or local.is_dir()):
        raise UsageError(f"{path}: is a pipe or a device; put a file there")
    return path.read_bytes()


def tokenizer_file(path: epath.Path) -> epath.Path:
    """Returns a tokenizer's file: in a folder tokenizer.json, else tokenizer.model."""
    for name in TOKENIZER_FILES:
        if (path / name).is_file():
            return path / name
    return path


def check_regular(path: epath.Path) -> None:
    """Raises UsageError for what is not to be written: a link, a pipe, a device or a folder."""
    if not is_url(path) and os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        kind = "a link" if os.path.islink(path) else "not a file"
        raise UsageError(f"{path}: is {kind}, and is not written; put a file in its place")


def parse_json(content: str | bytes):
    """Parses JSON; raises ValueError also where it is nested too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def append_jsonl(path: epath.Path, *records: dict) -> None:
    """Appends JSON objects, each as a line of its own; raises UsageError as `append_lines` does."""
    append_lines(path, "".join(json.dumps(record) + "\n" for record in records))


def append_lines(path: epath.Path, text: str) -> None:
    """Appends lines, also after one that was cut short.

    Raises UsageError as `check_regular` does.
    """
    lines = text.encode()
    if not is_url(path):
        check_regular(path)
        with open(path, "a+b", buffering=0) as file:
            size = file.tell()
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    lines = b"\n" + lines
            if file.write(lines) != len(lines):  # the disk is full
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return
    folder = kvstore(path.parent)
    is_written = False
    while not is_written:  # another process may write it between our read and our write
        entry = folder.read(path.name).result()
        before = entry.value if entry.state == "value" else b""
        separator = b"" if before.endswith(b"\n") or not before else b"\n"
        content = before + separator + lines
        stamp = folder.write(path.name, content, if_equal=entry.stamp.generation).result()
        is_written = bool(stamp.generation)  # empty where the object has changed


def check_new(flag: str, path: epath.Path) -> None:
    """Raises UsageError if `path` exists and is not an empty directory."""
    is_empty_folder = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_empty_folder:
        problem = "is there already, and is not overwritten"
        raise usage_error(f"--{flag}", path, problem, "choose another, or remove it")


@contextlib.contextmanager
def new_directory(flag: str, path: epath.Path) -> Iterator[epath.Path]:
    """Yields a temporary directory that becomes `path` on success and is deleted on an error.

    It lies next to `path`; where that is a URL, on the local disk, from which the files are copied.
    """
    if is_url(path):
        with tempfile.TemporaryDirectory() as folder:
            local = epath.Path(folder)
            yield local
            check_new(flag, path)
            upload(local, path)
        return
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.part")
    try:
        temporary.mkdir(parents=True)
    except FileExistsError:
        problem = "another process writes there, or one was killed that did"
        raise UsageError(f"{temporary}: {problem}; in that case remove it") from None
    except OSError as error:
        raise usage_error(f"--{flag}", path, f"cannot be made: {error.strerror}") from error
    try:
        yield temporary
        check_new(flag, path)
        os.rename(temporary, path)  # also where an empty directory is there
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_file(flag: str, path: epath.Path) -> Iterator[epath.Path]:
    """Yields the path of a temporary file that becomes `path` on success; otherwise it is deleted.

    It lies next to `path`; where that is a URL, on the local disk, from which it is copied.
    """
    with contextlib.ExitStack() as stack:
        if is_url(path):
            folder = epath.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            check_writable(f"--{flag}", path.parent)
            folder = path.parent
        temporary = folder / f".{os.getpid()}.{path.name}"
        stack.callback(temporary.unlink, missing_ok=True)
        yield temporary
        check_new(flag, path)
        if is_url(path):
            system, root = fsspec.core.url_to_fs(str(path))
            system.put_file(str(temporary), root)
        else:
            os.replace(temporary, path)


def files_below(folder: epath.Path) -> dict[str, int]:
    """Lists all files below a folder, sorted by their path in it, with their sizes in bytes."""
    if is_url(folder):
        system, root = fsspec.core.url_to_fs(str(folder))
        details = system.find(root, detail=True)
        return {os.path.relpath(path, root): details[path]["size"] for path in sorted(details)}
    paths = sorted(pathlib.Path(folder).rglob("*"))  # fsspec would hide errors
    files = filter(pathlib.Path.is_file, paths)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def upload(folder: epath.Path, target: epath.Path) -> None:
    """Copies the files below a local folder to a URL."""
    system, root = fsspec.core.url_to_fs(str(target))
    system.put(f"{folder}/", f"{root}/", recursive=True)


@contextlib.contextmanager
def local_copy(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a local path with the content of a place: of a URL, a copy until the context ends."""
    if not is_url(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        local = epath.Path(folder) / path.name
        system, root = fsspec.core.url_to_fs(str(path))
        retry_reads(path, lambda: system.get(root, str(local), recursive=True))
        yield local
