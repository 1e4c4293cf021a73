"""What every command shares: flags in, one JSON object out, `--help`, invalid input answered in one line.

A command is a module with `define_flags()`, `main() -> dict` and, at its end, `command.run(main, define_flags)`.
Its docstring is the text of `--help`. It imports JAX and its room inside `main`, so that `--help` answers at once.
Logs go to stderr; the dictionary that `main` returns is printed to stdout as the last line.
"""

import importlib.util
import json
import logging
import os
import pathlib
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from absl import flags

from prope.config import FIELDS, default_config, flat
from prope.errors import INTERRUPTED, UsageError, as_ending, is_disk_full, log, nearest

_WIDTH = 120  # columns of --help
_STOPPED = "stopped by Ctrl-C; the same command goes on from the last checkpoint"
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple",
    type(None): "a whole number or None",
}
_ACCELERATORS = ("accel*", "vfio/*", "nvidia*", "kfd")  # device files of TPUs and GPUs
_COMPILERS = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")


def run(
    main: Callable[[], dict | None],
    define_flags: Callable[[], None],
    leave: Callable[[int], None] = sys.exit,
    uses_devices: bool = True,
    joins: bool = False,
) -> None:
    """Parses the flags, runs `main` and prints its result; an expected error becomes one line and an exit code.

    Args:
      main: computes the result; None prints nothing.
      define_flags: defines the command's absl flags.
      leave: called with the exit code: 2 for invalid input, 1 for a failed run, others in `errors.py`.
      uses_devices: whether JAX computes in this process.
      joins: whether several processes run the command together where the environment says so; the first one prints.
    """
    prepare(define_flags, main.__globals__["__doc__"], uses_devices)
    _on_ctrl_c(_interrupt)
    sys.unraisablehook = _interrupt_later
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    for library in ("absl", "gcsfs"):  # Orbax and gcsfs log what they also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        _parse_flags(sys.argv, _define(define_flags))
        if uses_devices and not _accelerators():
            from prope.runtime.memory import (
                reuse_memory,
            )  # imports JAX, after the flags are checked

            reuse_memory()
        if joins:
            from prope.runtime import processes

            leave = processes.leave
            with processes.joined():
                result = main()
            result = result if processes.is_first() else None
        else:
            result = main()
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    except KeyboardInterrupt as error:
        failure, message, code = error, _STOPPED, INTERRUPTED
    except Exception as error:
        failure, ending = error, as_ending(error)
        kind = "error" if isinstance(ending, UsageError) else "stopped"
        message, code = (
            (f"{kind}: {ending}", ending.code) if ending else (traceback.format_exc().rstrip(), 1)
        )
    _on_ctrl_c(signal.SIG_DFL)  # leaving may take seconds
    print(message, file=sys.stderr, flush=True)
    (os._exit if is_disk_full(failure) else leave)(
        code
    )  # at exit, libraries would write to the full disk once more


def prepare(define_flags: Callable[[], None], doc: str, uses_devices: bool = True) -> None:
    """Answers --help with `doc` and the flags, or prepares for the import of JAX; call it before."""
    if not {"--help", "-h"} & set(sys.argv[1:]):
        _on_ctrl_c(_leave)
        if uses_devices and not _accelerators() and any(map(importlib.util.find_spec, _COMPILERS)):
            os.environ.setdefault(
                "JAX_PLATFORMS", "cpu"
            )  # they log errors where there is no TPU or GPU
        return
    own = [flags.FLAGS[name] for name in _define(define_flags)]
    rows = (
        (f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}", _meaning(flag)) for flag in own
    )
    text = f"{doc.strip()}\n\nFlags:\n{_table(rows)}"
    if "config" in flags.FLAGS:
        text += "\n\nConfig fields, set by --config.FIELD=VALUE after --config, with the defaults of prope/config.py:\n"
        text += _table(
            (f"{name}={value}", comment) for name, (value, comment) in _describe_fields().items()
        )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    print(text, flush=True)
    sys.exit(0)


def _accelerators() -> list[pathlib.Path]:
    """Lists the device files of TPUs and GPUs; none where JAX is told to use the CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return [path for name in _ACCELERATORS for path in pathlib.Path("/dev").glob(name)]


def _on_ctrl_c(handler) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, handler)


def _leave(_number: int, _frame) -> None:
    """Leaves at once: while JAX is imported there is nothing to tidy up."""
    print(_STOPPED, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _interrupt(_number: int, _frame) -> None:
    """Raises KeyboardInterrupt once; another Ctrl-C ends the process."""
    _on_ctrl_c(signal.SIG_DFL)
    raise KeyboardInterrupt


def _interrupt_later(ignored) -> None:
    """Repeats a Ctrl-C whose KeyboardInterrupt was ignored, as in a callback of the garbage collector such as JAX's."""
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        _on_ctrl_c(_interrupt)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)


