"""launch/tpu_vm.sh with a gcloud that has two workers, each a folder on this machine."""

import os
import signal
import subprocess
import sys

import pytest
from support.launchers import (
    HANDLE,
    NEXT,
    RECORD,
    calls,
    clean_environment,
    commit,
    launch,
    make_clone,
    put_programs,
    refused,
    start,
    wait_for,
)


@pytest.fixture
def fakes(tmp_path):
    programs = put_programs(tmp_path)
    sleep = tmp_path / "programs/sleep"
    sleep.write_text("#!/bin/sh\nexec /bin/sleep 0.2\n")  # the script's is of 30 s
    sleep.chmod(0o755)
    return programs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no action: give one of install"),
        (["create"], "create: give one of install"),
        (["install"], "--name=: must be the name of a slice"),
        (["run", "--name=a"], "no command"),
        (["stop", "--name=a", "--", "y"], "y: stop takes no command"),
        (["logs", "--name=a", "--zonne=b"], "--zonne=b"),
    ],
)
def test_tpu_vm_refuses(arguments, says, fakes, tmp_path):
    assert says in refused(launch("tpu_vm.sh", *arguments, **fakes))
    assert not calls(tmp_path)


def test_tpu_vm_prints_what_it_would_run(fakes, tmp_path):
    arguments = ["--name=a", "--dry-run", "--", "x", "a  'b"]
    done = launch("tpu_vm.sh", "run", *arguments, **fakes)
    assert done.returncode == 0 and not done.stderr and not calls(tmp_path)
    program = RECORD.format(python=sys.executable, here=tmp_path)
    (tmp_path / "programs/gcloud").write_text(program)
    subprocess.run(["bash", "-c", done.stdout], env=clean_environment(**fakes), check=True)
    logs, run = sorted(calls(tmp_path))
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a"]
    assert logs[:7] == [*gcloud, "--worker=0"] and "tail " in logs[7]
    assert run[:7] == [*gcloud, "--worker=all"] and "run x a\\ \\ \\'b " in run[7]


SETUP = "mkdir -p .venv/bin && echo export ACTIVATED=$1 >.venv/bin/activate\n"


@pytest.fixture
def installed(fakes, tmp_path):
    """A clone that was installed on two workers: (the clone, its commit, variables to run it)."""
    clone = make_clone(tmp_path)
    (clone / "launch/setup.sh").write_text(SETUP)
    commit(clone)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=clone, text=True)
    for worker in "01":
        (tmp_path / worker / "prope").mkdir(parents=True)
        (tmp_path / worker / "prope/old.py").write_text("")
    variables = fakes | {"PROPE_TPU": "a", "TMPDIR": str(tmp_path)}
    done = launch("tpu_vm.sh", "install", root=clone, **variables)
    assert done.returncode == 0, done.stderr
    return clone, head.strip(), variables


def test_tpu_vm_installs_what_is_committed(installed, tmp_path):
    clone, head, variables = installed
    for worker in "01":
        home = tmp_path / worker / "prope"
        assert (home / "COMMIT").read_text() == f"{head}\n"
        assert (home / "launch/run.sh").read_bytes() == (clone / "launch/run.sh").read_bytes()
        assert not (home / "old.py").exists()
    before = len(calls(tmp_path))
    with open(clone / "launch/run.sh", "a") as file:
        file.write("# changed\n")
    done = launch("tpu_vm.sh", "install", root=clone, **variables)
    assert "the tree holds changes; commit them" in refused(done)
    assert len(calls(tmp_path)) == before


# Each worker's codes; with each start its environment is written down.
SAY = """
echo "$ACTIVATED $PROPE_PROCESSES $PROPE_COMMIT $LIBTPU_INIT_ARGS $2" >>"$HOME/seen"
set -- "$HOME/codes"
"""


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(("0", "0"), 0), (("76", "1"), 1), (("75", "76"), 75), (("0", "137"), 137)],
)
def test_tpu_vm_runs_on_every_worker_and_exits_with_the_code_that_counts(
    codes, expected, installed, tmp_path
):
    clone, head, variables = installed
    for worker, code in zip("01", codes, strict=True):
        (tmp_path / worker / "codes").write_text(code)
    program = ["bash", "-c", SAY + NEXT.replace("$0", "$1"), "x", "y", "a  'b"]
    command = ["bash", "launch/run.sh", "v5p", *program]
    done = launch("tpu_vm.sh", "run", "--", *command, root=clone, **variables)
    assert done.returncode == expected, done.stderr
    # The output of process 0.
    assert sorted(done.stdout.splitlines()) == [f"log {codes[0]}", f"said {codes[0]}"]
    for worker in "01":
        (seen,) = (tmp_path / worker / "seen").read_text().splitlines()
        assert seen.startswith(f"tpu auto {head} --xla_tpu") and seen.endswith(" a  'b")
        assert "xla_tpu_enable_ag_backward_pipelining" in seen  # a flag of v5p alone


def start_run(installed, tmp_path) -> subprocess.Popen:
    """Starts a run that waits for SIGTERM on both workers."""
    clone, _, variables = installed
    command = [sys.executable, "-c", HANDLE, tmp_path / "ready"]
    run = start("tpu_vm.sh", "run", "--", *command, root=clone, **variables)
    wait_for(tmp_path / "ready", 2)
    return run


def test_tpu_vm_stops_a_run_and_starts_none_beside_another(installed, tmp_path):
    clone, _, variables = installed
    run = start_run(installed, tmp_path)
    second = launch("tpu_vm.sh", "run", "--", "true", root=clone, **variables)
    assert second.returncode == 2 and "a run is going on, end it with stop" in second.stderr
    assert launch("tpu_vm.sh", "stop", root=clone, **variables).returncode == 0
    run.communicate(timeout=60)
    assert run.returncode == 75
    logs = launch("tpu_vm.sh", "logs", root=clone, **variables)
    assert logs.returncode == 75 and "got 15" in logs.stdout
    assert launch("tpu_vm.sh", "stop", root=clone, **variables).returncode == 0  # there is none


def test_tpu_vm_goes_on_without_its_connection(installed, tmp_path):
    """With the script killed, the run goes on, and logs follows it to its end."""
    clone, _, variables = installed
    run = start_run(installed, tmp_path)
    run.kill()
    logs = start("tpu_vm.sh", "logs", root=clone, **variables)
    assert launch("tpu_vm.sh", "stop", root=clone, **variables).returncode == 0
    stdout, _ = logs.communicate(timeout=60)
    run.communicate(timeout=60)
    assert logs.returncode == 75 and "got 15" in stdout


def test_tpu_vm_tells_a_run_that_was_killed(installed, tmp_path):
    run = start_run(installed, tmp_path)
    for worker in "01":
        pid = int((tmp_path / worker / "prope_run/pid").read_text())
        os.killpg(pid, signal.SIGKILL)
    run.communicate(timeout=60)
    assert run.returncode == 137


def test_tpu_vm_gives_up_on_workers_that_do_not_answer(installed, tmp_path):
    clone, _, variables = installed
    (tmp_path / "programs/gcloud").write_text("#!/bin/sh\necho called >&2\nexit 255\n")
    done = launch("tpu_vm.sh", "logs", root=clone, **variables)
    assert done.returncode == 1 and "stopped: a is lost; logs follows the run again" in done.stderr
    assert done.stderr.count("called") == 1 + 5  # its log, then its state
