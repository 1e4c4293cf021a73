"""A sweep as a user runs it: what it leaves, what it proves, and that being killed changes nothing."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import CONFIG, ROOT, logged, losses
from etils import epath

from prope.config import default_config, from_dict
from prope.errors import UsageError
from prope.runtime.files import read_json
from prope.sweep import execute
from prope.sweep.grid import plan
from prope.sweep.runs import read_run

PERCENTAGES = ("0", "0.5", "1")
THREE = (
    CONFIG,
    f"--rope_percentage={','.join(PERCENTAGES)}",
    "--config.log_every=1",
    "--config.checkpoint_every=5",
)


@pytest.fixture(scope="session")
def start(cache_dir):
    """Starts launch/sweep.py in a process group of its own."""

    def run(*arguments, cwd=ROOT, **environment) -> subprocess.Popen:
        env = os.environ | {"PROPE_CACHE": str(cache_dir), "PYTHONPATH": str(ROOT)} | environment
        command = [sys.executable, str(ROOT / "launch" / "sweep.py"), *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)

    return run


@pytest.fixture(scope="session")
def finish(start):
    """Runs it to its end: (exit code, last line of stdout or None, stderr)."""

    def run(*arguments, **options) -> tuple[int, dict | None, str]:
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=600)
        return process.returncode, json.loads(out.splitlines()[-1]) if out else None, err

    return run


@pytest.fixture(scope="session")
def whole(once, finish):
    """A sweep over three values of p that nobody disturbed: (directory, last line)."""

    def make(directory):
        code, result, err = finish(*THREE, f"--workdir={directory}/sweep")
        assert code == 0, err
        return result

    directory, result = once("sweep", make)
    return directory / "sweep", result


def error_of(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith(("error:", "stopped:"))]
    assert "Traceback" not in err and lines and err.splitlines()[-1] == lines[-1], err
    return lines[-1]


@pytest.mark.slow
def test_a_sweep_differs_in_p_and_in_nothing_else(whole):
    directory, result = whole
    runs = [directory / f"rope_percentage={p}" for p in PERCENTAGES]
    assert [run["workdir"] for run in result["runs"]] == list(map(str, runs))
    assert [run["values"] for run in result["runs"]] == [
        {"rope_percentage": float(p)} for p in PERCENTAGES
    ]
    assert {run["state"] for run in result["runs"]} == {"finished"} and {
        run["step"] for run in result["runs"]
    } == {20}
    assert len({run["init_hash"] for run in result["runs"]}) == 1 and result["runs"][0]["init_hash"]
    hashes = [logged(run, "batch_hash") for run in runs]
    assert all(other == hashes[0] for other in hashes) and len(hashes[0]) == 20
    assert result["equal"] == {"init": 3, "batches": 3, "steps": 20}
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    assert [config["model"].pop("rope_percentage") for config in configs] == list(
        map(float, PERCENTAGES)
    )
    assert all(config == configs[0] for config in configs)
    for run, record, row in zip(runs, result["runs"], result["table"], strict=True):
        last = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
        assert (record["eval_loss"], record["perplexity"]) == (last["loss"], last["perplexity"])
        assert (row["eval_loss"], row["bits_per_byte"]) == (last["loss"], last["bits_per_byte"])
        assert record["loss"] == losses(run)[20] and (row["runs"], row["eval_loss_sd"]) == (1, None)
    assert [row["rotated_pairs"] for row in result["table"]] == [0, 8, 16]


@pytest.mark.slow
def test_killed_twice_a_sweep_ends_as_an_undisturbed_one(whole, start, finish, tmp_path):
    directory, result = whole
    for p in ("0", "0.5"):
        process = start(*THREE, f"--workdir={tmp_path}")
        run = tmp_path / f"rope_percentage={p}"
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / "5").is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        # What no kill can be timed to do: lines that were logged after the checkpoint that is gone back to.
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 19, "loss": 0.0, "batch_hash": "')
    code, again, err = finish(*THREE, f"--workdir={tmp_path}")
    assert code == 0, err
    assert re.search(r"rope_percentage=0: finished\n.*=0.5: resumes at step (5|10|15)\n", err)
    assert err.count(": starts\n") == 2 and err.count("resumed from step") == 1
    assert (again["table"], again["equal"]) == (result["table"], result["equal"])
    for p in PERCENTAGES:
        assert losses(tmp_path / f"rope_percentage={p}") == losses(
            directory / f"rope_percentage={p}"
        )


@pytest.mark.slow
def test_a_sweep_in_a_bucket_is_the_one_on_disk(whole, finish, run_command, bucket):
    directory, result = whole
    workdir, two = f"{bucket}/sweep", (CONFIG, "--rope_percentage=0,1", *THREE[2:])
    code, remote, err = finish(*two, f"--workdir={workdir}")
    assert code == 0, err
    assert remote["table"] == [result["table"][0], result["table"][2]]
    assert remote["equal"] == {"init": 2, "batches": 2, "steps": 20}
    assert [run["workdir"] for run in remote["runs"]] == [
        f"{workdir}/rope_percentage={p}" for p in (0, 1)
    ]
    for p in (0, 1):
        there, here = (
            epath.Path(workdir) / f"rope_percentage={p}",
            directory / f"rope_percentage={p}",
        )
        for name in ("loss", "batch_hash"):
            records = [
                json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()
            ]
            assert {record["step"]: record[name] for record in records} == logged(here, name)
    code, again, err = finish(*two, f"--workdir={workdir}")
    assert (code, again) == (0, remote) and "starts" not in err
    report = run_command("prope.report", f"--sweep={workdir}")
    assert report.code == 0 and report.result["output"] == f"{workdir}/report/index.html", (
        report.stderr
    )
    assert "</html>" in epath.Path(report.result["output"]).read_text()


@pytest.mark.slow
def test_a_finished_sweep_is_not_made_again_and_may_grow(whole, finish):
    directory, result = whole
    code, again, err = finish(*THREE, f"--workdir={directory}")
    assert (code, again) == (0, result) and "starts" not in err
    more = (
        CONFIG,
        "--rope_percentage=0,0.1,0.25,0.5,0.75,1",
        *THREE[2:],
        f"--workdir={directory}",
        "--dry-run",
    )
    code, plan, err = finish(*more)
    assert code == 0 and [run["state"] for run in plan["runs"]].count("finished") == 3
    assert "rope_percentage=0.1: new" in err


@pytest.mark.slow
def test_a_directory_of_another_sweep_is_refused(whole):
    directory, _ = whole
    three = [{"model.rope_percentage": [0.0, 0.5, 1.0]}]
    base = from_dict(json.loads((directory / "sweep.json").read_text())["config"])
    assert (
        execute.record_sweep(directory, plan(three, "", base, {}), three, base, {})["grids"]
        == three
    )
    other = base.copy_and_resolve_references()
    other.batch_size = 16
    for grids, config, says in (
        (
            [{"model.rope_percentage": [0.0, 1.0]}],
            base,
            "has also the run rope_percentage=0.5; name its values too",
        ),
        ([{"seed": [0, 1]}], base, "has also the run rope_percentage=0; name its values too"),
        (three, other, r"of another config \(batch_size: 8, not 16\)"),
    ):
        with pytest.raises(UsageError, match=says):
            execute.record_sweep(directory, plan(grids, "", config, {}), grids, config, {})
    with pytest.raises(UsageError, match="holds a run, not a sweep"):
        execute.record_sweep(directory / "rope_percentage=0", [], three, base, {})
    run = plan(three, "", other, {})[0]
    with pytest.raises(
        UsageError,
        match=r"rope_percentage=0: holds a run of another config \(batch_size: 8, not 16\)",
    ):
        read_run(directory / run.name, run.values, run.config)


FAKE = """
import json, os, pathlib, signal, sys, time
workdir = [a for a in sys.argv if a.startswith("--workdir=")][0].partition("=")[2]
name = pathlib.Path(workdir).name
with open("started", "a") as log:
    print(name, file=log)
