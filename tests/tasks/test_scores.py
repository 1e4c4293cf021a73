"""Scores of the long-context tasks: against the plain forward pass and greedy decoding; records."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.models import ALL_SWITCHES, draw_model, forward
from support.runs import make_run
from support.text import read_lines, refusal

from prope import sharding
from prope.data.tasks.draws import Prompt
from prope.data.tasks.tasks import TASKS, make_prompt
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer, load_tokenizer
from prope.inference import asking, generation
from prope.inference.asking import AskOptions
from prope.workdir.run import open_run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("longcontext")
    make_run(base / "a", 0.75)
    return base


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "run", 0.75)
    return tmp_path / "run"


def ask(workdir, **flags) -> list[dict]:
    """The records of prope.ask with these flags."""
    flags = {"workdir": str(workdir), "tasks": "niah", "trials": 2, "depths": "0,0.5"} | flags
    return list(asking.answers(AskOptions(**flags)))


def read_records(workdir) -> list[dict]:
    return read_lines(workdir / "longcontext.jsonl")


def make_trials(task, count, T=128, prose=False, tokenizer=None) -> list[asking.Trial]:
    tokenizer = tokenizer or ByteTokenizer()

    def size(text):
        return 1 + len(tokenizer.encode(text.encode()))

    rows = TASKS[task].rows
    made = []
    for i in range(count):
        prompt = make_prompt(task, prose, T, rows[i % len(rows)], i, 0, False, size)
        made.append(asking.encode(tokenizer, task, prompt))
    return made


def score(spec, params, T, tried):
    ids = ByteTokenizer.vocab_size
    return asking.score_trials(spec, params, T, tried, sharding.make_mesh(), ids)


def lively(base):
    """A run's spec and parameters, whose attention outweighs the token itself."""
    run = open_run(base / "a")
    params = run.params()
    params["layers"]["attn"]["attn_vec_einsum"]["w"] *= 5
    params["layers"]["mlp"]["linear"] *= 5
    return run.spec.replace({"model.attention": "xla"}), params


# --- Scores -----------------------------------------------------------------------------------


WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


