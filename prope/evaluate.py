"""Computes loss and perplexity of saved checkpoints over the validation documents.

    python -m prope.evaluate --workdir=runs/quickstart
    python -m prope.evaluate --workdir=runs --step=all --seq_len=1x,2x,8x
    python -m prope.evaluate --workdir=runs --seq_len=1x,8x --max_tokens=65536 --intervene=stop
    python -m prope.evaluate --workdir=runs --seq_len=8x --window=128,256,512 --sinks=0,4

Every token of every validation document is predicted once, and losses are summed in float64, so
the batch size does not change the result. Records are added to W/eval.jsonl, and reused. They are
also shown as a table; the JSON object is the last one, and of several holds all in short.

--window shows whether a model uses a length: it is evaluated as it is, then with layers that see so
many keys where they had no window; with --sinks the first tokens of each text, too (Xiao et al.,
ICLR 2024). The loss with the best window minus that without is the gain from context.

Started on every host of a pod as training is, it uses all their devices. Above 1 % of <unk> there
are no bits per byte, and without a predicted token no numbers at all: they are null.
"""

from absl import flags

from prope import command
from prope.inference import options

_SHORT = ("workdir", "step", "rope_percentage", "seq_len", "tokens", "loss", "loss_stderr")
_SHORT += ("bits_per_byte",)


def define_flags() -> None:
    """Defines the command's flags."""
    options.define_flags("eval.jsonl")
    windows = "windows, evenly spread; longer ones have more text"
    flags.DEFINE_integer("max_windows", None, windows, lower_bound=1)
    tokens = "tokens, evenly spread, the same ones at every --seq_len"
    flags.DEFINE_integer("max_tokens", None, tokens, lower_bound=1)
    flags.DEFINE_string("dataset", None, "another dataset, as in config.data.dataset")
    command.define_place("data_dir", "folder of the dataset, as in config.data.data_dir")
    windows = "last keys that layers without a window see, a list"
    flags.DEFINE_list("window", None, windows)
    kept = "with --window: first tokens that stay visible, a list; 0 by default"
    flags.DEFINE_list("sinks", None, kept)
    begins = "whether <bos> takes the place of every window's first token; by default as in the "
    begins += "run, and in an import as its tokenizer begins texts"
    flags.DEFINE_boolean("bos_every_window", None, begins)
    split = "documents to read; by default validation, and all of a text that was not trained on"
    flags.DEFINE_enum("split", None, ["validation", "train", "all"], split)


def main() -> dict:
    """Evaluates; returns the last record, and of several all in short."""
    from prope.inference.losses import LossOptions, evaluations

    loss_options = options.from_flags(LossOptions)
    records = list(evaluations(loss_options))
    cut = ("window", "sinks") if loss_options.window else ()
    return options.last_line(records, _SHORT + cut)


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True, restart_when_stuck=True)
