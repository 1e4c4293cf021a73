"""Shows a training batch as the model reads it, and how long the training documents are.

    python -m prope.data.inspect --config=configs/quickstart.py --step=12

Row by row: the text of every document, and the tokens around its borders with positions, targets
and loss weights.
"""

from absl import flags
from absl.flags import FLAGS

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config()
    flags.DEFINE_integer(
        "step", 0, "show the batch that a checkpoint of this step reads next", lower_bound=0
    )
    flags.DEFINE_integer("rows", 2, "rows of the batch to show", lower_bound=1)
    flags.mark_flags_as_required(["config"])


def main() -> dict:
    """Prints the batch; returns what it holds."""
    from prope.data.view import show_batch

    return show_batch(command.read_spec(), FLAGS.step, FLAGS.rows)


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
