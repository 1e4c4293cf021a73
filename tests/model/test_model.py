"""The decoder against its formula in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.models import (
    ALL_SWITCHES,
    DENSE4,
    E4,
    SWITCHES,
    SWITCHES_OF_KINDS,
    forward,
    initial_params,
    same,
    small,
)
from support.models import draw_model as draw

from prope import model, parameters
from prope.loss import weighted_loss

SEGMENTS = np.array(
    [[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2], [1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4]], np.int32
)


def assert_equals_formula(spec, params, tokens, positions, segments=None, multiple=4):
    """Compares the logits with the formula."""
    inputs = (tokens, positions, segments)
    expected, movement = measure_rounding(
        lambda params: oracles.decoder(spec, params, *inputs), params
    )
    scores = forward(spec, params, *inputs)
    assert_equal_but_rounding(scores, expected, movement, multiple)


@pytest.mark.parametrize(("p", "kv_heads"), [(0.0, 1), (0.25, 2), (0.75, 1), (1.0, 4)])
def test_equals_the_formula(p, kv_heads):
    spec = small(rope_percentage=p, num_kv_heads=kv_heads)
    assert_equals_formula(spec, *draw(spec))


# Two layers of two key heads: which pairs rotate differs, and how fast one of them does.
_ROWS = ((1.0, 0.0, 0.3, 0.1, 0.0, 0.03, 0.0, 0.01), (0.0, 0.6, 0.3, 0.0, 0.05, 0.0, 0.0, 0.0))
BY_HEAD = {"num_layers": 2, "rope_percentage": 1.0, "rope_type": "custom"}
BY_HEAD |= {"rope_frequencies": (_ROWS, ((1.5, *_ROWS[0][1:]), _ROWS[1]))}
TWO_KINDS = {
    "num_layers": 4,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 5,
}


@pytest.mark.parametrize("switch", [*SWITCHES, *SWITCHES_OF_KINDS])
def test_each_switch_equals_the_formula_and_changes_the_result(switch):
    fields = TWO_KINDS if switch in SWITCHES_OF_KINDS else {}
    if switch == "use_double_wide_mlp":
        fields = fields | {"num_kv_shared_layers": 2}
    plain = small(**fields)
    spec = small(**fields | {switch: ALL_SWITCHES[switch]})
    params, tokens, positions = draw(spec)
    assert_equals_formula(spec, params, tokens, positions)
    plain_params, *_ = draw(plain)
    expected = forward(plain, plain_params, tokens, positions)
    if parameters.shapes(plain) == parameters.shapes(spec):
        assert same(plain_params, params)
        scores = forward(spec, params, tokens, positions)
        assert np.abs(scores - expected).max() > 0.01 * np.std(expected)


# All switches, and a pattern of kinds that ends in part.
EVERYTHING = ALL_SWITCHES | {"sliding_window": 3}


@pytest.mark.parametrize(
    "fields",
    [DENSE4, *(pytest.param(fields, marks=pytest.mark.slow) for fields in (E4, EVERYTHING))],
)
def test_kinds_of_layers_equal_the_formula(fields):
    """E4 is compared with it, in the default tier too, by the gradient and by a cache."""
    multiple = 2 if fields is EVERYTHING else 4  # one ulp moves it more
    assert_equals_formula(small(**fields), *draw(small(**fields)), SEGMENTS, multiple)


@pytest.mark.parametrize("percentages", [(1.0, 0.25, 0.0), (0.0, 0.25, 1.0)])
def test_layers_may_each_have_their_p_at_far_positions(percentages):
    spec = small(rope_percentage=percentages)
    params, tokens, positions = draw(spec)
    assert_equals_formula(spec, params, tokens, positions * 80_000)
    scores = forward(small(rope_percentage=(0.5, 0.5, 0.5)), params, tokens, positions)
    spec = small(rope_percentage=0.5)
    expected = forward(spec, params, tokens, positions)
    np.testing.assert_array_equal(scores, expected)


def test_rms_norm_of_bfloat16_is_the_formula_rounded_once():
    x = np.random.default_rng(0).normal(3, 1, (2, 32, 512)).astype(jnp.bfloat16)
    params = {"scale": np.linspace(-0.9, 2, 512, dtype=np.float32)}
    expected = oracles.rms_norm(oracles.float64(x), params)
    normed = model.final_norm(small(), params, jnp.asarray(x))
    assert normed.dtype == jnp.bfloat16
    magnitude = np.abs(expected)
    half_ulp = 2.0 ** (np.floor(np.log2(magnitude)) - 8)
    error = np.abs(oracles.float64(normed) - expected)
    assert np.all(error <= half_ulp + 1e-5 * magnitude)


def compile_gradient(spec, params, tokens, positions) -> str:
    """The compiled text of the gradient of the output's sum of squares."""

    def loss(params, positions):
        hidden = model.hidden_states(spec, params, tokens, positions)
        return (hidden**2).sum()

    return jax.jit(jax.grad(loss)).lower(params, positions).compile().as_text()


