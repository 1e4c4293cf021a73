"""The JSON lines of a run, metrics.jsonl and eval.jsonl, and which evaluation of several to use."""

import json
from collections.abc import Iterable

from etils import epath
from ml_collections import ConfigDict

from prope.errors import log
from prope.runtime.files import retry_reads

SAME_WINDOWS = ("fingerprint", "seq_len", "windows")  # equal in these: the same tokens predicted


def read_jsonl(path: epath.Path) -> list[dict]:
    """Reads a file of JSON lines, skipping with a warning those cut short.

    Without the file the list is empty.
    """
    records = []
    for number, line in enumerate(retry_reads(path, path.read_bytes, b"").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            cause = "its process was killed as it wrote it"
            log.warning("%s: line %d is not JSON and is skipped; %s", path, number, cause)
    return records


def find_evaluations(records: Iterable[dict], **fields) -> list[dict]:
    """Selects the records with these values, such as step=700; a missing field counts as None.

    Those with another encoding than the run's (`prope.evaluate --encoding`) are left out, unless
    fields has one.
    """
    fields = {"encoding": None} | fields
    return [
        record
        for record in records
        if all(record.get(name) == value for name, value in fields.items())
    ]


def evaluations_of_training(records: Iterable[dict], config: ConfigDict, step: int) -> list[dict]:
    """Selects the evaluations of a step on the documents and window length of training.

    Training evaluates a step before it saves it, so the oldest with its max_windows is its record,
    and has the fingerprint of its documents.
    """
    data = config.data
    records = find_evaluations(records, step=step, dataset=data.dataset, seq_len=data.seq_len)
    limited = find_evaluations(records, max_windows=config.eval.max_windows)
    oldest_first = limited or records
    if not oldest_first:
        return []
    return find_evaluations(records, fingerprint=oldest_first[0]["fingerprint"])


def find_evaluation(records: Iterable[dict], **fields) -> dict | None:
    """Returns the record with these values and the most windows; of several, the newest."""
    newest_first = reversed(find_evaluations(records, **fields))
    return max(newest_first, key=lambda record: record["windows"], default=None)


def find_pair(
    records: list[dict], others: list[dict], second_fields: dict | None = None, **fields
) -> tuple[dict, dict] | None:
    """Returns the fullest evaluations on the same windows that have these values.

    `second_fields` are values of the second that differ.
    """
    matching = find_evaluations(others, **fields | (second_fields or {}))
    by_windows = {_windows(other): other for other in matching}
    shared = [record for record in records if _windows(record) in by_windows]
    record = find_evaluation(shared, **fields)
    return record and (record, by_windows[_windows(record)])


def _windows(record: dict) -> tuple:
    return tuple(record.get(field) for field in SAME_WINDOWS)
