"""Fields of specs, and the rules that a value of one has to hold.

A field of a spec is a field of the config: `setting` gives its default, its meaning and its rules,
from which the ConfigDict, `--help` and the checks are made.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any

from prope.errors import usage_error

# A rule gets a field's value, which is not None; it returns None, or what is allowed instead.
Rule = Callable[[Any], str | None]


def setting(default: Any, meaning: str, *rules: Rule, may_change: bool = False) -> Any:
    """Makes a field of a spec.

    Args:
      default: its value where no config sets it.
      meaning: what it is, for `--help` and errors.
      rules: what a value has to hold.
      may_change: whether a run may go on with another value: the field changes how a run is
        executed, and not what it computes.
    """
    metadata = {"meaning": meaning, "rules": rules, "may_change": may_change}
    return dataclasses.field(default=default, metadata=metadata)


changeable = functools.partial(setting, may_change=True)


def rule(holds: Callable[[Any], bool], allowed: str) -> Rule:
    """Makes the rule that `holds` is true; otherwise it returns what is `allowed`."""
    return lambda value: None if holds(value) else allowed


def one_of(*choices: str) -> Rule:
    """Makes the rule that a value is one of `choices`."""
    return rule(lambda value: value in choices, f"must be one of {', '.join(choices)}")


def optional_count(meaning_of_none: str) -> Rule:
    """Makes the rule of a number of things, for which None means another one."""
    return rule(lambda value: value >= 1, f"must be at least 1, or None for {meaning_of_none}")


AT_LEAST_1 = rule(lambda x: x >= 1, "must be at least 1")
NOT_NEGATIVE = rule(lambda x: x >= 0, "must not be negative")
POSITIVE = rule(lambda x: x > 0, "must be positive")
ABOVE_1 = rule(lambda x: x > 1, "must be greater than 1")
SHARE = rule(lambda x: 0 < x < 1, "must be between 0 and 1")


def value_type(field: dataclasses.Field) -> type:
    """Returns the type of a field's values, int for `int | None` and for `int | tuple`."""
    if not isinstance(field.type, types.UnionType):
        return typing.get_origin(field.type) or field.type
    return typing.get_args(field.type)[0]


def check_fields(spec, prefix: str) -> None:
    """Checks every field of a spec by its rules; raises UsageError with its name after `prefix`."""
    for field in dataclasses.fields(spec):
        check_field(prefix + field.name, getattr(spec, field.name), field)


def check_field(name: str, value: Any, field: dataclasses.Field) -> None:
    """Checks the value of a field by its rules; raises UsageError with its name."""
    if value is None:
        if type(None) not in typing.get_args(field.type):
            raise usage_error(name, value, f"must have a value, such as {field.default}")
        return
    problems = [check(value) for check in field.metadata.get("rules", ())]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append("must be a finite number")
    for problem in filter(None, problems):
        raise usage_error(name, value, problem)
