"""What a worker does: tokenises a chunk of documents into files that are complete or absent.

Files of chunk n: `n.train` and `n.validation`, elements as in the store, and then `n.json`.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import zlib

import numpy as np

from prope.data.sources.base import Chunk, Document
from prope.data.store.arrays import SPLITS, element_dtype, prompt_bit
from prope.data.tokenizer import load_tokenizer
from prope.runtime.files import read_json, write_atomic

_SEGMENT_BYTES = 2**22  # a longer document is tokenised in segments, to bound the memory


def start_worker(tokenizer: str, validation_fraction: float, marked: bool, alone: bool = True) -> None:
    """Sets up this process as a worker; `alone`: it does nothing else, and exits with its parent."""
    global _tokenizer, _validation_fraction, _marked
    _tokenizer, _validation_fraction, _marked = load_tokenizer(tokenizer), validation_fraction, marked
    if alone:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def pack(chunk: Chunk, folder: pathlib.Path, number: int) -> dict:
    """Writes the files of a chunk.

    Returns:
      The content of its JSON file: per split `tokens, documents, bytes, given, crc`; `empty`, the documents left out;
      `read`, bytes of text; `seconds` in all, and those of them in the tokenizer.
    """
    start = time.perf_counter()
    dtype = element_dtype(_tokenizer.vocab_size, _marked)
    record = {"empty": 0, "read": 0, "tokenizer_seconds": 0.0}
    with contextlib.ExitStack() as stack:
        outputs = {s: stack.enter_context(_SplitFile(folder / f"{number}.{s}", dtype)) for s in SPLITS}
        for document in chunk.read():
            if not document.text[document.prompt_bytes :].strip():  # nothing to predict
                record["empty"] += 1
                continue
            split = "validation" if is_validation(document.text, _validation_fraction) else "train"
            record["read"] += len(document.text)
            record["tokenizer_seconds"] += outputs[split].add(document)
    record |= {split: output.totals for split, output in outputs.items()}
    record["seconds"] = time.perf_counter() - start
    write_atomic(folder / f"{number}.json", json.dumps(record))
    return record


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document is held out: decided by a hash of its text, so it depends on nothing else."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def read_record(folder: pathlib.Path, number: int) -> dict | None:
    """Returns what `pack` returned for this chunk, in whatever process; None if it did not finish."""
    return read_json(folder / f"{number}.json")


def read_elements(folder: pathlib.Path, number: int, split: str, record: dict, dtype: np.dtype) -> np.ndarray | None:
    """Returns the elements of a chunk; None if the file is not what was written, as after a power failure."""
    try:
        elements = np.fromfile(folder / f"{number}.{split}", dtype)
    except FileNotFoundError:
        return None
    return elements if zlib.crc32(elements) == record[split]["crc"] else None


class _SplitFile:
    """The elements of one split of a chunk, in a file that gets its name when it is complete.

    Attributes:
      totals: `tokens, documents, bytes, given, crc` so far.
    """

    def __init__(self, path: pathlib.Path, dtype: np.dtype):
        self._path, self._temporary, self._dtype = path, path.with_name(f"{path.name}.{os.getpid()}"), dtype
        self._file = self._temporary.open("wb", buffering=2**20)
        self.totals = {"tokens": 0, "documents": 0, "bytes": 0, "given": 0, "crc": 0}

    def add(self, document: Document) -> float:
        """Appends <bos>, the tokens, <eos>; returns the seconds spent in the tokenizer."""
        start = time.perf_counter()
        # Prompt and predicted text are tokenised apart: a token belongs to one or the other.
        prompt = [_tokenizer.encode(segment) for segment in _segments(document.text[: document.prompt_bytes])]
        predicted = [_tokenizer.encode(segment) for segment in _segments(document.text[document.prompt_bytes :])]
        seconds = time.perf_counter() - start
        prompt_tokens = sum(map(len, prompt))
        elements = np.empty(2 + prompt_tokens + sum(map(len, predicted)), self._dtype)
        elements[0], elements[-1] = _tokenizer.bos, _tokenizer.eos
        np.concatenate([*prompt, *predicted], out=elements[1:-1], casting="unsafe")  # ids fit: below vocab_size
        elements[1 : 1 + prompt_tokens] |= prompt_bit(self._dtype)
        data = elements.tobytes()
        self._file.write(data)
        self.totals["crc"] = zlib.crc32(data, self.totals["crc"])
        self.totals["tokens"] += len(elements)
        self.totals["documents"] += 1
        self.totals["bytes"] += len(document.text) - document.prompt_bytes
        self.totals["given"] += prompt_tokens
        return seconds

    def __enter__(self) -> "_SplitFile":
        return self

    def __exit__(self, failed, *_) -> None:
        try:
            self._file.close()
            if not failed:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def _segments(text: bytes) -> list[bytes]:
    """Cuts a long text into segments that end after a line or a space, or else between two characters."""
    segments, start = [], 0
    while len(text) - start > _SEGMENT_BYTES:
        stop = start + _SEGMENT_BYTES
        cut = max(text.rfind(b"\n", start, stop), text.rfind(b" ", start, stop)) + 1
        if cut <= start:
            cut = stop
            while text[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        segments.append(text[start:cut])
        start = cut
    return [*segments, text[start:]] if start < len(text) else segments
