"""Several sources by weight: which window of which source is an entry of the endless list.

Every source keeps its own store and order of windows. Sources are interleaved evenly: any n consecutive entries hold
n times a source's share, give or take two.
"""

import bisect
import itertools

import numpy as np
from ml_collections import ConfigDict

from prope.config import is_generated
from prope.data.batch import Batch, padding
from prope.data.sources.find import weighted_sources
from prope.data.store.arrays import Store, integer_shares, mixture_fingerprint
from prope.data.tasks.windows import GeneratedWindows
from prope.data.windows import Windows
from prope.errors import UsageError

_ENDLESS = 2**96  # indices of a generated source: windows of 2**64 seeds


def open_windows(
    data: ConfigDict, vocab_size: int, split: str
) -> "Windows | Mixture | GeneratedWindows":
    """Returns the windows that a run's `config.data` names: of one source, of a mixture, or generated."""
    if is_generated(data.dataset):
        return GeneratedWindows(data, vocab_size, split)
    return (Mixture if data.dataset == "mixture" else Windows)(data, vocab_size, split)


def open_text(
    data: ConfigDict, vocab_size: int, split: str | None, run_data: ConfigDict, state: dict
):
    """Opens the windows of a text to evaluate or analyse.

    With `split` None it is the validation split of a text that a run was trained on, and all of another text. The run's
    own are named by its config.data, alone or in a mixture, or have the fingerprint in `state`, its checkpoint's data
    item. An imported run has none.
    """
    texts = (
        []
        if "imported_from" in state
        else [run_data, *(source for _, source in weighted_sources(run_data))]
    )
    if any(is_generated(source.dataset) for _, source in weighted_sources(data)):
        if split not in (None, "validation"):
            raise UsageError(
                f"--split={split}: {data.dataset} is generated, without end: only validation is finite"
            )
    elif split is None and (data.dataset, data.data_dir) not in [
        (text.dataset, text.data_dir) for text in texts
    ]:
        windows = open_windows(data, vocab_size, "all")
        if windows.store.fingerprint != state.get("fingerprint"):
            return windows
    return open_windows(data, vocab_size, split or "validation")


class Mixture:
    """Has the interface of `Windows`. Its windows are those of the sources, one source after the other.

    Weights count windows, so tokens: a source of weight 0.4 has 40 % of the windows of training. Where prompts are not
    predicted, sources have other shares of the predicted tokens, and so of the loss: `shares`.
    """

    def __init__(self, data: ConfigDict, vocab_size: int, split: str):
        self.weights, sources = zip(*weighted_sources(data), strict=True)
        self.split, self.seq_len, self.position_range = split, data.seq_len, data.position_range
        self.sources = [open_windows(source, vocab_size, split) for source in sources]
        self._parts = integer_shares(self.weights)
        self._order, self._ranks = interleave_sources(self._parts)
        counts = [
            _ENDLESS if isinstance(w, GeneratedWindows) and split == "train" else w.count
            for w in self.sources
        ]
        *self._offsets, self.count = itertools.accumulate(counts, initial=0)
        stores = [windows.store for windows in self.sources]
        predicted = [
            _predicted_share(source, vocab_size, store)
            for source, store in zip(sources, stores, strict=True)
        ]
        self.shares = np.multiply(self.weights, predicted) / np.dot(self.weights, predicted)
        self.store = Store(
            "", mixture_fingerprint(self.weights, [store.fingerprint for store in stores]), {}
        )

    def window_index(self, example: int, seed: int) -> int:
        """Returns the index of the window at entry `example` of the endless list."""
        cycle, entry = divmod(example, len(self._order))
        source = self._order[entry]
        example_of_source = cycle * self._parts[source] + int(self._ranks[entry])
        return self._offsets[source] + self.sources[source].window_index(example_of_source, seed)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order, as `Windows.read` does."""
        sources = [bisect.bisect(self._offsets, index) - 1 for index in indices]
        batch = padding(len(indices), self.seq_len)
        for source in set(sources):
            rows = [row for row, of_row in enumerate(sources) if of_row == source]
            of_source = self.sources[source].read(
                [indices[row] - self._offsets[source] for row in rows]
            )
            for name, values in of_source.items():
                batch[name][rows] = values
        return batch

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns beginnings of documents, as `Windows.document_starts`; from every source about equally many."""
        counts = [
            len(range(source, count, len(self.sources))) for source in range(len(self.sources))
        ]
        starts = (
            windows.document_starts(n) for windows, n in zip(self.sources, counts, strict=True) if n
        )
        return list(itertools.chain.from_iterable(starts))


def _predicted_share(data: ConfigDict, vocab_size: int, store: Store) -> float:
    """Computes which share of a source's tokens is predicted; of generated windows, in 64 of them."""
    if is_generated(data.dataset):
        return float(
            GeneratedWindows(data, vocab_size, "validation").read(range(64))["weights"].mean()
        )
    return store.targets("train") / max(store.count("tokens", "train"), 1)


def interleave_sources(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Orders sum(shares) entries: the source of each, and how many of that source come before it, both [entries]."""
    order = sorted(
        ((rank + 0.5) / share, source, rank)
        for source, share in enumerate(shares)
        for rank in range(share)
    )
    _, sources, ranks = zip(*order, strict=True)
    return np.array(sources), np.array(ranks)
