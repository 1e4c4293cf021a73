"""Timers, votes and start of a run, with a clock that the test sets; a device's memory."""

import ast
import contextlib
import ctypes
import fcntl
import importlib
import math
import os
import queue
import re
import shutil
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import numpy as np
import pytest
from support.commands import ROOT
from support.heads import make_walk
from support.runs import evaluate_run, make_run
from support.text import read_lines

from prope.config import resolve
from prope.data.store import workers
from prope.errors import Stopped
from prope.hf import exporter
from prope.runtime import interrupts, memory, processes, progress, startup, watchdog
from prope.workdir import metrics


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the clocks of `time` show, as a list of one number."""
    now = [1000.0]
    for module in (interrupts, watchdog, metrics):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def spec():
    return resolve(importlib.import_module("configs.quickstart").get_config("tiny"))


def test_a_save_is_due_after_the_minutes_and_again_after_as_many(clock):
    timer = interrupts.Interrupts(1.0)
    never = interrupts.Interrupts(0)
    for seconds, request in ((59, "NONE"), (2, "SAVE"), (1, "SAVE")):
        clock[0] += seconds
        assert timer.poll().name == request
    timer.saved()
    for seconds, request in ((59, "NONE"), (2, "SAVE")):
        clock[0] += seconds
        assert timer.poll().name == request
    assert timer.request == interrupts.Request.SAVE
    clock[0] += 1e9
    assert never.poll() == interrupts.Request.NONE


@pytest.mark.parametrize("second", ["NONE", "SAVE", "STOP"])
def test_several_processes_save_once_when_the_minutes_have_passed(clock, monkeypatch, second):
    """A vote is answered one poll later; what another process asks for meanwhile still counts."""
    monkeypatch.setattr(processes, "_count", 2)
    timer = interrupts.Interrupts(1.0)
    votes = []

    def vote(request):
        votes.append(request)
        other = interrupts.Request[second] if len(votes) == 4 else interrupts.Request.NONE
        return max(request, other)

    monkeypatch.setattr(timer, "_vote", vote)
    seen = []
    for seconds in (1, 61, 1, 1, 1, 1):
        clock[0] += seconds
        seen.append(timer.poll().name)
        if timer.request:
            timer.saved()
    assert seen == ["NONE", "NONE", "SAVE", "NONE", second, "NONE"]


def test_the_watchdog_ends_a_process_that_hangs(monkeypatch, capfd):
    ended = queue.Queue()
    monkeypatch.setattr(watchdog.os, "_exit", ended.put)
    with watchdog.watching(0.001):
        with watchdog.paused(), pytest.raises(queue.Empty):
            ended.get(timeout=0.2)
        watchdog.alive("step 3")
        assert ended.get(timeout=20) == 76
    line = "nothing has happened for 0.001 minutes after step 3; the stacks"
    assert line in capfd.readouterr().err


def test_the_watchdog_waits_while_processes_join(monkeypatch):
    alive_at = []
    monkeypatch.setattr(processes, "_join", lambda wanted: alive_at.append(watchdog._alive_at))
    monkeypatch.setattr(processes, "_check_gpus", lambda: None)
    monkeypatch.setenv("PROPE_PROCESSES", "auto")
    with watchdog.watching(60):
        processes.start()
        assert alive_at == [math.inf] and watchdog._alive_at < math.inf


@pytest.mark.parametrize("module", ["evaluate", "analyze", "export_hf", "ask"])
def test_commands_that_compute_for_long_are_watched(module):
    tree = ast.parse((ROOT / f"prope/{module}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (run,) = [call for call in calls if ast.unparse(call.func) == "command.run"]
    assert "restart_when_stuck=True" in ast.unparse(run)


def test_what_commands_do_for_long_reports_progress(tmp_path, monkeypatch):
    progress = []
    monkeypatch.setattr(watchdog, "alive", progress.append)
    make_run(tmp_path / "run")
    exporter.export(tmp_path / "run", tmp_path / "hf")
    assert progress[-1] == "the tensors before model.norm.weight"
    evaluate_run(tmp_path / "run", dataset="synthetic/copy", max_windows=20, batch_size=8)
    assert progress[-3:] == [f"sequence {start} of 20" for start in (0, 8, 16)]
    make_walk(tmp_path / "run").enter()
    assert progress[-1] == "a part of the analysis"


SIGTERM_AS_PROCESS_1 = """
import os, signal
if os.getpid() != 1:  # namespaces are not permitted here
    os.getpid = lambda: 1
