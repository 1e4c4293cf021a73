"""Prompts and training windows of the long-context tasks: solved by programs that read them, and without leaks."""

import collections
import hashlib
import re

import numpy as np
import pytest
from scipy import stats

from prope.config import GENERATED, default_config
from prope.data.mixture import open_text, open_windows
from prope.data.store.build import prepare
from prope.data.tasks.draws import LETTERS, Draw
from prope.data.tasks.retrieval import DEPTHS
from prope.data.tasks.tasks import TASKS, VARIANTS, make_prompt
from prope.data.tokenizer import BOS, ByteTokenizer
from prope.errors import UsageError
from prope.runtime.validate import validate

UNITS = 60
ALL = [
    *TASKS,
    *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in TASKS),
]
FORMS = [pytest.param(False, id="compact"), pytest.param(True, id="prose")]


def test_the_config_names_the_tasks_that_are_made():
    assert GENERATED["longcontext"][0] == "mix"
    assert {task.partition("-")[0] for task in VARIANTS} == set(TASKS)
    for name, task in TASKS.items():
        assert name in VARIANTS, "its default"
        assert f"{name}-{task.option}" not in VARIANTS, "one name for each"
    for task in VARIANTS:
        assert len(windows(task).read([0])["tokens"][0]) == 256


def parse_task(task: str) -> tuple[str, int]:
    name, _, option = task.partition("-")
    return name, int(option or TASKS[name].option)


def draw_prompt(task, prose=False, row=None, seed=0, n=UNITS, removed=False):
    name, option = parse_task(task)
    rows = TASKS[name].rows
    return TASKS[name].prompt(
        Draw(seed, (7,), option, prose, removed), n, rows[seed % len(rows)] if row is None else row
    )


def size(text: str) -> int:
    return 1 + len(text.encode())


# --- Programs that answer: they know the rules of README.md, and read the text ------------------------------------


def solve_compact(name: str, text: str) -> str:
    """The answer to the question with which a text in compact form ends."""
    if name == "passkey":
        return re.findall(r"#(\d{5}\.)", text)[0]
    if name == "niah":
        return dict(re.findall(r"=([A-Z])(\d)", text))[text[-1]]
    if name == "lookup":
        return dict(re.findall(r"(?<!/)([A-Za-z]{2})(\d)", text[:-3]))[text[-2:]]
    if name == "chain":
        links, name = dict(re.findall(r"([A-Z]):([A-Z0-7])", text)), text[-1]
        while name in links:
            name = links[name]
        return name
    if name == "offset":
        return text[:-2][-(2 ** int(text[-1]))]
    if name == "index":
        return text[text.index("@") + int(text[-1])]
    if name == "flipflop":
        return re.findall(r"\+(\d)", text)[-1]
    string, copy = text[text.rindex("(") + 1 :].split(")")
    return string[len(copy)]


def solve_prose(name: str, text: str) -> str:
    *lines, question = text.split("\n")
    if name == "passkey":
        (line,) = (line for line in lines if line.startswith("The pass key is"))
        return line.removeprefix("The pass key is") + "\n"
    if name == "niah":
        (line,) = (line for line in lines if line.startswith(question + " "))
        return line.removeprefix(question) + "\n"
    if name == "lookup":
        return dict(line.split(":") for line in lines if ":" in line)[question[:-1]] + "\n"
    if name == "chain":
        links = dict(re.findall(r"Set (\w+) to (\w+)", text))
        name = question.split()[3]
        while name in links:
            name = links[name]
        return f" {name}\n"
    if name == "offset":
        return f" {lines[-1].split()[-int(question.split()[1])]}\n"
    if name == "index":
        _, number, _, mark, _ = question.split()
        (line,) = (line for line in lines if line.startswith(mark + " "))
        return f" {line.split()[int(number)]}\n"
    if name == "flipflop":
        return " " + [line.split()[1] for line in lines if line.startswith("Write")][-1] + "\n"
    words, copy = text.removeprefix("Words:").split("\nAgain:")
    return " " + words.split()[len(copy.split())]


