"""How a process learns of the others: the environment, lost peers, memory, aborts, GPUs."""

import errno
import re
import subprocess
import sys

import jax
import pytest
from gcsfs.retry import HttpError
from support.commands import ROOT
from support.runs import make_run

from prope import command, sharding
from prope.errors import Stopped, StorageFailed, UsageError
from prope.runtime import files, processes
from prope.spec.run import Spec
from prope.workdir import run
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.reader import CheckpointReader


@pytest.mark.parametrize("value", ["two", "2", "0/2", "2/2@a:1", "0/2@a", "0@a:1", "-1/2@a:1"])
def test_processes_that_cannot_be_joined(value, monkeypatch):
    monkeypatch.setenv("PROPE_PROCESSES", value)
    with pytest.raises(UsageError, match=re.escape(f"PROPE_PROCESSES={value}: ")):
        processes.start()


def test_jax_finds_no_cluster(monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(processes.jax.distributed, "initialize", initialize)
    monkeypatch.setattr(processes, "_set_abort_message", lambda line: None)
    monkeypatch.setenv("PROPE_PROCESSES", "auto")
    with pytest.raises(UsageError, match="PROPE_PROCESSES=auto: "):
        processes.start()


def test_the_number_of_processes_is_compared_with_that_of_jax(monkeypatch):
    processes.check_count()
    monkeypatch.setattr(processes.jax, "process_count", lambda: 4)
    with pytest.raises(UsageError, match="PROPE_PROCESSES is 1, .* 4 processes"):
        processes.check_count()


def test_a_checkpoint_that_only_other_hosts_see_is_not_damaged(tmp_path, monkeypatch):
    _, params = make_run(tmp_path / "run")
    # The first process reads JSON for all.
    reader = CheckpointReader(tmp_path / "run/checkpoints/7")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    with pytest.raises(StorageFailed, match="checkpoints/7/params: "):
        reader.restore(params=sharding.with_shardings(params, sharding.make_mesh()))


GLOO = (
    "UNKNOWN: Gloo AllGather failed: [tcp/pair.cc:538] Read error [127.0.0.1]:20904: "
    "Connection reset by peer"
)
PEER_LOST = [
    "UNAVAILABLE: Socket closed",
    "DEADLINE_EXCEEDED: Barrier timed out",
    GLOO,
    "INTERNAL: The following tasks are unhealthy (stopped sending heartbeats)",
    "INTERNAL: NCCL operation failed: remote process exited or there was a network error",
]
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000000 bytes."
OTHER = "INVALID_ARGUMENT: Executable expected shape f32[2], and got f32[3]"


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize("message", [*PEER_LOST, OUT_OF_MEMORY, OTHER])
def test_only_the_errors_of_a_lost_peer_are_restarted(monkeypatch, message, kind):
    with pytest.raises(kind), processes.peer_loss_as_stopped():
        raise kind(message)  # alone, there is no peer
    monkeypatch.setattr(processes, "_count", 2)
    expected = Stopped if message in PEER_LOST else kind
    with pytest.raises(expected) as raised, processes.peer_loss_as_stopped():
        raise kind(message)
    if message in PEER_LOST:
        assert raised.value.code == 76
        assert f"({message})" in str(raised.value)


@pytest.mark.parametrize(
    ("message", "expected"), [(GLOO, Stopped), ("INTERNAL: no bucket", StorageFailed)]
)
def test_a_peer_that_is_lost_while_saving_is_no_fault_of_the_storage(
    monkeypatch, tmp_path, message, expected
):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(processes, "_count", 2)
    with (
        pytest.raises(expected),
        processes.peer_loss_as_stopped(),
        checkpoints._as_storage_failed(),
    ):
        raise ValueError(message)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "Input/output error"), 76),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 76),
        (HttpError({"code": 503, "message": "Service Unavailable"}), 76),
        (ValueError("UNAVAILABLE: Error reading gs://bucket/x: Service Unavailable"), 76),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (jax.errors.JaxRuntimeError(OUT_OF_MEMORY), 1),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), 1),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_launchers_restart_what_failing_storage_ended(monkeypatch, capsys, error, code):
    monkeypatch.setattr(sys, "argv", ["prope.train"])
    codes = []
    monkeypatch.setattr(command.os, "_exit", codes.append)  # as with a full disk
    command.run(lambda: (_ for _ in ()).throw(error), lambda: None, codes.append)
    assert codes == [code]
    assert re.fullmatch("stopped: .*\n", capsys.readouterr().err)


