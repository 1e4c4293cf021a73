"""A run as a value: the model, the data and everything else that its config says.

`prope.config.resolve` makes a `Spec` of a config, once. All that is not a command takes specs.
"""

import dataclasses
import operator
import os
from typing import Any

from prope.errors import shorten, usage_error
from prope.spec.data import DataSpec
from prope.spec.fields import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE,
    changeable,
    check_field,
    one_of,
    optional_count,
    rule,
    setting,
)
from prope.spec.model import DTYPES, ModelSpec
from prope.user_code import is_user_code

SCHEDULES = ("constant", "cosine", "wsd")
# A run may go on with other values of _LENGTHS, as long as updates that are done had these rates.
EXTENDABLE = ("constant", "wsd")
_LENGTHS = ("num_steps", "optimizer.decay_share")
LOG_TARGETS = ("tensorboard", "wandb", "csv")

_SEED = rule(lambda x: 0 <= x < 2**32, "must be in [0, 2^32 - 1]: keys of JAX hold 32 bits of it")
_DECAY_RATE = rule(lambda x: 0 <= x < 1, "must be in [0, 1)")
_SCHEDULE = rule(
    lambda x: x in SCHEDULES or is_user_code(x.partition("@")[0]),
    f"must be one of {', '.join(SCHEDULES)}, or my_module:function",
)
_LOG_TO = rule(
    lambda names: all(name in LOG_TARGETS or is_user_code(str(name)) for name in names),
    f"must be some of {', '.join(LOG_TARGETS)}, my_module:function",
)


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """The update rule: the fields of `config.optimizer`."""

    name: str = setting(
        "adamw",
        "adamw | lion | adafactor (has no b1, b2, eps, mu_dtype) | muon (matrices of layers; "
        "Adam for the rest)",
        one_of("adamw", "lion", "adafactor", "muon"),
    )
    learning_rate: float = setting(0.001, "at the peak, the end of warmup", POSITIVE)
    schedule: str = setting(
        "cosine",
        "after warmup: cosine | constant | wsd (constant, then linear decay) | "
        "my_module:function, from a Spec to an Optax schedule",
        _SCHEDULE,
    )
    decay_share: float = setting(
        0.2,
        "of wsd: the share of num_steps, at their end, in which the rate decays",
        rule(lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    )
    final_learning_rate: float = setting(0.0001, "at the last step, the end of the decay")
    warmup_steps: int = setting(
        100,
        "linear, from 0 to learning_rate; in a run that is no longer, a tenth of it",
        NOT_NEGATIVE,
    )
    b1: float = setting(0.9, "decay rate of the first moment", _DECAY_RATE)
    b2: float = setting(0.95, "decay rate of the second moment", _DECAY_RATE)
    eps: float = setting(1e-08, "added to the denominator, but of lion", POSITIVE)
    weight_decay: float = setting(0.1, "of matrices, not of norm scales", NOT_NEGATIVE)
    clip_norm: float = setting(1.0, "largest norm of the gradient over all parameters", POSITIVE)
    mu_dtype: str = setting(
        "float32", "dtype of the first moment; the second is always float32", one_of(*DTYPES)
    )


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """How devices are arranged: the fields of `config.mesh`."""

    data: int | None = changeable(
        None,
        "replicas of the parameters, within which FSDP shards them; None: one per TPU slice or "
        "GPU node. A replica may span GPU nodes, but not slices",
        optional_count("one per slice or node"),
    )
    context: int = changeable(
        1,
        "C, devices over which every sequence is split; its keys and values are all-gathered",
        AT_LEAST_1,
    )
    tensor: int = changeable(
        1, "devices over which heads, hidden units and vocabulary are split", AT_LEAST_1
    )
    gather: str = changeable(
        "head",
        "what a device holds whole of sharded parameters. head: the layer at work and the "
        "head's table; ahead: on TPUs also the next layer, fastest. prope.plan --search tells "
        "what fits",
        one_of("head", "ahead"),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """Which checkpoints are kept: the fields of `config.checkpoint`."""

    max_to_keep: int = changeable(2, "newest checkpoints kept", AT_LEAST_1)
    keep_every: int | None = changeable(
        None, "steps whose multiples are kept for ever; None: none", optional_count("none of them")
    )
    every_minutes: float = changeable(
        30.0, "minutes between checkpoints, beside checkpoint_every; 0: by steps only", NOT_NEGATIVE
    )


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """How losses are evaluated: the fields of `config.eval`."""

    batch_size: int = changeable(16, "windows at a time; does not change the result", AT_LEAST_1)
    max_windows: int | None = changeable(
        None, "number of windows to evaluate, evenly spread; None: all", optional_count("all")
    )


@dataclasses.dataclass(frozen=True)
class Spec:
    """A run: what its config means."""

    batch_size: int = setting(16, "sequences per optimizer step, over all devices", AT_LEAST_1)
    accumulation: int = changeable(
        1, "microbatches per batch, computed one after the other to save memory", AT_LEAST_1
    )
    loss_dtype: str = setting(
        "float32",
        "float32 | bfloat16: what logits are rounded to before the loss of training, whose softmax "
        "and sums are always float32",
        one_of(*DTYPES),
    )
    num_steps: int = setting(1000, "optimizer steps of the whole run", AT_LEAST_1)
    on_nonfinite: str = changeable(
        "stop",
        "where a loss or gradient is not finite: stop | skip the step, up to 10 in a row",
        one_of("stop", "skip"),
    )
    seed: int = setting(0, "of the initial weights and the order of the data", _SEED)
    log_every: int = changeable(10, "steps between lines of metrics.jsonl", AT_LEAST_1)
    log_to: tuple = changeable(
        ("tensorboard",),
        "where records go, beside the JSON lines: tensorboard, wandb, csv, my_module:function, "
        "which gets each as a dict",
        _LOG_TO,
    )
    eval_every: int = changeable(
        500, "steps between evaluations; the last step is always evaluated", AT_LEAST_1
    )
    checkpoint_every: int = changeable(
        500, "steps between checkpoints; the last step is always saved", AT_LEAST_1
    )
    watchdog_minutes: float = changeable(
        60.0, "minutes without progress after which the process ends; 0: never", NOT_NEGATIVE
    )
    profile: tuple = changeable(
        (),
        "first and last step, as in 10,12, whose trace jax.profiler writes to W/profile; empty: "
        "none",
    )
    model: ModelSpec = dataclasses.field(default_factory=ModelSpec)  # which imports JAX
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    optimizer: OptimizerSpec = OptimizerSpec()
    mesh: MeshSpec = MeshSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    eval: EvalSpec = EvalSpec()

    def __post_init__(self):
        check_run(self.flat())

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the config, nested as config.json has them."""
        return nest(self.flat())

    def flat(self) -> dict[str, Any]:
        """Returns the fields of the config by dotted name, {"model.num_layers": 4, ..}."""
        return {name: operator.attrgetter(name)(self) for name in FIELDS}

    def replace(self, fields: dict[str, Any]) -> "Spec":
        """Returns the spec with other values of fields, by dotted name; it is checked again."""
        changed = nest(fields)
        for group in changed.keys() & GROUPS:
            changed[group] = dataclasses.replace(getattr(self, group), **changed[group])
        return dataclasses.replace(self, **changed)


GROUPS = {
    "model": ModelSpec,
    "data": DataSpec,
    "optimizer": OptimizerSpec,
    "mesh": MeshSpec,
    "checkpoint": CheckpointSpec,
    "eval": EvalSpec,
}


def nest(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields by dotted name as config.json has them: those of a group in a dict."""
    nested = {}
    for name, value in fields.items():
        group, _, key = name.rpartition(".")
        parent = nested.setdefault(group, {}) if group else nested
        parent[key] = value
    return nested


# Every field of a config, by dotted name.
FIELDS = {
    f"{group}.{field.name}".lstrip("."): field
    for group, kind in {"": Spec, **GROUPS}.items()
    for field in dataclasses.fields(kind)
    if "meaning" in field.metadata
}


def check_run(fields: dict[str, Any]) -> None:
    """Checks every field by its rules, then what fields of several groups need of each other.

    `resolve` calls it before it builds a model, which imports JAX; every `Spec` calls it again.
    """
    for name, field in FIELDS.items():
        check_field(f"config.{name}", fields[name], field)

    def require(name, holds, problem):
        if not holds:
            raise usage_error(f"config.{name}", fields[name], problem)

    accumulation, steps = fields["accumulation"], fields["num_steps"]
    problem = f"must be a multiple of accumulation={accumulation}"
    require("batch_size", not fields["batch_size"] % accumulation, problem)
    rate, final = fields["optimizer.learning_rate"], fields["optimizer.final_learning_rate"]
    problem = f"must be in [0, optimizer.learning_rate={rate}]"
    require("optimizer.final_learning_rate", 0 <= final <= rate, problem)
    profile = fields["profile"]
    two_steps = len(profile) == 2 and all(isinstance(step, int) for step in profile)
    in_run = two_steps and 1 <= profile[0] <= profile[1] <= steps
    problem = f"must be two steps, first and last, of 1 to num_steps={steps}, or () for none"
    require("profile", not profile or in_run, problem)
    tensor = fields["mesh.tensor"]
    for name in ("model.num_heads", "model.hidden_dim", "model.vocab_size"):
        require(name, fields[name] % tensor == 0, f"must be a multiple of mesh.tensor={tensor}")
    for name in ("model.num_kv_heads", "model.num_global_kv_heads"):
        K = fields[name] or 1
        problem = f"must be 1, which every device keeps, or a multiple of mesh.tensor={tensor}"
        require(name, K == 1 or K % tensor == 0, problem)
    C, T = fields["mesh.context"], fields["data.seq_len"]
    needs = "each of its parts is two chunks of whole blocks"
    problem = f"must be a multiple of 2 x 128 x mesh.context={C}: {needs}"
    require("data.seq_len", C == 1 or T % (256 * C) == 0, problem)
    positions = fields["data.position_range"]
    covers = positions is None or T <= positions <= 2**31
    problem = f"must be from data.seq_len={T} to {2**31}, or None for ordinary positions"
    require("data.position_range", covers, problem)


def may_change(name: str) -> bool:
    """Returns whether a run may go on with another value of this field."""
    return FIELDS[name].metadata["may_change"]


def differences(fields: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Lists the fields, by dotted name, that make two runs different, as 'seed: 0, not 1'."""
    ours = _identity(fields)
    theirs = _identity(others)
    differing = [name for name in ours if ours[name] != theirs.get(name, ours[name])]
    return [f"{name}: {shorten(theirs[name])}, not {shorten(ours[name])}" for name in differing]


def _identity(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields without those that may change, in a mixture's sources too.

    So may the length of a run whose learning rate does not depend on it before its decay. A
    tokenizer counts by its name: a run may be moved, and its tokens have a fingerprint.
    """
    sources = [
        {key: source[key] for key in source if key == "weight" or not may_change(f"data.{key}")}
        for source in fields["data.mixture"]
    ]
    tokenizer = os.path.basename(fields["data.tokenizer"].rstrip("/"))
    fields = fields | {"data.tokenizer": tokenizer, "data.mixture": sources}
    free = _LENGTHS if fields["optimizer.schedule"] in EXTENDABLE else ()
    return {
        name: value for name, value in fields.items() if not may_change(name) and name not in free
    }