@pytest.mark.parametrize(
    ("tasks", "prose", "T", "fields"),
    [
        (["passkey", "niah"], False, 128, WINDOWS),
        pytest.param(["flipflop"], True, 160, {}, marks=pytest.mark.slow),
        pytest.param(["passkey"], False, 128, ALL_SWITCHES, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_plain_forward_pass(base, monkeypatch, tasks, prose, T, fields):
    """Answers of several lengths, longer than a chunk, and one that the model says, together."""
    monkeypatch.setattr(generation, "_CHUNK", 3)
    asking._make_score.cache_clear()  # which has no chunks among its keys
    spec, params = lively(base)
    if fields:
        spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, **fields))
        params, *_ = draw_model(spec.model)
    tried = [trial for task in tasks for trial in make_trials(task, 3, T, prose)]
    tokens = jnp.asarray(tried[-1].tokens)[None]
    logits = forward(spec.model, params, tokens, jnp.arange(tokens.shape[1])[None])
    tried[-1].candidates[0] = logits[0, -1, : ByteTokenizer.vocab_size].argmax()
    greedy = {}

    def read_whole(params) -> np.ndarray:
        """The log-probabilities [R, C] of the answers, from prompts that are read with them."""
        sums = []
        for number, (tokens, candidates, *_) in enumerate(tried):
            rows = [np.pad([*tokens, *answer], (0, T))[: T + 8] for answer in candidates]
            positions = jnp.tile(jnp.arange(T + 8), (len(rows), 1))
            logits = forward(spec.model, params, jnp.asarray(rows), positions)
            logits = np.asarray(logits, np.float64)[:, len(tokens) - 1 :][:, : candidates.shape[1]]
            logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            said = np.take_along_axis(logprobs, candidates[..., None], axis=-1)[..., 0]
            sums.append(said.sum(axis=1))
            sampled = logits[0, :, : ByteTokenizer.vocab_size].argmax(axis=-1)
            greedy.setdefault(number, (sampled == candidates[0]).all())
        return np.array(sums)

    expected, movement = measure_rounding(read_whole, params)
    for batch_size in (2, 100):
        batched = spec.replace({"eval.batch_size": batch_size})
        logprobs, exact = score(batched, params, T, tried)
        assert_equal_but_rounding(logprobs, expected, movement)
        assert exact.tolist() == list(greedy.values())


def test_exact_is_what_greedy_decoding_says(base):
    """What prope.sample says at temperature 0 is exact; with one other token it is not.

    It says no ids that the tokenizer lacks.
    """
    spec, params = lively(base)
    length = 6
    tried = make_trials("index", 20, 300, prose=True)
    keys = generation.row_keys(0, len(tried))
    ids = ByteTokenizer.vocab_size
    sampling = generation.Sampling(length, 0.0, eos=-1, vocab_size=ids)
    static = (spec.model, sampling)
    prompts, lengths = generation.pad_prompts([trial.tokens for trial in tried])
    first, cache = generation.prefill(*static, params, prompts, lengths, keys)
    said, _ = generation.decode(*static, params, first, cache, lengths, keys)
    for place in (None, 0, length - 1):
        changed = np.array(said)
        if place is not None:
            changed[:, place] = 4 + changed[:, place] % 200
        asked = []
        for answer, trial in zip(changed, tried, strict=True):
            candidates = np.stack([answer, trial.candidates[1]])
            asked.append(trial._replace(candidates=candidates))
        _, exact = score(spec, params, 320, asked)
        assert (exact == (place is None)).all()


def test_distances_are_tokens_from_the_answer_to_the_evidence():
    for tokens, candidates, _, distance, _ in make_trials("niah", 9):
        assert np.flatnonzero(tokens == GEMMA_IDS.bos).tolist() == [0]
        evidence = tokens[-distance:][:3] - 4
        key = tokens[-1] - 4
        value = candidates[0, 0] - 4
        assert evidence.tolist() == [ord("="), key, value]
    for k, trial in zip(TASKS["offset"].rows, make_trials("offset", 6), strict=True):
        assert trial.distance == 2 + k


@pytest.mark.parametrize("task", TASKS)
def test_prose_is_asked_of_any_tokenizer(sentencepiece_model, task):
    """Also one whose words of two syllables have from four to eight tokens, too."""
    for trial in make_trials(task, 7, 1024, prose=True, tokenizer=Uneven()):
        assert len(trial.candidates) == (2 if task == "flipflop" else 8)
    tokenizer = load_tokenizer(sentencepiece_model)
    for tokens, candidates, *_ in make_trials(task, 3, 1200, True, tokenizer):
        text = tokenizer.decode(tokens)
        used = len(tokens) + candidates.shape[1]
        assert used <= 1200
        assert used > 1100 or task == "duplicate"
        answers = set()
        for candidate in candidates:
            whole = tokenizer.decode([*tokens, *candidate])
            answers.add(whole.removeprefix(text))
        assert len(answers) == len(candidates)
        assert len({len(answer) for answer in answers}) == 1


# --- Records ----------------------------------------------------------------------------------


def plant_scores(monkeypatch, logprobs, exact=None):
    """Makes the model score so: logprobs [R, C]."""
    logprobs = np.array(logprobs, np.float64)
    exact = np.zeros(len(logprobs), bool) if exact is None else np.array(exact)
    monkeypatch.setattr(asking, "score_trials", lambda *_: (logprobs, exact))


def test_ranks_count_likelier_foils_and_half_of_equal_ones(run, monkeypatch):
    rows = [[-1.0, *[-2.0] * 7], [-2.0, *[-2.0] * 7], [-3.0, -1.0, *[-4.0] * 6], [math.nan] * 8]
    plant_scores(monkeypatch, rows, [False, True, True, True])
    (record,) = ask(run)
    assert (record["accuracy"], record["exact"]) == (0.25, 0.75)
    assert record["rank"] == (1 + 4.5 + 2 + 8) / 4
    assert record["chance"] == 1 / 8
    assert sum(record["wrong"].values()) == 3
    ends = stats.binomtest(1, 4).proportion_ci(method="wilson")
    np.testing.assert_allclose(record["accuracy_interval"], ends, rtol=1e-6)
    first, second = record["cells"]
    assert (first["row"], second["row"]) == (0, 0.5)
    assert (first["rank"], second["rank"]) == (2.75, 5)
    assert (first["exact"], second["exact"], first["logprob"]) == (0.5, 1, -1.5)
    assert (record["tokens"], record["answer_tokens"]) == (127, 1)
    assert first["distance"] > second["distance"] > 60


def test_records_have_the_best_guess_of_all_their_prompts(run, monkeypatch):
    """At depth 0 the first value is right and at 1 the last; in both no rule is always right."""
    plant_scores(monkeypatch, np.zeros((4, 8)))

    def guesses(**flags):
        (record,) = ask(run, depths="0,1", **flags)
        found = []
        for part in (*record["cells"], record):
            found.append((part["guess"], part["guess_rule"]))
        return found

    assert guesses() == [(1, "first"), (1, "last"), (0.5, "first")]
    removed = guesses(control="removed")
    assert removed == 3 * [(1 / 8, "chance")]
    passkey = guesses(tasks="passkey")
    assert passkey == 3 * [(1, "uniform")]


def test_a_guess_is_made_among_the_answers_that_are_scored():
    """Foils of another number of tokens are none, though they stand in the prompt."""
    prompt = Prompt("=A4=B5=C1=D2?C", "1", {"value": [*"4523abcde"]}, source=6)
    trial = asking.encode(Uneven(), "niah", prompt)
    assert trial.guesses == {"chance": 1 / 8, "uniform": 1 / 2, "first": 1, "last": 0}


def test_records_are_reused(run, monkeypatch):
    asked = ask(run, tasks="niah,offset", seq_len="0.5x,96")
    niah, longer, offset, _ = asked = json.loads(json.dumps(asked))
    assert [record["task"] for record in asked] == ["niah", "niah", "offset", "offset"]
    assert (niah["seq_len"], longer["seq_len"]) == (64, 96)
    assert read_records(run) == asked
    assert niah["windows"] == 4
    assert offset["windows"] == 12
    assert offset["rows"] == [1, 2, 4, 8, 16, 32]
    monkeypatch.setattr(asking, "score_trials", None)
    assert ask(run, seq_len="64") == [niah]
    for others in ({"depths": "1"}, {"again": True}):
        with pytest.raises(TypeError, match="not callable"):
            ask(run, seq_len="64", **others)


def open_prompts(base, task="niah", T=600, **flags):
    spec = open_run(base / "a").spec
    return asking.Prompts(task, T, spec, AskOptions(str(base / "a"), **flags))


def test_controls(base):
    for control in (None, "removed"):
        prompts = open_prompts(base, T=128, control=control)
        for number, row in enumerate(prompts.about["rows"]):
            trial = prompts.trial(row, number)
            text = ByteTokenizer().decode(trial.tokens)
            assert (f"={text[-1]}" in text) == (control is None)
            assert len(trial.tokens) + trial.candidates.shape[1] == 128
    near = open_prompts(base, T=1000, control="near")
    (row,) = near.about["rows"]
    assert row == 1 - 32 / 1000
    assert 25 < near.trial(row, 0).distance < 45


def test_what_changes_prompts_changes_their_fingerprint(base, monkeypatch):
    def fingerprint(**fields):
        return open_prompts(base, **fields).selection.fingerprint

    # The trials of others stay what they are.
    trial, same, other = (
        open_prompts(base, **flags).trial(0.5, 1).tokens.tolist()
        for flags in ({}, {"trials": 3, "depths": "0.5"}, {"seed": 1})
    )
    assert trial == same != other
    changes = [{"depths": "1"}, {}, {"form": "prose"}, {"trials": 3}, {"seed": 1}, {"T": 601}]
    changes += [{"control": "removed"}, {"control": "near"}, {"task": "niah-1"}]
    different = [fingerprint(**change) for change in changes]
    assert fingerprint(depths="1,1.0") == different[0], "prompts are not counted twice"
    for module, name in ((asking, "FORMAT"), (ByteTokenizer, "fingerprint")):
        monkeypatch.setattr(module, name, "another")
        different.append(fingerprint())
    assert len(set(different)) == len(different)


def test_runs_are_compared_on_the_same_trials(tmp_path, monkeypatch):
    """McNemar: 3 trials that only the first answers, 1 that only the second does, of 8."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    for workdir, right in ((a, "11111000"), (b, "11000100")):
        make_run(workdir)
        scores = [[-1.0 if hit == "1" else -3.0, *[-2.0] * 7] for hit in right]
        plant_scores(monkeypatch, scores, [hit == "1" for hit in reversed(right)])
        ask(workdir, trials=4)
    difference = asking.paired_answers(a, b, task="niah", seq_len=128)
    assert difference.samples == 8
    assert difference.difference == pytest.approx(2 / 8)
    variance = 3 + 1 - (3 - 1) ** 2 / 8
    of_sample = math.sqrt(8 / 7)
    assert difference.stderr == pytest.approx(math.sqrt(variance) / 8 * of_sample)
    exact = asking.paired_answers(b, a, exact=True)
    assert exact.difference == pytest.approx(-2 / 8)
    assert "index" in refusal(asking.paired_answers, a, b, task="index")


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing(whole, run_command, tmp_path):
    """27 prompts in batches of 12, for eight devices 16: the last batch is not full."""
    tasks = ["passkey", "niah", "duplicate"]
    flags = (f"--tasks={','.join(tasks)}", "--trials=3", "--batch_size=12")
    by_devices = []
    for devices in (1, 8):
        run = shutil.copytree(whole[0], tmp_path / str(devices))
        outcome = run_command("prope.ask", f"--workdir={run}", *flags, devices=devices)
        assert outcome.code == 0, outcome.stderr
        short = outcome.result["evaluations"]
        assert [record["task"] for record in short] == tasks
        assert short[-1].items() <= outcome.result.items()
        by_devices.append(run)
    one, eight = by_devices
    for a, b in zip(read_records(one), read_records(eight), strict=True):
        assert a["fingerprint"] == b["fingerprint"]
        assert a["wrong"] == b["wrong"]
        file = f"eval/20/{a['fingerprint']}-64-27.npz"
        with np.load(one / file) as ours, np.load(eight / file) as theirs:
            np.testing.assert_array_equal(ours["loss"], theirs["loss"], "which are right")
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5)


# --- Bad input --------------------------------------------------------------------------------

# Flags, and what the line that refuses them mentions.
REFUSED = [
    ({"tasks": "passkye"}, "did you mean passkey"),
    ({"tasks": "niah,chain-3"}, "--tasks=niah,chain-3"),
    ({"seq_len": "0.01x"}, "--seq_len=1"),
    ({"depths": "0,1.5"}, "--depths=0,1.5"),
    ({"depths": "x"}, "--depths=x"),
    ({"control": "near"}, "--depths=0,0.5"),
    ({"encoding": "dynamic"}, "rope_scaling_type=dynamic"),
]


@pytest.mark.parametrize(("flags", "mentions"), REFUSED)
def test_flags_that_are_refused(base, monkeypatch, flags, mentions):
    monkeypatch.setattr(jax, "devices", None)  # which would initialise them
    assert mentions in refusal(ask, base / "a", **flags)


class Joining(ByteTokenizer):
    """Four bytes a token, from the start."""

    def encode(self, text):
        sums = []
        for start in range(0, len(text), 4):
            sums.append(4 + sum(text[start : start + 4]) % 250)
        return np.array(sums, np.int32)


class Uneven(ByteTokenizer):
    """A token for each of 0 to 3 and a to l, two for each other digit and small letter."""

    def encode(self, text):
        doubled = b"".join(bytes([c]) * (1 + (c in b"4567mnopqrstuvwxyz")) for c in text)
        return super().encode(doubled)


# An answer that adds no token, one that adds some and changes the prompt's last, and few foils.
TOKENIZERS = [("niah", Joining()), ("passkey", Joining()), ("niah", Uneven())]


@pytest.mark.parametrize(("task", "tokenizer"), TOKENIZERS)
def test_a_tokenizer_whose_answers_cannot_be_compared(task, tokenizer):
    assert f"--tasks={task}" in refusal(make_trials, task, 9, 128, tokenizer=tokenizer)


def test_a_model_that_cannot_say_the_answers(tmp_path):
    make_run(tmp_path / "run", vocab_size=168)
    assert "config.data.tokenizer=byte" in refusal(ask, tmp_path / "run")
