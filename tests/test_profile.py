"""What a run shows of itself while it trains: figures in metrics.jsonl, and traces of single steps."""

import contextlib
import gzip
import json

import jax
import pytest
from conftest import losses
from etils import epath
from jax.profiler import ProfileData

from prope.config import default_config
from prope.errors import UsageError
from prope.runtime.profiler import Profiler
from prope.runtime.validate import validate
from prope.workdir import metrics


def read_traces(workdir) -> list[list[int]]:
    """The steps that each trace of a run names, in Perfetto's form and in the profiler's."""
    traces = []
    for folder in sorted((workdir / "profile" / "plugins" / "profile").iterdir()):
        (text,), (planes,) = folder.glob("*.trace.json.gz"), folder.glob("*.xplane.pb")
        events = json.loads(gzip.decompress(text.read_bytes()))["traceEvents"]
        named = [
            int(event["args"]["step_num"])
            for event in events
            if "step_num" in event.get("args", {})
        ]
        lines = [
            line for plane in ProfileData.from_file(str(planes)).planes for line in plane.lines
        ]
        stats = [
            dict(event.stats) for line in lines for event in line.events if event.name == "train"
        ]
        assert sorted(stat["step_num"] for stat in stats) == sorted(named)
        traces.append(sorted(named))
    return traces


@pytest.mark.slow
def test_steps_are_traced_and_named_and_change_nothing(train, trained, tmp_path):
    profiled = ("--config.log_every=1", "--config.profile=9,13")
    first = train(
        tmp_path, *profiled, "--stop_at_step=10"
    )  # within the range: the trace so far is kept
    assert first.code == 0, first.stderr
    assert read_traces(tmp_path) == [[9, 10]]
    second = train(tmp_path, *profiled)
    assert second.code == 0 and "resumed from step 10" in second.stderr
    assert read_traces(tmp_path) == [[9, 10], [11, 12, 13]]
    assert f"steps 11 to 13 are traced: {tmp_path}/profile" in second.stderr
    assert losses(tmp_path) == losses(trained[0]), "bit for bit"
    without = train(tmp_path, "--config.log_every=1")
    assert without.code == 0, "config.profile may change"


def test_a_trace_is_written_to_a_bucket(bucket, tmp_path):
    double = jax.jit(lambda x: 2 * x)
    with Profiler((2, 5), bucket, contextlib.nullcontext) as profiler:  # which ends after step 3
        results = [int(profiler.run(step, double, step)) for step in (1, 2, 3)]
    assert results == [2, 4, 6]
    for path in epath.Path(bucket).glob("profile/plugins/profile/*/*"):
        copy = tmp_path / path.relative_to(bucket)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert read_traces(tmp_path) == [[2, 3]]


@pytest.mark.parametrize("before", ["nothing", "a folder", "a file"])
def test_a_trace_is_written_where_it_can_be(tmp_path, caplog, before):
    if before == "a file":
        (tmp_path / "profile").write_text("no folder")
    if before == "a folder":
        (tmp_path / "profile").mkdir()
    with Profiler((1, 1), tmp_path, contextlib.nullcontext) as profiler:
        assert profiler.run(1, lambda x: x + 1, 2) == 3
    if before == "a file":
        assert "profile: the trace cannot be written: " in caplog.text
    else:
        assert read_traces(tmp_path) == [[1]]


@pytest.mark.parametrize("steps", [(3,), (0, 2), (5, 4), (1, 21), (1.0, 2), ("a", "b")])
def test_a_range_to_profile_must_be_two_steps_of_the_run(steps):
    config = default_config()
    config.update({"num_steps": 20, "profile": (20, 20)})
    config.optimizer.warmup_steps = 2
    validate(config)
    config.profile = steps
    with pytest.raises(
        UsageError,
        match=r"config.profile=\(.*must be two steps, first and last, of 1 to num_steps=20",
    ):
        validate(config)


def test_metrics_have_the_speed_and_the_memory(monkeypatch, tmp_path):
    """Of two devices with a peak of 100 GFLOP/s, at 1 s for a step of 8 tokens of 10 GFLOPs each."""
    clock = [0.0]
    device = type(
        "Device", (), {"memory_stats": lambda self: {"bytes_in_use": 5, "peak_bytes_in_use": 7}}
    )
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [device()])
    monkeypatch.setattr(metrics.jax, "device_count", lambda: 2)
    config = default_config()
    config.update({"batch_size": 2, "num_steps": 2, "log_every": 1})
    config.data.seq_len, config.optimizer.warmup_steps = 4, 1
    values = {"loss": 1.0, "grad_norm": 1.0, "batch_hash": 1}
    writer = metrics.MetricWriter(
        config, tmp_path, 0, 2, model_flops_per_token=10e9, peak_flops=100e9
    )
    with writer:
        for step in (1, 2, 3):  # a step is reported when the next one was dispatched
            writer.step(step, dict(values))
            clock[0] += 1
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert second["step_seconds"] == 1.0 and second["tokens_per_second"] == 8.0
    assert second["model_tflops_per_second_per_device"] == pytest.approx(8 * 10e9 / 2 / 1e12)
    assert second["mfu"] == pytest.approx(0.4)
    assert (second["memory_bytes"], second["peak_memory_bytes"]) == (5, 7)
    assert first.keys() == second.keys()


def test_what_is_not_known_on_a_cpu_is_null(trained):
    for line in (trained[0] / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert [record[name] for name in ("mfu", "memory_bytes", "peak_memory_bytes")] == [None] * 3
        assert record["step_seconds"] == pytest.approx(8 * 64 / record["tokens_per_second"])
        assert record["model_tflops_per_second_per_device"] > 0
