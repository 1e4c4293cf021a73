"""What can happen to a run: killed, asked to stop, its disk full, its checkpoints damaged; on real processes."""

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
from conftest import CONFIG, finish, flipped, logged, losses

from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_json
from prope.workdir.reader import write_hashes
from prope.workdir.run import open_run

EVERY_STEP = (
    "--config.log_every=1",
    "--config.checkpoint_every=2",
    "--config.eval_every=20",
    "--config.num_steps=40",
)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of that run, to be broken."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.fixture
def start(start_command):
    """Starts prope.train on the tiny config."""
    return lambda workdir, *arguments, **how: start_command(
        "prope.train", CONFIG, f"--workdir={workdir}", *arguments, **how
    )


@pytest.mark.slow
def test_killed_at_random_a_run_ends_as_a_straight_one_bit_for_bit(start, train, tmp_path):
    straight = train(tmp_path / "straight", *EVERY_STEP)
    assert straight.code == 0, straight.stderr
    chance = random.Random(6)
    for moment in (r"step \d+/", "", r"step \d+/"):  # the second kill: at any moment of the start
        command = start(tmp_path / "run", *EVERY_STEP)
        command.wait_for(f"{moment}|Traceback")
        time.sleep(chance.random())
        command.kill()
        assert "Traceback" not in command.stderr, command.stderr
        assert losses(tmp_path / "run"), "the kill met a run that was training"
    end = train(tmp_path / "run", *EVERY_STEP)
    assert end.code == 0, end.stderr
    assert (
        losses(tmp_path / "run") == losses(tmp_path / "straight")
        and len(losses(tmp_path / "run")) == 40
    )
    assert logged(tmp_path / "run", "batch_hash") == logged(tmp_path / "straight", "batch_hash")
    assert {k: end.result[k] for k in ("eval_loss", "init_hash")} == {
        k: straight.result[k] for k in ("eval_loss", "init_hash")
    }
    ours, theirs = (open_run(tmp_path / name).params() for name in ("run", "straight"))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, theirs))
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(left) == ["38", "40"], "what a killed process had begun to write is gone"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_asked_to_stop_while_training(start, train, tmp_path, number, code):
    arguments = (
        "--config.num_steps=100000",
        "--config.log_every=1",
        "--config.checkpoint_every=100000",
    )
    command = start(tmp_path, *arguments)
    command.wait_for("step 3/")
    command.signal(number)
    stopped = finish(command)
    assert stopped.code == code
    step = int(
        re.search(r"step (\d+) of 100000 is saved; the same command goes on", stopped.error)[1]
    )
    assert step >= 3 and Checkpoints(tmp_path).steps() == [step]
    resumed = train(tmp_path, *arguments, f"--stop_at_step={step + 2}")
    assert f"resumed from step {step}" in resumed.stderr and resumed.result["step"] == step + 2


@pytest.mark.slow
def test_asked_to_stop_while_evaluating(start, train, tmp_path):
    arguments = ("--config.eval_every=3", "--config.checkpoint_every=100", "--config.log_every=1")
    slow = ("--config.eval.batch_size=1", "--config.eval.max_windows=100000")
    command = start(tmp_path, *arguments, *slow)
    command.wait_for("step 3/20")
    time.sleep(0.3)
    command.signal(signal.SIGTERM)
    stopped = finish(command)
    assert stopped.code == 75 and "step 3 of 20 is saved" in stopped.error
    assert "validation loss" not in stopped.stderr
    resumed = train(tmp_path, *arguments, "--config.eval.max_windows=4", "--stop_at_step=4")
    assert resumed.code == 0, resumed.stderr
    records = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 4], (
        "the evaluation that was given up is made up for"
    )


@pytest.mark.slow
def test_asked_to_stop_while_compiling(start, tmp_path):
    deep = (
        "--config.model.num_layers=12",
        "--config.model.scan_layers=False",
        "--config.model.remat=full",
    )
    lasting = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    command = start(tmp_path, *deep, **lasting)
    command.wait_for("init_hash")
    time.sleep(0.3)
    command.signal(signal.SIGTERM)
    stopped = finish(command)
    assert stopped.code == 75 and "compiled in" not in stopped.stderr
    assert (
        "SIGTERM before the first step, so nothing was lost; the same command goes on"
        in stopped.error
    )


