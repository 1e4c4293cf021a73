"""Arrays, configs and parameters of small models."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from prope import attention, model, parameters
from prope.kernels.mask import CAUSAL, Mask
from prope.rope import rotation_table
from prope.spec.model import ModelSpec
from support.bounds import MULTIPLE, assert_equal_but_rounding, measure_rounding


def num_parameters(params):
    """Counts the scalars in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def needs_dtype(dtype):
    """Skips a test where XLA compiles no program of a dtype: float16 on a CPU without F16C."""
    try:
        jax.jit(lambda x: (2 * x).astype(dtype))(jnp.ones(64)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"XLA has no {jnp.dtype(dtype).name} here: {error}")


def draw_inputs(d, positions, seed=0, heads=2, dtype=np.float32):
    """What a rotation takes: [B, T, `heads`, d] for positions [B, T]."""
    rng = np.random.default_rng(seed)
    # Uniform, so that both lanes of a pair are often near the maximum: errors are largest there.
    inputs = rng.uniform(-1, 1, (*np.shape(positions), heads, d))
    return inputs.astype(dtype)


def draw_attention(T, S, N, K, H=16, B=2, dtype=np.float32):
    """Queries [B, T, N, H], keys and values [B, S, K, H]."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H)]
    return [jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes]


def draw_segments(B, T, seed=2):
    """Segments as of a packed window: some of one token, one row of one, zeros at an early end."""
    rng = np.random.default_rng(seed)
    segments = 1 + np.sort(rng.integers(0, 5, (B, T)), axis=1)
    segments[0, -T // 5 :] = 0
    segments[0, 0] = 9
    if B > 1:
        segments[-1] = 1
    return jnp.asarray(segments, jnp.int32)


_attend_by_blocks = attention._IMPLEMENTATIONS["xla"]


def documents_by_xla(query, key, value, q_seqlen, q_offsets, sliding_window_length, **options):
    """What JAX's call of cuDNN computes for documents of these lengths from these places on."""
    assert options["kv_seqlen"] is q_seqlen and options["kv_offsets"] is q_offsets
    assert options["mask_type"].name == "PADDING_CAUSAL"
    first = q_offsets[:, :-1, None]
    places = jnp.arange(query.shape[1])[None, None]
    inside = (first >= 0) & (first <= places) & (places < first + q_seqlen[..., None])
    mask = Mask(window=sliding_window_length)
    output = _attend_by_blocks(mask, None, query, key, value, inside.argmax(axis=1))
    return jnp.where(inside.any(axis=1)[..., None, None], output, jnp.nan)


def scaled_attention(query, key, value, mask=CAUSAL, **options):
    """Attention of queries that are not scaled yet, as the formula has them."""
    scaled = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    return attention.attention(scaled.astype(query.dtype), key, value, mask, **options)


def attention_with_gradients(query, key, value, cotangent, mask=CAUSAL, **options):
    """Attention's output and the cotangents of query, key and value, compiled anew."""

    def run(query, key, value, cotangent, mask):
        attend = functools.partial(scaled_attention, mask=mask, **options)
        output, vjp = jax.vjp(attend, query, key, value)
        return output, *vjp(cotangent)

    return jax.jit(run)(query, key, value, cotangent, mask)


def check_attention(query, key, value, mask=CAUSAL, multiple=MULTIPLE, cap=None, **options):
    """Compares attention and its gradients with the formula.

    Each may differ by `multiple` times what one unit in the last place of the inputs, in their
    dtype, moves the formula's result by.
    """
    rng = np.random.default_rng(1)
    cotangent = jnp.asarray(rng.standard_normal(query.shape), query.dtype)
    seen = oracles.causal_mask(query.shape[1], mask.segment_ids, mask.window, mask.sinks)
    formula = functools.partial(oracles.attention, seen=seen, cap=cap)
    arrays = (query, key, value)

    def name_results(*arrays):
        return dict(zip(("output", "query", "key", "value"), arrays, strict=True))

    def compute(query, key, value, cotangent):
        return name_results(*formula(query, key, value, cotangent=cotangent))

    expected, movement = measure_rounding(compute, *arrays, cotangent)
    actual = attention_with_gradients(*arrays, cotangent, mask, cap=cap, **options)
    assert {array.dtype for array in actual} == {query.dtype}
    assert_equal_but_rounding(name_results(*actual), expected, movement, multiple)


# The switches of a model that any layers may have, at values that are not the defaults.
SWITCHES = {
    "activation": "silu",
    "norm_epsilon": 0.1,
    "scale_embedding": False,
    "tied": False,
    "post_norms": True,
    "attention_scale": 0.7,
    "attention_softcap": 0.5,
    "final_softcap": 4.0,
    "qkv_bias": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "per_layer_input_dim": 6,
}


