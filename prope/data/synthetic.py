"""Windows whose answers are known: what p-RoPE is for, as an experiment of minutes.

synthetic/copy    positional: repeat the letter that stood k tokens before. `copy-2` asks for k = 2. Letters repeat all
                  the time and nothing else stands before a mark, so only their places tell which is meant.
synthetic/recall  semantic: a fact such as `k7=v3` stands somewhere, and later `k7?` asks for its value. Key and value
                  are one token, so that finding it needs no position, at any distance; every key is asked for once.
synthetic/mix     half the places for the one, half for the other.

A window is <bos> and random letters, with slots of two tokens in it, four to eight letters apart: a mark and its
answer, a question and its answer, or a fact and a letter. Only answers are predicted: all other weights are 0. Letters
and values are uniform, so guessing has a chance of 1/8. Of the two slots of a fact and its question the distance is
drawn first, evenly on a logarithmic scale, as far as free slots allow.

Nothing is stored. A training window is a function of (task, seq_len, seed, place in the endless list), a validation
window of (task, seq_len, number). Which split a window may be in is decided by a hash of its tokens, as it is for
documents, so no window is in both.
"""

import dataclasses
import functools
import textwrap
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from prope.config import SYNTHETIC as TASKS
from prope.data.store.arrays import SPLITS, fingerprint_of
from prope.data.tokenizer import BOS, PAD
from prope.errors import UsageError

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
_SHORTEST = {"copy": 16, "recall": 32, "mix": 64}  # tokens in which every kind of answer finds a place
_VALIDATION = 512  # windows of the split
_HELD_OUT = 4  # one in so many windows may be in the validation split
_PLACES = 2**32  # of the endless list of a seed
_FORMAT = 1  # of the rule that makes windows; part of the fingerprint


class Window(NamedTuple):
    """A window and the truth about it.

    Attributes:
      stream: int32 [T + 1], the tokens and the target of the last one.
      task: int8 [T], where the target is an answer, what kind of: an index in TASKS; elsewhere -1.
      distance: int32 [T], there, how many tokens before this one the answer can be read; elsewhere 0.
    """

    stream: np.ndarray
    task: np.ndarray
    distance: np.ndarray


@dataclasses.dataclass(frozen=True)
class SyntheticStore:
    """What `Store` says of tokens on disk; here there are none. Every answer counts as one byte of text.

    Attributes:
      fingerprint: of the rule that makes the windows.
      index: `unigram_loss` is that of guessing among the eight possible answers.
    """

    fingerprint: str
    index: dict

    def targets(self, split: str) -> int:
        """Answers, for the bytes that `index` counts."""
        return self.index[split]["bytes"]