@pytest.mark.parametrize("prose", FORMS)
@pytest.mark.parametrize("task", ALL)
def test_a_program_answers_a_thousand_prompts(task, prose):
    name, solve = parse_task(task)[0], solve_prose if prose else solve_compact
    texts = set()
    for seed in range(1000):
        prompt = draw_prompt(task, prose, seed=seed)
        assert solve(name, prompt.text) == prompt.answer, prompt
        texts.add(prompt.text)
    assert len(texts) > 980, "nearly all differ; a passkey in prose has its code and its place only"


# --- Answers stand where the evidence is, and nowhere else ----------------------------------------------------------


@pytest.mark.parametrize("prose", FORMS)
@pytest.mark.parametrize("task", ALL)
def test_the_answer_is_in_the_evidence_only(task, prose):
    name = parse_task(task)[0]
    for seed in range(200):
        prompt = draw_prompt(task, prose, seed=seed)
        answer, text = prompt.answer.strip(" \n"), prompt.text
        if name == "passkey" or (prose and name in ("niah", "lookup", "chain")):
            assert text.count(answer.rstrip(".")) == 1 and text.find(answer, prompt.source) > 0
            assert answer.rstrip(".") not in draw_prompt(task, prose, seed=seed, removed=True).text
        if (
            name in ("niah", "chain") and not prose
        ):  # other facts may have the value where there are too many
            assert text.count(answer) == 1 or task == "niah-16"
        if name == "index":
            mark = text.split()[-2] if prose else "@"
            assert (text[: -len(mark) - 4] if prose else text).count(mark) == 1


def candidates(prompt) -> list[str]:
    return list(
        dict.fromkeys([prompt.answer, *(text for texts in prompt.foils.values() for text in texts)])
    )[:8]


GUESSES = {
    "first": lambda text, of: min(of, key=lambda c: text.find(c) % 10**9),
    "last": lambda text, of: max(of, key=text.rfind),
    "commonest": lambda text, of: max(of, key=text.count),
    "any": lambda text, of: of[len(text) % len(of)],
}


@pytest.mark.parametrize("task", ALL)
def test_without_the_evidence_guessing_is_at_chance(task):
    name, prompts = parse_task(task)[0], []
    for seed in range(1000):
        prompt = draw_prompt(task, seed=seed, removed=True)
        assert "+" not in prompt.text, "no write is left"
        prompts.append((prompt.text, sorted(candidates(prompt)), prompt.answer))
    for guess, function in GUESSES.items():
        right = sum(function(text, of) == answer for text, of, answer in prompts)
        chance = 1 / 2 if name == "flipflop" else 1 / 8
        assert stats.binomtest(right, 1000, chance, alternative="greater").pvalue > 1e-4, (
            guess,
            right,
        )


@pytest.mark.parametrize("task", ALL)
def test_answers_are_uniform(task):
    name = parse_task(task)[0]
    prompts = [draw_prompt(task, seed=seed) for seed in range(1600)]
    counts = collections.Counter(prompt.answer[:1] for prompt in prompts)
    values = {"passkey": 9, "offset": 16, "index": 16, "flipflop": 2}.get(name, 8)
    assert len(counts) == values and stats.chisquare(list(counts.values())).pvalue > 1e-3, counts


@pytest.mark.parametrize("prose", FORMS)
@pytest.mark.parametrize("task", ALL)
def test_foils_are_other_answers_of_the_same_form(task, prose):
    name = parse_task(task)[0]
    for seed in range(50):
        prompt = draw_prompt(task, prose, seed=seed)
        of = candidates(prompt)
        assert len(of) == len({*of}) == (2 if name == "flipflop" else 8)
        assert {len(text) for text in of} == {len(prompt.answer)}
        if name in ("niah", "chain", "lookup"):
            assert all(value.strip() in prompt.text for value in prompt.foils["value"])
            others = [
                value for value in dict.fromkeys(prompt.foils["value"]) if value != prompt.answer
            ]
            assert of[1 : 1 + len(others)] == others[:7] and (others or task == "niah-1"), (
                "they come first"
            )
        if name == "offset" and not prose:
            place = len(prompt.text) - 2 - 2 ** int(prompt.text[-1])
            assert {*prompt.foils["neighbour"]} == {
                *prompt.text[:-2][max(place - 4, 0) : place + 5]
            } - (
                {prompt.answer}
                if prompt.text[max(place - 4, 0) : place + 5].count(prompt.answer) == 1
                else set()
            )


