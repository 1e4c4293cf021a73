"""The scripts of launch/, beside programs that stand for gcloud and Slurm."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import yaml
from support.commands import ROOT
from support.launchers import (
    HANDLE,
    NEXT,
    RECORD,
    TOOLS,
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

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])
TASK = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())


def test_shellcheck_finds_nothing():
    done = subprocess.run(
        [TOOLS / "shellcheck", "-x", *SCRIPTS], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- setup.sh ---------------------------------------------------------------------------------


def test_setup_knows_the_extras_of_the_project_and_its_own_folder(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = re.search(r"\^\(([a-z|-]*)\)\$", (ROOT / "launch/setup.sh").read_text())[1].split("|")
    assert sorted(filter(None, allowed)) == sorted(project["optional-dependencies"])
    command = ["bash", ROOT / "launch/setup.sh"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert str(tmp_path) in refused(done) and not list(tmp_path.iterdir())


def set_up(folder, *calls_of_it: str, sys="/sys/", **environment) -> subprocess.CompletedProcess:
    """Sources setup.sh in a folder that has the files it reads, with another /sys."""
    for name in ("launch/setup.sh", "launch/constraints.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    setup = folder / "launch/setup.sh"
    setup.write_text(setup.read_text().replace("/sys/", sys))
    script = "; ".join(f"source launch/setup.sh {call}" for call in calls_of_it)
    return subprocess.run(
        ["bash", "-c", f'{script}; echo "$? ${{activated:-no}}"'],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def put_program(file, code: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    file.chmod(0o755)


@pytest.mark.parametrize("works", [True, False], ids=["installed", "failed"])
def test_setup_remembers_only_an_install_that_worked(works, tmp_path):
    code = f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {0 if works else 1}\n'
    put_program(tmp_path / ".venv/bin/python", code)
    (tmp_path / ".venv/bin/activate").write_text("activated=yes\n")
    assert set_up(tmp_path, "gpu", "gpu").stdout == ("0 yes\n" if works else "1 no\n")
    ours = [line for line in (tmp_path / "calls").read_text().splitlines() if ".[gpu]" in line]
    assert len(ours) == (1 if works else 2)  # by uv; by pip at each call, where uv has failed
    for line in ours:
        assert line.endswith("--constraint launch/constraints.txt --editable .[gpu]")
        assert line.startswith("-m uv pip install" if works else "-m pip install")


OLD = """#!/bin/sh
case "$*" in
  -c*) exit 1 ;;
  *"python find 3.11") echo {0}/new ;;
  *) echo "$@" >>{0}/calls ;;
esac
"""
NEW = """#!/bin/sh
mkdir -p .venv/bin
cp {0}/new .venv/bin/python
touch .venv/bin/activate
echo new $@ >>{0}/calls
"""


@pytest.mark.parametrize(("extra", "works"), [("tpu", True), ("gcs", True), ("", False)])
def test_setup_brings_a_newer_python_where_a_machine_in_a_cloud_has_none(extra, works, tmp_path):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        put_program(tmp_path / name, OLD.format(tmp_path))
    put_program(tmp_path / "new", NEW.format(tmp_path))
    done = set_up(tmp_path, extra, PATH=f"{tmp_path}:/usr/bin:/bin", PYTHON="")
    assert done.stdout == ("0 no\n" if works else "1 no\n"), done.stderr
    if not works:
        assert "Python >= 3.11" in done.stderr and not (tmp_path / "calls").exists()
        return
    _, uv, venv, _, editable = (tmp_path / "calls").read_text().splitlines()
    assert uv == "-m uv python install --quiet 3.11"
    assert venv == "new -m venv .venv" and editable.endswith(f"--editable .[{extra}]")


SMI = """#!/bin/sh
[ {code} = 0 ] || {{ echo "NVIDIA-SMI has failed" >&2; exit {code}; }}
case "$*" in
  *driver_version*) echo {driver} ;;
  *)
    [ {gpus} != 0 ] || echo "No devices found."
    for i in $(seq 1 {gpus}); do echo "GPU $((i - 1)): NVIDIA H100 (UUID: GPU-$i)"; done ;;
