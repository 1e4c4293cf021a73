"""Encodings beside p-RoPE: published numbers, other projects' functions, limits, the decoder."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from oracles import decoder
from support.bounds import assert_equal_but_rounding, measure_rounding
from support.commands import refusal
from support.models import KINDS_OF_LAYERS, draw_model, forward, frequencies_of, layer_params, small

from configs.encodings_wiki import least_wavelength
from prope import encodings, model
from prope.inference.generation import empty_cache
from prope.rope import frequencies

R16 = [1, 0.316227766, 0.1, 0.0316227766, 0.01, 0.00316227766, 0.001, 0.000316227766]
SLOW = [0.0025, 0.000790569415, 0.00025, 7.90569415e-05]  # the last four of R16, / 4


def close(actual, expected):
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-19)


# --- Numbers of the papers' formulas, computed apart from this project, to ten digits -----------


def test_types_have_the_numbers_of_their_formulas():
    close(frequencies(16, 1e4), R16)
    close(encodings.reversed_frequencies(16, 1e4, 0.75), [0, 0, *R16[2:]])
    close(encodings.partial_frequencies(16, 1e4, 0.5), [1, 0.1, 0.01, 0.001, 0, 0, 0, 0])
    close(encodings.partial_frequencies(16, 1e4, 0.25), [1, 0.01, 0, 0, 0, 0, 0, 0])
    for cutoff, kept in ((1, 4), (0.5, 4), (0.25, 3), (4, 6)):
        close(encodings.cutoff_frequencies(16, 1e4, 512, cutoff), R16[:kept] + [0] * (8 - kept))
    close(encodings.hard_clip_frequencies(16, 1e4, 3), R16[:5] + [0] * 3)
    close(encodings.clipped_frequencies(16, 1e4, 4), [*R16[:5], 0.002371708245, 0.00025, 0])
    taper = encodings.clipped_frequencies(128, 1e7, 20)
    pairs = [44, 45, 54, 62, 63]
    expected = [1.539926526e-05, 1.188921691e-05, 5.692309663e-07, 1.128477418e-09, 0]
    close(taper[pairs], expected)
    for length, factor in ((512, 2), (4096, 4)):
        close(
            encodings.rope_id_frequencies(16, length),
            [*(0.1963495408 / factor ** np.arange(4)), 0, 0, 0, 0],
        )


@pytest.mark.parametrize("theta", [100.0, 1e4, 1e6])
@pytest.mark.parametrize("length", [64, 512, 8192])
def test_pairs_up_to_p_star_turn_once_in_the_length(theta, length):
    turns = [length / (2 * math.pi * theta ** (k / 128)) for k in range(128)]
    p = encodings.turning_share(length, theta)
    assert [k <= p * 128 for k in range(128)] == [of_pair >= 1 for of_pair in turns]
    twice = encodings.turning_share(length, theta, turns=2)
    assert [k <= twice * 128 for k in range(128)] == [of_pair >= 2 for of_pair in turns]


def test_scalings_of_the_wavelength_have_the_numbers_of_their_formulas():
    close(
        frequencies(16, encodings.ntk_wavelength(16, 1e4, 4)),
        [
            1,
            0.259412817,
            0.06729500963,
            0.01745718802,
            0.004528618321,
            0.001174781636,
            0.0003047534136,
            7.90569415e-05,
        ],
    )
    for factor, expected, slowest in (
        (1, 22081.79027, 0.000158113883),
        (4, 62924.94753, 6.32455532e-05),
    ):
        wavelength = encodings.dynamic_wavelength(16, 1e4, factor, 512, 1024)
        close(np.float64(wavelength), expected)
        close(frequencies(16, wavelength)[-1], slowest)
        close(frequencies(16, encodings.dynamic_wavelength(16, 1e4, factor, 512, 300)), R16)


def test_scalings_by_pairs_have_the_numbers_of_their_formulas():
    rope = frequencies(16, 1e4)
    close(
        encodings.yarn_frequencies(rope, 16, 1e4, 4, 512),
        [1, 0.2569350599, 0.0625, 0.01383496476, *SLOW],
    )
    # The ramp ends after the slowest pair.
    close(
        encodings.yarn_frequencies(rope, 16, 1e4, 4, 131_072), [*R16[:6], 8.125e-4, 1.976423538e-4]
    )
    close(encodings.llama3_frequencies(rope, 4, 512), [*R16[:3], 0.02037183272, *SLOW])
    steep = encodings.llama3_frequencies(rope, 4, 512, 1, 1)  # as Llama 4: no ramp
    close(steep, [*R16[:4], *SLOW])


def test_the_least_wavelength_of_a_length():
    for length, published in ((1024, 4.3e3), (2048, 1.16e4)):
        assert least_wavelength(128, length) == pytest.approx(published, rel=0.003)
    angles = np.arange(1708)[:, None] * frequencies(128, 1e4)
    sums = np.cos(angles).sum(axis=1)  # the first that is negative: 1707
    assert sums[:1707].min() > 0 > sums[1707]
    assert sums[1707] == pytest.approx(-0.4989315299, abs=1e-9)
    assert least_wavelength(128, 1707) <= 1e4 * 1.001


def test_the_neutral_value_of_each_is_rope_bit_for_bit():
    rope = frequencies(64, 1e4)
    for neutral in (
        encodings.partial_frequencies(64, 1e4, 1),
        encodings.reversed_frequencies(64, 1e4, 1),
        encodings.cutoff_frequencies(64, 1e4, 512, math.inf),
        encodings.clipped_frequencies(64, 1e4, 0),
        encodings.hard_clip_frequencies(64, 1e4, 0),
        frequencies(64, encodings.ntk_wavelength(64, 1e4, 1)),
        encodings.yarn_frequencies(rope, 64, 1e4, 1, 512),
        encodings.llama3_frequencies(rope, 1, 512),
        rope / 1.0,
    ):
        np.testing.assert_array_equal(neutral, rope)
    for zero in (encodings.partial_frequencies, encodings.reversed_frequencies):
        np.testing.assert_array_equal(zero(64, 1e4, 0), np.zeros(32))
    np.testing.assert_array_equal(
        encodings.clipped_frequencies(64, 1e4, 2), encodings.hard_clip_frequencies(64, 1e4, 1)
    )
    clamped = encodings.clipped_frequencies(64, 1e4, 99)
    np.testing.assert_array_equal(clamped, encodings.clipped_frequencies(64, 1e4, 32))


@pytest.mark.parametrize(
    ("d", "wavelength", "length", "pairs"),
    [
        (16, 1e4, 512, 4),
        (128, 5e5, 8192, 35),
        (128, 1e4, 4096, 46),
        (256, 1e4, 512, 62),
        (256, 1e4, 8192, 100),
    ],
)
def test_a_cutoff_keeps_the_pairs_that_complete_a_period(d, wavelength, length, pairs):
    kept = encodings.cutoff_frequencies(d, wavelength, length)
    assert np.count_nonzero(kept) == pairs
    expected = encodings.hard_clip_frequencies(d, wavelength, d // 2 - pairs)
    np.testing.assert_array_equal(kept, expected)


LAW = {"max_wavelength": 1e4, "rope_percentage": 0.5, "original_seq_len": 512}
LAW |= {"rope_cutoff": 1.0, "clip_low_n": 9}


@pytest.mark.parametrize("d", [44, 64, 88, 104, 128, 224, 256])
def test_every_type_gives_frequencies_that_fall_from_1(d):
    law = LAW | {"rope_frequencies": tuple(frequencies(d))}
    for name, (function, needed) in encodings.TYPES.items():
        freqs = function(d, *[law[field] for field in needed])
        assert (freqs.shape, freqs.dtype) == ((d // 2,), np.float64), name
        assert 0 <= freqs.min() <= freqs.max() <= 1, name
        rotated = freqs[freqs > 0]
        assert len(rotated) > 1, name
        assert (np.diff(rotated) < 0).all(), name
        assert name == "reversed" or (np.diff(freqs) <= 0).all(), name


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("partial", {"rope_type": "default", "partial_rotary_factor": 0.25}),
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 512}),
        ("llama3", LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 512}),
    ],
)
def test_frequencies_are_those_of_transformers(d, kind, values):
    pytest.importorskip("torch", reason="the hf extra is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    sizes = {
        "hidden_size": 4 * d,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | values,
    }
    ours = {"head_dim": d, "rope_percentage": 1.0}
    if kind == "partial":
        config = transformers.GPTNeoXConfig(**sizes)
        theirs, scale = GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config, device=None)
        ours |= {"rope_type": "partial", "rope_percentage": 0.25}
    else:
        config = transformers.LlamaConfig(**sizes)
        theirs, scale = ROPE_INIT_FUNCTIONS[kind](config, device=None, seq_len=2048)
        ours |= {"rope_scaling_type": kind, "rope_scaling_factor": values["factor"]}
    if kind not in ("partial", "linear"):
        ours["original_seq_len"] = 512
    freqs = frequencies_of(small(**ours), 2048)[0]
    number = len(theirs)
    np.testing.assert_allclose(freqs[:number], theirs.numpy(), rtol=3e-6)  # theirs are in float32
    assert (freqs[number:] == 0).all()
    if kind == "yarn":  # theirs is on cos and sin, of queries and keys both
        layer = small(**ours, logit_scale="yarn").layers[0]
        assert layer.logit_scale == pytest.approx(scale**2)


# Of every rope_type: the fields that it needs.
NEEDED = {
    "proportional": {},
    "partial": {},
    "reversed": {},
    "cutoff": {"rope_cutoff": 1.0, "original_seq_len": 512},
    "hard_clip": {"clip_low_n": 4},
    "cope": {"clip_low_n": 4},
    "rope_id": {"original_seq_len": 512},
    "custom": {"rope_frequencies": tuple(frequencies(16))},
}


@pytest.mark.parametrize("scaling", encodings.SCALINGS)
@pytest.mark.parametrize("rope_type", NEEDED)
def test_every_type_takes_every_scaling_but_some_those_of_a_wavelength(rope_type, scaling):
    fields = {"rope_type": rope_type, "rope_scaling_type": scaling, "rope_percentage": 1.0}
    fields |= NEEDED[rope_type]
    if "original_seq_len" in encodings.SCALINGS[scaling]:
        fields["original_seq_len"] = 512
    if scaling in encodings.INTERVENTIONS:
        fields["scaled_pairs"] = (1, 2)
    if rope_type in ("rope_id", "custom") and scaling in ("ntk", "dynamic", "yarn"):
        assert not encodings.can_rescale(rope_type, scaling)
        assert f"rope_scaling_type={scaling}: " in refusal(small, **fields)
    else:
        assert encodings.can_rescale(rope_type, scaling)
        small(**fields)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_what_a_scaling_makes_of_fewer_pairs_and_of_layers_of_two_kinds(scaling):
    """Partial rotary is RoPE of a head of p d lanes; other types leave pairs of RoPE out."""
    fields = {"rope_scaling_type": scaling, "rope_scaling_factor": 4.0}
    if "original_seq_len" in encodings.SCALINGS[scaling]:
        fields["original_seq_len"] = 512

    def scaled(d, p, **others):
        return frequencies_of(small(head_dim=d, rope_percentage=p, **fields, **others), 2048)

    rope, *_ = scaled(32, 1.0)
    pairs = np.arange(16)
    assert not np.allclose(rope, frequencies(32, 1e4))
    close(scaled(64, 0.5, rope_type="partial")[0], np.pad(rope, (0, 16)))
    close(scaled(32, 0.25)[0], np.where(pairs < 4, rope, 0))
    close(scaled(32, 0.25, rope_type="reversed")[0], np.where(pairs < 12, 0, rope))
    clipped = scaled(32, 1.0, rope_type="hard_clip", clip_low_n=5)
    close(clipped[0], np.where(pairs < 11, rope, 0))
    kinds = GEMMA | {"global_head_dim": 32}
    for local, expected in (({}, R16), ({"local_rope_percentage": 0.0}, np.zeros(8))):
        layers = zip(scaled(16, 1.0, **kinds | local), (expected, expected, rope), strict=True)
        for freqs, of_layer in layers:
            close(freqs, of_layer)


def test_interventions_act_on_layers_with_a_window_too():
    """Stopping makes their frequencies 0; removing is zeroing the weights of the queries."""
    stop = {"rope_scaling_type": "stop", "scaled_pairs": (1, 2)}
    own = oracles.layer_frequencies(small(**KINDS_OF_LAYERS))
    in_band = np.isin(np.arange(8), (1, 2))
    stopped = frequencies_of(small(**KINDS_OF_LAYERS, **stop))
    np.testing.assert_allclose(stopped, np.where(in_band, 0, own))
    config = small(**KINDS_OF_LAYERS)
    params, *inputs = draw_model(config)
    removed = small(**KINDS_OF_LAYERS, **stop | {"rope_scaling_type": "remove"})
    run = functools.partial(forward, removed)
    actual, movement = measure_rounding(lambda params: run(params, *inputs), params)
    query = params["layers"]["attn"]["q_einsum"]
    query["w"] = jnp.where(np.tile(in_band, 2), 0, query["w"])
    assert_equal_but_rounding(forward(config, params, *inputs), actual, movement)


def test_logit_scales_have_the_numbers_of_their_formulas():
    drope = {"logit_scale": "drope", "logit_scale_coefficient": 0.412}
    for fields, expected in (
        ({"rope_scaling_factor": 4.0, "logit_scale": "yarn"}, 1.296476993),
        ({"rope_scaling_factor": 4.0} | drope, 1.571153277),
        ({"logit_scale_factor": 4.0} | drope, 1.571153277),
        ({}, 1.0),
    ):
        for layer in small(**fields).layers:
            assert layer.logit_scale == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "scaled"), [((1.0, 0.0), [0]), ((0.0, 0.5), [1]), ((0.0, 0.0), [0, 1])]
)
def test_yarn_s_logits_are_of_the_layers_that_rotate_where_some_do(p, scaled):
    """The same as queries' weights times the factor, in these layers alone."""
    factor = {"rope_scaling_factor": 4.0, "logit_scale": "yarn"}
    config = small(num_layers=2, rope_percentage=p, **factor)
    plain = small(num_layers=2, rope_percentage=p)
    params, *inputs = draw_model(config)
    run = functools.partial(forward, config)
    actual, movement = measure_rounding(lambda params: run(params, *inputs), params)
    weights = params["layers"]["attn"]["q_einsum"]
    factors = np.where(np.isin([0, 1], scaled), 1.296476993, 1.0)
    weights["w"] = weights["w"] * factors[:, None, None, None].astype(np.float32)
    assert_equal_but_rounding(forward(plain, params, *inputs), actual, movement)


