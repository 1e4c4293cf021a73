"""The format in which `transformers` saves a Gemma 1: names and layouts of its tensors, fields of its config.json.

Neither torch nor transformers is needed to write or read it.

Axes: D embed_dim, N query heads, K key/value heads, H head_dim, F hidden_dim, V vocab.
"""

import dataclasses
import json
import math

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from prope.config import default_config
from prope.data.tokenizer import BOS, EOS, PAD
from prope.encodings import layer_percentages
from prope.errors import UsageError
from prope.rope import num_rotated_pairs
from prope.runtime import files
from prope.runtime.validate import validate

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.model"
SPECIAL_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

# Per layer: the tensor, the parameter that it comes from, which of its matrices, the axes there and in the file.
_LAYER = (
    ("self_attn.q_proj", "attn/q_einsum/w", (), "NDH", "NH D"),
    ("self_attn.k_proj", "attn/kv_einsum/w", (0,), "KDH", "KH D"),
    ("self_attn.v_proj", "attn/kv_einsum/w", (1,), "KDH", "KH D"),
    ("self_attn.o_proj", "attn/attn_vec_einsum/w", (), "NHD", "D NH"),
    ("mlp.gate_proj", "mlp/gating_einsum", (0,), "DF", "F D"),
    ("mlp.up_proj", "mlp/gating_einsum", (1,), "DF", "F D"),
    ("mlp.down_proj", "mlp/linear", (), "FD", "D F"),
    ("input_layernorm", "pre_attention_norm/scale", (), "D", "D"),
    ("post_attention_layernorm", "pre_ffw_norm/scale", (), "D", "D"),
)
_SIZES = {
    "hidden_size": "embed_dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}  # fmt: skip
_GELU = "gelu_pytorch_tanh"
# Fields with the values that this decoder computes; an absent field has the first.
_FIXED = {
    "model_type": ("gemma",),
    "hidden_act": (_GELU, "gelu"),  # which transformers reads as its tanh form too
    "hidden_activation": (None, _GELU),
    "rms_norm_eps": (1e-6,),
    "attention_bias": (False,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file, and the parameter, or part of one, that it holds."""

    name: str  # in the file
    shape: tuple[int, ...]  # in the file
    path: tuple[str, ...]  # of the parameter in the nested dictionary
    layer: int | None  # of the parameter, if it is stacked
    index: tuple[int, ...]  # of the matrix, if the parameter holds two
    order: tuple[int, ...]  # of the matrix's axes in the file, some of which are one axis there

    def read(self, parameter: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the tensor in the file's layout, C-contiguous, from the parameter, or its layer if it is stacked."""
        return np.ascontiguousarray(parameter[self.index].transpose(self.order), dtype).reshape(self.shape)

    def write(self, parameter: np.ndarray, values: np.ndarray) -> None:
        """Copies the tensor's values into the parameter."""
        parameter = parameter if self.layer is None else parameter[self.layer]
        matrix = parameter[self.index].transpose(self.order)
        matrix[...] = values.reshape(matrix.shape)


def tensors(config: ConfigDict) -> list[Tensor]:
    """Lists the tensors of a run's `config.model`, sorted by name."""
    sizes = {
        "D": config.embed_dim, "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_dim,
        "F": config.hidden_dim, "V": config.vocab_size,
    }  # fmt: skip

    def tensor(name, parameter, layer, index, here, there):
        shape = tuple(math.prod(sizes[axis] for axis in axes) for axes in there.split())
        order = tuple(here.index(axis) for axis in there.replace(" ", ""))
        return Tensor(f"model.{name}.weight", shape, tuple(parameter.split("/")), layer, index, order)

    result = [
        tensor("embed_tokens", "embedder/input_embedding", None, (), "VD", "V D"),
        tensor("norm", "final_norm/scale", None, (), "D", "D"),
        *(
            tensor(f"layers.{layer}.{name}", f"layers/{parameter}", layer, *axes)
            for layer in range(config.num_layers)
            for name, parameter, *axes in _LAYER
        ),
    ]
    return sorted(result, key=lambda tensor: tensor.name)


def to_hf(config: ConfigDict, dtype: str) -> dict:
    """Returns config.json for a run's config and the dtype of the tensors; raises UsageError if layers differ in p."""
    percentages = set(layer_percentages(config.model))
    if len(percentages) > 1:
        raise UsageError(
            f"config.model.rope_percentage={config.model.rope_percentage}: GemmaForCausalLM has one p for all layers; "
            "only a run with one number can be exported"
        )
    (p,) = percentages
    wavelength = config.model.max_wavelength
    rope = {"rope_type": "proportional", "rope_theta": wavelength, "partial_rotary_factor": float(p)}
    values = {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        **{theirs: config.model[ours] for theirs, ours in _SIZES.items()},
        "max_position_embeddings": config.data.seq_len,
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
        "rope_theta": wavelength,
        **SPECIAL_IDS,
        "dtype": dtype,
    }
    # transformers 4 does not know rope_parameters and would rotate every pair; at this field it stops.
    if num_rotated_pairs(config.model.head_dim, p) < config.model.head_dim // 2:
        values["rope_scaling"] = rope
    return values


def from_hf(path: epath.Path) -> tuple[ConfigDict, dict]:
    """Returns (config, values): a run's config for the model of this config.json, and the file's fields.

    Raises UsageError where the file cannot be read, or describes something that this decoder does not compute.
    """
    values = read_json(path)
    for name, allowed in _FIXED.items():
        value = values.get(name, None if name == "model_type" else allowed[0])
        if value not in allowed:
            raise UsageError(
                f"{path}: {name}={json.dumps(value)}: only {' or '.join(map(json.dumps, allowed))} can be imported, "
                "as in Gemma 1 (google/gemma-2b, google/gemma-7b) and what prope.export_hf writes"
            )

    def size(name: str, default: int | None = None) -> int:
        value = values.get(name, default)
        if type(value) is not int or value < 1:
            message = "must be a positive integer; restore the original file"
            raise UsageError(f"{path}: {name}={json.dumps(value)}: {message}")
        return value

    config = default_config()
    for theirs, ours in _SIZES.items():
        config.model[ours] = size(theirs)
    config.model.max_wavelength, config.model.rope_percentage = _rope(path, values)
    config.model.dtype = "bfloat16" if values.get("dtype", values.get("torch_dtype")) == "bfloat16" else "float32"
    tokens = config.eval.batch_size * config.data.seq_len
    config.data.seq_len = size("max_position_embeddings", 8192)
    config.eval.batch_size = max(1, tokens // config.data.seq_len)  # as many tokens at a time as by default
    try:
        validate(config)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return config, values


def _rope(path: epath.Path, values: dict) -> tuple[float, float]:
    """Returns (max_wavelength, rope_percentage), as transformers reads them: rope_scaling, the older name, first."""
    fields = [values[name] for name in ("rope_scaling", "rope_parameters") if values.get(name)] or [{}]
    # The releases have only rope_theta: every pair is rotated.
    theta, p = values.get("rope_theta", 1e4), values.get("partial_rotary_factor", 1)
    absent = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": p, "factor": 1}
    ropes = [absent | {{"type": "rope_type"}.get(name, name): value for name, value in rope.items()} for rope in fields]
    if ropes[0] != ropes[-1]:
        raise UsageError(
            f"{path}: rope_scaling={fields[0]} and rope_parameters={fields[1]} differ; remove the wrong one"
        )
    rope = ropes[0]
    if rope["rope_type"] not in ("default", "proportional") or rope["factor"] != 1 or rope.keys() != absent.keys():
        raise UsageError(
            f"{path}: the rotation is {json.dumps(rope)}: only rope_type default, and proportional with factor 1, can "
            "be imported"
        )
    theta, p = rope["rope_theta"], rope["partial_rotary_factor"]
    if type(p) not in (int, float) or not 0 <= p <= 1 or (rope["rope_type"] == "default" and p != 1):
        raise UsageError(
            f"{path}: partial_rotary_factor={json.dumps(p)}: must be a fraction in [0, 1] with rope_type proportional, "
            "and 1 with default"
        )
    if type(theta) not in (int, float):
        raise UsageError(f"{path}: rope_theta={json.dumps(theta)}: must be a number; it is 10000.0 in Gemma 1")
    return float(theta), float(p)


def read_json(path: epath.Path) -> dict:
    """Reads the object in a JSON file; raises UsageError where there is none."""
    values = files.read_json(path, "download it again")
    if not isinstance(values, dict):
        reason = "cannot be read: No such file or directory" if values is None else "holds no JSON object"
        raise UsageError(f"{path}: {reason}; download it again")
    return values
