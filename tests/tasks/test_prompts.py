"""Prompts of the long-context tasks: solved by programs, and without leaks."""

import collections
import functools
import hashlib
import re

import numpy as np
import pytest
from scipy import stats
from support.solvers import solve_compact, solve_prose
from support.text import refusal

from prope.data.tasks.draws import LETTERS, Draw
from prope.data.tasks.retrieval import DEPTHS
from prope.data.tasks.tasks import TASKS, VARIANTS, make_prompt, split_name
from prope.inference.asking import chances_without_retrieval
from prope.spec.data import GENERATED

UNITS = 60
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in TASKS]
every_task = pytest.mark.parametrize("task", [*TASKS, *SLOW])
both_forms = pytest.mark.parametrize("prose", [False, True])


def test_the_config_names_the_tasks_that_are_made():
    assert GENERATED["longcontext"] == ("mix", *VARIANTS)
    assert {split_name(task)[0] for task in VARIANTS} == set(TASKS)
    for name, task in TASKS.items():
        assert name in VARIANTS, "its default"
        assert f"{name}-{task.option}" not in VARIANTS, "one name for each"


@functools.cache
def draw_prompt(task, prose=False, row=None, seed=0, n=UNITS, removed=False):
    name, option = split_name(task)
    draw = Draw(seed, (7,), option, prose, removed)
    if row is None:
        rows = TASKS[name].rows
        row = rows[seed % len(rows)]
    return TASKS[name].prompt(draw, n, row)


def draw_prompts(task, count, prose=False, **fields):
    return [draw_prompt(task, prose, seed=seed, **fields) for seed in range(count)]


def count_bytes(text):
    return 1 + len(text)


def fit(task, prose=False, length=1000, size=count_bytes, row=0.5, trial=0, seed=0):
    removed = False
    return make_prompt(task, prose, length, row, trial, seed, removed, size)


@both_forms
@every_task
def test_a_program_answers_every_prompt(task, prose):
    name, _ = split_name(task)
    solve = solve_prose if prose else solve_compact
    prompts = draw_prompts(task, 200, prose)
    for prompt in prompts:
        assert solve(name, prompt.text) == prompt.answer, prompt
    # Nearly all differ; a passkey in prose has its code and its place only.
    assert len({prompt.text for prompt in prompts}) >= 196


# --- Answers stand where the evidence is, and nowhere else -------------------------------------


@both_forms
@every_task
def test_the_answer_is_in_the_evidence_only(task, prose):
    name, _ = split_name(task)
    for seed in range(200):
        prompt = draw_prompt(task, prose, seed=seed)
        answer = prompt.answer.strip(" .\n")
        text = prompt.text
        if name == "passkey" or (prose and name in ("niah", "lookup", "chain")):
            assert text.count(answer) == 1
            assert text.find(answer) > prompt.source
            removed = draw_prompt(task, prose, seed=seed, removed=True)
            assert answer not in removed.text
        elif name in ("niah", "chain") and task != "niah-16":
            assert text.count(answer) == 1
        if name == "index":
            mark = text.split()[-2] if prose else "@"
            before = text.rpartition(mark)[0] if prose else text
            assert before.count(mark) == 1


def candidates(prompt) -> list[str]:
    answers = [prompt.answer]
    for texts in prompt.foils.values():
        answers += texts
    return list(dict.fromkeys(answers))[:8]


def guesses(text, answers):
    """The first, the last and the commonest answer in a text, and any."""
    in_text = [answer for answer in answers if answer in text] or answers
    return [
        min(in_text, key=text.find),
        max(answers, key=text.rfind),
        max(answers, key=text.count),
        answers[len(text) % len(answers)],
    ]


@every_task
def test_without_the_evidence_guessing_is_at_chance(task):
    prompts = draw_prompts(task, 1000, removed=True)
    right = np.zeros(4, int)
    for prompt in prompts:
        assert "+" not in prompt.text, "no write is left"
        guessed = guesses(prompt.text, sorted(candidates(prompt)))
        right += [guess == prompt.answer for guess in guessed]
    chance = 1 / 2 if task.startswith("flipflop") else 1 / 8
    for hits in right.tolist():
        test = stats.binomtest(hits, 1000, chance, alternative="greater")
        assert test.pvalue > 1e-4, right


@every_task
def test_answers_are_uniform(task):
    name, _ = split_name(task)
    first = [prompt.answer[0] for prompt in draw_prompts(task, 1600)]
    counts = list(collections.Counter(first).values())
    values = {"passkey": 9, "offset": 16, "index": 16, "flipflop": 2}
    assert len(counts) == values.get(name, 8)
    assert stats.chisquare(counts).pvalue > 1e-3, counts


@both_forms
@every_task
def test_foils_are_other_answers_of_the_same_form(task, prose):
    name, _ = split_name(task)
    for prompt in draw_prompts(task, 50, prose):
        answers = candidates(prompt)
        assert len(answers) == (2 if name == "flipflop" else 8)
        assert {len(text) for text in answers} == {len(prompt.answer)}
        if name in ("niah", "chain", "lookup"):
            values = dict.fromkeys(prompt.foils["value"])
            assert all(value.strip() in prompt.text for value in values)
            values.pop(prompt.answer, None)
            first = list(values)[:7]
            assert first or task == "niah-1"
            assert answers[1 : 1 + len(first)] == first
        if name == "offset" and not prose:
            letters = prompt.text[:-2]
            place = len(letters) - 2 ** int(prompt.text[-1])
            start = max(place - 4, 0)
            near = letters[start:place] + letters[place + 1 : place + 5]
            assert prompt.foils["neighbour"] == list(near)


