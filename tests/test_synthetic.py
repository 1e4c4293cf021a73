"""Synthetic windows: solved by a program that reads their words; what is recorded of them is true."""

import collections
import json
import math
import re
import subprocess
import sys
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CONFIG, ROOT
from makers import make_run
from scipy import stats

from prope import model, sharding
from prope.config import default_config
from prope.data.mixture import open_windows
from prope.data.sources.find import find_source
from prope.data.tasks import synthetic
from prope.data.windows import train_batch
from prope.errors import UsageError
from prope.inference.losses import make_evaluation
from prope.runtime.validate import validate
from prope.workdir.run import read_config

KINDS = {"copy": ("copy",), "recall": ("recall",), "mix": ("copy", "recall")}
SHORTEST = {"copy": 16, "recall": 32, "mix": 64}


def settings(task="mix", T=128):
    config = default_config()
    config.data.update({"dataset": f"synthetic/{task}", "seq_len": T})
    validate(config)
    return config.data


def windows(task="mix", T=128, split="train"):
    return open_windows(settings(task, T), 168, split)


def words(ids) -> list[str]:
    return synthetic.text_of(ids).split()


def solve(tokens: list[str]) -> dict[int, tuple[str, str, int]]:
    """By place: (kind, answer, distance) of every question in a window's words."""
    found = {}
    for place, word in enumerate(tokens):
        if match := re.fullmatch(r"copy-(\d)", word):
            found[place] = ("copy", tokens[place - int(match[1])], int(match[1]))
        elif match := re.fullmatch(r"(k\d+)\?", word):
            facts = [
                n for n, other in enumerate(tokens[:place]) if other.startswith(f"{match[1]}=")
            ]
            assert len(facts) == 1, "a key has one value"
            found[place] = ("recall", tokens[facts[0]].split("=")[1], place - facts[0])
    return found


# --- The windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("task", "T"), [(t, T) for t in KINDS for T in (SHORTEST[t], 128, 1000)])
def test_a_program_solves_every_window(task, T, split):
    of = windows(task, T, split)
    batch = of.read(range(60))
    for row in range(60):
        tokens, targets = words(batch["tokens"][row]), words(batch["targets"][row])
        assert tokens[0] == "<bos>" and tokens[1:] == targets[:-1] and "<bos>" not in targets
        answers = solve(tokens)
        assert {place: targets[place] for place in answers} == {
            place: found[1] for place, found in answers.items()
        }
        assert np.flatnonzero(batch["weights"][row]).tolist() == sorted(answers)
        truth = of.window(row)
        places = np.flatnonzero(truth.task >= 0).tolist()
        assert {
            p: (("copy", "recall", "mix")[truth.task[p]], targets[p], truth.distance[p])
            for p in places
        } == answers
        assert not truth.distance[truth.task < 0].any()
        kinds = {found[0] for found in answers.values()}
        assert kinds == set(KINDS[task]), "every kind finds a place"
        queries = [tokens[place] for place, found in answers.items() if found[0] == "recall"]
        assert len(set(queries)) == len(queries), "a key is asked for once"
        assert all(
            re.fullmatch("[a-h]", found[1]) for found in answers.values() if found[0] == "copy"
        )
    assert set(batch["weights"].ravel()) == {0.0, 1.0} and (batch["segment_ids"] == 1).all()
    assert (batch["positions"] == np.arange(T)).all()
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "positions", "segment_ids"), np.dtype("int32")
    ) | {"weights": np.dtype("float32")}


def test_every_id_has_a_word_of_its_own():
    assert len(set(words(range(168)))) == 168
    with pytest.raises(IndexError):
        synthetic.text_of([168])


def test_answers_are_uniform_and_so_are_offsets():
    for task in ("copy", "recall"):
        of, counts, offsets = windows(task), collections.Counter(), collections.Counter()
        for index in range(1500):
            for kind, answer, distance in solve(words(of.window(index).stream[:-1])).values():
                counts[answer] += 1
                offsets[distance if kind == "copy" else 1] += 1
        assert len(counts) == 8 and stats.chisquare(list(counts.values())).pvalue > 0.01, counts
        assert task == "recall" or (
            len(offsets) == 4 and stats.chisquare(list(offsets.values())).pvalue > 0.01
        )


def test_slots_are_four_to_eight_letters_apart():
    letters = collections.Counter()
    for index in range(10):
        stream = words(windows("copy", 1000).window(index).stream)
        places = [place for place, word in enumerate(stream) if word.startswith("copy-")]
        letters.update(
            np.diff(places[:100]) - 2
        )  # of the last gaps only the short ones fit into the window
    assert (
        set(letters) == {4, 5, 6, 7, 8} and stats.chisquare(list(letters.values())).pvalue > 0.01
    ), letters


