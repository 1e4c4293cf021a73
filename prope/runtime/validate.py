"""Checks of a config: before a device is touched what needs none, and against the devices as soon as they are known."""

import math
import string

from ml_collections import ConfigDict

from prope.config import ATTENTION, DTYPES, LOSS_ON, MIXTURE, REMAT, SYNTHETIC, flat, layer_percentages
from prope.errors import UsageError, nearest


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

    require("model.head_dim", fields["model.head_dim"] % 2 == 0, "must be even: RoPE rotates pairs of lanes")
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
