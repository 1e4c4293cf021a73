"""Trains a SentencePiece model on the training documents of a dataset; what `prope.data.train_tokenizer` runs.

A hash chooses the lines that it learns from: bounded in memory, spread over the dataset, and the same every time.
"""

import functools
import hashlib
import heapq
import io
import re
import sys
from collections.abc import Iterable, Iterator

from etils import epath
from ml_collections import ConfigDict
from tqdm import tqdm

from prope.data.sources.find import find_source, weighted_sources
from prope.data.store.pack import cut_text, is_validation
from prope.data.tokenizer import BOS, EOS, PAD, UNKNOWN, load_tokenizer
from prope.errors import UsageError, log
from prope.runtime.files import is_url, write_output
from prope.runtime.validate import validate

_SENTENCE_BYTES = 4096  # SentencePiece leaves out lines above its limit
_RESERVED_IDS = 4 + 256  # the special ones and the bytes
_THREADS = 4  # fixed, because the sums of a unigram model depend on it


def train_tokenizer(
    config: ConfigDict, output: str, vocab_size: int, model_type: str, sample_bytes: int
) -> dict:
    """Trains a model on the data of a run's config, and writes it; returns what the command prints.

    `vocab_size` counts the special ids and the bytes. Memory is about 30 times `sample_bytes`. Raises UsageError where
    the data or the size of the vocabulary does not fit.
    """
    validate(config)
    path = epath.Path(output)
    if not is_url(path) and not path.parent.is_dir():
        raise UsageError(f"--output={output}: there is no folder {path.parent}")
    if vocab_size <= _RESERVED_IDS:
        least = f"must be more than {_RESERVED_IDS}, the special tokens and the bytes"
        raise UsageError(
            f"--vocab_size={vocab_size}: {least}; it is config.model.vocab_size where it is not given"
        )
    sentences, total = [], 0
    for weight, data in weighted_sources(config.data):
        lines, size = sample(
            _train_documents(find_source(data), data.validation_fraction),
            int(sample_bytes * weight),
        )
        sentences, total = sentences + lines, total + size
    size = sum(map(len, sentences))
    log.info(
        "learning from %s of %s bytes of text, %s lines",
        f"{size:,}",
        f"{total:,}",
        f"{len(sentences):,}",
    )
    model = _learn(sentences, vocab_size, model_type)
    write_output("output", path, model)
    tokenizer = load_tokenizer(str(path))
    tokens = sum(len(tokenizer.encode(sentence)) for sentence in sentences[:10_000])
    trained = {"model": str(path), "vocab_size": tokenizer.vocab_size, "model_type": model_type}
    rate = round(sum(map(len, sentences[:10_000])) / tokens, 3)
    sizes = {"sample_bytes": size, "train_bytes": total, "bytes_per_token": rate}
    return trained | {"fingerprint": tokenizer.fingerprint} | sizes


def sample(documents: Iterable[bytes], max_bytes: int) -> tuple[list[bytes], int]:
    """Samples lines: those with the smallest hashes, up to `max_bytes`.

    Returns lines of at most 4096 bytes, in the order of their hashes; and the size of all documents.
    """
    heap: list[tuple[int, bytes]] = []  # (-hash, line): the largest hash is on top
    size = total = 0
    limit = 2**64  # hashes from here on are dropped for good, whatever the order
    for document in documents:
        total += len(document)
        document_hash = hashlib.blake2b(document, digest_size=16).digest()
        for index, line in enumerate(_lines(document)):
            # Of document and index, so that a repeated line is sampled as often as it occurs.
            key = int.from_bytes(
                hashlib.blake2b(b"%b %d" % (document_hash, index), digest_size=8).digest()
            )
            if key < limit:
                heapq.heappush(heap, (-key, line))
                size += len(line)
            while size > max_bytes:
                negative, dropped = heapq.heappop(heap)
                size, limit = size - len(dropped), -negative
    return [line for _, line in sorted(heap, reverse=True)], total


def _lines(document: bytes) -> Iterator[bytes]:
    """Yields lines with their breaks; a long line is cut before a space, or between two characters."""
    for line in document.splitlines(keepends=True):
        yield from cut_text(line, _SENTENCE_BYTES, functools.partial(line.rfind, b" "))


def _train_documents(source, validation_fraction: float) -> Iterator[bytes]:
    with tqdm(
        total=source.num_bytes,
        unit="B",
        unit_scale=True,
        desc="text",
        disable=not sys.stderr.isatty(),
    ) as bar:
        for document in source.documents():
            bar.update(len(document))
            if not is_validation(document, validation_fraction):
                yield document


def _learn(sentences: list[bytes], vocab_size: int, model_type: str) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            pad_id=PAD,
            eos_id=EOS,
            bos_id=BOS,
            unk_id=UNKNOWN,
            eos_piece="<eos>",
            bos_piece="<bos>",
            # No text is changed, and none is unknown.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=_SENTENCE_BYTES + 1,
            num_threads=_THREADS,
            minloglevel=1,
        )
    except (RuntimeError, OSError) as error:
        reason = (
            re.sub(r"^.*\]\s*| or decrease .*", "", str(error).strip())
            or "it finds no text in them"
        )
        failed = f"SentencePiece cannot learn it from {len(sentences):,} lines"
        raise UsageError(f"--vocab_size={vocab_size}: {failed}: {reason}") from None
    return model.getvalue()
