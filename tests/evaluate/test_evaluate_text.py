"""Which text an evaluation reads: splits, foreign text, equal tokens at every length, mixtures."""

import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.runs import evaluate_run, make_run, save_checkpoints
from support.text import is_validation, refusal, write_lines

from prope.data.mixture import open_text, open_windows
from prope.data.store.arrays import Store
from prope.data.tasks import windows as generated_windows
from prope.data.tokenizer import GEMMA_IDS
from prope.inference.losses import select
from prope.inference.options import last_line
from prope.inference.paired import paired_difference
from prope.runtime import memory
from prope.workdir.checkpoints import Checkpoints, save_imported
from prope.workdir.run import open_run, read_config, write_config

T = 32  # length in training


def write(folder, count, letters) -> str:
    """Writes documents of one to a few hundred letters, and questions before them."""
    rng = np.random.default_rng(len(letters))
    lines = []
    for i, size in enumerate(rng.geometric(1 / 100, count)):
        text = "".join(rng.choice(list(letters), size))
        lines.append({"q": f"{i}?" * len(letters), "a": text, "text": text})
    folder.mkdir(exist_ok=True)
    write_lines(folder / "a.jsonl", lines)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on the documents in `trained`, beside those in `other`, which it has not seen."""
    base = tmp_path_factory.mktemp("texts")
    write(base / "trained", 100, "abc")
    write(base / "other", 60, "abcdefgh")
    save(base / "run", base, dataset="files", data_dir=str(base / "trained"))
    return base


def save(workdir, base, **data) -> None:
    """Makes a run on this data, with the fingerprint that training saves."""
    _, params = make_run(workdir, 1.0)
    fields = {"cache_dir": str(base / "cache"), "seq_len": T, "validation_fraction": 0.3} | data
    fields = {f"data.{name}": value for name, value in fields.items()}
    spec = read_config(workdir).replace(fields)
    shutil.rmtree(workdir / "checkpoints")
    write_config(workdir, spec)
    windows = open_windows(spec.data, 300, "validation")
    state = {"fingerprint": windows.store.fingerprint}
    identity = {"config": spec.to_dict(), "init_hash": ""}
    with Checkpoints(workdir) as checkpoints:
        opt_state = {"count": np.zeros(())}
        checkpoints.save(7, params, opt_state, identity, state)


@pytest.fixture
def run(base, tmp_path):
    return shutil.copytree(base / "run", tmp_path / "run")


def read_documents(folder, *splits) -> list[bytes]:
    """The documents of a folder in these splits."""
    lines = (folder / "a.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].encode() for line in lines]
    return [text for text in texts if ("train", "validation")[is_validation(text, 0.3)] in splits]


def assert_reads(record, split, texts):
    assert record["split"] == split
    assert record["documents"] == len(texts)
    assert record["tokens"] == sum(len(text) + 1 for text in texts), "and <eos>"


# --- Splits -----------------------------------------------------------------------------------

BOTH = ("train", "validation")


def test_foreign_text_is_evaluated_whole_and_that_of_training_held_out(run, base, tmp_path):
    (record,) = evaluate_run(run)
    assert_reads(record, "validation", read_documents(base / "trained", "validation"))
    (foreign,) = evaluate_run(run, data_dir=str(base / "other"))
    assert_reads(foreign, "all", read_documents(base / "other", *BOTH))
    assert foreign["fingerprint"] != record["fingerprint"]
    moved = shutil.copytree(base / "trained", tmp_path / "moved")
    again = evaluate_run(run, dataset="files", data_dir=str(moved))
    assert again == [record], "the same text in another place"


@pytest.mark.slow
def test_the_split_can_be_chosen(run, base):
    trained = base / "trained"
    (held_out,) = evaluate_run(run)
    (record,) = evaluate_run(run, split="train")
    texts = read_documents(trained, "train")
    assert_reads(record, "train", texts)
    bits = record["tokens"] * record["loss"] / math.log(2)
    assert record["bits_per_byte"] == pytest.approx(bits / sum(map(len, texts)), rel=1e-9)
    (foreign,) = evaluate_run(run, data_dir=str(base / "other"), split="validation")
    assert_reads(foreign, "validation", read_documents(base / "other", "validation"))
    # Not of the fuller evaluation on another split.
    assert record["fingerprint"] != held_out["fingerprint"]
    assert paired_difference(run, run).samples == held_out["documents"]


@pytest.mark.slow
def test_unigram_bits_are_those_of_the_training_split(run, base):
    trained = read_documents(base / "trained", "train")
    counts = np.ones(260)  # <eos> is 1, and bytes begin at 4
    counts[1] += len(trained)
    for byte in b"".join(trained):
        counts[byte + 4] += 1
    bits = -np.log2(counts / counts.sum())
    texts = read_documents(base / "trained", *BOTH)
    total = sum(bits[byte + 4] for byte in b"".join(texts)) + len(texts) * bits[1]
    (record,) = evaluate_run(run, split="all")
    expected = total / sum(map(len, texts))
    assert record["unigram_bits_per_byte"] == pytest.approx(expected, rel=1e-9)


def test_a_single_document_can_be_evaluated(run, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a cab")
    (record,) = evaluate_run(run, dataset="files", data_dir=str(tmp_path / "text"))
    assert_reads(record, "all", ["a cab"])
    assert record["loss_stderr"] is None


# --- Lengths ----------------------------------------------------------------------------------


def test_the_same_stretches_are_selected_at_every_length():
    """Of two sources of 5000 tokens, evenly spread; another number has another fingerprint."""

    def select_tokens(seq_len, max_tokens):
        count = -(-4999 // seq_len)
        text = {"split": "validation", "store": SimpleNamespace(fingerprint="of the store")}
        sources = {"sources": [SimpleNamespace(count=count)] * 2, "weights": [0.8, 0.2]}
        windows = SimpleNamespace(seq_len=seq_len, **sources, **text)
        indices, fingerprint = select(windows, None, max_tokens, longest=128)
        places = [divmod(i, count) for i in indices]
        return [(s, i * seq_len + j) for s, i in places for j in range(seq_len)], fingerprint

    starts = [(s, 40 * i // n * 128) for s, n in enumerate((8, 2)) for i in range(n)]
    expected = [(s, start + j) for s, start in starts for j in range(128)]
    selected = [select_tokens(seq_len, 1280) for seq_len in (32, 64, 128)]
    assert [tokens for tokens, _ in selected] == [expected] * 3
    assert len({fingerprint for _, fingerprint in selected} | {select_tokens(32, 1408)[1]}) == 2


@pytest.mark.slow
def test_every_length_reads_the_same_tokens(run):
    tokens = 10 * 4 * T
    records = evaluate_run(run, seq_len="1x,2x,4x", max_tokens=tokens)
    assert [record["windows"] for record in records] == [40, 20, 10]
    for name in ("tokens", "documents", "fingerprint"):
        assert len({record[name] for record in records}) == 1
    assert 0.9 * tokens < records[0]["tokens"] < tokens
    sums = []
    for path in (run / "eval" / "7").glob("*.npz"):
        sums.append(np.load(path)["tokens"].sum(axis=1))
    assert len(sums) == 3
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0], "document by document")
    assert evaluate_run(run, seq_len="1x,2x,4x", max_tokens=tokens) == records


@pytest.mark.slow
def test_memory_is_estimated_before_it_is_taken(run, monkeypatch):
    needed = []
    step_bytes = memory.step_bytes

    def spy(analysis):
        needed.append(step_bytes(analysis))
        return needed[-1]

    monkeypatch.setattr(memory, "step_bytes", spy)
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2 * 10**6)
    assert "0.002 GB" in refusal(evaluate_run, run, seq_len="32x")
    monkeypatch.setattr(memory, "device_bytes", lambda device: needed[0])
    assert len(evaluate_run(run, seq_len="32x")) == 1


# --- Mixtures ---------------------------------------------------------------------------------

LETTERS = {"short": "abc", "long": "abcdefghijklmnopqrstuvwx"}


@pytest.fixture
def mixed(base, tmp_path):
    """A run on 9 windows of short questions to 1 of long ones, though there are as many of both."""
    sources = []
    for name, weight in (("short", 0.9), ("long", 0.1)):
        folder = write(base / name, 90, LETTERS[name])
        sources.append({"weight": weight, "dataset": "files", "data_dir": folder})
    save(
        tmp_path / "mixed",
        base,
        dataset="mixture",
        template="{q}{a}",
        loss_on="targets",
        mixture=tuple(sources),
    )
    return tmp_path / "mixed"


def test_a_mixture_weighs_its_sources_as_training_does(mixed, base):
    (record,) = evaluate_run(mixed)
    sources = record["sources"]
    shares = []
    for source, name, weight in zip(sources, LETTERS, (0.9, 0.1), strict=True):
        assert source["weight"] == weight
        questions = 0
        answers = 0
        for line in map(json.loads, (base / name / "a.jsonl").read_text().splitlines()):
            if is_validation((line["q"] + line["a"]).encode(), 0.3):
                continue
            questions += len(line["q"]) + 1
            answers += len(line["a"]) + 1
        shares.append(weight * answers / (answers + questions))
    shares = np.array(shares) / sum(shares)
    np.testing.assert_allclose([source["share"] for source in sources], shares, rtol=1e-9)
    losses = np.array([source["loss"] for source in sources])
    errors = np.array([source["loss_stderr"] for source in sources])
    tokens = np.array([source["tokens"] for source in sources])
    assert record["loss"] == pytest.approx(shares @ losses, rel=1e-9)
    assert record["loss_stderr"] == pytest.approx(np.linalg.norm(shares * errors), rel=1e-9)
    by_size = tokens @ losses / tokens.sum()
    assert abs(by_size - record["loss"]) > 0.01 * abs(losses[0] - losses[1]), "not by size"
    assert record["tokens"] == tokens.sum()
    other = shutil.copytree(mixed, mixed.parent / "other")
    halved = jax.tree.map(lambda leaf: leaf / 2, open_run(mixed).params())
    save_checkpoints(other, read_config(other), {8: halved})
    (second,) = evaluate_run(other)
    difference = paired_difference(mixed, other).difference
    assert difference == pytest.approx(record["loss"] - second["loss"], rel=1e-4)


def test_some_windows_of_a_mixture_are_of_its_sources_by_weight(mixed):
    (record,) = evaluate_run(mixed, max_windows=20)
    assert [source["windows"] for source in record["sources"]] == [18, 2]
    (few,) = evaluate_run(mixed, max_windows=4)
    assert [source["windows"] for source in few["sources"]] == [4, 1], "one of each at least"


@pytest.mark.parametrize("place", ["trained", "~/trained/", "other/../trained"])
def test_a_source_is_the_same_however_its_place_is_written(base, monkeypatch, caplog, place):
    """Alone, where a text that has changed since training is told, and in a mixture."""
    monkeypatch.chdir(base)
    monkeypatch.setenv("HOME", str(base))
    named = read_config(base / "run").data
    run_data = dataclasses.replace(named, data_dir=place)
    text = open_text(named, 300, None, run_data, {"fingerprint": f"not of {place}"})
    assert text.split == "validation"
    assert "changed since training" in caplog.text
    source = {"weight": 1, "dataset": "files", "data_dir": place}
    run_data = dataclasses.replace(named, dataset="mixture", data_dir="", mixture=(source,))
    assert open_text(named, 300, None, run_data, {}).split == "validation"


@pytest.fixture
def generated(base, tmp_path, monkeypatch):
    """A run on two texts with tasks between them; the texts' last documents end in padding."""
    monkeypatch.setattr(generated_windows, "_VALIDATION_WINDOWS", 64)
    sources = []
    for name in ("trained", "longcontext/niah", "other"):
        source = {"weight": 1 / 3, "dataset": name}
        if "/" not in name:
            source |= {"dataset": "files", "data_dir": str(base / name)}
        sources.append(source)
    save(tmp_path / "generated", base, dataset="mixture", mixture=tuple(sources), seq_len=64)
    return tmp_path / "generated"


