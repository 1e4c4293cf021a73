"""What every command shares: flags in, one JSON object out, bad input answered in one line.

A command is a module with `define_flags()`, `main() -> dict` and, at its end, `command.run(main, define_flags)`.
Logs go to stderr; the dictionary that `main` returns is printed to stdout as the last line.
"""

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable

from absl import flags

from prope.config import default_config, flat
from prope.errors import FAILED, INTERRUPTED, UNUSABLE, RunFailed, Stopped, UsageError, is_disk_full, nearest


def run(
    main: Callable[[], dict | None], define_flags: Callable[[], None], leave: Callable[[int], None] = sys.exit
) -> None:
    """Parses the flags, runs `main`, prints its result if it has one; or ends with one line and an exit code.

    `leave` is called with the code: 2 for bad input, 1 for a failed run, those of `errors.py`.
    """
    ours = logging.getLogger("prope")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs what it also raises, from every thread
    try:
        define_flags()
        _parse_flags(sys.argv)
        result = main()
    except UsageError as error:
        message, code = f"error: {error}", UNUSABLE
    except RunFailed as error:
        message, code = f"stopped: {error}", FAILED
        if is_disk_full(error):  # at exit, libraries would try to write to the full disk once more
            leave = os._exit
    except Stopped as error:
        message, code = f"stopped: {error}", error.code
    except KeyboardInterrupt:
        message, code = "stopped by Ctrl-C; the same command goes on from the last checkpoint", INTERRUPTED
    except Exception as error:
        if not is_disk_full(error):
            raise
        reason = str(error).splitlines()[0]
        print(
            f"error: no space left on the device ({reason}); what was saved before is whole: free some space, then run "
            "the same command again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)
    else:
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    print(message, file=sys.stderr, flush=True)
    leave(code)


def _parse_flags(argv: list[str]) -> None:
    for argument in argv:  # the flag would only look when its value is used
        path = re.match(r"--config=([^:]+)", argument)
        if path and not os.path.isfile(path[1]):
            raise UsageError(f"--config={path[1]}: there is no such file; the project's own are in configs/")
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise UsageError(_flag_error(error, argv)) from None
    # What a config file, or an override of one of its fields, may raise while it is applied.
    except (AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
        raise UsageError(_flag_error(error, argv)) from None
    if len(rest) > 1:
        raise UsageError(f"unexpected argument {rest[1]!r}: every argument is a flag, --name=value")


def _flag_error(error: Exception, argv: list[str]) -> str:
    """One line for what went wrong in a flag, an override of a config field, or the config file itself."""
    known = flat(default_config())
    overrides = [found.groups() for argument in argv if (found := re.match(r"--config\.([\w.]+)=?(.*)", argument))]
    for name, _ in overrides:
        if name not in known:
            return f"--config.{name}: there is no such config field{nearest(name, known)}"
    for name, value in overrides:
        if name in str(error):
            return f"--config.{name}={value}: not a value of type {type(known[name]).__name__}"
    lines = [line for line in str(error.args[0]).splitlines() if line.strip()]
    if isinstance(error, flags.Error) and len(lines) == 1:
        return lines[0]
    # The config file itself failed. Where is in the traceback, or, where ml_collections quotes that, in the text.
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.name == "get_config"]
    frames += re.findall(r'File "(.+)", line (\d+), in get_config', str(error))
    place = "{} line {}: ".format(*frames[-1]) if frames else ""
    if isinstance(error, AttributeError | KeyError) and (unknown := re.search(r"['\"]([\w.]+)['\"]", lines[0])):
        hint = nearest(unknown[1], [name.split(".")[-1] for name in known])
        return f"{place}there is no config field {unknown[1]}{hint}"
    return f"{place}{lines[-1]}"
