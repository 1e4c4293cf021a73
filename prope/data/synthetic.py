"""Tasks with known answers: positional and semantic attention, measured in minutes.

synthetic/copy    positional: repeat the letter k tokens before. `copy-2` asks for k = 2. Letters repeat all the time,
                  so only their positions identify the one that is asked for.
synthetic/recall  semantic: after a fact such as `k7=v3`, at any distance, `k7?` asks for its value. Key and value are
                  one token, so that finding it needs no position. Every key is asked for once.
synthetic/mix     half of the slots for each.
longcontext/NAME  a task of prope/longcontext in compact form, as bytes; longcontext/mix draws the task of every window.

A window of synthetic/ is <bos> and random letters, with slots of two tokens four to eight letters apart: `copy-k` and
its answer, a question and its answer, or a fact and a letter. Only answers have a weight. Letters and values are
uniform, so guessing is right in 1/8 of cases. The distance of a fact and its question is drawn first, uniformly on a
logarithmic scale, as far as free slots allow.

Nothing is stored. A training window is a function of (task, seq_len, seed, entry of the endless list), a validation
window of (task, seq_len, number). A hash of its tokens decides which split a window may be in, so none is in both.
"""

import functools
import itertools
import textwrap
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from prope.config import GENERATED
from prope.data.batch import Batch, padding
from prope.data.store.arrays import SPLITS, Store, fingerprint_of
from prope.data.tokenizer import BOS, ByteTokenizer
from prope.errors import UsageError
from prope.longcontext import tasks as longcontext
from prope.longcontext.draws import Draw

TASKS = GENERATED["synthetic"]
OFFSETS = (1, 2, 3, 4)  # k of copy
LETTERS = VALUES = 8
KEYS = 16

# Ids, in this order after the four special ones.
_COPY = 4
_LETTER = _COPY + len(OFFSETS)
_VALUE = _LETTER + LETTERS
_QUERY = _VALUE + VALUES
_FACT = _QUERY + KEYS
VOCABULARY = _FACT + KEYS * VALUES

_GAP = (4, 8)  # letters before a slot: at least max(OFFSETS), so that what is copied is a letter
_MIN_TOKENS = {
    "copy": 16,
    "recall": 32,
    "mix": 64,
}  # of a window, for every kind of answer to fit in
_VALIDATION_WINDOWS = 512
_HELD_OUT = 4  # one in so many windows may be in the validation split
_ENTRIES = 2**32  # of the endless list of a seed
_FORMAT = 1  # of the rule that generates windows; in the fingerprint


class Window(NamedTuple):
    """A window and its answers."""

    stream: np.ndarray  # int32 [T + 1], the tokens and the target of the last one
    task: np.ndarray  # int8 [T], the index in TASKS where the target is an answer; elsewhere -1
    distance: (
        np.ndarray
    )  # int32 [T], tokens from a question back to where its answer can be read; elsewhere 0


class Synthetic:
    """Has the interface of `Windows`; `count` of the train split is the number of entries of one seed.

    In `store.index` an answer counts as one byte, and `unigram_loss` is that of guessing among eight answers.
    """

    def __init__(self, data: ConfigDict, vocab_size: int, split: str):
        family, self.task = data.dataset.split("/")
        self.seq_len, self.position_range, self._bytes = (
            data.seq_len,
            data.position_range,
            family == "longcontext",
        )
        self.tasks, ids = (tuple(longcontext.TASKS), 260) if self._bytes else (TASKS, VOCABULARY)
        if vocab_size < ids:
            remedy = f"set config.model.vocab_size to {ids} or more"
            raise UsageError(
                f"config.model.vocab_size={vocab_size}: {family} data has {ids} ids; {remedy}"
            )
        if self.seq_len < (shortest := _MIN_TOKENS.get(self.task, 64)):
            least = f"windows of {data.dataset} need at least {shortest} tokens"
            raise UsageError(f"seq_len={self.seq_len}: {least}; raise config.data.seq_len")
        self.name, self.split, self.sources, self.weights, self.shares = (
            data.dataset,
            split,
            [self],
            [1.0],
            [1.0],
        )
        self._validation = split == "validation"
        self.count = _VALIDATION_WINDOWS if self._validation else _ENTRIES
        self.length = self.count * self.seq_len
        counts = {"tokens": 1, "documents": 0, "given": 0, "bytes": 1}
        index = dict.fromkeys(SPLITS, counts) | {"unigram_loss": float(np.log(LETTERS))}
        self.store = Store("", fingerprint_of({"dataset": data.dataset, "format": _FORMAT}), index)
        self.window = functools.lru_cache(_VALIDATION_WINDOWS)(
            self._generate
        )  # evaluation reads them repeatedly

    def at(self, example: int, seed: int) -> int:
        """Returns the index of the window at entry `example` of the endless list; no two entries or seeds share one."""
        return seed * _ENTRIES + example

    def _generate(self, index: int) -> Window:
        """Draws the window of this index until it may be in this split."""
        draw_window = (
            self._draw_bytes if self._bytes else functools.partial(draw, self.task, self.seq_len)
        )
        for number in itertools.count():
            window = draw_window(int(index), (self.seq_len, self._validation, number))
            is_held_out = zlib.crc32(window.stream.astype("<i4").tobytes()) % _HELD_OUT == 0
            if is_held_out == self._validation:
                break
        return window

    def _draw_bytes(self, index: int, key: tuple[int, ...]) -> Window:
        """Draws a window of a task of prope/longcontext; the task itself, too, if it is mix."""
        name, _, option = self.task.partition("-")
        if name == "mix":
            name = self.tasks[Draw(index, (3, *key)).stream().integers(len(self.tasks))]
        number, kind = self.tasks.index(name), longcontext.TASKS[name]
        option = int(option or kind.options[0])
        text, answers = kind.window(
            Draw(index, (4, number, option, *key), option=option), self.seq_len
        )
        stream = np.append(np.int32(BOS), ByteTokenizer().encode(text[: self.seq_len].encode()))
        task, distance = np.full(self.seq_len, -1, np.int8), np.zeros(self.seq_len, np.int32)
        for (
            start,
            size,
            back,
        ) in answers:  # <bos> comes first, so a character is the target of its own index
            task[start : start + size], distance[start : start + size] = number, back - 1
        return Window(stream, task, distance)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order, as `Windows.read` does; weights are 1 at answers."""
        windows = [self.window(int(index)) for index in indices]
        batch = padding(len(windows), self.seq_len)
        for row, window in enumerate(windows):
            batch["tokens"][row], batch["targets"][row] = window.stream[:-1], window.stream[1:]
            batch["weights"][row] = window.task >= 0
            batch["positions"][row] = np.arange(self.seq_len)
            batch["segment_ids"][row] = 1
        return batch

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns windows, each of which is a document: int32 [T]."""
        return list(self.read(range(count))["tokens"])

    def accuracy(self, indices, correct: np.ndarray) -> dict:
        """Returns `accuracy` and `accuracy_by_distance`: by octaves of distance, for copy by single distances.

        `correct`, bool [B, T], tells for the windows `indices`, [B], whether the target has the highest score.
        """
        windows = [self.window(int(index)) for index in indices]
        task, distance = (
            np.stack([getattr(w, name) for w in windows]) for name in ("task", "distance")
        )
        by_distance = []
        for number in np.unique(task[task >= 0]).tolist():
            start = 1
            while start <= distance[task == number].max():
                stop = start + 1 if self.tasks[number] == "copy" else 2 * start
                if (
                    selected := correct[(task == number) & (start <= distance) & (distance < stop)]
                ).size:
                    counts = {"accuracy": float(selected.mean()), "answers": selected.size}
                    by_distance.append(
                        {"task": self.tasks[number], "from": start, "to": stop} | counts
                    )
                start = stop
        return {"accuracy": float(correct[task >= 0].mean()), "accuracy_by_distance": by_distance}

    def text_of(self, ids) -> str:
        """Returns tokens as text."""
        return ByteTokenizer().decode(ids) if self._bytes else text_of(ids)