# --- Places and lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [*DEPTHS, 0.3])
@pytest.mark.parametrize(
    "task", ["passkey", "niah", "lookup", "chain", "chain-1", "index", "flipflop", "duplicate"]
)
def test_evidence_is_exactly_at_its_depth(task, depth):
    """Before unit floor(depth * n): of lines, instructions, symbols of a string, or letters, beside other facts."""
    for seed in range(20):
        prompt = draw_prompt(task, row=depth, seed=seed)
        before, k = prompt.text[: prompt.source], int(depth * UNITS)
        name = parse_task(task)[0]
        if name == "lookup":
            assert len(before) == 3 * k
        elif name == "flipflop":
            writes = re.findall(r"\+(\d)", prompt.text)
            assert len(before) == 2 * min(k, UNITS - 1) and writes[-2:] in (
                ["0", "1"],
                ["1", "0"],
                writes[-1:],
            )
        elif name == "duplicate":
            assert len(before) == 1 + min(k, UNITS - 1) and prompt.text.endswith(")" + before[1:])
        else:
            assert sum(letter in LETTERS for letter in before) == k
        mark = {"passkey": "#", "niah": "=" + prompt.text[-1], "index": "@", "flipflop": "+"}.get(
            name, ""
        )
        assert prompt.text[prompt.source :].startswith(mark)


def test_links_of_a_chain_stand_evenly_from_the_root_to_the_end():
    text = draw_prompt("chain-4", row=0.5, seed=1, n=80).text
    name, places = text[-1], []
    while name.isalpha():
        at = text.index(name + ":")
        places.append(sum(letter in LETTERS for letter in text[:at]))
        name = text[at + 2]
    assert places == [70, 60, 50, 40]


@pytest.mark.parametrize("k", TASKS["offset"].rows)
def test_the_offset_is_the_row(k):
    for seed in range(20):
        text = draw_prompt("offset", row=k, seed=seed).text
        assert text[-2:] == f"<{int(np.log2(k))}" and len(text) == UNITS + 2


@pytest.mark.parametrize("prose", FORMS)
@pytest.mark.parametrize("task", ALL)
def test_prompts_are_as_long_as_fits_and_never_longer(task, prose):
    for length in (900, 1000, 1500) if prose else (160, 200, 333):
        row = TASKS[parse_task(task)[0]].rows[-2]
        prompt = make_prompt(task, prose, length, row, 3, 0, False, size)
        used = size(prompt.text + prompt.answer + prompt.rest)
        unit = (
            50
            if prose
            else {"lookup": 3, "flipflop": 2, "duplicate": 2}.get(parse_task(task)[0], 1)
        )
        assert length - unit < used <= length
    with pytest.raises(UsageError, match=f"seq_len=6: {task} needs at least \\d+ tokens"):
        make_prompt(task, prose, 6, row, 0, 0, False, size)


def test_lookup_ends_where_its_keys_do():
    assert size(make_prompt("lookup", False, 8000, 0.5, 0, 0, False, size).text) > 7990
    with pytest.raises(
        UsageError, match="facts need different names, of 2,704 that there are: take a shorter"
    ):
        make_prompt("lookup", False, 9000, 0.5, 0, 0, False, size)


