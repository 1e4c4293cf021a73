"""Tokenizers of tokenizer.json, as five families have them: from text to a run, and back."""

import json
import shutil
import types
import unicodedata

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from etils import epath
from support.exchange import edit
from support.heads import analysis_options
from support.runs import evaluate_run, make_run
from support.text import articles, data_config, read_lines, read_tokens, write_lines
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
from prope.config import default_config, differences
from prope.data import view
from prope.data.mixture import open_windows
from prope.data.store.pack import is_validation
from prope.data.tokenizer import SpecialIds, _special_ids_of, load_tokenizer, token_name
from prope.errors import UsageError
from prope.hf import exporter, importer
from prope.hf.tokenizers import write_tokenizer
from prope.inference import generation
from prope.inference.generation import Sampling
from prope.workdir.run import open_run, read_config, write_config

TEXTS = ["", "a b", "  two  spaces\r\n\n", "naïve é🙂 数学", "Z\u0301e\u0301", "x▁y", "\0 1234567"]
SPELLED = "<bos><s></s><eos><pad><unk><|endoftext|><|im_start|><|begin_of_text|><|im_end|>"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
# As older versions of transformers write a token.
PAD = {"__type": "AddedToken", "content": "<|endoftext|>", "normalized": False}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


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


def test_the_special_ids_are_the_familys(family):
    folder, special, _ = family
    for place in (folder, folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(place))
        assert tokenizer.special == special
    ids = reference(folder).get_vocab()
    assert tokenizer.vocab_size == max(ids.values()) + 1
    assert tokenizer.text_size == tokenizer.vocab_size - ("<image>" in ids)


def test_ids_are_the_librarys_and_texts_come_back(family):
    folder, special, comes_back = family
    ours = load_tokenizer(str(folder))
    theirs = reference(folder)
    for text in [*TEXTS, *articles(40)[30:]]:
        ids = ours.encode(text.encode())
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == comes_back(text)
        padded = [special.start, *ids, special.eos, special.pad, 10**6, -1]
        assert ours.decode(padded) == comes_back(text)


def test_text_that_spells_special_tokens_stays_text(family):
    folder, *_ = family
    ours = load_tokenizer(str(folder))
    ids = ours.encode(SPELLED.encode())
    added = {token.content: i for i, token in reference(folder).get_added_tokens_decoder().items()}
    assert not {added[name] for name in added if name in SPELLED} & set(ids.tolist())
    assert ours.decode(ids) == SPELLED


def test_an_end_token_that_is_an_ordinary_one_is_not_text(tmp_path):
    folder = write(smollm, tmp_path)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["added_tokens"][0]["special"] = False
    file.write_text(json.dumps(values))
    assert 0 not in load_tokenizer(str(folder)).encode(b"a<|endoftext|>b")


def test_the_fingerprint_is_of_what_decides_the_ids(tmp_path):
    folder = write(llama, tmp_path)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())

    def fingerprint(**changes):
        file.write_text(json.dumps(values | changes, indent=1))
        return load_tokenizer(str(folder)).fingerprint

    first = fingerprint()
    assert (
        fingerprint(
            truncation={
                "max_length": 2,
                "stride": 0,
                "strategy": "LongestFirst",
                "direction": "Right",
            }
        )
        == first
    )
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
        ({"bos_token": "<|im_start|>"}, 0),
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
    assert _special_ids_of("a.model", processor) == SpecialIds(2, 2, None, 0)


# --- Data --------------------------------------------------------------------------------------


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
    lengths = view.document_lengths(windows.store)
    np.testing.assert_array_equal(lengths, np.bincount(numbers))


def test_weights_do_not_depend_on_the_value_of_padding(tmp_path):
    documents(tmp_path)
    batches = []
    for name, pad in (("a", None), ("b", "<|im_start|>")):
        folder = tmp_path / name
        folder.mkdir()
        write(smollm, folder)
        if pad:
            config = folder / "tokenizer_config.json"
            values = json.loads(config.read_text())
            config.write_text(json.dumps(values | {"pad_token": pad}))
        windows = windows_of(tmp_path, folder, mask_documents=True)
        batches.append(windows.read([windows.count - 1]))
    assert batches[0]["tokens"][0, -1] == 0 and batches[1]["tokens"][0, -1] == 1
    for name in ("weights", "positions", "segment_ids"):
        np.testing.assert_array_equal(batches[0][name], batches[1][name])