def test_letters_alone_do_not_tell_what_to_copy():
    """In a long window the commonest letter is right hardly more often than any, and most answers stand elsewhere."""
    of, right, elsewhere, total = windows("copy", 1000), 0, 0, 0
    for index in range(60):
        tokens = words(of.window(index).stream[:-1])
        for place, (_, answer, _) in solve(tokens).items():
            before = [word for word in tokens[1:place] if len(word) == 1]
            right += collections.Counter(before).most_common(1)[0][0] == answer
            elsewhere += before.count(answer) > 1
            total += 1
    assert right / total < 0.16 and elsewhere / total > 0.95


@pytest.mark.parametrize("T", [128, 1024])
def test_every_distance_is_asked_for(T):
    distances = np.concatenate(
        [w.distance[w.task >= 0] for w in map(windows("recall", T).window, range(200))]
    )
    octaves = np.histogram(distances, 2 ** np.arange(3, int(math.log2(T))))[0] / len(distances)
    assert octaves.min() > 0.07, octaves
    assert distances.max() > 0.85 * T


# --- Batches ----------------------------------------------------------------------------------------------------


def same(a, b) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_a_batch_is_a_function_of_seed_and_step():
    batch = train_batch(windows(), 5, 8, 3)
    assert same(batch, train_batch(windows(), 5, 8, 3))
    parts = [train_batch(windows(), 5, 8, 3, rows) for rows in (range(3), range(3, 8))]
    assert same(batch, {name: np.concatenate([part[name] for part in parts]) for name in batch})
    several = train_batch(windows(), 5, 4, 7)
    assert np.array_equal(batch["tokens"][4:], several["tokens"]), "places count, not batches"
    code = "from tests.test_synthetic import *; import zlib; print(zlib.crc32(train_batch(windows(), 5, 8, 3)['tokens']))"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = ['.', 'tests']; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [str(zlib.crc32(batch["tokens"]))], done.stderr


def test_no_window_comes_twice():
    batches = [train_batch(windows(), seed, 8, step) for seed in (0, 1) for step in range(8)]
    batches += [windows(split="validation").read(range(512))]
    tokens = [row.tobytes() for batch in batches for row in batch["tokens"]]
    assert len(set(tokens)) == len(tokens) == 2 * 64 + 512


@pytest.mark.parametrize("task", KINDS)
def test_a_training_window_can_be_no_validation_window(task):
    for split, held_out in (("train", False), ("validation", True)):
        of = windows(task, split=split)
        streams = [of.window(index).stream for index in range(100)]
        assert {zlib.crc32(stream.astype("<i4").tobytes()) % 4 == 0 for stream in streams} == {
            held_out
        }
    assert windows(task, split="validation").count == 512


def test_randomised_positions_and_longer_windows():
    config = settings()
    config.position_range = 1000
    positions = train_batch(open_windows(config, 168, "train"), 0, 4, 0)["positions"]
    assert (np.diff(positions) > 0).all() and positions.max() > 500
    assert windows(T=128).store.fingerprint == windows(T=1024).store.fingerprint
    assert len({windows(task).store.fingerprint for task in KINDS}) == 3


# --- Accuracy ---------------------------------------------------------------------------------------------------


def test_accuracy_by_distance_counts_right_answers():
    of, rng = windows("mix", 256, "validation"), np.random.default_rng(0)
    indices, right = [3, 1, 70], rng.random((3, 256)) < 0.6
    every = []
    for row, index in enumerate(indices):
        answers = solve(words(of.window(index).stream[:-1]))
        every += [
            (kind, distance, right[row, place]) for place, (kind, _, distance) in answers.items()
        ]
    found = of.accuracy(indices, right)
    assert math.isclose(found["accuracy"], np.mean([r for *_, r in every]))
    assert sum(part["answers"] for part in found["accuracy_by_distance"]) == len(every)
    for part in found["accuracy_by_distance"]:
        there = [
            r for kind, d, r in every if kind == part["task"] and part["from"] <= d < part["to"]
        ]
        assert part["answers"] == len(there) and math.isclose(part["accuracy"], np.mean(there))
        assert part["to"] == (part["from"] + 1 if part["task"] == "copy" else 2 * part["from"])
    assert [p["from"] for p in found["accuracy_by_distance"] if p["task"] == "copy"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, 100])
