"""Synthetic windows: solved by a program that reads their words; what is recorded is true."""

import collections
import math
import re
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.commands import CONFIG
from support.models import forward
from support.runs import make_run

from prope import sharding
from prope.config import default_config
from prope.data.mixture import open_windows
from prope.data.sources.find import find_source
from prope.data.tasks import synthetic
from prope.data.windows import train_batch
from prope.errors import UsageError
from prope.inference.losses import LossEvaluation
from prope.runtime.validate import validate

KINDS = {"copy": {"copy"}, "recall": {"recall"}, "mix": {"copy", "recall"}}
SHORTEST = {"copy": 16, "recall": 32, "mix": 64}
SIZES = []
for name, shortest in SHORTEST.items():
    SIZES += [(name, shortest), (name, 128), (name, 1000)]


def settings(task="mix", T=128):
    config = default_config()
    config.data.update({"dataset": f"synthetic/{task}", "seq_len": T})
    validate(config)
    return config.data


def windows(task="mix", T=128, split="train"):
    return open_windows(settings(task, T), 168, split)


def words(ids) -> list[str]:
    return synthetic.text_of(ids).split()


def solve(tokens: list[str]) -> dict:
    """By place: (kind, answer, distance) of every question in a window's words."""
    answers = {}
    for place, word in enumerate(tokens):
        if word.startswith("copy-"):
            distance = int(word[-1])
            answers[place] = ("copy", tokens[place - distance], distance)
        if word.endswith("?"):
            key = word[:-1]
            facts = [word for word in tokens[:place] if word.startswith(f"{key}=")]
            (fact,) = facts
            value = fact.split("=")[1]
            distance = place - tokens.index(fact)
            answers[place] = ("recall", value, distance)
    return answers


def inputs_of(task, T, count):
    """The words of so many windows."""
    batch = windows(task, T).read(range(count))
    return list(map(words, batch["tokens"]))


def assert_uniform(values):
    counts = collections.Counter(values)
    assert stats.chisquare(list(counts.values())).pvalue > 0.01, counts


# --- The windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("task", "T"), SIZES)
def test_a_program_solves_every_window(task, T, split):
    generated = windows(task, T, split)
    batch = generated.read(range(60))
    for row in range(60):
        tokens = words(batch["tokens"][row])
        targets = words(batch["targets"][row])
        assert tokens[0] == "<bos>"
        assert tokens[1:] == targets[:-1]
        answers = solve(tokens)
        truth = generated.window(row)
        recorded = {}
        for place in np.flatnonzero(batch["weights"][row]):
            kind = synthetic.NAMES[truth.task[place]]
            recorded[place] = (kind, targets[place], truth.distance[place])
        assert recorded == answers
        assert not truth.distance[truth.task < 0].any()
        assert {kind for kind, *_ in answers.values()} == KINDS[task]
        for place, (kind, answer, _) in answers.items():
            if kind == "copy":
                assert answer in "abcdefgh"
            else:
                assert tokens.count(tokens[place]) == 1, "a key is asked for once"
    assert set(batch["weights"].ravel()) == {0.0, 1.0}
    assert (batch["segment_ids"] == 1).all()
    assert (batch["positions"] == np.arange(T)).all()
    for name, values in batch.items():
        assert values.dtype == ("float32" if name == "weights" else "int32")


def test_every_id_has_its_word():
    assert len(set(words(range(168)))) == 168
    with pytest.raises(IndexError):
        synthetic.text_of([168])


@pytest.mark.parametrize("task", ["copy", "recall"])
def test_answers_are_uniform_and_so_are_offsets(task):
    solved = []
    for tokens in inputs_of(task, 128, 1500):
        solved += solve(tokens).values()
    kinds, answers, distances = zip(*solved, strict=True)
    assert set(kinds) == {task}
    assert_uniform(answers)
    if task == "copy":
        assert set(distances) == {1, 2, 3, 4}
        assert_uniform(distances)


def test_slots_are_four_to_eight_letters_apart():
    gaps = []
    for tokens in inputs_of("copy", 1000, 10):
        # Only the short ones of the last gaps fit into the window.
        places = list(solve(tokens))[:100]
        gaps += (np.diff(places) - 2).tolist()
    assert set(gaps) == {4, 5, 6, 7, 8}
    assert_uniform(gaps)


