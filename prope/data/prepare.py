"""Stages 2 to 4: documents to tokens on disk, once: python -m prope.data.prepare --config=F.

Training does the same on first use. Workers turn parts of the source into files, in any order; when all parts are
there they are put one after the other into the store, which then gets its name. A process that is stopped, however
hard, leaves parts that the next one goes on from, and never a store that is not whole.
"""

from absl import flags
from ml_collections import config_flags

from prope import command
from prope.data.store.build import prepare
from prope.runtime.validate import validate


def define_flags() -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file("config", None, "the run's config file, such as configs/quickstart.py")
    flags.mark_flags_as_required(["config"])


def main() -> dict:
    """The command."""
    config = flags.FLAGS.config
    validate(config)
    return prepare(config)


if __name__ == "__main__":
    command.run(main, define_flags)
