"""Kinds of text, instructions, mixtures, and stores below URLs."""

import gzip
import json
import math

import numpy as np
import pytest
from makers import WIKIPEDIA as NAME
from makers import articles, documents_of, write_text, write_tfds
from makers import data_config as settings
from makers import read_tokens as stream

from prope.config import default_config, differences, from_dict
from prope.data.mixture import interleave_sources, open_windows
from prope.data.sources import base as source
from prope.data.sources import files
from prope.data.sources.find import find_source
from prope.data.store import arrays as store
from prope.data.store import build as prepare
from prope.data.store import pack
from prope.data.tokenizer import BOS, EOS
from prope.data.windows import train_batch
from prope.errors import UsageError
from prope.runtime.validate import validate


def refused(config, says):
    with pytest.raises(UsageError, match=says) as caught:
        prepare.open_store(config, 260)
    assert "\n" not in str(caught.value)


# --- Folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Every kind of file; the texts in order are those of articles(60)."""
    root, texts = tmp_path / "text", articles(60)
    (root / "d").mkdir(parents=True)
    lines = [
        json.dumps({"text": t, "n": 1}, ensure_ascii=i % 2 == 0) + "\n" + "\n" * (i % 3)
        for i, t in enumerate(texts)
    ]
    (root / "a.jsonl").write_text("".join(lines[:30]).rstrip("\n"))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:50]).encode()))
    (root / "c.txt").write_text(texts[50])
    (root / "c.txt.gz").write_bytes(gzip.compress(texts[51].encode()))
    for number in range(52, 60):
        (root / "d" / f"{number}.txt").write_text(texts[number])
    (root / "notes.md").write_text("not a document")
    return root


@pytest.mark.parametrize("size", [1, 37, 333, 5_000, 10**9])
def test_a_folder_is_the_same_documents_however_it_is_cut(tmp_path, folder, monkeypatch, size):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: size)
    found = find_source(settings(tmp_path, "files", folder))
    assert [text.decode() for text in found.documents()] == articles(60)
    assert len(found.chunks) > 1 or size == 10**9
    assert len({chunk.key for chunk in found.chunks}) == len(found.chunks)
    sizes = {
        path: path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix in (".txt", ".jsonl", ".gz")
    }
    # Gzip is taken to shrink text to a third.
    assert found.num_bytes == sum(
        3 * size if path.suffix == ".gz" else size for path, size in sizes.items()
    )


