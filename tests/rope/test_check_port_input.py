"""The check of ports: the files it reads, what it refuses, and its command."""

import json

import numpy as np
import pytest

from prope.errors import UsageError
from prope.golden.check import check, load_cases, read_values
from prope.rope import apply_p_rope

CASES = load_cases()
NAME = "proportional_d16_p0.25"
GOOD = CASES[NAME]["rotated_queries"]
QUERIES = f"{NAME}/rotated_queries"


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({}, "holds nothing to check; add arrays such as proportional_d16_p0/rotated_queries"),
        ({f"{NAME}0/cos": GOOD}, "must be CASE/ARRAY (did you mean proportional_d16_p0"),
        ({"rotated_queries": GOOD}, "rotated_queries: must be CASE/ARRAY (did you mean "),
        ({f"{NAME}/rotated_query": GOOD}, f"(did you mean {QUERIES}?), of"),
        ({f"{NAME}/queries": GOOD}, "must be CASE/ARRAY"),
        ({QUERIES: GOOD.T}, "must have shape (6, 16), apart from axes of length 1; got (16, 6)"),
        ({f"{NAME}/cos": GOOD[:, :9]}, "must have shape (6, 8), apart"),
        (
            {f"{NAME}/sin": GOOD[:, :4]},
            "got (6, 4): a table of the 2 rotated pairs alone pairs lane k with 2 + k; "
            "pad it to 8 pairs with cos 1 and sin 0",
        ),
        ({f"{NAME}/cos": GOOD[:, :2]}, "got (6, 2): a table of the 2 rotated pairs alone"),
        ({QUERIES: np.where(GOOD > 1, np.inf, GOOD)}, "must hold finite numbers"),
        ({QUERIES: GOOD.astype(str)}, "must hold finite numbers; its type is <U"),
        ({QUERIES: GOOD.astype(object)}, "cannot be read as an .npz file (ValueError)"),
    ],
)
def test_bad_values_are_refused(arrays, expected, tmp_path):
    np.savez(tmp_path / "values.npz", **arrays)
    with pytest.raises(UsageError) as error:
        read_values(tmp_path / "values.npz")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_every_form_of_an_array_is_read(tmp_path):
    name = "partial_d16_p0.25"
    case = CASES[name]
    for cos, sin in (
        (np.append(case["cos"], case["cos"], axis=1), np.append(case["sin"], case["sin"], axis=1)),
        (np.repeat(case["cos"], 2, axis=1), np.repeat(case["sin"], 2, axis=1)),
    ):
        arrays = {
            f"{name}/cos": cos.astype(np.float32)[None, :, None],
            f"{name}/sin": sin,
            f"{name}/inv_freq": case["frequencies"][:2],
            f"{name}/rotated_keys": case["rotated_keys"][None, None],
        }
        np.savez(tmp_path / "values.npz", **arrays)
        verdict, result = check(read_values(tmp_path / "values.npz"))
        assert result["equal"]
        assert verdict.startswith("equal to partial rotary in 1 of 17 cases within")


def test_the_command_prints_a_verdict(run_command, start_command, tmp_path):
    name = "proportional_d64_p0.3"
    case = CASES[name]
    for file, p in (("right", 0.3), ("wrong", 1.0)):
        inputs = np.float32(case["queries"])[None, :, None]
        positions = case["positions"].astype(np.int32)[None]
        rotated = apply_p_rope(inputs, positions, case["head_dim"], case["max_wavelength"], p)
        np.savez(tmp_path / file, **{f"{name}/rotated_queries": rotated[0, :, 0]})
    done = run_command("prope.check_port", f"--values={tmp_path}/right.npz")
    assert done.code == 0 and done.result["equal"]
    assert done.result["rope_percentage"] == 0.3
    assert done.stderr.startswith("equal to p-RoPE in 1 of 17 cases within ")
    assert done.stderr.count("\n") == 1
    command = start_command("prope.check_port", f"--values={tmp_path}/wrong.npz")
    code, stdout, stderr = command.wait()
    result = json.loads(stdout.splitlines()[-1])
    assert code == 1 and not result["equal"]
    assert result["mistake"] == "p is ignored: every pair is rotated"
    assert stderr.startswith("not p-RoPE in 1 of 17 cases: p is ignored")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--nofloat32_angles", "give --values, the file that the port has written"),
        ("--values={}/none.npz", "none.npz: cannot be read as an .npz file (FileNotFoundError)"),
        ("--values={}/text.npz", "text.npz: cannot be read as an .npz file"),
        ("--values={}/cut.npz", "cut.npz: cannot be read as an .npz file (BadZipFile)"),
        ("--values={}/array.npy", "array.npy: cannot be read as an .npz file"),
        ("--values={}", "cannot be read as an .npz file (IsADirectoryError)"),
        ("--values=https://a/b.npz", "must be a local path, or a URL of"),
    ],
)
def test_the_command_refuses_what_it_cannot_read(argument, expected, run_command, tmp_path):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "whole.npz", a=np.ones(9))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100])
    np.save(tmp_path / "array.npy", np.ones(3))
    done = run_command("prope.check_port", argument.format(tmp_path))
    assert done.code == 2
    assert expected in done.error
