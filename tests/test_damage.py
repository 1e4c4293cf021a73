"""A flipped byte anywhere in a run's files is refused, or changes nothing: for every way to read a checkpoint."""

import contextlib
import errno
import functools
import importlib
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from makers import NO_WINDOWS as WINDOWS
from makers import analysis_options as asked
from makers import articles, make_run, same
from makers import restore_training as start

from prope import sharding
from prope.analysis import analysis
from prope.errors import RunFailed, UsageError
from prope.hf import exporter, importer
from prope.inference import evaluation, generation
from prope.optimizer import make_optimizer
from prope.runtime import files
from prope.step import init_state
from prope.train import data_state
from prope.workdir import reader as readers
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import array_hashes, hash_on_host
from prope.workdir.run import Run, open_run, read_config, write_config

ITEMS = {
    item: [
        f"checkpoints/20/{item}/{name}"
        for name in (
            "_METADATA",
            "_sharding",
            "array_metadatas/process_0",
            "manifest.ocdbt",
            "d/*",
            "ocdbt.process_0/manifest.ocdbt",
            "ocdbt.process_0/d/*",
        )
    ]
    for item in ("params", "opt_state")
}
JSON = [f"checkpoints/20/{name}" for name in ("config/metadata", "data/metadata", "files.json")]
KINDS = [*ITEMS["params"], *ITEMS["opt_state"], *JSON, "config.json"]
# Orbax writes these when all is saved, and nothing reads them back.
UNREAD = ["_CHECKPOINT_METADATA", "commit_success.txt", "*/commit_success.txt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run saved at 10 and 20 as training saves it; every test leaves it as it was."""
    base = tmp_path_factory.mktemp("damage")
    (base / "text").mkdir()
    (base / "text" / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in articles(30))
    )
    config = importlib.import_module("configs.quickstart").get_config("tiny")
    config.data.update(
        {"dataset": "files", "data_dir": str(base / "text"), "cache_dir": str(base / "cache")}
    )
    config.data.update({"seq_len": 32, "validation_fraction": 0.3})
    (base / "run").mkdir()
    write_config(base / "run", config)
    params, opt_state = jax.jit(functools.partial(init_state, config, make_optimizer(config)))()
    with Checkpoints(base / "run") as checkpoints:
        for step in (10, 20):
            data = data_state(config, WINDOWS, step)
            checkpoints.save(
                step, params, opt_state, {"config": config.to_dict(), "init_hash": "0" * 16}, data
            )
            params, opt_state = jax.tree.map(
                lambda leaf: (leaf * 0.9 + 1).astype(leaf.dtype), (params, opt_state)
            )
    return base / "run"


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
    paths = [path for path in run.glob(kind) if path.is_file()]
    assert paths, kind
    for path in paths:
        for place in places:
            with flip(path, place):
                yield f"{path.relative_to(run)} at {place}"


