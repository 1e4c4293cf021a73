"""Parts of a source to files, by as many processes as the text is worth, going on from where others stopped."""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent import futures

from ml_collections import ConfigDict
from tqdm import tqdm

from prope.data.sources.base import Part, Source
from prope.data.store import pack
from prope.data.store.arrays import SPLITS
from prope.runtime.files import write_atomic

_FEW_BYTES = 2**26  # below this, starting workers costs more than they save
_SAY_EVERY = 30.0  # seconds between lines where there is no terminal

log = logging.getLogger(__name__)


def start_parts(folder: pathlib.Path, source: Source) -> None:
    """Makes the folder for parts; one that was cut otherwise, by another version, is begun anew."""
    cut = hashlib.sha256(json.dumps([part.key for part in source.parts]).encode()).hexdigest()
    try:
        same = (folder / "cut").read_text() == cut
    except OSError:
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_atomic(folder / "cut", cut)
    for left in folder.glob("*.*.*"):  # of workers that were killed: a finished file has one dot in its name
        left.unlink(missing_ok=True)


def make_parts(source: Source, config: ConfigDict, marked: bool, folder: pathlib.Path, made: dict) -> list[dict]:
    """`pack` of every part that is not there yet; the records of all, in order."""
    records = {number: pack.read_record(folder, number) for number in range(len(source.parts))}
    todo = [(number, source.parts[number]) for number, record in records.items() if record is None]
    there = source.num_bytes - sum(part.num_bytes for _, part in todo)
    log.info("data: packing %s (about %.1f MB of text)", source.name, source.num_bytes / 1e6)
    if len(todo) < len(records):
        log.info("data: %d of %d parts are there already", len(records) - len(todo), len(records))
    few = sum(part.num_bytes for _, part in todo) < _FEW_BYTES
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(config.num_workers or (1 if few else cores), len(todo)))
    arguments = (config.tokenizer, config.validation_fraction, marked)
    new = []
    with contextlib.closing(_Progress(source.num_bytes, there)) as progress:
        for number, record in _packed(todo, folder, workers, arguments):
            records[number] = record
            new.append(record)
            progress.add(source.parts[number].num_bytes)
    made["workers"] = workers
    made["tokens"] = sum(record[split]["tokens"] for record in new for split in SPLITS)
    made["tokenizer_seconds"] = sum(record["tokenizer_seconds"] for record in new)
    made["worker_seconds"] = sum(record["seconds"] for record in new)
    return [records[number] for number in range(len(records))]


def _packed(
    todo: list[tuple[int, Part]], folder: pathlib.Path, workers: int, arguments: tuple
) -> Iterator[tuple[int, dict]]:
    """(number, `pack` of it) of these parts, as they are done."""
    if workers == 1:
        pack.start_worker(*arguments, alone=False)
        for number, part in todo:
            yield number, pack.pack(part, folder, number)
        return
    pool = futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), pack.start_worker, arguments)
    try:
        running = {pool.submit(pack.pack, part, folder, number): number for number, part in todo}
        for future in futures.as_completed(running):
            yield running[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Progress:
    """A bar with the time left on a terminal; elsewhere a line now and then."""

    def __init__(self, total: int, there: int):
        self._bar = tqdm(
            total=total, initial=there, unit="B", unit_scale=True, desc="data", disable=not sys.stderr.isatty()
        )
        self._total, self._there, self._done = total, there, there
        self._start = self._said = time.monotonic()

    def add(self, size: int) -> None:
        self._bar.update(size)
        self._done += size
        now = time.monotonic()
        if self._bar.disable and now - self._said > _SAY_EVERY:
            self._said = now
            speed = (self._done - self._there) / (now - self._start)
            log.info(
                "data: %.1f %% of %.1f MB, %.2f MB/s, %.1f minutes left", 100 * self._done / self._total,
                self._total / 1e6, speed / 1e6, (self._total - self._done) / speed / 60,
            )  # fmt: skip

    def close(self) -> None:
        self._bar.close()
