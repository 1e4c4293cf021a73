"""A sweep as a user runs it: what it leaves, what it proves, and that kills change nothing."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from etils import epath
from support.commands import CONFIG, ROOT, logged, losses, refusal
from support.text import read_lines

from prope.config import default_config, from_dict
from prope.sweep import execute, runs
from prope.sweep.grid import plan
from prope.sweep.runs import read_run

PERCENTAGES = ("0", "0.5", "1")
EVERY_STEP = ("--config.log_every=1", "--config.checkpoint_every=5")
THREE = (CONFIG, "--rope_percentage=0,0.5,1", *EVERY_STEP)


@pytest.fixture(scope="session")
def start(cache_dir):
    """Starts launch/sweep.py in a process group of its own."""

    def run(*arguments, cwd=ROOT, **environment) -> subprocess.Popen:
        ours = {"PROPE_CACHE": str(cache_dir), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch" / "sweep.py"), *map(str, arguments)],
            cwd=cwd,
            env=os.environ | ours | environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

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
def dry_run(start):
    """The commands that it prints, as words, and their result."""

    def run(*arguments) -> tuple[list[list[str]], dict]:
        process = start(*arguments, "--dry-run")
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        *lines, last = out.splitlines()
        return [shlex.split(line) for line in lines], json.loads(last)

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


def run_of(directory, p: str) -> pathlib.Path:
    return directory / f"rope_percentage={p}"


def error_of(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith(("error:", "stopped:"))]
    assert "Traceback" not in err and lines and err.splitlines()[-1] == lines[-1], err
    return lines[-1]


@pytest.mark.slow
def test_runs_of_a_sweep_differ_in_p_and_in_nothing_else(whole):
    directory, result = whole
    hashes = logged(run_of(directory, "0"), "batch_hash")
    configs = []
    for p, record in zip(PERCENTAGES, result["runs"], strict=True):
        run = run_of(directory, p)
        assert record["workdir"] == str(run)
        assert record["values"] == {"rope_percentage": float(p)}
        assert (record["state"], record["step"]) == ("finished", 20)
        assert record["init_hash"] and record["init_hash"] == result["runs"][0]["init_hash"]
        assert logged(run, "batch_hash") == hashes and len(hashes) == 20
        last = read_lines(run / "eval.jsonl")[-1]
        assert (record["eval_loss"], record["perplexity"]) == (last["loss"], last["perplexity"])
        assert record["loss"] == losses(run)[20]
        of_first = losses(run_of(directory, "0"))
        assert p == "0" or all(loss != of_first[step] for step, loss in losses(run).items())
        configs.append(json.loads((run / "config.json").read_text()))
        assert configs[-1]["model"].pop("rope_percentage") == float(p)
    assert all(config == configs[0] for config in configs)
    assert result["equal"] == {"init": 3, "batches": 3, "steps": 20}


def wait_until(there, process) -> None:
    """Waits for a file or folder that a process makes."""
    deadline = time.monotonic() + 300
    while not there.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_twice_a_sweep_ends_as_an_undisturbed_one(whole, start, finish, tmp_path):
    directory, result = whole
    for p in ("0", "0.5"):
        process = start(*THREE, f"--workdir={tmp_path}")
        run = run_of(tmp_path, p)
        wait_until(run / "checkpoints" / "5", process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        # What no kill can be timed to do: a line that was cut short.
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 19, "loss": 0.0, "batch_hash": "')
    code, again, err = finish(*THREE, f"--workdir={tmp_path}")
    assert code == 0, err
    assert re.search(r"rope_percentage=0: finished\n.*=0.5: resumes at step (5|10|15)\n", err)
    assert err.count(": starts\n") == 2 and err.count("resumed from step") == 1
    assert (again["table"], again["equal"]) == (result["table"], result["equal"])
    for p in PERCENTAGES:
        assert losses(run_of(tmp_path, p)) == losses(run_of(directory, p))


@pytest.mark.slow
def test_a_sweep_in_a_bucket_is_the_one_on_disk(whole, finish, run_command, bucket):
    _, result = whole
    workdir = epath.Path(bucket) / "sweep"
    one = (CONFIG, "--rope_percentage=1", *EVERY_STEP, f"--workdir={workdir}")
    code, remote, err = finish(*one)
    assert code == 0, err
    assert remote["table"] == [result["table"][2]]
    assert [run["workdir"] for run in remote["runs"]] == [str(run_of(workdir, "1"))]
    code, again, err = finish(*one)
    assert (code, again) == (0, remote) and "starts" not in err
    report = run_command("prope.report", f"--sweep={workdir}")
    assert report.code == 0, report.stderr
    assert report.result["output"] == f"{workdir}/report/index.html"
    assert "</html>" in epath.Path(report.result["output"]).read_text()


@pytest.mark.slow
def test_a_finished_sweep_is_not_made_again_and_may_grow(whole, finish):
    directory, result = whole
    code, again, err = finish(*THREE, f"--workdir={directory}")
    assert (code, again) == (0, result) and "starts" not in err
    six = (CONFIG, "--rope_percentage=0,0.1,0.25,0.5,0.75,1", *EVERY_STEP)
    code, grown, err = finish(*six, f"--workdir={directory}", "--dry-run")
    assert code == 0 and "rope_percentage=0.1: new" in err
    assert [run["state"] for run in grown["runs"]].count("finished") == 3


@pytest.mark.slow
def test_a_directory_of_another_sweep_is_refused(whole):
    directory, _ = whole
    three = [{"model.rope_percentage": [0.0, 0.5, 1.0]}]
    two = [{"model.rope_percentage": [0.0, 1.0]}]
    base = from_dict(json.loads((directory / "sweep.json").read_text())["config"])
    other = base.copy_and_resolve_references()
    other.batch_size = 16

    def check(grids, config):
        execute.check_same_sweep(directory, plan(grids, "", config, {}), grids, config)

    check(three, base)
    assert "rope_percentage=0.5" in refusal(lambda: check(two, base))
    assert "batch_size: 8, not 16" in refusal(lambda: check(three, other))
    of_a_run = run_of(directory, "0")
    line = refusal(lambda: execute.check_same_sweep(of_a_run, [], three, base))
    assert f"--workdir={of_a_run}" in line
    planned = plan(three, "", base, {})
    line = refusal(lambda: execute.check_same_sweep(directory, planned, three, base, "W"))
    assert "--init_from=W" in line
    run = plan(three, "", other, {})[0]
    line = refusal(lambda: read_run(directory / run.name, run.values, run.spec))
    assert run.name in line and "batch_size: 8, not 16" in line


# In the place of prope.train: it says that it has started, then ends as the test says.
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
        print("cores", *os.sched_getaffinity(0), file=sys.stderr, flush=True)
        time.sleep(0.3)
        print("saved", file=sys.stderr, flush=True)
        sys.exit({signal.SIGTERM: 75, signal.SIGINT: 130}[number])
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    open("waiting", "w").close()
    open(f"waiting {name}", "w").close()
    time.sleep(60)
elif act < 0:
    os.kill(os.getpid(), -act)
else:
    print("stopped: because", file=sys.stderr)
sys.exit(act)
"""


