"""Computes loss and perplexity of saved checkpoints over the validation documents.

    python -m prope.evaluate --workdir=runs/quickstart
    python -m prope.evaluate --workdir=runs --step=all --seq_len=1x,2x,8x

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

_SHORT = ("workdir", "step", "rope_percentage", "seq_len", "tokens", "loss", "loss_stderr", "bits_per_byte")


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("workdir", None, "directory of a run, or one with runs below it: all are evaluated")
    flags.DEFINE_string("step", None, "checkpoint to evaluate, or 'all'; the newest by default")
    flags.DEFINE_integer("batch_size", None, "windows at a time: changes the speed, not the result", lower_bound=1)
    flags.DEFINE_integer("max_windows", None, "number of windows, evenly spread; all by default", lower_bound=1)
    tokens = "number of tokens, the same ones at every --seq_len, in evenly spread stretches of the longest"
    flags.DEFINE_integer("max_tokens", None, tokens, lower_bound=1)
    lengths = "tokens per window: numbers, or multiples of the training length, as in 512,2x,8x; 1x by default"
    flags.DEFINE_string("seq_len", None, lengths)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "folder of the dataset, as in config.data.data_dir")
    scaling = "rescale the encoding without training, for text longer than the training's; yarn scales the logits too"
    flags.DEFINE_enum("encoding", None, ["linear", "ntk", "dynamic", "yarn", "llama3"], scaling)
    factor = "with --encoding: by how much longer; by default each --seq_len over the training's, of dynamic 1"
    flags.DEFINE_float("factor", None, factor, lower_bound=1.0)
    split = "documents to read; by default validation, and all of a text that the run was not trained on"
    flags.DEFINE_enum("split", None, ["validation", "train", "all"], split)
    flags.DEFINE_boolean("again", False, "recompute what eval.jsonl has")
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Evaluates; returns the last record, and where there are several, logs a table and returns all in short."""
    from prope.inference.evaluation import Options, evaluations, table

    options = Options(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(Options)})
    records = list(evaluations(options))
    if len(records) == 1:
        return records[0]
    log.info("%s", table(records))
    return records[-1] | {"evaluations": [{name: record[name] for name in _SHORT} for record in records]}


if __name__ == "__main__":
    command.run(main, define_flags, joins=True)
