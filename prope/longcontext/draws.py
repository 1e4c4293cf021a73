"""What a prompt is drawn from: names, values and filler, in two forms.

compact  every symbol is an ASCII character, so the byte tokenizer is the symbol table; filler is letters from a to p
prose    lines of English of our own grammar, for models of text with any tokenizer; names and words are syllables

Every method draws from a stream of random numbers of its own: of two counts, the first draws are the same.
"""

from typing import NamedTuple

import numpy as np

from prope.errors import UsageError

LETTERS = "abcdefghijklmnop"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_GRAMMAR = """  a sentence takes a word of each line
    brave calm clever gentle happy honest kind lively loyal modest patient polite proud quiet shy young
    artist baker captain doctor farmer gardener hunter judge miller painter pilot poet sailor tailor teacher weaver
    admires borrows brings buys carries cleans draws finds hides holds likes loses paints repairs sells sends
    apple basket blanket bottle candle carpet chair coat drum hammer kettle lamp ladder mirror pillow spoon"""
_CYCLE = "The rain falls on the hills. The river runs to the sea. A bird sleeps in the tree. Snow lies on the far side."
_SPARE = 256  # unused values, of which answers of equally many tokens are chosen as foils


class Prompt(NamedTuple):
    """What stands between <bos> and the answer, and what may be said instead of it."""

    text: str
    answer: str  # with what ends it
    foils: dict[
        str, list[str]
    ]  # by kind, likely mistakes first: answers of as many bytes, the right one among them
    source: int  # the character of `text` at which the evidence begins
    rest: str = ""  # what follows the answer


class Draw:
    """The random draws of one prompt or window: a function of (seed, key), whatever model or tokenizer reads it.

    `option` is N of a task NAME-N; with `removed` the evidence is to be left out, as a control.
    """

    def __init__(
        self,
        seed: int,
        key: tuple[int, ...],
        option: int = 0,
        prose: bool = False,
        removed: bool = False,
    ):
        self._root = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
        )
        self.option, self.prose, self.removed = option, prose, removed

    def stream(self) -> np.random.Generator:
        """Returns another stream of random numbers."""
        return self._root.spawn(1)[0]

    def pick(self, units, count: int) -> list[str]:
        """Draws from `units` with replacement."""
        return [units[i] for i in self.stream().integers(len(units), size=count)]

    def distinct(self, high: int, count: int) -> list[int]:
        """Draws distinct numbers below `high`."""
        if count > high:
            few = f"{count:,} facts need different names, of {high:,} that there are"
            raise UsageError(f"{few}: take a shorter seq_len")
        rng, numbers = self.stream(), {}
        while len(numbers) < count:
            numbers |= dict.fromkeys(rng.integers(high, size=256).tolist())
        return list(numbers)[:count]

    def words(self, count: int, syllables: int = 2) -> list[str]:
        """Draws distinct words of no language, of two letters a syllable."""
        base = len(_SYLLABLES)
        numbers = self.distinct(base**syllables, count)
        return ["".join(_SYLLABLES[i // base**k % base] for k in range(syllables)) for i in numbers]

    def names(self, count: int, double: bool = False) -> list[str]:
        """Draws distinct names: words of three syllables or capital letters, at most all; or two words or letters."""
        if self.prose:
            words = self.words(count, syllables=3 + double)
            return [
                f"{word[:4]} {word[4:]}".title() if double else word.capitalize() for word in words
            ]
        if double:
            return [_ALPHABET[i // 52] + _ALPHABET[i % 52] for i in self.distinct(52**2, count)]
        return [_ALPHABET[i] for i in self.distinct(26, min(count, 26))]

    def values(self, count: int, digits: int = 7) -> tuple[list[str], list[str]]:
        """Draws (codes, others), all distinct; if compact, for seven digits one from 0 to 7, distinct up to eight."""
        if digits == 7 and not self.prose:
            every = [str(i) for i in self.distinct(8, 8)]
            return every[:count] if count <= 8 else self.pick(every, count), every
        least = 10 ** (digits - 1)
        codes = [str(least + i) for i in self.distinct(9 * least, count + _SPARE)]
        return codes[:count], codes[count:]

    def symbols(self, count: int) -> tuple[list[str], list[str]]:
        """Draws (symbols, unused ones), all distinct: filler letters, or words."""
        drawn = (
            self.words(count + _SPARE)
            if self.prose
            else [LETTERS[i] for i in self.distinct(16, 16)]
        )
        return drawn[:count], drawn[count:]

    def filler(self, count: int) -> list[str]:
        """Draws units of filler: random letters, or sentences of which none stands twice."""
        if not self.prose:
            return self.pick(LETTERS, count)
        start, step = self.stream().integers(2**15, size=2).tolist()
        words = [line.split() for line in _GRAMMAR.splitlines()[1:]]
        numbers = [(start + i * (2 * step + 1)) % 2**16 for i in range(count)]
        return [
            "The {} {} {} the {}\n".format(*(w[i >> 4 * k & 15] for k, w in enumerate(words)))
            for i in numbers
        ]

    def cycle(self, count: int) -> list[str]:
        """Repeats the same units: sixteen letters, or four sentences."""
        units = (
            [f"{line}\n" for line in _CYCLE.strip(".").split(". ")]
            if self.prose
            else self.filler(16)
        )
        return [units[i % len(units)] for i in range(count)]

    def complete(self, answer: str) -> str:
        """Ends an answer, in prose by a newline, after a space before it; in compact form by a dot if it is long."""
        return f" {answer}\n" if self.prose else answer + "." * (len(answer) > 1)

    def prompt(self, text: str, answer: str, source: int, foils: dict[str, list[str]]) -> Prompt:
        """Makes a prompt; completes its answers."""
        return Prompt(
            text,
            self.complete(answer),
            {k: [*map(self.complete, v)] for k, v in foils.items()},
            source,
        )
