"""Stage 3: text to ids and back. `byte` needs no file; anything else is the path of a SentencePiece model."""

import hashlib
import pathlib

import numpy as np

from prope.errors import UsageError

# Gemma's ids of the special tokens; the byte tokenizer has them too.
PAD, EOS, BOS, UNKNOWN = 0, 1, 2, 3


class ByteTokenizer:
    """One id per byte of UTF-8, after the four special ids."""

    vocab_size = 260
    bos, eos, pad = BOS, EOS, PAD
    fingerprint = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of the text, without <bos> or <eos>."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + 4

    def decode(self, ids) -> str:
        """The text of the ids; special ones are left out, broken UTF-8 is shown as U+FFFD."""
        return bytes(i - 4 for i in map(int, ids) if i >= 4).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model: Gemma's `tokenizer.model`, or one trained on the data.

    Raises:
      UsageError: the file cannot be read, or has no <bos> or <eos>.
    """

    def __init__(self, path: str):
        import sentencepiece

        try:
            model = pathlib.Path(path).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a SentencePiece model"
            raise UsageError(
                f"config.data.tokenizer={path}: cannot be read: {reason}; give byte, or the path of a .model file"
            ) from None
        self.vocab_size = self._processor.vocab_size()
        self.bos, self.eos = self._processor.bos_id(), self._processor.eos_id()
        self.pad = max(self._processor.pad_id(), 0)  # padding has no weight, so any id will do where there is none
        if self.bos < 0 or self.eos < 0:
            raise UsageError(f"config.data.tokenizer={path}: has no <bos> or no <eos>, which open and close a document")
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of the text, without <bos> or <eos>."""
        return np.array(self._processor.encode(text.decode()), np.int32)

    def decode(self, ids) -> str:
        """The text of the ids."""
        return self._processor.decode([int(i) for i in ids])


def load_tokenizer(name: str) -> ByteTokenizer | SentencePieceTokenizer:
    """The tokenizer that `config.data.tokenizer` names."""
    return ByteTokenizer() if name == "byte" else SentencePieceTokenizer(name)