def test_what_cannot_be_used_in_a_folder(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(files, "chunk_bytes", lambda total: 300)
    whole = (folder / "a.jsonl").read_bytes()
    for text, says in (
        (b'{"text": "a"', "not a JSON value"),
        (b'{"text": "\xff"}', r"not UTF-8 text \(byte 10\)"),
        (b'{"text": "\\ud800"}', "holds half a character"),
        (b'{"text": 3}', "no text under 'text'; name the key"),
        (b"[1]", "no text under 'text'"),
    ):
        (folder / "a.jsonl").write_bytes(whole + b"\n" + text + b"\n")
        line = whole.count(b"\n") + 2
        refused(settings(tmp_path, "files", folder), f"a.jsonl line {line}: {says}")
    (folder / "a.jsonl").write_bytes(whole)
    monkeypatch.setattr(files, "MAX_DOCUMENT", 100)
    monkeypatch.setattr(source, "MAX_DOCUMENT", 100)
    refused(
        settings(tmp_path, "files", folder),
        "a document of more than 100 bytes; cut it into several",
    )


# --- Instructions -----------------------------------------------------------------------------------------------


def instructions(tmp_path, kind, **fields):
    """60 records; (config, [(prompt, predicted)] in order)."""
    expected = [(b"Q: t\nA: ", text.encode()) for text in articles(60)]
    if kind == "files":
        (tmp_path / "text").mkdir()
        lines = [json.dumps({"title": "t", "text": text}) + "\n" for text in articles(60)]
        (tmp_path / "text" / "a.jsonl").write_text("".join(lines))
        return settings(
            tmp_path, "files", tmp_path / "text", template="Q: {title}\nA: {text}", **fields
        ), expected
    write_tfds(tmp_path / "data", kind, articles(60))
    return settings(
        tmp_path, NAME, tmp_path / "data", template="Q: {title}\nA: {text}", **fields
    ), expected


@pytest.mark.parametrize("kind", ["files", "tfrecord"])
def test_a_template_joins_features(tmp_path, kind):
    config, expected = instructions(tmp_path, kind)
    texts = [(prompt + predicted).decode() for prompt, predicted in expected]
    assert documents_of(prepare.open_store(config, 260), "train") == [
        text for text in texts if not pack.is_validation(text.encode(), 0.05)
    ]


@pytest.mark.parametrize("kind", ["files", "array_record"])
def test_the_loss_may_fall_on_targets_only(tmp_path, kind):
    config, expected = instructions(
        tmp_path, kind, loss_on="targets", seq_len=50, validation_fraction=0.2
    )
    tokens, weights, sizes = [], [], [0, 0]
    for prompt, predicted in expected:
        if not pack.is_validation(prompt + predicted, 0.2):
            tokens += [BOS, *(byte + 4 for byte in prompt + predicted), EOS]
            weights += [0] * (1 + len(prompt)) + [1] * (len(predicted) + 1)
            sizes = [sizes[0] + 1, sizes[1] + len(predicted)]
    windows = open_windows(config, 260, "train")
    batch = windows.read(range(windows.count))
    np.testing.assert_array_equal(batch["targets"].ravel()[: len(tokens) - 1], tokens[1:])
    np.testing.assert_array_equal(batch["tokens"].ravel()[: len(tokens) - 1], tokens[:-1])
    np.testing.assert_array_equal(batch["weights"].ravel()[: len(tokens) - 1], weights[1:])
    assert (
        batch["weights"].sum()
        == sum(weights)
        == windows.store.targets("train")
        == sizes[1] + sizes[0]
    )
    assert windows.store.index["train"]["bytes"] == sizes[1]

    def predicted_ids(split):
        elements, is_prompt = windows.store.decode(stream(windows.store, split))
        return elements[~is_prompt & (elements != BOS)]

    train, held_out = predicted_ids("train"), predicted_ids("validation")
    loss = -sum(math.log((np.sum(train == t) + 1) / (len(train) + 260)) for t in held_out) / len(
        held_out
    )
    assert math.isclose(windows.store.index["unigram_loss"], loss, rel_tol=1e-9)
    whole = (
        prepare.open_store(instructions(tmp_path / "2", kind)[0], 260)
        if (tmp_path / "2").mkdir() is None
        else None
    )
    assert whole.fingerprint != windows.store.fingerprint


@pytest.mark.parametrize(
    "vocab_size, dtype", [(2**15, "uint16"), (2**15 + 1, "uint32"), (256_000, "uint32")]
)
def test_the_mark_leaves_every_id_as_it_is(vocab_size, dtype):
    assert store.element_dtype(vocab_size, has_prompts=True) == dtype
    assert (
        store.element_dtype(2**16, has_prompts=False) == "uint16"
        and store.element_dtype(2**16 + 1, has_prompts=False) == "uint32"
    )
    elements = np.array([0, 1, vocab_size - 1, vocab_size - 1], dtype)
    elements[[1, 3]] |= store.prompt_bit(elements.dtype)
    ids, is_prompt = store.Store("", "", {"rule": {"has_prompts": True}}).decode(elements)
    assert ids.tolist() == [0, 1, vocab_size - 1, vocab_size - 1] and is_prompt.tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert ids.dtype == np.int32


def test_templates_that_do_not_fit(tmp_path):
    write_tfds(tmp_path / "data", "tfrecord", articles(60))
    wrong = settings(tmp_path, NAME, tmp_path / "data", template="{titel} {text}")
    refused(wrong, r"no text feature 'titel' \(did you mean title\?\).*set config.data.template")
    folder = write_text(tmp_path / "text", articles(60))
    refused(
        settings(tmp_path, "files", folder, template="{a}{text}"),
        "a.txt: has no fields for config.data.template",
    )
    for fields, says in (
        ({"template": "{a"}, "template={a: expected '}'"),
        ({"template": "{a.b}"}, "must name features in braces"),
        ({"template": "a"}, "must name features in braces"),
        ({"template": "{}"}, "must name features in braces"),
        ({"loss_on": "targets"}, "loss_on=targets: needs a template"),
        ({"loss_on": "x"}, "one of all, targets"),
        ({"loss_on": "targets", "template": "{a}."}, "must end with the feature to predict"),
    ):
        config = default_config()
        config.data.update({"dataset": "files", "data_dir": "x"} | fields)
        with pytest.raises(UsageError) as caught:
            validate(config)
        assert says in str(caught.value), caught.value


# --- Mixtures ---------------------------------------------------------------------------------------------------


def mixture(tmp_path, weights=(3, 1), **fields):
    first = write_text(tmp_path / "text", articles(100))
    second = write_text(tmp_path / "other", [text.upper() for text in articles(40)])
    folders = [
        {"weight": w, "dataset": "files", "data_dir": str(f)}
        for w, f in zip(weights, (first, second), strict=True)
    ]
    return settings(tmp_path, "mixture", seq_len=64, mixture=tuple(folders), **fields)


@pytest.mark.parametrize("shares", [[1], [9, 1], [1, 1], [3, 2, 5], [9997, 1, 2], [333, 667]])
def test_turns_are_spread_evenly(shares):
    turn, before = interleave_sources(shares)
    whose = np.tile(turn, 3)
    for index, share in enumerate(shares):
        counts = np.concatenate([[0], np.cumsum(whose == index)])
        places = np.arange(len(counts))
        assert np.abs(counts - places * share / sum(shares)).max() <= 1.5
        assert counts[len(turn)] == share
        np.testing.assert_array_equal(before[turn == index], np.arange(share))


def test_a_mixture_takes_from_each_source_its_share_and_order(tmp_path):
    config = mixture(tmp_path, weights=(0.75, 0.25))
    mixed = open_windows(config, 260, "train")
    alone = [
        open_windows(settings(tmp_path, "files", tmp_path / n, seq_len=64), 260, "train")
        for n in ("text", "other")
    ]
    places = range(4 * alone[0].count)
    seen = [mixed.window_index(place, seed=5) for place in places]
    ours = [
        [w for w in seen if w < alone[0].count],
        [w - alone[0].count for w in seen if w >= alone[0].count],
    ]
    assert len(ours[0]) == 3 * len(ours[1])
    for windows, order in zip(alone, ours, strict=True):
        assert order == [windows.window_index(place, seed=5) for place in range(len(order))]
    batch, again = (
        train_batch(mixed, 5, 8, 3),
        train_batch(open_windows(config, 260, "train"), 5, 8, 3, rows=range(4, 8)),
    )
    for row in range(8):
        window = seen[24 + row]
        which = int(window >= alone[0].count)
        expected = alone[which].read([window - which * alone[0].count])
        for name in batch:
            np.testing.assert_array_equal(batch[name][row], expected[name][0])
            if row >= 4:
                np.testing.assert_array_equal(batch[name][row], again[name][row - 4])


def test_a_mixture_is_evaluated_on_all_of_its_sources(tmp_path):
    mixed = open_windows(mixture(tmp_path), 260, "validation")
    stores = [
        prepare.open_store(settings(tmp_path, "files", tmp_path / n), 260)
        for n in ("text", "other")
    ]
    predicted = mixed.read(range(mixed.count))
    texts = np.concatenate([stream(st, "validation") for st in stores])
    np.testing.assert_array_equal(
        predicted["targets"][predicted["weights"] > 0], texts[texts != BOS]
    )
    other = settings(
        tmp_path, "mixture", mixture=tuple(dict(e, weight=1) for e in mixture_of(tmp_path))
    )
    assert open_windows(other, 260, "validation").store.fingerprint != mixed.store.fingerprint


@pytest.mark.parametrize("seed", [2**26 - 1, 2**26, 2**31 + 5, 2**63])
@pytest.mark.parametrize("first", ["files", "longcontext/passkey"])
def test_a_generated_source_of_a_mixture_has_windows_for_every_seed(tmp_path, seed, first):
    folder = str(write_text(tmp_path / "text", articles(60)))
    parts = [
        {"weight": 1, "dataset": "longcontext/passkey"},
        {"weight": 1, "dataset": "files", "data_dir": folder},
    ]
    parts = sorted(parts, key=lambda part: part["dataset"] != first)
    batch = train_batch(
        open_windows(settings(tmp_path, "mixture", mixture=tuple(parts), seq_len=64), 260, "train"),
        seed,
        4,
        0,
    )
    for number, part in enumerate(parts):
        data = settings(tmp_path, part["dataset"], part.get("data_dir", ""), seq_len=64)
        expected = train_batch(open_windows(data, 260, "train"), seed, 2, 0)
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name][number::2], values)


