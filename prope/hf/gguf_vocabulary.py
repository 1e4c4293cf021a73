"""The vocabulary of a run's tokenizer in a GGUF file, by which llama.cpp gives the same ids."""

import contextlib
import json
from typing import Any, NamedTuple

from prope.data.chat import read_template
from prope.data.tokenizer import FIELD, SPACE, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from prope.errors import shorten, usage_error
from prope.hf.tokenizers import read_model
from prope.spec.run import Spec

# Types of tokens, which are those of SentencePiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the steps in which a tokenizer.json cuts a text into words: their name in llama.cpp.
_CUTS = {
    "ByteLevel True": "gpt-2",
    "Digits True, ByteLevel True": "smollm",
    f"{_WORDS}, ByteLevel False": "llama-bpe",
    f"{_WORDS.replace('{1,3}', '')}, ByteLevel False": "qwen2",
}
_TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREFIX = {"type": "Prepend", "prepend": SPACE}
_REMEDY = "export it with python -m prope.export_hf, which keeps the tokenizer"


class _Token(NamedTuple):
    text: str
    score: float = 0.0
    kind: int = _NORMAL


def list_vocabulary(spec: Spec, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of a GGUF file's header that are a run's vocabulary.

    Raises UsageError where llama.cpp has no tokenizer that gives the same ids.
    """
    name = spec.data.tokenizer
    kinds = {ByteTokenizer: _of_bytes, SentencePieceTokenizer: _of_sentencepiece}
    try:
        tokens, fields = kinds.get(type(tokenizer), _of_json)(tokenizer)
    except ValueError as error:
        problem = f"llama.cpp has no such tokenizer: {error}"
        raise usage_error(FIELD, name, problem, _REMEDY) from None
    rows = [tokens.get(i, _Token(f"[PAD{i}]", 0.0, _UNUSED)) for i in range(spec.model.vocab_size)]
    special = tokenizer.special
    ids = {"eos": special.eos, "bos": special.start, "padding": special.pad, "unknown": special.unk}
    ids["eot"] = next(iter(spec.data.stop_ids), None)
    fields |= {f"{role}_token_id": i for role, i in ids.items() if i is not None}
    fields |= {"add_bos_token": special.bos is not None, "add_eos_token": False}
    fields["tokens"], fields["scores"], fields["token_type"] = map(list, zip(*rows, strict=True))
    fields = {f"tokenizer.ggml.{field}": value for field, value in fields.items()}
    with contextlib.suppress(ValueError):  # there is none
        fields["tokenizer.chat_template"], _ = read_template(name, tokenizer)
    return fields


def _of_bytes(_) -> tuple[dict[int, _Token], dict]:
    """Has a token for every byte; that of a space is SPACE, as which llama.cpp reads it."""
    tokens = [_Token(f"<{name}>", 0.0, _CONTROL) for name in ("pad", "eos", "bos")]
    tokens.append(_Token("<unk>", 0.0, _UNKNOWN))
    for byte in range(256):
        tokens.append(_Token(SPACE) if byte == 32 else _Token(f"<0x{byte:02X}>", 0.0, _BYTE))
    return dict(enumerate(tokens)), {"model": "llama", "add_space_prefix": False}


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> tuple[dict[int, _Token], dict]:
    proto = read_model(tokenizer)
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise ValueError("it is a unigram model; of BPE there is one")
    rules = proto.normalizer_spec
    if rules.precompiled_charsmap or rules.remove_extra_whitespaces:
        raise ValueError("it normalises a text")
    tokens = [_Token(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    fields = {"model": "llama", "add_space_prefix": rules.add_dummy_prefix}
    return dict(enumerate(tokens)), fields


def _of_json(tokenizer) -> tuple[dict[int, _Token], dict]:
    values = json.loads(tokenizer.tokenizer.to_str())
    model = values["model"]
    if model["type"] != "BPE":
        raise ValueError(f"its model is {model['type']}, not BPE")
    ids = model["vocab"]
    normalizer = values["normalizer"] or {}
    rules = normalizer.get("normalizers", [normalizer] if normalizer else [])
    cut = values["pre_tokenizer"] or {}
    cuts = cut.get("pretokenizers", [cut])
    scores = {}
    if model[
        "byte_fallback"
    ]:  # in SentencePiece's form: the pair of the best score is merged first
        if rules not in ([_TO_SPACE], [_PREFIX, _TO_SPACE]):
            raise ValueError(f"it normalises a text by {shorten(rules)}")
        if cut and cut.get("pattern") != {"String": " "}:  # of which there are none any more
            raise ValueError(f"it cuts a text by {shorten(cut)}")
        for rank, pair in enumerate(model["merges"]):
            scores.setdefault(ids["".join(pair)], -float(rank))
        fields = {"model": "llama", "add_space_prefix": rules[0] == _PREFIX}
    else:
        steps = ", ".join(map(_describe, cuts))
        if steps not in _CUTS or rules not in ([], [{"type": "NFC"}]):
            raise ValueError(f"it cuts a text by {shorten(steps)}")
        merges = [" ".join(pair) for pair in model["merges"]]
        fields = {"model": "gpt2", "pre": _CUTS[steps], "merges": merges}
    tokens = {i: _Token(text, scores.get(i, -1e9)) for text, i in ids.items()}
    if model["byte_fallback"]:
        for byte in range(256):
            text = f"<0x{byte:02X}>"
            tokens[ids[text]] = _Token(text, 0.0, _BYTE)
    for token in values["added_tokens"]:
        kind = _CONTROL if token["special"] else _USER_DEFINED
        kind = _UNKNOWN if token["id"] == tokenizer.special.unk else kind
        tokens[token["id"]] = _Token(token["content"], 0.0, kind)
    return tokens, fields


def _describe(step: dict) -> str:
    """Returns a step of `_CUTS`."""
    if step.get("type") == "Split":
        return step["pattern"].get("Regex", "") if step["behavior"] == "Isolated" else "another"
    rule = step.get("use_regex", step.get("individual_digits"))
    return f"{step.get('type')} {rule}" + (" after a space" if step.get("add_prefix_space") else "")
