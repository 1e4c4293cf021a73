"""A flipped byte anywhere in a run's files is refused, or changes nothing, however it is read."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import importlib
import json
import re
import shutil

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from gcsfs.retry import HttpError
from support.heads import analysis_options
from support.models import same
from support.runs import NO_WINDOWS, make_run, restore_training
from support.text import articles, data_config, write_lines

from prope import sharding
from prope.analysis import analysis
from prope.config import resolve
from prope.errors import RunFailed, StorageFailed, UsageError
from prope.hf import exporter, importer
from prope.inference import generation, losses
from prope.optimizer import make_optimizer
from prope.runtime import files
from prope.step import init_state
from prope.train import data_state
from prope.workdir import reader
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import array_hashes, hash_on_host
from prope.workdir.run import Run, open_run, read_config, write_config

SAVED = "checkpoints/20"
# Orbax gathers the files of all processes into one tree, by which arrays are read. It keeps the
# tree of every process, which nothing here reads.
ITEM = ("manifest.ocdbt", "d/*", "ocdbt.process_0/d/* large")
PARAMS = [f"{SAVED}/params/{name}" for name in ITEM]
OPT_STATE = [f"{SAVED}/opt_state/{name}" for name in ITEM]
JSON = [f"{SAVED}/{name}" for name in ("config/metadata", "data/metadata", "hashes.json")]
UNREAD_OF_ITEM = (
    "_METADATA",
    "_sharding",
    "ocdbt.process_0/manifest.ocdbt",
    "ocdbt.process_0/d/* small",
)
UNREAD = [
    *(f"{SAVED}/{item}/{name}" for item in ("params", "opt_state") for name in UNREAD_OF_ITEM),
    *(f"{SAVED}/{name}" for name in ("_CHECKPOINT_METADATA", "commit_success.txt")),
    f"{SAVED}/*/commit_success.txt",
]
ARRAYS = PARAMS[-1]
TREE_BYTES = 2**13  # arrays are in larger files


def draw_state(spec, step):
    """Parameters and optimizer state in which every number matters."""
    rng = np.random.default_rng(step)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
        return jnp.full(leaf.shape, step, leaf.dtype)

    init = functools.partial(init_state, spec, make_optimizer(spec))
    return jax.tree.map(draw, jax.eval_shape(init))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run saved at 10 and 20 as training saves it; every test leaves it as it was."""
    base = tmp_path_factory.mktemp("damage")
    workdir = base / "run"
    for folder in (workdir, base / "text"):
        folder.mkdir()
    write_lines(base / "text" / "a.jsonl", [{"text": text} for text in articles(30)])
    fields = {"validation_fraction": 0.3, "seq_len": 32}
    spec = resolve(importlib.import_module("configs.quickstart").get_config("tiny"))
    data = data_config(base, "files", base / "text", **fields)
    spec = dataclasses.replace(spec, data=data)
    write_config(workdir, spec)
    identity = {"config": spec.to_dict(), "init_hash": "0" * 16}
    with Checkpoints(workdir) as checkpoints:
        for step in (10, 20):
            params, opt_state = draw_state(spec, step)
            data = data_state(spec, NO_WINDOWS, step)
            checkpoints.save(step, params, opt_state, identity, data)
    return workdir


def paths(run, kind):
    """The files of a kind; those of arrays and of trees are told apart by size."""
    glob, _, size = kind.partition(" ")
    found = [path for path in run.glob(glob) if path.is_file()]
    if size:
        found = [p for p in found if (p.stat().st_size > TREE_BYTES) == (size == "large")]
    assert found, kind
    return found


@contextlib.contextmanager
def flip(path, place):
    """Changes the byte at a fraction of the file."""
    content = path.read_bytes()
    at = int((len(content) - 1) * place)
    path.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(content)


def flips(run, kind, places=(0.01, 0.25, 0.5, 0.75, 0.99)):
    """One flip after the other, in every file of a kind."""
    for path in paths(run, kind):
        for place in places:
            with flip(path, place):
                yield f"{path.relative_to(run)} at {place}"


