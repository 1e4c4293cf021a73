"""Lists the commands of prope, a line each.

python -m prope
"""

import pathlib
import pydoc
import sys

COMMANDS = (
    "train",
    "evaluate",
    "sample",
    "report",
    "analyze",
    "choose",
    "ask",
    "import_hf",
    "export_hf",
    "export_gguf",
    "check_port",
    "plan",
    "bench",
    "data.prepare",
    "data.inspect",
    "data.train_tokenizer",
)


others = [argument for argument in sys.argv[1:] if argument not in ("--help", "-h")]
if others:
    remedy = "write python -m prope.COMMAND, such as prope.train"
    print(f"error: unexpected argument {others[0]}: {remedy}", file=sys.stderr)
    sys.exit(2)
for name in COMMANDS:
    file = pathlib.Path(__file__).parent.joinpath(*name.split(".")).with_suffix(".py")
    print(f"  python -m prope.{name:{max(map(len, COMMANDS))}}  {pydoc.synopsis(str(file))}")
print("\nEach answers --help. In the repository: python launch/sweep.py for many runs.")
