"""Every config field with its type, default and meaning; `prope/runtime/validate.py` checks the values.

A config file in `configs/` starts from `default_config()` and sets values; it cannot add a field. A run is
identified by its config, except for the fields in `MAY_CHANGE`: they change how a run is executed and not what it
computes, and may differ when a run is resumed.
"""

from collections.abc import Iterable

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from prope.errors import UsageError, log, nearest

MAY_CHANGE = (
    "accumulation", "on_nonfinite", "log_every", "eval_every", "checkpoint_every", "watchdog_minutes", "profile",
    "model.attention", "model.remat", "model.scan_layers",
    "data.data_dir", "data.cache_dir", "data.store", "data.num_workers",
    "checkpoint.", "eval.", "mesh.",
)  # fmt: skip

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "minimal", "save_qkv", "full")


# fmt: off
def default_config() -> ConfigDict:
    """Makes a complete, locked config, with the values of a small model."""
    config = ConfigDict()
    config.batch_size = 16  # sequences per optimizer step, over all devices
    config.accumulation = 1  # microbatches per batch, computed one after the other to save memory
    config.num_steps = 1000  # optimizer steps of the whole run
    config.on_nonfinite = "stop"  # where a loss or gradient is not finite: stop | skip the step, up to 10 in a row
    config.seed = 0  # of the initial weights and the order of the data
    config.log_every = 10  # steps between lines of metrics.jsonl
    config.eval_every = 500  # steps between evaluations; the last step is always evaluated
    config.checkpoint_every = 500  # steps between checkpoints; the last step is always saved
    config.watchdog_minutes = 60.0  # minutes without progress after which the process ends; 0: never
    config.profile = ()  # first and last step, as in 10,12, whose trace jax.profiler writes to W/profile; empty: none

    config.model = model = ConfigDict()
    model.num_layers = 4  # L, layers of the decoder
    model.embed_dim = 256  # D, width of the residual stream
    model.num_heads = 4  # N, query heads of a layer
    model.num_kv_heads = 1  # K, key/value heads: 1 is multi-query, num_heads is multi-head attention
    model.head_dim = 64  # H, lanes of a head, even
    model.hidden_dim = 1024  # F, hidden units of the gated MLP
    model.vocab_size = 260  # V, at least the tokenizer's size
    model.max_wavelength = 10_000.0  # theta, the base wavelength of RoPE
    model.rope_percentage = 1.0  # p in [0, 1]: 1 is RoPE, 0 is NoPE; per layer: set_layer_percentages
    # proportional (p-RoPE) | partial | reversed | cutoff | hard_clip | cope | rope_id: see prope/encodings.py
    model.rope_type = "proportional"
    model.rope_cutoff = placeholder(float)  # of cutoff: pairs rotate whose period is at most this x original_seq_len
    model.clip_low_n = placeholder(int)  # of hard_clip and cope: how many of the slowest pairs are clipped
    # of layers without a window: none | linear | ntk | dynamic | yarn | llama3 | of a band: stop | remove | interpolate
    model.rope_scaling_type = "none"
    model.rope_scaling_factor = 1.0  # s, by how much the length grows
    model.scaled_pairs = ()  # of stop, remove and interpolate: first and last pair of the band
    model.original_seq_len = placeholder(int)  # length of training that types and scalings go by
    model.beta_fast = 32.0  # yarn: pairs of more turns in original_seq_len keep their frequency
    model.beta_slow = 1.0  # yarn: pairs of fewer turns are slowed down by s
    model.low_freq_factor = 1.0  # llama3: pairs of fewer turns are slowed down by s
    model.high_freq_factor = 4.0  # llama3: pairs of more turns keep their frequency
    model.logit_scale = "none"  # factor on the logits of layers without a window: none | yarn | drope
    model.logit_scale_coefficient = placeholder(float)  # of drope: c in 1 + c ln s
    model.layer_types = ()  # pattern of sliding_attention and full_attention that the layers repeat; empty: all full
    model.sliding_window = placeholder(int)  # keys that a query of a sliding layer sees, its own included
    model.local_max_wavelength = placeholder(float)  # of sliding layers; None: max_wavelength
    model.local_rope_percentage = placeholder(float)  # of sliding layers; None: rope_percentage
    model.use_qk_norm = False  # RMSNorm of every head's queries and keys, before the rotation
    model.dtype = "float32"  # of activations and matmuls, float32 | bfloat16; parameters are always float32
    model.attention = "auto"  # auto | xla | splash (TPU) | cudnn (NVIDIA)
    model.scan_layers = True  # compile one layer and loop, or unroll all; parameters and result are the same
    # what a layer saves for its backward pass, fastest first: none (everything) | minimal (wide matmuls and
    # attention) | save_qkv (q, k, v and the output of attention) | full (only the layer's input)
    model.remat = "none"

    config.data = data = ConfigDict()
    # python_docs | files | a TFDS name such as wikipedia/20230601.en | mixture | synthetic/ and copy, recall or mix |
    # longcontext/ and a task of prope/longcontext or mix
    data.dataset = "python_docs"
    data.data_dir = ""  # folder or gs:// URL of the TFDS data or of the files
    data.text_feature = "text"  # feature of a TFDS record, or key of a JSON line, that holds the text
    data.template = ""  # instead of text_feature: features in braces, as in "Q: {inputs}\nA: {targets}"
    data.loss_on = "all"  # tokens with a loss: all | targets (only those of the template's last feature)
    data.mixture = ()  # of dataset mixture: ({"weight": 0.9, "dataset": .., "data_dir": ..}, ..), a dict per source
    data.tokenizer = "byte"  # byte | path or gs:// URL of a SentencePiece .model
    data.seq_len = 256  # T, tokens in a window
    data.mask_documents = False  # True: positions restart and attention stops at document borders
    data.bos_every_window = False  # True: every window begins with <bos>, which replaces its first token
    data.position_range = placeholder(int)  # R: training positions are drawn from 0 .. R-1; None: they are 0 .. T-1
    data.validation_fraction = 0.05  # share of documents held out, chosen by a hash of their text
    data.cache_dir = ""  # folder or gs:// URL of token stores; empty: $PROPE_CACHE, else ~/.cache/prope
    data.store = ""  # a finished token store, as prope.data.prepare prints its place: the text is not needed
    data.num_workers = 0  # processes that tokenise; 0: one per core

    config.optimizer = optimizer = ConfigDict()
    optimizer.learning_rate = 1e-3  # at the peak, the end of warmup
    optimizer.final_learning_rate = 1e-4  # at the last step, the end of the cosine
    optimizer.warmup_steps = 100  # linear, from 0 to learning_rate
    optimizer.b1 = 0.9  # decay rate of the first moment
    optimizer.b2 = 0.95  # decay rate of the second moment
    optimizer.eps = 1e-8  # added to the denominator
    optimizer.weight_decay = 0.1  # of matrices, not of norm scales
    optimizer.clip_norm = 1.0  # largest norm of the gradient over all parameters
    optimizer.mu_dtype = "float32"  # of AdamW's first moment; the second is always float32

    config.mesh = mesh = ConfigDict()
    # Replicas of the parameters, within which FSDP shards them; None: one per TPU slice or GPU node. A replica may span
    # GPU nodes, but not slices.
    mesh.data = placeholder(int)
    mesh.context = 1  # C, devices over which every sequence is split; its keys and values are all-gathered
    mesh.tensor = 1  # devices over which heads, hidden units and vocabulary are split

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.max_to_keep = 2  # newest checkpoints kept
    checkpoint.keep_every = placeholder(int)  # steps whose multiples are kept for ever; None: none
    checkpoint.every_minutes = 30.0  # minutes between checkpoints, beside checkpoint_every; 0: by steps only

    config.eval = evaluation = ConfigDict()
    evaluation.batch_size = 16  # windows at a time; does not change the result
    evaluation.max_windows = placeholder(int)  # number of windows to evaluate, evenly spread; None: all
    return config.lock()
