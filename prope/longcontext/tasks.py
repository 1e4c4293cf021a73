"""The eight tasks. To add one: a function that draws facts and questions, and a line in TASKS; README.md shows how."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prope.errors import UsageError, nearest
from prope.longcontext.draws import LETTERS, Draw, Prompt

FORMAT = 1  # of the rules by which prompts are drawn
DEPTHS = tuple(i / 8 for i in range(9))
Answers = list[
    tuple[int, int, int]
]  # in a training window: (first character, characters, distance to the evidence)


class Kind(NamedTuple):
    """A task: what makes its prompts and training windows, and what may be asked of it."""

    prompt: Callable[[Draw, int, float], Prompt]  # of so many units of filler, for a row
    window: Callable[
        [Draw, int], tuple[str, Answers]
    ]  # of so many characters or more, in compact form
    options: tuple[int, ...] = (0,)  # N of NAME-N, the default first
    rows: tuple[float, ...] = DEPTHS


# --- Tasks of facts in filler ---------------------------------------------------------------------------------------


class Episode(NamedTuple):
    """Facts, in their order, and the questions that they answer."""

    facts: list[str]
    questions: list[tuple[str, str]]  # each with its answer; a prompt asks the first


Episodes = Callable[
    [Draw, int], tuple[list[Episode], list[str]]
]  # draws so many, and other answers


def pairs(
    compact, prose, digits: int = 7, double: bool = False, chained: bool = False, repeat: int = 1
) -> Episodes:
    """Makes episodes of keys with values, by templates (fact, question) of both forms.

    Keys have `double` names, values so many digits. `chained`: the value of a key is the key before, h times.
    """

    def draw_episodes(draw: Draw, count: int) -> tuple[list[Episode], list[str]]:
        fact, question = prose if draw.prose else compact
        h = draw.option if chained else 1
        names = draw.names(count * h, double)
        values, unused = draw.values(len(names) // h, digits)
        episodes = []
        for i, value in enumerate(values):
            own = names[i * h : (i + 1) * h]
            facts = [
                fact.format(name, to) for name, to in zip(own, [value, *own[:-1]], strict=True)
            ]
            episodes.append(Episode(facts, [(question.format(own[-1]), value)] * repeat))
        return episodes, unused

    return draw_episodes


def marked(draw: Draw, count: int) -> tuple[list[Episode], list[str]]:
    """Draws one mark before four symbols, whatever `count` says, and asks for each of them by its number."""
    symbols, unused = draw.symbols(4)
    fact, question = "@" + "".join(symbols), ">{}"
    if draw.prose:
        (mark,) = draw.names(1)
        fact, question = f"{mark} {' '.join(symbols)}\n", f"Word {{}} after {mark} is"
    return [
        Episode([fact], [(question.format(1 + i), symbols[i]) for i in draw.distinct(4, 4)])
    ], unused


def _insert(units: list[str], items: list[tuple[float, str]]) -> tuple[str, list[int]]:
    """Puts items (place, text) before units: the whole text, and the character at which each item starts."""
    text, last, starts = "", 0, [0] * len(items)
    for k in sorted(range(len(items)), key=lambda k: items[k][0]):
        text, last = text + "".join(units[last : int(items[k][0])]), int(items[k][0])
        starts[k], text = len(text), text + items[k][1]
    return text + "".join(units[last:]), starts


def of_facts(
    draw_episodes: Episodes, count: int = 0, draw_filler: Callable = Draw.filler, options=(0,)
) -> Kind:
    """Makes a task of facts in filler: `count` episodes in a prompt, else its option; 0: there is nothing but facts."""

    def prompt(draw: Draw, n: int, depth: float) -> Prompt:
        """Asks for an episode whose facts stand before unit floor(depth * n), and evenly from there to the end."""
        number = count or draw.option
        (asked, *others), unused = draw_episodes(draw, number or n + 1)
        (question, answer), *neighbours = asked.questions
        foils = {
            "neighbour": [a for _, a in neighbours],
            "value": [a for e in others for _, a in e.questions],
        }
        units, others = (
            (draw_filler(draw, n), others) if number else ([other.facts[0] for other in others], [])
        )
        asked, items = asked._replace(facts=[""]) if draw.removed else asked, []
        for start, (facts, _) in zip(
            [depth, *draw.stream().random(len(others))], (asked, *others), strict=True
        ):
            items += [
                ((start + (1 - start) * i / len(facts)) * n, fact) for i, fact in enumerate(facts)
            ]
        text, (source, *_) = _insert(units, items)
        return draw.prompt(text + question, answer, source, foils | {"unused": unused})

    def window(draw: Draw, T: int) -> tuple[str, Answers]:
        """Scatters facts over filler, and asks for them at distances that are uniform on a logarithmic scale."""
        rng, items, asked, dense = draw.stream(), [], [], not (count or draw.option)
        most = 1 if count == 1 else T // 16
        number = most if dense else int(np.exp(rng.uniform(0, math.log(most + 1))))
        episodes, _ = draw_episodes(draw, number + dense * T // 3)
        units = (
            [line for facts, _ in episodes[number:] for line in facts]
            if dense
            else draw_filler(draw, T)
        )
        size = sum(
            len("".join([*facts, *sum(questions, ())])) for facts, questions in episodes[:number]
        )
        n = (T - size) // len(units[0])
        for facts, questions in episodes[:number]:
            distances, source = np.exp(rng.uniform(0, math.log(n), len(questions))), len(items)
            start = rng.uniform(0, n - distances.max())
            items += [
                (start + distances.min() * i / len(facts), fact) for i, fact in enumerate(facts)
            ]
            for distance, (question, answer) in zip(distances, questions, strict=True):
                asked.append((len(items), len(question), len(draw.complete(answer)), source))
                items.append((start + distance, question + draw.complete(answer)))
        text, starts = _insert(units, items)
        return text, [
            (starts[k] + skip, size, starts[k] + skip - starts[source])
            for k, skip, size, source in asked
        ]

    return Kind(prompt, window, options)


# --- Tasks whose text itself is the evidence ----------------------------------------------------------------------


def offset(draw: Draw, n: int, k: float) -> Prompt:
    """Asks for the symbol k places before the end; in prose two short lists come first, as examples."""
    k, (symbols, unused) = int(k), draw.symbols(16)
    *examples, units = (draw.pick(symbols, size) for size in (k + 2, k + 2, n))
    answer, near = units[n - k], units[max(n - k - 4, 0) : n - k] + units[n - k + 1 : n - k + 5]
    if draw.removed:
        units[n - k] = draw.pick(symbols, 1)[0]
    text, source = "".join(units) + f"<{k.bit_length() - 1}", n - k
    if draw.prose:
        question = f"\nSymbol {k} from the end is"
        lists = [
            f"List: {' '.join(words)}{question}{draw.complete(words[-k])}"
            for words in (*examples, units)
        ]
        text = "".join(lists).removesuffix(draw.complete(units[-k]))
        source = len(text) - len(" ".join(units[-k:]) + question)
    return draw.prompt(
        text, answer, source, {"neighbour": near, "filler": symbols, "unused": unused}
    )


def offset_window(draw: Draw, T: int) -> tuple[str, Answers]:
    """Asks after four to twelve letters each, for one that stands at a power of two."""
    rng, text, answers = draw.stream(), "", []
    while len(text) < T:
        text += "".join(draw.pick(LETTERS, rng.integers(4, 13)))
        c = int(rng.choice([c for c in range(6) if 2**c <= len(text) and text[-(2**c)] in LETTERS]))
        answers.append((len(text) + 2, 1, 2**c + 2))
        text += f"<{c}{text[-(2**c)]}"
    return text, answers


def _instructions(draw: Draw, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws kinds (0 write, 1 read, 2 ignore) and bits, and finds the latest write at each place: [n] each."""
    rng, ignores = draw.stream(), draw.option / 100
    kinds, bits = (
        rng.choice(3, n, p=[(1 - ignores) / 2, (1 - ignores) / 2, ignores]),
        rng.integers(2, size=n),
    )
    kinds[0] = 0
    latest = np.maximum.accumulate(np.where(kinds == 0, np.arange(n), 0))
    return kinds, np.where(kinds == 1, bits[latest], bits), latest


