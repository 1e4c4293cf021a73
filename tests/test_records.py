"""Files of a run's directory: which of several evaluations is used, and files that are complete or not there."""

import json
import pathlib

import pytest

from prope.config import default_config
from prope.errors import UsageError
from prope.runtime.files import append_jsonl, read_json, write_atomic
from prope.workdir.records import evaluations_of_training, find_evaluation, find_pair, read_jsonl
from prope.workdir.run import open_workdir, write_config


def record(windows, loss, fingerprint="a", step=9, seq_len=256, max_windows=None):
    of_data = {"dataset": "python_docs", "fingerprint": fingerprint, "seq_len": seq_len}
    return of_data | {"step": step, "windows": windows, "max_windows": max_windows, "loss": loss}


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
    old = [{"step": 9, "loss": 5.0}, {"step": 9, "loss": 6.0}]  # without a number of windows
    assert find_evaluation(old, step=9)["loss"] == 6.0
    assert find_evaluation([*records, *old], step=9)["loss"] == 2.0


def test_two_runs_are_compared_on_windows_that_both_have():
    ours, theirs = (
        [record(100, 1.0), record(48, 2.0)],
        [record(48, 3.0), record(48, 4.0), record(100, 5.0, "b")],
    )
    assert [r["loss"] for r in find_pair(ours, theirs, step=9)] == [2.0, 4.0]
    assert [r["loss"] for r in find_pair(ours, [*theirs, record(100, 6.0)], step=9)] == [1.0, 6.0]
    assert find_pair(ours, theirs, step=9, windows=100) is None
    assert find_pair(ours, [record(100, 7.0, seq_len=512)]) is None


def test_other_documents_under_the_same_name_are_not_those_of_training():
    config = default_config()
    own, fewer, other = record(100, 1.0), record(48, 2.0, max_windows=48), record(300, 3.0, "b")
    assert evaluations_of_training([own, fewer, other], config, 9) == [own, fewer]
    assert evaluations_of_training([other | {"max_windows": 300}, own], config, 9) == [own]
    config.eval.max_windows = 48
    assert evaluations_of_training([record(9, 4.0, "b", max_windows=9), fewer, own], config, 9) == [
        fewer,
        own,
    ]
    assert evaluations_of_training([own], config, 8) == []


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomic(path, '{"p": 0.25}\n')
    write_atomic(tmp_path / "sums.npz", b"\xff\x00")
    assert (
        path.read_text() == '{"p": 0.25}\n' and (tmp_path / "sums.npz").read_bytes() == b"\xff\x00"
    )

    def disk_full(self, content):
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "{}")
    assert path.read_text() == '{"p": 0.25}\n'
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "sums.npz"]


def test_json_that_cannot_be_read_names_the_file_and_the_remedy(tmp_path):
    path = tmp_path / "sweep.json"
    assert read_json(path) is None and read_json(path, "start again") is None
    path.write_text("[1]")
    assert read_json(path, "start again") == [1]
    for content in (b"{", b"\xff"):
        path.write_bytes(content)
        assert read_json(path) is None, "a cache may be damaged"
        with pytest.raises(
            UsageError, match=r"sweep\.json: not readable as JSON \(.*\); start again"
        ):
            read_json(path, "start again")


@pytest.mark.parametrize(
    ("existed", "steps", "stays"),
    [(False, 0, False), (False, 1, True), (True, 0, True)],
    ids=["new", "begun", "old"],
)
def test_a_refused_run_leaves_its_directory_only_where_something_would_be_lost(
    tmp_path, existed, steps, stays
):
    path, config = tmp_path / "runs" / "a", default_config()
    if existed:
        path.mkdir(parents=True)
    with pytest.raises(UsageError, match="out of memory"), open_workdir(path, config):
        write_config(path, config)
        (path / "compilation_cache").mkdir()
        for step in range(steps):
            append_jsonl(path / "metrics.jsonl", {"step": step + 1})
        raise UsageError("out of memory")
    assert (path / "config.json").exists() == stays and (tmp_path / "runs").exists() == stays


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b"\x00\x00\x00", b'{"step": 2, "name": "\xc3']
)
def test_a_torn_line_loses_itself_only(tmp_path, caplog, torn):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    path.write_bytes(path.read_bytes() + torn)
    append_jsonl(path, {"step": 3})
    append_jsonl(path, {"step": 4})
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert f"{path}: line 2 is not JSON and is skipped" in caplog.text
    assert [json.loads(line) for line in path.read_bytes().splitlines()[2:]] == [
        {"step": 3},
        {"step": 4},
    ]


def test_json_that_cannot_be_read_counts_as_missing_unless_there_is_a_remedy(tmp_path):
    path = tmp_path / "a.json"
    assert read_json(path) is None and read_json(path, "restore it") is None
    path.write_text('{"cut": ')
    assert read_json(path) is None
    with pytest.raises(UsageError, match="a.json: not readable as JSON .*; restore it"):
        read_json(path, "restore it")
