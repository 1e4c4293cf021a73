"""Runs the scripts of launch/ for tests, beside programs that stand for those of a cloud."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

from support.commands import ROOT

TOOLS = pathlib.Path(sys.executable).parent


def clean_environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, without what the scripts take defaults from."""
    defaults = ("PROPE_", "SLURM_", "XLA_FLAGS", "SSH_AUTH_SOCK", "PYTHON")
    others = {name: value for name, value in os.environ.items() if not name.startswith(defaults)}
    return others | {"PYTHON": sys.executable} | more


def launch(script: str, *arguments, root=ROOT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", f"{root}/launch/{script}", *map(str, arguments)],
        cwd=root,
        env=clean_environment(**environment),
        input="typed",
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(done: subprocess.CompletedProcess) -> str:
    """Returns the one line with which a script refuses its arguments."""
    assert done.returncode == 2 and not done.stdout, done
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


# bash cannot take a signal that was ignored when it began, as Ctrl-C is in a background job. Not by
# preexec_fn: that forks this process, in which JAX may have threads.
HEAR_CTRL_C = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def start(
    script: str, *arguments, root=ROOT, group: bool = False, **environment: str
) -> subprocess.Popen:
    """Starts a script; in a process group of its own if asked to."""
    hear_ctrl_c = [sys.executable, "-c", HEAR_CTRL_C]
    return subprocess.Popen(
        [*hear_ctrl_c, "bash", f"{root}/launch/{script}", *map(str, arguments)],
        cwd=root,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=group,
    )


def wait_for(file, lines: int) -> None:
    """Waits until a file, to which every process writes a line, has so many."""
    deadline = time.monotonic() + 60
    while not file.exists() or len(file.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{file}: fewer than {lines} lines after 60 s"
        time.sleep(0.02)


# Says that it is there, and ends as prope does when a signal comes. Ctrl-C reaches it only as
# Python's exception, which is not raised where a shell has started it with SIGINT ignored.
HANDLE = """import os, signal, sys, time
def end(number, frame):
    print("got", number, file=sys.stderr)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
try:
    time.sleep(30)
except KeyboardInterrupt:
    print("got 2", file=sys.stderr)
    sys.exit(130)
"""

# A command whose every start ends with the next of the codes in a file, and says so.
NEXT = """read -r code rest <"$0"
echo "$rest" >"$0"
echo "said $code"
echo "log $code" >&2
exit "$code"
"""

# The head of every stand-in: it records its arguments.
RECORD = """#!{python}
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path("{here}")
arguments = sys.argv[1:]
with open(here / "calls", "a") as file:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, *arguments]), file=file)
"""
# gcloud: a slice of two workers, each a home directory.
GCLOUD = """
def flag(name):
    return next((a.split("=", 1)[1] for a in arguments if a.startswith(f"--{name}=")), None)
workers = ["0", "1"] if flag("worker") == "all" else [flag("worker")]
if "ssh" in arguments:
    started = []
    for w in workers:
        command = ["bash", "-c", flag("command")]
        home = os.environ | {"HOME": str(here / w)}
        started.append(subprocess.Popen(command, cwd=here / w, env=home))
    sys.exit(max(process.wait() for process in started))
if "scp" in arguments:
    source, target = arguments[4:6]
    for w in workers:
        shutil.copy(source, here / w / target.partition(":")[2])
"""
# srun: every task at once; exits with the greatest code, as Slurm's does.
SRUN = """
ntasks = next(int(a.split("=")[1]) for a in arguments if a.startswith("--ntasks="))
command = arguments[arguments.index("bash"):]
tasks = []
for i in range(ntasks):
    tasks.append(subprocess.Popen(command, env=os.environ | {"SLURM_PROCID": str(i)}))
sys.exit(max(task.wait() % 256 for task in tasks))
"""
SCONTROL = """
sys.exit(int(os.environ.get("REQUEUE_CODE", 0)))
"""


def put_programs(tmp_path) -> dict[str, str]:
    """Puts the stand-ins into a folder; returns the variables with which they are found first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    codes = {"gcloud": GCLOUD, "srun": SRUN, "scontrol": SCONTROL}
    for name, code in codes.items():
        (folder / name).write_text(RECORD.format(python=sys.executable, here=tmp_path) + code)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{TOOLS}:{os.environ['PATH']}"}


def calls(tmp_path) -> list[list[str]]:
    """Returns the calls of the stand-ins, each its name and arguments."""
    file = tmp_path / "calls"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def make_clone(tmp_path) -> pathlib.Path:
    """Makes a small clone of this project with one commit."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "prope/runtime").mkdir(parents=True)
    (root / "prope/__init__.py").write_text("")
    for name in ("prope/runtime/xla_flags.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    commit(root)
    return root


def commit(root) -> None:
    """Commits all that is below a folder."""
    author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=root, check=True)
