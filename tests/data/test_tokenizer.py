"""Tokenizers: learnt, of SentencePiece and of tokenizer.json, as five families have them."""

import itertools
import json
import shutil
import tracemalloc
import types
import unicodedata

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from etils import epath
from support.exchange import edit
from support.heads import analysis_options
from support.runs import evaluate_run, make_run, save_run
from support.text import (
    articles,
    data_config,
    is_validation,
    read_lines,
    read_tokens,
    refusal,
    texts_of,
    write_lines,
)
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from prope.analysis.sequences import read_sequences
from prope.data import view
from prope.data.mixture import open_windows
from prope.data.sources.find import find_source
from prope.data.tokenizer import (
    ByteTokenizer,
    SpecialIds,
    load_tokenizer,
    special_ids_of,
    token_name,
)
from prope.data.vocabulary import sample, split_lines, train_tokenizer
from prope.hf import exporter, importer, tokenizers
from prope.inference import generation
from prope.inference.generation import Sampling
from prope.spec.run import Spec
from prope.workdir.run import open_run, read_config, write_config

SECRET = "xylophonistically"

ODD = [
    "",
    " ",
    "  two  spaces ",
    "\n\n\tlines\r\n",
    "a\0b",
    "<bos><eos><unk><pad><0x0A>",
    "é数学🙂\u0301\u200d",
    "▁x▁▁ y▁",
    "▁",
    "\ufeff\u3000\xa0\u2028\ufffd",
    "\u2047 \u2585",
    "1234567890 " * 3,
]

SPECIAL_IDS = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}

TEXTS = ["", "a b", "  two  spaces\r\n\n", "naïve é🙂 数学", "Z\u0301e\u0301", "x▁y", "\0 1234567"]

SPELLED = "<bos><s></s><eos><pad><unk><|endoftext|><|im_start|><|begin_of_text|><|im_end|>"

ALPHABET = pre_tokenizers.ByteLevel.alphabet()

# As older versions of transformers write a token.
PAD = {"__type": "AddedToken", "content": "<|endoftext|>", "normalized": False}

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


# --- Learnt from text -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """300 texts of a few words; those held out, and only those, are full of another word."""
    root = tmp_path_factory.mktemp("tokenizer")
    rng = np.random.default_rng(0)
    words = ["rope", "Zürich", "数学", "pair\n", "2024"]
    syllables = ["fre", "quen", "cy", "po", "si", "tion", "an", "gle"]
    words += ["".join(rng.choice(syllables, 3)) for _ in range(60)]
    texts = []
    while len(texts) < 300:
        text = " ".join(rng.choice(words, rng.integers(20, 200)))
        secret = text + f" {SECRET}" * 9
        if is_validation(secret.encode(), 0.2):
            texts.append(secret)
        elif not is_validation(text.encode(), 0.2):
            texts.append(text)
    (root / "text").mkdir()
    write_lines(root / "text" / "all.jsonl", [{"text": text} for text in texts])
    fields = {"validation_fraction": 0.2, "seq_len": 64}
    return Spec(data=data_config(root, "files", root / "text", **fields))


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, spec, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "a.model"
    result = train_tokenizer(spec, str(path), 330, request.param, 10**6)
    assert result["model"] == str(path)
    assert result["vocab_size"] == 330
    return path, request.param


