"""Converts text to ids and back.

`byte` needs no file; any other name is the path or URL of a `tokenizer.json`, of a SentencePiece
model, or of a folder with one of them. All tokenizers have `vocab_size`, `text_size`, `special`,
`fingerprint`, `encode` and `decode`.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from prope.errors import first_line, usage_error
from prope.runtime.files import (
    TOKENIZER_FILES,
    as_path,
    parse_json,
    read_bytes,
    read_json,
    retry_reads,
    tokenizer_file,
)

# SentencePiece writes a space as this character, and so reads the character itself as a space.
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
FIELD = "config.data.tokenizer"
_REMEDY = (
    "give byte, a folder with tokenizer.json or tokenizer.model, or the file of either; "
    "python -m prope.data.train_tokenizer makes one"
)
# Names of special tokens, for a tokenizer.json with no file beside it that tells which it has.
_NAMES = {
    "pad": ("<pad>",),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>"),
}
# What stands between the documents of a family without <bos>, also where chats end otherwise.
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>")
# Files beside a tokenizer.json that tell the special tokens; the first that does counts.
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)
_DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # in tokenizer.json


class SpecialIds(NamedTuple):
    """The ids of a tokenizer's special tokens."""

    pad: int  # the end token where there is none: padding is told by its length
    eos: int
    bos: int | None  # None: no text begins with one
    unk: int | None  # None: the tokenizer knows every text
    separator: int | None = None  # what separates documents without <bos>; None: the end token

    @property
    def start(self) -> int:
        """The first id of every document: <bos>, or what separates documents without one.

        So a document is <bos>, text, <eos>; or the separator, text.
        """
        return _first((self.bos, self.separator, self.eos))

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a document."""
        return (self.eos,) if self.separator is None else (self.eos, self.separator)

    def is_unknown(self, ids):
        """Tells which ids of an array stand for text that the tokenizer lacks."""
        return ids == (-1 if self.unk is None else self.unk)


GEMMA_IDS = SpecialIds(pad=0, eos=1, bos=2, unk=3)


def _first(ids: Iterable[int | None]) -> int | None:
    """Returns the first id that is not None, if any."""
    return next((i for i in ids if i is not None), None)


class ByteTokenizer:
    """One id per byte of UTF-8, after the four special ids, which are Gemma's."""

    vocab_size = 260
    text_size = vocab_size
    special = GEMMA_IDS
    fingerprint = "byte"

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without special ids: int32 [tokens]."""
        return np.frombuffer(text, np.uint8).astype(np.int32) + 4

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        ids = np.asarray(ids, np.int64)
        text = (ids[(ids >= 4) & (ids < self.vocab_size)] - 4).astype(np.uint8)
        return text.tobytes().decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model: Gemma's or Mistral's, or one of prope.data.train_tokenizer."""

    def __init__(self, path: str, model: bytes):
        self.processor = _load_model(path, model)
        self.vocab_size = self.processor.vocab_size()
        self.text_size = self.vocab_size
        self.special = special_ids_of(path, self.processor)
        self.fingerprint = hashlib.sha256(model).hexdigest()
        space = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        first_piece = self.processor.id_to_piece(self.processor.encode("a")[0])
        # None: the model does not fall back on bytes, or would add a space for each.
        is_lossy = self.special.unk in space or first_piece.startswith(SPACE)
        self._space = None if is_lossy else space

    def encode(self, text: bytes) -> np.ndarray:
        """Encodes UTF-8 text, without special ids: int32 [tokens].

        It is lossless if the model falls back on bytes and puts no space before a text.
        """
        string = text.decode()
        if self._space is None or SPACE not in string:
            return np.array(self.processor.encode(string), np.int32)
        ids, *others = self.processor.encode(string.split(SPACE))
        for segment in others:
            ids += self._space + segment
        return np.array(ids, np.int32)

    def decode(self, ids) -> str:
        """Decodes ids; those without text are left out, broken UTF-8 becomes U+FFFD."""
        return self.processor.decode([int(i) for i in ids if i < self.vocab_size])


class JsonTokenizer:
    """A `tokenizer.json`, as the library `tokenizers` reads it.

    Text that spells a special token is text. The special ids are those of `beside`, a JSON object
    with the content of the files beside it by their names.
    """

    def __init__(self, path: str, content: bytes, beside: str):
        self.tokenizer, values = _load_json(path, content)
        self.special = _special_ids_beside(
            path, self.tokenizer, values["model"], json.loads(beside)
        )
        borders = {self.special.pad, self.special.eos, self.special.start}
        tokens = [self.tokenizer.id_to_token(i) for i in sorted(borders)]
        self.tokenizer.add_special_tokens(tokens)  # some files have them as ordinary ones
        self._borders = borders
        self.special_ids = {
            token["id"] for token in values.get("added_tokens") or () if token.get("special")
        }
        # Not in text, so they may lie beyond a model's vocabulary: Gemma 3 has one for images.
        unused = self.special_ids - {*borders, self.special.unk}
        ids = self.tokenizer.get_vocab().values()
        self.vocab_size = max(ids) + 1
        self.text_size = max(set(ids) - unused) + 1
        identity = {name: values.get(name) for name in _DECIDES_IDS} | {"special": self.special}
        identity = json.dumps(identity, sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(identity).hexdigest()

    def encode(self, text: bytes, has_markup: bool = False) -> np.ndarray:
        """Encodes UTF-8 text, without special ids: int32 [tokens].

        It is lossless unless the file normalises text. With markup, the name of a special token is
        that token.
        """
        self.tokenizer.encode_special_tokens = not has_markup
        (encoding,) = self.tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids) -> str:
        """Decodes ids; those of padding and borders are left out, broken UTF-8 becomes U+FFFD."""
        known = range(self.vocab_size)
        shown = [i for i in map(int, ids) if i in known and i not in self._borders]
        return self.tokenizer.decode(shown, skip_special_tokens=False)


