"""The loss of parameters on windows, summed by document and by position.

Every predicted token counts once. Losses are added up in float64, so the batch size does not change the result.

Axes: B batch, T seq_len of the windows, C documents, Q buckets of positions.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from prope import model, sharding
from prope.data.batch import padding
from prope.data.store.arrays import fingerprint_of
from prope.data.tasks.windows import GeneratedWindows
from prope.data.tokenizer import BOS
from prope.data.windows import Windows
from prope.inference import paired
from prope.kernels.choice import matmul_precision
from prope.loss import token_losses
from prope.runtime import processes
from prope.runtime.memory import check_memory
from prope.step import batch_hidden

_LONG = 8192  # tokens; windows from this length on are reported in buckets of 1024 positions


class Selection(NamedTuple):
    """The windows that are evaluated."""

    indices: list[int]
    fingerprint: str  # of their text: equal for all windows of a split, and, with max_tokens, at every seq_len


def select(
    windows: Windows, max_windows: int | None, max_tokens: int | None = None, longest: int = 0
) -> Selection:
    """Selects all windows; or `max_windows`, evenly spread; or those that hold the same `max_tokens` at any seq_len.

    The last are cut from evenly spread stretches of `longest` tokens. Of a mixture, if not all, every source has the
    share of the windows that it has in training.
    """
    stretch, number, rule = 1, max_windows, {}  # stretch: in windows
    if max_tokens is not None:
        stretch, number = longest // windows.seq_len, max_tokens // longest
        rule = {"max_tokens": max_tokens, "longest": longest}
    rule |= {"split": windows.split} if windows.split != "validation" else {}
    indices, offset = [], 0
    for source, weight in zip(windows.sources, windows.weights, strict=True):
        stretches = -(-source.count // stretch)
        chosen = stretches if number is None else min(max(round(number * weight), 1), stretches)
        starts = [i * stretches // chosen * stretch for i in range(chosen)]
        indices += [
            offset + start + k
            for start in starts
            for k in range(stretch)
            if start + k < source.count
        ]
        offset += source.count
    fingerprint = windows.store.fingerprint
    return Selection(
        indices, fingerprint_of({"store": fingerprint, **rule}) if rule else fingerprint
    )


def make_evaluation(
    config: ConfigDict, windows: Windows, mesh: Mesh, selection: Selection | None = None
) -> Callable[..., dict | None]:
    """Makes a function that evaluates parameters on a selection of `windows`, by default config.eval.max_windows.

    Its arguments are the parameters; a folder for the sums by document or None; and a callback before
    every batch, in all processes alike, which stops the evaluation (result None) by returning False. It returns:

    fingerprint, seq_len    of the selected text; tokens in a window
    split                   train, validation or all
    windows, tokens         numbers of windows read and of tokens predicted
    documents               number of documents that these tokens are of
    loss, perplexity        nats per token; its exponential. Of a mixture, the mean over its sources, weighted by their
                            shares of the predicted tokens in training
    loss_stderr             standard error of the loss over documents (`paired.mean_and_stderr`), None for a single one;
                            parts of a document in windows that are not neighbours count as documents
    bits_per_byte           the loss in total bits over the bytes of the text
    unigram_bits_per_byte   the same for predicting every token by its frequency in the training split
    sources                 mixtures only: of every source `dataset, weight` (of its windows in training), `share` (of
                            the predicted tokens), `windows, documents, tokens, loss, loss_stderr`
    by_position             [{"from", "to", "loss", "tokens"}] for positions from .. to - 1 in the window, where there
                            are tokens; an eighth of the training length each, 1024 in windows of 8192 tokens or more
    accuracy                synthetic data only: the share of answers that get the highest logit
    accuracy_by_distance    synthetic data only: [{"task", "from", "to", "accuracy", "answers"}] for answers that stand
                            from .. to - 1 tokens before their question
    """
    chosen, fingerprint = selection or select(windows, config.eval.max_windows)
    count = len(chosen)
    source_of = np.repeat(
        np.arange(len(windows.sources)), [source.count for source in windows.sources]
    )[chosen]
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    batch_size = -(-min(config.eval.batch_size, count) // shards) * shards
    local_rows = sharding.rows_of_this_process(mesh, batch_size)
    synthetic = isinstance(windows, GeneratedWindows)
    bucket_width = 1024 if windows.seq_len >= _LONG else max(config.data.seq_len // 8, 1)

    def read(start: int) -> dict[str, np.ndarray]:
        indices = [chosen[start + row] for row in local_rows if start + row < count]
        fill = padding(len(local_rows) - len(indices), windows.seq_len)
        return {
            name: np.concatenate([rows, fill[name]]) for name, rows in windows.read(indices).items()
        }

    def score(params, batch):
        hidden = batch_hidden(config, params, batch)
        scores = {name: batch[name] for name in ("weights", "segment_ids")}
        scores["losses"] = token_losses(hidden, model.embedding(params), batch["targets"])
        if synthetic:  # one sequence at a time, so that the logits of a batch never exist whole
            predictions = jax.lax.map(lambda row: model.logits(params, row).argmax(axis=-1), hidden)
            scores["correct"] = predictions == batch["targets"]
        scores, targets = jax.tree.map(sharding.whole_sequences, (scores, batch["targets"]))
        return scores | {"ends_document": targets[:, -1] == BOS}

    step = jax.jit(score, out_shardings=NamedSharding(mesh, PartitionSpec()))
    compiled = None

    def evaluate(
        params: model.Params,
        sums_folder: epath.Path | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> dict | None:
        nonlocal compiled
        sums, correct = _DocumentSums(windows.seq_len, bucket_width), []
        for start in range(0, count, batch_size):
            if not go_on():
                return None
            with sharding.use(mesh), matmul_precision(config.model.dtype):
                batch = sharding.global_batch(mesh, read(start), batch_size)
                if compiled is None:
                    compiled = step.lower(params, batch).compile()
                    check_memory(
                        compiled, f"lower the batch size, now {batch_size}, or the windows' length"
                    )
                scores = compiled(params, batch)
            scores = {name: np.asarray(values) for name, values in scores.items()}
            indices = chosen[start : start + batch_size]
            correct.extend(scores.pop("correct", ())[: len(indices)])
            for row, index in enumerate(indices):
                source = source_of[start + row]
                sums.add(index, source, **{name: values[row] for name, values in scores.items()})
        (losses, tokens), source = (
            np.concatenate(sums.of_windows, axis=1),
            np.array(sums.sources),
        )  # [C, Q]; [C]
        totals, counts = losses.sum(axis=1), tokens.sum(axis=1)
        summary = _summarize(totals, counts, source, windows.shares)
        split, stores = windows.split, [source.store for source in windows.sources]
        bytes_per_token = np.dot(
            windows.shares, [s.count("bytes", split) / s.targets(split) for s in stores]
        )
        unigram = float(np.dot(windows.shares, [store.unigram_loss(split) for store in stores]))
        bits_per_byte = 1 / float(bytes_per_token) / math.log(2)
        record = {
            "fingerprint": fingerprint,
            "seq_len": windows.seq_len,
            "split": split,
            "windows": count,
            **summary,
            "perplexity": math.exp(min(summary["loss"], 700.0)),
            "bits_per_byte": summary["loss"] * bits_per_byte,
            "unigram_bits_per_byte": unigram * bits_per_byte,
            "by_position": [
                {
                    "from": int(start),
                    "to": int(stop),
                    "tokens": int(tokens[:, q].sum()),
                    "loss": paired.mean_and_stderr(
                        losses[:, q], tokens[:, q], source, windows.shares
                    )[0],
                }
                for q, (start, stop) in enumerate(itertools.pairwise(sums.edges))
                if tokens[:, q].any()
            ],
        }
        if len(windows.sources) > 1:
            parts = zip(windows.sources, windows.weights, windows.shares, strict=True)
            record["sources"] = [
                {
                    "dataset": part.name,
                    "weight": weight,
                    "share": float(share),
                    "windows": int((source_of == s).sum()),
                }
                | _summarize(totals[source == s], counts[source == s])
                for s, (part, weight, share) in enumerate(parts)
            ]
        if synthetic:
            record |= windows.accuracy(chosen, np.array(correct))
        if sums_folder is not None and processes.is_first():
            of_documents = {"edges": sums.edges, "source": source, "shares": windows.shares}
            paired.write_sums(sums_folder, record, losses, tokens, **of_documents)
        return record

    return evaluate


def _summarize(loss: np.ndarray, tokens: np.ndarray, *sources) -> dict:
    """Computes the loss of a source, or of a mixture, from sums by document; None where no token is predicted."""
    mean, stderr = paired.mean_and_stderr(loss, tokens, *sources) if tokens.any() else (None, None)
    return {
        "documents": int((tokens > 0).sum()),
        "tokens": int(tokens.sum()),
        "loss": mean,
        "loss_stderr": stderr,
    }


class _DocumentSums:
    """Sums losses by document and by bucket of positions."""

    def __init__(self, T: int, bucket_width: int):
        self.edges = np.append(
            np.arange(0, T, bucket_width), T
        )  # [Q + 1]; edges[q] is the first position of bucket q
        self._bucket = np.arange(T) // bucket_width
        self.of_windows: list[np.ndarray] = []  # [2, documents, Q] of a window: losses and tokens
        self.sources: list[int] = []  # of every document
        self._last, self._ended = (
            -2,
            True,
        )  # index of the previous window, and whether its document ended with it

    def add(self, index: int, source: int, losses, weights, segment_ids, ends_document) -> None:
        """Adds the window with this index, arrays [T]; a document may go on from the window before."""
        documents, Q = max(int(segment_ids.max()), 1), len(self.edges) - 1
        cell = (
            np.maximum(segment_ids - 1, 0) * Q + self._bucket
        )  # padding has weight 0, so its cell does not matter
        summands = (losses.astype(np.float64) * weights, weights)
        sums = np.stack(
            [np.bincount(cell, values, documents * Q).reshape(documents, Q) for values in summands]
        )
        if index == self._last + 1 and not self._ended:
            self.of_windows[-1][:, -1] += sums[:, 0]
            sums = sums[:, 1:]
        if sums.shape[1]:
            self.of_windows.append(sums)
            self.sources += [source] * sums.shape[1]
        self._last, self._ended = index, ends_document
