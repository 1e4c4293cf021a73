"""Builds a token store from a source of documents, once.

Workers pack chunks of the source into files, in any order. When all are there, they are concatenated into the store,
whose index is written last: without it, it is not a store. A killed process leaves chunks that the next one reuses.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import tensorstore as ts
from ml_collections import ConfigDict

from prope.config import is_generated
from prope.data.sources.base import MissingText, Source
from prope.data.sources.find import find_source, weighted_sources
from prope.data.store import arrays, pack, workers
from prope.data.store.arrays import COUNTS, SPLITS, Store, find_store
from prope.data.store.lock import write_lock
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import BOS, load_tokenizer
from prope.errors import RunFailed, UsageError, first_line, is_disk_full, log
from prope.runtime.files import is_url, kvstore, local_cache

_SETTINGS = (
    "dataset",
    "text_feature",
    "template",
    "loss_on",
    "validation_fraction",
)  # that a store is made with


def open_store(data: ConfigDict, vocab_size: int, stats: dict | None = None) -> Store:
    """Returns the token store of one source's `config.data`, and prepares it first if it does not exist.

    If the store was prepared, `stats` is filled with `tokens, workers, tokenizer_seconds, worker_seconds`. Raises
    UsageError where the data, the tokenizer or the size of the model's vocabulary does not fit.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    if vocab_size < tokenizer.vocab_size:
        size = f"the tokenizer {data.tokenizer} has {tokenizer.vocab_size} ids"
        remedy = f"set config.model.vocab_size to {tokenizer.vocab_size} or more"
        raise UsageError(f"config.model.vocab_size={vocab_size}: {size}; {remedy}")
    if data.store:
        return _open_at(data.store, data, tokenizer.fingerprint)
    cache = data.cache_dir or str(local_cache())
    try:
        source = find_source(data)
    except MissingText as error:
        path = os.path.join(cache, _entry(cache, data, tokenizer.fingerprint) or "")
        if find_store(path) is None:
            raise
        log.warning("%s. Its store is used as it was made, %s", str(error).split(";")[0], path)
        return _open_at(path, data, tokenizer.fingerprint)
    rule = {"format": arrays.FORMAT, "source": source.identity, "tokenizer": tokenizer.fingerprint}
    rule |= {
        "validation_fraction": data.validation_fraction,
        "has_prompts": data.loss_on == "targets",
    }
    fingerprint = arrays.fingerprint_of(rule)
    name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', source.name)}-{fingerprint}"
    path = os.path.join(cache, name)
    if (store := find_store(path, fingerprint)) is None:
        with (
            _named_errors(cache),
            write_lock(cache, name, lambda: find_store(path, fingerprint)) as is_writer,
        ):
            if is_writer:
                _write_store(source, data, rule, path, {} if stats is None else stats)
        store = find_store(path, fingerprint)
    if data.data_dir:
        _entry(cache, data, tokenizer.fingerprint, name)
    return store


def _open_at(path: str, data: ConfigDict, tokenizer: str) -> Store:
    """Opens a store by its place; raises UsageError where it was made with other settings or another tokenizer."""
    if (store := find_store(path)) is None:
        raise UsageError(
            f"config.data.store={path}: is no token store; give what prope.data.prepare prints as store"
        )
    rule, source = store.index["rule"], store.index["rule"]["source"]
    if rule["format"] != arrays.FORMAT:
        raise UsageError(
            f"the store {path}: has format {rule['format']}, not {arrays.FORMAT}; prepare it again"
        )
    made_with = (
        {"template": ""} | rule | source | {"loss_on": "targets" if rule["has_prompts"] else "all"}
    )
    for name in _SETTINGS:
        if data[name] != (value := made_with.get(name, data[name])):
            raise UsageError(
                f"config.data.{name}={data[name]}: the store {path} was made with {value!r}; set that"
            )
    if rule["tokenizer"] != tokenizer:
        other = f"the store {path} was made with {rule['tokenizer']} (sha256 of the model)"
        raise UsageError(
            f"config.data.tokenizer={data.tokenizer}: is {tokenizer}, and {other}; give that one"
        )
    return store


