"""Loss and perplexity of checkpoints over validation documents; the room behind python -m prope.evaluate.

Every token of every validation document is predicted once. Losses are added up in float64, so the batch size does not
change the result. Evaluations that a run's eval.jsonl already has are not computed again.

Axes: B batch, T seq_len of the windows, C documents, Q buckets of positions.
"""

import dataclasses
import json
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from prope import model, sharding
from prope.config import override_dataset
from prope.data.batch import padding
from prope.data.mixture import open_windows
from prope.data.synthetic import Synthetic
from prope.data.tokenizer import BOS
from prope.data.windows import Windows
from prope.errors import UsageError
from prope.inference import paired
from prope.loss import token_losses
from prope.runtime import processes
from prope.runtime.files import append_jsonl
from prope.runtime.validate import validate
from prope.step import batch_hidden
from prope.workdir.checkpoints import list_steps
from prope.workdir.records import find_evaluation, read_jsonl
from prope.workdir.run import Run, find_runs, open_run

log = logging.getLogger("prope")

_LONG = 8192  # tokens; windows from this length on are reported in buckets of 1024 positions
# Fields that a cached record needs to be reused.
_FIELDS = {"loss", "loss_stderr", "by_position", "tokens", "perplexity", "bits_per_byte", "unigram_bits_per_byte"}


