"""Bits per byte of a part of a text: every window is one document, whose bytes are counted here."""

import math
import types

import numpy as np
import pytest
import sentencepiece
from support.runs import edit_run, evaluate_run, make_run
from support.text import is_validation, write_lines
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prope import sharding
from prope.data.mixture import open_windows
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer, load_tokenizer
from prope.inference import losses, paired
from prope.inference.losses import LossEvaluation, count_bytes
from prope.workdir.run import open_run, read_config

T = 32
SCRIPTS = [
    "the rope of a turn is long ",
    "верёвка делает поворот ",
    "绳子转动的频率很慢。 ",
    "🙂é ",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def learn(tokenizer, special, alphabet=()):
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["".join(SCRIPTS[:2]) * 9], trainer)
    return tokenizer


def byte_level(folder):
    """As Llama 3's and SmolLM's: every byte is a character of a token; no text has a <bos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learn(tokenizer, ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def with_fallback(folder):
    """As Mistral's: a space before every text, bytes as <0x0A>."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    learn(tokenizer, ["<unk>", "<s>", "</s>", *BYTES])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sentence_pieces(folder, **options):
    """As Gemma's: no space before a text."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["".join(SCRIPTS[:2])] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        minloglevel=2,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        **{"add_dummy_prefix": False} | options,
    )
    (folder / "tokenizer.model").rename(folder / "model")
    (folder / "model").rename(folder / "tokenizer.model")
    return folder


TOKENIZERS = {
    "byte": lambda folder: "byte",
    "byte_level": byte_level,
    "with_fallback": with_fallback,
    "sentence_pieces": sentence_pieces,
    "with_space": lambda folder: sentence_pieces(folder, add_dummy_prefix=True),
}


def write_documents(folder, tokenizer) -> list[str]:
    """Writes documents of T tokens each, borders included, in four scripts."""
    rng = np.random.default_rng(0)
    special = tokenizer.special
    size = T - (1 if special.bos is None else 2)
    documents = set()
    while len(documents) < 48:
        script = SCRIPTS[len(documents) % 4]
        text = f"{len(documents)} "
        while len(tokenizer.encode(text.encode())) < size:
            start, length = rng.integers(len(script)), rng.integers(1, 5)
            text += script[start : start + length]
        if len(tokenizer.encode(text.encode())) == size:
            documents.add(text)
    write_lines(folder / "a.jsonl", [{"text": text} for text in sorted(documents)])
    return sorted(documents)


@pytest.fixture(scope="module", params=TOKENIZERS)
def case(request, tmp_path_factory):
    """A run, its tokenizer, and the documents of its validation and its train split."""
    root = tmp_path_factory.mktemp("bytes")
    name = str(TOKENIZERS[request.param](root))
    tokenizer = load_tokenizer(name)
    (root / "text").mkdir()
    documents = write_documents(root / "text", tokenizer)
    make_run(root / "run", tokenizer=name, vocab_size=400)
    edit_run(root / "run", root, **{"data.seq_len": T, "data.validation_fraction": 0.4})
    by_split = {False: [], True: []}
    for text in documents:
        by_split[is_validation(text.encode(), 0.4)].append(text)
    return root / "run", tokenizer, by_split[True], by_split[False]


def expected(record, tokenizer, chosen, trained) -> tuple[float, float]:
    """Bits per byte of the record's loss, and of token frequencies, over these documents."""

    def predicted(text) -> list[int]:
        return [*tokenizer.encode(text.encode()).tolist(), tokenizer.special.ends[-1]]

    counts = np.ones(tokenizer.vocab_size)
    for text in trained:
        np.add.at(counts, predicted(text), 1)
    nats = -np.log(counts / counts.sum())
    size = sum(len(text.encode()) for text in chosen)
    unigram = sum(nats[predicted(text)].sum() for text in chosen)
    return record["loss"] * record["tokens"] / math.log(2) / size, unigram / math.log(2) / size


@pytest.mark.parametrize("flags", [{"max_windows": 3}, {"max_windows": 4}, {"max_tokens": 5 * T}])
def test_bits_of_some_windows_are_over_their_own_bytes(case, flags):
    run, tokenizer, held_out, trained = case
    (record,) = evaluate_run(run, **flags)
    count = record["windows"]
    chosen = [held_out[i * len(held_out) // count] for i in range(count)]
    bits, unigram = expected(record, tokenizer, chosen, trained)
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert record["unigram_bits_per_byte"] == pytest.approx(unigram, rel=1e-9)


def test_training_evaluates_a_part_of_its_text_alike(case):
    run, tokenizer, held_out, trained = case
    spec = read_config(run).replace({"eval.max_windows": 3})
    windows = open_windows(spec.data, spec.model.vocab_size, "validation")
    evaluation = LossEvaluation(spec, windows)
    record = evaluation.evaluate(open_run(run).params(), sharding.make_mesh())
    chosen = [held_out[i * len(held_out) // 3] for i in range(3)]
    bits, unigram = expected(record, tokenizer, chosen, trained)
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert record["unigram_bits_per_byte"] == pytest.approx(unigram, rel=1e-9)


def test_all_windows_have_the_bytes_of_the_split(case):
    run, tokenizer, held_out, _ = case
    (record,) = evaluate_run(run)
    size = sum(len(text.encode()) for text in held_out)
    bits = record["loss"] * record["tokens"] / math.log(2) / size
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    sizes = count_bytes(tokenizer)
    ids = [tokenizer.encode(text.encode()) for text in held_out]
    ends = sizes[tokenizer.special.ends[-1]]
    assert sum(sizes[one].sum() + ends for one in ids) == size


@pytest.mark.parametrize(("ids", "bits"), [([1], None), ([1, 5], 2 / math.log(2))])
def test_predicted_tokens_without_text_have_no_bits_per_byte(ids, bits, monkeypatch):
    """An <eos> with a loss of 1; and with a letter, whose bits are those of a byte."""
    store = types.SimpleNamespace(special=GEMMA_IDS, targets=lambda split: 9)
    windows = types.SimpleNamespace(store=store, split="", shares=[1.0])
    windows.sources = [windows]
    measured = np.stack([count_bytes(ByteTokenizer()), np.ones(260)])
    monkeypatch.setattr(losses, "_measure_ids", lambda *_: measured)
    number = np.full((1, 1), len(ids))
    sums = paired.Sums(1.0 * number, number, np.array([0, T]), np.zeros(1, int), [1.0])
    record = losses.per_byte(windows, sums, np.bincount(ids, minlength=300)[None], "byte")
    assert record["perplexity"] == pytest.approx(math.e)
    for name in ("bits_per_byte", "unigram_bits_per_byte"):
        assert record[name] == (bits and pytest.approx(bits))
