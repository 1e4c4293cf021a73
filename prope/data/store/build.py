"""Builds a token store from a source of documents, once.

Workers pack chunks of the source into files, in any order. When all are there, they are
concatenated into the store. A killed process leaves chunks that the next one reuses.

The bytes of a store depend on nothing but its fingerprint, which is in its name, and its index is
written last. Processes that share a folder wait for each other, where its file system has locks.
Others, as hosts that prepare the same store in a bucket, do the work twice: each writes the same
objects, stops where another one has written the index, and deletes none. So a writer that was
suspended in the meantime does no harm.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator

import filelock
import numpy as np

from prope.data.sources.base import Source, check_bad_rows
from prope.data.sources.find import find_source
from prope.data.store import arrays, pack, workers
from prope.data.store.arrays import COUNTS, SPLITS, UNIGRAM_LOSSES, Store, find_store
from prope.data.store.split import find_rule, warn_of_known_lines
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import load_tokenizer
from prope.errors import (
    RunFailed,
    StorageFailed,
    UsageError,
    find_full,
    first_line,
    is_denied,
    log,
    usage_error,
)
from prope.runtime.files import (
    as_path,
    check_writable,
    is_url,
    kvstore,
    local_cache,
    os_errors_of_tensorstore,
)
from prope.spec.data import DataSpec, is_generated
from prope.spec.run import Spec

# Fields of config.data that a store is made with.
_SETTINGS = ("dataset", "pattern", "text_feature", "template", "separator", "loss_on")
_SETTINGS += ("validation_fraction",)
_SIZES = ("tokens", "documents", "bytes", "unk_tokens")
POLL_SECONDS = 1.0  # hundreds of hosts may wait for a lock in a shared folder


def open_store(data: DataSpec, vocab_size: int, stats: dict | None = None) -> Store:
    """Returns the token store of one source's `config.data`; prepares it if it does not exist.

    If the store was prepared, `stats` is filled with `tokens` and `workers`. Raises UsageError
    where the data, the tokenizer or the size of the model's vocabulary does not fit.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    ids = tokenizer.text_size
    if vocab_size < ids:
        problem = f"the tokenizer {data.tokenizer} has {ids} ids"
        remedy = f"set config.model.vocab_size to {ids} or more"
        raise usage_error("config.model.vocab_size", vocab_size, problem, remedy)
    if data.store:
        store = _open_at_place(data, tokenizer.fingerprint)
    else:
        store = _find_or_write(data, tokenizer.fingerprint, {} if stats is None else stats)
    check_bad_rows(store.index.get("bad_rows", []), data.max_bad_rows)
    return store


def _find_or_write(data: DataSpec, tokenizer: str, stats: dict) -> Store:
    """Returns the store in the cache; prepares it if it does not exist."""
    source = find_source(data)
    rule = {
        "format": arrays.FORMAT,
        "source": source.identity,
        "tokenizer": tokenizer,
        "validation_fraction": data.validation_fraction,
        "has_prompts": data.loss_on == "targets",
    }
    fingerprint = arrays.fingerprint_of(rule)
    cache = str(local_cache())
    if data.cache_dir:
        cache = str(as_path("config.data.cache_dir", data.cache_dir))
    source_name = re.sub(r"[^A-Za-z0-9.]+", "-", source.name)
    name = f"{source_name}-{fingerprint}"
    path = os.path.join(cache, name)
    store = find_store(path, fingerprint)
    if store is None:
        with _lock_preparation(cache, name) as local_folder:
            # Another process may have written it in the meantime.
            store = find_store(path, fingerprint)
            if store is None:
                chunks = local_folder / f"{name}.chunks"
                try:
                    _write_store(source, data, rule, path, chunks, stats)
                except (OSError, RunFailed):
                    if find_store(path, fingerprint) is None:
                        raise
                    log.info("data: another host has finished %s meanwhile", path)
                shutil.rmtree(chunks, ignore_errors=True)
                store = find_store(path, fingerprint)
    return store


