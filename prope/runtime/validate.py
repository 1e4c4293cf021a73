"""Checks a config: single fields, then fields together, then how devices divide the batch.

`validate` needs no device, no tokenizer and no data. The rules of single fields stand beside them
in `prope/config.py`. Only the functions that import `encodings` or `sharding` import JAX, which
takes longer than all other checks.
"""

import math
import string
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from prope.config import EMBEDDED, FIELDS, GENERATED, LOSS_ON, check_fields, is_generated
from prope.errors import UsageError, nearest, usage_error
from prope.runtime.files import as_path
from prope.stack.layers import LAYER_TYPES, key_value_sources, layer_kinds

# Fields of config.data that each source of a mixture has for itself.
SOURCE_FIELDS = ("dataset", "data_dir", "text_feature", "template", "separator", "loss_on", "store")
MIXTURE_FIELDS = ("weight", *SOURCE_FIELDS)


def validate(config: ConfigDict) -> None:
    """Checks what can be known without a device, a tokenizer or data.

    A UsageError names the field, its value, what is allowed and, where there is one, the remedy.
    """
    check_fields(config)
    _check_layers(config.model)
    _check_data(config.data)
    _check_encoding(config.model)


def _check_layers(model: ConfigDict) -> None:
    """Checks that the fields of some layers alone have such layers."""
    fields = ("global_head_dim", "num_global_kv_heads", "global_key_is_value", "global_attention")
    for field in fields:
        if model[field] and set(layer_kinds(model)) != set(LAYER_TYPES):
            problem = "has no effect unless some layers have a window and others have none"
            raise usage_error(f"config.model.{field}", model[field], problem, "see layer_types")
    for field in ("test_window", "test_sinks"):
        if model[field]:
            problem = "is for evaluation, which sets it"
            remedy = "to train with windows, give layer_types and sliding_window"
            raise usage_error(f"config.model.{field}", model[field], problem, remedy)
    if model.use_double_wide_mlp and not model.num_kv_shared_layers:
        problem = "has no effect without num_kv_shared_layers"
        raise usage_error("config.model.use_double_wide_mlp", True, problem)
    one_p = isinstance(model.rope_percentage, int | float)
    if model.num_kv_shared_layers and not one_p:
        problem = "must be one number where layers share keys, which rotate once"
        raise usage_error("config.model.rope_percentage", model.rope_percentage, problem)


def _check_encoding(model: ConfigDict) -> None:
    """Checks the fields of the encoding, and that its frequencies can be computed."""
    from prope import encodings

    for field, kinds in encodings.CHOICES.items():
        kind = model[field]
        if kind not in kinds:
            problem = f"there is none{nearest(kind, kinds)}; must be one of {', '.join(kinds)}"
            raise usage_error(f"config.model.{field}", kind, problem)
    _check_fields_of_kinds(model)
    if not encodings.can_rescale(model.rope_type, model.rope_scaling_type):
        problem = f"needs a wavelength, which rope_type={model.rope_type} has not"
        raise usage_error("config.model.rope_scaling_type", model.rope_scaling_type, problem)
    if model.rope_scaling_type in encodings.INTERVENTIONS:
        _check_band(model)
    try:  # a ValueError begins with the field
        encodings.layer_frequencies(model)
    except ValueError as error:
        raise UsageError(f"config.model.{error}") from None


def _check_fields_of_kinds(model: ConfigDict) -> None:
    """Checks that the fields which rope_type and the like take have values, and no others."""
    from prope import encodings

    required = {*encodings.CHOICES, "layer_types"}
    for field, kinds in encodings.CHOICES.items():
        required |= set(kinds[model[field]])
    optional = set()
    if "logit_scale_factor" in required and model.logit_scale_factor is None:
        required.remove("logit_scale_factor")
        optional.add("logit_scale_factor")
        required.add("rope_scaling_factor")
    if "sliding_attention" in model.layer_types:
        required.add("sliding_window")
        optional |= {"local_max_wavelength", "local_rope_percentage"}
    allowed = required | optional
    chosen = [f"{field}={model[field]}" for field in (*encodings.CHOICES, "layer_types")]
    for name in sorted(encodings.FIELDS):
        value = model[name]
        default = FIELDS[f"model.{name}"].default
        # A default that is a type stands for None.
        is_set = value is not None if isinstance(default, type) else value != default
        if name in required and value is None:
            raise usage_error(f"config.model.{name}", value, "must have a value: its type needs it")
        if is_set and name not in allowed:
            problem = (
                f"has no effect with {', '.join(chosen)}; it takes {', '.join(sorted(allowed))}"
            )
            raise usage_error(f"config.model.{name}", value, problem)


def _check_band(model: ConfigDict) -> None:
    from prope import encodings

    pairs = tuple(model.scaled_pairs)
    try:
        masks = encodings.in_band(model)
    except ValueError as error:
        problem = f"must be the first and the last of a band, or bands with layers: {error}"
        remedy = "give such as (0, 3) or ('0-3@full',)"
        raise usage_error("config.model.scaled_pairs", pairs, problem, remedy) from None
    for number, source in enumerate(key_value_sources(model)):
        if not np.array_equal(masks[number], masks[source]):
            problem = f"layer {number} takes the keys of layer {source}, which rotate once"
            remedy = "give the same band to both, as @full and @sliding do"
            raise usage_error("config.model.scaled_pairs", pairs, problem, remedy)