def processor(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_a_trained_model_has_gemmas_special_ids(model):
    trained = processor(model[0])
    assert [trained.id_to_piece(i) for i in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert sum(trained.is_byte(i) for i in range(330)) == 256
    assert load_tokenizer(str(model[0])).special == SpecialIds(0, 1, 2, 3)


def test_the_same_text_gives_the_same_file(model, spec, bucket):
    """And the same figures."""
    path, kind = model
    again = epath.Path(bucket) / "another-name.model"
    result = train_tokenizer(spec, str(again), 330, kind, 10**6)
    assert again.read_bytes() == path.read_bytes()
    rows = epath.Path(spec.data.data_dir, "all.jsonl").read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    texts = [text for text in texts if not is_validation(text.encode(), 0.2)]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    size = len("".join(lines).encode())
    tokens = sum(map(len, processor(path).encode(lines)))
    assert result["train_bytes"] == result["sample_bytes"] == size
    assert result["bytes_per_token"] == round(size / tokens, 3)


@pytest.mark.parametrize(("unk", "expected"), [(0, [0]), (3, [3]), (None, [])])
def test_an_unknown_token_may_have_any_id(unk, expected):
    special = SpecialIds(pad=1, eos=1, bos=2, unk=unk)
    assert np.flatnonzero(special.is_unknown(np.arange(5))).tolist() == expected


def test_held_out_documents_are_not_learnt_from(model, spec, tmp_path):
    """Their word has the only x: learnt from, it would be a piece, and not a byte."""
    path, kind = model
    trained = processor(path)
    assert trained.piece_to_id("x") == trained.unk_id()
    assert trained.piece_to_id("Z") != trained.unk_id()
    everything = spec.replace({"data.validation_fraction": 1e-9})
    train_tokenizer(everything, str(tmp_path / "all.model"), 330, kind, 10**6)
    assert processor(tmp_path / "all.model").piece_to_id("x") > 259


def test_every_text_comes_back_byte_for_byte(model, spec):
    rng = np.random.default_rng(1)
    alphabet = list(dict.fromkeys("".join(ODD)))
    noise = ["".join(rng.choice(alphabet, rng.integers(1, 60))) for _ in range(500)]
    texts = [text.encode() for text in ODD + noise]
    texts += texts_of(find_source(spec.data))
    for tokenizer in (load_tokenizer(str(model[0])), load_tokenizer("byte")):
        for text in texts:
            ids = tokenizer.encode(text)
            assert ids.dtype == np.int32
            assert not np.isin(ids, [0, 1, 2, 3]).any()
            assert tokenizer.decode(ids).encode() == text
        ids_without_text = [2, *tokenizer.encode(b"rope"), 1, 0, 5000]
        assert tokenizer.decode(ids_without_text) == "rope"


def test_ids_that_are_no_bytes_have_no_text():
    """Also with a larger vocabulary: 4 is the first byte, 259 the last."""
    ids = [0, 3, 4, 4 + ord("a"), 259, 260, 300]
    assert ByteTokenizer().decode(ids) == "\0a\ufffd"


def test_a_model_without_bytes_takes_the_space_mark_for_a_space(tmp_path):
    """SentencePiece writes a space as U+2581, for which such a model has no other piece."""
    prefix = str(tmp_path / "model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a rope of words and of spaces"] * 20),
        model_prefix=prefix,
        vocab_size=30,
        model_type="bpe",
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        **SPECIAL_IDS,
    )
    tokenizer = load_tokenizer(f"{prefix}.model")
    ids = tokenizer.encode("of\u2581words".encode())
    assert ids.dtype == np.int32
    assert ids.tolist() == processor(f"{prefix}.model").encode("of words")
    assert tokenizer.decode(ids) == "of words"


def test_documents_are_cut_into_lines_without_a_loss():
    long = ("word " * 3000 + "\n") * 2 + "数" * 5000 + "\n\nend"
    for text in [*ODD, long]:
        lines = list(split_lines(text.encode()))
        assert b"".join(lines) == text.encode()
        assert all(0 < len(line) <= 4096 for line in lines)
        assert all(line.decode() for line in lines), "no character is cut"


def test_the_sample_is_bounded_and_depends_on_the_text_alone():
    documents = [f"line {i}\n".encode() * 3 for i in range(20_000)]
    size = sum(map(len, documents))
    all_lines, total = sample(documents, size)
    assert total == size == sum(map(len, all_lines))
    tracemalloc.start()
    lines, _ = sample(documents, 50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 49_900 < sum(map(len, lines)) <= 50_000
    assert peak < 2_000_000
    assert all_lines[: len(lines)] == lines, "those with the smallest hashes"
    from_reversed, _ = sample(reversed(documents), 50_000)
    assert sorted(from_reversed) == sorted(lines)
    numbers = [int(line.split()[1]) for line in lines]
    assert abs(np.mean(numbers) - 10_000) < 500, "from everywhere"


# --- tokenizer.json of five families ----------------------------------------------------------


def train(tokenizer, special, alphabet, size):
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(articles(30), trainer)
    return tokenizer


def byte_level(special, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, special, ALPHABET, 300)


def with_bytes(special, normalizer, decoder):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoder
    return train(tokenizer, [*special, *BYTES], [], 330)


def begin_with(tokenizer, name):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, tokenizer.token_to_id(name))]
    )
    return tokenizer


