"""Settings of the environment: each is refused, or proven to change no result."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.commands import ROOT, losses
from support.models import small

from prope import model
from prope.errors import UsageError
from prope.inference.generation import row_keys
from prope.runtime.environment import REQUIRED, check_environment, recorded_variables

OTHERS = {
    "jax_enable_x64": "true",
    "jax_threefry_partitionable": "false",
    "jax_random_seed_offset": "1",
    "jax_disable_jit": "true",
}
GUARDS = ["", "_host_to_device", "_device_to_host", "_device_to_device"]
FORBIDDEN = {f"jax_transfer_guard{guard}": "disallow" for guard in GUARDS}
# Under these a run is bit for bit the same.
HARMLESS = {
    "JAX_DEFAULT_PRNG_IMPL": "rbg",  # every key names its own
    "JAX_ENABLE_CUSTOM_PRNG": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_LOG_COMPILES": "1",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_TRANSFER_GUARD": "log",
    "JAX_ENABLE_CHECKS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
    "PYTHONHASHSEED": "7",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_ALL": "C",
    "TZ": "Asia/Kathmandu",
}


def read_settings(environment) -> dict:
    """The settings that JAX has after it was imported with these variables."""
    script = """
import jax, json
print(json.dumps({name: str(value) for name, value in jax.config.values.items()}))
"""
    env = os.environ | environment
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_setting_is_a_variable_and_its_default_is_the_required_value():
    assert OTHERS.keys() == REQUIRED.keys()
    changed = read_settings({name.upper(): value for name, value in OTHERS.items()})
    check_environment()
    for name in REQUIRED:
        assert changed[name] != str(jax.config.values[name]), name


@pytest.mark.parametrize(("name", "value"), (OTHERS | FORBIDDEN).items())
def test_a_setting_that_changes_results_or_forbids_copies_is_refused(name, value):
    with pytest.raises(UsageError, match=f"^{name.upper()}={value}: [^\n]*{name.upper()}$"):
        check_environment(jax.config.values | {name: value})


def test_how_jax_is_set_is_recorded(monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "high")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a")
    recorded = recorded_variables()
    assert recorded["JAX_DEFAULT_MATMUL_PRECISION"] == "high"
    assert recorded["LIBTPU_INIT_ARGS"] == "--a" and "HOME" not in recorded


@pytest.mark.slow
def test_settings_that_are_allowed_change_no_result(train, trained, tmp_path):
    run = train(tmp_path, "--config.log_every=1", PYTHONPATH=str(ROOT), **HARMLESS)
    assert run.code == 0, run.stderr
    assert losses(tmp_path) == losses(trained[0]), "bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["train", "plan", "import_hf"])
def test_every_command_refuses_before_it_begins(module, run_command, tmp_path):
    tiny = f"--config={ROOT}/configs/quickstart.py:tiny"
    flags = {
        "train": [tiny],
        "plan": [tiny, "--topology=v5e:2x4"],
        "import_hf": [f"--input={tmp_path}"],
    }
    workdir = [] if module == "plan" else [f"--workdir={tmp_path}/run"]
    arguments = [*flags[module], *workdir]
    environment = {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "1"}
    refused = run_command(f"prope.{module}", *arguments, **environment)
    assert refused.code == 2
    assert refused.error.startswith("error: JAX_ENABLE_X64=True: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_random_numbers_do_not_depend_on_the_default_generator(implementation):
    def draw():
        key = jax.random.key(5, impl=model.PRNG)
        params = model.init(small(num_layers=1), key)
        return jax.tree.leaves(params), jax.random.key_data(row_keys(5, 2))

    expected = draw()
    with jax.default_prng_impl(implementation):
        actual = draw()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
