"""What neither export nor import does, and what it says: one line, and nothing is left behind."""

import functools
import json
import re
import shutil
import types

import jax.numpy as jnp
import numpy as np
import pytest
from support.exchange import (
    GEMMA_2_2B,
    GEMMA_3_1B,
    GEMMA_3_12B,
    GEMMA_4_31B,
    GEMMA_4_E2B,
    edit,
    save,
    stored,
)
from support.models import small

from prope.errors import UsageError
from prope.hf import config_json, layout
from prope.hf import exporter as export_hf
from prope.hf import importer as import_hf
from prope.hf.families import ACTIVATIONS, FAMILIES, IMPORTED, choose_family
from prope.hf.rotation import write_rotations
from prope.stack.layers import layer_kinds


def refused(tmp_path, expected, source=None, workdir="back", **arguments):
    """The import ends in one line that matches, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=expected) as error:
        import_hf.import_run(source or tmp_path / "hf", tmp_path / workdir, **arguments)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def rope(**fields):
    return {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4} | fields,
        "rope_scaling": None,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "gpt2"}, 'model_type="gpt2": only "gemma" or "gemma2" or .* choose'),
        ({"model_type": ["gemma"]}, r'model_type=\["gemma"\]: only "gemma" or'),
        ({"model_type": None}, "model_type=null: only"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: only null or false"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: only null or false"),
        ({"hidden_act": "relu"}, "only gelu_pytorch_tanh or silu, the same in all fields"),
        ({"hidden_act": "silu"}, "only gelu_pytorch_tanh or silu, the same in all fields"),
        ({"hidden_activation": "gelu"}, "only gelu_pytorch_tanh or silu, the same"),
        ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps="1e-5": must be a positive number'),
        ({"attention_bias": True}, "attention_bias=true: only null or false"),
        ({"mlp_bias": True}, "mlp_bias=true: only null or false"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2: only null or false"),
        ({"num_experts": 8}, "num_experts=8: only null or false"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            r'layer_types=\["linear_attention", .*: GemmaForCausalLM has full_attention',
        ),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings="no": only true or false'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=false needs lm_head.weight, .* true"),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=true: only null or false",
        ),
        ({"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4}: only null'),
        ({"head_dim": "64"}, 'head_dim="64": must be a positive integer'),
        ({"head_dim": None}, r"has shape .*.* config.json leads to \(256, 48\)"),
        (
            {"num_hidden_layers": 2.0, "vocab_size": "3"},
            'vocab_size="3": must be a positive integer; num_hidden_layers=2.0: must be a',
        ),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a positive integer"),
        ({"head_dim": 63}, "head_dim=63: must be even"),
        (
            rope(rope_type="longrope", factor=2.0),
            '"rope_type": "longrope".*only rope_type default, proportional with',
        ),
        (rope(rope_type="yarn"), '"rope_type": "yarn".*: yarn needs the numbers factor'),
        (rope(factor=8.0), '"factor": 8.0.*only .*proportional with factor 1'),
        (rope(full_attention={}), ": unknown with proportional: full_attention"),
        (
            rope(partial_rotary_factor=1.5),
            r"partial_rotary_factor=1.5: must be a fraction in \[0, 1\]",
        ),
        (rope(partial_rotary_factor="all"), 'partial_rotary_factor="all": must be a fraction'),
        (
            rope(rope_type="default", partial_rotary_factor=0.5),
            "partial_rotary_factor=0.5: .* and 1 with default",
        ),
        (rope(rope_theta=None), "rope_theta=null: must be a number"),
        ({"rope_scaling": "linear"}, 'the rotation is "linear": must be an object'),
        (rope(rope_theta=1.0), "max_wavelength=1.0: must be greater than 1"),
        (
            {"rope_scaling": {"rope_type": "default"}},
            "rope_scaling=.* and rope_parameters=.* differ",
        ),
        (
            {"vocab_size": 200},
            "vocab_size=200, but the tokenizer byte has 260 ids; give --tokenizer=PATH",
        ),
        (
            {"bos_token_id": 1},
            "bos_token_id=1, but the tokenizer byte has 2; give --tokenizer=PATH",
        ),
        ({"eos_token_id": [5, 6]}, r"eos_token_id=\[5, 6\], but the tokenizer byte has 1"),
        ({"hidden_size": 50}, r"has shape \(300, 48\).* config.json leads to \(300, 50\)"),
        (
            {"num_hidden_layers": 3},
            "missing tensors: model.layers.2.input_layernorm.weight, .* and 6 more",
        ),
        (
            {"num_hidden_layers": 1},
            "unknown tensors: model.layers.1.input_layernorm.weight, .* and 6 more",
        ),
    ],
)
def test_a_config_that_would_be_loaded_wrongly(tmp_path, exported, fields, expected):
    if "vocab_size" in fields:  # the tensors agree, the tokenizer does not
        save(
            exported,
            stored(exported) | {"model.embed_tokens.weight": np.zeros((200, 48), np.float32)},
        )
    edit(exported, **fields)
    refused(tmp_path, re.escape(str(exported)) + ".*" + expected)


ONLY = " or ".join(f'"{model_type}"' for model_type in IMPORTED)
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
FULL_LAYERS = {str(number): {"head_dim": 512} for number in range(5, 60, 6)}
GEMMA_3_4B = GEMMA_3_12B["text_config"]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (
            {"model_type": "gemma3n", "num_kv_shared_layers": 10, "num_experts": 4},
            f'model_type="gemma3n": only {ONLY}; num_kv_shared_layers=10: only null or false; '
            "num_experts=4: only null or false",
        ),
        (  # EmbeddingGemma, with a rotation that is not known
            GEMMA_3_1B | {"use_bidirectional_attention": True, "rope_scaling": {"type": "su"}},
            "use_bidirectional_attention=true: only null or false; the rotation is ",
        ),
        (
            GEMMA_3_1B | {"layer_types": ["full_attention"] * 25 + ["linear_attention"]},
            "layer_types=[",
        ),
        (
            GEMMA_3_1B | {"rms_norm_eps": None, "rope_parameters": {"rope_theta": 1e4}},
            'rms_norm_eps=null: must be a positive number; rope_parameters={"rope_theta"',
        ),
        (GEMMA_2_2B | {"sliding_window": None}, "sliding_window=null: must be a positive integer"),
        (GEMMA_2_2B | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "the rotation is "),
        (
            GEMMA_3_12B | {"text_config": None},
            "text_config=null: must be the fields of a gemma3_text",
        ),
        (GEMMA_3_12B | {"text_config": {"model_type": "siglip"}}, "text_config={"),
        (
            GEMMA_3_12B | {"text_config": GEMMA_3_4B | {"attn_logit_softcapping": 50.0}},
            "attn_logit_softcapping=50.0: only null",
        ),
        (  # 26B-A4B; the fields in the order of its file
            {"model_type": "gemma4", "text_config": GEMMA_4_31B | EXPERTS},
            "enable_moe_block=true: only null or false; moe_intermediate_size=704: only null or "
            "false; num_experts=128: only null or false; top_k_experts=8: only null or false",
        ),
        (GEMMA_4_E2B | {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention="all"'),
        (GEMMA_4_E2B | {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        (GEMMA_4_E2B | {"vocab_size_per_layer_input": 262208}, "vocab_size_per_layer_input=262208"),
        (GEMMA_4_E2B | {"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1: must be an integer"),
        (GEMMA_4_31B | {"global_head_dim": None}, "global_head_dim=null: must be an integer of"),
        (GEMMA_4_31B | {"per_layer_config": {"4": FULL_LAYERS["5"]}}, "per_layer_config={"),
        (
            GEMMA_4_31B | {"per_layer_config": FULL_LAYERS | {"5": {"head_dim": 256}}},
            "per_layer_config={",
        ),
        (GEMMA_4_31B | {"per_layer_config": {"5": {"sliding_window": 4}}}, "per_layer_config={"),
        (
            GEMMA_4_31B | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_theta=null: must be a number",
        ),
    ],
)
def test_all_that_is_not_computed_is_named_at_once(tmp_path, values, names):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    remedy = "; choose a checkpoint without it: prope/hf/README.md says which are imported"
    refused(tmp_path, f"^{re.escape(f'{tmp_path}/hf/config.json: {names}')}.*{remedy}$")


def read(tmp_path, model_type, **fields):
    """config.model and config.json's fields, for these and what the class has where none is."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type} | fields))
    config, values = config_json.from_hf(path)
    return config.model, values


