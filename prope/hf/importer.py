"""Reads a checkpoint in the format of Hugging Face into a new run, as its step 0."""

import dataclasses
import functools
import math
import operator

import jax
import numpy as np
from etils import epath

from prope import parameters
from prope.errors import UsageError, log, usage_error
from prope.hf import config_json, deepmind
from prope.hf.families import FAMILIES
from prope.hf.hub import find_checkpoint
from prope.hf.layout import EMBEDDING, HEAD, Tensor, drop_unused, list_tensors
from prope.hf.tensors import Stored, check_found, open_tensors
from prope.hf.tokenizers import copy_into_run, find_tokenizer, read_stop_ids
from prope.runtime.files import as_path, check_new, local_copy, new_directory
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.workdir.checkpoints import save_imported
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import check_disk, write_config

_ROWS = 4096  # of two matrices, that are compared at a time
_DTYPES = ("F32", "BF16", "F16", "F64")  # the last is rounded to float32


def import_run(
    source: str,
    workdir: str,
    tokenizer: str | None = None,
    spec: Spec | None = None,
    dtype: str | None = None,
) -> dict:
    """Imports the checkpoint `source` as the run `workdir`; returns the command's result.

    `source` is a folder, a URL or a name on the Hub; `spec` the run's, for one of Orbax, which has
    no config. The run is computed in `dtype`, by default config.json's.

    Raises UsageError where this decoder does not compute the checkpoint, it is not whole, or
    `workdir` exists.
    """
    source = as_path("--input", source)
    path = as_path("--workdir", workdir)
    check_new("workdir", path)
    has_config = (source / "config.json").is_file()
    is_gguf = source.suffix == ".gguf" and source.is_file()
    is_gguf |= source.is_dir() and any(path.suffix == ".gguf" for path in source.iterdir())
    if not has_config and is_gguf:
        problem = "is in the form GGUF, which is not read"
        remedy = "load it with transformers, dequantized, save_pretrained, then --input=DIR"
        raise usage_error("--input", source, problem, remedy)
    source = find_checkpoint(source)
    is_orbax = deepmind.is_orbax(source)
    if is_orbax and spec is None:
        problem = "is a checkpoint of Orbax, which does not tell its model"
        remedy = "give --config=FILE, a config of the model that was saved, as in configs/"
        raise usage_error("--input", source, problem, remedy)
    if spec is not None and not is_orbax:
        problem = "is for a checkpoint of Orbax, and the input is none, or has a config.json"
        raise UsageError(f"--config: {problem}; remove the flag")
    with local_copy(source) as local:
        try:
            return _import(source, local, path, tokenizer, spec, dtype)
        except UsageError as error:
            raise UsageError(str(error).replace(str(local), str(source))) from error


def _import(
    source: epath.Path,
    local: epath.Path,
    path: epath.Path,
    tokenizer: str | None,
    spec: Spec | None,
    dtype: str | None,
) -> dict:
    """Imports the checkpoint in the folder `local`, which is `source` or a copy of it."""
    values = {}
    if spec is None:
        spec, values = config_json.from_hf(local / "config.json")
        family = FAMILIES[values["model_type"]]
        stored = open_tensors(local)
        pattern = "model.layers.{}.self_attn.{}.weight"
        drop_unused(stored, spec.model, pattern, "k_proj v_proj k_norm")
        check_tensors(local, stored, list_tensors(spec.model, family))
        spec = spec.replace({"model.tied": is_tied(spec.model.tied, stored)})
        expected = list_tensors(spec.model, family)
    else:
        stored, expected = deepmind.open_arrays(local, spec.model)
    model = dataclasses.replace(spec.model, dtype=dtype or spec.model.dtype)
    tokenizer_name, loaded_tokenizer = find_tokenizer(local, tokenizer, model.vocab_size, values)
    special = loaded_tokenizer.special
    stop_ids = read_stop_ids(local, values, model.vocab_size, special.eos)
    spec = dataclasses.replace(spec, model=model).replace({"data.stop_ids": stop_ids})
    num_parameters = parameters.count(model)
    if values:
        # Trained with <bos> before every text, a model needs it where a document is cut, too:
        # without it Gemma 3 270M loses 0.4 to 1.5 nats a token.
        spec = spec.replace({"data.bos_every_window": special.bos is not None})
        spec = set_training(spec, num_parameters)
    with new_directory("workdir", path) as directory:
        check_disk(directory, 4 * num_parameters)
        params = read_params(model, stored, expected)
        spec = spec.replace({"data.tokenizer": copy_into_run(tokenizer_name, directory, path)})
        params = jax.device_put(params, may_alias=True)  # without a second copy
        init_hash = hash_arrays(params)
        write_config(directory, spec)
        identity = {"config": spec.to_dict(), "init_hash": init_hash}
        save_imported(directory, params, identity, {"imported_from": str(source)})
    log.info("%s", model.describe_rotation())
    return {
        "workdir": str(path),
        "parameters": num_parameters,
        "step": 0,
        "rope_percentage": model.rope_percentage,
        "rotated_pairs": model.rotated_pairs,
        "tokenizer": spec.data.tokenizer,
        "dtype": model.dtype,
        "bos_every_window": spec.data.bos_every_window,
        "init_hash": init_hash,
    }


