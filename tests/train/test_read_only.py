"""Runs that may be read and not written, such as another user's: results go to --output."""

import json
import os

import jax
import pytest
from etils import epath
from support.commands import refusal
from support.heads import analysis_options
from support.runs import evaluate_run, make_run
from support.text import hash_files, read_lines

from prope.analysis import analysis
from prope.errors import UsageError
from prope.inference.asking import AskOptions, answers
from prope.inference.paired import paired_difference
from prope.pages import drawing
from prope.pages.run import report_run
from prope.pages.sweep import report_sweep


@pytest.fixture
def read_only(monkeypatch):
    """Makes folders read-only, for the superuser too, who may write everywhere."""
    folders = []
    may = os.access

    def access(path, mode):
        is_below = any(str(path).startswith(str(folder)) for folder in folders)
        return may(path, mode) and not is_below

    monkeypatch.setattr(os, "access", access)
    return folders.append


def test_records_and_sums_of_runs_go_to_the_output(runs, tmp_path, read_only, monkeypatch):
    read_only(runs)
    before = hash_files(runs)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", None)  # which would initialise them
        says = f"--workdir={runs}/nope: cannot be written; give --output, a folder"
        with pytest.raises(UsageError, match=says):
            evaluate_run(runs)
    output = tmp_path / "results"
    records = evaluate_run(runs, output=str(output))
    assert hash_files(runs) == before
    for record, name in zip(records, ("nope", "rope"), strict=True):
        assert record["workdir"] == str(runs / name)
        assert read_lines(output / name / "eval.jsonl") == [record]
    difference = paired_difference(output / "nope", output / "rope").difference
    assert difference == pytest.approx(records[0]["loss"] - records[1]["loss"], rel=1e-3)
    assert evaluate_run(runs, output=str(output)) == records
    assert len(read_lines(output / "rope" / "eval.jsonl")) == 1, "it is not computed again"
    assert evaluate_run(runs / "rope", output=str(output / "rope")) == records[1:]


def test_answers_of_runs_go_to_the_output(runs, tmp_path, read_only):
    read_only(runs)
    before = hash_files(runs)
    flags = {"workdir": str(runs / "rope"), "tasks": "passkey", "trials": 1, "seq_len": "128"}
    line = refusal(lambda: list(answers(AskOptions(**flags))))
    assert line.startswith("--workdir=") and "--output" in line
    assert list(answers(AskOptions(**flags, output=f"{tmp_path}/ours")))
    assert (tmp_path / "ours/longcontext.jsonl").exists() and hash_files(runs) == before


def test_what_a_run_has_is_read_and_needs_no_output(runs, read_only):
    (record,) = evaluate_run(runs / "rope")
    read_only(runs)
    assert evaluate_run(runs / "rope") == [record]


def test_an_output_that_cannot_be_written_is_named(runs, tmp_path, read_only):
    read_only(tmp_path / "results")
    says = f"--output={tmp_path}/results: cannot be written"
    with pytest.raises(UsageError, match=says):
        evaluate_run(runs / "rope", output=str(tmp_path / "results"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"--output={tmp_path}/file.*: cannot be made"):
        evaluate_run(runs / "rope", output=str(tmp_path / "file" / "below"))


def test_pages_of_a_sweep_go_to_the_output(template, tmp_path, read_only, monkeypatch):
    monkeypatch.setitem(drawing.STYLE, "savefig.dpi", 20)  # which saves time
    read_only(template)
    before = hash_files(template)
    run = template / "rope_percentage=1,seed=0"
    for write in (report_sweep, report_run):
        with pytest.raises(UsageError, match=r"--workdir=.*: cannot be written; give --output"):
            write(run if write is report_run else template)
    result = report_sweep(template, str(tmp_path / "a"))
    assert result["output"] == str(tmp_path / "a" / "report" / "index.html")
    assert (tmp_path / "a" / "report" / "loss.png").exists()
    result = report_run(run, str(tmp_path / "b"))
    assert result["output"] == str(tmp_path / "b" / "report" / "index.html")
    assert hash_files(template) == before


@pytest.mark.slow
def test_an_analysis_goes_to_the_output(tmp_path, read_only, monkeypatch):
    monkeypatch.setitem(drawing.STYLE, "savefig.dpi", 20)
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, 0.5, num_layers=1)
    (tmp_path / "text.txt").write_text("What turns, and what does not.")
    read_only(tmp_path / "runs")
    before = hash_files(tmp_path / "runs")
    flags = {"text": str(tmp_path / "text.txt"), "channels": 0}
    runs = epath.Path(tmp_path / "runs")
    options = analysis_options(output=str(tmp_path / "out"), **flags)
    result = analysis.analyse_all(runs, options)
    for name in ("a", "b"):
        saved = json.loads((tmp_path / "out" / name / "analysis" / "analysis.json").read_text())
        assert saved["workdir"] == str(runs / name)
        assert (tmp_path / "out" / name / "analysis" / "index.html").exists()
    assert result["output"] == str(tmp_path / "out")
    assert hash_files(tmp_path / "runs") == before
