"""The measurements measure what they say; their figures are not judged here."""

import jax.numpy as jnp
import numpy as np
from test_rope import oracle

from prope.bench import medians, paper_listing


def test_the_baseline_is_the_formula_in_float32():
    positions = np.arange(50, dtype=np.int32)[None]
    inputs = np.random.default_rng(0).standard_normal((1, 50, 2, 64)).astype(np.float32)
    for p in (0.0, 0.75, 1.0):
        turned = paper_listing(jnp.asarray(inputs), jnp.asarray(positions), 64, 10_000, p)
        np.testing.assert_allclose(turned, oracle(inputs, positions, 1e4, p), rtol=0, atol=1e-5)


def test_programs_are_timed_in_turns():
    calls = []
    found = medians({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert calls == list("ab") * 5 and found.keys() == {"a", "b"}


def test_the_command_prints_multiples_of_a_copy(run_command):
    outcome = run_command("prope.bench", "--rope", "--shape=1,64,2,64")
    figures = {"forward", "forward_backward", "output_and_gradient"}
    assert outcome.result["prope"].keys() == outcome.result["paper"].keys() == figures
    assert all(value > 0 for value in outcome.result["prope"].values())
    assert "--shape=1,2: must be four numbers" in run_command("prope.bench", "--rope", "--shape=1,2").error
    assert "give --rope" in run_command("prope.bench").error
