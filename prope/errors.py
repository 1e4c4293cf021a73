"""What a command tells its user: the log, exceptions that end it with one line, and the exit codes beside theirs."""

import difflib
import errno
import logging
import os
import re

log = logging.getLogger("prope")  # of all files; `command.run` sends it to stderr

PREEMPTED = 75  # stopped on request after saving: rerun the same command to resume (EX_TEMPFAIL)
LOST = (
    76  # hung, or lost another process: rerun the same command to resume from the last checkpoint
)
INTERRUPTED = 130  # by Ctrl-C

# Other packages are always installed.
_EXTRAS = {"'.[hf]'": ("torch", "transformers"), "'.[tpu]'": ("libtpu",), "'.[gcs]'": ("gcsfs",)}


class UsageError(Exception):
    """Invalid input: the text names the cause, the value and the remedy."""

    code = 2


class RunFailed(Exception):
    """The run cannot continue: the text says what happened, what is kept and what to do."""

    code = 1


class Stopped(Exception):
    """The run ends before its last step; rerunning the same command resumes it."""

    def __init__(self, message: str, code: int = PREEMPTED):
        super().__init__(message)
        self.code = code


def usage_error(field: str, value, problem: str, remedy: str = "") -> UsageError:
    """Makes the one line about a flag or a config field: "FIELD=VALUE: PROBLEM; REMEDY"."""
    ending = f"; {remedy}" if remedy else ""
    return UsageError(f"{field}={value}: {problem}{ending}")


def is_disk_full(error: BaseException) -> bool:
    """Tells whether an exception, or one in its chain, reports a full disk or quota."""
    # TensorStore wraps the operating system's text.
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(
        errno.ENOSPC
    ) in str(error):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_disk_full(cause)


def is_storage_error(error: BaseException) -> bool:
    """Tells whether a file system or a bucket has failed, rather than the program."""
    return isinstance(error, OSError) or type(error).__module__.startswith(
        ("gcsfs.", "aiohttp.", "google.", "boto")
    )


def as_ending(error: Exception) -> UsageError | RunFailed | Stopped | None:
    """Returns what ends a command with one line for an exception of any library; None where that needs a traceback."""
    if isinstance(error, UsageError | RunFailed | Stopped):
        return error
    if is_disk_full(error):
        saved = "what was saved before is whole: free some space, then run the same command again"
        return RunFailed(f"no space left on the device ({first_line(error)}); {saved}")
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        less = "lower the batch size or the length of the windows; training also takes a higher config.accumulation"
        remedy = f"{less}, or config.model.remat=full; python -m prope.plan computes what fits"
        return RunFailed(f"out of memory ({first_line(error)}): {remedy}")
    missing = (
        re.search(r"(?:No module named '|install )(\w+)", str(error))
        if isinstance(error, ImportError)
        else None
    )
    if missing and missing[1] != "prope":
        package = missing[1]
        extra = next((extra for extra, names in _EXTRAS.items() if package in names), ".")
        return UsageError(
            f"the Python package {package} is not installed: pip install -e {extra} in the clone"
        )
    if is_storage_error(error) and not isinstance(error, OSError):
        return RunFailed(
            f"the storage has failed ({first_line(error)}): run the same command again"
        )
    return None


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, at most 200 characters, or its type's name."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def nearest(name: str, known) -> str:
    """Returns ' (did you mean ...?)' where one of `known` resembles `name`, else ''."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""
