"""Maps a training example's number to a window of several sources, interleaved by weight.

Every source keeps its own store and order of windows. Sources are interleaved evenly: any n
consecutive examples hold n times a source's share, give or take two.
"""

import bisect
import functools
import itertools

import numpy as np

from prope.data.batch import AnyWindows, Batch, padding
from prope.data.store.arrays import Store, integer_shares, mixture_fingerprint
from prope.data.tasks.windows import GeneratedWindows
from prope.data.windows import Windows
from prope.errors import log, usage_error
from prope.runtime import processes
from prope.runtime.files import absolute, as_path
from prope.spec.data import DataSpec, is_generated

_ENDLESS = 2**96  # indices of a generated source: windows of 2**64 seeds


def open_windows(
    data: DataSpec, vocab_size: int, split: str
) -> "Windows | Mixture | GeneratedWindows":
    """Returns the windows of a `config.data`: of one source, of a mixture, or generated."""
    if is_generated(data.dataset):
        return GeneratedWindows(data, vocab_size, split)
    if data.dataset == "mixture":
        return Mixture(data, vocab_size, split)
    return Windows(data, vocab_size, split)


def open_text(data: DataSpec, vocab_size: int, split: str | None, run_data: DataSpec, state: dict):
    """Opens the windows of a text to evaluate or analyse.

    With `split` None it is the validation split of a text that a run was trained on, and all of
    another text. A text is the run's if `run_data`, its config.data, names it, alone or in a
    mixture, or if it has the fingerprint in `state`, the data item of its checkpoint. An imported
    run has no text.
    """
    datasets = [source.dataset for _, source in data.weighted_sources()]
    if any(map(is_generated, datasets)):
        if split not in (None, "validation"):
            problem = f"{data.dataset} is generated, without end: only validation is finite"
            raise usage_error("--split", split, problem)
        return open_windows(data, vocab_size, "validation")
    texts = [run_data, *(source for _, source in run_data.weighted_sources())]
    is_of_run = "imported_from" not in state and _place(data) in map(_place, texts)
    if split is None and not is_of_run:
        windows = open_windows(data, vocab_size, "all")
        if windows.store.fingerprint != state.get("fingerprint"):
            return windows
    windows = open_windows(data, vocab_size, split or "validation")
    is_same = _place(data) == _place(run_data)
    if is_same and "fingerprint" in state and processes.is_first():
        _warn_if_changed(windows.name, windows.store.fingerprint, state["fingerprint"])
    return windows


@functools.cache  # one line, whatever the number of lengths and runs
def _warn_if_changed(name: str, fingerprint: str, trained_on: str) -> None:
    if fingerprint != trained_on:
        message = (
            "%s: the text, the tokenizer or the format has changed since training (%s, not %s)"
        )
        log.warning(message, name, fingerprint, trained_on)


def _place(data: DataSpec) -> tuple[str, str]:
    """Returns the dataset, and its folder in the one way in which it can be written."""
    folder = data.data_dir and str(absolute(as_path("config.data.data_dir", data.data_dir)))
    return data.dataset, folder


class Mixture(AnyWindows):
    """Has the interface of `Windows`; its windows are those of one source after the other.

    Weights count windows, so tokens: a source of weight 0.4 has 40 % of the windows of training.
    Where prompts are not predicted, sources have other shares of the predicted tokens, and so of
    the loss: `shares`.
    """

    def __init__(self, data: DataSpec, vocab_size: int, split: str):
        super().__init__(data, split)
        self.weights, sources = zip(*data.weighted_sources(), strict=True)
        self.sources = [open_windows(source, vocab_size, split) for source in sources]
        self._examples_per_cycle = integer_shares(self.weights)
        self._order, self._ranks = interleave_sources(self._examples_per_cycle)
        counts = []
        predicted = []
        for source, windows in zip(sources, self.sources, strict=True):
            is_endless = isinstance(windows, GeneratedWindows) and split == "train"
            counts.append(_ENDLESS if is_endless else windows.count)
            predicted.append(_predicted_share(source, vocab_size, windows.store))
        *self._offsets, self.count = itertools.accumulate(counts, initial=0)
        weighted = np.multiply(self.weights, predicted)
        self.shares = weighted / np.dot(self.weights, predicted)
        fingerprints = [windows.store.fingerprint for windows in self.sources]
        fingerprint = mixture_fingerprint(self.weights, fingerprints)
        ids = self.sources[0].store.special  # one tokenizer for all
        self.store = Store("", fingerprint, {"special_ids": ids})

    def window_index(self, example: int, seed: int) -> int:
        """Returns the index of the window of a training example."""
        cycle, place = divmod(example, len(self._order))
        source = self._order[place]
        source_example = cycle * self._examples_per_cycle[source] + int(self._ranks[place])
        return self._offsets[source] + self.sources[source].window_index(source_example, seed)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order, as `Windows.read` does."""
        batch = padding(len(indices), self.seq_len)
        sources = np.array([bisect.bisect(self._offsets, index) - 1 for index in indices])
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            offset = self._offsets[source]
            windows = self.sources[source].read([indices[row] - offset for row in rows])
            for name, values in windows.items():
                batch[name][rows] = values
        return batch

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns beginnings of documents, about equally many of every source."""
        starts = []
        for number, windows in enumerate(self.sources):
            turns = len(range(number, count, len(self.sources)))
            if turns:
                starts += windows.document_starts(turns)
        return starts


def _predicted_share(data: DataSpec, vocab_size: int, store: Store) -> float:
    """Computes which share of a source's tokens is predicted; if generated, from 64 windows."""
    if is_generated(data.dataset):
        windows = GeneratedWindows(data, vocab_size, "validation")
        return float(windows.read(range(64))["weights"].mean())
    tokens = store.count("tokens", "train")
    return store.targets("train") / max(tokens, 1)


def interleave_sources(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Orders sum(shares) examples: the source of each, and its rank among that source's."""
    sources = np.repeat(np.arange(len(shares)), shares)
    ranks = np.concatenate([np.arange(share) for share in shares])
    middles = (ranks + 0.5) / np.repeat(shares, shares)
    order = np.lexsort((sources, middles))
    return sources[order], ranks[order]
