"""The commands that read a run, in two real processes of two devices each: as one process with one device."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import CONFIG, ROOT, finish
from etils import epath
from makers import WIDE, free_port, line_of
from makers import compare_analyses as difference

from prope.runtime.files import upload

pytestmark = pytest.mark.slow

SPEED = ("tokens_per_second", "seconds", "device", "workdir", "output")  # of no two runs equal


@pytest.fixture
def start_pod(start_command):
    """Starts two processes of a command with two devices each; a list of arguments is one for each."""

    def start(module, *arguments, **environment):
        pod = {
            "PROPE_PROCESSES": "2",
            "PROPE_COORDINATOR": f"127.0.0.1:{free_port()}",
        } | environment
        own = [[a[i] if isinstance(a, list) else a for a in arguments] for i in range(2)]
        return [
            start_command(module, *own[i], devices=2, PROPE_PROCESS=str(i), **pod) for i in range(2)
        ]

    return start


def run_script(script) -> list[tuple[int, list[bytes]]]:
    """Exit codes and output of two processes of a Python script, for what no command does."""
    pod = {
        "PYTHONPATH": str(ROOT),
        "PROPE_PROCESSES": "2",
        "PROPE_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | pod | {"PROPE_PROCESS": str(i)},
            stdout=-1,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[0].splitlines() for process in started]
    return [(process.returncode, lines) for process, lines in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def wide(once, train):
    """A run whose parameters are wide enough to be split over devices."""

    def make(directory):
        outcome = train(directory / "run", *WIDE, "--stop_at_step=4", "--config.checkpoint_every=2")
        assert outcome.code == 0, outcome.stderr

    return once("wide", make)[0] / "run"


@pytest.fixture
def twice(wide, tmp_path):
    """Two copies of that run: for one process, and for two."""
    return [shutil.copytree(wide, tmp_path / name / "run") for name in ("one", "two")]


def run_both(run_command, start_pod, module, twice, *arguments) -> tuple[dict, dict]:
    """What a command prints of the run in one process, and in two, of which the second prints nothing."""
    one = run_command(module, f"--workdir={twice[0]}", *arguments)
    assert one.code == 0, one.stderr
    first, second = map(finish, start_pod(module, f"--workdir={twice[1]}", *arguments))
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert second.result is None
    assert "process 0 of 2" in first.stderr and "with 2 of 4 devices" in first.stderr
    return one.result, first.result


def assert_same(one, two, where="") -> None:
    """Equal but for rounding, 1e-6, and for what SPEED names."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for name in one:
            if not name.endswith(SPEED):
                assert_same(one[name], two[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for number, pair in enumerate(zip(one, two, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=1e-6, abs=1e-6), where
    else:
        assert one == two, where


def test_evaluate(run_command, start_pod, twice):
    arguments = ("--step=all", "--seq_len=1x,2x", "--max_tokens=1280")
    one, two = run_both(run_command, start_pod, "prope.evaluate", twice, *arguments)
    assert len(one["evaluations"]) == 4
    assert_same(one, two)
    records = [
        [json.loads(line) for line in (w / "eval.jsonl").read_text().splitlines()] for w in twice
    ]
    assert len(records[1]) == len(records[0]), "only the first one writes"
    assert_same(*records)
    again = [
        finish(command)
        for command in start_pod("prope.evaluate", f"--workdir={twice[1]}", *arguments)
    ]
    assert "is in eval.jsonl" in again[0].stderr and again[0].result["loss"] == two["loss"]


def test_evaluate_and_export_in_a_bucket(run_command, start_pod, wide, bucket, tmp_path):
    upload(epath.Path(wide), epath.Path(bucket) / "run")
    one = run_command("prope.evaluate", f"--workdir={shutil.copytree(wide, tmp_path / 'run')}")
    first, second = map(finish, start_pod("prope.evaluate", f"--workdir={bucket}/run"))
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert_same(one.result, first.result)
    read, lines = [
        (place / "eval.jsonl").read_text()
        for place in (tmp_path / "run", epath.Path(bucket) / "run")
    ]
    assert len(lines.splitlines()) == len(read.splitlines())
    exported = run_command(
        "prope.export_hf", f"--workdir={tmp_path}/run", f"--output={tmp_path}/hf"
    )
    pod = start_pod("prope.export_hf", f"--workdir={bucket}/run", f"--output={bucket}/hf")
    assert [exported.code, *(finish(command).code for command in pod)] == [0, 0, 0]
    for path in (tmp_path / "hf").iterdir():
        assert (epath.Path(bucket) / "hf" / path.name).read_bytes() == path.read_bytes()


def test_sample(run_command, start_pod, twice, tmp_path):
    (tmp_path / "prompts").write_text("Return\nA list of\ndef\n")
    one = run_command(
        "prope.sample", f"--workdir={twice[0]}", f"--prompts={tmp_path}/prompts", "--length=30"
    )
    files = [f"--prompts={tmp_path}/prompts", "--prompts=/only/the/first/process/reads/it"]
    first, second = map(
        finish, start_pod("prope.sample", f"--workdir={twice[1]}", files, "--length=30")
    )
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert len(one.result["texts"]) == 3 and second.result is None
    assert_same(one.result, first.result)


def test_analyze(run_command, start_pod, twice, tmp_path):
    arguments = ("--sequences=3", "--seq_len=48", "--channels=2")
    one, two = run_both(run_command, start_pod, "prope.analyze", twice, *arguments)
    assert difference(one, two) < 1e-5
    assert (
        difference(*(json.loads((w / "analysis" / "analysis.json").read_text()) for w in twice))
        < 1e-5
    )


def test_the_first_process_alone_writes_an_analysis(twice):
    """It also reads the text alone."""
    script = (
        "import json, os, sys, types; sys.path.insert(0, 'tests')\n"
        "from etils import epath; from prope.runtime import processes as p; from prope.analysis import analysis\n"
        f"written, workdir = set(), {str(twice[1])!r}\n"
        "def note(event, found):\n"
        "    if event == 'open' and str(found[0]).startswith(workdir) and set(found[1] or '') & set('wax+'):\n"
        "        written.add(os.path.basename(str(found[0])))\n"
        "sys.addaudithook(note)\n"
        "text = 'README.md' if os.environ['PROPE_PROCESS'] == '0' else '/only/the/first/reads/it'\n"
        "with p.joined():\n"
        "    from makers import analysis_options as asked\n"
        "    made = analysis.analyse_all(epath.Path(workdir), asked(text=text, seq_len=40, channels=1))\n"
        "print(json.dumps([sorted(written), made]))"
    )
    (first, wrote), (second, wrote_too) = (
        (code, json.loads(lines[-1])) for code, lines in run_script(script)
    )
    assert (first, second) == (0, 0) and wrote[1] == wrote_too[1]
    assert any("analysis.json" in name for name in wrote[0]) and any(
        "index.html" in name for name in wrote[0]
    )
    assert wrote_too[0] == []


def test_export(run_command, start_pod, twice):
    arguments = [f"--output={w.parent}/hf" for w in twice]
    one = run_command("prope.export_hf", f"--workdir={twice[0]}", arguments[0])
    first, second = map(finish, start_pod("prope.export_hf", f"--workdir={twice[1]}", arguments[1]))
    assert (one.code, first.code, second.code) == (0, 0, 0), (
        one.stderr + first.stderr + second.stderr
    )
    assert second.result is None
    assert_same(one.result, first.result)
    written = [
        {path.name: path.read_bytes() for path in (w.parent / "hf").iterdir()} for w in twice
    ]
    assert written[0] == written[1] and "model.safetensors" in written[0]


def test_bench(start_pod):
    first, second = map(finish, start_pod("prope.bench", CONFIG, "--steps=2"))
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    found = first.result
    assert second.result is None and found["devices"] == 4
    assert found["tokens_per_second"] == pytest.approx(8 * 64 / found["step_seconds"])
    rate = found["model_flops_per_token"] * found["tokens_per_second"]
    assert found["model_flops_per_second"] == pytest.approx(rate), "of all devices"
    first, second = map(finish, start_pod("prope.bench", "--rope", "--shape=1,64,2,64"))
    assert (first.code, second.code) == (0, 0) and first.result["prope"] and second.result is None


def test_waiting_for_the_first_process_outlasts_the_collectives_of_a_cpu():
    """Which fail after 30 s; an export or an analysis takes longer."""
    script = (
        "import time; from prope.runtime import processes as p\n"
        "with p.joined(): print(p.call_on_first(lambda: (time.sleep(35), p.count(), p.is_first())[1:]))"
    )
    said = [lines[-1] for _, lines in run_script(script)]
    assert said == [b"[1, True]"] * 2, "the function believed to be alone"


@pytest.mark.parametrize(
    "module", ["prope.evaluate", "prope.export_hf"]
)  # by all processes, and by the first
def test_an_error_of_one_process_ends_both_with_one_line(start_pod, wide, tmp_path, module):
    more = {"prope.sample": ["--prompt=a"], "prope.export_hf": [f"--output={tmp_path}/hf"]}.get(
        module, []
    )
    none = tmp_path / "none"
    for outcome in map(
        finish, start_pod(module, [f"--workdir={none}", f"--workdir={wide}"], *more)
    ):
        assert outcome.code == 2 and f"--workdir={none}: no run there" in line_of(outcome)
    for outcome in map(finish, start_pod(module, f"--workdir={wide}", "--step=3", *more)):
        assert (
            outcome.code == 2
            and "--step=3" in line_of(outcome)
            and "no such checkpoint" in line_of(outcome)
        )


def test_a_checkpoint_that_one_process_cannot_read_is_damaged_for_all():
    """So that all take an older one."""
    script = (
        "import os; from prope.runtime import processes as p; from prope.workdir.reader import Damaged\n"
        "with p.joined():\n"
        "    try:\n"
        "        with p.raise_on_all(Damaged):\n"
        "            if os.environ['PROPE_PROCESS'] == '1': raise Damaged('of one')\n"
        "    except Damaged as error: print(error)"
    )
    assert [lines[-1] for _, lines in run_script(script)] == [b"process 1: of one", b"of one"]


@pytest.mark.parametrize(
    "item", ["data", "params"]
)  # a file that every process checks; arrays, of which it has a part
def test_a_checkpoint_that_is_damaged_on_one_host_is_passed_over_by_both(start_pod, twice, item):
    """The second process reads a copy. One that took another step than the other would wait for it."""
    for path in (twice[1] / "checkpoints" / "4" / item).rglob("*"):
        if path.is_file() and (item == "data" or path.stat().st_size > 2**16):
            path.write_bytes(bytes(path.stat().st_size))
    first, second = map(
        finish, start_pod("prope.sample", [f"--workdir={w}" for w in twice], "--prompt=a")
    )
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert first.result["step"] == 2
    assert (
        "checkpoint 4 is damaged (" in first.stderr
        and f"checkpoint 4 is damaged ({item}" in second.stderr
    )


def test_the_first_process_leaves_last_after_an_error_that_all_know():
    """JAX's runtime ends the others where it leaves before they have read the error."""
    script = (
        "import os, time; from jax.experimental import multihost_utils as m; from prope.runtime import processes as p\n"
        "gather = m.process_allgather\n"
        "if os.environ['PROPE_PROCESS'] == '1': m.process_allgather = lambda x: (gather(x), time.sleep(2))[0]\n"
        "try:\n    with p.joined(), p.raise_on_all(): raise p.UsageError('of both')\n"
        "except p.UsageError: p.leave(2)"
    )
    assert [code for code, _ in run_script(script)] == [2, 2]


def test_a_host_that_does_not_see_the_run(start_pod, wide, tmp_path):
    for outcome in map(
        finish,
        start_pod("prope.sample", [f"--workdir={wide}", f"--workdir={tmp_path}"], "--prompt=a"),
    ):
        assert outcome.code == 2 and f"--workdir={tmp_path}: no run there" in line_of(outcome)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_is_killed_while_they_evaluate(start_pod, run_command, twice, killed):
    arguments = (f"--workdir={twice[1]}", "--batch_size=4", "--split=train")
    before = (twice[1] / "eval.jsonl").read_bytes()
    pod = start_pod("prope.evaluate", *arguments, PROPE_HEARTBEAT_TIMEOUT="10")
    pod[0].wait_for("evaluating step 4")
    time.sleep(random.uniform(0, 3))
    pod[killed].kill()
    start = time.monotonic()
    other = finish(pod[1 - killed])
    assert time.monotonic() - start < 60
    assert other.code == 76 and "another process of this run is gone" in line_of(other)
    assert (twice[1] / "eval.jsonl").read_bytes() == before, "nothing, or half of it, was written"
    done = run_command("prope.evaluate", *arguments, "--max_windows=8")
    assert done.code == 0, done.stderr


def test_a_pod_that_evaluates_ends_on_sigterm(start_pod, wide):
    """JAX's runtime takes the signal for itself when processes join."""
    pod = start_pod(
        "prope.evaluate",
        f"--workdir={wide}",
        "--batch_size=4",
        "--split=train",
        PROPE_HEARTBEAT_TIMEOUT="10",
    )
    pod[0].wait_for("evaluating step 4")
    pod[1].signal(signal.SIGTERM)
    first, second = map(finish, pod)
    assert (first.code, second.code) == (76, -signal.SIGTERM)
