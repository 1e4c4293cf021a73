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
from support.commands import ROOT
from support.text import write_lines

from prope.config import default_config
from prope.data import view
from prope.data.sources.find import find_source
from prope.data.store.pack import is_validation
from prope.data.tokenizer import ByteTokenizer, load_tokenizer
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
SPECIAL_IDS = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
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
    config = default_config()
    fields = {"dataset": "files", "data_dir": str(root / "text"), "cache_dir": str(root / "cache")}
    config.data.update(fields | {"validation_fraction": 0.2, "seq_len": 64})
    return config


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, config, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "a.model"
    result = train_tokenizer(config, str(path), 330, request.param, 10**6)
    assert result["model"] == str(path)
    assert result["vocab_size"] == 330
    return path, request.param


def processor(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_a_trained_model_has_gemmas_special_ids(model):
    trained = processor(model[0])
    assert [trained.id_to_piece(i) for i in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert [trained.is_control(i) for i in range(4)] == [True, True, True, False]
    assert trained.is_unknown(3)
    assert sum(trained.is_byte(i) for i in range(330)) == 256
    assert trained.encode("rope")[0] > 259, "it has learnt something"


def test_the_same_text_gives_the_same_file(model, config, tmp_path):
    path, kind = model
    again = tmp_path / "another name.model"
    train_tokenizer(config, str(again), 330, kind, 10**6)
    assert again.read_bytes() == path.read_bytes()
    assert list(tmp_path.iterdir()) == [again]


def test_held_out_documents_are_not_learnt_from(model, config, tmp_path):
    """Their word has the only x: learnt from, it would be a piece, and not a byte."""
    path, kind = model
    trained = processor(path)
    assert trained.piece_to_id("x") == trained.unk_id()
    assert trained.piece_to_id("Z") != trained.unk_id()
    everything = config.copy_and_resolve_references()
    everything.data.validation_fraction = 1e-9
    train_tokenizer(everything, str(tmp_path / "all.model"), 330, kind, 10**6)
    assert processor(tmp_path / "all.model").piece_to_id("x") > 259


def test_every_text_comes_back_byte_for_byte(model, config):
    rng = np.random.default_rng(1)
    alphabet = list(dict.fromkeys("".join(ODD)))
    noise = ["".join(rng.choice(alphabet, rng.integers(1, 60))) for _ in range(500)]
    texts = [text.encode() for text in ODD + noise]
    texts += find_source(config.data).documents()
    for tokenizer in (load_tokenizer(str(model[0])), load_tokenizer("byte")):
        for text in texts:
            ids = tokenizer.encode(text)
            assert ids.dtype == np.int32
            assert not np.isin(ids, [0, 1, 2, 3]).any()
            assert tokenizer.decode(ids).encode() == text
        ids_without_text = [2, *tokenizer.encode(b"rope"), 1, 0, 5000]
        assert tokenizer.decode(ids_without_text) == "rope"


def test_ids_that_are_no_bytes_have_no_text():
    """Of a model with a larger vocabulary, too: 4 is the first byte, 259 the last."""
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
    all_lines, total = sample(documents(), size)
    assert total == size == sum(map(len, all_lines))
    tracemalloc.start()
    lines, total = sample(documents(), 50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == size
    assert 49_900 < sum(map(len, lines)) <= 50_000
    assert peak < 2_000_000
    assert all_lines[: len(lines)] == lines, "those with the smallest hashes"
    from_reversed, _ = sample(reversed(list(documents())), 50_000)
    assert sorted(from_reversed) == sorted(lines)
    numbers = [int(line.split()[1]) for line in lines]
    assert abs(np.mean(numbers) - 10_000) < 500, "from everywhere"
    assert len(set(numbers)) > 0.7 * len(numbers)


def refused(problem, function, *arguments):
    with pytest.raises(UsageError, match=problem) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_used(config, tmp_path):
    trained = io.BytesIO()
    texts = [text.decode() for text in find_source(config.data).documents()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=trained,
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    other = trained.getvalue()
    no_model = "cannot be read: it is not a SentencePiece model"
    cases = [
        ("text.model", b"not a model", no_model),
        ("cut.model", other[:500], no_model),
        ("empty.model", b"", no_model),
    ]
    for name, content, problem in cases:
        path = tmp_path / name
        path.write_bytes(content)
        refused(f"config.data.tokenizer={path}: {problem}", load_tokenizer, str(path))
    refused("none.model: cannot be read: No such file", load_tokenizer, "none.model")
    neither = "holds neither tokenizer.json nor tokenizer.model; give byte"
    refused(neither, load_tokenizer, str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"vocab_size": 260}, "--vocab_size=260: must be more than 260"),
        (
            {"vocab_size": 270},
            "vocab_size=270: .*smaller than required_chars.*Increase vocab_size$",
        ),
        ({"vocab_size": 90_000}, "--vocab_size=90000: .*too high .*value <= "),
        ({"vocab_size": 90_000, "model_type": "bpe"}, "--vocab_size=90000: .*too high .*value <= "),
        ({"sample_bytes": 1}, "cannot learn it from 0 lines: it finds no text in them"),
        ({"output": "none/m.model"}, "--output=.*/none/m.model: there is no folder"),
    ],
)
def test_models_that_cannot_be_trained(config, tmp_path, flags, problem):
    defaults = {
        "output": "m.model",
        "vocab_size": 330,
        "model_type": "unigram",
        "sample_bytes": 10**6,
    }
    output, *others = (defaults | flags).values()
    refused(problem, train_tokenizer, config, str(tmp_path / output), *others)
    assert not list(tmp_path.iterdir())


# --- What the model will see ------------------------------------------------------------------

REFUSES_SOCKETS = """
import runpy, socket, sys
def refuse(*arguments, **options):
    raise SystemExit('a socket was opened')
socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse
runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
"""


@pytest.fixture
def run_alone(config, tmp_path):
    """Runs a command where TensorFlow would end the process, and every socket is refused."""
    tensorflow = tmp_path / "fake" / "tensorflow"
    tensorflow.mkdir(parents=True)
    fails = "raise SystemExit('TensorFlow was imported')"
    (tensorflow / "__init__.py").write_text(fails)
    paths = os.pathsep.join([str(tensorflow.parent), str(ROOT)])
    flags = [f"--config={ROOT}/configs/quickstart.py"]
    for name in ("dataset", "data_dir", "cache_dir", "validation_fraction", "seq_len"):
        flags.append(f"--config.data.{name}={config.data[name]}")

    def run(module, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", REFUSES_SOCKETS, f"prope.data.{module}", *flags, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        *text, result = done.stdout.splitlines()
        return "\n".join(text), json.loads(result)

    return run


def test_the_commands_work_without_a_socket_and_without_tensorflow(config, tmp_path, run_alone):
    path = tmp_path / "m.model"
    learnt = ("--vocab_size=320", "--sample_bytes=50000")
    text, trained = run_alone("train_tokenizer", f"--output={path}", *learnt)
    assert trained["model"] == str(path)
    assert trained["vocab_size"] == 320
    assert not text
    plot = tmp_path / "plot.png"
    model = (f"--config.data.tokenizer={path}", "--config.model.vocab_size=320")
    text, result = run_alone("inspect", *model, "--step=12", "--rows=3", f"--plot={plot}")
    expected = {"step": 12, "rows": 3, "seq_len": 64, "plot": str(plot)}
    assert {name: result[name] for name in expected} == expected
    assert plot.read_bytes().startswith(b"\x89PNG")
    data = config.data.copy_and_resolve_references()
    data.tokenizer = str(path)
    windows = Windows(data, 320, "train")
    batch = train_batch(windows, 0, 8, 12, range(3))  # quickstart.py's seed and batch size
    numbers = re.findall(r"row \d of 8: window ([\d,]+) of", text)
    numbers = [int(number.replace(",", "")) for number in numbers]
    np.testing.assert_array_equal(windows.read(numbers)["tokens"], batch["tokens"])
    other_lines = r"(?m)^(---|===| +place| +\d+ +\d+ +\d+ |  \.\.\.).*"
    documents = " ".join(re.sub(other_lines, "", text).split())
    for tokens in batch["tokens"].tolist():
        assert " ".join(processor(path).decode(tokens).split()) in documents


def row(tokens, targets, weights, positions, segments):
    integers = {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "segment_ids": segments,
    }
    arrays = {name: np.array(values, np.int32) for name, values in integers.items()}
    return arrays | {"weights": np.array(weights, np.float32)}


def test_a_row_is_described_with_its_borders_positions_and_weights():
    a, b, q = (ord(character) + 4 for character in "abQ")
    tokens = [a, b, b, b, b, b, b, b, b, 1, 2, q, q, a, a, 1, 0, 0, 0]
    weights = [1] * 9 + [0, 0, 0, 1, 1, 1, 0, 0, 0]
    positions = [*range(10), 3, 7, 8, 20, 30, 31, 32, 33]
    segments = [1] * 10 + [2] * 6 + [0] * 2
    window = row(tokens[:-1], tokens[1:], weights, positions, segments)
    lines = list(view.describe(window, load_tokenizer("byte")))
    assert lines[:6] == [
        "--- document 1, which began in the window before: tokens 0..9 at positions 0..9",
        "    abbbbbbbb",
        "--- document 2: tokens 10..15 at positions 3, 7, 8, 20 .. 31",
        "    prompt, no loss | QQ",
        "    aa",
        "--- padding: tokens 16..17",
    ]
    table = [line.split() for line in lines[7:]]
    gap = table.index(["..."])
    assert table[gap + 4] == ["10", "3", "2", "2", "<bos>", str(q), "'Q'", "0"]
    assert table[-3] == ["15", "31", "2", "1", "<eos>", "0", "<pad>", "0"]
    del table[gap]
    places = [int(entry[0]) for entry in table]
    assert places == [0, 1, 2, *range(7, 18)]


def test_a_mixture_is_shown_source_by_source(config, tmp_path, capsys):
    mixture = []
    for name, words, weight in (("long", 60, 3), ("short", 4, 1)):
        folder = tmp_path / name
        folder.mkdir()
        texts = [f"{name} {i}" + " word" * words for i in range(100)]
        write_lines(folder / "a.jsonl", [{"inputs": text, "targets": "yes"} for text in texts])
        mixture.append({"weight": weight, "dataset": "files", "data_dir": str(folder)})
    mixed = config.copy_and_resolve_references()
    mixed.data.update({"dataset": "mixture", "data_dir": "", "mixture": tuple(mixture)})
    mixed.data.update({"template": "{inputs}? {targets}", "loss_on": "targets"})
    result = view.show_batch(mixed, 2, 4, str(tmp_path / "plot.png"))
    text = capsys.readouterr().out
    long, short = result["sources"]
    assert (long["dataset"], long["weight"]) == (f"files {tmp_path}/long", 0.75)
    assert (short["dataset"], short["weight"]) == (f"files {tmp_path}/short", 0.25)
    # <bos>, the name and a space, the number of one or two digits, the words, "? yes", <eos>
    assert long["document_tokens"]["longest"] == 1 + 7 + 300 + 5 + 1
    assert short["document_tokens"]["longest"] == 1 + 8 + 20 + 5 + 1
    steps = result["windows"] / mixed.batch_size
    assert result["steps_per_epoch"] == pytest.approx(steps, abs=0.005)
    assert result["weight_share"] < 0.3
    assert text.count("=== step 2, row ") == 4
    assert "    prompt, no loss | " in text
    assert re.search(r"^    yes$", text, re.M)


def test_a_mixture_of_generated_windows_has_no_lengths(config):
    mixed = config.copy_and_resolve_references()
    tasks = ("passkey", "niah")
    mixture = tuple({"weight": 1, "dataset": f"longcontext/{task}"} for task in tasks)
    mixed.data.update({"dataset": "mixture", "data_dir": "", "mixture": mixture})
    assert view.show_batch(mixed, 0, 1, None)["sources"] == []
    problem = "--plot=a.png: mixture has no documents whose lengths could be drawn; remove"
    refused(problem, view.show_batch, mixed, 0, 1, "a.png")


@pytest.mark.parametrize(("last", "goes_on"), [(1, False), (101, True)], ids=["eos", "a"])
def test_the_last_document_of_a_window_ends_or_goes_on(last, goes_on):
    ids = [2, 101, last]
    window = row(ids, ids, [1] * 3, range(3), [1] * 3)
    heading, *_ = view.describe(window, load_tokenizer("byte"))
    assert ("goes on in the next window" in heading) == goes_on


def test_control_characters_do_not_reach_the_terminal():
    ids = [byte + 4 for byte in b"red \x1b[31m bell \a tab \t end"]
    window = row(ids, ids, [0] * len(ids), range(len(ids)), [1] * len(ids))
    lines = list(view.describe(window, load_tokenizer("byte")))
    assert all(line.isprintable() for line in lines)
    assert "[31m" in lines[1]


@pytest.mark.parametrize("num_scans", [2, 1000])
def test_lengths_of_documents(config, monkeypatch, num_scans):
    store = Windows(config.data, 260, "train").store
    tokens = np.asarray(store.tokens("train").read().result())
    borders = [*np.flatnonzero(tokens == 2), len(tokens)]
    documents = list(itertools.pairwise(borders))
    if num_scans == 2:
        middle = len(tokens) // 2
        scanned = [*range(300), *range(middle, middle + 300)]
        documents = [(start, stop) for start, stop in documents if start in scanned]
    lengths = [stop - start for start, stop in documents]
    assert max(lengths) > 300, "some do not fit into a scan"
    monkeypatch.setattr(view, "_SCAN_TOKENS", 300)
    monkeypatch.setattr(view, "_SCANS", num_scans)
    assert view.document_lengths(store).tolist() == lengths


def test_the_same_lengths_give_the_same_picture(tmp_path):
    def draw(name, lengths):
        path = tmp_path / name
        view.draw_lengths(lengths, 64, str(path))
        return path.read_bytes()

    lengths = np.random.default_rng(0).integers(1, 5000, 300)
    picture = draw("a.png", {"a": lengths})
    assert len(picture) > 10_000
    assert draw("b.png", {"a": lengths}) == picture
    assert draw("c.png", {"a": lengths[:200]}) != picture
    draw("two.png", {"a": np.array([7]), "b": lengths})
    for wrong in ("none/a.png", "a.nothing"):
        refused(f"--plot={tmp_path}/{wrong}: cannot be written: ", draw, wrong, {"a": lengths})


def test_dollars_and_control_characters_in_names_are_drawn(tmp_path):
    lengths = {"files $\\frac$ \0\ud800": np.arange(2, 60), "files $b": np.arange(9, 99)}
    view.draw_lengths(lengths, 32, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000