def test_an_evaluation_counts_the_answers_that_score_highest(tmp_path, batch_size):
    config, params = make_run(tmp_path / "run")
    likely = (jnp.arange(300) >= 8) & (
        jnp.arange(300) < 24
    )  # letters and values, so that some answers are right
    params["embedder"]["input_embedding"] *= jnp.where(likely, 1, 0.1)[:, None]
    config.data.update({"dataset": "synthetic/mix", "seq_len": 64})
    config.eval.update({"batch_size": batch_size, "max_windows": 7})
    of = windows("mix", 64, "validation")
    found = make_evaluation(config, of, sharding.make_mesh())(params)
    right, losses = [], []
    for index in range(7):
        stream = of.window(index * 512 // 7).stream
        inputs = jnp.asarray(stream[None, :-1])
        hidden = model.hidden_states(config.model, params, inputs, jnp.arange(64)[None])
        logits = np.asarray(model.logits(params, hidden)[0], np.float64)
        for place in solve(words(stream[:-1])):
            right.append(logits[place].argmax() == stream[place + 1])
            losses.append(np.log(np.exp(logits[place]).sum()) - logits[place, stream[place + 1]])
    assert found["tokens"] == len(losses) and math.isclose(
        found["loss"], np.mean(losses), rel_tol=1e-5
    )
    assert sum(right) >= 2 and math.isclose(found["accuracy"], np.mean(right))
    assert math.isclose(found["bits_per_byte"], found["loss"] / math.log(2))
    assert math.isclose(found["unigram_bits_per_byte"], 3), "guessing one of eight"


@pytest.mark.slow
def test_trained_evaluated_and_looked_at_as_any_other(train, run_command, tmp_path):
    workdir = tmp_path / "run"
    trained = train(workdir, "--config.data.dataset=synthetic/recall")
    assert trained.code == 0, trained.stderr
    evaluated = run_command(
        "prope.evaluate", f"--workdir={workdir}", "--max_windows=8", "--seq_len=1x,4x"
    )
    first, last = evaluated.result.pop("evaluations")[0], evaluated.result
    assert (
        first["loss"] == trained.result["eval_loss"]
        and evaluated.stderr.count("is in eval.jsonl") == 1
    )
    assert 0 <= last["accuracy"] <= 1 and last["accuracy_by_distance"][-1]["from"] in (64, 128)
    lines = [json.loads(line) for line in (workdir / "eval.jsonl").read_text().splitlines()]
    assert {
        name: lines[1][name] for name in ("step", "tokens", "loss")
    }.items() <= first.items() and lines[2] == last
    config = (CONFIG, "--config.data.dataset=synthetic/recall")
    prepared = run_command("prope.data.prepare", *config)
    assert prepared.result["store"] is None and prepared.result["tokens"] == 0
    command = [sys.executable, "-m", "prope.data.inspect", *config, "--step=3", "--rows=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    shown = open_windows(read_config(workdir).data, 260, "train").window(24)
    answers = solve(words(shown.stream[:-1]))
    assert done.returncode == 0 and " ".join(words(shown.stream)[:10]) in done.stdout, done.stderr
    for place, (_, answer, distance) in answers.items():
        assert re.search(
            rf"^ +{place} +recall +k\d+\? +{answer} +1 +{distance} +k\d+={answer} at ",
            done.stdout,
            re.M,
        )
    assert (
        json.loads(done.stdout.splitlines()[-1])["fingerprint"]
        == windows("recall").store.fingerprint
    )


# --- Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"dataset": "synthetic/coppy"},
            r"dataset=synthetic/coppy: there is no such task \(did you mean synthetic/copy",
        ),
        (
            {"dataset": "synthetic"},
            "dataset=synthetic: there is no such task.*there are synthetic/copy, synthetic/rec",
        ),
        (
            {"data_dir": "x"},
            "data.data_dir=x: has no effect with data.dataset=synthetic/copy; remove it",
        ),
        ({"template": "{x}"}, "data.template={x}: has no effect with"),
        ({"tokenizer": "a.model"}, "data.tokenizer=a.model: has no effect with synthetic data"),
        (
            {"dataset": "mixture", "mixture": ({"weight": 1, "dataset": "synthetic/copy"},)},
            "and a dataset of text",
        ),
    ],
)
def test_what_a_config_cannot_say(fields, says):
    config = default_config()
    config.data.update({"dataset": "synthetic/copy"} | fields)
    with pytest.raises(UsageError, match=says):
        validate(config)


@pytest.mark.parametrize("task", KINDS)
def test_what_is_too_small(task):
    with pytest.raises(
        UsageError, match="model.vocab_size=167: synthetic data has 168 ids; set .* to 168 or more"
    ):
        open_windows(settings(task), 167, "train")
    least = SHORTEST[task]
    with pytest.raises(
        UsageError, match=f"seq_len={least - 1}: windows of synthetic/{task} need at least {least}"
    ):
        windows(task, least - 1)


@pytest.mark.slow
def test_there_is_no_text(run_command, tmp_path):
    with pytest.raises(
        UsageError, match="synthetic/mix: is generated while it is read, and has no text"
    ):
        find_source(settings())
    config = (CONFIG, "--config.data.dataset=synthetic/copy")
    plot = run_command("prope.data.inspect", *config, f"--plot={tmp_path}/a.png")
    assert (
        plot.code == 2
        and "synthetic/copy has no documents whose lengths could be drawn" in plot.error
    )
