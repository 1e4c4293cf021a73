"""Stages 2 to 4: documents to tokens on disk, once. Training then reads any window of them at random.

A store is a folder with two one-dimensional Zarr arrays, `train` and `validation`, and `index.json`, which is
written last: a folder without it does not count. In both arrays a document is <bos>, its tokens, <eos>.
"""

import collections
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent import futures

import numpy as np
import tensorstore as ts
from ml_collections import ConfigDict
from tqdm import tqdm

from prope.data.documents import Source, find_source
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError

SPLITS = ("train", "validation")

_FORMAT = 1  # of the store; part of the fingerprint
_PIECE = 2**14  # tokens that are read together
_SHARD = 2**24  # tokens in a file
_TASK_BYTES = 2**21  # text that a worker tokenises at a time
_FEW_BYTES = 2**26  # below this, starting workers costs more than they save

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Store:
    """Tokens on disk.

    Attributes:
      path: the folder.
      fingerprint: a hash of dataset, split rule and tokenizer; equal fingerprints mean equal tokens.
      index: what index.json says: per split `tokens, documents, bytes`; `unigram_loss`, the nats per token of the
        validation split under the token frequencies of the train split.
    """

    path: pathlib.Path
    fingerprint: str
    index: dict

    def tokens(self, split: str) -> ts.TensorStore:
        """The split's tokens, [tokens]; slices of it are read with `.read().result()`."""
        # The cache holds the shards' indices and the pieces that neighbouring windows share.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})
        return ts.open({**_spec(self.path / split), "open": True}, context=context, read=True).result()

    def targets(self, split: str) -> int:
        """Tokens that are predicted: all but every document's <bos>."""
        return self.index[split]["tokens"] - self.index[split]["documents"]


def open_store(config: ConfigDict, vocab_size: int) -> Store:
    """The token store of a run's `config.data`; prepared first where it is not there yet.

    Raises:
      UsageError: the data, the tokenizer or the vocabulary does not fit.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"config.model.vocab_size={vocab_size}: the tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids; "
            f"set config.model.vocab_size to {tokenizer.vocab_size} or more"
        )
    source = find_source(config)
    rule = {
        "format": _FORMAT,
        "source": source.identity,
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": config.validation_fraction,
    }
    fingerprint = hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]
    path = _cache_dir(config) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', source.name)}-{fingerprint}"
    if not (path / "index.json").is_file():
        _prepare(source, config, rule, fingerprint, path)
    index = json.loads((path / "index.json").read_text())
    return Store(path, fingerprint, index)


def _cache_dir(config: ConfigDict) -> pathlib.Path:
    named = config.cache_dir or os.environ.get("PROPE_CACHE")
    return pathlib.Path(named) if named else pathlib.Path.home() / ".cache" / "prope"


def _prepare(source: Source, config: ConfigDict, rule: dict, fingerprint: str, path: pathlib.Path) -> None:
    """Writes the store under another name, then renames it: it is whole or not there.

    Processes that prepare the same store at the same time each write their own; the first to finish is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(prefix=f"{path.name}.tmp-", dir=path.parent))
    except OSError as error:
        raise UsageError(f"config.data.cache_dir={path.parent}: cannot be written: {error.strerror}") from error
    try:
        index = _write_splits(source, config, work)
        for split in SPLITS:
            if not index[split]["documents"]:
                raise UsageError(
                    f"{source.name}: no document falls into the {split} split with "
                    f"config.data.validation_fraction={config.validation_fraction}; change it, or bring more documents"
                )
        index |= {"rule": rule, "fingerprint": fingerprint}
        (work / "index.json").write_text(json.dumps(index, indent=2))
        try:
            work.rename(path)
        except OSError:  # another process was first
            if not (path / "index.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_splits(source: Source, config: ConfigDict, folder: pathlib.Path) -> dict:
    tokenizer = load_tokenizer(config.tokenizer)
    writers = {split: _Writer(folder / split, tokenizer.vocab_size) for split in SPLITS}
    totals = {split: collections.Counter(tokens=0, documents=0, bytes=0) for split in SPLITS}
    log.info("data: packing %s (about %.1f MB of text) into %s", source.name, source.num_bytes / 1e6, folder.parent)
    with tqdm(total=source.num_bytes, unit="B", unit_scale=True, desc="data", disable=not sys.stderr.isatty()) as bar:
        for packed in _packed_tasks(source, config):
            for split, (tokens, documents, size) in packed.items():
                writers[split].write(tokens)
                totals[split].update(tokens=len(tokens), documents=documents, bytes=size)
                bar.update(size)
    counts = {split: writers[split].close() for split in SPLITS}
    for split in SPLITS:
        counts[split][tokenizer.bos] = 0  # never predicted
    share = (counts["train"] + 1) / (counts["train"] + 1).sum()
    unigram_loss = float(-(counts["validation"] * np.log(share)).sum() / max(counts["validation"].sum(), 1))
    return {**{split: dict(totals[split]) for split in SPLITS}, "unigram_loss": unigram_loss}


def _packed_tasks(source: Source, config: ConfigDict) -> Iterator[dict]:
    """`_pack` of every task, in order, on as many processes as the amount of text is worth."""
    arguments = (config.tokenizer, config.validation_fraction)
    workers = config.num_workers or os.cpu_count() or 1
    if workers == 1 or source.num_bytes < _FEW_BYTES:
        _start_worker(*arguments)
        yield from map(_pack, _tasks(source.documents()))
        return
    with futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, arguments) as pool:
        waiting = collections.deque()
        for task in _tasks(source.documents()):
            waiting.append(pool.submit(_pack, task))
            if len(waiting) > 2 * workers:  # bounds the memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _tasks(documents: Iterator[bytes]) -> Iterator[list[bytes]]:
    task, size = [], 0
    for document in documents:
        if document.strip():  # an empty document says nothing
            task.append(document)
            size += len(document)
        if size >= _TASK_BYTES:
            yield task
            task, size = [], 0
    yield task


