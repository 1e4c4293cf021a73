"""Shows which frequencies break: how stopping, removing or slowing bands of pairs changes the loss.

What is read are the records of `prope.evaluate --intervene`, on the tokens of a plain evaluation.
"""

import collections
from typing import NamedTuple

from prope.encodings import INTERVENTIONS
from prope.inference.statistics import Difference
from prope.sweep.runs import Run, average, find_changed, groups
from prope.workdir.records import UNCONVERTED

RESCALED = "rescaled"  # the kind of an encoding as a whole
KINDS = (*INTERVENTIONS, RESCALED)


class Change(NamedTuple):
    """The change of a group's loss by an intervention, in nats per token."""

    group: str
    kind: str
    band: tuple[int, ...]  # first and last pair; () of an encoding
    layers: str  # "" all, or as --intervene names them
    factor: float  # by which `interpolate` slows; 1 for others
    seq_len: int
    pairs: str  # band and layers, or the encoding; by which of several factors
    difference: Difference  # over seeds; over documents for a single run


def kind_of(encoding: str | None) -> str | None:
    """Names the kind of an evaluation's encoding; None for the run's own, and for training's."""
    if encoding in (None, UNCONVERTED):
        return None
    kind, *bands = encoding.split(":")
    return kind if bands else RESCALED


def list_changes(runs: list[Run]) -> list[Change]:
    """Computes the changes of the last step's loss, by kind, group, band, factor and length.

    Of several factors at one length, the names of pairs have them. Records of several bands at
    once are left out.
    """
    computed = []
    for kind in KINDS:
        for name, group in groups(runs).items():
            computed += sorted(_changes(kind, name, group))
    return computed


def _changes(kind: str, name: str, group: list[Run]) -> list[Change]:
    cases = {
        (record["encoding"], record.get("factor"), record["seq_len"])
        for run in group
        for record in run.evaluations
        if kind_of(record.get("encoding")) == kind and "+" not in record["encoding"]
    }
    computed = []
    for encoding, factor, seq_len in cases:
        fields = {"encoding": encoding, "factor": factor, "seq_len": seq_len}
        paired = [(run, run, *find_changed(run, fields)) for run in group]
        difference, _ = average([pair for pair in paired if len(pair) > 2])
        if difference is None:
            continue
        label = encoding.removeprefix(f"{kind}:")
        pairs, _, layers = label.partition("@")
        band = ()
        if kind in INTERVENTIONS:
            band = tuple(map(int, pairs.split("-")))
        factor = factor or 1.0  # of older records
        computed.append(Change(name, kind, band, layers, factor, seq_len, label, difference))
    places = collections.Counter((change.pairs, change.seq_len) for change in computed)
    for i, change in enumerate(computed):
        if places[change.pairs, change.seq_len] > 1:
            computed[i] = change._replace(pairs=f"{change.pairs} by {change.factor:g}")
    return computed
