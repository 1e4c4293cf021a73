"""The update rule against the formulas of AdamW and of the schedule."""

import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import adafactor, adamw, lion
from oracles import learning_rate as expected_rate
from support.commands import refusal
from support.models import ALL_SWITCHES, DENSE4, E4, leaves_by_path, small

from prope import parameters
from prope.config import resolve, to_config
from prope.optimizer import check_extension, learning_rate, make_optimizer, skip_nonfinite
from prope.spec.run import OptimizerSpec, Spec, differences


def make_spec(**fields):
    """A run of 100 updates; keyword arguments are fields of its optimizer."""
    defaults = {"warmup_steps": 10, "learning_rate": 1e-2, "final_learning_rate": 1e-3}
    return Spec(num_steps=100, optimizer=OptimizerSpec(**defaults | fields))


@pytest.mark.parametrize(("asked", "warmup"), [(0, 0), (10, 10), (100, 10), (2000, 10)])
def test_the_rate_rises_to_the_peak_and_ends_where_it_should(asked, warmup):
    """In a run that is no longer than its warmup, a tenth of it is."""
    rate = learning_rate(make_spec(warmup_steps=asked))
    for update in (1, 2, 9, 10, 11, 50, 99, 100, 1100):
        expected = expected_rate(update, num_updates=100, warmup=warmup, peak=1e-2, final=1e-3)
        np.testing.assert_allclose(rate(update - 1), expected, rtol=1e-5)
    assert rate(0) > 0
    assert math.isclose(rate(99), 1e-3, rel_tol=1e-6)


def rate_of(update, schedule, share, warmup):
    """The formula, of 100 updates from 1e-2 to 1e-3."""
    if update < warmup:
        return 1e-2 * update / warmup
    begin = max(warmup, 100 - round(100 * share)) if schedule == "wsd" else 100
    return 1e-2 - 9e-3 * max(update - begin, 0) / max(100 - begin, 1)


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
@pytest.mark.parametrize(("share", "warmup"), [(0.2, 10), (0.0, 0), (1.0, 10), (0.255, 0)])
def test_a_stable_rate_decays_in_its_share_of_the_steps(schedule, share, warmup):
    spec = make_spec(schedule=schedule, decay_share=share, warmup_steps=warmup)
    rates = jax.jit(jax.vmap(learning_rate(spec)))(jnp.arange(100))
    expected = [rate_of(update, schedule, share, warmup) for update in range(1, 101)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "step", "fields", "first"),
    [
        ("wsd", 80, {"num_steps": 200}, None),
        ("wsd", 100, {"num_steps": 200}, 81),
        ("wsd", 60, {"num_steps": 60}, 49),
        ("wsd", 60, {"num_steps": 75}, None),
        ("wsd", 90, {"optimizer.decay_share": 0.1}, 82 - 1),
        ("wsd", 90, {}, None),
        ("constant", 100, {"num_steps": 200}, None),
        ("constant", 30, {"num_steps": 9}, 1),  # which is shorter than its warmup
    ],
)
def test_a_run_goes_on_for_longer_where_its_rates_were_the_same(schedule, step, fields, first):
    """And config.json lets it; `cosine` is another run with every other length."""
    before = make_spec(schedule=schedule)
    spec = before.replace(fields)
    assert differences(spec.flat(), before.flat()) == []
    if first is None:
        return check_extension(spec, before, step)
    assert f"rates from step {first} on; keep" in refusal(check_extension, spec, before, step)
    return None


