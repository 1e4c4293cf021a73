"""Standard errors of losses, and paired differences of two runs, from sums by document.

Tokens of a document are correlated, so documents, not tokens, are the independent samples. Two runs evaluated on the
same windows find the same documents hard, so their difference by document is much more precise than either loss.
FINGERPRINT-SEQ_LEN-WINDOWS.npz in `sums_folder` therefore holds, for an evaluation of W:

loss    float32 [C, Q]: sums of the loss in nats, by document and by bucket of positions in the window
tokens  int32 [C, Q]: numbers of tokens
edges   int64 [Q + 1]: bucket q holds positions edges[q] .. edges[q + 1] - 1
source  int64 [C], shares float64 [S]: of a mixture, the source of every document, and the share of every source

Axes: C documents, in the order of the windows, Q buckets of positions, S sources.
"""

import io
import statistics
import zipfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from prope.errors import UsageError
from prope.runtime.files import write_atomic
from prope.workdir.records import SAME_WINDOWS, find_evaluation, find_pair, read_jsonl


class Difference(NamedTuple):
    """Loss of the first run minus loss of the second, nats per token: a mean over documents, or over seeds."""

    difference: float
    stderr: float | None  # None: one sample
    samples: int  # documents or seeds

    def interval(self) -> tuple[float, float] | None:
        """Computes Student's t interval of the difference, of 95 %; None for one sample."""
        from scipy import stats

        if self.stderr is None:
            return None
        reach = float(stats.t.ppf(0.975, self.samples - 1)) * self.stderr
        return self.difference - reach, self.difference + reach

    @property
    def distinguishable(self) -> bool:
        """Whether the 95 % interval leaves 0 out."""
        interval = self.interval()
        return interval is not None and interval[0] * interval[1] > 0


def average_seeds(losses: Sequence[float]) -> Difference:
    """Averages independent samples, one per seed, such as paired differences."""
    stderr = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None
    return Difference(statistics.fmean(losses), stderr, len(losses))


def mean_and_stderr(
    loss: np.ndarray,
    tokens: np.ndarray,
    source: np.ndarray | None = None,
    shares: Sequence[float] = (1.0,),
) -> tuple[float, float | None]:
    """Computes the loss per token and its standard error from sums by document.

    Of a mixture it is the mean over sources, weighted by their shares; sources without tokens do not count.

    The mean of a source is a ratio of two sums that both vary by document. Its standard error is the jackknife's (Efron
    and Tibshirani, An Introduction to the Bootstrap, eq. 11.5): with mean_c the mean without document c,
    sqrt((C - 1) / C * sum_c (mean_c - average of all mean_c)^2). Where few documents hold most of the tokens, the
    usual linear formula is much too small.

    Args:
      loss: [C] nats, summed over the tokens of a document.
      tokens: [C] numbers of tokens. Documents without tokens do not count; with fewer than two, the error is None.
      source: [C] indices into `shares`, by default one source.
      shares: [S] of the predicted tokens.
    """
    source = np.zeros(len(tokens), int) if source is None else source
    present = [s for s in range(len(shares)) if tokens[source == s].any()]
    means, errors = zip(
        *(_mean_of_source(loss[source == s], tokens[source == s]) for s in present), strict=True
    )
    share = np.take(shares, present) / np.take(shares, present).sum()
    return float(np.dot(share, means)), None if None in errors else float(
        np.linalg.norm(share * errors)
    )


