"""The scripts of launch/ on this machine: what they print and refuse, and what they start."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.commands import ROOT
from support.launchers import HANDLE, TOOLS, clean_environment, launch, refused, start, wait_for

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])
NEW = ("local_pod.sh", "tpu_vm.sh", "slurm.sbatch")


def test_shellcheck_finds_nothing():
    done = subprocess.run(
        [TOOLS / "shellcheck", "-x", *SCRIPTS], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_every_script(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("script", NEW)
def test_help_is_the_head_of_the_script(script):
    done = launch(script, "--help")
    assert done.returncode == 0 and not done.stderr
    assert f"launch/{script}" in done.stdout
    for line in done.stdout.splitlines():
        assert not line.startswith("#"), line


def test_every_new_script_is_tested():
    older = {"common.sh", "quickstart.sh", "run", "run.sh", "setup.sh", "test.sh"}
    assert {path.name for path in SCRIPTS} - older == set(NEW)


def test_every_flag_is_in_its_help():
    for script in NEW:
        code = (ROOT / "launch" / script).read_text()
        flags = set(
            re.findall(r"(--[a-z_-]+)=\*", code)
            + re.findall(r"^    (--[a-z_-]+)\)", code, re.MULTILINE)
        )
        text = launch(script, "--help").stdout
        assert not {flag for flag in flags if not re.search(rf"{flag}\b", text)}, script


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--processes=0", "--", "true"], "--processes=0"),
        (["--processes=two", "--", "true"], "--processes=two"),
        (["--devices=-1", "--", "true"], "--devices=-1"),
        (["--procesess=2", "--", "true"], "--procesess=2"),
        (["--processes=2"], "no command"),
        (["--"], "no command"),
    ],
)
def test_local_pod_refuses(arguments, named):
    assert named in refused(launch("local_pod.sh", *arguments))


def test_local_pod_prints_what_it_would_run():
    flags = ["--processes=3", "--devices=4", "--dry-run"]
    command = [sys.executable, "-c", PRINT, "a  'b"]
    done = launch(
        "local_pod.sh", *flags, "--", *command, XLA_FLAGS="--xla_one=1", PROPE_COMMIT="abc"
    )
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for process, line in enumerate(lines):  # a shell that reads the line back starts the process
        said = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=clean_environment()
        ).stdout
        port = re.search(r"127\.0\.0\.1:(\d+)", said)[1]
        assert 10_000 <= int(port) < 32_768
        flags = "--xla_one=1 --xla_force_host_platform_device_count=4"
        assert said == f"a  'b|cpu|{flags}|{process}/3@127.0.0.1:{port}|abc\n"
    assert len(set(re.findall(r":(\d+) ", done.stdout))) == 1


NAMES = ["JAX_PLATFORMS", "XLA_FLAGS", "PROPE_PROCESSES", "PROPE_COMMIT"]
PRINT = f"import os, sys; print(*sys.argv[1:], *(os.environ[name] for name in {NAMES}), sep='|')"


def test_local_pod_keeps_the_last_line_for_process_0_and_prefixes_the_rest():
    code = """import os, sys
i = os.environ["PROPE_PROCESSES"][0]
print("out", i, os.getpid(), os.getpgrp() == os.getpid(), flush=True)
print("one", i, file=sys.stderr)
sys.stderr.write(f"two {i} {sys.stdin.read()!r}")
"""
    done = launch("local_pod.sh", "--processes=3", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    pids = {
        int(i): pid
        for i, pid in re.findall(r"^process (\d): pid (\d+)$", done.stderr, re.MULTILINE)
    }
    assert (
        done.stdout == f"out 0 {pids[0]} True\n"
    )  # the pid is the command's own, as is its process group
    assert [line for line in said if line.startswith("[0]")] == ["[0] one 0", "[0] two 0 ''"]
    for i in (1, 2):
        assert sorted(line for line in said if line.startswith(f"[{i}]")) == [
            f"[{i}] one {i}",
            f"[{i}] out {i} {pids[i]} True",
            f"[{i}] two {i} ''",
        ]
    assert len(said) == 3 + 2 + 3 + 3


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("0 0 0", 0),
        ("1 2 75", 2),
        ("76 75 1", 1),
        ("75 130 76", 130),
        ("76 75 0", 75),
        ("0 0 76", 76),
        ("3 0 0", 3),
        ("76 134 0", 76),
        ("0 kill 0", 137),
    ],
)
def test_local_pod_exits_with_the_code_that_counts(codes, expected):
    script = (
        f'set -- {codes}; shift "${{PROPE_PROCESSES%%/*}}"; '
        '[[ $1 != kill ]] || kill -KILL $$; exit "$1"'
    )
    assert (
        launch("local_pod.sh", "--processes=3", "--", "bash", "-c", script).returncode == expected
    )


def test_local_pod_waits_for_all_and_ends_none():
    script = "((${PROPE_PROCESSES%%/*})) || exit 76; sleep 1; echo still here"
    begun = time.monotonic()
    done = launch("local_pod.sh", "--", "bash", "-c", script)
    assert done.returncode == 76 and "[1] still here" in done.stderr
    assert time.monotonic() - begun > 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_local_pod_passes_signals_on_to_every_process(number, code, tmp_path):
    pod = start(
        "local_pod.sh", "--processes=3", "--", sys.executable, "-c", HANDLE, tmp_path / "ready"
    )
    wait_for(tmp_path / "ready", 3)
    pod.send_signal(number)
    _, said = pod.communicate(timeout=30)
    assert pod.returncode == code
    for i in range(3):
        assert f"[{i}] got {number.value}\n" in said


def test_local_pod_is_not_confused_by_many_signals(tmp_path):
    code = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
open(sys.argv[1], "a").write("ready\\n")
end = time.monotonic() + 1
while time.monotonic() < end:
    time.sleep(0.01)
os._exit(75)  # sys.exit takes the handlers away before it ends
"""
    pod = start("local_pod.sh", "--", sys.executable, "-c", code, tmp_path / "ready")
    wait_for(tmp_path / "ready", 2)
    while pod.poll() is None:
        pod.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    pod.communicate()
    assert pod.returncode == 75


def test_local_pod_waits_for_a_process_that_is_stopped_for_a_while():
    pod = start("local_pod.sh", "--", "bash", "-c", "sleep 0.5; exit 75")
    pid = int(re.match(r"process 0: pid (\d+)", pod.stderr.readline())[1])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    assert pod.poll() is None
    os.kill(pid, signal.SIGCONT)
    pod.communicate(timeout=30)
    assert pod.returncode == 75


def test_pods_at_the_same_time_have_ports_of_their_own():
    pods = [
        start("local_pod.sh", "--", "bash", "-c", 'echo "$PROPE_PROCESSES"; sleep 1')
        for _ in range(4)
    ]
    assert len({pod.communicate(timeout=60)[0] for pod in pods}) == 4


def test_local_pod_takes_no_port_that_is_taken(tmp_path):
    # The script is given its pid by exec, so that the port it would take first can be taken before.
    code = """import os, socket, sys
taken = socket.create_server(("127.0.0.1", 10_000 + os.getpid() % 20_000))
taken.set_inheritable(True)
os.execvp("bash", ["bash", *sys.argv[1:]])
"""
    pod = ["launch/local_pod.sh", "--dry-run", "--", "true"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *pod],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate(timeout=30)
    port = int(re.search(r"127\.0\.0\.1:(\d+)", said)[1])
    assert process.returncode == 0 and port != 10_000 + process.pid % 20_000
