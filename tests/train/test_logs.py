"""Where records go beside the JSON lines: CSV, wandb, functions of the user's own."""

import csv
import json
import math
import re
import sys

import pytest
from etils import epath
from support.commands import refusal
from support.text import read_lines

from prope.config import resolve, to_config
from prope.spec.run import Spec
from prope.workdir import logs
from prope.workdir.logs import check_log_to
from prope.workdir.metrics import RecordFiles


def log_to(*names) -> Spec:
    return Spec(log_to=names)


@pytest.fixture(params=["local", "url"])
def place(request, tmp_path):
    return epath.Path(tmp_path if request.param == "local" else request.getfixturevalue("bucket"))


def rows(path) -> list[dict]:
    """The rows of a CSV, without what is empty, as Python's values."""
    table = csv.DictReader(path.read_text().splitlines())
    return [{name: json.loads(text) for name, text in row.items() if text} for row in table]


def write(place, start, *records, spec=None):
    """Writes records of metrics.jsonl, each at once."""
    with RecordFiles(place, start, None, spec or log_to("csv")) as files:
        for record in records:
            files.write("metrics.jsonl", "train", record)
            files.flush(10.0)


def test_a_csv_has_the_lines_of_its_file_after_any_start(place):
    first = [{"step": step, "loss": 0.1 * step, "mfu": None} for step in (1, 2, 3)]
    wider = {"step": 4, "loss": 0.5, "later": 1e-9}
    write(place, 0, *first, wider, {"step": 5, "loss": math.pi})
    csv_file, json_file = place / "metrics.csv", place / "metrics.jsonl"

    def without_none():
        return [{k: v for k, v in line.items() if v is not None} for line in read_lines(json_file)]

    assert rows(csv_file) == without_none() and len(rows(csv_file)) == 5
    write(place, 3)
    assert rows(csv_file) == without_none() and len(rows(csv_file)) == 3
    write(place, 3, wider, spec=log_to())  # without the CSV, which a later start makes up for
    write(place, 4, {"step": 5, "loss": 0.0})
    assert rows(csv_file) == without_none() and len(rows(csv_file)) == 5
    assert not [path for path in place.iterdir() if "tfevents" in path.name]


def test_a_csv_that_could_not_be_written_is_made_up_for(tmp_path, monkeypatch, caplog):
    append = logs.append_lines
    fails = [True]

    def broken(*arguments):
        if fails.pop() if fails else False:
            raise OSError(28, "No space left on device")
        append(*arguments)

    monkeypatch.setattr(logs, "append_lines", broken)
    write(epath.Path(tmp_path), 0, *({"step": step} for step in (1, 2, 3)))
    assert not fails and "records cannot be written" in caplog.text
    assert [row["step"] for row in rows(tmp_path / "metrics.csv")] == [1, 2, 3]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module of the user's own, which remembers what it was called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = ["seen = []", "def on_log(record):", "    seen.append(record)", "    1 / record['x']"]
    (tmp_path / "my_log.py").write_text("\n".join(lines))
    yield
    sys.modules.pop("my_log", None)


def test_a_function_gets_every_record_and_its_error_ends_nothing(own, place, caplog):
    records = [{"step": step, "x": step % 2} for step in (1, 2, 3, 4)]
    with RecordFiles(place, 0, None, log_to("my_log:on_log")) as files:
        for record in records:
            files.write("metrics.jsonl", "train", record)
        files.write("eval.jsonl", "eval", {"step": 4, "x": 1})
    seen = sys.modules["my_log"].seen
    assert seen == [{"tag": "train"} | record for record in records] + [
        {"tag": "eval", "step": 4, "x": 1}
    ]
    assert read_lines(place / "metrics.jsonl") == records
    (line,) = (record.getMessage() for record in caplog.records if record.name == "prope")
    assert re.search(r"my_log:on_log: step 2: ZeroDivisionError.*\(my_log.py line 4\)", line)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("tensorbord",), "config.log_to=('tensorbord',): must be some of tensorboard"),
        ((3,), "config.log_to=(3,)"),
        (("my_log:on_lock",), "config.log_to=my_log:on_lock: my_log has no function on_lock"),
        (("no_such:on_log",), "config.log_to=no_such:on_log: there is no module no_such"),
    ],
)
def test_a_place_for_records_that_there_is_not_is_named(own, names, named):
    assert named in refusal(lambda: check_log_to(log_to(*names)))


def test_places_may_be_words_of_a_command_and_change():
    spec = log_to("csv", "my_log:on_log")
    assert resolve(to_config(spec)) == spec and to_config(Spec()).log_to == ("tensorboard",)
