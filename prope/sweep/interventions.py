"""Shows which frequencies break: the loss with a band of pairs stopped, removed or interpolated, minus that without.

What is read are the records of `prope.evaluate --intervene`, on the same tokens as a plain evaluation of the run.
"""

from typing import NamedTuple

import numpy as np

from prope.encodings import INTERVENTIONS
from prope.html.drawing import Picture, label_cells, label_ticks, panels, show_image
from prope.inference.paired import Difference
from prope.sweep.runs import Run, average, groups
from prope.workdir.records import find_pair


class Change(NamedTuple):
    """The change of a group's loss by an intervention, nats per token, over seeds; of a single run, over documents."""

    group: str
    kind: str
    band: tuple[int, int]  # first and last pair
    factor: float  # of interpolate; 1 of the others
    seq_len: int
    pairs: str  # the band, with the factor where the group has several at this length
    difference: Difference


def changes(runs: list[Run]) -> list[Change]:
    """Computes the changes of the last step's loss by kind, group, band, factor and length, in this order."""
    found, plain = [], {"encoding": None, "factor": None}
    for group, members in groups(runs).items():
        by_case: dict[tuple, list[tuple[Run, Run, dict, dict]]] = {}
        for run in members:
            about = {"step": run.config.num_steps, "dataset": run.config.data.dataset}
            changed = [
                record for record in run.evaluations if ":" in (record.get("encoding") or "")
            ]
            for encoding, factor, T in {
                (r["encoding"], r["factor"], r["seq_len"]) for r in changed
            }:
                fields = about | {"seq_len": T, "encoding": encoding, "factor": factor}
                if pair := find_pair(run.evaluations, run.evaluations, plain, **fields):
                    by_case.setdefault((encoding, factor, T), []).append((run, run, *pair))
        for (encoding, factor, T), of_seeds in by_case.items():
            kind, _, pairs = encoding.partition(":")
            band, factors = (
                tuple(map(int, pairs.split("-"))),
                [f for e, f, t in by_case if (e, t) == (encoding, T)],
            )
            pairs += f" by {factor:g}" if len(factors) > 1 else ""
            found.append(Change(group, kind, band, factor, T, pairs, average(of_seeds)[0]))
    order = list(groups(runs))
    return sorted(
        found,
        key=lambda c: (
            INTERVENTIONS.index(c.kind),
            order.index(c.group),
            c.band,
            c.factor,
            c.seq_len,
        ),
    )


def pictures(found: list[Change]) -> list[Picture]:
    """Makes a picture of every kind of intervention: for each group of runs a map of the change by band and length."""
    return [
        _picture(kind, of_kind)
        for kind in INTERVENTIONS
        if (of_kind := [c for c in found if c.kind == kind])
    ]


def _picture(kind: str, found: list[Change]) -> Picture:
    names, lengths = list(dict.fromkeys(c.group for c in found)), sorted({c.seq_len for c in found})
    labels = list(dict.fromkeys(c.pairs for c in sorted(found, key=lambda c: (c.band, c.factor))))
    values = np.full((len(names), len(labels), len(lengths)), np.nan)
    for c in found:
        values[names.index(c.group), labels.index(c.pairs), lengths.index(c.seq_len)] = (
            c.difference.difference
        )
    reach = np.nanmax(np.abs(values))

    def draw(figure) -> None:
        for axes, name, of_group in zip(
            panels(figure, len(names), sharey=True)[0], names, values, strict=True
        ):
            show_image(axes, of_group, vmin=-reach, vmax=reach, aspect="auto")
            label_cells(
                axes,
                of_group,
                lambda change: f"{round(change, 2) + 0:+.2f}",
                bright=0.3 * reach,
            )
            axes.set(title=name, xlabel="tokens in a window")
            label_ticks(axes.xaxis, [f"{T:,}" for T in lengths])
            label_ticks(axes.yaxis, labels)
        figure.axes[0].set_ylabel("pairs, fastest first")

    longest = [c for c in found if c.seq_len == lengths[-1]]
    least, most = (choose(longest, key=lambda c: c.difference.difference) for choose in (min, max))
    ends = [
        f"{c.difference.difference:+.3f} in {c.group} for pairs {c.pairs}" for c in (least, most)
    ]
    title = {
        "stop": "Bands stopped",
        "remove": "Bands removed",
        "interpolate": "Bands interpolated",
    }[kind]
    words = {
        "stop": "no longer rotated",
        "remove": "removed from logits",
        "interpolate": "rotated more slowly",
    }[kind]
    caption = f"Loss with a band {words}, minus the loss as it is, nats per token, without training. Means over seeds."
    alt = f"Least and greatest change at {lengths[-1]} tokens: {'; '.join(ends)}."
    return Picture(
        kind, title, alt, caption, draw, (min(2.4 * len(names) + 0.6, 13), 1.2 + 0.3 * len(labels))
    )
