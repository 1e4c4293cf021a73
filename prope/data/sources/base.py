"""What a source of documents is: parts that can be read on their own, each a run of documents in a fixed order.

The parts are cut by position in the source, never by who reads them, so any number of processes may share them.
"""

import dataclasses
import string
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from prope.errors import UsageError

MAX_DOCUMENT = 2**26  # bytes; a longer one would not leave a worker within 2 GB


class Document(NamedTuple):
    """A document.

    Attributes:
      text: UTF-8.
      given: how many bytes at its start are given and not to be predicted, such as an instruction.
    """

    text: bytes
    given: int = 0


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of documents that one process reads.

    Attributes:
      key: where they are, for people and to know the part again.
      num_bytes: about how much text they hold.
      read: gives them in order; can be sent to another process; raises UsageError where the data is broken.
    """

    key: str
    num_bytes: int
    read: Callable[[], Iterator[Document]]


@dataclasses.dataclass(frozen=True)
class Source:
    """A collection of documents.

    Attributes:
      name: as in config.data.dataset.
      identity: what makes it this collection and no other, JSON-able; the same wherever the text is the same.
      parts: all documents, in order.
    """

    name: str
    identity: dict
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """About how much text there is."""
        return sum(part.num_bytes for part in self.parts)

    def documents(self) -> Iterator[bytes]:
        """The texts, in order."""
        for part in self.parts:
            for document in part.read():
                yield document.text


def part_bytes(total: int) -> int:
    """Bytes of a part: many parts, so that a stop loses little; not so many that their number is a burden."""
    return min(max(total // 256, 2**18), 2**23)


@dataclasses.dataclass(frozen=True)
class TextRule:
    """How a record becomes a document: a feature's text, or a template such as "Q: {inputs}\\nA: {targets}".

    With loss_on "targets" everything before the template's last field is given.
    """

    text_feature: str
    template: str = ""
    loss_on: str = "all"

    @classmethod
    def of(cls, config: ConfigDict) -> "TextRule":
        """The rule of a run's `config.data`."""
        return cls(config.text_feature, config.template, config.loss_on)

    @property
    def fields(self) -> tuple[str, ...]:
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
        """What decides the text, for a source's identity."""
        if not self.template:
            return {"text_feature": self.text_feature}
        return {"template": self.template, "loss_on": self.loss_on}

    def document(self, values: Mapping[str, bytes], where: str) -> Document:
        """The document of a record's features; `where` names it in an error."""
        values = {name: utf8(values[name], where) for name in self.fields}
        if not self.template:
            return Document(values[self.text_feature])
        pieces = []
        for literal, name, _, _ in string.Formatter().parse(self.template):
            pieces += [literal.encode()] + ([values[name]] if name else [])
        text = b"".join(pieces)
        return Document(text, len(text) - len(pieces[-1]) if self.loss_on == "targets" else 0)


def utf8(text: bytes, where: str) -> bytes:
    """The text itself.

    Raises:
      UsageError: it is not UTF-8, or too long.
    """
    if len(text) > MAX_DOCUMENT:
        raise too_long(where)
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8 text (byte {error.start}); convert or remove it") from None
    return text


def too_long(where: str) -> UsageError:
    """What to say of a document that is too long."""
    return UsageError(f"{where}: a document of more than {MAX_DOCUMENT:,} bytes; cut it into several")
