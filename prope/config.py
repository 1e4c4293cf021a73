"""The surface of a run: configs of ml_collections, as files, flags and config.json have them.

A config file in `configs/` starts from `default_config()` and sets values; it cannot add a field.
`resolve` makes a `Spec` of a config, and checks it; everything else takes specs. Fields, with
their defaults, meanings and rules, are those of the dataclasses in `prope/spec`.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from prope.errors import UsageError, log, nearest, usage_error
from prope.spec.data import EMBEDDED, is_generated
from prope.spec.fields import value_type
from prope.spec.kinds import SLIDING, repeat_pattern
from prope.spec.run import FIELDS, GROUPS, Spec, check_run, nest
from prope.user_code import is_user_code, load_function

# A Python file with an argument, the path of a config.json.
_READER = f"{pathlib.Path(__file__).parent / 'workdir' / 'saved_config.py'}:"


_CONVERT = "left on 2026-11-27; the last commit that has it is dfe6f76; --init_from with another "
_TEST = (
    "left on 2026-11-28; the last commit that has it is 4c75386; to train with windows, give "
    "layer_types and sliding_window; prope.evaluate has --window"
)
# Fields that this version no longer has: the value in the configs of runs that did without one,
# which are still read; and what to do instead.
LEFT = {
    "convert.schedule_steps": (0, f"{_CONVERT}encoding stops all pairs at once"),
    "convert.distill_weight": (0.0, f"{_CONVERT}encoding trains on text alone"),
    "model.test_window": (None, _TEST),
    "model.test_sinks": (0, _TEST),
}


def describe_left(name: str) -> str | None:
    """Says since when there is no field, or group of fields, of this name; None: never was one."""
    for field, (_, description) in LEFT.items():
        group, _, key = field.partition(".")
        if name in (field, key) or (name == group and group not in GROUPS):
            return description
    return None


def describe_unknown(name: str) -> str:
    """Says since when there is no config field of this name, or which one it resembles."""
    return describe_left(name) or f"there is no such config field{nearest(name, FIELDS)}"


def default_config() -> ConfigDict:
    """Makes a complete, locked config, with the values of a small model."""
    defaults = {
        name: placeholder(value_type(field)) if field.default is None else field.default
        for name, field in FIELDS.items()
    }
    return ConfigDict(nest(defaults)).lock()


def resolve(config: ConfigDict) -> Spec:
    """Makes the spec of a config.

    A UsageError names the field, its value, what is allowed and, where there is one, the remedy. It
    is raised before a device, a tokenizer or data is touched. The name of a function of the user's
    own ends with a hash of its file, so that a run does not go on with another one.
    """
    from prope.runtime.files import as_path  # imports TensorStore, which --help does not wait for

    return _make_spec(_embed(flat(config)), as_path)


def spec_from_dict(values: dict) -> Spec:
    """Makes the spec of a config that a run has saved; raises UsageError as `from_dict` does.

    Its places are not looked at: what reads them may not be installed, nor needed, here.
    """
    return _make_spec(flat(from_dict(values)), lambda *_: None)


def _embed(fields: dict[str, Any]) -> dict[str, Any]:
    """Replaces a file and a function that say how pairs rotate by their pairs and frequencies.

    A schedule "my_module:function" becomes "my_module:function@HASH".
    """
    pairs = fields["model.rope_pairs"]
    if pairs.endswith(".json"):
        fields["model.rope_pairs"] = read_pairs("config.model.rope_pairs", pairs)
    if is_user_code(fields["model.rope_type"]):
        fields["model.rope_frequencies"] = _call_for_layers(fields)
        fields["model.rope_type"] = "custom"
    schedule, _, _ = fields["optimizer.schedule"].partition("@")
    if is_user_code(schedule):
        source_hash = load_function("config.optimizer.schedule", schedule).source_hash
        fields["optimizer.schedule"] = f"{schedule}@{source_hash[:12]}"
    return fields


def read_pairs(field: str, path: str) -> str:
    """Returns `config.model.rope_pairs` of a file that prope.choose has written."""
    from prope.runtime.files import parse_json, read_text

    remedy = "give the pairs.json of prope.choose, or its pairs as text, as in config.json of a run"
    try:
        content = parse_json(read_text(field.removeprefix("--"), path, remedy))
        return str(content["rope_pairs"])
    except (ValueError, TypeError, KeyError) as error:
        problem = f"is no file of chosen pairs: {type(error).__name__} {error}"
        raise usage_error(field, path, problem, remedy) from None


def _call_for_layers(fields: dict[str, Any]) -> tuple:
    """Calls the function that rope_type names, with (head_dim, layer), for every layer."""
    from prope.encodings import custom_frequencies

    field, name = "config.model.rope_type", fields["model.rope_type"]
    function = load_function(field, name)
    layers = []
    kinds = repeat_pattern(fields["model.layer_types"], fields["model.num_layers"])
    for number, kind in enumerate(kinds):
        wide = None if kind == SLIDING else fields["model.global_head_dim"]
        head_dim = wide or fields["model.head_dim"]
        try:
            numbers = function.call(head_dim, number)
        except (Exception, SystemExit) as error:
            problem = f"layer {number}: {function.describe(error)}"
            raise usage_error(field, name, problem, "mend the function") from error
        try:
            layers.append(custom_frequencies(head_dim, numbers).tolist())
        except ValueError as error:
            problem = str(error).replace("rope_frequencies", f"layer {number}", 1)
            raise usage_error(field, name, problem, "mend the function") from None
    return tuple(layers)


def _make_spec(fields: dict[str, Any], check_place: Callable[[str, str], Any]) -> Spec:
    fields = {name: _to_tuple(value) for name, value in fields.items()}
    check_run(fields)
    parts = nest(fields)
    for group in reversed(GROUPS):  # the model is the last one, for it imports JAX
        parts[group] = GROUPS[group](**parts[group])
        if group == "data":
            for name, place in parts[group].places().items():
                check_place(f"config.{name}", place)
    return Spec(**parts)


def _to_tuple(value: Any) -> Any:
    """Makes tuples of lists, at every depth."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list | tuple) else value


