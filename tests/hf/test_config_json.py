"""config.json: what published ones lead to, what a run's says, and what is refused by name."""

import dataclasses
import json
import math
import re
import runpy

import numpy as np
import pytest
from support.commands import ROOT, refusal
from support.models import small
from support.runs import SIZES

from prope.config import resolve
from prope.hf import config_json
from prope.hf.families import ACTIVATIONS, FAMILIES, MODEL_FIELDS, choose_family
from prope.hf.layout import list_tensors
from prope.hf.rotation import write_rotations
from prope.parameters import count
from prope.spec.kinds import FULL, SLIDING
from prope.spec.model import ModelSpec
from prope.spec.run import Spec


def read(tmp_path, values):
    """(spec, fields) of a file with these values."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return config_json.from_hf(path)


def read_model(tmp_path, model_type, **fields):
    """The model of these fields, and for what the class has where none is."""
    return read(tmp_path, {"model_type": model_type} | fields)[0].model


def refuse(tmp_path, values, *names):
    """Reading ends in one line, which is returned: the file and all the names are in it."""
    line = refusal(lambda: read(tmp_path, values))
    assert line.startswith(f"{tmp_path}/config.json: ")
    assert all(name in line for name in names), line
    return line


# --- Published ones -----------------------------------------------------------------------------


# config.json of models on the Hub.
FILES = json.loads((ROOT / "tests/support/published.json").read_text())
GEMMA = {"activation": "gelu", "scale_embedding": True, "tied": True, "norm_epsilon": 1e-6}
LATER_GEMMA = GEMMA | {"post_norms": True}
GEMMA_2 = LATER_GEMMA | {"attention_softcap": 50.0, "final_softcap": 30.0}
GEMMA_3 = LATER_GEMMA | {"use_qk_norm": True, "local_max_wavelength": 1e4, "max_wavelength": 1e6}
GEMMA_4 = GEMMA_3 | {
    "attention_scale": 1.0,
    "final_softcap": 30.0,
    "global_head_dim": 512,
    "num_global_kv_heads": None,
    "use_value_norm": True,
    "use_skip_scale": True,
}
KEYS_ARE_VALUES = GEMMA_4 | {"global_key_is_value": True, "num_global_kv_heads": 4}
LLAMA = {"activation": "silu", "scale_embedding": False, "post_norms": False, "tied": True}
# By file: (parameters as the Hub shows them, windows of the layers, fields of config.model).
PUBLISHED = {
    "gemma-2b": (2_506_172_416, [None] * 18, GEMMA | {"max_wavelength": 1e4}),
    "gemma-2-2b": (2_614_341_888, [4096, None] * 13, GEMMA_2),
    "gemma-2-27b": (27_227_128_320, [4096, None] * 23, GEMMA_2 | {"attention_scale": 1 / 12}),
    "gemma-3-1b": (999_885_952, [*[512] * 5, None] * 4 + [512] * 2, GEMMA_3),
    "gemma-3-12b": (
        *(11_765_788_416 + 64 * 3840, [*[1024] * 5, None] * 8),
        GEMMA_3 | {"rope_scaling_type": "linear", "rope_scaling_factor": 8.0},
    ),
    # With layer_scalar, which is a buffer there.
    "gemma-4-E2B": (
        *(4_628_569_344 + 35, [*[512] * 4, None] * 7),
        GEMMA_4
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "per_layer_input_dim": 256},
    ),
    "gemma-4-12B": (
        *(11_907_350_272 + 48, [*[1024] * 5, None] * 8),
        KEYS_ARE_VALUES | {"num_global_kv_heads": 1},
    ),
    "gemma-4-31B": (30_697_345_280 + 60, [*[1024] * 5, None] * 10, KEYS_ARE_VALUES),
    "gemma-4-31B, as later versions write it": (
        *(30_697_345_280 + 60, [*[1024] * 5, None] * 10),
        KEYS_ARE_VALUES,
    ),
    "Llama-3.2-1B": (
        *(1_235_814_400, [None] * 16),
        LLAMA | {"rope_scaling_type": "llama3", "original_seq_len": 8192, "head_dim": 64},
    ),
    "SmolLM2-135M": (
        *(134_515_008, [None] * 30),
        LLAMA | {"norm_epsilon": 1e-5, "max_wavelength": 1e5, "head_dim": 64},
    ),
    "SmolLM3-3B": (3_075_098_624, [None] * 36, LLAMA | {"max_wavelength": 5e6}),
    "Qwen2.5-0.5B": (494_032_768, [None] * 24, LLAMA | {"qkv_bias": True}),
    "Qwen2.5-0.5B, as its page has it for long texts": (
        *(494_032_768, [None] * 24),
        {"rope_scaling_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "logit_scale": "yarn"},
    ),
    "Qwen3-0.6B": (596_049_920, [None] * 28, LLAMA | {"use_qk_norm": True, "head_dim": 128}),
    "Mistral-7B-v0.3": (7_248_023_552, [None] * 32, LLAMA | {"tied": False}),
    "Mistral-7B with absent fields": (7_248_023_552, [4096] * 32, LLAMA | {"tied": False}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_published_config_leads_to_its_model(tmp_path, name):
    values = FILES[name]
    parameters, windows, fields = PUBLISHED[name]
    spec, filled = read(tmp_path, values)
    model = spec.model
    tensors = list_tensors(model, FAMILIES[filled["model_type"]])
    assert sum(math.prod(tensor.shape) for tensor in tensors) == parameters
    assert count(model) == parameters
    assert [layer.window for layer in model.layers] == windows
    assert {name: getattr(model, name) for name in fields} == fields
    p = [1] * model.num_layers
    if values["model_type"] == "smollm3":
        p = [1, 1, 1, 0] * 9
    if values["model_type"].startswith("gemma4"):
        p = [0.25 if window is None else 1 for window in windows]
    assert [layer.rope_percentage for layer in model.layers] == p
    assert model.dtype == values.get("torch_dtype", "bfloat16")
    length = filled["max_position_embeddings"]
    assert spec.data.seq_len == values.get("max_position_embeddings", length)
    assert spec.eval.batch_size == max(1, 8192 // length)
    again, _ = read(tmp_path, config_json.to_hf(spec, model.dtype))
    assert again.model == model


# --- What the classes do with fields ------------------------------------------------------------


def test_full_layers_of_gemma_4_that_are_as_wide_as_the_others(tmp_path):
    alike = {"global_head_dim": 256, "num_global_key_value_heads": 16}
    absent = {"global_head_dim": None, "num_global_key_value_heads": 0}
    for fields in (alike, {"per_layer_config": {}} | absent):
        spec, _ = read(tmp_path, FILES["gemma-4-31B"]["text_config"] | fields)
        assert (spec.model.global_head_dim, spec.model.num_global_kv_heads) == (None, None)
    assert config_json.to_hf(spec, "float32")["global_head_dim"] == 256


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_activation_is_that_of_the_field_that_the_class_reads(tmp_path, model_type):
    used, unused = "hidden_act", "hidden_activation"
    if unused in FAMILIES[model_type].defaults:
        used, unused = unused, used
    for ours, theirs in ACTIVATIONS.items():
        assert read_model(tmp_path, model_type, **{used: theirs}).activation == ours
    default = read_model(tmp_path, model_type).activation
    other = ACTIVATIONS["silu" if default == "gelu" else "gelu"]
    refuse(tmp_path, {"model_type": model_type, unused: other}, unused, other, used)
    same = {unused: ACTIVATIONS[default]}
    assert read_model(tmp_path, model_type, **same).activation == default


def test_kinds_of_layers_by_the_rules_of_the_classes(tmp_path):
    """Gemma 2 alternates, and Gemma 4's last layer is full, whatever the file says."""
    for model_type, period in (("gemma2", 6), ("gemma3_text", 2)):
        model = read_model(tmp_path, model_type, sliding_window_pattern=period)
        assert model.layer_types == (SLIDING, FULL)
    for model_type in ("gemma4_text", "gemma4_unified_text"):
        model = read_model(tmp_path, model_type, num_hidden_layers=8)
        assert model.kinds == [*[SLIDING] * 5, FULL, SLIDING, FULL]
        types = {"num_hidden_layers": 3, "layer_types": [SLIDING] * 3}
        assert read_model(tmp_path, model_type, **types).kinds == [SLIDING, SLIDING, FULL]
    # Qwen's classes stop without use_sliding_window; SmolLM3's mask has the kinds of layer_types.
    types = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 4}
    for model_type, used in (("qwen2", True), ("qwen3", True), ("smollm3", False)):
        if used:
            refuse(tmp_path, {"model_type": model_type} | types, "use_sliding_window=false")
        model = read_model(tmp_path, model_type, use_sliding_window=used, **types)
        assert (model.layer_types, model.sliding_window) == ((SLIDING, FULL), 4)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_numbers_of_a_rotation(tmp_path, kind):
    """One that is absent has no default but the length, and one that is not known is named."""
    numbers = {"factor": 4}  # a float, whatever a file has
    if kind == "llama3":
        numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    written = {"rope_type": kind} | numbers
    values = {"model_type": "llama", "max_position_embeddings": 96}
    model = read_model(tmp_path, **values, rope_scaling=written)
    assert (model.rope_scaling_type, repr(model.rope_scaling_factor)) == (kind, "4.0")
    assert kind == "linear" or model.original_seq_len == 96
    if kind in ("yarn", "llama3"):
        written["original_max_position_embeddings"] = 48
        assert read_model(tmp_path, **values, rope_scaling=written).original_seq_len == 48
    for name in numbers:
        without = {other: written[other] for other in written.keys() - {name}}
        refuse(tmp_path, values | {"rope_scaling": without}, f"{kind} needs the numbers {name};")
        wrong = written | {name: "a", "mscale": 1.0}
        refuse(tmp_path, values | {"rope_scaling": wrong}, f"{kind} needs the numbers {name}; unk")


