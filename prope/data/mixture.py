"""Several sources by weight: which window of which source stands at a place of the endless list.

Every source keeps a store, and an order of windows, of its own; the mixture only says whose turn it is. Turns are
spread evenly: any stretch of n places holds n times a source's share, give or take two.
"""

import dataclasses
import math

import numpy as np
from ml_collections import ConfigDict

from prope.data.sources.find import weighted
from prope.data.store import arrays as store
from prope.data.synthetic import Synthetic
from prope.data.windows import Batch, Windows


def open_windows(config: ConfigDict, vocab_size: int, split: str) -> "Windows | Mixture | Synthetic":
    """The windows that a run's `config.data` names: of one source, of a mixture, or generated."""
    if config.dataset.startswith("synthetic/"):
        return Synthetic(config, vocab_size, split)
    if config.dataset != "mixture":
        return Windows(config, vocab_size, split)
    return Mixture(config, vocab_size, split)


@dataclasses.dataclass(frozen=True)
class MixedStore:
    """What `Store` says, of several stores together.

    Attributes:
      fingerprint: of the fingerprints and the shares.
      index: sums of the stores'; `unigram_loss` is the mean over all tokens of the validation split, each under the
        frequencies of its own source.
    """

    fingerprint: str
    index: dict

    def targets(self, split: str) -> int:
        """Tokens that are predicted."""
        counts = self.index[split]
        return counts["tokens"] - counts["documents"] - counts["given"]


class Mixture:
    """Used as `Windows` is. Its windows are those of the sources, one source after the other.

    The shares are those of training. Evaluation reads every validation window of every source once.
    """

    def __init__(self, config: ConfigDict, vocab_size: int, split: str):
        sources = weighted(config)
        self._windows = [Windows(own, vocab_size, split) for _, own in sources]
        self._shares = store.whole_shares([weight for weight, _ in sources])
        self._turn, self._before = turns(self._shares)
        self._offsets = np.cumsum([0] + [windows.count for windows in self._windows])
        self.count = int(self._offsets[-1])
        self.seq_len, self.position_range = config.seq_len, config.position_range
        stores = [windows.store for windows in self._windows]
        index = {
            s: {name: sum(st.index[s][name] for st in stores) for name in stores[0].index[s]} for s in store.SPLITS
        }
        targets = [st.targets("validation") for st in stores]
        losses = [st.index["unigram_loss"] for st in stores]
        index["unigram_loss"] = math.fsum(t * loss for t, loss in zip(targets, losses, strict=True)) / sum(targets)
        self.store = MixedStore(store.mixed_fingerprint([weight for weight, _ in sources], stores), index)

    def at(self, example: int, seed: int) -> int:
        """The window at place `example` of the endless list."""
        cycle, place = divmod(example, len(self._turn))
        source = self._turn[place]
        own = cycle * self._shares[source] + int(self._before[place])
        return int(self._offsets[source]) + self._windows[source].at(own, seed)

    def read(self, indices) -> Batch:
        """The windows with these indices, in this order, as `Windows.read` gives them."""
        indices = np.asarray(indices, np.int64)
        sources = np.searchsorted(self._offsets, indices, side="right") - 1
        batch = self.empty(len(indices))
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            for name, values in self._windows[source].read(indices[rows] - self._offsets[source]).items():
                batch[name][rows] = values
        return batch

    def beginnings(self, count: int) -> list[np.ndarray]:
        """How documents begin, as `Windows.beginnings`: as many of every source, as far as that goes."""
        each = [len(range(source, count, len(self._windows))) for source in range(len(self._windows))]
        parts = [windows.beginnings(n) for windows, n in zip(self._windows, each, strict=True) if n]
        return [tokens for part in parts for tokens in part]

    def empty(self, rows: int) -> Batch:
        """Windows of padding."""
        return {name: values.copy() for name, values in self._windows[0].empty(rows).items()}


def turns(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The turns of sum(shares) places: whose each is, and how many turns the same source had before, both [places]."""
    when = [((turn + 0.5) / share, source, turn) for source, share in enumerate(shares) for turn in range(share)]
    _, source, before = zip(*sorted(when), strict=True)
    return np.array(source), np.array(before)
