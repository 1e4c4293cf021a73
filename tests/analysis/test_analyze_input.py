"""What the analysis reads, and what it refuses."""

import json
import re

import jax
import numpy as np
import pytest
from support.heads import analysis_options
from support.models import layer_params
from support.runs import make_run
from support.text import data_config, read_tokens

from prope.analysis import analysis, choices, page, sequences
from prope.config import default_config
from prope.data import windows
from prope.data.mixture import open_windows
from prope.data.tokenizer import GEMMA_IDS, ByteTokenizer
from prope.errors import UsageError
from prope.workdir.run import open_run, write_config


def write_documents(folder, texts):
    """Writes a dataset of one file."""
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def test_layers_are_read_one_by_one(tmp_path):
    _, params = make_run(tmp_path / "run", num_layers=3)
    read = open_run(tmp_path / "run", 7).checkpoint.read
    for number in range(3):
        layer = read(("layers",), number)
        jax.tree.map(np.testing.assert_array_equal, layer, layer_params(params, number))
    jax.tree.map(np.testing.assert_array_equal, read(()), params)


@pytest.mark.parametrize("stretch", [100, 2**18])
def test_sequences_are_how_documents_begin(tmp_path, monkeypatch, stretch):
    monkeypatch.setattr(windows, "_SCAN_TOKENS", stretch)
    texts = [chr(97 + i % 26) * (10 if i % 3 else 200 + i) for i in range(90)]
    folder = write_documents(tmp_path / "text", texts)
    config = data_config(tmp_path, "files", folder, seq_len=64, validation_fraction=0.5)
    starts = open_windows(config, 260, "validation").document_starts(5)
    assert len({bytes(start) for start in starts}) == len(starts) == 5
    for start in starts:
        assert len(start) == 64
        assert start[0] == GEMMA_IDS.bos
        assert len(set(start[1:].tolist())) == 1
    config.seq_len = 1000  # longer than any: the longest
    opened = open_windows(config, 260, "validation")
    (longest,) = opened.document_starts(1)
    stream = read_tokens(opened.store, "validation")
    lengths = np.diff(np.flatnonzero(stream == GEMMA_IDS.bos), append=len(stream))
    assert len(longest) == lengths.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "paper"), [("python_docs", False), ("python_docs", True), ("synthetic/mix", False)]
)
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
        figures = {path.name for path in (folder / "theory").glob("*.png")}
        assert figures == {"figure_2.png", "figure_8.png"}
        link = re.search(r'href="(theory/[^"]*)"', (folder / "index.html").read_text())
        assert (folder / link[1]).exists()
    else:
        assert channel == "1_0_15"
        assert heads == {"1_0": "asked for"}
    pictures = {"usage", "usage_by_head", "census", "heads", "channels", f"channel_{channel}"}
    pictures |= {f"{kind}_{head}" for kind in ("head", "norms") for head in heads}
    assert {path.stem for path in folder.glob("*.png")} == pictures


def place_of(record):
    """Layer, head and pair, as in names of pictures."""
    names = ("layer", "head", "pair")
    return "_".join(str(record[name]) for name in names if name in record)


@pytest.mark.slow
def test_layers_with_different_p_are_analysed(tmp_path):
    make_run(tmp_path / "run", (1, 0.25))
    (tmp_path / "a.txt").write_text("What turns, and what does not.")
    options = analysis_options(text=str(tmp_path / "a.txt"), channels=0)
    found = analysis.analyse(tmp_path / "run", options)
    assert found["rotated_pairs"] == [32, 8]
    assert found["loss"] is None
    assert found["channels"] == []
    assert [layer["rotated_pairs"] for layer in found["layers"]] == [32, 8]
    page.write(tmp_path / "run" / "analysis", found)


# --- Refusals -------------------------------------------------------------------------------------

NOT_A_HEAD = "is not LAYER.HEAD of this model, whose heads are 0 to 3"
NOT_A_WINDOW = "is not START:STOP of the 64 tokens read, with 1 to 128 tokens; give another one"
REFUSALS = [
    ({"layers": "0,2"}, "--layers=0,2: '2' is not a layer of this model, which has 0 to 1"),
    ({"layers": "x"}, "--layers=x: 'x' is not a layer"),
    ({"heads": "1.4"}, f"--heads=1.4: '1.4' {NOT_A_HEAD}"),
    ({"heads": "1.0", "layers": "0"}, "of which these layers are measured: 0"),
    (
        {"channel": "0.1"},
        "--channel=0.1: '0.1' is not LAYER.HEAD.PAIR of this model, whose heads are 0 to 3 and "
        "pairs",
    ),
    (
        {"channel": "0.1.31,0.1.32"},
        "'0.1.32' is not .* pairs are 0 to 31 and of which these layers are measured: 0, 1",
    ),
    ({"channel": "0.4.0"}, "--channel=0.4.0: '0.4.0' is not"),
    (
        {"channel": "0.0.0,1.0.0", "layers": "0"},
        "'1.0.0' is not .* of which these layers are measured: 0",
    ),
    ({"window": "9"}, f"--window=9: {NOT_A_WINDOW}"),
    ({"window": "8:8"}, f"--window=8:8: {NOT_A_WINDOW}"),
    ({"window": "60:65"}, f"--window=60:65: {NOT_A_WINDOW}.* read more with --seq_len"),
    ({"tokens": "3,64"}, "--tokens=3,64: '64' is not one of at most 48 positions from 0 to 63"),
    ({"tokens": "-1"}, "--tokens=-1: '-1' is not one"),
    ({"tokens": ",".join("0" * 49)}, "is not one of at most 48 positions"),
    (
        {"head_of": "z"},
        "--head_of=z: must stand before some of the tokens read, and not before all; give a token "
        "such",
    ),
    ({"step": 3}, "--step=3: .* has no such checkpoint; it has 7"),
    ({"text": "none.txt"}, "--text=none.txt: cannot be read: No such file"),
]


