"""Fills in a YAML template and prints the result; launch/gke_jobset.sh uses it.

    python launch/fill_yaml.py launch/gke_jobset.yaml name=N image=I -- python -m prope.train --workdir=W

In a string, ${name} becomes the value's text. A string that is ${name:json} becomes the value parsed as JSON, such as a
number or a list. `command` is the list of words after --. The template is parsed first, so a value cannot change its
structure; `$(` in a word is doubled, because Kubernetes would expand it.
"""

import json
import os
import re
import sys
from typing import Any

import yaml


def fill(node: Any, values: dict[str, str]) -> Any:
    """Returns the node with every ${..} replaced.

    Raises:
      KeyError: no value has that name.
    """
    if isinstance(node, dict):
        return {key: fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, values) for value in node]
    if not isinstance(node, str):
        return node
    if whole := re.fullmatch(r"\$\{(\w+):json\}", node):
        return json.loads(values[whole[1]])
    return re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], node)


def _main(arguments: list[str]) -> None:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if {"--help", "-h"} & set(arguments[:end]):
        print(__doc__.strip())
        return
    template, *assignments = arguments[:end] or [""]
    wrong = [argument for argument in assignments if not re.match(r"\w+=", argument)]
    if wrong or not os.path.isfile(template):
        print(f"error: {[*wrong, template][0]!r}: give TEMPLATE NAME=VALUE.. -- COMMAND..", file=sys.stderr)
        sys.exit(2)
    values = dict(assignment.split("=", 1) for assignment in assignments)
    values["command"] = json.dumps([word.replace("$(", "$$(") for word in arguments[end + 1 :]])
    with open(template, encoding="utf-8") as file:
        filled = fill(yaml.safe_load(file), values)
    yaml.safe_dump(filled, sys.stdout, sort_keys=False, width=120)


if __name__ == "__main__":
    _main(sys.argv[1:])
