"""Trains a SentencePiece model on the training documents of a dataset.

    python -m prope.data.train_tokenizer --config=C.py --output=M.model --vocab_size=1000

It learns from a sample of lines that a hash chooses, so the same command writes the same file. The
model has Gemma's special ids, and every text decodes to its exact bytes.
"""

from absl import flags
from absl.flags import FLAGS

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config("the config file that names the dataset")
    command.define_place("output", "file or URL to write, such as tokenizer.model")
    default = "config.model.vocab_size by default"
    flags.DEFINE_integer("vocab_size", None, f"ids of the tokenizer; {default}")
    kinds = ["bpe", "unigram"]
    kind = "the kind of model; bpe, as Gemma's, has the same ids in llama.cpp, too"
    flags.DEFINE_enum("model_type", "bpe", kinds, kind)
    flags.DEFINE_integer("sample_bytes", 2**26, "learn from at most this much text", lower_bound=1)
    flags.mark_flags_as_required(["config", "output"])


def main() -> dict:
    """Trains the model; returns its path and statistics."""
    from prope.data.vocabulary import train_tokenizer

    spec = command.read_spec()
    vocab_size = spec.model.vocab_size if FLAGS.vocab_size is None else FLAGS.vocab_size
    return train_tokenizer(spec, FLAGS.output, vocab_size, FLAGS.model_type, FLAGS.sample_bytes)


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
