"""Two tasks that need only position, or only meaning, of tokens that are letters and words.

synthetic/copy    positional: repeat the letter k tokens before. `copy-2` asks for k = 2. Letters
                  repeat all the time, so only their positions identify the one that is asked for.
synthetic/recall  semantic: after a fact such as `k7=v3`, at any distance, `k7?` asks for its value.
                  Key and value are one token, so that finding it needs no position. Every key is
                  asked for once.
synthetic/mix     half of the slots for each.

A window is <bos> and random letters, with slots of two tokens four to eight letters apart: `copy-k`
and its answer, a question and its answer, or a fact and a letter. Letters and values are uniform,
so guessing is right in 1/8 of cases. The distance of a fact and its question is drawn first,
uniformly on a logarithmic scale, as far as free slots allow.
"""

import numpy as np

from prope.config import GENERATED
from prope.data.tasks.draws import Key, Window, make_rng, window_without_answers
from prope.data.tokenizer import GEMMA_IDS

NAMES = GENERATED["synthetic"]
OFFSETS = (1, 2, 3, 4)  # k of copy
LETTERS = "abcdefgh"
VALUES = 8
KEYS = 16

# Ids, in this order after the four special ones.
_COPY = 4
_LETTER = _COPY + len(OFFSETS)
_VALUE = _LETTER + len(LETTERS)
_QUERY = _VALUE + VALUES
_FACT = _QUERY + KEYS
VOCABULARY = _FACT + KEYS * VALUES

# Letters before a slot: at least max(OFFSETS), so that what is copied is a letter.
_SHORTEST_GAP = 4
_LONGEST_GAP = 8


def draw_window(task: str, T: int, index: int, key: Key) -> Window:
    """Draws a window of T tokens, a function of the arguments."""
    number = NAMES.index(task)
    rng = make_rng(index, (2, number, *key))
    stream = rng.integers(_LETTER, _VALUE, T + 1, dtype=np.int32)
    stream[0] = GEMMA_IDS.bos
    window = window_without_answers(stream)
    gaps = rng.integers(_SHORTEST_GAP, _LONGEST_GAP + 1, T // _SHORTEST_GAP)
    # The first token of each; <bos> and a gap come before.
    slots = np.cumsum(gaps + 2) - 1
    slots = rng.permutation(slots[slots < T])
    shares = {"copy": 1, "recall": 0, "mix": 0.5}
    copies = int(shares[task] * len(slots))
    _enter_copies(rng, window, slots[:copies])
    others = np.sort(slots[copies:])
    _enter_recalls(rng, window, others)
    return window


def _enter_copies(rng, window: Window, slots) -> None:
    stream = window.stream
    number = rng.integers(0, len(OFFSETS), len(slots))
    offset = np.array(OFFSETS)[number]
    stream[slots] = _COPY + number
    stream[slots + 1] = stream[slots - offset]
    window.task[slots] = NAMES.index("copy")
    window.distance[slots] = offset


def _choose_slots(rng, free, distance: float):
    """Chooses the free slots of a fact and its question, about as far apart as `distance`."""
    later = free[1:]
    candidates = later[later >= free[0] + distance]
    if not len(candidates):
        candidates = later
    query = rng.choice(candidates)
    earlier = free[free < query]
    misses = np.abs(query - earlier - distance)
    return earlier[misses.argmin()], query


def _enter_recalls(rng, window: Window, slots) -> None:
    shortest = np.log(_SHORTEST_GAP + 2)
    longest = np.log(len(window.task))
    keys = rng.permutation(KEYS)
    count = len(slots) // 2
    free = slots
    for key in keys[:count]:
        distance = np.exp(rng.uniform(shortest, longest))
        fact, query = _choose_slots(rng, free, distance)
        value = rng.integers(VALUES)
        window.stream[fact] = _FACT + key * VALUES + value
        window.stream[query] = _QUERY + key
        window.stream[query + 1] = _VALUE + value
        window.task[query] = NAMES.index("recall")
        window.distance[query] = query - fact
        unused = (free != fact) & (free != query)
        free = free[unused]


def text_of(ids) -> str:
    """Returns tokens as words: a letter, `copy-2`, `k7=v3`, `k7?`, `v3`."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>"]
    names += [f"copy-{k}" for k in OFFSETS]
    names += LETTERS
    values = [f"v{value}" for value in range(VALUES)]
    names += values
    names += [f"k{key}?" for key in range(KEYS)]
    for key in range(KEYS):
        names += [f"k{key}={value}" for value in values]
    return " ".join(names[token] for token in ids)