@pytest.mark.slow
def test_ctrl_c_twice_leaves_at_once(start, tmp_path):
    command = start(tmp_path, "--config.num_steps=100000", "--config.checkpoint_every=100000")
    command.wait_for("step 5/")
    command.signal(signal.SIGINT)
    command.wait_for("once more leaves at once")
    command.signal(signal.SIGINT)
    stopped = finish(command)
    assert (
        stopped.code == 130
        and "Ctrl-C twice; the same command goes on from the last checkpoint" in stopped.error
    )


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "one byte changed": lambda path: path.write_bytes(flipped(path.read_bytes())),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "kind"), [*((damage, "params") for damage in DAMAGES), ("missing", "hashes.json")]
)
def test_a_damaged_checkpoint_is_passed_over(whole, copy, train, run_command, damage, kind):
    folder = copy / "checkpoints" / "20"
    files = [folder / kind, *(folder / kind).rglob("*")]
    DAMAGES[damage](max(files, key=lambda path: path.stat().st_size * path.is_file()))
    evaluated = run_command("prope.evaluate", f"--workdir={copy}", "--max_windows=2")
    assert evaluated.result["step"] == 10 and "checkpoint 20 is damaged" in evaluated.stderr
    asked = run_command("prope.evaluate", f"--workdir={copy}", "--step=20")
    assert "checkpoint 20" in asked.error and "is damaged" in asked.error
    resumed = train(copy, "--config.log_every=1")
    assert resumed.code == 0, resumed.stderr
    assert re.search(r"checkpoint 20 is damaged \(.+\): passed over", resumed.stderr)
    assert "resumed from step 10" in resumed.stderr
    assert losses(copy) == losses(whole[0]) and resumed.result["eval_loss"] == whole[1]["eval_loss"]
    assert Checkpoints(copy).steps() == [10, 20] and open_run(copy).step == 20
    assert (copy / "checkpoints" / "20.damaged").is_dir(), "what is damaged is renamed, not deleted"


@pytest.mark.parametrize("item", ["opt_state", "data"])
@pytest.mark.slow
def test_any_damaged_item_counts(copy, train, item):
    for path in (copy / "checkpoints" / "20" / item).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    resumed = train(copy, "--stop_at_step=11")
    assert resumed.code == 0 and "resumed from step 10" in resumed.stderr


def test_where_nothing_is_whole_nothing_is_done(copy, train, run_command):
    for step in (10, 20):
        shutil.rmtree(copy / "checkpoints" / str(step) / "params")
    before = sorted(
        path for path in copy.rglob("*") if path.is_file() and path.name != "config.json"
    )
    outcome = train(copy)
    assert outcome.code == 2
    assert re.search(
        r"nothing whole to go on from: checkpoint 20 .*; checkpoint 10 .*start in a new",
        outcome.error,
    )
    assert "nothing whole to go on from" in run_command("prope.evaluate", f"--workdir={copy}").error
    assert (
        sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "config.json")
        == before
    )


def test_a_run_that_was_imported_is_not_gone_on_with(copy, train):
    shutil.rmtree(copy / "checkpoints" / "10")
    shutil.rmtree(copy / "checkpoints" / "20" / "opt_state")
    (copy / "checkpoints" / "20").rename(copy / "checkpoints" / "0")
    assert (
        "imported checkpoint, without optimizer state: start from it in another"
        in train(copy).error
    )


def test_what_a_killed_process_left_half_written_is_not_a_checkpoint(copy, train):
    half = copy / "checkpoints" / "30.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "20", half)
    (copy / "checkpoints" / "notes.txt").write_text("not ours to delete")
    resumed = train(copy)
    assert resumed.result["step"] == 20 and Checkpoints(copy).steps() == [10, 20]
    assert (copy / "checkpoints" / "notes.txt").exists() and not half.exists()


@pytest.mark.slow
def test_retention(train, tmp_path):
    outcome = train(
        tmp_path,
        "--config.checkpoint_every=2",
        "--config.checkpoint.keep_every=6",
        "--config.checkpoint.max_to_keep=2",
    )
    assert outcome.code == 0, outcome.stderr
    assert Checkpoints(tmp_path).steps() == [6, 12, 18, 20]


@pytest.mark.slow
def test_saving_by_the_clock(train, tmp_path):
    quick = ("--config.checkpoint_every=1000", "--config.checkpoint.every_minutes=1e-6")
    assert train(tmp_path / "run", *quick, "--config.checkpoint.max_to_keep=100").code == 0
    assert len(Checkpoints(tmp_path / "run").steps()) > 5
    never = ("--config.checkpoint_every=1000", "--config.checkpoint.every_minutes=0")
    assert train(tmp_path / "other", *never).code == 0
    assert Checkpoints(tmp_path / "other").steps() == [20]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="fills a disk of 20 MB: mounting it needs root")
