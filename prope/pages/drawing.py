"""Draws pictures with matplotlib, in one style, as PNG files."""

import dataclasses
import io
import itertools
import math
import re
from collections.abc import Callable

import matplotlib.figure
import numpy as np
from matplotlib.colors import PowerNorm, to_hex
from matplotlib.text import Text

# Seven and four have no common divisor, so 28 lines in a row look different.
MARKERS = "osD^vP*"
DASHES = ("-", "--", "-.", ":")
TEXT = "#24292f"
GRID = "#d8dee4"
BORDER = "#ff4d4d"  # can be seen on white and on viridis
STYLE = {
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.formatter.useoffset": False,
    "text.parse_math": False,  # a $ in a name is a $
    "savefig.dpi": 150,
}
PHONE = 4.2  # inches; on a page at most so wide, a picture fits a phone's screen
_MARGIN = 1.4  # inches of a panel that its title, labels and scale take


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing with its name, its texts and its size in inches."""

    name: str
    title: str
    alt: str
    caption: str
    draw: Callable  # takes a matplotlib Figure
    size: tuple[float, float] = (PHONE, 3.2)

    @property
    def file_name(self) -> str:
        """The name of its file: that of the picture, without characters such as /."""
        return re.sub(r"[^\w.=-]", "_", self.name) + ".png"

    def render(self) -> bytes:
        """Returns the picture as a PNG file."""
        png = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure = matplotlib.figure.Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            for text in figure.findobj(Text):
                text.set_text(escape_invisible(text.get_text()))
            figure.savefig(png, format="png", metadata={"Software": None})
        return png.getvalue()


def escape_invisible(text: str) -> str:
    """Escapes characters that are not seen or that move others, as in Python: "\\x00".

    They are control characters, bidirectional marks and lone surrogates; line breaks stay.
    """
    return "".join(
        character
        if character.isprintable() or character == "\n"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def arrange(count: int, most: int = 5) -> tuple[int, int]:
    """Returns columns and rows of `count` panels, of which a page has room for `most` in a row."""
    rows = math.ceil(count / most)
    return math.ceil(count / rows), rows


def panels(figure, columns: int, rows=1, wrap=math.inf, **options) -> np.ndarray:
    """Adds axes [rows, columns]; after `wrap` columns the others stand below, all rows of them."""
    across = min(columns, wrap)
    blocks = math.ceil(columns / across)
    axes = figure.subplots(blocks * rows, across, squeeze=False, **options)
    axes = axes.reshape(blocks, rows, across)
    axes = axes.swapaxes(0, 1).reshape(rows, blocks * across)
    for unused in axes[:, columns:].flat:
        unused.set_visible(False)
    return axes[:, :columns]


def styles(names: list[str]) -> dict[str, dict]:
    """Gives every name a colour, a marker and dashes, as keyword arguments of `axes.plot`."""
    # Viridis reads in order with every kind of colour vision and in grey; its palest end is faint.
    viridis = matplotlib.colormaps["viridis"]
    colours = viridis(np.linspace(0, 0.76, len(names)))
    looks = zip(names, colours, itertools.cycle(MARKERS), itertools.cycle(DASHES), strict=False)
    return {
        name: {"color": to_hex(colour), "marker": marker, "ls": dashes, "lw": 1.7, "ms": 4.5}
        for name, colour, marker, dashes in looks
    }


def line(axes, points: dict, style: dict, label: str | None = None) -> None:
    """Plots {x: (mean, error or None)}, with the errors as a band."""
    x = list(points)
    means, errors = zip(*points.values(), strict=True)
    axes.plot(x, means, label=label, markevery=max(len(x) // 8, 1), **style)
    errors = np.array(errors, float)  # nan of None
    low = means - errors
    high = means + errors
    axes.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)


def show_image(axes, values, power: float = 1, vmin=0, vmax=None, cmap="viridis", **options):
    """Shows values [rows, columns] as colours by their power; returns the image."""
    axes.grid(False)
    return axes.imshow(
        values, norm=PowerNorm(power, vmin, vmax), cmap=cmap, interpolation="none", **options
    )


def label_cells(
    axes, values, form: Callable[[float], str], is_bright: Callable[[float], bool]
) -> None:
    """Writes the finite values of an image, dark where the colour of the value is bright."""
    axes.patch.set(hatch="///", edgecolor=GRID)  # seen where there is no value
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "black" if is_bright(value) else "white"
            axes.text(column, row, form(value), ha="center", va="center", color=colour)


def height(rows: int) -> float:
    """Returns the inches of a panel whose rows are labelled: all up to 64, else every other one."""
    return _MARGIN + 0.165 * min(rows, 64)


def label_ticks(axis, labels: list, **options) -> None:
    """Labels the rows or the columns of an image, as many as have room."""
    grid = axis.axes.get_gridspec()
    figure = axis.axes.figure
    if axis.axis_name == "y":
        inches = figure.get_figheight() / grid.nrows
    else:
        inches = figure.get_figwidth() / grid.ncols
    inches_of_label = 1.15 * axis.label.get_size() / 72
    room = max(inches - _MARGIN, 1) / inches_of_label
    step = math.ceil(len(labels) / room)
    axis.set_ticks(
        range(0, len(labels), step), [escape_invisible(str(label)) for label in labels[::step]]
    )
    axis.set_tick_params(**options)


def draw_heatmap(
    axes, values, title: str, rows: str, labels: list, rotated: np.ndarray | None
) -> None:
    """Draws a map of [rows, P] with its scale, and borders of the pairs that are not `rotated`."""
    image = show_image(axes, values, aspect="auto")
    axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, label="2-norm")
    axes.set(xlabel="pair, fastest first", ylabel=rows, title=title)
    axes.locator_params(axis="x", integer=True)
    label_ticks(axes.yaxis, labels)
    if rotated is None or rotated.all():
        return
    row, pair = np.nonzero(np.diff(rotated, axis=1, prepend=True))
    axes.vlines(pair - 0.5, row - 0.5, row + 0.5, color=BORDER, lw=2)


def legend(axes) -> None:
    """Adds a legend below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(int(axes.figure.get_figwidth() // _widest_entry(labels)), 1)
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _widest_entry(labels: list[str]) -> float:
    """Returns the inches that an entry of a legend takes."""
    return 0.7 + 0.1 * max(map(len, labels))


def stacked_size(rows: int, labels: list[str]) -> tuple[float, float]:
    """Returns the inches of panels below one another, with a legend; for a phone if it can be."""
    entry = _widest_entry(labels)
    width = max(PHONE, entry)
    return width, 3.2 * rows + 0.2 * math.ceil(len(labels) / (width // entry))
