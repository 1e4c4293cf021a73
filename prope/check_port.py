"""Checks what a port of p-RoPE computes, and names its mistake from its values alone.

    python -m prope.check_port --write_inputs=runs/inputs.npz
    python -m prope.check_port --values=runs/values.npz

The first writes the inputs of every case; prope/golden/README.md says what a port computes from
them, all or some of it.
Exit code 0: equal to the golden vectors. 1: not equal, and the output says why. 2: the file cannot
be checked.
"""

import json
import sys

from absl import flags
from absl.flags import FLAGS

from prope import command
from prope.errors import UsageError, log, usage_error


def define_flags() -> None:
    """Defines the command's flags."""
    flags.DEFINE_string("values", None, "the port's arrays, an .npz file or URL")
    flags.DEFINE_string(
        "write_inputs", None, "writes the inputs of every case into this .npz file or URL"
    )
    accept = (
        "accept angles rounded to float32, as in transformers and gemma: "
        "off by 6e-4 at position 8191"
    )
    flags.DEFINE_boolean("float32_angles", False, accept)


def main() -> dict:
    """Writes the inputs, or checks the values; exits with code 1 where they are not equal."""
    if (FLAGS.values is None) == (FLAGS.write_inputs is None):
        raise UsageError(
            "give either --write_inputs, a file to write, or --values, the file that the port "
            "has written"
        )
    from prope.golden.check import check, input_file, load_cases, read_values
    from prope.runtime.files import as_path, check_writable, write_atomic

    if FLAGS.write_inputs is not None:
        output = as_path("write_inputs", FLAGS.write_inputs)
        if output.is_dir():
            remedy = "name a file in it, such as inputs.npz"
            raise usage_error("--write_inputs", output, "is a directory", remedy)
        check_writable("folder of --write_inputs", output.parent)
        write_atomic(output, input_file())
        return {"output": str(output), "cases": list(load_cases())}
    verdict, result = check(read_values(as_path("values", FLAGS.values)), FLAGS.float32_angles)
    log.info(verdict)
    if not result["equal"]:
        print(json.dumps(result), flush=True)
        sys.exit(1)
    return result


if __name__ == "__main__":
    command.run(main, define_flags, uses_devices=False)