def flipflop(draw: Draw, n: int, depth: float) -> Prompt:
    """Reads the latest write, at floor(depth * n), of another bit than before; only ignores with random bits follow."""
    kinds, bits, latest = _instructions(draw, n)
    last = min(int(depth * n), n - 1)
    bits[last] = 1 - bits[latest[last - 1]] if last else bits[0]
    kinds[last], kinds[last + 1 :], answer = 0, 2, str(bits[last])
    if draw.removed:
        kinds[:], bits = 2, draw.stream().integers(2, size=n)
    names, form = (("Write", "Read", "Ignore"), "{} {}\n") if draw.prose else ("+!-", "{}{}")
    units = [form.format(names[kind], bit) for kind, bit in zip(kinds, bits, strict=True)]
    return draw.prompt(
        "".join(units) + names[1], answer, len("".join(units[:last])), {"value": ["0", "1"]}
    )


def flipflop_window(draw: Draw, T: int) -> tuple[str, Answers]:
    """Has a loss on every read."""
    kinds, bits, latest = _instructions(draw, T // 2 + 1)
    text = "".join("+!-"[kind] + str(bit) for kind, bit in zip(kinds, bits, strict=True))
    return text, [
        (2 * i + 1, 1, 2 * int(i - latest[i]) + 1) for i in np.flatnonzero(kinds == 1).tolist()
    ]


def duplicate(draw: Draw, n: int, depth: float) -> Prompt:
    """Copies a string of eight symbols, up to its symbol floor(depth * n), which is asked for."""
    opens, asks, space = ("Words:", "\nAgain:", " ") if draw.prose else ("(", ")", "")
    symbols = [space + symbol for symbol in (draw.words(8) if draw.prose else LETTERS[:8])]
    string, k = draw.pick(symbols, n), min(int(depth * n), n - 1)
    before, answer, after = "".join(string[:k]), string[k], "".join(string[k + 1 :])
    shown = draw.pick(symbols, 1)[0] if draw.removed else answer
    text, source = opens + before + shown + after + asks + before, len(opens + before)
    return Prompt(text, answer, {"value": symbols}, source, after)


def duplicate_window(draw: Draw, T: int) -> tuple[str, Answers]:
    """Copies strings of lengths that are uniform on a logarithmic scale, every symbol with a loss."""
    rng, text, answers = draw.stream(), "", []
    while len(text) < T:
        string = "".join(
            draw.pick(LETTERS[:8], int(np.exp(rng.uniform(math.log(8), math.log(T // 2)))))
        )
        text += f"({string})"
        answers.append((len(text), len(string), len(string) + 1))
        text += string
    return text, answers


_PASSKEY = pairs(("#{1}.", "#"), ("The pass key is {1}\n", "The pass key is"), digits=5, repeat=3)
_NIAH = pairs(("={}{}", "?{}"), ("The code of {} is {}\n", "The code of {} is"))
_LOOKUP = pairs(("{}{}", "/{}"), ("{}: {}\n", "{}:"), double=True)
_CHAIN = pairs(("{}:{}", "&{}"), ("Set {} to {}\n", "The value of {} is"), chained=True)
TASKS = {
    "passkey": of_facts(_PASSKEY, count=1, draw_filler=Draw.cycle),
    "niah": of_facts(_NIAH, options=(4, 1, 16)),
    "lookup": of_facts(_LOOKUP, options=(0, 16)),
    "chain": of_facts(_CHAIN, count=2, options=(2, 1, 4)),
    "offset": Kind(offset, offset_window, rows=(1, 2, 4, 8, 16, 32)),
    "index": of_facts(marked, count=1),
    "flipflop": Kind(flipflop, flipflop_window, options=(80, 10, 98)),
    "duplicate": Kind(duplicate, duplicate_window),
}
VARIANTS = [
    name + f"-{n}" * (i > 0) for name, kind in TASKS.items() for i, n in enumerate(kind.options)
]


def parse_tasks(texts: str) -> list[str]:
    """Reads --tasks: all, or a list of NAME and NAME-N."""
    tasks = list(TASKS) if texts == "all" else texts.split(",")
    for task in tasks:
        if task not in VARIANTS:
            there_are = f"there are {', '.join(VARIANTS)}"
            raise UsageError(
                f"--tasks={texts}: there is no task {task}{nearest(task, VARIANTS)}; {there_are}"
            )
    return tasks


def make_prompt(
    task: str,
    prose: bool,
    length: int,
    row: float,
    trial: int,
    seed: int,
    removed: bool,
    size: Callable[[str], int],
) -> Prompt:
    """Makes the prompt with as many units of filler as fit into `length` tokens with its answer.

    The other arguments, but for `size`, which counts the tokens of a text with <bos>, determine all draws.
    """
    name, _, option = task.partition("-")
    option = int(option or TASKS[name].options[0])
    key = (FORMAT, list(TASKS).index(name), option, prose, length, round(row * 2**20), trial)

    def make(n: int) -> Prompt:
        return TASKS[name].prompt(Draw(seed, key, option, prose, removed), n, row)

    def measure(n: int) -> int:
        prompt = make(n)
        return size(prompt.text + prompt.answer + prompt.rest)

    least = int(
        max(2, *TASKS[name].rows)
    )  # units of the shortest prompt: an offset reaches back over so many
    low, high, shortest, n = (
        least,
        16 * length,
        measure(least),
        least + 1,
    )  # `low` units fit, and `high` do not
    if shortest > length:
        raise UsageError(
            f"--seq_len={length}: {task} needs at least {shortest} tokens; take longer ones"
        )
    while high - low > 1:
        used = measure(n)
        low, high = (n, high) if used <= length else (low, n)
        n = least + int(
            (length - shortest) * (n - least) / max(used - shortest, 1)
        )  # if all units were alike
        n = min(max(n, low + 1), high - 1)
    return make(low)
