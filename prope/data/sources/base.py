"""A source of documents: chunks of consecutive documents, each of which one process reads.

Chunks depend on the source alone, not on the number of processes that share them.
"""

import dataclasses
import string
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prope.errors import UsageError

MAX_DOCUMENT = 2**26  # bytes; a longer one would not leave a worker within 2 GB


class Document(NamedTuple):
    """A text.

    Attributes:
      text: UTF-8.
      prompt_bytes: length of its beginning that is not predicted, such as an instruction.
    """

    text: bytes
    prompt_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive documents of a source.

    Attributes:
      key: identifies the chunk within its source, and names it in messages.
      num_bytes: approximate size of the text.
      read: yields the documents in order; can be pickled; raises UsageError on damaged data.
    """

    key: str
    num_bytes: int
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A collection of documents.

    Attributes:
      name: as in config.data.dataset.
      identity: JSON values that are equal exactly where the documents are equal; part of the store's fingerprint.
      chunks: all documents, in order.
    """

    name: str
    identity: dict
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    def documents(self) -> Iterator[bytes]:
        """Yields the texts in order."""
        for chunk in self.chunks:
            for document in chunk.read():
                yield document.text


def chunk_bytes(total: int) -> int:
    """Returns the size of a chunk: small, so that an interruption loses little, but not thousands of them."""
    return min(max(total // 256, 2**18), 2**23)


@dataclasses.dataclass(frozen=True)
class TextRule:
    """How a record becomes a document: one feature, or a template such as "Q: {inputs}\\nA: {targets}".

    With loss_on "targets" all text before the template's last field is the prompt.
    """

    text_feature: str
    template: str = ""
    loss_on: str = "all"

    @property
    def features(self) -> tuple[str, ...]:
        """The features that a record must have."""
        if not self.template:
            return (self.text_feature,)
        return tuple(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(self.template) if name))

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
        values = {name: check_utf8(values[name], where) for name in self.features}
        if not self.template:
            return Document(values[self.text_feature])
        segments = []
        for literal, name, _, _ in string.Formatter().parse(self.template):
            segments += [literal.encode()] + ([values[name]] if name else [])
        text = b"".join(segments)
        return Document(text, len(text) - len(segments[-1]) if self.loss_on == "targets" else 0)


def check_utf8(text: bytes, where: str) -> bytes:
    """Returns the text; raises UsageError if it is not UTF-8 or too long."""
    if len(text) > MAX_DOCUMENT:
        raise too_long(where)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8 text (byte {error.start}); convert or remove it") from None
    return text


def too_long(where: str) -> UsageError:
    """Returns the error for a document above MAX_DOCUMENT."""
    return UsageError(f"{where}: a document of more than {MAX_DOCUMENT:,} bytes; cut it into several")
