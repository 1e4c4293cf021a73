"""Scores of the long-context tasks: against the plain forward pass, greedy decoding, formulas; records; refusals."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from makers import make_run
from ml_collections import FrozenConfigDict

from prope import model, sharding
from prope.data.tasks.tasks import TASKS, make_prompt
from prope.data.tokenizer import BOS, ByteTokenizer, load_tokenizer
from prope.errors import UsageError
from prope.hf.exporter import export
from prope.inference import generation, longcontext
from prope.inference.evaluation import Options, evaluations
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
    """The records of the command with these flags."""
    flags = {"workdir": str(workdir), "tasks": "niah", "trials": 2, "depths": "0,0.5"} | flags
    return list(evaluations(Options(**flags)))


def make_trials(task, count, T=128, prose=False, tokenizer=None) -> list[longcontext.Trial]:
    tokenizer = tokenizer or ByteTokenizer()

    def size(text):
        return 1 + len(tokenizer.encode(text.encode()))

    rows = TASKS[task].rows
    prompts = [
        make_prompt(task, prose, T, rows[i % len(rows)], i, 0, False, size) for i in range(count)
    ]
    return [longcontext.encode(tokenizer, task, prompt) for prompt in prompts]


def score(*arguments):
    return longcontext.score_trials(*arguments, sharding.make_mesh())


def lively(base):
    """A run's config and parameters, whose attention outweighs the token itself."""
    run = open_run(base / "a")
    params = run.params()
    params["layers"]["attn"]["attn_vec_einsum"]["w"] *= 5
    params["layers"]["mlp"]["linear"] *= 5
    run.config.model.attention = "xla"
    return run.config, params


# --- Scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prose", "T"),
    [
        ("passkey", False, 128),
        ("niah", False, 96),
        pytest.param("flipflop", True, 160, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_plain_forward_pass(base, task, prose, T):
    config, params = lively(base)
    trials = make_trials(task, 5, T, prose)
    forward = jax.jit(
        lambda tokens: model.logits(
            params, model.hidden_states(config.model, params, tokens, positions)
        )
    )
    positions = jnp.arange(T + 8)[None]
    expected, greedy = [], []
    for trial in trials:
        sums = []
        for k, candidate in enumerate(trial.candidates):
            tokens = np.zeros((1, T + 8), np.int32)
            row = [*trial.tokens, *candidate]
            tokens[0, : len(row)] = row
            logits = np.asarray(forward(tokens)[0], np.float64)[
                len(trial.tokens) - 1 : len(row) - 1
            ]
            logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            sums.append(logprobs[np.arange(len(candidate)), candidate].sum())
            if k == 0:
                greedy.append((logits.argmax(axis=1) == candidate).all())
        expected.append(sums)
    for batch_size in (2, 100):
        config.eval.batch_size = batch_size
        logprobs, exact = score(config, params, T, trials)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-4)
        assert exact.tolist() == greedy


@pytest.mark.parametrize(
    ("tasks", "prose", "length"),
    [
        (["index"], True, 6),
        (["passkey"], False, 6),
        pytest.param(
            [task for task in TASKS if task != "passkey"], False, 1, marks=pytest.mark.slow
        ),
    ],
)
def test_exact_is_what_greedy_decoding_says(base, tasks, prose, length):
    """20 prompts of each: what prope.sample says at temperature 0 is exact; with one other token it is not."""
    config, params = lively(base)
    trials = [
        trial for task in tasks for trial in make_trials(task, 20, 300 if prose else 96, prose)
    ]
    keys = generation.row_keys(0, len(trials))
    sampling = generation.Sampling(length, temperature=0.0, eos=-1)
    prompts, lengths = generation.pad_prompts([trial.tokens.tolist() for trial in trials])
    static = FrozenConfigDict(config.model), sampling
    first, cache = generation.prefill(*static, params, prompts, lengths, keys)
    said = np.asarray(generation.decode(*static, params, first, cache, lengths, keys)[0])
    for place in (None, 0, length - 1):
        changed = said.copy()
        if place is not None:
            changed[:, place] = 4 + changed[:, place] % 200
        both = [
            np.stack([answer, t.candidates[1]]) for answer, t in zip(changed, trials, strict=True)
        ]
        asked = [
            trial._replace(candidates=candidates)
            for trial, candidates in zip(trials, both, strict=True)
        ]
        _, exact = score(config, params, 320, asked)
        assert exact.all() if place is None else not exact.any()


@pytest.fixture(scope="module")
def theirs(base):
    """The run as a model of transformers."""
    pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    export(base / "a", base / "hf")
    return transformers.GemmaForCausalLM.from_pretrained(base / "hf")


@pytest.mark.parametrize("task", TASKS)
def test_transformers_ranks_answers_the_same(base, theirs, task):
    """20 prompts through the exported model, every candidate by a forward pass of its own."""
    import torch

    run, trials, expected = open_run(base / "a"), make_trials(task, 20, 96), []
    for trial in trials:
        C, A = trial.candidates.shape
        rows = np.concatenate(
            [np.broadcast_to(trial.tokens, (C, len(trial.tokens))), trial.candidates], axis=1
        )
        with torch.no_grad():
            logits = (
                theirs(torch.tensor(rows)).logits[:, -A - 1 : -1].double().log_softmax(-1).numpy()
            )
        expected.append(
            np.take_along_axis(logits, trial.candidates[..., None], axis=-1).sum(axis=(1, 2))
        )
    logprobs, _ = score(run.config, run.params(), 96, trials)
    ranks = [[sum(row > row[0]) for row in rows] for rows in (expected, logprobs)]
    assert ranks[0] == ranks[1] and len({*ranks[0]}) > min(2, C - 1), (
        "20 of 20 equal, and of several ranks"
    )
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)


