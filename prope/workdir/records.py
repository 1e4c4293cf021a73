"""The JSON lines of a run, metrics.jsonl and eval.jsonl, and which evaluation of several to use."""

import functools
from collections.abc import Iterable

from etils import epath

from prope.errors import log
from prope.runtime.files import parse_json, read_bytes, retry_reads
from prope.spec.run import Spec

# The encoding, in evaluations of a run that begins from another, of that other one.
UNCONVERTED = "init_from"
SAME_WINDOWS = ("fingerprint", "seq_len", "windows")  # equal in these: the same tokens predicted


def read_jsonl(path: epath.Path) -> list[dict]:
    """Reads a file of JSON lines, skipping with a warning those cut short.

    Without the file the list is empty.
    """
    records = []
    content = retry_reads(path, lambda: read_bytes(path), b"")
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            cause = "its process was killed as it wrote it"
            log.warning("%s: line %d is not JSON and is skipped; %s", path, number, cause)
    return records


def find_evaluations(records: Iterable[dict], **fields) -> list[dict]:
    """Selects the records with these values, such as step=700; a missing field counts as None.

    Those with another encoding than the run's (`prope.evaluate --encoding`), with a window that the
    run does not have (`--window`), or with another dtype or start of windows (`changed`), are left
    out, unless fields has one.
    """
    fields = {"encoding": None, "window": None, "sinks": None, "changed": None} | fields
    return [
        record
        for record in records
        if all(record.get(name) == value for name, value in fields.items())
    ]


def evaluations_of_training(
    records: Iterable[dict], spec: Spec, step: int, encoding: str | None = None
) -> list[dict]:
    """Selects the evaluations of a step on the documents and window length of training.

    Training evaluates a step before it saves it, so the oldest with its max_windows is its record,
    and has the fingerprint of its documents. `encoding` is the run's own (None), or UNCONVERTED.
    """
    find = functools.partial(find_evaluations, encoding=encoding)
    records = find(records, step=step, dataset=spec.data.dataset, seq_len=spec.data.seq_len)
    limited = find(records, max_windows=spec.eval.max_windows)
    fingerprints = [record.get("fingerprint") for record in limited or records]
    return find(records, fingerprint=fingerprints[0]) if fingerprints else []


def find_evaluation(records: Iterable[dict], **fields) -> dict | None:
    """Returns the record with these values and the most windows; of several, the newest."""
    newest_first = reversed(find_evaluations(records, **fields))
    return max(newest_first, key=lambda record: record.get("windows", 0), default=None)


def find_validation(
    records: Iterable[dict], spec: Spec, step: int, encoding: str | None = None
) -> dict | None:
    """Returns the newest evaluation of a step on the validation windows of `spec`, if any."""
    records = evaluations_of_training(records, spec, step, encoding)
    return find_evaluation(records, max_windows=spec.eval.max_windows, encoding=encoding)


def find_pair(
    records: list[dict], others: list[dict], second_fields: dict | None = None, **fields
) -> tuple[dict, dict] | None:
    """Returns the fullest evaluations on the same windows that have these values.

    `second_fields` are values of the second that differ.
    """
    matching = find_evaluations(others, **fields | (second_fields or {}))
    by_windows = {windows_of(other): other for other in matching}
    shared = [record for record in records if windows_of(record) in by_windows]
    record = find_evaluation(shared, **fields)
    if record is None:
        return None
    return record, by_windows[windows_of(record)]


def windows_of(record: dict) -> tuple:
    """Returns what identifies the windows of an evaluation."""
    return tuple(record.get(field) for field in SAME_WINDOWS)
