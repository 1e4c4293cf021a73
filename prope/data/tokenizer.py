"""Converts text to ids and back. `byte` needs no file; any other name is the path or URL of a SentencePiece model."""

import hashlib

import numpy as np
from etils import epath

from prope.errors import UsageError

# Gemma's ids of the special tokens, which every tokenizer here has.
PAD, EOS, BOS, UNKNOWN = 0, 1, 2, 3

# SentencePiece writes a space as this character, and so reads the character itself back as a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class ByteTokenizer:
    """One id per byte of UTF-8, after the four special ids."""

    vocab_size = 260
    fingerprint = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without <bos> or <eos>: int32 [tokens]."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + 4

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(i - 4 for i in map(int, ids) if 4 <= i < self.vocab_size).decode(
            errors="replace"
        )


class SentencePieceTokenizer:
    """A SentencePiece model: Gemma's `tokenizer.model`, or one that prope.data.train_tokenizer wrote."""

    def __init__(self, path: str):
        import sentencepiece

        remedy = "give byte, Gemma's tokenizer.model, or one made by python -m prope.data.train_tokenizer"
        try:
            model = epath.Path(path).read_bytes()
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            if not self.processor.vocab_size():  # an empty file
                raise RuntimeError
        except (OSError, RuntimeError) as error:
            readable = isinstance(error, RuntimeError)
            reason = (
                "it is not a SentencePiece model" if readable else error.strerror or "no such file"
            )
            raise UsageError(
                f"config.data.tokenizer={path}: cannot be read: {reason}; {remedy}"
            ) from None
        special = [getattr(self.processor, f"{name}_id")() for name in ("pad", "eos", "bos", "unk")]
        if special != [PAD, EOS, BOS, UNKNOWN]:
            ids = "pad {}, eos {}, bos {}, unk {}"
            found, wanted = ids.format(*special), f"Gemma's, {ids.format(PAD, EOS, BOS, UNKNOWN)}"
            wrong = f"its special ids are {found} (-1: none) and must be {wanted}"
            raise UsageError(f"config.data.tokenizer={path}: {wrong}; {remedy}")
        self.vocab_size = self.processor.vocab_size()
        space = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        self._space = (
            space if UNKNOWN not in space else None
        )  # None: the model does not fall back on bytes
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without <bos> or <eos>; losslessly if the model falls back on bytes: int32 [tokens]."""
        string = text.decode()
        if self._space is None or _SPACE not in string:
            return np.array(self.processor.encode(string), np.int32)
        ids, *others = self.processor.encode(string.split(_SPACE))
        for segment in others:
            ids += self._space + segment
        return np.array(ids, np.int32)

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        return self.processor.decode([i for i in map(int, ids) if i < self.vocab_size])


def load_tokenizer(name: str) -> ByteTokenizer | SentencePieceTokenizer:
    """Returns the tokenizer that `config.data.tokenizer` names."""
    return ByteTokenizer() if name == "byte" else SentencePieceTokenizer(name)


def token_name(tokenizer: ByteTokenizer | SentencePieceTokenizer, token: int) -> str:
    """Returns a token as it can be shown: <bos>, or its text in quotes."""
    return {PAD: "<pad>", EOS: "<eos>", BOS: "<bos>"}.get(int(token)) or repr(
        tokenizer.decode([token])
    )
