"""A run's records: metrics.jsonl and eval.jsonl, one JSON object a line."""

import json
import pathlib


def read_jsonl(path: pathlib.Path) -> list[dict]:
    """Reads the objects of a file of JSON lines; none if there is no file. A last line cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