acts = json.loads(pathlib.Path("acts.json").read_text())
act = acts.get(name, [1])
act = act[min(open("started").read().split().count(name), len(act)) - 1]
if act == "wait":
    def stop(number, frame):
        print("told", signal.Signals(number).name, file=sys.stderr, flush=True)
        time.sleep(0.3)
        print("saved", file=sys.stderr, flush=True)
        sys.exit({signal.SIGTERM: 75, signal.SIGINT: 130}[number])
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    open("waiting", "w").close()
    time.sleep(60)
elif act < 0:
    os.kill(os.getpid(), -act)
else:
    print("stopped: because", file=sys.stderr)
sys.exit(act)
"""


@pytest.fixture
def fake(tmp_path):
    """A folder in which prope.train is a program that ends as the test says, start by start."""
    (tmp_path / "prope").mkdir()
    (tmp_path / "prope" / "__init__.py").touch()
    (tmp_path / "prope" / "train.py").write_text(FAKE)

    def write(acts: dict) -> pathlib.Path:
        (tmp_path / "acts.json").write_text(
            json.dumps({f"seed={seed}": act for seed, act in acts.items()})
        )
        return tmp_path

    return write


SEEDS = (CONFIG, "--grid=seed=0,1,2", "--workdir=W")


def started(folder) -> list[str]:
    return (folder / "started").read_text().split()


def test_a_failed_run_does_not_stop_the_others(fake, finish):
    folder = fake({0: [1], 1: [0], 2: [2]})
    code, result, err = finish(*SEEDS, cwd=folder)
    assert code == 1 and started(folder) == ["seed=0", "seed=1", "seed=2"]
    assert (
        "3 of 3 runs failed: seed=0 (exit code 1, stopped: because); seed=1 (ended without an evaluation of step 20);"
        in error_of(err)
    )
    assert {run["state"] for run in result["runs"]} == {"failed"}


@pytest.mark.slow
def test_a_lost_run_is_started_again_and_not_for_ever(fake, finish):
    folder = fake({0: [76, -9, 1], 1: [-15] * 9, 2: [1]})
    code, _, err = finish(*SEEDS, cwd=folder)
    assert code == 1 and started(folder) == ["seed=0"] * 3 + ["seed=1"] * 4 + ["seed=2"]
    assert "seed=1 (signal SIGTERM)" in error_of(err) and "seed=0 (exit code 1" in error_of(err)


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_ends_the_sweep(fake, finish):
    for code in (75, 130):
        folder = fake({0: [1], 1: [code]})
        assert finish(*SEEDS, cwd=folder)[0] == code
        assert started(folder)[-2:] == ["seed=0", "seed=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_sweep_hands_on_that_it_is_to_stop_and_waits(fake, start, number, code):
    folder = fake({0: ["wait"]})
    process = start(*SEEDS, cwd=folder)
    while not (folder / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"told {number.name}\nsaved\n" in err and err.count("told") == 1
    assert started(folder) == ["seed=0"] and "the same command goes on" in err


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (signal.SIGTERM, 0, 75),
        (signal.SIGINT, 0, 130),  # the run had just ended: what a stopped one would say
        (signal.SIGTERM, 75, 75),
        (signal.SIGINT, 130, 130),
        (signal.SIGTERM, 1, 1),
        (signal.SIGTERM, -9, 137),
    ],
)
def test_a_stopped_sweep_says_that_it_was_stopped(monkeypatch, number, code, expected):
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    children = execute.ChildProcesses(lock=0)
    handlers[number](number, None)
    assert children.exit_code(code) == expected


@pytest.mark.slow
def test_a_run_that_outlives_its_sweep_keeps_others_away(fake, start, finish):
    folder = fake({0: ["wait"]})
    process = start(*SEEDS, cwd=folder)
    while not (folder / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # the sweep alone
    process.wait()
    code, _, err = finish(*SEEDS, cwd=folder)
    assert code == 2 and "a sweep, or a run of one, is at work there" in error_of(err)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


@pytest.mark.slow
def test_a_dry_run_prints_the_commands_and_leaves_nothing(finish, start, tmp_path):
    given = (
        "--config.optimizer.learning_rate=1e-4",
        "--config.data.tokenizer=my model",
        "--dry-run",
    )
    process = start(
        CONFIG, f"--workdir={tmp_path}/W", "--grid=seed=0,1", "--rope_percentage=0,0.50", *given
    )
    out, err = process.communicate()
    assert process.returncode == 0, err
    lines = out.splitlines()[:-1]
    assert len(lines) == 4 and not (tmp_path / "W").exists()
    assert lines[1] == (
        f"{sys.executable} -m prope.train {CONFIG} --config.optimizer.learning_rate=0.0001 "
        f"'--config.data.tokenizer=my model' --config.model.rope_percentage=0 --config.seed=1 "
        f"--workdir={tmp_path}/W/rope_percentage=0,seed=1"
    )
    assert json.loads(out.splitlines()[-1])["runs"][3]["values"] == {
        "rope_percentage": 0.5,
        "seed": 1,
    }


@pytest.mark.slow
def test_a_launcher_gets_every_run(finish, tmp_path):
    """With a program in sbatch's place, which says what it got: the runs are handed over, and not waited for."""
    (tmp_path / "sbatch").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$*" >>got\n')
    (tmp_path / "sbatch").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = ("--backend=slurm", "--", "--nodes=2", "--processes_per_node=node", "--exclusive")
    code, result, err = finish(*SEEDS, *given, cwd=tmp_path, **path)
    assert code == 0 and [run["state"] for run in result["runs"]] == ["submitted"] * 3, err
    lines = (tmp_path / "got").read_text().splitlines()
    names = [
        re.match(
            r"--job-name=(w-seed-\d-[0-9a-f]{8}) --dependency=singleton --nodes=2 --exclusive ",
            line,
        )[1]
        for line in lines
    ]
    assert len(set(names)) == 3
    script = f"{ROOT}/launch/slurm.sbatch --processes_per_node=node"
    assert lines[2].endswith(
        f"{script} -- python -m prope.train {CONFIG} --config.seed=2 --workdir=W/seed=2"
    )
    code, _, err = finish(*SEEDS, "--backend=sky", cwd=tmp_path)
    assert code == 2 and "--backend=sky: needs the program sky; install it" in error_of(err)
    code, _, err = finish(*SEEDS, "--", "--nodes=2", cwd=tmp_path)
    assert code == 2 and "--nodes=2: flags after -- are a launcher's" in error_of(err)
    code, _, err = finish(*SEEDS, "--backend=gke", "--", "--name=x", cwd=tmp_path)
    assert code == 2 and "--name=x: every run gets a name of its own" in error_of(err)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("tpu_vm", ["bash", f"{ROOT}/launch/tpu_vm.sh", "run", "--spot", "--"]),
        ("gke", ["bash", f"{ROOT}/launch/gke_jobset.sh", "--name=NAME", "--spot", "--"]),
    ],
)
def test_what_launchers_are_given(backend, expected):
    (run,) = plan([{"model.rope_percentage": [0.25]}], "file.py", default_config(), {})
    name = execute.job_name("W-rope_percentage=0.25")
    line = execute.run_command(backend, ["--spot"], pathlib.Path("/mnt/W"), run)
    train = [
        "--config=file.py",
        "--config.model.rope_percentage=0.25",
        "--workdir=/mnt/W/rope_percentage=0.25",
    ]
    assert line == [part.replace("NAME", name) for part in expected] + [
        "python",
        "-m",
        "prope.train",
        *train,
    ]
    assert len(execute.job_name("x" * 99)) == 40 and execute.job_name("x" * 99) != execute.job_name(
        "x" * 98
    )


