"""Documents that a function of the user's own yields, which the config names as "module:function".

It is called without arguments, up to three times, and yields the same rows every time: a text, or
(text, name), whose name is shown where something is wrong with the row or with the one after it.
"""

import functools
from collections.abc import Iterable, Iterator

from prope.data.sources.base import Chunk, Document, Source, bad_row, encode
from prope.errors import UsageError, usage_error
from prope.user_code import load_function

_FIELD = "config.data.dataset"


def user_documents(dataset: str) -> Source:
    """Returns the rows of a function as a source of one chunk; its module is in the identity."""
    identity = {"dataset": dataset, "module": load_function(_FIELD, dataset).source_hash}
    return Source(dataset, identity, (Chunk(dataset, 0, functools.partial(_read, dataset)),), True)


def _read(dataset: str) -> Iterator[Document]:
    """Yields the documents; raises UsageError with the row's number where the function raises."""
    function = load_function(_FIELD, dataset)
    where = ""
    number = 0
    try:
        rows = function.call()
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            raise TypeError(f"returned a {type(rows).__name__}; yield texts")
        for number, row in enumerate(rows, 1):
            text, name = row if isinstance(row, tuple) and len(row) == 2 else (row, "")
            where = f"row {number}" + (f" ({' '.join(str(name).split())[:200]})" if name else "")
            yield _document(text, f"{dataset} {where}")
    except Exception as error:
        last = f" after {where}" if where else ""
        problem = f"row {number + 1}{last}: {function.describe(error)}"
        remedy = "none of its rows was used: mend it, then run the same command again"
        raise usage_error(_FIELD, dataset, problem, remedy) from error


def _document(text: object, where: str) -> Document:
    if text is None:
        return Document(b"")  # which is left out, and counted
    if not isinstance(text, str):
        problem = f"a value of type {type(text).__name__}; yield a str, or (str, name)"
        return bad_row(where, UsageError(problem))
    try:
        return Document(encode(text))
    except UsageError as error:
        return bad_row(where, error)
