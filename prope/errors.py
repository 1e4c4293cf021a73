"""The ways in which a command ends early, each in one line, and its exit codes."""

import difflib
import errno
import os

FAILED = 1  # the run cannot go on as it is: someone has to look
UNUSABLE = 2  # what was given cannot be used: nothing was done
PREEMPTED = 75  # asked to stop, and everything is saved: the same command goes on (EX_TEMPFAIL)
LOST = 76  # stuck, or another process is gone: the same command goes on from the last checkpoint
INTERRUPTED = 130  # by Ctrl-C


class UsageError(Exception):
    """Something the user gave cannot be used: the text names the cause, the value and the remedy."""


class RunFailed(Exception):
    """The run cannot go on: the text says what happened, what is kept and what to do."""


class Stopped(Exception):
    """The run ends before its last step, and the same command goes on from there."""

    def __init__(self, message: str, code: int = PREEMPTED):
        super().__init__(message)
        self.code = code


def is_disk_full(error: BaseException) -> bool:
    """Whether this exception, or one that it came from, says that a disk or quota is full."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(cause):  # TensorStore wraps the operating system's text
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def nearest(name: str, known) -> str:
    """' (did you mean ...?)' where one of `known` resembles `name`, else ''."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""
