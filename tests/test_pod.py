"""A run of several processes, as on a pod: here two on one machine, with devices that they pretend to have."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import CONFIG, ROOT, finish, flipped, logged, losses
from makers import LOGGED, WIDE, free_port, line_of, start_patched, start_two_patched

from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import open_run


@pytest.fixture
def start_pod(start_command):
    """Starts `count` processes of prope.train with `devices` each; `workdir` may be one for each."""

    def start(workdir, *arguments, count=2, devices=2, **environment):
        given = {
            "PROPE_PROCESSES": str(count),
            "PROPE_COORDINATOR": f"127.0.0.1:{free_port()}",
        } | environment
        workdirs = workdir if isinstance(workdir, list) else [workdir] * count
        return [
            start_command(
                "prope.train",
                CONFIG,
                f"--workdir={path}",
                *arguments,
                devices=devices,
                PROPE_PROCESS=str(i),
                **given,
            )
            for i, path in enumerate(workdirs)
        ]

    return start


@pytest.fixture(scope="module")
def straight(once, train):
    """60 steps in one go by one process with one device: (workdir, what the command printed)."""

    def make(directory):
        outcome = train(directory / "run", *WIDE, "--config.num_steps=60", "--config.eval_every=20")
        assert outcome.code == 0, outcome.stderr
        return outcome.result

    directory, result = once("straight60", make)
    return directory / "run", result


@pytest.mark.slow
def test_a_run_that_moves_from_two_processes_to_four_devices_to_one(
    straight, train, cache_dir, tmp_path
):
    moving = (*WIDE, "--config.num_steps=60", "--config.eval_every=20")
    train_in = [
        "--",
        sys.executable,
        "-m",
        "prope.train",
        CONFIG,
        f"--workdir={tmp_path / 'run'}",
        *moving,
    ]
    pod = [
        "bash",
        ROOT / "launch" / "local_pod.sh",
        "--processes=2",
        "--devices=2",
        *train_in,
        "--stop_at_step=20",
    ]
    env = os.environ | {"PROPE_CACHE": str(cache_dir)}
    done = subprocess.run(pod, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout.splitlines()[-1])
    for process in (0, 1):
        said = rf"^\[{process}\] process {process} of 2 on .*, with 2 of 4 devices$"
        assert re.search(said, done.stderr, re.MULTILINE), done.stderr
    assert "[0] step 20/20" in done.stderr and "[1] step" not in done.stderr, (
        "only the first one logs"
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 20, "and writes"
    (start,) = [
        json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()
    ]
    assert (start["processes"], start["devices"]) == (2, 4) and len(start["commit"]) >= 40
    four = train(
        tmp_path / "run", *moving, "--stop_at_step=40", "--config.mesh.tensor=2", devices=4
    )
    assert four.code == 0 and "resumed from step 20" in four.stderr, four.stderr
    one = train(tmp_path / "run", *moving)
    assert one.code == 0 and "resumed from step 40" in one.stderr, one.stderr
    assert first["init_hash"] == four.result["init_hash"] == straight[1]["init_hash"]
    assert logged(tmp_path / "run", "batch_hash") == logged(straight[0], "batch_hash")
    ours, theirs = losses(tmp_path / "run"), losses(straight[0])
    assert list(ours) == list(range(1, 61))
    np.testing.assert_allclose([ours[s] for s in theirs], list(theirs.values()), rtol=1e-5)
    evals = [
        [json.loads(line) for line in (workdir / "eval.jsonl").read_text().splitlines()]
        for workdir in (tmp_path / "run", straight[0])
    ]
    assert [r["step"] for r in evals[0]] == [r["step"] for r in evals[1]] == [20, 40, 60]
    np.testing.assert_allclose(*([r["loss"] for r in records] for records in evals), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "tensor"), [(8, 2), (2, 1)])
def test_saved_on_many_devices_restored_on_fewer_and_as_numpy(
    straight, train, tmp_path, devices, tensor
):
    saved = train(
        tmp_path / "run",
        *WIDE,
        f"--config.mesh.tensor={tensor}",
        "--stop_at_step=2",
        devices=devices,
    )
    assert saved.code == 0, saved.stderr
    assert saved.result["init_hash"] == straight[1]["init_hash"]
    read = (
        "import sys, jax, numpy as np; from prope.workdir.run import open_run\n"
        "run = open_run(sys.argv[1]); assert jax.device_count() == int(sys.argv[2])\n"
        "leaves = jax.tree_util.tree_leaves_with_path(run.params())\n"
        "assert jax.device_count() == 1 or any(not leaf.is_fully_replicated for _, leaf in leaves)\n"
        "np.savez(sys.argv[3], **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})\n"
    )
    (tmp_path / "read.py").write_text(read)
    run = open_run(tmp_path / "run", 2)
    layers = [
        run.checkpoint.read(("layers",), number) for number in range(run.config.model.num_layers)
    ]
    params = {name: run.checkpoint.read((name,)) for name in ("embedder", "final_norm")}
    params["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    whole = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert len(whole) > 5 and all(type(leaf) is np.ndarray for leaf in whole.values())
    for fewer in (1, 2, 4):
        output = tmp_path / f"{fewer}.npz"
        env = {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={fewer}",
        }
        command = [sys.executable, tmp_path / "read.py", tmp_path / "run", str(fewer), output]
        subprocess.run(command, env=env | {"JAX_PLATFORMS": "cpu"}, check=True, timeout=600)
        found = np.load(output)
        assert set(found) == set(whole)
        for name in whole:
            np.testing.assert_array_equal(found[name], whole[name], err_msg=name)


@pytest.mark.slow
def test_one_of_two_is_asked_to_stop_and_both_save(start_pod, tmp_path):
    pod = start_pod(
        tmp_path,
        "--config.num_steps=100000",
        "--config.log_every=1",
        "--config.checkpoint_every=100000",
    )
    pod[0].wait_for("step 3/")
    pod[1].signal(signal.SIGTERM)
    first, second = map(finish, pod)
    assert (first.code, second.code) == (75, 75), first.stderr + second.stderr
    (step,) = Checkpoints(tmp_path).steps()
    for outcome in (first, second):
        assert f"SIGTERM: step {step} of 100000 is saved" in line_of(outcome)
    assert open_run(tmp_path).step == step


@pytest.mark.slow
def test_saving_by_the_clock_of_the_first_process(start_pod, tmp_path):
    arguments = (
        "--config.checkpoint_every=1000",
        "--config.checkpoint.every_minutes=1e-6",
        "--stop_at_step=4",
        *LOGGED,
    )
    outcomes = [finish(command) for command in start_pod(tmp_path, *arguments)]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert Checkpoints(tmp_path).steps() == [3, 4], "what one asks for, all know one step later"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_is_killed_and_the_other_ends(start_pod, train, tmp_path, killed):
    pod = start_pod(
        tmp_path,
        "--config.num_steps=100000",
        "--config.checkpoint_every=5",
        PROPE_HEARTBEAT_TIMEOUT="10",
    )
    pod[0].wait_for("step 10/")
    while not Checkpoints(tmp_path).steps():  # they are written while training goes on
        time.sleep(0.1)
    pod[killed].kill()
    start = time.monotonic()
    other = finish(pod[1 - killed])
    assert time.monotonic() - start < 60
    assert other.code == 76 and "another process of this run is gone" in line_of(other)
    assert "start the same command again" in line_of(other)
    step = max(Checkpoints(tmp_path).steps())
    resumed = train(tmp_path, "--config.num_steps=100000", f"--stop_at_step={step + 2}")
    assert resumed.code == 0 and resumed.result["step"] == step + 2


@pytest.mark.slow
def test_one_of_two_hangs_and_the_watchdog_ends_the_other(start_pod, tmp_path):
    lasting = {
        "PROPE_HEARTBEAT_TIMEOUT": "600"
    }  # the last heartbeat may be half of this old when the process hangs
    pod = start_pod(tmp_path, "--config.num_steps=100000", "--config.watchdog_minutes=1", **lasting)
    pod[0].wait_for("step 5/")
    pod[1].signal(signal.SIGSTOP)
    first = finish(pod[0])
    pod[1].kill()
    assert first.code == 76 and "nothing has happened for 1 minutes after step" in line_of(first)
    assert "Thread 0x" in first.stderr and "train.py" in first.stderr, "where every thread is"


@pytest.mark.slow
def test_all_pass_over_the_same_damaged_checkpoint(start_pod, train, tmp_path):
    assert train(tmp_path, *LOGGED).code == 0
    files = [
        path for path in (tmp_path / "checkpoints" / "20" / "params").rglob("*") if path.is_file()
    ]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(flipped(largest.read_bytes()))
    outcomes = [finish(command) for command in start_pod(tmp_path, *LOGGED, "--stop_at_step=12")]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert all("checkpoint 20 is damaged" in outcome.stderr for outcome in outcomes)
    assert "resumed from step 10" in outcomes[0].stderr and outcomes[0].result["step"] == 12
    assert (tmp_path / "checkpoints" / "20.damaged").is_dir()


@pytest.mark.slow
def test_a_process_that_never_comes(start_pod, tmp_path):
    (alone,) = start_pod([tmp_path], count=1, PROPE_PROCESSES="2", PROPE_START_TIMEOUT="5")
    outcome = finish(alone)
    assert outcome.code == 76
    assert re.search(
        r"after 5 s not all processes have come; 2 were expected, the first at 127.0.0.1:\d+",
        line_of(outcome),
    )
    assert "firewall" in line_of(outcome) and not (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_a_workdir_that_is_not_shared(start_pod, tmp_path):
    outcomes = [finish(command) for command in start_pod([tmp_path / "a", tmp_path / "b"])]
    for outcome in outcomes:
        assert outcome.code == 2 and "is not shared: process 1 of 2" in line_of(outcome), (
            outcome.stderr
        )
        assert "compiled" not in outcome.stderr
    assert not list((tmp_path / "a").glob(".shared*"))


@pytest.mark.slow
def test_bad_input_of_one_process_ends_both(start_pod, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    for outcome in map(finish, start_pod([tmp_path / "new", tmp_path / "run"], "--config.seed=1")):
        assert outcome.code == 2 and "holds a run of another config (seed: 0, not 1)" in line_of(
            outcome
        )


@pytest.mark.slow
def test_a_process_that_libtpu_has_joined_to_others_is_refused(tmp_path, cache_dir):
    """As one that is started by hand on a host of a pod, where JAX finds the others without being told."""
    patch = "import jax; jax.process_count = lambda: 4"
    process = start_patched(patch, tmp_path / "run", PROPE_CACHE=str(cache_dir))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2
    assert re.fullmatch(
        r"error: PROPE_PROCESSES is 1, and JAX runs in 4 processes.*=auto.*",
        stderr.splitlines()[-1],
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_host_ends_all(tmp_path, cache_dir):
    """Full for the second check, in `save`: the others would wait for this one there."""
    patch = (
        "checks = []\n"
        "def check_disk(path, size):\n"
        "    checks.append(path)\n"
        "    if len(checks) == 2 and os.environ['PROPE_PROCESS'] == '1': raise UsageError('the disk is full')\n"
        "train.check_disk = check_disk"
    )
    started = start_two_patched(patch, tmp_path, cache_dir)
    for process in started:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 2 and "the disk is full" in stderr.splitlines()[-1], stderr


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[], [10, 20]], ids=["none", "two"])
def test_all_processes_take_the_list_of_checkpoints_of_the_first_one(tmp_path, steps):
    """The second one's host sees the directory as it was."""
    script = (
        "import sys; from prope.runtime import processes; from prope.workdir.checkpoints import list_steps\n"
        "with processes.joined(): print(list_steps(sys.argv[1]))"
    )
    for folder in [
        *(f"0/checkpoints/{step}" for step in steps),
        "1/checkpoints/5",
        "1/checkpoints/10",
        "1/checkpoints/7",
    ]:
        (tmp_path / folder).mkdir(parents=True)
    pod = {
        "PYTHONPATH": str(ROOT),
        "PROPE_PROCESSES": "2",
        "PROPE_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / str(i)],
            env=os.environ | pod | {"PROPE_PROCESS": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    assert [process.communicate(timeout=300)[0].splitlines()[-1] for process in started] == [
        str(steps)
    ] * 2
    assert [process.returncode for process in started] == [0, 0]


@pytest.mark.slow
def test_one_of_two_runs_out_of_memory_and_both_end(tmp_path, cache_dir):
    """With codes of which launchers take 1: no restart."""
    patch = (
        "import jax\n"
        "def run_out(*_): raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.')\n"
        "if os.environ['PROPE_PROCESS'] == '1': train.compile_step = run_out"
    )
    started = start_two_patched(patch, tmp_path, cache_dir)
    first, second = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [76, 1], first + second
    assert (
        "stopped: out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.)" in second
    )
    assert "stopped: another process of this run is gone" in first
