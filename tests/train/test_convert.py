"""Conversion of a model to another encoding by training: config.convert, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.commands import logged
from support.models import KINDS_OF_LAYERS, draw_model, forward, same, small
from support.runs import NO_WINDOWS, make_run
from support.text import read_lines

from prope import model
from prope.config import default_config
from prope.cost.bench import bench_step
from prope.encodings import StoppingSchedule
from prope.errors import UsageError
from prope.hf.exporter import export
from prope.optimizer import learning_rate, make_optimizer
from prope.runtime.validate import validate
from prope.step import ConversionInputs, make_conversion, make_train_step, prepare, trace_step
from prope.sweep.recovery import compare, recoveries
from prope.sweep.runs import Run
from prope.train import open_conversion, start_or_resume
from prope.workdir.checkpoints import Checkpoints, save_imported
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run, read_config, write_config
from prope.workdir.source import config_before, open_source, read_teacher

STEPS = 7
# As Gemma 3 and Llama are imported. p before and after, of full and of sliding layers.
GEMMA3 = KINDS_OF_LAYERS | {"post_norms": True, "use_qk_norm": True, "local_rope_percentage": 1.0}
LLAMA = {"activation": "silu", "scale_embedding": False, "tied": False}
MODELS = {
    "gemma3": (GEMMA3 | {"rope_percentage": 1.0}, {"rope_percentage": 0.25}),
    "both kinds": (
        GEMMA3 | {"rope_percentage": 1.0},
        {"rope_percentage": 0.0, "local_rope_percentage": 0.5},
    ),
    "llama": (LLAMA | {"rope_percentage": 1.0}, {"rope_percentage": 0.5}),
    "layers": (LLAMA | {"rope_percentage": 1.0}, {"rope_percentage": (0.5, 1.0, 0.0)}),
    "p before": (LLAMA | {"rope_percentage": 0.75}, {"rope_percentage": 0.5}),
}


@pytest.fixture(params=MODELS)
def models(request):
    """The config.model before and after."""
    fields, converted = MODELS[request.param]
    return make_model(fields), make_model(fields | converted)


def make_model(fields):
    """A config.model, whose p may be one number for each layer."""
    config = small(**fields | {"rope_percentage": 1.0})
    with config.ignore_type():
        config.rope_percentage = fields["rope_percentage"]
    return config


def scheduled(before, after, step):
    """The frequencies of every layer after a step, by the formula, [L][P]."""
    both = (oracles.layer_frequencies(before), oracles.layer_frequencies(after))
    layers = []
    for old, new in zip(*both, strict=True):
        stopping = np.flatnonzero(old != new)[::-1]  # the slowest have the highest numbers
        shares = np.ones(len(old))
        for i, pair in enumerate(stopping):
            shares[pair] = np.clip(i + 1 - step * len(stopping) / STEPS, 0, 1)
        layers.append(old * shares)
    return layers


def radians_of(phases):
    """Radians per token of phases [.., 2, P]."""
    high, low = np.moveaxis(np.float64(phases), -2, 0)
    return (high / 2**32 + low / 2**64) * 2 * np.pi


def test_pairs_stop_one_after_the_other_the_slowest_first(models):
    schedule = StoppingSchedule(*models, STEPS, 12)
    kinds = oracles.layer_kinds(models[0])
    earlier = None
    for step in range(STEPS + 3):
        phases = schedule.phases(step)
        expected = scheduled(*models, step)
        for kind, freqs in zip(kinds, expected, strict=True):
            found = radians_of(phases[kind])  # of each encoding of these layers
            assert np.isclose(found, freqs, rtol=1e-12, atol=1e-18).all(axis=1).any()
        radians = np.concatenate([radians_of(phases[kind]).ravel() for kind in phases])
        assert earlier is None or (radians <= earlier).all()
        earlier = radians


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_decoder_is_what_it_was_then_what_it_becomes(models, scan):
    """Bit for bit at the ends; between them by the float64 decoder; compiled once."""
    before, after = models
    for config in models:
        config.scan_layers = scan
    params, tokens, positions = draw_model(before)
    schedule = StoppingSchedule(before, after, STEPS, tokens.shape[1])

    @functools.partial(jax.jit, static_argnums=0)
    def plain(number, params):
        return model.hidden_states(models[number], params, tokens, positions)

    @jax.jit
    def converted(params, phases):
        tables = schedule.tables(phases, positions)
        return model.hidden_states(after, params, tokens, positions, None, tables)

    assert same(converted(params, schedule.phases(0)), plain(0, params))
    for step in (STEPS, STEPS + 1, 10**6):
        assert same(converted(params, schedule.phases(step)), plain(1, params))
    step = 4
    hidden = converted(params, schedule.phases(step))
    assert converted._cache_size() == 1
    freqs = scheduled(before, after, step)
    expected = oracles.decoder(after, params, tokens, positions, freqs=freqs)
    logits = model.logits(after, params, hidden)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


def make_config(fields, **convert):
    """A config that trains this model, 2 x 12 tokens a step."""
    config = default_config()
    config.model.update(small(**fields).to_dict())
    config.update({"batch_size": 2, "accumulation": 2, "num_steps": 20})
    config.data.seq_len = 12
    config.optimizer.warmup_steps = 0
    config.convert.update(convert)
    validate(config)
    return config


def draw_batch(config, tokens, positions):
    rng = np.random.default_rng(3)
    targets = rng.integers(0, config.model.vocab_size, tokens.shape).astype(np.int32)
    weights = rng.uniform(0.5, 1, tokens.shape).astype(np.float32)
    ones = np.ones_like(targets)
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "segment_ids": ones,
        "weights": weights,
    }


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.slow), "llama"])
def test_updates_are_those_of_the_model_before_then_of_the_model_after(name):
    """With accumulation, bit for bit."""
    fields, converted = MODELS[name]
    before = make_config(fields)
    after = make_config(fields | converted)
    scheduled = make_config(fields | converted, schedule_steps=STEPS)
    params, tokens, positions = draw_model(before.model)
    batch = draw_batch(before, tokens, positions)
    optimizer = make_optimizer(before)
    opt_state = optimizer.init(params)
    conversion = make_conversion(scheduled, before)
    step = jax.jit(make_train_step(scheduled, optimizer, conversion))
    for config, at in ((before, 0), (after, STEPS)):
        inputs = ConversionInputs(conversion.schedule.phases(at))
        expected = jax.jit(make_train_step(config, optimizer))(params, opt_state, batch)
        assert same(step(params, opt_state, batch, inputs), expected)
    assert step._cache_size() == 1


def test_a_model_that_is_its_own_teacher_does_not_move():
    """Of the divergence alone there is no gradient; without decay nothing changes, then."""
    config = make_config(LLAMA, distill_weight=1.0)
    params, tokens, positions = draw_model(config.model)
    optimizer = make_optimizer(config)
    opt_state = optimizer.init(params)
    step = jax.jit(make_train_step(config, optimizer, make_conversion(config, config)))
    inputs = ConversionInputs(teacher=params)
    *_, metrics = step(params, opt_state, draw_batch(config, tokens, positions), inputs)
    assert metrics["distill_kl"] == 0 and metrics["loss"] > 1
    assert metrics["grad_norm"] == 0


def test_a_plan_counts_what_a_conversion_keeps():
    """The parameters before it, and the frequencies of a step; a benchmark has neither."""
    config = make_config(LLAMA, distill_weight=0.5, schedule_steps=STEPS)
    prepared = prepare(config, jax.devices())
    traced = trace_step(config, prepared.optimizer, prepared.mesh, prepared.state)
    (*_, inputs), _ = traced.args_info
    assert jax.tree.structure(inputs.teacher) == jax.tree.structure(prepared.state[0])
    (phases,) = inputs.phases.values()
    assert phases.shape == (1, 2, 8)
    with pytest.raises(UsageError, match="^config.convert=.*: is not timed: it needs another run"):
        bench_step(config, 1)


def test_a_run_knows_the_encoding_that_it_begins_from(tmp_path):
    """Of every layer; all else is its own."""
    make_run(tmp_path / "run", p=(0.5, 1.0))
    config = read_config(tmp_path / "run")
    expected = config.to_dict()
    config.seed = expected["seed"] = 9
    config.model.update({"remat": "full", "max_wavelength": 5e5})
    expected["model"]["remat"] = "full"
    with config.model.ignore_type():
        config.model.rope_percentage = 0.25
    run = open_source(config, tmp_path / "new", str(tmp_path / "run"))
    assert config_before(config, run).to_dict() == expected


def test_a_run_that_begins_from_another_has_a_new_optimizer(source, tmp_path):
    """Its moments are zero, and its learning rate warms up anew."""
    config = read_config(source)
    prepared = prepare(config, jax.devices())
    run = open_source(config, tmp_path / "new", str(source))
    with Checkpoints(tmp_path / "new") as checkpoints:
        state = start_or_resume(config, checkpoints, run, prepared, NO_WINDOWS)
    assert same(state.params, open_run(source).params())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    first = learning_rate(config)(0)
    peak = config.optimizer.learning_rate
    warmup = config.optimizer.warmup_steps
    final = config.optimizer.final_learning_rate
    expected = oracles.learning_rate(1, config.num_steps, warmup, peak, final)
    np.testing.assert_allclose(first, expected, rtol=1e-5)


def test_the_teacher_is_what_training_began_with(source, tmp_path):
    config = read_config(source)
    state = prepare(config, jax.devices()).state
    run = open_source(config, tmp_path, str(source))
    assert same(read_teacher(run, state[0], run.init_hash), open_run(source).params())
    with pytest.raises(UsageError, match="=.*run: holds other parameters now than when this run "):
        read_teacher(run, state[0], "0" * 16)


# --- Commands -------------------------------------------------------------------------------------

SHORT = {
    "num_steps": 6,
    "batch_size": 16,
    "log_every": 1,
    "eval_every": 2,
    "checkpoint_every": 6,
    "data.seq_len": 32,
    "data.dataset": "python_docs",
    "eval.max_windows": 3,
    "optimizer.warmup_steps": 2,
}
CONVERTED = {
    "model.rope_percentage": 0.25,
    "convert.schedule_steps": 4,
    "convert.distill_weight": 0.3,
}


def evaluations_of(workdir):
    """Losses of a run's evaluations by step and encoding."""
    records = read_lines(workdir / "eval.jsonl")
    return {(record["step"], record.get("encoding")): record["loss"] for record in records}


