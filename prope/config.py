"""What a config may say: every field with its type and meaning, and the checks made before any device is touched.

A config file in `configs/` starts from `default_config()` and sets values; it cannot add a field. A run is
identified by its config, except for the fields in `MAY_CHANGE`, which say how a run is carried out and not
what it computes: those may differ when a run is resumed.
"""

import math
import string
from collections.abc import Iterable

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from prope.errors import UsageError, nearest

MAY_CHANGE = (
    "accumulation", "log_every", "eval_every", "checkpoint_every", "watchdog_minutes",
    "model.attention", "model.remat", "model.scan_layers",
    "data.data_dir", "data.cache_dir", "data.num_workers",
    "checkpoint.", "eval.", "mesh.",
)  # fmt: skip

DTYPES = ("float32", "bfloat16")
ATTENTION = ("auto", "xla", "splash", "cudnn")
LOSS_ON = ("all", "targets")
MIXTURE = ("weight", "dataset", "data_dir", "text_feature", "template", "loss_on")  # fields of a source in a mixture
SYNTHETIC = ("copy", "recall", "mix")  # the tasks of prope/data/synthetic.py
REMAT = ("none", "minimal", "save_qkv", "full")


def default_config() -> ConfigDict:
    """A complete, locked config: the fields' types and, where a field has no neutral value, a small model's."""
    config = ConfigDict()
    config.batch_size = 16  # sequences per optimizer step, over all devices
    config.accumulation = 1  # parts that a batch is computed in, one after the other, to save memory
    config.num_steps = 1000  # optimizer steps of the whole run
    config.seed = 0  # initial weights and the order of the data
    config.log_every = 10  # steps
    config.eval_every = 500  # steps; the last step is always evaluated
    config.checkpoint_every = 500  # steps; the last step is always saved
    config.watchdog_minutes = 60.0  # the process ends where nothing happens for so long; 0: it waits for ever

    config.model = model = ConfigDict()
    model.num_layers = 4
    model.embed_dim = 256  # D
    model.num_heads = 4  # N, query heads
    model.num_kv_heads = 1  # K; 1 is multi-query, num_heads is multi-head attention
    model.head_dim = 64  # H, even
    model.hidden_dim = 1024  # F, of each of the two gates of the MLP
    model.vocab_size = 260  # V, at least the tokenizer's
    model.max_wavelength = 10_000.0  # theta, the base wavelength
    model.rope_percentage = 1.0  # p in [0, 1]: 1 is RoPE, 0 is NoPE; a number per layer: set_layer_percentages
    model.dtype = "float32"  # of activations and matmuls: float32 | bfloat16; parameters are always float32
    model.attention = "auto"  # auto | xla | splash (TPU) | cudnn (NVIDIA)
    model.scan_layers = True  # compile one layer and loop, or unroll; same parameters, same result
    # What a layer keeps for its backward pass, from the fastest to the smallest: none (everything) | minimal (the
    # wide matmuls and attention) | save_qkv (attention: q, k, v and output) | full (the layer's input only).
    model.remat = "none"

    config.data = data = ConfigDict()
    # python_docs | files | a TFDS name such as wikipedia/20230601.en | mixture | synthetic/ and copy, recall or mix
    data.dataset = "python_docs"
    data.data_dir = ""  # where TFDS data or files are; not used by python_docs
    data.text_feature = "text"  # the feature of a TFDS record, or the key of a JSON line, that holds the text
    data.template = ""  # instead of text_feature: a text with features in braces, "Q: {inputs}\nA: {targets}"
    data.loss_on = "all"  # all | targets (the template's last feature; what stands before it is given)
    data.mixture = ()  # for dataset mixture: ({"weight": 0.9, "dataset": .., "data_dir": ..}, ..), a dict per source
    data.tokenizer = "byte"  # byte | path of a SentencePiece .model
    data.seq_len = 256  # T, tokens in a window
    data.mask_documents = False  # True: positions restart and attention stops at document borders
    data.position_range = placeholder(int)  # R: training positions are drawn from 0 .. R-1; None: they are 0 .. T-1
    data.validation_fraction = 0.05  # share of the documents held out, chosen by a hash of their text
    data.cache_dir = ""  # folder or gs:// URL of token stores; empty: $PROPE_CACHE, else ~/.cache/prope
    data.num_workers = 0  # processes that tokenise; 0: one per core

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 1e-3  # at the peak
    optimizer.final_learning_rate = 1e-4  # at the last step, where the cosine ends
    optimizer.warmup_steps = 100
    optimizer.b1 = 0.9
    optimizer.b2 = 0.95
    optimizer.eps = 1e-8
    optimizer.weight_decay = 0.1  # of matrices only, not of norm scales
    optimizer.clip_norm = 1.0  # of the gradient over all parameters
    optimizer.mu_dtype = "float32"  # of AdamW's first moment; the second is always float32

    config.mesh = mesh = ConfigDict()
    mesh.data = placeholder(int)  # replicas of the parameters; None: one per slice. All other devices share them (FSDP)
    mesh.tensor = 1  # devices that share a sequence: parts of the heads, of the hidden units, of the vocabulary

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.max_to_keep = 2  # newest checkpoints kept
    checkpoint.keep_every = placeholder(int)  # steps: the checkpoints of its multiples are kept for ever; None: none
    checkpoint.every_minutes = 30.0  # saved by the clock as well, whichever comes first; 0: by steps only

    config.eval = evaluation = ConfigDict()
    evaluation.batch_size = 16  # windows at a time; the result does not depend on it
    evaluation.max_windows = placeholder(int)  # evaluate on this many, evenly spread; None: on all
    return config.lock()


