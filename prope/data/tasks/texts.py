"""Tasks whose text itself is the evidence: symbols at an offset, a register, a copied string."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prope.data.tasks.draws import LETTERS, Answer, Draw, Prompt, log_uniform
from prope.data.tasks.retrieval import DEPTHS

OFFSETS = (1, 2, 4, 8, 16, 32)
Text = tuple[str, list[Answer]]  # a training window and its answers


class Task(NamedTuple):
    """A task whose text itself is the evidence; a `Retrieval` has the same attributes."""

    prompt: Callable[[Draw, int, float], Prompt]  # (draw, units, depth) -> a prompt
    window: Callable[[Draw, int], Text]  # (draw, least characters) -> compact text
    option: int = 0  # N of NAME-N, if the name has none
    rows: tuple[float, ...] = DEPTHS


def offset(draw: Draw, n: int, k: float) -> Prompt:
    """Asks for the symbol k places before the end; in prose two short lists are examples."""
    k = int(k)
    place = n - k
    symbols, unused = draw.symbols(16)
    examples = [draw.pick(symbols, k + 2) for _ in range(2)]
    units = draw.pick(symbols, n)
    answer = units[place]
    first = max(place - 4, 0)
    neighbours = units[first:place] + units[place + 1 : place + 5]
    foils = {"neighbour": neighbours, "filler": symbols, "unused": unused}
    if draw.removed:
        (units[place],) = draw.pick(symbols, 1)
    if not draw.prose:
        text = f"{''.join(units)}<{OFFSETS.index(k)}"
        return draw.prompt(text, answer, place, foils)
    question = f"\nSymbol {k} from the end is"
    text = ""
    for words in examples:
        text += f"List: {' '.join(words)}{question}{draw.complete(words[-k])}"
    text += f"List: {' '.join(units)}{question}"
    evidence = " ".join(units[place:]) + question
    source = len(text) - len(evidence)
    return draw.prompt(text, answer, source, foils)


def offset_window(draw: Draw, T: int) -> Text:
    """Asks after four to twelve letters each, for one that stands at a power of two."""
    rng = draw.stream()
    text = ""
    answers = []
    while len(text) < T:
        text += "".join(draw.pick(LETTERS, rng.integers(4, 13)))
        powers = [c for c in range(6) if 2**c <= len(text) and text[-(2**c)] in LETTERS]
        c = int(rng.choice(powers))
        answer = text[-(2**c)]
        text += f"<{c}"
        answers.append(Answer(len(text), 2**c + 2))
        text += answer
    return text, answers


def _draw_instructions(draw: Draw, n: int):
    """Draws kinds (0 write, 1 read, 2 ignore) and bits; finds the latest write of each: [n]."""
    rng = draw.stream()
    ignore = draw.option / 100
    other = (1 - ignore) / 2
    kinds = rng.choice(3, n, p=[other, other, ignore])
    bits = rng.integers(2, size=n)
    kinds[0] = 0
    latest = np.maximum.accumulate(np.where(kinds == 0, np.arange(n), 0))
    return kinds, np.where(kinds == 1, bits[latest], bits), latest


_INSTRUCTIONS = ("Write ", "Read ", "Ignore ")


def _write_instructions(draw: Draw, kinds, bits) -> list[str]:
    names = _INSTRUCTIONS if draw.prose else "+!-"
    end = "\n" if draw.prose else ""
    return [f"{names[kind]}{bit}{end}" for kind, bit in zip(kinds, bits, strict=True)]


def flipflop(draw: Draw, n: int, depth: float) -> Prompt:
    """Reads the latest write, at floor(depth * n), of another bit than the one before.

    Only ignores with random bits follow it.
    """
    kinds, bits, latest = _draw_instructions(draw, n)
    last = min(int(depth * n), n - 1)
    if last:
        bits[last] = 1 - bits[latest[last - 1]]
    answer = str(bits[last])
    kinds[last] = 0
    kinds[last + 1 :] = 2
    if draw.removed:
        kinds[:] = 2
        bits = draw.stream().integers(2, size=n)
    units = _write_instructions(draw, kinds, bits)
    question = "Read" if draw.prose else "!"
    source = len("".join(units[:last]))
    return draw.prompt("".join(units) + question, answer, source, {"value": ["0", "1"]})


def flipflop_window(draw: Draw, T: int) -> Text:
    """Has a loss on every read."""
    kinds, bits, latest = _draw_instructions(draw, T // 2 + 1)
    units = _write_instructions(draw, kinds, bits)
    answers = [Answer(2 * i + 1, 2 * (i - latest[i]) + 1) for i in np.flatnonzero(kinds == 1)]
    return "".join(units), answers


def duplicate(draw: Draw, n: int, depth: float) -> Prompt:
    """Copies a string of eight symbols, up to its symbol floor(depth * n), which is asked for."""
    if draw.prose:
        opens = "Words:"
        closes = "\nAgain:"
        symbols, unused = ([f" {word}" for word in words] for words in draw.symbols(8))
    else:
        opens = "("
        closes = ")"
        symbols = list(LETTERS[:8])
        unused = []
    string = draw.pick(symbols, n)
    k = min(int(depth * n), n - 1)
    before = "".join(string[:k])
    after = "".join(string[k + 1 :])
    shown = draw.pick(symbols, 1)[0] if draw.removed else string[k]
    text = f"{opens}{before}{shown}{after}{closes}{before}"
    foils = {"value": symbols, "unused": unused}
    return Prompt(text, string[k], foils, len(opens + before), after)


def duplicate_window(draw: Draw, T: int) -> Text:
    """Copies strings of log-uniform lengths, every symbol with a loss."""
    rng = draw.stream()
    text = ""
    answers = []
    while len(text) < T:
        size = int(log_uniform(rng, 8, T // 2))
        string = "".join(draw.pick(LETTERS[:8], size))
        text += f"({string})"
        answers.append(Answer(len(text), size + 1, size))
        text += string
    return text, answers