from prope import command
command.prepare(lambda: None, "")
signal.raise_signal(signal.SIGTERM)
raise SystemExit("the signal was ignored")
"""


def test_sigterm_ends_a_command_that_is_the_first_process_of_a_container():
    """The kernel ignores a signal to process 1 that has no handler."""
    command = [sys.executable, "-c", SIGTERM_AS_PROCESS_1]
    namespace = ["unshare", "--pid", "--fork"]
    if shutil.which("unshare") and subprocess.run([*namespace, "true"]).returncode == 0:
        command = namespace + command
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\n")


# Counts the page faults of a program, x @ x.T of 81 MB; at times a small block takes a piece of
# the free 81 MB, so the last runs count by their median.
FAULTS = """
import resource, statistics, jax, jax.numpy as jnp
from prope.runtime import memory
memory.reuse_memory()
run = jax.jit(lambda x: jnp.sin(x @ x.T).sum())
x = jnp.ones((4500, 4))
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(faults[4:])))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="reuse_memory sets options of glibc's malloc; this system has another",
)
def test_a_program_on_a_cpu_runs_again_in_the_memory_of_its_last_run():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert int(done.stdout) < 1000, done.stderr  # 81 MB are 19,775 pages


# Memory that a program leaves taken whose 81 MB are a large part of a machine of 500 MB, or not.
LEFT = """
import sys, jax, jax.numpy as jnp
from prope.runtime import memory
memory.reuse_memory()
memory.device_bytes = lambda device: int(sys.argv[1])
run = jax.jit(lambda x: jnp.sin(x @ x.T).sum())
x = jnp.ones((4500, 4))
memory.check_memory(run.lower(x).compile(), "")
def taken():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = taken()
run(x).block_until_ready()
print(taken() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc and /proc")
@pytest.mark.parametrize(("machine", "is_left"), [(500_000_000, False), (10**12, True)])
def test_a_program_that_needs_much_of_a_cpu_gives_it_back(machine, is_left):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", LEFT, str(machine)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (int(done.stdout) > 60e6) == is_left, done.stderr


def test_speed_leaves_out_pauses(clock, tmp_path, spec, monkeypatch):
    """Steps of 10 s, with an evaluation of 1000 s after the second one; 10 GFLOPs a token."""
    spec = spec.replace({"log_every": 1})
    tokens = spec.batch_size * spec.data.seq_len
    values = {"loss": np.float32(1), "grad_norm": np.float32(1), "batch_hash": np.uint32(1)}
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(metrics.jax, "device_count", lambda: 2)
    with metrics.MetricWriter(spec, tmp_path, 0, 4, 10e9, 100e9) as writer:
        for step in (1, 2, 3, 4):
            clock[0] += 8
            writer.step(step, dict(values))
            writer._pending[-1].result()  # the thread has looked at the clock
            clock[0] += 2
            if step in (2, 4):  # a pause reports the step before it
                with writer.pause():
                    clock[0] += 1000
        summary = writer.summary("0" * 16)
    records = read_lines(tmp_path / "metrics.jsonl")
    seconds = [tokens / record["tokens_per_second"] for record in records]
    # A step ends when its values are there; what comes after that is the next one's.
    assert seconds == pytest.approx([8, 10, 10, 10])
    assert summary["tokens_per_second"] == pytest.approx(tokens / 9.5)
    flops = tokens * 10e9 / 8 / 2
    assert records[0]["model_tflops_per_second_per_device"] == pytest.approx(flops / 1e12)
    assert records[0]["mfu"] == pytest.approx(flops / 100e9)
    assert (records[0]["memory_bytes"], records[0]["peak_memory_bytes"]) == (5, 7)


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr a terminal of so many columns; 0: it does not tell. Returns what reads it."""

    reader, writer = os.openpty()
    monkeypatch.setenv("TERM", "xterm")

    def read_line():
        text = b""
        while not text.endswith(b"\n"):  # with which a bar ends
            text += os.read(reader, 2**16)
        return text.decode()

    def set_columns(columns):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        monkeypatch.setattr(sys, "stderr", stream)
        return read_line

    with os.fdopen(writer, "w") as stream:
        yield set_columns
    os.close(reader)


