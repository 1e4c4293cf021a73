"""Generated windows: solved by programs that read them; what is recorded of them is true."""

import collections
import math
import re
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.models import forward
from support.runs import make_run
from support.solvers import solve_compact
from support.text import refusal

from prope import sharding
from prope.data.mixture import open_text, open_windows
from prope.data.store.build import prepare
from prope.data.tasks import synthetic
from prope.data.tasks.tasks import TASKS, split_name
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer
from prope.data.windows import train_batch
from prope.inference.losses import LossEvaluation
from prope.spec.data import GENERATED, DataSpec
from prope.spec.run import Spec

decode = ByteTokenizer().decode
KINDS = {"copy": {"copy"}, "recall": {"recall"}, "mix": {"copy", "recall"}}
SHORTEST = {"copy": 16, "recall": 32, "mix": 64}
MIXED = ("synthetic/mix", "longcontext/mix")


def data_of(dataset, T=128, **fields):
    return DataSpec(**{"dataset": dataset, "seq_len": T} | fields)


def windows(dataset, T=128, split="train", **fields):
    return open_windows(data_of(dataset, T, **fields), 260, split)


# --- copy and recall: windows of words --------------------------------------------------------


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
            (fact,) = [other for other in tokens[:place] if other.startswith(f"{word[:-1]}=")]
            distance = place - tokens.index(fact)
            answers[place] = ("recall", fact.split("=")[1], distance)
    return answers


def solved(task, T, count):
    """The words of so many windows, each with its answers."""
    batch = windows(f"synthetic/{task}", T).read(range(count))
    return [(tokens, solve(tokens)) for tokens in map(words, batch["tokens"])]


def assert_uniform(values):
    counts = collections.Counter(values)
    assert stats.chisquare(list(counts.values())).pvalue > 0.01, counts


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("task", KINDS)
def test_a_program_solves_copy_and_recall(task, split):
    for T in (SHORTEST[task], 128, 1000):
        generated = windows(f"synthetic/{task}", T, split)
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


@pytest.mark.parametrize("task", ["copy", "recall"])
def test_answers_are_uniform_and_so_are_offsets(task):
    found = [answer for _, answers in solved(task, 128, 1500) for answer in answers.values()]
    _, answers, distances = zip(*found, strict=True)
    assert_uniform(answers)
    if task == "copy":
        assert set(distances) == {1, 2, 3, 4}
        assert_uniform(distances)
    else:  # every octave is asked for
        counts = np.bincount(np.log2(distances).astype(int))[3:-1]
        assert counts.min() > 0.07 * len(distances), counts


# --- The long-context tasks: windows of text --------------------------------------------------


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("task", GENERATED["longcontext"])
def test_a_program_solves_every_window(task, split):
    for T in (64, 400):
        generated = windows(f"longcontext/{task}", T, split)
        batch = generated.read(range(30))
        tokens = batch["tokens"]
        assert (tokens[:, 0] == GEMMA_IDS.bos).all()
        assert (batch["targets"][:, :-1] == tokens[:, 1:]).all()
        names = set()
        for row in range(30):
            window = generated.window(row)
            is_answer = batch["weights"][row] > 0
            assert (is_answer == (window.task >= 0)).all()
            text = decode(window.stream)
            assert len(text) == T
            # The character of an index in the text is the target of the token there.
            for place in np.flatnonzero(is_answer):
                name = list(TASKS)[window.task[place]]
                names.add(name)
                asked = text.rindex("#", 0, place) + 1 if name == "passkey" else place
                answer = solve_compact(name, text[:asked])
                assert text[place] == answer[place - asked], (row, place)
        assert names == set(TASKS if task == "mix" else [split_name(task)[0]])
        assert T == 64 or batch["weights"].sum() > 30


@pytest.mark.parametrize("task", ["niah", "chain-1", "lookup"])
def test_distances_are_log_uniform_and_keys_are_asked_once(task):
    generated = windows(f"longcontext/{task}", 512)
    distances = []
    numbers = []
    for row in range(200):
        window = generated.window(row)
        questions = re.findall(r"\?[A-Z]|&[A-Z]|/[A-Za-z]{2}", decode(window.stream))
        assert len({*questions}) == len(questions)
        numbers.append(len(questions))
        distances += window.distance[window.task >= 0].tolist()
    octaves = np.bincount(np.log2(distances).astype(int))[3:8]
    assert octaves.min() > 0.5 * octaves.max(), "each octave has about as many"
    if task == "lookup":
        assert min(numbers) > 10
    else:  # and each octave of numbers of facts about as many windows
        assert min(numbers) == 1
        assert max(numbers) > 20
        assert 20 < sum(number < 3 for number in numbers) < 100


