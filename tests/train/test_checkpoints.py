"""A run's first checkpoint is read back, its origin is recorded, and storage is asked little."""

import errno
import functools
import shutil
import time

import jax
import jax.numpy as jnp
import pytest
from etils import epath
from gcsfs.retry import HttpError
from support.commands import finish
from support.models import same
from support.runs import NO_WINDOWS, make_run, restore_training, save_checkpoints

from configs import gemma4_e2b
from configs.quickstart import get_config
from prope import parameters, sharding
from prope import step as step_lib
from prope import train as train_lib
from prope.config import resolve
from prope.errors import RunFailed, UsageError
from prope.hf import exporter
from prope.optimizer import make_optimizer
from prope.parameters import TABLE
from prope.step import init_state, prepare
from prope.workdir import checkpoints as checkpoints_lib
from prope.workdir.checkpoints import Checkpoints, save_imported
from prope.workdir.hashes import hash_arrays
from prope.workdir.reader import CheckpointReader, Damaged
from prope.workdir.run import open_run, read_config
from prope.workdir.source import INIT_FROM


def lose_array(folder, hashes):
    """Has an array's files be lost before a checkpoint is finished."""
    shutil.rmtree(folder / "params")
    write_hashes(folder, hashes)


write_hashes = checkpoints_lib.write_hashes
LOSSES = {
    "hashes.json is missing": lambda folder, hashes: None,
    "params: .*cannot be read": lose_array,
}


@pytest.mark.parametrize("reason", LOSSES)
def test_the_first_checkpoint_of_a_run_is_read_back(tmp_path, monkeypatch, reason):
    spec, params = make_run(tmp_path / "whole")
    monkeypatch.setattr(checkpoints_lib, "write_hashes", LOSSES[reason])
    says = f"run/checkpoints/1: was written, and cannot be read back .{reason}"
    with pytest.raises(RunFailed, match=says):
        save_checkpoints(tmp_path / "run", spec, {1: params})
    with pytest.raises(RunFailed, match="imported/checkpoints/0: .*cannot be read back"):
        identity = {"config": spec.to_dict(), "init_hash": "0" * 16}
        save_imported(epath.Path(tmp_path / "imported"), params, identity, {})
    # Later ones are not waited for.
    save_checkpoints(tmp_path / "whole", spec, {8: params})