def test_a_window_is_shown_with_the_borders_of_its_documents(tmp_path):
    folder = write(smollm, tmp_path)
    tokenizer = load_tokenizer(str(folder))
    a, b = (int(tokenizer.encode(letter)[0]) for letter in (b"a", b"b"))

    def headings(tokens, target):
        stream = np.array([*tokens, target])
        segments = np.cumsum(stream == 0) + (tokens[0] != 0)
        row = {
            "tokens": stream[:-1],
            "targets": stream[1:],
            "positions": np.arange(len(tokens)),
            "segment_ids": segments[:-1],
            "weights": np.ones(len(tokens)),
        }
        lines = list(view.describe(row, tokenizer))
        return [line for line in lines if line.startswith("---")], lines

    (first, second), lines = headings([a, 0, b], 0)
    assert first.startswith("--- document 1, which began in the window before: ")
    assert second.startswith("--- document 2: "), "the target says that it ends"
    assert any("<eos>" in line for line in lines)
    _, second = headings([a, 0], b)[0]
    assert second.startswith("--- document 2, goes on in the next window: ")


# --- Runs --------------------------------------------------------------------------------------


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


def test_no_id_is_sampled_that_the_tokenizer_lacks():
    logits = jnp.zeros((2, 400)).at[:, 303:].set(1000.0)
    keys = generation.row_keys(0, 2)
    for temperature, top_k, top_p in ((0.0, None, 1.0), (1.0, None, 1.0), (1.0, 3, 0.9)):
        sampling = Sampling(8, temperature, top_k, top_p, vocab_size=303)
        for position in range(9):
            tokens = generation.sample_tokens(sampling, logits, keys, jnp.full(2, position))
            assert tokens.max() < 303


@pytest.mark.parametrize(
    ("make", "special"), [(qwen, FAMILIES["qwen"][1]), (mistral, FAMILIES["mistral"][1])]
)
def test_a_text_begins_and_ends_as_the_tokenizer_has_it(tmp_path, monkeypatch, make, special):
    folder = write(make, tmp_path)
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=400)
    prompt, whole = (
        reference(folder).encode(text, add_special_tokens=False).ids for text in ("a", "a b")
    )
    assert whole[: len(prompt)] == prompt
    continuation = [*whole[len(prompt) :], special.eos]

    def generate(config, sampling, params, rows, seed):
        assert rows == [[special.start, *prompt]]
        ends = {special.eos} if special.bos is not None else {special.eos, special.start}
        assert sampling.eos == special.eos and set(sampling.stop_ids) == ends
        assert sampling.pad == special.pad
        assert sampling.vocab_size == reference(folder).get_vocab_size()
        seconds = dict.fromkeys(("prefill", "decode", "compile"), 1.0)
        return np.array([[*continuation, 0, special.pad]]), seconds

    monkeypatch.setattr(generation, "generate", generate)
    run = str(tmp_path / "run")
    result = generation.continue_prompts(run, None, ["a"], Sampling(6), 0)
    assert result["texts"] == [" b"]
    assert result["tokens"] == len(continuation)


@pytest.mark.slow
def test_a_run_trains_with_a_folder(tmp_path, run_command):
    folder = tmp_path / "files"
    folder.mkdir()
    write(qwen, folder)
    documents(tmp_path)
    flags = [
        "--config=configs/quickstart.py:tiny",
        "--config.data.dataset=files",
        f"--config.data.data_dir={tmp_path}/text",
        f"--config.data.cache_dir={tmp_path}/cache",
        f"--config.data.tokenizer={folder}",
        "--config.data.seq_len=32",
        "--config.data.num_workers=2",
        "--config.model.vocab_size=400",
        "--config.num_steps=4",
        "--config.optimizer.warmup_steps=1",
    ]
    shown = run_command("prope.data.inspect", *flags)
    assert shown.result["documents_in_rows"] > 1, shown.stderr
    run = f"--workdir={tmp_path}/run"
    trained = run_command("prope.train", *flags, run)
    assert np.isfinite(trained.result["eval_loss"]), trained.stderr
    said = run_command("prope.sample", run, "--prompt=The", "--length=5")
    assert said.result["tokens"] >= 1, said.stderr