@pytest.mark.parametrize("task", TASKS)
def test_distances_are_those_of_the_text(task):
    window = windows(f"longcontext/{task}", 256).window(5)
    text = decode(window.stream)
    for place in np.flatnonzero(window.task >= 0):
        question = place - 1  # its last token
        evidence = text[question - window.distance[place] : place]
        symbol = text[question]
        patterns = {
            "passkey": ".(.).*",
            "niah": f"={symbol}(.).*",
            "lookup": f"{text[place - 2 : place]}(.).*",
            "chain": "[A-Z]:(.).*",
            "index": f"@(.)(.)(.)(.).*>{symbol}",
            "flipflop": r"\+(.)[^+]*",
        }
        match = re.fullmatch(patterns.get(task, "(.).*"), evidence, re.DOTALL)
        assert match, evidence
        number = int(symbol) if task == "index" else 1
        assert match[number] == text[place]


# --- Batches and splits -----------------------------------------------------------------------


@pytest.mark.parametrize(("dataset", "checksum"), [(MIXED[0], 494010306), (MIXED[1], 3555622461)])
def test_a_batch_is_a_function_of_seed_and_step(dataset, checksum):
    generated = windows(dataset)
    batch = train_batch(generated, 5, 8, 3)
    assert zlib.crc32(batch["tokens"]) == checksum, "in every process"
    first = train_batch(windows(dataset), 5, 8, 3, range(3))
    others = train_batch(generated, 5, 8, 3, range(3, 8))
    smaller = train_batch(generated, 5, 4, 7)
    for name, values in batch.items():
        np.testing.assert_array_equal(np.concatenate([first[name], others[name]]), values)
        np.testing.assert_array_equal(smaller[name], values[4:], "places count, not batches")


@pytest.mark.parametrize("dataset", [*MIXED, "synthetic/copy", "synthetic/recall"])
def test_no_window_comes_twice_and_a_hash_decides_its_split(dataset):
    train = windows(dataset)
    validation = windows(dataset, split="validation")
    streams = []
    for index in range(100):
        held_out = validation.window(index).stream
        assert zlib.crc32(held_out.astype("<i4").tobytes()) % 4 == 0
        streams.append(held_out)
        for seed in (0, 1):
            stream = train.window(train.window_index(index, seed)).stream
            assert zlib.crc32(stream.astype("<i4").tobytes()) % 4 != 0
            streams.append(stream)
    assert len(np.unique(streams, axis=0)) == 300


def test_tasks_differ_in_their_fingerprint_and_lengths_do_not():
    datasets = ["synthetic/copy", "synthetic/recall", *MIXED, "longcontext/niah"]
    for T in (128, 1024):
        fingerprints = {dataset: windows(dataset, T).store.fingerprint for dataset in datasets}
        assert len(set(fingerprints.values())) == 5
    assert fingerprints["synthetic/mix"] == windows("synthetic/mix").store.fingerprint


# --- Beside text ------------------------------------------------------------------------------


@pytest.fixture
def mixture(tmp_path):
    """The data of a mixture of text with two tasks."""
    (tmp_path / "text").mkdir()
    for i in range(40):
        text = f"{i} the rain falls on the hills. " * 20
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    sources = (
        {"weight": 0.5, "dataset": "files", "data_dir": str(tmp_path / "text")},
        {"weight": 0.25, "dataset": "longcontext/niah"},
        {"weight": 0.25, "dataset": "longcontext/chain"},
    )
    return data_of("mixture", mixture=sources, cache_dir=str(tmp_path / "cache"))


def test_generated_windows_beside_text(mixture):
    """Each generated source has the windows that it has alone, whatever the seed."""
    mixed = open_windows(mixture, 260, "train")
    for seed in (0, 3):
        batch = train_batch(mixed, seed, 8, 0)
        rows = [row.tobytes() for row in batch["tokens"]]
        for task in ("niah", "chain"):
            generated = windows(f"longcontext/{task}")
            for i in range(2):
                window = generated.window(generated.window_index(i, seed))
                row = rows.index(window.stream[:-1].tobytes())
                is_answer = batch["weights"][row] > 0
                assert (is_answer == (window.task >= 0)).all()
        assert sum("rain" in text for text in map(decode, batch["tokens"])) == 4


