"""Decides which text is held out for validation: by a hash of the text, so by nothing else.

Of few documents at least one is held out, and a long one is cut for this decision: its pieces are
split as documents are. The pieces of one split follow each other there as one document.
"""

import collections
import functools
import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from prope.data.sources.base import Document, Source, cut_text
from prope.data.store.arrays import SPLITS
from prope.errors import log

_FEW = 2**12  # documents; more of them fall into both splits
_MAX_LINES = 2**20  # of validation text that are looked for in training text


class SplitRule(NamedTuple):
    """How the documents of a source are split."""

    held_out: Container[int]  # hashes of the validation text
    total: int = 0  # bytes of all documents, of which those of 1/16 of it are cut; 0: none is

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits of the store: if documents are cut, all of them are there whole, too."""
        return (*SPLITS, "all") if self.total else SPLITS

    def pieces(self, document: Document) -> Iterable[bytes]:
        """Cuts a long document."""
        text = document.text
        if not self.total or 16 * len(text) < self.total or document.prompt_bytes:
            return [text]
        limit = max(self.total // 256, min(self.total // 16, 256), 4)  # a character has up to 4
        return cut_text(text, limit, functools.partial(_find_cut, text))

    def parts(self, document: Document, split: str) -> Iterator[tuple[str, bytes]]:
        """Yields (split, text) of what a store holds of a document; `split`: that of its chunk."""

        def find_split(piece: bytes) -> str:
            return SPLITS[hash_text(document.split_by or piece) in self.held_out]

        if split:
            yield split, document.text
            return
        for split, pieces in itertools.groupby(self.pieces(document), find_split):
            yield split, b"".join(pieces)
        if self.total:
            yield "all", document.text


def hash_text(text: bytes) -> int:
    """Hashes a text to an integer below 2**64."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _find_cut(text: bytes, start: int, stop: int) -> int:
    """Returns the end of a line, else of a word, in the latter half of a span; 0 without one.

    The bytes before it decide which one, so copies of a text are cut alike wherever they stand.
    """

    def rank(end: int) -> tuple[bool, int]:
        return text[end - 1 : end] == b"\n", zlib.crc32(text[max(end - 32, 0) : end])

    borders = re.compile(rb"[\n ]").finditer(text, (start + stop) // 2, stop)
    return max((border.end() for border in borders), key=rank, default=0)


def find_rule(source: Source, fraction: float) -> SplitRule:
    """Returns the rule that splits a source; reads its documents where they are few."""
    rule = SplitRule(range(math.ceil(fraction * 2**64)))
    if not source.is_divided:
        return rule
    few = itertools.islice(source.documents(), _FEW + 1)
    sizes = [(len(document.text), document.goes_on) for document in few]
    if len(sizes) > _FEW:
        return rule
    total = sum(size for size, _ in sizes)
    if any(goes_on or 16 * size >= total for size, goes_on in sizes):
        rule = rule._replace(total=total)
    counts = collections.Counter(
        hash_text(piece)
        for document in source.documents()
        for piece in rule.pieces(document)
        if piece[document.prompt_bytes :].strip()
    )
    held_out = {number for number in counts if number in rule.held_out}
    if len(held_out) in (0, len(counts)):
        # Of equal texts all are held out: better those of which there are few.
        rarest = sorted(counts, key=lambda number: (counts[number], number))
        held_out = set(rarest[:1]) if len(counts) > 1 else set()
    return rule._replace(held_out=held_out)


def warn_of_known_lines(source: Source) -> None:
    """Warns of lines of the validation text that are in the training text, if files tell both."""

    def lines(split: str) -> Iterator[bytes]:
        for document in source.documents(split):
            yield from filter(None, map(bytes.strip, document.text.splitlines()))

    held_out = set(itertools.islice(lines("validation"), _MAX_LINES))
    known = held_out and held_out.intersection(lines("train"))
    if known:
        message = "data: %d of %d different lines of the validation text are training text, too"
        log.warning(message, len(known), len(held_out))
