"""Functions of the user's own, which a config names as "my_module:function"."""

import hashlib
import importlib
import inspect
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from prope.errors import first_line, nearest, usage_error

# A version of TFDS, as in lm1b:1.0.0, is no function.
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class UserFunction(NamedTuple):
    """A function of the user's own."""

    call: Callable
    file: str  # of its module
    source_hash: str  # sha256 of that file

    def describe(self, error: BaseException) -> str:
        """Returns an exception that the function has raised in one line, with its place."""
        return _describe(error, self.file)


def is_user_code(name: str) -> bool:
    """Returns whether the value of a config field names a function as "my_module:function"."""
    return _NAME.fullmatch(name) is not None


def load_function(field: str, name: str) -> UserFunction:
    """Imports "my_module:function"; the working directory is searched first, as for a script.

    Raises UsageError about the config field where there is no such module or function, where the
    module raises, and where it has no source file.
    """
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            remedy = f"put its file into {folder}, where the command starts; leave .py out"
            raise usage_error(field, name, f"there is no module {missing}", remedy) from None
        problem = f"{module_name} cannot be imported: {_describe(error)}"
        raise usage_error(field, name, problem, "mend it") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = nearest(function_name, vars(module))
        raise usage_error(field, name, f"{module_name} has no function {function_name}{hint}")
    file = inspect.getsourcefile(module) if getattr(module, "__file__", None) else None
    if file is None or not os.path.exists(file):
        problem = f"{module_name} has no .py file, by which its changes are noticed"
        raise usage_error(field, name, problem, "wrap the function in a module of your own")
    source_hash = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
    return UserFunction(function, file, source_hash)


def _describe(error: BaseException, file: str = "") -> str:
    """Returns an exception in one line, with the last line of `file` that it came through.

    Without `file` it is the line that has raised it.
    """
    text = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):  # which names its own place
        return text
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f"{text} ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})"
