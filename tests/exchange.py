"""A run to be exported, the forms of Gemma 1 that are imported, and those of Gemma 2 and 3 that are rejected."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from prope import model
from prope.config import default_config, set_layer_percentages
from prope.runtime.validate import validate
from prope.workdir.checkpoints import Checkpoints
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import write_config

SIZES = {
    "num_layers": 2,
    "embed_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "hidden_dim": 96,
    "vocab_size": 300,
}
# What google/gemma-2b and google/gemma-7b say, in the form in which they were released.
RELEASED = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2B = RELEASED | {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}
GEMMA_7B = RELEASED | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
# google/gemma-2-2b, google/gemma-3-1b-pt and google/gemma-3-12b-it, a model of text and images.
GEMMA_2_2B = {name: value for name, value in RELEASED.items() if name != "rope_scaling"} | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
}
GEMMA_3_1B = {name: value for name, value in RELEASED.items() if name != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "transformers_version": "4.50.0.dev0",
    "vocab_size": 262144,
}
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def make_run(workdir, p=0.75, tokenizer="byte", **sizes):
    """A run with random weights in which every number matters, saved as training saves them: (config, params)."""
    config = default_config()
    config.model.update(SIZES | sizes)
    if isinstance(p, tuple):
        set_layer_percentages(config, p)
    else:
        config.model.rope_percentage = float(p)
    config.data.update({"seq_len": 128, "tokenizer": str(tokenizer)})
    validate(config)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))

    def draw(path, leaf):
        scale = {"scale": 0.3, "input_embedding": 1.5 / np.sqrt(leaf.shape[-1])}.get(path[-1].key)
        scale = scale or 1 / np.sqrt(
            config.model.embed_dim
        )  # as initial weights: float32 angles blur sharper scores
        return jnp.asarray(scale * rng.standard_normal(leaf.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    workdir.mkdir(parents=True)
    write_config(workdir, config)
    with Checkpoints(workdir) as checkpoints:
        identity = {"config": config.to_dict(), "init_hash": hash_arrays(params)}
        checkpoints.save(7, params, {"count": np.zeros(())}, identity, {"examples": 0})
    return config, params


def same(ours, theirs) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), ours, theirs)
    )


def stored(directory) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(directory / "model.safetensors")


def edit(directory, **fields) -> None:
    """Changes fields of config.json; None removes one."""
    values = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in values.items() if v is not None})
    )


def save(directory, tensors) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
