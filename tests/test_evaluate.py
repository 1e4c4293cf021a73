"""Evaluation: against sums made token by token, and its standard errors against simulation, jackknife and bootstrap."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax import extend
from makers import edit_run as edit
from makers import evaluate_run as ask

from prope import model
from prope.data.windows import Windows
from prope.errors import UsageError
from prope.inference import evaluation as evaluate
from prope.inference import losses, paired
from prope.runtime.files import append_jsonl
from prope.workdir.run import open_run, read_config

T = 64  # of training
BOS = 2


@dataclasses.dataclass
class Tokens:
    """Every predicted token of some windows: its loss, its document, its position in the window."""

    loss: np.ndarray
    document: np.ndarray
    position: np.ndarray


def token_by_token(workdir, T, chosen=None, step=None) -> Tokens:
    """The plain softmax in float64, a window at a time; documents counted along the stream of tokens."""
    run = open_run(workdir, step)
    params = run.params()
    run.config.data.seq_len = T
    windows = Windows(run.config.data, run.config.model.vocab_size, "validation")
    stream = windows.store.tokens("validation").read().result()
    opened = np.cumsum(stream == BOS)
    predict = jax.jit(
        lambda *given: model.logits(params, model.hidden_states(run.config.model, params, *given))
    )
    found = []
    for window in range(windows.count) if chosen is None else chosen:
        tokens = stream[window * T : window * T + T + 1].astype(np.int32)
        positions = jnp.arange(len(tokens) - 1)[None]
        logits = np.asarray(predict(jnp.asarray(tokens[None, :-1]), positions)[0], np.float64)
        largest = logits.max(axis=1)
        losses = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest
        losses -= logits[np.arange(len(losses)), tokens[1:]]
        for place, target in enumerate(tokens[1:]):
            if target != BOS:
                found.append((losses[place], opened[window * T + place + 1], place))
    loss, document, position = map(np.array, zip(*found, strict=True))
    return Tokens(loss, document, position)


# --- The numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch_size", [7, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 1000))]
)
def test_a_record_is_the_sum_over_its_tokens(runs, batch_size):
    (record,) = ask(runs / "rope", batch_size=batch_size)
    expected = token_by_token(runs / "rope", T)
    assert record.keys() >= {
        "step",
        "rope_percentage",
        "rotated_pairs",
        "dataset",
        "seq_len",
        "tokens",
        "loss",
        "perplexity",
        "bits_per_byte",
        "loss_stderr",
        "fingerprint",
        "windows",
    }
    assert record["tokens"] == len(expected.loss)
    assert math.isclose(record["loss"], expected.loss.mean(), rel_tol=1e-6)
    assert [(part["from"], part["to"]) for part in record["by_position"]] == [
        (n, n + 8) for n in range(0, T, 8)
    ]
    for part in record["by_position"]:
        there = expected.loss[
            (part["from"] <= expected.position) & (expected.position < part["to"])
        ]
        assert part["tokens"] == len(there) and math.isclose(
            part["loss"], there.mean(), rel_tol=1e-6
        )
    assert sum(part["tokens"] for part in record["by_position"]) == record["tokens"]
    total = sum(part["tokens"] * part["loss"] for part in record["by_position"])
    assert math.isclose(total, record["tokens"] * record["loss"], rel_tol=1e-9)


def jackknife(values: np.ndarray, document: np.ndarray) -> float:
    """The standard error of the mean of `values`, by leaving out one document at a time."""
    names = np.unique(document)
    left = np.array([values[document != name].mean() for name in names])
    return math.sqrt((len(names) - 1) / len(names) * ((left - left.mean()) ** 2).sum())


def bootstrap(values: np.ndarray, document: np.ndarray) -> float:
    """The standard error of the mean of `values`, by drawing as many documents with replacement, again and again."""
    rng, parts = (
        np.random.default_rng(0),
        [values[document == name] for name in np.unique(document)],
    )
    return np.std(
        [
            np.concatenate([parts[i] for i in rng.integers(0, len(parts), len(parts))]).mean()
            for _ in range(999)
        ]
    )


def test_the_standard_error_is_that_over_documents(runs):
    expected = token_by_token(runs / "rope", T)
    (record,) = ask(runs / "rope")
    documents = len(np.unique(expected.document))
    assert documents > 20
    assert math.isclose(
        record["loss_stderr"], jackknife(expected.loss, expected.document), rel_tol=1e-3
    )
    assert math.isclose(
        record["loss_stderr"], bootstrap(expected.loss, expected.document), rel_tol=0.15
    )
    per_token = expected.loss.std() / math.sqrt(len(expected.loss))
    assert record["loss_stderr"] > 2 * per_token, "tokens of a document are alike"
    with np.load(next((runs / "rope" / "eval" / "9").glob("*.npz"))) as sums:
        assert len(sums["tokens"]) == documents, (
            "a document that goes on in the next window is one document"
        )
        assert (
            sums["tokens"].sum(axis=1).tolist()
            == np.unique(expected.document, return_counts=True)[1].tolist()
        )


def test_windows_apart_do_not_share_documents(runs):
    (record,) = ask(runs / "rope", max_windows=9)
    count = Windows(read_config(runs / "rope").data, 300, "validation").count
    chosen = [place * count // 9 for place in range(9)]
    expected = token_by_token(runs / "rope", T, chosen)
    assert (record["windows"], record["tokens"]) == (9, len(expected.loss))
    window = np.cumsum(np.diff(expected.position, prepend=0) < 0)
    pieces = expected.document + 1000 * window
    assert len(np.unique(pieces)) > len(np.unique(expected.document)), (
        "some document is in two of them"
    )
    assert math.isclose(record["loss_stderr"], jackknife(expected.loss, pieces), rel_tol=1e-3)


def test_the_standard_error_is_the_spread_over_many_samples():
    """Of samples of documents whose lengths differ and whose tokens, and length and loss, are correlated."""
    rng = np.random.default_rng(0)
    means, errors, naive = [], [], []
    for _ in range(3000):
        tokens = rng.geometric(1 / 50, 80)
        level = 3 + 0.3 * rng.standard_normal(80) + tokens / 100
        loss = tokens * level + rng.standard_normal(80) * np.sqrt(tokens)
        mean, stderr = paired.mean_and_stderr(loss, tokens)
        means.append(mean)
        errors.append(stderr)
        naive.append(1 / math.sqrt(tokens.sum()))
    assert math.isclose(np.sqrt(np.mean(np.square(errors))), np.std(means), rel_tol=0.04)
    assert np.mean(naive) < 0.5 * np.std(means)
    assert paired.mean_and_stderr(np.array([6.0, 0.0]), np.array([2, 0])) == (3.0, None)


@pytest.mark.slow
def test_two_runs_on_the_same_windows_are_compared_document_by_document(runs):
    a, b = ask(runs, seq_len="2x", step="7")
    ask(runs, seq_len="1x", step="7")  # newer, of another length
    ask(runs / "rope", seq_len="2x", step="9")
    ask(runs / "rope", seq_len="2x", step="7", max_windows=3)  # newer, of other windows
    found = paired.paired_difference(runs / "nope", runs / "rope", {"step": 7, "seq_len": 2 * T})
    ours, theirs = (token_by_token(runs / name, 2 * T, step=7) for name in ("nope", "rope"))
    assert math.isclose(found.difference, a["loss"] - b["loss"], rel_tol=1e-4)
    apart = ours.loss - theirs.loss
    assert math.isclose(found.difference, apart.mean(), rel_tol=1e-4)
    assert math.isclose(found.stderr, jackknife(apart, ours.document), rel_tol=1e-3)
    assert found.stderr < 0.7 * math.hypot(a["loss_stderr"], b["loss_stderr"])
    late = paired.paired_difference(
        runs / "nope", runs / "rope", {"step": 7, "seq_len": 2 * T}, (96, 128)
    )
    there = ours.position >= 96
    assert math.isclose(late.difference, apart[there].mean(), rel_tol=1e-4)
    assert math.isclose(late.stderr, jackknife(apart[there], ours.document[there]), rel_tol=1e-3)
    with pytest.raises(UsageError, match=r"positions=\(0, 3\): must be two of 0, 8, 16"):
        paired.paired_difference(
            runs / "nope", runs / "rope", {"step": 7, "seq_len": 2 * T}, (0, 3)
        )
    with pytest.raises(
        UsageError, match="rope: has no evaluation with .*'seq_len': 100.*prope.evaluate --workdir"
    ):
        ask(runs / "nope", seq_len="100")
        paired.paired_difference(runs / "nope", runs / "rope", {"seq_len": 100})
    shutil.rmtree(runs / "rope" / "eval")
    with pytest.raises(
        UsageError, match="npz: cannot be read; run python -m prope.evaluate .*--again"
    ):
        paired.paired_difference(runs / "nope", runs / "rope", {"step": 7, "seq_len": 2 * T})


def test_damaged_sums_are_answered_with_the_command_that_makes_them(tmp_path):
    record = {"step": 7, "split": "validation", "fingerprint": "f", "seq_len": 8, "windows": 2}
    append_jsonl(tmp_path / "eval.jsonl", record)
    ones, folder = np.ones((2, 1)), epath.Path(tmp_path / "eval" / "7")
    paired.write_sums(
        folder, record, ones, ones, edges=np.array([0, 8]), source=np.zeros(2, int), shares=[1.0]
    )
    assert paired.paired_difference(tmp_path, tmp_path).samples == 2
    whole = (folder / "f-8-2.npz").read_bytes()
    for damaged in (b"", b"text", whole[:-99], whole[:60] + bytes(40) + whole[100:]):
        (folder / "f-8-2.npz").write_bytes(damaged)
        with pytest.raises(
            UsageError, match="f-8-2.npz: cannot be read; run python -m prope.evaluate .*--again"
        ):
            paired.paired_difference(tmp_path, tmp_path)


# --- Longer windows ---------------------------------------------------------------------------------------------


def every_shape(jaxpr):
    """The shapes of all values that a jaxpr makes, those within its loops and calls too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in extend.core.jaxprs_in_params(equation.params):
            yield from every_shape(inner)