def _check_data(data: ConfigDict) -> None:
    """Checks the places, and the dataset or the sources of a mixture."""
    as_path("config.data.tokenizer", data.tokenizer)
    if data.cache_dir:
        as_path("config.data.cache_dir", data.cache_dir)
    if is_generated(data.dataset) and data.tokenizer != "byte":
        family, _, _ = data.dataset.partition("/")
        problem = f"has no effect with {family} data; remove it"
        raise usage_error("config.data.tokenizer", data.tokenizer, problem)
    source = {name: data[name] for name in SOURCE_FIELDS}
    is_mixture = data.dataset == "mixture"
    if is_mixture != bool(data.mixture):
        problem = "must have sources if, and only if, data.dataset=mixture"
        raise usage_error("config.data.mixture", data.mixture, problem)
    if not is_mixture:
        _check_source(source, "data.")
        return
    if data.store:
        problem = "goes into each source of data.mixture; remove it"
        raise usage_error("config.data.store", data.store, problem)
    for number, entry in enumerate(data.mixture):
        name = f"data.mixture[{number}]"
        _check_entry(f"config.{name}", entry, data.tokenizer)
        places = {"data_dir": "", "store": ""}  # each source has one of its own
        _check_source(source | places | dict(entry), f"{name}.")


def _check_entry(name: str, entry: dict, tokenizer: str) -> None:
    """Checks what a source needs in a mixture: its weight, and data that can be mixed."""
    if not isinstance(entry, dict):
        raise usage_error(name, entry, "must be a dict, as config.data.mixture has them")
    for field in entry:
        if field not in MIXTURE_FIELDS:
            hint = nearest(field, MIXTURE_FIELDS)
            raise UsageError(f"{name}: has no field {field}{hint}; it takes {MIXTURE_FIELDS}")
    weight = entry.get("weight")
    family = entry.get("dataset", "mixture").split("/")[0]
    has_weight = isinstance(weight, int | float) and 0 < weight < math.inf
    if not has_weight or family in ("mixture", "synthetic"):
        problem = "needs a weight above 0 and a dataset of text or longcontext"
        raise usage_error(name, entry, problem)
    if family == "longcontext" and tokenizer != "byte":
        problem = f"must be byte, of which {entry['dataset']} is made"
        raise usage_error("config.data.tokenizer", tokenizer, problem)


def _check_source(source: dict, prefix: str) -> None:
    """Checks the fields of one source, named with `prefix` in an error."""
    dataset = source["dataset"]

    def require(name: str, holds: bool, problem: str) -> None:
        if not holds:
            raise usage_error(f"config.{prefix}{name}", source[name], problem)

    family = dataset.split("/")[0]
    if family in GENERATED:
        known = [f"{family}/{task}" for task in GENERATED[family]]
        problem = f"there is no such task{nearest(dataset, known)}; there are {', '.join(known)}"
        require("dataset", dataset in known, problem)
        unused = ("data_dir", "template", "store")
    elif dataset in EMBEDDED:
        unused = ("data_dir", "template")
    else:
        unused = ()
        problem = f"{prefix}dataset={dataset} needs the folder that holds it, or a store; "
        problem += "a folder of text is dataset=files with data_dir=FOLDER"
        require("data_dir", bool(source["data_dir"] or source["store"]), problem)
    if dataset != "files":
        unused += ("separator",)
    for name in ("data_dir", "store"):
        if source[name]:
            as_path(f"config.{prefix}{name}", source[name])
    for name in unused:
        require(name, not source[name], f"has no effect with {prefix}dataset={dataset}; remove it")
    require("loss_on", source["loss_on"] in LOSS_ON, f"must be one of {', '.join(LOSS_ON)}")
    if source["template"]:
        problem = _template_problem(source["template"], source["loss_on"])
        require("template", not problem, problem)
    else:
        problem = "needs a template, such as '{inputs} {targets}'"
        require("loss_on", source["loss_on"] == "all", problem)


def _template_problem(template: str, loss_on: str) -> str:
    """Describes what is wrong with a template; empty where nothing is."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; a field is a name in braces, a brace itself is doubled"
    features = [feature for _, *feature in parsed if feature[0] is not None]
    plain = all(
        name.isidentifier() and not spec and not conversion for name, spec, conversion in features
    )
    if not features or not plain:
        return "must name features in braces, such as '{inputs} {targets}'"
    _, last_feature, _, _ = parsed[-1]
    if loss_on == "targets" and last_feature is None:
        return "with loss_on=targets it must end with the feature to predict"
    return ""


def validate_devices(config: ConfigDict, devices: Sequence) -> None:
    """Checks that devices and their slices can form the mesh and divide the batch.

    Raises UsageError, with the field, otherwise.
    """
    from prope import sharding

    mesh = config.mesh
    slices = sharding.num_slices(devices)
    replicas = mesh.data or slices
    if devices[0].platform == "tpu" and replicas % slices:
        problem = f"must be a multiple of the number of slices, {slices}"
        raise usage_error("config.mesh.data", replicas, problem)
    groups = len(devices)
    for axis, size in (("tensor", mesh.tensor), ("context", mesh.context), ("data", replicas)):
        if groups % size:
            problem = f"must divide the number of devices, or of groups of them, {groups}"
            raise usage_error(f"config.mesh.{axis}", size, problem)
        if axis != "data":
            groups //= size
    multiple = config.accumulation * groups
    if config.batch_size % multiple:
        product = f"(accumulation={config.accumulation} x {groups} groups of devices)"
        problem = f"must be a multiple of {multiple} {product}"
        raise usage_error("config.batch_size", config.batch_size, problem)
