"""What the analysis reads, and what it refuses."""

import json
import re

import jax
import numpy as np
import pytest
from makers import analysis_options as asked
from makers import layer_params as at_layer
from makers import make_run

from prope.analysis import analysis as analyze
from prope.analysis import page, sequences
from prope.config import default_config
from prope.data.mixture import open_windows
from prope.data.tokenizer import BOS, EOS
from prope.errors import UsageError
from prope.workdir.run import open_run, write_config


def test_layers_are_read_one_by_one(tmp_path):
    _, params = make_run(tmp_path / "run", num_layers=3)
    read = open_run(tmp_path / "run", 7).checkpoint.read
    for number in range(3):
        jax.tree.map(
            np.testing.assert_array_equal, read(("layers",), number), at_layer(params, number)
        )
    jax.tree.map(np.testing.assert_array_equal, read(()), params)


@pytest.mark.parametrize("stretch", [100, 2**18])
def test_sequences_are_how_documents_begin(tmp_path, monkeypatch, stretch):
    from prope.data import windows

    monkeypatch.setattr(windows, "_SCAN_TOKENS", stretch)
    (tmp_path / "text").mkdir()
    documents = [chr(97 + i % 26) * (10 if i % 3 else 200 + i) for i in range(90)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    config = default_config()
    config.data.update(
        {
            "dataset": "files",
            "data_dir": str(tmp_path / "text"),
            "cache_dir": str(tmp_path / "cache"),
            "seq_len": 64,
            "validation_fraction": 0.5,
        }
    )
    found = open_windows(config.data, 260, "validation").document_starts(5)
    assert len(found) == 5 and len({bytes(piece) for piece in found}) == 5
    for piece in found:
        assert len(piece) == 64 and piece[0] == BOS and len(set(piece[1:].tolist())) == 1
    config.data.seq_len = 1000  # longer than any: the longest
    found = open_windows(config.data, 260, "validation").document_starts(1)
    stream = open_windows(config.data, 260, "validation").store.tokens("validation").read().result()
    lengths = np.diff(np.flatnonzero(stream == BOS), append=len(stream))
    assert len(found[0]) == lengths.max()


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
    assert train(tmp_path / "run", f"--config.data.dataset={dataset}", *sizes).code == 0
    chosen = ["--paper"] if paper else ["--heads=1.0", "--channel=1.0.15"]
    done = run_command(
        "prope.analyze", f"--workdir={tmp_path / 'run'}", "--sequences=2", "--layers=1", *chosen
    )
    assert done.code == 0, done.stderr
    assert done.result["sequences"] == 2 and {head["layer"] for head in done.result["heads"]} == {1}
    folder = tmp_path / "run" / "analysis"
    saved = json.loads((folder / "analysis.json").read_text())
    heads, (channel,) = (
        {(head["layer"], head["head"]): head["why"] for head in saved["shown"]},
        saved["shown_channels"],
    )
    strongest = saved["channels"][0]
    place = (strongest["head"], strongest["pair"]) if paper else (0, 15)
    assert (channel["layer"], channel["head"], channel["pair"]) == (1, *place)
    assert saved["shown"][0]["table"]["tokens"][0] == "<bos>"
    if paper:
        assert set(heads) == {(1, 0), (1, 1)}, "both heads of the layer"
        assert {path.name for path in (folder / "theory").glob("*.png")} == {
            "figure_2.png",
            "figure_8.png",
        }
        assert (
            folder / re.search(r'href="(theory/[^"]*)"', (folder / "index.html").read_text())[1]
        ).exists()
    else:
        assert heads == {(1, 0): "asked for"}
    pictures = {path.stem for path in folder.glob("*.png")}
    shown = {f"{kind}_{layer}_{head}" for layer, head in heads for kind in ("head", "norms")}
    shown |= {f"channel_1_{channel['head']}_{channel['pair']}"}
    assert pictures == {"usage", "usage_by_head", "census", "heads", "channels"} | shown
    for value in (saved["loss"]["loss"], *(c["removed"]["difference"] for c in saved["channels"])):
        assert np.isfinite(value)


# --- What cannot be used ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"layers": "0,2"}, "--layers=0,2: '2' is not a layer of this model, which has 0 to 1"),
        ({"layers": "x"}, "--layers=x: 'x' is not a layer"),
        (
            {"heads": "1.4"},
            "--heads=1.4: '1.4' is not LAYER.HEAD of this model, whose heads are 0 to 3",
        ),
        ({"heads": "1.0", "layers": "0"}, "of which these layers are measured: 0"),
        (
            {"channel": "0.1"},
            "--channel=0.1: '0.1' is not LAYER.HEAD.PAIR of this model, whose heads are 0 to 3 and pairs",
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
        (
            {"window": "9"},
            "--window=9: is not START:STOP of the 64 tokens read, with 1 to 128 tokens; give another one",
        ),
        ({"window": "8:8"}, "--window=8:8: is not START:STOP of the 64"),
        (
            {"window": "60:65"},
            "--window=60:65: is not START:STOP of the 64 tokens read.*read more with --seq_len",
        ),
        ({"tokens": "3,64"}, "--tokens=3,64: '64' is not one of at most 48 positions from 0 to 63"),
        ({"tokens": "-1"}, "--tokens=-1: '-1' is not one"),
        ({"tokens": ",".join("0" * 49)}, "is not one of at most 48 positions"),
        (
            {"head_of": "z"},
            "--head_of=z: must stand before some of the tokens read, and not before all; give a token such",
        ),
        ({"step": 3}, "--step=3: .* has no such checkpoint; it has 7"),
        ({"text": "none.txt"}, "--text=none.txt: cannot be read: No such file"),
    ],
)
def test_what_is_not_there_is_answered_in_one_line(
    run_and_export, tmp_path, monkeypatch, flags, says
):
    (tmp_path / "a.txt").write_text("word " * 40)
    monkeypatch.setattr(analyze, "Walk", None)  # nothing is put on a device
    with pytest.raises(UsageError, match=says) as error:
        analyze.analyse(
            run_and_export / "run",
            asked(**{"text": str(tmp_path / "a.txt"), "seq_len": 64} | flags),
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
            "layer_types=.'sliding",
        ),
        ({"rope_type": "reversed"}, "rope_type=reversed"),
        ({"rope_scaling_type": "stop", "scaled_pairs": (0, 3)}, "rope_scaling_type=stop"),
    ],
)
def test_an_encoding_whose_rotated_pairs_are_not_the_first_is_refused(
    tmp_path, monkeypatch, fields, says
):
    make_run(tmp_path / "run", **fields)
    (tmp_path / "a.txt").write_text("word " * 40)
    monkeypatch.setattr(analyze, "Walk", None)
    with pytest.raises(
        UsageError,
        match=f"{says}.*: only layers without windows, whose rotated pairs are the first",
    ):
        analyze.analyse(tmp_path / "run", asked(text=str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "has 0 tokens"), (b"x", "has 1 tokens"), (b"\xff\xfe", "UTF-8")]
)
def test_a_text_has_two_tokens_at_least(run_and_export, tmp_path, content, says):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        analyze.analyse(run_and_export / "run", asked(text=str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").write_text("ab")  # enough
    assert (
        analyze.analyse(run_and_export / "run", asked(text=str(tmp_path / "a.txt")))["seq_len"] == 3
    )


def test_a_sequence_has_three_tokens_at_least(run_and_export, tmp_path, monkeypatch, caplog):
    """A document is its letters between <bos> and <eos>; what is missing of what was asked for is logged."""
    monkeypatch.setenv("PROPE_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO", "prope")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    run = open_run(run_and_export / "run")
    run.config.data.update({"dataset": "files", "data_dir": str(tmp_path / "text")})
    run.checkpoint.data = {"imported_from": "gemma"}  # so all documents are read

    def read(**flags):
        return sequences.read_sequences(run, asked(**flags))[0]

    documents = [[BOS, 4 + ord(letter), EOS] for letter in "xy"]
    assert read(seq_len=3, sequences=2) == documents and "found" not in caplog.text
    assert (
        read(seq_len=64, sequences=2) == documents
        and "found 2 documents of 3 tokens in split all" in caplog.text
    )
    with pytest.raises(
        UsageError, match="dataset=files: no document of split all has 3 tokens; give a --text=FILE"
    ):
        read(seq_len=2)


def test_a_run_without_a_checkpoint_is_answered_in_one_line(tmp_path, run_command):
    write_config(tmp_path, default_config())
    assert (
        "without a finished checkpoint; train it first"
        in run_command("prope.analyze", f"--workdir={tmp_path}").error
    )
    assert "Flag --workdir must have a value" in run_command("prope.analyze").error


@pytest.mark.parametrize(
    "flag", ["--heads=0.1", "--head_of=q", "--channel=0.1.2", "--theory=True", "--channels=0"]
)
def test_a_flag_that_contradicts_paper_is_answered_in_one_line(tmp_path, run_command, flag):
    done = run_command("prope.analyze", f"--workdir={tmp_path}", "--paper", flag)
    assert (
        f"{flag}: --paper chooses that itself; leave out one of the two" in done.error
        and done.code == 2
    )


@pytest.mark.slow
def test_layers_with_a_p_of_their_own_are_analysed(tmp_path):
    make_run(tmp_path / "run", (1, 0.25))
    (tmp_path / "a.txt").write_text("What turns, and what does not.")
    found = analyze.analyse(tmp_path / "run", asked(text=str(tmp_path / "a.txt"), channels=0))
    assert found["rotated_pairs"] == [32, 8] and found["loss"] is None and found["channels"] == []
    assert [layer["rotated_pairs"] for layer in found["layers"]] == [32, 8]
    page.write(tmp_path / "run" / "analysis", found)