def test_shares_beside_text_are_those_of_the_loss(mixture):
    mixed = open_windows(mixture, 260, "train")
    shares = [0.5]
    for task in ("niah", "chain"):
        weights = windows(f"longcontext/{task}").read(range(100))["weights"]
        shares.append(0.25 * weights.mean())
    np.testing.assert_allclose(mixed.shares, shares / np.sum(shares), rtol=0.2)
    assert prepare(Spec(data=mixture))["fingerprint"] == mixed.store.fingerprint
    held_out = open_windows(mixture, 260, "validation")
    assert held_out.count == 1024 + held_out.sources[0].count
    assert held_out.read([held_out.count - 1])["weights"].any()
    assert "--split=train" in refusal(open_text, mixture, 260, "train", mixture, {})


# --- Accuracy and what is shown ---------------------------------------------------------------


def test_accuracy_by_distance_counts_right_answers():
    generated = windows("synthetic/mix", 256, "validation")
    indices = [3, 1, 70]
    right = np.random.default_rng(0).random((3, 256)) < 0.6
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
        assert stop == (first + 1 if group["task"] == "copy" else 2 * first)
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
    spec, params = make_run(tmp_path / "run")
    # Letters and values are likely, so that some answers are right.
    ids = jnp.arange(300)
    scale = jnp.where((ids >= 8) & (ids < 24), 1, 0.1)
    params["embedder"]["input_embedding"] *= scale[:, None]
    fields = {"data.dataset": "synthetic/mix", "data.seq_len": 64}
    spec = spec.replace(fields | {"eval.batch_size": batch_size, "eval.max_windows": 7})
    generated = windows("synthetic/mix", 64, "validation")
    record = LossEvaluation(spec, generated).evaluate(params, sharding.make_mesh())
    right = []
    losses = []
    for index in range(7):
        stream = generated.window(index * 512 // 7).stream
        tokens = jnp.asarray(stream[None, :-1])
        logits = forward(spec.model, params, tokens, jnp.arange(64)[None])
        logits = np.asarray(logits, np.float64)
        for place in solve(words(stream[:-1])):
            scores = logits[0, place]
            target = stream[place + 1]
            right.append(scores.argmax() == target)
            losses.append(np.logaddexp.reduce(scores) - scores[target])
    assert record["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert sum(right) >= 2
    assert record["accuracy"] == pytest.approx(np.mean(right))
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2))
    assert record["unigram_bits_per_byte"] == pytest.approx(3), "guessing one of eight"


@pytest.mark.slow
def test_trained_and_evaluated_as_any_other(train, run_command, tmp_path):
    workdir = tmp_path / "run"
    trained = train(workdir, "--config.data.dataset=synthetic/recall")
    assert trained.code == 0, trained.stderr
    flags = (f"--workdir={workdir}", "--max_windows=8", "--seq_len=1x,4x")
    evaluated = run_command("prope.evaluate", *flags)
    assert evaluated.result["evaluations"][0]["loss"] == trained.result["eval_loss"]
    *_, farthest = evaluated.result["accuracy_by_distance"]
    assert farthest["from"] in (64, 128)


# --- Bad input --------------------------------------------------------------------------------

COPY = {"weight": 1, "dataset": "synthetic/copy"}
NIAH = {"weight": 1, "dataset": "longcontext/niah"}
# Fields of config.data, and what the line that refuses them mentions.
REFUSED = [
    ({"dataset": "synthetic/coppy"}, "did you mean synthetic/copy"),
    ({"dataset": "longcontext/niah-5"}, "config.data.dataset=longcontext/niah-5"),
    ({"data_dir": "x"}, "data.data_dir=x"),
    ({"tokenizer": "a.model"}, "data.tokenizer=a.model"),
    ({"dataset": "mixture", "mixture": (COPY,)}, f"config.data.mixture[0]={COPY}: "),
    ({"dataset": "mixture", "mixture": (NIAH,), "tokenizer": "a.model"}, "data.tokenizer=a.model"),
    ({"dataset": "synthetic/recall", "seq_len": 31}, "seq_len=31"),
    ({"seq_len": 63}, "seq_len=63"),
]


@pytest.mark.parametrize(("fields", "mentions"), REFUSED)
def test_fields_that_are_refused(fields, mentions):
    assert mentions in refusal(windows, **{"dataset": "longcontext/niah"} | fields)


@pytest.mark.parametrize(("dataset", "ids"), [(MIXED[0], 168), (MIXED[1], 260)])
def test_a_vocabulary_has_the_ids_of_the_tasks(dataset, ids):
    open_windows(data_of(dataset), ids, "train")
    says = refusal(open_windows, data_of(dataset), ids - 1, "train")
    assert f"config.model.vocab_size={ids - 1}" in says and str(ids) in says
