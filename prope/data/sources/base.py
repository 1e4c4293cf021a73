"""A source of documents: chunks of consecutive documents, each of which one process reads.

Chunks depend on the source alone, not on the number of processes that share them.
"""

import functools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prope.errors import UsageError, log

LISTED = 10  # bad rows that a message names


class Document(NamedTuple):
    """A text, or a part of a long one."""

    text: bytes  # UTF-8
    prompt_bytes: int = 0  # length of its beginning that is not predicted, such as an instruction
    split_by: bytes = b""  # decides instead of the text whether it is held out; empty: the text
    goes_on: bool = False  # the next document is the next part of the same text
    bad: tuple[str, str] | None = None  # where it is and why it cannot be read; it has no text


def bad_row(where: object, error: UsageError) -> Document:
    """Returns what stands for a row that cannot be read."""
    return Document(b"", bad=(str(where), str(error)))


class Chunk(NamedTuple):
    """Consecutive documents of a source."""

    key: str  # identifies its documents within the source, and names it in messages
    num_bytes: int  # approximate size of the text
    # Yields the documents in order; can be pickled; raises UsageError on damaged data.
    read: Callable[[], Iterator[Document]]
    # URL of the file that it copies here first; one worker reads its chunks one after the other.
    shard: str = ""
    split: str = ""  # train or validation; empty: a hash of each document decides


class Source(NamedTuple):
    """A collection of documents."""

    name: str  # as in config.data.dataset
    # JSON values, equal exactly where the documents are; in the store's fingerprint.
    identity: dict
    chunks: tuple[Chunk, ...]  # all documents, in order
    # There may be few documents: one at least is held out, and long ones are cut for that.
    is_divided: bool = False

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    def documents(self, split: str = "") -> Iterator[Document]:
        """Yields the documents of the chunks with this `split`, in order."""
        return (
            document for chunk in self.chunks if chunk.split == split for document in chunk.read()
        )


def chunk_bytes(total: int) -> int:
    """Returns the size of a chunk: an interruption loses little, and there are not thousands."""
    return min(max(total // 256, 2**18), 2**23)


@functools.cache  # the splits of a run read the same source
def log_once(message: str) -> None:
    """Logs a line that was not logged before."""
    log.info("%s", message)


def check_bad_rows(rows: Sequence[tuple[str, str]], limit: int) -> None:
    """Logs a list of the bad rows, which are left out; raises UsageError if `limit` are fewer."""
    if not rows:
        return
    places: dict[str, list[str]] = {}
    for where, reason in rows[:LISTED]:
        places.setdefault(reason, []).append(where)
    listed = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in places.items())
    if len(rows) > LISTED:
        listed += "; and more"
    if len(rows) > limit:
        raise UsageError(f"{listed}; or raise config.data.max_bad_rows={limit} to leave them out")
    log_once(f"data: {len(rows)} bad rows are left out: {listed}")


class TextRule(NamedTuple):
    """How a record becomes a document: one feature, or a template.

    The template is such as "Q: {inputs}\\nA: {targets}". With loss_on "targets" all text before its
    last field is the prompt. Separators stand between the documents of a .txt.
    """

    text_feature: str
    template: str = ""
    loss_on: str = "all"
    separator: str = ""

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
        separator = {"separator": self.separator} if self.separator else {}
        if not self.template:
            return {"text_feature": self.text_feature} | separator
        return {"template": self.template, "loss_on": self.loss_on}

    def document(self, values: Mapping[str, bytes]) -> Document:
        """Builds the document of a record; raises UsageError if it is not UTF-8 text."""
        text = b""
        prompt_bytes = 0
        for literal, name in self._segments:
            text += literal.encode()
            prompt_bytes = len(text)
            if name is not None:
                text += check_utf8(values[name])
        return Document(text, prompt_bytes if self.loss_on == "targets" else 0)


def check_utf8(text: bytes) -> bytes:
    """Returns the text; raises UsageError, with the reason alone, if it is not UTF-8 text."""
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.start})"
        raise UsageError(f"{problem}; convert or remove it") from None
    return text


def encode(text: str) -> bytes:
    """Returns the text as UTF-8; raises UsageError, with the reason alone, if it cannot be."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        problem = "holds half a character (an unpaired surrogate)"
        raise UsageError(f"{problem}; repair or remove it") from None


def cut_text(text: bytes, limit: int, find_cut: Callable[[int, int], int]) -> Iterator[bytes]:
    """Yields segments of at most `limit` bytes, of an empty text one.

    They end at `find_cut(start, latest end)`, or between characters if that is not after `start`.
    """
    start = 0
    while len(text) - start > limit:
        cut = find_cut(start, start + limit)
        if cut <= start:
            cut = start + limit
            while text[cut] & 0xC0 == 0x80 and cut > start + 1:  # inside a character
                cut -= 1
        yield text[start:cut]
        start = cut
    yield text[start:]


def cut_words(text: bytes, limit: int) -> Iterator[bytes]:
    """Yields segments of at most `limit` bytes that end after a line or a space."""

    def find_cut(start: int, stop: int) -> int:
        return max(text.rfind(mark, start, stop) for mark in (b"\n", b" ")) + 1

    return cut_text(text, limit, find_cut)