def import_like(workdir, fields):
    """Saves a model with all its pairs rotating as an import does: without an optimizer's state."""
    config, params = make_run(workdir.parent / "made", p=1.0, **fields)
    workdir.mkdir()
    write_config(workdir, config)
    identity = {"config": config.to_dict(), "init_hash": hash_arrays(params)}
    save_imported(workdir, params, identity, {"imported_from": "DIR"})


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def imported(request, tmp_path_factory, run_command):
    """Trains an imported model: a function of the run's name, other fields of the config, flags."""
    folder = tmp_path_factory.mktemp(request.param)
    fields = {"gemma3": GEMMA3, "llama": LLAMA | {"embed_dim": 256}}
    import_like(folder / "W", fields[request.param])

    def start(name, fields, *flags, begins=True, **options):
        arguments = [f"--config={folder}/W/config.json", f"--workdir={folder / name}", *flags]
        arguments += [f"--config.{name}={value}" for name, value in (SHORT | fields).items()]
        if begins:
            arguments.append(f"--init_from={folder / 'W'}")
        outcome = run_command("prope.train", *arguments, **options)
        assert outcome.code == 0, outcome.stderr
        return folder / name

    return start


@pytest.fixture(scope="module")
def converted(imported):
    """A run that converts the imported model, in one go."""
    return imported("straight", CONVERTED)


