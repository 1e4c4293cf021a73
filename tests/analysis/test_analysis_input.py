"""What the analysis reads, and what it refuses."""

import dataclasses
import json

import numpy as np
import pytest
from support.heads import analysis_options
from support.runs import make_run
from support.text import data_config, is_validation, read_tokens

from prope.analysis import analysis, choices, sequences
from prope.data import windows
from prope.data.mixture import open_windows
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer
from prope.errors import UsageError
from prope.spec.run import Spec
from prope.workdir.run import open_run, write_config


def write_documents(folder, texts):
    """Writes a dataset of one file."""
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("stretch", [100, 2**18])
def test_sequences_are_how_documents_begin(tmp_path, monkeypatch, stretch):
    monkeypatch.setattr(windows, "_SCAN_TOKENS", stretch)
    texts = [chr(97 + i % 26) * (10 if i % 3 else 200 + i) for i in range(90)]
    folder = write_documents(tmp_path / "text", texts)
    data = data_config(tmp_path, "files", folder, seq_len=64, validation_fraction=0.5)
    starts = open_windows(data, 260, "validation").document_starts(5)
    assert len({bytes(start) for start in starts}) == len(starts) == 5
    for start in starts:
        assert len(start) == 64
        assert start[0] == GEMMA_IDS.bos
        assert len(set(start[1:].tolist())) == 1
    longer = dataclasses.replace(data, seq_len=1000)  # than any: the longest
    opened = open_windows(longer, 260, "validation")
    (longest,) = opened.document_starts(1)
    stream = read_tokens(opened.store, "validation")
    lengths = np.diff(np.flatnonzero(stream == GEMMA_IDS.bos), append=len(stream))
    assert len(longest) == lengths.max()


@pytest.mark.parametrize("imported", [False, True])
def test_a_run_is_analysed_on_what_it_was_not_trained_on(tmp_path, imported):
    """A trained one on its validation split, an imported one on all documents."""
    texts = [f"{number:07} of many" for number in range(200)]
    folder = write_documents(tmp_path / "text", texts)
    make_run(tmp_path / "run")
    run = open_run(tmp_path / "run")
    fields = {"seq_len": 64, "validation_fraction": 0.2}
    data = data_config(tmp_path, "files", folder, **fields)
    run.spec = dataclasses.replace(run.spec, data=data)
    run.checkpoint.data = {"imported_from": "gemma"} if imported else {}
    options = analysis_options(seq_len=8, sequences=100)
    tokens, _, text = sequences.read_sequences(run, options)
    assert text == {"source": "files", "split": "all" if imported else "validation"}
    starts = {bytes(row[1:] - 4).decode() for row in np.array(tokens, np.uint8)}
    held_out = {text[:7] for text in texts if is_validation(text.encode(), 0.2)}
    assert len(starts) >= 20
    assert (starts <= held_out) == (not imported)
    assert starts <= {text[:7] for text in texts}


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "paper"), [("python_docs", True), ("synthetic/mix", False)])
def test_a_trained_run_is_analysed(tmp_path, train, run_command, dataset, paper):
    sizes = [
        "--config.num_steps=3",
        "--config.data.seq_len=64",
        "--config.model.vocab_size=300",
        "--config.eval.max_windows=1",
    ]
    run = tmp_path / "run"
    assert train(run, f"--config.data.dataset={dataset}", *sizes).code == 0
    chosen = ["--paper"] if paper else ["--heads=1.0", "--channel=1.0.15"]
    arguments = [f"--workdir={run}", "--sequences=2", "--layers=1", *chosen]
    done = run_command("prope.analyze", *arguments)
    assert done.code == 0, done.stderr
    assert done.result["sequences"] == 2
    assert {head["layer"] for head in done.result["heads"]} == {1}
    folder = run / "analysis"
    saved = json.loads((folder / "analysis.json").read_text())
    assert saved["shown"][0]["table"]["tokens"][0] == "<bos>"
    changes = [channel["removed"]["difference"] for channel in saved["channels"]]
    assert np.isfinite([saved["loss"]["loss"], *changes]).all()
    heads = {place_of(head): head["why"] for head in saved["shown"]}
    (channel,) = map(place_of, saved["shown_channels"])
    if paper:
        assert channel == place_of(saved["channels"][0])
        assert heads.keys() == {"1_0", "1_1"}, "both heads of the layer"
    else:
        assert (channel, heads) == ("1_0_15", {"1_0": "asked for"})
    pictures = {path.stem for path in folder.glob("*.png")}
    assert {f"channel_{channel}", *(f"head_{head}" for head in heads)} < pictures


def place_of(record):
    """Layer, head and pair, as in names of pictures."""
    names = ("layer", "head", "pair")
    return "_".join(str(record[name]) for name in names if name in record)


# --- Refusals -------------------------------------------------------------------------------------

