"""Checks a config: first what needs no device, then the divisions over devices and slices."""

import functools
import math
import string
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from prope import config as config_lib
from prope import encodings, sharding
from prope.config import DTYPES, REMAT, flat, is_generated
from prope.errors import UsageError, nearest
from prope.longcontext.tasks import VARIANTS

# (what a value must satisfy unless it is None, the error, the fields)
_RANGES = (
    (
        lambda x: x >= 1,
        "must be at least 1",
        """batch_size accumulation num_steps log_every eval_every checkpoint_every
        model.num_layers model.embed_dim model.num_heads model.num_kv_heads model.head_dim model.hidden_dim
        model.vocab_size data.seq_len eval.batch_size mesh.context mesh.tensor checkpoint.max_to_keep
        model.rope_scaling_factor model.sliding_window model.original_seq_len""",
    ),
    (
        lambda x: x >= 0,
        "must not be negative",
        """seed data.num_workers optimizer.warmup_steps optimizer.weight_decay
        watchdog_minutes checkpoint.every_minutes model.clip_low_n""",
    ),
    (
        lambda x: x > 0,
        "must be positive",
        "optimizer.learning_rate optimizer.eps optimizer.clip_norm",
    ),
    (lambda x: 0 <= x < 1, "must be in [0, 1)", "optimizer.b1 optimizer.b2"),
    (lambda x: 0 < x < 1, "must be between 0 and 1", "data.validation_fraction"),
    (lambda x: x > 1, "must be greater than 1", "model.max_wavelength model.local_max_wavelength"),
    (lambda x: x % 2 == 0, "must be even: RoPE rotates pairs of lanes", "model.head_dim"),
)
LOSS_ON = ("all", "targets")
_CHOICES = {
    "model.dtype": DTYPES,
    "optimizer.mu_dtype": DTYPES,
    "model.attention": ("auto", "xla", "splash", "cudnn"),
    "model.remat": REMAT,
    "data.loss_on": LOSS_ON,
    "on_nonfinite": ("stop", "skip"),
}
SYNTHETIC = ("copy", "recall", "mix")  # the tasks of prope/data/synthetic.py
GENERATED = {"synthetic": SYNTHETIC, "longcontext": ("mix", *VARIANTS)}
# of a source in a mixture
MIXTURE_FIELDS = ("weight", "dataset", "data_dir", "text_feature", "template", "loss_on", "store")
_OPTIONAL = {
    "eval.max_windows": "all",
    "mesh.data": "one per slice or node",
    "checkpoint.keep_every": "none of them",
}
_MULTIPLES = (  # the first must be a multiple of the second
    ("model.num_heads", "model.num_kv_heads"),
    ("model.num_heads", "mesh.tensor"),
    ("model.hidden_dim", "mesh.tensor"),
    ("model.vocab_size", "mesh.tensor"),
    ("batch_size", "accumulation"),
)


