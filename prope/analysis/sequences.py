"""What an analysis reads: the beginnings of validation documents, or a text."""

import logging
import pathlib

import numpy as np
from ml_collections import ConfigDict

from prope.analysis.measures import FROM
from prope.config import override_dataset
from prope.data.mixture import open_windows
from prope.data.synthetic import Synthetic, text_of
from prope.data.tokenizer import BOS, load_tokenizer, name_of
from prope.errors import UsageError
from prope.runtime.validate import validate

log = logging.getLogger("prope")

SHOWN = 48  # tokens of a map or a table
LEAST = FROM + 1  # tokens of a sequence


def sequences(config: ConfigDict, given) -> tuple[np.ndarray, list[str], str]:
    """What is read: ids [B, T], the first sequence's tokens by name, and in words where they are from.

    Raises:
      UsageError: there is no text, or too little of it.
    """
    generated = config.data.dataset.startswith("synthetic/")
    if given.text is not None:
        tokenizer = load_tokenizer(config.data.tokenizer)
        tokens = read_text(given.text, tokenizer)[None, : given.seq_len or config.data.seq_len]
        source = given.text
    else:
        config = config.copy_and_resolve_references()
        data = config.data
        data.seq_len = given.seq_len or data.seq_len
        override_dataset(data, given.dataset, given.data_dir)
        validate(config)
        windows = open_windows(data, config.model.vocab_size, "validation")
        pieces = windows.beginnings(given.sequences)
        longest = max(map(len, pieces), default=0)
        if longest < LEAST:
            raise UsageError(
                f"config.data.dataset={data.dataset}: no validation document has {LEAST} tokens; give a --text=FILE"
            )
        tokens = np.stack([piece for piece in pieces if len(piece) == longest])
        if len(tokens) < given.sequences or longest < data.seq_len:
            log.info("found %d validation documents of %d tokens", len(tokens), longest)
        tokenizer = None if isinstance(windows, Synthetic) else load_tokenizer(data.tokenizer)
        source = data.dataset
    if tokens.max() >= config.model.vocab_size:
        raise UsageError(f"{source}: holds the id {tokens.max()}; the model has {config.model.vocab_size}")
    names = [text_of([t]) if generated and tokenizer is None else name_of(tokenizer, t) for t in tokens[0, :SHOWN]]
    return tokens.astype(np.int32), names, source


def read_text(path: str, tokenizer) -> np.ndarray:
    """The text's ids, <bos> before them."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--text={path}: cannot be read: {reason}; give a text file") from None
    ids = tokenizer.encode(text.encode())
    if len(ids) < LEAST - 1:
        raise UsageError(f"--text={path}: has {len(ids)} tokens; two at least are needed")
    return np.concatenate([[BOS], ids]).astype(np.int32)