def test_letters_alone_do_not_tell_what_to_copy():
    """In a long window the commonest letter is seldom right, and most answers stand elsewhere."""
    right = []
    elsewhere = []
    for tokens in inputs_of("copy", 1000, 60):
        for place, (_, answer, _) in solve(tokens).items():
            before = [word for word in tokens[1:place] if len(word) == 1]
            right.append(answer == max("abcdefgh", key=before.count))
            elsewhere.append(before.count(answer) > 1)
    assert np.mean(right) < 0.16
    assert np.mean(elsewhere) > 0.95


@pytest.mark.parametrize("T", [128, 1024])
def test_every_distance_is_asked_for(T):
    distances = []
    for tokens in inputs_of("recall", T, 200):
        distances += [distance for *_, distance in solve(tokens).values()]
    octaves = np.log2(distances).astype(int)
    counts = np.bincount(octaves)[3:-1]
    assert counts.min() > 0.07 * len(distances), counts
    assert max(distances) > 0.85 * T


# --- Batches ----------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_seed_and_step():
    batch = train_batch(windows(), 5, 8, 3)
    assert zlib.crc32(batch["tokens"]) == 494010306, "in every process"
    first = train_batch(windows(), 5, 8, 3, range(3))
    others = train_batch(windows(), 5, 8, 3, range(3, 8))
    for name, values in batch.items():
        joined = np.concatenate([first[name], others[name]])
        np.testing.assert_array_equal(joined, values)
    smaller = train_batch(windows(), 5, 4, 7)
    last = batch["tokens"][4:]
    np.testing.assert_array_equal(last, smaller["tokens"], "places count, not batches")


def test_no_window_comes_twice():
    first = train_batch(windows(), 0, 64, 0)
    second = train_batch(windows(), 1, 64, 0)
    validation = windows(split="validation").read(range(512))
    tokens = [batch["tokens"] for batch in (first, second, validation)]
    distinct = np.unique(np.concatenate(tokens), axis=0)
    assert len(distinct) == 2 * 64 + 512


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_training_window_can_be_no_validation_window(task, split):
    generated = windows(task, split=split)
    for index in range(100):
        stream = generated.window(index).stream.astype("<i4")
        is_held_out = zlib.crc32(stream.tobytes()) % 4 == 0
        assert is_held_out == (split == "validation")


def test_randomised_positions_and_longer_windows():
    config = settings()
    config.position_range = 1000
    randomised = open_windows(config, 168, "train")
    positions = train_batch(randomised, 0, 4, 0)["positions"]
    assert (np.diff(positions) > 0).all()
    assert positions.max() > 500


def test_tasks_differ_in_their_fingerprint_and_lengths_do_not():
    short = windows(T=128)
    long = windows(T=1024)
    assert short.store.fingerprint == long.store.fingerprint
    fingerprints = {windows(task).store.fingerprint for task in KINDS}
    assert len(fingerprints) == 3


# --- Accuracy ---------------------------------------------------------------------------------


def test_accuracy_by_distance_counts_right_answers():
    generated = windows("mix", 256, "validation")
    indices = [3, 1, 70]
    rng = np.random.default_rng(0)
    right = rng.random((3, 256)) < 0.6
    answers = []
    for row, index in enumerate(indices):
        tokens = words(generated.window(index).stream[:-1])
        for place, (kind, _, distance) in solve(tokens).items():
            answers.append((kind, distance, right[row, place]))
    record = generated.accuracy(indices, right)
    *_, every = zip(*answers, strict=True)
    assert record["accuracy"] == pytest.approx(np.mean(every))
    counted = 0
    for group in record["accuracy_by_distance"]:
        first = group["from"]
        stop = group["to"]
        is_copy = group["task"] == "copy"
        assert stop == (first + 1 if is_copy else 2 * first)
        matching = []
        for kind, distance, is_right in answers:
            if kind == group["task"] and first <= distance < stop:
                matching.append(is_right)
        assert group["accuracy"] == pytest.approx(np.mean(matching))
        assert group["answers"] == len(matching)
        counted += len(matching)
    assert counted == len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [3, 100])
