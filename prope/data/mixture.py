"""Several sources by weight: which window of which source is an entry of the endless list.

Every source keeps its own store and order of windows. Sources are interleaved evenly: any n consecutive entries hold
n times a source's share, give or take two.
"""

import itertools
import math

import numpy as np
from ml_collections import ConfigDict

from prope.data.batch import Batch, padding
from prope.data.sources.find import weighted_sources
from prope.data.store.arrays import SPLITS, Store, integer_shares, mixture_fingerprint
from prope.data.synthetic import Synthetic
from prope.data.windows import Windows


def open_windows(data: ConfigDict, vocab_size: int, split: str) -> "Windows | Mixture | Synthetic":
    """Returns the windows that a run's `config.data` names: of one source, of a mixture, or generated."""
    if data.dataset.startswith("synthetic/"):
        return Synthetic(data, vocab_size, split)
    return (Mixture if data.dataset == "mixture" else Windows)(data, vocab_size, split)


class Mixture:
    """Has the interface of `Windows`. Its windows are those of the sources, one source after the other.

    The shares are those of training. Evaluation reads every validation window of every source once. The counts of
    `store.index` are sums, and its `unigram_loss` the mean over tokens, each under the frequencies of its own source.
    """

    def __init__(self, data: ConfigDict, vocab_size: int, split: str):
        weights, sources = zip(*weighted_sources(data), strict=True)
        self._windows = [Windows(source, vocab_size, split) for source in sources]
        self._shares = integer_shares(weights)
        self._sources, self._ranks = interleave_sources(self._shares)
        self._offsets = np.cumsum([0] + [windows.count for windows in self._windows])
        self.count = int(self._offsets[-1])
        self.seq_len, self.position_range = data.seq_len, data.position_range
        stores = [windows.store for windows in self._windows]
        index = {s: {name: sum(st.index[s][name] for st in stores) for name in stores[0].index[s]} for s in SPLITS}
        targets = [store.targets("validation") for store in stores]
        losses = [store.index["unigram_loss"] for store in stores]
        index["unigram_loss"] = math.fsum(t * loss for t, loss in zip(targets, losses, strict=True)) / sum(targets)
        self.store = Store("", mixture_fingerprint(weights, stores), index)

    def at(self, example: int, seed: int) -> int:
        """Returns the index of the window at entry `example` of the endless list."""
        cycle, entry = divmod(example, len(self._sources))
        source = self._sources[entry]
        example_of_source = cycle * self._shares[source] + int(self._ranks[entry])
        return int(self._offsets[source]) + self._windows[source].at(example_of_source, seed)

    def read(self, indices) -> Batch:
        """Reads the windows with these indices, in this order, as `Windows.read` does."""
        indices = np.asarray(indices, np.int64)
        sources = np.searchsorted(self._offsets, indices, side="right") - 1
        batch = padding(len(indices), self.seq_len)
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            for name, values in self._windows[source].read(indices[rows] - self._offsets[source]).items():
                batch[name][rows] = values
        return batch

    def document_starts(self, count: int) -> list[np.ndarray]:
        """Returns beginnings of documents, as `Windows.document_starts`; from every source about equally many."""
        shares = [len(range(source, count, len(self._windows))) for source in range(len(self._windows))]
        starts = (windows.document_starts(n) for windows, n in zip(self._windows, shares, strict=True) if n)
        return list(itertools.chain.from_iterable(starts))


def interleave_sources(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Orders sum(shares) entries: the source of each, and how many of that source come before it, both [entries]."""
    order = sorted(((rank + 0.5) / share, source, rank) for source, share in enumerate(shares) for rank in range(share))
    _, sources, ranks = zip(*order, strict=True)
    return np.array(sources), np.array(ranks)
