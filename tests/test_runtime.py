"""Timers and votes of a run, in this process, with a clock that the test sets."""

import importlib
import json

import numpy as np
import pytest

from prope.runtime import interrupts, processes, watchdog
from prope.workdir import metrics


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the clocks of `time` show, as a list of one number."""
    now = [1000.0]
    for module in (interrupts, watchdog, metrics):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_save_is_due_after_the_minutes_and_again_after_as_many(clock):
    timer = interrupts.Interrupts(1.0)
    for seconds, request in ((59, "NONE"), (2, "SAVE"), (1, "SAVE")):
        clock[0] += seconds
        assert timer.poll().name == request
    timer.saved()
    for seconds, request in ((59, "NONE"), (2, "SAVE")):
        clock[0] += seconds
        assert timer.poll().name == request
    assert timer.request == interrupts.Request.SAVE
    never = interrupts.Interrupts(0)
    clock[0] += 1e9
    assert never.poll() == interrupts.Request.NONE


@pytest.mark.parametrize("holds", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("own", [0, 1])
def test_a_condition_of_one_process_counts(monkeypatch, holds, own):
    def allgather(condition):
        assert condition == holds[own]
        return np.array(holds, np.int32)

    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", allgather)
    assert processes.any_process(holds[own]) == (holds != (False, False))


def test_speed_leaves_out_pauses(clock, tmp_path):
    """Steps of 10 s, with an evaluation of 1000 s after the second one."""
    config = importlib.import_module("configs.quickstart").get_config("tiny")
    config.log_every = 1
    tokens = config.batch_size * config.data.seq_len
    identity = {"fingerprint": "0" * 16, "windows": 1, "loss": 1.0}
    evaluation = identity | dict.fromkeys(("perplexity", "bits_per_byte", "unigram_bits_per_byte"), 1.0)
    with metrics.MetricWriter(config, tmp_path, 0, 4, 1e6, None) as writer:
        for step in (1, 2, 3, 4):
            clock[0] += 8
            writer.step(step, {"loss": np.float32(1), "grad_norm": np.float32(1), "batch_hash": np.uint32(1)})
            clock[0] += 2
            if step in (2, 4):  # a pause reports the step before it
                with writer.pause():
                    clock[0] += 1000
                    writer.evaluation(step, evaluation)
        summary = writer.summary("0" * 16)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # A step is reported when the next one was dispatched, or before a pause.
    assert [tokens / record["tokens_per_second"] for record in records] == pytest.approx([18, 2, 18, 2])
    assert summary["tokens_per_second"] == pytest.approx(tokens / 10)
