"""`prope.bench --suite`: each measurement is there once, however often it was interrupted; its numbers agree."""

import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from prope.cost import suite
from prope.errors import UsageError

TINY = suite.Sizes(
    "float32",
    (64, 2),
    2**10,
    (2, 8),
    (16, 8, 32),
    {"tiny": (1, 16, 2, 8, 16, 260, 16, 2)},
    ("tiny", "full"),
    "tiny",
    32,
    32,
    (1, 16, 2, 8),
    (16, 32),
)
NAMES = (
    [
        "matmul",
        "memory",
        "float32",
        "bfloat16",
        "xla, 16 tokens",
        "xla, 32 tokens",
        "16 tokens, 32 entries",
    ]
    + [f"tiny, {remat}" for remat in ("none", "minimal", "save_qkv", "full")]
    + [
        "tiny, 16 tokens",
        "tiny, 32 tokens",
        "tiny, batch 1",
        "tiny, batch 64",
        "tiny, save",
        "tiny, restore",
    ]
)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "suite.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_interrupted_suite_goes_on_and_measures_each_once(tmp_path, monkeypatch):
    assert suite.run_suite(tmp_path, 0, TINY)["left"] == len(NAMES)
    measure, calls = suite._measure, []

    def interrupted(function):
        calls.append(function)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measure(function)

    monkeypatch.setattr(suite, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        suite.run_suite(tmp_path, 1, TINY)
    assert [row["name"] for row in lines(tmp_path)[1:]] == NAMES[:5]
    with (tmp_path / "suite.jsonl").open("a") as file:
        file.write('{"group": "atten')  # as a kill leaves it
    found = suite.run_suite(tmp_path, 5, TINY)
    assert [row["name"] for row in found["rows"]] == NAMES and found["left"] == 0
    assert len(calls) == len(NAMES) + 1
    again = suite.run_suite(tmp_path, 5, TINY)
    assert again["rows"] == found["rows"] and len(calls) == len(NAMES) + 1

    rows = {row["name"]: row for row in found["rows"]}
    assert all(row["seconds"] > 0 and row["value"] > 0 for row in rows.values())
    matmul, memory = rows["matmul"], rows["memory"]
    assert matmul["value"] == pytest.approx(2 * 64**3 / matmul["seconds"] / 1e9)
    attended = rows[
        "xla, 32 tokens"
    ]  # 1 sequence, 2 heads of 8: a query sees half of the keys, in 2 + 4 matmuls
    assert attended["value"] == pytest.approx(6 * 2 * 2 * 8 * 32 * 16 / attended["seconds"] / 1e9)
    assert attended["share"] == pytest.approx(attended["value"] / matmul["value"])
    head = rows["16 tokens, 32 entries"]
    assert head["value"] == pytest.approx(3 * 2 * 16 * 8 * 32 / head["seconds"] / 1e9)
    decoded = rows["tiny, batch 64"]
    parameters = 260 * 16 + 16 * (2 * 8 + 2 * 8 + 2 * 8 + 3 * 16) + 3 * 16
    cached = 64 * 2 * 8 * (128 + 65 / 2)
    assert decoded["share"] == pytest.approx(
        4 * (parameters + cached) / decoded["seconds"] / 1e9 / memory["value"]
    )
    assert decoded["value"] == pytest.approx(64 / decoded["seconds"])
    page = (tmp_path / "index.html").read_text()
    assert all(name in page for name in NAMES) and (tmp_path / "attention.png").exists()


def test_a_device_with_too_little_memory_has_a_row_that_says_so(tmp_path, monkeypatch):
    def measure():
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\nmore"
        )

    monkeypatch.setattr(suite, "measurements", lambda _: [("step", "2.5 B, none", measure)])
    row = suite.run_suite(tmp_path, 1)["rows"][0]
    assert (
        row["error"]
        == "does not fit in the device's memory: RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."
    )
    assert "does not fit in the device&#39;s memory" in (tmp_path / "index.html").read_text()


def test_figures_of_two_machines_are_not_mixed(tmp_path):
    (tmp_path / "suite.jsonl").write_text('{"machine": {"device": "NVIDIA H100"}}\n')
    with pytest.raises(
        UsageError, match=r"holds figures of another machine .*H100.*; choose another --output"
    ):
        suite.run_suite(tmp_path, 0, TINY)


def test_no_library_of_the_data_is_needed(tmp_path):
    """On a machine with a GPU there may be JAX, Flax, Optax and Orbax only."""
    names = (
        "grain",
        "tensorflow_datasets",
        "array_record",
        "sentencepiece",
        "zarr",
        "gcsfs",
        "torch",
        "transformers",
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({names!r}))\n"
    )
    command = [
        sys.executable,
        "-m",
        "prope.bench",
        "--suite",
        f"--output={tmp_path}/out",
        "--minutes=0",
    ]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads(done.stdout)["left"] == 2 + 2 + 7 + 1 + 3 * 4 + 5 + 2 + 2
    )  # in the order of the groups