def _open_at_place(data: DataSpec, tokenizer: str) -> Store:
    """Opens the store that `config.data.store` names.

    Raises UsageError where it was made with other settings or another tokenizer.
    """
    path = str(as_path("config.data.store", data.store))
    store = find_store(path)
    if store is None:
        remedy = "give what prope.data.prepare prints as store"
        raise usage_error("config.data.store", path, "is no token store", remedy)
    rule = store.index["rule"]
    if rule["format"] != arrays.FORMAT:
        problem = f"has format {rule['format']}, not {arrays.FORMAT}; prepare it again"
        raise UsageError(f"the store {path}: {problem}")
    made_with = {"template": "", "separator": "", "pattern": ""} | rule | rule["source"]
    made_with["loss_on"] = "targets" if rule["has_prompts"] else "all"
    for name in _SETTINGS:
        if name in made_with and made_with[name] != getattr(data, name):
            problem = f"the store {path} was made with {made_with[name]!r}"
            raise usage_error(f"config.data.{name}", getattr(data, name), problem, "set that")
    if rule["tokenizer"] != tokenizer:
        other = f"the store {path} was made with {rule['tokenizer']} (sha256 of the model)"
        problem = f"is {tokenizer}, and {other}"
        raise usage_error("config.data.tokenizer", data.tokenizer, problem, "give that one")
    return store


def check_split(store: Store, data: DataSpec, split: str) -> None:
    """Raises UsageError where no document of the store of `config.data` is in the split."""
    if not store.count("documents", split):
        problem = f"no document of {data.dataset} falls into the {split} split"
        remedy = "change it, or add documents with other text"
        field = "config.data.validation_fraction"
        raise usage_error(field, data.validation_fraction, problem, remedy)


@contextlib.contextmanager
def _lock_preparation(cache: str, name: str) -> Iterator[pathlib.Path]:
    """Yields the local folder for the chunks of a store that no other process prepares there.

    The operating system releases the lock when its holder dies. Hosts that share a folder need a
    file system that locks for all of them, as NFS does.
    """
    folder = pathlib.Path(cache)
    setting = "config.data.cache_dir"
    if is_url(cache):
        check_writable(setting, cache)
        folder = local_cache()
        setting = "PROPE_CACHE"
    path = folder / f"{name}.lock"
    lock = filelock.FileLock(path, mode=0o666)  # users who share a cache wait, too
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        log.info("data: another process is preparing %s; waiting for it", name)
        lock.acquire(poll_interval=POLL_SECONDS)
    except OSError as error:
        raise usage_error(setting, folder, f"cannot be written: {error.strerror}") from error
    try:
        with os_errors_of_tensorstore():
            yield folder
    except OSError as error:
        if is_denied(error):
            raise usage_error(setting, folder, f"cannot be written: {error.strerror}") from error
        if not find_full(error):
            problem = f"the store cannot be prepared: {first_line(error)}"
            remedy = "finished chunks are kept: see to the storage and run the same command again"
            raise StorageFailed(f"{cache}: {problem}; {remedy}") from error
        room = "a store needs room for itself and, until it is done, for its chunks"
        remedy = "Finished chunks are kept: free some space and run the same command again"
        raise usage_error(setting, folder, find_full(error), f"{room}. {remedy}") from error
    finally:
        path.unlink(missing_ok=True)  # still held: filelock does not take over a deleted file
        lock.release()


def _write_store(
    source: Source, data: DataSpec, rule: dict, path: str, chunks: pathlib.Path, stats: dict
) -> None:
    """Packs the source, and writes the store from its chunks; the index makes it valid."""
    split_rule = find_rule(source, data.validation_fraction)
    warn_of_known_lines(source)
    records = workers.pack_chunks(source, data, split_rule, chunks, stats)
    # Of older code some lack counts.
    bad_rows = [row for record in records for row in record.get("bad_rows", ())]
    check_bad_rows(bad_rows, data.max_bad_rows)
    index: dict = {"bad_rows": bad_rows}
    for split in split_rule.splits:
        counts = [record[split] for record in records]
        index[split] = {name: sum(count.get(name, 0) for count in counts) for name in COUNTS}
    index["empty"] = sum(record["empty"] for record in records)
    if index["empty"]:
        first = next(record["chunk"] for record in records if record["empty"])
        message = "data: %d documents without text were left out, the first in %s"
        log.info(message, index["empty"], first)
    _log_unknown(index, data.tokenizer)
    if not any(index[split]["documents"] for split in SPLITS):
        problem = f"has no document with text; {index['empty']} without it were left out"
        raise UsageError(f"{source.name}: {problem}; add some, or set config.data.text_feature")
    index |= {"rule": rule, "fingerprint": arrays.fingerprint_of(rule)}
    index |= _concatenate(path, data, chunks, records, split_rule.splits)
    folder = kvstore(path)
    before = folder.read("index.json").result()
    if before.state != "value":  # nor does it write over one that comes at the same moment
        content = json.dumps(index, indent=2).encode()
        folder.write("index.json", content, if_equal=before.stamp.generation).result()


