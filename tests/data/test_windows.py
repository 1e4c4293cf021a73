"""The batch as a pure function: on any number of processes, epoch after epoch, at any positions."""

import collections
import itertools
import json
import threading
import time

import numpy as np
import pytest
from support.text import data_config, is_validation
from support.text import read_tokens as stream

from prope.data.windows import Windows, prefetch, randomise_positions, shuffled_index, train_batch

B = 8
T = 32
BOS = 2
EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """150 texts of very different lengths, no two windows of which are alike."""
    root = tmp_path_factory.mktemp("windows") / "text"
    root.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(150):
        letters = rng.integers(97, 123, rng.integers(1, 300))
        text = "".join(map(chr, letters))
        lines.append(json.dumps({"text": text}) + "\n")
    (root / "all.jsonl").write_text("".join(lines))
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
def open_windows(folder):
    def run(split="train", **fields):
        data = data_config(folder.parent, "files", folder, **{"seq_len": T} | fields)
        return Windows(data, 260, split)

    return run


def assert_equal(batch, expected):
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_predict_every_token_once(open_windows, split):
    """At ordinary positions, which are drawn in training only."""
    windows = open_windows(split, position_range=100)
    batch = windows.read(range(windows.count))
    tokens = stream(windows.store, split)
    predicted = batch["targets"][batch["weights"] > 0]
    np.testing.assert_array_equal(predicted, tokens[tokens != BOS])
    assert len(predicted) == windows.store.targets(split)
    np.testing.assert_array_equal(batch["tokens"].ravel()[: len(tokens) - 1], tokens[:-1])
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (batch["positions"] == np.arange(T)).all()


@pytest.mark.parametrize(("shorter", "count"), [(2, 2), (1, 1), (0, 1)])
def test_the_last_window_may_predict_one_token(open_windows, shorter, count):
    length = open_windows("validation").length
    windows = open_windows("validation", seq_len=length - shorter)
    assert windows.count == count
    weights = windows.read(range(count))["weights"]
    assert weights.sum() == windows.store.targets("validation")


@pytest.mark.parametrize("mask_documents", [False, True])
def test_every_window_may_begin_with_bos(open_windows, expected, mask_documents):
    """It replaces the first token that is read, and nothing that is predicted."""
    fields = {"mask_documents": mask_documents}
    plain = open_windows(**fields).read(range(40))
    changed = open_windows(**fields, bos_every_window=True).read(range(40))
    assert (changed["tokens"][:, 0] == BOS).all()
    np.testing.assert_array_equal(changed["targets"].ravel(), expected[1 : 40 * T + 1])
    plain["tokens"][:, 0] = BOS
    assert_equal(changed, plain)