def test_what_skypilot_is_given(monkeypatch):
    (run,) = plan(
        [{"model.rope_percentage": [0.25]}],
        "file.py",
        default_config(),
        {"data.tokenizer": "my model"},
    )
    monkeypatch.setenv("PROPE_COMMIT", "abc")
    line = execute.run_command(
        "sky", ["--gpus=H100:8", "--env=PLATFORM=gpu"], epath.Path("gs://B/W"), run
    )
    name = execute.job_name("W-rope_percentage=0.25")
    assert line[:5] == ["sky", "jobs", "launch", "--yes", f"--name={name}"]
    assert line[5:8] == ["--detach-run", "--gpus=H100:8", "--env=PLATFORM=gpu"]
    command = (
        "--config=file.py '--config.data.tokenizer=my model' --config.model.rope_percentage=0.25"
    )
    command = f"python -m prope.train {command} --workdir=gs://B/W/rope_percentage=0.25"
    assert line[8:] == [
        f"--env=COMMAND={command}",
        "--env=PROPE_COMMIT=abc",
        f"{ROOT}/launch/sky.yaml",
    ]
    assert "--detach-run" not in execute.run_command("sky", ["--wait"], epath.Path("gs://B/W"), run)


# What stands for SkyPilot: a queue of jobs, which never end.
SKY = """#!/usr/bin/env python3
import json, pathlib, sys
queue = pathlib.Path("queue")
if sys.argv[2] == "queue":
    print(json.dumps([{"job_id": 1, "job_name": name} for name in queue.read_text().split()] if queue.exists() else []))
else:
    with queue.open("a") as file:
        print(*[a.removeprefix("--name=") for a in sys.argv if a.startswith("--name=")], file=file)
"""