def test_a_disk_that_fills_up_while_saving(start, train, tmp_path):
    """There is room for the arrays, as the check before sees, but hardly any for what is written around them."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(tmp_path)], check=True)
    try:
        arguments = (
            "--config.checkpoint_every=300",
            "--config.eval_every=600",
            "--config.num_steps=600",
        )
        command = start(tmp_path / "run", *arguments, "--config.log_every=50")
        command.wait_for("step 1/")
        command.signal(signal.SIGSTOP)
        free = shutil.disk_usage(tmp_path).free
        (tmp_path / "filler").write_bytes(b"0" * (free - 12 * 90_688 - 30_000))
        command.signal(signal.SIGCONT)
        stopped = finish(command)
        (line,) = [
            line for line in stopped.stderr.splitlines() if line.startswith(("stopped:", "error:"))
        ]
        assert stopped.code == 1 and "Traceback" not in stopped.stderr, stopped.stderr
        # Whoever meets it first: the checkpoint, or the metrics of a later step.
        assert re.search(
            r"checkpoint 300 could not be written .*No space left|no space left on the device", line
        ), line
        assert max(losses(tmp_path / "run")) < 600, (
            "it stops at the next step, not where it would save again"
        )
        (tmp_path / "filler").unlink()
        resumed = train(tmp_path / "run", *arguments)
        assert resumed.result["step"] == 600 and Checkpoints(tmp_path / "run").steps() == [300, 600]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_token_store_that_was_replaced(copy, whole, train, cache_dir, tmp_path):
    """What a store says of itself tells; without it, it is made again, the same."""
    fingerprint = json.loads((copy / "checkpoints" / "20" / "data" / "metadata").read_text())[
        "fingerprint"
    ]
    cache, name = (
        tmp_path / "cache",
        f"python-docs-{fingerprint}",
    )  # other tests keep other stores in theirs
    store = shutil.copytree(cache_dir / name, cache / name)
    index = json.loads((store / "index.json").read_text())
    (store / "index.json").write_text(json.dumps(index | {"fingerprint": "0" * 16}))
    shutil.rmtree(copy / "checkpoints" / "20")
    refused = train(copy, "--config.log_every=1", PROPE_CACHE=str(cache))
    assert "was changed or copied; remove it to have it prepared again" in refused.error
    shutil.rmtree(store)
    resumed = train(copy, "--config.log_every=1", PROPE_CACHE=str(cache))
    assert resumed.code == 0 and losses(copy) == losses(whole[0])


@pytest.mark.slow
def test_a_late_start_is_as_fast_as_an_early_one(train, tmp_path):
    """The batch of a step is a function of the step: at a million, nothing is read again."""
    step, long = 1_000_000, ("--config.num_steps=1000100", "--config.log_every=1")
    assert train(tmp_path, *long, "--stop_at_step=1").code == 0
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "1", checkpoints / str(step))
    saved = checkpoints / str(step)
    data = json.loads((saved / "data" / "metadata").read_text()) | {"examples": 8 * step}
    (saved / "data" / "metadata").write_text(json.dumps(data))
    hashes = json.loads((saved / "hashes.json").read_text())["items"]
    write_hashes(saved, hashes | {"data": hash_json(data)})
    resumed = train(tmp_path, *long, f"--stop_at_step={step + 2}")
    assert resumed.result["step"] == step + 2, resumed.stderr
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert starts[-1]["step"] == step + 1
    assert starts[-1]["seconds"].keys() >= {
        "import",
        "data",
        "restore",
        "first batch",
        "compile",
        "first step",
    }
    assert starts[-1]["seconds"]["first batch"] < 1


@pytest.mark.slow
def test_compiled_programs_are_found_again(train, tmp_path):
    """Beside the run, where nothing says another place."""
    for expected in ("miss", "hit"):
        outcome = train(
            tmp_path,
            "--config.eval.max_windows=1",
            JAX_COMPILATION_CACHE_DIR="",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        assert outcome.code == 0, outcome.stderr
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "metrics.jsonl").unlink()
        assert f"compilation cache: {expected}" in outcome.stderr
    assert list((tmp_path / "compilation_cache").glob("cpu-*/*"))