def write_steps(spec, folder):
    """Reports three steps of 12, which took seconds and have all figures."""
    values = {"loss": np.float32(1.2345), "grad_norm": np.float32(1), "batch_hash": np.uint32(1)}
    spec = spec.replace({"log_every": 1})
    with metrics.MetricWriter(spec, folder, 0, 12, 10e9, 100e9) as writer:
        for step in (1, 2, 3, 4):
            writer.step(step, dict(values))


@pytest.mark.parametrize("columns", [80, 110, 200])
def test_a_bar_has_a_length_and_the_loss_beside_it(terminal, spec, tmp_path, columns):
    read = terminal(columns)
    write_steps(spec, tmp_path)
    last = read().rstrip().split("\r")[-1]
    assert len(last) <= columns
    before, bar, after = last.split("|")
    assert before == "3/12 " and len(bar) == 20
    assert "left, loss 1.2345, " in after and "tokens/s" in after


@pytest.mark.parametrize(
    ("columns", "kind"), [(0, "xterm"), (110, "dumb"), (0, "dumb"), (None, "xterm")]
)
def test_where_no_bar_can_be_drawn_there_are_lines(
    terminal, spec, tmp_path, monkeypatch, columns, kind
):
    """A terminal of unknown size, one without a cursor, and a file."""
    if columns is not None:
        terminal(columns)
    monkeypatch.setenv("TERM", kind)
    lines = []
    monkeypatch.setattr(metrics.log, "info", lambda text, *values: lines.append(text % values))
    write_steps(spec, tmp_path)
    assert [line[:24] for line in lines] == [f"step {n}/12: loss 1.2345, "[:24] for n in (1, 2, 3)]
    assert not workers.has_bars()


def test_a_slow_compilation_is_explained(monkeypatch):
    lines = []
    monkeypatch.setattr(progress.log, "info", lines.append)
    with progress.compiling():
        pass
    assert "'Very slow compile?' is no error" in lines[0]


@pytest.mark.parametrize("request_", interrupts.Request)
def test_only_a_stop_ends_what_can_wait(monkeypatch, request_):
    """Where a save is due, as where nothing is, an evaluation goes on; any request saves."""
    asked = interrupts.Interrupts()
    monkeypatch.setattr(asked, "_signalled", request_)
    asked.poll()
    assert asked.should_stop == (request_.name not in ("NONE", "SAVE"))
    assert asked.wants_save == (request_.name != "NONE")
    expected = pytest.raises(Stopped) if asked.should_stop else contextlib.nullcontext()
    with expected:
        asked.stop_if_requested("step 1 is saved")


def test_an_evaluation_without_numbers_is_written(tmp_path, spec):
    evaluation = {"fingerprint": "0" * 16, "windows": 1, "loss": None}
    names = ("perplexity", "bits_per_byte", "unigram_bits_per_byte")
    with metrics.MetricWriter(spec, tmp_path, 0, 4, 1e6, None) as writer:
        writer.evaluation(4, evaluation | dict.fromkeys(names))
        summary = writer.summary("0" * 16)
    assert [summary[name] for name in ("eval_loss", *names)] == 4 * [None]


def test_the_commit_is_gits_or_the_one_that_was_told(monkeypatch):
    monkeypatch.delenv("PROPE_COMMIT", raising=False)
    commit = startup.find_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40,}(\+changes)?", commit)
    monkeypatch.setenv("PATH", "/nowhere")  # without git
    assert startup.find_commit() is None
    monkeypatch.setenv("PROPE_COMMIT", "abc")
    assert startup.find_commit() == "abc"


@pytest.mark.parametrize(("stats", "expected"), [({"bytes_limit": 7}, 7), ({}, None), (None, None)])
def test_an_accelerators_memory_is_what_it_says(stats, expected):
    """It is not the host's, where the driver does not say."""
    device = SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    assert memory.device_bytes(device) == expected
