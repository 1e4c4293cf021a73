"""DeepMind's gemma 4.0.1 beside prope: its rotation, whose values are kept in gemma4.json."""

import json
import os
import subprocess

import numpy as np
import pytest
from conftest import ROOT

from prope import apply_p_rope
from prope.golden.check import FLOAT32, check, load_cases

VERSION = "4.0.1"


@pytest.fixture(params=["stored", "installed"])
def gemma4_values(request, tmp_path):
    """What gemma's `apply_rope` gives for queries of golden cases, by case."""
    file = ROOT / "tests/gemma4.json"
    if request.param == "installed":
        python = os.environ.get("PROPE_GEMMA4_PYTHON")
        if python is None:
            pytest.skip(f"PROPE_GEMMA4_PYTHON names no Python >= 3.12 with gemma {VERSION}")
        file = tmp_path / "gemma4.json"
        command = [python, ROOT / "tests/write_gemma4.py", file]
        # Without the tests' XLA_FLAGS, which another jaxlib may not know.
        environment = {"JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, check=True, timeout=120)
    values = json.loads(file.read_text())
    assert values.pop("version") == VERSION
    return {name: np.array(rows) for name, rows in values.items()}


def test_gemma_4_s_rotation_is_golden_up_to_float32_angles(gemma4_values):
    values = {name: {"rotated_queries": rows} for name, rows in gemma4_values.items()}
    verdict, result = check(values, float32_angles=True)
    assert result["equal"] and verdict.startswith("equal to p-RoPE in 4 of 17 cases")
    assert check(values)[1]["mistake"] == FLOAT32


def test_gemma_4_s_rotation_is_prope_s_within_its_own_error(gemma4_values):
    for name, theirs in gemma4_values.items():
        case = load_cases()[name]
        settings = (case["head_dim"], case["max_wavelength"], case["rope_percentage"])
        inputs = np.float32(case["queries"])[None, :, None]
        ours = apply_p_rope(
            inputs,
            case["positions"].astype(np.int32)[None],
            *settings,
        )
        their_error = np.abs(theirs - case["rotated_queries"]).max()
        assert np.abs(ours[0, :, 0] - theirs).max() <= their_error + 1.5 * 3e-7
        assert their_error < 0.05, "angles of 262143 and 1048575 radians, in float32"