def test_draws_depend_on_what_names_the_prompt_and_on_nothing_else():
    def prompt(task="niah", prose=True, length=1000, row=0.5, trial=0, seed=0, size=size):
        return make_prompt(task, prose, length, row, trial, seed, False, size)

    first = prompt()
    prompt("index")  # no state is left behind
    assert prompt() == first
    others = [
        prompt(task="niah-16"),
        prompt(length=1001),
        prompt(row=0.25),
        prompt(trial=1),
        prompt(seed=1),
    ]
    assert len({p.answer for p in [first, *others]}) == 6
    other_tokenizer = prompt(size=lambda text: len(text) // 3)  # more units fit, of the same draws
    assert other_tokenizer[1:3] == first[1:3] and other_tokenizer.text.endswith(
        first.text.splitlines()[-1]
    )
    assert other_tokenizer.text.replace("\n", "").count("The") > first.text.count("The")


def test_prompts_stay_what_they_are():
    """Changed rules make another FORMAT."""
    texts = [draw_prompt(task, prose, seed=3, n=80) for task in VARIANTS for prose in (False, True)]
    assert hashlib.sha256(repr(texts).encode()).hexdigest()[:16] == "5729a5f84136c117"


def test_filler_has_no_sentence_twice_and_no_word_of_a_question():
    lines = Draw(0, (1,), prose=True).filler(3000)
    assert len({*lines}) == 3000 and {len(line.split()) for line in lines} == {6}
    words = {word.lower() for line in lines for word in line.split()}
    assert not words & {
        "code",
        "pass",
        "key",
        "set",
        "value",
        "word",
        "write",
        "read",
        "ignore",
        "list",
        "symbol",
        "of",
    }
    assert not any(character.isdigit() for line in lines for character in line) and len(words) == 65


# --- Training windows ------------------------------------------------------------------------------------------------


def data_of(task, T=256, **fields):
    config = default_config()
    config.data.update({"dataset": f"longcontext/{task}", "seq_len": T} | fields)
    validate(config)
    return config.data


def windows(task, T=256, split="train", **fields):
    return open_windows(data_of(task, T, **fields), 260, split)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("task", [*ALL, "mix"])
def test_a_program_solves_every_window(task, split):
    for T in (64, 400):
        of = windows(task, T, split)
        batch, names, number = of.read(range(30)), set(), 0
        for row in range(30):
            tokens, weights, window = batch["tokens"][row], batch["weights"][row], of.window(row)
            text = ByteTokenizer().decode([*tokens, batch["targets"][row][-1]])
            assert tokens[0] == BOS and len(text) == T and BOS not in tokens[1:]
            assert (batch["targets"][row][:-1] == tokens[1:]).all() and (
                window.task >= 0
            ).tolist() == weights.tolist()
            places = np.flatnonzero(weights)
            name = list(TASKS)[window.task[places[0]]] if len(places) else None
            names.add(name)
            number += len(places)
            for place in places:  # the character of this index in the text is its target
                if name == "passkey":
                    start = text.rindex("#", 0, place) + 1
                    assert text[place] == solve_compact(name, text[:start])[place - start]
                else:
                    assert text[place] == solve_compact(name, text[:place]), (row, place)
        assert names - {None} == ({*TASKS} if task == "mix" else {parse_task(task)[0]})
        assert number > 30 or T == 64


@pytest.mark.parametrize("task", ["niah", "chain-1", "lookup"])
def test_distances_are_log_uniform_and_keys_are_asked_once(task):
    distances, numbers, of = [], [], windows(task, 512)
    for row in range(200):
        window = of.window(row)
        text = ByteTokenizer().decode(window.stream)
        questions = re.findall(r"\?[A-Z]|&[A-Z]|/[A-Za-z]{2}", text)
        assert len({*questions}) == len(questions) > 10 * (task == "lookup")
        numbers.append(len(questions))
        distances += window.distance[window.task >= 0].tolist()
    octaves = np.histogram(distances, [8, 16, 32, 64, 128, 256])[0]
    assert octaves.min() > 0.5 * octaves.max(), "each octave has about as many"
    if task != "lookup":
        assert min(numbers) == 1 and max(numbers) > 20, (
            "and each octave of numbers of facts about as many windows"
        )
        assert 20 < sum(number < 3 for number in numbers) < 100


@pytest.mark.parametrize("task", TASKS)
def test_distances_are_those_of_the_text(task):
    window = windows(task).window(5)
    text = ByteTokenizer().decode(window.stream)
    for place in np.flatnonzero(window.task >= 0):
        evidence = text[
            place - 1 - window.distance[place] : place
        ]  # from the question's last token
        at = {
            "passkey": 1,
            "niah": 2,
            "lookup": 2,
            "chain": 2,
            "index": text[place - 1],
            "flipflop": 1,
        }.get(task, 0)
        assert evidence[int(at)] == text[place]
        key = {
            "niah": "=" + text[place - 1],
            "lookup": text[place - 2 : place],
            "index": "@",
            "flipflop": "+",
        }
        assert evidence.startswith(key.get(task, "")) and (evidence[1] == ":" or task != "chain")
        assert "+" not in evidence[1:], "of writes the latest"


def test_splits_share_no_window_and_seeds_differ():
    train, validation = windows("mix"), windows("mix", split="validation")
    seen = {train.window(train.at(i, seed)).stream.tobytes() for i in range(100) for seed in (0, 1)}
    assert len(seen) == 200 and not seen & {
        validation.window(i).stream.tobytes() for i in range(100)
    }
    assert train.store.fingerprint != windows("niah").store.fingerprint


def test_a_mixture_with_text(tmp_path):
    """Each generated source has the windows that it has alone, whatever the seed; shares are those of the loss."""
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} the rain falls on the hills. " * 20)
    parts = [(0.5, "files"), (0.25, "longcontext/niah"), (0.25, "longcontext/chain")]
    mixture = tuple({"weight": weight, "dataset": name} for weight, name in parts)
    mixture[0]["data_dir"] = str(tmp_path / "text")
    data = data_of("", 128, dataset="mixture", mixture=mixture, cache_dir=str(tmp_path / "cache"))
    mixed = open_windows(data, 260, "train")
    alone = [windows(task, 128) for task in ("niah", "chain")]
    for seed in (0, 3):
        batch = mixed.read([mixed.at(i, seed) for i in range(8)])
        found = [row.tobytes() for row in batch["tokens"]]
        for of in alone:
            for i in range(2):
                row = found.index(of.window(of.at(i, seed)).stream[:-1].tobytes())
                assert (
                    batch["weights"][row].tolist() == (of.window(of.at(i, seed)).task >= 0).tolist()
                )
        assert sum("rain" in ByteTokenizer().decode(row) for row in batch["tokens"]) == 4
    answers = [of.read(range(100))["weights"].mean() for of in alone]
    expected = np.array([0.5, 0.25 * answers[0], 0.25 * answers[1]])
    np.testing.assert_allclose(mixed.shares, expected / expected.sum(), rtol=0.2)
    config = default_config()
    config.data = data
    assert prepare(config)["fingerprint"] == mixed.store.fingerprint
    held_out = open_windows(data, 260, "validation")
    assert held_out.count == 1024 + held_out.sources[0].count
    assert held_out.read([held_out.count - 1])["weights"].sum() > 0
    with pytest.raises(
        UsageError, match="--split=train: mixture is generated, without end: only validation"
    ):
        open_text(data, 260, "train", data, {})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"dataset": "longcontext/nia"},
            r"longcontext/nia: there is no such task \(did you mean longcontext/niah\?\); ",
        ),
        (
            {"dataset": "longcontext/niah-5"},
            "there is no such task.*there are longcontext/mix, longcontext/passkey",
        ),
        ({"tokenizer": "a.model"}, "data.tokenizer=a.model: has no effect with longcontext data"),
        (
            {
                "tokenizer": "a.model",
                "dataset": "mixture",
                "mixture": ({"weight": 1, "dataset": "longcontext/niah"},),
            },
            "data.tokenizer=a.model: must be byte, of which longcontext/niah is made",
        ),
        ({"data_dir": "x"}, "data.data_dir=x: has no effect with data.dataset=longcontext/niah"),
    ],
)
def test_what_a_config_cannot_say(fields, says):
    with pytest.raises(UsageError, match=says):
        windows("niah", **fields)


def test_what_is_too_small():
    data = default_config().data
    data.dataset = "longcontext/niah"
    with pytest.raises(
        UsageError, match="vocab_size=259: longcontext data has 260 ids; set .* to 260 or more"
    ):
        open_windows(data, 259, "train")
    with pytest.raises(
        UsageError, match="seq_len=63: windows of longcontext/niah need at least 64"
    ):
        windows("niah", 63)
