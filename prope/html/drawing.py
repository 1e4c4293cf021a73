"""Pictures that are drawn once for a light and once for a dark ground, each with a text that says what it shows."""

import dataclasses
import io
from collections.abc import Callable

import matplotlib
import matplotlib.figure

MARKERS = "osD^vP*X"


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of the ground, the text and the lines, which are taken from a part of a colour map."""

    ground: str
    text: str
    grid: str
    part: tuple[float, float]


# Viridis reads in order with every kind of colour vision and in grey; its palest and darkest ends need contrast.
THEMES = {
    "light": Theme("#ffffff", "#24292f", "#d8dee4", (0.0, 0.76)),
    "dark": Theme("#161b22", "#d4dae1", "#363d47", (0.36, 1.0)),
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing that has yet to be given its theme."""

    name: str
    title: str
    alt: str
    caption: str
    draw: Callable[[matplotlib.figure.Figure, Theme], None]
    size: tuple[float, float] = (9.6, 3.9)

    def png(self, theme: str) -> bytes:
        """The picture as a file."""
        look = THEMES[theme]
        settings = {
            "figure.facecolor": look.ground, "axes.facecolor": look.ground, "axes.edgecolor": look.grid,
            "text.color": look.text, "axes.labelcolor": look.text, "axes.titlecolor": look.text,
            "xtick.color": look.text, "ytick.color": look.text, "grid.color": look.grid, "axes.grid": True,
            "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.linewidth": 0.8,
            "font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left", "legend.frameon": False,
            "xtick.major.size": 0, "ytick.major.size": 0, "axes.formatter.useoffset": False,
        }  # fmt: skip
        with matplotlib.rc_context(settings):
            figure = matplotlib.figure.Figure(figsize=self.size, layout="constrained")
            self.draw(figure, look)
            made = io.BytesIO()
            figure.savefig(made, format="png", dpi=150, metadata={"Software": None})
        return made.getvalue()


def styles(names: list[str], theme: Theme) -> dict[str, dict]:
    """A colour and a marker for every group, in the order of the sweep."""
    low, high = theme.part
    last = len(names) - 1
    colours = [
        matplotlib.colormaps["viridis"](low + (high - low) * (i / last if last else 0.5)) for i in range(last + 1)
    ]
    return {
        name: {"color": colour, "marker": MARKERS[i % len(MARKERS)], "lw": 1.7, "ms": 4.5}
        for i, (name, colour) in enumerate(zip(names, colours, strict=True))
    }


def line(axes, points: dict, style: dict, label: str | None = None) -> None:
    """A mean with its standard error as a band, with a marker here and there."""
    x, y = list(points), [value for value, _ in points.values()]
    axes.plot(x, y, label=label, markevery=max(len(x) // 8, 1), **style)
    errors = [error for _, error in points.values()]
    if None not in errors:
        low, high = ([v + sign * e for v, e in zip(y, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)
