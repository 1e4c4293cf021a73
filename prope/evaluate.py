"""Computes loss and perplexity of saved checkpoints over the validation documents.

    python -m prope.evaluate --workdir=runs/quickstart
    python -m prope.evaluate --workdir=runs --step=all --seq_len=1x,2x,8x

The config is stored in the run directory. Every token of every validation document is predicted once, and losses are
summed in float64, so the batch size does not change the result. Records in W/eval.jsonl are reused.
"""

import dataclasses

from absl import flags

from prope import command

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("workdir", None, "directory of a run, or one with runs below it: all are evaluated")
    flags.DEFINE_string("step", None, "checkpoint to evaluate, or 'all'; the newest by default")
    flags.DEFINE_integer("batch_size", None, "windows at a time: changes the speed, not the result", lower_bound=1)
    flags.DEFINE_integer("max_windows", None, "number of windows, evenly spread; all by default", lower_bound=1)
    lengths = "tokens per window: numbers, or multiples of the training length, as in 512,2x,8x; 1x by default"
    flags.DEFINE_string("seq_len", None, lengths)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "folder of the dataset, as in config.data.data_dir")
    flags.DEFINE_boolean("again", False, "recompute what eval.jsonl has")
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Evaluates; returns the last record, and all of them where there are several."""
    from prope.inference.evaluation import Options, evaluations

    options = Options(**{field.name: FLAGS[field.name].value for field in dataclasses.fields(Options)})
    records = list(evaluations(options))
    return records[-1] | ({"evaluations": records} if len(records) > 1 else {})


if __name__ == "__main__":
    command.run(main, define_flags)
