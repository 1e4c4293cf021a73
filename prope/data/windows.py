"""Windows of the token stream, and the batch of a step as a pure function.

Window i of a split holds the tokens i*T .. i*T + T and predicts each from those before it, so the windows together
predict every token once. Training reads an endless list: a permutation of all windows, then another one, epoch after
epoch. A batch is B consecutive entries: a function of (fingerprint, seed, step, B, T) alone.

With `position_range` R a training window gets randomised positions (Ruoss et al., 2023): T distinct ones of 0 .. R-1,
sorted, drawn anew for every entry of the list. Validation keeps the positions 0 .. T-1, so that its loss depends on no
draw and compares runs that differ in R. (The paper, appendix B.2, speaks of training positions only.)

Axes: B batch, T seq_len.
"""

import collections
import itertools
from collections.abc import Callable, Iterator
from concurrent import futures

import numpy as np
from ml_collections import ConfigDict

from prope.data.batch import Batch
from prope.data.store.arrays import Store, find_store
from prope.data.store.build import check_split, open_store
from prope.data.tokenizer import BOS, PAD
from prope.errors import UsageError, log
from prope.runtime import processes

_SCAN_TOKENS = 2**18  # tokens of the stream that are searched at a time


class Windows:
    """The windows of one split, train, validation or all, of the token store that a config names.

    `sources`, their `weights` in windows and `shares` of the predicted tokens are lists because a mixture has several.
    """

    def __init__(self, data: ConfigDict, vocab_size: int, split: str):
        self.store: Store = _open_on_all(data, vocab_size)
        check_split(self.store, data, split)
        self.name = f"{data.dataset} {data.data_dir}" if data.dataset == "files" else data.dataset
        self.split, self.sources, self.weights, self.shares = split, [self], [1.0], [1.0]
        self.seq_len = data.seq_len  # T
        self.position_range = (
            data.position_range
        )  # R, from which `train_batch` draws positions; None: 0 .. T-1
        self._mask_documents, self._bos_every_window = data.mask_documents, data.bos_every_window
        self._tokens = self.store.tokens(split)
        self.length = self._tokens.shape[0]
        self.count = -(-(self.length - 1) // self.seq_len)  # of windows; the last one may be padded
        if split == "train" and self.seq_len > self.length:
            longest = f"longer than the train split of {self.name}, {self.length:,} tokens"
            raise UsageError(
                f"config.data.seq_len={self.seq_len}: {longest}; choose a shorter window, or add text"
            )

    def window_index(self, example: int, seed: int) -> int:
        """Returns the index of the window at entry `example` of the endless list."""
        return shuffled_index(example, self.count, seed)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order."""
        T = self.seq_len
        reads = [
            self._tokens[i * T : min(i * T + T + 1, self.length)].read() for i in map(int, indices)
        ]
        stream = np.full((len(reads), T + 1), PAD, np.int32)
        real, is_prompt = np.zeros((2, len(reads), T + 1), bool)
        for row, read in enumerate(reads):
            elements = read.result()
            stream[row, : len(elements)], is_prompt[row, : len(elements)] = self.store.decode(
                elements
            )
            real[row, : len(elements)] = True
        is_bos = stream == BOS
        segment_ids = np.cumsum(is_bos, axis=1, dtype=np.int32) + ~is_bos[:, :1]
        index = np.broadcast_to(np.arange(T, dtype=np.int32), (len(reads), T))
        if self._bos_every_window:
            stream[:, 0] = BOS
        first = (
            np.maximum.accumulate(np.where(is_bos[:, :-1], index, 0), axis=1)
            if self._mask_documents
            else 0
        )
        return {
            "tokens": stream[:, :-1],
            "targets": stream[:, 1:],
            "positions": np.asarray(index - first, np.int32),
            "segment_ids": np.where(real, segment_ids, 0)[:, :-1].astype(np.int32),
            "weights": (real & ~is_bos & ~is_prompt)[:, 1:].astype(np.float32),
        }

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns the beginnings of up to `count` documents: int32, T tokens each, or fewer of a shorter document.

        The stream is cut into `count` intervals. Of each it is the first document with T tokens that begins there, or
        the longest one if there is none.
        """
        cuts = [self.length * number // count for number in range(count + 1)]
        starts = [self._document_start(start, stop) for start, stop in itertools.pairwise(cuts)]
        return [tokens for tokens in starts if len(tokens)]

    def _document_start(self, start: int, stop: int) -> np.ndarray:
        best = np.zeros(0, np.int32)
        for first in range(start, stop, _SCAN_TOKENS):
            last = min(first + _SCAN_TOKENS, stop)
            tokens, _ = self.store.decode(
                self._tokens[first : min(last + self.seq_len, self.length)].read().result()
            )
            for begin, end in itertools.pairwise([*np.flatnonzero(tokens == BOS), len(tokens)]):
                if begin < last - first and min(end - begin, self.seq_len) > len(best):
                    best = tokens[begin:end][: self.seq_len]
                if len(best) == self.seq_len:
                    return best
        return best


def _open_on_all(data: ConfigDict, vocab_size: int) -> Store:
    """Opens the store in all processes of a run; the first one prepares it, without the others."""
    if processes.count() == 1:
        return open_store(data, vocab_size)
    first = processes.call_on_first(lambda: vars(open_store(data, vocab_size)))
    path, fingerprint = first["path"], first["fingerprint"]
    with processes.raise_on_all():
        if (store := find_store(path, fingerprint)) is None:
            log.warning(
                "%s is not seen here: made again; config.data.cache_dir may be a place that hosts share",
                path,
            )
            store = open_store(data, vocab_size)
        if store.fingerprint != fingerprint:
            raise UsageError(
                f"{data.dataset}: is other text here ({store.path}) than in process 0 ({path}); share it"
            )
    return store


def train_batch(windows: Windows, seed: int, batch_size: int, step: int, rows=None) -> Batch:
    """Reads the batch of update `step + 1`: entries step*B .. step*B + B-1 of the endless list of windows.

    `rows` are those of the B rows that are read: all by default, a process's own on a pod.
    """
    rows = range(batch_size) if rows is None else rows
    examples = [step * batch_size + int(row) for row in rows]
    batch = windows.read([windows.window_index(example, seed) for example in examples])
    if windows.position_range is not None:
        for positions, example in zip(batch["positions"], examples, strict=True):
            positions[:] = randomise_positions(positions, windows.position_range, seed, example)
    return batch


def randomise_positions(positions: np.ndarray, limit: int, seed: int, example: int) -> np.ndarray:
    """Draws positions from 0 .. limit-1 for the window at entry `example` of the endless list: int32 [T].

    They are distinct and increase from each 0 of the ordinary `positions` to the next: over the whole window, or within
    each of its documents where documents are masked. Every such choice is equally likely.
    """
    # Another spawn key than the permutations': their seeds must not meet.
    generator = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, example], spawn_key=(1,)))
    )
    lengths = np.diff(np.flatnonzero(positions == 0), append=len(positions))
    drawn = [
        np.sort(generator.choice(limit, length, replace=False, shuffle=False)) for length in lengths
    ]
    return np.concatenate(drawn).astype(np.int32)


def shuffled_index(example: int, count: int, seed: int) -> int:
    """Returns the window at entry `example` of the endless list: every epoch of `count` is a new permutation."""
    import grain  # takes half a second

    epoch, entry = divmod(example, count)
    if count == 1:
        return 0
    key = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
    return grain.experimental.index_shuffle(index=entry, max_index=count - 1, seed=key, rounds=4)


def prefetch(
    function: Callable[[int], Batch], start: int, stop: int, depth: int = 4
) -> Iterator[Batch]:
    """Yields function(start), .., function(stop - 1); threads compute up to `depth` of them ahead.

    Several at a time, because a batch from a bucket takes long to arrive but does not keep a core busy.
    """
    pool, steps = futures.ThreadPoolExecutor(depth, "batches"), iter(range(start, stop))
    pending = collections.deque(
        pool.submit(function, step) for step in itertools.islice(steps, depth)
    )
    try:
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(function, step) for step in itertools.islice(steps, 1))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