def test_the_sources_of_a_mixture_have_the_sums_of_each_alone(generated, base):
    (record,) = evaluate_run(generated)
    alone = []
    for flags in (
        {"dataset": "files", "data_dir": str(base / "trained")},
        {"dataset": "longcontext/niah"},
        {"dataset": "files", "data_dir": str(base / "other")},
    ):
        alone += evaluate_run(generated, **flags)
    for ours, expected in zip(record["sources"], alone, strict=True):
        for name in ("windows", "documents", "tokens", "loss", "loss_stderr"):
            assert ours[name] == pytest.approx(expected[name], rel=1e-9), name
    assert alone[1]["documents"] == alone[1]["windows"] == 64, "no window goes on in another"
    assert alone[1]["loss_stderr"] > 0


# --- What cannot be said ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letters", "has_bits"), [("a" + 98 * "b", True), ("aa" + 97 * "b", False)]
)
def test_above_1_percent_of_unknown_tokens_there_are_no_bits_per_byte(
    run, tmp_path, monkeypatch, letters, has_bits
):
    """One or two of 100 predicted tokens, <eos> among them, are unknown."""
    monkeypatch.setattr(Store, "special", GEMMA_IDS._replace(unk=4 + ord("a")))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(letters)
    (record,) = evaluate_run(run, dataset="files", data_dir=str(tmp_path / "text"))
    assert record["tokens"] == 100
    assert record["unknown_tokens"] == letters.count("a")
    for name in ("bits_per_byte", "unigram_bits_per_byte"):
        assert (record[name] is not None) == has_bits
    assert record["perplexity"] == math.exp(record["loss"])


