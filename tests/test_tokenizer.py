"""Tokenizers: what is learnt and from what, and that every text comes back byte for byte."""

import io
import itertools
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT

from prope.config import default_config
from prope.data import view
from prope.data.sources.find import find_source
from prope.data.store.pack import is_validation
from prope.data.tokenizer import load_tokenizer
from prope.data.vocabulary import sample, split_lines, train_tokenizer
from prope.data.windows import Windows, train_batch
from prope.errors import UsageError

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


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """300 texts of a few words; those that are held out, and only those, are full of another word."""
    root = tmp_path_factory.mktemp("tokenizer")
    rng = np.random.default_rng(0)
    words = ["rope", "Zürich", "数学", "pair\n", "2024"]
    words += [
        "".join(rng.choice(["fre", "quen", "cy", "po", "si", "tion", "an", "gle"], 3))
        for _ in range(60)
    ]
    texts = []
    while len(texts) < 300:
        text = " ".join(rng.choice(words, rng.integers(20, 200)))
        secret = f"{text}{f' {SECRET}' * 9}"
        if is_validation(secret.encode(), 0.2):
            texts.append(secret)
        elif not is_validation(text.encode(), 0.2):
            texts.append(text)
    (root / "text").mkdir()
    (root / "text" / "all.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    config = default_config()
    config.data.update(
        {
            "dataset": "files",
            "data_dir": str(root / "text"),
            "cache_dir": str(root / "cache"),
            "validation_fraction": 0.2,
            "seq_len": 64,
        }
    )
    return config


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, config, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "a.model"
    result = train_tokenizer(config, str(path), 330, request.param, 10**6)
    assert result["model"] == str(path) and result["vocab_size"] == 330
    return path, request.param


def processor(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_a_trained_model_has_gemmas_special_ids(model):
    trained = processor(model[0])
    assert [trained.id_to_piece(i) for i in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert [trained.is_control(i) for i in range(4)] == [
        True,
        True,
        True,
        False,
    ] and trained.is_unknown(3)
    assert sum(trained.is_byte(i) for i in range(330)) == 256
    assert trained.encode("rope")[0] > 259, "it has learnt something"


def test_the_same_text_gives_the_same_file(model, config, tmp_path):
    path, kind = model
    train_tokenizer(config, str(tmp_path / "another name.model"), 330, kind, 10**6)
    assert (tmp_path / "another name.model").read_bytes() == path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["another name.model"]


def test_held_out_documents_are_not_learnt_from(model, config, tmp_path):
    """Their word has the only x: learnt from, it would be a piece, and not a byte to fall back on."""
    path, kind = model
    assert (
        processor(path).piece_to_id("x")
        == processor(path).unk_id()
        != processor(path).piece_to_id("Z")
    )
    everything = config.copy_and_resolve_references()
    everything.data.validation_fraction = 1e-9
    train_tokenizer(everything, str(tmp_path / "all.model"), 330, kind, 10**6)
    assert processor(tmp_path / "all.model").piece_to_id("x") > 259


def test_every_text_comes_back_byte_for_byte(model, config):
    rng = np.random.default_rng(1)
    alphabet = list(dict.fromkeys("".join(ODD)))
    noise = ["".join(rng.choice(alphabet, rng.integers(1, 60))) for _ in range(500)]
    documents = list(find_source(config.data).documents())
    for tokenizer in (load_tokenizer(str(model[0])), load_tokenizer("byte")):
        for text in documents + [t.encode() for t in ODD + noise]:
            ids = tokenizer.encode(text)
            assert ids.dtype == np.int32 and not np.isin(ids, [0, 1, 2, 3]).any()
            assert tokenizer.decode(ids).encode() == text
        assert tokenizer.decode([2, *tokenizer.encode(b"rope"), 1, 0, 5000]) == "rope", (
            "no text, no ids of the model"
        )


def test_a_model_without_bytes_takes_the_space_mark_for_a_space(tmp_path):
    """SentencePiece writes a space as U+2581; a model that cannot fall back on bytes has no other piece for it."""
    prefix = str(tmp_path / "model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a rope of words and of spaces"] * 20),
        model_prefix=prefix,
        vocab_size=30,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
    )
    tokenizer = load_tokenizer(f"{prefix}.model")
    ids = tokenizer.encode("of\u2581words".encode())
    assert ids.dtype == np.int32 and ids.tolist() == processor(f"{prefix}.model").encode("of words")
    assert tokenizer.decode(ids) == "of words"


def test_documents_are_cut_into_lines_without_a_loss():
    long = ("word " * 3000 + "\n") * 2 + "数" * 5000 + "\n\nend"
    for text in [*ODD, long]:
        lines = list(split_lines(text.encode()))
        assert b"".join(lines) == text.encode() and all(0 < len(line) <= 4096 for line in lines)
        assert all(line.decode() for line in lines), "no character is cut"


def test_a_line_of_32_mb_is_cut_in_one_pass():
    """A copy of the rest for every cut would move 130 GB, in about a minute."""
    line = b"word of a rope " * 2_236_962
    start = time.perf_counter()
    assert sum(map(len, split_lines(line))) == len(line)
    assert time.perf_counter() - start < 15


def test_the_sample_is_bounded_and_depends_on_the_text_alone():
    def documents():
        return (f"line {i}\n".encode() * 3 for i in range(20_000))

    size = sum(map(len, documents()))
    everything, total = sample(documents(), size)
    assert total == size == sum(map(len, everything))
    tracemalloc.start()
    some, total = sample(documents(), 50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == size and 49_900 < sum(map(len, some)) <= 50_000 and peak < 2_000_000
    assert everything[: len(some)] == some, "those with the smallest hashes"
    assert sorted(sample(reversed(list(documents())), 50_000)[0]) == sorted(some)
    numbers = [int(line.split()[1]) for line in some]
    assert abs(np.mean(numbers) - 10_000) < 500 and len(set(numbers)) > 0.7 * len(numbers), (
        "from everywhere"
    )


def refused(says, function, *arguments):
    with pytest.raises(UsageError, match=says) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_used(config, tmp_path):
    other, texts = io.BytesIO(), [text.decode() for text in find_source(config.data).documents()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=other,
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    (tmp_path / "other.model").write_bytes(other.getvalue())
    ids = r"pad -1, eos 2, bos 1, unk 0 \(-1: none\) and must be Gemma's, pad 0, eos 1, bos 2, unk 3; give byte"
    refused(
        f"tokenizer={tmp_path}/other.model: its special ids are {ids}",
        load_tokenizer,
        str(tmp_path / "other.model"),
    )
    for name, data in (
        ("text.model", b"not a model"),
        ("cut.model", other.getvalue()[:500]),
        ("empty.model", b""),
    ):
        (tmp_path / name).write_bytes(data)
        refused(
            f"{name}: cannot be read: it is not a SentencePiece model",
            load_tokenizer,
            str(tmp_path / name),
        )
    refused("none.model: cannot be read: No such file", load_tokenizer, "none.model")
    refused("cannot be read: Is a directory", load_tokenizer, str(tmp_path))


def test_models_that_cannot_be_trained(config, tmp_path):
    def attempt(says, output="m.model", vocab_size=330, kind="unigram", size=10**6):
        refused(says, train_tokenizer, config, str(tmp_path / output), vocab_size, kind, size)
        assert not list(tmp_path.iterdir())

    attempt("vocab_size=260: must be more than 260", vocab_size=260)
    attempt(
        "vocab_size=270: .*Vocabulary size is smaller than required_chars.*Increase vocab_size$",
        vocab_size=270,
    )
    attempt("vocab_size=90000: .*too high .*value <= ", vocab_size=90_000)
    attempt("vocab_size=90000: .*too high .*value <= ", vocab_size=90_000, kind="bpe")
    attempt("cannot learn it from 0 lines: it finds no text in them", size=1)
    attempt(f"--output={tmp_path}/none/m.model: there is no folder", output="none/m.model")


# --- What the model will see ------------------------------------------------------------------------------------


def test_the_commands_work_without_a_socket_and_without_tensorflow(config, tmp_path):
    """In processes where a TensorFlow could be imported and would end them, and where every socket is refused."""
    (tmp_path / "fake" / "tensorflow").mkdir(parents=True)
    (tmp_path / "fake" / "tensorflow" / "__init__.py").write_text(
        "raise SystemExit('TensorFlow was imported')"
    )
    refuse = (
        "import runpy, socket, sys\n"
        "def refuse(*arguments, **options):\n"
        "    raise SystemExit('a socket was opened')\n"
        "socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse\n"
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
    )
    fields = [
        f"--config.data.{name}={value}"
        for name, value in config.data.items()
        if name in ("dataset", "data_dir", "cache_dir", "validation_fraction", "seq_len")
    ]

    def run(module, *arguments):
        command = [
            sys.executable,
            "-c",
            refuse,
            module,
            f"--config={ROOT}/configs/quickstart.py",
            *fields,
            *arguments,
        ]
        paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "fake"), str(ROOT)])}
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        *shown, last = done.stdout.splitlines()
        return "\n".join(shown), json.loads(last)

    path = tmp_path / "m.model"
    shown, trained = run(
        "prope.data.train_tokenizer", f"--output={path}", "--vocab_size=320", "--sample_bytes=50000"
    )
    assert trained["model"] == str(path) and trained["vocab_size"] == 320 and not shown
    model = (f"--config.data.tokenizer={path}", "--config.model.vocab_size=320")
    plot = tmp_path / "plot.png"
    shown, last = run("prope.data.inspect", *model, "--step=12", "--rows=3", f"--plot={plot}")
    assert (last["step"], last["rows"], last["seq_len"], last["plot"]) == (12, 3, 64, str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    own = config.copy_and_resolve_references()
    own.data.tokenizer = str(path)
    windows = Windows(own.data, 320, "train")
    batch = train_batch(windows, 0, 8, 12, range(3))  # the seed and the batch size of quickstart.py
    numbers = [
        int(number.replace(",", ""))
        for number in re.findall(r"row \d of 8: window ([\d,]+) of", shown)
    ]
    np.testing.assert_array_equal(windows.read(numbers)["tokens"], batch["tokens"])
    text = " ".join(
        re.sub(r"(?m)^(---|===| +place| +\d+ +\d+ +\d+ |  \.\.\.).*", "", shown).split()
    )
    for tokens in batch["tokens"].tolist():
        assert " ".join(processor(path).decode(tokens).split()) in text


def row(tokens, targets, weights, positions, segments):
    values = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    return {name: np.array(v, np.int32) for name, v in values.items()} | {
        "weights": np.array(weights, np.float32)
    }


def test_a_row_is_described_with_its_borders_positions_and_weights():
    a, b, q = (ord(c) + 4 for c in "abQ")
    stream = [a, b, b, b, b, b, b, b, b, 1, 2, q, q, a, a, 1, 0, 0, 0]
    weights = [1] * 9 + [0, 0, 0, 1, 1, 1, 0, 0, 0]
    positions = [*range(10), 3, 7, 8, 20, 30, 31, 32, 33]
    lines = list(
        view.describe(
            row(stream[:-1], stream[1:], weights, positions, [1] * 10 + [2] * 6 + [0] * 2),
            load_tokenizer("byte"),
        )
    )
    assert lines[:6] == [
        "--- document 1, which began in the window before: tokens 0..9 at positions 0..9",
        "    abbbbbbbb",
        "--- document 2: tokens 10..15 at positions 3, 7, 8, 20 .. 31",
        "    prompt, no loss | QQ",
        "    aa",
        "--- padding: tokens 16..17",
    ]
    table = [line.split() for line in lines[7:]]
    assert [entry[0] for entry in table if entry != ["..."]] == [
        *map(str, [0, 1, 2, *range(7, 18)])
    ]
    assert table.count(["..."]) == 1
    assert table[table.index(["..."]) + 4] == ["10", "3", "2", "2", "<bos>", str(q), "'Q'", "0"]
    assert table[-3] == ["15", "31", "2", "1", "<eos>", "0", "<pad>", "0"]


def test_a_mixture_is_shown_source_by_source(config, tmp_path, capsys):
    mixed = config.copy_and_resolve_references()
    for name, words in (("long", 60), ("short", 4)):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"inputs": f"{name} {i}" + " word" * words, "targets": "yes"})
            for i in range(100)
        ]
        (tmp_path / name / "a.jsonl").write_text("\n".join(lines))
    mixed.data.update(
        {
            "dataset": "mixture",
            "data_dir": "",
            "template": "{inputs}? {targets}",
            "loss_on": "targets",
            "seq_len": 64,
            "mixture": tuple(
                {"weight": w, "dataset": "files", "data_dir": str(tmp_path / n)}
                for n, w in (("long", 3), ("short", 1))
            ),
        }
    )
    result = view.show_batch(mixed, 2, 4, str(tmp_path / "plot.png"))
    shown = capsys.readouterr().out
    assert [(s["dataset"], s["weight"]) for s in result["sources"]] == [
        (f"files {tmp_path}/long", 0.75),
        (f"files {tmp_path}/short", 0.25),
    ]
    # <bos>, the name and a space, the number of one or two digits, the words, "? yes", <eos>
    assert [s["document_tokens"]["longest"] for s in result["sources"]] == [
        1 + 7 + 300 + 5 + 1,
        1 + 8 + 20 + 5 + 1,
    ]
    assert result["steps_per_epoch"] == pytest.approx(
        result["windows"] / mixed.batch_size, abs=0.005
    )
    assert shown.count("=== step 2, row ") == 4 and "    prompt, no loss | " in shown
    assert re.search(r"^    yes$", shown, re.M) and result["weight_share"] < 0.3


