"""The measurements measure what they say; their figures are not judged here."""

import contextlib
import os
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.commands import CONFIG, ROOT, devices_flags
from support.runs import make_run

from prope.cost import bench, hlo, timeline
from prope.cost.flops import CHIPS


@pytest.mark.parametrize("p", [0.0, 0.75])
def test_the_baseline_is_the_formula_in_float32(p):
    positions = np.arange(50, dtype=np.int32)[None]
    inputs = np.random.default_rng(0).standard_normal((1, 50, 2, 64)).astype(np.float32)
    rotated = bench.paper_listing(jnp.asarray(inputs), jnp.asarray(positions), 64, 10_000, p)
    expected = oracles.rotation(inputs, positions, 1e4, p)
    np.testing.assert_allclose(rotated, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("calls", [1, 3])
def test_programs_are_timed_alternately_after_two_rounds(monkeypatch, calls):
    """Calls that follow each other are made before one result is waited for."""
    events = []
    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(jax, "block_until_ready", lambda _: events.append("wait"))

    def program(name, seconds):
        clock[0] += 9.0 if len(events) <= 4 * calls else seconds
        events.append(name)

    programs = {"a": lambda: program("a", 1.0), "b": lambda: program("b", 2.0)}
    assert bench.medians(programs, rounds=1, calls=calls) == {"a": 1.0, "b": 2.0}
    assert events == (["a"] * calls + ["wait"] + ["b"] * calls + ["wait"]) * 3


def test_the_command_prints_multiples_of_a_copy(run_command):
    result = run_command("prope.bench", "--rope", "--shape=1,64,2,64").result
    kinds = {"forward", "forward_backward", "output_and_gradient"}
    for name in ("prope", "paper"):
        assert result[name].keys() == kinds
        assert min(result[name].values()) > 0


def test_one_result_of_the_matmuls_is_alive():
    """64 results of 8192 x 8192, 17 GB, would count as the step's peak, or not fit."""

    def count_alive():
        return sum(array.shape == (67, 67) for array in jax.live_arrays())

    square = jnp.eye(67)
    program = bench.repeat_matmul(square, repeats=5)
    program()
    before = count_alive()
    result = program()
    assert count_alive() - before <= 1
    np.testing.assert_array_equal(result, square)


@pytest.mark.slow
def test_the_command_measures_the_training_step(run_command, tmp_path):
    """Without the libraries that only data, other formats and buckets need."""
    names = "grain tensorflow_datasets array_record sentencepiece zarr gcsfs torch transformers"
    hide = f"import sys\nsys.modules.update(dict.fromkeys({names.split()}))\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "XLA_FLAGS": devices_flags(2)}
    result = run_command("prope.bench", CONFIG, "--steps=2", "--profile", **environment).result
    assert result["device"] == "cpu"
    assert result["devices"] == 2
    assert result["mfu"] is None, "nobody publishes the peak of a CPU"
    speed = result["tokens_per_second"]
    assert speed == pytest.approx(8 * 64 / result["step_seconds"])
    rate = result["model_flops_per_token"] * speed
    assert result["model_flops_per_second"] == pytest.approx(rate)
    matmul_rate = result["matmul_flops_per_second"]
    assert result["matmul_fraction"] == pytest.approx(rate / 2 / matmul_rate)
    # float32: the parameters and AdamW's two moments, on two devices.
    state = 3 * 4 * result["parameters"]
    assert result["peak_bytes"] >= result["temporary_bytes"] + state / 2
    assert result["compile_seconds"] > 0
    assert "XLA_FLAGS" in result["xla_flags"]
    assert result["compiler_options"] == {}, "options are for TPUs"
    profile = result["profile"]
    busy = profile["busy_milliseconds"]
    assert profile["idle_milliseconds"] >= 0
    classes = profile["classes"]
    measured = sum(row["measured_milliseconds"] for row in classes.values())
    assert busy <= measured * 1.001 <= 1.001 * busy * os.cpu_count() * 2
    assert {"matmul MLP", "matmul head", "attention", "norms", "optimizer"} < classes.keys()


def test_a_trace_is_sorted_by_class_beside_the_roofline(monkeypatch):
    """Planes of GPUs and TPUs: a loop counts by what is in it; a second device does not."""
    text = """
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %dot.1 = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="jit(step)/Block/mlp/dot_general"}
  %loop = f32[8,8]{1,0} while(%dot.1), condition=%a, body=%a, known={"known_trip_count":{"n":"0"}}
  ROOT %copy.1 = f32[8,8]{1,0} copy(%loop)
}
%a (y: f32[8,8]) -> f32[8,8] {
  ROOT %y = f32[8,8]{1,0} parameter(0)
}
"""
    module = hlo.parse(text)

    def line(name, *events):
        def event(name, op, start, end):
            stats = [("hlo_op", op)] if op else []
            return SimpleNamespace(name=name, stats=stats, start_ns=1e6 * start, end_ns=1e6 * end)

        return SimpleNamespace(name=name, events=[event(*values) for values in events])

    gpu = [
        line("Stream #13", ("nvjet", "dot.1", 10, 16), ("kernel", "copy.1", 14, 22)),
        line("Stream #14", ("Memcpy", None, 31, 34)),
        line("XLA Ops", ("dot.1", "dot.1", 0, 99)),  # derived from the streams
    ]
    ops = ("%loop = f32[8,8]{1,0} while(", None, 10, 30), ("%dot.1 = f32[8,8] dot", None, 10, 16)
    tpu = [line("XLA Ops", *ops, ("copy.1", None, 28, 31)), line("Steps", ("1", None, 0, 99))]
    cases = {
        "GPU": (gpu, (15, 9), {"matmul MLP": 6, "copies": 8, "other": 3}),
        "TPU": (tpu, (9, 12), {"matmul MLP": 6, "copies": 3}),
    }

    @contextlib.contextmanager
    def trace(folder):
        yield
        pathlib.Path(folder, "host.xplane.pb").touch()

    monkeypatch.setattr(jax.profiler, "trace", trace)
    for name, (lines, (busy, idle), expected) in cases.items():
        planes = [(f"/device:{name}:0", lines), (f"/device:{name}:1", gpu), ("/host:CPU", gpu)]
        planes = [SimpleNamespace(name=plane, lines=lines) for plane, lines in planes]
        data = SimpleNamespace(from_file=lambda _, planes=planes: SimpleNamespace(planes=planes))
        monkeypatch.setattr(jax.profiler, "ProfileData", data)
        result = timeline.profile(list, module, CHIPS["v5e"])
        assert result["busy_milliseconds"] == pytest.approx(busy / 3)
        assert result["idle_milliseconds"] == pytest.approx(idle / 3)
        classes = result["classes"]
        measured = {name: row["measured_milliseconds"] for name, row in classes.items()}
        assert measured == pytest.approx({name: value / 3 for name, value in expected.items()})
        assert classes["matmul MLP"]["flops"] == 2 * 8**3


def test_a_peak_is_counted_by_the_device_where_it_counts():
    memory = SimpleNamespace(
        argument_size_in_bytes=10,
        output_size_in_bytes=7,
        alias_size_in_bytes=6,
        temp_size_in_bytes=100,
    )
    gpu = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 5})
    cpu = SimpleNamespace(memory_stats=lambda: None)
    assert bench.peak_bytes(gpu, memory) == 5
    assert bench.peak_bytes(cpu, memory) == 111