def test_memory_grows_with_the_cache_alone(base):
    config, mesh, B = open_run(base / "a").config, sharding.make_mesh(), 4
    static = FrozenConfigDict(config.model)

    def sizes(T):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, T), (B,), (B, 8, 6))]
        params = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
        with sharding.use(mesh):
            compiled = longcontext._make_score(static, mesh).lower(params, *shapes).compile()
        cache = jax.eval_shape(lambda: generation.empty_cache(config.model, B, T))
        return compiled.memory_analysis().temp_size_in_bytes, sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)
        )

    (short, of_short), (long, of_long) = sizes(512), sizes(8192)
    scores = 4 * B * config.model.num_heads * 256 * (8192 - 512)  # of 256 tokens, float32
    assert long - short < 3 * (of_long - of_short) + 2 * scores


def test_answers_of_several_lengths_are_scored_together(base):
    config, params = lively(base)
    mixed = [trial for task in ("niah", "passkey") for trial in make_trials(task, 2, 96)]
    together = score(config, params, 96, mixed)[0]
    apart = [score(config, params, 96, mixed[i : i + 2])[0] for i in (0, 2)]
    np.testing.assert_allclose(together, np.concatenate(apart), rtol=0, atol=1e-4)


def test_a_prompt_has_one_bos_and_fits():
    for task in TASKS:
        for trial in make_trials(task, 9, 96):
            assert trial.tokens[0] == BOS and (trial.tokens == BOS).sum() == 1
            assert len(trial.tokens) + trial.candidates.shape[1] <= 96
            assert 0 < trial.distance < len(trial.tokens)
            assert len({tuple(candidate) for candidate in trial.candidates}) == (
                2 if task == "flipflop" else 8
            )


def test_distances_are_tokens_from_the_answer_to_the_evidence():
    for trial in make_trials("niah", 9):
        evidence, question = trial.tokens[-trial.distance :][:3] - 4, trial.tokens[-1] - 4
        assert bytes([*evidence]) == b"=" + bytes([question, trial.candidates[0, 0] - 4])
    for i, trial in enumerate(make_trials("offset", 12)):
        assert trial.distance == 2 + TASKS["offset"].rows[i % 6]


