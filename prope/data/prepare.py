"""Tokenises a dataset into the token store that training reads.

    python -m prope.data.prepare --config=configs/quickstart.py

Training does the same on first use. Rerun the same command to resume.
"""

from absl import flags

from prope import command


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_config()
    flags.mark_flags_as_required(["config"])


def main() -> dict:
    """Prepares the store; returns its path, size and fingerprint."""
    from prope.data.store.build import prepare

    return prepare(command.read_spec())


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
