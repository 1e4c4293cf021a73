"""Writes a checkpoint as a GGUF file, of which llama.cpp computes the same.

An architecture of llama.cpp fixes what a layer does, and what a file can say of its rotation: a
divisor for every pair, or how many lanes rotate by powers of which base. `ARCHITECTURES` has both;
a run is written in the first that computes it. Weights make up for the rest: lanes are reordered so
that those that rotate come first, and queries hold the factors on scores.

Axes: H head_dim, P = H / 2 pairs, R of them that rotate.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from prope import parameters
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError, log, shorten, usage_error
from prope.hf import engines
from prope.hf.config_json import check_known
from prope.hf.families import FAMILIES
from prope.hf.gguf_vocabulary import make_vocabulary
from prope.hf.layout import Tensor, list_tensors, unread_parameters
from prope.rope import frequencies
from prope.runtime import watchdog
from prope.runtime.files import as_path, check_new, new_file
from prope.spec.kinds import FULL, SLIDING
from prope.spec.model import ModelSpec
from prope.workdir.run import check_disk, open_run

# By --dtype: the names of the type and of the file type in the library gguf.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_BOUNDS = {"F32": 1e-3, "F16": 5e-2, "BF16": 5e-2, "Q8_0": 5e-2}
_STOPPED = 1e30  # a divisor with which float32 rotates no pair at any position
_STANDSTILL = 2.0**60  # the same for all pairs, as the factor of a linear scaling
_NO_WINDOW = 2**24  # tokens, where an architecture has windows in all its models
_REMEDY = "export it with python -m prope.export_hf, for transformers and vLLM"


class Rotation(NamedTuple):
    """What a file says of the rotation of a model's layers."""

    fields: dict[str, Any]  # of the header, without the architecture's name
    lanes: list[np.ndarray]  # [L][H]: which lane stands at each place of a head
    divisors: np.ndarray | None = None  # of the frequencies of all pairs [P]


# --- What a file can say of a rotation ------------------------------------------------------------


def _by_divisors(model: ModelSpec, can_skip: bool = False) -> Rotation:
    """Has one divisor for every pair, and the two lanes of a pair side by side."""
    H = model.head_dim
    rotating = [layer for layer in model.layers if not can_skip or layer.frequencies.any()]
    layers = rotating or model.layers
    fields = {"rope.freq_base": layers[0].max_wavelength, "rope.dimension_count": H}
    lanes = np.arange(H).reshape(2, -1).T.ravel()
    return Rotation(fields, [lanes] * model.num_layers, _divisors(layers))


def _divisors(layers) -> np.ndarray:
    freqs = layers[0].frequencies[0]
    if any(not np.array_equal(layer.frequencies[0], freqs) for layer in layers):
        raise ValueError("has one rotation for all layers")
    plain = frequencies(layers[0].head_dim, layers[0].max_wavelength)
    return np.divide(plain, freqs, out=np.full(len(freqs), _STOPPED), where=freqs > 0)


def _by_divisors_or_none(model: ModelSpec) -> Rotation:
    """As `_by_divisors`, where any layers may have a window, and any do not rotate."""
    fields, lanes, divisors = _by_divisors(model, can_skip=True)
    fields["attention.rope_pattern"] = [bool(x.frequencies.any()) for x in model.layers]
    return Rotation(fields, lanes, divisors)


class _Series(NamedTuple):
    """The frequencies of a layer, where those of the pairs that rotate are a geometric series."""

    pairs: tuple[int, ...]
    first: float  # 0 where none rotates
    ratio: float


def _series(model: ModelSpec, kind: str) -> _Series | None:
    """Returns the series of the layers of a kind; None where there are none."""
    layers = [layer for layer in model.layers if layer.kind == kind]
    if not layers:
        return None
    freqs = layers[0].frequencies[0]
    pairs = np.flatnonzero(freqs)
    ratios = freqs[pairs][1:] / freqs[pairs][:-1]
    ratio = float(ratios[0]) if len(ratios) else 1.0
    same = all(np.array_equal(layer.frequencies[0], freqs) for layer in layers)
    if not same or not np.allclose(ratios, ratio, rtol=1e-9, atol=0):
        raise ValueError(f"has one rotation for {kind} layers, by powers of a base")
    return _Series(tuple(pairs.tolist()), float(freqs[pairs[0]]) if len(pairs) else 0.0, ratio)