# --- The decoder --------------------------------------------------------------------------------

GEMMA = {
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 3,
}


YARN_LOGITS = {
    "use_qk_norm": True,
    "logit_scale": "yarn",
    "rope_scaling_type": "linear",
    "rope_scaling_factor": 4.0,
}
LOCAL = GEMMA | {"local_rope_percentage": 1.0}


def keep(freqs, *heads):
    """Frequencies [K, P] of which every key head keeps some pairs."""
    return np.array([np.where(np.isin(np.arange(len(freqs)), kept), freqs, 0) for kept in heads])


LOCAL_100 = 100.0 ** (-np.arange(8) / 8)
WIDE = 1e4 ** (-np.arange(12) / 12)
# Numbers for each of two key heads of six layers, of which some do not rotate.
CUSTOM = np.random.default_rng(0).uniform(0, 2, (6, 2, 8)).round(3)
CUSTOM = tuple(tuple(map(tuple, layer)) for layer in np.where(CUSTOM < 0.5, 0, CUSTOM).tolist())
BY_HEAD = {"rope_type": "custom", "rope_percentage": 1.0, "rope_frequencies": CUSTOM}

# The fields, the frequencies and the windows of six layers.
LAYERS = [
    ({"rope_type": "reversed"}, [np.r_[0, 0, R16[2:]]] * 6, [None] * 6),
    (
        LOCAL | {"local_max_wavelength": 100.0, "rope_percentage": 0.25},
        [100.0 ** (-np.arange(8) / 8)] * 2 + [np.r_[R16[:2], np.zeros(6)]],
        [3, 3, None] * 2,
    ),
    (LOCAL | YARN_LOGITS | {"rope_percentage": 0.0}, [R16, R16, np.zeros(8)], [3, 3, None] * 2),
    (YARN_LOGITS, [np.array(R16) / 4 * (np.arange(8) < 6)], [None] * 6),
    (
        {"rope_percentage": 1.0, "rope_pairs": "0-2,5 7; 0-7; - 1; -; 3,6 0-3; 2"},
        [
            keep(R16, (0, 1, 2, 5), 7),
            np.array(R16),
            keep(R16, (), 1),
            np.zeros(8),
            keep(R16, (3, 6), (0, 1, 2, 3)),
            keep(R16, 2),
        ],
        [None] * 6,
    ),
    (  # heads of two sizes, of which layers have two and four
        LOCAL
        | {"local_max_wavelength": 100.0, "global_head_dim": 24, "num_global_kv_heads": 4}
        | {"rope_percentage": 1.0, "rope_pairs": "0 1-2; 7; 0,8 4-8 11 0-5; 3 3; - 0; 5"},
        [
            keep(LOCAL_100, 0, (1, 2)),
            keep(LOCAL_100, 7),
            keep(WIDE, (0, 8), (4, 5, 6, 7, 8), 11, (0, 1, 2, 3, 4, 5)),
            keep(LOCAL_100, 3),
            keep(LOCAL_100, (), 0),
            keep(WIDE, 5),
        ],
        [3, 3, None] * 2,
    ),
    (BY_HEAD, CUSTOM, [None] * 6),
]


