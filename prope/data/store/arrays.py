"""Tokens on disk: what a store is, how it is found and how any window of it is read.

A store is a folder, or a prefix below a URL such as gs://bucket/stores, with two one-dimensional Zarr arrays,
`train` and `validation`, and `index.json`, which is written last: a folder without it does not count. In both
arrays a document is <bos>, its tokens, <eos>.

Where `config.data.loss_on` is "targets", the top bit of an element is set for tokens that are given and not to be
predicted; `Store.ids_and_given` takes the two apart. Other stores hold the plain ids.
"""

import dataclasses
import hashlib
import json
import math
import pathlib

import numpy as np
import tensorstore as ts

from prope.errors import UsageError

SPLITS = ("train", "validation")

FORMAT = 2  # of the store; part of the fingerprint
_PIECE = 2**14  # tokens that are read together
SHARD = 2**24  # tokens in a file
_PARTS = 10_000  # the weights of a mixture are rounded to this part

# One for the process: its cache holds the shards' indices and the pieces that neighbouring windows share.
CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})


@dataclasses.dataclass(frozen=True)
class Store:
    """Tokens on disk.

    Attributes:
      path: the folder, or the URL.
      fingerprint: a hash of dataset, split rule and tokenizer; equal fingerprints mean equal tokens.
      index: what index.json says: per split `tokens, documents, bytes, given`, where bytes are those of the text to
        predict and given counts the tokens that are not to be predicted; `empty`, how many documents were left out
        for having no text; `unigram_loss`, the nats per token of the validation split under the token frequencies
        of the train split.
    """

    path: str
    fingerprint: str
    index: dict

    def tokens(self, split: str) -> ts.TensorStore:
        """The split's elements, [tokens]; slices of it are read with `.read().result()`."""
        return open_array(self.path, split)

    def targets(self, split: str) -> int:
        """Tokens that are predicted: all but every document's <bos> and what is given."""
        counts = self.index[split]
        return counts["tokens"] - counts["documents"] - counts["given"]

    def ids_and_given(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Elements of an array, of any shape: their ids, int32, and which of them are given, bool."""
        if not self.index["rule"]["marked"]:
            return elements.astype(np.int32), np.zeros(elements.shape, bool)
        top = mark(elements.dtype)
        return (elements & ~top).astype(np.int32), (elements & top) != 0


def mark(dtype: np.dtype) -> np.integer:
    """The bit that says: this token is given."""
    return np.dtype(dtype).type(1 << (8 * np.dtype(dtype).itemsize - 1))


def dtype_of(vocab_size: int, marked: bool) -> np.dtype:
    """Of the arrays of a store."""
    return np.dtype("uint16" if vocab_size <= (2**15 if marked else 2**16) else "uint32")


def fingerprint_of(rule: dict) -> str:
    """The name of the tokens that this rule makes."""
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]


def mixed_fingerprint(weights: list[float], stores: list[Store]) -> str:
    """The name of what these stores hold together."""
    named = [[share, st.fingerprint] for share, st in zip(whole_shares(weights), stores, strict=True)]
    return fingerprint_of({"mixture": named})


def whole_shares(weights: list[float]) -> list[int]:
    """Whole numbers that stand to each other as the weights, which sum to 1, do; the least such."""
    exact = [weight * _PARTS for weight in weights]
    shares = [math.floor(value + 1e-9) for value in exact]
    for source in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: _PARTS - sum(shares)]:
        shares[source] += 1
    if min(shares) < 1:
        raise UsageError(
            f"config.data.mixture: a weight is less than 1/{_PARTS} of the sum; remove it, or make it more"
        )
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def is_url(place: str) -> bool:
    """Whether a place is a URL; otherwise it is a folder."""
    return "://" in place


def join(place: str, name: str) -> str:
    """A place below a place."""
    return f"{place.rstrip('/')}/{name}"


def keys(place: str) -> ts.KvStore:
    """The files below a place, a folder or a URL."""
    spec = place.rstrip("/") + "/" if is_url(place) else {"driver": "file", "path": f"{pathlib.Path(place).resolve()}/"}
    return ts.KvStore.open(spec, context=CONTEXT).result()


def find_store(place: str, fingerprint: str) -> Store | None:
    """The store at this place, or None where there is none.

    Raises:
      UsageError: what is there cannot be read, or is not what its name says.
    """
    remedy = "remove it to have it prepared again"
    try:
        found = keys(place).read("index.json").result()
    except Exception as error:  # as many types as there are kinds of storage
        raise UsageError(f"config.data.cache_dir: the store {place} cannot be read: {first_line(error)}") from None
    if found.state != "value":
        return None
    try:
        index = json.loads(found.value)
        says, made_by, sizes = index["fingerprint"], fingerprint_of(index["rule"]), [index[s]["tokens"] for s in SPLITS]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"the store {place}: its index.json is damaged; {remedy}") from None
    if not fingerprint == says == made_by:
        other = says if says != fingerprint else made_by
        raise UsageError(
            f"the store {place}: its fingerprint is {other}, not {fingerprint}: it was changed or copied; {remedy}"
        )
    store = Store(place, fingerprint, index)
    for split, size in zip(SPLITS, sizes, strict=True):
        try:
            there = store.tokens(split).shape[0]
        except ValueError as error:
            raise UsageError(f"the store {place}: {split} cannot be read ({first_line(error)}); {remedy}") from None
        if there != size:
            raise UsageError(f"the store {place}: {split} has {there} tokens, its index.json says {size}; {remedy}")
    return store


def first_line(error: Exception) -> str:
    """The first line of what an exception says."""
    return str(error).split("\n")[0] or type(error).__name__


def open_array(place: str, split: str) -> ts.TensorStore:
    """The array of a split, to be read."""
    once = {"recheck_cached_data": "open", "recheck_cached_metadata": "open"}  # what is written does not change
    return ts.open(_spec(place, split) | once, context=CONTEXT, open=True, read=True).result()


class Writer:
    """Appends elements to a new array, shard by shard, and counts how often each id is predicted."""

    def __init__(self, place: str, split: str, vocab_size: int, marked: bool):
        dtype = dtype_of(vocab_size, marked)
        spec = _spec(place, split) | {"metadata": _metadata(dtype)}
        self._array = ts.open(spec, context=CONTEXT, create=True).result()
        self._pending, self._filled, self._written = np.empty(SHARD, dtype), 0, 0
        self._marked, self._writing = marked, None
        self.counts = np.zeros(vocab_size, np.int64)

    def write(self, elements: np.ndarray) -> None:
        """Appends elements [tokens]."""
        predicted = elements[(elements & mark(elements.dtype)) == 0] if self._marked else elements
        self.counts += np.bincount(predicted, minlength=len(self.counts))
        while len(elements):
            taken = min(len(elements), SHARD - self._filled)
            self._pending[self._filled : self._filled + taken] = elements[:taken]
            self._filled += taken
            elements = elements[taken:]
            if self._filled == SHARD:
                self._flush()

    def close(self) -> None:
        """Writes the rest."""
        self._flush()
        self._writing.result()
        self._array.resize(exclusive_max=[self._written], resize_metadata_only=True).result()

    def _flush(self) -> None:
        if self._writing is not None:
            self._writing.result()
        stop = self._written + self._filled
        self._writing = self._array[self._written : stop].write(self._pending[: self._filled])
        self._pending = np.empty_like(self._pending)  # the other is being written meanwhile
        self._written, self._filled = stop, 0


def _spec(place: str, split: str) -> dict:
    return {"driver": "zarr3", "kvstore": keys(join(place, split)).spec().to_json()}


def _metadata(dtype: np.dtype) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checked = [little, {"name": "crc32c"}]  # a damaged file is an error, not other text
    pieces = {"chunk_shape": [_PIECE], "codecs": checked, "index_codecs": checked}
    return {
        "shape": [2**48],  # cut to the number of tokens at the end
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD]}},
        "codecs": [{"name": "sharding_indexed", "configuration": pieces}],
        "fill_value": 0,
    }


def everything() -> ts.KvStore.KeyRange:
    """All files below a place."""
    return ts.KvStore.KeyRange("", "")
