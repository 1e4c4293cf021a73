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
from prope.errors import UsageError
from prope.hf.rotation import choose_class, read_rotation
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
    ("self_attn.q_norm", "attn/query_norm/scale", (), "H", "H"),  # these two with QK-norm only
    ("self_attn.k_norm", "attn/key_norm/scale", (), "H", "H"),
)
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
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_POST_NORMS = "which normalises attention's and the MLP's output (post_attention_layernorm, post_feedforward_layernorm)"
# What this decoder lacks of the later model types, whose windows, wavelengths and QK-norm it has.
_LACKS = {
    "gemma2": _POST_NORMS,
    "gemma3_text": _POST_NORMS,
    "gemma3": "which reads images (vision_config)",
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
    scale: float = 1.0  # the file holds scale * (parameter + offset)
    offset: float = 0.0

    def read(self, parameter: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns the tensor in the file's layout, C-contiguous, from the parameter, or its layer if it is stacked."""
        matrix = parameter[self.index].transpose(self.order)
        if (self.scale, self.offset) != (1, 0):
            matrix = self.scale * (matrix + self.offset)
        return np.ascontiguousarray(matrix, dtype).reshape(self.shape)

    def write(self, parameter: np.ndarray, values: np.ndarray) -> None:
        """Copies the tensor's values into the parameter."""
        parameter = parameter if self.layer is None else parameter[self.layer]
        matrix = parameter[self.index].transpose(self.order)
        matrix[...] = values.reshape(matrix.shape)


def tensors(config: ConfigDict) -> list[Tensor]:
    """Lists the tensors of a run's `config.model`, sorted by name."""
    sizes = {
        "D": config.embed_dim,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "F": config.hidden_dim,
        "V": config.vocab_size,
    }
    gemma = choose_class(config)[0] == "GemmaForCausalLM"
    # SmolLM3 and Mellum neither add 1 to norms nor multiply the embedding by sqrt(D). That is also the output matrix,
    # for which the final norm takes the factor back.
    scales = (
        {} if gemma else {"embed_tokens": config.embed_dim**0.5, "norm": config.embed_dim**-0.5}
    )

    def tensor(
        name: str, parameter: str, layer: int | None, index: tuple[int, ...], here: str, there: str
    ) -> Tensor:
        shape = tuple(math.prod(sizes[axis] for axis in axes) for axes in there.split())
        order = tuple(here.index(axis) for axis in there.replace(" ", ""))
        path, offset = tuple(parameter.split("/")), float(not gemma and parameter.endswith("scale"))
        return Tensor(
            f"model.{name}.weight", shape, path, layer, index, order, scales.get(name, 1.0), offset
        )

    result = [tensor("embed_tokens", "embedder/input_embedding", None, (), "VD", "V D")]
    result += [tensor("norm", "final_norm/scale", None, (), "D", "D")]
    for name, parameter, *axes in _LAYER if config.use_qk_norm else _LAYER[:-2]:
        result += [
            tensor(f"layers.{i}.{name}", f"layers/{parameter}", i, *axes)
            for i in range(config.num_layers)
        ]
    return sorted(result, key=lambda tensor: tensor.name)


def to_hf(config: ConfigDict, dtype: str) -> dict:
    """Returns config.json for a run's config and the dtype of the tensors; raises UsageError if none computes it."""
    name, encoding = choose_class(config.model)
    rope, head_dim = encoding["rope_parameters"], config.model.head_dim
    values = {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        **{theirs: config.model[ours] for theirs, ours in _SIZES.items()},
        "max_position_embeddings": config.data.seq_len,
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        **encoding,
        "rope_theta": rope.get("rope_theta", config.model.max_wavelength),
        **SPECIAL_IDS,
        "dtype": dtype,
    }
    # transformers 4 does not know rope_parameters and would rotate every pair; this field it reads, or stops at it.
    if (
        "rope_type" in rope
        and num_rotated_pairs(head_dim, rope.get("partial_rotary_factor", 0)) < head_dim // 2
    ):
        values["rope_scaling"] = rope
    if config.model.rope_scaling_type == "dynamic":
        values["max_position_embeddings"] = (
            config.model.original_seq_len
        )  # which transformers scales by
    return values


def from_hf(path: epath.Path) -> tuple[ConfigDict, dict]:
    """Returns (config, values): a run's config for the model of this config.json, and the file's fields.

    Raises UsageError where the file cannot be read, or describes something that this decoder does not compute.
    """
    values = read_json(path)
    if rejected := _rejected(values):
        remedy = "can be imported, as in Gemma 1 (google/gemma-2b, google/gemma-7b) and as prope.export_hf writes it"
        if str(values.get("model_type")) in _LACKS:
            remedy += "; configs/gemma2_like.py and configs/gemma3_like.py train models with such windows from scratch"
        raise UsageError(f"{path}: {'; '.join(rejected)} {remedy}")

    def size(name: str, default: int | None = None) -> int:
        value = values.get(name, default)
        if type(value) is not int or value < 1:
            allowed = "must be a positive integer; restore the original file"
            raise UsageError(f"{path}: {name}={json.dumps(value)}: {allowed}")
        return value

    config = default_config()
    for theirs, ours in _SIZES.items():
        config.model[ours] = size(theirs)
    config.model.dtype = (
        "bfloat16" if values.get("dtype", values.get("torch_dtype")) == "bfloat16" else "float32"
    )
    tokens = config.eval.batch_size * config.data.seq_len
    config.data.seq_len = size("max_position_embeddings", 8192)
    config.eval.batch_size = max(
        1, tokens // config.data.seq_len
    )  # as many tokens at a time as by default
    try:
        config.model.update(read_rotation(values))
        validate(config)
    except (TypeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None
    return config, values


def _rejected(values: dict, prefix: str = "") -> list[str]:
    """Names all fields of config.json that this decoder does not compute, with their values and what is allowed."""
    rejected = []
    for name, allowed in _FIXED.items():
        value = values.get(name, None if name == "model_type" else allowed[0])
        if value not in allowed:
            lacks = f", {_LACKS[value]}" if str(value) in _LACKS else ""
            rejected += [
                f"{prefix}{name}={json.dumps(value)}{lacks}: only {' or '.join(map(json.dumps, allowed))}"
            ]
    text = values.get("text_config")  # of a model that reads images too
    return rejected + (_rejected(text, "text_config.") if isinstance(text, dict) else [])


def read_json(path: epath.Path) -> dict:
    """Reads the object in a JSON file; raises UsageError where there is none."""
    values = files.read_json(path, "download it again")
    if not isinstance(values, dict):
        reason = (
            "cannot be read: No such file or directory"
            if values is None
            else "holds no JSON object"
        )
        raise UsageError(f"{path}: {reason}; download it again")
    return values