def test_prose_is_asked_of_any_tokenizer(sentencepiece_model):
    tokenizer = load_tokenizer(sentencepiece_model)
    for task in TASKS:
        for trial in make_trials(task, 3, 1200, True, tokenizer):
            text = tokenizer.decode(trial.tokens)
            used = len(trial.tokens) + trial.candidates.shape[1]
            assert trial.tokens[0] == BOS and used <= 1200 and (used > 1100 or task == "duplicate")
            answers = [
                tokenizer.decode([*trial.tokens, *candidate]).removeprefix(text)
                for candidate in trial.candidates
            ]
            assert len({*answers}) == len(answers) and len({*map(len, answers)}) == 1


# --- Records ------------------------------------------------------------------------------------------------------


def scored(monkeypatch, logprobs, exact=None):
    """Makes the model score so: logprobs [R, C]."""
    logprobs = np.array(logprobs, np.float64)
    exact = np.zeros(len(logprobs), bool) if exact is None else np.array(exact)
    monkeypatch.setattr(longcontext, "score_trials", lambda *_: (logprobs, exact))


def test_ranks_count_likelier_foils_and_half_of_equal_ones(run, monkeypatch):
    rows = [[-1.0, *[-2.0] * 7], [-2.0, *[-2.0] * 7], [-3.0, -1.0, *[-4.0] * 6], [math.nan] * 8]
    scored(monkeypatch, rows, [True, False, False, False])
    (record,) = ask(run)
    assert (
        record["rank_accuracy"] == 0.25
        and record["rank"] == (1 + 4.5 + 2 + 8) / 4
        and record["exact"] == 0.25
    )
    assert record["chance"] == 1 / 8 and sum(record["wrong"].values()) == 3
    assert [cell["row"] for cell in record["cells"]] == [0, 0.5]
    assert [cell["rank"] for cell in record["cells"]] == [2.75, 5] and record["cells"][0][
        "exact"
    ] == 0.5
    assert record["cells"][0]["distance"] > record["cells"][1]["distance"] > 60


def test_intervals_are_wilsons(run, monkeypatch):
    scored(monkeypatch, [[-1.0, *[-2.0] * 7]] * 3 + [[-3.0, *[-2.0] * 7]])
    (record,) = ask(run)
    z, q, n = 1.959964, 0.75, 4
    ends = [
        (q + z * z / 2 / n + s * z * math.sqrt(q * (1 - q) / n + (z / 2 / n) ** 2))
        / (1 + z * z / n)
        for s in (-1, 1)
    ]
    np.testing.assert_allclose(record["rank_accuracy_interval"], ends, rtol=1e-6)
    assert record["cells"][0]["rank_accuracy_interval"][1] == 1 and record["exact_interval"][0] == 0


