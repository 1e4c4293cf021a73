"""Runs in a bucket: they end as on disk, and survive what happens to buckets and processes."""

import asyncio
import collections
import random
import time

import fsspec
import jax
import pytest
from etils import epath
from gcsfs import retry
from support.commands import CONFIG, finish
from support.processes import WIDE, pod_environments

from prope.errors import RunFailed, StorageFailed, UsageError
from prope.runtime import files
from prope.runtime.files import as_path, check_writable, read_json, upload
from prope.workdir.checkpoints import Checkpoints, list_steps
from prope.workdir.records import read_jsonl
from prope.workdir.run import Run, find_runs, open_run

STEPS = (
    "--config.log_every=1",
    "--config.checkpoint_every=5",
    "--config.eval_every=20",
    "--config.num_steps=20",
)
# Fields that differ by machine, beside those counted by seconds.
MACHINE_FIELDS = {"workdir", "output", "runs", "init_hash"}


@pytest.fixture
def uploaded(whole, bucket):
    """A run of 20 steps that was copied to a bucket from a disk: (its URL, its folder)."""
    url = epath.Path(bucket) / "run"
    upload(epath.Path(whole[0]), url)
    return url, whole[0]


@pytest.fixture(scope="module")
def straight(train_once):
    """A run of 20 steps on disk, undisturbed."""
    workdir, result = train_once("straight20", *STEPS)
    return epath.Path(workdir), result


@pytest.fixture
def start_in_bucket(bucket, start_command):
    """Starts the training of a run in the bucket."""

    def start(*arguments):
        return start_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS, *arguments)

    return start


@pytest.fixture
def finish_as_straight(bucket, straight):
    """Waits for a run; compares losses, batches, evaluation and all saved arrays, bit for bit."""

    def logged(workdir):
        fields = ("step", "loss", "grad_norm", "batch_hash")
        records = read_jsonl(workdir / "metrics.jsonl")
        return [[record[field] for field in fields] for record in records]

    def hashes(workdir):
        items = read_json(workdir / "checkpoints/20/hashes.json")["items"]
        return {item: items[item] for item in ("params", "opt_state")}

    def check(command):
        outcome = finish(command)
        assert outcome.code == 0, outcome.stderr
        workdir = epath.Path(bucket) / "run"
        expected_dir, expected = straight
        assert logged(workdir) == logged(expected_dir)
        assert hashes(workdir) == hashes(expected_dir)
        assert outcome.result["init_hash"] == expected["init_hash"]
        assert numbers(outcome.result) == numbers(expected)
        return outcome

    return check


def numbers(result):
    """What a command printed, without places and times."""
    if isinstance(result, list):
        return [numbers(entry) for entry in result]
    if not isinstance(result, dict):
        return result
    names = [name for name in result if name not in MACHINE_FIELDS and "second" not in name]
    return {name: numbers(result[name]) for name in names}


@pytest.mark.slow
def test_a_run_copied_to_a_bucket_is_found_read_and_kept(uploaded):
    url, local = uploaded
    assert find_runs(url.parent) == [url]
    assert list_steps(url) == list_steps(local) == [10, 20]
    params = open_run(url).params()
    expected = open_run(local).params()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, expected))
    with Checkpoints(url) as checkpoints:  # Orbax removes what it takes for unfinished
        assert checkpoints.steps() == [10, 20]
    assert list_steps(url) == [10, 20]


@pytest.mark.slow
def test_a_checkpoint_of_which_an_object_is_gone_is_passed_over_and_set_aside(uploaded, caplog):
    url, _ = uploaded
    (url / "checkpoints/20/params/manifest.ocdbt").unlink()
    run, _ = open_run(url).restore_newest_valid(Run.params)
    assert run.step == 10
    assert "checkpoint 20 is damaged (params: " in caplog.text
    with Checkpoints(url) as checkpoints:
        checkpoints.set_aside(20)
    assert list_steps(url) == [10]
    assert (url / "checkpoints/20.damaged/hashes.json").exists()
    (url / "checkpoints/10/hashes.json").unlink()  # written when all else is
    assert list_steps(url) == []


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(UsageError, match="--workdir=gs://other/run: .*gcloud"):
        check_writable("--workdir", epath.Path("gs://other/run"))


