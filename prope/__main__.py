"""Lists the commands of prope, a line each.

python -m prope
"""

import ast
import pathlib
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


def _first_line(command: str) -> str:
    """Reads the first line of a command's docstring without importing the module."""
    path = pathlib.Path(__file__).parent.joinpath(*command.split("."))
    module = ast.parse(path.with_suffix(".py").read_text())
    return ast.get_docstring(module).splitlines()[0]


def _list() -> str:
    """Returns the text that is printed."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m prope.{name:{width}}  {_first_line(name)}" for name in COMMANDS]
    lines += ["", "Each answers --help. In the repository: python launch/sweep.py for many runs."]
    return "\n".join(lines)


others = [argument for argument in sys.argv[1:] if argument not in ("--help", "-h")]
if others:
    remedy = "write python -m prope.COMMAND, such as prope.train"
    print(f"error: unexpected argument {others[0]}: {remedy}", file=sys.stderr)
    sys.exit(2)
print(_list())
