"""A run of several processes, as on a pod: here two on one machine, with fake devices."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support.commands import CONFIG, ROOT, devices_flags, finish, flipped, logged, losses
from support.processes import (
    LOGGED,
    QUICK,
    WIDE,
    line_of,
    pod_environments,
    start_patched,
    start_two_patched,
    train_in_local_pod,
)
from support.text import read_lines

from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import open_run

pytestmark = pytest.mark.slow

STEPS_60 = (*WIDE, "--config.num_steps=60", "--config.eval_every=20")
ENDLESS = "--config.num_steps=100000"


@pytest.fixture
def start_pod(start_pod):
    """Starts two processes of prope.train, with two devices each, on one workdir or on two."""

    def start(workdir, *arguments, patch=""):
        workdirs = workdir if isinstance(workdir, list) else [workdir] * 2
        flags = [f"--workdir={path}" for path in workdirs]
        return start_pod("prope.train", CONFIG, flags, *arguments, patch=patch)

    return start


@pytest.fixture
def run_pod(start_pod):
    """Does the same, and returns the outcomes."""
    return lambda *arguments: [finish(command) for command in start_pod(*arguments)]


@pytest.fixture(scope="module")
def straight(train_once):
    """60 steps in one go by one process with one device: (workdir, what the command printed)."""
    return train_once("straight60", *STEPS_60)


def test_a_run_that_moves_from_two_processes_to_four_devices_to_one(
    straight, train, cache_dir, tmp_path
):
    workdir = tmp_path / "run"
    straight_workdir, straight_result = straight
    done = train_in_local_pod(workdir, cache_dir, 2, *STEPS_60, "--stop_at_step=20")
    first = json.loads(done.stdout.splitlines()[-1])
    for process in (0, 1):
        joined = rf"^\[{process}\] process {process} of 2 on .*, with 2 of 4 devices$"
        assert re.search(joined, done.stderr, re.MULTILINE), done.stderr
    assert "[0] step 20/20" in done.stderr
    assert "[1] step" not in done.stderr, "only the first one logs"
    assert len(read_lines(workdir / "metrics.jsonl")) == 20, "and writes"
    (start,) = read_lines(workdir / "starts.jsonl")
    assert (start["processes"], start["devices"]) == (2, 4)
    assert len(start["commit"]) >= 40
    split = ("--stop_at_step=40", "--config.mesh.tensor=2", "--config.accumulation=2")
    four = train(workdir, *STEPS_60, *split, devices=4)
    assert four.code == 0, four.stderr
    assert "resumed from step 20" in four.stderr
    one = train(workdir, *STEPS_60)
    assert one.code == 0, one.stderr
    assert "resumed from step 40" in one.stderr
    assert first["init_hash"] == four.result["init_hash"] == straight_result["init_hash"]
    assert logged(workdir, "batch_hash") == logged(straight_workdir, "batch_hash")
    ours = losses(workdir)
    theirs = losses(straight_workdir)
    assert list(ours) == list(range(1, 61))
    np.testing.assert_allclose([ours[s] for s in theirs], list(theirs.values()), rtol=1e-5)
    ours = {record["step"]: record["loss"] for record in read_lines(workdir / "eval.jsonl")}
    theirs = read_lines(straight_workdir / "eval.jsonl")
    assert list(ours) == [record["step"] for record in theirs] == [20, 40, 60]
    expected = [record["loss"] for record in theirs]
    np.testing.assert_allclose(list(ours.values()), expected, rtol=1e-5)


READ = """
import sys, jax, numpy as np
from prope.workdir.run import open_run
run = open_run(sys.argv[1])
assert jax.device_count() == int(sys.argv[2])
leaves = jax.tree_util.tree_leaves_with_path(run.params())
assert jax.device_count() == 1 or any(not leaf.is_fully_replicated for _, leaf in leaves)
arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
np.savez(sys.argv[3], **arrays)
"""


def read_as_numpy(workdir) -> dict[str, np.ndarray]:
    run = open_run(workdir, 2)
    num_layers = run.spec.model.num_layers
    layers = [run.checkpoint.read(("layers",), number) for number in range(num_layers)]
    params = {name: run.checkpoint.read((name,)) for name in ("embedder", "final_norm")}
    params["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def test_saved_on_four_devices_restored_on_fewer_or_more_and_as_numpy(straight, train, tmp_path):
    short = ("--config.mesh.tensor=2", "--stop_at_step=2")
    saved = train(tmp_path / "run", *WIDE, *short, devices=4)
    assert saved.code == 0, saved.stderr
    assert saved.result["init_hash"] == straight[1]["init_hash"]
    whole = read_as_numpy(tmp_path / "run")
    assert len(whole) > 5
    assert all(type(leaf) is np.ndarray for leaf in whole.values())
    for devices in (1, 2, 8):
        output = tmp_path / f"{devices}.npz"
        env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices_flags(devices)}
        command = [sys.executable, "-c", READ, tmp_path / "run", str(devices), output]
        subprocess.run(command, env=env, check=True, timeout=600)
        restored = np.load(output)
        assert set(restored) == set(whole)
        for name in whole:
            np.testing.assert_array_equal(restored[name], whole[name], err_msg=name)


def test_one_of_two_is_asked_to_stop_and_both_save(start_pod, tmp_path):
    every_step = ("--config.log_every=1", "--config.checkpoint_every=100000")
    pod = start_pod(tmp_path, ENDLESS, *every_step)
    pod[0].wait_for("step 3/")
    pod[1].signal(signal.SIGTERM)
    outcomes = [finish(command) for command in pod]
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes
    (step,) = Checkpoints(tmp_path).steps()
    for outcome in outcomes:
        assert f"SIGTERM: step {step} of 100000 is saved" in line_of(outcome)
    assert open_run(tmp_path).step == step


def test_saving_by_the_clock_of_the_first_process(run_pod, tmp_path):
    by_clock = ("--config.checkpoint_every=1000", "--config.checkpoint.every_minutes=1e-6")
    outcomes = run_pod(tmp_path, *by_clock, "--stop_at_step=4", *LOGGED)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    # What one asks for at step 1, all know at step 2, which answers what is asked for there.
    assert Checkpoints(tmp_path).steps() == [2, 4]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_is_killed_and_the_other_ends(start_pod, train, tmp_path, killed):
    pod = start_pod(tmp_path, ENDLESS, "--config.checkpoint_every=5", patch=QUICK)
    pod[0].wait_for("step 10/")
    while not Checkpoints(tmp_path).steps():  # they are written while training goes on
        time.sleep(0.1)
    pod[killed].kill()
    start = time.monotonic()
    other = finish(pod[1 - killed])
    assert time.monotonic() - start < 60
    assert other.code == 76
    assert "another process of this run is gone" in line_of(other)
    step = max(Checkpoints(tmp_path).steps())
    resumed = train(tmp_path, ENDLESS, f"--stop_at_step={step + 2}")
    assert resumed.code == 0, resumed.stderr
    assert resumed.result["step"] == step + 2


def test_one_of_two_hangs_and_the_watchdog_ends_the_other(start_pod, tmp_path):
    # The last heartbeat may be half of this old when the process hangs.
    patient = "from prope.runtime import processes; processes.HEARTBEAT_SECONDS = 600"
    # Without FSDP nothing is reduce-scattered: on CPUs that fails after 30 s by itself.
    replicas = "--config.mesh.data=4"
    pod = start_pod(tmp_path, ENDLESS, replicas, "--config.watchdog_minutes=0.5", patch=patient)
    pod[0].wait_for("step 5/")
    pod[1].signal(signal.SIGSTOP)
    first = finish(pod[0])
    pod[1].kill()
    assert first.code == 76
    assert "nothing has happened for 0.5 minutes after step" in line_of(first)
    assert "Thread 0x" in first.stderr, "where every thread is"
    assert "train.py" in first.stderr


def test_all_pass_over_the_same_damaged_checkpoint(run_pod, whole, tmp_path):
    run = shutil.copytree(whole[0], tmp_path / "run")
    params = run / "checkpoints" / "20" / "params"
    files = [path for path in params.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(flipped(largest.read_bytes()))
    outcomes = run_pod(run, "--stop_at_step=12")
    for outcome in outcomes:
        assert outcome.code == 0, outcome.stderr
        assert "checkpoint 20 is damaged" in outcome.stderr
    assert "resumed from step 10" in outcomes[0].stderr
    assert outcomes[0].result["step"] == 12
    assert (run / "checkpoints" / "20.damaged").is_dir()


def test_a_process_that_never_comes(start_command, tmp_path):
    patch = "from prope.runtime import processes; processes.START_SECONDS = 5"
    words = [CONFIG, f"--workdir={tmp_path}"]
    outcome = finish(start_command("prope.train", *words, patch=patch, **pod_environments()[0]))
    assert outcome.code == 76
    assert "2 were expected, the first at 127.0.0.1:" in line_of(outcome)
    assert not (tmp_path / "config.json").exists()


def test_a_workdir_that_is_not_shared(run_pod, tmp_path):
    for outcome in run_pod([tmp_path / "a", tmp_path / "b"]):
        assert outcome.code == 2, outcome.stderr
        assert "is not shared: process 1 of 2" in line_of(outcome)
        assert "compiled" not in outcome.stderr
    assert not list((tmp_path / "a").glob(".shared*"))


def test_bad_input_of_one_process_ends_both(run_pod, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    for outcome in run_pod([tmp_path / "new", tmp_path / "run"], "--config.seed=1"):
        assert outcome.code == 2
        assert "holds a run of another config (seed: 0, not 1)" in line_of(outcome)


def test_a_process_that_libtpu_has_joined_to_others_is_refused(tmp_path, cache_dir):
    """It is started by hand on a host of a pod, where JAX finds the others without being told."""
    patch = "import jax; jax.process_count = lambda: 4"
    process = start_patched(patch, tmp_path / "run", PROPE_CACHE=str(cache_dir))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.fullmatch("error: PROPE_PROCESSES is 1, .*=auto.*", stderr.splitlines()[-1])
    assert not (tmp_path / "run").exists()


# The disk is full for the second check, in `save`: the others would wait for this one there.
FULL_DISK = """
checks = []
def check_disk(path, size):
    checks.append(path)
    if len(checks) == 2 and process == "1":
        raise UsageError("the disk is full")
train.check_disk = check_disk
"""


def test_a_disk_that_is_full_on_one_host_ends_all(tmp_path, cache_dir):
    for process in start_two_patched(FULL_DISK, tmp_path, cache_dir):
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 2, stderr
        assert "the disk is full" in stderr.splitlines()[-1]


OUT_OF_MEMORY = """
import jax
def run_out(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
if process == "1":
    train.compile_step = run_out
"""


def test_one_of_two_runs_out_of_memory_and_both_end(tmp_path, cache_dir):
    """They end with codes of which launchers take 1: no restart."""
    started = start_two_patched(OUT_OF_MEMORY, tmp_path, cache_dir)
    first, second = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [76, 1], first + second
    cause = "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
    assert f"stopped: out of memory ({cause})" in second
    assert "stopped: another process of this run is gone" in first