def test_rotations_by_kind_of_layer_and_of_older_files(tmp_path):
    full = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}
    fields = {"rope_parameters": {FULL: full}, "max_position_embeddings": 96}
    fields |= {"num_hidden_layers": 1, "layer_types": [FULL]}
    assert read_model(tmp_path, "gemma3_text", **fields).original_seq_len == 96
    for name in ("rope_parameters", "rope_scaling"):
        rope = {"type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        model = read_model(tmp_path, "gemma", **{name: rope})
        assert (model.rope_percentage, model.max_wavelength) == (0.25, 1e6)
        model = read_model(tmp_path, "gemma", **{name: {"rope_type": "default", "rope_theta": 1e5}})
        assert (model.rope_percentage, model.max_wavelength) == (1.0, 1e5)


@pytest.mark.parametrize("share", [0, 0.0, 0.25, 1])
def test_a_share_of_the_whole_file_is_that_of_every_rotation(tmp_path, share):
    """Zero is a value, in every form; a rotation's own share goes first."""
    rope = {"rope_type": "proportional", "rope_theta": 1e6}
    fields = {"partial_rotary_factor": share}
    for name in ("rope_parameters", "rope_scaling"):
        assert read_model(tmp_path, "llama", **fields, **{name: rope}).rope_percentage == share
    both = {"rope_parameters": {FULL: rope, SLIDING: rope | {"partial_rotary_factor": 0.5}}}
    for model_type in ("gemma3_text", "gemma4_text"):
        model = read_model(tmp_path, model_type, **fields, **both)
        assert (model.rope_percentage, model.local_rope_percentage) == (share, 0.5)
    if share != 1:
        values = {"model_type": "llama", "rope_theta": 1e4} | fields
        refuse(tmp_path, values, f"partial_rotary_factor={share}")


SMOLLM_3 = FILES["SmolLM3-3B"]
CARD = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize(
    ("fields", "rotated", "windows"),
    [
        ({}, [1, 1, 1, 0] * 9, [None] * 36),
        ({"no_rope_layers": [0, 1] * 18}, [0, 1] * 18, [None] * 36),
        ({"use_sliding_window": True, "sliding_window": 9}, [1, 1, 1, 0] * 9, [*[None] * 3, 9] * 9),
        ({"no_rope_layers": [0] * 36}, [0] * 36, [None] * 36),
    ],
)
def test_yarn_in_smollm3_is_of_the_layers_that_rotate(tmp_path, fields, rotated, windows):
    """As its card has it for long texts: nothing multiplies the logits of the others."""
    values = SMOLLM_3 | {"rope_scaling": CARD, "max_position_embeddings": 131072} | fields
    spec, _ = read(tmp_path, values)
    layers = spec.model.layers
    assert [layer.window for layer in layers] == windows
    scales = [layer.logit_scale for layer in layers]
    expected = [(0.1 * math.log(2) + 1) ** 2 if rotates else 1 for rotates in rotated]
    np.testing.assert_allclose(scales, expected, rtol=1e-12)
    assert [layer.num_rotated > 0 for layer in layers] == list(map(bool, rotated))
    if any(rotated):
        again, _ = read(tmp_path, config_json.to_hf(spec, "float32"))
        assert again.model == dataclasses.replace(spec.model, dtype="float32")


def test_a_scaled_rotation_of_windows_is_still_refused(tmp_path):
    fields = {"rope_scaling": CARD, "layer_types": [SLIDING] * 36, "sliding_window": 9}
    refuse(tmp_path, SMOLLM_3 | fields, "scales no layers with a window")


def test_the_outer_ids_of_a_model_of_images_are_kept(tmp_path):
    whole = FILES["gemma-3-12b"]
    text = whole["text_config"] | {"eos_token_id": 1, "bos_token_id": 2}
    for outer, expected in (([1, 106], [1, 106]), (None, 1)):
        _, values = read(tmp_path, whole | {"text_config": text, "eos_token_id": outer})
        assert (values["eos_token_id"], values["bos_token_id"]) == (expected, 2)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


# --- What import refuses ------------------------------------------------------------------------


def rope(**fields):
    return {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4} | fields}


