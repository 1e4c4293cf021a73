"""What a worker does: tokenises a chunk of documents into files.

Files of chunk n: `n.train` and `n.validation`, elements as in the store, and then `n.json`, without
which they do not count.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
import zlib
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import numpy as np

from prope.data.sources.base import Chunk, Document, cut_text
from prope.data.store.arrays import COUNTS, SPLITS, element_dtype, prompt_bit
from prope.data.tokenizer import load_tokenizer
from prope.errors import RunFailed
from prope.runtime.files import write_atomic

SEGMENT_BYTES = 2**22  # a longer document is tokenised in segments, to bound the memory


def start_worker(
    tokenizer: str, validation_fraction: float, has_prompts: bool, stop: Event | None = None
) -> None:
    """Sets up this process as a worker; with `stop` it exits with its parent."""
    global _tokenizer, _dtype, _validation_fraction, _stop
    _tokenizer = load_tokenizer(tokenizer)
    _dtype = element_dtype(_tokenizer.vocab_size, has_prompts)
    _validation_fraction = validation_fraction
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


def pack(chunk: Chunk, folder: pathlib.Path, number: int) -> dict:
    """Writes the files of a chunk; returns the content of its JSON file.

    It holds, per split, COUNTS and `crc`; `chunk`, its key; and `empty`, the documents left out.
    """
    zeros = dict.fromkeys((*COUNTS, "crc"), 0)
    record: dict = {split: dict(zeros) for split in SPLITS}
    record |= {"chunk": chunk.key, "empty": 0}
    with contextlib.ExitStack() as stack:
        files = {}
        for split in SPLITS:
            file = (folder / f"{number}.{split}").open("wb", 2**20)
            files[split] = stack.enter_context(file)
        for document in chunk.read():
            predicted_text = document.text[document.prompt_bytes :]
            if not predicted_text.strip():
                record["empty"] += 1
                continue
            held_out = is_validation(document.split_key, _validation_fraction)
            split = "validation" if held_out else "train"
            elements, prompt_tokens, unk_tokens = _tokenise(document)
            data = elements.tobytes()
            files[split].write(data)
            counts = record[split]
            counts["crc"] = zlib.crc32(data, counts["crc"])
            counts["tokens"] += len(elements)
            counts["documents"] += 1
            counts["bytes"] += len(predicted_text)
            counts["prompt_tokens"] += prompt_tokens
            counts["unk_tokens"] += unk_tokens
    write_atomic(folder / f"{number}.json", json.dumps(record))
    return record


def is_validation(document: bytes, fraction: float) -> bool:
    """Tells whether a document is held out: by a hash of its text, so by nothing else."""
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest())
    return number < fraction * 2**64


def read_elements(
    folder: pathlib.Path, number: int, split: str, record: dict, dtype: np.dtype
) -> np.ndarray:
    """Returns the elements of a chunk.

    A file that is not what was written, as after a power failure, is dropped: RunFailed.
    """
    path = folder / f"{number}.{split}"
    elements = np.fromfile(path, dtype) if path.exists() else np.empty(0, dtype)
    if zlib.crc32(elements) != record[split]["crc"]:
        (folder / f"{number}.json").unlink(missing_ok=True)
        problem = f"chunk {number} is damaged and was dropped"
        raise RunFailed(f"{folder}: {problem}; run the same command again")
    return elements


def _tokenise(document: Document) -> tuple[np.ndarray, int, int]:
    """Returns a document's elements, as in the store; counts those of prompts, and <unk>."""
    special = _tokenizer.special
    # Prompt and predicted text are tokenised apart: a token belongs to one or the other.
    prompt = _encode(document.text[: document.prompt_bytes])
    predicted = _encode(document.text[document.prompt_bytes :])
    end = [] if special.bos is None else [[special.eos]]
    ids = np.concatenate([[special.start], *prompt, *predicted, *end])
    elements = ids.astype(_dtype)
    prompt_tokens = sum(map(len, prompt))
    elements[1 : 1 + prompt_tokens] |= prompt_bit(_dtype)
    return elements, prompt_tokens, int(np.count_nonzero(special.is_unknown(ids)))


def _encode(text: bytes) -> list[np.ndarray]:
    return [_tokenizer.encode(segment) for segment in segments(text)]


def segments(text: bytes) -> Iterator[bytes]:
    """Yields segments of a long text that end after a line or a space."""

    def find_cut(start: int, stop: int) -> int:
        last_line_end = text.rfind(b"\n", start, stop)
        last_space = text.rfind(b" ", start, stop)
        return max(last_line_end, last_space) + 1

    return cut_text(text, SEGMENT_BYTES, find_cut)