def _start_worker(tokenizer: str, validation_fraction: float) -> None:
    global _tokenizer, _validation_fraction
    _tokenizer, _validation_fraction = load_tokenizer(tokenizer), validation_fraction


def _pack(documents: list[bytes]) -> dict[str, tuple[np.ndarray, int, int]]:
    """Per split: <bos>, tokens, <eos> of its documents in a row, how many they are, and their bytes."""
    parts = {split: [np.empty(0, np.int32)] for split in SPLITS}
    number, size = collections.Counter(), collections.Counter()
    for document in documents:
        split = "validation" if is_validation(document, _validation_fraction) else "train"
        parts[split] += [[_tokenizer.bos], _tokenizer.encode(document), [_tokenizer.eos]]
        number[split] += 1
        size[split] += len(document)
    return {split: (np.concatenate(parts[split]), number[split], size[split]) for split in SPLITS}


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document is held out: decided by a hash of its text, so it depends on nothing else."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


class _Writer:
    """Appends tokens to a Zarr array, shard by shard, and counts how often each occurs."""

    def __init__(self, path: pathlib.Path, vocab_size: int):
        dtype = np.dtype("uint16" if vocab_size <= 2**16 else "uint32")
        self._array = ts.open({**_spec(path), "metadata": _metadata(dtype), "create": True}).result()
        self._pending = np.empty(0, dtype)
        self._written = 0
        self._counts = np.zeros(vocab_size, np.int64)

    def write(self, tokens: np.ndarray) -> None:
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        self._pending = np.concatenate([self._pending, tokens.astype(self._pending.dtype)])
        while len(self._pending) >= _SHARD:
            self._flush(_SHARD)

    def close(self) -> np.ndarray:
        """Writes the rest; returns the counts [vocab]."""
        self._flush(len(self._pending))
        self._array.resize(exclusive_max=[self._written], resize_metadata_only=True).result()
        return self._counts

    def _flush(self, length: int) -> None:
        self._array[self._written : self._written + length].write(self._pending[:length]).result()
        self._pending = self._pending[length:]
        self._written += length


def _spec(path: pathlib.Path) -> dict:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}


def _metadata(dtype: np.dtype) -> dict:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checked = [little, {"name": "crc32c"}]  # a damaged file is an error, not other text
    pieces = {"chunk_shape": [_PIECE], "codecs": checked, "index_codecs": checked}
    return {
        "shape": [2**48],  # cut to the number of tokens at the end
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_SHARD]}},
        "codecs": [{"name": "sharding_indexed", "configuration": pieces}],
        "fill_value": 0,
    }
