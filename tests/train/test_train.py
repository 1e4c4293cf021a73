"""The commands as a user runs them: files, exit codes, one line for bad input."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from oracles import learning_rate
from support.commands import CONFIG, ROOT, losses, refusal
from support.models import same
from support.runs import restore_training as start
from support.text import WIKIPEDIA as NAME
from support.text import articles, read_lines, write_lines, write_tfds

from prope import sharding
from prope import train as train_lib
from prope.config import to_config
from prope.data.windows import Windows
from prope.errors import UsageError
from prope.inference.losses import LossEvaluation
from prope.workdir import metrics
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run, read_config

EVERY_STEP = "--config.log_every=1"


def text_files(tmp_path, prefix):
    """Writes documents; returns the flags that name them, which begin with `prefix`."""
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "a.jsonl", [{"text": text} for text in articles()])
    return f"{prefix}dataset=files", f"{prefix}data_dir={tmp_path / 'text'}"


CONTRACT = {"step", "loss", "perplexity", "bits_per_byte", "rope_percentage"}
TRAINED = CONTRACT | {"eval_loss", "init_hash", "tokens_per_second", "workdir"}
LOGGED = {"loss", "grad_norm", "batch_hash", "tokens_per_second", "data_wait_ms"}


def test_the_result_has_what_is_written_last(trained, tmp_path, cache_dir, monkeypatch):
    """To a bucket, records are written some at a time, and all of them at the end."""
    workdir = shutil.copytree(trained[0], tmp_path / "run")
    (workdir / "eval.jsonl").unlink()
    monkeypatch.setenv("PROPE_CACHE", str(cache_dir))
    monkeypatch.setattr(metrics, "is_url", lambda path: True)
    monkeypatch.setattr(metrics, "upload", lambda *_: None)
    result = train_lib.train(to_config(read_config(workdir)), str(workdir))
    (record,) = read_lines(workdir / "eval.jsonl")
    assert result["eval_loss"] == record["loss"] == pytest.approx(trained[1]["eval_loss"])


def test_a_run_leaves_what_it_should(trained):
    workdir, result = trained
    assert result.keys() >= TRAINED
    fields = ("step", "rope_percentage", "workdir")
    assert [result[field] for field in fields] == [20, 0.75, str(workdir)]
    assert np.isclose(result["perplexity"], np.exp(result["eval_loss"]))
    config = json.loads((workdir / "config.json").read_text())
    assert config["model"]["rope_percentage"] == 0.75
    steps = read_lines(workdir / "metrics.jsonl")
    peak, final = (config["optimizer"][f"{name}learning_rate"] for name in ("", "final_"))
    rates = [learning_rate(step, 20, 2, peak, final) for step in range(1, 21)]
    assert [record["learning_rate"] for record in steps] == pytest.approx(rates, rel=1e-5)
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert steps[0].keys() >= LOGGED
    assert steps[0]["mfu"] is steps[0]["memory_bytes"] is None, "not known on a CPU"
    assert len({record["batch_hash"] for record in steps}) == 20
    assert steps[0]["loss"] > steps[-1]["loss"]
    evaluations = read_lines(workdir / "eval.jsonl")
    assert [record["step"] for record in evaluations][:2] == [10, 20]
    assert (result["loss"], result["eval_loss"]) == (steps[-1]["loss"], evaluations[1]["loss"])
    (start,) = read_lines(workdir / "starts.jsonl")
    assert (start["step"], start["processes"], start["devices"]) == (1, 1, 1)
    assert len(list(workdir.glob("events.out.tfevents.*"))) == 1
    assert Checkpoints(workdir).steps() == [10, 20]
    run = open_run(workdir, 10)
    assert (run.step, run.init_hash) == (10, result["init_hash"])
    assert open_run(workdir).step == 20


def test_a_stopped_run_ends_as_a_straight_one_bit_for_bit(whole, train, tmp_path):
    """Evaluated more often than saved, and where it was stopped."""
    workdir, result = whole
    flags = (EVERY_STEP, "--config.eval_every=4")
    stopped = train(tmp_path / "run", *flags, "--stop_at_step=7")
    assert stopped.result["step"] == 7
    resumed = train(tmp_path / "run", *flags)
    assert "resumed from step 7" in resumed.stderr
    assert losses(tmp_path / "run") == losses(workdir)
    for key in ("loss", "eval_loss", "init_hash"):
        assert resumed.result[key] == result[key]
    assert same(open_run(tmp_path / "run").params(), open_run(workdir).params())
    evaluated = [record["step"] for record in read_lines(tmp_path / "run" / "eval.jsonl")]
    assert evaluated == [4, 7, 8, 12, 16, 20]
    assert Checkpoints(tmp_path / "run").steps() == [10, 20]


@pytest.mark.slow
def test_a_stable_run_is_extended_from_before_its_decay(train, tmp_path):
    """Bit for bit as a run that was as long from its start, and as the shorter one until then."""
    fields = ["optimizer.schedule=wsd", "log_every=1", "eval.max_windows=1"]
    fields += ["eval_every=99", "checkpoint_every=99", "checkpoint.max_to_keep=1"]
    flags = [f"--config.{field}" for field in fields]
    short, copy, long = (tmp_path / name for name in ("short", "copy", "long"))
    assert train(short, *flags).code == 0
    assert {path.name for path in (short / "checkpoints").iterdir()} == {"16", "20"}
    refused = train(short, *flags, "--config.num_steps=30").error
    assert "config.num_steps=30: checkpoint 20 had other learning rates from step 17" in refused
    shutil.copytree(short, copy)
    shutil.rmtree(copy / "checkpoints/20")
    for workdir in (copy, long):
        assert train(workdir, *flags, "--config.num_steps=30").code == 0
    assert losses(copy) == losses(long) and len(losses(long)) == 30
    assert [losses(short)[step] == losses(long)[step] for step in (16, 17, 19)] == [1, 1, 0]


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(trained, train, run_command, tmp_path):
    """It is evaluated where no record of all windows is left."""
    result = trained[1]
    shutil.copytree(trained[0], tmp_path / "run")
    part = run_command("prope.evaluate", f"--workdir={tmp_path / 'run'}", "--max_windows=1")
    assert part.result["loss"] != result["eval_loss"]
    again = train(tmp_path / "run", EVERY_STEP)
    assert again.result["eval_loss"] == result["eval_loss"] and "step 20/20" not in again.stderr
    for name in ("metrics.jsonl", "eval.jsonl"):
        (tmp_path / "run" / name).unlink()
    bare = train(tmp_path / "run", EVERY_STEP)
    assert (bare.result["eval_loss"], bare.result["loss"]) == (result["eval_loss"], None)


def test_evaluation_of_a_uniform_model_is_the_log_of_the_vocabulary(whole, cache_dir, monkeypatch):
    """A zero embedding makes all tokens equally likely: the loss is log V, whatever is padded."""
    monkeypatch.setenv("PROPE_CACHE", str(cache_dir))
    run = open_run(whole[0])
    params = run.params()
    params["embedder"]["input_embedding"] *= 0
    spec = run.spec.replace({"eval.batch_size": 512, "eval.max_windows": None})
    windows = Windows(spec.data, spec.model.vocab_size, "validation")
    found = LossEvaluation(spec, windows).evaluate(params, sharding.make_mesh())
    assert found["tokens"] == windows.store.targets("validation")
    np.testing.assert_allclose(found["loss"], np.log(260), rtol=1e-6)
    size = windows.store.index["validation"]["bytes"]
    bits = np.log2(260) * found["tokens"]
    np.testing.assert_allclose(found["bits_per_byte"], bits / size, rtol=1e-6)


@pytest.mark.slow
def test_wikipedia_in_both_formats_trains_alike_without_tensorflow_or_a_socket(tmp_path):
    """A TensorFlow that can be imported ends the process; every use of a socket fails."""
    (tmp_path / "fake" / "tensorflow").mkdir(parents=True)
    (tmp_path / "fake" / "tensorflow" / "__init__.py").write_text(
        "raise SystemExit('TensorFlow was imported')"
    )
    watch = (
        "import runpy, sys\n"
        "def refuse(event, arguments):\n"
        "    names = ('connect', 'bind', 'getaddrinfo', 'sendto')\n"
        "    if event in [f'socket.{name}' for name in names]:\n"
        "        raise RuntimeError(f'{event} {arguments}')\n"
        "sys.addaudithook(refuse)\n"
        "runpy.run_module('prope.train', run_name='__main__', alter_sys=True)\n"
    )
    found = []
    for kind in ("array_record", "tfrecord"):
        write_tfds(tmp_path / kind, kind, articles(300))
        workdir = tmp_path / f"run-{kind}"
        arguments = [
            sys.executable,
            "-c",
            watch,
            CONFIG,
            f"--workdir={workdir}",
            f"--config.data.dataset={NAME}",
            f"--config.data.data_dir={tmp_path / kind}",
            f"--config.data.cache_dir={tmp_path / kind / 'cache'}",
            EVERY_STEP,
        ]
        env = os.environ | {"PYTHONPATH": str(tmp_path / "fake")}
        done = subprocess.run(
            arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        found.append(losses(workdir))
    assert found[0] == found[1] and len(found[0]) == 20


STAGE = {
    "data.seq_len": 128,
    "data.position_range": 256,
    "model.rope_percentage": 0.5,
    "model.max_wavelength": 500_000.0,
    "model.layer_types": ("sliding_attention", "full_attention"),
    "model.sliding_window": 16,
    "model.local_max_wavelength": 100.0,
    "model.remat": "full",
}


def test_a_stage_of_training_changes_length_and_encoding(trained, tmp_path, caplog):
    """What differs in model and data is logged; the parameters are those of the earlier stage."""
    with caplog.at_level(logging.INFO, "prope"):
        spec = open_run(trained[0]).spec
        spec = spec.replace(STAGE | {"num_steps": 30, "batch_size": 4, "seed": 9})
        step, params, _ = start(spec, tmp_path / "a", trained[0])
    assert (step, params) == (0, hash_arrays(open_run(trained[0]).params()))
    assert "model.rope_percentage: 0.75 -> 0.5" in caplog.text
    for name, value in (("num_heads", 4), ("dtype", "bfloat16"), ("attention_softcap", 9.0)):
        spec = open_run(trained[0]).spec
        theirs = getattr(spec.model, name)
        spec = spec.replace({"model.max_wavelength": 500_000.0, f"model.{name}": value})
        with pytest.raises(
            UsageError, match=rf"=\S+: is another model \(model.{name}: {theirs}, not {value}\)$"
        ):
            start(spec, tmp_path / "b", trained[0])


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoint(train, tmp_path):
    outcome = train(
        tmp_path / "run",
        "--config.optimizer.learning_rate=1e30",
        "--config.checkpoint_every=1",
        "--config.optimizer.warmup_steps=0",
        "--config.eval.max_windows=1",
    )
    assert outcome.code == 1
    assert re.search(
        r"stopped: step \d+ has loss .* (nan|inf).*learning_rate \(now 1e\+30\)", outcome.error
    )
    kept = Checkpoints(tmp_path / "run").steps()
    assert kept and all(
        np.isfinite(leaf).all()
        for leaf in jax.tree.leaves(open_run(tmp_path / "run", kept[-1]).params())
    )


# --- Bad input --------------------------------------------------------------------------------


# What is given, and the name that the line has.
REFUSED = [
    ("--config.model.rope_percentag=0.5", "model.rope_percentage"),
    ("--config.num_steps=many", "config.num_steps"),
    ("--config.model.vocab_size=100", "vocab_size"),
    ("--config.data.tokenizer=none.model", "none.model"),
    ("--stop_at_step=0", "--stop_at_step"),
]
IN_A_FILE = [
    ("def get_config(): return 1 +", "file.py"),
    ("c.model.rope_percentag = 1.0", "rope_percentage"),
    ("c.modle.head_dim = 64", "modle"),
    ("c.num_steps = 'many'", "file.py line 4"),
    ("c.model.rope_percentage = None", "config.model.rope_percentage"),
    ("set_layer_percentages(c, [None, 1])", "file.py line 4"),
]
IMPORTS = "from prope.config import default_config, set_layer_percentages\n"


def check_refused(outcome, name, workdir):
    """Asserts one line, which has the name, exit code 2, and that nothing is written."""
    assert outcome.code == 2, outcome.stderr
    assert name in outcome.error
    assert not workdir.exists()


def test_bad_input_gets_one_line_before_a_device_is_touched(train, run_command, tmp_path):
    """On a platform that does not exist: touching a device would be another error."""
    nowhere = {"JAX_PLATFORMS": "cpu,none"}  # JAX has no such device
    workdir = tmp_path / "run"
    for argument, name in REFUSED:
        check_refused(train(workdir, argument, **nowhere), name, workdir)
    for text, name in IN_A_FILE:
        if "def" not in text:
            lines = ("def get_config():", "c = default_config()", text, "return c")
            text = IMPORTS + "\n    ".join(lines)
        (tmp_path / "file.py").write_text(text)
        flags = (f"--config={tmp_path}/file.py", f"--workdir={workdir}")
        check_refused(run_command("prope.train", *flags, **nowhere), name, workdir)
    for file in (f"{ROOT}/configs/quickstart.py:huge", f"{tmp_path}/none.py"):
        flags = (f"--config={file}", f"--workdir={workdir}")
        name = file.rpartition("/")[2].rpartition(":")[2]
        check_refused(run_command("prope.train", *flags, **nowhere), name, workdir)
    check_refused(run_command("prope.train", CONFIG, **nowhere), "--workdir", workdir)


def test_a_directory_of_another_run_is_refused_and_left_alone(whole, train):
    workdir, _ = whole
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    arguments = ("--config.model.rope_percentage=0.5", "--config.seed=1", "--config.log_every=3")
    outcome = train(workdir, *arguments)
    assert "model.rope_percentage: 0.75, not 0.5" in outcome.error
    assert "seed: 0, not 1" in outcome.error
    assert "log_every" not in outcome.error
    longer = train(workdir, "--config.num_steps=40")
    assert "num_steps: 20, not 40" in longer.error
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_other_data_under_a_run_is_refused(train, tmp_path):
    arguments = text_files(tmp_path, "--config.data.")
    assert train(tmp_path / "run", *arguments, "--stop_at_step=2").code == 0
    (tmp_path / "text" / "b.txt").write_text("one more document")
    outcome = train(tmp_path / "run", *arguments)
    assert "checkpoint 2 was trained on other data" in outcome.error


def test_what_a_reader_cannot_find(whole, tmp_path):
    workdir, _ = whole

    (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
    assert "checkpoint" in refusal(lambda: open_run(tmp_path))
    values = json.loads((workdir / "config.json").read_text())
    values["model"]["rope_percentage"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "checkpoints").symlink_to(workdir / "checkpoints")
    assert "model.rope_percentage: 0.75, not 1.0" in refusal(lambda: open_run(tmp_path))
