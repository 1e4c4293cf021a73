"""Exceptions that end a command with one line, and the exit codes."""

import difflib
import errno
import os

FAILED = 1  # the run cannot continue unchanged: its error needs attention
UNUSABLE = 2  # invalid input: nothing was done
PREEMPTED = 75  # stopped on request after saving: rerun the same command to resume (EX_TEMPFAIL)
LOST = 76  # hung, or lost another process: rerun the same command to resume from the last checkpoint
INTERRUPTED = 130  # by Ctrl-C


class UsageError(Exception):
    """Invalid input: the text names the cause, the value and the remedy."""


class RunFailed(Exception):
    """The run cannot continue: the text says what happened, what is kept and what to do."""


class Stopped(Exception):
    """The run ends before its last step; rerunning the same command resumes it."""

    def __init__(self, message: str, code: int = PREEMPTED):
        super().__init__(message)
        self.code = code


def is_disk_full(error: BaseException) -> bool:
    """Tells whether an exception, or one in its chain, reports a full disk or quota."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(cause):  # TensorStore wraps the operating system's text
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, at most 200 characters, or its type's name."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def nearest(name: str, known) -> str:
    """Returns ' (did you mean ...?)' where one of `known` resembles `name`, else ''."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""
