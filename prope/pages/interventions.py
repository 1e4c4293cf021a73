"""Draws maps of how the loss changes by interventions on the encoding."""

from operator import attrgetter

import numpy as np

from prope.pages.drawing import Picture, arrange, label_cells, label_ticks, panels, show_image
from prope.sweep.interventions import RESCALED, Change

WORDS = {  # by kind: the title of its picture, and what is changed
    "stop": ("Bands stopped", "a band no longer rotated"),
    "remove": ("Bands removed", "a band removed from logits"),
    "interpolate": ("Bands interpolated", "a band rotated more slowly"),
    RESCALED: ("Encodings rescaled", "the encoding rescaled by --encoding"),
}


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
            axes.set_ylabel("encoding" if kind == RESCALED else "pairs, fastest first")

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
