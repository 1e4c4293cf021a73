import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import filelock
import pytest

pytest.register_assert_rewrite("support", "oracles")

from support.commands import CONFIG, ROOT, Outcome, devices_flags, finish, outcome
from support.forks import Command

# The tests and the processes that they start inherit these settings of JAX.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
# Threads of torch and NumPy wait for one another: two of each worker on two cores take five times
# what one takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "agg"  # a notebook names one that is not installed here
# A script's `pytest &` ignores Ctrl-C, and so would the commands that the tests stop by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# One compilation cache for all workers and all clones of a user: its keys hold the program, the
# flags and the versions.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prope-tests"
PROGRAMS = pathlib.Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{CACHE}/programs"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
# XLA's older emitters compile loops for CPUs in half the time; XLA refuses flags that it has not.
QUICK_COMPILATION = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10.") and (
    os.environ.get("PROPE_TESTS") != "optimized"
):
    given = os.environ.get("XLA_FLAGS", "")
    is_given = QUICK_COMPILATION in given
    os.environ["XLA_FLAGS"] = given if is_given else f"{QUICK_COMPILATION} {given}"
# Where Python is told to keep no bytecode, as in many containers, every process would compile
# all that it imports.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = f"{ROOT}/.pytest_cache/bytecode"


def pytest_collection_modifyitems(items):
    """Sorts the longest first, so that all workers end together."""

    def order(item) -> tuple[bool, bool]:
        is_fast = item.get_closest_marker("slow") is None
        return is_fast, "test_real_models" not in item.nodeid

    items.sort(key=order)


def pytest_collection_finish():
    gc.freeze()  # else each collection of garbage goes through all that was imported


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    for program in PROGRAMS.glob("*-cache"):
        if program.stat().st_mtime < time.time() - 7 * 86_400:
            program.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)  # before any fixture, so that runs of all tests have the same bits
def pytest_runtest_setup(item):
    """Has LLVM optimize little, here and in commands, which halves compile times.

    Tests marked `optimized` are optimized; PROPE_TESTS=optimized optimizes all. Compiled HLO and
    memory are the same.
    """
    import jax

    quick = "optimized" not in (
        os.environ.get("PROPE_TESTS"),
        *(mark.name for mark in item.iter_markers()),
    )
    if jax.config.read("jax_disable_most_optimizations") != quick:
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.clear_caches()  # their keys leave this setting out
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(quick).lower()


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory) -> pathlib.Path:
    """A directory that all workers of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cache_dir(shared_dir) -> pathlib.Path:
    """The cache of token stores, which have a lock of their own."""
    return shared_dir / "cache"


@pytest.fixture(scope="session")
def once(shared_dir):
    """Calls `make(directory)` in one worker only: (directory, result), for reading by all."""

    def run(name: str, make) -> tuple[pathlib.Path, object]:
        directory, result = shared_dir / name, shared_dir / f"{name}.json"
        with filelock.FileLock(shared_dir / f"{name}.lock"):
            if not result.exists():
                shutil.rmtree(directory, ignore_errors=True)
                directory.mkdir()
                result.write_text(json.dumps(make(directory)))
        return directory, json.loads(result.read_text())

    return run


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """A Cloud Storage server that this worker and its commands use from now on."""
    from support.buckets import Server

    server = Server(tmp_path_factory.mktemp("storage"))
    os.environ.update(server.environment)
    yield server
    server.stop()


@pytest.fixture
def bucket(storage, request) -> str:
    """A URL, gs://bucket/..., of this test's own, with nothing below it."""
    return f"gs://bucket/{re.sub(r'[^a-z0-9_]+', '-', request.node.name)}-{time.time_ns()}"


@pytest.fixture(scope="session")
def start_command(cache_dir, tmp_path_factory):
    """Starts python -m MODULE in another process, after the statements of `patch`."""

    def start(
        module: str, *arguments: str, devices: int = 1, patch: str = "", **environment: str
    ) -> Command:
        defaults = {"PROPE_CACHE": str(cache_dir), "XLA_FLAGS": devices_flags(devices)}
        env = os.environ | defaults | environment
        return Command(
            module,
            [str(argument) for argument in arguments],
            env,
            tmp_path_factory.mktemp("command"),
            patch,
        )

    return start


@pytest.fixture(scope="session")
def run_command(start_command, cache_dir):
    """Runs python -m MODULE as a user does, in a process of its own."""

    def run(module: str, *arguments: str, **options) -> Outcome:
        if "PYTHONPATH" in options:  # which an interpreter reads when it starts
            command = [sys.executable, "-m", module, *map(str, arguments)]
            env = os.environ | {"PROPE_CACHE": str(cache_dir)} | options
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
            )
            return outcome(done.returncode, done.stdout, done.stderr)
        return finish(start_command(module, *arguments, **options))

    return run


