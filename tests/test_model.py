"""The decoder against its formula in float64, written here from the description of Gemma 1."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from makers import draw_model as draw
from makers import forward, small
from makers import initial_params as start
from oracles import decoder as reference

from prope import model
from prope.config import default_config, set_layer_percentages
from prope.cost.flops import num_parameters
from prope.loss import weighted_loss


@pytest.mark.parametrize("p", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("kv_heads", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_the_formula(p, kv_heads):
    config = small(rope_percentage=p, num_kv_heads=kv_heads)
    params, tokens, positions = draw(config)
    expected = reference(config, params, tokens, positions)
    np.testing.assert_allclose(
        forward(config, params, tokens, positions), expected, rtol=0, atol=2e-5 * expected.std()
    )


def test_far_positions_equal_the_formula():
    config = small(rope_percentage=1.0)
    params, tokens, positions = draw(config)
    positions = positions * 80_000
    expected = reference(config, params, tokens, positions)
    np.testing.assert_allclose(
        forward(config, params, tokens, positions), expected, rtol=0, atol=2e-5 * expected.std()
    )


def test_segments_equal_the_formula():
    config = small()
    params, tokens, positions = draw(config)
    segments = np.array([[1] * 5 + [2] * 7, [1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4]], np.int32)
    expected = reference(config, params, tokens, positions, segments)
    actual = forward(config, params, tokens, positions, segments)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * expected.std())


def test_two_copies_of_a_document_get_the_same_logits_when_masked():
    config = small()
    params, tokens, _ = draw(config, B=1, T=6)
    twice = np.concatenate([tokens, tokens], axis=1)
    positions = np.concatenate([np.arange(6), np.arange(6)])[None].astype(np.int32)
    segments = np.repeat([[1, 2]], 6, axis=1).astype(np.int32)
    scores = np.asarray(forward(config, params, twice, positions, segments))
    np.testing.assert_allclose(scores[:, :6], scores[:, 6:], rtol=0, atol=1e-5)
    unmasked = np.asarray(forward(config, params, twice, positions))
    assert np.abs(unmasked[:, :6] - unmasked[:, 6:]).max() > 0.1


@pytest.mark.slow
def test_p_reaches_every_layer():
    """A layer that ignored p would give the same output for every p when the others' attention is cut off."""
    positions = np.arange(12, dtype=np.int32)[None]
    for layer in range(3):
        outputs = []
        for p in (0.0, 0.5, 1.0):
            config = small(rope_percentage=p)
            params, tokens, _ = draw(config, B=1)
            others = np.arange(3) != layer
            out = params["layers"]["attn"]["attn_vec_einsum"]
            out["w"] = jnp.where(others[:, None, None, None], 0, out["w"])
            outputs.append(np.asarray(forward(config, params, tokens, positions)))
        for one, other in ((0, 1), (1, 2), (0, 2)):
            difference = np.abs(outputs[one] - outputs[other]).max(-1)[0]
            assert difference[0] == 0, "position 0 turns nothing"
            assert np.all(difference[2:] > 1e-4)


@pytest.mark.parametrize(
    ("scan_layers", "percentages"),
    [
        (True, (1.0, 0.25, 0.0)),
        pytest.param(False, (1.0, 0.25, 0.0), marks=pytest.mark.slow),
        (True, (0.0, 0.25, 1.0)),
    ],
)
def test_layers_may_each_have_their_p(scan_layers, percentages):
    whole = default_config()
    whole.model = small(scan_layers=scan_layers)
    set_layer_percentages(whole, percentages)
    config = whole.model
    params, tokens, positions = draw(config)
    expected = reference(config, params, tokens, positions * 1000)
    scores = forward(config, params, tokens, positions * 1000)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-5 * expected.std())
    set_layer_percentages(whole, (0.5, 0.5, 0.5))
    same = forward(small(rope_percentage=0.5, scan_layers=scan_layers), params, tokens, positions)
    np.testing.assert_array_equal(forward(whole.model, params, tokens, positions), same)