def not_read(tmp_path, expected, model_type, **fields):
    with pytest.raises(UsageError, match=expected) as error:
        read(tmp_path, model_type, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", IMPORTED)
def test_the_activation_is_that_of_the_field_that_the_class_reads(tmp_path, model_type):
    fields = ["hidden_act", "hidden_activation"]
    if FAMILIES[model_type].activation_field == "hidden_activation":
        fields.reverse()
    used, unused = fields
    for ours, theirs in ACTIVATIONS.items():
        assert read(tmp_path, model_type, **{used: theirs})[0].activation == ours
    default = read(tmp_path, model_type)[0].activation
    other = ACTIVATIONS["silu" if default == "gelu" else "gelu"]
    expected = f"{unused}=.*{other}.*ForCausalLM reads {used}=.*{ACTIVATIONS[default]}"
    not_read(tmp_path, expected, model_type, **{unused: other})
    same = {unused: ACTIVATIONS[default]}
    assert read(tmp_path, model_type, **same)[0].activation == default


def test_the_activation_of_gemma_1s_releases(tmp_path):
    for hidden_activation in (None, "gelu_pytorch_tanh"):
        fields = {"hidden_act": "gelu", "hidden_activation": hidden_activation}
        assert read(tmp_path, "gemma", **fields)[0].activation == "gelu"


def test_gemma_2_alternates_whatever_its_file_says(tmp_path):
    model, _ = read(tmp_path, "gemma2", sliding_window_pattern=6)
    assert model.layer_types == ("sliding_attention", "full_attention")
    model, _ = read(tmp_path, "gemma3_text", sliding_window_pattern=2)
    assert model.layer_types == ("sliding_attention", "full_attention")


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
def test_gemma_4s_last_layer_is_full_whatever_its_file_says(tmp_path, model_type):
    local = ["sliding_attention"]
    full = ["full_attention"]
    model, _ = read(tmp_path, model_type, num_hidden_layers=8)
    assert layer_kinds(model) == [*local * 5, *full, *local, *full]
    model, _ = read(tmp_path, model_type, num_hidden_layers=3, layer_types=local * 3)
    assert layer_kinds(model) == local * 2 + full


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3"])
def test_sliding_layers_without_windows(tmp_path, model_type):
    """Qwen's classes stop; SmolLM3's mask has the kinds of layer_types."""
    fields = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    }
    if model_type != "smollm3":
        expected = "use_sliding_window=false: must be true: some layers are sliding_attention"
        not_read(tmp_path, expected, model_type, **fields)
        fields["use_sliding_window"] = True
    model, _ = read(tmp_path, model_type, **fields)
    assert (model.layer_types, model.sliding_window) == (tuple(fields["layer_types"]), 4)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_numbers_of_a_rotation(tmp_path, kind):
    """One that is absent has no default but the length, and one that is not known is named."""
    numbers = {"factor": 4.0}
    if kind == "llama3":
        numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    read_numbers = functools.partial(read, tmp_path, "llama", max_position_embeddings=96)
    written = {"rope_type": kind} | numbers
    model, _ = read_numbers(rope_scaling=written)
    assert model.rope_scaling_type == kind
    assert model.rope_scaling_factor == 4
    if kind != "linear":
        assert model.original_seq_len == 96
    if kind in ("yarn", "llama3"):
        written["original_max_position_embeddings"] = 48
        assert read_numbers(rope_scaling=written)[0].original_seq_len == 48
    for name in numbers:
        without = {other: written[other] for other in written.keys() - {name}}
        expected = f"{kind} needs the numbers {name}; choose"
        not_read(tmp_path, expected, "llama", rope_scaling=without)
        wrong = written | {name: "a", "mscale": 1.0}
        expected = f"{kind} needs the numbers {name}; unknown with {kind}: mscale;"
        not_read(tmp_path, expected, "llama", rope_scaling=wrong)