# Those by which layers differ in shape.
SWITCHES_OF_KINDS = {
    "global_head_dim": 24,
    "num_global_kv_heads": 1,
    "global_key_is_value": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}


# Layers of one shape that differ in all else, in a pattern that ends in part.
KINDS_OF_LAYERS = {
    "num_layers": 5,
    "num_kv_heads": 2,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 6,
    "local_max_wavelength": 100.0,
    "local_rope_percentage": 0.75,
}


ALL_SWITCHES = KINDS_OF_LAYERS | SWITCHES | SWITCHES_OF_KINDS | {"num_layers": 6}


# Gemma 4 at a small size: layers of two shapes, of which full ones have no values of their own; and
# with inputs of their own, and the last ones with the keys and values of others.
_GEMMA4 = {
    "num_layers": 6,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 5,
    "global_head_dim": 32,
    "rope_percentage": 0.25,
    "max_wavelength": 1000.0,
    "local_rope_percentage": 1.0,
    "local_max_wavelength": 100.0,
    "post_norms": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "attention_scale": 0.1,
    "final_softcap": 3.0,
    "norm_epsilon": 0.1,  # so that the last norm does not undo the last skip scale
}


DENSE4 = _GEMMA4 | {"num_kv_heads": 2, "num_global_kv_heads": 1, "global_key_is_value": True}


E4 = _GEMMA4 | {
    "num_kv_heads": 1,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "per_layer_input_dim": 8,
}


def small(**fields):
    """The spec of a model that compiles in a moment."""
    sizes = {
        "num_layers": 3,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_dim": 48,
        "vocab_size": 50,
        "rope_percentage": 0.75,
    }
    return ModelSpec(**sizes | fields)


def frequencies_of(spec, seq_len=None):
    """The frequencies [P] of every layer, for sequences of this length, where heads share them."""
    layers = spec.layers_at(seq_len)
    assert all((layer.frequencies == layer.frequencies[0]).all() for layer in layers)
    return [layer.frequencies[0] for layer in layers]


def initial_params(spec, seed=0):
    """The initial parameters of a model."""
    init = functools.partial(model.init, spec)
    return jax.jit(init)(jax.random.key(seed))


def draw_model(spec, B=2, T=12, seed=0):
    """Parameters with no zeros in them, so that every one matters; tokens; positions."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for path, row in parameters.parameters(spec).items():
        sizes = parameters.axis_sizes(spec, path)
        fan_in = math.prod(sizes[axis] for axis in row.fan_in)
        scale = 0.1 + row.is_matrix / math.sqrt(fan_in)
        shape = [sizes[axis] for axis in parameters.stacked_axes(path)]
        leaf = scale * rng.standard_normal(shape)
        if path.endswith("skip_scale"):
            leaf = rng.uniform(0.3, 0.9, shape)
        leaves[path] = jnp.asarray(leaf, jnp.float32)
    params = parameters.nest(leaves)
    tokens = rng.integers(0, spec.vocab_size, (B, T))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return params, jnp.asarray(tokens, jnp.int32), positions


def forward(spec, params, tokens, positions, segments=None):
    """The logits [B, T, V] of prope's decoder."""
    return _forward(spec, params, tokens, positions, segments)


@functools.partial(jax.jit, static_argnums=0)
def _forward(spec, params, tokens, positions, segments):
    hidden = model.hidden_states(spec, params, tokens, positions, segments)
    return model.logits(spec, params, hidden)


def assert_trees_close(actual, expected, rtol, where=""):
    """Compares the arrays of two trees, relative to the largest of each array."""

    def compare(path, theirs, ours):
        bound = rtol * np.abs(theirs).max()
        name = f"{where} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, expected, actual)


def leaves_by_path(tree) -> dict:
    """The leaves of nested dictionaries by their paths, as in the table of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def same(ours, theirs) -> bool:
    """Whether two trees of arrays are equal, bit for bit."""

    def equal(a, b):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()

    return jax.tree.all(jax.tree.map(equal, ours, theirs))


def layer_params(params, number):
    """The parameters of one layer."""
    return jax.tree.map(lambda leaf: leaf[number], params["layers"])


def run_layers(spec, params, tokens, positions):
    """Yields (residual stream after, captured) of every layer."""
    x = model.embed(spec, model.embedding(params), tokens)
    run_layer = jax.jit(functools.partial(model.run_layer, spec), static_argnames="layer")
    for layer in spec.layers:
        table = rotation_table(positions, layer.frequencies)
        x, captured = run_layer(layer_params(params, layer.number), x, table, layer=layer)
        yield x, captured