@pytest.mark.slow
def test_the_table_is_made_once_however_many_layers_share_it():
    """Only the table shifts integers, in the gradient of an unrolled model of any depth."""

    def count_shifts(num_layers):
        spec = small(num_layers=num_layers, scan_layers=False, remat="full")
        text = compile_gradient(spec, *draw(spec))
        return text.count(" shift-right-logical(")

    assert 0 < count_shifts(1) == count_shifts(4)


def test_later_tokens_do_not_matter():
    T = 12
    spec = small()
    params, _, positions = draw(spec, B=1, T=T)
    embedding = params["embedder"]["input_embedding"]
    tokens = jnp.arange(T)[None]  # every token once: row i of the table is read at position i

    def output_at_6(rows):
        table = embedding.at[:T].set(rows)
        changed = params | {"embedder": {"input_embedding": table}}
        return model.hidden_states(spec, changed, tokens, positions)[0, 6].sum()

    gradient = jax.jit(jax.grad(output_at_6))(embedding[:T])
    largest = np.abs(np.asarray(gradient)).max(axis=-1)
    assert np.all(largest[:7] > 0)
    assert np.all(largest[7:] == 0)


def loss_and_gradient(spec, params, tokens, positions, segments=None):
    """The summed loss of predicting the tokens in reverse order, and its gradient."""

    def loss(params):
        hidden = model.hidden_states(spec, params, tokens, positions, segments)
        weights = jnp.ones(tokens.shape, jnp.float32)
        table = model.embedding(params)
        return weighted_loss(hidden, table, tokens[:, ::-1], weights, spec.final_softcap)

    return jax.jit(jax.value_and_grad(loss))(params)


def slope_along(function, leaves, number, direction):
    """The slope of a function of arrays along a direction of one of them, by differences."""
    values = []
    for step in (1e-5, -1e-5):
        moved = list(leaves)
        moved[number] = leaves[number] + step * direction
        values.append(function(moved))
    return (values[0] - values[1]) / 2e-5


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("fields", "segments"),
    [
        ({"num_kv_heads": 1, "num_layers": 2}, None),
        (BY_HEAD, None),
        (E4, None),
        pytest.param({"num_layers": 2}, SEGMENTS, marks=pytest.mark.slow),
        pytest.param(DENSE4, SEGMENTS, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_differences_of_the_formula(fields, segments):
    spec = small(**fields)
    params, tokens, positions = draw(spec)
    targets = np.asarray(tokens)[:, ::-1, None]

    def loss(leaves):
        tree = jax.tree.unflatten(structure, leaves)
        scores = oracles.decoder(spec, tree, tokens, positions, segments)
        target_scores = np.take_along_axis(scores, targets, axis=-1)
        logsumexp = np.log(np.exp(scores).sum(-1))
        return np.sum(logsumexp - target_scores[..., 0])

    segment_ids = None if segments is None else jnp.asarray(segments)
    value, gradient = loss_and_gradient(spec, params, tokens, positions, segment_ids)
    grads = jax.tree_util.tree_leaves_with_path(gradient)
    leaves, structure = jax.tree.flatten(params)
    leaves = [oracles.float64(leaf) for leaf in leaves]
    np.testing.assert_allclose(value, loss(leaves), rtol=1e-5)
    rng = np.random.default_rng(0)
    for number, (path, grad) in enumerate(grads):
        direction = rng.choice([-1.0, 1.0], grad.shape)
        expected = slope_along(loss, leaves, number, direction)
        error = np.sum(oracles.float64(grad) * direction) - expected
        bound = 1e-5 * np.linalg.norm(grad) * np.sqrt(grad.size)
        assert abs(error) < bound, jax.tree_util.keystr(path)


MODELS = {"gemma": {}, "dense4": DENSE4, "e4": E4, "all": EVERYTHING}
SETTINGS = [*itertools.product(["gemma"], [True, False], ["none", "minimal", "save_qkv", "full"])]
SETTINGS += [("dense4", True, "full"), ("e4", True, "minimal"), ("e4", True, "full")]
SETTINGS += [("all", True, "none"), ("all", True, "minimal"), ("all", False, "full")]


@functools.cache
def gradient_without_scan_or_remat(name):
    """The arguments of `loss_and_gradient` after the config, its results, and their rounding.

    The rounding of an array is how far the gradient moves with parameters that move by one ulp.
    """
    spec = small(**MODELS[name], scan_layers=False)
    params, tokens, positions = draw(spec)
    compute = functools.partial(loss_and_gradient, spec)
    expected, rounding = measure_rounding(lambda params: compute(params, tokens, positions), params)
    return (params, tokens, positions), expected, rounding


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("name", "scan_layers", "remat"), SETTINGS)
def test_scan_and_remat_change_nothing(name, scan_layers, remat):
    arguments, expected, rounding = gradient_without_scan_or_remat(name)
    spec = small(**MODELS[name], scan_layers=scan_layers, remat=remat)
    loss, gradient = loss_and_gradient(spec, *arguments)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_equal_but_rounding(gradient, expected[1], rounding[1], multiple=4)


@pytest.mark.slow
def test_attention_is_run_again_only_where_nothing_is_kept():
    """Only attention has exponentials: two forward, one in its gradient, two to run again."""

    def count_exponentials(remat):
        spec = small(num_layers=1, scan_layers=False, remat=remat)
        text = compile_gradient(spec, *draw(spec))
        return text.count(" exponential(")

    counts = {remat: count_exponentials(remat) for remat in ("none", "minimal", "save_qkv", "full")}
    assert counts == {"none": 3, "minimal": 3, "save_qkv": 3, "full": 5}


def test_initial_weights_do_not_depend_on_scan_or_encoding():
    expected = initial_params(small(), 3)
    for fields in (
        {"scan_layers": False, "remat": "full"},
        {"rope_percentage": 0.0},
        {"rope_percentage": 1.0, "rope_type": "rope_id", "original_seq_len": 512},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3},
    ):
        assert same(initial_params(small(**fields), 3), expected), fields