@pytest.fixture
def fake(tmp_path):
    """A folder in which prope.train is that program; it is given the acts of every seed."""
    (tmp_path / "prope").mkdir()
    (tmp_path / "prope" / "__init__.py").touch()
    (tmp_path / "prope" / "train.py").write_text(FAKE)

    def write(acts: dict) -> pathlib.Path:
        by_name = {f"seed={seed}": act for seed, act in acts.items()}
        (tmp_path / "acts.json").write_text(json.dumps(by_name))
        return tmp_path

    return write


SEEDS = (CONFIG, "--grid=seed=0,1,2", "--workdir=W")


def started(folder) -> list[str]:
    return (folder / "started").read_text().split()


def test_a_failed_run_does_not_stop_the_others(fake, finish):
    folder = fake({0: [1], 1: [0], 2: [2]})
    code, result, err = finish(*SEEDS, cwd=folder)
    assert code == 1 and started(folder) == ["seed=0", "seed=1", "seed=2"]
    reasons = re.findall(r"(seed=.) \((.*?)\)", error_of(err))
    assert [name for name, _ in reasons] == ["seed=0", "seed=1", "seed=2"]
    assert "because" in reasons[0][1] and "step 20" in reasons[1][1]
    assert {run["state"] for run in result["runs"]} == {"failed"}


