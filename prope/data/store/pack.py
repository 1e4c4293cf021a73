"""What a worker does: a part of the documents to tokens, in files that are whole or not there.

Files of part n in the folder for parts: `n.train`, `n.validation` (elements as in the store) and then `n.json`.
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

from prope.data.sources.base import Document, Part
from prope.data.store.arrays import SPLITS, dtype_of, mark
from prope.data.tokenizer import load_tokenizer
from prope.runtime.files import read_json, write_atomic

_PIECE_BYTES = 2**22  # a longer document is tokenised in pieces, to bound the memory


def start_worker(tokenizer: str, validation_fraction: float, marked: bool, alone: bool = True) -> None:
    """Makes this process a worker; `alone`: it is nothing else, and ends when its parent does."""
    global _tokenizer, _validation_fraction, _marked
    _tokenizer, _validation_fraction, _marked = load_tokenizer(tokenizer), validation_fraction, marked
    if alone:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def pack(part: Part, folder: pathlib.Path, number: int) -> dict:
    """Writes the files of a part.

    Returns:
      what its JSON file says: per split `tokens, documents, bytes, given, crc`; `empty`, the documents left out;
      `read`, bytes of text; `seconds` in all, and those of them in the tokenizer.
    """
    start = time.perf_counter()
    dtype = dtype_of(_tokenizer.vocab_size, _marked)
    record = {"empty": 0, "read": 0, "tokenizer_seconds": 0.0}
    with contextlib.ExitStack() as stack:
        outputs = {s: stack.enter_context(_Output(folder / f"{number}.{s}", dtype)) for s in SPLITS}
        for document in part.read():
            if not document.text[document.given :].strip():  # nothing to predict
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
    """What `pack` has returned for this part, in this process or one that was stopped; None if it did not finish."""
    return read_json(folder / f"{number}.json")


def read_elements(folder: pathlib.Path, number: int, split: str, record: dict, dtype: np.dtype) -> np.ndarray | None:
    """The elements of a part; None if its file is not what was written, as after a loss of power."""
    try:
        elements = np.fromfile(folder / f"{number}.{split}", dtype)
    except FileNotFoundError:
        return None
    return elements if zlib.crc32(elements) == record[split]["crc"] else None


class _Output:
    """The elements of one split of a part, written as they come; the file gets its name at the end.

    Attributes:
      totals: `tokens, documents, bytes, given, crc` so far.
    """

    def __init__(self, path: pathlib.Path, dtype: np.dtype):
        self._path, self._temporary, self._dtype = path, path.with_name(f"{path.name}.{os.getpid()}"), dtype
        self._file = self._temporary.open("wb", buffering=2**20)
        self.totals = {"tokens": 0, "documents": 0, "bytes": 0, "given": 0, "crc": 0}

    def add(self, document: Document) -> float:
        """Appends <bos>, the tokens, <eos>; returns the seconds that the tokenizer took."""
        start = time.perf_counter()
        # Given and predicted text are tokenised apart: a token is one or the other.
        given = [_tokenizer.encode(piece) for piece in _pieces(document.text[: document.given])]
        predicted = [_tokenizer.encode(piece) for piece in _pieces(document.text[document.given :])]
        seconds = time.perf_counter() - start
        elements = np.empty(2 + sum(map(len, given)) + sum(map(len, predicted)), self._dtype)
        elements[0], elements[-1] = _tokenizer.bos, _tokenizer.eos
        np.concatenate([*given, *predicted], out=elements[1:-1], casting="unsafe")  # ids fit: they are below vocab_size
        number = sum(map(len, given))
        elements[1 : 1 + number] |= mark(self._dtype) if number else 0
        data = elements.tobytes()
        self._file.write(data)
        self.totals["crc"] = zlib.crc32(data, self.totals["crc"])
        self.totals["tokens"] += len(elements)
        self.totals["documents"] += 1
        self.totals["bytes"] += len(document.text) - document.given
        self.totals["given"] += number
        return seconds

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, failed, *_) -> None:
        try:
            self._file.close()
            if not failed:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)


def _pieces(text: bytes) -> list[bytes]:
    """The text; a long one in pieces that end after a line or a space, or else between two characters."""
    pieces, start = [], 0
    while len(text) - start > _PIECE_BYTES:
        stop = start + _PIECE_BYTES
        cut = max(text.rfind(b"\n", start, stop), text.rfind(b" ", start, stop)) + 1
        if cut <= start:
            cut = stop
            while text[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]] if start < len(text) else pieces