def smollm():
    """One token has every role in its files, and no text begins with it."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.ByteLevel()
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return tokenizer, {"tokenizer_config.json": roles}


def qwen():
    """Special tokens come last; config.json names a <bos> that no text has."""
    tokenizer = byte_level([], normalizers.NFC())
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    roles = {"eos_token": "<|im_end|>", "pad_token": PAD}
    ids = {"bos_token_id": 300, "eos_token_id": 302}
    return tokenizer, {"tokenizer_config.json": roles, "config.json": ids}


def llama():
    """Ids of config.json alone, in a list."""
    tokenizer = byte_level(["<|x|>", "<|begin_of_text|>", "<|eot|>"])
    ids = {"eos_token_id": [2, 0], "bos_token_id": 1}
    return begin_with(tokenizer, "<|begin_of_text|>"), {"config.json": ids}


def mistral():
    """Nothing beside it; a space before every text."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer = with_bytes(["<unk>", "<s>", "</s>"], normalizer, decoder)
    return begin_with(tokenizer, "<s>"), {}


def gemma():
    """<bos> that no file asks for, and a token for images behind all others."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer = with_bytes(special, normalizers.Replace(" ", "▁"), decoders.Sequence(steps))
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.add_special_tokens(["<image>"])
    return tokenizer, {"special_tokens_map.json": {"eos_token": "<eos>"}}


FAMILIES = {
    # maker, special ids (pad, eos, bos, unk), what a text comes back as
    "smollm": (smollm, SpecialIds(0, 0, None, None), str),
    "qwen": (
        qwen,
        SpecialIds(300, 302, None, None, 300),
        lambda text: unicodedata.normalize("NFC", text),
    ),
    "llama": (llama, SpecialIds(2, 2, 1, None), str),
    "mistral": (mistral, SpecialIds(2, 2, 1, 0), lambda text: text.replace("▁", " ")),
    "gemma": (gemma, SpecialIds(0, 1, 2, 3), lambda text: text.replace("▁", " ")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(folder, the library's tokenizer, special ids, what a text comes back as)."""
    make, *expected = FAMILIES[request.param]
    return write(make, tmp_path_factory.mktemp(request.param)), *expected


def write(make, folder):
    tokenizer, beside = make()
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [
        token for token in values["added_tokens"] if token["content"] not in BYTES
    ]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name, values in beside.items():
        (folder / name).write_text(json.dumps(values))
    return folder


def reference(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_are_the_librarys_and_texts_come_back(family):
    folder, special, comes_back = family
    ours = load_tokenizer(str(folder))
    theirs = reference(folder)
    assert ours.special == load_tokenizer(str(folder / "tokenizer.json")).special == special
    vocabulary = theirs.get_vocab()
    assert ours.vocab_size == max(vocabulary.values()) + 1
    assert ours.text_size == ours.vocab_size - ("<image>" in vocabulary)
    for text in [*TEXTS, *articles(40)[30:]]:
        ids = ours.encode(text.encode())
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        padded = [special.start, *ids, special.eos, special.pad, 10**6, -1]
        assert ours.decode(ids) == ours.decode(padded) == comes_back(text)
    ids = ours.encode(SPELLED.encode())
    added = {token.content: i for i, token in theirs.get_added_tokens_decoder().items()}
    assert not {added[name] for name in added if name in SPELLED} & set(ids.tolist())
    assert ours.decode(ids) == SPELLED, "text that spells special tokens stays text"


def test_an_end_token_that_is_an_ordinary_one_is_not_text(tmp_path):
    file = write(smollm, tmp_path) / "tokenizer.json"
    values = json.loads(file.read_text())
    values["added_tokens"][0]["special"] = False
    file.write_text(json.dumps(values))
    assert 0 not in load_tokenizer(str(file)).encode(b"a<|endoftext|>b")


def test_the_fingerprint_is_of_what_decides_the_ids(tmp_path):
    folder = write(llama, tmp_path)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())

    def fingerprint(**changes):
        file.write_text(json.dumps(values | changes, indent=1))
        return load_tokenizer(str(folder)).fingerprint

    first = fingerprint()
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    assert fingerprint(truncation=cut) == first
    assert len(load_tokenizer(str(folder)).encode(b"a longer text")) > 2
    assert fingerprint(decoder=None) == first
    assert fingerprint(normalizer={"type": "NFC"}) != first
    edit(folder, eos_token_id=0)
    assert fingerprint() != first


