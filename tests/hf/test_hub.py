"""Checkpoints by name, from a small server that answers as the Hugging Face Hub does."""

import logging
import re
import shutil

import pytest
from support.commands import refusal
from support.exchange import edit
from support.hub_server import COMMIT, serve
from support.runs import make_run

from prope.errors import StorageFailed
from prope.hf import exporter, hub, importer
from prope.runtime.files import as_path

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")

NAME = "lab/tiny-gemma"
# What models on the Hub hold beside a checkpoint.
OTHERS = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/params.json")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported run, and beside it what the Hub's models hold besides."""
    folder = tmp_path_factory.mktemp("hub")
    make_run(folder / "run")
    exporter.export(folder / "run", folder / "hf")
    for name in OTHERS:
        (folder / "hf" / name).parent.mkdir(exist_ok=True)
        (folder / "hf" / name).write_bytes(b"not a checkpoint")
    return folder / "hf"


@pytest.fixture
def server(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serve("models", NAME, exported, tmp_path / "cache", monkeypatch) as handler:
        yield handler


def fetch(name=NAME):
    return hub.find_checkpoint(as_path("--input", name))


def test_a_model_is_fetched_by_its_name_once(server, exported, tmp_path):
    by_name = importer.import_run(NAME, tmp_path / "by_name")
    by_folder = importer.import_run(exported, tmp_path / "by_folder")
    assert by_name["init_hash"] == by_folder["init_hash"]
    fetched = {path.partition(f"{COMMIT}/")[2] for method, path in server.asked if method == "GET"}
    assert fetched - {""} == {file.name for file in exported.iterdir()} - {*OTHERS, "original"}
    server.asked.clear()
    fetch()
    assert set(server.asked) == {("GET", f"/api/models/{NAME}/revision/main")}


def test_a_model_that_is_refused_is_not_fetched(server, exported, tmp_path):
    server.folder = shutil.copytree(exported, tmp_path / "other")
    edit(server.folder, model_type="mamba")
    line = refusal(lambda: importer.import_run(NAME, tmp_path / "run"))
    assert 'model_type="mamba"' in line
    names = {path.rpartition("/")[2] for _, path in server.asked}
    assert "config.json" in names and "model.safetensors" not in names


def test_a_folder_of_that_name_is_taken_and_the_log_says_so(server, exported, tmp_path, caplog):
    shutil.copytree(exported, tmp_path / NAME)
    with caplog.at_level(logging.INFO, "prope"):
        assert str(fetch()) == NAME
    assert f"--input={NAME}" in caplog.text
    assert server.asked == []


def test_a_model_in_the_cache_needs_no_network(server, monkeypatch):
    place = fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert fetch() == place
    (place / "model.safetensors").unlink()
    assert "/cache" in refusal(fetch)
    assert server.asked == []


@pytest.mark.parametrize(
    ("name", "failing", "remedy"),
    [
        ("lab/none", {}, "hf auth login"),
        ("lab/a--b", {}, "the name"),
        (NAME, {f"/{NAME}": (403, "GatedRepo")}, f"/{NAME} .*Gated.*terms.*hf auth login"),
        (NAME, {"/api": (401, "")}, "hf auth login"),
        (NAME, {"/api": (503, "")}, f"hf download {NAME} --local-dir=DIR"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(server, tmp_path, name, failing, remedy):
    server.failing |= failing
    line = refusal(lambda: importer.import_run(name, tmp_path / "run"))
    assert re.match(f"--input={name}: .*{remedy}", line), line
    assert not (tmp_path / "run").exists()


def test_a_download_that_stops_is_begun_again_by_the_same_command(server, tmp_path):
    server.failing[f"/{NAME}/resolve/{COMMIT}/model"] = (404, "EntryNotFound")
    with pytest.raises(StorageFailed, match=r"404.*; run the same command again") as error:
        importer.import_run(NAME, tmp_path / "run")
    assert "\n" not in str(error.value) and error.value.code == 76
    server.failing.clear()
    assert importer.import_run(NAME, tmp_path / "run")["step"] == 0


@pytest.mark.parametrize("name", ["none", "a/b/c", "./lab/tiny-gemma"])
def test_what_is_no_name_is_a_directory_that_is_missing(server, name):
    assert "no such directory" in refusal(lambda: fetch(name))
    assert server.asked == []


def test_a_name_without_the_library(server, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'huggingface-hub>=2'" in refusal(fetch)