@pytest.mark.slow
def test_a_job_in_skypilots_queue_is_not_handed_out_again(finish, tmp_path, bucket):
    (tmp_path / "sky").write_text(SKY)
    (tmp_path / "sky").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = (CONFIG, "--grid=seed=0,1,2", f"--workdir={bucket}/W", "--backend=sky")
    for _ in range(2):
        code, result, err = finish(*given, cwd=tmp_path, **path)
        assert code == 0 and [run["state"] for run in result["runs"]] == ["submitted"] * 3, err
        assert len((tmp_path / "queue").read_text().split()) == 3
    assert err.count("is in SkyPilot's queue already") == 3
    assert len(read_json(epath.Path(bucket) / "W" / "sweep.json")["runs"]) == 3


# What stands for gcloud: workers that print what a run ends with, and keep its files to themselves.
TPU_VM = """#!/usr/bin/env python3
import json, re, sys
(command,) = [a for a in sys.argv if a.startswith("--command=")] or [""]
if "running" in command:
    print("exit 0")
elif command.endswith("prope_run/out"):
    print(json.dumps({"step": 20, "loss": 1.0, "eval_loss": 2.0, "perplexity": 7.4, "bits_per_byte": 2.9,
                      "init_hash": "aa"}))
elif "launch/run.sh" in command:
    print(re.search(r"--workdir=\\S+", command)[0], file=open("started", "a"))
"""


