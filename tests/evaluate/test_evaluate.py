"""Evaluation against sums made token by token, and its errors against simulation and jackknife."""

import dataclasses
import itertools
import json
import math
import shutil
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from support.commands import flipped
from support.compiled import array_shapes
from support.models import ALL_SWITCHES, forward
from support.runs import edit_run, evaluate_run, make_run
from support.text import read_lines, refusal

from prope.data.windows import Windows
from prope.inference import losses, paired, statistics
from prope.runtime.files import append_jsonl
from prope.workdir.run import open_run, read_config

T = 64  # length in training
BOS = 2


class Tokens(NamedTuple):
    """Every predicted token of some windows."""

    loss: np.ndarray
    document: np.ndarray  # counted along the stream of tokens
    position: np.ndarray  # in the window


def open_windows(workdir, T):
    spec = read_config(workdir)
    data = dataclasses.replace(spec.data, seq_len=T)
    return Windows(data, spec.model.vocab_size, "validation")


def token_by_token(workdir, T, chosen=None, step=None, bos=False) -> Tokens:
    """The plain softmax in float64, a window at a time, of masked documents too.

    With `bos`, that is the first token of every window.
    """
    run = open_run(workdir, step)
    is_masked = run.spec.data.mask_documents
    params = run.params()
    windows = open_windows(workdir, T)
    stream = windows.store.tokens("validation").read().result().astype(np.int32)
    opened = np.cumsum(stream == BOS)
    predicted = []
    for window in range(windows.count) if chosen is None else chosen:
        start = window * T
        tokens = stream[start : start + T + 1]
        inputs = tokens[None, :-1].copy()
        begins = (inputs == BOS) & is_masked
        if bos:
            inputs[0, 0] = BOS
        places = np.arange(inputs.shape[1])[None]
        positions = places - np.maximum.accumulate(places * begins, axis=1)
        segments = np.cumsum(begins, axis=1) if is_masked else None
        (logits,) = forward(run.spec.model, params, jnp.asarray(inputs), positions, segments)
        logits = np.asarray(logits, np.float64)
        for place, target in enumerate(tokens[1:]):
            if target != BOS:
                loss = np.logaddexp.reduce(logits[place]) - logits[place, target]
                predicted.append((loss, opened[start + place + 1], place))
    return Tokens(*map(np.array, zip(*predicted, strict=True)))


def jackknife(values: np.ndarray, document: np.ndarray) -> float:
    """The standard error of the mean of `values`, by leaving out one document at a time."""
    names = np.unique(document)
    left = np.array([values[document != name].mean() for name in names])
    C = len(names)
    return math.sqrt((C - 1) / C * ((left - left.mean()) ** 2).sum())


# --- The numbers ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_of_layers_of_all_kinds_and_of_its_intervention(runs, base):
    """The frequencies that are stopped are 0 in each kind of layer."""
    run = runs / "kinds"
    make_run(run, 0.5, **ALL_SWITCHES)
    edit_run(run, base)
    (record,) = evaluate_run(run)
    expected = token_by_token(run, T).loss.mean()
    assert record["loss"] == pytest.approx(expected, rel=1e-6)
    assert record["rotated_pairs"] == [24, 24, 6, 24, 24, 6]
    (stopped,) = evaluate_run(run, intervene="stop:0-3")
    assert stopped["rotated_pairs"] == [20, 20, 2, 20, 20, 2]
    (beyond,) = evaluate_run(run, intervene="stop:12-31")  # of 12 in layers without a window
    assert beyond["rotated_pairs"] == [12, 12, 6, 12, 12, 6]
    edit_run(run, base, **{"model.rope_scaling_type": "stop", "model.scaled_pairs": (0, 3)})
    # The weights of step 9 before.
    expected = token_by_token(run, T, step=7).loss.mean()
    assert stopped["loss"] == pytest.approx(expected, rel=1e-6) != record["loss"]