def test_a_mixture_of_generated_windows_has_no_lengths(config):
    mixed = config.copy_and_resolve_references()
    parts = tuple({"weight": 1, "dataset": f"longcontext/{task}"} for task in ("passkey", "niah"))
    mixed.data.update({"dataset": "mixture", "data_dir": "", "mixture": parts})
    assert view.show_batch(mixed, 0, 1, None)["sources"] == []
    with pytest.raises(
        UsageError,
        match="--plot=a.png: mixture has no documents whose lengths could be drawn; remove",
    ):
        view.show_batch(mixed, 0, 1, "a.png")


def test_control_characters_do_not_reach_the_terminal():
    text = "red \x1b[31m bell \a tab \t end"
    ids = [byte + 4 for byte in text.encode()]
    zeros = [0] * len(ids)
    lines = list(
        view.describe(row(ids, ids, zeros, range(len(ids)), [1] * len(ids)), load_tokenizer("byte"))
    )
    assert all(line.isprintable() for line in lines) and "[31m" in lines[1]


@pytest.mark.parametrize("stretches", [2, 1000])
def test_lengths_of_documents(config, monkeypatch, stretches):
    windows = Windows(config.data, 260, "train")
    stream = np.asarray(windows.store.tokens("train").read().result())
    starts = [i for i, token in enumerate(stream) if token == 2]
    true = [stop - start for start, stop in itertools.pairwise([*starts, len(stream)])]
    monkeypatch.setattr(view, "_SCAN_TOKENS", 300)
    monkeypatch.setattr(view, "_SCANS", stretches)
    places = [0, len(stream) // 2]
    expected = [
        n
        for start, n in zip(starts, true, strict=True)
        if stretches > 2 or any(p <= start < p + 300 for p in places)
    ]
    assert max(expected) > 300, "some do not fit into a stretch"
    assert view.document_lengths(windows.store).tolist() == expected


def test_the_same_lengths_give_the_same_picture(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 5000, 300)
    for name, values in (("a.png", lengths), ("b.png", lengths), ("c.png", lengths[:200])):
        view.draw_lengths({"a": values}, 64, str(tmp_path / name))
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c and len(a) > 10_000
    view.draw_lengths({"a": np.array([7]), "b": lengths}, 64, str(tmp_path / "two.png"))
    for wrong in ("none/a.png", "a.nothing"):
        path = str(tmp_path / wrong)
        refused(f"--plot={path}: cannot be written: ", view.draw_lengths, {"a": lengths}, 64, path)
