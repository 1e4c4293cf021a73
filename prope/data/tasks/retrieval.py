"""Retrieval tasks: facts are hidden in filler, and a question asks for one of them."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

from prope.data.tasks.draws import Answer, Draw, Prompt, log_uniform

DEPTHS = tuple(i / 8 for i in range(9))


class Episode(NamedTuple):
    """Facts, in their order, and the questions that they answer."""

    facts: list[str]
    questions: list[tuple[str, str]]  # each with its answer; a prompt asks the first


Episodes = tuple[list[Episode], list[str]]  # and values that none of them has


def pairs(
    compact: tuple[str, str],
    prose: tuple[str, str],
    digits: int | None = None,
    double: bool = False,
    chained: bool = False,
    repeat: int = 1,
) -> Callable[[Draw, int], Episodes]:
    """Makes a function that draws so many keys with values, as facts and questions.

    Args:
      compact: templates of a fact and of a question.
      prose: the same, in the other form.
      digits: of a value; see `Draw.values`.
      double: whether a key is two names.
      chained: whether only the first key has the value, and N - 1 others the key before, for the
        option N of the task.
      repeat: how many times a training window asks for each.
    """

    def draw_episodes(draw: Draw, count: int) -> Episodes:
        fact, question = prose if draw.prose else compact
        links = draw.option if chained else 1
        names = draw.names(count * links, double)
        values, unused = draw.values(len(names) // links, digits)
        episodes = []
        for i, value in enumerate(values):
            chain = [value, *names[i * links : (i + 1) * links]]
            facts = [fact.format(key, target) for target, key in itertools.pairwise(chain)]
            answered = (question.format(chain[-1]), value)
            episodes.append(Episode(facts, [answered] * repeat))
        return episodes, unused

    return draw_episodes


def symbols_after_mark(draw: Draw, _count: int) -> Episodes:
    """Draws a mark before four symbols, and asks for each of them by its number."""
    symbols, unused = draw.symbols(4)
    if draw.prose:
        (mark,) = draw.names(1)
        fact = f"{mark} {' '.join(symbols)}\n"
        question = f"Word {{}} after {mark} is"
    else:
        fact = "@" + "".join(symbols)
        question = ">{}"
    questions = [(question.format(i + 1), symbols[i]) for i in draw.distinct(4, 4)]
    return [Episode([fact], questions)], unused


@dataclasses.dataclass
class Item:
    """A fact, or a question with its answer, to be inserted between units of filler."""

    place: float  # units before it
    text: str
    answer: str = ""  # the end of `text`, of a question
    evidence: "Item | None" = None  # what answers a question
    start: int = 0  # its first character in the whole text, which `insert` finds


def insert(units: list[str], items: list[Item]) -> str:
    """Puts items between units; returns the whole text, and sets where each item starts."""
    text = ""
    last = 0
    for item in sorted(items, key=lambda item: item.place):
        place = int(item.place)
        text += "".join(units[last:place])
        item.start = len(text)
        text += item.text
        last = place
    return text + "".join(units[last:])


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """A retrieval task: hides facts in filler and asks for one."""

    draw_episodes: Callable[[Draw, int], Episodes]
    count: int = 0  # episodes in a prompt; 0: as the option says; both 0: there are only facts
    draw_filler: Callable[[Draw, int], list[str]] = Draw.filler
    option: int = 0  # N of NAME-N, if the name has none
    rows: tuple[float, ...] = DEPTHS

    def prompt(self, draw: Draw, n: int, depth: float) -> Prompt:
        """Hides facts in n units: those asked for from unit floor(depth * n) on, evenly."""
        count = self.count or draw.option
        episodes, unused = self.draw_episodes(draw, count or n + 1)
        target, *others = episodes
        (question, answer), *neighbours = target.questions
        foils = {
            "neighbour": [answer for _, answer in neighbours],
            "value": [answer for other in others for _, answer in other.questions],
            "unused": unused,
        }
        if count:
            units = self.draw_filler(draw, n)
        else:
            units = [other.facts[0] for other in others]
            others = []
        if draw.removed:
            target = target._replace(facts=[""])
        starts = [depth, *draw.stream().random(len(others))]
        items = [
            Item((start + (1 - start) * i / len(facts)) * n, fact)
            for start, (facts, _) in zip(starts, [target, *others], strict=True)
            for i, fact in enumerate(facts)
        ]
        text = insert(units, items) + question
        return draw.prompt(text, answer, items[0].start, foils)

    def window(self, draw: Draw, T: int) -> tuple[str, list[Answer]]:
        """Scatters facts and questions over T characters or more, at log-uniform distances."""
        rng = draw.stream()
        number = 1 if self.count == 1 else T // 16
        if self.count or draw.option:
            number = int(log_uniform(rng, 1, number + 1))
            episodes, _ = self.draw_episodes(draw, number)
            units = self.draw_filler(draw, T)
        else:
            episodes, _ = self.draw_episodes(draw, number + T // 3)
            units = [fact for episode in episodes[number:] for fact in episode.facts]
        hidden = episodes[:number]
        # Answers are not completed.
        texts = (itertools.chain(episode.facts, *episode.questions) for episode in hidden)
        free = T - sum(map(len, itertools.chain(*texts)))
        items = scatter(draw, rng, hidden, free // len(units[0]))
        text = insert(units, items)
        answers = []
        for item in items:
            if item.evidence:
                start = item.start + len(item.text) - len(item.answer)
                distance = start - item.evidence.start
                answers.append(Answer(start, distance, len(item.answer)))
        return text, answers


def scatter(draw: Draw, rng, episodes: list[Episode], n: int) -> list[Item]:
    """Draws the places of facts, and of questions after them, among n units."""
    items = []
    for facts, questions in episodes:
        distances = log_uniform(rng, 1, n, len(questions))
        closest = distances.min()
        start = rng.uniform(0, n - distances.max())
        evidence = [Item(start + closest * i / len(facts), fact) for i, fact in enumerate(facts)]
        items += evidence
        for distance, (question, answer) in zip(distances, questions, strict=True):
            answer = draw.complete(answer)
            items.append(Item(start + distance, question + answer, answer, evidence[0]))
    return items