@pytest.mark.parametrize(
    ("roles", "start"),
    [
        ({"bos_token": "<|im_end|>", "add_bos_token": True}, 0),
        ({"bos_token": "<|im_start|>", "add_bos_token": True}, 1),
        ({"bos_token": "<|im_start|>", "add_bos_token": False}, 0),
    ],
)
def test_documents_of_a_model_for_chats_begin_as_its_family_has_it(tmp_path, roles, start):
    """Not with the token that ends a turn, even if that is called <bos> too."""
    folder = write(smollm, tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({"eos_token": "<|im_end|>"} | roles))
    tokenizer = load_tokenizer(str(folder))
    bos = start or None
    assert tokenizer.special == SpecialIds(2, 2, bos, None, None if bos else 0)
    assert tokenizer.special.start == start
    assert token_name(tokenizer, start) == ("<bos>" if bos else "<separator>")


def test_a_sentencepiece_model_whose_bos_is_its_eos_has_no_bos():
    ids = {"pad_id": -1, "eos_id": 2, "bos_id": 2, "unk_id": 0}
    processor = types.SimpleNamespace(**{name: lambda i=i: i for name, i in ids.items()})
    assert special_ids_of("a.model", processor) == SpecialIds(2, 2, None, 0)


# --- Windows ----------------------------------------------------------------------------------


def documents(tmp_path):
    texts = [f"{i} {text[: 40 + 9 * i]}" for i, text in enumerate(articles(30))]
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "a.jsonl", [{"text": text} for text in texts])
    return [text for text in texts if not is_validation(text.encode(), 0.2)]


def windows_of(tmp_path, folder, **fields):
    fields = {"tokenizer": str(folder), "validation_fraction": 0.2, "seq_len": 32} | fields
    data = data_config(tmp_path, "files", tmp_path / "text", **fields)
    return open_windows(data, 400, "train")


def stream_of(folder, special, texts):
    """The tokens by the definition, <bos> text <eos> or end token and text; and their documents."""
    theirs = reference(folder)
    stream = []
    numbers = []
    for number, text in enumerate(texts):
        ids = theirs.encode(text, add_special_tokens=False).ids
        document = [special.start, *ids]
        if special.bos is not None:
            document.append(special.eos)
        stream += document
        numbers += [number] * len(document)
    return np.array(stream), np.array(numbers)


def test_windows_of_every_family(tmp_path, family):
    folder, special, _ = family
    stream, numbers = stream_of(folder, special, documents(tmp_path))
    windows = windows_of(tmp_path, folder, mask_documents=True)
    np.testing.assert_array_equal(read_tokens(windows.store, "train"), stream)
    batch = windows.read(range(windows.count))
    flat = {name: values.ravel() for name, values in batch.items()}
    predicted = len(stream) - 1
    np.testing.assert_array_equal(flat["tokens"][:predicted], stream[:-1])
    np.testing.assert_array_equal(flat["targets"][:predicted], stream[1:])
    weights = np.ones(predicted) if special.bos is None else stream[1:] != special.bos
    np.testing.assert_array_equal(flat["weights"][:predicted], weights)
    assert flat["weights"].sum() == weights.sum() == windows.store.targets("train")
    assert not flat["segment_ids"][len(stream) :].any()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    for place in range(predicted):
        window = place - place % 32
        first = max(starts[numbers[place]], window)
        assert flat["positions"][place] == place - first
        assert flat["segment_ids"][place] == 1 + numbers[place] - numbers[window]


def test_beginnings_of_documents(tmp_path, family):
    folder, special, _ = family
    _, numbers = stream_of(folder, special, documents(tmp_path))
    windows = windows_of(tmp_path, folder, bos_every_window=True)
    assert (windows.read(range(3))["tokens"][:, 0] == special.start).all()
    assert all(tokens[0] == special.start for tokens in windows.document_starts(3))
    np.testing.assert_array_equal(view.document_lengths(windows.store), np.bincount(numbers))


# --- Runs and checkpoints ---------------------------------------------------------------------