def by_layers(run: Run):
    """All parameters, read one layer or array at a time."""
    read = run.checkpoint.read
    layers = [read(("layers",), number) for number in range(run.config.model.num_layers)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    embedding = read(("embedder", "input_embedding"))
    return {
        "embedder": {"input_embedding": embedding},
        "final_norm": read(("final_norm",)),
        "layers": stacked,
    }


# --- Parameters -------------------------------------------------------------------------------------------------


def test_every_file_of_a_run_is_of_a_known_kind(run):
    known = {path for kind in KINDS for path in run.glob(kind)}
    known |= {path for kind in UNREAD for path in (run / "checkpoints" / "20").glob(kind)}
    files = {path for path in (run / "checkpoints" / "20").rglob("*") if path.is_file()}
    assert files <= known
    sizes = [
        path.stat().st_size for kind in ITEMS["params"] for path in run.glob(kind) if path.is_file()
    ]
    assert max(sizes) > readers._SMALL, "no file whose only check is that of its arrays"


@pytest.mark.parametrize("read", [Run.params, by_layers])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_refused(run, kind, read):
    for flipped in flips(run, kind):
        with pytest.raises(UsageError) as error:
            open_run(run, 20).first_undamaged(read)
        message = str(error.value)
        assert "config.json" in message or re.search(
            "checkpoint 20 is damaged .*; --step=20 names it; the run also has 10", message
        )
        assert "\n" not in message, flipped


@pytest.mark.parametrize("read", [Run.params, by_layers])
def test_without_step_an_older_checkpoint_is_read(run, read, caplog):
    expected = read(open_run(run, 10))
    for kind in ("checkpoints/20/params/ocdbt.process_0/d/*", "checkpoints/20/data/metadata"):
        for flipped in flips(run, kind, [0.5]):
            opened, params = open_run(run).first_undamaged(read)
            assert opened.step == 10 and same(params, expected), flipped
            assert (
                "checkpoint 20 is damaged" in caplog.messages[-1]
                and "passed over" in caplog.messages[-1]
            )


@pytest.mark.slow
@pytest.mark.parametrize("read", [Run.params, by_layers])
def test_what_nothing_reads_changes_nothing(run, read):
    expected = read(open_run(run))
    for kind in UNREAD:
        for flipped in flips(run, f"checkpoints/20/{kind}"):
            assert same(read(open_run(run, 20)), expected), flipped


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that reads have waited; nobody waits."""
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return waited


Path = type(epath.Path())


def fail_reads(monkeypatch, kind, times, error):
    """Has the first reads of checkpoint 20 fail: of its small files, their sizes, the list, or its arrays."""
    left = [times]
    owner, name = {
        "small file": (Path, "read_bytes"),
        "size": (pathlib.Path, "stat"),
        "list": (Path, "iterdir"),
        "array": (readers.ts, "open"),
    }[kind]
    read, of = (
        getattr(owner, name),
        {"list": "checkpoints", "array": "checkpoints/20/params"}.get(kind, "/20/"),
    )

    def fail(where, *args, **kwargs):
        if of in str(where) and left[0]:
            left[0] -= 1
            raise error
        return read(where, *args, **kwargs)

    monkeypatch.setattr(owner, name, fail)


READ_ERRORS = {
    "small file": OSError(errno.EIO, "Input/output error"),
    "size": OSError(errno.ESTALE, "Stale file handle"),
    "list": TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    "array": ValueError("UNKNOWN: Error reading local file: Failed to read [os_error_code='5']"),
    "array, by a network": ValueError("UNAVAILABLE: 503 from the bucket"),
}


@pytest.mark.parametrize("kind", READ_ERRORS)
def test_a_read_that_failed_is_tried_again_and_is_not_damage(
    run, monkeypatch, pauses, caplog, kind
):
    with monkeypatch.context() as patch:
        fail_reads(patch, kind.split(",")[0], 2, READ_ERRORS[kind])
        opened, params = open_run(run).first_undamaged(Run.params)
    assert opened.step == 20 and pauses == [1, 2]
    assert same(params, by_layers(open_run(run, 20))) and "is damaged" not in caplog.text


@pytest.mark.parametrize("kind", READ_ERRORS)
def test_where_every_read_fails_the_command_ends(run, monkeypatch, pauses, kind):
    with monkeypatch.context() as patch:
        fail_reads(patch, kind.split(",")[0], -1, READ_ERRORS[kind])
        with pytest.raises(
            RunFailed, match=r"checkpoints.*: cannot be read: .*; nothing was changed: see to"
        ):
            open_run(run).first_undamaged(Run.params)
    assert pauses == [1, 2, 4, 8, 16]


def test_a_read_that_is_not_permitted_ends_the_command_at_once(run, monkeypatch, pauses):
    with monkeypatch.context() as patch:
        fail_reads(patch, "small file", -1, PermissionError(errno.EACCES, "Permission denied"))
        with pytest.raises(RunFailed, match="checkpoints/20.*Permission denied"):
            open_run(run)
    assert pauses == []


def test_the_reason_names_the_array(run):
    largest = max(run.glob(ITEMS["params"][-1]), key=lambda path: path.stat().st_size)
    array = (
        r"checkpoint 20 is damaged \(params: (\['\w+'\])+ (is not what was saved|cannot be read)"
    )
    for place in np.linspace(0.05, 0.95, 20):
        with flip(largest, place), pytest.raises(UsageError, match=array):
            open_run(run, 20).first_undamaged(by_layers)


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
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
    assert 0.8 * own < read < 1.05 * own < size / 7


def bytes_read() -> int:
    import tensorstore as ts

    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def test_hashes_on_the_host_are_those_of_the_devices():
    rng = np.random.default_rng(0)
    layers = rng.standard_normal((3, 70_001, 2)).astype(np.float32)
    tree = {
        "layers": {"w": layers, "b": jax.numpy.asarray(layers[..., 0], "bfloat16")},
        "table": layers[0],
    }
    hashes = array_hashes(tree)
    for name, leaf in tree["layers"].items():
        leaf = np.asarray(leaf)
        parts = [hash_on_host(part, i * part.size) for i, part in enumerate(leaf)]
        assert parts == hashes[f"['layers']['{name}']"] and sum(parts) % 2**32 == hash_on_host(leaf)
    assert [hash_on_host(tree["table"])] == hashes["['table']"]
    assert int(sharding.hash_bits(layers)) == hash_on_host(layers)


def test_one_byte_of_the_optimizer_state_is_noticed_by_its_hash(run, tmp_path):
    """In an array, as no checksum of a file or of a compressed chunk would notice it."""
    folder = shutil.copytree(run, tmp_path / "run") / "checkpoints" / "20"
    shutil.rmtree(folder.parent / "10")
    config = read_config(tmp_path / "run")
    state = jax.jit(functools.partial(init_state, config, make_optimizer(config)))()[1]
    state = jax.tree.map(
        lambda leaf: np.array((leaf * 0.9 + 1).astype(leaf.dtype)), state
    )  # as `run` saves it
    saved = json.loads((folder / "config" / "metadata").read_text())
    assert array_hashes(state) == saved["array_hashes"]["opt_state"]
    leaves = jax.tree.leaves(state)
    for leaf in (leaves[0], leaves[-1]):
        leaf.reshape(-1).view(np.uint8)[0] ^= 1
        saved["array_hashes"]["opt_state"] = array_hashes(state)
        (folder / "config" / "metadata").write_text(json.dumps(saved))
        readers.list_files(folder)
        with pytest.raises(
            UsageError, match="checkpoint 20 is damaged .opt_state.* is not what was saved"
        ):
            start(config, tmp_path / "run")
        leaf.reshape(-1).view(np.uint8)[0] ^= 1


# --- Imports ----------------------------------------------------------------------------------------------------


def test_imported_parameters_are_verified(run_and_export, tmp_path):
    importer.import_run(run_and_export / "hf", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "0"
    expected = by_layers(open_run(tmp_path / "run"))
    largest = max(
        (folder / "params").rglob("*"), key=lambda path: path.stat().st_size * path.is_file()
    )
    for read in (Run.params, by_layers):
        assert same(read(open_run(tmp_path / "run")), expected)
        for place in (0.1, 0.3, 0.5, 0.7, 0.9):
            with flip(largest, place), pytest.raises(UsageError, match="checkpoint 0 is damaged"):
                open_run(tmp_path / "run").first_undamaged(read)


# --- Commands ---------------------------------------------------------------------------------------------------


def evaluate(workdir, output, step):
    step = step and str(step)
    options = evaluation.LossOptions(str(workdir), step, max_windows=2, again=True)
    return next(evaluation.evaluations(options))["loss"]


def sample(workdir, output, step):
    sampling = generation.Sampling(length=3, temperature=0.0)
    return generation.continue_prompts(str(workdir), step, ["a"], sampling, 0)["text"]


def analyze(workdir, output, step):
    return analysis.analyse(
        workdir, asked(step=step, sequences=1, seq_len=16, again=True, channels=0)
    )["heads"]


def export(workdir, output, step):
    exporter.export(workdir, output / "hf", step)
    content = (output / "hf" / "model.safetensors").read_bytes()
    shutil.rmtree(output / "hf")
    return content


NAMED = {
    "evaluate": evaluate,
    "sample": sample,
    "analyze": analyze,
    "export": export,
}  # those with --step


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("analyze", "sample")),
        "evaluate",
        "export",
    ],
)
@pytest.mark.parametrize(
    "kind", [ITEMS["params"][-1], *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS)]
)
def test_commands_refuse_a_flipped_byte_and_write_nothing(run, tmp_path, command, kind):
    before = sorted(run.rglob("*"))
    for flipped in flips(run, kind):
        with pytest.raises(UsageError):
            NAMED[command](run, tmp_path, 20)
        assert not list(tmp_path.iterdir()) and sorted(run.rglob("*")) == before, flipped


@pytest.mark.slow
@pytest.mark.parametrize("command", NAMED)
def test_commands_pass_over_a_damaged_newest_checkpoint(run, tmp_path, command):
    copy = shutil.copytree(run, tmp_path / "run")
    expected = NAMED[command](copy, tmp_path, 10)
    assert NAMED[command](copy, tmp_path, 20) != expected or command == "sample"
    for _ in flips(copy, ITEMS["params"][-1], [0.5]):
        assert NAMED[command](copy, tmp_path, None) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [ITEMS["params"][-1], ITEMS["opt_state"][-1], *KINDS[:-1]],
)
def test_training_neither_resumes_nor_starts_from_a_flipped_byte(run, tmp_path, kind):
    copy, new = shutil.copytree(run, tmp_path / "run"), tmp_path / "new"
    shutil.rmtree(copy / "checkpoints" / "10")
    config = read_config(copy)
    resumed, started = start(config, copy), start(config, new, copy)
    assert (resumed[0], started[0]) == (20, 0) and resumed[1] == started[1]
    for flipped in flips(copy, kind):
        with pytest.raises(
            UsageError, match="nothing whole to go on from: checkpoint 20 is damaged"
        ):
            start(config, copy)
        with pytest.raises(
            UsageError, match="nothing whole to go on from: checkpoint 20 is damaged"
        ):
            start(config, new, copy)
        assert list((new / "checkpoints").iterdir()) == [], flipped
