"""Compares the groups of runs of a sweep: each with RoPE, and by contrasts declared beforehand.

Differences from one RoPE are corrected for their number by Dunnett's test, declared contrasts by
Holm's. Both pool the variance over groups, with the seed as block. With a single seed there are
intervals over documents only.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from etils import epath

from prope.errors import usage_error
from prope.inference.statistics import (
    CriticalValue,
    Difference,
    Pooled,
    bonferroni_critical,
    detectable_difference,
    document_variance,
    dunnett_critical,
    holm,
    over_documents,
    pool_variance,
    pooled_difference,
    seeds_needed,
)
from prope.runtime.files import append_jsonl
from prope.sweep.runs import (
    SEED,
    Pair,
    Run,
    average,
    group_name,
    groups,
    loss_differences,
    paired_runs,
    read_documents,
    read_entries,
    reference,
)
from prope.workdir.records import SAME_WINDOWS, read_jsonl

CONTRASTS = "contrasts.jsonl"  # declared contrasts, in the sweep's directory


class Comparison(NamedTuple):
    """Loss of a group of runs minus that of another, nats per token."""

    group: str
    other: str
    difference: Difference | None = None  # None: no finished runs of a common seed
    over: str = ""  # what its standard error is over: "3 seeds", "documents"
    documents: Difference | None = None  # the same over seeds and documents
    p_value: float | None = None  # of a declared contrast, adjusted by Holm
    evaluated: int = 0  # runs with a result when the contrast was declared


class Family(NamedTuple):
    """All comparisons with one RoPE."""

    reference: str
    pooled: Pooled
    comparisons: list[Comparison]
    level: float  # at which the intervals of all comparisons hold together


# --- With RoPE ------------------------------------------------------------------------------------


def compare_with_rope(runs: Iterable[Run]) -> list[Family]:
    """Compares all groups that have a RoPE with it; groups without common seeds are left out.

    Of several RoPEs each has its share of the 5 % (Bonferroni).
    """
    by_name = groups(runs)
    pairs: dict[str, dict[str, list[Pair]]] = {}  # by RoPE and group
    for name, group in by_name.items():
        rope = reference(group[0].values, by_name)
        found = paired_runs(group, by_name[rope]) if rope else []
        if found:
            pairs.setdefault(rope, {})[name] = found
    level = 1 - 0.05 / max(len(pairs), 1)
    families = []
    for rope, by_group in pairs.items():
        pooled = _pool([*by_name[rope], *(run for name in by_group for run in by_name[name])])
        critical = functools.partial(dunnett_critical, len(by_group), level=level)
        comparisons = []
        for name, found in by_group.items():
            comparisons.append(_compare(Comparison(name, rope), found, pooled, critical))
        families.append(Family(rope, pooled, comparisons, level))
    return families


def _pool(runs: list[Run]) -> Pooled:
    """Pools the variance of the last evaluations' losses over groups."""
    losses = []
    names = []
    blocks = []
    for run in runs:
        evaluation = run.evaluation
        if run.state == "finished" and evaluation["loss"] is not None:
            windows = [evaluation.get(field) for field in SAME_WINDOWS]
            losses.append(evaluation["loss"])
            names.append(run.group)
            blocks.append((run.values.get(SEED), *windows))
    return pool_variance(losses, names, blocks)


def _compare(
    comparison: Comparison, pairs: list[Pair], pooled: Pooled, critical: CriticalValue
) -> Comparison:
    """Computes a difference from pairs of runs, over seeds if there are several."""
    if len(pairs) < 2:
        difference, over = average(pairs)
        if difference and difference.stderr is not None:
            degrees = difference.samples - 1
            difference = difference._replace(critical=critical(degrees))
        return comparison._replace(difference=difference, over=over)
    difference = pooled_difference(loss_differences(pairs), pooled, critical)
    documents = None
    sums = read_documents(pairs)
    if sums:
        first = sums[0]
        loss = np.stack([one.loss.sum(axis=1) for one in sums])
        added = document_variance(loss, first.tokens.sum(axis=1), first.source, first.shares)
        if added:
            documents = over_documents(difference, *added, critical)
    return comparison._replace(
        difference=difference, over=f"{len(pairs)} seeds", documents=documents
    )


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


def compare_declared(
    runs: Iterable[Run], families: list[Family], folder: epath.Path
) -> list[Comparison]:
    """Computes the declared contrasts, with p-values adjusted for their number.

    Intervals hold together (Bonferroni). The variance is that of the RoPE's family if both groups
    are in one, else of the two alone.
    """
    by_name = groups(runs)
    records = read_jsonl(folder / CONTRASTS)
    critical = functools.partial(bonferroni_critical, len(records))
    contrasts = []
    for record in records:
        group, other = record["groups"]
        both = [by_name.get(group, []), by_name.get(other, [])]
        pairs = paired_runs(*both)
        contrast = Comparison(group, other, evaluated=record["evaluated"])
        if pairs:
            pooled = _pool([*both[0], *both[1]])
            for family in families:
                names = {family.reference, *(one.group for one in family.comparisons)}
                if names >= {group, other}:
                    pooled = family.pooled
            contrast = _compare(contrast, pairs, pooled, critical)
        contrasts.append(contrast)
    p_values = [_p_value(one) for one in contrasts]
    adjusted = holm([1.0 if p_value is None else p_value for p_value in p_values])
    return [
        one._replace(p_value=p_value and holms)
        for one, p_value, holms in zip(contrasts, p_values, adjusted, strict=True)
    ]


def _p_value(contrast: Comparison) -> float | None:
    """Returns the unadjusted p-value over seeds; None where there are no two seeds."""
    if contrast.difference is None or contrast.over == "documents":
        return None
    return contrast.difference.p_value


# --- What the runs can tell -----------------------------------------------------------------------


class Detectable(NamedTuple):
    """What a number of seeds can tell, and how many a quarter of it takes."""

    reference: str
    methods: int  # with RoPE
    seeds: int  # the fewest of a comparison
    pooled: Pooled
    difference: float  # seen with a probability of 80 %, nats per token
    smaller: float
    seeds_needed: int  # to see `smaller` as surely


def detectable(families: list[Family]) -> list[Detectable]:
    """Computes the least true differences that are seen with a probability of 80 %.

    RoPEs without two seeds, or whose runs do not vary, are left out.
    """
    computed = []
    for family in families:
        pooled = family.pooled
        several = [one for one in family.comparisons if one.over.endswith("seeds")]
        if not several or not pooled.variance:
            continue
        seeds = min(one.difference.samples for one in several)
        methods = 1 + len(family.comparisons)
        difference = detectable_difference(pooled.deviation, methods, seeds, family.level)
        smaller = float(f"{difference / 4:.1g}")
        needed = seeds_needed(smaller, pooled.deviation, methods, family.level)
        computed.append(
            Detectable(family.reference, methods, seeds, pooled, difference, smaller, needed)
        )
    return computed
