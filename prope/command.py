"""Shares what every command does: reads flags, prints a JSON object, answers --help and errors.

A command is a module with `define_flags()`, `main() -> dict` and, at its end,
`command.run(main, define_flags)`. Its docstring is the text of `--help`. It imports JAX and its
room inside `main`, so that `--help` and invalid input are answered at once. Logs go to stderr; the
dictionary that `main` returns is printed to stdout as the last line.
"""

import contextlib
import difflib
import importlib.util
import json
import logging
import os
import pathlib
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser

from prope.config import describe_left, describe_unknown, python_file, resolve
from prope.errors import (
    INTERRUPTED,
    NO_PLATFORM,
    UsageError,
    find_full,
    log,
    nearest,
    to_user_error,
    usage_error,
)
from prope.spec.run import FIELDS, Spec

_WIDTH = 100  # columns of --help
_MAX_INDENT = 34
_STOPPED = "stopped by Ctrl-C; the same command goes on from the last checkpoint, if there is one"
_FIELDS_HELP = (
    "--config.FIELD=VALUE, after --config, sets a config field; prope/spec has all of them, "
    "with their defaults and meanings."
)
_RESOLVED = set()  # "config", where it must be valid as it is
_ACCELERATORS = ("accel*", "vfio/*", "nvidia*", "kfd")  # device files of TPUs and GPUs
# Packages of which any brings JAX a platform, by its name in JAX_PLATFORMS.
_PLUGINS = {"tpu": ["libtpu"], "cuda": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}


def run(
    main: Callable[[], dict | None],
    define_flags: Callable[[], None],
    leave: Callable[[int], None] = sys.exit,
    uses_devices: bool = True,
    multihost: bool = False,
    restart_when_stuck: bool = False,
) -> None:
    """Parses the flags, runs `main` and prints its result.

    An expected error becomes one line and an exit code.

    Args:
      main: computes the result; None prints nothing.
      define_flags: defines the command's absl flags.
      leave: called with the exit code: 2 for invalid input, 1 for a failed run, others in
        `errors.py`.
      uses_devices: whether JAX computes in this process.
      multihost: whether several processes run the command together where the environment says so;
        the first one prints.
      restart_when_stuck: whether it ends, to be started again, after an hour without progress.
    """
    if not flags.FLAGS.is_parsed():  # else `prepare` was called before other imports
        prepare(define_flags, main.__globals__["__doc__"], uses_devices)
    _on_ctrl_c(_interrupt)
    try:
        # From here on the imports import JAX.
        if uses_devices:
            from prope.runtime.environment import check_environment

            check_environment()
            if not accelerators():
                from prope.runtime.memory import reuse_memory

                reuse_memory()
        if multihost:
            from prope.runtime import processes, watchdog

            leave = processes.leave
            minutes = watchdog.MINUTES if restart_when_stuck else None
            with watchdog.watching(minutes), processes.joined():
                result = main()
            if not processes.is_first():
                result = None
        else:
            result = main()
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    except KeyboardInterrupt:
        message = _STOPPED
        code = INTERRUPTED
        leave = os._exit  # at exit JAX clears its caches: a crash where a compilation was cut off
    except Exception as error:
        message, code = _describe_error(error)
        if find_full(error) or isinstance(error, BrokenPipeError):
            leave = os._exit  # at exit, Python and libraries would write there once more
    _on_ctrl_c(signal.SIG_DFL)  # leaving may take seconds
    with contextlib.suppress(Exception):  # stdout may be closed, or its disk full
        sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    leave(code)