@pytest.mark.slow
def test_a_lost_run_is_started_again_and_not_for_ever(fake, finish):
    folder = fake({0: [76, -9, 1], 1: [-15] * 9, 2: [1]})
    code, _, err = finish(*SEEDS, cwd=folder)
    assert code == 1 and started(folder) == ["seed=0"] * 3 + ["seed=1"] * 4 + ["seed=2"]
    assert "seed=1 (signal SIGTERM)" in error_of(err) and "seed=0 (exit code 1" in error_of(err)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_sweep_hands_on_that_it_is_to_stop_and_waits(fake, start, number, code):
    folder = fake({0: ["wait"]})
    process = start(*SEEDS, cwd=folder)
    wait_until(folder / "waiting", process)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert re.search(rf"told {number.name}\ncores .*\nsaved\n", err) and err.count("told") == 1
    assert started(folder) == ["seed=0"] and "the same command goes on" in err


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (signal.SIGTERM, 0, 75),
        (signal.SIGINT, 0, 130),  # the run had just ended: what a stopped one would say
        (signal.SIGTERM, 1, 1),
        (signal.SIGTERM, -9, 137),
    ],
)
def test_a_stopped_sweep_says_that_it_was_stopped(monkeypatch, number, code, expected):
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    children = execute.ChildProcesses()
    handlers[number](number, None)
    assert children.exit_code(code) == expected


# --- Several at a time ----------------------------------------------------------------------------

NVIDIA = [pathlib.Path(f"/dev/nvidia{name}") for name in (0, 1, 2, "ctl", "-uvm")]


@pytest.mark.parametrize(
    ("jobs", "found", "visible", "cores", "shares"),
    [
        (1, NVIDIA, None, [0, 1], [("", ())]),
        (2, [], None, [0, 1], [("", [0]), ("", [1])]),
        (2, [], "0,1,2", [2, 3, 6, 7, 9], [("", [2, 3]), ("", [6, 7])]),
        (3, NVIDIA, None, [0], [("0", ()), ("1", ()), ("2", ())]),
        (2, NVIDIA, "3,MIG-a,5,6", [0], [("3,MIG-a", ()), ("5,6", ())]),
        (2, NVIDIA, "", [0, 1], [("", [0]), ("", [1])]),
        (3, [], None, [0, 1], "--jobs=3: there are 2 cores here for them; give fewer"),
        (4, NVIDIA, None, [0] * 9, "--jobs=4: there are 3 GPUs here for them; give fewer"),
        (2, NVIDIA, "1", [0, 1], "--jobs=2: there are 1 GPUs"),
        (2, [pathlib.Path("/dev/accel0")], None, [0, 1], "/dev/accel0 cannot be divided"),
    ],
)
def test_a_machine_is_divided(jobs, found, visible, cores, shares, monkeypatch):
    monkeypatch.setattr(execute, "accelerators", lambda: found)
    monkeypatch.setattr(execute, "list_cores", lambda: cores)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(shares, str):
        assert shares in refusal(lambda: execute.split_machine(jobs))
    else:
        assert execute.split_machine(jobs) == shares


two_cores = pytest.mark.skipif(len(execute.list_cores()) < 2, reason="needs two cores")


@two_cores
def test_a_run_that_fails_leaves_those_beside_it(fake, finish):
    folder = fake({0: [1], 1: [0], 2: [76, 2]})
    code, result, err = finish(*SEEDS, "--jobs=2", cwd=folder, JAX_PLATFORMS="cpu")
    assert code == 1 and sorted(started(folder)) == ["seed=0", "seed=1", "seed=2", "seed=2"]
    failed = [name for name, _ in re.findall(r"(seed=.) \((.*?)\)", error_of(err))]
    assert sorted(failed) == ["seed=0", "seed=1", "seed=2"]
    assert {run["state"] for run in result["runs"]} == {"failed"}
    assert err.count("seed=0: stopped: because\n") == 1  # lines of one run are told from others
    code, _, err = finish(*SEEDS, "--jobs=2", "--launcher=true", cwd=folder, JAX_PLATFORMS="cpu")
    assert code == 2 and "--jobs=2: the runs of a launcher are not here" in error_of(err)


@two_cores
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_all_runs_at_work_are_told_to_stop(fake, start, number, code):
    folder = fake({0: ["wait"], 1: ["wait"]})
    process = start(*SEEDS, "--jobs=2", cwd=folder, JAX_PLATFORMS="cpu")
    for name in ("seed=0", "seed=1"):
        wait_until(folder / f"waiting {name}", process)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and sorted(started(folder)) == ["seed=0", "seed=1"]
    cores = []
    for name in ("seed=0", "seed=1"):
        assert err.count(f"{name}: told {number.name}\n") == err.count(f"{name}: saved\n") == 1
        cores.append(set(re.search(rf"{name}: cores (.*)", err)[1].split()))
    assert cores[0] and cores[1] and not cores[0] & cores[1]


