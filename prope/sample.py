"""Continues prompts with a saved checkpoint: python -m prope.sample --workdir=W --prompt=TEXT.

The prompts are read in one pass, which fills the KV cache; then one compiled loop makes a token of every row at a time.
Prompts of different lengths are padded on the right. A row's positions are those of its prompt alone, it sees no
padding, and its random numbers are its own: but for rounding, it becomes what it would alone.
"""

from absl import flags

from prope import command
from prope.inference.generation import Sampling, continue_prompts, read_prompts


def define_flags() -> None:
    """The command's flags."""
    flags.DEFINE_string("workdir", None, "directory of the run")
    flags.DEFINE_integer("step", None, "checkpoint to sample from; the newest by default")
    flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times, the same text too")
    flags.DEFINE_string("prompts", None, "file with a text to continue on each line; empty lines are left out")
    flags.DEFINE_integer("length", 200, "tokens to make for each prompt; less where the document ends")
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token, 1 samples from the model")
    flags.DEFINE_integer("top_k", None, "sample from this many likeliest tokens; from all by default")
    flags.DEFINE_float("top_p", 1.0, "of these, from the fewest likeliest ones that have this share")
    flags.DEFINE_integer("seed", 0, "of the random numbers", lower_bound=0, upper_bound=2**32 - 1)
    flags.mark_flags_as_required(["workdir"])


def main() -> dict:
    """The command."""
    given = flags.FLAGS
    sampling = Sampling(given.length, given.temperature, given.top_k, given.top_p)
    texts = read_prompts(given.prompt, given.prompts)
    return continue_prompts(given.workdir, given.step, texts, sampling, given.seed)


if __name__ == "__main__":
    command.run(main, define_flags)
