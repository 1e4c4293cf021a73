"""Finds, checks, copies and writes the tokenizer files of a checkpoint."""

import json
from collections.abc import Iterable

import numpy as np
from etils import epath

from prope.data.tokenizer import (
    SPACE,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    read_beside,
)
from prope.errors import UsageError, log, usage_error
from prope.runtime.files import TOKENIZER_FILES, absolute, as_path, tokenizer_file

_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_IDS = ("config.json", "generation_config.json")  # which may tell special ids
_UNREAD = ("tokenizer_config.json", "vocab.json")  # of a tokenizer without TOKENIZER_FILES
_FOLDER = "tokenizer"  # in a run
_REMEDY = "give --tokenizer=PATH, the tokenizer that the checkpoint was trained with"


def find_tokenizer(
    source: epath.Path, flag: str | None, vocab_size: int, values: dict
) -> tuple[str, Tokenizer]:
    """Finds a checkpoint's tokenizer: its place, "byte" where there is none, and the tokenizer.

    Raises UsageError where it cannot be read, or does not fit `vocab_size` or the special ids in
    `values`, the fields of config.json.
    """
    beside = [str(source / name) for name in TOKENIZER_FILES if (source / name).is_file()]
    name = flag or (str(source) if beside else None)
    if name is None:
        for other in _UNREAD:
            if (source / other).is_file():
                problem = f"has neither {' nor '.join(TOKENIZER_FILES)}, and {other} is not read"
                remedy = "load it with AutoTokenizer of transformers and save it there"
                raise usage_error("--input", source, problem, f"{remedy}, or {_REMEDY}")
        remedy = "taking the byte tokenizer; if that is wrong, give --tokenizer=PATH"
        log.info("no %s in %s: %s", " or ".join(TOKENIZER_FILES), source, remedy)
        name = "byte"
    tokenizer = load_tokenizer(name)
    if flag and beside:
        known = [load_tokenizer(file).fingerprint for file in beside]
        if tokenizer.fingerprint not in known:
            problem = f"{beside[0]} is there and is another one"
            raise usage_error("--tokenizer", flag, problem, "remove the flag, or that file")
    tokenizer_has = f"but the tokenizer {name} has"
    if vocab_size < tokenizer.text_size:
        problem = f"vocab_size={vocab_size}, {tokenizer_has} {tokenizer.text_size} ids"
        raise UsageError(f"{source}: {problem}; {_REMEDY}")
    # A tuned checkpoint's own tokenizer may have another end, which `read_stop_ids` adds.
    fields = ("bos_token_id",) if beside else ("bos_token_id", "eos_token_id")
    for field in fields:
        ours = special_fields(tokenizer)[field]
        theirs = values.get(field)
        if None not in (ours, theirs) and ours not in _as_list(theirs):
            problem = f"{field}={theirs}, {tokenizer_has} {ours}"
            raise UsageError(f"{source}: {problem}; {_REMEDY}")
    return name, tokenizer


def _as_list(ids) -> list:
    return ids if isinstance(ids, list) else [ids]


def read_stop_ids(source: epath.Path, values: dict, vocab_size: int, eos: int) -> tuple[int, ...]:
    """Lists the ids besides `eos`, the tokenizer's, at which a text ends.

    These are where transformers stops, as generation_config.json has them; and those of
    config.json, where `eos` is none of them. Raises UsageError where one is no id.
    """
    in_config = _as_list(values.get("eos_token_id"))
    values = values | read_beside(source / "config.json", "generation_config.json")
    ids = _as_list(values.get("eos_token_id", eos))
    if {eos, None}.isdisjoint(in_config):
        ids = [*ids, *in_config]
        ends = f"eos_token_id={in_config}, the tokenizer's end token is {eos}"
        log.info("%s/config.json: %s: documents end with it, samples with either", source, ends)
    for stop in ids:
        if stop is not None and (type(stop) is not int or not 0 <= stop < vocab_size):
            problem = f"must be ids below vocab_size={vocab_size}"
            raise usage_error(f"{source}: eos_token_id", ids, problem, "restore the original file")
    return tuple(sorted(set(ids) - {None, eos}))


def copy_into_run(name: str, directory: epath.Path, workdir: epath.Path) -> str:
    """Copies a tokenizer's files into the folder of a run that becomes `workdir`.

    Returns `config.data.tokenizer`.
    """
    if name == "byte":
        return name
    folder = directory / _FOLDER
    folder.mkdir()
    _copy_files(name, folder, _IDS)
    return str(absolute(workdir) / _FOLDER)


def _copy_files(name: str, folder: epath.Path, more: tuple[str, ...] = ()) -> None:
    """Copies a tokenizer's file, and those beside it if they are its own."""
    path = as_path("config.data.tokenizer", name)
    file = tokenizer_file(path)
    kind = "tokenizer.json" if file.suffix == ".json" else "tokenizer.model"
    copied = {kind: file}
    if file != path or kind == "tokenizer.json":
        for beside in (*TOKENIZER_FILES, *_BESIDE, *more):
            if file.with_name(beside).is_file():
                copied.setdefault(beside, file.with_name(beside))
    for target, source in copied.items():
        source.copy(folder / target)


