"""The batch as a pure function: on any number of processes, epoch after epoch, with randomised positions or without."""

import collections
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT

from prope.config import default_config, differences
from prope.data.store.pack import is_validation
from prope.data.windows import Windows, prefetch, randomise_positions, train_batch
from prope.errors import UsageError
from prope.runtime.validate import validate

B, T = 8, 32
BOS, EOS = 2, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """150 texts of very different lengths, no two windows of which are alike."""
    root = tmp_path_factory.mktemp("windows") / "text"
    root.mkdir()
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 300)))) for _ in range(150)]
    (root / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of the train split, from the texts: per document <bos>, the bytes + 4, <eos>."""
    stream = []
    for line in (folder / "all.jsonl").read_text().splitlines():
        text = json.loads(line)["text"].encode()
        if not is_validation(text, 0.05):
            stream += [BOS, *(byte + 4 for byte in text), EOS]
    return stream


@pytest.fixture
def windows(folder):
    def of(split="train", **fields):
        config = default_config().data
        paths = {"data_dir": str(folder), "cache_dir": str(folder.parent / "cache")}
        config.update({"dataset": "files", "seq_len": T} | paths | fields)
        return Windows(config, 260, split)

    return of


def test_every_window_may_begin_with_bos(windows, expected):
    """It replaces the first token that is read, and nothing that is predicted."""
    plain, changed = (windows(bos_every_window=value).read(range(40)) for value in (False, True))
    assert (changed["tokens"][:, 0] == BOS).all() and (plain["tokens"][:, 0] == BOS).mean() < 0.2
    np.testing.assert_array_equal(changed["tokens"][:, 1:], plain["tokens"][:, 1:])
    np.testing.assert_array_equal(changed["targets"].ravel(), expected[1 : 40 * T + 1])
    for name in ("targets", "positions", "segment_ids", "weights"):
        np.testing.assert_array_equal(changed[name], plain[name])


def digest(batch, row):
    return hashlib.sha256(
        b"".join(batch[name][row].tobytes() for name in sorted(batch))
    ).hexdigest()[:8]


WORKER = """
import json, sys, jax
from test_windows import B, digest
from prope import sharding
from prope.config import from_dict
from prope.data.store.pack import is_validation
from prope.data.windows import Windows, train_batch
address, process, config = sys.argv[1], int(sys.argv[2]), from_dict(json.loads(sys.argv[3]))
jax.distributed.initialize(address, 2, process)
windows = Windows(config.data, 260, "train")
rows = sharding.rows_of_this_process(sharding.make_mesh(2), B)
batches = (train_batch(windows, 3, B, step, rows) for step in range(1000))
print(json.dumps([jax.device_count(), rows, [[digest(batch, i) for i in range(len(rows))] for batch in batches]]))
"""


@pytest.mark.slow
def test_two_processes_read_the_batches_of_one_for_1000_steps(windows, folder):
    of = windows(mask_documents=True, position_range=100)
    config = default_config()
    config.data.update(
        {
            "dataset": "files",
            "seq_len": T,
            "data_dir": str(folder),
            "cache_dir": str(folder.parent / "cache"),
            "mask_documents": True,
            "position_range": 100,
        }
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": paths,
    }
    commands = [
        [sys.executable, "-c", WORKER, address, str(n), json.dumps(config.to_dict())]
        for n in (0, 1)
    ]
    started = [
        subprocess.Popen(c, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT) for c in commands
    ]
    whole = [train_batch(of, 3, B, step) for step in range(1000)]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert [devices for devices, _, _ in found] == [4, 4]
    assert sorted(found[0][1] + found[1][1]) == list(range(B)) and len(found[0][1]) == B // 2
    for _, rows, digests in found:
        for step, batch in enumerate(whole):
            assert digests[step] == [digest(batch, row) for row in rows], step


def test_eight_processes_read_the_batches_of_one_for_1000_steps(windows):
    of = windows(position_range=64)
    for step in range(1000):
        whole = train_batch(of, 3, B, step)
        for name, values in whole.items():
            assert values.dtype == (
                np.float32 if name == "weights" else np.int32
            ) and values.shape == (B, T)
        row = step % B  # the one row of one of eight; over the steps, of every one
        for name, values in train_batch(of, 3, B, step, [row]).items():
            np.testing.assert_array_equal(values[0], whole[name][row])


def test_three_epochs_touch_every_window_three_times_in_another_order(windows, expected):
    of = windows()
    starts = range(0, len(expected) - 1, T)
    of_tokens = {
        tuple((expected + [0] * T)[start : start + T]): i for i, start in enumerate(starts)
    }
    assert len(of_tokens) == len(starts) == of.count and of.count % B, (
        "windows differ; a batch crosses the epochs"
    )
    steps = range(-(-3 * of.count // B))
    seen = [
        of_tokens[tuple(row)]
        for step in steps
        for row in train_batch(of, 1, B, step)["tokens"].tolist()
    ]
    epochs = [seen[epoch * of.count : (epoch + 1) * of.count] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(of.count))
    for one, other in itertools.combinations([*epochs, list(range(of.count))], 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10, (
            "about one place in common, by chance"
        )
    assert collections.Counter(seen[: 3 * of.count]) == dict.fromkeys(range(of.count), 3)


# --- Randomised positions ---------------------------------------------------------------------------------------


def test_randomised_positions_rise_through_the_range_and_change_nothing_else(windows):
    plain, of = windows(), windows(position_range=100)
    seen = set()
    for step in range(20):
        ordinary, batch = train_batch(plain, 1, B, step), train_batch(of, 1, B, step)
        positions = batch.pop("positions")
        assert positions.dtype == np.int32 and positions.shape == (B, T)
        assert (np.diff(positions) > 0).all() and positions.min() >= 0 and positions.max() < 100
        assert (ordinary.pop("positions") == np.arange(T)).all()
        for name, values in ordinary.items():
            np.testing.assert_array_equal(batch[name], values)
        seen |= {tuple(row) for row in positions.tolist()}
    assert len(seen) == 20 * B, "a new draw in every row of every step"


def test_randomised_positions_are_a_function_of_seed_step_and_row(windows):
    of = windows(position_range=100)
    positions = train_batch(of, 1, B, 7)["positions"]
    np.testing.assert_array_equal(
        train_batch(windows(position_range=100), 1, B, 7)["positions"], positions
    )
    np.testing.assert_array_equal(train_batch(of, 1, B, 7, [6, 2])["positions"], positions[[6, 2]])
    for other in ((2, B, 7), (1, B, 8), (1, B, 7 + of.count)):
        assert not (train_batch(of, *other)["positions"] == positions).all(axis=1).any()


def test_every_choice_of_positions_is_equally_likely():
    draws = collections.Counter(
        tuple(randomise_positions(np.arange(2), 4, 5, e).tolist()) for e in range(3000)
    )
    assert set(draws) == set(itertools.combinations(range(4), 2))
    assert all(abs(count - 500) < 5 * np.sqrt(3000 * 1 / 6 * 5 / 6) for count in draws.values()), (
        draws
    )
    whole = randomise_positions(np.arange(T), T, 5, 0)
    assert whole.dtype == np.int32 and whole.tolist() == list(range(T))


def test_randomised_positions_restart_with_every_masked_document(windows):
    plain, of = windows(mask_documents=True), windows(mask_documents=True, position_range=50)
    openings, falls = [], 0
    for step in range(of.count // B):
        ordinary, batch = train_batch(plain, 1, B, step), train_batch(of, 1, B, step)
        for tokens, positions, before in zip(
            batch["tokens"], batch["positions"], ordinary["positions"], strict=True
        ):
            borders = np.flatnonzero(tokens == BOS)
            for document in np.split(positions, borders):
                assert (np.diff(document) > 0).all()
            assert (before[borders] == 0).all()
            openings += positions[borders].tolist()
            falls += int((np.diff(positions) < 0).sum())
        assert batch["positions"].min() >= 0 and batch["positions"].max() < 50
    assert len(set(openings)) > 5, "the first position of a document is drawn as well"
    assert falls > len(openings) / 2, "and does not go on from the document before"


def test_validation_keeps_ordinary_positions(windows):
    of = windows("validation", position_range=100)
    assert (of.read(range(of.count))["positions"] == np.arange(T)).all()


def test_the_range_is_checked_and_makes_another_run():
    config, other = default_config(), default_config()
    for allowed in (config.data.seq_len, 2**31):
        config.data.position_range = allowed
        validate(config)
    assert differences(config, other) == [f"data.position_range: None, not {2**31}"]
    for value in (config.data.seq_len - 1, 0, -1, 2**31 + 1):
        config.data.position_range = value
        with pytest.raises(
            UsageError, match=f"data.position_range={value}: must be from data.seq_len=256 to "
        ):
            validate(config)


# --- Reading ahead ----------------------------------------------------------------------------------------------


def test_reading_ahead_is_concurrent_bounded_and_in_order():
    both, made = threading.Barrier(2, timeout=10), []

    def function(step):
        if step < 2:
            both.wait()  # passes only if another thread gets here meanwhile
        time.sleep(0.01 * (step % 3))
        made.append(step)
        return step

    batches = prefetch(function, 0, 50, depth=4)
    assert [next(batches) for _ in range(10)] == list(range(10))
    time.sleep(0.2)
    assert sorted(made) == list(range(14)), "four are ready, and no more"
    assert list(batches) == list(range(10, 50)) and sorted(made) == list(range(50))


def test_an_error_while_reading_ahead_arrives_at_its_step():
    batches = prefetch(lambda step: 1 // (step - 5), 0, 50)
    assert [next(batches) for _ in range(5)] == [-1] * 5
    with pytest.raises(ZeroDivisionError):
        next(batches)