def layer_percentages(model: ConfigDict) -> tuple[float, ...]:
    """rope_percentage of every layer, from a run's `config.model`, which may give one number for all."""
    p = model.rope_percentage
    return (p,) * model.num_layers if isinstance(p, int | float) else tuple(p)


def set_layer_percentages(config: ConfigDict, percentages: Iterable[float]) -> None:
    """Gives every layer its own rope_percentage; the field's declared type is one number."""
    with config.model.ignore_type():
        config.model.rope_percentage = tuple(map(float, percentages))


def sized(config: ConfigDict, size: str) -> ConfigDict:
    """The config as it is for size "full"; for "tiny", one that any laptop trains in seconds.

    `--config=FILE.py:tiny` keeps what the run is about (data, p, kinds of attention head, optimizer) and cuts sizes
    and lengths.
    """
    if size not in ("full", "tiny"):
        raise ValueError(f"the size of a config is full or tiny; got {size}")
    if size == "full":
        return config
    if isinstance(config.model.rope_percentage, tuple):
        set_layer_percentages(config, config.model.rope_percentage[:2])
    groups = config.model.num_heads // config.model.num_kv_heads
    config.update_from_flattened_dict({
        "batch_size": 8, "accumulation": 1, "num_steps": 20, "log_every": 5, "eval_every": 10, "checkpoint_every": 10,
        "model.num_layers": 2, "model.embed_dim": 64, "model.num_heads": min(groups, 4), "model.num_kv_heads": 1,
        "model.head_dim": 32, "model.hidden_dim": 128, "data.seq_len": 64,
        "optimizer.warmup_steps": 2, "eval.batch_size": 8, "eval.max_windows": 8,
    })  # fmt: skip
    return config


def flat(config: ConfigDict) -> dict:
    """The config's fields by dotted name, {"model.num_layers": 4, ...}."""
    fields = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            fields |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            fields[name] = value
    return fields


