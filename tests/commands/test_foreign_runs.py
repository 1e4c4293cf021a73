"""Runs that this user may not write, and runs that were moved: results about them lie elsewhere."""

import os
import shutil

import pytest
from support.commands import refusal
from support.runs import make_run
from support.text import hash_files

from prope.data.tokenizer import load_tokenizer
from prope.inference.asking import AskOptions, answers
from prope.workdir.run import open_run


def test_answers_of_a_run_of_somebody_else_lie_elsewhere(base, tmp_path, monkeypatch):
    theirs = shutil.copytree(base / "runs/rope", tmp_path / "theirs")
    before = hash_files(theirs)
    # The tests may run as a user who may do anything.
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path))
    options = {"tasks": "passkey", "trials": 1, "seq_len": "128"}
    line = refusal(lambda: list(answers(AskOptions(str(theirs), **options))))
    assert line.startswith("--workdir=") and "--output" in line
    assert list(answers(AskOptions(str(theirs), **options, output=f"{tmp_path}/ours")))
    assert (tmp_path / "ours/longcontext.jsonl").exists() and hash_files(theirs) == before


@pytest.mark.parametrize("old", ["gone", "another"])
def test_a_run_that_was_moved_has_its_tokenizer_with_it(tmp_path, sentencepiece_model, old):
    first = tmp_path / "first"
    make_run(first, tokenizer=first / "tokenizer.model", vocab_size=300)
    shutil.copy(sentencepiece_model, first / "tokenizer.model")
    moved = shutil.copytree(first, tmp_path / "moved")
    if old == "gone":
        shutil.rmtree(first)
    else:
        (first / "tokenizer.model").write_text("another")
    run = open_run(moved)
    assert run.config.data.tokenizer == str(moved / "tokenizer.model")
    assert load_tokenizer(run.config.data.tokenizer).vocab_size == 300