def set_training(spec: Spec, num_parameters: int) -> Spec:
    """Sets what a run is trained on with, by the size of its model: 16,384 tokens a step."""
    rate = float(f"{np.clip(1e-4 * (135e6 / num_parameters) ** 0.5, 1e-5, 1e-4):.0e}")
    rates = {"optimizer.learning_rate": rate, "optimizer.final_learning_rate": rate / 10}
    return spec.replace(rates | {"batch_size": max(2**14 // spec.data.seq_len, 1)})


def check_tensors(source: epath.Path, stored: dict[str, Stored], expected: list[Tensor]) -> None:
    """Raises UsageError where the tensors are not those of config.json's model."""
    shapes = {tensor.name: tensor.shape for tensor in expected}
    if HEAD in shapes and HEAD not in stored and EMBEDDING in stored:
        problem = f"config.json's tie_word_embeddings=false needs {HEAD}, which is missing"
        remedy = "if the embedding is also the output matrix, set it to true"
        raise usage_error("--input", source, problem, remedy)
    if HEAD in stored:
        shapes[HEAD] = shapes[EMBEDDING]
    found = {}
    for name, tensor in stored.items():
        name = name if name in shapes else tensor.name  # as the file has it
        found[name] = (tuple(tensor.values.get_shape()), tensor.values.get_dtype())
    remedy = "a checkpoint has the tensors that its config.json leads to: download both again, or "
    remedy += "load it with transformers, dequantized, without a wrapper, and call save_pretrained"
    check_found(source, found, shapes, _DTYPES, remedy)


def read_params(model: ModelSpec, stored: dict[str, Stored], expected: list[Tensor]) -> dict:
    """Reads the parameters as float32, one tensor at a time into arrays for all."""
    params = jax.tree.map(lambda leaf: _aligned(leaf.shape), parameters.shapes(model))
    for tensor in expected:
        parameter = functools.reduce(operator.getitem, tensor.path, params)
        _copy(stored[tensor.name], tensor, parameter)
    return params


def _copy(source: Stored, tensor: Tensor, parameter: np.ndarray) -> None:
    values = source.values[:]
    with np.errstate(invalid="ignore"):
        total = values.sum(dtype=np.float64)  # without a second array of its size
    if not np.isfinite(total):
        log.warning("%s: %s has values that are nan or infinite", source.file, tensor.name)
    tensor.write(parameter, values)


def is_tied(tied: bool, stored: dict[str, Stored]) -> bool:
    """Returns whether the embedding is the output matrix: by config.json, or as both are equal.

    Raises UsageError where config.json and the file disagree.
    """
    if HEAD not in stored:
        return tied
    head = stored[HEAD]
    count = head.values.get_shape()[0]

    def read(name, start):
        rows = slice(start, min(start + _ROWS, count))
        return np.asarray(stored[name].values[rows], np.float32)

    is_same = all(
        np.array_equal(read(HEAD, start), read(EMBEDDING, start), equal_nan=True)
        for start in range(0, count, _ROWS)
    )
    if tied and not is_same:
        problem = f"{HEAD} differs from {EMBEDDING}, but config.json's tie_word_embeddings is true"
        remedy = "set it to false if the checkpoint has an output matrix of its own"
        raise UsageError(f"{head.file}: {problem}; {remedy}")
    return is_same


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Allocates an array that JAX can use without a copy: it starts at a multiple of 64 bytes."""
    size = math.prod(shape) * 4
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)