def draw(task: str, T: int, index: int, key: tuple[int, ...]) -> Window:
    """Draws a window of T tokens, a function of the arguments."""
    sequence = np.random.SeedSequence(index, spawn_key=(2, TASKS.index(task), *key))
    generator = np.random.Generator(np.random.PCG64(sequence))
    stream = generator.integers(_LETTER, _LETTER + LETTERS, T + 1, dtype=np.int32)
    stream[0] = BOS
    kind, distance = np.full(T, -1, np.int8), np.zeros(T, np.int32)
    gaps = generator.integers(_GAP[0], _GAP[1] + 1, T // _GAP[0])
    slots = np.cumsum(gaps + 2) - 1  # of each its first token; <bos> and a gap come before
    slots = slots[slots < T]
    shuffled = generator.permutation(slots)
    copies = shuffled[: {"copy": len(slots), "recall": 0, "mix": len(slots) // 2}[task]]
    number = generator.integers(0, len(OFFSETS), len(copies))
    offset = np.array(OFFSETS)[number]
    stream[copies], stream[copies + 1] = _COPY + number, stream[copies - offset]
    kind[copies], distance[copies] = TASKS.index("copy"), offset

    free = np.sort(shuffled[len(copies) :])
    for key in generator.permutation(KEYS)[: len(free) // 2]:
        wanted = np.exp(generator.uniform(np.log(_GAP[0] + 2), np.log(T)))
        candidates = free[1:][free[1:] >= free[0] + wanted]
        query = generator.choice(candidates if len(candidates) else free[1:])
        earlier = free[free < query]
        fact = earlier[np.abs(query - earlier - wanted).argmin()]
        value = generator.integers(VALUES)
        stream[fact], stream[query], stream[query + 1] = (
            _FACT + key * VALUES + value,
            _QUERY + key,
            _VALUE + value,
        )
        kind[query], distance[query] = TASKS.index("recall"), query - fact
        free = free[(free != fact) & (free != query)]
    return Window(stream, kind, distance)


def text_of(ids) -> str:
    """Returns the tokens as words: a letter, `copy-2`, `k7=v3`, `k7?`, `v3`."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"copy-{k}" for k in OFFSETS)]
    names += [chr(ord("a") + n) for n in range(LETTERS)] + [f"v{n}" for n in range(VALUES)]
    names += [f"k{n}?" for n in range(KEYS)] + [
        f"k{key}=v{value}" for key in range(KEYS) for value in range(VALUES)
    ]
    return " ".join(names[i] for i in map(int, ids))


def describe(windows: Synthetic, window: Window) -> Iterator[str]:
    """Yields lines that show a window: its text, then every answer."""
    yield from textwrap.wrap(
        windows.text_of(window.stream), 110, initial_indent="    ", subsequent_indent="    "
    )
    yield "  place  task       token    target  weight  distance  the answer is in"
    for place in np.flatnonzero(window.task >= 0):
        token, target = (windows.text_of([window.stream[place + n]]) for n in (0, 1))
        source, name = place - window.distance[place], windows.tasks[window.task[place]]
        words = f"{windows.text_of([window.stream[source]])} at {source}"
        yield f"  {place:5d}  {name:9s}  {token:7s}  {target:6s}  {1:6d}  {window.distance[place]:8d}  {words}"
