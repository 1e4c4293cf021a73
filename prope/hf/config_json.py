"""config.json of transformers: written for a run, and read for a new one.

Neither torch nor transformers is needed to write or read it.
"""

import dataclasses
import json

from etils import epath

from prope.errors import UsageError, log, usage_error
from prope.hf.families import (
    FAMILIES,
    MODEL_FIELDS,
    changed_fields,
    choose_family,
    fill,
    read_fields,
    write_fields,
)
from prope.hf.rotation import read_rotation, write_custom_rotation, write_rotations
from prope.rope import num_rotated_pairs
from prope.runtime import files
from prope.spec.kinds import FULL
from prope.spec.model import ModelSpec
from prope.spec.run import Spec

_TOKEN_IDS = ("bos_token_id", "eos_token_id")


def to_hf(spec: Spec, dtype: str, custom_code: bool = False) -> dict:
    """Returns config.json for a run's config and the dtype of the tensors.

    With `custom_code` it has `rope_frequencies` where a class computes all but the rotation. Raises
    UsageError where no class of transformers computes the run, or it has a field that is not known
    here.
    """
    model = spec.model
    check_known(model)
    model_type, ropes, custom = _choose_class(model, custom_code)
    family = FAMILIES[model_type]
    fields = write_fields(family, model, ropes)
    rope = fields["rope_parameters"]
    values = {
        "architectures": [family.hf_class],
        "model_type": model_type,
        "max_position_embeddings": spec.data.seq_len,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **fields,
        **custom,
        "dtype": dtype,
    }
    rope_of_kind = rope if family.rotates_by_kind else {FULL: rope}
    # Those that are scaled have no share.
    shares = [each.get("partial_rotary_factor", 0) for each in rope_of_kind.values()]
    is_plain = num_rotated_pairs(model.head_dim, min(shares)) == model.head_dim // 2
    if not is_plain and model_type != "gemma4_text":  # which transformers 4 does not have
        # It does not know rope_parameters and would rotate every pair; this field it reads, or
        # stops at it.
        values["rope_scaling"] = rope_of_kind[FULL]
    if model.rope_scaling_type == "dynamic":
        # The length that transformers scales by.
        values["max_position_embeddings"] = model.original_seq_len
    return values


def _choose_class(model: ModelSpec, custom_code: bool) -> tuple[str, list[dict], dict]:
    """Returns (model_type, rope_parameters of every layer, fields of modeling_prope.py)."""
    try:
        ropes = write_rotations(model)
        model_type = choose_family(model, ropes)
    except UsageError as error:
        plain_error = error
    else:
        if custom_code:
            log.info("%s computes this run without --custom_code", FAMILIES[model_type].hf_class)
        return model_type, ropes, {}
    try:
        ropes, custom = write_custom_rotation(model)
        model_type = choose_family(model, ropes)
    except UsageError as error:
        raise (error if custom_code else plain_error) from None
    if not custom_code:
        raise UsageError(f"{plain_error}; or export it with --custom_code")
    return model_type, ropes, custom


def check_known(model: ModelSpec) -> None:
    """Raises UsageError where a model has a field, such as a variant's, that no export knows."""
    for field in dataclasses.fields(model):
        name = field.name
        value = getattr(model, name)
        if name not in MODEL_FIELDS and value is not None:
            problem = "export does not know it, and would leave out what it computes"
            remedy = "write it in prope/hf/families.py"
            raise usage_error(f"config.model.{name}", value, problem, remedy)


def from_hf(path: epath.Path) -> tuple[Spec, dict]:
    """Returns (spec, values): a run's spec for this config.json, and the fields of its text.

    Raises UsageError, with all that is wrong, where the file cannot be read, or describes something
    that this decoder does not compute.
    """
    values = read_json(path)
    try:
        return _read(_text_part(values))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _read(values: dict) -> tuple[Spec, dict]:
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        only = " or ".join(map(json.dumps, FAMILIES))
        raise UsageError(f"model_type={json.dumps(model_type)}: only {only}")
    values, bad_sizes = fill(family, values)
    problems = changed_fields(family, values) + bad_sizes
    fields = {}
    if not bad_sizes:
        fields, wrong = read_fields(family, values)
        problems += wrong
        try:
            fields |= read_rotation(family, values)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        problems = dict.fromkeys(problems)  # two of them read the kinds of layers
        remedy = "choose a checkpoint without it: prope/hf/README.md says which are imported"
        raise UsageError(f"{'; '.join(problems)}; {remedy}")
    dtype = values.get("dtype", values.get("torch_dtype"))
    fields["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
    plain = Spec()
    seq_len = values["max_position_embeddings"]
    batch_size = max(1, plain.eval.batch_size * plain.data.seq_len // seq_len)
    fields = {f"model.{name}": value for name, value in fields.items()}
    fields |= {"data.seq_len": seq_len, "eval.batch_size": batch_size}
    return plain.replace(fields), values


def _text_part(values: dict) -> dict:
    """Returns the fields of the text, in a file of a model that reads images too."""
    text_type = f"{values.get('model_type')}_text"  # such as gemma3_text
    if text_type not in FAMILIES:
        return values
    text = values.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", text_type) != text_type:
        problem = f"must be the fields of a {text_type}"
        raise usage_error("text_config", json.dumps(text), problem)
    # A tuned model stops at more ids than its text part names: the outer ones are used.
    outer = {name: values[name] for name in _TOKEN_IDS if values.get(name) is not None}
    return values | {"model_type": text_type} | text | outer


def read_json(path: epath.Path) -> dict:
    """Reads the object in a JSON file; raises UsageError where there is none."""
    values = files.read_json(path, "download it again")
    if not isinstance(values, dict):
        problem = f"{path}: is missing, or holds no JSON object"
        raise UsageError(f"{problem}; give the folder of a checkpoint, or download it again")
    return values
