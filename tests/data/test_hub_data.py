"""Datasets of the Hugging Face Hub, from a small server that answers as it does."""

import re
import shutil

import pytest
from pyarrow import parquet
from support.commands import CONFIG, ROOT, refusal
from support.hub_server import serve
from support.text import articles, data_config, write_lines

from prope.data.sources.find import find_source
from prope.data.store.build import open_store

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")

NAME = "lab/tiny"
PLACE = f"hf://datasets/{NAME}"


@pytest.fixture
def folder(tmp_path):
    """As datasets on the Hub are: splits by name, and files about them."""
    import pyarrow

    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    texts = articles(60)
    names = ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-0")
    for number, name in enumerate(names):
        table = pyarrow.table({"text": texts[number * 15 : number * 15 + 15]})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=4)
    (tmp_path / "hub" / "README.md").write_text("# Tiny")
    (tmp_path / "hub" / ".gitattributes").write_text("")
    (tmp_path / "hub" / "notes").mkdir()
    write_lines(tmp_path / "hub" / "notes" / "a.ndjson", [{"text": "a note"}, {"text": "another"}])
    return tmp_path / "hub"


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    with serve("datasets", NAME, folder, tmp_path / "hub_cache", monkeypatch) as handler:
        yield handler


@pytest.mark.parametrize("below", ["", "/data", "@main/data", "/notes"])
def test_a_folder_of_the_hub_is_that_folder(tmp_path, folder, server, below):
    local = open_store(
        data_config(tmp_path, "files", f"{folder}/{below.removeprefix('@main')}"), 260
    )
    other = data_config(tmp_path / "other", "files", PLACE + below)
    assert open_store(other, 260).index == local.index
    fetched = {path for method, path in server.asked if method == "GET" and "resolve" in path}
    assert not [path for path in fetched if "test" in path or "README" in path]
    server.asked.clear()
    assert find_source(other).identity["files"]
    assert not [path for _, path in server.asked if "resolve" in path], "the files are in the cache"


@pytest.mark.parametrize(
    ("place", "failing", "mentions"),
    [
        ("hf://datasets/lab/none", {}, "repository not found.*hf auth login"),
        (f"{PLACE}@v9", {}, "FileNotFoundError|RevisionNotFoundError"),
        (f"{PLACE}/none", {}, "no file of text in it"),
        (PLACE, {"/api": (401, "GatedRepo")}, f"repository not found.*hf download {NAME} "),
        (PLACE, {f"/datasets/{NAME}/resolve": (403, "")}, "does not give it"),
        ("hf://lab/model", {}, "URL of gs:// or s3:// or hf://datasets/"),
        ("hf://datasets/lab", {}, "does not give it"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_is_one_line(tmp_path, server, place, failing, mentions):
    server.failing |= failing
    line = refusal(lambda: open_store(data_config(tmp_path, "files", place), 260))
    assert line.startswith("config.data.data_dir=hf://") and re.search(mentions, line), line
    assert not list(tmp_path.rglob("index.json"))


def test_commands_ask_the_hub_that_the_environment_names(tmp_path, server, run_command):
    text = [CONFIG, "--config.data.dataset=files", f"--config.data.data_dir={PLACE}"]
    options = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    options |= {"HF_ENDPOINT": server.endpoint, "PROPE_CACHE": str(tmp_path / "prope")}
    done = run_command("prope.data.prepare", *text, **options)
    assert done.code == 0 and done.result["documents"] == 47, done.stderr
    offline = run_command("prope.data.prepare", *text, **options | {"HF_HUB_OFFLINE": "1"})
    assert offline.code == 2 and "offline mode is enabled" in offline.error
    other = run_command("prope.train", *text, f"--workdir={PLACE}", **options)
    assert other.code == 2 and f"--workdir={PLACE}: must be a local path" in other.error


def test_the_hub_without_its_library(tmp_path, monkeypatch):
    from prope.runtime import files

    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    line = refusal(find_source, data_config(tmp_path, "files", PLACE))
    assert line == f"config.data.data_dir={PLACE}: needs a package: pip install huggingface_hub"
    assert "hf://" in refusal(data_config, tmp_path, "wikipedia", PLACE)
    shutil.rmtree(tmp_path)
