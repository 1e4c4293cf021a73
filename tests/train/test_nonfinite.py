"""Steps whose loss or gradient is not finite: the run stops, or skips them."""

import functools
import json
import os
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from support.commands import CONFIG, ROOT, losses

from prope.optimizer import learning_rate, make_optimizer
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.step import init_state, make_train_step
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import open_run

SKIP = ("--config.on_nonfinite=skip", "--config.log_every=1")


def skips(workdir) -> list:
    lines = (workdir / "skips.jsonl").read_text().splitlines()
    return [(record["step"], record["in_a_row"]) for record in map(json.loads, lines)]


def tiny_step():
    """A training step with config.on_nonfinite=skip: (spec, step, first state, batch)."""
    sizes = dict.fromkeys(("embed_dim", "head_dim", "hidden_dim"), 16)
    model = ModelSpec(num_layers=1, num_heads=1, **sizes)
    spec = Spec(on_nonfinite="skip", num_steps=200, model=model)
    optimizer = make_optimizer(spec)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 3, 260)
    batch = {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, axis=1),
        "segment_ids": jnp.ones_like(tokens),
        "positions": jnp.broadcast_to(jnp.arange(8), (2, 8)),
        "weights": jnp.ones((2, 8)),
    }
    step = jax.jit(make_train_step(spec, optimizer))
    state = jax.jit(functools.partial(init_state, spec, optimizer))()
    return spec, step, state, batch


def test_a_skipped_step_changes_nothing_but_the_schedule():
    spec, step, state, batch = tiny_step()
    params, opt_state, _ = step(*state, batch)
    bad = batch | {"weights": batch["weights"].at[0, 0].set(jnp.nan)}
    kept_params, kept_state, metrics = step(params, opt_state, bad)
    assert not np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, params, kept_params)
    adam, *_, schedule = kept_state[1]
    jax.tree.map(np.testing.assert_array_equal, opt_state[1][0], adam)  # moments and their count
    assert schedule.count == 2

    def update(opt_state):
        after, *_ = step(params, opt_state, batch)
        difference = jax.tree.map(jnp.subtract, after, params)
        return jax.flatten_util.ravel_pytree(difference)[0]

    # The next update differs from the one without the skip by the rate alone, that of its step.
    plain = update(opt_state)
    later = update(kept_state)
    rate, later_rate = (float(learning_rate(spec)(count)) for count in (1, 2))
    ratio = later_rate / rate
    large = np.abs(plain) > 1e-6
    np.testing.assert_allclose(later[large] / plain[large], ratio, rtol=1e-2)
    norms = np.linalg.norm(later) / np.linalg.norm(plain)
    np.testing.assert_allclose(norms, ratio, rtol=1e-4)


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is():
    """The squares of its norm overflow."""
    _, step, (params, opt_state), batch = tiny_step()
    params["final_norm"]["scale"] += 1e25
    kept_params, kept_state, metrics = step(params, opt_state, batch)
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, params, kept_params)
    jax.tree.map(np.testing.assert_array_equal, opt_state[1][0], kept_state[1][0])


@pytest.mark.slow
def test_ten_skips_in_a_row_end_the_run_however_often_it_was_interrupted(train, tmp_path):
    diverge = ("--config.optimizer.learning_rate=1e30", "--config.optimizer.warmup_steps=0")
    diverge += (*SKIP, "--config.eval.max_windows=1")
    stopped = train(tmp_path / "run", *diverge, "--stop_at_step=6")
    assert stopped.code == 0, stopped.stderr
    first = skips(tmp_path / "run")[0][0]
    outcome = train(tmp_path / "run", *diverge)
    assert outcome.code == 1
    last = f"step {first + 9} has loss .*, the last of 10 skipped in a row"
    assert re.search(last, outcome.error)
    assert skips(tmp_path / "run") == [(first + i, 1 + i) for i in range(9)]


@pytest.mark.slow
def test_a_run_with_skips_resumes_bit_for_bit(run_command, tmp_path):
    """Batches 4, 5 and 11 have a weight that is not a number."""
    (tmp_path / "sitecustomize.py").write_text(
        "import prope.data.windows as windows\n"
        "read = windows.train_batch\n"
        "def train_batch(store, seed, size, step, rows):\n"
        "    batch = read(store, seed, size, step, rows)\n"
        "    if step in (3, 4, 10):\n"
        "        batch['weights'] = batch['weights'] * float('nan')\n"
        "    return batch\n"
        "windows.train_batch = train_batch\n"
    )

    def train(name, *arguments):
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        flags = (CONFIG, f"--workdir={tmp_path / name}", *SKIP, *arguments)
        return run_command("prope.train", *flags, PYTHONPATH=path)

    straight = train("straight")
    assert straight.result["skipped_steps"] == 3 and "step 5 has loss nan" in straight.stderr
    assert train("run", "--stop_at_step=4").code == 0
    resumed = train("run")
    for name in ("straight", "run"):
        assert skips(tmp_path / name) == [(4, 1), (5, 2), (11, 1)]
    steps = set(range(1, 21))
    assert set(losses(tmp_path / "run")) == steps - {4, 5, 11}
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert resumed.result["eval_loss"] == straight.result["eval_loss"]
    assert Checkpoints(tmp_path / "run").steps() == [10, 20]
    ours, theirs = (hash_arrays(open_run(tmp_path / name).params()) for name in ("run", "straight"))
    assert ours == theirs