def _entry(cache: str, data: ConfigDict, tokenizer: str, name: str | None = None) -> str | None:
    """Returns the name of the store that this config last had in a cache, or keeps `name` as such.

    It is what finds the store when the text is gone: fingerprints are of the text.
    """
    place = data.data_dir if is_url(data.data_dir) else str(pathlib.Path(data.data_dir).resolve())
    entry = {field: data[field] for field in _SETTINGS} | {
        "data_dir": place,
        "tokenizer": tokenizer,
    }
    key = f"by_config/{arrays.fingerprint_of(entry)}.json"
    with contextlib.suppress(
        ValueError
    ):  # damaged, or in a cache of others, which may be read only
        entries = kvstore(cache)
        known = entries.read(key).result().value
        if name and known != (new := json.dumps(entry | {"store": name}, indent=2).encode()):
            entries.write(key, new).result()
        return name or json.loads(known or b"{}").get("store")
    return name


def check_split(store: Store, data: ConfigDict, split: str) -> None:
    """Raises UsageError where no document of the store of `config.data` is in the split."""
    if not store.count("documents", split):
        fraction = f"config.data.validation_fraction={data.validation_fraction}; change it, or add documents"
        raise UsageError(
            f"{data.dataset}: no document falls into the {split} split with {fraction}"
        )


@contextlib.contextmanager
def _named_errors(cache: str):
    """Re-raises errors of the storage and of workers as one line that names them."""
    try:
        yield
    except (UsageError, RunFailed):
        raise
    except BrokenProcessPool:
        killed = "a worker was killed, most likely for want of memory: finished chunks are kept"
        remedy = "run the same command again with a smaller config.data.num_workers"
        raise RunFailed(f"{killed}; {remedy}") from None
    except Exception as error:
        if is_disk_full(error):
            place = (
                f"PROPE_CACHE={local_cache()}"
                if is_url(cache)
                else f"config.data.cache_dir={cache}"
            )
            full = "the disk is full; a store needs room for itself and, until it is done, for its chunks"
            remedy = "Finished chunks are kept: free some space and run the same command again"
            raise UsageError(f"{place}: {full}. {remedy}") from error
        if isinstance(error, OSError) or (isinstance(error, ValueError) and is_url(cache)):
            reason = getattr(error, "strerror", None) or first_line(error)
            raise UsageError(
                f"config.data.cache_dir={cache}: cannot be written: {reason}"
            ) from error
        raise


def _write_store(source: Source, data: ConfigDict, rule: dict, path: str, stats: dict) -> None:
    """Writes the store; the caller holds its lock."""
    name = path.split("/")[-1]
    chunks = pathlib.Path(
        local_cache() if is_url(path) else pathlib.Path(path).parent, f"{name}.chunks"
    )
    records = workers.pack_chunks(source, data, rule["has_prompts"], chunks, stats)
    index = {
        split: {name: sum(r[split][name] for r in records) for name in COUNTS} for split in SPLITS
    }
    index["empty"] = sum(record["empty"] for record in records)
    if index["empty"]:
        first = next(
            chunk.key
            for chunk, record in zip(source.chunks, records, strict=True)
            if record["empty"]
        )
        log.info(
            "data: %d documents without text were left out, the first in %s", index["empty"], first
        )
    if not any(index[split]["documents"] for split in SPLITS):
        raise UsageError(f"{source.name}: has no document with text; add some")
    index |= {"rule": rule, "fingerprint": arrays.fingerprint_of(rule)}
    store = kvstore(path)
    store.delete_range(ts.KvStore.KeyRange()).result()  # what a killed process left
    try:
        index |= _concatenate(path, data, rule["has_prompts"], chunks, records)
        store.write("index.json", json.dumps(index, indent=2).encode()).result()
    except Exception:  # such as a full disk
        store.delete_range(ts.KvStore.KeyRange()).result()
        raise
    shutil.rmtree(chunks, ignore_errors=True)


