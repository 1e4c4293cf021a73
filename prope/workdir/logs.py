"""Where records go beside the JSON lines, by `config.log_to`: CSV, wandb, the user's function."""

import contextlib
import csv
import functools
import io
import itertools
import os
import secrets
from collections.abc import Callable

from etils import epath

from prope.errors import first_line, log, usage_error
from prope.runtime.files import append_lines, is_url, write_atomic
from prope.spec.run import Spec
from prope.user_code import is_user_code, load_function
from prope.workdir.records import read_jsonl

Listener = Callable[[dict], None]  # gets a record and its "tag", such as train or eval

_FIELD = "config.log_to"
_FINISH_SECONDS = 60  # that wandb may take at the end to send what is left


def check_log_to(spec: Spec) -> None:
    """Raises UsageError where a function of `config.log_to` is not there, or a login to wandb."""
    for name in filter(is_user_code, spec.log_to):
        load_function(_FIELD, name)
    if "wandb" in spec.log_to:
        import wandb

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            remedy = "run wandb login, or set WANDB_MODE=offline and run wandb sync later"
            raise usage_error(_FIELD, "wandb", "there is no login", remedy)


def numbers(tag: str, record: dict) -> dict[str, float]:
    """Returns the numbers of a record by their names in TensorBoard and wandb, "TAG/FIELD"."""
    return {
        f"{tag}/{field}": value
        for field, value in record.items()
        if field != "step" and isinstance(value, int | float)
    }


class CsvFiles:
    """Keeps a CSV beside files of records, with a column for every field."""

    def __init__(self, workdir: epath.Path):
        self._workdir = workdir
        self._columns: dict[str, list[str]] = {}

    def add(self, name: str, records: list[dict]) -> None:
        """Adds records that the file `name` has by now; for another field all is written anew."""
        columns = self._columns.pop(name, [])  # none after an error
        write = append_lines
        text = io.StringIO()
        if not columns or set(itertools.chain(*records)) - set(columns):
            write = write_atomic
            records = read_jsonl(self._workdir / name)
            columns = list(dict.fromkeys(itertools.chain(*records)))
            print(*columns, sep=",", file=text)
        csv.DictWriter(text, columns, lineterminator="\n").writerows(records)
        write((self._workdir / name).with_suffix(".csv"), text.getvalue())
        self._columns[name] = columns


def open_listeners(spec: Spec, workdir: epath.Path, opened: contextlib.ExitStack) -> list[Listener]:
    """Opens wandb, which `opened` closes, and the user's functions."""
    listeners = []
    for name in spec.log_to:
        if name == "wandb":
            listeners.append(_tell_once(name, _open_wandb(spec, workdir, opened), first_line))
        elif is_user_code(name):
            function = load_function(_FIELD, name)
            listeners.append(_tell_once(name, function.call, function.describe))
    return listeners


def _tell_once(name: str, call: Listener, describe: Callable[[Exception], str]) -> Listener:
    """Returns a listener whose errors end no run; the first is logged."""
    errors = []

    def listen(record: dict) -> None:
        try:
            call(record)
        except Exception as error:
            if not errors:
                line = "%s=%s: step %d: %s; training goes on, and later errors are not shown"
                log.warning(line, _FIELD, name, record["step"], describe(error))
            errors.append(error)

    return listen


def _open_wandb(spec: Spec, workdir: epath.Path, opened: contextlib.ExitStack) -> Listener:
    """Opens the run of wandb whose id W/wandb_id keeps, offline where wandb does not answer.

    A sweep is a group.
    """
    import wandb

    file = workdir / "wandb_id"
    if not file.exists():
        write_atomic(file, secrets.token_hex(4))
    start = functools.partial(
        wandb.init,
        id=file.read_text(),
        resume="allow",
        name=workdir.name,
        group=workdir.parent.name if (workdir.parent / "sweep.json").exists() else None,
        project=os.environ.get("WANDB_PROJECT", "prope"),
        dir=None if is_url(workdir) else str(workdir),
        config=spec.to_dict(),
        allow_val_change=True,  # of fields with which a run may go on
        settings=wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_SECONDS),
    )
    try:
        run = start()
    except Exception as error:
        log.warning("%s=wandb: %s; training goes on, with wandb offline", _FIELD, first_line(error))
        wandb.teardown()
        run = start(mode="offline")
    place = "offline" if run.offline else run.url
    log.info("wandb: %s; what it lacks is sent by wandb sync %s", place, run.settings.sync_dir)

    @opened.push
    def close(kind, *_) -> None:
        with contextlib.suppress(Exception):  # what is lost there is in metrics.jsonl
            wandb.teardown(exit_code=int(kind is not None))

    return lambda record: run.log(numbers(record["tag"], record), step=record["step"])
