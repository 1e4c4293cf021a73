"""What a worker does: tokenises a chunk of documents into files.

Files of chunk n: `n.train` and `n.validation`, elements as in the store, and then `n.json`, without which they do not
count.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

import numpy as np

from prope.data.sources.base import Chunk, Document
from prope.data.store.arrays import COUNTS, SPLITS, element_dtype, prompt_bit
from prope.data.tokenizer import BOS, EOS, load_tokenizer
from prope.errors import RunFailed
from prope.runtime.files import write_atomic

_SEGMENT_BYTES = 2**22  # a longer document is tokenised in segments, to bound the memory


def start_worker(
    tokenizer: str, validation_fraction: float, has_prompts: bool, stop: Event | None = None
) -> None:
    """Sets up this process as a worker; with `stop` it does nothing else, and exits with its parent."""
    global _tokenizer, _validation_fraction, _marked, _stop
    _tokenizer, _validation_fraction, _marked, _stop = (
        load_tokenizer(tokenizer),
        validation_fraction,
        has_prompts,
        stop,
    )
    if stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
        threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def pack_run(chunks: list[tuple[int, Chunk]], folder: pathlib.Path) -> list[tuple[int, dict]]:
    """Packs chunks one after the other, unless the workers are told to stop; returns (number, record) of each."""
    return [(number, pack(chunk, folder, number)) for number, chunk in chunks if not _stop.is_set()]


def pack(chunk: Chunk, folder: pathlib.Path, number: int) -> dict:
    """Writes the files of a chunk; returns the content of its JSON file.

    It holds, per split, `tokens, documents, bytes, given, crc`; `chunk`, its key; `empty`, the documents left out;
    `seconds` in all, and `tokenizer_seconds` of them.
    """
    start = time.perf_counter()
    record: dict = {split: dict.fromkeys((*COUNTS, "crc"), 0) for split in SPLITS}
    record |= {"chunk": chunk.key, "empty": 0, "tokenizer_seconds": 0.0}
    with contextlib.ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{number}.{split}").open("wb", 2**20))
            for split in SPLITS
        }
        for document in chunk.read():
            if not document.text[document.prompt_bytes :].strip():  # nothing to predict
                record["empty"] += 1
                continue
            split = "validation" if is_validation(document.text, _validation_fraction) else "train"
            record["tokenizer_seconds"] += _append(document, files[split], record[split])
    record["seconds"] = time.perf_counter() - start
    write_atomic(folder / f"{number}.json", json.dumps(record))
    return record


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document is held out: decided by a hash of its text, so it depends on nothing else."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < fraction * 2**64


def read_elements(
    folder: pathlib.Path, number: int, split: str, record: dict, dtype: np.dtype
) -> np.ndarray:
    """Returns the elements of a chunk; drops one whose file is not what was written, as after a power failure."""
    path = folder / f"{number}.{split}"
    elements = np.fromfile(path, dtype) if path.exists() else np.empty(0, dtype)
    if zlib.crc32(elements) != record[split]["crc"]:
        (folder / f"{number}.json").unlink(missing_ok=True)
        raise RunFailed(
            f"{folder}: chunk {number} is damaged and was dropped; run the same command again"
        )
    return elements


def _append(document: Document, file: io.BufferedWriter, counts: dict) -> float:
    """Writes <bos>, the tokens, <eos>, and adds to `counts`; returns the seconds spent in the tokenizer."""
    start = time.perf_counter()
    # Prompt and predicted text are tokenised apart: a token belongs to one or the other.
    prompt = [
        _tokenizer.encode(segment) for segment in _segments(document.text[: document.prompt_bytes])
    ]
    predicted = [
        _tokenizer.encode(segment) for segment in _segments(document.text[document.prompt_bytes :])
    ]
    seconds = time.perf_counter() - start
    dtype = element_dtype(_tokenizer.vocab_size, _marked)
    tokens = [[BOS], *prompt, *predicted, [EOS]]
    elements = np.concatenate(tokens, dtype=dtype, casting="unsafe")  # ids fit: below vocab_size
    prompt_tokens = sum(map(len, prompt))
    elements[1 : 1 + prompt_tokens] |= prompt_bit(dtype)
    data = elements.tobytes()
    file.write(data)
    counts["crc"] = zlib.crc32(data, counts["crc"])
    counts["tokens"] += len(elements)
    counts["documents"] += 1
    counts["bytes"] += len(document.text) - document.prompt_bytes
    counts["prompt_tokens"] += prompt_tokens
    return seconds


def _segments(text: bytes) -> Iterator[bytes]:
    """Yields segments of a long text that end after a line or a space."""
    return cut_text(
        text,
        _SEGMENT_BYTES,
        lambda *span: max(text.rfind(b"\n", *span), text.rfind(b" ", *span)) + 1,
    )


def cut_text(text: bytes, limit: int, find_cut: Callable[[int, int], int]) -> Iterator[bytes]:
    """Yields segments of at most `limit` bytes, which end at `find_cut(start, latest end)`, or between characters."""
    start = 0
    while len(text) - start > limit:
        cut = find_cut(start, start + limit)
        if cut <= start:
            cut = start + limit
            while text[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