def prepare(define_flags: Callable[[], None], doc: str, uses_devices: bool = True) -> None:
    """Answers --help with `doc`, or parses and checks what needs no JAX, whose import may follow.

    Invalid flags, an invalid config or JAX_PLATFORMS end the process with one line.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
        print(_help_text(define_flags, doc), flush=True)
        sys.exit(0)
    _on_ctrl_c(_leave)  # while JAX is imported there is nothing to tidy up
    if os.getpid() == 1:  # in a container: there a signal without a handler does nothing
        signal.signal(signal.SIGTERM, _leave)
    _log_to_stderr()
    # Pictures are written into files. A notebook names a backend that may not be installed here.
    os.environ["MPLBACKEND"] = "agg"
    try:
        if uses_devices:
            _check_platforms()
        _parse_flags(sys.argv, _define(define_flags))
        if _RESOLVED and flags.FLAGS.config is not None:
            read_spec()  # after flags that are missing, for this imports JAX
    except Exception as error:
        message, code = _describe_error(error)
        print(message, file=sys.stderr)
        sys.exit(code)


def _check_platforms() -> None:
    """Raises UsageError where no platform that JAX_PLATFORMS names is installed.

    Where it names none, chooses the CPU if there is no device of the others that are installed:
    their packages would log errors.
    """
    find = importlib.util.find_spec
    asked = os.environ.get("JAX_PLATFORMS")
    installed = [name for name in _PLUGINS if any(map(find, _PLUGINS[name]))]
    if not asked and installed and not accelerators():
        os.environ["JAX_PLATFORMS"] = "cpu"
    if asked:  # what JAX logs, with tracebacks, it also raises
        logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    installed.append("cpu")
    # JAX's other packages for platforms are in the namespace jax_plugins.
    if asked and not find("jax_plugins") and set(asked.split(",")).isdisjoint(installed):
        problem = f"is not installed, only {' and '.join(installed)}"
        raise usage_error("JAX_PLATFORMS", asked, problem, NO_PLATFORM)


def _log_to_stderr() -> None:
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.StreamHandler(sys.stderr))
    for library in ("absl", "gcsfs"):  # Orbax and gcsfs log what they also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)


def _describe_error(error: Exception) -> tuple[str, int]:
    """Returns the text that ends a command, and its exit code."""
    known = to_user_error(error)
    if known is None:
        return "".join(traceback.format_exception(error)).rstrip(), 1
    kind = "error" if isinstance(known, UsageError) else "stopped"
    return f"{kind}: {known}", known.code


def accelerators() -> list[pathlib.Path]:
    """Lists the device files of TPUs and GPUs; none where JAX is told to use the CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    return [path for name in _ACCELERATORS for path in pathlib.Path("/dev").glob(name)]


def _on_ctrl_c(handler) -> None:
    # A job in the background ignores Ctrl-C, and goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, _frame) -> None:
    """Leaves at once, with the code of a process that this signal has ended."""
    message = _STOPPED if number == signal.SIGINT else "stopped by SIGTERM"
    print(message, file=sys.stderr, flush=True)
    os._exit(128 + number)


def _interrupt(_number: int, _frame) -> None:
    """Raises KeyboardInterrupt once; another Ctrl-C ends the process."""
    _on_ctrl_c(signal.SIG_DFL)
    raise KeyboardInterrupt


def define_place(name: str, help: str, by_seed: bool = False) -> None:
    """Defines a flag whose value is a place, a local path or a URL; it may have {seed} if asked."""
    parser = _Place(f"--{name}", by_seed)
    flags.DEFINE(parser, name, None, help, serializer=flags.ArgumentSerializer())


def define_config(help: str = "the run's config file, such as configs/quickstart.py") -> None:
    """Defines --config, a config that must be valid as it is; `read_spec` returns its spec."""
    config_flags.DEFINE_config_file("config", None, help)
    _RESOLVED.add("config")


def read_spec() -> Spec:
    """Returns the spec of --config; raises UsageError where it is not valid."""
    return resolve(flags.FLAGS.config)


class _Place(flags.ArgumentParser):
    """Parses a place; raises UsageError for one that cannot be used."""

    def __init__(self, field: str, by_seed: bool):
        self._field = field
        self._by_seed = by_seed

    def parse(self, argument: str) -> str:
        from prope.runtime.files import as_path

        if self._by_seed and "{seed}" in argument:
            as_path(self._field, argument.replace("{seed}", "0"))
            return argument
        return str(as_path(self._field, argument))


def _define(define_flags: Callable[[], None]) -> list[str]:
    """Defines the flags; returns their names, without those of libraries."""
    defined_before = set(flags.FLAGS)
    define_flags()
    return [name for name in flags.FLAGS if name not in defined_before]


def _help_text(define_flags: Callable[[], None], doc: str) -> str:
    defined = [flags.FLAGS[name] for name in _define(define_flags)]
    rows = [(f"--{'[no]' * flag.boolean}{flag.name}", _meaning(flag)) for flag in defined]
    text = f"{(doc or '').strip()}\n\nFlags:\n{_table(rows)}"  # python -OO has no docstrings
    if "config" in flags.FLAGS:
        text += "\n\n" + textwrap.fill(_FIELDS_HELP, _WIDTH)
    return text