def test_a_bos_of_id_0_is_not_predicted(open_windows, expected, tmp_path):
    from tokenizers import Tokenizer, models

    pieces = ["<s>", "</s>", *map(chr, range(97, 123))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.add_special_tokens(pieces[:2])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    windows = open_windows(tokenizer=str(tmp_path))
    tokens = np.array([{BOS: 0, EOS: 1}.get(token, token - 99) for token in expected])
    np.testing.assert_array_equal(stream(windows.store, "train"), tokens)
    batch = windows.read(range(windows.count))
    predicted = batch["targets"][batch["weights"] > 0]
    np.testing.assert_array_equal(predicted, tokens[tokens > 0])
    assert windows.store.targets("train") == len(predicted)
    shares = (np.bincount(predicted) + 1) / (len(predicted) + len(pieces))
    assert windows.store.unigram_loss("train") == pytest.approx(-np.log(shares[predicted]).mean())


# --- Order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 1237])
def test_every_epoch_is_a_new_permutation(count):
    def order(epoch, seed=5):
        examples = range(epoch * count, (epoch + 1) * count)
        return [shuffled_index(example, count, seed) for example in examples]

    orders = [order(0), order(1), order(2), order(0, seed=6)]
    for indices in orders:
        assert sorted(indices) == list(range(count))
    if count > 100:
        for one, other in itertools.combinations([*orders, list(range(count))], 2):
            assert np.sum(np.equal(one, other)) < 10, "about one place, by chance"


def test_the_windows_of_the_text_are_read_in_that_order(open_windows, expected):
    windows = open_windows()
    count = windows.count
    assert count == -(-(len(expected) - 1) // T)
    padded = np.array(expected + [0] * T)
    for step in (0, count // B, 2 * count // B):  # among them batches that cross the epochs
        batch = train_batch(windows, 1, B, step)
        for row, example in enumerate(range(step * B, step * B + B)):
            start = shuffled_index(example, count, 1) * T
            np.testing.assert_array_equal(batch["tokens"][row], padded[start : start + T])


def test_a_batch_is_a_function_of_its_step(open_windows):
    late = train_batch(open_windows(), seed=1, batch_size=B, step=40)
    windows = open_windows()
    for step in (0, 3, 40):
        batch = train_batch(windows, 1, B, step)
    # The batch size cuts one endless list.
    pair = [train_batch(windows, 1, B // 2, step) for step in (80, 81)]
    assert_equal(batch, late)
    assert_equal({name: np.concatenate([part[name] for part in pair]) for name in late}, late)
    other_seed = train_batch(windows, 2, B, 40)
    assert np.any(other_seed["tokens"] != late["tokens"])


def test_eight_processes_read_the_batches_of_one(open_windows):
    windows = open_windows(position_range=64)
    for step in range(200):
        whole = train_batch(windows, 3, B, step)
        row = step % B  # the one row of one of eight; over the steps, of every one
        for name, values in train_batch(windows, 3, B, step, [row]).items():
            assert whole[name].dtype == (np.float32 if name == "weights" else np.int32)
            assert whole[name].shape == (B, T)
            np.testing.assert_array_equal(values[0], whole[name][row])


# --- Randomised positions ---------------------------------------------------------------------


def test_randomised_positions_rise_through_the_range_and_change_nothing_else(open_windows):
    plain = open_windows()
    windows = open_windows(position_range=100)
    seen = set()
    for step in range(20):
        ordinary = train_batch(plain, 1, B, step)
        batch = train_batch(windows, 1, B, step)
        positions = batch.pop("positions")
        assert (np.diff(positions) > 0).all()
        assert positions.min() >= 0
        assert positions.max() < 100
        assert (ordinary.pop("positions") == np.arange(T)).all()
        assert_equal(batch, ordinary)
        seen |= {tuple(row) for row in positions.tolist()}
    assert len(seen) == 20 * B, "a new draw in every row of every step"


def test_another_seed_step_or_epoch_has_other_randomised_positions(open_windows):
    windows = open_windows(position_range=100)
    whole = train_batch(windows, 1, B, 7)["positions"]
    for seed, step in ((2, 7), (1, 8), (1, 7 + windows.count)):
        other = train_batch(windows, seed, B, step)["positions"]
        assert not (other == whole).all(axis=1).any()


def test_every_choice_of_positions_is_equally_likely():
    counts = collections.Counter()
    for example in range(3000):
        drawn = randomise_positions(np.arange(2), 4, 5, example)
        counts[tuple(drawn.tolist())] += 1
    assert set(counts) == set(itertools.combinations(range(4), 2))
    stderr = np.sqrt(3000 * 1 / 6 * 5 / 6)
    assert all(abs(count - 500) < 5 * stderr for count in counts.values()), counts
    whole = randomise_positions(np.arange(T), T, 5, 0)
    assert whole.dtype == np.int32
    assert whole.tolist() == list(range(T))


def test_every_epoch_draws_other_positions_for_a_window(open_windows):
    windows = open_windows(position_range=1000)
    drawn = collections.defaultdict(set)
    for step in range(3 * windows.count):
        (positions,) = train_batch(windows, 1, 1, step)["positions"]
        drawn[windows.window_index(step, 1)].add(tuple(positions))
    assert {len(draws) for draws in drawn.values()} == {3}


def test_randomised_positions_restart_with_every_masked_document(open_windows):
    windows = open_windows(mask_documents=True, position_range=50)
    openings = []
    falls = 0
    for step in range(windows.count // B):
        batch = train_batch(windows, 1, B, step)
        for row, positions in enumerate(batch["positions"]):
            borders = np.flatnonzero(batch["tokens"][row] == BOS)
            for document in np.split(positions, borders):
                assert (np.diff(document) > 0).all()
            openings += positions[borders].tolist()
            falls += int((np.diff(positions) < 0).sum())
        assert batch["positions"].min() >= 0
        assert batch["positions"].max() < 50
    assert len(set(openings)) > 5, "the first position of a document is drawn as well"
    assert falls > len(openings) / 2, "and does not go on from the document before"


# --- Reading ahead ----------------------------------------------------------------------------


def test_reading_ahead_is_concurrent_bounded_and_in_order():
    both = threading.Barrier(2, timeout=10)
    made = []

    def function(step):
        if step < 2:
            both.wait()  # passes only if another thread gets here meanwhile
        time.sleep(0.01 * (step % 3))
        made.append(step)
        return step

    batches = prefetch(function, 0, 50)
    assert [next(batches) for _ in range(10)] == list(range(10))
    time.sleep(0.2)
    assert sorted(made) == list(range(14)), "four are ready, and no more"
    assert list(batches) == list(range(10, 50))
    assert sorted(made) == list(range(50))
    for start, stop in ((3, 5), (3, 3)):  # fewer than the depth
        assert list(prefetch(lambda step: step, start, stop)) == list(range(start, stop))


def test_an_error_while_reading_ahead_arrives_at_its_step():
    batches = prefetch(lambda step: 1 // (step - 5), 0, 50)
    assert [next(batches) for _ in range(5)] == [-1] * 5
    with pytest.raises(ZeroDivisionError):
        next(batches)