# What saving meets, and the exit code: 76 where launchers may start again.
SAVING = [
    (OSError(errno.EIO, "Input/output error"), 76),
    (ValueError("Bad Request [http_response_code='400']"), 76),
    (ValueError("FAILED_PRECONDITION: Failed to write [os_error_code='107']"), 76),
    (HttpError({"code": 403, "message": "says the bucket"}), 76),
    (ValueError("UNKNOWN: Failed to write: No space left on device [os_error_code='28']"), 1),
    (ValueError("OUT_OF_RANGE: Error writing: File too large [os_error_code='27']"), 1),
    (ValueError("PERMISSION_DENIED: Failed to open [os_error_code='13']"), 1),
    (OSError(errno.EROFS, "Read-only file system"), 1),
    (ValueError("an error of the program"), None),
    (jax.errors.JaxRuntimeError("INTERNAL: an error of the device"), None),
]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The config and the parameters of a run."""
    return make_run(tmp_path_factory.mktemp("small") / "run")


@pytest.mark.parametrize(("error", "code"), SAVING, ids=lambda value: str(value)[:40])
def test_only_what_may_pass_is_tried_again_when_a_save_fails(
    small_run, tmp_path, monkeypatch, error, code
):
    spec, params = small_run
    monkeypatch.setattr(checkpoints_lib, "write_hashes", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises((type(error), RunFailed)) as raised:
        save_checkpoints(tmp_path / "run", spec, {1: params})
    if code is None:
        assert raised.value is error
    else:
        assert "checkpoint 1 could not be written" in str(raised.value)
        assert raised.value.code == code
        assert ("ulimit -f" in str(raised.value)) == ("too large" in str(error))


def test_a_save_that_begins_while_another_is_written_has_hashes_of_its_own(
    small_run, tmp_path, monkeypatch
):
    spec, params = small_run
    finish_save = Checkpoints._finish

    def finish_late(checkpoints):
        time.sleep(0.3)
        finish_save(checkpoints)

    monkeypatch.setattr(Checkpoints, "_finish", finish_late)
    scale = params["final_norm"]["scale"]
    by_step = {step: params | {"final_norm": {"scale": step * scale}} for step in (1, 2, 3)}
    save_checkpoints(tmp_path, spec, by_step)
    for step in by_step:
        reader = CheckpointReader(epath.Path(tmp_path) / f"checkpoints/{step}")
        assert same(reader.read(("final_norm", "scale")), step * scale)


@pytest.fixture
def origin(tmp_path):
    """A run whose parameters others start from: (its config, its folder)."""
    make_run(tmp_path / "origin")
    return read_config(epath.Path(tmp_path / "origin")), tmp_path / "origin"


def test_a_run_that_was_begun_from_another_one_goes_on_from_it(origin, tmp_path):
    spec, folder = origin
    expected = restore_training(spec, tmp_path / "new", folder)
    assert expected != restore_training(spec, tmp_path / "new")
    (tmp_path / "new" / INIT_FROM).write_text(str(folder))
    assert restore_training(spec, tmp_path / "new") == expected
    assert restore_training(spec, tmp_path / "new", folder / "../origin") == expected
    with pytest.raises(UsageError, match=f"--init_from={tmp_path}/other: .*{folder}"):
        restore_training(spec, tmp_path / "new", tmp_path / "other")
    shutil.move(folder, tmp_path / "moved")
    with pytest.raises(UsageError, match=f"--workdir={folder}: no run there"):
        restore_training(spec, tmp_path / "new")


def test_no_weights_are_drawn_for_a_run_that_starts_from_another_one(origin, tmp_path, monkeypatch):
    spec, folder = origin
    monkeypatch.setattr(train_lib, "init_state", lambda *_: pytest.fail("draws weights"))
    assert restore_training(spec, tmp_path / "new", folder)[0] == 0


NAMES = ("adamw", "lion", "adafactor", "muon")


def save_training(spec, folder):
    """Saves the state that training starts from, as step 10."""
    prepared = prepare(spec, jax.devices())
    params, opt_state = jax.jit(functools.partial(init_state, spec, prepared.optimizer))()
    with Checkpoints(folder) as checkpoints:
        data = train_lib.data_state(spec, NO_WINDOWS, 10)
        identity = {"config": spec.to_dict(), "init_hash": "0" * 16}
        checkpoints.save(10, params, opt_state, identity, data)
    return hash_arrays(params), hash_arrays(opt_state)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_each_optimizer_is_restored_and_of_no_other(tmp_path, monkeypatch, name):
    """Where the config says the same, as when code is changed, the names and shapes tell."""
    spec = resolve(get_config("tiny")).replace({"optimizer.name": name})
    saved = save_training(spec, tmp_path)
    assert restore_training(spec, tmp_path) == (10, *saved)
    for other in NAMES:
        if other == name:
            continue
        changed = spec.replace({"optimizer.name": other})
        with pytest.raises(UsageError, match=f"optimizer.name: {name}, not {other}"):
            restore_training(changed, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(step_lib, "make_optimizer", lambda _, c=changed: make_optimizer(c))
            with pytest.raises(UsageError, match=r": opt_state .*\[.*--init_from") as raised:
                restore_training(spec, tmp_path)
        assert "damaged" not in str(raised.value) and "\n" not in str(raised.value)


# What other code might make: the path of a row of parameters and its change.
OTHER_CODE = {
    "one more": {"layers/extra_norm/scale": TABLE["layers/pre_ffw_norm/scale"]},
    "another shape": {"final_norm/scale": TABLE["final_norm/scale"]._replace(axes="F")},
    "another name": {
        "earlier_norm/scale": TABLE["final_norm/scale"],
        "final_norm/scale": TABLE["final_norm/scale"]._replace(exists_where="use_qk_norm"),
    },
}


@pytest.mark.parametrize("rows", OTHER_CODE.values(), ids=OTHER_CODE)
@pytest.mark.parametrize("saves", [True, False], ids=["saves", "reads"])
def test_parameters_of_other_code_are_refused_by_all_that_read_them(
    tmp_path, monkeypatch, rows, saves
):
    """Code that makes other parameters has saved the checkpoint, or reads it."""
    with monkeypatch.context() as patch:
        if saves:
            patch.setattr(parameters, "TABLE", TABLE | rows)
        make_run(tmp_path / "run")
    if not saves:
        monkeypatch.setattr(parameters, "TABLE", TABLE | rows)
    path = ".*".join(next(iter(rows)).split("/"))
    readers = {
        "evaluate, sample, analyze": lambda: open_run(tmp_path / "run"),
        "init_from": lambda: restore_training(
            read_config(epath.Path(tmp_path / "run")), tmp_path / "new", tmp_path / "run"
        ),
        "export": lambda: exporter.export(tmp_path / "run", tmp_path / "hf"),
    }
    for read in readers.values():
        with pytest.raises(UsageError, match=rf"checkpoints/7: params .*{path}"):
            read()
    assert not (tmp_path / "hf").exists()


def test_another_dtype_is_not_damage(tmp_path):
    """As where JAX_ENABLE_X64 makes parameters of float64: the line names both."""
    _, params = make_run(tmp_path / "run")
    wide = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    abstract = sharding.with_shardings(wide, sharding.make_mesh())
    with pytest.raises(UsageError, match="is float32.*bfloat16") as raised:
        open_run(tmp_path / "run").params(abstract)
    assert not isinstance(raised.value, Damaged)


@pytest.mark.parametrize(
    "names", ["", "extra_layernorm", "input_layernorm"], ids=["none", "unknown", "taken"]
)
def test_a_parameter_that_transformers_does_not_read_is_not_exported(tmp_path, monkeypatch, names):
    row = TABLE["layers/pre_ffw_norm/scale"]._replace(hf_names=names)
    monkeypatch.setattr(parameters, "TABLE", TABLE | {"layers/extra_norm/scale": row})
    make_run(tmp_path / "run")
    with pytest.raises(UsageError, match="layers/extra_norm/scale"):
        exporter.export(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


KILLED = """
import os
from prope.workdir.checkpoints import Checkpoints
Checkpoints.save = lambda *_: os._exit(9)
"""


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_starts_from_the_same_parameters(
    whole, train, start_command, tmp_path
):
    flag = f"--init_from={whole[0]}"
    straight = train(tmp_path / "straight", flag, "--config.seed=3")
    workdir = f"--workdir={tmp_path / 'run'}"
    again = (train_lib.__name__, "--config=configs/quickstart.py:tiny", workdir, "--config.seed=3")
    killed = finish(start_command(*again, flag, patch=KILLED))
    assert killed.code == 9 and not list((tmp_path / "run/checkpoints").iterdir())
    rerun = finish(start_command(*again))
    assert rerun.code == 0, rerun.stderr
    for name in ("loss", "eval_loss", "init_hash"):
        assert rerun.result[name] == straight.result[name]


@pytest.mark.slow
def test_layers_in_stacks_are_restored_and_each_is_read_alone(tmp_path):
    """Gemma 4 E2B, tiny."""
    spec = resolve(gemma4_e2b.get_config("tiny"))
    saved = save_training(spec, tmp_path)
    assert restore_training(spec, tmp_path) == (10, *saved)
    reader = CheckpointReader(tmp_path / "checkpoints/10")
    layers = reader.read(("layers",))
    assert len(layers) > 1
    for stack, expected in layers.items():
        row = reader.read(("layers", stack), 0)
        assert same(row, jax.tree.map(lambda leaf: leaf[0], expected)), stack
