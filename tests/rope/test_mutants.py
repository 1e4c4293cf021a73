"""The tests of the rotation notice the errors that people make, each planted in a copy."""

import contextlib
import itertools
import sys
from collections.abc import Iterator

import pytest
from support.commands import ROOT
from support.planted import ROPE_MUTANTS as MUTANTS
from support.planted import load_source as load

import prope


def cases(test) -> Iterator[dict]:
    """The arguments of every case of a test, as its parametrize marks say."""
    grids = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args
            names = names.split(",") if isinstance(names, str) else names
            grids.append(
                [dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in rows]
            )
    for combination in itertools.product(*grids):
        yield {name: value for arguments in combination for name, value in arguments.items()}


def first_failure(monkeypatch, replace: tuple[str, str] = ("", "")) -> str | None:
    """Names the first test of test_rope.py that fails where a text of rope.py is replaced."""
    file = ROOT / "prope" / "rope.py"
    source = file.read_text()
    assert replace[0] in source, "the mutant no longer fits the code"
    mutant = load("prope.rope", file, source.replace(*replace) if replace[0] else source)
    monkeypatch.setitem(sys.modules, "prope.rope", mutant)
    monkeypatch.setattr(prope, "apply_p_rope", mutant.apply_p_rope, raising=False)
    file = ROOT / "tests/rope/test_rope.py"
    tests = load("test_rope_of_a_mutant", file, file.read_text())
    named = {
        name: test
        for name, test in vars(tests).items()
        if name.startswith("test_") and "random" not in name
    }
    for name, test in sorted(named.items(), key=lambda item: len(list(cases(item[1])))):
        for arguments in cases(test):
            try:
                # A case whose dtype XLA lacks here (float16 without F16C) notices nothing.
                with contextlib.suppress(pytest.skip.Exception):
                    test(**arguments)
            except (AssertionError, pytest.fail.Exception):
                return name
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_noticed(name, monkeypatch):
    assert first_failure(monkeypatch, MUTANTS[name])


@pytest.mark.slow
def test_the_code_without_an_error_passes(monkeypatch):
    assert first_failure(monkeypatch) is None
