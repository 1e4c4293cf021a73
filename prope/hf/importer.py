"""Reads a Gemma 1 checkpoint in the format of Hugging Face into a new run with a checkpoint of step 0."""

import functools
import hashlib
import logging
import math
import operator
import pathlib
import shutil
from collections.abc import Iterable

import jax
import numpy as np
from ml_collections import ConfigDict

from prope import model
from prope.data.tokenizer import load_tokenizer
from prope.errors import UsageError
from prope.hf import gemma
from prope.hf.tensors import Header, open_tensors, read_headers, some
from prope.runtime.files import check_new, new_directory
from prope.workdir.checkpoints import save_imported
from prope.workdir.run import check_disk, write_config

log = logging.getLogger("prope")

_DTYPES = ("F32", "BF16", "F16")  # whose values are all float32 values
_TIED = "lm_head.weight"  # if present, a copy of the embedding
_EMBEDDING = "model.embed_tokens.weight"
_REMEDY = "give --tokenizer=PATH, the SentencePiece model that the checkpoint was trained with"
_OTHER_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def import_run(source: str, workdir: str, tokenizer: str | None = None) -> dict:
    """Imports the checkpoint in `source` as the run `workdir`; returns the command's result.

    Raises:
      UsageError: the checkpoint is not one that this decoder computes, or is not whole; or `workdir` exists.
    """
    source, path = pathlib.Path(source), pathlib.Path(workdir)
    check_new("workdir", path)
    if not source.is_dir():
        raise UsageError(
            f"--input={source}: no such directory; a name on the Hub is fetched with: hf download NAME --local-dir=DIR"
        )
    config, values = gemma.from_hf(source / "config.json")
    headers, expected = read_headers(source), gemma.tensors(config.model)
    check_tensors(source, headers, expected)
    tokenizer_file = find_tokenizer(source, tokenizer, config, values)

    with new_directory("workdir", path) as directory:
        check_disk(directory, sum(4 * math.prod(tensor.shape) for tensor in expected))
        params = read_params(config, headers, expected)
        check_tied(headers, params)
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, directory / gemma.TOKENIZER)
            config.data.tokenizer = str(path.resolve() / gemma.TOKENIZER)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(params):
            digest.update(leaf.reshape(-1).view(np.uint8))
        init_hash = digest.hexdigest()[:16]
        write_config(directory, config)
        identity = {"config": config.to_dict(), "init_hash": init_hash}
        save_imported(directory, params, identity, {"imported_from": str(source)})
    pairs = model.rotated_pairs(config.model)
    log.info(
        "%s parameters, computed in %s; p-RoPE rotates %d of %d pairs; tokenizer %s",
        f"{model.num_parameters(params):,}", config.model.dtype, pairs, config.model.head_dim // 2,
        config.data.tokenizer,
    )  # fmt: skip
    return {
        "workdir": str(path),
        "parameters": model.num_parameters(params),
        "step": 0,
        "rope_percentage": config.model.rope_percentage,
        "rotated_pairs": pairs,
        "tokenizer": config.data.tokenizer,
        "init_hash": init_hash,
    }


def check_tensors(source: pathlib.Path, headers: dict[str, Header], expected: list[gemma.Tensor]) -> None:
    """Raises UsageError where the tensors are not those of config.json's model."""
    shapes = {tensor.name: tensor.shape for tensor in expected}
    missing, surplus = shapes.keys() - headers.keys(), headers.keys() - shapes.keys() - {_TIED}
    if missing or surplus:
        what = [
            f"{word} tensors: {some(names)}" for word, names in (("missing", missing), ("unknown", surplus)) if names
        ]
        raise UsageError(f"--input={source}: {'; '.join(what)}; only the tensors of a plain Gemma 1 can be imported")
    for name, tensor in headers.items():
        shape = shapes.get(name, shapes[_EMBEDDING])
        if tensor.shape != shape:
            raise UsageError(f"{tensor.file}: {name} has shape {tensor.shape}; config.json leads to {shape}")
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{tensor.file}: {name} has dtype {tensor.dtype}; only {', '.join(_DTYPES)} can be read")


def find_tokenizer(source: pathlib.Path, flag: str | None, config: ConfigDict, values: dict) -> pathlib.Path | None:
    """Returns the file of the checkpoint's SentencePiece model; None for bytes.

    Raises:
      UsageError: there is none, there are two that differ, or it does not fit config.json.
    """
    own = source / gemma.TOKENIZER
    name = str(own) if own.is_file() else flag
    others = [name for name in _OTHER_TOKENIZERS if (source / name).is_file()]
    if name is None and others:
        raise UsageError(f"--input={source}: has no {own.name}, and {others[0]} is not read; {_REMEDY}")
    tokenizer = load_tokenizer(name or "byte")
    if flag is not None and load_tokenizer(flag).fingerprint != tokenizer.fingerprint:
        raise UsageError(f"--tokenizer={flag}: {own} is there and is another one; remove the flag, or that file")
    size, what = config.model.vocab_size, f"the tokenizer {name or 'byte'} has"
    if size < tokenizer.vocab_size:
        raise UsageError(f"{source}: vocab_size={size}, but {what} {tokenizer.vocab_size} ids; {_REMEDY}")
    for special in ("bos", "eos"):
        ours, theirs = getattr(tokenizer, special), values.get(f"{special}_token_id")
        if theirs is not None and ours not in (theirs if isinstance(theirs, list) else [theirs]):
            raise UsageError(f"{source}: {special}_token_id={theirs}, but {what} {ours}; {_REMEDY}")
    if name is None:
        log.info("no %s in %s: taking the byte tokenizer; if that is wrong, give --tokenizer=PATH", own.name, source)
    return None if name in (None, "byte") else pathlib.Path(name)


def read_params(config: ConfigDict, headers: dict[str, Header], expected: Iterable[gemma.Tensor]) -> dict:
    """Reads the parameters as float32, one tensor at a time into arrays for all."""
    shapes = jax.eval_shape(lambda: model.init(config.model, jax.random.key(0)))
    params = jax.tree.map(lambda leaf: _aligned(leaf.shape), shapes)
    for file in sorted({header.file for header in headers.values()}):
        with open_tensors(file) as tensors:
            for tensor in expected:
                if headers[tensor.name].file == file:
                    parameter = functools.reduce(operator.getitem, tensor.path, params)
                    tensor.write(parameter, tensors.get_tensor(tensor.name))
    return params


def check_tied(headers: dict[str, Header], params: dict) -> None:
    """Raises UsageError where the checkpoint has an output matrix that is not its embedding."""
    if _TIED not in headers:
        return
    with open_tensors(headers[_TIED].file) as tensors:
        output, embedding = tensors.get_tensor(_TIED), params["embedder"]["input_embedding"]
    for start in range(0, len(output), 1024):  # some rows at a time, since float32 copies are compared
        rows = slice(start, start + 1024)
        if output[rows].astype(np.float32).tobytes() != embedding[rows].tobytes():
            raise UsageError(
                f"{headers[_TIED].file}: {_TIED} differs from {_EMBEDDING}; this decoder has one matrix for both, as "
                "Gemma 1 has: import a checkpoint with tied embeddings"
            )


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Allocates an array that JAX can use without a copy: it must start at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * 4
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)