def _by_lanes(model: ModelSpec, scaled: str = FULL) -> Rotation:
    """Rotates the first 2 R lanes of every head, by powers of a base that each kind has.

    Frequencies of the kinds in `scaled` can be divided, in all of them by the same number.
    """
    H = model.head_dim
    series = {kind: found for kind in (FULL, SLIDING) if (found := _series(model, kind))}
    counts = {found.pairs for found in series.values() if found.pairs} or {tuple(range(H // 2))}
    if len(counts) > 1:
        raise ValueError("rotates the same pairs in layers with a window and in others")
    (pairs,) = counts
    R = len(pairs)
    firsts = {found.first for kind, found in series.items() if kind in scaled}
    if len(firsts) > 1 or any(f.first != 1 for k, f in series.items() if k not in scaled):
        raise ValueError("slows down no layers with a window")
    bases = {kind: found.ratio**-R if found.pairs else 1e4 for kind, found in series.items()}
    fields = {"rope.dimension_count": 2 * R, "rope.freq_base": bases.get(FULL, 1e4)}
    if SLIDING in bases:
        fields["rope.freq_base_swa"] = bases[SLIDING]
    return Rotation(
        fields | _scaling(firsts.pop() if firsts else 1.0), [_order(pairs, H)] * model.num_layers
    )


def _scaling(factor: float) -> dict[str, Any]:
    """Returns the fields with which frequencies are multiplied by a factor."""
    divisor = 1 / factor if factor else _STANDSTILL
    return {} if factor == 1 else {"rope.scaling.type": "linear", "rope.scaling.factor": divisor}


def _order(pairs: tuple[int, ...], H: int) -> np.ndarray:
    """Returns the lanes of a head with those of some pairs in front, in two halves."""
    rotated = np.array(pairs, int)
    others = np.setdiff1d(np.arange(H // 2), rotated)
    return np.concatenate([rotated, rotated + H // 2, others, others + H // 2])


def _by_whole_heads(model: ModelSpec) -> Rotation:
    """Rotates all pairs or none."""
    rotation = _by_lanes(model)
    if rotation.fields["rope.dimension_count"] != model.head_dim:
        raise ValueError("rotates all pairs or none")
    return rotation


def _by_sections(model: ModelSpec) -> Rotation:
    """Rotates the first R pairs by the place in a text, and others by a place that text lacks.

    It is for pictures: three coordinates, in turns, are the same place; the fourth is 0.
    """
    P = model.head_dim // 2
    found = _series(model, FULL)
    R = len(found.pairs)
    if not 0 < R < P or found.pairs != tuple(range(R)):
        raise ValueError("rotates the first pairs of a head")
    sections = [(R + 2) // 3, (R + 1) // 3, R // 3, P - R]
    fields = {"rope.dimension_count": 2 * P, "rope.dimension_sections": sections}
    fields |= {"rope.freq_base": found.ratio**-P} | _scaling(found.first)
    return Rotation(fields, [np.arange(2 * P)] * model.num_layers)


def _by_kind(model: ModelSpec) -> Rotation:
    """Has a divisor for every pair of full layers, and sliding ones that rotate their first lanes.

    These differ in shape, too.
    """
    full = [layer for layer in model.layers if layer.kind == FULL]
    local = _series(model, SLIDING)
    if not full or local is None or local.first != 1:
        raise ValueError("has layers with a window, which rotate, and layers without")
    R = len(local.pairs)
    fields = {
        "rope.freq_base": model.max_wavelength,
        "rope.dimension_count": full[0].head_dim,
        "rope.freq_base_swa": local.ratio**-R,
        "rope.dimension_count_swa": 2 * R,
    }
    orders = {FULL: np.arange(full[0].head_dim), SLIDING: _order(local.pairs, model.head_dim)}
    return Rotation(fields, [orders[kind] for kind in model.kinds], _divisors(full))


# --- The table ------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    """An architecture of llama.cpp: the fields of a `ModelSpec` that it fixes, and its rotation."""

    fixed: dict[str, Any]
    rotate: Callable[[ModelSpec], Rotation]


_OF_GEMMA_4 = {
    "use_value_norm": False,
    "use_skip_scale": False,
    "global_head_dim": None,
    "num_global_kv_heads": None,
    "global_key_is_value": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "per_layer_input_dim": 0,
}
_SILU = _OF_GEMMA_4 | {
    "activation": "silu",
    "post_norms": False,
    "use_qk_norm": False,
    "attention_softcap": None,
    "final_softcap": None,
}
_LLAMA = _SILU | {"scale_embedding": False, "layer_types": ()}
_QWEN_3 = _LLAMA | {"use_qk_norm": True, "qkv_bias": False}
_GEMMA = _SILU | {"activation": "gelu", "scale_embedding": True, "qkv_bias": False}
_GEMMA_2 = {
    name: value
    for name, value in (_GEMMA | {"post_norms": True, "tied": True}).items()
    if name not in ("attention_softcap", "final_softcap")
}
_GEMMA_3 = _GEMMA_2 | {"use_qk_norm": True, "attention_softcap": None}
_GEMMA_3.pop("tied")
_GEMMA_4 = {name: value for name, value in _GEMMA_3.items() if name not in _OF_GEMMA_4}
_GEMMA_4 |= {"use_value_norm": True, "use_skip_scale": True}
# In the order in which they are tried.
ARCHITECTURES = {
    "llama": Architecture(_LLAMA, _by_divisors),
    "granite_swa": Architecture(_SILU, _by_divisors_or_none),
    "qwen3": Architecture(_QWEN_3, _by_whole_heads),
    "qwen3vl": Architecture(_QWEN_3, _by_sections),
    "gemma": Architecture(_GEMMA | {"layer_types": (), "tied": True}, _by_lanes),
    "gemma2": Architecture(_GEMMA_2, functools.partial(_by_lanes, scaled=FULL + SLIDING)),
    "gemma3": Architecture(_GEMMA_3, _by_lanes),
    "gemma4": Architecture(_GEMMA_4, _by_kind),
}


def choose_architecture(model: ModelSpec) -> tuple[str, Rotation]:
    """Returns the first architecture that computes a model, and what a file says of its rotation.

    Raises UsageError where there is none, with what the nearest computes instead.
    """
    if model.rope_scaling_type in ("dynamic", "remove"):
        problem = "llama.cpp has no such rotation"
        raise usage_error("config.model.rope_scaling_type", model.rope_scaling_type, problem)
    if any((layer.frequencies != layer.frequencies[0]).any() for layer in model.layers):
        field = "rope_pairs" if model.rope_pairs else "rope_frequencies"
        problem = "llama.cpp rotates all heads of a layer by the same pairs"
        remedy = "choose pairs with --per=model"
        raise usage_error(f"config.model.{field}", shorten(getattr(model, field)), problem, remedy)
    model_has = vars(model) | {"layer_types": tuple(model.kinds) if SLIDING in model.kinds else ()}
    problems = {}
    for name, architecture in ARCHITECTURES.items():
        others = {k: v for k, v in architecture.fixed.items() if model_has[k] != v}
        problem = ", ".join(f"{field}={value}" for field, value in others.items())
        try:
            if not others:
                return name, architecture.rotate(model)
        except ValueError as error:
            problem = str(error)
        problems[len(others), -len(problems)] = f"{name}, {problem}"
    got = f"config.model: rotates {shorten(model.describe_rotation())}"
    nearest = problems[min(problems)]
    raise UsageError(
        f"{got}: no architecture of llama.cpp computes this model; the nearest is {nearest}; "
        f"{_REMEDY}"
    )


# --- The file -------------------------------------------------------------------------------------


def _header(model: ModelSpec, name: str, rotation: Rotation, seq_len: int) -> dict[str, Any]:
    """Returns the fields of a file's header, without the architecture's name."""
    layers = model.layers
    full = next((layer for layer in layers if layer.kind == FULL), layers[0])
    fields = {
        "vocab_size": model.vocab_size,
        "context_length": seq_len,
        "embedding_length": model.embed_dim,
        "block_count": model.num_layers,
        "feed_forward_length": _one_or_all([layer.hidden_dim for layer in layers]),
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": _one_or_all([layer.num_kv_heads for layer in layers]),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.layer_norm_rms_epsilon": model.norm_epsilon,
    }
    has_windows = SLIDING in model.kinds
    if has_windows or name in ("gemma2", "granite_swa"):  # which have windows in every model
        pattern = [kind == SLIDING or not has_windows for kind in model.kinds]
        fields["attention.sliding_window_pattern"] = pattern
        fields["attention.sliding_window"] = model.sliding_window if has_windows else _NO_WINDOW
    if name == "granite_swa":
        fields |= {"logit_scale": 1.0}
        if model.scale_embedding:
            fields["embedding_scale"] = math.sqrt(model.embed_dim)
    if name == "gemma2":  # without a cap, one that no score comes near
        fields["attn_logit_softcapping"] = model.attention_softcap or 2.0**20
    if name == "gemma2" or model.final_softcap:
        fields["final_logit_softcapping"] = model.final_softcap or 2.0**20
    if name == "gemma4":
        fields["attention.key_length_swa"] = model.head_dim
        fields["attention.value_length_swa"] = model.head_dim
        fields["attention.shared_kv_layers"] = model.num_kv_shared_layers
        fields["embedding_length_per_layer_input"] = model.per_layer_input_dim
    return fields | rotation.fields


def _one_or_all(sizes: list[int]) -> int | list[int]:
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _query_factors(model: ModelSpec, name: str) -> list[float]:
    """Returns what queries are multiplied by, [L], so that scores have the model's factors."""
    width = model.head_dim
    if (name, model.num_layers) in (("gemma2", 46), ("gemma3", 62)):  # the largest release's
        width = model.embed_dim // model.num_heads
    theirs = 1.0 if name == "gemma4" else width**-0.5
    return [
        layer.logit_scale * (model.attention_scale or layer.head_dim**-0.5) / theirs
        for layer in model.layers
    ]


class _Entry(NamedTuple):
    """A tensor of the file: its name, shape and type there, and how it is computed."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of DTYPES' values
    compute: Callable[[Callable], np.ndarray]  # of what reads a parameter; float32


def _entries(model: ModelSpec, name: str, rotation: Rotation, dtype: str) -> list[_Entry]:
    """Lists the tensors of the file."""
    import gguf

    family = FAMILIES["gemma4_text" if model.post_norms else "llama"]  # norms multiply by w
    unread = unread_parameters(model, family)
    if unread:
        problem = f"llama.cpp has no tensor for {', '.join(unread)}"
        raise UsageError(f"config.model: {problem}; {_REMEDY}")
    archs = {known: arch for arch, known in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs.get(name, gguf.MODEL_ARCH.LLAMA), model.num_layers)
    factors = _query_factors(model, name)
    query = "q_norm" if model.use_qk_norm else "q_proj"

    def compute(tensor: Tensor, number: int | None, read: Callable) -> np.ndarray:
        values = tensor.read(read(tensor.path, tensor.layer), np.dtype(np.float32))
        part = tensor.name.split(".")[-2]
        if part in ("q_proj", "k_proj", "q_norm", "k_norm"):
            lanes = rotation.lanes[number]
            heads = values.reshape(-1, len(lanes), *values.shape[1:])
            values = heads[:, lanes].reshape(values.shape)
        return values * np.float32(factors[number]) if part == query else values

    entries = []
    for tensor in list_tensors(model, family):
        number = int(tensor.name.split(".")[2]) if ".layers." in tensor.name else None
        theirs = names.get_name(tensor.name, (".weight", ".bias"))
        theirs += ".weight" if tensor.name.endswith("layer_scalar") else ""
        kind = dtype if len(tensor.shape) > 1 else "F32"
        if kind == "Q8_0" and tensor.shape[-1] % 32:  # which are the blocks of it
            kind = "F16"
        entries.append(
            _Entry(theirs, tensor.shape, kind, functools.partial(compute, tensor, number))
        )
    constants = {}
    if rotation.divisors is not None and (name == "gemma4" or (rotation.divisors != 1).any()):
        constants["rope_freqs.weight"] = rotation.divisors
    if name == "granite_swa":  # of tokens that attention may go to besides: none
        for number in range(model.num_layers):
            constants[f"blk.{number}.attn_sinks.weight"] = np.full(model.num_heads, -_STOPPED)
    for theirs, values in constants.items():
        values = values.astype(np.float32)
        entries.append(_Entry(theirs, values.shape, "F32", lambda read, values=values: values))
    return entries


def _write(path: str, name: str, header: dict, entries: list[_Entry], read, vocabulary) -> None:
    """Writes the file; tensors are read one at a time."""
    import gguf

    types = {entry: gguf.GGMLQuantizationType[entry.dtype] for entry in entries}
    writer = gguf.GGUFWriter(path, name)
    for field, value in header.items():
        key = field if field.startswith("general.") else f"{name}.{field}"
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kind[type(value)]}")(key, value)
    vocabulary(writer)
    for entry, kind in types.items():
        shape = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry, kind in types.items():
        watchdog.alive(f"the tensors before {entry.name}")
        values = entry.compute(read)
        if entry.dtype in ("F16", "Q8_0") and not np.abs(values).max(initial=0) < 65504:
            problem = f"{entry.name} has numbers that float16 cannot hold"
            raise usage_error("--dtype", entry.dtype, problem, "give float32 or bfloat16")
        writer.write_tensor_data(gguf.quants.quantize(values, kind).view(np.uint8))
    writer.close()


def export(
    workdir: str,
    output: str,
    step: int | None = None,
    dtype: str = "float32",
    check: str | None = None,
) -> dict:
    """Writes the checkpoint of a step, by default the newest, as a new file.

    Returns the command's result. Raises UsageError where there is no such checkpoint, llama.cpp
    does not compute it, or `output` exists; RunFailed where `check` finds another result.
    """
    target = as_path("--output", output)
    check_new("output", target)
    run = open_run(workdir, step)
    spec = run.spec
    model = spec.model
    check_known(model)
    name, rotation = choose_architecture(model)
    kind = DTYPES[dtype]
    header = {"general.name": os.path.basename(workdir.rstrip("/")), "general.file_type": 0}
    header["general.file_type"] = _FILE_TYPES[kind]
    header |= _header(model, name, rotation, spec.data.seq_len)
    entries = _entries(model, name, rotation, kind)
    tokenizer = load_tokenizer(spec.data.tokenizer)
    vocabulary = make_vocabulary(spec, tokenizer)

    def write(run):
        log.info("exporting step %d of %s in %s; %s", run.step, workdir, dtype, name)
        read = functools.lru_cache(1)(run.checkpoint.read)  # as in the export for transformers
        with new_file("output", target) as path:
            size = sum(math.prod(entry.shape) for entry in entries) * (4 if kind == "F32" else 2)
            check_disk(path.parent, size, "the tensors need", "output")
            _write(str(path), name, header, entries, read, vocabulary)
            bound = _BOUNDS[kind] if model.activation == "silu" else 1e-2
            return engines.check(check, run, path, bound, tokenizer)

    run, checked = run.restore_newest_valid(write)
    command = f"llama-completion --model {target} --prompt 'Once upon' -n 32 --temp 0 -no-cnv"
    log.info("llama.cpp continues a text by: %s", command)
    return {
        "output": str(target),
        "architecture": name,
        "parameters": parameters.count(model),
        "dtype": dtype,
        "step": run.step,
        "rope_percentage": model.rope_percentage,
        "rotated_pairs": model.rotated_pairs,
        "checked": checked,
        "command": command,
        "workdir": str(workdir),
    }