def mixture_of(tmp_path):
    return [{"dataset": "files", "data_dir": str(tmp_path / name)} for name in ("text", "other")]


def test_a_mixture_in_a_config(tmp_path, run_command):
    config = default_config()
    config.data.update(
        {"dataset": "mixture", "mixture": ({"weight": 1, "dataset": "python_docs"},)}
    )
    validate(config)
    saved = from_dict(json.loads(json.dumps(config.to_dict())))
    assert differences(config, saved) == []
    config.data.mixture = ({"weight": 1, "dataset": "files", "data_dir": "a"},)
    moved = config.copy_and_resolve_references()
    moved.data.mixture = ({"weight": 1, "dataset": "files", "data_dir": "b"},)
    assert differences(config, moved) == [] and differences(config, saved) != []
    for entries, says in (
        ((), "mixture=(): goes with data.dataset=mixture"),
        (
            ({"weight": 1, "dataset": "files"},),
            "mixture[0].data_dir=: data.mixture[0].dataset=files needs the folder",
        ),
        (({"weight": 0, "dataset": "files", "data_dir": "a"},), "needs a weight above 0"),
        (({"weight": 1},), "needs a weight above 0 and a dataset"),
        (
            ({"weight": 1, "dataset": "files", "data_dri": "a"},),
            "has no field data_dri (did you mean data_dir?)",
        ),
    ):
        config.data.mixture = entries
        with pytest.raises(UsageError) as caught:
            validate(config)
        assert says in str(caught.value), caught.value
    entries = tuple(dict(e, weight=1) for e in mixture(tmp_path).mixture)
    page = f"from prope.config import default_config\ndef get_config():\n    config = default_config()\n    config.data.dataset = 'mixture'\n    config.data.mixture = {entries}\n    return config\n"
    (tmp_path / "mixed.py").write_text(page)
    prepared = run_command(
        "prope.data.prepare",
        f"--config={tmp_path}/mixed.py",
        f"--config.data.cache_dir={tmp_path}/c",
    )
    assert prepared.code == 0 and prepared.result["documents"] == 140, prepared.stderr
    assert [s["documents"] for s in prepared.result["sources"]] == [100, 40] and len(
        prepared.result["store"]
    ) == 2
