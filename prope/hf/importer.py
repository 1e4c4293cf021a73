"""Reads a Gemma 1 checkpoint in the format of Hugging Face into a new run with a checkpoint of step 0."""

import functools
import math
import operator

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from prope import model
from prope.data.tokenizer import load_tokenizer
from prope.encodings import describe, rotated_pairs
from prope.errors import UsageError, log
from prope.hf import gemma
from prope.hf.tensors import Stored, open_tensors, some
from prope.runtime.files import absolute, as_path, check_new, local_copy, new_directory
from prope.workdir.checkpoints import save_imported
from prope.workdir.hashes import hash_arrays
from prope.workdir.run import check_disk, write_config

_DTYPES = ("F32", "BF16", "F16")  # whose values are all float32 values
_TIED = "lm_head.weight"  # if present, a copy of the embedding
_EMBEDDING = "model.embed_tokens.weight"
_REMEDY = "give --tokenizer=PATH, the SentencePiece model that the checkpoint was trained with"
_OTHER_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def import_run(source: str, workdir: str, tokenizer: str | None = None) -> dict:
    """Imports the checkpoint in `source` as the run `workdir`; returns the command's result.

    Raises UsageError where this decoder does not compute the checkpoint, it is not whole, or `workdir` exists.
    """
    source, path = as_path("input", source), as_path("workdir", workdir)
    check_new("workdir", path)
    if not source.is_dir():
        remedy = "a name on the Hub is fetched with: hf download NAME --local-dir=DIR"
        raise UsageError(f"--input={source}: no such directory; {remedy}")
    with local_copy(source) as local:
        try:
            return _import(source, local, path, tokenizer)
        except UsageError as error:
            raise UsageError(str(error).replace(str(local), str(source))) from error


def _import(source: epath.Path, local: epath.Path, path: epath.Path, tokenizer: str | None) -> dict:
    """Imports the checkpoint in the folder `local`, which is `source` or a copy of it."""
    config, values = gemma.from_hf(local / "config.json")
    stored, expected = open_tensors(local), gemma.tensors(config.model)
    check_tensors(local, stored, expected)
    tokenizer_file = find_tokenizer(local, tokenizer, config, values)

    parameters = sum(math.prod(tensor.shape) for tensor in expected)
    with new_directory("workdir", path) as directory:
        check_disk(directory, 4 * parameters)
        params = read_params(config, stored, expected)
        check_tied(stored, params)
        if tokenizer_file is not None:
            epath.Path(tokenizer_file).copy(directory / gemma.TOKENIZER)
            config.data.tokenizer = str(absolute(path) / gemma.TOKENIZER)
        params = jax.device_put(params, may_alias=True)  # without a second copy
        init_hash = hash_arrays(params)
        write_config(directory, config)
        identity = {"config": config.to_dict(), "init_hash": init_hash}
        save_imported(directory, params, identity, {"imported_from": str(source)})
    computed = f"{parameters:,} parameters, computed in {config.model.dtype}"
    log.info("%s; %s; tokenizer %s", computed, describe(config.model), config.data.tokenizer)
    return {
        "workdir": str(path),
        "parameters": parameters,
        "step": 0,
        "rope_percentage": config.model.rope_percentage,
        "rotated_pairs": rotated_pairs(config.model),
        "tokenizer": config.data.tokenizer,
        "init_hash": init_hash,
    }


def check_tensors(
    source: epath.Path, stored: dict[str, Stored], expected: list[gemma.Tensor]
) -> None:
    """Raises UsageError where the tensors are not those of config.json's model."""
    shapes = {tensor.name: tensor.shape for tensor in expected}
    differing = {
        "missing": shapes.keys() - stored.keys(),
        "unknown": stored.keys() - shapes.keys() - {_TIED},
    }
    if what := [f"{word} tensors: {some(names)}" for word, names in differing.items() if names]:
        raise UsageError(
            f"--input={source}: {'; '.join(what)}; only the tensors of a plain Gemma 1 can be imported"
        )
    for name, (file, values) in stored.items():
        expected_shape, shape = shapes.get(name, shapes[_EMBEDDING]), tuple(values.get_shape())
        if shape != expected_shape:
            raise UsageError(
                f"{file}: {name} has shape {shape}; config.json leads to {expected_shape}"
            )
        if (dtype := values.get_dtype()) not in _DTYPES:
            raise UsageError(
                f"{file}: {name} has dtype {dtype}; only {', '.join(_DTYPES)} can be read"
            )


def find_tokenizer(
    source: epath.Path, flag: str | None, config: ConfigDict, values: dict
) -> epath.Path | None:
    """Returns the file of the checkpoint's SentencePiece model, which must fit config.json; None for bytes."""
    own = source / gemma.TOKENIZER
    name = str(own) if own.is_file() else flag
    others = [name for name in _OTHER_TOKENIZERS if (source / name).is_file()]
    if name is None and others:
        raise UsageError(
            f"--input={source}: has no {own.name}, and {others[0]} is not read; {_REMEDY}"
        )
    tokenizer = load_tokenizer(name or "byte")
    if flag is not None and load_tokenizer(flag).fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"--tokenizer={flag}: {own} is there and is another one; remove the flag, or that file"
        )
    size, what = config.model.vocab_size, f"the tokenizer {name or 'byte'} has"
    if size < tokenizer.vocab_size:
        raise UsageError(
            f"{source}: vocab_size={size}, but {what} {tokenizer.vocab_size} ids; {_REMEDY}"
        )
    for special in ("bos_token_id", "eos_token_id"):
        ours, theirs = gemma.SPECIAL_IDS[special], values.get(special)
        if theirs is not None and ours not in (theirs if isinstance(theirs, list) else [theirs]):
            raise UsageError(f"{source}: {special}={theirs}, but {what} {ours}; {_REMEDY}")
    if name is None:
        log.info(
            "no %s in %s: taking the byte tokenizer; if that is wrong, give --tokenizer=PATH",
            own.name,
            source,
        )
    return None if name in (None, "byte") else epath.Path(name)


def read_params(
    config: ConfigDict, stored: dict[str, Stored], expected: list[gemma.Tensor]
) -> dict:
    """Reads the parameters as float32, one tensor at a time into arrays for all."""
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: _aligned(leaf.shape), shapes)
    for tensor in expected:
        tensor.write(
            functools.reduce(operator.getitem, tensor.path, params), stored[tensor.name].values[:]
        )
    return params


def check_tied(stored: dict[str, Stored], params: dict) -> None:
    """Raises UsageError where the checkpoint has an output matrix that is not its embedding."""
    if _TIED in stored and (stored[_TIED].values[:] != params["embedder"]["input_embedding"]).any():
        one = "this decoder has one matrix for both, as Gemma 1 has: import a checkpoint with tied embeddings"
        raise UsageError(f"{stored[_TIED].file}: {_TIED} differs from {_EMBEDDING}; {one}")


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Allocates an array that JAX can use without a copy: it must start at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * 4
    raw = np.empty(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size].view(np.float32).reshape(shape)