class Synthetic:
    """Used as `Windows` is, whose attributes it has; `count` of the train split is the number of places of one seed."""

    def __init__(self, config: ConfigDict, vocab_size: int, split: str):
        self.task = config.dataset.removeprefix("synthetic/")
        self.seq_len, self.position_range = config.seq_len, config.position_range
        if vocab_size < VOCABULARY:
            raise UsageError(
                f"config.model.vocab_size={vocab_size}: synthetic data has {VOCABULARY} ids; set "
                f"config.model.vocab_size to {VOCABULARY} or more"
            )
        if self.seq_len < _SHORTEST[self.task]:
            raise UsageError(
                f"seq_len={self.seq_len}: windows of {config.dataset} need at least {_SHORTEST[self.task]} tokens; "
                "raise config.data.seq_len"
            )
        self._validation = split == "validation"
        self.count = _VALIDATION if self._validation else _PLACES
        index = {split: {"bytes": 1} for split in SPLITS} | {"unigram_loss": float(np.log(LETTERS))}
        self.store = SyntheticStore(fingerprint_of({"dataset": config.dataset, "format": _FORMAT}), index)
        self.window = functools.lru_cache(_VALIDATION)(self._make)  # evaluation reads the same ones again and again

    def at(self, example: int, seed: int) -> int:
        """The window at place `example` of the endless list: no two places and seeds share one."""
        return seed * _PLACES + example

    def _make(self, index: int) -> Window:
        """The window of this index: the first of a sequence of draws that may be in this split."""
        attempt = 0
        while True:
            key = (2, TASKS.index(self.task), self.seq_len, self._validation, attempt)
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(index), spawn_key=key)))
            window = draw(self.task, self.seq_len, generator)
            if is_held_out(window.stream) == self._validation:
                return window
            attempt += 1

    def read(self, indices) -> dict[str, np.ndarray]:
        """The windows with these indices, in this order, as `Windows.read` gives them; weights are 1 at answers."""
        windows = [self.window(int(index)) for index in indices]
        batch = self.empty(len(windows))
        for row, window in enumerate(windows):
            batch["tokens"][row], batch["targets"][row] = window.stream[:-1], window.stream[1:]
            batch["weights"][row] = window.task >= 0
            batch["positions"][row] = np.arange(self.seq_len)
            batch["segment_ids"][row] = 1
        return batch

    def beginnings(self, count: int) -> list[np.ndarray]:
        """Whole windows, which are documents: int32 [T] each."""
        return list(self.read(range(count))["tokens"])

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Windows of padding."""
        names = ("tokens", "targets", "positions", "segment_ids")
        batch = {name: np.full((rows, self.seq_len), PAD, np.int32) for name in names}
        return batch | {"weights": np.zeros((rows, self.seq_len), np.float32)}

    def accuracy(self, indices, right: np.ndarray) -> dict:
        """Shares of right answers: `accuracy`, and `accuracy_by_distance`, in octaves, of copy by single distances.

        Args:
          indices: of B windows.
          right: bool [B, T], whether the target has the highest score.
        """
        windows = [self.window(int(index)) for index in indices]
        task, distance = (np.stack([getattr(w, name) for w in windows]) for name in ("task", "distance"))
        found = []
        for number in np.unique(task[task >= 0]).tolist():
            start = 1
            while start <= distance[task == number].max():
                stop = start + 1 if TASKS[number] == "copy" else 2 * start
                there = (task == number) & (start <= distance) & (distance < stop)
                if there.any():
                    about = {"task": TASKS[number], "from": start, "to": stop}
                    found.append(about | {"accuracy": float(right[there].mean()), "answers": int(there.sum())})
                start = stop
        return {"accuracy": float(right[task >= 0].mean()), "accuracy_by_distance": found}


def is_held_out(stream: np.ndarray) -> bool:
    """Whether a window of these tokens belongs to the validation split."""
    return zlib.crc32(stream.astype("<i4").tobytes()) % _HELD_OUT == 0


def draw(task: str, T: int, generator: np.random.Generator) -> Window:
    """A random window of T tokens."""
    stream = generator.integers(_LETTER, _LETTER + LETTERS, T + 1, dtype=np.int32)
    stream[0] = BOS
    kind, distance = np.full(T, -1, np.int8), np.zeros(T, np.int32)
    gaps = generator.integers(_GAP[0], _GAP[1] + 1, T // _GAP[0])
    slots = np.cumsum(gaps + 2) - 1  # a slot's first place; <bos> and a gap before the first one
    slots = slots[slots < T]
    shuffled = generator.permutation(slots)
    copies = shuffled[: {"copy": len(slots), "recall": 0, "mix": len(slots) // 2}[task]]
    offset = generator.integers(0, len(OFFSETS), len(copies))
    stream[copies], stream[copies + 1] = _COPY + offset, stream[copies - np.array(OFFSETS)[offset]]
    kind[copies], distance[copies] = TASKS.index("copy"), np.array(OFFSETS)[offset]

    free = np.sort(shuffled[len(copies) :])
    for key in generator.permutation(KEYS)[: len(free) // 2]:
        wanted = np.exp(generator.uniform(np.log(_GAP[0] + 2), np.log(T)))
        asks = free[1:][free[1:] >= free[0] + wanted]
        ask = generator.choice(asks if len(asks) else free[1:])
        earlier = free[free < ask]
        fact = earlier[np.abs(ask - earlier - wanted).argmin()]
        value = generator.integers(VALUES)
        stream[fact], stream[ask], stream[ask + 1] = _FACT + key * VALUES + value, _QUERY + key, _VALUE + value
        kind[ask], distance[ask] = TASKS.index("recall"), ask - fact
        free = free[(free != fact) & (free != ask)]
    return Window(stream, kind, distance)


def text_of(ids) -> str:
    """The tokens as words: a letter, `copy-2`, `k7=v3`, `k7?`, `v3`."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"copy-{k}" for k in OFFSETS)]
    names += [chr(ord("a") + n) for n in range(LETTERS)] + [f"v{n}" for n in range(VALUES)]
    names += [f"k{n}?" for n in range(KEYS)] + [f"k{key}=v{value}" for key in range(KEYS) for value in range(VALUES)]
    return " ".join(names[i] for i in map(int, ids))


def describe(window: Window) -> Iterator[str]:
    """Lines that show a window: its text, then every answer."""
    yield from textwrap.wrap(text_of(window.stream), 110, initial_indent="    ", subsequent_indent="    ")
    yield "  place  task    token    target  weight  distance  the answer is in"
    for place in np.flatnonzero(window.task >= 0):
        token, target = (text_of([window.stream[place + n]]) for n in (0, 1))
        source, name = place - window.distance[place], TASKS[window.task[place]]
        words = f"{text_of([window.stream[source]])} at {source}"
        yield f"  {place:5d}  {name:6s}  {token:7s}  {target:6s}  {1:6d}  {window.distance[place]:8d}  {words}"