@pytest.mark.parametrize(("flags", "error"), REFUSALS)
def test_what_is_not_there_is_refused(run_and_export, tmp_path, monkeypatch, flags, error):
    (tmp_path / "a.txt").write_text("word " * 40)
    monkeypatch.setattr(analysis, "Walk", None)  # nothing is put on a device
    options = analysis_options(**{"text": str(tmp_path / "a.txt"), "seq_len": 64} | flags)
    with pytest.raises(UsageError, match=error) as raised:
        analysis.analyse(run_and_export / "run", options)
    assert "\n" not in str(raised.value)


def test_a_text_has_two_tokens_at_least(run_and_export, tmp_path):
    text = tmp_path / "a.txt"
    options = analysis_options(text=str(text), channels=0)
    for content, error in ((b"", "has 0 tokens"), (b"x", "has 1 tokens"), (b"\xff\xfe", "UTF-8")):
        text.write_bytes(content)
        with pytest.raises(UsageError, match=error):
            analysis.analyse(run_and_export / "run", options)
    text.write_text("ab")  # enough
    assert analysis.analyse(run_and_export / "run", options)["seq_len"] == 3


def test_a_sequence_has_three_tokens_at_least(run_and_export, tmp_path, monkeypatch, caplog):
    """A document is its letters between <bos> and <eos>; what is missing is logged."""
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO", "prope")
    folder = write_documents(tmp_path / "text", "xy")
    run = open_run(run_and_export / "run")
    run.config.data.update({"dataset": "files", "data_dir": str(folder)})
    run.checkpoint.data = {"imported_from": "gemma"}  # so all documents are read

    def read(**flags):
        ids, *_ = sequences.read_sequences(run, analysis_options(**flags))
        return ids

    documents = [[GEMMA_IDS.bos, 4 + ord(letter), GEMMA_IDS.eos] for letter in "xy"]
    assert read(seq_len=3, sequences=2) == documents
    assert "found" not in caplog.text
    assert read(seq_len=64, sequences=2) == documents
    assert "found 2 documents of 3 tokens in split all" in caplog.text
    error = "dataset=files: no document of split all has 3 tokens; give a --text=FILE"
    with pytest.raises(UsageError, match=error):
        read(seq_len=2)


def test_another_dataset_is_read_whole(run_and_export, tmp_path, monkeypatch):
    """--dataset and --data_dir name a text that is not the run's; the run keeps its own."""
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "cache"))
    folder = write_documents(tmp_path / "text", "xyz")
    run = open_run(run_and_export / "run")
    before = run.config.to_json()
    options = analysis_options(dataset="files", data_dir=str(folder), seq_len=3, sequences=9)
    ids, _, text = sequences.read_sequences(run, options)
    assert [chr(tokens[1] - 4) for tokens in ids] == ["x", "y", "z"]
    assert text == {"source": "files", "split": "all"}
    assert run.config.to_json() == before


def test_windows_and_tokens_reach_to_both_ends():
    for start, stop in ((0, 1), (0, choices.MOST), (72, 200), (199, 200)):
        window = choices.parse_window(f"{start}:{stop}", 200)
        assert window == range(start, stop)
    for text in ("0:0", f"0:{choices.MOST + 1}", "150:201", "200:201", "5:4"):
        with pytest.raises(UsageError, match="is not START:STOP of the 200 tokens read"):
            choices.parse_window(text, 200)
    names = np.array([["'x'"] * 200])

    def choose(count: int) -> list[int]:
        tokens = ",".join(map(str, range(200 - count, 200)))
        options = analysis_options(tokens=tokens, paper=False)
        return choices.choose_tokens(options, names).table

    assert choose(choices.SHOWN) == list(range(200 - choices.SHOWN, 200))
    with pytest.raises(UsageError, match="is not one of at most 48 positions"):
        choose(choices.SHOWN + 1)


def test_unknown_tokens_of_a_text_are_counted(run_and_export, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(ByteTokenizer, "special", GEMMA_IDS._replace(unk=4 + ord("a")))
    (tmp_path / "a.txt").write_text("bananas")
    run = open_run(run_and_export / "run")
    sequences.read_sequences(run, analysis_options(text=str(tmp_path / "a.txt")))
    assert "a.txt: 3 of 7 tokens are <unk>" in caplog.text


CONFLICTS = ["--heads=0.1", "--head_of=q", "--channel=0.1.2", "--theory=True", "--channels=0"]
CHOSEN = "--paper chooses that itself; leave out one of the two"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--workdir=RUN"], "without a finished checkpoint; train it first"),
        ([], "--workdir: must be given"),
        *((["--workdir=RUN", "--paper", flag], f"{flag}: {CHOSEN}") for flag in CONFLICTS),
        (["--workdir=RUN", "--text=a", "--dataset=b"], "--dataset=b: --text is read instead"),
        (["--workdir=RUN", "--text=a", "--data_dir=c"], "--data_dir=c: --text is read instead"),
    ],
)
def test_a_command_is_refused(tmp_path, run_command, flags, error):
    write_config(tmp_path, default_config())
    done = run_command("prope.analyze", *(flag.replace("RUN", str(tmp_path)) for flag in flags))
    assert error in done.error
    assert done.code == 2
