"""launch/slurm.sbatch with an srun that runs its tasks here, and an scontrol."""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from support.commands import ROOT
from support.launchers import HANDLE, calls, launch, put_programs, refused, wait_for


@pytest.fixture
def fakes(tmp_path):
    return put_programs(tmp_path)


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_ON_NODE": "9",
    "SLURM_SUBMIT_DIR": str(ROOT),
}


@pytest.mark.parametrize(
    ("mode", "devices", "flags"),
    [
        ("gpu", "", "--ntasks=4 --ntasks-per-node=2 --gpu-bind=none --cpus-per-task=4"),
        (
            "node",
            " JAX_LOCAL_DEVICE_IDS=0,1",
            "--ntasks=2 --ntasks-per-node=1 --gpu-bind=none --cpus-per-task=9",
        ),
    ],
)
def test_slurm_prints_the_step(mode, devices, flags, fakes, tmp_path):
    arguments = ["--dry-run", f"--processes_per_node={mode}", "--", "python", "-m", "x", "a b"]
    done = launch("slurm.sbatch", *arguments, **JOB, **fakes)
    words = shlex.split(done.stdout)
    start = words.index("-c")
    environment = f"env PROPE_PROCESSES=auto{devices}"
    srun = f"srun --nodes=2 {flags} --kill-on-bad-exit=0 bash -c"
    assert words[: start + 1] == f"{environment} {srun}".split()
    assert words[start + 2 :] == [
        *["task", "bash", "launch/run.sh", "gpu", "python", "-m", "x"],
        "a b",
    ]
    assert not calls(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "changed", "named"),
    [
        (["--processes_per_node=two"], {}, "--processes_per_node=two"),
        (["--max_restarts=no"], {}, "--max_restarts=no"),
        (["--max_restart=2"], {}, "--max_restart=2"),
        ([], {"SLURM_JOB_ID": ""}, "no Slurm job"),
        ([], {"SLURM_GPUS_ON_NODE": ""}, "no GPUs"),
        ([], {"SLURM_GPUS_PER_TASK": "1"}, "--gpus-per-task"),
        ([], {"SLURM_CPUS_ON_NODE": "1"}, "1 CPUs a node are too few"),
    ],
)
def test_slurm_refuses_before_srun(arguments, changed, named, fakes, tmp_path):
    assert named in refused(launch("slurm.sbatch", *arguments, "--", "x", **JOB | changed, **fakes))
    assert not calls(tmp_path)


def test_slurm_refuses_another_folder_and_no_command(fakes, tmp_path):
    assert "not the folder of a clone" in refused(
        launch("slurm.sbatch", **JOB | {"SLURM_SUBMIT_DIR": str(tmp_path)})
    )
    assert "no command" in refused(launch("slurm.sbatch", **JOB, **fakes))


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ("0 0 0 0", 0, False),
        ("1 76 76 76", 1, False),
        ("76 2 1 76", 1, False),
        ("75 130 75 75", 75, True),
        ("75 75 75 75", 75, True),
        ("76 75 76 76", 75, True),
        ("76 76 0 76", 76, True),
        ("76 134 76 76", 76, True),
        ("0 0 0 139", 139, True),
        ("143 143 143 143", 143, True),
        ("0 kill 0 0", 137, True),
        ("0 1 kill 0", 1, False),
        ("130 130 0 130", 130, False),
    ],
)
def test_slurm_queues_again_what_is_not_final(codes, code, requeued, fakes, tmp_path):
    words = f'set -- {codes}; shift "$SLURM_PROCID"; [[ $1 != kill ]] || kill -KILL $$; exit "$1"'
    done = launch("slurm.sbatch", "--", "bash", "-c", words, **JOB, **fakes)
    assert done.returncode == code, done.stderr
    assert [call for call in calls(tmp_path) if call[0] == "scontrol"] == [
        ["scontrol", "requeue", "7"]
    ] * requeued


def test_slurm_stops_queueing(fakes, tmp_path):
    stop = ["--max_restarts=3", "--", "bash", "-c", "exit 76"]
    done = launch("slurm.sbatch", *stop, SLURM_RESTART_COUNT="3", **JOB, **fakes)
    assert done.returncode == 76 and "after 3 restarts" in done.stderr
    assert [call[0] for call in calls(tmp_path)] == ["srun"]
    done = launch("slurm.sbatch", *stop, SLURM_RESTART_COUNT="2", REQUEUE_CODE="1", **JOB, **fakes)
    assert done.returncode == 76 and "did not take job 7 back" in done.stderr


def test_slurm_task_waits_for_a_command_that_saves(tmp_path):
    # Slurm signals every process of a task; here both of them are.
    (tmp_path / "handle.py").write_text(HANDLE)
    given = ["--dry-run", "--", sys.executable, tmp_path / "handle.py", tmp_path / "ready"]
    words = shlex.split(launch("slurm.sbatch", *given, **JOB).stdout)
    command = [*words[words.index("bash") :][:4], *words[words.index("gpu") + 1 :]]
    task = subprocess.Popen(command, start_new_session=True)
    wait_for(tmp_path / "ready", 1)
    os.killpg(task.pid, signal.SIGTERM)
    assert task.wait(timeout=30) == 255 - 75  # greater than that of a 76


def test_slurm_asks_to_stop_before_the_limit():
    said = re.findall(r"^#SBATCH (\S+)$", (ROOT / "launch/slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=TERM@120", "--open-mode=append"} <= set(said)