def _define(define_flags: Callable[[], None]) -> list[str]:
    """Defines the flags; returns their names, without those of libraries."""
    others = set(flags.FLAGS)
    define_flags()
    return [name for name in flags.FLAGS if name not in others]


def _meaning(flag: flags.Flag) -> str:
    """The flag's help, whether it is required, and its default."""
    required = any("must have a value" in validator.message for validator in flag.validators)
    default = "none" if flag.default in (None, []) else flag.default_as_str.strip("'")
    meaning = re.sub(r"\s+", " ", flag.help)  # absl adds spaces of its own
    return f"{meaning} ({'required' if required else f'default: {default}'})"


def _describe_fields() -> dict[str, tuple[object, str]]:
    """Returns (default, meaning) of every config field, by dotted name."""
    defaults = flat(default_config())
    return {name: (defaults[name], field.meaning) for name, field in FIELDS.items()}


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns as text: names, and wrapped meanings."""
    rows = list(rows)
    indent = " " * min(34, max(len(name) for name, _ in rows) + 4)
    lines = []
    for name, meaning in rows:
        name = f"  {name}".ljust(len(indent))
        if not name.endswith("  "):
            lines, name = [*lines, name], indent
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=name, subsequent_indent=indent)
    return "\n".join(lines)


def _parse_flags(argv: list[str], own: list[str]) -> None:
    for argument, following in zip(
        argv, [*argv[1:], ""], strict=True
    ):  # absl would look only when the value is used
        match = re.fullmatch(r"--?config(=.*)?", argument)
        path = (match[1][1:] if match[1] else following).split(":")[0] if match else ""
        if path and not os.path.isfile(path):
            raise UsageError(
                f"--config={path}: there is no such file; the project's own are in configs/"
            )
    try:
        rest = flags.FLAGS(argv)
    except Exception as error:  # absl's own, and whatever a config file raises
        raise UsageError(_flag_error(error, argv, own)) from None
    if len(rest) > 1:
        raise UsageError(
            f"unexpected argument {rest[1]!r}: every argument is a flag, --name=value; --help lists them"
        )
    if nan := [
        name for name in own if flags.FLAGS[name].value != flags.FLAGS[name].value
    ]:  # within any bounds of absl
        raise UsageError(f"--{nan[0]}=nan: must be a number")


def _flag_error(error: Exception, argv: list[str], own: list[str]) -> str:
    """One line for an error in a flag, an override of a config field, or the config file itself."""
    known = flat(default_config()) if "config" in own else {}
    overrides = [
        match.groups()
        for argument in argv
        if (match := re.match(r"--?config\.([\w.]+)=?(.*)", argument))
    ]
    for name, _ in overrides if known else ():
        if name not in known:
            return f"--config.{name}: there is no such config field{nearest(name, known)}"
    if isinstance(error, flags.UnrecognizedFlagError):
        wrong, names = (
            error.flagname,
            {part: f"config.{n}" for n in reversed(known) for part in (n, n.split(".")[-1])},
        )
        names |= {name: name for name in own}
        longer = sorted((name for name in names if wrong in name and len(wrong) > 3), key=len)
        close = longer or get_close_matches(wrong, names, 1, 0.5)
        hint = f" (did you mean --{names[close[0]]}?)" if close else ""
        return f"--{wrong}: there is no such flag{hint}; --help lists the flags"
    if missing := re.search(r"Flag (--\w+) must have a value", str(error)):
        return f"{missing[1]}: must be given; --help lists the flags"
    lines = [line for line in str(*error.args[:1]).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    if "before a value for --config" in lines[0]:
        return "--config.FIELD=VALUE: must come after --config=FILE"
    for name, value in overrides:
        if name in str(error):
            return f"--config.{name}={value}: must be {_KINDS[type(known[name])]}: {_describe_fields()[name][1]}"
    if number := re.match(r"flag --(\w+)=(.*): (invalid literal|could not convert)", lines[0]):
        return f"--{number[1]}={number[2]}: must be {flags.FLAGS[number[1]].parser.syntactic_help}"
    if isinstance(error, flags.Error) and len(lines) == 1:
        return lines[0]
    # The config file itself failed. Where is in the traceback, or, where ml_collections quotes that, in the text.
    frames = [
        (f.filename, f.lineno)
        for f in traceback.extract_tb(error.__traceback__)
        if f.name == "get_config"
    ]
    frames += re.findall(r'File "(.+)", line (\d+), in get_config', str(error))
    place = "{} line {}: ".format(*frames[-1]) if frames else ""
    if isinstance(error, AttributeError | KeyError) and (
        unknown := re.search(r"['\"]([\w.]+)['\"]", lines[0])
    ):
        hint = nearest(unknown[1], [name.split(".")[-1] for name in known])
        return f"{place}there is no config field {unknown[1]}{hint}"
    return f"{place}{lines[-1]}"
