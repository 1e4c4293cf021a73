"""config.json of transformers: written for a run, and read for a Gemma 1.

Neither torch nor transformers is needed to write or read it.
"""

import json

from etils import epath
from ml_collections import ConfigDict

from prope.config import default_config
from prope.errors import UsageError, usage_error
from prope.hf.rotation import choose_class, read_rotation
from prope.rope import num_rotated_pairs
from prope.runtime import files
from prope.runtime.validate import validate

_SIZES = {
    "hidden_size": "embed_dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
_GELU = "gelu_pytorch_tanh"
# Fields with the values that this decoder computes; an absent field has the first.
_FIXED = {
    "model_type": ("gemma",),
    "hidden_act": (_GELU, "gelu"),  # which transformers reads as its tanh form too
    "hidden_activation": (None, _GELU),
    "rms_norm_eps": (1e-6,),
    "attention_bias": (False,),
    "tie_word_embeddings": (True, False),  # with an output matrix that equals the embedding
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_POST_NORMS = (
    "which normalises attention's and the MLP's output "
    "(post_attention_layernorm, post_feedforward_layernorm)"
)
# What is not imported yet of the later model types.
_LACKS = {
    "gemma2": _POST_NORMS,
    "gemma3_text": _POST_NORMS,
    "gemma3": "which reads images (vision_config)",
}


def to_hf(config: ConfigDict, dtype: str) -> dict:
    """Returns config.json for a run's config and the dtype of the tensors.

    Raises UsageError where no class of transformers computes the run.
    """
    model = config.model
    name, encoding = choose_class(model)
    rope = encoding["rope_parameters"]
    values = {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        **{theirs: model[ours] for theirs, ours in _SIZES.items()},
        "max_position_embeddings": config.data.seq_len,
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        **encoding,
        "rope_theta": rope.get("rope_theta", model.max_wavelength),
        "dtype": dtype,
    }
    if "rope_type" in rope:
        p = rope.get("partial_rotary_factor", 0)
        if num_rotated_pairs(model.head_dim, p) < model.head_dim // 2:
            # transformers 4 does not know rope_parameters and would rotate every pair; this field
            # it reads, or stops at it.
            values["rope_scaling"] = rope
    if model.rope_scaling_type == "dynamic":
        # The length that transformers scales by.
        values["max_position_embeddings"] = model.original_seq_len
    return values


def from_hf(path: epath.Path) -> tuple[ConfigDict, dict]:
    """Returns (config, values): a run's config for this config.json, and the file's fields.

    Raises UsageError where the file cannot be read, or describes something that this decoder does
    not compute.
    """
    values = read_json(path)
    _check_supported(path, values)
    config = default_config()
    for theirs, ours in _SIZES.items():
        config.model[ours] = _size(path, values, theirs)
    saved_dtype = values.get("dtype", values.get("torch_dtype"))
    config.model.dtype = "bfloat16" if saved_dtype == "bfloat16" else "float32"
    tokens_at_a_time = config.eval.batch_size * config.data.seq_len
    config.data.seq_len = _size(path, values, "max_position_embeddings", 8192)
    config.eval.batch_size = max(1, tokens_at_a_time // config.data.seq_len)
    try:
        config.model.update(read_rotation(values))
        validate(config)
    except (TypeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None
    return config, values


def _size(path: epath.Path, values: dict, name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if type(value) is not int or value < 1:
        problem = "must be a positive integer"
        raise usage_error(
            f"{path}: {name}", json.dumps(value), problem, "restore the original file"
        )
    return value


def _check_supported(path: epath.Path, values: dict) -> None:
    """Raises UsageError that names all fields which this decoder does not compute."""
    rejected = _rejected(values)
    text_config = values.get("text_config")  # where the model reads images too
    if isinstance(text_config, dict):
        rejected += _rejected(text_config, "text_config.")
    if not rejected:
        return
    supported = (
        "can be imported, as in Gemma 1 (google/gemma-2b, google/gemma-7b) and as prope.export_hf "
        "writes it"
    )
    if str(values.get("model_type")) in _LACKS:
        pages = "configs/gemma2_like.py and configs/gemma3_like.py"
        supported += f"; {pages} train models with such windows from scratch"
    raise UsageError(f"{path}: {'; '.join(rejected)} {supported}")


def _rejected(values: dict, prefix: str = "") -> list[str]:
    """Describes the fields that this decoder does not compute, and what is allowed."""
    rejected = []
    for name, allowed in _FIXED.items():
        absent = None if name == "model_type" else allowed[0]
        value = values.get(name, absent)
        if value not in allowed:
            lacks = f", {_LACKS[value]}" if str(value) in _LACKS else ""
            only = " or ".join(map(json.dumps, allowed))
            rejected.append(f"{prefix}{name}={json.dumps(value)}{lacks}: only {only}")
    return rejected


def read_json(path: epath.Path) -> dict:
    """Reads the object in a JSON file; raises UsageError where there is none."""
    values = files.read_json(path, "download it again")
    if values is None:
        problem = "cannot be read: No such file or directory"
        raise UsageError(f"{path}: {problem}; download it again")
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds no JSON object; download it again")
    return values