def test_the_original_length_by_kind_of_layer(tmp_path):
    full = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}
    fields = {"rope_parameters": {"full_attention": full}, "max_position_embeddings": 96}
    fields |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert read(tmp_path, "gemma3_text", **fields)[0].original_seq_len == 96


def test_the_outer_ids_of_a_model_of_images_are_kept(tmp_path):
    text = GEMMA_3_4B | {"eos_token_id": 1, "bos_token_id": 2}
    _, values = read(tmp_path, **GEMMA_3_12B | {"text_config": text})
    assert (values["eos_token_id"], values["bos_token_id"]) == ([1, 106], 2)
    _, values = read(tmp_path, **GEMMA_3_12B | {"text_config": text, "eos_token_id": None})
    assert values["eos_token_id"] == 1


NUMBERS = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"),
    *("sliding_window_pattern", "no_rope_layer_interval"),
)
BOOLEANS = (
    *("tie_word_embeddings", "use_sliding_window"),
    *("attention_k_eq_v", "use_double_wide_mlp"),
)
OTHERS = ("hidden_act", "hidden_activation", "rope_scaling", "rope_parameters", "model_type")
USED = {
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
    "no_rope_layers": [0, 1, 1] * 2,
    "attention_k_eq_v": True,
}


@pytest.mark.parametrize("model_type", IMPORTED)
def test_a_value_of_another_type_is_one_line(tmp_path, model_type):
    family = FAMILIES[model_type]
    used = {name: value for name, value in USED.items() if family.reads(name)}
    assert read(tmp_path, **used | {"model_type": model_type})
    named = dict.fromkeys(("rope_scaling", "rope_parameters"), "the rotation is|rope_parameters=")
    for field in {*family.defaults, *OTHERS}:
        for value in (0.5, "a", ["a"], [["a"]], {"a": 1}, {"a": ["b"]}, True):
            is_right = (field in NUMBERS and value == 0.5) or (field in BOOLEANS and value is True)
            if not is_right:
                fields = {"model_type": model_type} | used | {field: value}
                not_read(tmp_path, named.get(field, f"{field}="), **fields)


