"""Tokenises the chunks of a source into files, in as many processes as the text is worth; resumes after a stop."""

import io
import itertools
import math
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from concurrent import futures

from ml_collections import ConfigDict
from tqdm import tqdm

from prope.data.sources.base import Chunk, Source
from prope.data.store import pack
from prope.data.store.arrays import SPLITS
from prope.errors import log
from prope.runtime.files import read_json

_ONE_PROCESS_BYTES = 2**26  # below this, starting workers costs more than they save
_LOG_SECONDS = 30.0  # between lines where there is no terminal


def pack_chunks(
    source: Source, data: ConfigDict, has_prompts: bool, folder: pathlib.Path, stats: dict
) -> list[dict]:
    """Packs every chunk that has no files yet; returns the records of all, in order, and fills `stats`."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [read_json(folder / f"{number}.json") or {} for number in range(len(source.chunks))]
    # One with another key was cut by another rule.
    missing = [
        (n, chunk) for n, chunk in enumerate(source.chunks) if records[n].get("chunk") != chunk.key
    ]
    size = sum(chunk.num_bytes for _, chunk in missing)
    there = len(records) - len(missing)
    reused = f"; {there} of {len(records)} chunks are there already" if there else ""
    log.info(
        "data: packing %s (about %.1f MB of text)%s", source.name, source.num_bytes / 1e6, reused
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = data.num_workers or (1 if size < _ONE_PROCESS_BYTES else cores)
    stats["workers"] = workers = max(1, min(workers, len(missing)))
    arguments = (data.tokenizer, data.validation_fraction, has_prompts)
    terminal, logged = sys.stderr.isatty(), time.monotonic()
    options = {
        "total": source.num_bytes,
        "initial": source.num_bytes - size,
        "unit": "B",
        "unit_scale": True,
    }
    with tqdm(**options, desc="data", file=None if terminal else io.StringIO()) as bar:
        for number, record in _packed(missing, folder, workers, arguments):
            records[number] = record
            bar.update(source.chunks[number].num_bytes)
            if not terminal and time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                log.info("%s", tqdm.format_meter(**bar.format_dict | {"ncols": 0}))
    new = [records[number] for number, _ in missing]
    stats["tokens"] = sum(record[split]["tokens"] for record in new for split in SPLITS)
    stats["tokenizer_seconds"] = sum(record["tokenizer_seconds"] for record in new)
    stats["worker_seconds"] = sum(record["seconds"] for record in new)
    return records


def _packed(
    chunks: list[tuple[int, Chunk]], folder: pathlib.Path, workers: int, arguments: tuple
) -> Iterator[tuple[int, dict]]:
    """Yields (number, record) of these chunks as they finish."""
    if workers == 1:
        pack.start_worker(*arguments)
        for number, chunk in chunks:
            yield number, pack.pack(chunk, folder, number)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = futures.ProcessPoolExecutor(workers, context, pack.start_worker, (*arguments, stop))
    try:
        for future in futures.as_completed(
            [pool.submit(pack.pack_run, run, folder) for run in _runs(chunks, workers)]
        ):
            yield from future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _runs(chunks: list[tuple[int, Chunk]], workers: int) -> Iterator[list[tuple[int, Chunk]]]:
    """Cuts chunks into runs that one worker packs: of a shard that it copies first all, or a part if there are few."""
    shards = [
        list(run) for _, run in itertools.groupby(chunks, lambda entry: entry[1].shard or entry[0])
    ]
    for run in shards:
        size = math.ceil(len(run) / math.ceil(workers / len(shards)))
        yield from (run[start : start + size] for start in range(0, len(run), size))