@pytest.mark.parametrize(("make", "ends"), [(smollm, -1), (llama, 0)])
def test_a_run_is_evaluated_by_documents(tmp_path, make, ends):
    """The last document of a family without <bos> has no end token."""
    folder = write(make, tmp_path)
    theirs = reference(folder)
    documents(tmp_path)
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=400)
    (record,) = evaluate_run(tmp_path / "run", dataset="files", data_dir=str(tmp_path / "text"))
    texts = [line["text"] for line in read_lines(tmp_path / "text" / "a.jsonl")]
    assert record["documents"] == len(texts)
    ids = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert record["tokens"] == sum(map(len, ids)) + len(texts) + ends
    assert record["unknown_tokens"] == 0
    assert record["bits_per_byte"] > 0
    (tmp_path / "a.txt").write_text("a text")
    options = analysis_options(text=str(tmp_path / "a.txt"))
    _, (names,), _ = read_sequences(open_run(tmp_path / "run"), options)
    assert names[0] == ("<eos>" if ends else "<bos>")


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.0, None, 1.0), (1.0, 3, 0.9)])
def test_no_id_is_sampled_that_the_tokenizer_lacks(temperature, top_k, top_p):
    logits = jnp.zeros((2, 400)).at[:, 303:].set(1000.0)
    keys = generation.row_keys(0, 2)
    sampling = Sampling(8, temperature, top_k, top_p, vocab_size=303)
    for position in range(9):
        tokens = generation.sample_tokens(sampling, logits, keys, jnp.full(2, position))
        assert tokens.max() < 303


@pytest.mark.parametrize(
    ("make", "special"), [(make, special) for make, special, _ in FAMILIES.values()]
)
def test_a_text_begins_and_ends_as_the_tokenizer_has_it(tmp_path, monkeypatch, make, special):
    folder = write(make, tmp_path)
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=400)
    prompt, whole = (
        reference(folder).encode(text, add_special_tokens=False).ids for text in ("a", "a b")
    )
    assert whole[: len(prompt)] == prompt
    continuation = [*whole[len(prompt) :], special.eos]

    def generate(spec, sampling, params, rows, seed):
        assert rows == [[special.start, *prompt]]
        ends = {special.eos} if special.bos is not None else {special.eos, special.start}
        assert sampling.eos == special.eos and set(sampling.stop_ids) == ends
        assert sampling.pad == special.pad
        assert sampling.vocab_size == reference(folder).get_vocab_size()
        seconds = {"prefill": 2.0, "decode": 3.0, "compile": 7.0}
        return np.array([[*continuation, 0, special.pad]]), seconds

    monkeypatch.setattr(generation, "generate", generate)
    run = str(tmp_path / "run")
    result = generation.continue_prompts(run, None, ["a"], Sampling(6), 0)
    assert result["texts"] == [" b"]
    count = len(continuation)
    assert result["tokens"] == count
    rates = [result[f"{name}tokens_per_second"] for name in ("", "prefill_", "decode_")]
    assert rates == [count / 5, (1 + len(prompt)) / 2, (count - 1) / 3]
    assert result["compile_seconds"] == 7


@pytest.fixture
def checkpoint(tmp_path, family):
    """The exported folder of a run with a family's tokenizer."""
    folder, _, _ = family
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=400)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    return tmp_path / "hf"


def test_a_tokenizer_goes_along_and_a_moved_run_finds_it(tmp_path, family, checkpoint):
    folder, special, _ = family
    fields = json.loads((checkpoint / "config.json").read_text())
    expected = {"eos_token_id": special.eos, "bos_token_id": special.bos}
    expected["pad_token_id"] = None if special.pad == special.eos else special.pad
    assert {name: fields[name] for name in expected} == expected
    result = importer.import_run(checkpoint, tmp_path / "back")
    assert result["tokenizer"] == str(tmp_path / "back" / "tokenizer")
    (tmp_path / "back").rename(tmp_path / "moved")
    data = open_run(tmp_path / "moved").spec.data
    assert data.tokenizer == str(tmp_path / "moved" / "tokenizer")
    assert data.stop_ids == ()
    original = load_tokenizer(str(folder))
    exporter.export(tmp_path / "moved", tmp_path / "again")
    for place in (data.tokenizer, tmp_path / "again"):
        ours = load_tokenizer(str(place))
        assert (ours.special, ours.fingerprint) == (special, original.fingerprint)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.slow