# fmt: on


def set_layer_percentages(config: ConfigDict, percentages: Iterable[float]) -> None:
    """Sets rope_percentage to one value per layer, although the field's type is one number."""
    try:
        percentages = tuple(map(float, percentages))
    except (TypeError, ValueError):
        raise UsageError(
            f"rope_percentage of layers: {percentages}: must be fractions in [0, 1]"
        ) from None
    with config.model.ignore_type():
        config.model.rope_percentage = percentages


def sized(config: ConfigDict, size: str) -> ConfigDict:
    """Returns the config for size "full"; for "tiny", one that any laptop trains in seconds.

    `--config=FILE.py:tiny` keeps p, the kind of attention and the optimizer, and cuts sizes and lengths. It needs no
    files: python_docs replaces a dataset, and byte a tokenizer; the command line may name others.
    """
    if size not in ("full", "tiny"):
        raise ValueError(f"the size of a config is full or tiny; got {size}")
    if size == "full":
        return config
    if isinstance(config.model.rope_percentage, tuple):
        set_layer_percentages(config, [config.model.rope_percentage[i] for i in (0, -1)])
    if config.model.layer_types:
        config.model.layer_types, config.model.sliding_window = (
            ("sliding_attention", "full_attention"),
            16,
        )
    groups = config.model.num_heads // config.model.num_kv_heads
    config.update_from_flattened_dict({
        "batch_size": 8, "accumulation": 1, "num_steps": 20, "log_every": 5, "eval_every": 10, "checkpoint_every": 10,
        "model.num_layers": 2, "model.embed_dim": 64, "model.num_heads": min(groups, 4), "model.num_kv_heads": 1,
        "model.head_dim": 32, "model.hidden_dim": 128, "data.seq_len": 64,
        "mesh.context": 1, "optimizer.warmup_steps": 2, "eval.batch_size": 8, "eval.max_windows": 8,
    })  # fmt: skip
    data = config.data
    if data.dataset != "python_docs" and not is_generated(data.dataset):
        log.info(
            "tiny: python_docs replaces %s; --config.data.dataset and .data_dir choose another",
            data.dataset,
        )
        override_dataset(data, "python_docs", None)
    if data.tokenizer != "byte":
        log.info("tiny: the byte tokenizer replaces %s", data.tokenizer)
        data.tokenizer, config.model.vocab_size = "byte", 260
    return config