def special_fields(tokenizer: Tokenizer) -> dict:
    """Returns the special ids as config.json and generation_config.json have them."""
    pad, eos, bos, *_ = tokenizer.special
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None if pad == eos else pad}


def write_tokenizer(
    name: str, tokenizer: Tokenizer, folder: epath.Path, texts: Iterable[bytes]
) -> None:
    """Writes a run's tokenizer so that AutoTokenizer of transformers gives the same ids.

    A SentencePiece model gets a tokenizer.json, which transformers reads as it is; of the model
    alone it makes one of another kind. Raises UsageError where what was written gives other ids for
    one of `texts`.
    """
    if name == "byte":
        ids = "the ids of a text are 2, then 4 more than each of its bytes"
        log.info("transformers has no byte tokenizer: %s", ids)
        return
    _copy_files(name, folder)
    file = folder / "tokenizer_config.json"
    values = read_beside(file, file.name)
    if not (folder / "tokenizer.json").is_file():
        (folder / "tokenizer.json").write_text(_convert(tokenizer))
        values.pop("tokenizer_class", None)
    if "tokenizer_class" not in values:
        text = json.dumps(_tokenizer_config(tokenizer) | values, indent=2)
        file.write_text(text + "\n")
    written = load_tokenizer(str(folder))
    is_unigram = _is_unigram(tokenizer)
    for text in texts:
        text = text.replace(SPACE.encode(), b" ")  # the same to a converted model
        ids = tokenizer.encode(text)
        others = written.encode(text)
        is_same = np.array_equal(ids, others)
        if is_unigram and len(ids) == len(others):
            # Of two cuts that are as likely, sums in float32, as SentencePiece's, may take another.
            is_same = tokenizer.decode(ids) == tokenizer.decode(others)
        if not is_same:
            problem = f"the tokenizer.json that is made of it gives other ids for {text[:60]}"
            remedy = "name a folder that holds the model, as tokenizer.model, and a tokenizer.json "
            remedy += "that gives the same ids"
            raise usage_error("config.data.tokenizer", name, problem, remedy)


def read_model(tokenizer: SentencePieceTokenizer):
    """Returns a SentencePiece model as its message of Protocol Buffers."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    return ModelProto.FromString(tokenizer.processor.serialized_model_proto())


def _is_unigram(tokenizer: Tokenizer) -> bool:
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return False
    spec = read_model(tokenizer).trainer_spec
    return spec.model_type == spec.UNIGRAM


def _convert(tokenizer: SentencePieceTokenizer) -> str:
    """Returns the tokenizer.json of a SentencePiece model."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    proto = read_model(tokenizer)
    fallback = proto.trainer_spec.byte_fallback
    _, _, bos, unk, _ = tokenizer.special
    learnt = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    if _is_unigram(tokenizer):
        # The others, which no text is cut into, cost more than any spelling of them.
        scores = [(piece.piece, learnt.get(piece.piece, -1e4)) for piece in proto.pieces]
        model = models.Unigram(scores, unk, fallback)
    else:
        ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        merges = [
            (piece[:end], piece[end:])
            for piece in sorted(learnt, key=learnt.get, reverse=True)
            for end in range(1, len(piece))
            if {piece[:end], piece[end:]} <= ids.keys()
        ]
        unk_token = proto.pieces[unk].piece
        model = models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=fallback)
    rules = proto.normalizer_spec
    steps = []
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    converted = tokenizers.Tokenizer(model)
    converted.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    converted.decoder = decoders.Sequence(undo)
    converted.add_tokens([p.piece for p in proto.pieces if p.type == p.USER_DEFINED])
    if bos is not None:
        start = proto.pieces[bos].piece
        special = [(start, bos)]
        converted.post_processor = processors.TemplateProcessing(f"{start} $0", None, special)
    return converted.to_str()


def _tokenizer_config(tokenizer: Tokenizer) -> dict:
    """Returns tokenizer_config.json for a tokenizer that has none.

    Without a class, transformers takes that of config.json's model, with other rules; without the
    names of the tokens, a family's, and may leave <bos> out.
    """
    special = tokenizer.special
    if isinstance(tokenizer, SentencePieceTokenizer):
        name_of = tokenizer.processor.id_to_piece
    else:
        name_of = tokenizer.tokenizer.id_to_token
    ids = special_fields(tokenizer) | {"unk_token_id": special.unk}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": special.bos is not None,
        "add_eos_token": False,
        **{field.removesuffix("_id"): name_of(i) for field, i in ids.items() if i is not None},
        "clean_up_tokenization_spaces": False,
    }
