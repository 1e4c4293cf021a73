"""Files of a run's directory: which evaluation is used; files that are complete or not there."""

import json
import pathlib

import pytest
from etils import epath
from support.commands import refusal

from prope.errors import UsageError
from prope.runtime.files import append_jsonl, read_json, write_atomic
from prope.spec.data import DataSpec
from prope.spec.run import Spec
from prope.workdir.records import evaluations_of_training, find_evaluation, find_pair, read_jsonl
from prope.workdir.run import open_run, open_workdir, read_config, write_config


def record(windows, loss, fingerprint="a", **fields):
    default = {"dataset": "python_docs", "seq_len": 256, "step": 9, "max_windows": None}
    return default | {"windows": windows, "loss": loss, "fingerprint": fingerprint} | fields


def test_the_fullest_evaluation_and_of_equally_full_ones_the_newest_is_found():
    records = [
        record(100, 1.0),
        record(100, 2.0),
        record(48, 3.0, max_windows=48),
        record(200, 4.0, step=8),
    ]
    assert find_evaluation(records, step=9)["loss"] == 2.0
    assert find_evaluation(records, step=9, windows=48)["loss"] == 3.0
    assert find_evaluation(records)["loss"] == 4.0
    assert find_evaluation(records, step=7) is None
    bare = [{"step": 9, "loss": 5.0}, {"step": 9, "loss": 6.0}]  # without a number of windows
    assert find_evaluation(bare, step=9)["loss"] == 6.0
    assert find_evaluation([*records, *bare], step=9)["loss"] == 2.0


def test_two_runs_are_compared_on_windows_that_both_have():
    ours = [record(100, 1.0), record(48, 2.0)]
    theirs = [record(48, 3.0), record(48, 4.0), record(100, 5.0, "b")]

    def pair(theirs, **fields):
        return [evaluation["loss"] for evaluation in find_pair(ours, theirs, **fields) or ()]

    assert pair(theirs, step=9) == [2.0, 4.0]
    assert pair([*theirs, record(100, 6.0)], step=9) == [1.0, 6.0]
    assert pair(theirs, step=9, windows=100) == []
    assert pair([record(100, 7.0, seq_len=512)]) == []


def test_other_documents_under_the_same_name_are_not_those_of_training():
    spec = Spec()
    whole, fewer = record(100, 1.0), record(48, 2.0, max_windows=48)
    assert evaluations_of_training([whole, fewer, record(300, 3.0, "b")], spec, 9) == [whole, fewer]
    limited = record(300, 3.0, "b", max_windows=300)
    assert evaluations_of_training([limited, whole], spec, 9) == [whole]
    assert evaluations_of_training([whole], spec, 8) == []
    spec = spec.replace({"eval.max_windows": 48})
    limited = record(9, 4.0, "b", max_windows=9)
    assert evaluations_of_training([limited, fewer, whole], spec, 9) == [fewer, whole]


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomic(path, '{"p": 0.25}\n')
    write_atomic(tmp_path / "sums.npz", b"\xff\x00")
    assert path.read_text() == '{"p": 0.25}\n'
    assert (tmp_path / "sums.npz").read_bytes() == b"\xff\x00"

    def disk_full(self, content):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "{}")
    assert path.read_text() == '{"p": 0.25}\n'
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "sums.npz"]


def test_json_that_cannot_be_read_counts_as_missing_unless_there_is_a_remedy(tmp_path):
    path = tmp_path / "sweep.json"
    assert read_json(path) is None and read_json(path, "start again") is None
    path.write_text("[1]")
    assert read_json(path, "start again") == [1]
    for content in (b"{", b"\xff", b'{"cut": '):
        path.write_bytes(content)
        assert read_json(path) is None, "a cache may be damaged"
        refused = r"sweep\.json: not readable as JSON \(.*\); start again"
        with pytest.raises(UsageError, match=refused):
            read_json(path, "start again")


@pytest.mark.parametrize("saved_format", [None, 2, 4, "3"])
def test_a_run_of_another_format_is_refused(tmp_path, saved_format):
    write_config(tmp_path, Spec())
    assert read_config(tmp_path) == Spec()
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    assert values.pop("format") == 3
    if saved_format is not None:
        values["format"] = saved_format
    path.write_text(json.dumps(values))
    for opened in (open_run, lambda place: open_workdir(place, Spec()).__enter__()):
        line = refusal(lambda opened=opened: opened(tmp_path))
        assert line.startswith(f"{path}: format={saved_format or 'none'}: ")
        assert "dfe6f76" in line, "the last commit that reads it"
    assert json.loads(path.read_text()) == values, "it is left alone"


def test_places_of_a_saved_run_need_not_be_reachable(tmp_path):
    """What reads a bucket may not be installed where a run is only read."""
    spec = Spec(data=DataSpec(cache_dir="s3://bucket/cache"))
    write_config(tmp_path, spec)
    assert read_config(tmp_path) == spec


def test_a_saved_config_that_is_not_valid_is_named(tmp_path):
    write_config(tmp_path, Spec())
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": -1'))
    assert refusal(read_config, tmp_path).startswith(f"{path}: config.seed=-1: ")


@pytest.mark.parametrize(
    ("existed", "steps", "stays"),
    [(False, 0, False), (False, 1, True), (True, 0, True)],
    ids=["new", "begun", "old"],
)
def test_a_refused_run_leaves_its_directory_only_where_something_would_be_lost(
    tmp_path, existed, steps, stays
):
    path = epath.Path(tmp_path) / "runs" / "a"
    spec = Spec()
    if existed:
        path.mkdir(parents=True)
    with pytest.raises(UsageError, match="out of memory"), open_workdir(path, spec):
        write_config(path, spec)
        (path / "eval").mkdir()
        for step in range(steps):
            append_jsonl(path / "metrics.jsonl", {"step": step + 1})
        raise UsageError("out of memory")
    assert (path / "config.json").exists() == stays


TORN_LINES = [b"\x00\x00\x00", b'{"step": 2, "name": "\xc3']


@pytest.mark.parametrize("torn", TORN_LINES)
def test_a_torn_line_loses_itself_only(tmp_path, caplog, torn):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    path.write_bytes(path.read_bytes() + torn)
    append_jsonl(path, {"step": 3})
    append_jsonl(path, {"step": 4})
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert f"{path}: line 2 is not JSON and is skipped" in caplog.text
    lines = path.read_bytes().splitlines()
    assert list(map(json.loads, lines[2:])) == [{"step": 3}, {"step": 4}]