def yarn(**fields):
    return {"rope_parameters": YARN | fields}


GEMMA_2B, GEMMA_2_2B, GEMMA_3_1B = (FILES[f"gemma-{name}"] for name in ("2b", "2-2b", "3-1b"))
GEMMA_3_12B = FILES["gemma-3-12b"]
GEMMA_4_E2B, GEMMA_4_31B = (FILES[f"gemma-4-{name}"]["text_config"] for name in ("E2B", "31B"))
FULL_LAYERS = FILES["gemma-4-31B, as later versions write it"]["per_layer_config"]
TEXT = GEMMA_3_12B["text_config"]
UNSET = {
    "attention_bias": True,
    "mlp_bias": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "residual_multiplier": 0.2,
    "num_experts": 8,
    "enable_moe_block": True,
    "use_bidirectional_attention": True,
    "quantization_config": {"bits": 4},
}
# (a file, what is edited in it, what the line names; by default every edited field and its value).
REFUSED = [
    (GEMMA_2B, UNSET),
    (GEMMA_2B, {"model_type": "gpt2"}),
    (GEMMA_2B, {"layer_types": ["linear_attention", FULL]}),
    (GEMMA_2B, {"vocab_size": "3", "num_hidden_layers": 2.0, "num_attention_heads": 0}),
    (GEMMA_2B, {"head_dim": 63}),
    (GEMMA_2B, rope(rope_type="longrope", factor=2.0), "rope_type", "longrope"),
    (GEMMA_2B, rope(factor=8.0), '"factor": 8.0'),
    (GEMMA_2B, rope(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
    (GEMMA_2B, rope(rope_theta=1.0), "max_wavelength=1.0"),
    (GEMMA_2B, rope() | {"rope_scaling": {"type": "default"}}, "rope_scaling=", "rope_parameters="),
    (
        *(GEMMA_2B, yarn(attention_factor=2, truncate=0, factor="4")),
        *("factor", "truncate", "attention_f"),
    ),
    (GEMMA_2B, yarn(factor=0.5), "rope_scaling_factor=0.5"),
    (GEMMA_2B, yarn(original_max_position_embeddings=64.5), "max_position_embeddings=64.5"),
    (GEMMA_2B, yarn(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (GEMMA_3_1B, {"rms_norm_eps": None, "rope_parameters": {"rope_theta": 1e4}}),
    (GEMMA_2_2B, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    (GEMMA_3_12B, {"text_config": {"model_type": "siglip"}}),
    (
        *(GEMMA_3_12B, {"text_config": TEXT | {"attn_logit_softcapping": 50.0}}),
        "attn_logit_softcapping=50.0",
    ),
    (GEMMA_4_E2B, {"use_bidirectional_attention": "all"}),
    (GEMMA_4_E2B, {"vocab_size_per_layer_input": 262208}),
    (GEMMA_4_E2B, {"num_kv_shared_layers": -1}),
    (GEMMA_4_31B, {"per_layer_config": FULL_LAYERS | {"5": {"head_dim": 256}}}),
    (GEMMA_4_31B, {"per_layer_config": {"5": {"sliding_window": 4}}}),
    (GEMMA_4_31B, {"rope_parameters": {FULL: {"rope_type": "default"}}}, "rope_theta=null"),
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_all_that_is_not_computed_is_named_at_once(tmp_path, case):
    values, edits, *names = case
    refuse(tmp_path, values | edits, *names or [f"{n}={json.dumps(v)}" for n, v in edits.items()])


# By field, the values among those below that are right.
POSITIVE = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window_pattern",
    "no_rope_layer_interval",
)
BOOLEAN = ("tie_word_embeddings", "use_sliding_window", "attention_k_eq_v", "use_double_wide_mlp")
RIGHT = dict.fromkeys(POSITIVE, 0.5) | dict.fromkeys(BOOLEAN, True)
OTHERS = ("hidden_act", "hidden_activation", "rope_scaling", "rope_parameters", "model_type")
USED = {
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "no_rope_layers": [0, 1, 1] * 2,
    "attention_k_eq_v": True,
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_value_of_another_type_is_one_line(tmp_path, model_type):
    family = FAMILIES[model_type]
    used = {name: value for name, value in USED.items() if name in family.defaults}
    assert read_model(tmp_path, model_type, **used)
    for field in {*family.defaults, *OTHERS}:
        is_rope = field in ("rope_scaling", "rope_parameters")
        for value in (0.5, "a", ["a"], [["a"]], {"a": 1}, {"a": ["b"]}, True):
            right = RIGHT.get(field)
            if type(value) is not type(right) or value != right:
                line = refuse(tmp_path, {"model_type": model_type} | used | {field: value})
                assert f"{field}=" in line or (is_rope and re.search("rotation|rope_para", line))


def test_whether_qwen_has_windows_is_read_where_its_layers_are_too_few_for_them(tmp_path):
    fields = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": "x"}
    refuse(tmp_path, fields, 'use_sliding_window="x"')


@pytest.mark.parametrize("field", ["rope_type", "type", "factor", "partial_rotary_factor"])
def test_a_value_of_another_type_in_a_rotation_is_one_line(tmp_path, field):
    for value in ("a", ["a"], {"a": 1}, None):
        written = {"rope_type": "linear", "factor": 2.0} | {field: value}
        for name in ("rope_scaling", "rope_parameters"):
            refuse(tmp_path, {"model_type": "llama", name: written}, json.dumps(value))


# --- What a run's config.json says --------------------------------------------------------------

# By the beginning of a page's name; Gemma for the others.
CLASSES = {
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "smollm2": "Llama",
    "smollm3": "SmolLM3",
    "conversion_smollm2": "Llama",
    "conversion": "Gemma3",
}
PAGES = {file.stem for file in (ROOT / "configs").glob("*.py")} - {"families"}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_class_of_every_page_of_configs(page):
    spec = resolve(runpy.run_path(str(ROOT / "configs" / f"{page}.py"))["get_config"]())
    if page in ("rnope_swa", "longcontext", "unrotated_or_fast"):
        line = refusal(lambda: config_json.to_hf(spec, "float32"))
        assert "no class of transformers" in line
    else:
        name = next((CLASSES[start] for start in CLASSES if page.startswith(start)), "Gemma")
        values = config_json.to_hf(spec, "float32")
        assert values["architectures"] == [f"{name}ForCausalLM"]


def written_rope(p=1.0, **fields):
    """rope_parameters of such a model."""
    model = ModelSpec(**SIZES | {"rope_percentage": float(p)} | fields)
    return config_json.to_hf(Spec(model=model), "float32")["rope_parameters"]


@pytest.mark.parametrize("d", [2, 44, 256])
def test_a_hard_clip_keeps_its_pairs(d):
    """p = C / P alone would lose one, as at d = 44 and C = 15."""
    for n in range(d // 2 + 1):
        rope = written_rope(rope_type="hard_clip", clip_low_n=n, head_dim=d)
        assert rope["rope_type"] == "proportional"
        assert int(rope["partial_rotary_factor"] * d // 2) == d // 2 - n


def test_no_pair_is_a_share_above_zero(tmp_path):
    """vLLM refuses 0."""
    values = config_json.to_hf(Spec(model=ModelSpec(**SIZES | {"rope_percentage": 0.0})), "float32")
    share = values["rope_parameters"]["partial_rotary_factor"]
    assert share > 0 and int(share * 512 // 2) == 0
    assert read(tmp_path, values)[0].model.rope_percentage == 0


@pytest.mark.parametrize(
    ("layer_types", "local", "period"),
    [
        ((SLIDING, SLIDING, FULL), 1.0, 3),
        ((FULL,), None, 1),
        ((SLIDING, FULL), 0.5, 8),  # MLX rotates all, and stops at 8 of 7 layers
        ((FULL, SLIDING), 1.0, 8),
        ((SLIDING,), 1.0, 8),
    ],
)
def test_the_pattern_of_gemma_3_is_one_of_which_its_readers_compute_the_same(
    layer_types, local, period
):
    fields = {"layer_types": layer_types, "local_rope_percentage": local, "num_layers": 7}
    fields |= {"sliding_window": 17} if SLIDING in layer_types else {}
    sizes = SIZES | {"post_norms": True, "use_qk_norm": True, "rope_percentage": 0.25} | fields
    values = config_json.to_hf(Spec(model=ModelSpec(**sizes)), "float32")
    assert values["model_type"] == "gemma3_text"
    assert values.get("sliding_window_pattern") == period


def test_the_divisors_of_longrope():
    rope = written_rope(head_dim=16, rope_type="cope", clip_low_n=4)
    freqs = 1e4 ** (-np.arange(8) / 8) / np.array(rope["short_factor"])
    expected = [1, 10**-0.5, 0.1, 10**-1.5, 0.01, 0.002371708245, 0.00025, 0]
    np.testing.assert_allclose(freqs, expected, rtol=1e-9, atol=1e-29)
    assert rope["long_factor"] == rope["short_factor"] and rope["attention_factor"] == 1
    json.dumps(rope, allow_nan=False)


WINDOWS = {"layer_types": (SLIDING, FULL), "sliding_window": 17}
SCALED = {"rope_scaling_factor": 4.0, "original_seq_len": 128}
YARN_RUN = SCALED | {"rope_scaling_type": "yarn", "rope_percentage": 1.0}
DYNAMIC = SCALED | {"rope_scaling_type": "dynamic"}
DROPE = {"logit_scale": "drope", "logit_scale_coefficient": 0.4, "rope_scaling_factor": 4.0}
QWEN = {"scale_embedding": False, "use_qk_norm": True}
GEMMA_4_RUN = {
    "post_norms": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "attention_scale": 1.0,
    "global_head_dim": 64,
    "layer_types": (FULL, SLIDING),
    "sliding_window": 4,
}
LAST_FULL = {"layer_types": (SLIDING, SLIDING, FULL)}


# (Fields of config.model, what the line names, the nearest class).
@pytest.mark.parametrize(
    ("fields", "named", "nearest"),
    [
        ({"attention_scale": 0.7}, "attention_scale=0.7", "Gemma"),
        ({"use_qk_norm": True}, "use_qk_norm=True", "Gemma"),
        (WINDOWS, "layer_types=('sliding_attention', 'full_attention')", "Gemma"),
        (QWEN | {"rope_percentage": (1.0, 0.25, 1.0)}, "rope_percentage=(1.0, 0.25, 1.0)", "Qwen3"),
        (QWEN | WINDOWS | {"local_max_wavelength": 500.0}, "local_max_wavelength=500.0", "Qwen3"),
        (QWEN | WINDOWS | YARN_RUN, "rope_scaling_type=yarn", "Qwen3"),
        (QWEN | WINDOWS | DROPE, "logit_scale=drope", "Qwen3"),
        ({"post_norms": True, "scale_embedding": False}, "scale_embedding=False", "Gemma2"),
        ({"per_layer_input_dim": 8}, "per_layer_input_dim=8", "Gemma"),
        (GEMMA_4_RUN | {"layer_types": (SLIDING, FULL)}, "layer_types", "Gemma4"),
        (GEMMA_4_RUN | LAST_FULL | {"attention_scale": None}, "attention_scale", "Gemma4"),
        (GEMMA_4_RUN | LAST_FULL | {"num_global_kv_heads": 1}, "num_global_kv", "Gemma4"),
        (DYNAMIC, "rope_scaling_type=dynamic", None),
        (DYNAMIC | {"rope_type": "partial"}, "rope_scaling_type=dynamic", None),
    ],
)
def test_what_no_class_computes_is_not_exported(fields, named, nearest):
    model = small(**fields)
    line = refusal(lambda: choose_family(model, write_rotations(model)))
    assert f"config.model.{named}" in line
    assert nearest is None or f"nearest, {nearest}ForCausalLM, computes " in line


@pytest.mark.parametrize("value", [(0.5, 1.0), 0.25, 0, False])
def test_a_field_that_export_does_not_know_is_not_left_out(value):
    """A variant of a reader's own, such as p by head; zero is a value, too."""
    assert {field.name for field in dataclasses.fields(ModelSpec)} <= MODEL_FIELDS
    fields = [("head_percentages", object | None, None)]
    variant = dataclasses.make_dataclass("Variant", fields, bases=(ModelSpec,), frozen=True)
    spec = Spec(model=variant(head_percentages=value))
    line = refusal(lambda: config_json.to_hf(spec, "float32"))
    assert f"config.model.head_percentages={value}: " in line
    assert config_json.to_hf(Spec(model=variant()), "float32")["model_type"] == "gemma"