# JAX's runtime aborts in a thread that Python did not start.
ABORT = """
import ctypes, time
from prope.runtime import processes
{}
libc = ctypes.CDLL(None)
thread = ctypes.c_void_p()
libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("state", "code", "line"),
    [
        ("", 76, "\nstopped: a peer is lost\n"),
        ("processes._exit_code = 2  # set by leave(2)", 2, ""),
    ],
    ids=["running", "leaving"],
)
def test_a_process_that_the_runtime_aborts_has_lost_a_peer(state, code, line):
    script = ABORT.format(f"processes._set_abort_message('a peer is lost')\n{state}")
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (code, line)


@pytest.mark.parametrize(("visible", "count"), [("0,1,2,3", 4), ("2", 1)])
def test_gpus_that_nobody_uses(monkeypatch, visible, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = type("Device", (), {"platform": "gpu"})
    monkeypatch.setattr(processes.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(processes.jax, "local_device_count", lambda: count)
    processes._check_gpus()  # raises nothing
    monkeypatch.setattr(processes.jax, "local_device_count", lambda: count - 1)
    with pytest.raises(UsageError, match=rf"{count} GPUs .* use {count - 1}: .*CUDA_VISIBLE"):
        processes._check_gpus()
    # Where there are none, what is visible does not matter.
    monkeypatch.setattr(device, "platform", "cpu")
    processes._check_gpus()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, "auto"),
        ({"SLURM_NTASKS": "8"}, "1"),  # a shell inside an allocation
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": ""}, "1"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "auto"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, "1"),
        ({}, "1"),
    ],
)
def test_several_tasks_of_slurm_are_not_mistaken_for_one(environ, expected, monkeypatch):
    monkeypatch.setattr(processes.os, "environ", environ)
    assert processes._default_processes() == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "8"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"PROPE_PROCESSES": "0/2@10.0.0.1:8476"},
    ],
)
def test_a_process_says_for_what_it_waits(environ, monkeypatch):
    monkeypatch.setattr(processes, "_join", lambda wanted: None)
    monkeypatch.setattr(processes, "_check_gpus", lambda: None)
    lines = []
    monkeypatch.setattr(processes.log, "info", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(processes.os, "environ", environ)
    processes.start()
    (setting,) = environ.items()
    assert "=".join(setting) in "\n".join(lines[:2])
    assert "PROPE_PROCESSES=1 runs this one alone" in "\n".join(lines[:2])


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': none\nfound")]
)
@pytest.mark.parametrize("asked", ["JAX_PLATFORMS=cuda", "JAX_PLATFORM_NAME=gpu"])
def test_devices_that_are_not_there_are_named_as_asked_for(error, asked, monkeypatch):
    def process_count():
        raise error

    monkeypatch.setenv(*asked.split("="))
    monkeypatch.setattr(processes.jax, "process_count", process_count)
    with pytest.raises(UsageError, match=rf"^{asked}: [^\n]*setup\.sh gpu[^\n]*$"):
        processes.check_count()


# What Open MPI, MPICH, Slurm and a container leave behind: this process is alone.
LEFT_BEHIND = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "PMI_SIZE": "4",
    "PMI_RANK": "3",
    "PMI_FD": "7",
    "PMIX_RANK": "3",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "NVIDIA_VISIBLE_DEVICES": "void",
    "JAX_PLATFORMS": "",
}


def test_one_process_runs_alone_where_a_cluster_has_left_its_variables(train, tmp_path):
    run = train(tmp_path / "run", "--stop_at_step=1", **LEFT_BEHIND)
    assert run.code == 0 and run.result["step"] == 1, run.stderr


def test_half_of_the_variables_of_a_cluster_are_refused(train, tmp_path):
    """JAX looks for Open MPI by one variable, and reads others."""
    left = {"PROPE_PROCESSES": "auto", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.96.0.1:34911"}
    run = train(tmp_path / "run", **left)
    assert run.code == 2 and "PROPE_PROCESSES=auto: " in run.error
    assert "OMPI_COMM_WORLD_SIZE" in run.error and not (tmp_path / "run").exists()


def test_only_the_first_process_tries_whether_a_directory_can_be_written(tmp_path, monkeypatch):
    """In a bucket the others would remove the object that it writes to try it."""
    tried = []
    monkeypatch.setattr(run, "check_writable", lambda flag, path: tried.append(path))
    for index in (0, 1, 2):
        monkeypatch.setattr(processes, "_index", index)
        with run.open_workdir(tmp_path, Spec()):
            pass
    assert tried == [tmp_path]
