"""Continues prompts with a saved checkpoint.

    python -m prope.sample --workdir=runs/quickstart --prompt="Return a new list that"
    python -m prope.sample --workdir=runs/quickstart --prompts=FILE --temperature=0
    python -m prope.sample --workdir=runs/smollm2 --chat

The prompts are read in chunks, which fill the KV cache; one compiled loop then samples a token for
every row at a time. A row's continuation does not depend on the other rows, up to rounding. Row i
draws with fold_in(key(seed), i). Started on every host of a pod as training is, it uses all their
devices; process 0 reads the prompts and prints.

With --chat a prompt is a message to a model that was made for chats: the chat template in its
tokenizer's folder writes it, <bos> included, and special tokens of the template end the answer.
Without prompts, the lines of stdin up to an empty one are a chat, each answered in view of all
before it.
"""

import functools

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import usage_error
from prope.inference import options


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("workdir", "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to sample from; the newest by default")
    flags.DEFINE_multi_string("prompt", [], "text to continue")
    command.define_place("prompts", "file with one prompt per line; empty lines are skipped")
    start = "token before a prompt: that of a document, <bos> or the family's separator, or none"
    flags.DEFINE_enum("start", "document", ["document", "none"], start)
    flags.DEFINE_boolean("chat", False, "prompts are messages of a chat, not text to continue")
    options.define_dtype()
    length = "largest number of tokens per prompt; a row ends earlier at <eos>"
    flags.DEFINE_integer("length", 200, length, lower_bound=1)
    temperature = "0 takes the likeliest token, 1 samples from the model"
    flags.DEFINE_float("temperature", 0.8, temperature, lower_bound=0.0, upper_bound=1e6)
    top_k = "sample from this many likeliest tokens; from all by default"
    flags.DEFINE_integer("top_k", None, top_k, lower_bound=1)
    top_p = "of these, from the fewest likeliest ones that have this probability"
    flags.DEFINE_float("top_p", 1.0, top_p, lower_bound=1e-9, upper_bound=1.0)
    flags.DEFINE_integer("seed", 0, "of the random numbers", lower_bound=0, upper_bound=2**32 - 1)
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """Samples; returns the texts and the speed, of a chat those of its last answer."""
    from prope.inference.generation import Sampling, continue_prompts, read_message, read_prompts
    from prope.runtime.processes import call_on_first

    sampling = Sampling(FLAGS.length, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    start = FLAGS.start
    ask = str  # no message
    if FLAGS.chat:
        if FLAGS["start"].present:
            raise usage_error("--start", start, "has no effect with --chat; leave it out")
        start = "chat"
        if not (FLAGS.prompt or FLAGS.prompts):
            ask = functools.partial(call_on_first, read_message)
    first = ask()
    texts = [first] if first else call_on_first(lambda: read_prompts(FLAGS.prompt, FLAGS.prompts))
    return continue_prompts(
        FLAGS.workdir, FLAGS.step, texts, sampling, FLAGS.seed, start, FLAGS.dtype, ask
    )


if __name__ == "__main__":
    command.run(main, define_flags, multihost=True)
