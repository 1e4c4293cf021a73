"""Computes losses of models on windows of text, summed by document and by position.

`evaluations` opens checkpoints for `python -m prope.evaluate`; `LossEvaluation` evaluates
parameters, those in training too. Every predicted token counts once. Losses are added up in
float64, so the batch size does not change the result.

Axes: B batch, T seq_len of the windows, C documents, Q buckets of positions.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prope import model, sharding
from prope.data.batch import Batch, padding
from prope.data.mixture import open_text
from prope.data.store.arrays import READ_TOKENS, fingerprint_of, retry_tokens
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from prope.data.windows import Windows
from prope.errors import log, usage_error
from prope.inference import paired
from prope.inference.opening import records, specs_by_length
from prope.inference.options import Options
from prope.kernels.choice import matmul_precision
from prope.loss import token_losses
from prope.runtime import processes, watchdog
from prope.runtime.memory import check_memory
from prope.spec.data import DataSpec, is_generated, override_dataset
from prope.spec.kinds import FULL
from prope.spec.model import ModelSpec
from prope.spec.run import Spec
from prope.step import batch_hidden
from prope.workdir.run import Run

RECORDS = "eval.jsonl"
_MAX_UNKNOWN = 0.01  # share of <unk> up to which a loss says something about the bytes
# How byte-level BPE, which writes every byte as a character, writes a space; what stands for one
# byte in tokens that are text.
_BYTE_LEVEL_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
_ONE_BYTE = re.compile("\N{LOWER ONE EIGHTH BLOCK}|^<0x[0-9A-F]{2}>$")
_LONG_WINDOW = 8192  # tokens; from this length on, buckets have 1024 positions


class Selection(NamedTuple):
    """The windows that are evaluated."""

    indices: list[int]
    # Hash of the text and of the rule that selects from it. With max_tokens it is the same at every
    # seq_len, because the tokens are.
    fingerprint: str


def select(
    windows: Windows, max_windows: int | None, max_tokens: int | None = None, longest: int = 0
) -> Selection:
    """Selects windows, evenly spread; in a mixture every source has its share of training.

    Args:
      windows: all windows of a split.
      max_windows: how many are selected; None: all.
      max_tokens: instead of `max_windows`: so many tokens, the same ones at every length of
        windows. They are read in stretches of `longest` tokens.
      longest: the longest window that will read these tokens.
    """
    number = max_windows
    stretch = 1  # neighbouring windows that are selected together
    rule = {}
    if max_tokens is not None:
        number = max_tokens // longest
        stretch = longest // windows.seq_len
        rule = {"max_tokens": max_tokens, "longest": longest}
    if windows.split != "validation":
        rule["split"] = windows.split
    indices = []
    offset = 0
    for source, weight in zip(windows.sources, windows.weights, strict=True):
        stretches = -(-source.count // stretch)
        chosen = stretches
        if number is not None:
            chosen = min(max(round(number * weight), 1), stretches)
        for i in range(chosen):
            start = i * stretches // chosen * stretch
            stop = min(start + stretch, source.count)
            indices += range(offset + start, offset + stop)
        offset += source.count
    fingerprint = windows.store.fingerprint
    if rule:
        fingerprint = fingerprint_of({"store": fingerprint, **rule})
    return Selection(indices, fingerprint)


def run_batches(
    step: Callable[[Batch], dict[str, jax.Array]],
    spec: Spec,
    mesh: Mesh,
    count: int,
    read: Callable[[list[int]], Batch],
    go_on: Callable[[], bool] = lambda: True,
) -> Iterator[dict[str, np.ndarray]]:
    """Runs a step on the sequences 0 .. count - 1; yields its results batch by batch.

    Args:
      step: computes arrays, whose first axis is the batch, from a batch on all devices.
      spec: of the run; `eval.batch_size` is the most sequences of a batch.
      mesh: the devices.
      count: how many sequences there are.
      read: reads this process's sequences of a batch; numbers from `count` on are padding.
      go_on: called before every batch, in all processes alike; after False nothing is read.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    batch_size = -(-min(spec.eval.batch_size, count) // shards) * shards
    local_rows = sharding.rows_of_this_process(mesh, batch_size)
    for start in range(0, count, batch_size):
        watchdog.alive(f"sequence {start} of {count}")
        if not go_on():
            return
        sequences = read([start + row for row in local_rows])
        with sharding.use(mesh), matmul_precision(spec.model.dtype):
            results = step(sharding.global_batch(mesh, sequences, batch_size))
        rows = min(batch_size, count - start)
        yield {name: np.asarray(values)[:rows] for name, values in results.items()}


class LossEvaluation:
    """Evaluates parameters on a selection of windows, by default of spec.eval.max_windows."""

    def __init__(self, spec: Spec, windows: Windows, selection: Selection | None = None):
        self.spec = spec
        self.windows = windows
        self.selection = selection or select(windows, spec.eval.max_windows)
        self.dataset = spec.data.dataset
        self.seq_len = windows.seq_len
        self.split = windows.split
        self._compiled = None

    def evaluate(
        self,
        params: model.Params,
        mesh: Mesh,
        sums_folder: epath.Path | None = None,
        go_on: Callable[[], bool] = lambda: True,
        writing: Callable = contextlib.nullcontext,
    ) -> dict | None:
        """Returns the record of an evaluation; None where `go_on` ends it.

        Args:
          params: the parameters.
          mesh: the devices, the same ones in every call.
          sums_folder: where the sums by document are written; None: nowhere.
          go_on: called before every batch, in all processes alike; False ends the evaluation.
          writing: makes the context in which the sums are written, `errors.warn_if_unwritten` in
            training.
        """
        indices = self.selection.indices
        count = len(indices)
        sources = self.windows.sources
        source_of = np.repeat(range(len(sources)), [source.count for source in sources])[indices]
        by_document = DocumentSums(self.seq_len, self.spec.data.seq_len)
        counts = np.zeros((len(sources), self.spec.model.vocab_size), int)
        start = self.windows.store.special.start
        correct = []
        row = 0

        step = functools.partial(self._run, params, mesh)
        for scores in run_batches(step, self.spec, mesh, count, self._read, go_on):
            correct.extend(scores.pop("correct", ()))
            for i, targets in enumerate(scores.pop("targets")):
                source = source_of[row]
                window = {name: values[i] for name, values in scores.items()}
                is_generated = isinstance(sources[source], GeneratedWindows)
                ends_document = is_generated or targets[-1] == start
                by_document.add(indices[row], source, ends_document=ends_document, **window)
                np.add.at(counts[source], targets[window["weights"] > 0], 1)
                row += 1
        if row < count:
            return None
        sums = by_document.finish(self.windows.shares)
        record = {
            "fingerprint": self.selection.fingerprint,
            "seq_len": self.seq_len,
            "split": self.split,
            "bos_every_window": self.spec.data.bos_every_window,
            "windows": count,
            **summarize(sums),
            "by_position": summarize_positions(sums),
            **per_byte(self.windows, sums, counts, self.spec.data.tokenizer),
        }
        if len(sources) > 1:
            record["sources"] = summarize_sources(self.windows, source_of, sums)
        if isinstance(self.windows, GeneratedWindows):
            record |= self.windows.accuracy(indices, np.array(correct))
        if sums_folder is not None and processes.is_first():
            with writing(sums_folder):
                paired.write_sums(sums_folder, record, sums)
        return record

    def _read(self, rows: list[int]) -> Batch:
        """Reads windows by their place in the selection; places after the last are padding."""
        selected = self.selection.indices
        indices = [selected[row] for row in rows if row < len(selected)]
        batch = self.windows.read(indices)
        fill = padding(len(rows) - len(indices), self.seq_len)
        return {name: np.concatenate([batch[name], fill[name]]) for name in batch}

    def _run(self, params, mesh, batch) -> dict[str, jax.Array]:
        """Calls `_score`, compiled at the first call: later ones have the same shapes."""
        if self._compiled is None:
            step = jax.jit(self._score, out_shardings=NamedSharding(mesh, PartitionSpec()))
            self._compiled = step.lower(params, batch).compile()
            size = self.spec.eval.batch_size
            advice = f"lower the batch size, now {size}, or the windows' length"
            check_memory(self._compiled, advice)
        return self._compiled(params, batch)

    def _score(self, params, batch) -> dict[str, jax.Array]:
        """Scores every token of a batch, [B, T]."""
        hidden = batch_hidden(self.spec, params, batch)
        targets = batch["targets"]
        scores = {
            "weights": batch["weights"],
            "segment_ids": batch["segment_ids"],
            "targets": targets,
            "losses": token_losses(
                hidden, model.head(params), targets, self.spec.model.final_softcap
            ),
        }
        if isinstance(self.windows, GeneratedWindows):
            # One sequence at a time, so that the logits of a batch never exist whole.
            logits = functools.partial(model.logits, self.spec.model, params)
            likeliest = jax.lax.map(lambda row: logits(row).argmax(axis=-1), hidden)
            scores["correct"] = likeliest == targets
        return jax.tree.map(sharding.whole_sequences, scores)


class DocumentSums:
    """Sums losses by document and by bucket of positions, window after window."""

    def __init__(self, T: int, training_length: int):
        width = 1024 if T >= _LONG_WINDOW else max(training_length // 8, 1)
        # [Q + 1]: the first position of each bucket, and T.
        self._edges = np.append(np.arange(0, T, width), T)
        self._bucket = np.arange(T) // width
        self._windows = []  # one [2, documents, Q] a window: losses and tokens
        self._sources = []  # the source of every document
        self._open = None  # source and index of the window in which the last document goes on

    def add(self, index: int, source: int, losses, weights, segment_ids, ends_document) -> None:
        """Adds a window, arrays [T].

        Windows come in order: a document that the previous window of the source did not end goes on
        in this one.
        """
        documents = max(int(segment_ids.max()), 1)
        Q = len(self._edges) - 1
        # Padding has weight 0, so its cell does not matter.
        cell = np.maximum(segment_ids - 1, 0) * Q + self._bucket
        values = (losses.astype(np.float64) * weights, weights)
        sums = np.stack([np.bincount(cell, x, documents * Q) for x in values])
        sums = sums.reshape(2, documents, Q)
        if self._open == (source, index):
            self._windows[-1][:, -1] += sums[:, 0]
            sums = sums[:, 1:]
        if sums.shape[1]:
            self._windows.append(sums)
            self._sources += [source] * sums.shape[1]
        self._open = None if ends_document else (source, index + 1)

    def finish(self, shares) -> paired.Sums:
        """Returns the sums of all windows, of sources with these shares."""
        losses, tokens = np.concatenate(self._windows, axis=1)
        return paired.Sums(losses, tokens, self._edges, np.array(self._sources), shares)


def summarize(sums: paired.Sums, rows=slice(None), columns=slice(None)) -> dict:
    """Computes the loss of some documents in some buckets; None where no token is predicted.

    Its standard error is over documents; None of a single one.
    """
    tokens = sums.tokens[rows, columns].sum(axis=1)
    loss, stderr = sums.mean_and_stderr(rows, columns) if tokens.any() else (None, None)
    return {
        "documents": int((tokens > 0).sum()),
        "tokens": int(tokens.sum()),
        "loss": loss,
        "loss_stderr": stderr,
    }


def summarize_positions(sums: paired.Sums) -> list[dict]:
    """Computes the loss of each bucket of positions that has tokens, as `summarize` does."""
    return [
        {"from": start, "to": stop} | summarize(sums, columns=slice(q, q + 1))
        for q, (start, stop) in enumerate(itertools.pairwise(sums.edges.tolist()))
        if sums.tokens[:, q].any()
    ]


def summarize_sources(windows: Windows, source_of: np.ndarray, sums: paired.Sums) -> list[dict]:
    """Computes the loss of each source of a mixture; source_of[i] is that of window i."""
    sources = []
    for s, source in enumerate(windows.sources):
        about = {
            "dataset": source.name,
            "weight": windows.weights[s],
            "share": float(windows.shares[s]),
            "windows": int((source_of == s).sum()),
        }
        sources.append(about | summarize(sums, sums.source == s))
    return sources


def per_byte(windows: Windows, sums: paired.Sums, counts: np.ndarray, tokenizer: str) -> dict:
    """Computes perplexity and bits per byte; warns where there are none.

    All are None where no token is predicted. There are no bits per byte above 1 % of <unk>, which
    stands for any text, and where the predicted tokens have no text.

    Args:
      windows: the windows that were evaluated.
      sums: their sums; sources without tokens do not count.
      counts: [S, V] how often each id is predicted, by source.
      tokenizer: config.data.tokenizer.
    """
    tokens = counts.sum(axis=1)
    is_unknown = windows.store.special.is_unknown(np.arange(counts.shape[1]))
    unknown = counts[:, is_unknown].sum(axis=1)
    record = dict.fromkeys(("perplexity", "bits_per_byte", "unigram_bits_per_byte"))
    record["unknown_tokens"] = int(unknown.sum())
    if not tokens.any():
        log.warning("no token of the evaluated windows is predicted: there is no loss")
        return record
    loss, _ = sums.mean_and_stderr()
    record["perplexity"] = math.exp(min(loss, 700.0))  # exp(710) overflows
    counted = np.flatnonzero(tokens)
    shares = np.array(windows.shares)[counted]
    shares /= shares.sum()
    unknown_share = float(np.dot(shares, unknown[counted] / tokens[counted]))
    if unknown_share > _MAX_UNKNOWN:
        problem = f"{unknown_share:.1%} of the predicted tokens are <unk>, more than 1 %"
        log.warning("%s: there are no bits per byte; take a tokenizer with byte fallback", problem)
        return record
    per_token = [_bytes_and_nats(windows.sources[s], counts[s], tokenizer) for s in counted]
    num_bytes, unigram_loss = np.dot(shares, per_token).tolist()
    if num_bytes > 0:
        bits = num_bytes * math.log(2)
        record["bits_per_byte"] = loss / bits
        record["unigram_bits_per_byte"] = unigram_loss / bits
    return record


def _bytes_and_nats(source: Windows, counts: np.ndarray, tokenizer: str) -> tuple[float, float]:
    """Averages the bytes of a source's predicted tokens, and their loss under token frequencies.

    counts[i] is how often id i is predicted.
    """
    store = source.store
    targets = store.targets(source.split)
    if isinstance(source, GeneratedWindows) or counts.sum() == targets:
        return store.count("bytes", source.split) / targets, store.unigram_loss(source.split)
    (ids,) = counts.nonzero()
    return tuple(_measure_ids(source, tokenizer)[:, ids] @ counts[ids] / counts.sum())


@functools.lru_cache(8)  # training evaluates the same windows again and again
def _measure_ids(source: Windows, tokenizer: str) -> np.ndarray:
    """Measures every id, [2, V]: its bytes, and its nats under the train split's frequencies.

    Of more than 2^24 tokens as many are counted, evenly spread.
    """
    loaded = load_tokenizer(tokenizer)
    store = source.store
    train = store.tokens("train")
    size = train.shape[0]
    chunks = np.unique(np.linspace(0, size // READ_TOKENS, 1024, dtype=int))
    places = np.add.outer(chunks * READ_TOKENS, np.arange(READ_TOKENS))
    chosen = train[places[places < size]]
    ids, is_prompt = store.decode(retry_tokens(store.path, lambda: chosen.read().result()))
    predicted = ids[~is_prompt & (ids != store.special.bos)]
    counts = np.bincount(predicted, minlength=loaded.vocab_size) + 1
    return np.stack([count_bytes(loaded), -np.log(counts / counts.sum())])


def count_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Counts the bytes of text that each id stands for, [V].

    Where the tokenizer puts a space before every text, the end of a document takes it back.
    """
    texts = ["?"] * tokenizer.vocab_size
    example = "a a"
    if not isinstance(tokenizer, ByteTokenizer):
        is_json = isinstance(tokenizer, JsonTokenizer)
        to_text = tokenizer.tokenizer.id_to_token if is_json else tokenizer.processor.id_to_piece
        texts = [to_text(i) or "" for i in range(len(texts))]
        example = "".join(texts[i] for i in tokenizer.encode(example.encode()))
    if _BYTE_LEVEL_SPACE not in example:
        texts = [_ONE_BYTE.sub(" ", text).encode() for text in texts]
    sizes = np.array([len(text) for text in texts])
    sizes[list(tokenizer.special.ends)] = -(not example.startswith("a"))
    return sizes


# --- Checkpoints ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LossOptions(Options):
    """Which losses to compute; the fields are the flags of prope.evaluate, which explains them."""

    max_windows: int | None = None
    max_tokens: int | None = None
    dataset: str | None = None
    data_dir: str | None = None
    split: str | None = None
    window: list[str] | None = None
    sinks: list[str] | None = None
    bos_every_window: bool | None = None

    def cuts(self, model: ModelSpec, T: int) -> list[tuple[int | None, int]]:
        """Returns windows of the layers that have none, each with sinks; first (None, 0), uncut."""
        windows = _parse_counts("--window", self.window or [], least=1)
        sinks = _parse_counts("--sinks", self.sinks or ["0"], least=0)
        # Where they hold T keys, the last query, too, sees all.
        cuts = [(w, s) for w in windows for s in sinks if w + s < T and FULL in model.kinds]
        return [(None, 0), *cuts]

    def __post_init__(self):
        super().__post_init__()
        if self.sinks and not self.window:
            problem = "has no effect without --window, outside of which they stay visible"
            raise usage_error("--sinks", ",".join(self.sinks), problem)
        if self.max_windows and self.max_tokens:
            problem = f"conflicts with --max_tokens={self.max_tokens}; give one"
            raise usage_error("--max_windows", self.max_windows, problem)


def _parse_counts(flag: str, entries: list[str], least: int) -> list[int]:
    for entry in entries:
        if not entry.strip().isdecimal() or int(entry) < least:
            problem = f"{entry!r} is not a number of tokens from {least} on"
            raise usage_error(flag, ",".join(entries), problem)
    return list(dict.fromkeys(map(int, entries)))


def evaluations(options: LossOptions) -> Iterator[dict]:
    """Yields the record of every evaluation, in the order of runs, checkpoints and lengths.

    Raises UsageError, before anything is computed, where a run, a checkpoint or data is missing or
    does not fit the flags.
    """
    opened = {}  # evaluations that several runs share
    open_all = functools.partial(_open_lengths, options, opened)
    if options.max_windows and "," in (options.seq_len or ""):
        remedy = "--max_tokens reads the same text at every length"
        log.warning("--max_windows: longer windows hold more text; %s", remedy)
    limits = {"max_windows": options.max_windows, "max_tokens": options.max_tokens}
    return records(options, open_all, RECORDS, **limits)


def _open_lengths(
    options: LossOptions, opened: dict[tuple, LossEvaluation], run: Run, encoding: str | None
) -> list[LossEvaluation]:
    """Opens the evaluation of each length; runs that differ by seed share one, in `opened`."""
    state = run.checkpoint.data
    if "imported_from" in state and options.dataset is None:
        problem = "was imported, without a dataset; give --dataset=files --data_dir=DIR or another"
        raise usage_error("--workdir", run.workdir, problem)
    data = override_dataset(run.spec.data, options.dataset, options.data_dir)
    if options.bos_every_window is not None:
        data = dataclasses.replace(data, bos_every_window=options.bos_every_window)
    specs = specs_by_length(dataclasses.replace(run.spec, data=data), options, encoding)
    longest = max(specs)
    if options.max_tokens:
        _check_max_tokens(options, specs, data)
    if options.window and FULL not in run.spec.model.kinds:
        log.info("%s: as it is, for no layer is without a window", run.workdir)
    evaluations = []
    for T, spec in specs.items():
        for window, sinks in options.cuts(spec.model, T):
            model = dataclasses.replace(spec.model, test_window=window, test_sinks=sinks)
            cut = dataclasses.replace(spec, model=model)
            # All that the program and its windows depend on; `open_text` reads the run's data, too.
            texts = repr((data, run.spec.data))
            key = (T, state.get("fingerprint"), cut.model, cut.eval.batch_size, texts)
            if key not in opened:
                windows = _open_windows(run, options, cut, T)
                selection = select(windows, options.max_windows, options.max_tokens, longest)
                opened[key] = LossEvaluation(cut, windows, selection)
            evaluations.append(opened[key])
    return evaluations


def _check_max_tokens(options: LossOptions, lengths: Iterable[int], data: DataSpec) -> None:
    """Raises UsageError where the same tokens cannot be read at every length."""
    if any(is_generated(source.dataset) for _, source in data.weighted_sources()):
        problem = f"{data.dataset} has other windows at every length; give --max_windows"
        raise usage_error("--max_tokens", options.max_tokens, problem)
    longest = max(lengths)
    if options.max_tokens < longest:
        allowed = f"must be at least a window, here of {longest} tokens"
        raise usage_error("--max_tokens", options.max_tokens, allowed)
    for T in lengths:
        if longest % T:
            problem = f"{T} does not divide the longest, {longest}, as it must with --max_tokens"
            raise usage_error("--seq_len", options.seq_len, problem)


def _open_windows(run: Run, options: LossOptions, spec: Spec, T: int):
    data = dataclasses.replace(spec.data, seq_len=T)
    vocab_size = spec.model.vocab_size
    windows = open_text(data, vocab_size, options.split, run.spec.data, run.checkpoint.data)
    text_length = max(source.length for source in windows.sources)
    # At the training's length a short text is padded, as in training.
    if text_length < T and spec.data.seq_len < T:
        problem = f"longer than split {windows.split} of {data.dataset}, {text_length:,} tokens"
        raise usage_error("--seq_len", T, problem, "give a shorter window, or more text")
    return windows