def test_rms_norm_of_bfloat16_is_the_formula_rounded_once():
    x = np.random.default_rng(0).normal(3, 1, (2, 32, 512)).astype(jnp.bfloat16)
    scale = np.linspace(-0.9, 2, 512, dtype=np.float32)
    wide = x.astype(np.float64)
    expected = (
        wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale.astype(np.float64))
    )
    actual = np.asarray(model.final_norm({"scale": scale}, jnp.asarray(x)))
    assert actual.dtype == jnp.bfloat16
    half_ulp = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 8)
    assert np.all(
        np.abs(actual.astype(np.float64) - expected) <= half_ulp + 1e-5 * np.abs(expected)
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_table_is_made_once_however_many_layers_share_it(remat):
    """Only the table shifts integers: the compiled gradient of an unrolled model must not do it more with depth."""

    def shifts(num_layers):
        config = small(num_layers=num_layers, scan_layers=False, remat=remat)
        params, tokens, positions = draw(config)

        def loss(params, positions):
            return (model.hidden_states(config, params, tokens, positions) ** 2).sum()

        text = jax.jit(jax.grad(loss)).lower(params, positions).compile().as_text()
        return text.count(" shift-right-logical(")

    assert 0 < shifts(1) == shifts(4)


def test_later_tokens_do_not_matter():
    config = small()
    params, tokens, positions = draw(config, B=1)

    def one_output(embedded, at):
        table = params["embedder"]["input_embedding"].at[tokens[0]].set(embedded)
        changed = params | {"embedder": {"input_embedding": table}}
        return model.hidden_states(config, changed, tokens, positions)[0, at].sum()

    tokens = jnp.arange(12, dtype=jnp.int32)[
        None
    ]  # every token once, so that a row of the table is a place
    gradient = jax.jit(jax.grad(one_output), static_argnums=1)(
        params["embedder"]["input_embedding"][:12], 6
    )
    reached = np.abs(np.asarray(gradient)).max(-1)
    assert np.all(reached[:7] > 0) and np.all(reached[7:] == 0)


def gradient_of(config, params, tokens, positions, segments=None):
    """The summed loss of the tokens in reverse order, and its gradient."""

    def loss(params):
        hidden = model.hidden_states(config, params, tokens, positions, segments)
        ones = jnp.ones(tokens.shape, jnp.float32)
        return weighted_loss(hidden, model.embedding(params), tokens[:, ::-1], ones)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    ("kv_heads", "masked"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_gradients_equal_differences_of_the_formula(kv_heads, masked):
    config = small(num_kv_heads=kv_heads, num_layers=2)
    params, tokens, positions = draw(config)
    segments = (
        jnp.array([[1] * 5 + [2] * 7, [1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4]], jnp.int32)
        if masked
        else None
    )
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def loss(params):
        scores = reference(config, params, tokens, positions, segments)
        right = np.take_along_axis(scores, np.asarray(tokens)[:, ::-1, None], axis=-1)
        return np.sum(np.log(np.exp(scores).sum(-1)) - right[..., 0])

    narrow = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    value, gradient = gradient_of(config, narrow, tokens, positions, segments)
    np.testing.assert_allclose(value, loss(params), rtol=1e-5)
    leaves, names = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    for i, grad in enumerate(jax.tree.leaves(gradient)):
        along = rng.choice([-1.0, 1.0], grad.shape)
        up, down = (
            loss(
                jax.tree.unflatten(names, [*leaves[:i], leaves[i] + step * along, *leaves[i + 1 :]])
            )
            for step in (1e-5, -1e-5)
        )
        expected = (up - down) / 2e-5
        error = np.sum(np.asarray(grad, np.float64) * along) - expected
        assert abs(error) < 1e-5 * np.linalg.norm(grad) * np.sqrt(grad.size), jax.tree_util.keystr(
            jax.tree_util.tree_leaves_with_path(params)[i][0]
        )


@functools.cache
def of_plain():
    """(what `gradient_of` takes after the config, what it finds) without scan or remat."""
    plain = small(scan_layers=False)
    arguments = draw(plain)
    return arguments, gradient_of(plain, *arguments)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("remat", ["none", "minimal", "save_qkv", "full"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_scan_and_remat_change_nothing(scan_layers, remat):
    arguments, (loss, gradient) = of_plain()
    other_loss, other_gradient = gradient_of(
        small(scan_layers=scan_layers, remat=remat), *arguments
    )
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    for expected, actual in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True
    ):
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=5e-6 * np.abs(expected).max()
        )  # by vector width


@pytest.mark.slow
def test_attention_is_run_again_only_where_nothing_is_kept():
    """Of what is compiled here only attention has exponentials: two forward, one in its gradient, two to run again."""

    def exponentials(remat):
        config = small(num_layers=1, scan_layers=False, remat=remat)
        params = jax.eval_shape(functools.partial(model.init, config), jax.random.key(0))
        tokens = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))

        def loss(params):
            return (model.hidden_states(config, params, tokens, tokens) ** 2).sum()

        return jax.jit(jax.grad(loss)).lower(params).compile().as_text().count(" exponential(")

    found = [exponentials(remat) for remat in ("none", "minimal", "save_qkv", "full")]
    assert found == [3, 3, 3, 5]


