"""Stage 5: windows of the token stream, and the batch of a step as a pure function.

Window i of a split holds tokens i*T .. i*T + T and predicts each from those before it, so the windows together
predict every token once. A training batch is B consecutive entries of an endless list: a permutation of all
windows, then another one, epoch after epoch. What a step sees is decided by (fingerprint, seed, step, batch size,
T) and by nothing else; where a run stands in its data is one integer.

With `position_range` R a training window gets randomised positions (Ruoss et al., 2023): T distinct ones of 0 .. R-1,
sorted, drawn anew for every place of the list. Validation keeps the ordinary positions 0 .. T-1: its loss then depends
on no draw and compares runs that differ in R. (The paper, appendix B.2, speaks of training positions only.)

Axes: B batch, T seq_len.
"""

import collections
import itertools
from collections.abc import Callable, Iterator
from concurrent import futures

import grain
import numpy as np
from ml_collections import ConfigDict

from prope.data.store.arrays import Store
from prope.data.store.build import open_store
from prope.data.tokenizer import load_tokenizer

Batch = dict[str, np.ndarray]

_STRETCH = 2**18  # tokens of the stream that are looked through at a time


class Windows:
    """The windows of one split of the token store that a config names.

    Attributes:
      store: the tokens.
      seq_len: T.
      count: the number of windows; the last one may be padded.
      position_range: R, what `train_batch` draws positions from; None: positions are ordinary.
    """

    def __init__(self, config: ConfigDict, vocab_size: int, split: str):
        tokenizer = load_tokenizer(config.tokenizer)
        self.store: Store = open_store(config, vocab_size)
        self.seq_len = config.seq_len
        self.position_range = config.position_range
        self._mask_documents = config.mask_documents
        self._bos, self._pad = tokenizer.bos, tokenizer.pad
        self._split = split
        self._tokens = self.store.tokens(split)
        self._length = self._tokens.shape[0]
        self.count = -(-(self._length - 1) // self.seq_len)

    def at(self, example: int, seed: int) -> int:
        """The window at place `example` of the endless list."""
        return window_of(example, self.count, seed)

    def read(self, indices) -> Batch:
        """The windows with these indices, in this order.

        Returns:
          `tokens, targets` int32 [B, T]; `weights` float32 [B, T], 0 where the target is a <bos>, padding or given;
          `positions` int32 [B, T], which restart at document borders if documents are masked; `segment_ids`
          int32 [B, T], the number of the document within the window, from 1, or 0 for padding.
        """
        T = self.seq_len
        starts = [int(i) * T for i in indices]
        ends = [min(start + T + 1, self._length) for start in starts]
        reads = [self._tokens[start:end].read() for start, end in zip(starts, ends, strict=True)]
        stream = np.full((len(starts), T + 1), self._pad, np.int32)
        real = np.zeros((len(starts), T + 1), bool)
        given = np.zeros((len(starts), T + 1), bool)
        for row, read in enumerate(reads):
            piece = read.result()
            stream[row, : len(piece)], given[row, : len(piece)] = self.store.ids_and_given(piece)
            real[row, : len(piece)] = True
        opens = (stream == self._bos) & real
        segment_ids = np.cumsum(opens, axis=1, dtype=np.int32) + ~opens[:, :1]
        index = np.broadcast_to(np.arange(T, dtype=np.int32), (len(starts), T))
        first = np.maximum.accumulate(np.where(opens[:, :-1], index, 0), axis=1) if self._mask_documents else 0
        return {
            "tokens": stream[:, :-1],
            "targets": stream[:, 1:],
            "weights": (real & ~opens & ~given)[:, 1:].astype(np.float32),
            "positions": np.asarray(index - first, np.int32),
            "segment_ids": np.where(real, segment_ids, 0)[:, :-1].astype(np.int32),
        }

    def beginnings(self, count: int) -> list[np.ndarray]:
        """How documents begin: up to `count` pieces, int32, of T tokens each, or of fewer if documents are shorter.

        The stream is cut into `count` stretches. Of each it is the first document with T tokens that begins there, or
        the longest one where there is none.
        """
        cuts = [self._length * part // count for part in range(count + 1)]
        found = [self._beginning(start, stop) for start, stop in itertools.pairwise(cuts)]
        return [tokens for tokens in found if len(tokens)]

    def _beginning(self, start: int, stop: int) -> np.ndarray:
        best = np.zeros(0, np.int32)
        for first in range(start, stop, _STRETCH):
            last = min(first + _STRETCH, stop)
            tokens, _ = self.store.ids_and_given(
                self._tokens[first : min(last + self.seq_len, self._length)].read().result()
            )
            opens = np.flatnonzero(tokens == self._bos)
            for begin, end in itertools.pairwise([*opens, len(tokens)]):
                if begin < last - first and min(end - begin, self.seq_len) > len(best):
                    best = tokens[begin:end][: self.seq_len]
                if len(best) == self.seq_len:
                    return best
        return best

    def empty(self, rows: int) -> Batch:
        """Windows of padding, to fill a batch up with: no token of them has a weight."""
        zeros = np.zeros((rows, self.seq_len), np.int32)
        return {
            "tokens": zeros + self._pad, "targets": zeros + self._pad, "weights": zeros.astype(np.float32),
            "positions": zeros, "segment_ids": zeros,
        }  # fmt: skip


def train_batch(windows: Windows, seed: int, batch_size: int, step: int, rows=None) -> Batch:
    """The batch of update `step + 1`: rows step*B .. step*B + B-1 of the endless list of windows.

    Args:
      windows: of the train split.
      seed: of the run.
      batch_size: B, over all processes.
      step: updates done before, from 0.
      rows: which of the B rows to read; all by default, a process's own on a pod.
    """
    rows = range(batch_size) if rows is None else rows
    examples = [step * batch_size + int(row) for row in rows]
    batch = windows.read([windows.at(example, seed) for example in examples])
    if windows.position_range is not None:
        for positions, example in zip(batch["positions"], examples, strict=True):
            positions[:] = randomised(positions, windows.position_range, seed, example)
    return batch


def randomised(positions: np.ndarray, limit: int, seed: int, example: int) -> np.ndarray:
    """Positions [T] drawn from 0 .. limit-1 for the window at place `example` of the endless list: int32 [T].

    They are distinct and rise from each 0 of the ordinary `positions` to the next: over the whole window, or within
    each of its documents where documents are masked. Every such choice is equally likely.
    """
    # Another spawn key than the permutations': their seeds must not meet.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, example], spawn_key=(1,))))
    lengths = np.diff(np.flatnonzero(positions == 0), append=len(positions))
    drawn = [np.sort(generator.choice(limit, length, replace=False, shuffle=False)) for length in lengths]
    return np.concatenate(drawn).astype(np.int32)


def window_of(example: int, count: int, seed: int) -> int:
    """The window at place `example` of the endless list: every epoch of `count` places is a new permutation."""
    epoch, place = divmod(example, count)
    if count == 1:
        return 0
    key = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
    return grain.experimental.index_shuffle(index=place, max_index=count - 1, seed=key, rounds=4)


def ahead(function: Callable[[int], Batch], start: int, stop: int, depth: int = 4) -> Iterator[Batch]:
    """function(start), .., function(stop - 1): up to `depth` of them are made on threads while one is used.

    Several at a time, because a batch from a bucket takes long to come, but does not keep a core busy.
    """
    with futures.ThreadPoolExecutor(depth, "batches") as pool:
        steps = iter(range(start, stop))
        waiting = collections.deque(pool.submit(function, step) for step in itertools.islice(steps, depth))
        try:
            while waiting:
                batch = waiting.popleft().result()
                waiting.extend(pool.submit(function, step) for step in itertools.islice(steps, 1))
                yield batch
        finally:
            for future in waiting:
                future.cancel()