def test_a_run_is_timed_beside_transformers_with_the_same_weights(libraries, tmp_path, monkeypatch):
    import beside_transformers

    # torch's threads would wait for those of other tests.
    monkeypatch.setattr(beside_transformers, "list_cores", lambda: [0])
    # What a CPU, or their AdamW, cannot do.
    fields = {"attention": "splash", "remat": "full"}
    make_run(tmp_path / "run", **fields)
    result = beside_transformers.measure(tmp_path / "run", 40, 2, 1)
    assert (result["seq_len"], result["sequences"]) == (40, 2)
    losses = result["losses"]
    assert losses["prope"] == pytest.approx(losses["transformers"], abs=1e-5)
    parts = ["loss", "training step", "prefill", "prefill and 64 tokens"]
    assert list(result["seconds"]) == parts
    for seconds in result["seconds"].values():
        assert min(seconds["prope"], seconds["transformers"]) > 0


# What is given, and the name that the line has.
REFUSED = [
    ([], "--config"),
    (["--rope", CONFIG], "--rope"),
    (["--rope", "--profile"], "--profile"),
    (["--rope", "--shape=1,2"], "--shape=1,2"),
    (["--rope", "--shape=1,64,2,63"], "--shape=1,64,2,63"),
    (["--rope", "--shape=-1,64,2,x"], "--shape=-1,64,2,x"),
    ([CONFIG, "--config.model.attention=splash"], "config.model.attention"),
    ([CONFIG, "--config.batch_size=6"], "config.batch_size"),
]


def test_invalid_input_is_refused_in_one_line(run_command):
    for arguments, name in REFUSED:
        outcome = run_command("prope.bench", *arguments, devices=4)
        assert outcome.code == 2
        assert name in outcome.error
