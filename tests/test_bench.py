"""The measurements measure what they say; their figures are not judged here."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CONFIG, ROOT
from oracles import rotation as oracle

from prope.cost import bench
from prope.cost.bench import medians, paper_listing, peak_bytes, repeat_matmul


def test_the_baseline_is_the_formula_in_float32():
    positions = np.arange(50, dtype=np.int32)[None]
    inputs = np.random.default_rng(0).standard_normal((1, 50, 2, 64)).astype(np.float32)
    for p in (0.0, 0.75, 1.0):
        rotated = paper_listing(jnp.asarray(inputs), jnp.asarray(positions), 64, 10_000, p)
        np.testing.assert_allclose(rotated, oracle(inputs, positions, 1e4, p), rtol=0, atol=1e-5)


def test_programs_are_timed_in_turns():
    calls = []
    found = medians({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert calls == list("ab") * 5 and found.keys() == {"a", "b"}


def test_the_command_prints_multiples_of_a_copy(run_command):
    outcome = run_command("prope.bench", "--rope", "--shape=1,64,2,64")
    figures = {"forward", "forward_backward", "output_and_gradient"}
    assert outcome.result["prope"].keys() == outcome.result["paper"].keys() == figures
    assert all(value > 0 for value in outcome.result["prope"].values())
    for shape in ("1,2", "1,64,2,63", "1,64,0,64", "-1,64,2,64", "1,64,2,x"):
        error = run_command("prope.bench", "--rope", f"--shape={shape}").error
        assert f"--shape={shape}: must be four numbers" in error


def test_a_sweep_of_attention_ranks_the_blocks_that_compile(monkeypatch, run_command):
    error = run_command("prope.bench", "--attention").error
    assert "--attention sweeps blocks of the TPU's splash attention, and this is a cpu" in error
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5")
    monkeypatch.setattr(bench.jax, "devices", lambda: [device])
    asked = []

    def time(programs, rounds):
        if not asked:
            assert [x.shape[-2:] for x in jax.eval_shape(programs["attention"])] == [(256, 128)] * 3
        asked.append(len(asked))
        if len(asked) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")
        return {"attention": 100.0 - len(asked)}

    monkeypatch.setattr(bench, "medians", time)
    found = bench.bench_attention((1, 256, 2, 128))
    seconds = [row["seconds"] for row in found["blocks"]]
    assert seconds == sorted(seconds) and found["best"] == found["blocks"][0]
    assert len(seconds) == len(asked) - 1 and len(seconds) > 20
    assert all(row["keys_at_once"] <= row["keys"] for row in found["blocks"])


def test_one_result_of_the_matmuls_is_alive():
    """Of 64 results of 8192 x 8192, 17 GB would count as the step's peak, or not fit."""
    square = jnp.eye(67)
    program = repeat_matmul(square, repeats=5)
    program()
    others = sum(array.shape == (67, 67) for array in jax.live_arrays())
    result = program()
    assert sum(array.shape == (67, 67) for array in jax.live_arrays()) - others <= 1
    np.testing.assert_array_equal(result, square)


@pytest.mark.slow
def test_the_command_measures_the_training_step(run_command, tmp_path):
    """Without the libraries that only data, other formats and buckets need."""
    names = "grain tensorflow_datasets array_record sentencepiece zarr gcsfs torch transformers"
    hide = f"import sys\nsys.modules.update(dict.fromkeys({names.split()}))\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    environment = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    outcome = run_command("prope.bench", CONFIG, "--steps=2", **environment)
    found = outcome.result
    assert found["mfu"] is None and found["device"] == "cpu", "nobody publishes the peak of a CPU"
    layer = 64 * 2 * 32 + 2 * 64 * 32 + 2 * 32 * 64 + 3 * 64 * 128  # N is 2, K 1, H 32, D 64, F 128
    assert found["model_flops_per_token"] == 6 * (2 * layer + 260 * 64) + 6 * 2 * 2 * 32 * 64
    assert found["tokens_per_second"] == pytest.approx(8 * 64 / found["step_seconds"])
    rate = found["model_flops_per_token"] * found["tokens_per_second"]
    assert found["model_flops_per_second"] == pytest.approx(rate)
    assert found["matmul_fraction"] == pytest.approx(rate / 2 / found["matmul_flops_per_second"])
    state = (
        3 * 4 * found["parameters"]
    )  # float32: the parameters and AdamW's two moments, on two devices
    assert found["peak_bytes"] >= found["temporary_bytes"] + state / 2
    assert found["compile_seconds"] > 0 and found["devices"] == 2
    assert "XLA_FLAGS" in found["xla_flags"]


def test_a_peak_is_counted_by_the_device_where_it_counts():
    memory = SimpleNamespace(
        argument_size_in_bytes=10,
        output_size_in_bytes=7,
        alias_size_in_bytes=6,
        temp_size_in_bytes=100,
    )
    assert peak_bytes(SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 5}), memory) == 5
    assert peak_bytes(SimpleNamespace(memory_stats=lambda: None), memory) == 111


def test_what_cannot_be_measured_is_answered_in_one_line(run_command):
    assert (
        "needs --config=FILE to measure its training step, or --rope or --attention"
        in run_command("prope.bench").error
    )
    error = run_command("prope.bench", CONFIG, "--config.model.attention=splash").error
    assert (
        "config.model.attention=splash cannot be used: it is a TPU kernel, and this is a cpu"
        in error
    )
    error = run_command("prope.bench", CONFIG, "--config.batch_size=6", devices=4).error
    assert "config.batch_size=6: must be a multiple of 4" in error