def test_another_schedule_or_length_of_a_cosine_is_another_run():
    cosine, wsd = make_spec().flat(), make_spec(schedule="wsd").flat()
    for ours, theirs in ((cosine, wsd), (wsd, cosine)):
        (line,) = differences(ours, theirs | {"num_steps": 200})[-1:]
        assert line.startswith("optimizer.schedule: ")
    assert differences(cosine, cosine | {"num_steps": 200}) == ["num_steps: 200, not 100"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes the spec of a run whose schedule returns an expression of `count`, and of `spec`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(expression):
        sys.modules.pop("my_rates", None)
        lines = ["import jax.numpy as jnp", "def rates(spec):", f"    return {expression}"]
        (tmp_path / "my_rates.py").write_text("\n".join(lines))
        config = to_config(make_spec(schedule="my_rates:rates"))
        return resolve(config)

    yield make
    sys.modules.pop("my_rates", None)


def test_a_schedule_of_the_users_own_is_used_as_it_is(own):
    spec = own("lambda count: spec.optimizer.learning_rate / (count + 1)")
    assert [float(learning_rate(spec)(count)) for count in (0, 3)] == pytest.approx([1e-2, 25e-4])
    assert re.fullmatch(r"my_rates:rates@[0-9a-f]{12}", spec.optimizer.schedule)
    assert resolve(to_config(spec)) == spec
    other = own("lambda count: spec.optimizer.learning_rate / (count + 2)")
    (line,) = differences(other.flat(), spec.flat())
    assert line == f"optimizer.schedule: {spec.optimizer.schedule}, not {other.optimizer.schedule}"


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("lambda count: jnp.where(count < 40, 1e-3, jnp.nan)", "step 41 is nan"),
        ("lambda count: jnp.log(3.0 - count)", r"step 3 is 0\.0|step 4 is -inf"),
        ("lambda count: 1e-3 - 1e-4 * count", "step 12 is -"),
        ("lambda count: jnp.ones(3)", r"step 1 is \[1.0, 1.0, 1.0\]"),
        ("lambda count: {}", "TypeError"),
        ("lambda count: 1e-3 if count < 40 else 1e-4", "TracerBool"),
        ("1e-3", "TypeError: 'float' object is not callable"),
        ("spec.no_such", r"AttributeError: .*\(my_rates.py line 3\)"),
    ],
)
def test_a_schedule_of_the_users_own_that_is_none_is_named(own, expression, named):
    line = refusal(make_optimizer, own(expression))
    assert line.startswith("config.optimizer.schedule=my_rates:rates: ")
    assert re.search(named, line), line


NAMES = ("adamw", "lion", "adafactor", "muon")
FORMULAS = {"adamw": adamw, "lion": lion, "adafactor": adafactor}


STACKS = [*((name, DENSE4) for name in NAMES), ("muon", E4), ("adamw", ALL_SWITCHES)]


@pytest.mark.parametrize(("name", "fields"), STACKS)
def test_matrices_of_all_stacks_decay_and_scales_and_biases_do_not(name, fields):
    spec = make_spec(warmup_steps=0, weight_decay=0.1, name=name)
    shapes = parameters.shapes(small(**fields))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5), shapes)
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(spec)

    @jax.jit
    def update(params):
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        return updates

    decayed = -learning_rate(spec)(0) * 0.1 * 0.5
    for path, leaf in leaves_by_path(update(params)).items():
        is_matrix = not path.endswith(("/scale", "/b", "/skip_scale"))
        np.testing.assert_allclose(leaf, decayed * is_matrix, rtol=1e-5, err_msg=path)


def compare_updates(spec, weights, gradients, rtol, atol):
    """Compares each update of weights with the formula; returns the optimizer's last state."""
    optimizer = make_optimizer(spec)
    params = {"linear": jnp.asarray(weights, jnp.float32)}
    state = optimizer.init(params)
    rate = learning_rate(spec)
    formula = FORMULAS[spec.optimizer.name](
        weights,
        gradients,
        rates=[float(rate(count)) for count in range(len(gradients))],
        clip_norm=spec.optimizer.clip_norm,
        weight_decay=spec.optimizer.weight_decay,
    )
    for gradient, expected in zip(gradients, formula, strict=True):
        gradient = {"linear": jnp.asarray(gradient, jnp.float32)}
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(params["linear"], expected, rtol=rtol, atol=atol)
    return state, expected


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_equal_the_formula(name, decay):
    spec = make_spec(warmup_steps=0, weight_decay=decay, clip_norm=1.0, name=name)
    gradients = np.array([[3.0, -4, 1, 0.5], [0.1, 0.2, 0.3, -0.4], [2, 2, -2, 2]])
    compare_updates(spec, np.array([0.5, -1, 2, 1]), gradients, rtol=1e-4, atol=1e-8)


def test_small_updates_are_not_lost_and_moments_have_their_dtypes():
    rate = 6e-4
    spec = make_spec(mu_dtype="bfloat16", learning_rate=rate, final_learning_rate=rate)
    gradients = np.random.default_rng(0).normal(0.1, 1, (100, 50))
    bound = 4e-4
    state, expected = compare_updates(spec, np.ones(50), gradients, rtol=0, atol=bound)
    largest = np.abs(expected - 1).max()
    # A change in steps so small that bfloat16 weights would lose each of them.
    assert 50 * bound < largest < 0.1
    (adam,) = (node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node))
    assert adam.mu["linear"].dtype == jnp.bfloat16
    assert adam.nu["linear"].dtype == jnp.float32


