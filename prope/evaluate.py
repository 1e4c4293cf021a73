"""Computes loss and perplexity of saved checkpoints over the validation documents.

    python -m prope.evaluate --workdir=runs/quickstart
    python -m prope.evaluate --workdir=runs --step=all --seq_len=1x,2x,8x
    python -m prope.evaluate --workdir=runs --seq_len=1x,8x --max_tokens=65536 --intervene=stop,interpolate:16-31
    python -m prope.evaluate --workdir=runs --tasks=all --seq_len=0.5x,1x,2x,4x,8x

The config is stored in the run directory. Every token of every validation document is predicted once, and losses are
summed in float64, so the batch size does not change the result. Records are added to W/eval.jsonl, and reused.
Several evaluations are also shown as a table; the JSON object is the last one, and holds all in short.
Started on every host of a pod as training is, it uses all their devices; process 0 writes and prints.
"""

import dataclasses

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import log

_SHORT = (
    "workdir",
    "step",
    "rope_percentage",
    "seq_len",
    "tokens",
    "loss",
    "loss_stderr",
    "bits_per_byte",
)
_SHORT += ("task", "rank_accuracy", "exact", "chance")


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "workdir", None, "directory of a run, or one with runs below it: all are evaluated"
    )
    flags.DEFINE_string("step", None, "checkpoint to evaluate, or 'all'; the newest by default")
    flags.DEFINE_integer(
        "batch_size", None, "windows at a time: changes the speed, not the result", lower_bound=1
    )
    flags.DEFINE_integer(
        "max_windows", None, "number of windows, evenly spread; all by default", lower_bound=1
    )
    tokens = "number of tokens, the same ones at every --seq_len, in evenly spread stretches of the longest"
    flags.DEFINE_integer("max_tokens", None, tokens, lower_bound=1)
    lengths = "tokens per window: numbers, or multiples of the training length, as in 512,2x,8x; 1x by default"
    flags.DEFINE_string("seq_len", None, lengths)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "folder of the dataset, as in config.data.data_dir")
    scaling = "rescale the encoding without training, for text longer than the training's; yarn scales the logits too"
    flags.DEFINE_enum("encoding", None, ["linear", "ntk", "dynamic", "yarn", "llama3"], scaling)
    bands = "test a band of pairs: stop its rotation, remove it, or interpolate it, as in stop:16-19; without a band, "
    flags.DEFINE_string("intervene", None, bands + "every eighth of the pairs in turn")
    factor = "with --encoding or --intervene=interpolate: how many times longer the text is than in training; by "
    factor += "default each --seq_len over the training's, of dynamic 1"
    flags.DEFINE_float("factor", None, factor, lower_bound=1.0)
    split = "documents to read; by default validation, and all of a text that the run was not trained on"
    flags.DEFINE_enum("split", None, ["validation", "train", "all"], split)
    flags.DEFINE_boolean("again", False, "recompute what eval.jsonl, or longcontext.jsonl, has")
    tasks = "ask for what stands far back: all, or some, as in passkey,niah-16; prope/data/tasks/README.md has them"
    flags.DEFINE_string("tasks", None, tasks)
    form = "of tasks: compact, or prose for models of text; by default prose where the tokenizer is not byte"
    flags.DEFINE_enum("form", None, ["compact", "prose"], form)
    depths = "of tasks: where the evidence stands, in fractions of the prompt such as 0,0.5,1; by default eighths"
    flags.DEFINE_string("depths", None, depths)
    flags.DEFINE_integer("trials", 32, "of tasks: prompts of each depth", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "of tasks: from which prompts are drawn", lower_bound=0)
    control = (
        "of tasks: evidence removed, which must give chance, or near, 32 tokens before the question"
    )
    flags.DEFINE_enum("control", None, ["removed", "near"], control)
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Evaluates; returns the last record, and where there are several, logs a table and returns all in short."""
    from prope.inference.evaluation import Options, evaluations, table

    options = Options(
        **{field.name: FLAGS[field.name].value for field in dataclasses.fields(Options)}
    )
    records = list(evaluations(options))
    if len(records) == 1:
        return records[0]
    if options.tasks is None:
        log.info("%s", table(records))
    short = [{name: record[name] for name in _SHORT if name in record} for record in records]
    return records[-1] | {"evaluations": short}


if __name__ == "__main__":
    command.run(main, define_flags, joins=True)