def _log_unknown(index: dict, tokenizer: str) -> None:
    """Warns of text that the tokenizer does not know, which is lost."""
    unknown = sum(index[split]["unk_tokens"] for split in SPLITS)
    tokens = sum(index[split]["tokens"] for split in SPLITS)
    if unknown:
        problem = f"{unknown / tokens:.2%} of the tokens are <unk>, text that {tokenizer} lacks"
        remedy = "take a tokenizer with byte fallback, as prope.data.train_tokenizer makes"
        log.warning("data: %s; above 1 %% there are no bits per byte; %s", problem, remedy)


def _concatenate(
    path: str, data: DataSpec, chunks: pathlib.Path, records: list[dict], splits: tuple[str, ...]
) -> dict:
    """Writes the two arrays; returns fields of the index.

    They are the special ids, and the losses of predicting by token frequencies.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    vocab_size = tokenizer.vocab_size
    dtype = arrays.element_dtype(vocab_size, data.loss_on == "targets")
    counts = {split: np.zeros(vocab_size, np.int64) for split in splits}

    def read(split: str) -> Iterator[np.ndarray]:
        for number, record in enumerate(records):
            for elements in pack.read_elements(chunks, number, split, record, dtype):
                predicted = elements[elements < vocab_size]  # prompts have the top bit
                counts[split] += np.bincount(predicted, minlength=vocab_size)
                yield elements

    for split in splits:
        size = sum(record[split]["tokens"] for record in records)
        arrays.write_array(path, split, dtype, size, read(split))
        if tokenizer.special.bos is not None:
            counts[split][tokenizer.special.bos] = 0  # never predicted
    smoothed = counts["train"] + 1
    log_frequencies = np.log(smoothed / smoothed.sum())
    about = {"special_ids": tokenizer.special}
    for split in splits:
        total = -(counts[split] * log_frequencies).sum()
        about[UNIGRAM_LOSSES[split]] = float(total / max(counts[split].sum(), 1))
    return about


def prepare(spec: Spec) -> dict:
    """Prepares every source of a run's config.data; returns what the command prints."""
    weights, sources = zip(*spec.data.weighted_sources(), strict=True)
    results = [_prepare_source(source, spec.model.vocab_size) for source in sources]
    if spec.data.dataset != "mixture":
        return results[0]
    fingerprints = [result["fingerprint"] for result in results]
    pairs = zip(weights, results, strict=True)
    return {
        "store": [result["store"] for result in results],
        **{name: sum(result[name] for result in results) for name in (*_SIZES, "seconds")},
        "fingerprint": arrays.mixture_fingerprint(weights, fingerprints),
        "sources": [{"weight": weight, **result} for weight, result in pairs],
    }


def _prepare_source(data: DataSpec, vocab_size: int) -> dict:
    """Prepares the store of one source's `config.data`; returns what is printed about it."""
    if is_generated(data.dataset):
        log.info("%s is generated while it is read: there is nothing to prepare", data.dataset)
        fingerprint = GeneratedWindows(data, vocab_size, "train").store.fingerprint
        sizes = dict.fromkeys((*_SIZES, "seconds"), 0)
        return {"store": None, **sizes, "fingerprint": fingerprint, "prepared": False}
    start = time.perf_counter()
    stats = {}
    store = open_store(data, vocab_size, stats)
    for split in SPLITS:
        check_split(store, data, split)
    seconds = time.perf_counter() - start
    tokens = stats.get("tokens")
    return {
        "store": store.path,
        **{name: store.count(name, "all") for name in _SIZES},
        "fingerprint": store.fingerprint,
        "prepared": bool(stats),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds) if tokens else None,
        "workers": stats["workers"] if tokens else 0,
        "bad_rows": len(store.index.get("bad_rows", ())),
        **{name: store.index[name] for name in (*SPLITS, "empty")},
    }
