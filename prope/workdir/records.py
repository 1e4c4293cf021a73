"""The JSON lines in a run's directory, metrics.jsonl and eval.jsonl, and which evaluation among them to use."""

import json
from collections.abc import Iterable

from etils import epath
from ml_collections import ConfigDict

from prope.errors import log
from prope.runtime.files import retry_reads

SAME_WINDOWS = (
    "fingerprint",
    "seq_len",
    "windows",
)  # evaluations equal in these predicted the same tokens


def read_jsonl(path: epath.Path) -> list[dict]:
    """Reads a file of JSON lines, skipping with a warning those cut short; an empty list if there is no file."""
    records = []
    for number, line in enumerate(retry_reads(path, path.read_bytes, b"").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            log.warning(
                "%s: line %d is not JSON and is skipped; its process was killed as it wrote it",
                path,
                number,
            )
    return records


def find_evaluations(records: Iterable[dict], **fields) -> list[dict]:
    """Selects the records with these values, such as step=700, in their order; a missing field counts as None.

    Those with another encoding than the run's (`prope.evaluate --encoding`) are left out, unless fields has one.
    """
    fields = {"encoding": None} | fields
    return [
        record for record in records if all(record.get(k) == value for k, value in fields.items())
    ]


def evaluations_of_training(records: Iterable[dict], config: ConfigDict, step: int) -> list[dict]:
    """Selects the evaluations of a step on the documents and window length of training.

    Training evaluates a step before it saves it, so its own evaluation is the oldest with its max_windows.
    """
    records = find_evaluations(
        records, step=step, dataset=config.data.dataset, seq_len=config.data.seq_len
    )
    own = find_evaluations(records, max_windows=config.eval.max_windows) or records
    return find_evaluations(records, fingerprint=own[0].get("fingerprint")) if own else []


def find_evaluation(records: Iterable[dict], **fields) -> dict | None:
    """Returns the fullest record with these values, by number of windows, and of equally full ones the newest."""
    newest_first = reversed(find_evaluations(records, **fields))
    return max(newest_first, key=lambda record: record.get("windows") or 0, default=None)


def find_pair(
    records: list[dict], others: list[dict], second_fields: dict | None = None, **fields
) -> tuple[dict, dict] | None:
    """Returns the fullest evaluations on the same windows that have these values.

    `second_fields` are values of the second that differ.
    """
    matching = find_evaluations(others, **fields | (second_fields or {}))
    of_windows = {tuple(map(other.get, SAME_WINDOWS)): other for other in matching}
    shared = [record for record in records if tuple(map(record.get, SAME_WINDOWS)) in of_windows]
    record = find_evaluation(shared, **fields)
    return record and (record, of_windows[tuple(map(record.get, SAME_WINDOWS))])