@pytest.mark.parametrize(("fields", "freqs", "windows"), LAYERS)
def test_layers_with_windows_and_encodings_equal_the_formula(fields, freqs, windows):
    config = small(num_layers=6, **fields)
    params, tokens, positions = draw_model(config)
    scale = 1.296476993 if "logit_scale" in fields else 1.0
    freqs = [freqs[layer % len(freqs)] for layer in range(6)]
    inputs = (tokens, positions)
    options = {"freqs": freqs, "windows": windows, "scale": scale}
    run = functools.partial(decoder, config, **options)
    expected, movement = measure_rounding(lambda params: run(params, *inputs), params)
    assert_equal_but_rounding(forward(config, params, *inputs), expected, movement)
    plain = decoder(config, params, tokens, positions, freqs=freqs, windows=[None] * 6)
    assert windows[0] is None or np.abs(plain - expected).max() > 1e-2 * expected.std()


def test_pairs_that_all_heads_share_are_the_same_program():
    """What is compiled for p-RoPE is compiled for its pairs, named one by one."""
    texts = []
    for fields in ({}, {"rope_percentage": 1.0, "rope_pairs": "0-3,4,5 0-5"}):
        config = small(**fields)
        params, *inputs = draw_model(config)
        run = functools.partial(model.hidden_states, config)
        texts.append(jax.jit(run).lower(params, *inputs).as_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "pairs",
    [{"rope_percentage": (0.5, 1.0, 0.5)}, {"rope_percentage": 1.0, "rope_pairs": "1;2;3,7"}],
)
def test_heads_that_rotate_alike_have_one_table(pairs):
    """Training keeps the table of every layer for its backward pass."""
    spec = small(**{"rope_percentage": 1.0} | pairs)
    layers = spec.layers
    positions = np.zeros((1, 4), np.int32)
    tables = encodings.rotation_tables(layers, positions)
    for number, layer in enumerate(layers):
        arrays = {name: rows[number] for name, rows in tables.per_layer.items()}
        assert tables.choose(layer, arrays).shape == (2, 1, 4, 1, 8)