LONG = {"num_layers": 2, "head_dim": 128}


@functools.cache
def of_long_windows():
    """(what `gradient_of` takes after the config, what it finds): T = 128, in which there are several documents."""
    params, tokens, positions = draw(small(**LONG), T=128)
    segments = jnp.asarray(np.arange(128) // np.array([[50], [200]]), jnp.int32)
    arguments = params, tokens, positions, segments
    return arguments, gradient_of(small(**LONG, attention="xla"), *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [
        ("minimal", False),
        ("none", True),
        ("save_qkv", True),
        ("full", False),
    ],
)
def test_the_kernel_of_tpus_changes_nothing(monkeypatch, remat, scan_layers):
    run = functools.partial(splash_attention_kernel.make_splash_mqa, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mqa", run)
    arguments, (expected_loss, expected) = of_long_windows()
    config = small(**LONG, attention="splash", remat=remat, scan_layers=scan_layers)
    loss, gradient = gradient_of(config, *arguments)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_initial_weights_do_not_depend_on_scan_or_p():
    expected = start(small(), 3)
    for fields in ({"scan_layers": False}, {"rope_percentage": 0.0}, {"remat": "full"}):
        actual = start(small(**fields), 3)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), expected, actual))


def test_initial_weights_have_the_variance_of_their_fan_in():
    config = small(
        embed_dim=128, num_heads=4, head_dim=64, hidden_dim=512, vocab_size=500, num_kv_heads=2
    )
    layers = (params := start(config))["layers"]
    fan_in = [
        (params["embedder"]["input_embedding"], 128),
        (layers["attn"]["q_einsum"]["w"], 128),
        (layers["attn"]["kv_einsum"]["w"], 128),
        (layers["attn"]["attn_vec_einsum"]["w"], 4 * 64),
        (layers["mlp"]["gating_einsum"], 128),
        (layers["mlp"]["linear"], 512),
    ]
    for leaf, size in fan_in:
        assert abs(np.std(leaf) * size**0.5 - 1) < 0.02
        assert np.abs(leaf).max() * size**0.5 < 2 / 0.879, "cut at two standard deviations"
        assert np.std(np.asarray(leaf)[0] - np.asarray(leaf)[1]) > 0, "layers start apart"
    norms = [layers["pre_attention_norm"], layers["pre_ffw_norm"], params["final_norm"]]
    assert all(np.all(np.asarray(norm["scale"]) == 0) for norm in norms)


def test_gemma_2b_has_gemma_s_parameters():
    config = small(
        num_layers=18,
        embed_dim=2048,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        hidden_dim=16_384,
        vocab_size=256_128,
    )
    shapes = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    assert num_parameters(shapes) == 2_506_434_560


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    config = small(dtype="bfloat16")
    params, tokens, positions = draw(config)
    hidden = jax.jit(functools.partial(model.hidden_states, config))(params, tokens, positions)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(start(config))} == {jnp.dtype("float32")}
    scores = model.logits(params, hidden)
    assert scores.dtype == jnp.float32
    expected = reference(config, params, tokens, positions)
    assert np.abs(scores - expected).mean() < 0.03 * expected.std()
