"""A run's records: metrics.jsonl and eval.jsonl, one JSON object a line."""

import json
import pathlib


def append_jsonl(path: pathlib.Path, record: dict) -> None:
    """Adds one JSON object as a line."""
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def read_jsonl(path: pathlib.Path) -> list[dict]:
    """The objects of a file of JSON lines; none where there is no file. A last line cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