def _meaning(flag: flags.Flag) -> str:
    """Returns the flag's help, and whether it is required or its default."""
    meaning = re.sub(r"\s+", " ", flag.help)  # absl adds spaces
    if any("must have a value" in validator.message for validator in flag.validators):
        return f"{meaning} (required)"
    default = "none" if flag.default in (None, []) else flag.default_as_str.strip("'")
    return f"{meaning} (default: {default})"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Formats names and wrapped meanings as two columns."""
    width = min(_MAX_INDENT, max(len(name) for name, _ in rows) + 4)
    indent = " " * width
    lines = []
    for name, meaning in rows:
        start = f"  {name}".ljust(width)
        if not start.endswith("  "):
            lines.append(start)
            start = indent
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=start, subsequent_indent=indent)
    return "\n".join(lines)


def _parse_flags(argv: list[str], names: list[str]) -> None:
    """Parses the command line; raises UsageError for what is wrong in the flags `names`."""
    argv = _open_configs(argv)
    try:
        rest = flags.FLAGS(argv)
        if "config" in names and flags.FLAGS.config is not None:
            flags.FLAGS.config.copy_and_resolve_references()  # a file that is missing raises here
    except Exception as error:  # absl's errors, and whatever a config file raises
        raise UsageError(_flag_error(error, argv, names)) from None
    if len(rest) > 1:
        rule = "every argument is a flag, --name=value; --help lists them"
        raise UsageError(f"unexpected argument {rest[1]!r}: {rule}")
    for name in names:
        value = flags.FLAGS[name].value
        if value != value:  # within any bounds of absl
            raise usage_error(f"--{name}", "nan", "must be a number")


def _open_configs(argv: list[str]) -> list[str]:
    """Makes `--config` name a Python file: for W/config.json, one that reads it.

    Raises UsageError for a pipe or a device, which would be waited for.
    """
    opened = []
    for before, argument in zip(["", *argv], argv, strict=False):
        match = re.fullmatch(r"(--?config=)?(.+)", argument, re.DOTALL)
        if match and (match[1] or before in ("--config", "-config")):
            path = os.path.expanduser(match[2])
            if os.path.exists(path) and not os.path.isfile(path):
                remedy = "the project's are in configs/"
                raise usage_error("--config", path, "is not a file", remedy)
            argument = f"{match[1] or ''}{python_file(path)}"
        opened.append(argument)
    return opened


class _OptionalNumber(flags.ArgumentParser):
    """Parses a number, or None, for a config field that may have no value."""

    def __init__(self, parser: flags.ArgumentParser):
        self._parser = parser
        self.syntactic_help = parser.syntactic_help

    def parse(self, argument: str):
        return None if argument == "None" else self._parser.parse(argument)


class _Words(tuple_parser.TupleParser):
    """Parses a tuple as Python writes it, or words: a,b is ("a", "b"), and no text is ()."""

    def parse(self, argument):
        try:
            value = super().parse(argument)
        except ValueError:
            if re.search(r"[()\[\]'\"]", argument):
                raise
            value = (argument,)  # csv,my_module:function, which is no Python
        if value == (argument,):
            value = tuple(re.findall(r"[^\s,()\[\]'\"]+", argument))
        return value


for _type, _parser in ((int, flags.IntegerParser()), (float, flags.FloatParser())):
    config_flags.register_flag_parser_for_type(_type, _OptionalNumber(_parser))
config_flags.register_flag_parser_for_type(tuple, _Words())


def _flag_error(error: Exception, argv: list[str], names: list[str]) -> str:
    """Describes an error in a flag, a config field or a config file in one line."""
    if isinstance(error, UsageError):
        return str(error)
    fields = FIELDS if "config" in names else {}
    for argument in argv:
        override = re.match(r"--?config\.([\w.]+)", argument)
        if override and fields and override[1] not in fields:
            return f"--config.{override[1]}: {describe_unknown(override[1])}"
    if isinstance(error, flags.UnrecognizedFlagError):
        hint = _nearest_flag(error.flagname, names, fields)
        return f"--{error.flagname}: there is no such flag{hint}; --help lists the flags"
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    quotes_traceback = "Traceback" in str(error)
    if isinstance(error, flags.Error) and not quotes_traceback:
        value = re.match(r"flag --config\.([\w.]+)=", lines[0])
        meaning = f"; {FIELDS[value[1]].metadata['meaning']}" if value else ""
        return lines[0] + meaning
    # The config file failed.
    trace = "".join(traceback.format_exception(error))
    frames = re.findall(r'File "(.+)", line (\d+), in get_config', trace)
    place = "{} line {}: ".format(*frames[-1]) if frames else ""
    # A field of a group, which may not be set, or a group, which is not found.
    unknown = re.search(r"""(?:Key "|^"')(\w+)(?:" does not exist|'"$)""", "\n".join(lines))
    if unknown:
        if left := describe_left(unknown[1]):
            return f"{place}config.{unknown[1]}: {left}"
        hint = nearest(unknown[1], [name.split(".")[-1] for name in FIELDS])
        return f"{place}there is no config field {unknown[1]}{hint}"
    if isinstance(error, OSError) and not frames:
        return f"--config: {lines[-1].strip()}; the project's config files are in configs/"
    return place + lines[-1]


def _nearest_flag(name: str, names: Sequence[str], fields: dict) -> str:
    """Hints at the flag, or at the config field by its last name, that `name` resembles."""
    flag_by_name = {field.split(".")[-1]: f"--config.{field}" for field in reversed(fields)}
    flag_by_name |= {flag: f"--{flag}" for flag in names}
    matches = difflib.get_close_matches(name.split(".")[-1], flag_by_name, n=1, cutoff=0.5)
    return f" (did you mean {flag_by_name[matches[0]]}?)" if matches else ""