def test_what_is_there_is_not_asked_again(run, monkeypatch):
    first = ask(run, tasks="niah,offset", seq_len="0.5x,96")
    assert [(record["task"], record["seq_len"]) for record in first] == [
        (task, T) for task in ("niah", "offset") for T in (64, 96)
    ]
    lines = (run / "longcontext.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(first))
    (niah, *_, offset) = first
    assert (
        niah["windows"] == 4 and offset["windows"] == 12 and offset["rows"] == [1, 2, 4, 8, 16, 32]
    )
    monkeypatch.setattr(longcontext, "score_trials", None)
    assert ask(run, tasks="niah", seq_len="64") == json.loads(json.dumps(first[:1]))
    for others in (
        {"depths": "1"},
        {"trials": 3},
        {"seed": 1},
        {"control": "removed"},
        {"again": True},
        {"form": "prose"},
    ):
        with pytest.raises(TypeError, match="not callable"):
            ask(run, tasks="niah", seq_len="64" if "form" not in others else "600", **others)


def test_controls(run):
    (near,) = ask(run, control="near", depths=None, seq_len="1000")
    assert 25 < near["distance"] < 45 and near["rows"] == [1 - 32 / 1000]
    (removed,) = ask(run, control="removed")
    (asked,) = ask(run)
    assert removed["control"] == "removed" and removed["fingerprint"] != asked["fingerprint"]


def open_prompts(base, task="niah", T=600, **flags):
    return longcontext.Prompts(
        task, T, open_run(base / "a").config, Options(str(base / "a"), tasks=task, **flags)
    )


def test_prompts_of_an_evaluation_fit_and_lose_their_evidence_as_a_control(base):
    for control in (None, "removed"):
        prompts = open_prompts(base, T=128, control=control)
        for number, row in enumerate(prompts.about["rows"]):
            trial = prompts.trial(row, number)
            text = ByteTokenizer().decode(trial.tokens)
            assert (f"={text[-1]}" in text) == (control is None)
            assert len(trial.tokens) + trial.candidates.shape[1] == 128


def test_what_changes_prompts_changes_their_fingerprint(base, monkeypatch):
    flags = (
        {"form": "prose"},
        {"depths": "1"},
        {"trials": 3},
        {"seed": 1},
        {"control": "removed"},
        {"control": "near"},
    )
    found = [
        open_prompts(base, **f).selection.fingerprint
        for f in ({}, *flags, {"task": "niah-1"}, {"T": 601})
    ]
    assert open_prompts(base).selection.fingerprint == found[0]
    assert open_prompts(base, depths="1,1.0").selection.fingerprint == found[2], (
        "prompts are not counted twice"
    )
    for owner, name in ((longcontext, "FORMAT"), (ByteTokenizer, "fingerprint")):
        monkeypatch.setattr(owner, name, "another")
        found.append(open_prompts(base).selection.fingerprint)
    assert len({*found}) == len(found)


def test_a_trial_does_not_depend_on_what_else_is_asked(run, monkeypatch):
    asked = []

    def score(config, params, T, trials, mesh):
        asked.append([trial.tokens.tobytes() for trial in trials])
        return np.zeros((len(trials), 8)), np.zeros(len(trials), bool)

    monkeypatch.setattr(longcontext, "score_trials", score)
    for flags in ({}, {"depths": "0.5"}, {"trials": 3}, {"seed": 1}):
        ask(run, **flags)
    both, deep, more, seeded = asked
    assert both[2:] == deep and both == more[:2] + more[3:5]
    assert len({*more, *seeded}) == 6 + 4


def test_runs_are_compared_on_the_same_trials(tmp_path, monkeypatch):
    """McNemar: 3 trials that only the first answers, 1 that only the second does, of 8."""
    answered = {"a": [1, 1, 1, 1, 1, 0, 0, 0], "b": [1, 1, 0, 0, 0, 1, 0, 0]}
    for name, right in answered.items():
        make_run(tmp_path / name)
        scored(
            monkeypatch,
            [[-1.0 if r else -3.0, *[-2.0] * 7] for r in right],
            np.array(right[::-1]) > 0,
        )
        ask(tmp_path / name, trials=4)
    found = longcontext.paired_answers(tmp_path / "a", tmp_path / "b", task="niah", seq_len=128)
    stderr = (
        math.sqrt(3 + 1 - (3 - 1) ** 2 / 8) / 8 * math.sqrt(8 / 7)
    )  # of a sample, whence the last factor
    assert (
        found.samples == 8
        and math.isclose(found.difference, 2 / 8)
        and math.isclose(found.stderr, stderr)
    )
    assert math.isclose(
        longcontext.paired_answers(tmp_path / "b", tmp_path / "a", exact=True).difference, -2 / 8
    )
    with pytest.raises(UsageError, match="has no evaluation with .*'task': 'index'"):
        longcontext.paired_answers(tmp_path / "a", tmp_path / "b", task="index")


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing(whole, run_command, tmp_path):
    """27 prompts in batches of 12, for eight devices 16: several rows a device, and a last batch that is not full."""
    import shutil

    tasks, records, trials = ["passkey", "niah", "duplicate"], [], []
    for devices in (1, 8):
        run = shutil.copytree(whole[0], tmp_path / str(devices))
        asked = (
            f"--tasks={','.join(tasks)}",
            "--seq_len=1x",
            "--trials=3",
            "--batch_size=12",
            f"--workdir={run}",
        )
        outcome = run_command("prope.evaluate", *asked, devices=devices)
        assert outcome.code == 0, outcome.stderr
        assert "on 27 prompts of 64 tokens of longcontext/niah; " in outcome.stderr
        assert [short["task"] for short in outcome.result["evaluations"]] == tasks
        records.append(
            [json.loads(line) for line in (run / "longcontext.jsonl").read_text().splitlines()]
        )
        files = [
            run / "eval" / "20" / f"{r['fingerprint']}-{r['seq_len']}-{r['windows']}.npz"
            for r in records[-1]
        ]
        trials.append([np.load(file) for file in files])
    for one, eight in zip(*records, strict=True):
        assert one["fingerprint"] == eight["fingerprint"] and one["wrong"] == eight["wrong"]
        assert [cell["wrong"] for cell in one["cells"]] == [
            cell["wrong"] for cell in eight["cells"]
        ]
    for one, eight in zip(*trials, strict=True):
        assert one["logprobs"].shape[0] == 27 and (one["loss"] == eight["loss"]).all(), (
            "which are right, and exact"
        )
        np.testing.assert_allclose(one["logprobs"], eight["logprobs"], rtol=1e-5)


# --- Bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"tasks": "passkye"},
            r"--tasks=passkye: there is no task passkye \(did you mean passkey\?\); there are passkey, ni",
        ),
        (
            {"tasks": "niah,chain-3"},
            r"--tasks=niah,chain-3: there is no task chain-3 \(did you mean chain-\d\?\)",
        ),
        ({"tasks": ""}, "--tasks=: there is no task ; there are passkey"),
        ({"seq_len": "8"}, "--seq_len=8: niah needs at least 18 tokens; take longer ones"),
        ({"seq_len": "0.01x"}, "--seq_len=1: niah needs at least"),
        ({"seq_len": "0.001x"}, "--seq_len=0.001x: '0.001x' is neither"),
        (
            {"depths": "0,1.5"},
            r"--depths=0,1.5: must be fractions of the prompt in \[0, 1\], such as 0,0.5,1",
        ),
        ({"depths": "-0.5"}, "--depths=-0.5: must be fractions"),
        ({"depths": "x"}, "--depths=x: must be fractions"),
        (
            {"tasks": "lookup", "seq_len": "9000"},
            "facts need different names, of 2,704 that there are",
        ),
        ({"split": "train"}, "--split=train: has no effect with --tasks; remove it"),
        ({"max_tokens": 512}, "--max_tokens=512: has no effect with --tasks; remove it"),
        ({"control": "near"}, "--depths=0,0.5: has no effect with --control=near; remove it"),
        ({"tasks": None}, "--depths=0,0.5: has no effect without --tasks; remove it"),
        ({"encoding": "dynamic"}, "--tasks keeps keys, which dynamic would rotate anew"),
    ],
)
def test_what_cannot_be_asked(base, monkeypatch, flags, says):
    monkeypatch.setattr(jax, "devices", None)  # which would initialise them
    with pytest.raises(UsageError, match=says):
        ask(base / "a", **flags)