def test_the_record_names_the_checkpoint_that_was_read_where_the_newest_is_damaged(runs):
    (older,) = evaluate_run(runs / "rope", step="7")
    files = [file for file in (runs / "rope/checkpoints/9/params").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(flipped(largest.read_bytes()))
    (record,) = evaluate_run(runs / "rope", again=True)
    assert record["step"] == 7 and record["loss"] == older["loss"]
    assert [folder.name for folder in (runs / "rope/eval").iterdir()] == ["7"]


def test_sums_of_other_weights_or_encodings_have_folders_that_file_systems_take(tmp_path):
    many = "+".join(f"{pair}-{pair}@sliding" for pair in range(0, 128, 2))
    changes = [{}, {"step": 8}, {"encoding": "ntk"}, {"factor": 2.0}, {"encoding": f"stop:{many}"}]
    changes += [{"window": 8, "sinks": 0}, {"window": 8, "sinks": 4}]
    changes += [{"changed": {"model.dtype": dtype}} for dtype in ("float32", "bfloat16")]
    changes += [{"encoding": None} | changes[-3]]
    record = {"step": 9, "encoding": "yarn", "factor": 4.0}
    folders = [paired.sums_folder(tmp_path, record | change) for change in changes]
    assert len(set(folders)) == len(folders)
    for folder in folders:
        folder.mkdir(parents=True)


MASKED = {"data.mask_documents": True, "model.final_softcap": 1.0, "model.rope_percentage": 0.5}


@pytest.mark.parametrize(("fields", "pairs"), [({}, 32), (MASKED, 16)], ids=["plain", "masked"])
def test_a_record_is_the_sum_over_its_tokens(runs, base, fields, pairs):
    edit_run(runs / "rope", base, **fields)
    (record,) = evaluate_run(runs / "rope", batch_size=7)
    expected = token_by_token(runs / "rope", T)
    about = ("step", "rope_percentage", "rotated_pairs", "dataset", "seq_len")
    assert [record[name] for name in about] == [9, pairs / 32, pairs, "files", T]
    assert record["tokens"] == len(expected.loss)
    assert record["loss"] == pytest.approx(expected.loss.mean(), rel=1e-6)
    buckets = record["by_position"]
    starts = [bucket["from"] for bucket in buckets]
    assert starts == list(range(0, T, 8))
    for bucket in buckets:
        assert bucket["to"] == bucket["from"] + 8
        is_there = expected.position // 8 == bucket["from"] // 8
        there = expected.loss[is_there]
        documents = expected.document[is_there]
        assert bucket["tokens"] == len(there)
        assert bucket["documents"] == len(set(documents)) > 20
        assert bucket["loss"] == pytest.approx(there.mean(), rel=1e-6)
        assert bucket["loss_stderr"] == pytest.approx(jackknife(there, documents), rel=1e-3)


def test_a_position_that_one_document_reaches_has_no_standard_error():
    loss = np.array([[3.0, 8.0], [5.0, 0.0]])
    tokens = np.array([[1, 4], [2, 0]])
    sums = paired.Sums(loss, tokens, np.array([0, 4, 8]), np.zeros(2, int), [1.0])
    both, one = losses.summarize_positions(sums)
    assert both["loss_stderr"] == pytest.approx(
        jackknife(np.array([3, 2.5, 2.5]), np.array([0, 1, 1]))
    )
    assert (one["documents"], one["loss"], one["loss_stderr"]) == (1, 2.0, None)


def test_the_standard_error_is_that_over_documents(runs):
    loss, document, _ = token_by_token(runs / "rope", T)
    (record,) = evaluate_run(runs / "rope")
    counts = np.bincount(document)
    counts = counts[counts > 0]
    assert len(counts) > 20
    stderr = record["loss_stderr"]
    assert stderr == pytest.approx(jackknife(loss, document), rel=1e-3)
    assert stderr > 2 * loss.std() / math.sqrt(len(loss)), "tokens of a document are alike"
    (file,) = (runs / "rope" / "eval" / "9").glob("*.npz")
    with np.load(file) as sums:
        # A document that goes on in the next window is one document.
        assert sums["tokens"].sum(axis=1).tolist() == counts.tolist()


def test_windows_apart_do_not_share_documents(runs):
    (record,) = evaluate_run(runs / "rope", max_windows=12)
    count = open_windows(runs / "rope", T).count
    chosen = [place * count // 12 for place in range(12)]
    loss, document, position = token_by_token(runs / "rope", T, chosen)
    assert (record["windows"], record["tokens"]) == (12, len(loss))
    window = np.cumsum(np.diff(position, prepend=0) < 0)
    apart = document + 1000 * window
    assert len(np.unique(apart)) > len(np.unique(document)), "some document is in two of them"
    assert record["loss_stderr"] == pytest.approx(jackknife(loss, apart), rel=1e-3)


def test_saved_sums_are_added_up_in_float64():
    """In float32, as they are saved, a document is less than the last digit of all together."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 100, 20_000).astype(np.int32)
    level = rng.normal(3, 0.3, len(tokens))
    loss = (tokens * level).astype(np.float32)
    exact = loss.astype(np.float64)
    weights = tokens.astype(np.float64)
    one_source = (np.zeros(len(tokens), int), [1.0])
    expected = statistics.mean_and_stderr(exact, weights, *one_source)
    actual = statistics.mean_and_stderr(loss, tokens, *one_source)
    assert actual == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_two_runs_on_the_same_windows_are_compared_document_by_document(runs):
    nope, rope = (runs / "nope", runs / "rope")
    about = {"step": 7, "seq_len": 2 * T}
    a, b = evaluate_run(runs, seq_len="2x", step="7")
    evaluate_run(runs, seq_len="1x", step="7")  # newer, of another length
    evaluate_run(rope, seq_len="2x", step="9")
    evaluate_run(rope, seq_len="2x", step="7", max_windows=3)  # newer, of other windows
    found = paired.paired_difference(nope, rope, about)
    assert found.difference == pytest.approx(a["loss"] - b["loss"], rel=1e-4)
    assert found.stderr < 0.7 * math.hypot(a["loss_stderr"], b["loss_stderr"])
    ours = token_by_token(nope, 2 * T, step=7)
    theirs = token_by_token(rope, 2 * T, step=7)
    apart = ours.loss - theirs.loss
    late = ours.position >= 96
    for positions, chosen in ((None, late | True), ((96, 128), late)):
        found = paired.paired_difference(nope, rope, about, positions)
        assert found.difference == pytest.approx(apart[chosen].mean(), rel=1e-4)
        stderr = jackknife(apart[chosen], ours.document[chosen])
        assert found.stderr == pytest.approx(stderr, rel=1e-3)
    assert "positions=(0, 3): " in refusal(paired.paired_difference, nope, rope, about, (0, 3))
    evaluate_run(nope, seq_len="100")
    says = refusal(paired.paired_difference, nope, rope, {"seq_len": 100})
    assert "'seq_len': 100" in says


def test_damaged_sums_are_answered_with_the_command_that_makes_them(tmp_path):
    record = {"step": 7, "split": "validation", "fingerprint": "f", "seq_len": 8, "windows": 2}
    append_jsonl(tmp_path / "eval.jsonl", record)
    tokens = np.array([[1, 1], [1, 0]])
    sums = paired.Sums(tokens, tokens, np.array([0, 4, 8]), np.zeros(2, int), [1.0])
    folder = epath.Path(tmp_path / "eval" / "7")
    paired.write_sums(folder, record, sums)
    assert paired.paired_difference(tmp_path, tmp_path).samples == 2
    late = paired.paired_difference(tmp_path, tmp_path, positions=(4, 8))
    assert late.samples == 1, "of two documents one reaches there"
    file = folder / "f-8-2.npz"
    whole = file.read_bytes()
    for damaged in (b"", b"text", whole[:-99], whole[:60] + bytes(40) + whole[100:], None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        says = refusal(paired.paired_difference, tmp_path, tmp_path)
        assert "f-8-2.npz: " in says and "--again" in says


# --- Longer windows ---------------------------------------------------------------------------


def test_long_windows_are_finite_and_their_scores_never_whole(runs, monkeypatch):
    compiled = []
    monkeypatch.setattr(losses, "check_memory", lambda program, _: compiled.append(program))
    (record,) = evaluate_run(runs / "rope", seq_len="8x", max_windows=2)
    assert record["seq_len"] == 8 * T
    assert len(record["by_position"]) == 64
    middle = open_windows(runs / "rope", 8 * T).count // 2
    expected = token_by_token(runs / "rope", 8 * T, [0, middle])
    assert record["loss"] == pytest.approx(expected.loss.mean(), rel=1e-5)
    shapes = [dims for _, dims in array_shapes(compiled[0].as_text())]
    assert any(8 * T in shape for shape in shapes)
    of_all_heads = 2 * 4 * (8 * T) ** 2
    assert max(map(math.prod, shapes)) < of_all_heads / 2, "scores of all queries with all keys"


def test_windows_of_8192_tokens_are_told_apart_by_thousands(runs):
    flags = {"seq_len": "8192", "max_windows": 1, "split": "all"}
    (long,) = evaluate_run(runs / "rope", **flags)
    starts = [bucket["from"] for bucket in long["by_position"]]
    assert starts == list(range(0, long["tokens"], 1024))


# --- Which runs, checkpoints and lengths ------------------------------------------------------


@pytest.mark.slow
def test_all_runs_all_checkpoints_all_lengths_once_and_not_again(runs, base, monkeypatch):
    compiled = []
    check = losses.check_memory
    monkeypatch.setattr(losses, "check_memory", lambda *given: compiled.append(check(*given)))
    shutil.copytree(runs / "nope", runs / "below" / "seed=1")
    edit_run(runs / "below" / "seed=1", base, seed=1)
    (runs / "unfinished").mkdir()
    shutil.copy(runs / "nope" / "config.json", runs / "unfinished")
    records = evaluate_run(runs, step="all", seq_len="1x,32,0064,2x")
    assert len(compiled) == 6, "once for each length and p"
    expected = []
    for name, p in (("below/seed=1", 0.0), ("nope", 0.0), ("rope", 1.0)):
        for step in (7, 9):
            expected += [(str(runs / name), p, step, length) for length in (64, 32, 128)]
    fields = ("workdir", "rope_percentage", "step", "seq_len")
    assert [tuple(record[name] for name in fields) for record in records] == expected
    assert len({record["loss"] for record in records[6:]}) == 12
    lines = read_lines(runs / "rope" / "eval.jsonl")
    assert lines == records[12:]

    assert evaluate_run(runs, step="all", seq_len="1x,32,64,2x") == records
    (newest,) = evaluate_run(runs / "rope")
    assert newest == records[15]
    assert len(compiled) == 6
    assert read_lines(runs / "rope" / "eval.jsonl") == lines
    assert evaluate_run(runs / "rope", again=True) == [newest]
    assert len(compiled) == 7


@pytest.mark.slow
def test_a_record_is_reused_for_the_same_evaluation_alone(runs, tmp_path, base):
    rope = runs / "rope"
    (first,) = evaluate_run(rope)
    # Training's record has neither of these.
    lacking = ("rope_percentage", "rotated_pairs", "init_hash", "workdir")
    training = {name: value for name, value in first.items() if name not in lacking}
    (rope / "eval.jsonl").write_text(json.dumps(training | {"loss": 0.5}) + "\n")
    assert evaluate_run(rope) == [first | {"loss": 0.5}]
    for other in ({"max_windows": 2}, {"step": "7"}):
        assert evaluate_run(rope, **other)[0]["loss"] != 0.5
    shutil.copytree(base / "text", tmp_path / "more")
    (tmp_path / "more" / "b.jsonl").write_text('{"text": "another text"}\n' * 50)
    (other,) = evaluate_run(rope, dataset="files", data_dir=str(tmp_path / "more"))
    assert other["loss"] != 0.5, "the same name, other documents"


@pytest.mark.slow
def test_the_command_prints_the_last_and_all_in_short(runs, run_command):
    flags = ("--max_windows=5", "--window=16")
    outcome = run_command("prope.evaluate", f"--workdir={runs}", "--seq_len=32,1x", *flags)
    assert outcome.code == 0, outcome.stderr
    last = outcome.result
    short = last.pop("evaluations")
    assert short[-1].items() <= last.items()
    shown = [(record["workdir"], record["seq_len"], record["window"]) for record in short]
    places = itertools.product((str(runs / "nope"), str(runs / "rope")), (32, 64), (None, 16))
    assert shown == list(places)
    one = run_command("prope.evaluate", f"--workdir={runs / 'rope'}", "--max_windows=5")
    assert "evaluations" not in one.result and one.result["windows"] == 5


YARN = {"original_seq_len": T, "logit_scale": "yarn"}
RESCALED = [
    ("yarn", 4.0, YARN | {"rope_scaling_factor": 4.0}),
    ("dynamic", None, {"original_seq_len": T}),
]


@pytest.mark.parametrize(("encoding", "factor", "fields"), RESCALED)
def test_an_encoding_is_rescaled_for_the_evaluation_alone(runs, base, encoding, factor, fields):
    """It equals the plain evaluation of a run whose config has these fields."""
    rope = runs / "rope"
    (plain,) = evaluate_run(rope, seq_len="2x")
    flags = {"seq_len": "2x", "encoding": encoding, "factor": factor}
    (record,) = evaluate_run(rope, **flags)
    assert record["encoding"] == encoding
    assert record["factor"] == fields.get("rope_scaling_factor", 1.0)
    assert evaluate_run(rope, seq_len="2x") == [plain]
    fields = fields | {"rope_scaling_type": encoding}
    edit_run(rope, base, **{f"model.{name}": value for name, value in fields.items()})
    (expected,) = evaluate_run(rope, seq_len="2x", step="7")  # the weights of step 9 before
    assert record["loss"] == expected["loss"] != plain["loss"]


def test_every_window_begins_with_bos_where_the_run_or_a_flag_says_so(runs, base):
    run = runs / "rope"
    (plain,) = evaluate_run(run)
    (begun,) = evaluate_run(run, bos_every_window=True)
    expected = token_by_token(run, T, bos=True).loss.mean()
    assert begun["loss"] == pytest.approx(expected, rel=1e-6) != plain["loss"]
    for name in ("documents", "tokens", "fingerprint"):
        assert begun[name] == plain[name]
    assert begun["documents"] < begun["windows"]
    assert evaluate_run(run) == [plain], "an evaluation by a flag does not stand for the run's own"
    edit_run(run, base, **{"data.bos_every_window": True})
    (record,) = evaluate_run(run, step="7")  # the weights of step 9 before
    assert record["loss"] == begun["loss"]
    (without,) = evaluate_run(run, step="7", bos_every_window=False)
    assert without["loss"] == plain["loss"]


def test_the_dtype_of_a_flag_is_that_of_a_run_computed_in_it(runs, base):
    run = runs / "rope"
    (plain,) = evaluate_run(run)
    (rounded,) = evaluate_run(run, dtype="bfloat16")
    assert (plain["dtype"], rounded["dtype"]) == ("float32", "bfloat16")
    assert evaluate_run(run) == [plain]
    edit_run(run, base, **{"model.dtype": "bfloat16"})
    (record,) = evaluate_run(run, step="7")  # the weights of step 9 before
    assert record["loss"] == rounded["loss"] != plain["loss"]
