"""Training that begins from another run: its encoding before and after, recovery, what has left."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.commands import ROOT, logged
from support.models import same, small
from support.runs import NO_WINDOWS, make_run
from support.sweeps import Page
from support.text import articles, read_lines, write_lines

from prope.config import LEFT, default_config, describe_left, spec_from_dict
from prope.errors import UsageError
from prope.hf.importer import import_run, set_training
from prope.spec.data import DataSpec
from prope.spec.run import Spec
from prope.step import prepare
from prope.sweep.grid import read_grids
from prope.sweep.recovery import compare, recoveries
from prope.sweep.runs import Run
from prope.train import start_or_resume
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.run import open_run, read_config
from prope.workdir.source import open_source, spec_before


def test_a_run_knows_the_encoding_that_it_begins_from(tmp_path):
    """The encoding of every layer; all else is its own."""
    make_run(tmp_path / "run", p=(0.5, 1.0))
    begun = read_config(tmp_path / "run")
    others = {"seed": 9, "model.remat": "full"}
    encoding = {"model.max_wavelength": 5e5, "model.rope_percentage": 0.25}
    spec = begun.replace(others | encoding)
    run = open_source(spec, tmp_path / "new", str(tmp_path / "run"))
    assert spec_before(spec, run) == begun.replace(others)


def test_the_kinds_of_layers_before_may_be_others(tmp_path):
    """Attention of full layers alone has no meaning in a model that has no others."""
    make_run(tmp_path / "run")
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
    fields = {f"model.{name}": value for name, value in windows.items()}
    spec = read_config(tmp_path / "run").replace(fields | {"model.global_attention": "xla"})
    run = open_source(spec, tmp_path / "new", str(tmp_path / "run"))
    assert spec_before(spec, run).model.layers[0].window is None
    same_encoding = run.spec.replace({"seed": 9, "model.attention": "xla"})
    assert spec_before(same_encoding, run) == same_encoding


def test_a_run_that_begins_from_another_has_a_new_optimizer(tmp_path):
    """Its moments are zero, and its learning rate begins anew."""
    source = tmp_path / "run"
    make_run(source, p=0.5)
    spec = read_config(source)
    prepared = prepare(spec, jax.devices())
    run = open_source(spec, tmp_path / "new", str(source))
    with Checkpoints(tmp_path / "new") as checkpoints:
        state = start_or_resume(spec, checkpoints, run, prepared, NO_WINDOWS)
    assert same(state.params, open_run(source).params())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    assert state.step == 0


@pytest.mark.slow
def test_a_conversion_is_evaluated_as_it_was_and_as_it_is(trained, train, tmp_path):
    """Beside a control that keeps its encoding: with the same weights and batches."""
    flags = (f"--init_from={trained[0]}", "--config.log_every=1", "--stop_at_step=2")
    losses = {}
    for p in (0.75, 0.25):
        workdir = tmp_path / str(p)
        outcome = train(workdir, *flags, f"--config.model.rope_percentage={p}")
        assert outcome.code == 0, outcome.stderr
        records = read_lines(workdir / "eval.jsonl")
        losses[p] = {(one["step"], one.get("encoding")): one["loss"] for one in records}
    control, converted = losses.values()
    assert control.keys() == {(0, None), (2, None)}
    assert converted.keys() == {(0, "init_from"), (0, None), (2, None)}
    assert converted[0, "init_from"] == control[0, None] != converted[0, None]
    hashes = [logged(tmp_path / str(p), "batch_hash") for p in losses]
    assert hashes[0] == hashes[1]


# --- Recovery -------------------------------------------------------------------------------------


def make_sweep_run(name, values, losses, before=None):
    """A run that has evaluated these losses at steps 0, 10, ..; `before` as it was at step 0."""
    spec = Spec(batch_size=2, num_steps=100, model=small(), data=DataSpec(seq_len=12))
    records = [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses)]
    if before is not None:
        records.append({"step": 0, "loss": before, "encoding": "init_from"})
    data = {"dataset": spec.data.dataset, "seq_len": 12, "max_windows": None, "windows": 5}
    return Run(
        name,
        None,
        values,
        spec,
        started=True,
        step=30,
        init_hash=None,
        metrics=[],
        evaluations=[record | data for record in records],
        answers=[],
    )


def test_a_model_is_back_once_it_stays_within_the_bound():
    """Every seed counts by itself; 24 tokens a step."""
    rope = {"rope_percentage": 1.0}
    half = {"rope_percentage": 0.5}
    runs = [
        make_sweep_run("rope", rope | {"seed": 0}, [3.0, 2.9, 2.8, 2.7]),
        make_sweep_run("rope, seed 1", rope | {"seed": 1}, [3.0, 2.95, 2.9, 2.85]),
        make_sweep_run("back", half | {"seed": 0}, [3.5, 2.91, 2.83, 2.715], before=3.0),
        make_sweep_run("never", half | {"seed": 1}, [3.5, 3.2, 2.95, 2.9], before=3.0),
        make_sweep_run("at once", half | {"seed": 0}, [3.01, 2.91, 2.81, 2.71], before=3.0),
    ]
    found = {one.run: (one.control, one.tokens) for one in recoveries(runs)}
    expected = {"back": ("rope", 720), "never": ("rope, seed 1", None), "at once": ("rope", 0)}
    assert found == expected
    assert compare(runs[2], runs[0], within=0.031).tokens == 240


# --- The recipe -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported(run_and_export, tmp_path_factory):
    """A run that was exported, and imported again."""
    exported = run_and_export / "hf"
    workdir = tmp_path_factory.mktemp("imported") / "W"
    import_run(exported, workdir)
    return workdir


@pytest.fixture
def recipe(tmp_path):
    """The commands of "From RoPE to p-RoPE" as configs/README.md has them, for a run W."""
    page = (ROOT / "configs/README.md").read_text()
    section = page.partition("## From RoPE to p-RoPE\n")[2].partition("\n## ")[0]
    block = re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text/a.jsonl", [{"text": text} for text in articles()])

    def fill_in(workdir) -> list[list[str]]:
        places = {"W": str(workdir), "S": str(tmp_path / "S"), "DATA": str(tmp_path / "text")}
        words = [shlex.split(line, comments=True) for line in block.splitlines()]
        return [
            [re.sub(r"(?<==)(W|S|DATA)\b", lambda name: places[name[1]], word) for word in line]
            for line in words
        ]

    return fill_in


@pytest.mark.parametrize("kind", ["imported", "trained"])
def test_the_recipe_is_taken_as_it_is_written(recipe, kind, request, cache_dir):
    workdir = request.getfixturevalue(kind)
    workdir = workdir[0] if kind == "trained" else workdir
    (_, *sweep), (_, *report) = recipe(workdir)
    env = os.environ | {"PROPE_CACHE": str(cache_dir), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / sweep[0], *sweep[1:], "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *commands, _ = done.stdout.splitlines()
    assert len(commands) == 4
    assert all(f"--init_from={workdir}" in words for words in map(shlex.split, commands))
    assert report[:2] == ["-m", "prope.report"]


@pytest.mark.slow
def test_the_recipe_trains_and_is_reported(recipe, imported, cache_dir):
    """With fewer and smaller steps."""
    (_, *sweep), (_, *report) = recipe(imported)
    small = ["--config.num_steps=4", "--config.data.seq_len=64", "--config.eval.max_windows=2"]
    env = os.environ | {"PROPE_CACHE": str(cache_dir), "PYTHONPATH": str(ROOT)}
    for command in ([ROOT / sweep[0], *sweep[1:], *small], report):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {run["state"] for run in result["runs"]} == {"finished"}
    page = Page(pathlib.Path(result["output"]))
    (table,) = [table for table in page.tables if "tokens until back" in table[0]]
    assert len(table) == 4
    for row, recovery in zip(table[1:], result["recovery"], strict=True):
        back = "not yet" if recovery["tokens"] is None else f"{recovery['tokens']:,}"
        assert row[:3] == [recovery["run"], recovery["control"], back]


# Parameters, and the peak of the learning rate as pages of published models have it, or its bound.
RATES = [(10**5, 1e-4), (134_515_008, 1e-4), (10**9, 4e-5), (4 * 10**9, 2e-5), (8 * 10**9, 1e-5)]
RATES += [(70 * 10**9, 1e-5)]


@pytest.mark.parametrize(("parameters", "rate"), RATES)
@pytest.mark.parametrize(("seq_len", "windows"), [(512, 32), (8192, 2), (131_072, 1)])
def test_an_import_is_for_fine_tuning(parameters, rate, seq_len, windows):
    spec = Spec(data=DataSpec(seq_len=seq_len))
    spec = set_training(spec, parameters)
    assert spec.optimizer.learning_rate == pytest.approx(rate)
    assert spec.optimizer.final_learning_rate == pytest.approx(rate / 10)
    assert spec.batch_size == windows


def test_an_imported_run_has_them(imported):
    spec = read_config(imported)
    assert spec.optimizer.learning_rate == 1e-4
    assert spec.batch_size * spec.data.seq_len == 16_384


# --- Fields that have left ------------------------------------------------------------------------

LEFT_NAMES = tuple(LEFT)


@pytest.mark.parametrize("name", LEFT_NAMES)
def test_a_saved_config_of_a_field_that_left_is_read_if_it_did_without(name):
    values = Spec().to_dict()
    group, _, key = name.rpartition(".")
    saved = values.setdefault(group, {}) if group else values
    saved[key], _ = LEFT[name]
    assert spec_from_dict(values) == Spec()
    saved[key] = 1
    with pytest.raises(UsageError) as refused:
        spec_from_dict(values)
    check_line(str(refused.value), name)


def test_a_group_of_which_a_field_left_is_there():
    assert describe_left("convert") and describe_left("test_sinks")
    assert describe_left("model") is None


def check_line(line: str, name: str):
    """Asserts that one line names the field, and the last commit that has it."""
    assert "\n" not in line
    assert name in line
    assert describe_left(name) in line


@pytest.mark.parametrize("name", LEFT_NAMES)
def test_a_field_that_left_is_refused_as_a_flag_and_in_a_grid(run_command, tmp_path, name):
    page = f"{ROOT}/configs/quickstart.py"
    workdir = f"--workdir={tmp_path / 'run'}"
    outcome = run_command("prope.train", f"--config={page}", workdir, f"--config.{name}=1")
    assert outcome.code == 2
    check_line(outcome.error, name)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError) as refused:
        read_grids([f"{name}=1,2"], None, page, default_config(), {})
    check_line(str(refused.value), name)