def _mean_of_source(loss: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    nonempty = tokens > 0
    loss, tokens = np.asarray(loss, np.float64)[nonempty], np.asarray(tokens, np.float64)[nonempty]
    mean, C = float(loss.sum() / tokens.sum()), len(tokens)
    if C < 2:
        return mean, None
    left_out = (loss.sum() - loss) / (tokens.sum() - tokens)
    return mean, float(np.sqrt((C - 1) / C * ((left_out - left_out.mean()) ** 2).sum()))


def paired_difference(
    workdir_a: epath.PathLike,
    workdir_b: epath.PathLike,
    about: dict | None = None,
    positions: tuple[int, int] | None = None,
    file: str = "eval.jsonl",
    but: dict | None = None,
) -> Difference:
    """Computes the difference of two runs' losses on the same windows, with its standard error over documents.

    The fullest evaluations that both runs have are compared, and of equally full ones the newest. Raises UsageError,
    which names the command that makes them, where an evaluation or its sums are missing.

    Args:
      about: values that both records in `file` must have, such as {"step": 700, "seq_len": 512}.
      positions: (from, to): only tokens at positions from .. to - 1 of their windows; both must be edges of buckets.
      but: values of the second run's record that differ, such as {"encoding": "stop:16-19"}; both may be one run.
    """
    workdirs, fields = (workdir_a, workdir_b), {"split": "validation"} | (about or {})
    records, others = (read_jsonl(epath.Path(workdir) / file) for workdir in workdirs)
    if (pair := find_pair(records, others, but, **fields)) is None:
        workdir = workdir_a
        if unmatched := find_evaluation(records, **fields):
            workdir, fields = (
                workdir_b,
                fields | {name: unmatched.get(name) for name in SAME_WINDOWS} | (but or {}),
            )
        remedy = (
            f"run python -m prope.evaluate --workdir={workdir} with the flags of the other run's"
        )
        raise UsageError(f"{workdir}: has no evaluation with {fields}; {remedy}")
    (loss, tokens, edges, *sources), (loss_b, tokens_b, *_) = map(_read_sums, workdirs, pair)
    if loss.shape != loss_b.shape or (tokens != tokens_b).any():
        remedy = "both runs must have the same config.data and training length"
        raise UsageError(
            f"{workdir_a} and {workdir_b}: their evaluations count other tokens; {remedy}"
        )
    if not set(positions or ()) <= set(edges.tolist()):
        raise UsageError(f"positions={positions}: must be two of {', '.join(map(str, edges))}")
    columns = slice(*np.searchsorted(edges, positions)) if positions else slice(None)
    differences = loss[:, columns].astype(np.float64) - loss_b[:, columns]
    counts = tokens[:, columns].sum(axis=1)
    return Difference(
        *mean_and_stderr(differences.sum(axis=1), counts, *sources), int((counts > 0).sum())
    )


def sums_folder(workdir: epath.PathLike, record: dict) -> epath.Path:
    """Returns the folder of an evaluation's sums: W/eval/STEP, or a folder in it of an encoding that was rescaled."""
    folder = epath.Path(workdir) / "eval" / str(record["step"])
    encoding = record.get("encoding")
    return folder / f"{encoding.replace(':', '-')}-{record['factor']}" if encoding else folder


def write_sums(
    folder: epath.Path, record: dict, loss: np.ndarray, tokens: np.ndarray, **others
) -> None:
    """Writes the sums of an evaluation, and `edges, source, shares`, into its `sums_folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = io.BytesIO()
    np.savez_compressed(
        arrays, loss=loss.astype(np.float32), tokens=tokens.astype(np.int32), **others
    )
    write_atomic(_path(folder, record), arrays.getvalue())


def _path(folder: epath.Path, record: dict) -> epath.Path:
    return folder / ("-".join(str(record.get(name)) for name in SAME_WINDOWS) + ".npz")


def _read_sums(workdir: epath.PathLike, record: dict) -> tuple[np.ndarray, ...]:
    """Reads (loss, tokens, edges, source, shares)."""
    path = _path(sums_folder(workdir, record), record)
    try:
        with np.load(io.BytesIO(path.read_bytes())) as saved:
            return tuple(saved[name] for name in ("loss", "tokens", "edges", "source", "shares"))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        command = f"python -m prope.evaluate --workdir={workdir} --again with the flags of that evaluation"
        made = f"(step {record['step']}, seq_len {record['seq_len']})"
        raise UsageError(f"{path}: cannot be read; run {command} {made}") from None
