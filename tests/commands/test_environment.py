"""Settings of the environment: each is refused, or proven to change no result."""

import contextlib
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
    "OMP_NUM_THREADS": "2",
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


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_a_setting_that_changes_results_is_refused(name, value):
    with pytest.raises(UsageError, match=f"^{name.upper()}={value}: [^\n]*{name.upper()}$"):
        check_environment(jax.config.values | {name: value})


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--xla_cpu_enable_fast_math=true", True),
        ("--xla_cpu_enable_fast_math", True),
        ("--xla_dump_to=/x --xla_cpu_enable_fast_min_max=1", True),
        ("--xla_cpu_enable_fast_math=false", False),
        ("--xla_cpu_fast_math_honor_nans=true", False),
        ("--xla_force_host_platform_device_count=8", False),
    ],
)
def test_fast_math_is_refused(flags, refused, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    expected = contextlib.nullcontext()
    if refused:
        expected = pytest.raises(UsageError, match="--xla_cpu_enable_fast")
    with expected:
        check_environment()


@pytest.mark.parametrize(
    ("encoding", "refused"), [("UTF-8", False), ("utf8", False), ("ISO-8859-1", True)]
)
def test_a_locale_without_utf_8_is_refused(encoding, refused, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: encoding)
    expected = pytest.raises(UsageError, match=encoding) if refused else contextlib.nullcontext()
    with expected:
        check_environment()


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
def test_a_command_refuses_before_it_begins(run_command, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "1"}
    refused = run_command("prope.evaluate", f"--workdir={tmp_path}/run", **environment)
    assert refused.code == 2
    assert refused.error.startswith("error: JAX_ENABLE_X64=True: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("platforms", ["cuda", "gpus", "tpu", "rocm,cpu"])
def test_a_platform_that_is_not_here_is_refused_and_no_directory_stays(train, tmp_path, platforms):
    """With the packages of a TPU or GPU, and without."""
    run = train(tmp_path / "run", JAX_PLATFORMS=platforms)
    assert run.code == 2 and run.error.startswith(f"error: JAX_PLATFORMS={platforms}: ")
    assert "cpu" in run.error and "source launch/setup.sh gpu" in run.error
    assert not (tmp_path / "run").exists()


# What Colab and continuous integration set for every command.
HOST = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYTHONWARNINGS": "ignore:::pip._internal.cli.base_command",
    "PYTHONSTARTUP": "/none.py",
    "TERM": "dumb",
    "COLUMNS": "0",
    "TQDM_DISABLE": "1",
    "PYTHONIOENCODING": "ascii",
}


def test_a_page_is_drawn_whatever_a_host_sets(whole, tmp_path):
    output = tmp_path / "page"
    done = subprocess.run(
        [sys.executable, "-m", "prope.report", f"--workdir={whole[0]}", f"--output={output}"],
        cwd=ROOT,
        env=os.environ | HOST,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(output.rglob("*.png"))


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