def test_an_evaluation_counts_the_answers_that_score_highest(tmp_path, batch_size):
    config, params = make_run(tmp_path / "run")
    # Letters and values are likely, so that some answers are right.
    ids = jnp.arange(300)
    likely = (ids >= 8) & (ids < 24)
    scale = jnp.where(likely, 1, 0.1)
    params["embedder"]["input_embedding"] *= scale[:, None]
    config.data.update({"dataset": "synthetic/mix", "seq_len": 64})
    config.eval.update({"batch_size": batch_size, "max_windows": 7})
    generated = windows("mix", 64, "validation")
    evaluation = LossEvaluation(config, generated)
    record = evaluation.evaluate(params, sharding.make_mesh())
    right = []
    losses = []
    for index in range(7):
        stream = generated.window(index * 512 // 7).stream
        tokens = jnp.asarray(stream[None, :-1])
        logits = forward(config.model, params, tokens, jnp.arange(64)[None])
        logits = np.asarray(logits, np.float64)
        for place in solve(words(stream[:-1])):
            scores = logits[0, place]
            target = stream[place + 1]
            right.append(scores.argmax() == target)
            losses.append(np.logaddexp.reduce(scores) - scores[target])
    assert record["tokens"] == len(losses)
    assert record["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert sum(right) >= 2
    assert record["accuracy"] == pytest.approx(np.mean(right))
    bits = record["loss"] / math.log(2)
    assert record["bits_per_byte"] == pytest.approx(bits)
    assert record["unigram_bits_per_byte"] == pytest.approx(3), "guessing one of eight"


@pytest.mark.slow
def test_trained_evaluated_and_shown_as_any_other(train, run_command, tmp_path):
    workdir = tmp_path / "run"
    trained = train(workdir, "--config.data.dataset=synthetic/recall")
    assert trained.code == 0, trained.stderr
    flags = (f"--workdir={workdir}", "--max_windows=8", "--seq_len=1x,4x")
    evaluated = run_command("prope.evaluate", *flags)
    first = evaluated.result["evaluations"][0]
    assert first["loss"] == trained.result["eval_loss"]
    assert evaluated.stderr.count("is in eval.jsonl") == 1
    *_, farthest = evaluated.result["accuracy_by_distance"]
    assert farthest["from"] in (64, 128)
    config = (CONFIG, "--config.data.dataset=synthetic/recall")
    prepared = run_command("prope.data.prepare", *config).result
    assert prepared["store"] is None
    assert prepared["tokens"] == 0
    shown = run_command("prope.data.inspect", *config, "--step=3", "--rows=1").result
    assert shown["fingerprint"] == windows("recall").store.fingerprint
    plot = run_command("prope.data.inspect", *config, f"--plot={tmp_path}/a.png")
    assert "synthetic/recall has no documents whose lengths could be drawn" in plot.error


@pytest.mark.parametrize("task", KINDS)
def test_a_window_is_shown_with_its_answers(task):
    generated = windows(task)
    text = words(generated.window(24).stream)
    shown = "\n".join(generated.describe(24))
    assert " ".join(text[:10]) in shown
    for place, (kind, answer, distance) in solve(text[:-1]).items():
        source = place - distance
        row = f"{place} {kind} {text[place]} {answer} 1 {distance} {text[source]} at {source}"
        assert row in re.sub(" +", " ", shown)


# --- Bad input --------------------------------------------------------------------------------


MIXED = {"weight": 1, "dataset": "synthetic/copy"}
REFUSED = [
    ({"dataset": "synthetic/coppy"}, r"synthetic/coppy: .* \(did you mean synthetic/copy"),
    ({"dataset": "synthetic"}, "no such task.*there are synthetic/copy, synthetic/rec"),
    ({"data_dir": "x"}, "data_dir=x: has no effect with data.dataset=synthetic/copy; remove"),
    ({"template": "{x}"}, "data.template={x}: has no effect with"),
    ({"tokenizer": "a.model"}, "tokenizer=a.model: has no effect with synthetic data"),
    ({"dataset": "mixture", "mixture": (MIXED,)}, "and a dataset of text"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED)
def test_what_a_config_cannot_say(fields, says):
    config = default_config()
    config.data.update({"dataset": "synthetic/copy"} | fields)
    with pytest.raises(UsageError, match=says):
        validate(config)


@pytest.mark.parametrize("task", KINDS)
def test_what_is_too_small(task):
    says = "vocab_size=167: synthetic data has 168 ids; set .* to 168 or more"
    with pytest.raises(UsageError, match=says):
        open_windows(settings(task), 167, "train")
    least = SHORTEST[task]
    says = f"seq_len={least - 1}: windows of synthetic/{task} need at least {least}"
    with pytest.raises(UsageError, match=says):
        windows(task, least - 1)


def test_there_is_no_text():
    with pytest.raises(UsageError, match="synthetic/mix: is generated .* and has no text"):
        find_source(settings())
