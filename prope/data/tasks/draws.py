"""What tasks are drawn from: names, values and filler, in two forms.

compact  every symbol is an ASCII character, so the byte tokenizer is the symbol table; filler is
         letters from a to p
prose    lines of English of our own grammar, for models of text with any tokenizer; names and
         words are syllables

Every method of `Draw` takes a new stream of random numbers, so that a larger count keeps the first
draws.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from prope.errors import UsageError

Key = tuple[int, ...]

LETTERS = "abcdefghijklmnop"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
# A sentence takes a word of each: an adjective, a noun, a verb and a noun.
_GRAMMAR = [
    words.split()
    for words in (
        "brave calm clever gentle happy honest kind lively "
        "loyal modest patient polite proud quiet shy young",
        "artist baker captain doctor farmer gardener hunter judge "
        "miller painter pilot poet sailor tailor teacher weaver",
        "admires borrows brings buys carries cleans draws finds "
        "hides holds likes loses paints repairs sells sends",
        "apple basket blanket bottle candle carpet chair coat "
        "drum hammer kettle lamp ladder mirror pillow spoon",
    )
]
_CYCLE = [
    "The rain falls on the hills\n",
    "The river runs to the sea\n",
    "A bird sleeps in the tree\n",
    "Snow lies on the far side\n",
]
# Unused values, of which answers of equally many tokens are chosen as foils.
_SPARE = 256
_SPARE_WORDS = 2048  # few words of two syllables are a single token


class Prompt(NamedTuple):
    """A text, the answer that it asks for, and wrong answers."""

    text: str  # all between <bos> and the answer
    answer: str  # with what ends it
    # By kind, likely mistakes first: answers of as many bytes, the right one among them.
    foils: dict[str, list[str]]
    source: int  # the character of `text` at which the evidence begins
    rest: str = ""  # what follows the answer


class Answer(NamedTuple):
    """The place of an answer in the text of a training window."""

    start: int  # its first character
    distance: int  # characters from there back to the evidence
    size: int = 1  # characters


class Window(NamedTuple):
    """A training window and its answers."""

    stream: np.ndarray  # int32 [T + 1], the tokens and the target of the last one
    task: np.ndarray  # int8 [T], the index of a task where the target is its answer; elsewhere -1
    # int32 [T], tokens from a question back to where its answer can be read; elsewhere 0
    distance: np.ndarray


def window_without_answers(stream: np.ndarray) -> Window:
    """Makes a window whose answers are still to be entered."""
    T = len(stream) - 1
    return Window(stream, np.full(T, -1, np.int8), np.zeros(T, np.int32))


def make_rng(seed: int, key: Key) -> np.random.Generator:
    """Makes a generator whose numbers no other (seed, key) has."""
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return np.random.Generator(np.random.PCG64(sequence))


def log_uniform(rng: np.random.Generator, low: float, high: float, size=None):
    """Draws from low to high, uniformly on a logarithmic scale."""
    return np.exp(rng.uniform(math.log(low), math.log(high), size))


@dataclasses.dataclass
class Draw:
    """The random draws of one prompt or window: a function of (seed, key) alone."""

    seed: int
    key: Key
    option: int = 0  # N of a task NAME-N
    prose: bool = False
    removed: bool = False  # whether the evidence is to be left out, as a control

    def __post_init__(self):
        self._root = make_rng(self.seed, self.key)

    def stream(self) -> np.random.Generator:
        """Returns another stream of random numbers."""
        return self._root.spawn(1)[0]

    def pick(self, units, count: int) -> list[str]:
        """Draws from `units` with replacement."""
        return [units[i] for i in self.stream().integers(len(units), size=count)]

    def distinct(self, high: int, count: int) -> list[int]:
        """Draws distinct numbers below `high`."""
        if count > high:
            problem = f"{count:,} facts need different names, of {high:,} that there are"
            raise UsageError(f"{problem}: take a shorter seq_len")
        rng = self.stream()
        numbers = {}
        while len(numbers) < count:
            numbers |= dict.fromkeys(rng.integers(high, size=256).tolist())
        return list(numbers)[:count]

    def words(self, count: int, syllables: int = 2) -> list[str]:
        """Draws distinct words of no language, of two letters a syllable."""
        base = len(_SYLLABLES)
        return [
            "".join(_SYLLABLES[number // base**k % base] for k in range(syllables))
            for number in self.distinct(base**syllables, count)
        ]

    def names(self, count: int, double: bool = False) -> list[str]:
        """Draws distinct names: a word or a capital letter, of which there are 26; or two."""
        if self.prose:
            words = self.words(count, syllables=4 if double else 3)
            if double:
                words = [f"{word[:4]} {word[4:]}" for word in words]
            return [word.title() for word in words]
        if double:
            numbers = self.distinct(52**2, count)
            return [_ALPHABET[i // 52] + _ALPHABET[i % 52] for i in numbers]
        return [_ALPHABET[i] for i in self.distinct(26, min(count, 26))]

    def values(self, count: int, digits: int | None = None) -> tuple[list[str], list[str]]:
        """Draws (codes, other codes), all distinct.

        By default codes have seven digits, and in compact form one from 0 to 7, so that of more
        than eight codes some are equal.
        """
        if digits is None and not self.prose:
            every = list(map(str, self.distinct(8, 8)))
            codes = every[:count] if count <= 8 else self.pick(every, count)
            return codes, every
        least = 10 ** ((digits or 7) - 1)
        codes = [str(least + i) for i in self.distinct(9 * least, count + _SPARE)]
        return codes[:count], codes[count:]

    def symbols(self, count: int) -> tuple[list[str], list[str]]:
        """Draws (symbols, unused ones), all distinct: filler letters, or words."""
        if self.prose:
            drawn = self.words(count + _SPARE_WORDS)
        else:
            drawn = [LETTERS[i] for i in self.distinct(16, 16)]
        return drawn[:count], drawn[count:]

    def filler(self, count: int) -> list[str]:
        """Draws units of filler: random letters, or sentences of which none stands twice."""
        if not self.prose:
            return self.pick(LETTERS, count)
        start, step = self.stream().integers(2**15, size=2).tolist()
        units = []
        for i in range(count):
            number = (start + i * (2 * step + 1)) % 2**16
            words = (words[number // 16**k % 16] for k, words in enumerate(_GRAMMAR))
            units.append("The {} {} {} the {}\n".format(*words))
        return units

    def cycle(self, count: int) -> list[str]:
        """Repeats the same units: sixteen letters, or four sentences."""
        units = _CYCLE if self.prose else self.filler(16)
        return [units[i % len(units)] for i in range(count)]

    def complete(self, answer: str) -> str:
        """Ends an answer: by a newline in prose, after a space; else by a dot if it is long."""
        if self.prose:
            return f" {answer}\n"
        return f"{answer}." if len(answer) > 1 else answer

    def prompt(self, text: str, answer: str, source: int, foils: dict[str, list[str]]) -> Prompt:
        """Makes a prompt; completes its answers."""
        completed = {kind: list(map(self.complete, texts)) for kind, texts in foils.items()}
        return Prompt(text, self.complete(answer), completed, source)
