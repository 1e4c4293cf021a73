"""Shows which frequencies break: how stopping, removing or slowing bands of pairs changes the loss.

What is read are the records of `prope.evaluate --intervene`, on the tokens of a plain evaluation.
"""

import collections
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from prope.encodings import INTERVENTIONS
from prope.html.drawing import Picture, arrange, label_cells, label_ticks, panels, show_image
from prope.inference.statistics import Difference
from prope.sweep.runs import Run, average, find_changed, groups
from prope.workdir.records import UNCONVERTED

_RESCALED = "rescaled"  # the kind of an encoding as a whole
WORDS = {  # by kind: the title of its picture, and what is changed
    "stop": ("Bands stopped", "a band no longer rotated"),
    "remove": ("Bands removed", "a band removed from logits"),
    "interpolate": ("Bands interpolated", "a band rotated more slowly"),
    _RESCALED: ("Encodings rescaled", "the encoding rescaled by --encoding"),
}


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
    return kind if bands else _RESCALED


def changes(runs: list[Run]) -> list[Change]:
    """Computes the changes of the last step's loss, by kind, group, band, factor and length.

    Of several factors at one length, the names of pairs have them. Records of several bands at
    once are left out.
    """
    computed = []
    for kind in WORDS:
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


def pictures(changes: list[Change]) -> list[Picture]:
    """Makes a picture of every kind of intervention, with a map for each group of runs."""
    by_kind = {kind: [change for change in changes if change.kind == kind] for kind in WORDS}
    return [_picture(kind, same_kind) for kind, same_kind in by_kind.items() if same_kind]


def _picture(kind: str, changes: list[Change]) -> Picture:
    groups = list(dict.fromkeys(change.group for change in changes))
    lengths = sorted({change.seq_len for change in changes})
    by_band = sorted(changes, key=attrgetter("layers", "band", "factor", "pairs"))
    bands = list(dict.fromkeys(change.pairs for change in by_band))
    values = np.full((len(groups), len(bands), len(lengths)), np.nan)
    for change in changes:
        place = (
            groups.index(change.group),
            bands.index(change.pairs),
            lengths.index(change.seq_len),
        )
        values[place] = change.difference.difference
    title, changed = WORDS[kind]
    width = max(2.4, 0.7 + 0.65 * len(lengths))
    across, blocks = arrange(len(groups), int(12.3 // width) or 1)

    def draw(figure) -> None:
        row = panels(figure, len(groups), wrap=across, sharey=True)[0]
        largest = np.nanmax(np.abs(values))
        for axes, group, losses in zip(row, groups, values, strict=True):
            _draw_map(axes, losses, largest)
            axes.set(title=group, xlabel="tokens in a window")
            label_ticks(axes.xaxis, lengths)
            label_ticks(axes.yaxis, bands)
        for axes in row[::across]:
            axes.set_ylabel("encoding" if kind == _RESCALED else "pairs, fastest first")

    caption = (
        f"Loss with {changed}, minus the loss as it is, nats per token, without training."
        " Of several seeds, means. Red: the loss rises; blue: it falls; hatched: not"
        " evaluated, or pairs that do not rotate."
    )
    size = (width * across + 0.6, (1.2 + 0.3 * len(bands)) * blocks)
    alt = f"Changes of the loss from {np.nanmin(values):+.4f} to {np.nanmax(values):+.4f}."
    return Picture(kind, title, alt, caption, draw, size)


def _draw_map(axes, losses: np.ndarray, largest: float) -> None:
    """Draws changes [bands, lengths] in the colours of -largest to largest."""
    digits = 2 if largest >= 0.1 else 4
    show_image(axes, losses, vmin=-largest, vmax=largest, cmap="RdBu_r", aspect="auto")
    label_cells(
        axes,
        losses,
        lambda change: f"{change:+z.{digits}f}",
        lambda change: abs(change) < 0.6 * largest,
    )
