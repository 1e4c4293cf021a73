"""Finds a token store on disk, and reads and writes its arrays.

A store is a folder, or a prefix below a URL such as gs://bucket/stores. It has two one-dimensional
Zarr arrays, `train` and `validation`, and `index.json`, which is written last: a folder without it
is not a store. In both arrays a document is <bos>, its tokens, <eos>; with a tokenizer that has no
<bos> it is the end token, then its tokens.

With `config.data.loss_on` "targets" the store has prompts: the top bit of an element tells that
the token belongs to a prompt, which is not predicted. Other stores hold the plain ids.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import tensorstore as ts
from etils import epath

from prope.data.tokenizer import GEMMA_IDS, SpecialIds
from prope.errors import UsageError, first_line
from prope.runtime.files import (
    CONTEXT,
    files_below,
    kvstore,
    parse_json,
    raise_storage_error,
    retry_reads,
)

T = TypeVar("T")

SPLITS = ("train", "validation")
# Per split in index.json: see `Store`.
COUNTS = ("tokens", "documents", "bytes", "prompt_tokens", "unk_tokens")
FORMAT = 3  # version of the store; in its fingerprint
SHARD = 2**24  # tokens in a file
UNIGRAM_LOSSES = {  # names in index.json, by split
    "train": "train_unigram_loss",
    "validation": "unigram_loss",
    "all": "all_unigram_loss",
}
READ_TOKENS = 2**14  # tokens that are read together: a chunk, in Zarr's words
_DAMAGED = re.compile("NOT_FOUND:|DATA_LOSS:|OUT_OF_RANGE:")  # of TensorStore's errors
_SHARE_UNIT = 10_000  # the weights of a mixture are rounded to multiples of 1 / _SHARE_UNIT


@dataclasses.dataclass(frozen=True)
class Store:
    """A token store.

    `index` is the content of index.json. Per split it has `tokens, documents, bytes`, where bytes
    are those of the predicted text, `prompt_tokens`, and `unk_tokens`, which stand for text that
    the tokenizer lacks. `empty`: the number of documents without text, which are left out.
    `unigram_loss`: nats per token of the validation split under the token frequencies of the train
    split; `train_unigram_loss`: of the train split itself. `special_ids`: those of the tokenizer,
    by default Gemma's. A `split` is train, validation or all.
    Of documents that are cut for their split there is an array with all of them, whole.
    """

    path: str  # folder or URL; empty for a mixture of stores, and for generated windows
    fingerprint: str  # equal ones mean equal tokens; hash of dataset, split rule and tokenizer
    index: dict

    @property
    def special(self) -> SpecialIds:
        """The special ids of the tokenizer."""
        return SpecialIds(*self.index.get("special_ids", GEMMA_IDS))

    def tokens(self, split: str) -> ts.TensorStore:
        """Opens the split's elements, [tokens]; slices are read with `.read().result()`."""
        return ts.concat([_open_array(self.path, name) for name in self._arrays(split)], axis=0)

    def count(self, name: str, split: str) -> int:
        """Counts what one of COUNTS names, in a split."""
        # Older stores lack unk_tokens.
        return sum(self.index[array].get(name, 0) for array in self._arrays(split))

    def targets(self, split: str) -> int:
        """Counts the predicted tokens: all except every document's <bos> and the prompts.

        Without <bos>, what separates documents is predicted, but for the first of the split.
        """
        documents = self.count("documents", split)
        starts = min(documents, 1) if self.special.bos is None else documents
        return self.count("tokens", split) - starts - self.count("prompt_tokens", split)

    def unigram_loss(self, split: str) -> float:
        """Computes the loss per token under the token frequencies of the train split."""
        losses = [
            self.targets(array) * self.index[UNIGRAM_LOSSES[array]] for array in self._arrays(split)
        ]
        return sum(losses) / self.targets(split)

    def _arrays(self, split: str) -> tuple[str, ...]:
        return SPLITS if split == "all" and "all" not in self.index else (split,)

    def decode(self, elements: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Splits elements into their ids, int32, and whether they belong to a prompt, bool."""
        if not self.index["rule"]["has_prompts"]:
            return elements.astype(np.int32), np.zeros(elements.shape, bool)
        bit = prompt_bit(elements.dtype)
        return (elements & ~bit).astype(np.int32), (elements & bit) != 0


def _open_array(path: str, name: str) -> ts.TensorStore:
    spec = _spec(path, name)
    spec["fill_missing_data_reads"] = False  # what is missing is an error, not padding
    # A store does not change.
    return ts.open(spec, context=CONTEXT, open=True, read=True, recheck_cached="open").result()


def prompt_bit(dtype: np.dtype) -> np.integer:
    """Returns the top bit, which tells that a token belongs to a prompt."""
    return dtype.type(1 << (8 * dtype.itemsize - 1))


def element_dtype(vocab_size: int, has_prompts: bool) -> np.dtype:
    """Returns the dtype of a store's arrays; with prompts, one bit is not for ids."""
    uint16_ids = 2**15 if has_prompts else 2**16
    return np.dtype("uint16" if vocab_size <= uint16_ids else "uint32")


def fingerprint_of(rule: dict) -> str:
    """Hashes the JSON-able rule that determines the tokens."""
    text = json.dumps(rule, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mixture_fingerprint(weights: Sequence[float], fingerprints: Sequence[str]) -> str:
    """Hashes the shares and fingerprints of a mixture."""
    shares = integer_shares(weights)
    return fingerprint_of({"mixture": list(zip(shares, fingerprints, strict=True))})


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Returns the smallest integers in the ratio of the weights, rounded to 1 / 10,000.

    The weights sum to 1.
    """
    exact = np.multiply(weights, _SHARE_UNIT)
    shares = np.floor(exact + 1e-9).astype(int)
    most_rounded = np.argsort(shares - exact, kind="stable")
    shares[most_rounded[: _SHARE_UNIT - shares.sum()]] += 1
    if shares.min() < 1:
        problem = f"a weight is less than 1/{_SHARE_UNIT} of the sum"
        raise UsageError(f"config.data.mixture: {problem}; remove it, or make it more")
    return (shares // np.gcd.reduce(shares)).tolist()


def find_store(path: str, fingerprint: str | None = None) -> Store | None:
    """Returns the store at this path, or None if there is none.

    Raises UsageError where it is damaged, or its fingerprint is not `fingerprint`, if that is set.
    """
    try:
        entry = retry_tokens(path, lambda: kvstore(path).read("index.json").result())
    except ValueError as error:
        field = "cache_dir" if fingerprint else "store"
        problem = f"the store {path} cannot be read: {first_line(error)}"
        raise UsageError(f"config.data.{field}: {problem}") from None
    if entry.state != "value":
        return None
    try:
        index = parse_json(entry.value)
        fingerprints = [index["fingerprint"], fingerprint_of(index["rule"])]
        sizes = {split: index[split]["tokens"] for split in (*SPLITS, *index.keys() & {"all"})}
    except (ValueError, KeyError, TypeError):
        raise _unusable(path, "its index.json is damaged") from None
    expected = fingerprint or fingerprints[0]
    for fingerprint in fingerprints:
        if fingerprint != expected:
            problem = f"its fingerprint is {fingerprint}, not {expected}: it was changed or copied"
            raise _unusable(path, problem)
    store = Store(path, expected, index)
    files = retry_reads(epath.Path(path), lambda: files_below(epath.Path(path)))
    problems = []
    for split, size in sizes.items():
        if f"{split}/zarr.json" not in files:
            problems.append(f"{split}/zarr.json is missing")
            continue
        try:
            array = retry_tokens(path, functools.partial(_open_array, path, split))
        except ValueError as error:
            raise _unusable(path, f"{split} cannot be read ({first_line(error)})") from None
        if array.shape[0] != size:
            problem = f"{split} has {array.shape[0]} tokens, its index.json says {size}"
            raise _unusable(path, problem)
        problems += _shard_problems(split, array, files)
    if problems:
        raise _unusable(path, ", ".join(problems))
    return store


def _shard_problems(split: str, array: ts.TensorStore, files: dict[str, int]) -> list[str]:
    """Describes the shards of an array that are missing or not as long as they must be.

    `files` has the sizes in bytes of all files of the store. A shard holds its chunks, each with a
    checksum, and an index: two integers for each of its chunks, and a checksum.
    """
    (tokens,) = array.chunk_layout.write_chunk.shape
    (chunk,) = array.chunk_layout.read_chunk.shape
    chunk_bytes = chunk * array.dtype.numpy_dtype.itemsize + 4
    index_bytes = tokens // chunk * 16 + 4
    problems = []
    for number, start in enumerate(range(0, array.shape[0], tokens)):
        chunks = math.ceil(min(tokens, array.shape[0] - start) / chunk)
        expected = chunks * chunk_bytes + index_bytes
        name = f"{split}/c/{number}"
        size = files.get(name)
        if size is None:
            problems.append(f"{name} is missing")
        elif size != expected:
            problems.append(f"{name} has {size} bytes, not {expected}")
    return problems


def retry_tokens(path: str, read: Callable[[], T]) -> T:
    """Calls `read`, which reads from the store at `path`, with `retry_reads`.

    Raises UsageError where something of the store is missing or damaged.
    """

    def read_once() -> T:
        try:
            return read()
        except ValueError as error:
            raise_storage_error(error)
            if _DAMAGED.match(str(error)):
                raise _unusable(path, first_line(error)) from None
            raise

    return retry_reads(path, read_once)


def _unusable(path: str, problem: str) -> UsageError:
    return UsageError(f"the store {path}: {problem}; remove it to have it prepared again")


def write_array(
    path: str, split: str, dtype: np.dtype, size: int, arrays: Iterable[np.ndarray]
) -> None:
    """Writes a split of a store: arrays of `dtype` one after the other, `size` elements together.

    What is there already of the same store is written again. Raises FileExistsError where the store
    has an index: another process has finished it.
    """
    folder = kvstore(path)
    spec = _spec(path, split) | {"metadata": _metadata(dtype, size)}
    store = ts.open(spec, context=CONTEXT, create=True, open=True).result()
    writing = None
    for number, shard in enumerate(_join(arrays, SHARD)):
        if folder.read("index.json").result().state == "value":
            raise FileExistsError(path)
        if writing is not None:
            writing.result()
        start = number * SHARD
        writing = store[start : start + len(shard)].write(shard)  # while the next one is read
    if writing is not None:
        writing.result()


def _join(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the elements of all arrays in arrays of this size; the last one may be shorter."""
    waiting = []
    count = 0
    for array in arrays:
        waiting.append(array)
        count += len(array)
        while count >= size:
            joined = np.concatenate(waiting)
            yield joined[:size]
            waiting = [joined[size:]]
            count -= size
    if count:
        yield np.concatenate(waiting)


def _spec(path: str, split: str) -> dict:
    folder = kvstore(os.path.join(path, split))
    return {"driver": "zarr3", "kvstore": folder.spec().to_json()}


def _metadata(dtype: np.dtype, size: int) -> dict:
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little_endian, {"name": "crc32c"}]  # a damaged file is an error, not other text
    sharding = {"chunk_shape": [READ_TOKENS], "codecs": codecs, "index_codecs": codecs}
    return {
        "shape": [size],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "fill_value": 0,
    }
