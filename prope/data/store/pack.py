"""What a worker does: tokenises a chunk of documents into files.

Files of chunk n: `n.train`, `n.validation` and, where documents are cut for their split, `n.all`
with the whole documents: elements as in the store. Then `n.json`, without which they do not count.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import zlib
from multiprocessing.synchronize import Event
from typing import BinaryIO

import numpy as np

from prope.data.sources.base import Chunk, cut_words
from prope.data.store.arrays import COUNTS, element_dtype, prompt_bit
from prope.data.store.split import SplitRule
from prope.data.tokenizer import load_tokenizer
from prope.errors import RunFailed
from prope.runtime.files import write_atomic

SEGMENT_BYTES = 2**22  # a longer document is tokenised in segments, to bound the memory


def start_worker(
    tokenizer: str, rule: SplitRule, has_prompts: bool, max_bad: int, stop: Event | None = None
) -> None:
    """Sets up this process as a worker; with `stop` it exits with its parent."""
    global _tokenizer, _dtype, _rule, _max_bad, _num_bad, _stop
    _tokenizer = load_tokenizer(tokenizer)
    _dtype = element_dtype(_tokenizer.vocab_size, has_prompts)
    _rule = rule
    _max_bad = max_bad
    _num_bad = 0  # rows, in all chunks of this process
    _stop = stop
    if stop is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def pack_run(chunks: list[tuple[int, Chunk]], folder: pathlib.Path) -> list[tuple[int, dict]]:
    """Packs chunks until the workers are told to stop; returns (number, record) of each."""
    packed = []
    for number, chunk in chunks:
        if not _stop.is_set():
            packed.append((number, pack(chunk, folder, number)))
    return packed


class _SplitFile:
    """Writes the documents of a split, and counts what COUNTS names."""

    def __init__(self, file: BinaryIO):
        self.counts = dict.fromkeys((*COUNTS, "crc"), 0)
        self._file = file
        self._is_in_document = False

    def write(self, text: bytes, prompt_bytes: int) -> None:
        """Writes text of a document, which begins with it or goes on."""
        if not self._is_in_document:
            self._is_in_document = True
            self.counts["documents"] += 1
            self._write_ids(np.array([_tokenizer.special.start]))
        # Prompt and predicted text are tokenised apart: a token belongs to one or the other.
        for part, mark in ((text[:prompt_bytes], prompt_bit(_dtype)), (text[prompt_bytes:], 0)):
            for segment in cut_words(part, SEGMENT_BYTES):
                self._write_ids(_tokenizer.encode(segment), mark)
        self.counts["bytes"] += len(text) - prompt_bytes

    def end_document(self) -> None:
        """Ends the document, if one has begun."""
        if self._is_in_document and _tokenizer.special.bos is not None:
            self._write_ids(np.array([_tokenizer.special.eos]))
        self._is_in_document = False

    def _write_ids(self, ids: np.ndarray, mark: int = 0) -> None:
        data = (ids.astype(_dtype) | mark).tobytes()
        self._file.write(data)
        self.counts["crc"] = zlib.crc32(data, self.counts["crc"])
        self.counts["tokens"] += len(ids)
        self.counts["prompt_tokens"] += len(ids) if mark else 0
        self.counts["unk_tokens"] += int(np.count_nonzero(_tokenizer.special.is_unknown(ids)))


def pack(chunk: Chunk, folder: pathlib.Path, number: int) -> dict:
    """Writes the files of a chunk; returns the content of its JSON file.

    It holds, per split, COUNTS and `crc`; `chunk`, its key; `empty`, the number of documents that
    are left out because they have no text; and `bad_rows`, those that cannot be read. With too many
    of them in this process it goes on to look for more, and writes no JSON file.
    """
    global _num_bad
    record: dict = {"chunk": chunk.key, "empty": 0, "bad_rows": []}
    with contextlib.ExitStack() as stack:
        files = {}
        for split in _rule.splits:
            file = (folder / f"{number}.{split}").open("wb", 2**20)
            files[split] = _SplitFile(stack.enter_context(file))
        for document in chunk.read():
            if document.bad:
                record["bad_rows"].append(document.bad)
                _num_bad += 1
            elif not document.text[document.prompt_bytes :].strip():
                record["empty"] += 1
            elif _num_bad <= _max_bad:
                for split, text in _rule.parts(document, chunk.split):
                    files[split].write(text, document.prompt_bytes)
            if not document.goes_on:
                for file in files.values():
                    file.end_document()
    record |= {split: file.counts for split, file in files.items()}
    if _num_bad <= _max_bad:
        write_atomic(folder / f"{number}.json", json.dumps(record))
    return record


def read_elements(
    folder: pathlib.Path, number: int, split: str, record: dict, dtype: np.dtype
) -> np.ndarray:
    """Returns the elements of a chunk, which stay on the disk until they are looked at.

    A file that is not what was written, as after a power failure, is dropped: RunFailed.
    """
    path = folder / f"{number}.{split}"
    count = path.stat().st_size // dtype.itemsize if path.exists() else 0
    elements = np.memmap(path, dtype, "r", shape=count) if count else np.empty(0, dtype)
    if zlib.crc32(elements) != record[split]["crc"]:
        (folder / f"{number}.json").unlink(missing_ok=True)
        problem = f"chunk {number} is damaged and was dropped"
        raise RunFailed(f"{folder}: {problem}; run the same command again")
    return elements