@pytest.fixture(scope="session")
def train(run_command):
    """Trains the tiny quickstart config; keyword arguments are those of `run_command`."""

    def run(workdir, *arguments: str, **options) -> Outcome:
        return run_command("prope.train", CONFIG, f"--workdir={workdir}", *arguments, **options)

    return run


@pytest.fixture(scope="session")
def start_pod(start_command):
    """Starts two processes with two devices each; a list of arguments is one for each."""
    from support.processes import pod_environments

    def start(module, *arguments, patch=""):
        started = []
        for process, environment in enumerate(pod_environments()):
            words = [each[process] if isinstance(each, list) else each for each in arguments]
            started.append(start_command(module, *words, devices=2, patch=patch, **environment))
        return started

    return start


@pytest.fixture(scope="session")
def train_once(once, train):
    """Trains a run of a name, which no test may change: (workdir, result)."""

    def run(name, *arguments):
        def make(directory):
            outcome = train(directory / "run", *arguments)
            assert outcome.code == 0, outcome.stderr
            return outcome.result

        directory, result = once(name, make)
        return directory / "run", result

    return run


@pytest.fixture(scope="session")
def trained(train_once):
    """A run of 20 steps, saved at 10 and 20: (workdir, result)."""
    return train_once("trained", "--config.log_every=1")


@pytest.fixture(scope="session")
def whole(trained, tmp_path_factory):
    """A copy of that run for this worker, to which commands may add files."""
    workdir, result = trained
    return shutil.copytree(workdir, tmp_path_factory.mktemp("runs") / "whole"), result


@pytest.fixture(scope="session")
def run_and_export(once):
    """A run with random weights and its export, which no test may change."""

    def make(folder):
        from support.runs import make_run

        from prope.hf import exporter

        make_run(folder / "run")
        exporter.export(folder / "run", folder / "hf")

    return once("exchange", make)[0]


@pytest.fixture
def exported(run_and_export, tmp_path):
    """tmp_path with a run in it and its export, which is returned: to be broken."""
    shutil.copytree(run_and_export, tmp_path, dirs_exist_ok=True)
    return tmp_path / "hf"


@pytest.fixture(scope="session")
def sentencepiece_model(once) -> str:
    def make(folder):
        import sentencepiece
        from support.text import articles

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(articles(200)),
            model_prefix=str(folder / "model"),
            vocab_size=300,
            model_type="bpe",
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            byte_fallback=True,
            minloglevel=2,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
        )

    return str(once("sentencepiece", make)[0] / "model.model")


@pytest.fixture(scope="session")
def base(once):
    """Two runs with the same weights, p = 0 and p = 1, and the documents they read."""

    def make(base):
        from support.runs import edit_run, letter_documents, make_run
        from support.text import write_lines

        (base / "text").mkdir()
        write_lines(base / "text" / "a.jsonl", [{"text": text} for text in letter_documents()])
        (base / "runs").mkdir()
        for name, p in (("nope", 0.0), ("rope", 1.0)):
            make_run(base / "runs" / name, p)
            edit_run(base / "runs" / name, base)

    return once("base", make)[0]


@pytest.fixture
def runs(base, tmp_path):
    """A copy of the runs that a test may write to."""
    return shutil.copytree(base / "runs", tmp_path / "runs")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A sweep whose numbers are drawn at random, everything evaluated."""
    from support.sweeps import write_sweep

    directory = tmp_path_factory.mktemp("template")
    write_sweep(directory)
    return directory


@pytest.fixture
def interpreted(monkeypatch):
    """Has the CPU run the TPU's attention kernel from its source."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    make = functools.partial(splash_attention_kernel.make_splash_mqa, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mqa", make)


@pytest.fixture(scope="session")
def gemma_rope():
    """The file of the gemma package that rotates, without the package around it."""
    try:
        files = importlib.metadata.files("gemma")
    except importlib.metadata.PackageNotFoundError:
        install = "pip install --no-deps gemma==3.3.0, as .ci/run does"
        pytest.skip(f"compares with DeepMind's gemma: {install}")
    name = "gemma/gm/math/_positional_embeddings.py"
    (path,) = (file.locate() for file in files if str(file) == name)
    spec = importlib.util.spec_from_file_location("gemma_rope", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.apply_rope


@pytest.fixture(scope="session")
def libraries():
    """(transformers, torch)."""
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    return pytest.importorskip("transformers", reason="the hf extra is not installed"), torch


@pytest.fixture
def remote_code(tmp_path, monkeypatch):
    """Where transformers copies the code of a checkpoint before it executes it."""
    folder = f"{tmp_path}/remote_code"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.setattr("sys.path", [*sys.path])