@pytest.mark.slow
def test_a_run_that_outlives_its_sweep_keeps_others_away(fake, start, finish):
    folder = fake({0: ["wait"]})
    process = start(*SEEDS, cwd=folder)
    wait_until(folder / "waiting", process)
    os.kill(process.pid, signal.SIGKILL)  # the sweep alone
    process.wait()
    code, _, err = finish(*SEEDS, cwd=folder)
    assert code == 2 and "a sweep, or a run of one, is at work there" in error_of(err)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()


@pytest.mark.slow
def test_a_dry_run_prints_the_commands_and_leaves_nothing(dry_run, tmp_path):
    values = ("--config.optimizer.learning_rate=1e-4", "--config.data.tokenizer=my model")
    grids = ("--grid=seed=0,1", "--rope_percentage=0,0.50")
    commands, result = dry_run(CONFIG, f"--workdir={tmp_path}/W", *grids, *values)
    assert len(commands) == 4 and not (tmp_path / "W").exists()
    assert commands[1] == [
        *(sys.executable, "-m", "prope.train", CONFIG, "--config.optimizer.learning_rate=0.0001"),
        *(values[1], "--config.model.rope_percentage=0", "--config.seed=1"),
        f"--workdir={tmp_path}/W/rope_percentage=0,seed=1",
    ]
    assert result["runs"][3]["values"] == {"rope_percentage": 0.5, "seed": 1}


def test_a_saved_config_is_swept_and_may_be_a_value_of_a_grid(dry_run, finish, trained, tmp_path):
    file = f"--config={trained[0]}/config.json"
    workdir = f"--workdir={tmp_path}/W"
    ((*_, first, _, last),), _ = dry_run(file, workdir, "--grid=seed=0")
    assert (first, last) == (file, f"{workdir}/seed=0")
    ((*_, first, last),), _ = dry_run(CONFIG, workdir, f"--grid={file.removeprefix('--')}")
    assert (first, last) == (file, f"{workdir}/config={trained[0].name}")
    code, _, err = finish(file, workdir, "--dry-run")
    assert code == 2 and file in error_of(err), "it has no grid"


# A program that launches: it writes down its arguments and ends with LAUNCHER_CODE.
QUEUE = """#!/usr/bin/env python3
import json, os, sys
with open("queue.jsonl", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
sys.exit(int(os.environ.get("LAUNCHER_CODE", 0)))
"""
VALUES = ('--config.data.tokenizer=it\'s "my" $HOME {name}', "--config.profile=10,12")


@pytest.fixture
def queue(tmp_path):
    """Puts the program into a folder: (the folder, a function that returns what it was handed)."""
    (tmp_path / "queue").write_text(QUEUE)
    (tmp_path / "queue").chmod(0o755)

    def read() -> list[list[str]]:
        return [json.loads(line) for line in (tmp_path / "queue.jsonl").read_text().splitlines()]

    return tmp_path, read


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["./queue '--for={name} of us' --", "bash -c './queue \"--for={name} of us\" -- {command}'"],
    ids=["words that follow", "a text within a word"],
)
def test_a_launcher_gets_every_run_once(launcher, queue, finish):
    folder, handed_out = queue
    arguments = (*SEEDS, *VALUES, f"--launcher={launcher}")
    code, result, err = finish(*arguments, cwd=folder)
    assert code == 0, err
    assert [run["state"] for run in result["runs"]] == ["submitted"] * 3
    assert len({words[0] for words in handed_out()}) == 3
    for seed, words in enumerate(handed_out()):
        assert re.fullmatch(rf"--for=w-seed-{seed}-[0-9a-f]{{8}} of us", words[0])
        assert words[1:] == [
            *("--", "python", "-m", "prope.train", CONFIG, VALUES[0], "--config.profile=(10, 12)"),
            *(f"--config.seed={seed}", f"--workdir=W/seed={seed}"),
        ]
    record = folder / "W/launched/seed=1"
    code, again, err = finish(*arguments, cwd=folder)
    assert (code, again) == (0, result) and len(handed_out()) == 3
    assert re.search(rf"seed=1: .*{record.read_text().strip()}.* remove W/launched/seed=1", err)
    record.unlink()
    assert finish(*arguments, cwd=folder)[:2] == (0, result)
    assert len(handed_out()) == 4 and handed_out()[3] == handed_out()[1]