@pytest.mark.slow
def test_folders_of_other_machines_are_not_made_here(finish, tmp_path):
    (tmp_path / "gcloud").write_text(TPU_VM)
    (tmp_path / "gcloud").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PROPE_CACHE": str(tmp_path / "cache"),
    }
    workdir = tmp_path / "mounted_there/W"
    flags = ("--name=a", "--type=v5p-8", "--poll=1")
    given = (CONFIG, "--grid=seed=0,1", f"--workdir={workdir}", "--backend=tpu_vm", "--", *flags)
    code, result, err = finish(*given, cwd=tmp_path, **environment)
    assert code == 0 and [run["state"] for run in result["runs"]] == ["finished"] * 2, err
    assert not workdir.parent.exists()
    assert (tmp_path / "started").read_text().split() == [
        f"--workdir={workdir}/seed={seed}" for seed in (0, 1)
    ]
    (state,) = (tmp_path / "cache/sweeps").iterdir()
    assert re.fullmatch("W-[0-9a-f]{8}", state.name) and read_json(state / "sweep.json")[
        "grids"
    ] == [{"seed": [0, 1]}]
    code, again, err = finish(*given, cwd=tmp_path, **environment)  # what has ended is known
    assert (code, again) == (0, result), err
    assert len((tmp_path / "started").read_text().split()) == 2 and not workdir.parent.exists()


def test_a_run_that_leaves_no_files_here_is_known_by_what_it_printed(tmp_path):
    (run,) = plan([{"model.rope_percentage": [0.25]}], "file.py", default_config(), {})
    made = execute.Sweep(tmp_path, [run])
    assert made.read(run).state == "new"
    printed = {
        "step": 1000,
        "loss": 1.0,
        "eval_loss": 2.0,
        "perplexity": 7.4,
        "bits_per_byte": 2.9,
        "init_hash": "aa",
    }
    made.printed[run.name] = printed
    record = made.read(run).record()
    assert record["state"] == "finished" and printed.items() <= record.items()


@pytest.mark.slow
def test_what_a_config_refuses_is_found_before_the_first_run(finish, tmp_path):
    code, _, err = finish(CONFIG, "--rope_percentage=0,0.5,1.5", f"--workdir={tmp_path}/W")
    assert code == 2 and "model.rope_percentage=1.5: must be a fraction" in error_of(err)
    code, _, err = finish(CONFIG, f"--workdir={tmp_path}/W")
    assert code == 2 and "has no get_sweep(), so say what to sweep" in error_of(err)
    code, _, err = finish(
        CONFIG, "--rope_percentage=0", "--config.model.rope_percentage=1", f"--workdir={tmp_path}/W"
    )
    assert code == 2 and "model.rope_percentage is swept" in error_of(err)
    assert not (tmp_path / "W").exists()