def validate(config: ConfigDict) -> None:
    """Checks what can be known without a device, a tokenizer or data.

    A UsageError names the field, its value, what is allowed and, where there is one, the remedy.
    """
    fields = flat(config)
    require = functools.partial(_require, fields, "")
    for name, default in flat(config_lib.default_config()).items():
        require(
            name,
            default is None or fields[name] is not None,
            f"must have a value, such as {default}",
        )
    p, local = fields["model.rope_percentage"], fields["model.local_rope_percentage"]
    layers = [p] * config.model.num_layers if isinstance(p, int | float) else p
    allowed = "must be a fraction in [0, 1], where 1 is RoPE and 0 is NoPE"
    require(
        "model.rope_percentage", all(0 <= p <= 1 for p in layers), allowed
    )  # first: nan is not finite either
    count = f"must be one number, or one for each of model.num_layers={config.model.num_layers}"
    require("model.rope_percentage", len(layers) == config.model.num_layers, count)
    require("model.local_rope_percentage", local is None or 0 <= local <= 1, allowed)
    for name, value in fields.items():
        if isinstance(value, float):
            require(name, math.isfinite(value), "must be a finite number")
    for satisfies, allowed, names in _RANGES:
        for name in names.split():
            require(name, fields[name] is None or satisfies(fields[name]), allowed)
    for name, choices in _CHOICES.items():
        require(name, fields[name] in choices, f"must be one of {', '.join(choices)}")
    for name, none in _OPTIONAL.items():
        require(
            name,
            fields[name] is None or fields[name] >= 1,
            f"must be at least 1, or None for {none}",
        )
    for name, divisor in _MULTIPLES:
        require(
            name,
            fields[name] % fields[divisor] == 0,
            f"must be a multiple of {divisor}={fields[divisor]}",
        )
    _check_encoding(config.model, require)
    kv_heads, tensor = fields["model.num_kv_heads"], fields["mesh.tensor"]
    allowed = f"must be 1, which every device keeps, or a multiple of mesh.tensor={tensor}"
    require("model.num_kv_heads", kv_heads == 1 or kv_heads % tensor == 0, allowed)
    parts, seq_len = fields["mesh.context"], fields["data.seq_len"]
    allowed = f"must be a multiple of 2 x 128 x mesh.context={parts}: each of its parts is two chunks of whole blocks"
    require("data.seq_len", parts == 1 or seq_len % (256 * parts) == 0, allowed)
    steps, peak = fields["num_steps"], fields["optimizer.learning_rate"]
    require(
        "optimizer.warmup_steps",
        fields["optimizer.warmup_steps"] < steps,
        f"must be less than num_steps={steps}",
    )
    traced = fields["profile"]
    allowed = f"must be two steps, first and last, of 1 to num_steps={steps}, or () for none"
    two = len(traced) == 2 and all(isinstance(step, int) for step in traced)
    require("profile", not traced or (two and 1 <= traced[0] <= traced[1] <= steps), allowed)
    final = fields["optimizer.final_learning_rate"]
    require(
        "optimizer.final_learning_rate",
        0 <= final <= peak,
        f"must be in [0, optimizer.learning_rate={peak}]",
    )
    limit = fields["data.position_range"]
    allowed = f"must be from data.seq_len={seq_len} to {2**31}, or None for ordinary positions"
    require("data.position_range", limit is None or seq_len <= limit <= 2**31, allowed)
    if is_generated(fields["data.dataset"]):
        unused = f"has no effect with {fields['data.dataset'].split('/')[0]} data; remove it"
        require("data.tokenizer", fields["data.tokenizer"] == "byte", unused)
    mixed = fields["data.dataset"] == "mixture"
    require(
        "data.mixture",
        mixed == bool(fields["data.mixture"]),
        "goes with data.dataset=mixture, and that with it",
    )
    common = {name: fields[f"data.{name}"] for name in MIXTURE_FIELDS[1:]}
    require(
        "data.store",
        not (mixed and fields["data.store"]),
        "goes into each source of data.mixture; remove it",
    )
    if not mixed:
        _check_source(common, "data.")
    for number, entry in enumerate(fields["data.mixture"]):
        where = f"data.mixture[{number}]"
        for name in entry:
            if name not in MIXTURE_FIELDS:
                hint = nearest(name, MIXTURE_FIELDS)
                raise UsageError(
                    f"config.{where}: has no field {name}{hint}; it takes {MIXTURE_FIELDS}"
                )
        weight, kind = entry.get("weight"), entry.get("dataset", "mixture").split("/")[0]
        if not (isinstance(weight, int | float) and 0 < weight < math.inf) or kind in (
            "mixture",
            "synthetic",
        ):
            raise UsageError(
                f"config.{where}={entry}: needs a weight above 0 and a dataset of text or longcontext"
            )
        if kind == "longcontext":
            of_bytes = fields["data.tokenizer"] == "byte"
            require(
                "data.tokenizer", of_bytes, f"must be byte, of which {entry['dataset']} is made"
            )
        _check_source(common | {"data_dir": "", "store": ""} | dict(entry), f"{where}.")


