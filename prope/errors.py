"""The project's log, the exceptions that end a command with one line, and the exit codes."""

import contextlib
import difflib
import errno
import json
import logging
import math
import os
import re
import traceback
import zipfile
import zlib
from collections.abc import Iterator

log = logging.getLogger("prope")  # `command.run` sends it to stderr

# Stopped on request after saving (EX_TEMPFAIL): rerun the same command to resume.
PREEMPTED = 75
# Hung, lost another process or the storage, or another training is at work on the run: rerun the
# same command to resume from the last checkpoint.
LOST = 76
INTERRUPTED = 130  # by Ctrl-C

# Errors of a disk, or of a file system over a network, that a later start may not meet.
_OUTAGES = (
    errno.EIO,
    errno.ESTALE,
    errno.EREMOTEIO,
    errno.ENOLCK,
    errno.EAGAIN,
    errno.ENOTCONN,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)

# Other packages are always installed.
_EXTRAS = {
    "torch": "'.[hf]'",
    "transformers": "'.[hf]'",
    "gguf": "'.[gguf]'",
    "libtpu": "'.[tpu]'",
    "gcsfs": "'.[gcs]'",
    "wandb": "'.[wandb]'",
}
# What libraries raise for a file that is not what it should be.
_BAD_DATA = UnicodeError | EOFError | json.JSONDecodeError | zipfile.BadZipFile | zlib.error
_OF_TENSORSTORE = re.compile(
    r"(NOT_FOUND|PERMISSION_DENIED|UNAUTHENTICATED|DATA_LOSS|UNAVAILABLE|ABORTED|INTERNAL|UNKNOWN"
    r"|DEADLINE_EXCEEDED|FAILED_PRECONDITION|ALREADY_EXISTS|OUT_OF_RANGE): "
)
# What only a person can change, by the error of the operating system.
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the shell (ulimit -f) or the file system permits",
}
# Remedies.
NO_PLATFORM = "name another, such as cpu, or install it: source launch/setup.sh gpu (or tpu)"
_FREE_SPACE = (
    "what was saved before is whole: free some space or raise the limit, then run the same "
    "command again"
)
_LESS_MEMORY = (
    "lower the batch size or the length of the windows; training also takes a higher "
    "config.accumulation or config.model.remat=full; "
    "python -m prope.plan computes what fits"
)


class UsageError(Exception):
    """Invalid input: the text names the cause, the value and the remedy."""

    code = 2


class RunFailed(Exception):
    """The run cannot continue: the text says what happened, what is kept and what to do."""

    code = 1


class StorageFailed(RunFailed):
    """The storage failed for longer than is waited for: the same command may go on later."""

    code = LOST


class Stopped(Exception):
    """The run ends before its last step; rerunning the same command resumes it."""

    def __init__(self, message: str, code: int = PREEMPTED):
        super().__init__(message)
        self.code = code


def usage_error(field: str, value, problem: str, remedy: str = "") -> UsageError:
    """Makes the one line about a flag or a config field: "FIELD=VALUE: PROBLEM; REMEDY"."""
    ending = f"; {remedy}" if remedy else ""
    return UsageError(f"{field}={value}: {problem}{ending}")


def shorten(value, length: int = 300) -> str:
    """Returns a value as text, cut where it is longer."""
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}.."


def vmem_error(message: str) -> UsageError | None:
    """Reads the compiler's message that a kernel needs more of a TPU's VMEM than it may use.

    No smaller batch mends that, though XLA raises it as RESOURCE_EXHAUSTED.
    """
    match = re.search(r"size ([\d.]+)M and limit ([\d.]+M) exceeded scoped vmem", message)
    if match is None:
        return None
    needed, limit = match.groups()
    kibibytes = math.ceil(1024 * float(needed))
    problem = f"a kernel needs {needed}M of VMEM"
    remedy = f"add --xla_tpu_scoped_vmem_limit_kib={kibibytes} or more to that variable"
    return usage_error("LIBTPU_INIT_ARGS", f"{limit} of VMEM", problem, remedy)


