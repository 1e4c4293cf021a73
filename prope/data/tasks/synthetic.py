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

from prope.data.tasks.draws import Key, Window, log_uniform, make_rng, window_without_answers
from prope.data.tokenizer import GEMMA_IDS
from prope.spec.data import GENERATED

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


def copy(rng, stream, slots):
    """Enters questions for a letter before; returns their places and distances."""
    number = rng.integers(0, len(OFFSETS), len(slots))
    distances = np.array(OFFSETS)[number]
    stream[slots] = _COPY + number
    stream[slots + 1] = stream[slots - distances]
    return slots, distances


def recall(rng, stream, slots):
    """Enters facts and questions for their values; returns places and distances of questions."""
    free = np.sort(slots)
    queries = []
    distances = []
    for key in rng.permutation(KEYS)[: len(slots) // 2]:
        distance = log_uniform(rng, _SHORTEST_GAP + 2, len(stream) - 1)
        later = free[1:]
        far = later[later >= free[0] + distance]
        query = rng.choice(far if len(far) else later)
        earlier = free[free < query]
        fact = earlier[np.abs(query - earlier - distance).argmin()]
        value = rng.integers(VALUES)
        stream[fact] = _FACT + key * VALUES + value
        stream[query] = _QUERY + key
        stream[query + 1] = _VALUE + value
        queries.append(query)
        distances.append(query - fact)
        free = free[(free != fact) & (free != query)]
    return queries, distances


TASKS = {"copy": copy, "recall": recall}


def draw_window(task: str, T: int, index: int, key: Key) -> Window:
    """Draws a window of T tokens, a function of the arguments."""
    rng = make_rng(index, (2, NAMES.index(task), *key))
    stream = rng.integers(_LETTER, _VALUE, T + 1, dtype=np.int32)
    stream[0] = GEMMA_IDS.bos
    window = window_without_answers(stream)
    gaps = rng.integers(_SHORTEST_GAP, _LONGEST_GAP + 1, T // _SHORTEST_GAP)
    # The first token of each; <bos> and a gap come before.
    slots = np.cumsum(gaps + 2) - 1
    slots = rng.permutation(slots[slots < T])
    parts = {task: slots}
    if task == "mix":
        parts = dict(zip(TASKS, np.split(slots, [len(slots) // 2]), strict=True))
    for name, part in parts.items():
        places, distances = TASKS[name](rng, stream, part)
        window.task[places] = NAMES.index(name)
        window.distance[places] = distances
    return window


def text_of(ids) -> str:
    """Returns tokens as words: a letter, `copy-2`, `k7=v3`, `k7?`, `v3`."""
    values = [f"v{value}" for value in range(VALUES)]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"copy-{k}" for k in OFFSETS), *LETTERS, *values]
    names += [f"k{key}?" for key in range(KEYS)]
    names += [f"k{key}={value}" for key in range(KEYS) for value in values]
    return " ".join(names[token] for token in ids)
