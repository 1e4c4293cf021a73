"""Trains a SentencePiece model on the training documents of a dataset.

A hash chooses the lines that it learns from: bounded in memory, spread over the dataset, and the
same every time. (SentencePiece's own sample differs from process to process.)
"""

import functools
import hashlib
import heapq
import io
from collections.abc import Iterable, Iterator

from etils import epath
from tqdm import tqdm

from prope.data.sources.base import check_bad_rows, cut_text
from prope.data.sources.find import find_source
from prope.data.store.split import find_rule, hash_text
from prope.data.tokenizer import GEMMA_IDS, load_tokenizer
from prope.errors import first_line, log, usage_error
from prope.runtime.files import is_url, write_output
from prope.spec.data import DataSpec
from prope.spec.run import Spec

_LINE_BYTES = 4096  # SentencePiece leaves out lines above its limit
_RESERVED_IDS = 4 + 256  # the special ones and the bytes
_THREADS = 4  # fixed, because the sums of a unigram model depend on it


def train_tokenizer(
    spec: Spec, output: str, vocab_size: int, model_type: str, sample_bytes: int
) -> dict:
    """Trains a model on the data of a run's config, and writes it.

    Returns what the command prints. `vocab_size` counts the special ids and the bytes. Memory is
    about 30 times `sample_bytes`. Raises UsageError where the data or the size of the vocabulary
    does not fit.
    """
    path = epath.Path(output)
    if not is_url(path) and not path.parent.is_dir():
        raise usage_error("--output", output, f"there is no folder {path.parent}")
    if vocab_size <= _RESERVED_IDS:
        problem = f"must be more than {_RESERVED_IDS}, the special tokens and the bytes"
        default = "it is config.model.vocab_size where it is not given"
        raise usage_error("--vocab_size", vocab_size, problem, default)
    lines = []
    train_bytes = 0
    for weight, data in spec.data.weighted_sources():
        sampled, num_bytes = sample(_train_documents(data), int(sample_bytes * weight))
        lines += sampled
        train_bytes += num_bytes
    size = sum(map(len, lines))
    log.info("learning from %s of %s bytes of text", f"{size:,}", f"{train_bytes:,}")
    write_output("output", path, _learn(lines, vocab_size, model_type))
    tokenizer = load_tokenizer(str(path))
    first_lines = lines[:10_000]
    num_tokens = sum(len(tokenizer.encode(line)) for line in first_lines)
    return {
        "model": str(path),
        "vocab_size": tokenizer.vocab_size,
        "model_type": model_type,
        "fingerprint": tokenizer.fingerprint,
        "sample_bytes": size,
        "train_bytes": train_bytes,
        "bytes_per_token": round(sum(map(len, first_lines)) / num_tokens, 3),
    }


def _train_documents(data: DataSpec) -> Iterator[bytes]:
    """Yields the training text of a source, with a progress bar in a terminal."""
    source = find_source(data)
    rule = find_rule(source, data.validation_fraction)
    bad_rows = []
    with tqdm(total=source.num_bytes, unit="B", unit_scale=True, desc="text", disable=None) as bar:
        for chunk in source.chunks:
            for document in chunk.read():
                bar.update(len(document.text))
                if document.bad:
                    bad_rows.append(document.bad)
                    continue
                parts = rule.parts(document, chunk.split)
                yield from (text for split, text in parts if split == "train")
    check_bad_rows(bad_rows, data.max_bad_rows)


def sample(documents: Iterable[bytes], max_bytes: int) -> tuple[list[bytes], int]:
    """Samples lines: those with the smallest hashes, up to `max_bytes`.

    Returns lines of at most 4096 bytes, in the order of their hashes; and the size of all
    documents.
    """
    heap: list[tuple[int, bytes]] = []  # (-hash, line): the largest hash is on top
    size = 0
    total = 0
    limit = 2**64  # hashes from here on are dropped for good, whatever the order
    for document in documents:
        total += len(document)
        document_hash = hashlib.blake2b(document, digest_size=16).digest()
        for index, line in enumerate(split_lines(document)):
            # With the index, so that a repeated line is sampled as often as it occurs.
            place = b"%b %d" % (document_hash, index)
            line_hash = hash_text(place)
            if line_hash < limit:
                heapq.heappush(heap, (-line_hash, line))
                size += len(line)
            while size > max_bytes:
                negative_hash, dropped = heapq.heappop(heap)
                limit = -negative_hash
                size -= len(dropped)
    return [line for _, line in sorted(heap, reverse=True)], total


def split_lines(document: bytes) -> Iterator[bytes]:
    """Yields lines with their breaks; a long one is cut before a space, or between characters."""
    for line in document.splitlines(keepends=True):
        yield from cut_text(line, _LINE_BYTES, functools.partial(line.rfind, b" "))


def _learn(lines: list[bytes], vocab_size: int, model_type: str) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            pad_id=GEMMA_IDS.pad,
            eos_id=GEMMA_IDS.eos,
            bos_id=GEMMA_IDS.bos,
            unk_id=GEMMA_IDS.unk,
            eos_piece="<eos>",
            bos_piece="<bos>",
            # No text is changed, and none is unknown.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=_LINE_BYTES + 1,
            num_threads=_THREADS,
            minloglevel=1,
        )
    except (RuntimeError, OSError) as error:
        problem = f"SentencePiece cannot learn it from {len(lines):,} lines: {first_line(error)}"
        raise usage_error("--vocab_size", vocab_size, problem) from None
    return model.getvalue()
