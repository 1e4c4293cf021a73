"""Records in wandb, as its own files have them."""

import os
import pathlib
import struct
import sys
import types

import pytest
from etils import epath
from support.commands import refusal
from support.text import read_lines

from prope.spec.run import Spec
from prope.workdir.logs import check_log_to
from prope.workdir.metrics import RecordFiles

WANDB = Spec(log_to=("wandb",))


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """The package, offline, without anybody's login."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    package = pytest.importorskip("wandb", reason="the wandb extra is not installed")
    package.teardown()
    yield package
    package.teardown()


def kept(folder: pathlib.Path) -> list:
    """The messages in a run's file of wandb, which is a log as LevelDB's, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as messages

    (file,) = folder.glob("*.wandb")
    data = file.read_bytes()
    found, message, at = [], b"", 7
    while at + 7 <= len(data):
        at += (32_768 - at % 32_768) % 32_768 if 32_768 - at % 32_768 < 7 else 0
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a message, or its end
            found.append(messages.Record.FromString(message))
            message = b""
    return found


def test_wandb_has_every_record_and_a_run_that_is_resumed_is_the_same(wandb, tmp_path, caplog):
    workdir = epath.Path(tmp_path / "sweep/p=0.5")
    workdir.mkdir(parents=True)
    (tmp_path / "sweep/sweep.json").touch()
    caplog.set_level("INFO", "prope")
    for start in (0, 2):
        with RecordFiles(workdir, start, None, WANDB) as files:
            for step in range(start + 1, start + 3):
                files.write("metrics.jsonl", "train", {"step": step, "loss": 0.5 * step, "h": "x"})
            files.write("eval.jsonl", "eval", {"step": step, "loss": 0.25})
    folders = sorted((tmp_path / "sweep/p=0.5/wandb").glob("offline-run-*"))
    assert len(folders) == 2 and caplog.text.count("sent by wandb sync") == 2
    history = {}
    for folder in folders:
        (run,) = (record.run for record in kept(folder) if record.HasField("run"))
        assert (run.run_id, run.run_group, run.project, run.display_name) == (
            *((workdir / "wandb_id").read_text(), "sweep", "prope", "p=0.5"),
        )
        config = {item.key: item.value_json for item in run.config.update}
        assert config["batch_size"] == "16" and '"wsd"' not in config["optimizer"]
        for record in kept(folder):
            if record.HasField("history"):
                values = {
                    "/".join(i.nested_key) or i.key: i.value_json for i in record.history.item
                }
                history[record.history.step.num] = {
                    name: float(value) for name, value in values.items() if name[0] != "_"
                }
    assert history == {
        1: {"train/loss": 0.5},
        2: {"train/loss": 1.0, "eval/loss": 0.25},
        3: {"train/loss": 1.5},
        4: {"train/loss": 2.0, "eval/loss": 0.25},
    }


def test_without_a_login_nothing_is_begun(wandb, monkeypatch):
    check_log_to(WANDB)
    wandb.teardown()
    monkeypatch.delenv("WANDB_MODE")
    line = refusal(check_log_to, WANDB)
    assert line.startswith("config.log_to=wandb: ")
    assert "wandb login" in line and "WANDB_MODE=offline" in line


def test_training_goes_on_where_wandb_does_not(wandb, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb.Run, "log", lambda *_, **__: {}["lost"])
    with RecordFiles(epath.Path(tmp_path), 0, None, WANDB) as files:
        for step in (1, 2):
            files.write("metrics.jsonl", "train", {"step": step})
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "log_to=wandb: step 1: 'lost'" in line


def test_a_wandb_that_does_not_answer_is_used_offline(tmp_path, monkeypatch, caplog):
    opened = []

    def init(mode=None, **_):
        opened.append(mode)
        if mode is None:
            raise ConnectionError("no answer")
        settings = types.SimpleNamespace(sync_dir="W/wandb/offline-run")
        return types.SimpleNamespace(offline=True, settings=settings, log=lambda *_, **__: None)

    def teardown(exit_code=None):
        raise ConnectionResetError("gone")

    package = types.SimpleNamespace(init=init, teardown=lambda **_: None, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with RecordFiles(epath.Path(tmp_path), 0, None, WANDB):
        package.teardown = teardown  # at the end it fails, and nothing of it is seen
    assert opened == [None, "offline"] and caplog.text.count("no answer") == 1
