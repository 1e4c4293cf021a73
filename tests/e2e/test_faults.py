"""Faults of a run: kills, signals, a full disk, damaged checkpoints; on real processes."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import jax
import pytest
from support.commands import CONFIG, finish, flipped, logged, losses
from support.text import hash_files, read_lines

from configs.quickstart import get_config
from prope.config import resolve
from prope.data.mixture import open_windows
from prope.data.windows import train_batch
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import open_run

LOG = "--config.log_every=1"
ENDLESS = ("--config.num_steps=100000", "--config.checkpoint_every=100000", LOG)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of that run, to be broken."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.fixture
def start(start_command):
    """Starts prope.train on the tiny config."""
    return lambda workdir, *arguments, **options: start_command(
        "prope.train", CONFIG, f"--workdir={workdir}", *arguments, **options
    )


@pytest.mark.slow
def test_killed_at_random_a_run_ends_as_a_straight_one_bit_for_bit(start, train, tmp_path):
    steps = ("--config.num_steps=20", "--config.checkpoint_every=2", "--config.eval_every=10", LOG)
    straight = train(tmp_path / "straight", *steps)
    assert straight.code == 0, straight.stderr
    chance = random.Random(6)
    for moment in (r"step \d+/", "", r"step \d+/"):  # the second kill: at any moment of the start
        command = start(tmp_path / "run", *steps)
        command.wait_for(f"{moment}|Traceback")
        time.sleep(chance.random())
        command.kill()
        assert "Traceback" not in command.stderr, command.stderr
        assert losses(tmp_path / "run"), "the kill met a run that was training"
    end = train(tmp_path / "run", *steps)
    assert end.code == 0, end.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert len(losses(tmp_path / "run")) == 20
    assert logged(tmp_path / "run", "batch_hash") == logged(tmp_path / "straight", "batch_hash")
    for name in ("eval_loss", "init_hash"):
        assert end.result[name] == straight.result[name]
    ours, theirs = (open_run(tmp_path / name).params() for name in ("run", "straight"))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs))
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(left) == ["18", "20"], "what a killed process had begun to write is gone"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_asked_to_stop_while_training(start, train, tmp_path, number, code):
    command = start(tmp_path, *ENDLESS)
    command.wait_for("step 3/")
    command.signal(number)
    stopped = finish(command)
    assert stopped.code == code
    line = r"step (\d+) of 100000 is saved; the same command goes on"
    step = int(re.search(line, stopped.error)[1])
    assert step >= 3
    assert Checkpoints(tmp_path).steps() == [step]
    resumed = train(tmp_path, *ENDLESS, f"--stop_at_step={step + 2}")
    assert f"resumed from step {step}" in resumed.stderr
    assert resumed.result["step"] == step + 2


@pytest.mark.slow
def test_asked_to_stop_while_evaluating(start, train, tmp_path):
    arguments = ("--config.eval_every=3", "--config.checkpoint_every=100", LOG)
    slow = ("--config.eval.batch_size=1", "--config.eval.max_windows=100000")
    command = start(tmp_path, *arguments, *slow)
    command.wait_for("step 3/20")
    time.sleep(0.3)
    command.signal(signal.SIGTERM)
    stopped = finish(command)
    assert stopped.code == 75
    assert "step 3 of 20 is saved" in stopped.error
    assert "validation loss" not in stopped.stderr
    resumed = train(tmp_path, *arguments, "--config.eval.max_windows=4", "--stop_at_step=4")
    assert resumed.code == 0, resumed.stderr
    evaluated = [record["step"] for record in read_lines(tmp_path / "eval.jsonl")]
    assert evaluated == [3, 4], "the evaluation that was given up is made up for"


@pytest.mark.slow
def test_asked_to_stop_while_compiling(start, tmp_path):
    deep = (
        "--config.model.num_layers=12",
        "--config.model.scan_layers=False",
        "--config.model.remat=full",
    )
    slow = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    command = start(tmp_path, *deep, **slow)
    command.wait_for("init_hash")
    time.sleep(0.3)
    command.signal(signal.SIGTERM)
    stopped = finish(command)
    assert stopped.code == 75
    assert "compiled in" not in stopped.stderr
    line = "SIGTERM before the first step, so nothing was lost; the same command goes on"
    assert line in stopped.error


@pytest.mark.slow
def test_ctrl_c_twice_leaves_at_once(start, tmp_path):
    command = start(tmp_path, *ENDLESS)
    command.wait_for("step 5/")
    command.signal(signal.SIGINT)
    command.wait_for("once more leaves at once")
    command.signal(signal.SIGINT)
    stopped = finish(command)
    assert stopped.code == 130
    assert "Ctrl-C twice; the same command goes on from the last checkpoint" in stopped.error


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(whole, copy, train, run_command):
    whole_workdir, whole_result = whole
    params = copy / "checkpoints" / "20" / "params"
    files = [path for path in params.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(flipped(largest.read_bytes()))
    evaluated = run_command("prope.evaluate", f"--workdir={copy}", "--max_windows=2")
    assert evaluated.result["step"] == 10
    assert "checkpoint 20 is damaged" in evaluated.stderr
    named = run_command("prope.evaluate", f"--workdir={copy}", "--step=20")
    assert "checkpoint 20 is damaged" in named.error
    resumed = train(copy, LOG)
    assert resumed.code == 0, resumed.stderr
    assert "checkpoint 20 is damaged" in resumed.stderr
    assert "resumed from step 10" in resumed.stderr
    assert losses(copy) == losses(whole_workdir)
    assert resumed.result["eval_loss"] == whole_result["eval_loss"]
    assert Checkpoints(copy).steps() == [10, 20]
    assert open_run(copy).step == 20
    assert (copy / "checkpoints" / "20.damaged").is_dir(), "what is damaged is renamed, not deleted"


def test_where_nothing_is_whole_nothing_is_done(copy, train, run_command):
    def files():
        return {path for path in copy.rglob("*") if path.is_file() and path.name != "config.json"}

    for step in (10, 20):
        shutil.rmtree(copy / "checkpoints" / str(step) / "params")
    before = files()
    outcome = train(copy)
    assert outcome.code == 2
    line = "nothing whole to go on from: checkpoint 20 .*; checkpoint 10 .*start in a new"
    assert re.search(line, outcome.error)
    assert "nothing whole to go on from" in run_command("prope.evaluate", f"--workdir={copy}").error
    assert files() == before


def test_a_run_that_was_imported_is_not_gone_on_with(copy, train):
    checkpoints = copy / "checkpoints"
    shutil.rmtree(checkpoints / "10")
    shutil.rmtree(checkpoints / "20" / "opt_state")
    (checkpoints / "20").rename(checkpoints / "0")
    refusal = "imported checkpoint, without optimizer state: start from it in another"
    assert refusal in train(copy).error


def test_what_a_killed_process_left_half_written_is_not_a_checkpoint(copy, train):
    half = copy / "checkpoints" / "30.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "20", half)
    (copy / "checkpoints" / "notes.txt").write_text("not ours to delete")
    resumed = train(copy)
    assert resumed.result["step"] == 20
    assert Checkpoints(copy).steps() == [10, 20]
    assert (copy / "checkpoints" / "notes.txt").exists()
    assert not half.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "options", "steps"),
    [
        (2, ("keep_every=6", "max_to_keep=2"), [6, 12, 18, 20]),
        # At least five more by the clock.
        (1000, ("every_minutes=1e-6", "max_to_keep=100"), None),
    ],
    ids=["retention", "clock"],
)
def test_which_checkpoints_are_kept(train, tmp_path, every, options, steps):
    words = [f"--config.checkpoint.{option}" for option in options]
    outcome = train(tmp_path, f"--config.checkpoint_every={every}", *words)
    assert outcome.code == 0, outcome.stderr
    kept = Checkpoints(tmp_path).steps()
    assert kept == steps if steps else len(kept) > 5


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 20 MB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="fills a disk of 20 MB: mounting it needs root")
def test_a_disk_that_fills_up_while_saving(start, train, small_disk):
    """There is room for the arrays, as the check sees, but not for what is written around them."""
    workdir = small_disk / "run"
    filler = small_disk / "filler"
    steps = ("--config.num_steps=600", "--config.checkpoint_every=300", "--config.eval_every=600")
    command = start(workdir, *steps, "--config.log_every=50")
    command.wait_for("step 1/")
    command.signal(signal.SIGSTOP)
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"0" * (free - 12 * 90_688 - 30_000))
    command.signal(signal.SIGCONT)
    stopped = finish(command)
    assert stopped.code == 1, stopped.stderr
    assert "Traceback" not in stopped.stderr, stopped.stderr
    lines = stopped.stderr.splitlines()
    (line,) = [line for line in lines if line.startswith(("stopped:", "error:"))]
    # The checkpoint meets it first, or the metrics of a later step.
    saving = "checkpoint 300 could not be written .*the disk is full"
    assert re.search(f"{saving}|the disk is full", line), line
    assert max(losses(workdir)) < 600, "it stops at the next step, not where it would save again"
    filler.unlink()
    resumed = train(workdir, *steps)
    assert resumed.result["step"] == 600
    assert Checkpoints(workdir).steps() == [300, 600]


@pytest.mark.slow
def test_a_token_store_that_was_replaced(copy, whole, train, cache_dir, tmp_path):
    """What a store says of itself tells; without it, it is made again, the same."""
    checkpoint = copy / "checkpoints" / "20"
    fingerprint = json.loads((checkpoint / "data" / "metadata").read_text())["fingerprint"]
    name = f"python-docs-{fingerprint}"
    cache = tmp_path / "cache"  # other tests keep other stores in theirs
    store = shutil.copytree(cache_dir / name, cache / name)
    index = json.loads((store / "index.json").read_text())
    (store / "index.json").write_text(json.dumps(index | {"fingerprint": "0" * 16}))
    shutil.rmtree(checkpoint)
    refused = train(copy, LOG, PROPE_CACHE=str(cache))
    assert "was changed or copied; remove it to have it prepared again" in refused.error
    shutil.rmtree(store)
    resumed = train(copy, LOG, PROPE_CACHE=str(cache))
    assert resumed.code == 0, resumed.stderr
    assert losses(copy) == losses(whole[0])


def test_the_first_batch_of_a_late_start_is_read_at_once(cache_dir):
    """The batch of a step is a function of the step: nothing before it is read again."""
    spec = resolve(get_config("tiny")).replace({"data.cache_dir": str(cache_dir)})
    windows = open_windows(spec.data, spec.model.vocab_size, "train")
    seconds = []
    for step in (0, 1_000_000):  # the first imports what reads
        began = time.perf_counter()
        train_batch(windows, spec.seed, spec.batch_size, step)
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < 1


@pytest.mark.slow
def test_compiled_programs_are_shared_by_the_runs_of_a_user(train, tmp_path):
    """A program that lies in a run's directory is not executed: another may have put it there."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    flags = ("--config.eval.max_windows=1", "--stop_at_step=1")
    for name, expected in (("a", "miss"), ("b", "hit")):
        outcome = train(tmp_path / name, *flags, **cache)
        assert outcome.code == 0, outcome.stderr
        assert f"compilation cache: {expected}" in outcome.stderr
    (folder,) = (tmp_path / "cache/prope/programs").glob("cpu-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    shutil.move(folder, tmp_path / "c/compilation_cache" / folder.name)
    planted = hash_files(tmp_path / "c/compilation_cache")
    outcome = train(tmp_path / "c", *flags, **cache)
    assert outcome.code == 0 and "compilation cache: miss" in outcome.stderr
    assert hash_files(tmp_path / "c/compilation_cache") == planted, "neither read nor written"
    folder.chmod(0o777)
    outcome = train(tmp_path / "d", *flags, **cache)
    assert outcome.code == 0 and "is not of this user alone" in outcome.stderr
    assert "compilation cache: miss" in outcome.stderr