esac
"""


@pytest.mark.parametrize(
    ("smi", "pci", "call", "environment", "extra", "said"),
    [
        (None, None, "", {}, "", ""),
        ({"code": 9}, None, "", {}, "", ""),
        ({"gpus": 0}, None, "", {}, "", ""),
        ({}, None, "", {}, "gpu", "lists 1 GPU; for none"),
        ({"gpus": 2}, None, "", {}, "gpu", "lists 2 GPUs; for none"),
        ({"driver": "570.86.15"}, None, "", {}, "", "570.86.15 of the GPU is older than 580"),
        ({"driver": "[N/A]"}, None, "", {}, "gpu", "lists 1 GPU"),
        ({}, None, '""', {"PROPE_EXTRA": "hf"}, "", ""),
        ({}, None, "hf", {}, "hf", ""),
        ({}, None, "", {"PROPE_EXTRA": ""}, "", ""),
        (None, None, "", {"PROPE_EXTRA": "tpu"}, "tpu", ""),
        (None, ("0x1ae0", "0x0063"), "", {}, "tpu", "has 1 TPU chip; for none"),
        (None, ("0x1ae0", "0x0042"), "", {}, "", ""),  # a virtual network card of Google's
        (None, ("0x8086", "0x0063"), "", {}, "", ""),
    ],
)
def test_setup_takes_the_extra_of_what_is_here(smi, pci, call, environment, extra, said, tmp_path):
    put_program(tmp_path / ".venv/bin/python", f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "bin").mkdir()
    if smi is not None:
        values = {"code": 0, "gpus": 1, "driver": "580.65.06"} | smi
        put_program(tmp_path / "bin/nvidia-smi", SMI.format(**values))
    if pci:
        device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
        device.mkdir(parents=True)
        for name, value in zip(("vendor", "device"), pci, strict=True):
            (device / name).write_text(f"{value}\n")
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"} | environment
    done = set_up(tmp_path, call, sys=f"{tmp_path}/sys/", **variables)
    assert done.stdout == "0 no\n", done.stderr
    installed = (tmp_path / "calls").read_text().splitlines()[-1]
    assert installed.endswith(f"--editable .[{extra}]" if extra else "--editable .")
    lines = done.stderr.replace("installing the pinned", "\0").splitlines()
    lines = [line for line in lines if not line.startswith("\0")]
    assert [said in line for line in lines] == [True] * bool(said), done.stderr


def test_quickstart_installs_for_the_gpu_that_is_here(tmp_path):
    (tmp_path / "launch").mkdir()
    for name in ("common.sh", "quickstart.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text('echo "setup $# $*"')
    put_program(tmp_path / "bin/python", '#!/bin/sh\necho "$@"')
    done = launch("quickstart.sh", "W", root=tmp_path, PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert done.stdout.splitlines()[0] == "setup 0 "
    assert done.stdout.splitlines()[1].endswith("--workdir=W")


# --- local_pod.sh -----------------------------------------------------------------------------

NAMES = ["JAX_PLATFORMS", "XLA_FLAGS", "PROPE_PROCESSES", "PROPE_COMMIT"]
PRINT = f"import os, sys; print(*sys.argv[1:], *(os.environ[name] for name in {NAMES}), sep='|')"


def test_local_pod_prints_what_it_would_run():
    flags = ["--processes=3", "--devices=4", "--dry-run"]
    command = [sys.executable, "-c", PRINT, "a  'b"]
    given = {"XLA_FLAGS": "--xla_one=1", "PROPE_COMMIT": "abc"}
    done = launch("local_pod.sh", *flags, "--", *command, **given)
    assert done.returncode == 0 and not done.stderr
    ports = set()
    for process, line in enumerate(done.stdout.splitlines()):
        # A shell that reads the line back starts the process.
        said = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=clean_environment()
        ).stdout
        flags = "--xla_one=1 --xla_force_host_platform_device_count=4"
        head, port, end = re.fullmatch(r"(.*@127\.0\.0\.1:)(\d+)(.*)\n", said).groups()
        assert head + end == f"a  'b|cpu|{flags}|{process}/3@127.0.0.1:|abc"
        ports.add(port)
    assert process == 2 and len(ports) == 1 and 10_000 <= int(port) < 32_768


def test_local_pod_keeps_the_last_line_for_process_0_and_prefixes_the_rest():
    code = """import os, sys
