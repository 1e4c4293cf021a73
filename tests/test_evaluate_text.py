"""Which text an evaluation reads: splits and foreign text, equal tokens at every length, mixtures by their weights."""

import json
import math
import shutil
import types

import jax
import numpy as np
import pytest
from makers import make_run

from prope.analysis.sequences import read_sequences
from prope.config import default_config
from prope.data.mixture import open_windows
from prope.data.store.pack import is_validation
from prope.errors import UsageError
from prope.inference import evaluation
from prope.inference.paired import paired_difference
from prope.runtime import memory
from prope.workdir.checkpoints import Checkpoints, save_imported
from prope.workdir.run import open_run, read_config, write_config

T = 32  # of training


def write(folder, count, letters) -> str:
    """Writes documents of one to a few hundred letters, and questions before them; returns the folder."""
    rng = np.random.default_rng(len(letters))
    texts = ["".join(rng.choice(list(letters), size)) for size in rng.geometric(1 / 100, count)]
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"q": f"{i}?" * len(letters), "a": text, "text": text})
        for i, text in enumerate(texts)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on the documents in `own`, beside those in `other`, which it has not seen."""
    base = tmp_path_factory.mktemp("texts")
    write(base / "own", 100, "abc")
    write(base / "other", 60, "abcdefgh")
    make_run(base / "run", 1.0)
    save(base / "run", base, dataset="files", data_dir=str(base / "own"))
    return base


def save(workdir, base, **data) -> None:
    """Gives a run its data, and the fingerprint that training saves."""
    config = read_config(workdir)
    config.data.update(
        {"cache_dir": str(base / "cache"), "seq_len": T, "validation_fraction": 0.3} | data
    )
    params = open_run(workdir).params()
    shutil.rmtree(workdir / "checkpoints")
    write_config(workdir, config)
    windows = open_windows(config.data, 300, "validation")
    state = {"fingerprint": windows.store.fingerprint}
    with Checkpoints(workdir) as checkpoints:
        checkpoints.save(
            7, params, {"count": np.zeros(())}, {"config": config.to_dict(), "init_hash": ""}, state
        )


@pytest.fixture
def run(base, tmp_path):
    return shutil.copytree(base / "run", tmp_path / "run")


def ask(workdir, **flags) -> list[dict]:
    return list(evaluation.evaluations(evaluation.Options(workdir=str(workdir), **flags)))


def predicted(texts) -> int:
    return sum(len(text) + 1 for text in texts)  # and <eos>


# --- Splits -----------------------------------------------------------------------------------------------------


def documents(folder) -> list[bytes]:
    return [
        json.loads(line)["text"].encode() for line in (folder / "a.jsonl").read_text().splitlines()
    ]


def test_foreign_text_is_evaluated_whole_and_its_own_on_the_validation_split(run, base, tmp_path):
    own, other = documents(base / "own"), documents(base / "other")
    held_out = [text for text in own if is_validation(text, 0.3)]
    (record,) = ask(run)
    assert (record["split"], record["documents"], record["tokens"]) == (
        "validation",
        len(held_out),
        predicted(held_out),
    )
    (foreign,) = ask(run, data_dir=str(base / "other"))
    assert (foreign["split"], foreign["documents"], foreign["tokens"]) == (
        "all",
        len(other),
        predicted(other),
    )
    assert foreign["fingerprint"] != record["fingerprint"]
    moved = shutil.copytree(base / "own", tmp_path / "moved")
    assert ask(run, dataset="files", data_dir=str(moved)) == [record], (
        "the same text in another place"
    )


@pytest.mark.slow
def test_the_split_can_be_chosen(run, base):
    own, other = documents(base / "own"), documents(base / "other")
    for folder, split, texts in (
        (None, "train", [text for text in own if not is_validation(text, 0.3)]),
        (None, "all", own),
        (str(base / "other"), "validation", [text for text in other if is_validation(text, 0.3)]),
    ):
        (record,) = ask(run, data_dir=folder, split=split)
        assert (record["split"], record["documents"], record["tokens"]) == (
            split,
            len(texts),
            predicted(texts),
        )
        bits_per_token = record["loss"] / math.log(2)
        of_bytes = record["tokens"] * bits_per_token / sum(map(len, texts))
        assert math.isclose(record["bits_per_byte"], of_bytes, rel_tol=1e-9)
    trained = np.concatenate(
        [np.frombuffer(text, np.uint8) for text in own if not is_validation(text, 0.3)]
    )
    (whole,) = ask(run, split="all")
    counts = (
        np.bincount(
            np.append(
                trained + 4, [1] * (len(own) - len([t for t in own if is_validation(t, 0.3)]))
            ),
            minlength=260,
        )
        + 1
    )
    bits = -np.log2(counts / counts.sum())
    total = sum(bits[np.frombuffer(text, np.uint8).astype(int) + 4].sum() + bits[1] for text in own)
    assert math.isclose(whole["unigram_bits_per_byte"], total / sum(map(len, own)), rel_tol=1e-9)
    assert (
        len(
            {
                record["fingerprint"]
                for record in ask(run) + ask(run, split="all") + ask(run, split="train")
            }
        )
        == 3
    )
    held_out = [text for text in own if is_validation(text, 0.3)]
    assert paired_difference(run, run).samples == len(held_out), (
        "not of the fuller evaluations on other splits"
    )


def test_a_single_document_can_be_evaluated(run, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a cab")
    (record,) = ask(run, dataset="files", data_dir=str(tmp_path / "text"))
    assert (record["split"], record["documents"], record["tokens"], record["loss_stderr"]) == (
        "all",
        1,
        6,
        None,
    )


def test_generated_windows_have_no_other_split(run):
    with pytest.raises(UsageError, match="--split=all: synthetic/copy is generated"):
        ask(run, dataset="synthetic/copy", split="all")


def test_an_analysis_reads_the_same_split(run, base):
    options = {
        "text": None,
        "dataset": None,
        "data_dir": None,
        "split": None,
        "seq_len": 8,
        "sequences": 40,
    }
    for folder, split in ((None, "validation"), (str(base / "other"), "all")):
        flags = types.SimpleNamespace(**options | {"data_dir": folder})
        tokens, _, text = read_sequences(open_run(run), flags)
        assert text == {"source": "files", "split": split}
        starts = {bytes(row[1:] - 4) for row in np.array(tokens, np.uint8)}
        read = [
            text for text in documents(base / ("other" if folder else "own")) if text[:7] in starts
        ]
        assert len(read) >= 20 and all(is_validation(text, 0.3) for text in read) == (
            split == "validation"
        )


# --- Lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_length_reads_the_same_tokens(run, base):
    tokens = 10 * 4 * T
    records = ask(run, seq_len="1x,2x,4x", max_tokens=tokens)
    assert [record["windows"] for record in records] == [40, 20, 10]
    assert (
        len({(record["tokens"], record["documents"], record["fingerprint"]) for record in records})
        == 1
    )
    assert 0.9 * tokens < records[0]["tokens"] < tokens
    sums = [
        np.load(path)["tokens"].sum(axis=1) for path in sorted((run / "eval" / "7").glob("*.npz"))
    ]
    assert len(sums) == 3
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0], "document by document")
    assert ask(run, seq_len="1x,2x,4x", max_tokens=tokens) == records
    (alone,) = ask(run, max_tokens=tokens)
    assert alone["fingerprint"] != records[0]["fingerprint"], "other stretches"
    whole = ask(run, seq_len="1x,4x", max_tokens=10**9)
    assert [record["tokens"] for record in whole] == 2 * [ask(run)[0]["tokens"]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"seq_len": "1x,4x", "max_tokens": 100},
            "--max_tokens=100: must be at least a window, here of 128 tokens",
        ),
        (
            {"seq_len": "48,4x", "max_tokens": 9999},
            "--seq_len=48,4x: with --max_tokens .*128, so .*; 48 does not",
        ),
        (
            {"max_windows": 3, "max_tokens": 9999},
            "--max_windows=3 and --max_tokens=9999: give one of them",
        ),
        (
            {"seq_len": "100000000"},
            "--seq_len=100000000: longer than split validation of files, [0-9,]+ tokens",
        ),
    ],
)
def test_lengths_that_cannot_be_compared(run, flags, says):
    with pytest.raises(UsageError, match=says):
        ask(run, **flags)


@pytest.mark.slow
def test_memory_is_estimated_before_it_is_taken(run, monkeypatch):
    needed = []
    real = memory.step_bytes
    monkeypatch.setattr(
        memory, "step_bytes", lambda analysis: needed.append(real(analysis)) or needed[-1]
    )
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2 * 10**6)
    with pytest.raises(
        UsageError,
        match="a step needs at least .* GB on every device, which has 0.002 GB: lower the batch size",
    ):
        ask(run, seq_len="32x")
    monkeypatch.setattr(memory, "device_bytes", lambda device: needed[0])
    assert len(ask(run, seq_len="32x")) == 1


def test_what_the_layers_keep_must_fit(monkeypatch):
    config = default_config()  # 4 layers, 256 wide and 1024 in the MLP, 16 sequences
    config.data.seq_len = 10**6
    for fields, needed in (
        ({}, 4 * 16 * 10**6 * (256 + 2 * 1024) * 4),
        ({"model.remat": "full"}, 65_536_000_000),
        ({"accumulation": 4}, 16_384_000_000),
        ({"model.dtype": "bfloat16"}, 8_192_000_000),
    ):
        config.update_from_flattened_dict(fields)
        monkeypatch.setattr(
            memory, "device_bytes", lambda device, needed=needed: needed // jax.device_count()
        )
        memory.check_activations(config, "less")
        monkeypatch.setattr(
            memory, "device_bytes", lambda device, needed=needed: needed // jax.device_count() - 1
        )
        with pytest.raises(
            UsageError,
            match="out of memory: a step needs at least .* on every device, which has .*: less",
        ):
            memory.check_activations(config, "less")


# --- Mixtures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(base, tmp_path):
    """A run on 9 windows of short questions to 1 of long ones, though there are as many of both."""
    data = {"dataset": "mixture", "data_dir": "", "template": "{q}{a}", "loss_on": "targets"}
    data["mixture"] = tuple(
        {"weight": weight, "dataset": "files", "data_dir": write(base / name, 90, letters)}
        for weight, name, letters in (
            (0.9, "short", "abc"),
            (0.1, "long", "abcdefghijklmnopqrstuvwx"),
        )
    )
    make_run(tmp_path / "mixed", 1.0)
    save(tmp_path / "mixed", base, **data)
    return tmp_path / "mixed"


def test_a_mixture_weighs_its_sources_as_training_does(mixed, base):
    (record,) = ask(mixed)
    assert [source["weight"] for source in record["sources"]] == [0.9, 0.1]
    predicted_share = []
    for source, name in zip(record["sources"], ("short", "long"), strict=True):
        lines = [json.loads(line) for line in (base / name / "a.jsonl").read_text().splitlines()]
        lines = [line for line in lines if not is_validation((line["q"] + line["a"]).encode(), 0.3)]
        answers = sum(len(line["a"]) + 1 for line in lines)
        predicted_share.append(
            source["weight"] * answers / (answers + sum(len(line["q"]) + 1 for line in lines))
        )
    shares = np.array(predicted_share) / sum(predicted_share)
    np.testing.assert_allclose([source["share"] for source in record["sources"]], shares, rtol=1e-9)
    losses, errors = (
        np.array([source[name] for source in record["sources"]]) for name in ("loss", "loss_stderr")
    )
    assert math.isclose(record["loss"], shares @ losses, rel_tol=1e-9)
    assert math.isclose(
        record["loss_stderr"], math.sqrt(((shares * errors) ** 2).sum()), rel_tol=1e-9
    )
    tokens = np.array([source["tokens"] for source in record["sources"]])
    by_size = tokens @ losses / tokens.sum()
    assert abs(by_size - record["loss"]) > 10 * 1e-3 * abs(losses[0] - losses[1]), "not by size"
    assert record["tokens"] == tokens.sum() and record["perplexity"] == math.exp(record["loss"])
    difference = paired_difference(mixed, mixed)
    assert (difference.difference, difference.stderr) == (0.0, 0.0)


def test_some_windows_of_a_mixture_are_of_its_sources_by_weight(mixed):
    (record,) = ask(mixed, max_windows=20)
    assert [source["windows"] for source in record["sources"]] == [18, 2]


def test_a_source_of_the_mixture_is_not_foreign(base, tmp_path):
    sources = tuple(
        {"weight": 1, "dataset": "files", "data_dir": write(base / name, 90, name)}
        for name in ("ab", "cd")
    )
    make_run(tmp_path / "run", 1.0)
    save(tmp_path / "run", base, dataset="mixture", data_dir="", mixture=sources)
    (record,) = ask(tmp_path / "run", dataset="files", data_dir=str(base / "cd"))
    assert record["split"] == "validation"


# --- What must be said ------------------------------------------------------------------------------------------


def test_an_imported_run_is_asked_for_its_dataset(tmp_path, base):
    config, params = make_run(tmp_path / "run", 1.0)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    identity = {"config": config.to_dict(), "init_hash": ""}
    save_imported(
        tmp_path / "run", jax.tree.map(np.asarray, params), identity, {"imported_from": "gemma"}
    )
    with pytest.raises(
        UsageError,
        match="run: was imported, so it has no dataset of its own; .*--dataset=python_docs",
    ):
        ask(tmp_path / "run")
    (record,) = ask(tmp_path / "run", dataset="files", data_dir=str(base / "other"))
    assert (record["split"], record["documents"]) == ("all", 60)