def _check_encoding(model: ConfigDict, require: Callable) -> None:
    """Checks the encoding's fields: those of its type, scaling and windows have values, and no others are set."""
    defaults, pattern = config_lib.default_config().model, tuple(model.layer_types)
    types = {name: fields for name, (_, fields) in encodings.TYPES.items()}
    tables = {
        "rope_type": types,
        "rope_scaling_type": encodings.SCALINGS,
        "logit_scale": encodings.LOGIT_SCALES,
    }
    taken = {*tables, "layer_types"}
    for name, table in tables.items():
        known = f"there is none{nearest(model[name], table)}; must be one of {', '.join(table)}"
        require(f"model.{name}", model[name] in table, known)
        taken |= {*table[model[name]]}
    scales = encodings.can_rescale(model.rope_type, model.rope_scaling_type)
    require(
        "model.rope_scaling_type",
        scales,
        f"needs a wavelength, which rope_type={model.rope_type} has not",
    )
    for kind in pattern:
        known = f"there is no {kind}{nearest(kind, encodings.LAYER_TYPES)}; it takes {', '.join(encodings.LAYER_TYPES)}"
        require("model.layer_types", kind in encodings.LAYER_TYPES, known)
    fills = (
        f"must fill the layers: as many as model.num_layers={model.num_layers}, or a divisor of it"
    )
    require("model.layer_types", not pattern or model.num_layers % len(pattern) == 0, fills)
    if "sliding_attention" in pattern:
        taken |= {"sliding_window", "local_max_wavelength", "local_rope_percentage"}
    optional = {"local_max_wavelength", "local_rope_percentage"}
    for name in sorted(encodings.FIELDS):
        if name in taken:
            missing = name not in optional and model[name] is None
            require(f"model.{name}", not missing, "must have a value, which its type needs")
        elif model[name] != defaults[name]:
            chosen = ", ".join(f"{field}={model[field]}" for field in (*tables, "layer_types"))
            require(
                f"model.{name}",
                False,
                f"has no effect with {chosen}; it takes {', '.join(sorted(taken))}",
            )
    if "scaled_pairs" in taken:
        last, pairs = model.head_dim // 2 - 1, tuple(model.scaled_pairs)
        band = (
            len(pairs) == 2
            and all(type(pair) is int for pair in pairs)
            and 0 <= pairs[0] <= pairs[1] <= last
        )
        require(
            "model.scaled_pairs",
            band,
            f"must be two pairs of 0 to {last}, the first and the last of a band",
        )
    try:
        encodings.layer_frequencies(model)
    except ValueError as error:
        raise UsageError(f"config.model.{error}") from None


def _require(fields: dict, prefix: str, name: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise UsageError(f"config.{prefix}{name}={fields[name]}: {allowed}")


def _check_source(source: dict, prefix: str) -> None:
    """Checks the fields of one source, named with `prefix` in an error."""
    require = functools.partial(_require, source, prefix)
    dataset, template, targets = (
        source["dataset"],
        source["template"],
        source["loss_on"] == "targets",
    )
    family = dataset.split("/")[0]
    generated = family in GENERATED
    if generated:
        known = [f"{family}/{task}" for task in GENERATED[family]]
        hint = nearest(dataset, known)
        require(
            "dataset",
            dataset in known,
            f"there is no such task{hint}; there are {', '.join(known)}",
        )
    if generated or dataset == "python_docs":
        for name in ("data_dir", "template", *(["store"] if generated else [])):
            require(
                name, not source[name], f"has no effect with {prefix}dataset={dataset}; remove it"
            )
    else:
        place = source["data_dir"] or source["store"]
        require(
            "data_dir",
            bool(place),
            f"{prefix}dataset={dataset} needs the folder that holds it, or a store",
        )
    require("loss_on", source["loss_on"] in LOSS_ON, f"must be one of {', '.join(LOSS_ON)}")
    require(
        "loss_on", bool(template) or not targets, "needs a template, such as '{inputs} {targets}'"
    )
    if not template:
        return
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        require(
            "template", False, f"{error}; a field is a name in braces, a brace itself is doubled"
        )
    plain = all(
        name is None or (name.isidentifier() and not spec and not how)
        for _, name, spec, how in parsed
    )
    named = any(name is not None for _, name, _, _ in parsed)
    require(
        "template", plain and named, "must name features in braces, such as '{inputs} {targets}'"
    )
    ends = parsed[-1][1] is not None
    require(
        "template",
        ends or not targets,
        "with loss_on=targets it must end with the feature to predict",
    )


def validate_devices(config: ConfigDict, all_devices: Sequence) -> None:
    """Raises UsageError where the devices, or their slices, cannot divide the batch, or cannot form the mesh."""
    devices, slices, mesh = len(all_devices), sharding.num_slices(all_devices), config.mesh
    replicas, parts = mesh.data or slices, config.accumulation
    if all_devices[0].platform == "tpu" and replicas % slices:
        raise UsageError(
            f"config.mesh.data={replicas}: must be a multiple of the number of slices, {slices}"
        )
    per_sequence, over = 1, ""
    for name, size in (("tensor", mesh.tensor), ("context", mesh.context), ("data", replicas)):
        if devices // per_sequence % size:
            raise UsageError(
                f"config.mesh.{name}={size}: must divide the number of devices, {devices}{over}"
            )
        if name != "data" and size > 1:
            per_sequence *= size
            over += f"{' and ' if over else ' over '}mesh.{name}={size}"
    rows = devices // per_sequence
    if config.batch_size % (parts * rows):
        groups = "devices" if per_sequence == 1 else f"groups of {per_sequence} devices"
        multiple = f"{parts * rows} (accumulation={parts} x {rows} {groups})"
        raise UsageError(f"config.batch_size={config.batch_size}: must be a multiple of {multiple}")