REFUSALS = [  # flags, and the one that is named
    ({"layers": "0,2"}, "layers"),
    ({"heads": "1.4"}, "heads"),
    ({"heads": "1.0", "layers": "0"}, "heads"),
    ({"channel": "0.1"}, "channel"),
    ({"channel": "0.1.31,0.1.32"}, "channel"),
    ({"window": "9"}, "window"),
    ({"window": "60:65"}, "window"),
    ({"tokens": "3,64"}, "tokens"),
    ({"tokens": "-1"}, "tokens"),
    ({"tokens": ",".join("0" * 49)}, "tokens"),
    ({"head_of": "z"}, "head_of"),
    ({"step": 3}, "step"),
    ({"text": "none.txt"}, "text"),
    ({"text": "one-token.txt"}, "text"),
    ({"text": "no-utf8.txt"}, "text"),
]


def test_what_is_not_there_is_refused(run_and_export, tmp_path, monkeypatch):
    """In one line that begins with the flag and its value, before anything is put on a device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analysis, "Walk", None)
    texts = {"a": b"word " * 40, "one-token": b"x", "no-utf8": b"\xff\xfe"}
    for name, content in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    for flags, named in REFUSALS:
        options = analysis_options(**{"text": "a.txt", "seq_len": 64} | flags)
        with pytest.raises(UsageError) as raised:
            analysis.analyse(run_and_export / "run", options)
        assert str(raised.value).startswith(f"--{named}={flags[named]}: "), flags
        assert "\n" not in str(raised.value), flags


def test_a_pair_must_be_one_of_its_layer():
    counts = {"HEAD": [4] * 3, "PAIR": [8, 8, 12]}
    assert choices.parse_places("channel", "2.0.11", [0, 2], **counts) == [(2, 0, 11)]
    with pytest.raises(UsageError, match="^--channel=0.0.8: "):
        choices.parse_places("channel", "0.0.8", [0, 2], **counts)


def test_a_text_of_two_tokens_is_enough_and_unknown_ones_are_counted(
    run_and_export, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "a.txt"
    path.write_text("ab")
    options = analysis_options(text=str(path), channels=0)
    assert analysis.analyse(run_and_export / "run", options)["seq_len"] == 3
    path.write_text("bananas")
    monkeypatch.setattr(ByteTokenizer, "special", GEMMA_IDS._replace(unk=4 + ord("a")))
    sequences.read_sequences(open_run(run_and_export / "run"), options)
    assert "a.txt: 3 of 7 tokens are <unk>" in caplog.text


def test_another_dataset_is_read_whole_from_three_tokens_on(
    run_and_export, tmp_path, monkeypatch, caplog
):
    """A document is its letters between <bos> and <eos>; the run keeps its own dataset."""
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO", "prope")
    folder = write_documents(tmp_path / "text", "xy")
    run = open_run(run_and_export / "run")
    before = run.spec

    def read(**flags):
        flags |= {"dataset": "files", "data_dir": str(folder)}
        ids, _, text = sequences.read_sequences(run, analysis_options(**flags))
        assert text == {"source": "files", "split": "all"}
        return ids

    documents = [[GEMMA_IDS.bos, 4 + ord(letter), GEMMA_IDS.eos] for letter in "xy"]
    assert read(seq_len=3, sequences=2) == documents
    assert "found" not in caplog.text
    assert read(seq_len=64, sequences=2) == documents
    assert "found 2 documents of 3 tokens in split all" in caplog.text
    with pytest.raises(UsageError, match="^config.data.dataset=files: "):
        read(seq_len=2)
    assert run.spec == before


def test_windows_and_tokens_reach_to_both_ends():
    for start, stop in ((0, 1), (0, choices.MOST), (199, 200)):
        window = choices.parse_window(f"{start}:{stop}", 200)
        assert window == range(start, stop)
    for text in ("0:0", f"0:{choices.MOST + 1}", "150:201", "5:4"):
        with pytest.raises(UsageError, match=f"^--window={text}: "):
            choices.parse_window(text, 200)
    last = list(range(200 - choices.SHOWN, 200))
    names = np.array([["'x'"] * 200])
    options = analysis_options(tokens=",".join(map(str, last)), paper=False)
    assert choices.choose_tokens(options, names).table == last
    options.tokens += ",0"
    with pytest.raises(UsageError, match="^--tokens="):
        choices.choose_tokens(options, names)


def test_the_papers_window_is_around_the_first_apostrophe():
    for length, apostrophe, window in (
        (200, 150, range(126, 174)),
        (200, 190, range(152, 200)),
        (200, 7, range(48)),
        (30, 20, range(30)),
    ):
        assert choices.parse_window(None, length, apostrophe) == window


COMMANDS = [  # flags, and what the line begins with
    (["--workdir=RUN"], "--workdir=RUN: "),
    (["--workdir=RUN", "--text=a", "--dataset=b"], "--text=a: "),
    (["--workdir=RUN", "--text=a", "--data_dir=c"], "--text=a: "),
]


@pytest.mark.parametrize(("flags", "begins"), COMMANDS)
def test_a_command_is_refused(tmp_path, run_command, flags, begins):
    write_config(tmp_path, Spec())
    done = run_command("prope.analyze", *(flag.replace("RUN", str(tmp_path)) for flag in flags))
    assert done.error.startswith("error: " + begins.replace("RUN", str(tmp_path)))
    assert done.code == 2