i = os.environ["PROPE_PROCESSES"][0]
print("out", i, os.getpid(), os.getpgrp() == os.getpid(), flush=True)
print("one", i, file=sys.stderr)
sys.stderr.write(f"two {i} {sys.stdin.read()!r}")
"""
    done = launch("local_pod.sh", "--processes=3", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    pids = dict(re.findall(r"^process (\d): pid (\d+)$", done.stderr, re.MULTILINE))
    assert done.stdout == f"out 0 {pids['0']} True\n"  # the command's own pid and process group
    expected = []
    for i, pid in pids.items():
        expected += [f"process {i}: pid {pid}", f"[{i}] one {i}", f"[{i}] two {i} ''"]
        expected += [f"[{i}] out {i} {pid} True"] if i != "0" else []
    assert sorted(done.stderr.splitlines()) == sorted(expected)


def test_local_pod_waits_for_all_and_ends_none():
    script = "((${PROPE_PROCESSES%%/*})) || exit 76; sleep 1; echo still here"
    begun = time.monotonic()
    done = launch("local_pod.sh", "--", "bash", "-c", script)
    assert done.returncode == 76 and "[1] still here" in done.stderr
    assert time.monotonic() - begun > 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_local_pod_passes_signals_on_to_every_process(number, code, tmp_path):
    command = [sys.executable, "-c", HANDLE, tmp_path / "ready"]
    pod = start("local_pod.sh", "--processes=3", "--", *command)
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
    command = ["bash", "-c", 'echo "$PROPE_PROCESSES"; sleep 1']
    pods = [start("local_pod.sh", "--", *command) for _ in range(4)]
    assert len({pod.communicate(timeout=60)[0] for pod in pods}) == 4


def test_local_pod_takes_no_port_that_is_taken():
    # The script is given its pid by exec, so that the port it would take first can be taken before.
    code = """import os, socket, sys
