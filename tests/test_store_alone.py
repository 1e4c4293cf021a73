"""A token store when the text is gone: by its place, by the config that made it, and from another host."""

import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
from conftest import CONFIG
from etils import epath
from makers import WIKIPEDIA as NAME
from makers import articles, write_text, write_tfds
from makers import data_config as settings
from makers import data_refused as refused

from prope.config import default_config, differences
from prope.data.mixture import open_windows
from prope.data.store import build as prepare
from prope.data.windows import train_batch
from prope.errors import UsageError
from prope.runtime.validate import validate


@pytest.fixture(params=["folder", "bucket"])
def cache(request, tmp_path) -> str:
    return (
        request.getfixturevalue("bucket") if request.param == "bucket" else str(tmp_path / "stores")
    )


def test_a_store_is_opened_by_its_place(tmp_path, cache, monkeypatch):
    config = settings(tmp_path, "files", write_text(tmp_path / "text", articles()), seq_len=64)
    config.cache_dir = cache
    expected = open_windows(config, 260, "train")
    shutil.rmtree(tmp_path / "text")
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "another host"))
    alone = settings(tmp_path / "x", "files", store=expected.store.path, seq_len=64)
    found = open_windows(alone, 260, "train")
    assert found.store == expected.store and not (tmp_path / "another host").exists()
    for name, values in train_batch(found, 1, 4, 2).items():
        np.testing.assert_array_equal(values, train_batch(expected, 1, 4, 2)[name])
    parts = [{"weight": w, "dataset": "files", "store": expected.store.path} for w in (1, 2)]
    mixed = open_windows(
        settings(tmp_path / "x", "mixture", mixture=tuple(parts), seq_len=64), 260, "train"
    )
    assert [source.store for source in mixed.sources] == 2 * [expected.store]


def test_a_store_that_does_not_fit(tmp_path, sentencepiece_model):
    write_tfds(tmp_path / "data", "tfrecord", articles())
    made = settings(tmp_path, NAME, tmp_path / "data")
    made.update({"template": "{title}: {text}", "loss_on": "targets", "validation_fraction": 0.1})
    place = prepare.open_store(made, 260).path
    shutil.rmtree(tmp_path / "data")
    fits = {
        "dataset": NAME,
        "template": made.template,
        "loss_on": "targets",
        "validation_fraction": 0.1,
    }
    assert prepare.open_store(settings(tmp_path, store=place, **fits), 260).path == place
    for fields, says in (
        (
            {"dataset": "python_docs"},
            f"config.data.dataset=python_docs: the store {place} was made with '{NAME}'",
        ),
        (
            {"template": "{text}"},
            "config.data.template={text}: the store .* was made with '{title}: {text}'",
        ),
        ({"loss_on": "all"}, "config.data.loss_on=all: .* was made with 'targets'"),
        (
            {"validation_fraction": 0.05},
            "config.data.validation_fraction=0.05: .* was made with 0.1; set that",
        ),
        (
            {"tokenizer": sentencepiece_model},
            "config.data.tokenizer=.*model: is [0-9a-f]{64}, and .* with byte ",
        ),
        (
            {"store": str(tmp_path)},
            f"config.data.store={tmp_path}: is no token store; give what prope.data.prepare",
        ),
    ):
        refused(settings(tmp_path, **{"store": place} | fits | fields), says, 300)
    index = pathlib.Path(place) / "index.json"
    whole = json.loads(index.read_text())
    for change, says in (
        (whole | {"rule": whole["rule"] | {"validation_fraction": 0.2}}, "was changed or copied"),
        (whole | {"train": whole["train"] | {"tokens": 1}}, "its index.json says 1"),
    ):
        index.write_text(json.dumps(change))
        refused(settings(tmp_path, store=place, **fits), says)