# One of 262,144 ids takes 5 to 7 s to load, and a command asks for it several times.
_json_tokenizer = functools.lru_cache(1)(JsonTokenizer)

Tokenizer = ByteTokenizer | SentencePieceTokenizer | JsonTokenizer


def _load_model(path: str, model: bytes):
    """Returns the SentencePiece processor of a model; raises UsageError where it is none."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        processor = None
    if not processor or not processor.vocab_size():  # an empty file has no ids
        problem = "cannot be read: it is not a SentencePiece model"
        raise usage_error(FIELD, path, problem, _REMEDY)
    return processor


def special_ids_of(path: str, processor) -> SpecialIds:
    """Returns the special ids of a SentencePiece model, where -1 stands for none."""
    eos = processor.eos_id()
    if eos < 0:
        raise _without_end(path)
    pad = processor.pad_id()
    bos = processor.bos_id()
    return SpecialIds(
        pad=eos if pad < 0 else pad,
        eos=eos,
        bos=None if bos in (-1, eos) else bos,
        unk=processor.unk_id(),
    )


def _without_end(path: str):
    problem = "has no end token, which ends every document"
    remedy = "name one as eos_token in tokenizer_config.json beside it"
    return usage_error(FIELD, path, problem, remedy)


def _load_json(path: str, content: bytes) -> tuple[Any, dict]:
    """Returns the Tokenizer of a tokenizer.json, and its JSON; raises UsageError if it is none."""
    # One text at a time is encoded here, in processes of our own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    try:
        values = parse_json(content)
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        if not tokenizer.get_vocab():
            raise ValueError("its model has no tokens")
    except Exception as error:  # the library has no other kind
        problem = f"tokenizer.json cannot be used: {first_line(error)}"
        remedy = "download it again, or load it with AutoTokenizer and call save_pretrained"
        raise usage_error(FIELD, path, problem, remedy) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, values


def read_beside(file: epath.Path, name: str) -> dict:
    """Reads the JSON object in another file of a folder; empty where there is none."""
    values = read_json(file.with_name(name), "download it again")
    return values if isinstance(values, dict) else {}


def _special_ids_beside(path: str, tokenizer, model: dict, beside: dict[str, dict]) -> SpecialIds:
    """Finds the special ids: of the files beside tokenizer.json, or by their usual names."""

    def find(role: str) -> int | None:
        found = []
        for values in beside.values():
            name = values.get(f"{role}_token")
            name = name.get("content") if isinstance(name, dict) else name
            if isinstance(name, str):
                found.append(tokenizer.token_to_id(name))
            ids = values.get(f"{role}_token_id")
            first = ids[0] if isinstance(ids, list) and ids else ids
            if type(first) is int and first >= 0 and tokenizer.id_to_token(first):
                found.append(first)
        return _first([*found, *map(tokenizer.token_to_id, _NAMES[role])])

    eos = find("eos")
    if eos is None:
        raise _without_end(path)
    pad = find("pad")
    bos = _start_of_text(tokenizer, find("bos"), beside["tokenizer_config.json"])
    if bos == eos:
        bos = None
    unk = model.get("unk_id")
    if isinstance(model.get("unk_token"), str):
        unk = tokenizer.token_to_id(model["unk_token"])
    separators = [tokenizer.token_to_id(name) for name in _SEPARATORS]
    separator = _first(separators) if bos is None and eos not in separators else None
    return SpecialIds(
        pad=eos if pad is None else pad,
        eos=eos,
        bos=bos,
        unk=None if unk in (eos, bos, pad, separator) else unk,
        separator=separator,
    )


def _start_of_text(tokenizer, bos: int | None, values: dict) -> int | None:
    """Returns what texts begin with: `bos`, or another id, or None; `values` of its config."""
    # Gemma's texts all begin with <bos>, whether the files ask for it or not.
    if bos is not None and tokenizer.id_to_token(bos) == "<bos>":
        return bos
    begins = values.get("add_bos_token")
    if begins is not None:
        return bos if begins is True else None
    ids = tokenizer.encode("a").ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    return ids[0] if ids[:1] != plain[:1] else None


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `config.data.tokenizer` names.

    Raises UsageError where it cannot be read.
    """
    if name == "byte":
        return ByteTokenizer()
    path = as_path(FIELD, name)

    def read() -> tuple[epath.Path, bytes]:
        file = tokenizer_file(path)
        return file, read_bytes(file)

    try:
        file, content = retry_reads(path, read)
    except IsADirectoryError:
        problem = f"holds neither {' nor '.join(TOKENIZER_FILES)}"
        raise usage_error(FIELD, name, problem, _REMEDY) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror or 'no such file'}"
        raise usage_error(FIELD, name, problem, _REMEDY) from None
    if file.suffix == ".json":
        beside = {other: read_beside(file, other) for other in _BESIDE}
        return _json_tokenizer(name, content, json.dumps(beside))
    return SentencePieceTokenizer(name, content)


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token as it can be shown: <bos>, or its text in quotes."""
    special = tokenizer.special
    names = {special.pad: "<pad>", special.separator: "<separator>"}
    names |= {special.bos: "<bos>", special.eos: "<eos>"}
    return names.get(int(token)) or repr(tokenizer.decode([token]))
