"""Trains a SentencePiece model on a dataset: python -m prope.data.train_tokenizer --config=F --output=M.model.

It learns from the training documents, never from held-out ones, and from a sample of their lines that a hash chooses:
bounded in memory, spread over the whole dataset, and the same every time, so the same command gives the same file.
The model has Gemma's special ids and changes no text: every document decodes to its exact bytes.
"""

import hashlib
import heapq
import io
import logging
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

from absl import flags
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm

from prope import command
from prope.data.sources.find import find_source, weighted
from prope.data.store.pack import is_validation
from prope.data.tokenizer import BOS, EOS, PAD, UNKNOWN, load_tokenizer
from prope.errors import UsageError
from prope.runtime.files import write_atomic
from prope.runtime.validate import validate

_SENTENCE = 4096  # bytes; SentencePiece leaves out a line that is longer than its limit
_SMALLEST = 4 + 256  # ids: the special ones and the bytes
_THREADS = 4  # the sums of an unigram model depend on it, so it is not the machine's

log = logging.getLogger("prope")


def train_tokenizer(config: ConfigDict, output: str, vocab_size: int, model_type: str, sample_bytes: int) -> dict:
    """Writes a model; returns what the command prints.

    Args:
      config: of a run; only its data matters, not its tokenizer.
      output: path of the file to write.
      vocab_size: ids of the tokenizer, special ones and bytes included.
      model_type: unigram or bpe.
      sample_bytes: of text to learn from, at most; memory is about 30 times that.

    Raises:
      UsageError: the data or the size of the vocabulary does not fit.
    """
    validate(config)
    path = pathlib.Path(output)
    if not path.parent.is_dir():
        raise UsageError(f"--output={output}: there is no folder {path.parent}")
    if vocab_size <= _SMALLEST:
        raise UsageError(
            f"--vocab_size={vocab_size}: must be more than {_SMALLEST}, the special tokens and the bytes; "
            "it is config.model.vocab_size where it is not given"
        )
    sentences, total = [], 0
    for weight, data in weighted(config.data):
        documents = _train_documents(find_source(data), data.validation_fraction)
        lines, size = sample(documents, int(sample_bytes * weight))
        sentences, total = sentences + lines, total + size
    size = sum(map(len, sentences))
    log.info("learning from %s of %s bytes of text, %s lines", f"{size:,}", f"{total:,}", f"{len(sentences):,}")
    model = _learn(sentences, vocab_size, model_type)
    try:
        write_atomic(path, model)
    except OSError as error:
        raise UsageError(f"--output={output}: cannot be written: {error.strerror}") from error
    tokenizer = load_tokenizer(str(path))
    tokens = sum(len(tokenizer.encode(sentence)) for sentence in sentences[:10_000])
    return {
        "model": str(path),
        "vocab_size": tokenizer.vocab_size,
        "model_type": model_type,
        "fingerprint": tokenizer.fingerprint,
        "sample_bytes": size,
        "train_bytes": total,
        "bytes_per_token": round(sum(map(len, sentences[:10_000])) / tokens, 3),
    }


def sample(documents: Iterable[bytes], most: int) -> tuple[list[bytes], int]:
    """The lines of the documents, or, beyond `most` bytes, those with the smallest hashes.

    Returns:
      lines, at most 4096 bytes long, in the order of their hashes; and the bytes of all documents together.
    """
    kept: list[tuple[int, int, bytes]] = []  # a heap: the largest hash is on top
    size = total = number = 0
    limit = 2**64  # hashes from here on are out for good, so the order of the documents does not matter
    for document in documents:
        total += len(document)
        name = hashlib.blake2b(document, digest_size=16).digest()
        for place, line in enumerate(_lines(document)):
            # Of the document and the place, so that lines which are everywhere come as often as they do there.
            key = int.from_bytes(hashlib.blake2b(b"%b %d" % (name, place), digest_size=8).digest())
            if key >= limit:
                continue
            number += 1
            heapq.heappush(kept, (-key, number, line))
            size += len(line)
            while size > most:
                negative, _, dropped = heapq.heappop(kept)
                size, limit = size - len(dropped), -negative
    return [line for _, _, line in sorted(kept, key=lambda entry: (-entry[0], entry[1]))], total


def _lines(document: bytes) -> Iterator[bytes]:
    """The document in pieces that end after a line break or, where a line is long, after a space or a character."""
    for line in document.splitlines(keepends=True):
        while len(line) > _SENTENCE:
            cut = line.rfind(b" ", 0, _SENTENCE)
            if cut <= 0:
                cut = _SENTENCE
                while line[cut] & 0xC0 == 0x80:  # the middle of a character
                    cut -= 1
            yield line[:cut]
            line = line[cut:]
        yield line


def _train_documents(source, validation_fraction: float) -> Iterator[bytes]:
    with tqdm(total=source.num_bytes, unit="B", unit_scale=True, desc="text", disable=not sys.stderr.isatty()) as bar:
        for document in source.documents():
            bar.update(len(document))
            if not is_validation(document, validation_fraction):
                yield document


def _learn(sentences: list[bytes], vocab_size: int, model_type: str) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=vocab_size, model_type=model_type,
            pad_id=PAD, eos_id=EOS, bos_id=BOS, unk_id=UNKNOWN, eos_piece="<eos>", bos_piece="<bos>",
            # No text is changed, and none is unknown.
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            byte_fallback=True, allow_whitespace_only_pieces=True, split_digits=True,
            max_sentence_length=_SENTENCE + 1, num_threads=_THREADS, minloglevel=1,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = re.sub(r"^.*\]\s*| or decrease .*", "", str(error).strip()) or "it finds no text in them"
        raise UsageError(
            f"--vocab_size={vocab_size}: SentencePiece cannot learn it from {len(sentences):,} lines: {reason}"
        ) from None
    return model.getvalue()


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the config file that names the dataset")
    flags.DEFINE_string("output", None, "file to write, such as tokenizer.model")
    flags.DEFINE_integer("vocab_size", None, "ids of the tokenizer; config.model.vocab_size by default")
    flags.DEFINE_enum("model_type", "unigram", ["unigram", "bpe"], "the kind of model; Gemma's is bpe")
    flags.DEFINE_integer("sample_bytes", 2**26, "learn from at most this much text", lower_bound=1)
    flags.mark_flags_as_required(["config", "output"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    vocab_size = given.config.model.vocab_size if given.vocab_size is None else given.vocab_size
    return train_tokenizer(given.config, given.output, vocab_size, given.model_type, given.sample_bytes)


if __name__ == "__main__":
    command.run(main, define_flags)