def flat(config: ConfigDict) -> dict:
    """Flattens the config to its fields by dotted name, {"model.num_layers": 4, ...}."""
    fields = {}
    for name, value in config.to_dict().items():
        fields |= (
            {f"{name}.{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return fields


def from_dict(values: dict) -> ConfigDict:
    """Reads a config that a run has saved; fields that are newer than the run take their defaults.

    Raises UsageError for a field that this version of prope does not know, or a value of another type.
    """
    config = default_config()
    try:
        saved, known = flat(ConfigDict(values)), flat(config)
        if unknown := [name for name in saved if name not in known]:
            hint = nearest(unknown[0], known)
            raise UsageError(
                f"the saved config has a field that this version does not know: {unknown[0]}{hint}"
            )
        if isinstance(saved.get("model.rope_percentage"), list | tuple):
            set_layer_percentages(config, saved.pop("model.rope_percentage"))
        config.update_from_flattened_dict(saved)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"the saved config cannot be read: {error}") from None
    return config


def differences(config: ConfigDict, other: ConfigDict) -> list[str]:
    """Lists the fields that make two configs different runs, as 'model.rope_percentage: 0.25, not 0.75'."""
    ours, theirs = flat(config), flat(other)
    for fields in (ours, theirs):  # what may change in config.data may do so in a mixture
        mixture = [
            {k: v for k, v in e.items() if f"data.{k}" not in MAY_CHANGE}
            for e in fields["data.mixture"]
        ]
        fields["data.mixture"] = mixture
    differing = (
        name for name in ours if ours[name] != theirs[name] and not name.startswith(MAY_CHANGE)
    )
    return [f"{name}: {theirs[name]}, not {ours[name]}" for name in differing]


def is_generated(dataset: str) -> bool:
    """Tells whether a dataset is tasks with known answers, generated while it is read."""
    return dataset.startswith(("synthetic/", "longcontext/"))


def override_dataset(data: ConfigDict, dataset: str | None, data_dir: str | None) -> None:
    """Replaces the dataset or the data_dir in a run's `config.data`; None changes nothing."""
    if dataset is not None:
        data.update({"dataset": dataset, "mixture": (), "template": "", "loss_on": "all"})
    if dataset is not None or data_dir is not None:
        data.update({"data_dir": data_dir or "", "store": ""})
