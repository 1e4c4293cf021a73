"""launch/tpu_vm.sh with a gcloud that has two workers, each a folder on this machine."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from launchers import (
    HANDLE,
    NEXT,
    calls,
    launch,
    make_clone,
    put_programs,
    refused,
    start,
    wait_for,
)


@pytest.fixture
def fakes(tmp_path):
    return put_programs(tmp_path)


@pytest.fixture
def clone(tmp_path):
    return make_clone(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no action: give one of create"),
        (["launch"], "launch: give one of create"),
        (["create", "--type=v5p-8"], "--name="),
        (["create", "--name=A_b", "--type=v5p-8"], "--name=A_b"),
        (["create", "--name=a"], "--type="),
        (["create", "--name=a", "--type=v4-8"], "--type=v4-8"),
        (["run", "--name=a", "--type=v5p-8"], "no command"),
        (["run", "--name=a", "--type=v5p-8", "--poll=x", "--", "y"], "--poll=x"),
        (["stop", "--name=a", "--", "y"], "stop takes no command"),
        (["logs", "--name=a", "--zonne=b"], "--zonne=b"),
    ],
)
def test_tpu_vm_refuses(arguments, named, fakes, tmp_path):
    assert named in refused(
        launch("tpu_vm.sh", *arguments, "--dry-run"[: 99 * bool(arguments)], **fakes)
    )
    assert not calls(tmp_path)


VM = "gcloud compute tpus tpu-vm"
QUEUE = "gcloud compute tpus queued-resources"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["create", "--type=v5litepod-16"],
            f"{VM} create a --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite",
        ),
        (
            ["create", "--type=v5p-128", "--spot"],
            f"{VM} create a --accelerator-type=v5p-128 --version=v2-alpha-tpuv5 --spot",
        ),
        (
            ["create", "--type=v6e-8", "--version=x"],
            f"{VM} create a --accelerator-type=v6e-8 --version=x",
        ),
        (
            ["create", "--type=v6e-8", "--queue", "--spot"],
            f"{QUEUE} create a --node-id=a --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot",
        ),
        (["delete"], f"{VM} delete a"),
        (["delete", "--queue"], f"{QUEUE} delete a --force"),
    ],
)
def test_tpu_vm_runs_what_it_prints(arguments, expected, fakes, tmp_path):
    place = ["--zone=z", "--poll=1"]
    printed = launch("tpu_vm.sh", *arguments, "--name=a", *place, "--dry-run", **fakes)
    assert shlex.split(printed.stdout) == [*expected.split(), "--zone=z", "--quiet"] and not calls(
        tmp_path
    )
    assert launch("tpu_vm.sh", *arguments, "--name=a", *place, **fakes).returncode == 0
    assert [call for call in calls(tmp_path) if "describe" not in call] == [
        shlex.split(printed.stdout)
    ]


@pytest.mark.parametrize(
    ("states", "code"), [("WAITING_FOR_RESOURCES,,ACTIVE", 0), ("PROVISIONING,FAILED", 2)]
)
def test_tpu_vm_waits_in_the_queue(states, code, fakes, tmp_path):
    (tmp_path / "states").write_text(states)
    done = launch("tpu_vm.sh", "create", "--name=a", "--type=v6e-8", "--queue", "--poll=1", **fakes)
    assert done.returncode == code and (code == 0 or "the request is FAILED" in refused(done))
    assert [call[4] for call in calls(tmp_path)] == [
        "create",
        *["describe"] * len(states.split(",")),
    ]


@pytest.fixture
def installed(fakes, clone, tmp_path):
    """The clone installed on two workers whose environments are there already; and the variables to run it with."""
    root, _ = clone
    wanted = subprocess.run(
        "cat pyproject.toml launch/constraints.txt | cksum",
        shell=True,
        cwd=root,
        capture_output=True,
    )
    for worker in ("0", "1"):
        environment = tmp_path / worker / "prope/.venv"
        (environment / "bin").mkdir(parents=True)
        (environment / "bin/activate").write_text("export ACTIVATED=yes")
        (environment / "bin/python").write_text("")
        (environment / "bin/python").chmod(0o755)
        (environment / "installed-tpu").write_bytes(wanted.stdout.strip() + b" tpu\n")
        (tmp_path / worker / "prope/old.py").write_text("")
    variables = fakes | {
        "PROPE_TPU": "a",
        "PROPE_TPU_ZONE": "z",
        "PROPE_TPU_TYPE": "v5p-16",
        "TMPDIR": str(tmp_path),
    }
    done = launch("tpu_vm.sh", "install", root=root, **variables)
    assert done.returncode == 0, done.stderr
    return root, variables


def test_tpu_vm_installs_what_is_committed(installed, clone, tmp_path):
    root, head = clone
    for worker in ("0", "1"):
        home = tmp_path / worker / "prope"
        assert (home / "COMMIT").read_text() == f"{head}\n"
        assert (home / "launch/run.sh").read_bytes() == (root / "launch/run.sh").read_bytes()
        assert not (home / "old.py").exists()
    first, second = [call for call in calls(tmp_path) if call[4] in ("ssh", "scp")][:2]
    assert (
        "--worker=0" in first and second[4] == "scp" and "--worker=all" in second
    )  # the key, before all at once
    assert not list(tmp_path.glob("*.tar.gz"))


def test_tpu_vm_installs_changes_only_if_told(installed, clone, tmp_path):
    root, head = clone
    _, variables = installed
    with open(root / "launch/run.sh", "a") as file:
        file.write("# changed\n")
    before = len(calls(tmp_path))
    assert "--allow-changes" in refused(launch("tpu_vm.sh", "install", root=root, **variables))
    assert len(calls(tmp_path)) == before
    assert launch("tpu_vm.sh", "install", "--allow-changes", root=root, **variables).returncode == 0
    assert (tmp_path / "1/prope/launch/run.sh").read_text().endswith("# changed\n")
    assert (tmp_path / "1/prope/COMMIT").read_text() == f"{head}+changes\n"


# Each worker's own codes; with each start its environment is written down.
SAY = 'echo "$ACTIVATED $PROPE_PROCESSES $PROPE_COMMIT $LIBTPU_INIT_ARGS" >>"$HOME/seen"; set -- "$HOME/codes"; '


def run_on_workers(
    installed, tmp_path, codes: tuple[str, str], *flags: str
) -> subprocess.CompletedProcess:
    root, variables = installed
    for worker, text in zip("01", codes, strict=True):
        (tmp_path / worker / "codes").write_text(text)
    command = ["bash", "-c", SAY + NEXT.replace("$0", "$1"), "a  'b"]
    return launch("tpu_vm.sh", "run", "--poll=1", *flags, "--", *command, root=root, **variables)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(("0", "0"), 0), (("76", "1"), 1), (("75", "76"), 75), (("0", "137"), 137)],
)
def test_tpu_vm_runs_on_every_worker_and_exits_with_the_code_that_counts(
    codes, expected, installed, clone, tmp_path
):
    done = run_on_workers(installed, tmp_path, codes)
    assert done.returncode == expected, done.stderr
    assert done.stdout.splitlines()[-1] == f"said {codes[0]}"  # the last line of process 0
    assert f"log {codes[0]}\n" in done.stderr
    for worker in "01":
        (seen,) = (tmp_path / worker / "seen").read_text().splitlines()
        assert seen.startswith(f"yes auto {clone[1]} --xla_tpu")
        assert "xla_tpu_enable_ag_backward_pipelining" in seen  # a flag of v5p alone


def test_tpu_vm_stops_a_run_and_starts_none_beside_another(installed, tmp_path):
    root, variables = installed
    command = [
        "tpu_vm.sh",
        "run",
        "--poll=1",
        "--",
        sys.executable,
        "-c",
        HANDLE,
        tmp_path / "ready",
    ]
    run = start(*command, root=root, **variables)
    wait_for(tmp_path / "ready", 2)
    second = launch(*command, root=root, **variables)
    assert second.returncode == 2 and "a run is going on, end it with stop" in second.stderr
    assert launch("tpu_vm.sh", "stop", root=root, **variables).returncode == 0
    run.communicate(timeout=60)
    assert run.returncode == 75
    assert len((tmp_path / "ready").read_text().splitlines()) == 2
    assert launch("tpu_vm.sh", "logs", "--poll=1", root=root, **variables).returncode == 75
    assert launch("tpu_vm.sh", "stop", root=root, **variables).returncode == 0  # there is none


def test_tpu_vm_knows_a_killed_run_and_none(installed, tmp_path):
    root, variables = installed
    assert "no run has been started" in refused(
        launch("tpu_vm.sh", "logs", "--poll=1", root=root, **variables)
    )
    command = ["--", sys.executable, "-c", HANDLE, tmp_path / "ready"]
    run = start("tpu_vm.sh", "run", "--poll=1", *command, root=root, **variables)
    wait_for(tmp_path / "ready", 2)
    for worker in "01":
        os.killpg(int((tmp_path / worker / "prope_run/pid").read_text()), signal.SIGKILL)
    run.communicate(timeout=60)
    assert run.returncode == 137