# --- Guesses that read the prompt and match nothing ---------------------------------------------


@pytest.mark.parametrize("removed", [False, True])
@both_forms
@every_task
def test_guesses_are_of_the_answers_that_a_reader_meets(task, prose, removed):
    unit = r"\S+" if prose else r"\d{5}\.|."
    for prompt in draw_prompts(task, 50, prose, removed=removed):
        answers = candidates(prompt)
        values = [answer.strip() for answer in answers]
        met = [word for word in re.findall(unit, prompt.text) if word in values]
        right = values[0]
        chance = 1 / len(values)
        expected = {"chance": chance, "uniform": chance, "first": chance, "last": chance}
        if met:
            expected["uniform"] = 0
            if right in met:
                expected["uniform"] = 1 / len({*met})
            expected["first"] = met[0] == right
            expected["last"] = met[-1] == right
        assert chances_without_retrieval(prompt.text, answers) == expected, prompt


@pytest.mark.parametrize(("task", "others"), [("niah", 3), ("chain", 1)])
@pytest.mark.parametrize("depth", [0, 0.25, 0.75, 1])
def test_the_first_and_the_last_value_are_right_as_the_others_fall_beside(task, others, depth):
    """All `others`, at uniform depths, stand before the evidence with probability depth^others."""
    probabilities = {"first": (1 - depth) ** others, "last": depth**others}
    hits = dict.fromkeys(probabilities, 0)
    for prompt in draw_prompts(task, 300, row=depth):
        chances = chances_without_retrieval(prompt.text, candidates(prompt))
        for rule in hits:
            hits[rule] += int(chances[rule])
    for rule, probability in probabilities.items():
        test = stats.binomtest(hits[rule], 300, probability)
        assert test.pvalue > 1e-3, rule


# --- Places and lengths -----------------------------------------------------------------------

OF_DEPTH = [task for task in (*TASKS, "chain-1") if task != "offset"]


@pytest.mark.parametrize("depth", [*DEPTHS, 0.3])
@pytest.mark.parametrize("task", OF_DEPTH)
def test_evidence_is_exactly_at_its_depth(task, depth):
    """Before unit floor(depth * n): of lines, instructions, symbols of a string, or letters."""
    name, _ = split_name(task)
    k = int(depth * UNITS)
    last = min(k, UNITS - 1)
    for seed in range(20):
        prompt = draw_prompt(task, row=depth, seed=seed)
        text = prompt.text
        source = prompt.source
        before = text[:source]
        if name == "lookup":
            assert len(before) == 3 * k
        elif name == "flipflop":
            assert len(before) == 2 * last
            writes = re.findall(r"\+(\d)", text)
            assert writes[-2:] != 2 * writes[-1:]
        elif name == "duplicate":
            assert len(before) == 1 + last
            assert text.endswith(f"){before[1:]}")
        else:
            assert sum(letter in LETTERS for letter in before) == k
        marks = {"passkey": "#", "niah": f"={text[-1]}", "index": "@", "flipflop": "+"}
        assert text[source:].startswith(marks.get(name, ""))


@both_forms
@every_task
def test_prompts_are_as_long_as_fits_and_never_longer(task, prose):
    name, _ = split_name(task)
    row = TASKS[name].rows[-2]
    sizes = {"lookup": 3, "flipflop": 2, "duplicate": 2}
    unit = 50 if prose else sizes.get(name, 1)
    for length in (900, 1000, 1500) if prose else (160, 200, 333):
        prompt = fit(task, prose, length, row=row, trial=3)
        used = count_bytes(prompt.text + prompt.answer + prompt.rest)
        assert length - unit < used <= length
    assert "seq_len=6" in refusal(fit, task, prose, 6, row=row)


def test_lookup_ends_where_its_keys_do():
    assert len(fit("lookup", length=8000).text) > 7990
    assert "seq_len" in refusal(fit, "lookup", length=9000)


def test_draws_depend_on_what_names_the_prompt_and_on_nothing_else():
    first = fit("niah", True)
    fit("index", True)  # no state is left behind
    assert fit("niah", True) == first
    others = [
        fit("niah-16", True),
        fit("niah", True, length=1001),
        fit("niah", True, row=0.25),
        fit("niah", True, trial=1),
        fit("niah", True, seed=1),
    ]
    answers = {prompt.answer for prompt in others}
    assert len(answers | {first.answer}) == 6
    # With another tokenizer more units fit, of the same draws.
    longer = fit("niah", True, size=lambda text: len(text) // 3)
    assert (longer.answer, longer.foils) == (first.answer, first.foils)
    assert len(longer.text) > len(first.text)


def test_prompts_stay_what_they_are():
    """Changed rules make another FORMAT."""
    texts = []
    for task in VARIANTS:
        for prose in (False, True):
            texts.append(draw_prompt(task, prose, seed=3, n=80))
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()
    assert digest.startswith("3103a60a57540d75")