@pytest.mark.slow
def test_a_conversion_goes_on_as_if_never_stopped(imported, converted):
    """Bit for bit, from the middle of its schedule, without --init_from."""
    imported("stopped", CONVERTED, "--stop_at_step=2")
    stopped = imported("stopped", CONVERTED, begins=False)
    for name in ("loss", "distill_kl", "grad_norm", "batch_hash"):
        assert logged(stopped, name) == logged(converted, name)
    assert evaluations_of(stopped) == evaluations_of(converted)
    ours = open_run(stopped)
    assert same(ours.params(), open_run(converted).params())
    assert ours.config.model.rope_percentage == 0.25


@pytest.mark.slow
def test_transformers_loads_a_converted_model_with_the_same_loss(converted, tmp_path):
    torch = pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    run = open_run(converted)
    export(converted, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = np.random.default_rng(0).integers(0, run.config.model.vocab_size, (2, 65))
    positions = jnp.broadcast_to(jnp.arange(64), (2, 64))
    ours = forward(run.config.model, run.params(), jnp.asarray(tokens[:, :-1]), positions)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens[:, :-1])).logits
    np.testing.assert_allclose(ours, expected.numpy(), rtol=0, atol=1e-4)
    losses = [
        float(torch.nn.functional.cross_entropy(logits.mT, torch.tensor(tokens[:, 1:])))
        for logits in (torch.tensor(np.asarray(ours)), expected)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.slow
def test_a_conversion_is_evaluated_before_during_and_after(imported, converted):
    """Beside the model as it was, which begins with the same weights and batches."""
    control = imported("control", {}, "--stop_at_step=2")
    before = evaluations_of(control)
    assert before.keys() == {(0, None), (2, None)}
    scheduled = evaluations_of(converted)
    assert scheduled.keys() == {(0, "schedule"), (0, None), (2, "schedule"), (4, None), (6, None)}
    assert scheduled[0, "schedule"] == before[0, None] != scheduled[0, None]
    assert logged(converted, "loss")[1] == logged(control, "loss")[1]
    assert logged(converted, "distill_kl")[1] == 0 != logged(converted, "distill_kl")[2]
    hashes = logged(converted, "batch_hash")
    assert [hashes[step] for step in (1, 2)] == list(logged(control, "batch_hash").values())


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["llama"], indirect=True)
def test_a_conversion_is_the_same_on_eight_devices(imported, converted):
    """With the teacher's parameters sharded."""
    spread = imported("eight", CONVERTED | {"mesh.data": 2, "accumulation": 2}, devices=8)
    for name, rtol in (("loss", 1e-5), ("distill_kl", 1e-3)):
        ours = logged(spread, name)
        theirs = logged(converted, name)
        assert ours.keys() == theirs.keys() and len(ours) == 6
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol, atol=1e-6)