taken = socket.create_server(("127.0.0.1", 10_000 + os.getpid() % 20_000))
taken.set_inheritable(True)
os.execvp("bash", ["bash", *sys.argv[1:]])
"""
    command = [sys.executable, "-c", code, "launch/local_pod.sh", "--dry-run", "--", "true"]
    pipe = subprocess.PIPE
    pod = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=pipe, text=True)
    said, _ = pod.communicate(timeout=30)
    port = int(re.search(r"127\.0\.0\.1:(\d+)", said)[1])
    assert pod.returncode == 0 and port != 10_000 + pod.pid % 20_000


# --- Exit codes -------------------------------------------------------------------------------


@pytest.fixture
def fakes(tmp_path):
    """The stand-ins; the variables with which they are found first."""
    programs = put_programs(tmp_path)
    # The script's is of 30 s.
    put_program(tmp_path / "programs/sleep", "#!/bin/sh\nexec /bin/sleep 0.2\n")
    return programs


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_ON_NODE": "9",
    "SLURM_SUBMIT_DIR": str(ROOT),
}
# What SkyPilot sets on a host. Source: its documentation, "Environment variables".
HOST = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
}
SETUP = "mkdir -p .venv/bin && echo export ACTIVATED=$1 >.venv/bin/activate\n"


@pytest.fixture
def host(tmp_path):
    """Runs SkyPilot's job as on a host, in a folder that stands for the clone there."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "prope").symlink_to(ROOT / "prope")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    path = f'export PATH="{os.path.dirname(sys.executable)}:$PATH"'
    (tmp_path / ".venv/bin/activate").write_text(path)

    def run(platform: str, given: str) -> subprocess.CompletedProcess:
        environment = clean_environment(PLATFORM=platform, COMMAND=given, **HOST)
        command = ["bash", "-c", TASK["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


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


# Ends with the code of the process's number, which a variable or a file has.
END = '[[ $1 != kill ]] || kill -KILL $$; exit "$1"'
# Codes of the processes; the launcher's own; whether the run is started again.
CODES = [
    ("0 0", 0, False),
    ("1 76", 1, False),
    ("76 2", 2, False),
    ("130 130", 130, False),
    ("1 kill", 1, False),
    ("75 75", 75, True),
    ("76 75", 75, True),
    ("0 76", 76, True),
    ("76 134", 76, True),
    ("0 139", 139, True),
    ("143 143", 143, True),
    ("kill 0", 137, True),
]


@pytest.mark.parametrize(("codes", "code", "restarted"), CODES)
def test_local_pod_exits_with_the_code_that_counts(codes, code, restarted):
    script = f'set -- {codes}; shift "${{PROPE_PROCESSES%%/*}}"; {END}'
    assert launch("local_pod.sh", "--", "bash", "-c", script).returncode == code


def test_ctrl_c_of_one_process_counts_before_a_stop():
    script = 'set -- 75 130; shift "${PROPE_PROCESSES%%/*}"; exit "$1"'
    assert launch("local_pod.sh", "--", "bash", "-c", script).returncode == 130


@pytest.mark.parametrize(("codes", "code", "restarted"), CODES)
def test_slurm_queues_again_what_is_not_final(codes, code, restarted, fakes, tmp_path):
    script = f'set -- {codes} {codes}; shift "$SLURM_PROCID"; {END}'
    done = launch("slurm.sbatch", "--", "bash", "-c", script, **JOB, **fakes)
    assert done.returncode == code, done.stderr
    requeued = [call for call in calls(tmp_path) if call[0] == "scontrol"]
    assert requeued == [["scontrol", "requeue", "7"]] * restarted


@pytest.mark.parametrize(
    ("code", "expected"), [("134", 76), ("kill", 76), ("0", 0), ("1", 1), ("2", 2)]
)
def test_a_host_of_skypilot_ends_with_a_code_that_its_job_knows(code, expected, host):
    done = host("cpu", f"bash -c '{END.replace('$1', code)}'")
    assert done.returncode == expected
    for stopped in (75, 76):
        assert host("cpu", f"bash -c 'exit {stopped}'").returncode == stopped
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 76]


# Each worker's codes; with each start its environment is written down.
SAY = """
echo "$ACTIVATED $PROPE_PROCESSES $PROPE_COMMIT $LIBTPU_INIT_ARGS $2" >>"$HOME/seen"
set -- "$HOME/codes"
"""


@pytest.mark.parametrize(
    ("codes", "expected"), [("0 0", 0), ("76 1", 1), ("75 76", 75), ("0 137", 137)]
)
def test_tpu_vm_runs_on_every_worker_and_exits_with_the_code_that_counts(
    codes, expected, installed, tmp_path
):
    clone, head, variables = installed
    for worker, code in zip("01", codes.split(), strict=True):
        (tmp_path / worker / "codes").write_text(code)
    program = ["bash", "-c", SAY + NEXT.replace("$0", "$1"), "x", "y", "a  'b"]
    command = ["bash", "launch/run.sh", "v5p", *program]
    done = launch("tpu_vm.sh", "run", "--", *command, root=clone, **variables)
    assert done.returncode == expected, done.stderr
    first = codes.split()[0]
    assert sorted(done.stdout.splitlines()) == [f"log {first}", f"said {first}"]  # of process 0
    for worker in "01":
        (seen,) = (tmp_path / worker / "seen").read_text().splitlines()
        assert seen.startswith(f"tpu auto {head} --xla_tpu") and seen.endswith(" a  'b")
        assert "xla_tpu_enable_ag_backward_pipelining" in seen  # a flag of v5p alone


# --- slurm.sbatch -----------------------------------------------------------------------------


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
    words = shlex.split(launch("slurm.sbatch", *arguments, **JOB, **fakes).stdout)
    begin = words.index("-c") + 1
    srun = f"srun --nodes=2 {flags} --kill-on-bad-exit=0 bash -c"
    assert words[:begin] == f"env PROPE_PROCESSES=auto{devices} {srun}".split()
    assert words[begin + 1 :] == [
        *["task", "bash", "launch/run.sh", "gpu", "python", "-m", "x"],
        "a b",
    ]
    assert not calls(tmp_path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURM_JOB_ID": ""}, "Slurm job"),
        ({"SLURM_GPUS_ON_NODE": ""}, "GPUs"),
        ({"SLURM_GPUS_PER_TASK": "1"}, "--gpus-per-task"),
        ({"SLURM_CPUS_ON_NODE": "1"}, "1 CPUs"),
        ({"SLURM_SUBMIT_DIR": "/"}, "/: "),
    ],
)
def test_slurm_refuses_before_srun(changed, named, fakes, tmp_path):
    assert named in refused(launch("slurm.sbatch", "--", "x", **JOB | changed, **fakes))
    assert "command" in refused(launch("slurm.sbatch", **JOB, **fakes))
    assert not calls(tmp_path)


