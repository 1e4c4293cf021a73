"""A source of documents: chunks of consecutive documents, each of which one process reads.

Chunks depend on the source alone, not on the number of processes that share them.
"""

import functools
import string
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prope.errors import UsageError, log

MAX_DOCUMENT = 2**26  # bytes; a longer one would not leave a worker within 2 GB


class Document(NamedTuple):
    """A text."""

    text: bytes  # UTF-8
    prompt_bytes: int = 0  # length of its beginning that is not predicted, such as an instruction
    split_by: bytes = b""  # decides instead of the text whether it is held out; empty: the text

    @property
    def split_key(self) -> bytes:
        """What decides by its hash whether the document is held out."""
        return self.split_by or self.text


class Chunk(NamedTuple):
    """Consecutive documents of a source."""

    key: str  # identifies its documents within the source, and names it in messages
    num_bytes: int  # approximate size of the text
    # Yields the documents in order; can be pickled; raises UsageError on damaged data.
    read: Callable[[], Iterator[Document]]
    # URL of the file that it copies here first; one worker reads its chunks one after the other.
    shard: str = ""


class Source(NamedTuple):
    """A collection of documents."""

    name: str  # as in config.data.dataset
    # JSON values, equal exactly where the documents are; in the store's fingerprint.
    identity: dict
    chunks: tuple[Chunk, ...]  # all documents, in order

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    def documents(self) -> Iterator[bytes]:
        """Yields the texts in order."""
        return (document.text for chunk in self.chunks for document in chunk.read())


def chunk_bytes(total: int) -> int:
    """Returns the size of a chunk: an interruption loses little, and there are not thousands."""
    return min(max(total // 256, 2**18), 2**23)


@functools.cache  # the splits of a run read the same source
def log_once(message: str) -> None:
    """Logs a line that was not logged before."""
    log.info("%s", message)


class TextRule(NamedTuple):
    """How a record becomes a document: one feature, or a template.

    The template is such as "Q: {inputs}\\nA: {targets}". With loss_on "targets" all text before its
    last field is the prompt.
    """

    text_feature: str
    template: str = ""
    loss_on: str = "all"

    @property
    def _segments(self) -> list[tuple[str, str | None]]:
        """The text: pairs of a literal and the feature that follows it, if any."""
        if not self.template:
            return [("", self.text_feature)]
        return [(literal, name) for literal, name, _, _ in string.Formatter().parse(self.template)]

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a record must have."""
        return tuple(dict.fromkeys(name for _, name in self._segments if name is not None))

    @property
    def option(self) -> str:
        """The config field that names the features."""
        return "config.data.template" if self.template else "config.data.text_feature"

    @property
    def identity(self) -> dict:
        """What determines the text, for `Source.identity`."""
        if not self.template:
            return {"text_feature": self.text_feature}
        return {"template": self.template, "loss_on": self.loss_on}

    def document(self, values: Mapping[str, bytes], where: str) -> Document:
        """Builds the document of a record; `where` names the record in an error."""
        text = b""
        prompt_bytes = 0
        for literal, name in self._segments:
            text += literal.encode()
            prompt_bytes = len(text)
            if name is not None:
                text += check_utf8(values[name], where)
        return Document(text, prompt_bytes if self.loss_on == "targets" else 0)


def check_utf8(text: bytes, where: str) -> bytes:
    """Returns the text; raises UsageError if it is not UTF-8 text or too long."""
    if len(text) > MAX_DOCUMENT:
        raise too_long(where)
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
        raise UsageError(f"{where}: {problem}; convert or remove it") from None
    return text


def cut_text(text: bytes, limit: int, find_cut: Callable[[int, int], int]) -> Iterator[bytes]:
    """Yields segments of at most `limit` bytes.

    They end at `find_cut(start, latest end)`, or between characters if that is not after `start`.
    """
    start = 0
    while len(text) - start > limit:
        cut = find_cut(start, start + limit)
        if cut <= start:
            cut = start + limit
            while text[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def too_long(where: str) -> UsageError:
    """Returns the error for a document above MAX_DOCUMENT."""
    problem = f"a document of more than {MAX_DOCUMENT:,} bytes"
    return UsageError(f"{where}: {problem}; cut it into several")