def test_without_credentials_it_is_one_line_after_seconds(bucket, storage, monkeypatch):
    file = epath.Path(bucket) / "a.json"
    file.write_text("{}")
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    with storage.failing(401):
        with pytest.raises(RunFailed, match=r"a\.json: .*gcloud auth"):
            read_json(file, "remedy")
        with pytest.raises(UsageError, match=f"--workdir={bucket}: .*gcloud auth"):
            check_writable("--workdir", epath.Path(bucket))
    assert waited == [1, 2, 4]


def test_an_outage_that_lasts_ends_a_start_that_launchers_repeat(bucket, storage, monkeypatch):
    async def pause(*_):
        await sleep(0)

    sleep = asyncio.sleep
    monkeypatch.setattr(retry.asyncio, "sleep", pause)
    with storage.failing(503), pytest.raises(StorageFailed, match=bucket) as raised:
        check_writable("--workdir", as_path("workdir", bucket))
    assert raised.value.code == 76


@pytest.mark.slow
def test_everything_in_a_bucket_is_as_on_disk(
    bucket, straight, start_in_bucket, finish_as_straight, run_command, tmp_path
):
    """Train, kill -9, resume, evaluate, sample, export, import, analyze, report."""
    killed = start_in_bucket()
    # After the first save, the next one keeps it waiting.
    while not list_steps(f"{bucket}/run") and killed._process.is_alive():
        time.sleep(0.1)
    killed.kill()
    again = finish_as_straight(start_in_bucket())
    assert "resumed from step" in again.stderr

    for module, *arguments in (
        ("prope.evaluate", "--again", "--seq_len=1x,2x"),
        ("prope.sample", "--prompt=def f", "--length=8", "--temperature=0"),
        ("prope.report",),
        ("prope.analyze", "--sequences=2"),
        ("prope.export_hf", "--output=BASE/hf"),
    ):
        printed = []
        for base, workdir in ((bucket, f"{bucket}/run"), (tmp_path, straight[0])):
            placed = [argument.replace("BASE", str(base)) for argument in arguments]
            outcome = run_command(module, f"--workdir={workdir}", *placed)
            assert outcome.code == 0, outcome.stderr
            printed.append(numbers(outcome.result))
        assert printed[0] == printed[1]
    exported = epath.Path(bucket) / "hf"
    for name in ("config.json", "model.safetensors"):
        assert (exported / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    imported = f"--workdir={bucket}/imported"
    for module, *arguments in (
        ("prope.import_hf", f"--input={exported}"),
        ("prope.sample", "--prompt=a", "--length=4"),
    ):
        outcome = run_command(module, imported, *arguments)
        assert outcome.code == 0, outcome.stderr
    run = epath.Path(bucket) / "run"
    for page in (
        "report/index.html",
        "report/loss.png",
        "analysis/index.html",
        "analysis/usage.png",
    ):
        assert (run / page).exists(), page
    events = list(run.glob("events.out.tfevents.*"))
    assert len(events) == 2
    assert all(path.stat().length > 100 for path in events)


@pytest.mark.slow
def test_killed_between_arrays_and_commit_a_run_ends_as_a_straight_one(
    bucket, start_in_bucket, finish_as_straight
):
    system = fsspec.filesystem("gs")
    chance = random.Random(3)
    kills = 0
    folder = f"{bucket}/run/checkpoints"

    def is_saving() -> bool:
        """Returns whether a checkpoint has parameters and no commit."""
        names = system.find(folder) if system.exists(folder) else []
        places = [name.split("/checkpoints/")[1] for name in names if "/params/" in name]
        steps = {place.split("/")[0] for place in places}
        return any(not system.exists(f"{folder}/{step}/commit_success.txt") for step in steps)

    for _ in range(4):
        command = start_in_bucket()
        command.wait_for("first step after|Traceback|error:")
        time.sleep(chance.random() / 4)
        end = time.monotonic() + 20
        met = is_saving()
        while not met and time.monotonic() < end and command._process.is_alive():
            met = is_saving()
        command.kill()
        kills += met
        assert "Traceback" not in command.stderr, command.stderr
    assert kills >= 2, "too few kills met a checkpoint that was being written"
    finish_as_straight(start_in_bucket())


@pytest.mark.slow
def test_a_bucket_that_fails_for_20_seconds_delays_a_run(
    storage, start_in_bucket, finish_as_straight
):
    command = start_in_bucket()
    command.wait_for("step 14/20")  # before a save
    with storage.failing():
        time.sleep(20)
    finish_as_straight(command)


# --- Requests: python -m pytest -m "" -s tests/e2e/test_buckets.py -k requests prints the table of
# launch/README.md ---------------------------------------------------------------------------------

EVERY = ("--config.num_steps=7", "--config.checkpoint_every=2", "--config.eval_every=5")
# Says in the server's log who asks, and what for; waits for what is saved in the background.
COUNTING = """
import os
from gcsfs import core
from prope.inference.losses import LossEvaluation
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.metrics import MetricWriter

process = os.environ["PROPE_PROCESSES"].partition("/")[0]
headers = core.GCSFileSystem._get_headers
core.GCSFileSystem._get_headers = lambda *given, **more: (
    headers(*given, **more) | {"authorization": process}
)

def say(phase):
    with open(LOG, "a") as log:
        log.write(f"{process} PHASE {phase}\\n")

def save(self, *arguments):
    say("checkpoint" if self._steps else "first_checkpoint")
    saved(self, *arguments)
    self._manager.wait_until_finished()
    say("steps")

def evaluate(*arguments):
    say("evaluation")
    return evaluated(*arguments)

def write(*arguments):
    written(*arguments)
    say("steps")

saved, Checkpoints.save = Checkpoints.save, save
evaluated, LossEvaluation.evaluate = LossEvaluation.evaluate, evaluate
written, MetricWriter.evaluation = MetricWriter.evaluation, write
"""
KINDS = ("list", "get", "put", "delete")
# Phases of the run, and how often each is there.
PHASES = {"start": 1, "first_checkpoint": 1, "checkpoint": 3, "evaluation": 2}
INDEX = 6  # requests, at most, of each kind for a process's index, of parameters and optimizer


def kind_of(method: str, path: str) -> str:
    """What a request to Cloud Storage's JSON interface does."""
    is_list = path.partition("?")[0].endswith("/o")
    reads = "list" if is_list else "get"
    return {"POST": "put", "PUT": "put", "PATCH": "put", "DELETE": "delete"}.get(method, reads)


def count(lines: list[str]) -> dict[int, dict[str, list[int]]]:
    """Requests by process, phase and kind; those of the lease, which go by the clock, left out."""
    counts = collections.Counter()
    phases = {}
    for line in lines:
        client, method, path = line.rsplit(" ", 2)
        process = client.removeprefix("Bearer ")  # TensorStore's
        if method == "PHASE":
            phases[process] = path
        elif "lease.json" not in path:
            counts[process, phases.get(process, "start"), kind_of(method, path)] += 1
    return {
        int(process): {phase: [counts[process, phase, kind] for kind in KINDS] for phase in PHASES}
        for process in phases
    }


@pytest.fixture
def count_requests(bucket, storage, start_command):
    """Counts those of a run of so many processes."""

    def run(processes: int) -> dict[int, dict[str, list[int]]]:
        patch = f"LOG = {str(storage.log)!r}\n{COUNTING}"
        storage.requests()
        started = []
        for number, pod in enumerate(pod_environments(processes)):
            words = (CONFIG, f"--workdir={bucket}/{processes}", *WIDE, *EVERY)
            token = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": str(number)}
            started.append(start_command("prope.train", *words, patch=patch, **pod, **token))
        for outcome in [finish(command) for command in started]:
            assert outcome.code == 0, outcome.stderr
        return count(storage.requests())

    return run


@pytest.mark.slow
def test_requests_of_a_process_do_not_grow_with_the_processes(count_requests):
    """But for the first one's of a save, by which it joins each process's index of arrays."""
    counts = {processes: count_requests(processes) for processes in (2, 4)}
    two, four = counts.values()
    print(f"\nphase (of which there were)  processes  process  {'  '.join(KINDS)}")
    for phase, times in PHASES.items():
        for processes, by_process in counts.items():
            for process in (0, 1):
                print(f"{phase} ({times})", processes, process, *by_process[process][phase])
    for phase, times in PHASES.items():
        puts = two[0][phase][KINDS.index("put")]
        assert puts >= times, f"{phase}: requests were not counted"
        for process in (1, 2, 3):
            other = zip(four[process][phase], two[1][phase], strict=True)
            # Which process writes a part that several hold, and in which phase it ends, is chance.
            assert all(now <= before + times + 1 for now, before in other), (phase, process)
        growth = [now - before for now, before in zip(four[0][phase], two[0][phase], strict=True)]
        indices = 2 * times * INDEX if "checkpoint" in phase else 0
        allowed = [times + 1 + more for more in (0, indices, 0, indices)]
        assert all(more <= most for more, most in zip(growth, allowed, strict=True)), phase