@pytest.mark.parametrize(
    "fields",
    [GEMMA | {"local_max_wavelength": 100.0}, GEMMA | {"rope_percentage": 0.0}, GEMMA | BY_HEAD],
)
def test_a_cache_gives_what_the_whole_text_gives(fields):
    config = small(num_layers=6, use_qk_norm=True, **fields)
    params, tokens, positions = draw_model(config, T=11)
    run = jax.jit(functools.partial(model.hidden_states, config))
    whole, movement = measure_rounding(lambda params: run(params, tokens, positions), params)
    decode = jax.jit(functools.partial(model.decode, config))
    cache = empty_cache(config, 2, 11)
    hidden, cache = decode(params, tokens[:, :6], cache, jnp.zeros(2, jnp.int32))
    assert_equal_but_rounding(hidden, whole[:, :6], movement)
    layers = [layer_params(params, number) for number in range(6)]
    for t in range(6, 11):
        first = jnp.full(2, t, jnp.int32)
        hidden, cache = decode(params | {"layers": layers}, tokens[:, t : t + 1], cache, first)
        assert_equal_but_rounding(hidden[:, 0], whole[:, t], movement)


# --- Bad input ----------------------------------------------------------------------------------


COPE = {"rope_type": "cope", "clip_low_n": 4}
ROPE_ID = {"rope_type": "rope_id", "original_seq_len": 512}
WINDOWS = {"layer_types": ("sliding_attention",), "sliding_window": 8}
TWO_KINDS = WINDOWS | {"layer_types": ("sliding_attention", "full_attention")}

