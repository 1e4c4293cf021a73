"""A token store on disk: how it is found, and how any window of it is read.

A store is a folder, or a prefix below a URL such as gs://bucket/stores. It has two one-dimensional Zarr arrays,
`train` and `validation`, and `index.json`, which is written last: a folder without it is not a store. In both arrays
a document is <bos>, its tokens, <eos>.

With `config.data.loss_on` "targets" the top bit of an element marks the tokens of a prompt, which are not predicted.
index.json calls this `has_prompts` and counts them as `given`. Other stores hold the plain ids.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence

import numpy as np
import tensorstore as ts

from prope.errors import UsageError, first_line
from prope.runtime.files import CONTEXT, kvstore

SPLITS = ("train", "validation")
COUNTS = ("tokens", "documents", "bytes", "prompt_tokens")  # per split in index.json: see `Store`
PARTS = {
    "train": ("train",),
    "validation": ("validation",),
    "all": SPLITS,
}  # arrays of what can be read

FORMAT = 3  # of the store; in its fingerprint
_READ_TOKENS = 2**14  # tokens that are read together: a chunk, in Zarr's words
SHARD = 2**24  # tokens in a file
_SHARE_UNIT = 10_000  # the weights of a mixture are rounded to multiples of 1 / _SHARE_UNIT


@dataclasses.dataclass(frozen=True)
class Store:
    """A token store.

    `index` is the content of index.json. Per split `tokens, documents, bytes, given`: bytes of the predicted text,
    tokens of the prompts. `empty`: the number of documents without text, which are left out. `unigram_loss`: nats per
    token of the validation split under the token frequencies of the train split; `train_unigram_loss`: of the train
    split itself. A `split` is train, validation or all.
    """

    path: str  # folder or URL; empty for a mixture of stores, and for generated windows
    fingerprint: (
        str  # hash of dataset, split rule and tokenizer; equal fingerprints mean equal tokens
    )
    index: dict

    def tokens(self, split: str) -> ts.TensorStore:
        """Opens the split's elements, [tokens]; slices are read with `.read().result()`."""
        check = {
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
        }  # a store does not change
        specs = [_spec(self.path, part) | check for part in PARTS[split]]
        return ts.concat(
            [ts.open(spec, context=CONTEXT, open=True, read=True).result() for spec in specs],
            axis=0,
        )

    def count(self, name: str, split: str) -> int:
        """Counts the `tokens, documents, bytes` or `given` tokens of a split."""
        return sum(self.index[part][name] for part in PARTS[split])

    def targets(self, split: str) -> int:
        """Counts the predicted tokens: all but every document's <bos> and the prompts."""
        return (
            self.count("tokens", split)
            - self.count("documents", split)
            - self.count("prompt_tokens", split)
        )

    def unigram_loss(self, split: str) -> float:
        """Computes the loss per token under the token frequencies of the train split."""
        names = {"train": "train_unigram_loss", "validation": "unigram_loss"}
        return sum(
            self.targets(part) * self.index[names[part]] for part in PARTS[split]
        ) / self.targets(split)

    def decode(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits elements of any shape into their ids, int32, and whether they belong to a prompt, bool."""
        if not self.index["rule"]["has_prompts"]:
            return elements.astype(np.int32), np.zeros(elements.shape, bool)
        bit = prompt_bit(elements.dtype)
        return (elements & ~bit).astype(np.int32), (elements & bit) != 0


def prompt_bit(dtype: np.dtype) -> np.integer:
    """Returns the bit that marks a token of a prompt: the top one."""
    return dtype.type(1 << (8 * dtype.itemsize - 1))


def element_dtype(vocab_size: int, has_prompts: bool) -> np.dtype:
    """Returns the dtype of a store's arrays; `has_prompts`: one bit is the prompt's."""
    return np.dtype("uint16" if vocab_size <= (2**15 if has_prompts else 2**16) else "uint32")


def fingerprint_of(rule: dict) -> str:
    """Hashes the JSON-able rule that determines the tokens."""
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]


def mixture_fingerprint(weights: Sequence[float], fingerprints: Sequence[str]) -> str:
    """Hashes the shares and fingerprints of a mixture."""
    return fingerprint_of(
        {"mixture": list(zip(integer_shares(weights), fingerprints, strict=True))}
    )


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the ratio of the weights, which sum to 1 and are rounded to 1 / 10,000."""
    exact = [weight * _SHARE_UNIT for weight in weights]
    shares = [math.floor(value + 1e-9) for value in exact]
    for source in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[
        : _SHARE_UNIT - sum(shares)
    ]:
        shares[source] += 1
    if min(shares) < 1:
        allowed = f"1/{_SHARE_UNIT} of the sum"
        raise UsageError(
            f"config.data.mixture: a weight is less than {allowed}; remove it, or make it more"
        )
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def find_store(path: str, fingerprint: str | None = None) -> Store | None:
    """Returns the store at this path, None if there is none; raises UsageError where it is not the one asked for.

    With `fingerprint` None it may be any that is whole.
    """
    remedy = "remove it to have it prepared again"
    try:
        entry = kvstore(path).read("index.json").result()
    except Exception as error:  # as many types as there are kinds of storage
        field = "cache_dir" if fingerprint else "store"
        raise UsageError(
            f"config.data.{field}: the store {path} cannot be read: {first_line(error)}"
        ) from None
    if entry.state != "value":
        return None
    try:
        index = json.loads(entry.value)
        fingerprint = fingerprint or index["fingerprint"]
        others = [
            name
            for name in (index["fingerprint"], fingerprint_of(index["rule"]))
            if name != fingerprint
        ]
        sizes = [index[split]["tokens"] for split in SPLITS]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"the store {path}: its index.json is damaged; {remedy}") from None
    if others:
        differs = f"its fingerprint is {others[0]}, not {fingerprint}"
        raise UsageError(f"the store {path}: {differs}: it was changed or copied; {remedy}")
    store = Store(path, fingerprint, index)
    for split, size in zip(SPLITS, sizes, strict=True):
        try:
            length = store.tokens(split).shape[0]
        except ValueError as error:
            raise UsageError(
                f"the store {path}: {split} cannot be read ({first_line(error)}); {remedy}"
            ) from None
        if length != size:
            raise UsageError(
                f"the store {path}: {split} has {length} tokens, its index.json says {size}; {remedy}"
            )
    return store


