"""What prope.data.inspect shows: rows of a batch, and how long documents are."""

import dataclasses
import re

import numpy as np
import pytest
from support.text import articles, data_config, read_tokens, write_lines

from prope.data import view
from prope.data.tokenizer import load_tokenizer
from prope.data.windows import Windows, train_batch
from prope.spec.run import Spec


@pytest.fixture
def spec(tmp_path):
    """A run's spec with 200 texts, which are to be read in windows of 64 tokens."""
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "all.jsonl", [{"text": text} for text in articles()])
    fields = {"validation_fraction": 0.2, "seq_len": 64}
    return Spec(data=data_config(tmp_path, "files", tmp_path / "text", **fields))


def test_the_rows_of_a_batch_are_shown(spec, capsys):
    result = view.show_batch(spec, 20, 3)
    text = capsys.readouterr().out
    assert (result["step"], result["rows"], result["seq_len"]) == (20, 3, 64)
    windows = Windows(spec.data, 260, "train")
    batch = train_batch(windows, spec.seed, spec.batch_size, 20, range(3))
    assert batch["weights"].mean() < 1, "a document ends in a row"
    assert (result["windows"], result["steps_per_epoch"]) == (
        windows.count,
        round(windows.count / spec.batch_size, 2),
    )
    assert result["documents_in_rows"] == sum(len({*row} - {0}) for row in batch["segment_ids"])
    assert result["weight_share"] == pytest.approx(batch["weights"].mean(), abs=1e-4)
    numbers = re.findall(rf"row \d of {spec.batch_size}: window ([\d,]+) of", text)
    numbers = [int(number.replace(",", "")) for number in numbers]
    np.testing.assert_array_equal(windows.read(numbers)["tokens"], batch["tokens"])
    other_lines = r"(?m)^(---|===| +place| +\d+ +\d+ +\d+ |  \.\.\.).*"
    documents = "".join(re.sub(other_lines, "", text).split())
    for tokens in batch["tokens"]:
        assert "".join(load_tokenizer("byte").decode(tokens).split()) in documents


def row(tokens, targets, weights, positions, segments):
    integers = {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "segment_ids": segments,
    }
    arrays = {name: np.array(values, np.int32) for name, values in integers.items()}
    return arrays | {"weights": np.array(weights, np.float32)}


def test_a_row_is_described_with_its_borders_positions_and_weights():
    a, b, q = (ord(character) + 4 for character in "abQ")
    tokens = [a, b, b, b, b, b, b, b, b, 1, 2, q, q, a, a, 1, 0, 0, 0]
    weights = [1] * 9 + [0, 0, 0, 1, 1, 1, 0, 0, 0]
    positions = [*range(10), 3, 7, 8, 20, 30, 31, 32, 33]
    segments = [1] * 10 + [2] * 6 + [0] * 2
    window = row(tokens[:-1], tokens[1:], weights, positions, segments)
    lines = list(view.describe(window, load_tokenizer("byte")))
    assert lines[:6] == [
        "--- document 1, which began in the window before: tokens 0..9 at positions 0..9",
        "    abbbbbbbb",
        "--- document 2: tokens 10..15 at positions 3..31",
        "    prompt, no loss | QQ",
        "    aa",
        "--- padding: tokens 16..17",
    ]
    table = [line.split() for line in lines[7:]]
    places = [entry[0] for entry in table]
    assert places == ["0", "1", "2", "...", *map(str, range(7, 18))]
    assert table[7] == ["10", "3", "2", "2", "<bos>", str(q), "'Q'", "0"]
    assert table[-3] == ["15", "31", "2", "1", "<eos>", "0", "<pad>", "0"]


def test_a_mixture_is_shown_source_by_source(spec, tmp_path, capsys):
    mixture = []
    for name, words, weight in (("long", 60, 3), ("short", 4, 1)):
        folder = tmp_path / name
        folder.mkdir()
        texts = [f"{name} {i:02}" + " word" * words for i in range(100)]
        write_lines(folder / "a.jsonl", [{"inputs": text, "targets": "yes"} for text in texts])
        mixture.append({"weight": weight, "dataset": "files", "data_dir": str(folder)})
    fields = {"dataset": "mixture", "data_dir": "", "mixture": tuple(mixture)}
    fields |= {"template": "{inputs}? {targets}", "loss_on": "targets"}
    mixed = dataclasses.replace(spec, data=dataclasses.replace(spec.data, **fields))
    result = view.show_batch(mixed, 2, 4)
    text = capsys.readouterr().out
    shown = [
        (source["dataset"], source["weight"], source["document_tokens"]["longest"])
        for source in result["sources"]
    ]
    # <bos>, the name, a space and two digits, the words, "? yes", <eos>
    long = (f"files {tmp_path}/long", 0.75, 1 + 7 + 300 + 5 + 1)
    assert shown == [long, (f"files {tmp_path}/short", 0.25, 1 + 8 + 20 + 5 + 1)]
    assert [source["longer_than_window"] for source in result["sources"]] == [1, 0]
    assert result["weight_share"] < 0.3
    assert text.count("=== step 2, row ") == 4
    assert "    prompt, no loss | " in text
    assert "\n    yes\n" in text


def test_a_mixture_of_generated_windows_has_no_lengths(spec):
    tasks = ("passkey", "niah")
    mixture = tuple({"weight": 1, "dataset": f"longcontext/{task}"} for task in tasks)
    mixed = spec.replace({"data.dataset": "mixture", "data.data_dir": "", "data.mixture": mixture})
    assert view.show_batch(mixed, 0, 1)["sources"] == []


def test_control_characters_do_not_reach_the_terminal():
    ids = [byte + 4 for byte in b"red \x1b[31m bell \a tab \t end"]
    window = row(ids, ids, [0] * len(ids), range(len(ids)), [1] * len(ids))
    lines = list(view.describe(window, load_tokenizer("byte")))
    assert all(line.isprintable() for line in lines)
    assert "[31m" in lines[1]


@pytest.mark.parametrize("measured", [700, 10**9])
def test_lengths_of_documents(spec, monkeypatch, measured):
    store = Windows(spec.data, 260, "train").store
    tokens = read_tokens(store, "train")[:measured]
    lengths = np.diff(np.flatnonzero(tokens == 2), append=len(tokens))
    assert lengths.max() > 300, "some do not fit into a scan"
    monkeypatch.setattr(view, "SCAN_TOKENS", 300)
    monkeypatch.setattr(view, "MEASURED_TOKENS", measured)
    assert view.document_lengths(store).tolist() == lengths.tolist()