def from_dict(values: dict) -> ConfigDict:
    """The config that a run has written; fields that it did not know yet take their defaults.

    Raises:
      UsageError: a field that this version of prope does not know, or a value of another type.
    """
    config = default_config()
    given = flat(ConfigDict(values))
    known = flat(config)
    for name in given:
        if name not in known:
            raise UsageError(
                f"the saved config has a field that this version does not know: {name}{nearest(name, known)}"
            )
    try:
        if isinstance(given.get("model.rope_percentage"), list | tuple):
            set_layer_percentages(config, given.pop("model.rope_percentage"))
        config.update_from_flattened_dict(given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the saved config cannot be read: {error}") from None
    return config


def differences(config: ConfigDict, other: ConfigDict) -> list[str]:
    """'model.rope_percentage: 0.25, not 0.75' for every field that makes two configs different runs."""
    ours, theirs = flat(config), flat(other)
    for fields in (ours, theirs):  # as data.data_dir may change, so may those in a mixture
        fields["data.mixture"] = [{k: v for k, v in e.items() if k != "data_dir"} for e in fields["data.mixture"]]
    return [
        f"{name}: {theirs[name]}, not {value}"
        for name, value in ours.items()
        if value != theirs[name] and not name.startswith(MAY_CHANGE)
    ]


def read_elsewhere(data: ConfigDict, dataset: str | None, data_dir: str | None) -> None:
    """Makes a run's `config.data` name another dataset, as a plain one, or another place; None changes nothing."""
    if dataset is not None:
        plain = {"mixture": (), "template": "", "loss_on": "all"}
        data.update({"dataset": dataset, "data_dir": "", **plain})
    if data_dir is not None:
        data.data_dir = data_dir


def validate(config: ConfigDict) -> None:
    """Checks what can be known without a device, a tokenizer or data.

    Raises:
      UsageError: naming the field, its value, what is allowed and, where there is one, the remedy.
    """
    fields = flat(config)

    def require(name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise UsageError(f"config.{name}={fields[name]}: {allowed}")

    layers = layer_percentages(config.model)
    allowed = "must be a fraction in [0, 1], where 1 is RoPE and 0 is NoPE"
    require("model.rope_percentage", all(0 <= p <= 1 for p in layers), allowed)  # first: nan is not finite either
    count = f"must be one number, or one for each of model.num_layers={config.model.num_layers}"
    require("model.rope_percentage", len(layers) == config.model.num_layers, count)
    for name, value in fields.items():
        if isinstance(value, float):
            require(name, math.isfinite(value), "must be a finite number")
    positive = (
        "batch_size", "accumulation", "num_steps", "log_every", "eval_every", "checkpoint_every",
        "model.num_layers", "model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.head_dim",
        "model.hidden_dim", "model.vocab_size", "data.seq_len", "eval.batch_size", "mesh.tensor",
        "checkpoint.max_to_keep",
    )  # fmt: skip
    for name in positive:
        require(name, fields[name] >= 1, "must be at least 1")
    for name in (
        "seed", "data.num_workers", "optimizer.warmup_steps", "optimizer.weight_decay", "watchdog_minutes",
        "checkpoint.every_minutes",
    ):  # fmt: skip
        require(name, fields[name] >= 0, "must not be negative")
    for name in ("optimizer.learning_rate", "optimizer.eps", "optimizer.clip_norm"):
        require(name, fields[name] > 0, "must be positive")
    for name in ("optimizer.b1", "optimizer.b2"):
        require(name, 0 <= fields[name] < 1, "must be in [0, 1)")
    for name, allowed in (
        ("model.dtype", DTYPES), ("optimizer.mu_dtype", DTYPES),
        ("model.attention", ATTENTION), ("model.remat", REMAT),
    ):  # fmt: skip
        require(name, fields[name] in allowed, f"must be one of {', '.join(allowed)}")
    for name, none in (
        ("eval.max_windows", "all"), ("mesh.data", "one per slice"), ("checkpoint.keep_every", "none of them"),
    ):  # fmt: skip
        if fields[name] is not None:
            require(name, fields[name] >= 1, f"must be at least 1, or None for {none}")

    require("model.head_dim", fields["model.head_dim"] % 2 == 0, "must be even: RoPE turns pairs of lanes")
    require("model.max_wavelength", fields["model.max_wavelength"] > 1, "must be greater than 1")
    heads, kv_heads = fields["model.num_heads"], fields["model.num_kv_heads"]
    require("model.num_heads", heads % kv_heads == 0, f"must be a multiple of model.num_kv_heads={kv_heads}")
    tensor = fields["mesh.tensor"]
    for name in ("model.num_heads", "model.hidden_dim", "model.vocab_size"):
        require(name, fields[name] % tensor == 0, f"must be a multiple of mesh.tensor={tensor}")
    shared = kv_heads == 1 or kv_heads % tensor == 0
    require("model.num_kv_heads", shared, f"must be 1, which every device keeps, or a multiple of mesh.tensor={tensor}")
    parts = fields["accumulation"]
    require("batch_size", fields["batch_size"] % parts == 0, f"must be a multiple of accumulation={parts}")
    steps, peak = fields["num_steps"], fields["optimizer.learning_rate"]
    require(
        "optimizer.warmup_steps",
        fields["optimizer.warmup_steps"] < steps,
        f"must be less than num_steps={steps}",
    )
    final = fields["optimizer.final_learning_rate"]
    require("optimizer.final_learning_rate", 0 <= final <= peak, f"must be in [0, optimizer.learning_rate={peak}]")
    if fields["data.position_range"] is not None:
        allowed = f"must be from data.seq_len={fields['data.seq_len']} to {2**31}, or None for ordinary positions"
        require("data.position_range", fields["data.seq_len"] <= fields["data.position_range"] <= 2**31, allowed)
    share = fields["data.validation_fraction"]
    require("data.validation_fraction", 0 < share < 1, "must be between 0 and 1")
    require("data.loss_on", fields["data.loss_on"] in LOSS_ON, f"must be one of {', '.join(LOSS_ON)}")
    if fields["data.dataset"].startswith("synthetic/"):
        require("data.tokenizer", fields["data.tokenizer"] == "byte", "has no effect with synthetic data; remove it")
    mixed = fields["data.dataset"] == "mixture"
    require("data.mixture", mixed == bool(fields["data.mixture"]), "goes with data.dataset=mixture, and that with it")
    for number, entry in enumerate(fields["data.mixture"]):
        where = f"data.mixture[{number}]"
        for name in entry:
            if name not in MIXTURE:
                raise UsageError(f"config.{where}: has no field {name}{nearest(name, MIXTURE)}; it takes {MIXTURE}")
        weight = entry.get("weight")
        if (
            not isinstance(weight, int | float)
            or not 0 < weight < math.inf
            or entry.get("dataset", "mixture").split("/")[0] in ("mixture", "synthetic")
        ):
            raise UsageError(f"config.{where}={entry}: needs a weight above 0 and a dataset of text")
        own = {name: fields[f"data.{name}"] for name in MIXTURE[2:]} | {"data_dir": ""} | dict(entry)
        _check_source(own, f"{where}.")
    if not mixed:
        _check_source({name: fields[f"data.{name}"] for name in MIXTURE[1:]}, "data.")


def _check_source(source: dict, prefix: str) -> None:
    """Checks the fields of one source, named with `prefix` in an error."""

    def require(name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise UsageError(f"config.{prefix}{name}={source[name]}: {allowed}")

    if source["dataset"].split("/")[0] == "synthetic":
        known = [f"synthetic/{task}" for task in SYNTHETIC]
        hint = nearest(source["dataset"], known)
        require("dataset", source["dataset"] in known, f"there is no such task{hint}; there are {', '.join(known)}")
        for name in ("data_dir", "template"):
            require(name, not source[name], f"has no effect with {prefix}dataset={source['dataset']}; remove it")
    elif source["dataset"] == "python_docs":
        require("data_dir", not source["data_dir"], f"has no effect with {prefix}dataset=python_docs; remove it")
        require("template", not source["template"], f"has no effect with {prefix}dataset=python_docs; remove it")
    else:
        require(
            "data_dir", bool(source["data_dir"]), f"{prefix}dataset={source['dataset']} needs the folder that holds it"
        )
    targets = source["loss_on"] == "targets"
    require("loss_on", source["loss_on"] in LOSS_ON, f"must be one of {', '.join(LOSS_ON)}")
    require("loss_on", bool(source["template"]) or not targets, "needs a template, such as '{inputs} {targets}'")
    if not source["template"]:
        return
    try:
        parsed = list(string.Formatter().parse(source["template"]))
        whole = all(name is None or (name.isidentifier() and not spec and not how) for _, name, spec, how in parsed)
    except ValueError as error:
        require("template", False, f"{error}; a field is a name in braces, a brace itself is doubled")
    named = [name for _, name, _, _ in parsed if name is not None]
    require("template", whole and bool(named), "must name features in braces, such as '{inputs} {targets}'")
    ends = parsed[-1][1] is not None
    require("template", ends or not targets, "with loss_on=targets it must end with the feature to predict")


def validate_devices(config: ConfigDict, devices: int, slices: int = 1) -> None:
    """Checks the config against the number of devices and of slices, as soon as these are known.

    Raises:
      UsageError: a batch or a mesh that the devices cannot divide.
    """
    replicas, tensor, parts = config.mesh.data or slices, config.mesh.tensor, config.accumulation
    if replicas % slices:
        raise UsageError(f"config.mesh.data={replicas}: must be a multiple of the number of slices, {slices}")
    if devices % tensor:
        raise UsageError(f"config.mesh.tensor={tensor}: must divide the number of devices, {devices}")
    if devices // tensor % replicas:
        over = f" over mesh.tensor={tensor}" if tensor > 1 else ""
        raise UsageError(f"config.mesh.data={replicas}: must divide the number of devices, {devices}{over}")
    rows = devices // tensor
    if config.batch_size % (parts * rows):
        raise UsageError(
            f"config.batch_size={config.batch_size}: must be a multiple of {parts * rows} "
            f"(accumulation={parts} x {rows} {'devices' if tensor == 1 else f'groups of {tensor} devices'})"
        )
