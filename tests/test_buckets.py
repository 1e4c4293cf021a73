"""Runs in a bucket: they end as on disk, and survive what happens to buckets, processes and hosts."""

import random
import time

import fsspec
import jax
import pytest
from conftest import CONFIG, finish
from etils import epath

from prope.errors import RunFailed, UsageError
from prope.runtime import files
from prope.runtime.files import check_writable, read_json, upload
from prope.workdir.checkpoints import Checkpoints, list_steps
from prope.workdir.records import read_jsonl
from prope.workdir.run import Run, find_runs, open_run

STEPS = (
    "--config.log_every=1",
    "--config.checkpoint_every=5",
    "--config.eval_every=20",
    "--config.num_steps=20",
)
OF_MACHINE = {"workdir", "output", "runs", "init_hash"}  # and what is counted by seconds


@pytest.fixture
def uploaded(whole, bucket):
    """A run of 20 steps that was copied to a bucket from a disk: (its URL, its folder)."""
    upload(epath.Path(whole[0]), epath.Path(bucket) / "run")
    return epath.Path(bucket) / "run", whole[0]


@pytest.fixture(scope="module")
def straight(once, train):
    """A run of 20 steps on disk, undisturbed."""

    def make(directory):
        outcome = train(directory / "run", *STEPS)
        assert outcome.code == 0, outcome.stderr
        return outcome.result

    directory, result = once("straight20", make)
    return epath.Path(directory) / "run", result


def same_run(workdir, result: dict, straight) -> None:
    """Compares losses, batches, evaluation and the hashes of all saved arrays, bit for bit."""
    workdir, other = epath.Path(workdir), straight[0]
    fields = ("step", "loss", "grad_norm", "batch_hash")
    ours, theirs = (
        [[r[f] for f in fields] for r in read_jsonl(place / "metrics.jsonl")]
        for place in (workdir, other)
    )
    assert ours == theirs
    hashes, expected = (
        read_json(place / "checkpoints/20/hashes.json")["items"] for place in (workdir, other)
    )
    for item in ("params", "opt_state"):
        assert hashes[item] == expected[item]
    assert result["init_hash"] == straight[1]["init_hash"] and numbers(result) == numbers(
        straight[1]
    )


def numbers(result):
    """What a command printed, without places and times."""
    if isinstance(result, list):
        return [numbers(entry) for entry in result]
    if not isinstance(result, dict):
        return result
    return {
        name: numbers(value)
        for name, value in result.items()
        if name not in OF_MACHINE and "second" not in name
    }


@pytest.mark.slow
def test_a_run_copied_to_a_bucket_is_found_read_and_kept(uploaded):
    url, local = uploaded
    assert find_runs(url.parent) == [url] and list_steps(url) == list_steps(local) == [10, 20]
    ours, theirs = (open_run(place).params() for place in (url, local))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs))
    with Checkpoints(url) as checkpoints:  # Orbax removes what it takes for unfinished
        assert checkpoints.steps() == [10, 20]
    assert list_steps(url) == [10, 20]


@pytest.mark.slow
def test_a_checkpoint_of_which_an_object_is_gone_is_passed_over_and_set_aside(uploaded, caplog):
    url, _ = uploaded
    (url / "checkpoints/20/params/manifest.ocdbt").unlink()
    run, _ = open_run(url).first_undamaged(Run.params)
    assert run.step == 10 and "checkpoint 20 is damaged (params: " in caplog.text
    with Checkpoints(url) as checkpoints:
        checkpoints.set_aside(20)
    assert list_steps(url) == [10] and (url / "checkpoints/20.damaged/hashes.json").exists()
    (url / "checkpoints/10/hashes.json").unlink()  # written when all else is
    assert list_steps(url) == []


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    with pytest.raises(
        UsageError,
        match=r"--workdir=gs://other/run: cannot be made: No such file.*ls gs://other answ",
    ):
        check_writable("--workdir", epath.Path("gs://other/run"))


def test_without_credentials_it_is_one_line_at_once(bucket, storage, monkeypatch):
    (epath.Path(bucket) / "a.json").write_text("{}")
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("waited"))
    with storage.failing(401):
        with pytest.raises(
            RunFailed, match=r"a\.json: cannot be read: .*gcloud auth application-default login"
        ):
            read_json(epath.Path(bucket) / "a.json", "remedy")
        with pytest.raises(
            UsageError,
            match=r"--workdir=gs://bucket/.*: cannot be made: .*application-default login",
        ):
            check_writable("--workdir", epath.Path(bucket))