@pytest.mark.parametrize("field", ["rope_type", "type", "factor", "partial_rotary_factor"])
@pytest.mark.parametrize("value", ["a", ["a"], {"a": 1}, None])
def test_a_value_of_another_type_in_a_rotation_is_one_line(tmp_path, field, value):
    written = {"rope_type": "linear", "factor": 2.0} | {field: value}
    for name in ("rope_scaling", "rope_parameters"):
        not_read(tmp_path, "the rotation is |partial_rotary_factor=", "llama", **{name: written})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model.norm.weight": None}, "missing tensors: model.norm.weight;"),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(256)},
            "unknown tensors: .*q_proj.bias;",
        ),
        (
            {"model.layers.1.pre_feedforward_layernorm.weight": np.zeros(48)},
            "unknown tensors: .*1.pre_feedforward_",
        ),
        (
            {"lm_head.weight": np.zeros((300, 48), np.float32)},
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        (
            {"lm_head.weight": np.zeros((48, 300), np.float32)},
            r"lm_head.weight has shape \(48, 300\)",
        ),
        (
            {"model.norm.weight": np.zeros(47, np.float32)},
            r"norm.weight has shape \(47,\) .* leads to \(48,\)",
        ),
        (
            {"model.norm.weight": np.zeros(48, np.int8)},
            "norm.weight has dtype I8, not one of F32 BF16 F16 F64; load it with transformers",
        ),
        (
            {"model.layers.0.mlp.down_proj.weight": np.zeros((48, 96), jnp.float8_e4m3fn)},
            "down_proj.weight has dtype F8_E4M3, not .*, dequantized",
        ),
        (
            {"language_model.model.norm.weight": np.zeros(48, np.float32)},
            "model.norm.weight is there twice; remove one",
        ),
    ],
)
def test_tensors_that_would_be_loaded_wrongly(tmp_path, exported, change, expected):
    tensors = stored(exported) | change
    save(exported, {name: value for name, value in tensors.items() if value is not None})
    refused(tmp_path, expected)