def read_despite(run, kind, read, message="") -> list:
    """What is read in spite of a flip: nothing, as every one is refused.

    Within files of arrays, a few flips meet trees of a process, which nothing reads.
    """
    results = []
    count = 0
    for flipped in flips(run, kind):
        count += 1
        try:
            results.append(read())
        except UsageError as error:
            assert re.search(message, str(error)) and "\n" not in str(error), flipped
    assert len(results) <= (count / 2 if kind.endswith("large") else 0), kind
    return results


def by_layers(run: Run):
    """All parameters, read one layer or array at a time."""
    read = run.checkpoint.read
    layers = [read(("layers",), number) for number in range(run.spec.model.num_layers)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    embedding = read(("embedder", "input_embedding"))
    return {
        "embedder": {"input_embedding": embedding},
        "final_norm": read(("final_norm",)),
        "layers": stacked,
    }


both_readers = pytest.mark.parametrize("read", [Run.params, by_layers])


# --- Parameters -------------------------------------------------------------------------------


def test_every_file_of_a_run_is_of_a_known_kind(run):
    kinds = [*PARAMS, *OPT_STATE, *JSON, *UNREAD]
    known = [path for kind in kinds for path in paths(run, kind)]
    files = {path for path in (run / SAVED).rglob("*") if path.is_file()}
    assert files == set(known) and len(known) == len(files)


@both_readers
@pytest.mark.parametrize("kind", [*PARAMS, *JSON, "config.json"])
def test_a_flipped_byte_is_refused(run, kind, read):
    """In one line, which names the array where one cannot be read."""
    reason = (
        r"params: (\['\w+'\])+ (is not what was saved|cannot be read)" if kind in PARAMS else ""
    )
    line = rf"checkpoint 20 is damaged \({reason}.*; --step=20 names it; the run also has 10"
    if kind == "config.json":
        line = "/config.json: "
    expected = read(open_run(run, 20))
    for params in read_despite(
        run, kind, lambda: open_run(run, 20).restore_newest_valid(read)[1], line
    ):
        assert same(params, expected)


@pytest.mark.parametrize("kind", JSON)
def test_another_digit_in_json_is_refused(run, kind):
    path = run / kind
    content = path.read_text()
    try:
        for found in list(re.finditer(r"\d", content))[::7]:
            other = str((int(found[0]) + 1) % 10)
            path.write_text(content[: found.start()] + other + content[found.end() :])
            with pytest.raises(UsageError, match="damaged .*(is not what was|is not readable)"):
                open_run(run, 20)
    finally:
        path.write_text(content)


@both_readers
def test_without_step_an_older_checkpoint_is_read(run, read, caplog):
    expected = read(open_run(run, 10))
    for kind in (ARRAYS, JSON[1]):
        for flipped in flips(run, kind, [0.5]):
            opened, params = open_run(run).restore_newest_valid(read)
            assert opened.step == 10 and same(params, expected), flipped
            assert re.search("checkpoint 20 is damaged .*passed over", caplog.messages[-1])


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("item", ["params", "opt_state", "data"])
def test_a_file_that_is_cut_short_or_gone_is_damage(run, tmp_path, damage, item):
    copy = shutil.copytree(run, tmp_path / "run")
    files = [path for path in (copy / SAVED / item).rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "commit_success.txt"]  # which nothing reads
    DAMAGES[damage](max(files, key=lambda path: path.stat().st_size))
    assert restore_training(read_config(copy), copy)[0] == 10
    assert (copy / f"{SAVED}.damaged").is_dir()


@pytest.mark.slow
def test_what_nothing_reads_changes_nothing(run):
    """Parameters need no file of the optimizer's state; nothing needs the unread ones."""
    spec = read_config(run)
    expected = by_layers(open_run(run, 20))
    restored = restore_training(spec, run)
    for kind in (*OPT_STATE, *UNREAD):
        for flipped in flips(run, kind):
            for read in (Run.params, by_layers):
                assert same(read(open_run(run, 20)), expected), flipped
    for kind in UNREAD:
        for flipped in flips(run, kind, [0.5]):
            assert restore_training(spec, run) == restored, flipped


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that reads have waited; nobody waits."""
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return waited


Path = type(epath.Path())
# What of checkpoint 20 cannot be read: the function that reads it, its paths, and the error.
READ_ERRORS = {
    "small file": (Path, "read_bytes", "/20/", OSError(errno.EIO, "Input/output error")),
    "list": (Path, "iterdir", "checkpoints", TimeoutError(errno.ETIMEDOUT, "Timed out")),
    "array": (
        *(ts, "open", "checkpoints/20/params"),
        ValueError("UNKNOWN: Error reading local file: Failed to read [os_error_code='5']"),
    ),
    "array, by a network": (
        *(ts, "open", "checkpoints/20/params"),
        ValueError("UNAVAILABLE: 503 from the bucket"),
    ),
}


def fail_reads(monkeypatch, kind, times, error=None):
    """Has the first reads of checkpoint 20 fail."""
    left = [times]
    owner, name, where, default = READ_ERRORS[kind]
    read = getattr(owner, name)

    def fail(place, *args, **kwargs):
        if where in str(place) and left[0]:
            left[0] -= 1
            raise error or default
        return read(place, *args, **kwargs)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("kind", READ_ERRORS)
def test_a_read_that_fails_is_repeated_and_is_not_damage(run, monkeypatch, pauses, caplog, kind):
    with monkeypatch.context() as patch:
        fail_reads(patch, kind, 2)
        opened, params = open_run(run).restore_newest_valid(Run.params)
    assert opened.step == 20 and pauses == [1, 2]
    assert same(params, by_layers(open_run(run, 20))) and "is damaged" not in caplog.text
    pauses.clear()
    failed = "checkpoints.*: cannot be read: .*; nothing was changed: see to"
    with monkeypatch.context() as patch:
        fail_reads(patch, kind, -1)
        with pytest.raises(StorageFailed, match=failed):
            open_run(run).restore_newest_valid(Run.params)
    assert pauses[:5] == [1, 2, 4, 8, 16] and 240 < sum(pauses) < 300


def http_error(code):
    """gcsfs's error for a status of HTTP."""
    return HttpError({"code": code, "message": "says the bucket"})


def array_error(status, reason, code=""):
    """TensorStore's error: it names the code after its spec."""
    text = f'Error opening "zarr" driver: {reason} [tensorstore_spec=\'{{"path": "a: b"}}\']{code}'
    return ValueError(f"{status}: {text}" if status else text)


def http(code):
    return f" [http_response_code='{code}']"


# What reading says where nothing is wrong with the checkpoint: (what is read, the error).
NO_DAMAGE = [
    *[("small file", http_error(code)) for code in (400, 503)],
    ("small file", ValueError("Bad Request: b/o\nthe token is invalid")),
    ("small file", aiohttp.ClientPayloadError("Response payload is not completed")),
    ("list", OSError(errno.ESTALE, "Stale file handle")),
    ("array", array_error("PERMISSION_DENIED", "Forbidden", http(403))),
    ("array", array_error("FAILED_PRECONDITION", "Payload Too Large", http(413))),
    ("array", array_error("ABORTED", "All 32 retry attempts failed: Too Many Requests")),
    ("array", array_error("UNKNOWN", "CURL error SSL peer certificate was not OK")),
    ("array", array_error("DATA_LOSS", "read", " [os_error_code='5']")),
]


@pytest.mark.parametrize(("kind", "error"), NO_DAMAGE, ids=lambda value: str(value)[:60])
def test_what_the_storage_says_is_not_damage(run, monkeypatch, pauses, caplog, kind, error):
    """A moment of it changes nothing; for longer it ends the command, which launchers restart."""
    with monkeypatch.context() as patch:
        fail_reads(patch, kind, 2, error)
        opened, _ = open_run(run).restore_newest_valid(Run.params)
    assert opened.step == 20 and pauses == [1, 2]
    with monkeypatch.context() as patch:
        fail_reads(patch, kind, -1, error)
        with pytest.raises(StorageFailed, match="cannot be read: ") as raised:
            open_run(run).restore_newest_valid(Run.params)
    assert raised.value.code == 76 and "is damaged" not in caplog.text


@pytest.mark.parametrize("kind", ["small file", "array"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.45 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_this_process_lacks_is_not_damage(run, monkeypatch, kind, error):
    fail_reads(monkeypatch, kind, -1, error)
    with pytest.raises(type(error)):
        open_run(run).restore_newest_valid(Run.params)


@pytest.mark.parametrize(
    "error",
    [
        array_error("NOT_FOUND", "Gone", http(410)),
        array_error("OUT_OF_RANGE", "an object is cut short", http(416)),
        array_error("NOT_FOUND", "no file", " [os_error_code='2']"),
        array_error("DATA_LOSS", "CRC-32C checksum verification failed"),
        array_error("FAILED_PRECONDITION", "Truncated Zstd-compressed stream"),
        array_error("", "Error parsing object member shape"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_what_is_missing_or_cannot_be_decoded_is_damage(run, monkeypatch, pauses, caplog, error):
    fail_reads(monkeypatch, "array", -1, error)
    opened, _ = open_run(run).restore_newest_valid(Run.params)
    assert opened.step == 10 and pauses == []
    assert "checkpoint 20 is damaged (params: " in caplog.text


@pytest.mark.parametrize("content", ["folder", "[]", "7", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["hashes.json", "config/metadata"])
def test_a_json_file_that_is_something_else_is_damage(run, tmp_path, caplog, name, content):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "checkpoints/20" / name
    path.unlink()
    if content == "folder":
        path.mkdir()
    else:
        path.write_text(content)
    opened, _ = open_run(copy).restore_newest_valid(Run.params)
    assert opened.step == 10
    assert f"checkpoint 20 is damaged ({name} is " in caplog.text


@pytest.mark.parametrize("kind", ["small file", "array"])
def test_a_read_that_is_not_permitted_ends_the_command_at_once(run, monkeypatch, pauses, kind):
    denied = PermissionError(errno.EACCES, "Permission denied")
    if kind == "array":
        denied = array_error("PERMISSION_DENIED", "open", " [os_error_code='13']")
    with monkeypatch.context() as patch:
        fail_reads(patch, kind, -1, denied)
        with pytest.raises(RunFailed, match="checkpoints/20") as raised:
            open_run(run).restore_newest_valid(Run.params)
    assert raised.value.code == 1, "launchers would restart without end"
    assert pauses == []


def test_one_layer_reads_one_layer(tmp_path):
    """Bytes of the params item that leave the disk, as TensorStore counts them."""
    _, params = make_run(tmp_path / "run", num_layers=8, embed_dim=128, hidden_dim=512)
    item = tmp_path / "run" / "checkpoints" / "7" / "params"
    size = sum(path.stat().st_size for path in item.rglob("*") if path.is_file())
    run = open_run(tmp_path / "run")
    run.checkpoint.read(("layers",), 0)  # opens the arrays
    before = bytes_read()
    layer = run.checkpoint.read(("layers",), 5)
    read = bytes_read() - before
    assert same(layer, jax.tree.map(lambda leaf: leaf[5], params["layers"]))
    layer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
    assert 0.8 * layer_bytes < read < 1.05 * layer_bytes < size / 7


def bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_hashes_on_the_host_are_those_of_the_devices():
    rng = np.random.default_rng(0)
    layers = rng.standard_normal((3, 70_001, 2)).astype(np.float32)
    halves = jnp.asarray(layers[..., 0], "bfloat16")
    hashes = array_hashes({"layers": {"w": layers, "b": halves}, "table": layers[0]})
    for name, leaf in (("w", layers), ("b", np.asarray(halves))):
        chunks = [hash_on_host(chunk, i * chunk.size) for i, chunk in enumerate(leaf)]
        assert chunks == hashes[f"['layers']['{name}']"]
        assert sum(chunks) % 2**32 == hash_on_host(leaf)
    assert [hash_on_host(layers[0])] == hashes["['table']"]
    assert int(sharding.hash_bits(layers)) == hash_on_host(layers)


def test_one_byte_of_the_optimizer_state_is_noticed_by_its_hash(run, tmp_path):
    """In an array, as no checksum of a compressed chunk would notice it."""
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "10")
    spec = read_config(copy)
    hashes = json.loads((copy / SAVED / "hashes.json").read_text())["items"]
    state = jax.tree.map(np.array, draw_state(spec, 20)[1])
    assert array_hashes(state) == hashes["opt_state"]
    leaves = jax.tree.leaves(state)
    for leaf in (leaves[0], leaves[-1]):
        leaf.reshape(-1).view(np.uint8)[0] ^= 1
        reader.write_hashes(copy / SAVED, hashes | {"opt_state": array_hashes(state)})
        with pytest.raises(UsageError, match="20 is damaged .opt_state.* is not what was saved"):
            restore_training(spec, copy)
        leaf.reshape(-1).view(np.uint8)[0] ^= 1


def test_imported_parameters_are_verified(run_and_export, tmp_path):
    importer.import_run(run_and_export / "hf", tmp_path / "run")
    item = tmp_path / "run" / "checkpoints" / "0" / "params"
    expected = by_layers(open_run(tmp_path / "run"))
    files = [path for path in item.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    for read in (Run.params, by_layers):
        assert same(read(open_run(tmp_path / "run")), expected)
        for place in (0.1, 0.3, 0.5, 0.7, 0.9):
            with flip(largest, place), pytest.raises(UsageError, match="checkpoint 0 is damaged"):
                open_run(tmp_path / "run").restore_newest_valid(read)


# --- Commands ---------------------------------------------------------------------------------


def evaluate(workdir, output, step):
    step = step and str(step)
    options = losses.LossOptions(str(workdir), step, max_windows=2, again=True)
    return next(losses.evaluations(options))["loss"]


def sample(workdir, output, step):
    sampling = generation.Sampling(length=3, temperature=0.0)
    return generation.continue_prompts(str(workdir), step, ["a"], sampling, 0)["text"]


def analyze(workdir, output, step):
    options = analysis_options(step=step, sequences=1, seq_len=16, channels=0)
    return analysis.analyse(workdir, options)["heads"]


def export(workdir, output, step):
    exporter.export(workdir, output / "hf", step)
    content = (output / "hf" / "model.safetensors").read_bytes()
    shutil.rmtree(output / "hf")
    return content


COMMANDS = [evaluate, export, sample, analyze]  # with --step
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("command", [evaluate, export, slow(sample), slow(analyze)])
@pytest.mark.parametrize(
    "kinds", [[ARRAYS], slow([*PARAMS[:-1], *JSON, "config.json"])], ids=["arrays", "others"]
)
def test_commands_refuse_a_flipped_byte_and_write_nothing(run, tmp_path, command, kinds):
    copy = shutil.copytree(run, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    for kind in kinds:
        results = read_despite(copy, kind, lambda: command(copy, tmp_path, 20))
        assert results or sorted(tmp_path.rglob("*")) == before
        for result in results:
            assert result == command(copy, tmp_path, 20)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_pass_over_a_damaged_newest_checkpoint(run, tmp_path, command):
    copy = shutil.copytree(run, tmp_path / "run")
    expected = command(copy, tmp_path, 10)
    assert command(copy, tmp_path, 20) != expected or command is sample
    for _ in flips(copy, ARRAYS, [0.5]):
        assert command(copy, tmp_path, None) == expected


@pytest.mark.parametrize(
    "kinds",
    [OPT_STATE[-1:], slow([*OPT_STATE[:-1], *PARAMS, *JSON])],
    ids=["optimizer state", "others"],
)
def test_training_neither_resumes_nor_starts_from_a_flipped_byte(run, tmp_path, kinds):
    copy = shutil.copytree(run, tmp_path / "run")
    new = tmp_path / "new"
    shutil.rmtree(copy / "checkpoints" / "10")
    spec = read_config(copy)
    resumed = restore_training(spec, copy)
    started = restore_training(spec, new, copy)
    assert (resumed[0], started[0]) == (20, 0) and resumed[1] == started[1]
    refused = "nothing whole to go on from: checkpoint 20 is damaged"
    resume = functools.partial(restore_training, spec, copy)
    start = functools.partial(restore_training, spec, new, copy)
    for kind in kinds:
        assert all(restored == resumed for restored in read_despite(copy, kind, resume, refused))
        if kind not in OPT_STATE:  # which a new run does not read
            assert all(restored == started for restored in read_despite(copy, kind, start, refused))
    assert list((new / "checkpoints").iterdir()) == []
