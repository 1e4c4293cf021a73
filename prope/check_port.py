"""Checks what a port of p-RoPE computes, and names its mistake from its values alone.

    python -m prope.check_port --values=runs/values.npz

prope/golden/README.md says what a port computes, all or some of it, and from which inputs.
Exit code 0: equal to the golden vectors. 1: not equal, and the output says why. 2: the file cannot
be checked.
"""

import json
import sys

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import log


def define_flags() -> None:
    """Defines the command's flags."""
    command.define_place("values", "the port's arrays, an .npz file or URL")
    accept = (
        "accept angles rounded to float32, as in transformers and gemma: "
        "off by 6e-4 at position 8191"
    )
    flags.DEFINE_boolean("float32_angles", False, accept)
    flags.mark_flags_as_required(["values"])


def main() -> dict:
    """Checks the values; exits with code 1 where they are not equal."""
    from prope.golden.check import check, read_values
    from prope.runtime.files import as_path

    values = read_values(as_path("--values", FLAGS.values))
    verdict, result = check(values, FLAGS.float32_angles)
    log.info(verdict)
    if not result["equal"]:
        print(json.dumps(result), flush=True)
        sys.exit(1)
    return result


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