NO_FREQUENCIES = [(), (1.0,) * 7, (7.0,) * 8, (-1.0,) * 8, CUSTOM[:5], ("a",) * 8]
NO_FREQUENCIES += [((((1.0,) * 8,) * 3),) * 6, ((1.0,) * 8, (1.0,) * 7) * 3]
# The field that the refusal must name with its value, and what is given.
REFUSED = [
    ("rope_type", {"rope_type": "cutof"}),
    ("original_seq_len", {"rope_type": "cutoff", "rope_cutoff": 1.0}),
    ("rope_cutoff", {"rope_cutoff": 1.0}),
    ("rope_cutoff", {"rope_type": "cutoff", "rope_cutoff": 0.01, "original_seq_len": 512}),
    ("clip_low_n", {"rope_type": "cope"}),
    ("clip_low_n", COPE | {"clip_low_n": 1}),
    ("rope_percentage", COPE | {"rope_percentage": 0.5}),
    ("rope_percentage", {"rope_type": "partial", "rope_percentage": 0.2}),
    ("original_seq_len", ROPE_ID | {"original_seq_len": 64}),
    ("original_seq_len", {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}),
    ("rope_scaling_factor", {"rope_scaling_type": "linear", "rope_scaling_factor": 0.5}),
    ("rope_scaling_type", {"rope_scaling_type": "yarm"}),
    ("rope_scaling_type", ROPE_ID | {"rope_scaling_type": "yarn"}),
    ("logit_scale_coefficient", {"logit_scale": "drope", "rope_scaling_factor": 2.0}),
    ("logit_scale_factor", {"logit_scale_factor": 2.0}),
    ("logit_scale_factor", {"logit_scale": "yarn", "logit_scale_factor": 0.5}),
    (
        "rope_scaling_factor",
        {"logit_scale": "yarn", "logit_scale_factor": 2.0, "rope_scaling_factor": 4.0},
    ),
    ("sliding_window", {"layer_types": ("sliding_attention",)}),
    ("sliding_window", WINDOWS | {"sliding_window": 0}),
    ("sliding_window", {"sliding_window": 8}),
    ("layer_types", {"layer_types": ("full_attention",) * 9}),
    ("layer_types", {"layer_types": ("full_atention",)}),
    ("num_global_kv_heads", {"num_global_kv_heads": 1}),
    ("global_attention", {"global_attention": "xla"}),
    ("use_double_wide_mlp", {"use_double_wide_mlp": True}),
    ("num_kv_shared_layers", {"num_kv_shared_layers": 6}),
    ("num_kv_shared_layers", TWO_KINDS | {"num_kv_shared_layers": 5}),
    ("local_rope_percentage", WINDOWS | {"local_rope_percentage": 1.5}),
    ("local_max_wavelength", WINDOWS | {"local_max_wavelength": 1.0}),
    *(("rope_pairs", {"rope_pairs": pairs}) for pairs in ("0-8", "3-1", "a", "0 1 2", "0;1", "0,")),
    ("rope_pairs", {"rope_pairs": "0-6", "rope_percentage": 0.75}),
    ("rope_frequencies", {"rope_frequencies": (1.0,) * 8}),
    *(("rope_frequencies", BY_HEAD | {"rope_frequencies": numbers}) for numbers in NO_FREQUENCIES),
    ("rope_scaling_type", BY_HEAD | {"rope_scaling_type": "yarn", "original_seq_len": 512}),
]


@pytest.mark.parametrize(("named", "fields"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(named, fields):
    fields = {"num_layers": 6, "rope_percentage": 1.0} | fields
    value = fields.get(named, getattr(small(), named))
    assert refusal(small, **fields).startswith(f"config.model.{named}={value}"[:300])
