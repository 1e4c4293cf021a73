"""Several devices, several processes."""

import os
import socket
import subprocess
import sys

import jax

from support.commands import CONFIG, ROOT, devices_flags

# data, fsdp, tensor
MESHES = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8)]


def on_eight_devices(file: str, function: str) -> None:
    """Runs a function of a test file in a process with eight devices."""
    quick = str(jax.config.read("jax_disable_most_optimizations")).lower()  # as here
    env = os.environ | {"XLA_FLAGS": devices_flags(8), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = quick
    command = [sys.executable, "-c", f"import runpy; runpy.run_path({file!r})[{function!r}]()"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


# Windows that no number of devices divides.
LOGGED = ("--config.log_every=1", "--config.eval.max_windows=7")


# A patch with which a lost process is noticed soon.
QUICK = "from prope.runtime import processes; processes.HEARTBEAT_SECONDS = 10"


# Wide enough that parameters are split over devices.
WIDE = (*LOGGED, "--config.model.embed_dim=256")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def pod_environments(count: int = 2) -> list[dict[str, str]]:
    """The variables that join processes on this machine, for each process."""
    port = free_port()
    return [{"PROPE_PROCESSES": f"{i}/{count}@127.0.0.1:{port}"} for i in range(count)]


def train_in_local_pod(workdir, cache_dir, devices: int, *arguments):
    """Trains the tiny config in two processes with so many devices each, to the end."""
    pod = ["bash", ROOT / "launch" / "local_pod.sh", "--processes=2", f"--devices={devices}", "--"]
    command = [sys.executable, "-m", "prope.train", CONFIG, f"--workdir={workdir}", *arguments]
    env = os.environ | {"PROPE_CACHE": str(cache_dir)}
    done = subprocess.run([*pod, *command], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


def start_patched(patch: str, workdir, *arguments, **environment) -> subprocess.Popen:
    """Starts prope.train on the tiny config, with lines of Python before."""
    script = f"""
import os, sys
from prope import train, command
from prope.errors import UsageError
{patch}
command.run(train.main, train.define_flags, train.leave)
"""
    command = [sys.executable, "-c", script, CONFIG, f"--workdir={workdir}", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def start_two_patched(patch: str, tmp_path, cache_dir) -> list:
    """Starts two processes of a run, each with the patch, which reads `process`: "0" or "1"."""
    patch = f"{QUICK}\nprocess = os.environ['PROPE_PROCESSES'][0]\n{patch}"
    cache = {"PROPE_CACHE": str(cache_dir)}
    return [start_patched(patch, tmp_path, *LOGGED, **cache, **pod) for pod in pod_environments()]


def line_of(outcome) -> str:
    """The one line of ours that a process ends with, among what JAX's runtime may say."""
    lines = outcome.stderr.splitlines()
    (line,) = [line for line in lines if line.startswith(("error:", "stopped:"))]
    assert "Traceback" not in outcome.stderr, outcome.stderr
    return line
