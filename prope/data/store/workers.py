"""Tokenises the chunks of a source into files, in several processes; resumes after a stop."""

import io
import itertools
import math
import multiprocessing
import pathlib
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

from tqdm import tqdm

from prope.data.sources.base import LISTED, Chunk, Source
from prope.data.store import pack
from prope.data.store.arrays import SPLITS
from prope.data.store.split import SplitRule
from prope.errors import RunFailed, log
from prope.runtime.files import read_json
from prope.runtime.processes import list_cores
from prope.runtime.progress import has_bars
from prope.spec.data import DataSpec

_ONE_PROCESS_BYTES = 2**26  # below this, starting workers costs more than they save
_LOG_SECONDS = 30.0  # between lines where there is no terminal

_NumberedChunks = list[tuple[int, Chunk]]


def pack_chunks(
    source: Source, data: DataSpec, rule: SplitRule, folder: pathlib.Path, stats: dict
) -> list[dict]:
    """Packs every chunk that has no files yet; returns the records of all, in order.

    `stats` is filled with the `workers` and the `tokens` that they wrote. Leaves
    the rest where bad rows are more than config.data.max_bad_rows, and than a message lists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbered = list(enumerate(source.chunks))
    records = [read_json(folder / f"{number}.json") or {} for number, _ in numbered]
    # Another key was cut by another rule.
    missing = [(n, chunk) for n, chunk in numbered if records[n].get("chunk") != chunk.key]
    missing_bytes = sum(chunk.num_bytes for _, chunk in missing)
    finished = len(records) - len(missing)
    reused = f"; {finished} of {len(records)} chunks are there already" if finished else ""
    megabytes = source.num_bytes / 1e6
    size = f" (about {megabytes:.1f} MB of text)" if megabytes else ""
    log.info("data: packing %s%s%s", source.name, size, reused)
    num_workers = data.num_workers or (
        1 if missing_bytes < _ONE_PROCESS_BYTES else len(list_cores())
    )
    num_workers = max(1, min(num_workers, len(missing)))
    settings = (data.tokenizer, rule, data.loss_on == "targets", data.max_bad_rows)
    stats |= {"workers": num_workers, "tokens": 0}
    num_bad = 0
    kind = tqdm if has_bars() else _LoggedBar
    total = source.num_bytes
    initial = total - missing_bytes
    with kind(total=total, initial=initial, unit="B", unit_scale=True, desc="data") as bar:
        for number, record in _packed(missing, folder, num_workers, settings):
            records[number] = record
            stats["tokens"] += sum(record[split]["tokens"] for split in SPLITS)
            bar.update(source.chunks[number].num_bytes)
            num_bad += len(record["bad_rows"])
            if num_bad > max(data.max_bad_rows, LISTED):
                break
    return records


class _LoggedBar(tqdm):
    """A progress bar for where there is no terminal: a line of the log now and then."""

    def __init__(self, **options):
        super().__init__(file=io.StringIO(), **options)
        self._logged = time.monotonic()

    def update(self, n=1):
        """Advances by `n`."""
        super().update(n)
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            log.info("%s", tqdm.format_meter(**self.format_dict | {"ncols": 0}))


def _packed(
    chunks: _NumberedChunks, folder: pathlib.Path, num_workers: int, settings: tuple
) -> Iterator[tuple[int, dict]]:
    """Yields (number, record) of these chunks as they finish."""
    if num_workers == 1:
        pack.start_worker(*settings)
        for number, chunk in chunks:
            yield number, pack.pack(chunk, folder, number)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = futures.ProcessPoolExecutor(num_workers, context, pack.start_worker, (*settings, stop))
    try:
        pending = [pool.submit(pack.pack_run, run, folder) for run in _runs(chunks, num_workers)]
        for future in futures.as_completed(pending):
            yield from future.result()
    except BrokenProcessPool:
        killed = "a worker was killed, most likely for want of memory: finished chunks are kept"
        remedy = "run the same command again with a smaller config.data.num_workers"
        raise RunFailed(f"{killed}; {remedy}") from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _runs(chunks: _NumberedChunks, num_workers: int) -> Iterator[_NumberedChunks]:
    """Cuts chunks into runs that one worker packs.

    A run has all chunks of a shard that is copied first, or some of them if shards are few.
    """
    shards = itertools.groupby(chunks, lambda entry: entry[1].shard or entry[0])
    runs = [list(run) for _, run in shards]
    for run in runs:
        workers_per_run = math.ceil(num_workers / len(runs))
        size = math.ceil(len(run) / workers_per_run)
        for start in range(0, len(run), size):
            yield run[start : start + size]