# --- Recovery -------------------------------------------------------------------------------------


def make_sweep_run(name, values, losses, before=None, **convert):
    """A run that has evaluated these losses at steps 0, 10, ..; `before` as it was at step 0."""
    config = make_config({}, **convert)
    config.num_steps = 100
    records = []
    for number, loss in enumerate(losses):
        record = {"step": 10 * number, "loss": loss}
        if number > 0 and 10 * number < config.convert.schedule_steps:
            record["encoding"] = "schedule"
        records.append(record)
    if before is not None:
        encoding = "schedule" if convert else "init_from"
        records.append({"step": 0, "loss": before, "encoding": encoding})
    data = {"dataset": config.data.dataset, "seq_len": 12, "max_windows": None, "windows": 5}
    return Run(
        name,
        None,
        values,
        config,
        started=True,
        step=30,
        init_hash=None,
        metrics=[],
        evaluations=[record | data for record in records],
        answers=[],
    )


def test_a_model_is_back_once_it_stays_within_the_bound():
    """Of every seed by itself; 24 tokens a step."""
    rope = {"rope_percentage": 1.0}
    half = {"rope_percentage": 0.5}
    runs = [
        make_sweep_run("rope", rope | {"seed": 0}, [3.0, 2.9, 2.8, 2.7]),
        make_sweep_run("rope, seed 1", rope | {"seed": 1}, [3.0, 2.95, 2.9, 2.85]),
        make_sweep_run("back", half | {"seed": 0}, [3.5, 2.91, 2.83, 2.715], before=3.0),
        make_sweep_run("never", half | {"seed": 1}, [3.5, 3.2, 2.95, 2.9], before=3.0),
        make_sweep_run("better", half | {"seed": 1}, [2.9, 2.8, 2.7, 2.6], before=3.0),
        make_sweep_run(
            "slowly",
            half | {"seed": 0, "schedule_steps": 15},
            [3.5, 2.95, 2.81, 2.71],
            before=3.0,
            schedule_steps=15,
        ),
        make_sweep_run(
            "soon",
            half | {"seed": 0, "schedule_steps": 15},
            [3.5, 2.9, 2.81, 2.71],
            before=3.0,
            schedule_steps=15,
        ),
        make_sweep_run("of no seed", half, [3.5, 2.9], before=3.0),
    ]
    found = {one.run: (one.control, one.tokens) for one in recoveries(runs)}
    assert found == {
        "back": ("rope", 720),
        "never": ("rope, seed 1", None),
        "better": ("rope, seed 1", 0),
        "slowly": ("rope", 480),
        "soon": ("rope", 480),  # not before its pairs have stopped
    }
    slowly = next(one for one in recoveries(runs) if one.run == "slowly")
    tokens, gaps = zip(*slowly.gaps, strict=True)
    assert tokens == (0, 240, 480, 720)
    np.testing.assert_allclose(gaps, [0, 0.05, 0.01, 0.01], atol=1e-12)
    assert compare(runs[2], runs[0], within=0.031).tokens == 240