@pytest.mark.slow
def test_everything_in_a_bucket_is_as_on_disk(
    bucket, straight, start_command, run_command, tmp_path
):
    """Train, kill -9, resume, evaluate, sample, export, import, analyze, report."""
    killed = start_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS)
    while (
        not list_steps(f"{bucket}/run") and killed._process.is_alive()
    ):  # then the next save keeps it waiting
        time.sleep(0.1)
    killed.kill()
    again = run_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS)
    assert again.code == 0 and "resumed from step" in again.stderr, again.stderr
    same_run(f"{bucket}/run", again.result, straight)

    def both(module: str, *arguments: str, **places: str) -> None:
        results = []
        for base, workdir in ((bucket, f"{bucket}/run"), (tmp_path, straight[0])):
            flags = [f"--{flag}={base}/{name}" for flag, name in places.items()]
            outcome = run_command(module, f"--workdir={workdir}", *flags, *arguments)
            assert outcome.code == 0, outcome.stderr
            results.append(numbers(outcome.result))
        assert results[0] == results[1]

    both("prope.evaluate", "--again", "--seq_len=1x,2x")
    both("prope.sample", "--prompt=def f", "--length=8", "--temperature=0")
    both("prope.report")
    both("prope.analyze", "--sequences=2")
    both("prope.export_hf", output="hf")
    for name in ("config.json", "model.safetensors"):
        assert (epath.Path(bucket) / "hf" / name).read_bytes() == (
            tmp_path / "hf" / name
        ).read_bytes()
    imported = run_command(
        "prope.import_hf", f"--input={bucket}/hf", f"--workdir={bucket}/imported"
    )
    assert imported.code == 0, imported.stderr
    assert (
        run_command("prope.sample", f"--workdir={bucket}/imported", "--prompt=a", "--length=4").code
        == 0
    )
    pages = ("loss.png", "analysis/index.html", "analysis/usage.png")
    assert all((epath.Path(bucket) / "run" / page).exists() for page in pages)
    events = list((epath.Path(bucket) / "run").glob("events.out.tfevents.*"))
    assert len(events) == 2 and all(path.stat().length > 100 for path in events)


@pytest.mark.slow
def test_killed_between_arrays_and_commit_a_run_ends_as_a_straight_one(
    bucket, straight, start_command
):
    system, chance, kills = fsspec.filesystem("gs"), random.Random(3), 0
    folder = f"{bucket}/run/checkpoints"

    def unfinished() -> bool:
        names = system.find(folder) if system.exists(folder) else []
        begun = {
            name.split("/checkpoints/")[1].split("/")[0] for name in names if "/params/" in name
        }
        return any(not system.exists(f"{folder}/{step}/commit_success.txt") for step in begun)

    for _ in range(4):
        command = start_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS)
        command.wait_for("first step after|Traceback|error:")
        time.sleep(chance.random() / 4)
        end = time.monotonic() + 20
        while not (met := unfinished()) and time.monotonic() < end and command._process.is_alive():
            pass
        command.kill()
        kills += met
        assert "Traceback" not in command.stderr, command.stderr
    assert kills >= 2, "too few kills met a checkpoint that was being written"
    outcome = finish(start_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS))
    assert outcome.code == 0, outcome.stderr
    same_run(f"{bucket}/run", outcome.result, straight)


@pytest.mark.slow
def test_a_bucket_that_fails_for_20_seconds_delays_a_run(
    bucket, storage, straight, start_command, run_command
):
    stopped = run_command(
        "prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS, "--stop_at_step=10"
    )
    assert stopped.code == 0, stopped.stderr
    command = start_command("prope.train", CONFIG, f"--workdir={bucket}/run", *STEPS)
    for moment in ("attention: xla", "step 14/20"):  # before a restore; before a save
        command.wait_for(moment)
        with storage.failing():
            time.sleep(20)
    outcome = finish(command)
    assert outcome.code == 0, outcome.stderr
    same_run(f"{bucket}/run", outcome.result, straight)
