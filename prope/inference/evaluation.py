"""Loss and perplexity of saved checkpoints over the validation documents: python -m prope.evaluate --workdir=W.

W is a run, or a directory with runs below it. A run knows its config. Every token of every validation document is
predicted once and the losses are added up in float64, so the batch size does not change the result. What W/eval.jsonl
already says is not computed again.

Axes: B batch, T seq_len of the windows.
"""

import dataclasses
import functools
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
from prope.workdir import checkpoints as checkpoint
from prope.workdir.records import read_jsonl

log = logging.getLogger("prope")

_LONG = 8192  # windows of this many tokens and more are told apart by thousands of positions

# What a record must say to stand for an evaluation that is asked for.
_FIELDS = ("loss", "loss_stderr", "by_position", "tokens", "perplexity", "bits_per_byte", "unigram_bits_per_byte")


def make_evaluation(config: ConfigDict, windows: Windows, mesh: Mesh) -> Callable[..., dict | None]:
    """A function of the parameters that evaluates `windows`: all, or config.eval.max_windows evenly spread ones.

    Its arguments are the parameters and, if wanted, a folder W/eval/STEP to keep the sums by document in, and what is
    called before every batch, as often in every process: where that returns False it gives up, with None. It returns

    fingerprint, windows        of the data; how many windows were read
    tokens                      how many were predicted
    loss, perplexity            nats per token; its exponential
    loss_stderr                 standard error of the loss over documents, `paired.mean_and_stderr`; null for a single
                                one. A document's pieces in windows that are not neighbours count as documents
    bits_per_byte               the loss in total bits over the bytes of the text
    unigram_bits_per_byte       what predicting every token by its frequency in the training split would give
    by_position                 [{"from", "to", "loss", "tokens"}]: by position in the window, from .. to - 1, in steps
                                of an eighth of config.data.seq_len, the length of training; of 1024 in windows of
                                8192 tokens or more. Buckets without a token are left out
    accuracy                    of synthetic data: the share of the answers that have the highest score
    accuracy_by_distance        of synthetic data: [{"task", "from", "to", "accuracy", "answers"}], by how many tokens
                                before the question the answer stands, from .. to - 1
    """
    count = _count(config, windows)
    chosen = [place * windows.count // count for place in range(count)]
    parts = mesh.devices.size // mesh.shape["tensor"]
    size = -(-min(config.eval.batch_size, count) // parts) * parts
    mine = sharding.rows_of_this_process(mesh, size)
    generated = isinstance(windows, Synthetic)
    width = 1024 if windows.seq_len >= _LONG else max(config.data.seq_len // 8, 1)

    def read(start: int) -> dict[str, np.ndarray]:
        rows = [chosen[start + row] for row in mine if start + row < count]
        padding = windows.empty(len(mine) - len(rows))
        return {name: np.concatenate([part, padding[name]]) for name, part in windows.read(rows).items()}

    def score(params, batch):
        hidden = batch_hidden(config, params, batch)
        scores = {name: batch[name] for name in ("weights", "segment_ids")} | {"opens": batch["tokens"][:, 0] == BOS}
        scores["losses"] = token_losses(hidden, model.embedding(params), batch["targets"])
        if generated:  # a sequence at a time: nothing holds the logits of all
            best = jax.lax.map(lambda row: model.logits(params, row).argmax(axis=-1), hidden)
            scores["right"] = best == batch["targets"]
        return scores

    step = jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def evaluation(
        params: model.Params, keep: pathlib.Path | None = None, go_on: Callable[[], bool] = lambda: True
    ) -> dict | None:
        sums, right = _Sums(windows.seq_len, width), []
        for start in range(0, count, size):
            if not go_on():
                return None
            with sharding.use(mesh):
                scores = step(params, sharding.global_batch(mesh, read(start), size))
            scores = {name: np.asarray(values) for name, values in scores.items()}
            here = chosen[start : start + size]
            right.extend(scores.pop("right", ())[: len(here)])
            for row, window in enumerate(here):
                sums.add(window, **{name: values[row] for name, values in scores.items()})
        losses, tokens = sums.by_document()
        loss, stderr = paired.mean_and_stderr(losses.sum(axis=1), tokens.sum(axis=1))
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
            "by_position": _by_position(losses.sum(axis=0), tokens.sum(axis=0), sums.edges),
        }
        if generated:
            record |= windows.accuracy(chosen, np.array(right))
        if keep is not None and processes.is_first():
            paired.write_sums(keep, record, losses, tokens, sums.edges)
        return record

    return evaluation


class _Sums:
    """Adds up losses [T] of windows, by document and by bucket of positions.

    Attributes:
      edges: [Q + 1]; bucket q holds positions edges[q] .. edges[q + 1] - 1.
    """

    def __init__(self, T: int, width: int):
        self.edges = np.append(np.arange(0, T, width), T)
        self._bucket = np.arange(T) // width
        self._parts: list[np.ndarray] = []  # [2, documents, Q]: losses and tokens
        self._last = -2  # the window before

    def add(self, window: int, losses, weights, segment_ids, opens) -> None:
        """Adds a window; `opens` says that a document begins with it."""
        documents, Q = max(int(segment_ids.max()), 1), len(self.edges) - 1
        cell = np.maximum(segment_ids - 1, 0) * Q + self._bucket  # padding has no weight, so it may go anywhere
        both = (losses.astype(np.float64) * weights, weights)
        part = np.stack([np.bincount(cell, values, documents * Q).reshape(documents, Q) for values in both])
        if window == self._last + 1 and not opens:  # the document goes on
            self._parts[-1][:, -1] += part[:, 0]
            part = part[:, 1:]
        if part.shape[1]:
            self._parts.append(part)
        self._last = window

    def by_document(self) -> tuple[np.ndarray, np.ndarray]:
        """(losses, tokens), both [C, Q]."""
        losses, tokens = np.concatenate(self._parts, axis=1)
        return losses, tokens


def _by_position(losses: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> list[dict]:
    return [
        {"from": int(start), "to": int(stop), "loss": float(loss / count), "tokens": int(count)}
        for start, stop, loss, count in zip(edges[:-1], edges[1:], losses, tokens, strict=True)
        if count
    ]


def _count(config: ConfigDict, windows: Windows) -> int:
    return min(config.eval.max_windows or windows.count, windows.count)


def find_steps(run: pathlib.Path, step: str | None) -> list[int | None]:
    """The checkpoints of a run that --step names: a number, "all", or None for the newest, which stays None.

    Raises:
      UsageError: it is neither.
    """
    if step == "all":
        return checkpoint.steps_of(run)
    if step is not None and not step.isdecimal():
        raise UsageError(f"--step={step}: must be the number of a checkpoint, or all")
    return [None if step is None else int(step)]


def lengths(text: str | None, trained: int) -> list[int]:
    """The lengths that --seq_len names: "512,2x,8x" are 512 and two and eight times the length of training.

    Raises:
      UsageError: an entry is neither a number nor a multiple.
    """
    found = []
    for entry in ("1x" if text is None else text).split(","):
        match = re.fullmatch(r"\s*([0-9]+)(x?)\s*", entry)
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"--seq_len={text}: {entry!r} is neither a number of tokens nor a multiple of the training's length; "
                "give a list such as 512 or 1x,2x,8x"
            )
        found.append(int(match[1]) * (trained if match[2] else 1))
    return list(dict.fromkeys(found))


def _asked_for(config: ConfigDict, given) -> ConfigDict:
    """A run's config, as the flags would have it."""
    config = config.copy_and_resolve_references()
    config.model.attention = "auto"  # of this machine, which need not be the one that trained
    config.eval.max_windows = given.max_windows
    override_dataset(config.data, given.dataset, given.data_dir)
    validate(config)
    return config


@dataclasses.dataclass
class _Evaluator:
    """What runs that differ in their seed only have in common: windows, and what is compiled for them."""

    config: ConfigDict
    windows: Windows

    @functools.cached_property
    def function(self) -> Callable[..., dict]:
        return make_evaluation(self.config, self.windows, sharding.make_mesh())


def _evaluators(config: ConfigDict, given, made: dict[str, _Evaluator]) -> list[_Evaluator]:
    """One for each length that is asked for; those that are in `made` already are taken from there."""
    found, trained = [], config.data.seq_len
    for T in lengths(given.seq_len, trained):
        own = config.copy_and_resolve_references()
        # Longer windows, fewer at a time: as many tokens as at the training's length, so that memory suffices.
        own.eval.batch_size = given.batch_size or max(config.eval.batch_size * trained // max(T, trained), 1)
        data = own.data.copy_and_resolve_references()
        data.seq_len = T
        key = json.dumps([own.model.to_dict(), own.data.to_dict(), own.eval.to_dict(), T])
        if key not in made:
            made[key] = _Evaluator(own, open_windows(data, own.model.vocab_size, "validation"))
        found.append(made[key])
    return found


def evaluations(given) -> Iterator[dict]:
    """The records of all evaluations that the flags ask for: run by run, checkpoint by checkpoint, length by length.

    Raises:
      UsageError: a run, a checkpoint or data is missing, or does not fit; before the first evaluation.
    """
    plan, made, runs = [], {}, checkpoint.find_runs(given.workdir)
    for workdir in runs:
        if len(runs) > 1 and not checkpoint.steps_of(workdir):
            log.info("%s: left out, for it has no finished checkpoint yet", workdir)
            continue
        for step in find_steps(workdir, given.step):
            config, step, init_hash = checkpoint.find_run(workdir, step)
            plan.append((workdir, step, init_hash, _evaluators(_asked_for(config, given), given, made)))
    if not plan:
        raise UsageError(f"--workdir={given.workdir}: no run there has a finished checkpoint; train one first")
    for workdir, step, init_hash, evaluators in plan:
        params = None
        for evaluator in evaluators:
            config, windows = evaluator.config, evaluator.windows
            count, pairs = _count(config, windows), model.rotated_pairs(config.model)
            about = {"step": step, "dataset": config.data.dataset, "seq_len": windows.seq_len}
            run = {"rope_percentage": config.model.rope_percentage, "rotated_pairs": pairs}
            end = {"init_hash": init_hash, "workdir": str(workdir)}
            same = about | {"fingerprint": windows.store.fingerprint, "windows": count}
            found = None if given.again else _find(workdir, same)
            if found is not None:
                log.info("step %d of %s on %d tokens a window: is in eval.jsonl", step, workdir, windows.seq_len)
                yield {**about, **run, **found, **end}
                continue
            log.info(
                "evaluating step %d of %s on %d of %d windows of %d tokens of %s; p-RoPE turns %s of %d pairs", step,
                workdir, count, windows.count, windows.seq_len, config.data.dataset, pairs, config.model.head_dim // 2,
            )  # fmt: skip
            if params is None:  # without --step, of the newest checkpoint that is whole
                loaded = checkpoint.load_run(workdir, None if given.step is None else step)
                params, step = loaded.params, loaded.step
                about["step"] = step
            result = evaluator.function(params, workdir / "eval" / str(step))
            record = {**about, **run, "max_windows": config.eval.max_windows, **result, **end}
            if processes.is_first():
                append_jsonl(workdir / "eval.jsonl", record)
            yield record


def _find(workdir: pathlib.Path, about: dict) -> dict | None:
    """The newest record of a run with these values and all that an evaluation says."""
    records = read_jsonl(workdir / "eval.jsonl")
    found = [r for r in records if about.items() <= r.items() and all(name in r for name in _FIELDS)]
    return found[-1] if found else None
