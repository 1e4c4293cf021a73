"""Evaluates checkpoints on long-context tasks: eight kinds of prompts with known answers.

    python -m prope.ask --workdir=runs/longcontext
    python -m prope.ask --workdir=runs --tasks=niah-16,offset --seq_len=0.5x,1x,2x,4x,8x
    python -m prope.ask --workdir=runs --tasks=niah --seq_len=1x --control=removed

prope/data/tasks/README.md has the tasks. `accuracy` is the share of prompts whose right answer is
likelier than seven wrong ones; only above `guess`, the no-retrieval baseline, it is retrieval: the
best guess that reads the prompt but matches nothing. Records are added to W/longcontext.jsonl, and
reused; the JSON object is the last one, and holds all in short. Started on every host of a pod as
training is, it uses all their devices; process 0 writes and prints.
"""

from absl import flags

from prope import command
from prope.inference import options

_SHORT = ("workdir", "step", "rope_percentage", "task", "seq_len", "accuracy", "exact", "guess")


def define_flags() -> None:
    """Defines the command's flags."""
    options.define_flags("longcontext.jsonl")
    flags.DEFINE_string("tasks", "all", "all, or some, as in passkey,niah-16")
    form = "compact, or prose for models of text; by default prose where the tokenizer is not byte"
    flags.DEFINE_enum("form", None, ["compact", "prose"], form)
    flags.DEFINE_string(
        "depths",
        None,
        "where the evidence stands, in fractions of the prompt as in 0,0.5,1; eighths by default",
    )
    flags.DEFINE_integer("trials", 32, "prompts of each depth", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "from which prompts are drawn", lower_bound=0, upper_bound=2**32 - 1
    )
    control = "evidence removed, which must give chance, or near, 32 tokens before the question"
    flags.DEFINE_enum("control", None, ["removed", "near"], control)


def main() -> dict:
    """Asks; returns the last record, and of several all in short."""
    from prope.inference.asking import AskOptions, answers

    records = list(answers(options.from_flags(AskOptions)))
    return options.last_line(records, _SHORT)


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
