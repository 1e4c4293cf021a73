"""The tests of the rotation notice the errors that people make: each, planted in a copy, must fail a test."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

# What is planted: (the text in prope/rope.py, what stands there instead).
MUTANTS = {
    "wrong denominator": (
        "max_wavelength ** (-2.0 * pairs / head_dim)",
        "max_wavelength ** (-2.0 * pairs / max(2 * num_rotated_pairs(head_dim, rope_percentage), 1))",
    ),
    "prefix pairing": (
        "    return rotate(inputs, rotation_table(positions, head_dim, max_wavelength, rope_percentage))",
        "    n = num_rotated_pairs(head_dim, rope_percentage)\n"
        "    table = rotation_table(positions, head_dim, max_wavelength, rope_percentage)[..., :n]\n"
        "    return jnp.concatenate([rotate(inputs[..., : 2 * n], table), inputs[..., 2 * n :]], axis=-1)",
    ),
    "interleaved pairing": (
        "    first, second = jnp.split(inputs.astype(jnp.float32), 2, axis=-1)\n",
        "    first, second = inputs[..., 0::2].astype(jnp.float32), inputs[..., 1::2].astype(jnp.float32)\n",
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
        "    steps = jnp.abs(positions).astype(jnp.uint32)\n",
        "    radians = (high + low / 2.0**32) / 2.0**32 * 2 * math.pi\n"
        "    angle = positions.astype(jnp.float32) * radians.astype(np.float32)\n"
        "    return jnp.cos(angle), jnp.sin(angle)\n"
        "    steps = jnp.abs(positions).astype(jnp.uint32)\n",
    ),
    "low word of the fraction dropped": ("upper * (low >> 16) + ", ""),
    "quarter turns rounded down": ("(phase + np.uint32(1 << 29)) >> 30", "phase >> 30"),
    "sine of negative positions": ("!= (positions < 0)", "!= (positions > positions)"),
}


def suite_passes(folder, replace=None) -> bool:
    """Whether tests/test_rope.py passes on a copy of the package in which a text is replaced."""
    shutil.copytree(ROOT / "prope", folder / "prope", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py", "tests/forks.py", "tests/test_rope.py"):
        shutil.copy(ROOT / name, folder / name)
    if replace:
        source = (folder / "prope" / "rope.py").read_text()
        assert source.count(replace[0]) >= 1, "the mutant no longer fits the code"
        (folder / "prope" / "rope.py").write_text(source.replace(*replace))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not random",
        "tests/test_rope.py",
    ]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_error_is_noticed(name, tmp_path):
    assert not suite_passes(tmp_path, MUTANTS[name])


def test_the_copy_without_an_error_passes(tmp_path):
    assert suite_passes(tmp_path)
