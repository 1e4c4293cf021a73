"""Converts text to ids and back.

`byte` needs no file; any other name is the path or URL of a SentencePiece model.
"""

import hashlib

import numpy as np

from prope.errors import usage_error
from prope.runtime.files import as_path, read_bytes, retry_reads

# Gemma's ids of the special tokens, which every tokenizer here has.
PAD = 0
EOS = 1
BOS = 2
UNKNOWN = 3

# SentencePiece writes a space as this character, and so reads the character itself as a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_REMEDY = "give byte, Gemma's tokenizer.model, or one made by python -m prope.data.train_tokenizer"


class ByteTokenizer:
    """One id per byte of UTF-8, after the four special ids."""

    vocab_size = 260
    fingerprint = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without <bos> or <eos>: int32 [tokens]."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + 4

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        text = bytes(int(i) - 4 for i in ids if 4 <= i < self.vocab_size)
        return text.decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model: Gemma's `tokenizer.model`, or one of prope.data.train_tokenizer."""

    def __init__(self, path: str):
        model = _read_model(path)
        self.processor = _load_model(path, model)
        self.vocab_size = self.processor.vocab_size()
        self.fingerprint = hashlib.sha256(model).hexdigest()
        space = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        # None: the model does not fall back on bytes.
        self._space = None if UNKNOWN in space else space

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without <bos> or <eos>: int32 [tokens].

        It is lossless if the model falls back on bytes.
        """
        string = text.decode()
        if self._space is None or _SPACE not in string:
            return np.array(self.processor.encode(string), np.int32)
        ids, *others = self.processor.encode(string.split(_SPACE))
        for segment in others:
            ids += self._space + segment
        return np.array(ids, np.int32)

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        return self.processor.decode([int(i) for i in ids if i < self.vocab_size])


def _read_model(path: str) -> bytes:
    file = as_path("config.data.tokenizer", path)
    try:
        return retry_reads(file, lambda: read_bytes(file))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or 'no such file'}"
        raise usage_error("config.data.tokenizer", path, problem, _REMEDY) from None


def _load_model(path: str, model: bytes):
    """Returns the SentencePiece processor of a model; raises UsageError where it does not fit."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        processor = None
    if not processor or not processor.vocab_size():  # an empty file has no ids
        problem = "cannot be read: it is not a SentencePiece model"
        raise usage_error("config.data.tokenizer", path, problem, _REMEDY)
    special = (processor.pad_id(), processor.eos_id(), processor.bos_id(), processor.unk_id())
    expected = (PAD, EOS, BOS, UNKNOWN)
    if special != expected:
        ids = "pad {}, eos {}, bos {}, unk {}"
        problem = f"its special ids are {ids.format(*special)} (-1: none)"
        wanted = f"must be Gemma's, {ids.format(*expected)}"
        raise usage_error("config.data.tokenizer", path, f"{problem} and {wanted}", _REMEDY)
    return processor


def load_tokenizer(name: str) -> ByteTokenizer | SentencePieceTokenizer:
    """Returns the tokenizer that `config.data.tokenizer` names."""
    return ByteTokenizer() if name == "byte" else SentencePieceTokenizer(name)


def token_name(tokenizer: ByteTokenizer | SentencePieceTokenizer, token: int) -> str:
    """Returns a token as it can be shown: <bos>, or its text in quotes."""
    special = {PAD: "<pad>", EOS: "<eos>", BOS: "<bos>"}
    return special.get(int(token)) or repr(tokenizer.decode([token]))
