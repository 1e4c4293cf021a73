"""The vocabulary of a run's tokenizer in a GGUF file, by which llama.cpp gives the same ids."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

from prope.data.chat import read_template
from prope.data.tokenizer import FIELD, SPACE, ByteTokenizer, SentencePieceTokenizer, Tokenizer
from prope.errors import shorten, usage_error
from prope.hf.tokenizers import read_model
from prope.spec.run import Spec

# Types of tokens, which are those of SentencePiece.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the steps that cut a text into words, and whether whole words are tokens before any merge: the
# name that llama.cpp has for them.
_PRE_TOKENIZERS = {
    (("ByteLevel", True), False): "gpt-2",
    (("Digits", True), ("ByteLevel", True), False): "smollm",
    (("Split", _WORDS), ("ByteLevel", False), True): "llama-bpe",
    (("Split", _WORDS.replace("{1,3}", "")), ("ByteLevel", False), False): "qwen2",
}
_REMEDY = "export it with python -m prope.export_hf, which keeps the tokenizer"


def make_vocabulary(spec: Spec, tokenizer: Tokenizer) -> Callable:
    """Returns what writes a run's vocabulary with a GGUFWriter.

    Raises UsageError where llama.cpp has no tokenizer that gives the same ids.
    """
    name = spec.data.tokenizer
    try:
        if isinstance(tokenizer, ByteTokenizer):
            fields = _of_bytes()
        elif isinstance(tokenizer, SentencePieceTokenizer):
            fields = _of_sentencepiece(tokenizer)
        else:
            fields = _of_json(tokenizer)
    except ValueError as error:
        problem = f"llama.cpp has no such tokenizer: {error}"
        raise usage_error(FIELD, name, problem, _REMEDY) from None
    V = spec.model.vocab_size
    tokens = fields.pop("tokens")
    padding = [(f"[PAD{i}]", 0.0, _UNUSED) for i in range(len(tokens), V)]
    texts, scores, kinds = zip(*(tokens + padding)[:V], strict=True)
    special = tokenizer.special
    ids = {"eos": special.eos, "bos": special.start, "padding": special.pad, "unknown": special.unk}
    ids["eot"] = next(iter(spec.data.stop_ids), None)
    fields |= {f"{role}_token_id": i for role, i in ids.items() if i is not None}
    fields["add_bos_token"] = special.bos is not None
    fields["add_eos_token"] = False
    template = None
    with contextlib.suppress(ValueError):
        template, _ = read_template(name, tokenizer)

    def write(writer) -> None:
        writer.add_token_list(list(texts))
        writer.add_token_scores(list(scores))
        writer.add_token_types(list(kinds))
        kinds_of = {bool: "bool", int: "uint32", str: "string", list: "array"}
        for field, value in fields.items():
            getattr(writer, f"add_{kinds_of[type(value)]}")(f"tokenizer.ggml.{field}", value)
        if template:
            writer.add_chat_template(template)

    return write


def _of_bytes() -> dict[str, Any]:
    """Has a token for every byte; that of a space is SPACE, as which llama.cpp reads it."""
    special = [(f"<{name}>", 0.0, _CONTROL) for name in ("pad", "eos", "bos")]
    special.append(("<unk>", 0.0, _UNKNOWN))
    tokens = [(f"<0x{byte:02X}>", 0.0, _BYTE) for byte in range(256)]
    tokens[ord(" ")] = (SPACE, 0.0, _NORMAL)
    return {"model": "llama", "tokens": special + tokens, "add_space_prefix": False}


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    proto = read_model(tokenizer)
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise ValueError("it is a unigram model; BPE is computed alike")
    rules = proto.normalizer_spec
    if rules.precompiled_charsmap or rules.remove_extra_whitespaces:
        raise ValueError("it normalises a text")
    return {
        "model": "llama",
        "tokens": [(piece.piece, piece.score, piece.type) for piece in proto.pieces],
        "add_space_prefix": rules.add_dummy_prefix,
    }


def _of_json(tokenizer) -> dict[str, Any]:
    values = json.loads(tokenizer.tokenizer.to_str())
    model = values["model"]
    if model["type"] != "BPE":
        raise ValueError(f"its model is {model['type']}, not BPE")
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = {token["id"]: token for token in values["added_tokens"]}
    texts = {i: text for text, i in model["vocab"].items()}
    texts |= {i: token["content"] for i, token in added.items()}
    scores = dict.fromkeys(texts, -1e9)
    kinds = dict.fromkeys(texts, _NORMAL)
    for i, token in added.items():
        kinds[i] = _CONTROL if token["special"] else _USER_DEFINED
    if model["byte_fallback"]:
        ids = model["vocab"]
        for rank, pair in reversed(list(enumerate(merges))):
            scores[ids["".join(pair)]] = -float(rank)
        for byte in range(256):
            kinds[ids[f"<0x{byte:02X}>"]] = _BYTE
        if tokenizer.special.unk is not None:
            kinds[tokenizer.special.unk] = _UNKNOWN
        fields = {"model": "llama", "add_space_prefix": _has_space_prefix(values)}
    else:
        name = _PRE_TOKENIZERS.get(_steps(values))
        if name is None:
            raise ValueError(f"it cuts texts by {shorten(json.dumps(values['pre_tokenizer']))}")
        fields = {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in merges]}
    unused = ("", -1e9, _UNUSED)
    size = max(texts) + 1
    tokens = [
        (texts[i], scores[i], kinds[i]) if i in texts else (f"[PAD{i}]", *unused[1:])
        for i in range(size)
    ]
    return fields | {"tokens": tokens}


def _has_space_prefix(values: dict) -> bool:
    """Returns whether a space is put before a text, where spaces are SPACE and nothing else is."""
    normalizer = values["normalizer"]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    known = [{"type": "Prepend", "prepend": SPACE}]
    known += [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    cut = values["pre_tokenizer"]
    cuts_nothing = cut is None or cut.get("pattern") == {"String": " "}  # there are none any more
    if known[1] not in steps or any(step not in known for step in steps) or not cuts_nothing:
        raise ValueError(f"it normalises a text by {shorten(json.dumps(normalizer))}")
    return known[0] in steps


def _steps(values: dict) -> tuple:
    """Returns the key of `_PRE_TOKENIZERS` for a tokenizer.json."""
    normalizer = values["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):
        return ()
    cut = values["pre_tokenizer"] or {}
    steps = []
    for step in cut.get("pretokenizers", [cut]):
        parameter = {"ByteLevel": "use_regex", "Digits": "individual_digits", "Split": "pattern"}
        value = step.get(parameter.get(step.get("type"), ""))
        if step.get("add_prefix_space") or step.get("behavior", "Isolated") != "Isolated":
            return ()
        steps.append((step.get("type"), value.get("Regex") if isinstance(value, dict) else value))
    return (*steps, bool(values["model"].get("ignore_merges")))
