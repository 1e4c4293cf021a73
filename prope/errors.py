"""The two ways in which a command ends early, each in one line."""

import difflib


class UsageError(Exception):
    """Something the user gave cannot be used: the text names the cause, the value and the remedy."""


class RunFailed(Exception):
    """The run cannot go on: the text says what happened, what is kept and what to do."""


def nearest(name: str, known) -> str:
    """' (did you mean ...?)' where one of `known` resembles `name`, else ''."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""
