"""Reads the sequences of an analysis: the beginnings of documents, or a text."""

import dataclasses

import numpy as np

from prope.analysis.measures import FROM
from prope.data.mixture import open_text
from prope.data.tasks.synthetic import text_of
from prope.data.tokenizer import load_tokenizer, token_name
from prope.errors import UsageError, log, usage_error
from prope.runtime.files import read_text
from prope.spec.data import DataSpec, is_generated, override_dataset
from prope.workdir.run import Run

MIN_TOKENS = FROM + 1  # the shortest sequence


def read_sequences(
    run: Run, options, split: str | None = None
) -> tuple[list[list[int]], list[list[str]], dict]:
    """Reads the sequences to analyse: of the file of --text, or of documents.

    The documents are those of --dataset, without it the run's, of a split. By default that is
    validation, and all of a text that the run was not trained on.

    Returns ids [B, T], the names of these tokens [B, T], and {"source": dataset or file, "split":
    of a dataset}.
    """
    spec = run.spec
    seq_len = options.seq_len or spec.data.seq_len
    if options.text is None:
        data = override_dataset(spec.data, options.dataset, options.data_dir)
        data = dataclasses.replace(data, seq_len=seq_len)
        source = data.dataset
        if is_generated(source):
            split = None
        tokens, split = _read_documents(run, data, options.sequences, split)
    else:
        source = options.text
        tokens = _read_file(source, spec.data.tokenizer)[:, :seq_len]
        split = None
    V = spec.model.vocab_size
    if tokens.max() >= V:
        raise UsageError(f"{source}: holds the id {tokens.max()}; the model has {V}")
    ids, places = np.unique(tokens, return_inverse=True)
    if split and source.startswith("synthetic/"):
        names = [text_of([token]) for token in ids.tolist()]
    else:
        tokenizer = load_tokenizer(spec.data.tokenizer)
        names = [token_name(tokenizer, token) for token in ids.tolist()]
    token_names = np.array(names, object)[places.reshape(tokens.shape)]
    return tokens.tolist(), token_names.tolist(), {"source": source, "split": split}


def _read_file(path: str, name: str) -> np.ndarray:
    """Reads the tokens of a text file, which begin as a document: [1, T]."""
    text = read_text("text", path, "give a text file")
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text.encode())
    if len(ids) < MIN_TOKENS - 1:
        raise usage_error("--text", path, f"has {len(ids)} tokens", "two at least are needed")
    unknown = np.count_nonzero(tokenizer.special.is_unknown(ids))
    if unknown:
        log.warning("%s: %d of %d tokens are <unk>", path, unknown, len(ids))
    return np.append(tokenizer.special.start, ids)[None]


def _read_documents(
    run: Run, data: DataSpec, count: int, split: str | None
) -> tuple[np.ndarray, str]:
    """Reads the beginnings of documents of `data`, [B, T], and names their split.

    T is the greatest length that a document has, up to data.seq_len; shorter documents are left
    out.
    """
    spec = run.spec
    windows = open_text(data, spec.model.vocab_size, split, spec.data, run.checkpoint.data)
    documents = windows.document_starts(count)
    longest = max(map(len, documents), default=0)
    if longest < MIN_TOKENS:
        problem = f"no document of split {windows.split} has {MIN_TOKENS} tokens"
        raise usage_error("config.data.dataset", data.dataset, problem, "give a --text=FILE")
    tokens = np.stack([document for document in documents if len(document) == longest])
    if len(tokens) < count or longest < data.seq_len:
        log.info("found %d documents of %d tokens in split %s", len(tokens), longest, windows.split)
    return tokens, windows.split
