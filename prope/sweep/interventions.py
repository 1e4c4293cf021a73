"""Shows which frequencies break: how stopping, removing or slowing bands of pairs changes the loss.

What is read are the records of `prope.evaluate --intervene`, on the tokens of a plain evaluation.
"""

import operator
import re
from typing import NamedTuple

import numpy as np

from prope.encodings import INTERVENTIONS
from prope.html.drawing import Picture, label_cells, label_ticks, panels, show_image
from prope.inference.statistics import Difference
from prope.sweep.runs import Run, average, groups
from prope.workdir.records import find_pair

_WORDS = {
    "stop": ("Bands stopped", "no longer rotated"),
    "remove": ("Bands removed", "removed from logits"),
    "interpolate": ("Bands interpolated", "rotated more slowly"),
}


class Change(NamedTuple):
    """The change of a group's loss by an intervention, in nats per token."""

    group: str
    kind: str
    band: tuple[int, int]  # first and last pair
    layers: str  # "" all, or as --intervene names them
    factor: float  # by which `interpolate` slows; 1 for others
    seq_len: int
    pairs: str  # band and layers, with the factor where the group has several at this length
    difference: Difference  # over seeds; over documents for a single run


def changes(runs: list[Run]) -> list[Change]:
    """Computes the changes of the last step's loss, by kind, group, band, factor and length.

    Records of several bands at once, such as those of a search, are left out.
    """
    computed = []
    for kind in INTERVENTIONS:
        for name, group in groups(runs).items():
            computed += sorted(_changes(kind, name, group))
    return computed


def _changes(kind: str, name: str, group: list[Run]) -> list[Change]:
    cases = {
        (record["encoding"], record["factor"], record["seq_len"])
        for run in group
        for record in run.evaluations
        if re.fullmatch(rf"{kind}:[^+]*", record.get("encoding") or "")  # one band
    }
    computed = []
    for encoding, factor, seq_len in cases:
        fields = {
            "encoding": encoding,
            "factor": factor,
            "seq_len": seq_len,
        }
        paired = []
        for run in group:
            records = _find_records(run, fields)
            if records:
                paired.append((run, run, *records))
        difference, _ = average(paired)
        if difference is None:
            continue
        label = encoding.removeprefix(f"{kind}:")
        pairs, _, layers = label.partition("@")
        first, last = pairs.split("-")
        band = (int(first), int(last))
        computed.append(Change(name, kind, band, layers, factor, seq_len, label, difference))
    places = [(change.band, change.layers, change.seq_len) for change in computed]
    for i, change in enumerate(computed):
        if places.count(places[i]) > 1:
            computed[i] = change._replace(pairs=f"{change.pairs} by {change.factor:g}")
    return computed


def _find_records(run: Run, fields: dict) -> tuple[dict, dict] | None:
    """Finds a run's last evaluations with an intervention and without, on the same tokens."""
    plain = {"encoding": None, "factor": None}
    fields = fields | {"step": run.last_step}
    if run.metrics:  # an import has no data of its own
        fields["dataset"] = run.config.data.dataset
    return find_pair(run.evaluations, run.evaluations, plain, **fields)


def pictures(changes: list[Change]) -> list[Picture]:
    """Makes a picture of every kind of intervention, with a map for each group of runs."""
    drawn = []
    for kind in INTERVENTIONS:
        same_kind = [change for change in changes if change.kind == kind]
        if same_kind:
            drawn.append(_picture(kind, same_kind))
    return drawn


def _picture(kind: str, changes: list[Change]) -> Picture:
    groups = list(dict.fromkeys(change.group for change in changes))
    lengths = sorted({change.seq_len for change in changes})
    by_band = sorted(changes, key=operator.attrgetter("layers", "band", "factor"))
    bands = list(dict.fromkeys(change.pairs for change in by_band))
    values = np.full((len(groups), len(bands), len(lengths)), np.nan)
    for change in changes:
        group = groups.index(change.group)
        band = bands.index(change.pairs)
        length = lengths.index(change.seq_len)
        values[group, band, length] = change.difference.difference
    largest = np.nanmax(np.abs(values))

    def draw(figure) -> None:
        row = panels(figure, len(groups), sharey=True)[0]
        for axes, group, losses in zip(row, groups, values, strict=True):
            show_image(
                axes,
                losses,
                vmin=-largest,
                vmax=largest,
                cmap="RdBu_r",
                aspect="auto",
            )
            label_cells(axes, losses, _signed, lambda change: abs(change) < 0.6 * largest)
            axes.set(title=group, xlabel="tokens in a window")
            label_ticks(axes.xaxis, [f"{length:,}" for length in lengths])
            label_ticks(axes.yaxis, bands)
        row[0].set_ylabel("pairs, fastest first")

    title, words = _WORDS[kind]
    caption = (
        f"Loss with a band {words}, minus the loss as it is, nats per token, without training."
    )
    caption += (
        " Of several seeds, means. Red: the loss rises; blue: it falls; hatched: not evaluated."
    )
    alt = "Maps of the change of the loss by band and length, from"
    alt += f" {np.nanmin(values):+.3f} to {np.nanmax(values):+.3f}."
    width = min(2.4 * len(groups) + 0.6, 12.9)
    height = 1.2 + 0.3 * len(bands)
    return Picture(kind, title, alt, caption, draw, (width, height))


def _signed(change: float) -> str:
    return f"{round(change, 2) + 0:+.2f}"  # adding 0 makes -0.0 positive