def test_initial_weights_have_the_variance_of_their_fan_in():
    sizes = {
        "embed_dim": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "hidden_dim": 512,
        "vocab_size": 500,
    }
    params = initial_params(small(**sizes))
    layers = params["layers"]
    fan_in = [
        (params["embedder"]["input_embedding"], 128),
        (layers["attn"]["q_einsum"]["w"], 128),
        (layers["attn"]["kv_einsum"]["w"], 128),
        (layers["attn"]["attn_vec_einsum"]["w"], 4 * 64),
        (layers["mlp"]["gating_einsum"], 128),
        (layers["mlp"]["linear"], 512),
    ]
    for leaf, size in fan_in:
        normed = np.asarray(leaf) * np.sqrt(size)
        assert abs(normed.std() - 1) < 0.02
        assert np.abs(normed).max() < 2 / 0.879, "cut at two standard deviations"
        assert np.std(normed[0] - normed[1]) > 0, "layers start apart"
    for norm in (layers["pre_attention_norm"], layers["pre_ffw_norm"], params["final_norm"]):
        np.testing.assert_array_equal(norm["scale"], 0)


@pytest.mark.parametrize(("D", "factor"), [(640, 25.25), (5376, 73.5)])
def test_the_factor_of_embeddings_is_rounded_as_in_googles_code(D, factor):
    spec = small(embed_dim=D, dtype="bfloat16")
    ones = jnp.ones((spec.vocab_size, D))
    tokens = jnp.zeros((1, 1), jnp.int32)
    assert set(np.ravel(model.embed(spec, ones, tokens)).tolist()) == {factor}
    spec = dataclasses.replace(spec, dtype="float32")
    exact = np.float32(np.sqrt(D))
    assert set(np.ravel(model.embed(spec, ones, tokens)).tolist()) == {exact}


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    spec = small(dtype="bfloat16")
    params, tokens, positions = draw(spec)
    hidden_states = jax.jit(functools.partial(model.hidden_states, spec))
    hidden = hidden_states(params, tokens, positions)
    assert hidden.dtype == jnp.bfloat16
    scores = model.logits(spec, params, hidden)
    assert scores.dtype == jnp.float32
    expected = oracles.decoder(spec, params, tokens, positions)
    assert np.abs(scores - expected).mean() < 0.03 * expected.std()