# --- Hugging Face ------------------------------------------------------------------------------


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
    config = open_run(tmp_path / "moved").config
    assert config.data.tokenizer == str(tmp_path / "moved" / "tokenizer")
    assert config.data.stop_ids == ()
    original = load_tokenizer(str(folder))
    exporter.export(tmp_path / "moved", tmp_path / "again")
    for place in (config.data.tokenizer, tmp_path / "again"):
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


def test_a_mistral_model_of_sentencepiece(tmp_path, caplog):
    """The default ids of SentencePiece: unk 0, bos 1, eos 2, no pad; and a space before texts."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(articles(50)),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    file = str(tmp_path / "tokenizer.model")
    ours = load_tokenizer(str(tmp_path))
    theirs = sentencepiece.SentencePieceProcessor(model_file=file)
    assert ours.special == SpecialIds(2, 2, 1, 0)
    assert ours.fingerprint == load_tokenizer(file).fingerprint
    for text in TEXTS:
        ids = ours.encode(text.encode())
        assert ids.tolist() == theirs.encode(text)
        assert ours.decode(ids) == text.replace("▁", " ")
    text = documents(tmp_path)[0]
    stream = read_tokens(windows_of(tmp_path, file).store, "train")
    first = [1, *theirs.encode(text), 2]
    assert stream[: len(first)].tolist() == first
    (tmp_path / "out").mkdir()
    write_tokenizer(file, ours, epath.Path(tmp_path / "out"))
    assert "AutoTokenizer leaves out the space" in caplog.text
    assert load_tokenizer(str(tmp_path / "out")).special == ours.special


@pytest.mark.parametrize("name", ["words", "words/", "checkpoints", "words/tokenizer.json"])
def test_what_lies_in_a_run_is_its_tokenizer_if_it_is_one(tmp_path, name):
    """And another folder of that name is not."""
    original = tmp_path / "elsewhere" / name
    config = default_config()
    config.data.tokenizer = f"{original}/" if name.endswith("/") else str(original)
    write_config(tmp_path, config)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "words").mkdir()
    write(smollm, tmp_path / "words")
    found = read_config(tmp_path).data.tokenizer
    if name.startswith("words") and not name.endswith("json"):
        assert found == str(tmp_path / "words")
        assert load_tokenizer(f"file://{found}/").fingerprint == load_tokenizer(found).fingerprint
        config.data.tokenizer = found
        assert not differences(config, read_config(tmp_path))
    else:
        assert found == str(original)


# --- What cannot be used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", r"not readable as JSON \(.*\); download it again"),
        ("[]", "tokenizer.json has no model; load it with AutoTokenizer"),
        ('{"model": null}', "tokenizer.json has no model; load it with AutoTokenizer"),
        ('{"model": {"type": "New"}}', "tokenizer.json cannot be used: .*; download it again"),
        (
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "the model in tokenizer.json has no tokens; download it again",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
            "has no end token, .*; name one as eos_token in tokenizer_config.json beside it",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, problem):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=f"^config.data.tokenizer={tmp_path}: {problem}") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "vocab_size", "fields", "problem"),
    [
        (llama, 290, {}, "vocab_size=290, but the tokenizer .* has 300 ids; give --tokenizer="),
        (qwen, 301, {}, "vocab_size=301, but the tokenizer .* has 303 ids; give --tokenizer="),
        (llama, 400, {"eos_token_id": 5}, "eos_token_id=5, but the tokenizer .* has 2; give"),
        (llama, 400, {"bos_token_id": 5}, "bos_token_id=5, but the tokenizer .* has 1; give"),
        (smollm, 400, {"eos_token_id": [0, 400]}, r"eos_token_id=\[0, 400\]: must be ids below"),
    ],
)
def test_checkpoints_whose_tokenizer_does_not_fit(tmp_path, make, vocab_size, fields, problem):
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
    with pytest.raises(UsageError, match=problem) as error:
        importer.import_run(tmp_path / "hf", tmp_path / "back")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "back").exists()


def test_a_token_for_images_may_lie_beyond_the_model(tmp_path):
    """Gemma 3 270M has V = 262144, and its tokenizer the id 262144."""
    folder = write(gemma, tmp_path)
    text_size = load_tokenizer(str(folder)).text_size
    make_run(tmp_path / "run", tokenizer=folder, vocab_size=text_size)
    exporter.export(tmp_path / "run", tmp_path / "hf")
    assert importer.import_run(tmp_path / "hf", tmp_path / "back")["tokenizer"] != "byte"