def test_a_model_that_cannot_say_the_answers(tmp_path):
    make_run(tmp_path / "run", vocab_size=168)
    with pytest.raises(
        UsageError,
        match="config.data.tokenizer=byte: has 260 ids, and the model of .* 168; put back",
    ):
        ask(tmp_path / "run")


class Joining(ByteTokenizer):
    """Four bytes a token, from the start."""

    def encode(self, text):
        return np.array([4 + sum(text[i : i + 4]) % 250 for i in range(0, len(text), 4)], np.int32)


@pytest.mark.parametrize("task", ["niah", "passkey"])
def test_a_tokenizer_that_joins_prompt_and_answer(task):
    """An answer that adds no token, and one that adds some and changes the prompt's last one."""
    joins = f"--tasks={task}: the tokenizer joins the end of a prompt, '.*', and its answer, '"
    with pytest.raises(UsageError, match=joins):
        make_trials(task, 9, 128, tokenizer=Joining())


class Uneven(ByteTokenizer):
    """A token for each of 0 to 3, two for each other digit."""

    def encode(self, text):
        return super().encode(b"".join(bytes([c]) * (1 + (c in b"4567")) for c in text))


def test_a_tokenizer_whose_answers_are_of_several_lengths():
    with pytest.raises(
        UsageError,
        match=r"--tasks=niah: the tokenizer has 4 answers of as many tokens as '\d', of 8",
    ):
        make_trials("niah", 1, 128, tokenizer=Uneven())
