"""Continues prompts with a saved checkpoint.

    python -m prope.sample --workdir=runs/quickstart --prompt="Return a new list that"
    python -m prope.sample --workdir=runs/quickstart --prompts=FILE --temperature=0

The prompts are read in chunks, which fill the KV cache; one compiled loop then samples a token for
every row at a time. A row's continuation does not depend on the other rows, up to rounding. Row i
draws with fold_in(key(seed), i). Started on every host of a pod as training is, it uses all their
devices; process 0 reads the prompts and prints.
"""

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.inference import options


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to sample from; the newest by default")
    flags.DEFINE_multi_string("prompt", [], "text to continue")
    command.define_place("prompts", "file with one prompt per line; empty lines are skipped")
    start = "token before a prompt: that of a document, <bos> or the family's separator, or none"
    flags.DEFINE_enum("start", "document", ["document", "none"], start)
    options.define_dtype()
    flags.DEFINE_integer(
        "length", 200, "largest number of tokens per prompt; a row ends earlier at <eos>"
    )
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token, 1 samples from the model")
    flags.DEFINE_integer(
        "top_k", None, "sample from this many likeliest tokens; from all by default"
    )
    flags.DEFINE_float(
        "top_p", 1.0, "of these, from the fewest likeliest ones that have this probability"
    )
    flags.DEFINE_integer("seed", 0, "of the random numbers", lower_bound=0, upper_bound=2**32 - 1)
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Samples; returns the texts and the speed."""
    from prope.inference.generation import Sampling, continue_prompts, read_prompts
    from prope.runtime.processes import call_on_first

    sampling = Sampling(FLAGS.length, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    texts = call_on_first(lambda: read_prompts(FLAGS.prompt, FLAGS.prompts))
    return continue_prompts(
        FLAGS.workdir, FLAGS.step, texts, sampling, FLAGS.seed, FLAGS.start, FLAGS.dtype
    )


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True)
