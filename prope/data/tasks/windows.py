"""Windows of generated tasks, which training and evaluation read as they read those of a text.

Nothing is stored. A training window is a function of (task, seq_len, seed, entry of the endless
list), a validation window of (task, seq_len, number). A hash of its tokens decides which split a
window may be in, so none is in both. Only answers have a weight.
"""

import functools
import itertools
import textwrap
import zlib
from collections.abc import Iterator

import numpy as np

from prope.data.batch import AnyWindows, Batch, padding
from prope.data.store.arrays import COUNTS, SPLITS, Store, fingerprint_of
from prope.data.tasks import synthetic, tasks
from prope.data.tasks.draws import Window
from prope.errors import usage_error
from prope.spec.data import DataSpec

# config.data.dataset=FAMILY/TASK: the module of FAMILY has NAMES, VOCABULARY, draw_window, text_of.
_FAMILIES = {"synthetic": synthetic, "longcontext": tasks}
_MIN_TOKENS = {"copy": 16, "recall": 32}  # so that every kind of answer fits in; of others 64
_VALIDATION_WINDOWS = 512
_HELD_OUT = 4  # one in so many windows may be in the validation split
_ENTRIES = 2**32  # windows that a seed gives: more than any run reads
_FORMAT = 1  # version of the rule that generates windows; in the fingerprint
_GUESSES = 8  # answers among which `unigram_loss` is that of guessing


class GeneratedWindows(AnyWindows):
    """Has the interface of `Windows`; `count` of the train split is the entries of one seed.

    In `store.index` an answer counts as one byte.
    """

    def __init__(self, data: DataSpec, vocab_size: int, split: str):
        family, self.task = data.dataset.split("/")
        self._tasks = _FAMILIES[family]
        ids = self._tasks.VOCABULARY
        if vocab_size < ids:
            raise usage_error(
                "config.model.vocab_size",
                vocab_size,
                f"{family} data has {ids} ids",
                f"set config.model.vocab_size to {ids} or more",
            )
        shortest = _MIN_TOKENS.get(self.task, 64)
        if data.seq_len < shortest:
            raise usage_error(
                "seq_len",
                data.seq_len,
                f"windows of {data.dataset} need at least {shortest} tokens",
                "raise config.data.seq_len",
            )
        super().__init__(data, split)
        self._validation = split == "validation"
        self.count = _VALIDATION_WINDOWS if self._validation else _ENTRIES
        self.length = self.count * self.seq_len
        counts = dict.fromkeys(COUNTS, 0) | {"tokens": 1, "bytes": 1}
        index = dict.fromkeys(SPLITS, counts) | {"unigram_loss": float(np.log(_GUESSES))}
        fingerprint = fingerprint_of({"dataset": data.dataset, "format": _FORMAT})
        self.store = Store("", fingerprint, index)
        # Evaluation reads windows repeatedly.
        self.window = functools.lru_cache(_VALIDATION_WINDOWS)(self._generate)

    def window_index(self, example: int, seed: int) -> int:
        """Returns the index of the window of an example; no two examples or seeds share one."""
        return seed * _ENTRIES + example

    def _generate(self, index: int) -> Window:
        """Draws the window of this index until it may be in this split."""
        for attempt in itertools.count():
            key = (self.seq_len, self._validation, attempt)
            window = self._tasks.draw_window(self.task, self.seq_len, int(index), key)
            is_held_out = zlib.crc32(window.stream.astype("<i4").tobytes()) % _HELD_OUT == 0
            if is_held_out == self._validation:
                break
        return window

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order, as `Windows.read` does."""
        windows = [self.window(int(index)) for index in indices]
        batch = padding(len(windows), self.seq_len)
        batch["segment_ids"][:] = 1
        batch["positions"][:] = np.arange(self.seq_len)
        for row, window in enumerate(windows):
            batch["tokens"][row] = window.stream[:-1]
            batch["targets"][row] = window.stream[1:]
            batch["weights"][row] = window.task >= 0
        return batch

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns windows, each of which is a document: int32 [T]."""
        return list(self.read(range(count))["tokens"])

    def accuracy(self, indices, correct: np.ndarray) -> dict:
        """Returns `accuracy` and `accuracy_by_distance`: of copy by distance, else by octave.

        `correct`, bool [B, T], is whether each target of the windows `indices`, [B], has the
        highest score.
        """
        windows = [self.window(int(index)) for index in indices]
        task = np.stack([window.task for window in windows])
        distance = np.stack([window.distance for window in windows])
        octaves = 1 << np.frexp(distance)[1] >> 1  # the power of two that each begins with
        by_distance = []
        for number in np.unique(task[task >= 0]).tolist():
            name = self._tasks.NAMES[number]
            starts = distance if name == "copy" else octaves
            for start in np.unique(starts[task == number]).tolist():
                answers = correct[(task == number) & (starts == start)]
                by_distance.append(
                    {
                        "task": name,
                        "from": start,
                        "to": start + 1 if name == "copy" else 2 * start,
                        "accuracy": float(answers.mean()),
                        "answers": answers.size,
                    }
                )
        return {"accuracy": float(correct[task >= 0].mean()), "accuracy_by_distance": by_distance}

    def describe(self, index: int) -> Iterator[str]:
        """Yields lines that show a window: its text, then every answer."""
        window = self.window(index)
        text_of = self._tasks.text_of
        indent = "    "
        text = text_of(window.stream)
        yield from textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent)
        yield "  place  task       token    target  weight  distance  the answer is in"
        for place in np.flatnonzero(window.task >= 0):
            name = self._tasks.NAMES[window.task[place]]
            distance = window.distance[place]
            token = text_of([window.stream[place]])
            target = text_of([window.stream[place + 1]])
            evidence = f"{text_of([window.stream[place - distance]])} at {place - distance}"
            columns = f"  {place:5d}  {name:9s}  {token:7s}  {target:6s}  {1:6d}"
            yield f"{columns}  {distance:8d}  {evidence}"
