"""Commands that read a run, in two real processes of two devices each, as in one process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from etils import epath
from support.commands import CONFIG, ROOT, finish
from support.heads import compare_analyses
from support.processes import QUICK, WIDE, line_of, pod_environments
from support.text import read_lines

from prope.runtime.files import upload

pytestmark = pytest.mark.slow

# Endings of names whose values differ between two runs.
SPEED = ("tokens_per_second']", "seconds']", "device']", "workdir']", "output']")


@pytest.fixture
def run_pod(start_pod):
    """Runs a command in both, which succeed and of which only the first prints: the outcomes."""

    def run(module, *arguments):
        first, second = [finish(command) for command in start_pod(module, *arguments)]
        assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
        assert second.result is None
        return first, second

    return run


@pytest.fixture
def refused_by_pod(start_pod):
    """Returns the line with which both processes refuse."""

    def refused(module, *arguments):
        lines = []
        for outcome in map(finish, start_pod(module, *arguments)):
            assert outcome.code == 2, outcome.stderr
            lines.append(line_of(outcome))
        return lines

    return refused


def run_script(script) -> list[tuple[int, list[bytes]]]:
    """Exit codes and output of two processes of a Python script, for what no command does."""
    started = []
    for pod in pod_environments():
        env = os.environ | {"PYTHONPATH": str(ROOT)} | pod
        command = [sys.executable, "-c", script]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in started]
    return [(process.returncode, lines) for process, lines in zip(started, outputs, strict=True)]


@pytest.fixture(scope="module")
def wide(train_once):
    """A run whose parameters are wide enough to be split over devices."""
    return train_once("wide", *WIDE, "--stop_at_step=4", "--config.checkpoint_every=2")[0]


@pytest.fixture
def twice(wide, tmp_path):
    """Two copies of that run: for one process, and for two."""
    return [shutil.copytree(wide, tmp_path / name / "run") for name in ("one", "two")]


@pytest.fixture
def run_both(run_command, run_pod, twice):
    """Runs a command on one copy in one process and on the other in two: the two results."""

    def run(module, *arguments) -> tuple[dict, dict]:
        one = run_command(module, f"--workdir={twice[0]}", *arguments)
        assert one.code == 0, one.stderr
        first, _ = run_pod(module, f"--workdir={twice[1]}", *arguments)
        assert "process 0 of 2" in first.stderr
        assert "with 2 of 4 devices" in first.stderr
        return one.result, first.result

    return run


def assert_same(one, two) -> None:
    """Equal but for rounding, 1e-6, and for what SPEED names."""
    found = []
    for result in (one, two):
        leaves = jax.tree_util.tree_leaves_with_path(result)
        values = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        found.append({name: values[name] for name in values if not name.endswith(SPEED)})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        is_rounded = isinstance(value, float)
        expected = pytest.approx(value, rel=1e-6, abs=1e-6) if is_rounded else value
        assert found[1][name] == expected, name


def read_records(workdir) -> list[dict]:
    return read_lines(workdir / "eval.jsonl")


def test_evaluate(run_both, run_pod, twice):
    arguments = ("--step=all", "--seq_len=1x,2x", "--max_tokens=1280")
    one, two = run_both("prope.evaluate", *arguments)
    assert len(one["evaluations"]) == 4
    assert_same(one, two)
    # Only the first process writes.
    assert_same(read_records(twice[0]), read_records(twice[1]))
    again, _ = run_pod("prope.evaluate", f"--workdir={twice[1]}", *arguments)
    assert "is in eval.jsonl" in again.stderr
    assert again.result["loss"] == two["loss"]


def test_evaluate_and_export_in_a_bucket(run_command, run_pod, wide, bucket, tmp_path):
    here = shutil.copytree(wide, tmp_path / "run")
    there = epath.Path(bucket)
    upload(epath.Path(wide), there / "run")
    one = run_command("prope.evaluate", f"--workdir={here}")
    first, _ = run_pod("prope.evaluate", f"--workdir={bucket}/run")
    assert_same(one.result, first.result)
    assert len(read_records(there / "run")) == len(read_records(here))
    output = f"--output={tmp_path}/hf"
    assert run_command("prope.export_hf", f"--workdir={here}", output).code == 0
    run_pod("prope.export_hf", f"--workdir={bucket}/run", f"--output={bucket}/hf")
    for path in (tmp_path / "hf").iterdir():
        assert (there / "hf" / path.name).read_bytes() == path.read_bytes()


def test_sample(run_command, run_pod, twice, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.write_text("Return\nA list of\ndef\n")
    arguments = (f"--prompts={prompts}", "--length=30")
    one = run_command("prope.sample", f"--workdir={twice[0]}", *arguments)
    files = [f"--prompts={prompts}", "--prompts=/only/the/first/process/reads/it"]
    first, _ = run_pod("prope.sample", f"--workdir={twice[1]}", files, "--length=30")
    assert len(one.result["texts"]) == 3
    assert_same(one.result, first.result)


def test_analyze(run_both, twice):
    arguments = ("--sequences=3", "--seq_len=48", "--channels=2")
    one, two = run_both("prope.analyze", *arguments)
    assert compare_analyses(one, two) < 1e-5
    saved = [json.loads((w / "analysis" / "analysis.json").read_text()) for w in twice]
    assert compare_analyses(*saved) < 1e-5


ANALYZE = """
import json, os, sys
sys.path.insert(0, "tests")
from etils import epath
from prope.analysis import analysis
from prope.runtime import processes