@pytest.mark.slow
def test_a_launcher_that_fails_is_asked_again(queue, finish, bucket):
    folder, handed_out = queue
    arguments = (CONFIG, "--grid=seed=0", f"--workdir={bucket}/W", "--launcher=./queue")
    # Each start with the launcher's exit code, the run's state then, and how often it was asked.
    for code, state, asked in (("3", "failed", 1), ("0", "submitted", 2), ("0", "submitted", 2)):
        _, result, err = finish(*arguments, cwd=folder, LAUNCHER_CODE=code)
        assert result["runs"][0]["state"] == state and len(handed_out()) == asked
        assert state == "submitted" or "seed=0 (exit code 3)" in error_of(err)


class ListedCodes:
    """Stands for child processes, which end with the codes of a list; a str is a signal to us."""

    def __init__(self, codes):
        self.codes = list(codes)
        self.commands = []
        self.stop_signal = None

    def run(self, command, share, prefix):
        self.commands.append(command)
        code = self.codes.pop(0)
        if isinstance(code, str):
            self.stop_signal = signal.SIGTERM
            code = int(code)
        return code, ""

    exit_code = execute.ChildProcesses.exit_code


@pytest.mark.parametrize(
    ("codes", "state", "recorded"),
    [
        ([0], "submitted", True),
        ([1], "failed", False),
        ([76, 0], "submitted", True),
        ([76, 76, 76, 76], "failed", False),
        ([-9], "failed", True),  # what it launched may go on
        ([75], None, False),
        ([130], None, False),
        (["1"], None, True),
    ],
)
def test_what_a_launcher_that_ends_has_done(codes, state, recorded, tmp_path):
    (run,) = plan([{"seed": [0]}], "file.py", default_config(), {})
    sweep = execute.Sweep(epath.Path(tmp_path), [run], ["queue"])
    processes = ListedCodes(codes)
    if state is None:
        with pytest.raises(SystemExit):
            sweep.execute(processes)
    else:
        sweep.execute(processes)
        assert sweep.result()["runs"][0]["state"] == state
    assert not processes.codes and len(processes.commands) == len(codes)
    assert (tmp_path / "launched/seed=0").exists() == recorded


class Killed(BaseException):
    """The sweep's own process is killed."""


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ([-9] * 4, "signal SIGKILL"),
        ([76] * 4, "exit code 76"),
        ([2], "exit code 2"),
        ([0], "ended without an evaluation of step 1000"),
        ([Killed()], "was started, and has not ended"),
        (["75"], "was started, and has not ended"),
    ],
)
def test_a_run_that_has_no_files_is_told_with_why_it_failed(codes, reason, tmp_path):
    """In the sweep's file and JSON, and by the report, also after the sweep was begun again."""
    config = default_config()
    grids = [{"seed": [0, 1]}]
    first, other = plan(grids, "file.py", config, {})

    class Children(ListedCodes):
        def run(self, *arguments):
            if isinstance(self.codes[0], Killed):
                raise self.codes[0]
            return super().run(*arguments)

    path = epath.Path(tmp_path)
    sweep = execute.Sweep(path, [first, other], [])
    sweep.record = {"config": config.to_dict(), "init_from": None}
    with contextlib.suppress(Killed, SystemExit):
        sweep.execute(Children([*codes, 1]))
    told = execute.check_same_sweep(path, [first, other], grids, config)
    assert told["seed=0"] == reason
    entries = runs.unfinished_entries(path, [])
    assert [entry["reason"] for entry in entries] == [reason, told.get("seed=1")]
    assert reason in refusal(lambda: runs.read_sweep(path))
    by_name = dict(zip(("seed=0", "seed=1"), sweep.result()["runs"], strict=True))
    assert {name: run["reason"] for name, run in by_name.items()} == {
        name: told.get(name) for name in by_name
    }


@pytest.mark.parametrize("launcher", ["", "  ", "sbatch 'x", "no-such-program"])
def test_a_launcher_that_cannot_be_used_is_refused_first(launcher, tmp_path):
    arguments = (f"{tmp_path}/W", "", default_config(), {}, [{"seed": [0]}], launcher)
    assert f"--launcher={launcher}: " in refusal(lambda: execute.run_sweep(*arguments))
    assert not list(tmp_path.iterdir())


def test_a_job_has_a_short_name_of_its_own():
    names = {execute.job_name(text) for text in ("x" * 98, "x" * 99, "2026-W", "ü", "-" * 40 + "x")}
    assert len(names) == 5
    assert all(re.fullmatch("[a-z][-a-z0-9]{0,38}[a-z0-9]", name) for name in names)