def test_an_evaluation_without_a_predicted_token_has_no_numbers(base, tmp_path):
    lines = [{"q": f"{i:099}", "a": "!"} for i in range(40)]
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "a.jsonl", lines)
    run = tmp_path / "run"
    prompts = {"dataset": "files", "template": "{q}{a}", "loss_on": "targets"}
    save(run, base, data_dir=str(tmp_path / "text"), **prompts)
    # The first window of 32 tokens ends within the prompt.
    (record,) = evaluate_run(run, max_windows=1)
    assert record["tokens"] == record["documents"] == 0
    for name in ("loss", "loss_stderr", "perplexity", "bits_per_byte", "unigram_bits_per_byte"):
        assert record[name] is None
    short = last_line([record, record], ("workdir", "loss", "bits_per_byte"))["evaluations"]
    assert [line["loss"] for line in short] == [None, None]
    assert "positions=" in refusal(paired_difference, run, run)


# --- What must be said ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 640), ("data_dir", "text")])
def test_flags_that_a_mixture_would_ignore_are_refused(generated, name, value):
    assert f"--{name}={value}: " in refusal(evaluate_run, generated, **{name: value})


def test_an_imported_run_is_asked_for_its_dataset(tmp_path, base):
    run = tmp_path / "run"
    spec, params = make_run(run, 1.0)
    shutil.rmtree(run / "checkpoints")
    identity = {"config": spec.to_dict(), "init_hash": ""}
    params = jax.tree.map(np.asarray, params)
    save_imported(run, params, identity, {"imported_from": "gemma"})
    assert f"--workdir={run}: " in refusal(evaluate_run, run)
    (record,) = evaluate_run(run, dataset="files", data_dir=str(base / "other"))
    assert_reads(record, "all", read_documents(base / "other", *BOTH))