def _concatenate(
    path: str, data: ConfigDict, has_prompts: bool, chunks: pathlib.Path, records: list[dict]
) -> dict:
    """Writes the two arrays; returns the losses of predicting by token frequencies (`unigram_loss` in the index)."""
    vocab_size = load_tokenizer(data.tokenizer).vocab_size
    dtype = arrays.element_dtype(vocab_size, has_prompts)
    counts = {split: np.zeros(vocab_size, np.int64) for split in SPLITS}

    def read(split: str) -> Iterator[np.ndarray]:
        for number, record in enumerate(records):
            elements = pack.read_elements(chunks, number, split, record, dtype)
            counts[split] += np.bincount(
                elements[elements < vocab_size], minlength=vocab_size
            )  # not the prompts
            yield elements

    for split in SPLITS:
        arrays.write_array(
            path, split, dtype, sum(record[split]["tokens"] for record in records), read(split)
        )
        counts[split][BOS] = 0  # never predicted
    share = (counts["train"] + 1) / (counts["train"] + 1).sum()
    losses = {
        split: float(-(n * np.log(share)).sum() / max(n.sum(), 1)) for split, n in counts.items()
    }
    return {"unigram_loss": losses["validation"], "train_unigram_loss": losses["train"]}


def prepare(config: ConfigDict) -> dict:
    """Prepares every source of a run's config.data; returns what the command prints."""
    weights, sources = zip(*weighted_sources(config.data), strict=True)
    results = [_prepare_source(source, config.model.vocab_size) for source in sources]
    if config.data.dataset != "mixture":
        return results[0]
    total = {
        name: sum(result[name] for result in results)
        for name in ("tokens", "documents", "bytes", "seconds")
    }
    total["fingerprint"] = arrays.mixture_fingerprint(
        weights, [result["fingerprint"] for result in results]
    )
    parts = [{"weight": weight, **result} for weight, result in zip(weights, results, strict=True)]
    return {"store": [result["store"] for result in results]} | total | {"sources": parts}


def _prepare_source(data: ConfigDict, vocab_size: int) -> dict:
    """Prepares the store of one source's `config.data`; returns its part of what the command prints."""
    if is_generated(data.dataset):
        log.info("%s is generated while it is read: there is nothing to prepare", data.dataset)
        empty = dict.fromkeys(("tokens", "documents", "bytes", "seconds"), 0)
        fingerprint = GeneratedWindows(data, vocab_size, "train").store.fingerprint
        return {"store": None} | empty | {"fingerprint": fingerprint, "prepared": False}
    start, stats = time.perf_counter(), {}
    store = open_store(data, vocab_size, stats)
    for split in SPLITS:
        check_split(store, data, split)
    seconds = time.perf_counter() - start
    result = {"store": store.path} | {
        name: store.count(name, "all") for name in ("tokens", "documents", "bytes")
    }
    result |= {
        "fingerprint": store.fingerprint,
        "prepared": bool(stats),
        "seconds": round(seconds, 3),
    }
    result |= {"tokens_per_second": None, "workers": 0}
    if stats.get("tokens"):
        result |= {
            "tokens_per_second": round(stats["tokens"] / seconds),
            "workers": stats["workers"],
            # In a worker, with everything around it; and of the tokenizer alone in the same minutes.
            "worker_tokens_per_second": round(stats["tokens"] / stats["worker_seconds"]),
            "tokenizer_tokens_per_second": round(
                stats["tokens"] / max(stats["tokenizer_seconds"], 1e-9)
            ),
        }
    return result | {name: store.index[name] for name in (*SPLITS, "empty")}
