"""How sure a loss is, and how much two runs differ: sums by document, kept beside a run's evaluations.

Tokens of one document are alike, so the document, not the token, is what a loss is a sample of. Two runs that were
evaluated on the same windows find the same documents hard; their difference, taken document by document, is far
surer than either loss. W/eval/STEP/FINGERPRINT-SEQ_LEN-WINDOWS.npz therefore holds, for an evaluation of W:

loss    float32 [C, Q]: sums of the loss in nats, by document and by bucket of positions in the window
tokens  int32 [C, Q]: how many tokens these are
edges   int64 [Q + 1]: bucket q holds positions edges[q] .. edges[q + 1] - 1

Axes: C documents, in the order of the windows, Q buckets of positions.
"""

import io
import os
import pathlib
from typing import NamedTuple

import numpy as np

from prope.errors import UsageError
from prope.runtime.files import write_atomic
from prope.workdir.records import read_jsonl

SAME_DATA = ("fingerprint", "seq_len", "windows")  # of a record: two that agree in these saw the same tokens


class Difference(NamedTuple):
    """Loss of the first run minus loss of the second, nats per token, and its standard error (None: one document)."""

    difference: float
    stderr: float | None


def mean_and_stderr(loss: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    """The loss per token and its standard error, from sums by document.

    The mean is a ratio of two sums that both vary from document to document. Its standard error is the jackknife's
    (Efron and Tibshirani, An Introduction to the Bootstrap, eq. 11.5): with mean_c the mean without document c, of
    C, sqrt((C - 1) / C * sum_c (mean_c - average of all mean_c)^2). Where few documents hold most of the tokens the
    usual linear formula is too small; this one much less so.

    Args:
      loss: [C] nats; sums over the tokens of a document.
      tokens: [C]; how many they are. Documents without any do not count.

    Returns:
      (mean, standard error), nats per token; the error is None where there are fewer than two documents.
    """
    counted = tokens > 0
    loss, tokens = np.asarray(loss, np.float64)[counted], np.asarray(tokens, np.float64)[counted]
    mean = float(loss.sum() / tokens.sum())
    count = len(tokens)
    if count < 2:
        return mean, None
    without = (loss.sum() - loss) / (tokens.sum() - tokens)
    return mean, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))


def paired_difference(
    workdir_a: str | os.PathLike,
    workdir_b: str | os.PathLike,
    about: dict | None = None,
    positions: tuple[int, int] | None = None,
) -> Difference:
    """How much the losses of two runs differ on the same windows.

    Args:
      workdir_a: a run that prope.evaluate, or training, has evaluated.
      workdir_b: another, on the same data at the same length.
      about: values that both records in eval.jsonl must have, such as {"step": 700, "seq_len": 512}. Of those of the
        first run the newest counts, of the second the newest on the same windows.
      positions: only tokens at positions from .. to - 1 of their windows; both must be edges of buckets.

    Raises:
      UsageError: an evaluation is missing, or its sums are; says which command makes them.
    """
    about = about or {}
    record = _newest(workdir_a, about)
    (loss, tokens, edges), (other, counted, _) = (
        _read(workdir, _newest(workdir, about | {name: record[name] for name in SAME_DATA}))
        for workdir in (workdir_a, workdir_b)
    )
    if loss.shape != other.shape or (tokens != counted).any():
        raise UsageError(
            f"{workdir_a} and {workdir_b}: their evaluations count other tokens; both runs must have the same "
            "config.data and training length"
        )
    columns = slice(None)
    if positions is not None:
        if not set(positions) <= set(edges.tolist()):
            raise UsageError(f"positions={positions}: must be two of {', '.join(map(str, edges))}")
        columns = slice(*np.searchsorted(edges, positions))
    apart = loss[:, columns].astype(np.float64) - other[:, columns]
    return Difference(*mean_and_stderr(apart.sum(axis=1), tokens[:, columns].sum(axis=1)))


def write_sums(folder: pathlib.Path, record: dict, loss: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> None:
    """Writes the sums of an evaluation into the folder of its step, W/eval/STEP, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, record)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, loss=loss.astype(np.float32), tokens=tokens.astype(np.int32), edges=edges)
    write_atomic(path, arrays.getvalue())


def _path(folder: pathlib.Path, record: dict) -> pathlib.Path:
    return folder / ("-".join(str(record[name]) for name in SAME_DATA) + ".npz")


def _newest(workdir: str | os.PathLike, wanted: dict) -> dict:
    records = read_jsonl(pathlib.Path(workdir) / "eval.jsonl")
    found = [r for r in records if wanted.items() <= r.items() and all(name in r for name in SAME_DATA)]
    if not found:
        raise UsageError(
            f"{workdir}: has no evaluation with {wanted}; run python -m prope.evaluate --workdir={workdir} with the "
            "flags of the other run's"
        )
    return found[-1]


def _read(workdir: str | os.PathLike, record: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path = _path(pathlib.Path(workdir) / "eval" / str(record["step"]), record)
    try:
        with np.load(path) as saved:
            return saved["loss"], saved["tokens"], saved["edges"]
    except (OSError, ValueError, KeyError):
        raise UsageError(
            f"{path}: cannot be read; run python -m prope.evaluate --workdir={workdir} --again with the flags of "
            f"that evaluation (step {record['step']}, seq_len {record['seq_len']})"
        ) from None
