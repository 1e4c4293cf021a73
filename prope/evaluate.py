"""Loss and perplexity of saved checkpoints over the validation documents: python -m prope.evaluate --workdir=W.

W is a run, or a directory with runs below it. A run knows its config. Every token of every validation document is
predicted once and the losses are added up in float64, so the batch size does not change the result. What W/eval.jsonl
already says is not computed again.

Axes: B batch, T seq_len of the windows.
"""

from absl import flags

from prope import command
from prope.inference.evaluation import evaluations


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of the run, or one with runs below it: all are evaluated")
    flags.DEFINE_string("step", None, "checkpoint to evaluate, or all; the newest by default")
    flags.DEFINE_integer("batch_size", None, "windows at a time: changes the speed, not the result", lower_bound=1)
    flags.DEFINE_integer(
        "max_windows", None, "evaluate this many windows, evenly spread; all by default", lower_bound=1
    )
    length = "tokens in a window: numbers, or multiples of the training's, as in 512,2x,8x; as in training by default"
    flags.DEFINE_string("seq_len", None, length)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    flags.DEFINE_string("data_dir", None, "where the dataset is, as in config.data.data_dir")
    flags.DEFINE_boolean("again", False, "evaluate even what eval.jsonl already has")
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """The command."""
    records = list(evaluations(flags.FLAGS))
    return records[-1] | ({"evaluations": records} if len(records) > 1 else {})


if __name__ == "__main__":
    command.run(main, define_flags)
