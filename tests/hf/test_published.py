"""What config.json of published checkpoints leads to: sizes, layers, rotations, switches."""

import json
import math

import pytest
from support.exchange import GEMMA_2_2B, GEMMA_3_1B, GEMMA_3_12B, GEMMA_4_31B, GEMMA_4_E2B

from prope.encodings import layer_percentages
from prope.hf import config_json
from prope.hf.families import FAMILIES
from prope.hf.layout import list_tensors
from prope.stack.layers import layer_windows

LLAMA_3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def sizes(V, D, F, L, N, K, length, **fields):
    values = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    return values | fields


LLAMA_32_1B = sizes(
    *(128256, 2048, 8192, 16, 32, 8, 131072),
    model_type="llama",
    attention_bias=False,
    head_dim=64,
    mlp_bias=False,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=LLAMA_3_ROPE,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
# As a GGUF file has it: numbers of float32.
SMOLLM2_135M = sizes(
    *(49152, 576, 1536, 30, 9, 3, 8192),
    model_type="llama",
    is_llama_config=True,
    rms_norm_eps=9.999999747378752e-06,
    rope_interleaved=False,
    rope_scaling=None,
    rope_theta=100000,
    tie_word_embeddings=True,
)
SMOLLM3_3B = sizes(
    *(128256, 2048, 11008, 36, 16, 4, 65536),
    model_type="smollm3",
    no_rope_layer_interval=4,
    rms_norm_eps=1e-06,
    rope_theta=5000000.0,
    sliding_window=None,
    use_sliding_window=False,
)
QWEN25_05B = sizes(
    *(151936, 896, 4864, 24, 14, 2, 32768),
    model_type="qwen2",
    max_window_layers=21,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=32768,
    tie_word_embeddings=True,
    use_mrope=False,
    use_sliding_window=False,
)
LENGTH = {"original_max_position_embeddings": 32768}
QWEN3_06B = sizes(
    *(151936, 1024, 3072, 28, 16, 8, 40960),
    model_type="qwen3",
    attention_bias=False,
    head_dim=128,
    max_window_layers=28,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
)
MISTRAL_7B = sizes(
    *(32768, 4096, 14336, 32, 32, 8, 32768),
    model_type="mistral",
    rms_norm_eps=1e-05,
    rope_theta=1000000.0,
    sliding_window=None,
)
GEMMA_3_270M = GEMMA_3_1B | {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "rms_norm_eps": 9.999999974752427e-07,
}
GEMMA_4_E4B = GEMMA_4_E2B | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
}
# Without the fields that its class does not have.
GEMMA_4_12B = {name: GEMMA_4_31B[name] for name in GEMMA_4_31B if "per_layer" not in name} | {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "model_type": "gemma4_unified_text",
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
LATER_GEMMA_4_31B = GEMMA_4_31B | {
    "per_layer_config": {
        str(number): {"head_dim": 512, "num_key_value_heads": 4} for number in range(5, 60, 6)
    }
}
del LATER_GEMMA_4_31B["global_head_dim"], LATER_GEMMA_4_31B["num_global_key_value_heads"]


def with_images(text, model_type="gemma4"):
    return {
        "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
        "dtype": "bfloat16",
        "image_token_id": 258880,
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
    }


GEMMA_2_27B = GEMMA_2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
GEMMA = {"activation": "gelu", "scale_embedding": True, "post_norms": True, "tied": True}
GEMMA_2 = GEMMA | {"attention_softcap": 50.0, "final_softcap": 30.0, "local_max_wavelength": None}
GEMMA_3 = GEMMA | {"use_qk_norm": True, "local_max_wavelength": 1e4, "norm_epsilon": 1e-6}
GEMMA_4 = GEMMA | {
    "attention_scale": 1.0,
    "final_softcap": 30.0,
    "head_dim": 256,
    "global_head_dim": 512,
    "local_max_wavelength": 1e4,
    "max_wavelength": 1e6,
    "norm_epsilon": 1e-6,
    "num_global_kv_heads": None,
    "use_qk_norm": True,
    "use_value_norm": True,
    "use_skip_scale": True,
}
KEYS_ARE_VALUES = GEMMA_4 | {
    "global_key_is_value": True,
    "num_global_kv_heads": 4,
    "num_kv_shared_layers": 0,
    "per_layer_input_dim": 0,
}
LLAMA = {"activation": "silu", "scale_embedding": False, "post_norms": False, "tied": True}
FULL = None
# (config.json, parameters, windows of the first layers, fields of config.model).
PUBLISHED = {
    "gemma-2-2b": (GEMMA_2_2B, 2_614_341_888, [4096, FULL] * 13, GEMMA_2),
    "gemma-2-27b": (
        GEMMA_2_27B,
        27_227_128_320,
        [4096, FULL] * 23,
        GEMMA_2 | {"attention_scale": 1 / 12, "attention_softcap": 50.0},
    ),
    "gemma-3-270m": (
        GEMMA_3_270M,
        268_098_176,
        [*[512] * 5, FULL] * 3,
        GEMMA_3 | {"attention_scale": None, "max_wavelength": 1e6},
    ),
    "gemma-3-1b": (
        GEMMA_3_1B,
        999_885_952,
        [*[512] * 5, FULL] * 4 + [512] * 2,
        GEMMA_3 | {"rope_scaling_type": "none"},
    ),
    "gemma-3-12b": (
        GEMMA_3_12B,
        11_765_788_416 + 64 * 3840,
        [*[1024] * 5, FULL] * 8,
        GEMMA_3
        | {"rope_scaling_type": "linear", "rope_scaling_factor": 8.0, "attention_scale": None},
    ),
    "gemma-4-E2B": (
        with_images(GEMMA_4_E2B),
        4_628_569_344 + 35,  # with layer_scalar, a buffer there
        [*[512] * 4, FULL] * 7,
        GEMMA_4
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "per_layer_input_dim": 256},
    ),
    "gemma-4-E4B": (
        with_images(GEMMA_4_E4B),
        7_463_013_376 + 42,
        [*[512] * 5, FULL] * 7,
        GEMMA_4
        | {"num_kv_shared_layers": 18, "use_double_wide_mlp": False, "per_layer_input_dim": 256},
    ),
    "gemma-4-12B": (
        with_images(GEMMA_4_12B, "gemma4_unified"),
        11_907_350_272 + 48,
        [*[1024] * 5, FULL] * 8,
        KEYS_ARE_VALUES | {"num_global_kv_heads": 1},
    ),
    "gemma-4-31B": (
        with_images(GEMMA_4_31B),
        30_697_345_280 + 60,
        [*[1024] * 5, FULL] * 10,
        KEYS_ARE_VALUES,
    ),
    "gemma-4-31B, as later versions write it": (
        LATER_GEMMA_4_31B,
        30_697_345_280 + 60,
        [*[1024] * 5, FULL] * 10,
        KEYS_ARE_VALUES,
    ),
    "Llama-3.2-1B": (
        LLAMA_32_1B,
        1_235_814_400,
        [FULL] * 16,
        LLAMA | {"rope_scaling_type": "llama3", "original_seq_len": 8192, "head_dim": 64},
    ),
    "SmolLM2-135M": (
        SMOLLM2_135M,
        134_515_008,
        [FULL] * 30,
        LLAMA | {"norm_epsilon": 1e-5, "max_wavelength": 1e5, "head_dim": 64},
    ),
    "SmolLM3-3B": (SMOLLM3_3B, 3_075_098_624, [FULL] * 36, LLAMA | {"max_wavelength": 5e6}),
    "Qwen2.5-0.5B": (QWEN25_05B, 494_032_768, [FULL] * 24, LLAMA | {"qkv_bias": True}),
    "Qwen2.5-0.5B, as its page has it for long texts": (
        QWEN25_05B | {"rope_scaling": {"factor": 4.0, "type": "yarn"} | LENGTH},
        494_032_768,
        [FULL] * 24,
        {"rope_scaling_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "logit_scale": "yarn"},
    ),
    "Qwen3-0.6B": (
        QWEN3_06B,
        596_049_920,
        [FULL] * 28,
        LLAMA | {"use_qk_norm": True, "head_dim": 128},
    ),
    "Mistral-7B-v0.3": (MISTRAL_7B, 7_248_023_552, [FULL] * 32, LLAMA | {"tied": False}),
    "Mistral-7B with absent fields": (
        {name: MISTRAL_7B[name] for name in MISTRAL_7B.keys() - {"sliding_window", "hidden_act"}},
        7_248_023_552,
        [4096] * 32,
        LLAMA | {"tied": False, "layer_types": ("sliding_attention",)},
    ),
}


@pytest.mark.parametrize(
    ("values", "parameters", "windows", "fields"), PUBLISHED.values(), ids=PUBLISHED
)
def test_a_published_config_leads_to_its_model(tmp_path, values, parameters, windows, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    config, read = config_json.from_hf(path)
    tensors = list_tensors(config.model, FAMILIES[read["model_type"]])
    assert sum(math.prod(tensor.shape) for tensor in tensors) == parameters
    assert layer_windows(config.model) == windows
    for name, value in fields.items():
        assert config.model[name] == value, name
    layers = config.model.num_layers
    p = [1] * layers
    if values["model_type"] == "smollm3":
        p = [1, 1, 1, 0] * 9
    if values["model_type"].startswith("gemma4"):
        p = [0.25 if window is FULL else 1 for window in windows]
    assert layer_percentages(config.model) == p
    assert config.model.dtype == values.get("torch_dtype", "bfloat16")
    length = read["max_position_embeddings"]
    assert config.data.seq_len == values.get("max_position_embeddings", length)
    path.write_text(json.dumps(config_json.to_hf(config, config.model.dtype)))
    assert config_json.from_hf(path)[0].model == config.model


def test_full_layers_of_gemma_4_that_are_as_wide_as_the_others(tmp_path):
    path = tmp_path / "config.json"
    alike = {"global_head_dim": 256, "num_global_key_value_heads": 16}
    for fields in (alike, {"per_layer_config": {}}):
        path.write_text(json.dumps(GEMMA_4_31B | fields))
        model = config_json.from_hf(path)[0].model
        assert (model.global_head_dim, model.num_global_kv_heads) == (None, None)
    config, _ = config_json.from_hf(path)
    assert config_json.to_hf(config, "float32")["global_head_dim"] == 256