workdir = {workdir!r}
written = set()
def note(event, arguments):
    if event != "open":
        return
    path, mode, *_ = arguments
    if str(path).startswith(workdir) and set(mode or "") & set("wax+"):
        written.add(os.path.basename(str(path)))
sys.addaudithook(note)
first = os.environ["PROPE_PROCESSES"].startswith("0")
text = "README.md" if first else "/only/the/first/reads/it"
with processes.joined():
    from support.heads import analysis_options
    options = analysis_options(text=text, seq_len=40, channels=1)
    result = analysis.analyse_all(epath.Path(workdir), options)
print(json.dumps([sorted(written), result]))
"""


def test_the_first_process_alone_writes_an_analysis(twice):
    """It also reads the text alone."""
    outcomes = run_script(ANALYZE.format(workdir=str(twice[1])))
    assert [code for code, _ in outcomes] == [0, 0]
    (written, result), (written_too, result_too) = [json.loads(lines[-1]) for _, lines in outcomes]
    assert result == result_too
    assert any("analysis.json" in name for name in written)
    assert any("index.html" in name for name in written)
    assert written_too == []


def test_bench(run_pod):
    first, _ = run_pod("prope.bench", CONFIG, "--steps=2")
    result = first.result
    assert result["devices"] == 4
    assert result["tokens_per_second"] == pytest.approx(8 * 64 / result["step_seconds"])


AGREE = """
import json, os, time
from prope.runtime import processes
from prope.workdir.checkpoints import list_steps
from prope.workdir.reader import Damaged

process = os.environ["PROPE_PROCESSES"][0]
def wait():
    time.sleep(35)
    return processes.count(), processes.is_first()
with processes.joined():
    said = {name: list_steps(f"{folder}/{name}/{process}") for name in ("none", "two")}
    try:
        with processes.raise_on_all(Damaged):
            if process == "1":
                raise Damaged("of one")
    except Damaged as error:
        said["damaged"] = str(error)
    said["waited"] = processes.call_on_first(wait)
