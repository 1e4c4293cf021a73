"""Builds a token store from a source of documents, once.

Workers turn parts of the source into files, in any order. When all parts are there they are concatenated into the
store, which is renamed into place last. A killed process leaves parts that the next one reuses, and never a store
that is incomplete.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from ml_collections import ConfigDict

from prope.data.sources.base import Source
from prope.data.sources.find import find_source, local_cache, weighted
from prope.data.store import arrays as store
from prope.data.store import pack, workers
from prope.data.store.arrays import SPLITS, Store
from prope.data.store.lock import locked
from prope.data.synthetic import Synthetic
from prope.data.tokenizer import load_tokenizer
from prope.errors import RunFailed, UsageError, is_disk_full
from prope.runtime.files import write_atomic

log = logging.getLogger(__name__)


def open_store(config: ConfigDict, vocab_size: int, made: dict | None = None) -> Store:
    """The token store of a run's `config.data`; prepared first where it is not there yet.

    Args:
      config: of one source, not of a mixture.
      vocab_size: of the model.
      made: if given, gets what preparing took: `tokens, workers, tokenizer_seconds, worker_seconds`.

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
        "format": store.FORMAT,
        "source": source.identity,
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": config.validation_fraction,
        "marked": config.loss_on == "targets",
    }
    fingerprint = store.fingerprint_of(rule)
    name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', source.name)}-{fingerprint}"
    cache = config.cache_dir or str(local_cache())
    place = store.join(cache, name)
    found = store.find_store(place, fingerprint)
    if found is None:
        with _named_errors(cache):
            if not store.is_url(cache):
                pathlib.Path(cache).mkdir(parents=True, exist_ok=True)
                if not os.access(cache, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            done = lambda: store.find_store(place, fingerprint) is not None  # noqa: E731
            with locked(store.keys(cache), f"{name}.lock", name, done) as mine:
                if mine and not done():
                    _prepare(source, config, rule, place, {} if made is None else made)
        found = store.find_store(place, fingerprint)
    return found


@contextlib.contextmanager
def _named_errors(cache: str):
    """What the storage says, in one line that names it."""
    try:
        yield
    except (UsageError, RunFailed, KeyboardInterrupt):
        raise
    except BrokenProcessPool:
        raise RunFailed(
            "a worker was killed, most likely for want of memory: finished parts are kept; run the same command again "
            "with a smaller config.data.num_workers"
        ) from None
    except Exception as error:
        if is_disk_full(error):
            raise UsageError(
                f"config.data.cache_dir={cache}: the disk is full; a store needs room for itself and, until it is "
                "done, for its parts. Finished parts are kept: free some space and run the same command again"
            ) from error
        if isinstance(error, OSError):
            raise UsageError(f"config.data.cache_dir={cache}: cannot be written: {error.strerror}") from error
        if isinstance(error, ValueError) and store.is_url(cache):
            raise UsageError(f"config.data.cache_dir={cache}: cannot be written: {store.first_line(error)}") from error
        raise


def _prepare(source: Source, config: ConfigDict, rule: dict, place: str, made: dict) -> None:
    """Writes the store; the caller holds its lock."""
    name = place.split("/")[-1]
    url = store.is_url(place)
    parts = (local_cache() if url else pathlib.Path(place).parent) / f"{name}.parts"
    workers.start_parts(parts, source)
    records = workers.make_parts(source, config, rule["marked"], parts, made)
    index = {split: {k: sum(r[split][k] for r in records) for k in records[0][split] if k != "crc"} for split in SPLITS}
    index["empty"] = sum(record["empty"] for record in records)
    if index["empty"]:
        first = next(part.key for part, record in zip(source.parts, records, strict=True) if record["empty"])
        log.info("data: %d documents without text were left out, the first in %s", index["empty"], first)
    for split in SPLITS:
        if not index[split]["documents"]:
            shutil.rmtree(parts)
            raise UsageError(
                f"{source.name}: no document falls into the {split} split with "
                f"config.data.validation_fraction={config.validation_fraction}; change it, or bring more documents"
            )
    index |= {"rule": rule, "fingerprint": store.fingerprint_of(rule)}
    if url:  # there is no renaming: without its index, which comes last, it does not count
        store.keys(place).delete_range(store.everything()).result()
        index["unigram_loss"] = _assemble(place, config, rule["marked"], parts, records)
        store.keys(place).write("index.json", json.dumps(index, indent=2).encode()).result()
    else:
        for left in parts.parent.glob(f"{name}.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        work = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=parts.parent))
        work.chmod(0o777 & ~_umask())
        try:
            index["unigram_loss"] = _assemble(str(work), config, rule["marked"], parts, records)
            write_atomic(work / "index.json", json.dumps(index, indent=2))
            shutil.rmtree(place, ignore_errors=True)  # a folder without an index
            work.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(parts, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _assemble(place: str, config: ConfigDict, marked: bool, folder: pathlib.Path, records: list[dict]) -> float:
    """Writes the two arrays; returns the loss that predicting by the frequencies of tokens would have."""
    tokenizer = load_tokenizer(config.tokenizer)
    dtype = store.dtype_of(tokenizer.vocab_size, marked)
    counts = {}
    for split in SPLITS:
        writer = store.Writer(place, split, tokenizer.vocab_size, marked)
        for number, record in enumerate(records):
            elements = pack.read_elements(folder, number, split, record, dtype)
            if elements is None:
                (folder / f"{number}.json").unlink(missing_ok=True)
                raise RunFailed(f"{folder}: part {number} is damaged and was dropped; run the same command again")
            writer.write(elements)
        writer.close()
        counts[split] = writer.counts
        counts[split][tokenizer.bos] = 0  # never predicted
    share = (counts["train"] + 1) / (counts["train"] + 1).sum()
    return float(-(counts["validation"] * np.log(share)).sum() / max(counts["validation"].sum(), 1))


def prepare(config: ConfigDict) -> dict:
    """Prepares every source of a run's config.data; returns what the command prints."""
    if config.data.dataset.startswith("synthetic/"):
        log.info("%s is generated while it is read: there is nothing to prepare", config.data.dataset)
        store_of = Synthetic(config.data, config.model.vocab_size, "train").store
        return {"store": None, "tokens": 0, "documents": 0, "fingerprint": store_of.fingerprint, "prepared": False}
    results, stores, sources = [], [], weighted(config.data)
    for _, own in sources:
        start, made = time.perf_counter(), {}
        stores.append(open_store(own, config.model.vocab_size, made))
        results.append(_report(stores[-1], made, time.perf_counter() - start))
    if config.data.dataset != "mixture":
        return results[0]
    weights = [weight for weight, _ in sources]
    total = {name: sum(result[name] for result in results) for name in ("tokens", "documents", "bytes", "seconds")}
    return {
        "store": [result["store"] for result in results], **total,
        "fingerprint": store.mixed_fingerprint(weights, stores),
        "sources": [{"weight": weight, **result} for weight, result in zip(weights, results, strict=True)],
    }  # fmt: skip


def _report(found: Store, made: dict, seconds: float) -> dict:
    total = {name: sum(found.index[split][name] for split in SPLITS) for name in ("tokens", "documents", "bytes")}
    speeds = {}
    if made.get("tokens"):
        speeds = {
            "tokens_per_second": round(made["tokens"] / seconds),
            "workers": made["workers"],
            # In a worker, with everything around it, and of the tokenizer alone in the same minutes.
            "worker_tokens_per_second": round(made["tokens"] / made["worker_seconds"]),
            "tokenizer_tokens_per_second": round(made["tokens"] / max(made["tokenizer_seconds"], 1e-9)),
        }
    return {
        "store": str(found.path), **total, "fingerprint": found.fingerprint, "prepared": bool(made),
        "seconds": round(seconds, 3), "tokens_per_second": None, "workers": 0, **speeds,
        **{split: found.index[split] for split in SPLITS}, "empty": found.index["empty"],
    }  # fmt: skip