def is_adam(node) -> bool:
    """Whether a node of an optimizer's state holds the moments."""
    return hasattr(node, "mu")


def muon_updates(gradients, params):
    """What Muon's first step adds to parameters, and its learning rate."""
    spec = make_spec(warmup_steps=0, weight_decay=0.0, name="muon", clip_norm=1e9)
    optimizer = make_optimizer(spec)
    state = optimizer.init(params)
    updates, _ = jax.jit(optimizer.update)(gradients, state, params)
    return updates, learning_rate(spec)(0)


def draw_gradients(shapes):
    """Random gradients for arrays of these shapes."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)


def rows_of(w):
    """Makes a matrix [64, K H] of weights [K, 64, H]."""
    return np.moveaxis(w, 1, 0).reshape(64, -1)


def assert_orthogonal(matrices, rate):
    """Asserts that updates have singular values about as one another, and AdamW's size."""
    for matrix in matrices:
        singular = np.linalg.svd(np.asarray(matrix), compute_uv=False)
        expected = 0.2 * rate * math.sqrt(max(matrix.shape))
        assert 0.6 * expected < singular.min() and singular.max() < 1.3 * expected


@pytest.mark.parametrize(
    "fields",
    # In one stack; in several; of 6 layers with inputs of their own: more than embed_dim.
    [{}, DENSE4, E4 | {"per_layer_input_dim": 16}],
    ids=["one stack", "dense4", "e4"],
)
def test_muon_makes_orthogonal_updates_of_every_matrix_and_adams_of_the_rest(fields):
    """Layers, and the two matrices in one array, are matrices of their own."""
    sizes = {"embed_dim": 64, "head_dim": 8}
    if fields:
        sizes["global_head_dim"] = 12
    gradients = draw_gradients(parameters.shapes(small(**fields | sizes)))
    updates, rate = muon_updates(gradients, gradients)
    layers = updates["layers"]
    matrices = []
    for layer in layers.values() if fields else [layers]:
        mlp = layer["mlp"]
        attention = layer["attn"]
        matrices += [*mlp["linear"], *(half for row in mlp["gating_einsum"] for half in row)]
        matrices += [w.reshape(-1, 64) for w in attention["attn_vec_einsum"]["w"]]
        for name in {"q_einsum", "k_einsum", "kv_einsum"} & attention.keys():
            weights = attention[name]["w"]
            matrices += map(rows_of, weights.reshape(-1, *weights.shape[-3:]))
        if "per_layer_input_gate" in layer:
            matrices += [*layer["per_layer_input_gate"]["w"], *layer["per_layer_projection"]["w"]]
    embedder = updates["embedder"]
    if "per_layer_model_projection" in embedder:
        projection = embedder["per_layer_model_projection"]["w"]  # [D, M, Q]
        matrices += [*np.moveaxis(projection, 1, 0)]
    others = ("/scale", "skip_scale", "input_embedding", "per_layer_embeddings")
    leaves = leaves_by_path(updates).items()
    expected = sum(leaf.size for path, leaf in leaves if not path.endswith(others))
    assert sum(matrix.size for matrix in matrices) == expected, "each array is looked at"
    assert_orthogonal(matrices, rate)
    for adam in (embedder["input_embedding"], updates["final_norm"]["scale"]):
        # Its first update, by Nesterov's momentum.
        np.testing.assert_allclose(np.abs(adam), rate * (1 + 0.9 / 1.9), rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_skipped_changes_no_state_but_the_schedule(name):
    spec = make_spec(warmup_steps=0, name=name)
    optimizer = make_optimizer(spec)
    params = {"linear": jnp.ones((4, 4))}
    state = optimizer.init(params)
    _, new = jax.jit(optimizer.update)(params, state, params)
    kept = skip_nonfinite(jnp.array(False), new, state)
    changed = [
        path
        for (path, old), value in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(kept), strict=True
        )
        if not np.array_equal(old, value)
    ]
    assert len(changed) == 1 and changed[0][-1].name == "count"