def test_a_gguf_file_is_told_how_to_be_read(tmp_path):
    folder = tmp_path / "gguf"
    folder.mkdir()
    file = folder / "tiny.gguf"
    file.write_bytes(b"GGUF")
    expected = "tiny.gguf is a GGUF file, which is not read; .*dequantize=True.*--input=DIR$"
    for source in (folder, file):
        refused(tmp_path, f"--input={re.escape(str(source))}: {expected}", source)


def test_a_checkpoint_whose_head_and_config_disagree(tmp_path, exported):
    tensors = stored(exported)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save(exported, tensors | head)
    refused(tmp_path, "tie_word_embeddings is true; set it to false if")
    edit(exported, tie_word_embeddings=False)
    import_hf.import_run(exported, tmp_path / "untied")
    save(exported, tensors)
    refused(tmp_path, "tie_word_embeddings=false needs lm_head.weight, which is missing; if")


def test_tensors_that_are_not_whole(tmp_path, exported):
    weights = exported / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:100], b""):
        weights.write_bytes(content)
        refused(tmp_path, "model.safetensors: not a whole safetensors file .*; download it again")
    weights.unlink()
    neither = "has neither model.safetensors nor model.safetensors.index.json"
    refused(tmp_path, f"{neither}; .*save_pretrained")


