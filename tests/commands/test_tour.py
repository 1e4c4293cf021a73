"""launch/tour.ipynb is launch/tour.py with its outputs; .ci/run executes it."""

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from support.commands import ROOT

NOTEBOOK = ROOT / "launch/tour.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_the_script():
    jupytext = pytest.importorskip("jupytext")
    script = jupytext.read(ROOT / "launch/tour.py")
    notebook = jupytext.read(NOTEBOOK)
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (script, notebook)]
    assert cells[0] == cells[1], "make it again, as launch/README.md says"
    assert len(cells[0]) > 15


def test_every_cell_that_shows_something_has_its_output():
    """Small, without errors and without the places of the machine that made it."""
    for number, cell in enumerate(CODE, start=1):
        assert cell["execution_count"] == number
        code = "".join(cell["source"])
        kinds = [output["output_type"] for output in cell["outputs"]]
        shows = re.search(r"^ *print\(|^plt\.show", code, re.MULTILINE)
        assert set(kinds) <= {"stream", "display_data"} and bool(kinds) == bool(shows)
        for output in cell["outputs"]:
            assert output.get("name") != "stderr"
            image = output.get("data", {}).get("image/png", "")
            assert len(base64.b64decode(image)) <= 100_000
            text = "".join(output.get("text", [])) + str(output.get("data", {}).get("text/plain"))
            assert not re.search(r"/\w+/\w", text)
    assert NOTEBOOK.stat().st_size < 250_000


@pytest.mark.parametrize("is_here", [True, False])
def test_the_first_cell_installs_only_where_prope_is_not(is_here, monkeypatch, tmp_path):
    calls = []
    clone = tmp_path / "prope-clone"
    clone.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: is_here or None)
    monkeypatch.setattr(subprocess, "run", lambda words, check: calls.append(words))
    exec("".join(CODE[0]["source"]), {})
    if is_here:
        assert not calls and os.getcwd() == str(tmp_path)
        return
    git, pip = calls
    assert git == ["git", "clone", "--depth=1", "URL-OF-THIS-REPOSITORY", "prope-clone"]
    assert pip[:4] == [sys.executable, "-m", "pip", "install"] and pip[-1] == "."
    assert sys.path[0] == os.getcwd() == str(clone)