def write_array(
    path: str, split: str, dtype: np.dtype, size: int, arrays: Iterable[np.ndarray]
) -> None:
    """Writes a split of a new store: arrays of `dtype` one after the other, `size` elements together."""
    store = ts.open(
        _spec(path, split) | {"metadata": _metadata(dtype, size)}, context=CONTEXT, create=True
    ).result()
    shard, start, filled, writing = np.empty(SHARD, dtype), 0, 0, None
    for array in arrays:
        while len(array):
            taken, array = np.split(array, [SHARD - filled])
            shard[filled : filled + len(taken)] = taken
            filled += len(taken)
            if filled == SHARD or start + filled == size:
                if writing:
                    writing.result()
                writing = store[start : start + filled].write(shard[:filled])
                shard, start, filled = (
                    np.empty_like(shard),
                    start + filled,
                    0,
                )  # the other is being written meanwhile
    if writing:
        writing.result()


def _spec(path: str, split: str) -> dict:
    return {"driver": "zarr3", "kvstore": kvstore(os.path.join(path, split)).spec().to_json()}


def _metadata(dtype: np.dtype, size: int) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checked = [little, {"name": "crc32c"}]  # a damaged file is an error, not other text
    sharding = {"chunk_shape": [_READ_TOKENS], "codecs": checked, "index_codecs": checked}
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [SHARD]}}
    return {
        "shape": [size],
        "data_type": dtype.name,
        "chunk_grid": grid,
        "codecs": codecs,
        "fill_value": 0,
    }