print(json.dumps(said))
"""
STEPS = {"none/0": [], "none/1": [5, 10, 7], "two/0": [10, 20], "two/1": [5, 10, 7]}


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """What two processes say of a few things that they agree on."""
    folder = tmp_path_factory.mktemp("agreed")
    for host, steps in STEPS.items():  # the second one's sees the directories as they were
        for step in steps:
            (folder / host / "checkpoints" / str(step)).mkdir(parents=True)
    outcomes = run_script(f"folder = {str(folder)!r}\n{AGREE}")
    return [json.loads(lines[-1]) for _, lines in outcomes]


def test_waiting_for_the_first_process_outlasts_the_collectives_of_a_cpu(agreed):
    """Collectives fail after 30 s; an export or an analysis takes longer."""
    for said in agreed:
        assert said["waited"] == [1, True], "the function believed to be alone"


def test_all_processes_take_the_list_of_checkpoints_of_the_first_one(agreed):
    for said in agreed:
        assert (said["none"], said["two"]) == ([], [10, 20])


def test_a_checkpoint_that_one_process_cannot_read_is_damaged_for_all(agreed):
    """So that all take an older one."""
    assert [said["damaged"] for said in agreed] == ["process 1: of one", "of one"]


# The first runs in all processes, the second in the first one.
@pytest.mark.parametrize("module", ["prope.evaluate", "prope.export_hf"])
def test_an_error_of_one_process_ends_both_with_one_line(refused_by_pod, wide, tmp_path, module):
    more = [f"--output={tmp_path}/hf"] if module == "prope.export_hf" else []
    none = tmp_path / "none"
    workdirs = [f"--workdir={none}", f"--workdir={wide}"]
    for line in refused_by_pod(module, workdirs, *more):
        assert f"--workdir={none}: no run there" in line
    for line in refused_by_pod(module, f"--workdir={wide}", "--step=3", *more):
        assert "--step=3" in line
        assert "no such checkpoint" in line


# Every process checks the files of params that hold its shards; the first reads data for all.
@pytest.mark.parametrize(("item", "step"), [("data", 4), ("params", 2)])
def test_a_checkpoint_that_is_damaged_on_one_host_is_passed_over_by_both(
    run_pod, twice, item, step
):
    """The second process reads a copy; with another step than the other it would wait for it."""
    for path in (twice[1] / "checkpoints" / "4" / item).rglob("*"):
        if path.is_file() and (item == "data" or path.stat().st_size > 2**16):
            path.write_bytes(bytes(path.stat().st_size))
    workdirs = [f"--workdir={workdir}" for workdir in twice]
    first, second = run_pod("prope.sample", workdirs, "--prompt=a")
    assert first.result["step"] == step
    if step == 2:
        assert "checkpoint 4 is damaged (" in first.stderr
        assert f"checkpoint 4 is damaged ({item}" in second.stderr


LEAVE = """
import os, time
from jax.experimental import multihost_utils
from prope.runtime import processes
gather = multihost_utils.process_allgather
def gather_late(array):
    gathered = gather(array)
    time.sleep(2)
    return gathered
if os.environ["PROPE_PROCESSES"].startswith("1"):
    multihost_utils.process_allgather = gather_late
try:
    with processes.joined(), processes.raise_on_all():
        raise processes.UsageError("of both")
except processes.UsageError:
    processes.leave(2)
"""


def test_the_first_process_leaves_last_after_an_error_that_all_know():
    """JAX's runtime ends the others where it leaves before they have read the error."""
    assert [code for code, _ in run_script(LEAVE)] == [2, 2]


EVALUATE = ("prope.evaluate", "--batch_size=4", "--split=train")


@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_is_killed_while_they_evaluate(start_pod, run_command, twice, killed):
    workdir = twice[1]
    before = (workdir / "eval.jsonl").read_bytes()
    pod = start_pod(*EVALUATE, f"--workdir={workdir}", patch=QUICK)
    pod[0].wait_for("evaluating step 4")
    time.sleep(random.uniform(0, 3))
    pod[killed].kill()
    start = time.monotonic()
    other = finish(pod[1 - killed])
    assert time.monotonic() - start < 60
    assert other.code == 76
    assert "another process of this run is gone" in line_of(other)
    assert (workdir / "eval.jsonl").read_bytes() == before, "nothing, or half of it, was written"
    done = run_command(*EVALUATE, f"--workdir={workdir}", "--max_windows=8")
    assert done.code == 0, done.stderr


def test_a_pod_that_evaluates_ends_on_sigterm(start_pod, wide):
    """JAX's runtime takes the signal for itself when processes join."""
    pod = start_pod(*EVALUATE, f"--workdir={wide}", patch=QUICK)
    pod[0].wait_for("evaluating step 4")
    pod[1].signal(signal.SIGTERM)
    first, second = map(finish, pod)
    assert (first.code, second.code) == (76, -signal.SIGTERM)
