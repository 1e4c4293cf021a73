"""Compares groups of runs: each with RoPE or the first, and by contrasts declared beforehand.

Both are Student's t of the paired differences by seed of the two groups themselves, corrected for
the number of comparisons: see `prope/inference/statistics.py`. Contrasts have an exact test by sign
flips, too. With a single seed there are intervals over documents only.
"""

from collections.abc import Iterable
from typing import NamedTuple

from etils import epath

from prope.errors import usage_error
from prope.inference.statistics import Difference, holm
from prope.runtime.files import append_jsonl
from prope.sweep.runs import (
    Pair,
    Run,
    average,
    group_name,
    groups,
    paired_runs,
    read_entries,
    reference,
)
from prope.workdir.records import read_jsonl

CONTRASTS = "contrasts.jsonl"  # declared contrasts, in the sweep's directory


class Comparison(NamedTuple):
    """Loss of a group of runs minus that of another, nats per token."""

    group: str
    other: str
    difference: Difference | None = None  # None: no finished runs of a common seed
    over: str = ""  # what its standard error is over: "3 seeds", "documents"
    p_value: float | None = None  # of a declared contrast over seeds, adjusted by Holm
    sign_flip_p_value: float | None = None  # the same, by all signs of the differences
    evaluated: int = 0  # runs with a result when the contrast was declared


# --- With RoPE, or the first ----------------------------------------------------------------------


def compare_with_reference(runs: Iterable[Run]) -> list[Comparison]:
    """Compares all groups that have a `reference` with it; those without common seeds are left out.

    The intervals of all of them hold together.
    """
    by_name = groups(runs)
    found = []
    for name, group in by_name.items():
        other = reference(group[0].values, by_name)
        pairs = paired_runs(group, by_name[other]) if other else []
        if pairs:
            found.append((Comparison(name, other), pairs))
    return [_compare(comparison, pairs, len(found)) for comparison, pairs in found]


def _compare(comparison: Comparison, pairs: list[Pair], comparisons: int) -> Comparison:
    """Computes a difference from pairs of runs; its interval holds together with others."""
    difference, over = average(pairs)
    return comparison._replace(difference=difference._replace(comparisons=comparisons), over=over)


# --- Declared contrasts ---------------------------------------------------------------------------


def declare(directory: epath.Path, folder: epath.Path, texts: list[str]) -> None:
    """Appends contrasts to FOLDER/contrasts.jsonl, before any result is read.

    Args:
      directory: of the sweep.
      folder: for the contrasts.
      texts: the contrasts, such as "p=0.75,rope". Other names raise UsageError.
    """
    entries = read_entries(directory)
    by_text = {}
    for entry in entries:
        by_text |= dict.fromkeys(_texts_of(entry["values"]), group_name(entry["values"]))
    contrasts = [_parse(text, by_text) for text in texts]
    declared = [record["groups"] for record in read_jsonl(folder / CONTRASTS)]
    results = [read_jsonl(directory / entry["name"] / "eval.jsonl") for entry in entries]
    evaluated = sum(map(bool, results))  # an evaluation's file is there, empty, from the start
    for contrast in contrasts:
        if contrast not in declared and contrast[::-1] not in declared:
            append_jsonl(folder / CONTRASTS, {"groups": contrast, "evaluated": evaluated})
            declared.append(contrast)


def _texts_of(values: dict) -> list[str]:
    """Lists how --contrast may name a group: p=1 is rope, too, and p=0 nope."""
    text = group_name(values).replace(" ", "")
    methods = {"p=1": "rope", "p=0": "nope"}
    by_method = ",".join(methods.get(part, part) for part in text.split(","))
    return [text, by_method]


def _parse(text: str, by_text: dict[str, str]) -> list[str]:
    """Returns the two groups of a contrast. A group's name may hold commas itself."""
    parts = text.replace(" ", "").split(",")
    for place in range(1, len(parts)):
        names = [",".join(parts[:place]), ",".join(parts[place:])]
        contrast = [by_text.get(name) for name in names]
        if None not in contrast and contrast[0] != contrast[1]:
            return contrast
    remedy = f"write two of {', '.join(by_text)} with a comma between them"
    raise usage_error("--contrast", text, "does not name two of the sweep's groups", remedy)


def compare_declared(runs: Iterable[Run], folder: epath.Path) -> list[Comparison]:
    """Computes the declared contrasts, with p-values adjusted for their number."""
    by_name = groups(runs)
    records = read_jsonl(folder / CONTRASTS)
    contrasts = []
    for record in records:
        group, other = record["groups"]
        contrast = Comparison(group, other, evaluated=record["evaluated"])
        pairs = paired_runs(by_name.get(group, []), by_name.get(other, []))
        contrasts.append(_compare(contrast, pairs, len(records)) if pairs else contrast)
    over_seeds = [None if one.over == "documents" else one.difference for one in contrasts]
    for name in ("p_value", "sign_flip_p_value"):
        p_values = [one and getattr(one, name) for one in over_seeds]
        adjusted = holm([1.0 if p_value is None else p_value for p_value in p_values])
        for i, p_value in enumerate(p_values):
            contrasts[i] = contrasts[i]._replace(**{name: p_value and adjusted[i]})
    return contrasts
