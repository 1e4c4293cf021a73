"""Maps a training example's number to a window; each epoch is a new permutation.

Window i of a split holds the tokens i*T .. i*T + T and predicts each from those before it, so the
windows together predict every token once. Training examples are numbered without end: the first
ones are a permutation of all windows, the next ones another permutation, epoch after epoch. A batch
is B consecutive examples: a function of (fingerprint, seed, step, B, T) alone.

With `position_range` R a training window gets randomised positions (Ruoss et al., 2023): T distinct
ones of 0 .. R-1, sorted, drawn anew for every example. Validation keeps the positions 0 .. T-1, so
that its loss depends on no draw and compares runs that differ in R. (The paper, appendix B.2,
speaks of training positions only.)

Axes: B batch, T seq_len.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from prope.data.batch import AnyWindows, Batch
from prope.data.store.arrays import Store, find_store, retry_tokens
from prope.data.store.build import check_split, open_store
from prope.errors import UsageError, log, usage_error
from prope.runtime import processes, watchdog
from prope.spec.data import DataSpec

_AHEAD = 4  # batches that are computed at a time, ahead of the one that is used
_SCAN_TOKENS = 2**18  # tokens of the stream that are searched at a time


class Windows(AnyWindows):
    """The windows of one split, train, validation or all, of the token store of a config."""

    def __init__(self, data: DataSpec, vocab_size: int, split: str):
        super().__init__(data, split)
        self.store: Store = _open_on_all(data, vocab_size)
        check_split(self.store, data, split)
        if data.dataset == "files":
            self.name += f" {data.data_dir}"
        self._mask_documents = data.mask_documents
        self._bos_every_window = data.bos_every_window
        self._tokens = self.store.tokens(split)
        self.length = self._tokens.shape[0]
        self.count = -(-(self.length - 1) // self.seq_len)  # the last window may be padded
        if split == "train" and self.seq_len > self.length:
            raise usage_error(
                "config.data.seq_len",
                self.seq_len,
                f"longer than the train split of {self.name}, {self.length:,} tokens",
                "choose a shorter window, or add text",
            )

    def window_index(self, example: int, seed: int) -> int:
        """Returns the index of the window of a training example."""
        return shuffled_index(example, self.count, seed)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order."""
        T = self.seq_len
        special = self.store.special
        stream, is_token, is_prompt = self._read_stream(indices)
        is_start = is_token & (stream == special.start)
        is_predicted = is_token & ~is_prompt
        if special.bos is not None:  # elsewhere it ends the document before
            is_predicted &= ~is_start
        begun = np.cumsum(is_start, axis=1, dtype=np.int32)
        began_before = ~is_start[:, :1]
        segment_ids = np.where(is_token, begun + began_before, 0)
        positions = np.tile(np.arange(T, dtype=np.int32), (len(stream), 1))
        if self._mask_documents:
            starts = np.where(is_start[:, :-1], positions, 0)
            positions -= np.maximum.accumulate(starts, axis=1)
        if self._bos_every_window:
            stream[:, 0] = special.start
        return {
            "tokens": stream[:, :-1],
            "targets": stream[:, 1:],
            "positions": positions,
            "segment_ids": segment_ids[:, :-1].astype(np.int32),
            "weights": is_predicted[:, 1:].astype(np.float32),
        }

    def _read_stream(self, indices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads tokens [B, T + 1], which of them are no padding, and which are of a prompt."""
        T = self.seq_len
        starts = [int(index) * T for index in indices]
        rows = self._read_tokens([(start, min(start + T + 1, self.length)) for start in starts])
        stream = np.full((len(rows), T + 1), self.store.special.pad, np.int32)
        is_token = np.zeros(stream.shape, bool)
        is_prompt = np.zeros(stream.shape, bool)
        for row, elements in enumerate(rows):
            size = len(elements)
            stream[row, :size], is_prompt[row, :size] = self.store.decode(elements)
            is_token[row, :size] = True
        return stream, is_token, is_prompt

    def _read_tokens(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Reads the elements of (start, stop) spans of the stream, all at once."""

        def read() -> list[np.ndarray]:
            reads = [self._tokens[start:stop].read() for start, stop in spans]
            return [read.result() for read in reads]

        return retry_tokens(self.store.path, read)

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns the beginnings of up to `count` documents: int32, at most T tokens each.

        The stream is cut into `count` intervals. The beginning from an interval is that of the
        first document with T tokens that begins there, or of the longest one if there is none.
        """
        cuts = [self.length * number // count for number in range(count + 1)]
        starts = [self._document_start(start, stop) for start, stop in itertools.pairwise(cuts)]
        return [tokens for tokens in starts if len(tokens)]

    def _document_start(self, start: int, stop: int) -> np.ndarray:
        longest = np.zeros(0, np.int32)
        for first in range(start, stop, _SCAN_TOKENS):
            last = min(first + _SCAN_TOKENS, stop)
            end = min(last + self.seq_len, self.length)
            (elements,) = self._read_tokens([(first, end)])
            tokens, _ = self.store.decode(elements)
            starts = np.flatnonzero(tokens == self.store.special.start)
            for begin, end in itertools.pairwise([*starts, len(tokens)]):
                if begin >= last - first:
                    break
                document = tokens[begin : min(end, begin + self.seq_len)]
                longest = max(longest, document, key=len)
                if len(longest) == self.seq_len:
                    return longest
        return longest


@watchdog.paused()  # text is tokenized on first use, maybe for an hour
def _open_on_all(data: DataSpec, vocab_size: int) -> Store:
    """Opens the store in all processes of a run; the first one prepares it, without the others."""
    if processes.count() == 1:
        return open_store(data, vocab_size)
    first = processes.call_on_first(lambda: vars(open_store(data, vocab_size)))
    path = first["path"]
    fingerprint = first["fingerprint"]
    with processes.raise_on_all():
        store = find_store(path, fingerprint)
        if store is None:
            remedy = "config.data.cache_dir may be a place that hosts share"
            log.warning("%s is not seen here: made again; %s", path, remedy)
            store = open_store(data, vocab_size)
        if store.fingerprint != fingerprint:
            problem = f"is other text here ({store.path}) than in process 0 ({path})"
            raise UsageError(f"{data.dataset}: {problem}; share it")
    return store


def train_batch(windows: Windows, seed: int, batch_size: int, step: int, rows=None) -> Batch:
    """Reads the batch of update `step + 1`: the training examples step*B .. step*B + B-1.

    `rows` are those of the B rows that are read, such as the rows of a process; by default all.
    """
    rows = range(batch_size) if rows is None else rows
    examples = [step * batch_size + int(row) for row in rows]
    indices = [windows.window_index(example, seed) for example in examples]
    batch = windows.read(indices)
    limit = windows.position_range
    if limit is not None:
        for positions, example in zip(batch["positions"], examples, strict=True):
            positions[:] = randomise_positions(positions, limit, seed, example)
    return batch


def randomise_positions(positions: np.ndarray, limit: int, seed: int, example: int) -> np.ndarray:
    """Draws positions from 0 .. limit-1 for the window of a training example: int32 [T].

    They are distinct and increase from each 0 of the ordinary `positions` to the next: over the
    whole window, or within each of its documents where documents are masked. Every such choice is
    equally likely.
    """
    # Another spawn key than the permutations': their seeds must not meet.
    seeds = np.random.SeedSequence([seed, example], spawn_key=(1,))
    generator = np.random.Generator(np.random.PCG64(seeds))
    starts = np.flatnonzero(positions == 0)
    drawn = [
        np.sort(generator.choice(limit, length, replace=False, shuffle=False))
        for length in np.diff(starts, append=len(positions))
    ]
    return np.concatenate(drawn).astype(np.int32)


def shuffled_index(example: int, count: int, seed: int) -> int:
    """Returns the window of a training example; every epoch of `count` is a new permutation."""
    import grain  # takes half a second

    epoch, place = divmod(example, count)
    if count == 1:
        return 0
    seeds = np.random.SeedSequence([seed, epoch])
    key = int(seeds.generate_state(1)[0])
    shuffle = grain.experimental.index_shuffle
    return shuffle(index=place, max_index=count - 1, seed=key, rounds=4)


def prefetch(function: Callable[[int], Batch], start: int, stop: int) -> Iterator[Batch]:
    """Iterates over function(start), .., function(stop - 1); threads compute some ahead.

    Several at a time, because a batch from a bucket takes long to arrive and keeps no core busy.
    """
    import grain

    options = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
    return iter(grain.MapDataset.range(start, stop).map(function).to_iter_dataset(options))
