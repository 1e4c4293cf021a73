"""What a run shows of itself while it trains: figures in metrics.jsonl, and traces of steps."""

import contextlib

import fsspec
import jax
import pytest
from jax.profiler import ProfileData
from support.commands import losses

from prope.runtime.profiler import Profiler


def read_traces(workdir) -> list[list[int]]:
    """The steps that each trace of a run names."""
    traces = []
    for folder in sorted((workdir / "profile/plugins/profile").iterdir()):
        (xplane,) = folder.glob("*.xplane.pb")
        traces.append(xplane_steps(xplane))
    return traces


def xplane_steps(path) -> list[int]:
    steps = []
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    steps.append(dict(event.stats)["step_num"])
    return sorted(steps)


@pytest.mark.slow
def test_steps_are_traced_and_named_and_change_nothing(train, trained, tmp_path):
    profiled = ("--config.log_every=1", "--config.profile=9,13")
    # The first run ends within the range: the trace so far is kept.
    first = train(tmp_path, *profiled, "--stop_at_step=10")
    assert first.code == 0, first.stderr
    assert read_traces(tmp_path) == [[9, 10]]
    second = train(tmp_path, *profiled)
    assert second.code == 0, second.stderr
    assert "resumed from step 10" in second.stderr
    assert read_traces(tmp_path) == [[9, 10], [11, 12, 13]]
    assert f"steps 11 to 13 are traced: {tmp_path}/profile" in second.stderr
    assert losses(tmp_path) == losses(trained[0]), "bit for bit"
    without = train(tmp_path, "--config.log_every=1")
    assert without.code == 0, "config.profile may change"


def test_a_trace_is_written_to_a_bucket(bucket, tmp_path):
    double = jax.jit(lambda x: 2 * x)
    # The run ends after step 3.
    with Profiler((2, 5), bucket, contextlib.nullcontext) as profiler:
        results = [int(profiler.run(step, double, step)) for step in (1, 2, 3)]
    assert results == [2, 4, 6]
    copy = tmp_path / "copy"
    fsspec.filesystem("gs").get(bucket, str(copy), recursive=True)
    assert read_traces(copy) == [[2, 3]]


def trace_one_step(workdir):
    with Profiler((1, 1), workdir, contextlib.nullcontext) as profiler:
        assert profiler.run(1, lambda x: x + 1, 2) == 3


def test_storage_that_fails_ends_no_run(tmp_path, caplog):
    (tmp_path / "profile").write_text("no folder")
    trace_one_step(tmp_path)
    assert "profile: the trace cannot be written: " in caplog.text