def test_transformers_gives_the_same_ids(family, checkpoint):
    transformers = pytest.importorskip("transformers")
    folder, special, _ = family
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ours = load_tokenizer(str(checkpoint))
    for text in [*TEXTS[1:], *articles(3)]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text.encode()).tolist()
        assert theirs.decode(ids) == ours.decode(ids)
        assert theirs(text)["input_ids"] == reference(folder).encode(text).ids
    assert theirs.eos_token_id == special.eos


def learn(folder, kind, **options):
    """A SentencePiece model as its trainer makes it, but for these options."""
    options = {"byte_fallback": True, "vocab_size": 400, "minloglevel": 2} | options
    options["hard_vocab_limit"] = False
    lines = [line for text in articles(60) for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        **options,
    )
    return folder / "tokenizer.model"


def exported_with(tmp_path, tokenizer, **fields):
    """The folder of an export of a run with this tokenizer, and the tokenizer."""
    ours = load_tokenizer(str(tokenizer))
    make_run(tmp_path / "run", tokenizer=tokenizer, vocab_size=ours.vocab_size, **fields)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    return tmp_path / "hf", ours


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# How models of SentencePiece differ: by name, options of its trainer. "" is its own default.
MODELS = {
    "": {},
    "as Mistral's": IDENTITY,
    "as Gemma's": IDENTITY | {"add_dummy_prefix": False, "user_defined_symbols": ["<turn>", "\n"]},
    "without bytes": {"byte_fallback": False, "vocab_size": 100},
    "other special tokens": {"bos_id": -1, "eos_id": 0, "unk_id": 1, "control_symbols": ["<c>"]},
}


QUICK = (("unigram", ""), ("unigram", "as Gemma's"), ("bpe", "as Mistral's"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("unigram", "bpe", "char"), MODELS)
    ],
)
def test_a_sentencepiece_model_is_exported_as_a_tokenizer_json(tmp_path, kind, name):
    """Which gives the ids that SentencePiece gives, and comes back with the run."""
    file = learn(tmp_path, kind, **MODELS[name])
    folder, ours = exported_with(tmp_path, file)
    assert (folder / "tokenizer.model").read_bytes() == file.read_bytes()
    written = load_tokenizer(str(folder))
    assert written.special[:3] == ours.special[:3]
    theirs = processor(file)
    spelled = [] if kind == "unigram" else ["<s>", "<0x0A><c>"]  # unless its characters are known
    for text in [*TEXTS, *articles(40), "<turn>a\n <turn>", "ﬁ ②", *spelled]:
        text = text.replace("▁", " ")
        ids = theirs.encode(text)
        assert written.encode(text.encode()).tolist() == ids, text
        assert written.decode(ids) == ours.decode(ids) or name == "without bytes"
    importer.import_run(folder, tmp_path / "back")
    back = load_tokenizer(open_run(tmp_path / "back").spec.data.tokenizer)
    assert (back.special, back.fingerprint) == (written.special, written.fingerprint)


# By class, fields of a run that becomes it.
CLASSES = {
    "Gemma": {},
    "Gemma3": {"post_norms": True, "use_qk_norm": True},
    "Llama": {"scale_embedding": False, "activation": "silu"},
    "Qwen3": {"scale_embedding": False, "use_qk_norm": True},
}


@pytest.mark.parametrize(
    "name", ["Gemma", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CLASSES][1:])]
)
def test_autotokenizer_gives_the_ids_of_both_kinds(model, spec, tmp_path, name):
    """And has no token beyond the model's vocabulary."""
    transformers = pytest.importorskip("transformers")
    folder, ours = exported_with(tmp_path, model[0], **CLASSES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == ours.vocab_size == 330
    texts = [document.text.decode() for document in find_source(spec.data).documents()]
    for text in [*texts[:50], *TEXTS, "    a\n\n\tb"]:
        text = text.replace("▁", " ")
        ids = ours.encode(text.encode()).tolist()
        assert theirs(text)["input_ids"] == [2, *ids]
        assert theirs.decode(ids) == text
    ids = (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id, theirs.mask_token)
    assert ids == (0, 1, 2, None)


def test_an_export_to_qwen2_tells_that_autotokenizer_reads_it_otherwise(
    tmp_path, caplog, sentencepiece_model
):
    """It takes Qwen2Tokenizer for every qwen2, which cuts bytes."""
    fields = {"scale_embedding": False, "qkv_bias": True}
    folder, ours = exported_with(tmp_path, sentencepiece_model, **fields)
    assert "load it by PreTrainedTokenizerFast" in caplog.text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in articles(5):
        assert theirs(text)["input_ids"] == [2, *ours.encode(text.encode())]


def test_the_class_of_an_imported_sentencepiece_model_is_not_kept(tmp_path):
    """Another makes BPE of its pieces; the rest of the file stays."""
    learn(tmp_path, "unigram")
    values = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "model_max_length": 9}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    folder, _ = exported_with(tmp_path, tmp_path)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (written["add_bos_token"], written["model_max_length"]) == (False, 9)