def test_shards_that_are_not_whole(tmp_path, exported):
    names = list(stored(exported))
    (exported / "model.safetensors").rename(exported / "a.safetensors")
    index = exported / "model.safetensors.index.json"
    for content, expected in (
        (dict.fromkeys(names, "b.safetensors"), "names the shard b.safetensors, which is not"),
        (dict.fromkeys(set(names) - {"model.norm.weight"}, "a.safetensors"), "others: model.norm"),
        (dict.fromkeys([*names, "more"], "a.safetensors"), "its tensors are others: more;"),
        (None, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": content}))
        refused(tmp_path, expected)
    index.write_text("{")
    refused(tmp_path, "index.json: not readable as JSON")


@pytest.mark.parametrize("ids", [[1, 300], [1, -1], [1, "2"], [1, 2.0]])
def test_an_end_that_is_no_id(tmp_path, exported, ids):
    (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    refused(tmp_path, "eos_token_id=.*: must be ids below vocab_size=300; restore")


def test_a_config_that_is_not_there(tmp_path, exported):
    (exported / "config.json").write_text("[]")
    refused(tmp_path, "config.json: holds no JSON object")
    (exported / "config.json").unlink()
    refused(tmp_path, "config.json: cannot be read: No such file")


def test_tokenizers_of_an_import(tmp_path, exported, sentencepiece_model):
    (exported / "vocab.json").write_text("{}")
    no_file = "has neither tokenizer.json nor tokenizer.model, and vocab.json is not read; load it"
    refused(tmp_path, no_file)
    refused(tmp_path, "none.model: cannot be read", tokenizer="none.model")
    result = import_hf.import_run(exported, tmp_path / "bytes", tokenizer="byte")
    assert result["tokenizer"] == "byte"
    result = import_hf.import_run(exported, tmp_path / "named", tokenizer=sentencepiece_model)
    assert result["tokenizer"] == str(tmp_path / "named" / "tokenizer")
    assert [file.name for file in (tmp_path / "named" / "tokenizer").iterdir()] == [
        "tokenizer.model"
    ]
    shutil.copy(sentencepiece_model, exported / "tokenizer.model")
    result = import_hf.import_run(exported, tmp_path / "there")
    assert result["tokenizer"] == str(tmp_path / "there" / "tokenizer")
    assert import_hf.import_run(exported, tmp_path / "both", tokenizer=sentencepiece_model)
    differs = "--tokenizer=byte: .*tokenizer.model is there and is another one"
    refused(tmp_path, differs, tokenizer="byte")


def export_refused(tmp_path, name, expected):
    with pytest.raises(UsageError, match=expected):
        export_hf.export(tmp_path / "run", tmp_path / name)


def test_what_is_there_is_left_alone(tmp_path, exported):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    export_refused(tmp_path, "hf", "--output=.*hf: is there already, and is not overwritten")
    refused(tmp_path, "--workdir=.*run: is there already", workdir="run")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    (tmp_path / "file").write_text("")
    refused(tmp_path, "--workdir=.*file/back: cannot be made: Not a directory", workdir="file/back")
    empty = tmp_path / "empty"
    empty.mkdir()
    export_hf.export(tmp_path / "run", empty)
    for path, content in before.items():
        assert (empty / path.name).read_bytes() == content
    (tmp_path / "new.part").mkdir()
    export_refused(tmp_path, "new", "new.part: another process writes there, or one was killed")


GEMMA_4 = {
    "post_norms": True,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
    "attention_scale": 1.0,
    "global_head_dim": 64,
    "layer_types": ("full_attention", "sliding_attention"),
    "sliding_window": 4,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"attention_scale": 0.7}, "attention_scale=0.7: .* nearest, GemmaForCausalLM, would"),
        ({"attention_softcap": 0.5}, "attention_softcap=0.5: no class of transformers"),
        ({"final_softcap": 4.0}, "final_softcap=4.0: no class of transformers"),
        ({"post_norms": True, "qkv_bias": True}, "qkv_bias=True: .* nearest, Gemma2ForCausalLM"),
        ({"post_norms": True, "scale_embedding": False}, "scale_embedding=False: .* Gemma2For"),
        (
            {"post_norms": True, "use_qk_norm": True, "attention_softcap": 0.5},
            "use_qk_norm=True: .* Gemma2ForCausalLM",
        ),
        ({"post_norms": True, "attention_scale": 0.7}, "attention_scale=0.7: .* Gemma2For"),
        ({"use_value_norm": True}, "use_value_norm=True: .* GemmaForCausalLM"),
        ({"use_skip_scale": True}, "use_skip_scale=True: .* GemmaForCausalLM"),
        ({"per_layer_input_dim": 8}, "per_layer_input_dim=8: .* GemmaForCausalLM"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1: .* GemmaForCausalLM"),
        (GEMMA_4 | {"attention_scale": None}, "attention_scale=None: .* Gemma4For"),
        (GEMMA_4 | {"num_global_kv_heads": 2}, "num_global_kv_heads=2: .* Gemma4For"),
        (GEMMA_4 | {"qkv_bias": True}, "qkv_bias=True: .* Gemma4For"),
        (
            GEMMA_4 | {"layer_types": ("sliding_attention", "full_attention")},
            r"layer_types=\(.*\): .* Gemma4For",
        ),
    ],
)
def test_a_decoder_of_no_class_is_not_exported(fields, expected):
    model = small(**fields)
    with pytest.raises(UsageError, match=f"^config.model.{expected}"):
        choose_family(model, write_rotations(model))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_half_written_output_goes_away(tmp_path, exported, monkeypatch, error):
    def fail(*_):
        raise error

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(layout.Tensor, "read", fail)
    with pytest.raises(type(error)):
        export_hf.export(tmp_path / "run", tmp_path / "new")
    monkeypatch.setattr(import_hf, "save_imported", fail)
    with pytest.raises(type(error)):
        import_hf.import_run(exported, tmp_path / "back")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_is_found_first(tmp_path, exported, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    before = sorted(tmp_path.iterdir())
    full = "the disk is full: the tensors need .* choose another --output"
    export_refused(tmp_path, "new", full)
    refused(tmp_path, "the disk is full: a checkpoint needs .* choose another --workdir")
    assert sorted(tmp_path.iterdir()) == before