@pytest.mark.parametrize("p", [pytest.param("nope", marks=pytest.mark.slow), "rope"])
def test_long_windows_are_finite_and_their_scores_never_whole(runs, p, monkeypatch):
    traced, jit = [], jax.jit

    def spy(function, **options):
        return jit(
            lambda *given: traced.append(jax.make_jaxpr(function)(*given)) or function(*given),
            **options,
        )

    with monkeypatch.context() as patch:
        patch.setattr(losses.jax, "jit", spy)
        (record,) = ask(runs / p, seq_len="8x", max_windows=2)
    assert record["seq_len"] == 8 * T and len(record["by_position"]) == 64
    expected = token_by_token(runs / p, 8 * T, [0, count_windows(runs / p, 8 * T) // 2])
    assert math.isfinite(record["loss"]) and math.isclose(
        record["loss"], expected.loss.mean(), rel_tol=1e-5
    )
    shapes = list(every_shape(traced[0].jaxpr))
    assert any(8 * T in shape for shape in shapes)
    of_all_heads = 2 * 4 * (8 * T) ** 2
    assert max(map(math.prod, shapes)) < of_all_heads / 2, "scores of all queries with all keys"


def count_windows(workdir, T):
    config = read_config(workdir)
    config.data.seq_len = T
    return Windows(config.data, 300, "validation").count


def test_windows_of_8192_tokens_are_told_apart_by_thousands(runs, monkeypatch):
    def root(hidden, table, targets):
        return jnp.sqrt(jnp.arange(1.0, targets.shape[1] + 1))[None] + 0 * targets

    monkeypatch.setattr(losses, "token_losses", root)
    short, long = ask(runs / "rope", seq_len="8191,8192", max_windows=1, split="all")
    assert [part["to"] for part in short["by_position"]][:3] == [8, 16, 24]
    starts = [part["from"] for part in long["by_position"]]
    assert starts == [1024 * n for n in range(len(starts))] and len(starts) == math.ceil(
        long["tokens"] / 1024
    )
    expected = np.sqrt(np.arange(1024, 2048) + 1).mean()
    assert math.isclose(long["by_position"][1]["loss"], expected, rel_tol=1e-2), (
        "some targets are <bos>"
    )


@pytest.mark.slow
def test_training_with_randomised_positions_does_not_bound_evaluation(runs, base):
    edit(runs / "rope", base, **{"data.position_range": 2 * T})
    (ordinary, other) = ask(runs, seq_len="4x")
    assert math.isclose(
        other["loss"], token_by_token(runs / "rope", 4 * T).loss.mean(), rel_tol=1e-6
    )
    assert ordinary["loss"] != other["loss"]


# --- Which runs, checkpoints and lengths ------------------------------------------------------------------------


@pytest.mark.slow
def test_all_runs_all_checkpoints_all_lengths_once_and_not_again(runs, base, monkeypatch):
    made = []
    real = evaluate.make_evaluation
    monkeypatch.setattr(
        evaluate, "make_evaluation", lambda *given: made.append(given) or real(*given)
    )
    shutil.copytree(runs / "nope", runs / "below" / "seed=1")
    edit(runs / "below" / "seed=1", base, seed=1)
    shutil.copytree(
        runs / "rope", runs / "nope" / "within"
    )  # is a part of that run, whatever it holds
    (runs / "unfinished").mkdir()
    shutil.copy(runs / "nope" / "config.json", runs / "unfinished")
    records = ask(runs, step="all", seq_len="1x,32,0064,2x")
    names = [record["workdir"].removeprefix(str(runs)) for record in records]
    assert names == ["/below/seed=1"] * 6 + ["/nope"] * 6 + ["/rope"] * 6
    assert [(record["step"], record["seq_len"]) for record in records] == [
        (step, T) for step in (7, 9) for T in (64, 32, 128)
    ] * 3
    assert [record["rope_percentage"] for record in records] == [0.0] * 12 + [1.0] * 6
    assert len({record["loss"] for record in records[6:]}) == 12
    assert len(made) == 6, "compiled once for each length and p"
    lines = {name: (runs / name / "eval.jsonl").read_text() for name in ("nope", "rope")}
    assert [json.loads(line) for line in lines["rope"].splitlines()] == records[12:]

    assert ask(runs, step="all", seq_len="1x,32,64,2x") == records
    (newest,) = ask(runs / "rope")
    assert newest == records[15] and len(made) == 6
    assert {name: (runs / name / "eval.jsonl").read_text() for name in lines} == lines
    (again,) = ask(runs / "rope", again=True)
    assert again == newest and len(made) == 7
    assert len((runs / "rope" / "eval.jsonl").read_text().splitlines()) == 7


@pytest.mark.slow
def test_what_is_found_is_the_same_and_whole(runs, tmp_path, base):
    (first,) = ask(runs / "rope")
    short = {
        name: value for name, value in first.items() if name not in ("loss_stderr", "by_position")
    }
    (runs / "rope" / "eval.jsonl").write_text(json.dumps(short | {"loss": 0.5}) + "\n")
    assert ask(runs / "rope") == [first], "a record without a standard error does not count"
    training = {
        name: value
        for name, value in first.items()
        if name not in ("rope_percentage", "rotated_pairs", "init_hash", "workdir")
    }
    (runs / "rope" / "eval.jsonl").write_text(json.dumps(training | {"loss": 0.5}) + "\n")
    (found,) = ask(runs / "rope")
    assert found == first | {"loss": 0.5}, "one that training made does, and gets what it lacks"
    assert ask(runs / "rope", max_windows=10**6)[0]["loss"] == 0.5, (
        "all windows, said in another way"
    )
    for other in ({"max_windows": 2}, {"step": "7"}, {"seq_len": "32"}):
        assert ask(runs / "rope", **other)[0]["loss"] != 0.5
    shutil.copytree(base / "text", tmp_path / "more")
    (tmp_path / "more" / "b.jsonl").write_text('{"text": "another text"}\n' * 50)
    (other,) = ask(runs / "rope", dataset="files", data_dir=str(tmp_path / "more"))
    assert other["loss"] != 0.5 and other["fingerprint"] != first["fingerprint"], (
        "the same name, other documents"
    )


@pytest.mark.slow
def test_the_command_prints_the_last_and_all_in_short(runs, run_command):
    outcome = run_command(
        "prope.evaluate", f"--workdir={runs}", "--seq_len=32,1x", "--max_windows=5"
    )
    assert outcome.code == 0, outcome.stderr
    short, last = outcome.result.pop("evaluations"), outcome.result
    assert len(short) == 4 and len(json.dumps(short[0])) < 300 and short[-1].items() <= last.items()
    assert (last["workdir"], last["seq_len"]) == (str(runs / "rope"), T)
    header, *rows = [line.split() for line in outcome.stderr.splitlines()[-5:]]
    assert header[:6] == ["run", "step", "p", "seq_len", "tokens", "loss"]
    expected = [
        ["nope", "9", "0", "32"],
        ["nope", "9", "0", "64"],
        ["rope", "9", "1", "32"],
        ["rope", "9", "1", "64"],
    ]
    assert [row[:4] for row in rows] == expected
    assert [row[5] for row in rows] == [f"{record['loss']:.4f}" for record in short]
    one = run_command("prope.evaluate", f"--workdir={runs / 'rope'}", "--max_windows=5")
    assert one.result == last
    assert one.stderr.count("\n") == 1 and "is in eval.jsonl" in one.stderr


@pytest.mark.parametrize(
    ("encoding", "factor", "fields"),
    [
        ("yarn", 4.0, {"rope_scaling_factor": 4.0, "original_seq_len": T, "logit_scale": "yarn"}),
        pytest.param(
            "yarn",
            None,
            {"rope_scaling_factor": 2.0, "original_seq_len": T, "logit_scale": "yarn"},
            marks=pytest.mark.slow,
        ),
        pytest.param("ntk", 8.0, {"rope_scaling_factor": 8.0}, marks=pytest.mark.slow),
        ("dynamic", None, {"original_seq_len": T}),
    ],
)
def test_an_encoding_is_rescaled_for_the_evaluation_alone(runs, base, encoding, factor, fields):
    """It equals the plain evaluation of a run whose config has these fields."""
    (plain,) = ask(runs / "rope", seq_len="2x")
    flags = {"seq_len": "2x", "encoding": encoding, "factor": factor}
    (record,) = ask(runs / "rope", **flags)
    shutil.copytree(runs / "rope", runs / "same")
    fields |= {"rope_scaling_type": encoding}
    edit(runs / "same", base, **{f"model.{name}": value for name, value in fields.items()})
    (expected,) = ask(runs / "same", seq_len="2x", step="7")  # the weights of step 9 before
    assert record["loss"] == expected["loss"] != plain["loss"]
    assert (record["encoding"], record["factor"]) == (
        encoding,
        fields.get("rope_scaling_factor", 1.0),
    )
    lines = (runs / "rope" / "eval.jsonl").read_text()
    assert ask(runs / "rope", **flags) == [record] and ask(runs / "rope", seq_len="2x") == [plain]
    assert (runs / "rope" / "eval.jsonl").read_text() == lines, "both were computed before"


def test_documents_are_the_same_when_every_window_begins_with_bos(runs, base):
    (plain,) = ask(runs / "rope")
    edit(runs / "rope", base, **{"data.bos_every_window": True})
    (record,) = ask(runs / "rope", step="7")  # the weights of step 9 before
    assert (record["documents"], record["tokens"]) == (plain["documents"], plain["tokens"])
    assert record["documents"] < record["windows"] and record["loss"] != plain["loss"]


def test_runs_that_cannot_be_rescaled_are_left_out(runs, base):
    rope_id = {
        "model.rope_percentage": 1.0,
        "model.rope_type": "rope_id",
        "model.original_seq_len": 128,
    }
    edit(runs / "nope", base, **rope_id)
    (record,) = ask(runs, encoding="yarn", seq_len="2x")
    assert record["workdir"] == str(runs / "rope")
    with pytest.raises(
        UsageError,
        match="rope_scaling_type=yarn: needs a wavelength, which rope_type=rope_id has not",
    ):
        ask(runs / "nope", encoding="yarn")
    edit(runs / "rope", base, **rope_id)
    with pytest.raises(
        UsageError, match="no run there has a finished checkpoint that --encoding=yarn can rescale"
    ):
        ask(runs, encoding="yarn")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"factor": 4.0}, "--factor=4.0: goes with --encoding"),
        (
            {"seq_len": "2y"},
            "--seq_len=2y: '2y' is neither a number of tokens nor a multiple .* such as 512 or 1x,2x",
        ),
        ({"seq_len": "64,,2x"}, "--seq_len=64,,2x: '' is neither"),
        ({"seq_len": "0x"}, "--seq_len=0x: '0x' is neither"),
        ({"seq_len": "-5"}, "--seq_len=-5: '-5' is neither"),
        ({"step": "last"}, "--step=last: must be the number of a checkpoint, or all"),
        ({"step": "8"}, "--step=8: .*/nope has no such checkpoint; it has 7, 9"),
        ({"workdir": "none"}, "--workdir=none: no run there"),
    ],
)
def test_what_cannot_be_asked_for(runs, flags, says, monkeypatch):
    monkeypatch.setattr(
        evaluate, "make_evaluation", lambda *given: pytest.fail("began all the same")
    )
    with pytest.raises(UsageError, match=says):
        ask(**{"workdir": runs} | flags)


def test_a_directory_of_unfinished_runs(runs):
    for name in ("nope", "rope"):
        shutil.rmtree(runs / name / "checkpoints")
    with pytest.raises(UsageError, match="no run there has a finished checkpoint; train one first"):
        ask(runs)