# --- Refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run that rotates half of the pairs of its layers."""
    folder = tmp_path_factory.mktemp("source") / "run"
    make_run(folder, p=0.5)
    return folder


SCHEDULE = {"convert.schedule_steps": 10}
DISTILL = {"convert.distill_weight": 0.5}
OTHER_TOKENS = "TOKENS: compares the next tokens of byte with those of another tokenizer; give the"
REFUSED = [
    (False, SCHEDULE, "schedule_steps=10: converts the model of another run; name it by --init_f"),
    (True, SCHEDULE | {"model.rope_percentage": 0.75}, "only stops pairs, and pair 16 of layer 0 "),
    (True, SCHEDULE | {"model.rope_type": "reversed"}, "stops pairs, and model.rope_type differs"),
    (True, SCHEDULE | {"model.max_wavelength": 5e5}, "and model.max_wavelength differs from that"),
    (True, SCHEDULE | {"model.hidden_dim": 64}, r"is another model \(model.hidden_dim: 96, not 64"),
    (True, {"convert.schedule_steps": -1}, "schedule_steps=-1: must not be negative"),
    (True, {"convert.schedule_steps": 1000}, "must be less than num_steps=1000"),
    (False, DISTILL, "distill_weight=0.5: converts the model of another run; name it by --init_f"),
    (True, {"convert.distill_weight": 1.5}, r"distill_weight=1.5: must be in \[0, 1\]"),
    (True, {"convert.distill_weight": -0.1}, r"distill_weight=-0.1: must be in \[0, 1\]"),
    (True, {"convert.distill_weight": float("nan")}, r"distill_weight=nan: must be in \[0, 1\]"),
    (True, DISTILL | {"model.vocab_size": 301}, r"is another model \(model.vocab_size: 300, not "),
    (True, DISTILL | {"data.tokenizer": "TOKENS"}, OTHER_TOKENS),
]


@pytest.mark.parametrize(("named", "fields", "says"), REFUSED)
def test_what_cannot_be_converted_is_one_line(
    source, tmp_path, sentencepiece_model, named, fields, says
):
    config = read_config(source)
    config.update_from_flattened_dict(fields)
    if config.data.tokenizer == "TOKENS":
        config.data.tokenizer = sentencepiece_model
        says = says.replace("TOKENS", sentencepiece_model)
    with pytest.raises(UsageError, match=says) as raised:
        validate(config)
        run = open_source(config, tmp_path, str(source) if named else None)
        open_conversion(config, run)
    assert "\n" not in str(raised.value)