def shift(values):
    """Every id is the next one."""
    vocab = values["model"]["vocab"]
    values["model"]["vocab"] = {piece: (i + 1) % len(vocab) for piece, i in vocab.items()}


def reverse(values):
    values["model"]["merges"].reverse()


def forget_spaces(values):
    values["normalizer"] = None


@pytest.mark.parametrize("change", [shift, reverse, forget_spaces])
def test_no_export_succeeds_with_another_tokenizer(tmp_path, monkeypatch, change):
    """What is written is read back and compared, on texts of the run too."""
    file = learn(tmp_path, "bpe", **IDENTITY)
    convert = tokenizers._convert

    def convert_wrongly(tokenizer):
        values = json.loads(convert(tokenizer))
        change(values)
        return json.dumps(values)

    monkeypatch.setattr(tokenizers, "_convert", convert_wrongly)
    line = refusal(exported_with, tmp_path, file)
    assert f"config.data.tokenizer={file}: " in line and "tokenizer.json" in line
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.part").exists()


def test_the_written_tokenizer_is_compared_on_the_run_s_own_texts(tmp_path):
    """Texts with a symbol that Python's documentation has not: a space is put before it."""
    file = learn(tmp_path, "bpe", **IDENTITY, user_defined_symbols=["<turn>"])
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "a.jsonl", [{"text": "a <turn>b <turn>c"}] * 9)
    spec, params = make_run(tmp_path / "docs", tokenizer=file, vocab_size=400)
    exporter.export(tmp_path / "docs", tmp_path / "hf")
    for place in ("text", "gone"):
        fields = {"data.dataset": "files", "data.data_dir": str(tmp_path / place)}
        save_run(tmp_path / f"run-{place}", spec.replace(fields), params)
    assert "<turn>" in refusal(exporter.export, tmp_path / "run-text", tmp_path / "other")
    exporter.export(tmp_path / "run-gone", tmp_path / "other")  # on Python's texts alone


def test_a_model_of_words_is_refused(tmp_path):
    """SentencePiece splits at spaces before it looks for words, and no tokenizer.json does here."""
    file = learn(tmp_path, "word", vocab_size=300)
    assert "a tokenizer.json that gives the same ids" in refusal(exported_with, tmp_path, file)
    make_run(tmp_path / "others", tokenizer=write(llama, tmp_path), vocab_size=400)
    exporter.export(tmp_path / "others", tmp_path / "hf")


@pytest.mark.parametrize("old", ["gone", "there"])
@pytest.mark.parametrize(
    ("name", "found"), [("words/", "words"), ("a.model", "a.model"), ("checkpoints", None)]
)
def test_what_lies_in_a_run_that_was_moved_is_its_tokenizer_if_it_is_one(
    tmp_path, name, found, old
):
    """And another folder of that name is not."""
    spec = Spec().replace({"data.tokenizer": f"{tmp_path}/elsewhere/{name}"})
    write_config(tmp_path, spec)
    for folder in ("checkpoints", "words", "elsewhere/words"):
        (tmp_path / folder).mkdir(parents=True)
    write(smollm, tmp_path / "words")
    (tmp_path / "a.model").touch()
    if old == "there":
        write(smollm, tmp_path / "elsewhere/words")
        (tmp_path / "elsewhere/a.model").touch()
    read = read_config(tmp_path)
    found = str(tmp_path / found) if found else spec.data.tokenizer
    assert read == spec.replace({"data.tokenizer": found})


# --- What cannot be used ----------------------------------------------------------------------


