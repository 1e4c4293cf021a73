"""Reads the sequences of an analysis: the beginnings of documents, or a text."""

import numpy as np

from prope.analysis.measures import FROM
from prope.config import override_dataset
from prope.data.mixture import open_text
from prope.data.tasks.synthetic import text_of
from prope.data.tokenizer import BOS, load_tokenizer, token_name
from prope.errors import UsageError, log
from prope.runtime.files import read_text
from prope.runtime.validate import validate
from prope.workdir.run import Run

LEAST = FROM + 1  # tokens of a sequence


def read_sequences(run: Run, options) -> tuple[list[list[int]], list[list[str]], dict]:
    """Reads the sequences to analyse, by the flags `text, dataset, data_dir, split, seq_len, sequences`.

    Returns ids [B, T], the names of these tokens [B, T], and {"source": dataset or file, "split": of a dataset}.
    """
    config = run.config
    if options.text is not None:
        tokenizer = load_tokenizer(config.data.tokenizer)
        ids = tokenizer.encode(read_text("text", options.text, "give a text file").encode())
        if len(ids) < LEAST - 1:
            raise UsageError(
                f"--text={options.text}: has {len(ids)} tokens; two at least are needed"
            )
        tokens = np.append(BOS, ids)[None, : options.seq_len or config.data.seq_len]
        source, split = options.text, None
    else:
        config = config.copy_and_resolve_references()
        data = config.data
        data.seq_len = options.seq_len or data.seq_len
        override_dataset(data, options.dataset, options.data_dir)
        validate(config)
        state = run.checkpoint.data
        windows = open_text(data, config.model.vocab_size, options.split, run.config.data, state)
        documents = windows.document_starts(options.sequences)
        if (longest := max(map(len, documents), default=0)) < LEAST:
            none = f"no document of split {windows.split} has {LEAST} tokens"
            raise UsageError(f"config.data.dataset={data.dataset}: {none}; give a --text=FILE")
        tokens = np.stack([document for document in documents if len(document) == longest])
        if len(tokens) < options.sequences or longest < data.seq_len:
            log.info(
                "found %d documents of %d tokens in split %s", len(tokens), longest, windows.split
            )
        tokenizer = (
            None if data.dataset.startswith("synthetic/") else load_tokenizer(data.tokenizer)
        )
        source, split = data.dataset, windows.split
    if tokens.max() >= config.model.vocab_size:
        raise UsageError(
            f"{source}: holds the id {tokens.max()}; the model has {config.model.vocab_size}"
        )
    names = {
        t: token_name(tokenizer, t) if tokenizer else text_of([t])
        for t in np.unique(tokens).tolist()
    }
    ids = tokens.tolist()
    return ids, [[names[t] for t in row] for row in ids], {"source": source, "split": split}