def test_slurm_stops_queueing(fakes, tmp_path):
    stop = ["--max_restarts=3", "--", "bash", "-c", "exit 76"]
    done = launch("slurm.sbatch", *stop, SLURM_RESTART_COUNT="3", **JOB, **fakes)
    assert done.returncode == 76 and "3 restarts" in done.stderr
    assert [call[0] for call in calls(tmp_path)] == ["srun"]
    done = launch("slurm.sbatch", *stop, SLURM_RESTART_COUNT="2", REQUEUE_CODE="1", **JOB, **fakes)
    assert done.returncode == 76 and "stopped: " in done.stderr


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


# --- tpu_vm.sh, with a gcloud that has two workers, each a folder on this machine ----------------


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
    assert "commit" in refused(launch("tpu_vm.sh", "install", root=clone, **variables))
    assert len(calls(tmp_path)) == before


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
    assert second.returncode == 2 and "stop" in second.stderr
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
    assert done.returncode == 1 and "stopped: a is lost" in done.stderr
    assert done.stderr.count("called") == 1 + 5  # its log, then its state


# --- sky.yaml ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "expected"),
    [("v5p", "auto|False"), ("gpu", "1/2@10.0.0.4:8476|True"), ("cpu", "1/2@10.0.0.4:8476|False")],
)
def test_a_host_joins_the_others(platform, expected, host, tmp_path):
    code = 'print(*sys.argv[1:], os.environ["PROPE_PROCESSES"], "XLA_FLAGS" in os.environ, sep="|")'
    (tmp_path / "say.py").write_text(f"import os, sys\n{code}\n")
    done = host(platform, "python say.py 'a  b' --c=d")
    assert done.stdout == f"a  b|--c=d|{expected}\n", done.stderr


def test_every_platform_installs_its_extras(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/setup.sh").write_text('echo "$1"; [[ $1 != "$FAILS" ]]')

    def setup(platform: str, fails: str = "") -> tuple[list[str], int]:
        environment = os.environ | {"PLATFORM": platform, "FAILS": fails}
        command = ["bash", "-c", TASK["setup"]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=-1, text=True)
        return done.stdout.split(), done.returncode

    assert setup("v5e") == (["tpu", "gcs"], 0) and setup("cpu") == (["gcs"], 0)
    assert setup("gpu") == (["gpu", "gcs"], 0)
    assert setup("gpu", "gpu") == (["gpu"], 1) and setup("cpu", "gcs") == (["gcs"], 1)


def test_jobsets_restart_what_is_not_final_and_may_save():
    """xpk restarts codes from 127 on by itself."""
    page = (ROOT / "launch/gke.md").read_text()
    assert "--restart-on-exit-codes=75,76 --max-restarts=50" in page
    assert "--termination-grace-period-seconds=600" in page
