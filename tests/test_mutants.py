"""The tests of the rotation notice the errors that people make: each, planted in a copy, must fail a test."""

import itertools
import pathlib
import sys
import types
from collections.abc import Iterator

import pytest
from conftest import ROOT

import prope

# What is planted: (the text in prope/rope.py, what stands there instead).
MUTANTS = {
    "wrong denominator": (
        "max_wavelength ** (-2.0 * pairs / head_dim)",
        "max_wavelength ** (-2.0 * pairs / max(2 * num_rotated_pairs(head_dim, rope_percentage), 1))",
    ),
    "prefix pairing": (
        "    table = rotation_table(positions, freqs)\n    return rotate(inputs, table)\n",
        "    n = num_rotated_pairs(head_dim, rope_percentage)\n"
        "    table = rotation_table(positions, freqs[:n])\n"
        "    rotated = rotate(inputs[..., : 2 * n], table)\n"
        "    return jnp.concatenate([rotated, inputs[..., 2 * n :]], axis=-1)\n",
    ),
    "interleaved pairing": (
        ".reshape(*inputs.shape[:-1], 2, -1)\n",
        ".reshape(*inputs.shape[:-1], -1, 2).swapaxes(-1, -2)\n",
    ),
    "slow end kept": (
        "rotated = pairs < num_rotated_pairs(head_dim, rope_percentage)",
        "rotated = pairs >= head_dim // 2 - num_rotated_pairs(head_dim, rope_percentage)",
    ),
    "bfloat16 positions": (
        "positions.astype(wide)[..., None]",
        "positions.astype(jnp.bfloat16).astype(wide)[..., None]",
    ),
    "bfloat16 frequencies": (
        "return np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)",
        "exact = np.where(rotated, max_wavelength ** (-2.0 * pairs / head_dim), 0.0)\n"
        "    return exact.astype(jnp.bfloat16).astype(np.float64)",
    ),
    "p applied twice": (
        "return int(rope_percentage * head_dim // 2)",
        "return int(rope_percentage * rope_percentage * head_dim // 2)",
    ),
    "p = 0 read as unset": (
        "return int(rope_percentage * head_dim // 2)",
        "return int((rope_percentage or 1.0) * head_dim // 2)",
    ),
    "a sign of the rotation": ("second * cos + first * sin", "second * cos - first * sin"),
    "float32 angles": (
        "    phase = _phase(positions, high, low)\n",
        "    radians = (high + low / 2.0**32) / 2.0**32 * 2 * math.pi\n"
        "    angle = positions.astype(jnp.float32) * radians.astype(np.float32)\n"
        "    return jnp.cos(angle), jnp.sin(angle)\n",
    ),
    "low word of the fraction dropped": ("upper * low_upper + ", ""),
    "quarter turns rounded down": ("(phase + np.uint32(1 << 29)) >> 30", "phase >> 30"),
    "sine of negative positions": ("!= (positions < 0)", "!= (positions > positions)"),
}


def load(name: str, file: pathlib.Path, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


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
    """The first test of tests/test_rope.py that fails, in this process, where a text of prope/rope.py is replaced."""
    file = ROOT / "prope" / "rope.py"
    source = file.read_text()
    assert replace[0] in source, "the mutant no longer fits the code"
    mutant = load("prope.rope", file, source.replace(*replace) if replace[0] else source)
    monkeypatch.setitem(sys.modules, "prope.rope", mutant)
    monkeypatch.setattr(prope, "apply_p_rope", mutant.apply_p_rope, raising=False)
    file = ROOT / "tests" / "test_rope.py"
    tests = load("test_rope_of_a_mutant", file, file.read_text())
    named = {
        name: test
        for name, test in vars(tests).items()
        if name.startswith("test_") and "random" not in name
    }
    for name, test in sorted(named.items(), key=lambda item: len(list(cases(item[1])))):
        for arguments in cases(test):
            try:
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
