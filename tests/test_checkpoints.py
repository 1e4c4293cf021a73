"""A run's first checkpoint is read back, its origin is recorded, and storage is asked little."""

import shutil

import jax.numpy as jnp
import pytest
from conftest import finish
from etils import epath
from makers import make_run, restore_training, save_checkpoints

from prope import train as train_lib
from prope.errors import RunFailed, UsageError
from prope.workdir import checkpoints as checkpoints_lib
from prope.workdir.checkpoints import Checkpoints, save_imported
from prope.workdir.run import read_config


def lose_array(folder, hashes):
    """Has an array's files be lost before a checkpoint is finished."""
    shutil.rmtree(folder / "opt_state")
    write_hashes(folder, hashes)


write_hashes = checkpoints_lib.write_hashes
LOSSES = {
    "hashes.json is missing": lambda folder, hashes: None,
    "opt_state: .*cannot be read": lose_array,
}


@pytest.mark.parametrize("reason", LOSSES)
def test_the_first_checkpoint_of_a_run_is_read_back(tmp_path, monkeypatch, reason):
    config, params = make_run(tmp_path / "whole")
    monkeypatch.setattr(checkpoints_lib, "write_hashes", LOSSES[reason])
    says = f"run/checkpoints/1: was written, and cannot be read back .{reason}"
    with pytest.raises(RunFailed, match=says):
        save_checkpoints(tmp_path / "run", config, {1: params})
    # Later ones are not waited for.
    save_checkpoints(tmp_path / "whole", config, {8: params})


def test_an_imported_checkpoint_is_read_back(tmp_path, monkeypatch):
    config, params = make_run(tmp_path / "whole")
    monkeypatch.setattr(checkpoints_lib, "write_hashes", lambda folder, hashes: None)
    with pytest.raises(RunFailed, match="run/checkpoints/0: was written, and cannot be read back"):
        save_imported(epath.Path(tmp_path / "run"), params, config.to_dict(), {})


@pytest.fixture
def origin(tmp_path):
    """A run whose parameters others start from: (its config, its folder)."""
    make_run(tmp_path / "origin")
    return read_config(epath.Path(tmp_path / "origin")), tmp_path / "origin"


def test_a_run_that_was_begun_from_another_one_goes_on_from_it(origin, tmp_path):
    config, folder = origin
    expected = restore_training(config, tmp_path / "new", folder)
    assert expected != restore_training(config, tmp_path / "new")
    (tmp_path / "new" / train_lib.INIT_FROM).write_text(str(folder))
    assert restore_training(config, tmp_path / "new") == expected
    assert restore_training(config, tmp_path / "new", folder / "../origin") == expected
    other = f"--init_from={tmp_path}/other: this run was begun from {folder}; leave the flag out"
    with pytest.raises(UsageError, match=other):
        restore_training(config, tmp_path / "new", tmp_path / "other")
    shutil.move(folder, tmp_path / "moved")
    with pytest.raises(UsageError, match=f"--workdir={folder}: no run there"):
        restore_training(config, tmp_path / "new")


def test_no_weights_are_drawn_for_a_run_that_starts_from_another_one(origin, tmp_path, monkeypatch):
    config, folder = origin
    monkeypatch.setattr(train_lib, "init_state", lambda *_: pytest.fail("draws weights"))
    assert restore_training(config, tmp_path / "new", folder)[0] == 0


KILLED = "from prope import train; train.Training.save = lambda *_: os._exit(9)"


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_starts_from_the_same_parameters(
    whole, train, start_command, tmp_path
):
    flag = f"--init_from={whole[0]}"
    straight = train(tmp_path / "straight", flag, "--config.seed=3")
    workdir = f"--workdir={tmp_path / 'run'}"
    again = (train_lib.__name__, "--config=configs/quickstart.py:tiny", workdir, "--config.seed=3")
    killed = finish(start_command(*again, flag, patch=f"import os; {KILLED}"))
    assert killed.code == 9 and not list((tmp_path / "run/checkpoints").iterdir())
    rerun = finish(start_command(*again))
    assert rerun.code == 0, rerun.stderr
    for name in ("loss", "eval_loss", "init_hash"):
        assert rerun.result[name] == straight.result[name]


@pytest.mark.slow
def test_requests_of_a_save_do_not_grow_with_the_checkpoints_that_are_kept(
    bucket, storage, tmp_path
):
    config, params = make_run(tmp_path / "run")
    counts = []
    for kept in (1, 21):
        url = epath.Path(bucket) / str(kept)
        save_checkpoints(url, config, {100: params})
        for step in range(1, kept):
            (url / f"checkpoints/{step}/hashes.json").write_text("{}")
        with Checkpoints(url) as checkpoints:
            storage.requests()
            identity = {"config": config.to_dict(), "init_hash": "0" * 16}
            checkpoints.save(101, params, {"count": jnp.zeros(())}, identity, {})
            checkpoints._manager.wait_until_finished()
            counts.append(len(storage.requests()))
    assert counts[1] <= counts[0] + 5