def to_config(spec: Spec) -> ConfigDict:
    """Returns the config of a spec."""
    return from_dict(spec.to_dict())


def set_layer_percentages(config: ConfigDict, percentages: Iterable[float]) -> None:
    """Sets rope_percentage to one value per layer, although the field's type is one number."""
    with config.model.ignore_type():
        config.model.rope_percentage = tuple(map(float, percentages))


# The sizes and lengths of a config's tiny form, but for the number of heads.
_TINY = {
    "batch_size": 8,
    "accumulation": 1,
    "num_steps": 20,
    "log_every": 5,
    "eval_every": 10,
    "checkpoint_every": 10,
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.num_kv_heads": 1,
    "model.head_dim": 32,
    "model.hidden_dim": 128,
    "data.seq_len": 64,
    "mesh.context": 1,
    "optimizer.warmup_steps": 2,
    "eval.batch_size": 8,
    "eval.max_windows": 8,
}
# Where a config sets them. Layers that share keys and values are two of four.
_TINY_SHAPES = {
    "model.global_head_dim": 64,
    "model.num_global_kv_heads": 1,
    "model.num_kv_shared_layers": 2,
    "model.per_layer_input_dim": 16,
}


def shrink_for_laptop(config: ConfigDict, size: str) -> ConfigDict:
    """Returns the config for size "full"; for "tiny", one that any laptop trains in seconds.

    `--config=FILE.py:tiny` keeps p, the kind of attention and the optimizer, and cuts sizes and
    lengths. It needs no files: python_docs replaces a dataset, and byte a tokenizer; the command
    line may name others.
    """
    if size not in ("full", "tiny"):
        raise ValueError(f"the size of a config is full or tiny; got {size}")
    if size == "full":
        return config
    p = config.model.rope_percentage
    if isinstance(p, tuple):
        set_layer_percentages(config, (p[0], p[-1]))
    if config.model.layer_types:
        config.model.layer_types = ("sliding_attention", "full_attention")
        config.model.sliding_window = 16
    groups = config.model.num_heads // config.model.num_kv_heads
    fields = flat(config)
    shapes = {name: value for name, value in _TINY_SHAPES.items() if fields[name]}
    if "model.num_kv_shared_layers" in shapes:
        shapes["model.num_layers"] = 4
    config.update_from_flattened_dict(_TINY | shapes | {"model.num_heads": min(groups, 4)})
    data = config.data
    needs_files = data.dataset not in EMBEDDED and not is_user_code(data.dataset)
    if needs_files and not is_generated(data.dataset):
        choose = "--config.data.dataset and .data_dir choose another"
        log.info("tiny: python_docs replaces %s; %s", data.dataset, choose)
        empty = dict.fromkeys(("data_dir", "template", "separator", "pattern", "store"), "")
        data.update(empty | {"dataset": "python_docs", "mixture": (), "loss_on": "all"})
    if data.tokenizer != "byte":
        log.info("tiny: the byte tokenizer replaces %s", data.tokenizer)
        data.tokenizer = "byte"
        config.model.vocab_size = 260
    return config


def python_file(path: str) -> str:
    """Returns the Python file to run for a config file: for a config.json, one that reads it."""
    if path.endswith(".json") and ".py:" not in path:
        return _READER + path
    return path


def as_given(file: str) -> str:
    """Returns the path that `python_file` was given."""
    return file.removeprefix(_READER)


def flat(config: ConfigDict) -> dict:
    """Flattens the config to its fields by dotted name, {"model.num_layers": 4, ...}."""
    fields = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            fields[name] = value
    return fields


def from_dict(values: dict) -> ConfigDict:
    """Reads a config that a run has saved; fields that are newer than the run take their defaults.

    Raises UsageError for a field that this version of prope does not know, or a value of another
    type.
    """
    config = default_config()
    try:
        saved = flat(ConfigDict(values))
        for name in saved.keys() & LEFT.keys():
            value = saved.pop(name)
            unused, description = LEFT[name]
            if value != unused:
                raise usage_error(f"config.{name}", value, description)
        unknown = [name for name in saved if name not in FIELDS]
        if unknown:
            hint = nearest(unknown[0], FIELDS)
            problem = "the saved config has a field that this version does not know"
            raise UsageError(f"{problem}: {unknown[0]}{hint}")
        if isinstance(saved.get("model.rope_percentage"), list | tuple):
            set_layer_percentages(config, saved.pop("model.rope_percentage"))
        config.update_from_flattened_dict(saved)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"the saved config cannot be read: {error}") from None
    return config