def test_a_config_with_a_store(tmp_path):
    config, other = default_config(), default_config()
    config.data.update({"dataset": NAME, "store": "gs://bucket/stores/a"})
    other.data.update({"dataset": NAME, "data_dir": "data"})
    validate(config)
    assert differences(config, other) == [], (
        "the place of the data may change when a run is resumed"
    )
    for fields, says in (
        (
            {"dataset": "synthetic/copy"},
            "config.data.store=gs://bucket/stores/a: has no effect with",
        ),
        (
            {"store": ""},
            f"config.data.data_dir=: data.dataset={NAME} needs the folder that holds it, or a store",
        ),
        (
            {"dataset": "mixture", "mixture": ({"weight": 1, "dataset": "python_docs"},)},
            "config.data.store=gs://bucket/stores/a: goes into each source of data.mixture",
        ),
    ):
        wrong = config.copy_and_resolve_references()
        wrong.data.update(fields)
        with pytest.raises(UsageError) as caught:
            validate(wrong)
        assert says in str(caught.value)


@pytest.mark.parametrize("kind", ["files", "tfrecord"])
def test_a_store_is_found_when_the_text_is_gone(tmp_path, cache, kind, monkeypatch, caplog):
    folder = tmp_path / "text"
    write_text(folder, articles()) if kind == "files" else write_tfds(folder, kind, articles())
    config = settings(tmp_path, "files" if kind == "files" else NAME, folder)
    config.cache_dir = cache
    expected = prepare.open_store(config, 260)
    shutil.rmtree(folder)
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "another host"))
    with caplog.at_level(logging.WARNING, "prope"):
        assert prepare.open_store(config, 260) == expected
    assert (
        f"config.data.data_dir={folder}: there is no such folder. Its store is used as it was made"
        in caplog.text
    )
    other = config.copy_and_resolve_references()
    other.validation_fraction = 0.1
    refused(other, "there is no such folder")
    write_text(folder, articles()[::-1]) if kind == "files" else write_tfds(
        folder, kind, articles()[:50]
    )
    newer = prepare.open_store(config, 260)
    assert newer.fingerprint != expected.fingerprint, "text that is there is always compared"
    shutil.rmtree(folder)
    assert prepare.open_store(config, 260) == newer
    (epath.Path(newer.path) / "index.json").unlink()
    refused(config, "there is no such folder")


@pytest.mark.slow
def test_a_run_goes_on_without_its_text(tmp_path, bucket, storage, run_command):
    """On another host, which sees the bucket only."""
    write_text(tmp_path / "text", articles())
    data = [
        "--config.data.dataset=files",
        f"--config.data.cache_dir={bucket}/stores",
        "--config.data.seq_len=64",
    ]
    raw = f"--config.data.data_dir={tmp_path}/text"
    prepared = run_command("prope.data.prepare", CONFIG, *data, raw, **storage.environment)
    assert prepared.code == 0, prepared.stderr
    train = ["prope.train", CONFIG, f"--workdir={tmp_path}/run", "--config.log_every=1", *data]
    first = run_command(*train, raw, "--stop_at_step=10", **storage.environment)
    assert first.code == 0, first.stderr
    shutil.rmtree(tmp_path / "text")
    elsewhere = storage.environment | {"PROPE_CACHE": str(tmp_path / "another host")}
    by_place = run_command(
        *train, f"--config.data.store={prepared.result['store']}", "--stop_at_step=15", **elsewhere
    )
    assert by_place.code == 0 and "resumed from step 10" in by_place.stderr, by_place.stderr
    by_config = run_command(*train, raw, **elsewhere)
    assert by_config.code == 0 and "resumed from step 15" in by_config.stderr, by_config.stderr
    assert "there is no such folder. Its store is used as it was made" in by_config.stderr
    evaluated = run_command(
        "prope.evaluate", f"--workdir={tmp_path}/run", "--max_windows=8", **elsewhere
    )
    assert evaluated.code == 0 and evaluated.result["loss"] == by_config.result["eval_loss"], (
        evaluated.stderr
    )
    (epath.Path(prepared.result["store"]) / "index.json").unlink()
    gone = run_command(*train, f"--config.data.store={prepared.result['store']}", **elsewhere)
    assert f"config.data.store={prepared.result['store']}: is no token store" in gone.error
