"""What a config may say: every field with its type and meaning, and the checks made before any device is touched.

A config file in `configs/` starts from `default_config()` and sets values; it cannot add a field. A run is
identified by its config, except for the fields in `MAY_CHANGE`, which say how a run is carried out and not
what it computes: those may differ when a run is resumed.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from prope.errors import UsageError, nearest

log = logging.getLogger("prope")

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

    `--config=FILE.py:tiny` keeps p, the kind of attention and the optimizer, and cuts sizes and lengths. It needs no
    files: python_docs replaces a dataset, and byte a tokenizer, until the command line gives one.
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
    _embed_data(config)
    return config


class _Operation(NamedTuple):
    """The operation of a FieldReference: its value is fn(value, *args), computed at every read."""

    fn: Callable
    args: tuple


def _embed_data(config: ConfigDict) -> None:
    """Replaces data and tokenizer that need files, until `data_dir`, `dataset` or `tokenizer` is overridden.

    Overrides are applied after this, so fields that depend on them are references, computed when they are read.
    """
    data, model = config.data, config.model
    replaced = []

    def compute(fields: ConfigDict, name: str, source: FieldReference, value: Callable) -> None:
        """Computes a field from its full-size value and another field."""
        fields[name] = FieldReference(fields[name], op=_Operation(value, (source,)))

    if data.dataset != "python_docs" and not data.dataset.startswith("synthetic/"):
        flag = "dataset=mixture" if data.dataset == "mixture" else "data_dir=DIR"
        replaced.append(f"python_docs, not {data.dataset} (--config.data.{flag} reads that)")
        data.data_dir = ""
        if data.dataset != "mixture":
            compute(data, "dataset", data.get_ref("data_dir"), lambda full, folder: full if folder else "python_docs")
        dataset = data.get_ref("dataset")
        compute(data, "mixture", dataset, lambda full, name: full if name == "mixture" else ())
        compute(data, "template", dataset, lambda full, name: "" if name == "python_docs" else full)
        if data.dataset == "mixture":
            data.dataset = "python_docs"
    if data.tokenizer != "byte":
        replaced.append(f"the tokenizer byte, not {data.tokenizer} (--config.data.tokenizer=FILE reads that)")
        data.tokenizer = "byte"
        compute(model, "vocab_size", data.get_ref("tokenizer"), lambda full, name: 260 if name == "byte" else full)
    if replaced:
        log.info("tiny: takes %s", "; ".join(replaced))


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


def override_dataset(data: ConfigDict, dataset: str | None, data_dir: str | None) -> None:
    """Makes a run's `config.data` name another dataset, as a plain one, or another place; None changes nothing."""
    if dataset is not None:
        plain = {"mixture": (), "template": "", "loss_on": "all"}
        data.update({"dataset": dataset, "data_dir": "", **plain})
    if data_dir is not None:
        data.data_dir = data_dir
