"""Writes a checkpoint as a GGUF file, of which llama.cpp computes the same.

An architecture of llama.cpp fixes what a layer does, and what a file can say of its rotation. The
weights make up for the rest: lanes of heads are reordered, and queries hold the factors on scores.

Axes: H head_dim, P = H / 2 pairs, R of them that rotate, L layers.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from prope import parameters
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError, log, shorten, usage_error
from prope.hf import engines
from prope.hf.config_json import check_known
from prope.hf.families import FAMILIES, choose_family
from prope.hf.gguf_vocabulary import list_vocabulary
from prope.hf.layout import Tensor, list_tensors, unread_parameters
from prope.inference.opening import keep_pairs
from prope.rope import frequencies
from prope.runtime import watchdog
from prope.runtime.files import as_path, check_new, new_file
from prope.spec.kinds import FULL, SLIDING
from prope.spec.layers import Layer
from prope.spec.model import ModelSpec
from prope.workdir.run import check_disk, open_run

# By --dtype: the type's name and the number of the file's type in the library gguf.
DTYPES = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
}
_LLAMA = ("llama", "granite_swa")  # the second has windows, and layers without rotation
# By class of transformers that has a run's layers: architectures, in the order they are tried in.
ARCHITECTURES = {
    **dict.fromkeys(("llama", "qwen2", "mistral", "smollm3"), _LLAMA),
    "qwen3": ("qwen3",),  # or qwen3vl, where some pairs stand still
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3_text": ("gemma3",),
    "gemma4_text": ("gemma4",),
}
_STOPPED = 1e30  # a divisor with which float32 rotates no pair at any position
_STANDSTILL = 2.0**60  # the same for all pairs, as the factor of a linear scaling
_BASES = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
_FAR = 2**24  # tokens of a window, and a cap, where an architecture has one and a run has not
_REMEDY = "export it for transformers and vLLM: python -m prope.export_hf"


class Rotation(NamedTuple):
    """What a file says of the rotation of a model's layers."""

    fields: dict[str, Any]  # of its header, without the architecture's name
    lanes: np.ndarray | None  # which lane stands at each place of a head [H]; None: as they are
    divisors: np.ndarray | None = None  # of the frequencies of all pairs [P]


def choose_architecture(model: ModelSpec) -> tuple[str, Rotation]:
    """Returns the first architecture that computes a model, and what a file says of its rotation.

    Raises UsageError, with what each has instead, where there is none.
    """
    field = "rope_pairs" if model.rope_pairs else "rope_frequencies"
    problems = []
    if any((layer.frequencies != layer.frequencies[0]).any() for layer in model.layers):
        problems = [f"all rotate the same pairs in every head of a layer ({field})"]
    if model.rope_scaling_type in ("dynamic", "remove"):
        problems = [f"none has rope_scaling_type={model.rope_scaling_type}"]
    # By its layers alone, whatever their rotation.
    names = ARCHITECTURES[choose_family(model, [{"rope_theta": 1.0}] * model.num_layers)]
    for name in () if problems else names:
        try:
            rotation = _rotate(name, model)
            is_cut = "rope.dimension_sections" in rotation.fields
            return "qwen3vl" if is_cut else name, rotation
        except ValueError as error:
            problems.append(f"{name} {error}")
    got = f"{shorten(model.describe_rotation())}: no architecture of llama.cpp computes this"
    raise UsageError(f"config.model: {got}: {', '.join(problems)}; {_REMEDY}")


