"""Fills in a YAML template: python launch/fill_yaml.py TEMPLATE NAME=VALUE.. [-- COMMAND..] prints the result.

In a string, ${name} becomes the value's text. A string that is ${name:json} becomes the value read as JSON: a number, a
list. `command` is the words after --. The template is parsed before, so a value cannot change its structure; `$(` in a
word is doubled, because Kubernetes would expand it.
"""

import json
import re
import sys
from typing import Any

import yaml


def fill(node: Any, values: dict[str, str]) -> Any:
    """The node with every ${..} replaced.

    Raises:
      KeyError: there is no value of that name.
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
    template, *assignments = arguments[:end]
    values = dict(assignment.split("=", 1) for assignment in assignments)
    values["command"] = json.dumps([word.replace("$(", "$$(") for word in arguments[end + 1 :]])
    with open(template, encoding="utf-8") as file:
        filled = fill(yaml.safe_load(file), values)
    yaml.safe_dump(filled, sys.stdout, sort_keys=False, width=120)


if __name__ == "__main__":
    _main(sys.argv[1:])