def find_full(error: BaseException) -> str | None:
    """Names what an exception, or one in its chain, reports as full: a disk, a quota or a file.

    None: nothing.
    """
    for code, reason in _FULL.items():
        # TensorStore wraps the operating system's text.
        if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
            return reason
    cause = error.__cause__ or error.__context__
    return cause and find_full(cause)


def is_denied(error: BaseException) -> bool:
    """Returns whether a file system does not permit something: no later start may do it either."""
    return getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)


def is_storage_error(error: BaseException) -> bool:
    """Returns whether a file system or a bucket has failed, rather than the program."""
    libraries = ("fsspec.", "s3fs.", "gcsfs.", "aiohttp.", "google.", "boto", "urllib3.", "http.")
    if isinstance(error, OSError) or type(error).__module__.startswith(libraries):
        return True
    return isinstance(error, ValueError) and str(error).startswith("Bad Request")  # of gcsfs


def to_user_error(error: Exception) -> UsageError | RunFailed | Stopped | None:
    """Converts a known exception to a one-line error; another one needs a traceback: None."""
    if isinstance(error, UsageError | RunFailed | Stopped):
        return error
    if vmem := vmem_error(str(error)):
        return vmem
    cause = first_line(error)
    if isinstance(error, BrokenPipeError):
        return RunFailed(f"{cause}: what reads the output has ended, as head does; use a file")
    if full := find_full(error):
        return RunFailed(f"{full} ({cause}); {_FREE_SPACE}")
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        return RunFailed(f"out of memory ({cause}): {_LESS_MEMORY}")
    if isinstance(error, ImportError):
        return _missing_package(error)
    if is_storage_error(error) and not isinstance(error, OSError):
        return StorageFailed(f"the storage has failed ({cause}): run the same command again")
    is_tensorstore = isinstance(error, ValueError) and _OF_TENSORSTORE.match(str(error))
    if isinstance(error, OSError | _BAD_DATA) or is_tensorstore:
        return _file_error(error)
    return None


@contextlib.contextmanager
def warn_if_unwritten(place) -> Iterator[None]:
    """Turns an error of the storage into a warning, for a file that training can do without."""
    try:
        yield
    except Exception as error:
        if to_user_error(error) is None:
            raise
        log.warning("%s: not written: %s", place, first_line(error))


def _file_error(error: Exception) -> RunFailed:
    """Names the file, or the line of this code, where reading or writing failed, and the cause."""
    place = getattr(error, "filename", None)
    if place is None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/prope/" in frame.filename]
        place = ", ".join(f"{frame.filename}:{frame.lineno}" for frame in (ours or frames)[-1:])
    cause = getattr(error, "strerror", None) or first_line(error)
    remedy = "see to that file, then run the same command again"
    if is_denied(error):
        remedy = "have its owner permit it, or name another place; --output=DIR where there is one"
    kind = StorageFailed if _is_outage(error) else RunFailed
    return kind(f"{place}: {type(error).__name__}: {cause}; {remedy}")


def _is_outage(error: Exception) -> bool:
    """Returns whether storage or a network has failed in a way that may pass."""
    if isinstance(error, OSError):
        return isinstance(error, TimeoutError | ConnectionError) or error.errno in _OUTAGES
    return re.match("UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", str(error)) is not None


def _missing_package(error: ImportError) -> UsageError | None:
    missing = re.search(r"(?:No module named '|install )(\w+)", str(error))
    if missing is None or missing[1] == "prope":
        return None
    package = missing[1]
    install = f"pip install -e {_EXTRAS.get(package, '.')} in the clone"
    return UsageError(f"the Python package {package} is not installed: {install}")


def first_line(error: Exception) -> str:
    """Returns the first 200 characters of an exception's first line, or its type's name."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def nearest(name: str, known) -> str:
    """Returns ' (did you mean ...?)' where one of `known` resembles `name`, else ''."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else ""