NO_END = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
NO_TOKENS = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
NEW = {"model": {"type": "New"}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in ("{", "[]", "[" * 100_000)),
        *(("tokenizer.json", json.dumps(values)) for values in (NEW, NO_TOKENS, NO_END)),
        ("tokenizer.model", "not a model"),
        ("tokenizer.model", ""),
        ("tokenizer.txt", "a folder with neither"),
        (".", None),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, name, content):
    folder = tmp_path / "none" if content is None else tmp_path
    if content is not None:
        (tmp_path / name).write_text(content)
    says = refusal(load_tokenizer, str(folder))
    assert says.startswith(f"config.data.tokenizer={folder}: ")


@pytest.mark.parametrize(
    ("flags", "mentions"),
    [
        ({"vocab_size": 260}, "--vocab_size=260: "),
        ({"vocab_size": 90_000}, "--vocab_size=90000: "),
        ({"vocab_size": 90_000, "model_type": "bpe"}, "--vocab_size=90000: "),
        ({"sample_bytes": 1}, "0 lines"),
        ({"output": "none/m.model"}, "/none/m.model: "),
    ],
)
def test_models_that_cannot_be_trained(spec, tmp_path, flags, mentions):
    defaults = {"output": "m.model", "vocab_size": 330, "model_type": "unigram"}
    output, *others = (defaults | {"sample_bytes": 10**6} | flags).values()
    assert mentions in refusal(train_tokenizer, spec, str(tmp_path / output), *others)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "vocab_size", "fields", "mentions"),
    [
        (qwen, 301, {}, "vocab_size=301"),
        (llama, 400, {"bos_token_id": 5}, "bos_token_id=5"),
        (smollm, 400, {"eos_token_id": [0, 400]}, "eos_token_id=[0, 400]"),
    ],
)
def test_checkpoints_whose_tokenizer_does_not_fit(tmp_path, make, vocab_size, fields, mentions):
    make_run(tmp_path / "run", vocab_size=vocab_size)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    files = tmp_path / "files"
    files.mkdir()
    write(make, files)
    (files / "config.json").unlink(missing_ok=True)
    if make is llama:
        roles = {"eos_token": "<|eot|>", "bos_token": "<|begin_of_text|>"}
        (files / "tokenizer_config.json").write_text(json.dumps(roles))
    shutil.copytree(files, tmp_path / "hf", dirs_exist_ok=True)
    ids = load_tokenizer(str(files)).special
    (tmp_path / "hf" / "generation_config.json").unlink()
    edit(tmp_path / "hf", **{"eos_token_id": ids.eos, "bos_token_id": ids.bos} | fields)
    assert mentions in refusal(importer.import_run, tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(0, None, (0,)), ([0, 3], None, (0, 3)), (0, [2, 5], (0, 5)), ([2, 3], None, (3,))],
)
def test_the_end_of_a_tuned_checkpoint_is_its_tokenizer_s(
    tmp_path, caplog, in_config, in_generation, expected
):
    """What config.json has instead ends a sample, too. The tokenizer's is 2 here."""
    caplog.set_level("INFO")
    make_run(tmp_path / "run", tokenizer=write(llama, tmp_path), vocab_size=400)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    roles = {"eos_token": "<|eot|>", "bos_token": "<|begin_of_text|>"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(roles))
    edit(tmp_path / "hf", eos_token_id=in_config)
    (tmp_path / "hf" / "generation_config.json").unlink()
    if in_generation is not None:
        values = json.dumps({"eos_token_id": in_generation})
        (tmp_path / "hf" / "generation_config.json").write_text(values)
    importer.import_run(tmp_path / "hf", tmp_path / "back")
    data = open_run(tmp_path / "back").spec.data
    assert load_tokenizer(data.tokenizer).special.eos == 2
    assert data.stop_ids == expected
    is_said = "the tokenizer's end token is 2" in caplog.text
    assert is_said == (2 not in np.atleast_1d(in_config))
    exporter.export(tmp_path / "back", tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["eos_token_id"] == [2, *expected]


def test_a_token_for_images_may_lie_beyond_the_model(tmp_path):
    """Gemma 3 270M has V = 262144, and its tokenizer the id 262144."""
    folder = write(gemma, tmp_path)
    text_size = load_tokenizer(str(folder)).text_size
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=text_size)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    assert importer.import_run(tmp_path / "hf", tmp_path / "back")["tokenizer"] != "byte"
