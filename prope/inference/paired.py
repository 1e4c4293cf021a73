"""Paired differences of two runs: reads and writes the sums of losses by document.

Tokens of a document are correlated, so documents, not tokens, are the independent samples. Two runs
evaluated on the same windows find the same documents hard, so their difference by document is much
more precise than either loss. FINGERPRINT-SEQ_LEN-WINDOWS.npz in `sums_folder` therefore holds, for
an evaluation of W:

loss    float32 [C, Q]: sums of the loss in nats, by document and by bucket of positions
tokens  int32 [C, Q]: numbers of tokens
edges   int64 [Q + 1]: bucket q holds positions edges[q] .. edges[q + 1] - 1
source  int64 [C]: of a mixture, the source of every document
shares  float64 [S]: of a mixture, the share of every source

Axes: C documents, in the order of the windows, Q buckets of positions, S sources.
"""

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from prope.errors import UsageError, usage_error
from prope.inference.statistics import Difference, mean_and_stderr
from prope.runtime.files import write_atomic
from prope.workdir.records import SAME_WINDOWS, find_pair, read_jsonl


class Sums(NamedTuple):
    """The sums of an evaluation by document and by bucket of positions, as they are saved."""

    loss: np.ndarray
    tokens: np.ndarray
    edges: np.ndarray
    source: np.ndarray
    shares: Sequence[float]

    def mean_and_stderr(self, rows=slice(None), columns=slice(None)) -> tuple[float, float | None]:
        """Computes the loss per token of some documents in some buckets, and its standard error."""
        loss = self.loss[rows, columns].sum(axis=1)
        tokens = self.tokens[rows, columns].sum(axis=1)
        return mean_and_stderr(loss, tokens, self.source[rows], self.shares)


def paired_difference(*runs, **options) -> Difference:
    """Computes the difference of two runs' losses on the same windows, and its standard error.

    The arguments are those of `read_difference`.
    """
    sums = read_difference(*runs, **options)
    documents = (sums.tokens.sum(axis=1) > 0).sum()
    mean, stderr = sums.mean_and_stderr()
    return Difference(mean, stderr, int(documents))


def read_difference(
    workdir_a: epath.PathLike,
    workdir_b: epath.PathLike,
    about: dict | None = None,
    positions: tuple[int, int] | None = None,
    file: str = "eval.jsonl",
    second_fields: dict | None = None,
) -> Sums:
    """Reads the sums of the first run's losses minus those of the second on the same windows.

    The fullest evaluations that both runs have are compared, and of equally full ones the newest.
    Raises UsageError, which names the command that makes them, where an evaluation or its sums are
    missing; and where no token is predicted at these positions.

    Args:
      workdir_a: the first run.
      workdir_b: the second run.
      about: values that both records in `file` must have, such as {"step": 700, "seq_len": 512}.
      positions: (from, to): only tokens at positions from .. to - 1 of their windows; both must be
        edges of buckets.
      file: the name of the records.
      second_fields: values of the second run's record that differ, such as
        {"encoding": "stop:16-19"}; both may be one run.
    """
    fields = {"split": "validation"} | (about or {})
    records, others = (read_jsonl(epath.Path(run) / file) for run in (workdir_a, workdir_b))
    pair = find_pair(records, others, second_fields, **fields)
    if pair is None:
        raise UsageError(
            f"{workdir_a} and {workdir_b}: no evaluations of the same windows with {fields}; "
            "run python -m prope.evaluate with the same flags for both"
        )
    a = _read_sums(workdir_a, pair[0])
    b = _read_sums(workdir_b, pair[1])
    if a.loss.shape != b.loss.shape or (a.tokens != b.tokens).any():
        raise UsageError(
            f"{workdir_a} and {workdir_b}: their evaluations count other tokens; "
            "both runs must have the same config.data and training length"
        )
    columns = slice(None)
    if positions:
        if not set(positions) <= set(a.edges.tolist()):
            edges = ", ".join(map(str, a.edges))
            raise usage_error("positions", positions, f"must be two of {edges}")
        columns = slice(*np.searchsorted(a.edges, positions))
    loss = a.loss.astype(np.float64) - b.loss
    tokens = a.tokens[:, columns]
    if not tokens.any():
        raise usage_error("positions", positions, "no token is predicted there", "name others")
    return a._replace(loss=loss[:, columns], tokens=tokens)


def sums_folder(workdir: epath.PathLike, record: dict) -> epath.Path:
    """Returns the folder of an evaluation's sums: W/eval/STEP, or one in it of what is changed."""
    folder = epath.Path(workdir) / "eval" / str(record["step"])
    encoding = record.get("encoding")
    if encoding:
        bands = encoding.replace(":", "-").replace("+", "/")  # a file's name may be too short
        folder /= f"{bands}-{record['factor']}"
    if record.get("window"):
        folder /= f"window-{record['window']}-{record['sinks']}"
    for name, value in record.get("changed", {}).items():
        folder /= f"{name}-{value}"
    return folder


def write_sums(folder: epath.Path, record: dict, sums: Sums, **others: np.ndarray) -> None:
    """Writes the sums of an evaluation, and other arrays, into its `sums_folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = sums._replace(loss=sums.loss.astype(np.float32), tokens=sums.tokens.astype(np.int32))
    file = io.BytesIO()
    np.savez_compressed(file, **sums._asdict(), **others)
    write_atomic(folder / _file_name(record), file.getvalue())


def sums_file(workdir: epath.PathLike, record: dict) -> epath.Path:
    """Returns the file of an evaluation's sums."""
    return sums_folder(workdir, record) / _file_name(record)


def _file_name(record: dict) -> str:
    return "-".join(str(record.get(field)) for field in SAME_WINDOWS) + ".npz"


def _read_sums(workdir: epath.PathLike, record: dict) -> Sums:
    path = sums_file(workdir, record)
    try:
        with np.load(io.BytesIO(path.read_bytes())) as saved:
            return Sums(*(saved[name] for name in Sums._fields))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        raise UsageError(
            f"{path}: cannot be read; run python -m prope.evaluate --workdir={workdir} --again "
            f"with the flags of step {record['step']}, seq_len {record['seq_len']}"
        ) from None