def _rotate(name: str, model: ModelSpec) -> Rotation:
    """Returns what an architecture is told; raises ValueError with what it has instead."""
    activation = "gelu" if name.startswith("gemma") else "silu"
    if model.activation != activation:
        raise ValueError(f"has activation={activation}")
    if name in ("gemma", "gemma2") and not model.tied:
        raise ValueError("has tied=True")
    if SLIDING in model.kinds and name in ("llama", "qwen3"):
        raise ValueError("has no windows")
    layers = model.layers
    lanes = np.arange(model.head_dim).reshape(2, -1)  # of pairs [2, P]
    if name in _LLAMA:
        fields = {"rope.freq_base": layers[0].max_wavelength}
        if name == "granite_swa":
            rotating = [layer for layer in layers if layer.frequencies.any()]
            if rotating:  # where none does, divisors say so: it needs one that does
                fields["attention.rope_pattern"] = [bool(x.frequencies.any()) for x in layers]
                layers = rotating
        return Rotation(fields, lanes.T.ravel(), _divisors(layers))
    by_kind = {kind: [x for x in layers if x.kind == kind] for kind in model.kinds}
    divisors = {kind: _divisors(alike) for kind, alike in by_kind.items()}
    bases = {_BASES[kind]: alike[0].max_wavelength for kind, alike in by_kind.items()}
    if name == "gemma4":
        if len(divisors) < 2 or (divisors[SLIDING] != 1).any():
            raise ValueError("has layers with a window, which rotate all pairs, and others")
        fields = bases | {"rope.dimension_count_swa": model.head_dim}
        return Rotation(fields, None, divisors[FULL])
    rotated = {kind: _first_pairs(each) for kind, each in divisors.items()}
    P = lanes.shape[1]
    (R, *others) = {count for count, _ in rotated.values() if count} or {P}
    _, divisor = rotated.get(FULL, (R, 1.0))
    local_divisor = divisor if name == "gemma2" else 1.0
    if others or rotated.get(SLIDING, (R, local_divisor))[1] != local_divisor:
        raise ValueError("has the same rotated pairs with a window and without")
    fields = bases
    if R < P and name == "qwen3":
        # Of three coordinates, in turns, which are a token's place; the fourth, of pictures, is 0.
        fields["rope.dimension_sections"] = [(R + 2) // 3, (R + 1) // 3, R // 3, P - R]
        R = P
    elif R < P:
        # All pairs of fewer lanes, which are slower by the base alone.
        fields = {field: base ** (R / P) for field, base in bases.items()}
        fields["rope.dimension_count"] = 2 * R
    if divisor != 1:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": divisor}
    return Rotation(fields, np.concatenate([lanes[:, :R].ravel(), lanes[:, R:].ravel()]))


def _divisors(layers: Sequence[Layer]) -> np.ndarray:
    """Returns by what powers of the wavelength are divided in layers that rotate alike [P]."""
    freqs = layers[0].frequencies[0]
    if any(not np.array_equal(layer.frequencies[0], freqs) for layer in layers):
        raise ValueError("has one rotation for all layers of a kind")
    plain = frequencies(layers[0].head_dim, layers[0].max_wavelength)
    return np.divide(plain, freqs, out=np.full(len(freqs), _STOPPED), where=freqs > 0)


def _first_pairs(divisors: np.ndarray) -> tuple[int, float]:
    """Returns how many pairs rotate, the first ones, and their one divisor."""
    R = int(np.count_nonzero(divisors < _STOPPED))
    divisor = float(divisors[0]) if R else _STANDSTILL
    if (divisors[:R] != divisor).any():
        raise ValueError("rotates the first pairs, by powers of a base")
    return R, divisor


def _header(name: str, model: ModelSpec) -> dict[str, Any]:
    """Returns the fields of a file's header but its rotation, without the architecture's name."""
    layers = model.layers
    full = next((layer for layer in layers if layer.kind == FULL), layers[0])
    fields = {
        "vocab_size": model.vocab_size,
        "embedding_length": model.embed_dim,
        "block_count": model.num_layers,
        "feed_forward_length": [layer.hidden_dim for layer in layers],
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": [layer.num_kv_heads for layer in layers],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.layer_norm_rms_epsilon": model.norm_epsilon,
    }
    has_windows = SLIDING in model.kinds
    if has_windows or name in ("gemma2", "granite_swa"):
        window = model.sliding_window if has_windows else _FAR
        pattern = [kind == SLIDING or not has_windows for kind in model.kinds]
        fields |= {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
    if name == "granite_swa":
        fields["logit_scale"] = 1.0
    if name == "gemma2":
        fields["attn_logit_softcapping"] = float(model.attention_softcap or _FAR)
    if name == "gemma2" or model.final_softcap:
        fields["final_logit_softcapping"] = float(model.final_softcap or _FAR)
    if name == "gemma4":
        fields |= {
            "attention.key_length_swa": model.head_dim,
            "attention.value_length_swa": model.head_dim,
            "attention.shared_kv_layers": model.num_kv_shared_layers,
            "embedding_length_per_layer_input": model.per_layer_input_dim,
        }
    return fields


# By name in the file: shape, type, and what computes it, in float32, with what reads a parameter.
_Tensors = dict[str, tuple[tuple[int, ...], str, Callable[[Callable], np.ndarray]]]


def _tensors(name: str, model: ModelSpec, rotation: Rotation, kind: str) -> _Tensors:
    import gguf

    family = FAMILIES["gemma4_text" if model.post_norms else "llama"]  # norms multiply by w
    unread = unread_parameters(model, family)
    if unread:
        problem = f"llama.cpp has no tensor for {', '.join(unread)}"
        raise UsageError(f"config.model: {problem}; {_REMEDY}")
    known = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    arch = known.get(name, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(arch, model.num_layers)
    width = model.head_dim
    if (name, model.num_layers) in (("gemma2", 46), ("gemma3", 62)):  # the largest releases
        width = model.embed_dim // model.num_heads
    their_scale = 1.0 if name == "gemma4" else width**-0.5
    query = "q_norm" if model.use_qk_norm else "q_proj"

    def compute(tensor: Tensor, read: Callable) -> np.ndarray:
        values = tensor.read(read(tensor.path, tensor.layer), np.dtype(np.float32))
        part = tensor.name.split(".")[-2]
        if part in ("q_proj", "k_proj", "q_norm", "k_norm") and rotation.lanes is not None:
            heads = values.reshape(-1, model.head_dim, *values.shape[1:])
            values = heads[:, rotation.lanes].reshape(values.shape)
        if part == query:
            layer = model.layers[int(tensor.name.split(".")[2])]
            scale = layer.logit_scale * (model.attention_scale or layer.head_dim**-0.5)
            values = values * np.float32(scale / their_scale)
        return values

    tensors = {}
    for tensor in list_tensors(model, family):
        suffix = ".weight" if tensor.name.endswith("layer_scalar") else ""
        theirs = names.get_name(tensor.name, (".weight", ".bias")) + suffix
        its_kind = kind if len(tensor.shape) > 1 else "F32"
        if its_kind == "Q8_0" and tensor.shape[-1] % 32:  # it has blocks of 32
            its_kind = "F16"
        tensors[theirs] = (tensor.shape, its_kind, functools.partial(compute, tensor))
    constants = {}
    if rotation.divisors is not None:
        constants["rope_freqs.weight"] = rotation.divisors
    if name == "granite_swa":  # scores of nothing, to which attention may go there
        sinks = np.full(model.num_heads, -_STOPPED)
        constants |= {f"blk.{i}.attn_sinks.weight": sinks for i in range(model.num_layers)}
    for theirs, values in constants.items():
        array = values.astype(np.float32)
        tensors[theirs] = (array.shape, "F32", lambda read, array=array: array)
    return tensors


def _write(path: str, name: str, fields: dict, tensors: _Tensors, read: Callable) -> None:
    """Writes the file; tensors are read one at a time."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, name)
    for field, value in fields.items():
        key = field if field.startswith(("general.", "tokenizer.")) else f"{name}.{field}"
        types = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{types[type(value)]}")(key, value)
    for theirs, (shape, kind, _) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(shape, kinds[kind])
        size = math.prod(stored)
        writer.add_tensor_info(theirs, stored, np.dtype(np.uint8), size, kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for theirs, (_, kind, compute) in tensors.items():
        watchdog.alive(f"the tensors before {theirs}")
        values = compute(read)
        if kind in ("F16", "Q8_0") and not np.abs(values).max(initial=0) < 65504:
            problem = f"{theirs} has numbers that float16 cannot hold"
            raise usage_error("--dtype", kind.lower(), problem, "give float32 or bfloat16")
        writer.write_tensor_data(gguf.quants.quantize(values, kinds[kind]).view(np.uint8))
    writer.close()


def export(
    workdir: str,
    output: str,
    step: int | None = None,
    dtype: str = "float32",
    check: str | None = None,
    pairs: str | None = None,
) -> dict:
    """Writes the checkpoint of a step, by default the newest, as a new file.

    Of its pairs those of `pairs` rotate, as in prope.evaluate; None: those that were trained.

    Returns the command's result. Raises UsageError where there is no such checkpoint, llama.cpp
    does not compute it, or `output` exists; RunFailed where `check` finds another result.
    """
    target = as_path("--output", output)
    check_new("output", target)
    run = open_run(workdir, step)
    model = keep_pairs(run.spec.model, pairs)
    spec = dataclasses.replace(run.spec, model=model)
    check_known(model)
    name, rotation = choose_architecture(model)
    # A wrong rotation may be less than what a smaller type loses: float32 is compared first.
    dtypes = dict.fromkeys(["float32", dtype] if engines.is_there(check) else [dtype])
    # GELU is a table of float16 there, and Gemma 4's scores are sharp.
    factor = 10 if name == "gemma4" else 1
    tokenizer = load_tokenizer(spec.data.tokenizer)
    fields = {
        "general.name": os.path.basename(os.path.abspath(workdir)),
        "context_length": spec.data.seq_len,
        **_header(name, model),
        **rotation.fields,
        **list_vocabulary(spec, tokenizer),
    }
    num_bytes = parameters.count(model) * (4 if "float32" in dtypes else 2)

    def write(run):
        log.info("exporting step %d of %s in %s as %s", run.step, workdir, dtype, name)
        # The last array is kept: neighbours such as gate_proj and up_proj are cut from one.
        read = functools.lru_cache(1)(run.checkpoint.read)
        with new_file("output", target) as path:
            check_disk(path.parent, num_bytes, "the tensors need", "output")
            for each in dtypes:
                kind, file_type = DTYPES[each]
                tensors = _tensors(name, model, rotation, kind)
                of_type = {"general.file_type": file_type}
                _write(str(path), name, fields | of_type, tensors, read)
                bound = factor * engines.BOUNDS[each]
                checked = engines.check(check, run, spec, tokenizer, path, bound)
            return checked

    run, checked = run.restore_newest_valid(write)
    command = f"llama-completion --model {target} --prompt 'Once upon' -n 32 --temp 0 -no-cnv"
    return {
        "output": str(target),
        "architecture": name,
        "parameters": parameters.count(model),
        "dtype": dtype,
        "checked": checked,
        "step": run.step,
        "rope_percentage": model.rope_percentage,
        "rotated_pairs": model.rotated_pairs,
        "command": command,
        "workdir": str(workdir),
    }