def make_evaluation(config: ConfigDict, windows: Windows, mesh: Mesh) -> Callable[..., dict | None]:
    """Makes a function that evaluates parameters on `windows`: all, or config.eval.max_windows evenly spread ones.

    Its arguments are the parameters; a folder for the sums by document, W/eval/STEP, or None; and a callback before
    every batch, in all processes alike, which stops the evaluation (result None) by returning False. It returns:

    fingerprint, seq_len    of the data; tokens in a window
    windows, tokens         numbers of windows read and of tokens predicted
    loss, perplexity        nats per token; its exponential
    loss_stderr             standard error of the loss over documents (`paired.mean_and_stderr`), None for a single one;
                            parts of a document in windows that are not neighbours count as documents
    bits_per_byte           the loss in total bits over the bytes of the text
    unigram_bits_per_byte   the same for predicting every token by its frequency in the training split
    by_position             [{"from", "to", "loss", "tokens"}] for positions from .. to - 1 in the window, where there
                            are tokens; an eighth of the training length each, 1024 in windows of 8192 tokens or more
    accuracy                synthetic data only: the share of answers that get the highest logit
    accuracy_by_distance    synthetic data only: [{"task", "from", "to", "accuracy", "answers"}] for answers that stand
                            from .. to - 1 tokens before their question
    """
    count = _count(config, windows)
    chosen = [i * windows.count // count for i in range(count)]
    shards = mesh.devices.size // mesh.shape["tensor"]
    batch_size = -(-min(config.eval.batch_size, count) // shards) * shards
    local_rows = sharding.rows_of_this_process(mesh, batch_size)
    synthetic = isinstance(windows, Synthetic)
    bucket_width = 1024 if windows.seq_len >= _LONG else max(config.data.seq_len // 8, 1)

    def read(start: int) -> dict[str, np.ndarray]:
        indices = [chosen[start + row] for row in local_rows if start + row < count]
        fill = padding(len(local_rows) - len(indices), windows.seq_len)
        return {name: np.concatenate([rows, fill[name]]) for name, rows in windows.read(indices).items()}

    def score(params, batch):
        hidden = batch_hidden(config, params, batch)
        scores = {name: batch[name] for name in ("weights", "segment_ids")}
        scores["starts_document"] = batch["tokens"][:, 0] == BOS
        scores["losses"] = token_losses(hidden, model.embedding(params), batch["targets"])
        if synthetic:  # one sequence at a time, so that the logits of a batch never exist whole
            predictions = jax.lax.map(lambda row: model.logits(params, row).argmax(axis=-1), hidden)
            scores["correct"] = predictions == batch["targets"]
        return scores

    step = jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def evaluate(
        params: model.Params, sums_folder: pathlib.Path | None = None, go_on: Callable[[], bool] = lambda: True
    ) -> dict | None:
        sums, correct = _DocumentSums(windows.seq_len, bucket_width), []
        for start in range(0, count, batch_size):
            if not go_on():
                return None
            with sharding.use(mesh), model.matmul_precision(config.model.dtype):
                scores = step(params, sharding.global_batch(mesh, read(start), batch_size))
            scores = {name: np.asarray(values) for name, values in scores.items()}
            indices = chosen[start : start + batch_size]
            correct.extend(scores.pop("correct", ())[: len(indices)])
            for row, index in enumerate(indices):
                sums.add(index, **{name: values[row] for name, values in scores.items()})
        losses, tokens = sums.by_document()
        loss, stderr = paired.mean_and_stderr(losses.sum(axis=1), tokens.sum(axis=1))
        buckets = zip(sums.edges[:-1], sums.edges[1:], losses.sum(axis=0), tokens.sum(axis=0), strict=True)
        store = windows.store
        bits_per_byte = store.targets("validation") / store.index["validation"]["bytes"] / math.log(2)
        record = {
            "fingerprint": store.fingerprint,
            "seq_len": windows.seq_len,
            "windows": count,
            "tokens": int(tokens.sum()),
            "loss": loss,
            "loss_stderr": stderr,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss * bits_per_byte,
            "unigram_bits_per_byte": store.index["unigram_loss"] * bits_per_byte,
            "by_position": [
                {"from": int(start), "to": int(stop), "loss": float(total / number), "tokens": int(number)}
                for start, stop, total, number in buckets
                if number
            ],
        }
        if synthetic:
            record |= windows.accuracy(chosen, np.array(correct))
        if sums_folder is not None and processes.is_first():
            paired.write_sums(sums_folder, record, losses, tokens, sums.edges)
        return record

    return evaluate


class _DocumentSums:
    """Sums losses by document and by bucket of positions."""

    def __init__(self, T: int, bucket_width: int):
        self.edges = np.append(np.arange(0, T, bucket_width), T)  # [Q + 1]; edges[q] is the first position of bucket q
        self._bucket = np.arange(T) // bucket_width
        self._sums: list[np.ndarray] = []  # [2, documents, Q] of a window: losses and tokens
        self._last = -2  # index of the previous window

    def add(self, index: int, losses, weights, segment_ids, starts_document) -> None:
        """Adds the window with this index, arrays [T]; a document may go on from the window before."""
        documents, Q = max(int(segment_ids.max()), 1), len(self.edges) - 1
        cell = np.maximum(segment_ids - 1, 0) * Q + self._bucket  # padding has weight 0, so its cell does not matter
        summands = (losses.astype(np.float64) * weights, weights)
        sums = np.stack([np.bincount(cell, values, documents * Q).reshape(documents, Q) for values in summands])
        if index == self._last + 1 and not starts_document:
            self._sums[-1][:, -1] += sums[:, 0]
            sums = sums[:, 1:]
        if sums.shape[1]:
            self._sums.append(sums)
        self._last = index

    def by_document(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (losses, tokens), both [C, Q]."""
        losses, tokens = np.concatenate(self._sums, axis=1)
        return losses, tokens


def _count(config: ConfigDict, windows: Windows) -> int:
    return min(config.eval.max_windows or windows.count, windows.count)


@dataclasses.dataclass(frozen=True)
class Options:
    """Which evaluations to make; the fields are the flags of prope.evaluate, which explains them."""

    workdir: str
    step: str | None = None
    batch_size: int | None = None
    max_windows: int | None = None
    seq_len: str | None = None
    dataset: str | None = None
    data_dir: str | None = None
    again: bool = False

    def __post_init__(self):
        if self.step not in (None, "all") and not self.step.isdecimal():
            raise UsageError(f"--step={self.step}: must be the number of a checkpoint, or all")


def _parse_lengths(text: str | None, trained: int) -> list[int]:
    """Parses --seq_len: "512,2x,8x" are 512 tokens and two and eight times the length of training."""
    lengths = []
    for entry in ("1x" if text is None else text).split(","):
        match = re.fullmatch(r"\s*([0-9]+)(x?)\s*", entry)
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"--seq_len={text}: {entry!r} is neither a number of tokens nor a multiple of the training's length; "
                "give a list such as 512 or 1x,2x,8x"
            )
        lengths.append(int(match[1]) * (trained if match[2] else 1))
    return list(dict.fromkeys(lengths))


def _open_lengths(config: ConfigDict, options: Options, opened: dict) -> list[tuple[ConfigDict, Windows]]:
    """Opens the windows of each length, once for all runs that differ only in their seed."""
    config = config.copy_and_resolve_references()
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    config.eval.max_windows = options.max_windows
    override_dataset(config.data, options.dataset, options.data_dir)
    validate(config)
    keys, trained = [], config.data.seq_len
    for T in _parse_lengths(options.seq_len, trained):
        own = config.copy_and_resolve_references()
        # Longer windows, fewer at a time: as many tokens as at the training's length, so that memory suffices.
        own.eval.batch_size = options.batch_size or max(config.eval.batch_size * trained // max(T, trained), 1)
        data = own.data.copy_and_resolve_references()
        data.seq_len = T
        key = json.dumps([own.model.to_dict(), own.data.to_dict(), own.eval.to_dict(), T])
        if key not in opened:
            opened[key] = own, open_windows(data, own.model.vocab_size, "validation")
        keys.append(key)
    return [opened[key] for key in keys]


def evaluations(options: Options) -> Iterator[dict]:
    """Yields the record of every evaluation: run by run, checkpoint by checkpoint, length by length.

    Raises UsageError, before the first evaluation, where a run, a checkpoint or data is missing, or does not fit.
    """
    plan, opened, functions, runs = [], {}, {}, find_runs(options.workdir)
    for workdir in runs:
        if len(runs) > 1 and not list_steps(workdir):
            log.info("%s: left out, for it has no finished checkpoint yet", workdir)
            continue
        for step in list_steps(workdir) if options.step == "all" else [options.step]:
            run = open_run(workdir, None if step is None else int(step))
            plan.append((run, _open_lengths(run.config, options, opened)))
    if not plan:
        raise UsageError(f"--workdir={options.workdir}: no run there has a finished checkpoint; train one first")
    for run, lengths in plan:
        workdir, step, params = run.workdir, run.step, None
        for config, windows in lengths:
            count, pairs = _count(config, windows), model.rotated_pairs(config.model)
            record = {"step": step, "dataset": config.data.dataset, "seq_len": windows.seq_len}
            same = record | {"fingerprint": windows.store.fingerprint, "windows": count}
            record |= {"rope_percentage": config.model.rope_percentage, "rotated_pairs": pairs}
            identity = {"init_hash": run.init_hash, "workdir": str(workdir)}
            reusable = [r for r in read_jsonl(workdir / "eval.jsonl") if r.keys() >= _FIELDS and not options.again]
            if cached := find_evaluation(reusable, **same):
                log.info("step %d of %s on %d tokens a window: is in eval.jsonl", step, workdir, windows.seq_len)
                yield record | cached | identity
                continue
            log.info(
                "evaluating step %d of %s on %d of %d windows of %d tokens of %s; p-RoPE rotates %s of %d pairs", step,
                workdir, count, windows.count, windows.seq_len, config.data.dataset, pairs, config.model.head_dim // 2,
            )  # fmt: skip
            if params is None:  # without --step, of the newest undamaged checkpoint
                run, params = run.first_undamaged(Run.params)
                record["step"] = step = run.step
            if windows not in functions:
                functions[windows] = make_evaluation(config, windows, sharding.make_mesh())
            result = functions[windows](params, workdir / "eval" / str(step))
            record |= {"max_windows": config.eval.max_windows, **result, **identity}
            if processes.is_first():
                append_jsonl(workdir / "eval.jsonl", record)
            yield record
