"""The eight long-context tasks: longcontext/NAME; longcontext/mix draws one for each window.

To add one: a function that draws prompts, one that draws training windows, and a line in TASKS;
README.md shows how. `prope.spec.data.GENERATED` lists the names that a config may have.
"""

from collections.abc import Callable

import numpy as np

from prope.data.tasks import texts
from prope.data.tasks.draws import Draw, Key, Prompt, Window, window_without_answers
from prope.data.tasks.retrieval import Retrieval, pairs, symbols_after_mark
from prope.data.tasks.texts import Task
from prope.data.tokenizer import ByteTokenizer
from prope.errors import nearest, usage_error
from prope.spec.data import GENERATED

FORMAT = 1  # version of the rules by which prompts are drawn
VARIANTS = [name for name in GENERATED["longcontext"] if name != "mix"]  # NAME and NAME-N
VOCABULARY = ByteTokenizer.vocab_size
_BYTES = ByteTokenizer()

# ((fact, question) in compact form, the same in prose); {0} is the key, {1} the value.
_PASSKEY = pairs(("#{1}.", "#"), ("The pass key is {1}\n", "The pass key is"), digits=5, repeat=3)
_NIAH = pairs(("={}{}", "?{}"), ("The code of {} is {}\n", "The code of {} is"))
_LOOKUP = pairs(("{}{}", "/{}"), ("{}: {}\n", "{}:"), double=True)
_CHAIN = pairs(("{}:{}", "&{}"), ("Set {} to {}\n", "The value of {} is"), chained=True)
TASKS = {
    "passkey": Retrieval(_PASSKEY, count=1, draw_filler=Draw.cycle),
    "niah": Retrieval(_NIAH, option=4),
    "lookup": Retrieval(_LOOKUP),
    "chain": Retrieval(_CHAIN, count=2, option=2),
    "offset": Task(texts.offset, texts.offset_window, rows=texts.OFFSETS),
    "index": Retrieval(symbols_after_mark, count=1),
    "flipflop": Task(texts.flipflop, texts.flipflop_window, option=80),
    "duplicate": Task(texts.duplicate, texts.duplicate_window),
}
NAMES = tuple(TASKS)


def parse_tasks(flag: str) -> list[str]:
    """Reads --tasks: all, or a list of NAME and NAME-N."""
    tasks = list(NAMES) if flag == "all" else flag.split(",")
    for task in tasks:
        if task not in VARIANTS:
            problem = f"there is no task {task}{nearest(task, VARIANTS)}"
            raise usage_error("--tasks", flag, problem, f"there are {', '.join(VARIANTS)}")
    return tasks


def split_name(task: str) -> tuple[str, int]:
    """Splits NAME-N into its name and option; without N the option is the task's default."""
    name, _, option = task.partition("-")
    return name, int(option or TASKS[name].option)


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
    """Makes the longest prompt that fits into `length` tokens with its answer.

    All draws are a function of the arguments.

    Args:
      task: NAME or NAME-N.
      prose: in sentences, not compact.
      length: tokens of the prompt, its answer and <bos>.
      row: where the evidence stands, a fraction of the prompt; of an offset, how far back.
      trial: number of the prompt among those of this row.
      seed: the seed of all prompts.
      removed: leaves the evidence out, as a control.
      size: counts the tokens of a text with <bos>.
    """
    name, option = split_name(task)
    key = (FORMAT, NAMES.index(name), option, prose, length, round(row * 2**20), trial)

    def make(n: int) -> Prompt:
        return TASKS[name].prompt(Draw(seed, key, option, prose, removed), n, row)

    def measure(n: int) -> int:
        prompt = make(n)
        return size(prompt.text + prompt.answer + prompt.rest)

    # The row of an offset is a number of units, those of other tasks are below 1.
    fewest = int(max(2, *TASKS[name].rows))
    shortest = measure(fewest)
    if shortest > length:
        problem = f"{task} needs at least {shortest} tokens"
        raise usage_error("--seq_len", length, problem, "take longer ones")
    low = fewest  # units that fit
    high = 16 * length  # units that do not
    n = fewest + 1
    while high - low > 1:
        used = measure(n)
        if used <= length:
            low = n
        else:
            high = n
        # The next guess takes the mean length of a unit so far.
        more = (length - shortest) * (n - fewest) / max(used - shortest, 1)
        n = min(max(fewest + int(more), low + 1), high - 1)
    return make(low)


def draw_window(task: str, T: int, index: int, key: Key) -> Window:
    """Draws a training window of T bytes, a function of the arguments."""
    if task == "mix":
        rng = Draw(index, (3, *key)).stream()
        task = NAMES[rng.integers(len(NAMES))]
    name, option = split_name(task)
    number = NAMES.index(name)
    draw = Draw(index, (4, number, option, *key), option)
    text, answers = TASKS[name].window(draw, T)
    stream = np.append(np.int32(_BYTES.special.bos), _BYTES.encode(text[:T].encode()))
    window = window_without_answers(stream)
    for answer in answers:
        # <bos> comes first, so a character is the target of its index in the text.
        places = slice(answer.start, answer.start + answer.size)
        window.task[places] = number
        window.distance[places] = answer.distance - 1
    return window


def text_of(ids) -> str:
    """Returns tokens as text."""
    return _BYTES.decode(ids)
