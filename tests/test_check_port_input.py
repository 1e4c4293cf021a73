"""The check of ports: the files it reads, what it refuses, and its command."""

import json

import numpy as np
import pytest

from prope.errors import UsageError
from prope.golden.check import check, load_cases, read_values
from prope.rope import apply_p_rope

CASES = load_cases()
GOOD = CASES["proportional_d16_p0.25"]["rotated_queries"]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (
            {"proportional_d16_p0.2/rotated_queries": GOOD},
            "must be CASE/ARRAY (did you mean proportional_d16_p0",
        ),
        ({"rotated_queries": GOOD}, "rotated_queries: must be CASE/ARRAY (did you mean "),
        (
            {"proportional_d16_p0.25/rotated_query": GOOD},
            "(did you mean proportional_d16_p0.25/rotated_queries?), of",
        ),
        ({"proportional_d16_p0.25/queries": GOOD}, "holds nothing to check; add arrays such as p"),
        ({}, "holds nothing to check"),
        (
            {"proportional_d16_p0.25/rotated_queries": GOOD.T},
            "must have shape (6, 16), apart from axes of length 1",
        ),
        ({"proportional_d16_p0.25/cos": GOOD[:, :9]}, "must have shape (6, 8), apart"),
        (
            {"proportional_d16_p0.25/rotated_queries": np.where(GOOD > 1, np.inf, GOOD)},
            "must hold finite numbers",
        ),
        (
            {"proportional_d16_p0.25/rotated_queries": GOOD.astype(str)},
            "must hold finite numbers; its type is <U",
        ),
        (
            {"proportional_d16_p0.25/rotated_queries": GOOD.astype(object)},
            "cannot be read as an .npz file",
        ),
    ],
)
def test_bad_values_are_refused(arrays, says, tmp_path):
    np.savez(tmp_path / "values.npz", **arrays)
    with pytest.raises(UsageError) as error:
        read_values(tmp_path / "values.npz")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_every_form_of_an_array_is_read(tmp_path):
    case = CASES["partial_d16_p0.25"]
    for repeat in (lambda x: np.concatenate([x, x], axis=1), lambda x: np.repeat(x, 2, axis=1)):
        np.savez(
            tmp_path / "values.npz",
            **{
                "partial_d16_p0.25/cos": repeat(case["cos"]).astype(np.float32)[None, :, None],
                "partial_d16_p0.25/sin": repeat(case["sin"]),
                "partial_d16_p0.25/inv_freq": case["frequencies"][:2],
                "partial_d16_p0.25/rotated_keys": case["rotated_keys"][None, None],
            },
        )
        verdict, result = check(read_values(tmp_path / "values.npz"))
        assert result["equal"] and verdict.startswith(
            "equal to partial rotary in 1 of 17 cases within"
        )


def test_the_command_from_inputs_to_verdict(run_command, start_command, tmp_path):
    done = run_command("prope.check_port", f"--write_inputs={tmp_path}/new/inputs.npz")
    assert done.code == 0 and done.result == {
        "output": f"{tmp_path}/new/inputs.npz",
        "cases": list(CASES),
    }
    with np.load(tmp_path / "new/inputs.npz") as file:
        inputs = dict(file.items())
    key = "proportional_d64_p0.3/"
    assert (
        inputs[f"{key}queries"].dtype == np.float32 and inputs[f"{key}positions"].dtype == np.int32
    )
    x, positions = (inputs[key + kind][None] for kind in ("queries", "positions"))
    d, theta, p = (
        inputs[key + kind].item() for kind in ("head_dim", "max_wavelength", "rope_percentage")
    )
    values = {
        f"{key}rotated_queries": np.asarray(
            apply_p_rope(x[:, :, None], positions, d, theta, p)[:, :, 0]
        )
    }
    np.savez(tmp_path / "right.npz", **inputs, **values)
    done = run_command("prope.check_port", f"--values={tmp_path}/right.npz")
    assert done.code == 0 and done.result["equal"] and done.result["rope_percentage"] == 0.3
    assert (
        done.stderr.startswith("equal to p-RoPE in 1 of 17 cases within ")
        and done.stderr.count("\n") == 1
    )
    values = {
        f"{key}rotated_queries": np.asarray(
            apply_p_rope(x[:, :, None], positions, d, theta, 1.0)[:, :, 0]
        )
    }
    np.savez(tmp_path / "wrong.npz", **values)
    code, stdout, stderr = start_command(
        "prope.check_port", f"--values={tmp_path}/wrong.npz"
    ).wait()
    result = json.loads(stdout.splitlines()[-1])
    assert (
        code == 1
        and not result["equal"]
        and result["mistake"] == "p is ignored: every pair is rotated"
    )
    assert (
        stderr.startswith("not p-RoPE in 1 of 17 cases: p is ignored") and stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either --write_inputs, a file to write, or --values"),
        (["--values=a.npz", "--write_inputs=b.npz"], "give either"),
        (["--values={}/none.npz"], "none.npz: cannot be read as an .npz file (FileNotFoundError)"),
        (["--values={}/text.npz"], "text.npz: cannot be read as an .npz file"),
        (["--values={}/cut.npz"], "cut.npz: cannot be read as an .npz file (BadZipFile)"),
        (["--values={}/array.npy"], "array.npy: cannot be read as an .npz file"),
        (["--values={}"], "cannot be read as an .npz file (IsADirectoryError)"),
        (["--values=https://a/b.npz"], "must be a local path, or a URL of"),
        (["--write_inputs={}"], "is a directory; name a file in it"),
        (["--write_inputs={}/text.npz/below.npz"], "folder of --write_inputs="),
    ],
)
def test_the_command_refuses_what_it_cannot_read(arguments, says, run_command, tmp_path):
    (tmp_path / "text.npz").write_text("no zip")
    np.savez(tmp_path / "whole.npz", a=np.ones(9))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100])
    np.save(tmp_path / "array.npy", np.ones(3))
    done = run_command("prope.check_port", *(argument.format(tmp_path) for argument in arguments))
    assert done.code == 2 and says in done.error
