"""What a process says of the others: the environment, lost peers, memory, aborts, GPUs; in one process each."""

import re
import signal
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from prope import command
from prope.errors import RunFailed, Stopped, UsageError
from prope.runtime import files, processes
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.reader import CheckpointReader


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"PROPE_PROCESSES": "two"}, "PROPE_PROCESSES=two: must be a whole number from 1"),
        (
            {"PROPE_PROCESSES": "2", "PROPE_PROCESS": "0"},
            "PROPE_COORDINATOR and PROPE_PROCESS go together",
        ),
        (
            {"PROPE_PROCESSES": "2", "PROPE_COORDINATOR": "a:1", "PROPE_PROCESS": "2"},
            "less than PROPE_PROCESSES=2",
        ),
        (
            {"PROPE_PROCESSES": "2", "PROPE_COORDINATOR": "a", "PROPE_PROCESS": "0"},
            "=a: must be host:port",
        ),
        (
            {"PROPE_PROCESSES": "auto", "PROPE_COORDINATOR": "a:1", "PROPE_PROCESS": "0"},
            "be the number of processes",
        ),
        (
            {"PROPE_PROCESSES": "2", "PROPE_START_TIMEOUT": "soon"},
            "PROPE_START_TIMEOUT=soon: must be a whole number",
        ),
        (
            {"PROPE_PROCESSES": "2", "PROPE_PROCESSES_PER_NODE": "rack"},
            "=rack: must be gpu, one process for",
        ),
    ],
)
def test_what_the_environment_may_not_say(environment, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        processes.start(environment)


def test_the_number_of_processes_is_compared_with_that_of_jax(monkeypatch):
    processes.check_count()
    monkeypatch.setattr(processes.jax, "process_count", lambda: 4)
    with pytest.raises(
        UsageError,
        match="PROPE_PROCESSES is 1, and JAX runs in 4 processes, of which this is number 0",
    ):
        processes.check_count()


def test_a_checkpoint_that_only_other_hosts_see_is_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_count", 2)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    with pytest.raises(
        RunFailed, match="checkpoints/20: cannot be read: this host does not see it"
    ):
        CheckpointReader(tmp_path / "checkpoints" / "20")


LOST = [
    "UNAVAILABLE: Socket closed",
    "DEADLINE_EXCEEDED: Barrier timed out",
    "ABORTED: Shutdown barrier has failed",
    "UNKNOWN: Gloo AllGather failed: [tcp/pair.cc:538] Read error [127.0.0.1]:20904: Connection reset by peer",
    "INTERNAL: The following tasks are unhealthy (stopped sending heartbeats)",
    "INTERNAL: NCCL operation failed: remote process exited or there was a network error",
]


OWN = [
    "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000000 bytes.",
    "INVALID_ARGUMENT: Executable expected shape f32[2], and got f32[3]",
    "INTERNAL: a bug",
]


@pytest.mark.parametrize("message", [*LOST, *OWN])
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_only_the_errors_of_a_lost_peer_are_restarted(monkeypatch, message, kind):
    with pytest.raises(kind), processes.peer_loss_as_stopped():
        raise kind(message)  # alone, there is no peer
    monkeypatch.setattr(processes, "_count", 2)
    with (
        pytest.raises(Stopped if message in LOST else kind) as raised,
        processes.peer_loss_as_stopped(),
    ):
        raise kind(message)
    if message in LOST:
        assert raised.value.code == 76 and f"({message})" in str(raised.value)


def test_a_peer_that_is_lost_while_saving_is_no_fault_of_the_storage(monkeypatch, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(processes, "_count", 2)
    for message, ends_with in ((LOST[3], Stopped), ("no such bucket", RunFailed)):
        with (
            pytest.raises(ends_with),
            processes.peer_loss_as_stopped(),
            checkpoints._as_run_failed(),
        ):
            raise ValueError(message)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (jax.errors.JaxRuntimeError(OWN[0]), "40000000000000 bytes"),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), "7.45 GiB"),
        (jax.errors.JaxRuntimeError(OWN[1]), None),
    ],
    ids=["device", "host", "other"],
)
def test_out_of_memory_is_final_and_says_what_to_lower(monkeypatch, capsys, error, says):
    def main():
        with processes.peer_loss_as_stopped():
            raise error

    monkeypatch.setattr(sys, "argv", ["prope.train"])
    monkeypatch.setattr(processes, "_count", 2)
    codes = []
    command.run(main, lambda: None, codes.append)
    assert codes == [1]
    message = capsys.readouterr().err
    if says is None:
        assert "Traceback" in message and "INVALID_ARGUMENT" in message
    else:
        assert re.fullmatch(
            rf"stopped: out of memory \(.*{says}.*\): lower the batch size .*\n", message
        )
        assert all(
            word in message
            for word in ("config.accumulation", "config.model.remat=full", "prope.plan")
        )


ABORTS = {
    "in Python": ("os.abort()", False, -signal.SIGABRT),
    "by a signal": ("os.kill(os.getpid(), signal.SIGABRT)", False, -signal.SIGABRT),
    "while joining": ("os.abort()", True, 76),
    # As JAX's runtime does: in a thread that Python did not start.
    "in a thread of the runtime": (
        "libc = ctypes.CDLL(None); thread = ctypes.c_void_p()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.abort, None); time.sleep(60)",
        False,
        76,
    ),
}


SLOW = ("by a signal", "while joining")


@pytest.mark.parametrize(
    "abort", [pytest.param(a, marks=[pytest.mark.slow] * (a in SLOW)) for a in ABORTS]
)
def test_an_abort_keeps_its_code_unless_the_runtime_has_lost_a_peer(abort):
    statement, joining, code = ABORTS[abort]
    script = (
        "import ctypes, os, signal, time; from prope.runtime import processes\n"
        f"processes._set_abort_message('a peer is lost', joining={joining})\n{statement}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code
    assert ("stopped: a peer is lost" in done.stderr) == (code == 76)


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3", 4), ("2", 1)])
def test_gpus_that_nobody_uses(monkeypatch, visible, count):
    device = type("Device", (), {"platform": "gpu"})
    monkeypatch.setattr(processes.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(processes.jax, "local_device_count", lambda: count)
    processes._check_gpus({"CUDA_VISIBLE_DEVICES": visible})  # raises nothing
    monkeypatch.setattr(processes.jax, "local_device_count", lambda: count - 1)
    says = rf"{count} GPUs are visible .* 1 processes use {count - 1}: start one process for each"
    with pytest.raises(UsageError, match=says):
        processes._check_gpus({"CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(device, "platform", "cpu")
    processes._check_gpus(
        {"CUDA_VISIBLE_DEVICES": visible}
    )  # where there are none, what is visible does not matter


def test_several_tasks_of_slurm_are_not_mistaken_for_one():
    assert (
        processes._default_processes({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}) == "auto"
    )
    assert processes._default_processes({"SLURM_NTASKS": "8"}) == "1", (
        "a shell inside an allocation is one process"
    )
    assert processes._default_processes({"TPU_WORKER_HOSTNAMES": "a,b"}) == "auto"
    assert processes._default_processes({}) == "1"
