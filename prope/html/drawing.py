"""Draws pictures once, as PNG and as SVG whose colours the page's style sheet sets for light and dark."""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable

import numpy as np

MARKERS = "osD^vP*X"
DASHES = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
)  # tell lines apart that lie on one another
TEXT, GRID, GROUND = "#24292f", "#d8dee4", "#ffffff"
BORDER = "#ff4d4d"  # seen on either ground and on viridis
_STEPS = 16  # colours of groups
_NARROW = 4.4  # inches, a phone's width at 72 pixels each
_MARGIN = 1.4  # inches of a panel that its title, labels and scale take
_SETTINGS = {
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": GRID,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.formatter.useoffset": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "prope",
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing with its name, its texts and its size in inches."""

    name: str
    title: str
    alt: str
    caption: str
    draw: Callable  # of a matplotlib Figure
    size: tuple[float, float] = (9.6, 3.9)

    def render(self) -> tuple[bytes, str, list[dict]]:
        """Draws the picture: (a PNG file in light colours, <svg> elements: one wide, one narrow, `cells`)."""
        import matplotlib.figure

        png, elements = io.BytesIO(), ""
        for kind, size, points in (
            ("wide", self.size, 10),
            ("narrow", (_NARROW, 0.8 * _NARROW), 11.5),
        ):
            svg = io.StringIO()
            with matplotlib.rc_context(_SETTINGS | {"font.size": points}):
                figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
                self.draw(figure)
                if kind == "wide":
                    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                    values = cells(figure)
                figure.savefig(
                    svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
                )
            elements += self._inline(svg.getvalue(), kind)
        return png.getvalue(), elements, values

    def _inline(self, svg: str, kind: str) -> str:
        """Makes an SVG file part of a page: no header, ids of its own, colours as CSS variables."""
        box, content = re.search(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>(.*)', svg, re.DOTALL).groups()
        content = re.sub(r"<defs>\s*<style.*?</defs>", "", content, count=1, flags=re.DOTALL)
        referred = set(re.findall(r'(?:href="|url\()#([^")]+)', content))
        content = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in referred else "", content)
        content = content.replace("xlink:href=", "href=")
        content = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-{kind}-", content)
        variables = {light: f"var(--{name})" for name, (light, _) in palette().items()}
        content = re.sub(r' font-family: [^;]*;| transform="rotate\(-0 [^"]*"', "", content)
        least, most = (
            round(scale * float(box.split()[2])) for scale in (1.11, 1.6)
        )  # labels of 11 to 16 pixels
        style = f' style="min-width: {least}px; max-width: {most}px"' if kind == "wide" else ""
        content = re.sub(r"#[0-9a-f]{6}\b", lambda m: variables.get(m[0], m[0]), content)
        return f'<svg class="{kind}"{style} {box}>{content}'


def panels(
    figure,
    columns: int,
    rows: int = 1,
    wrap=math.inf,
    stacked: bool = False,
    labels: int = 0,
    **options,
):
    """Adds axes [rows, columns], or one row that wraps; stacked, or on a phone with room for labels, in one column."""
    if (wide := figure.get_figwidth() > _NARROW) and not stacked:
        across = min(columns, wrap)
        axes = figure.subplots(rows * -(-columns // across), across, squeeze=False, **options)
        axes = (
            axes.reshape(-1, rows, across).swapaxes(0, 1).reshape(rows, -1)
        )  # rows stand below each other
        for unused in axes[:, columns:].flat:
            unused.set_visible(False)
        return axes[:, :columns]
    if not wide:
        figure.set_size_inches(
            _NARROW, max(0.8 * _NARROW, 1.15 * height(labels)) * columns * (0.5 + 0.5 / rows)
        )
    shared = {name: value for name, value in options.items() if name.startswith("share")}
    return figure.subplots(columns, rows, squeeze=False, **shared).T


@functools.cache
def palette() -> dict[str, tuple[str, str]]:
    """Returns the colours of pictures by the name of their CSS variable: (light, dark)."""
    import matplotlib
    from matplotlib.colors import rgb2hex

    # Viridis reads in order with every kind of colour vision and in grey; its palest and darkest ends need contrast.
    viridis = matplotlib.colormaps["viridis"]
    groups = {
        f"group-{i}": (rgb2hex(viridis(0.76 * x)), rgb2hex(viridis(0.36 + 0.64 * x)))
        for i, x in enumerate(np.linspace(0, 1, _STEPS))
    }
    return {
        "text": (TEXT, "#d4dae1"),
        "line": (GRID, "#363d47"),
        "card": (GROUND, "#161b22"),
        **groups,
    }


def styles(names: list[str]) -> dict[str, dict]:
    """Gives every group a colour, a marker and dashes, in their order, as keyword arguments of `axes.plot`."""
    last = len(names) - 1
    steps = [round((_STEPS - 1) * (i / last if last else 0.5)) for i in range(len(names))]
    groups = zip(names, steps, itertools.cycle(MARKERS), itertools.cycle(DASHES), strict=False)
    return {
        name: {
            "color": palette()[f"group-{step}"][0],
            "marker": marker,
            "lw": 1.7,
            "ms": 4.5,
            "ls": dashes,
        }
        for name, step, marker, dashes in groups
    }


def line(axes, points: dict, style: dict, label: str | None = None) -> None:
    """Plots means with their standard errors as a band, from {x: (mean, error or None)}."""
    x, y = list(points), [value for value, _ in points.values()]
    apart = max(
        len(x) // 8, 1
    )  # points between markers, which start where those of other lines do not
    axes.plot(x, y, label=label, markevery=(len(axes.lines) % apart, apart), **style)
    if None not in (errors := [error for _, error in points.values()]):
        axes.fill_between(
            x, np.subtract(y, errors), np.add(y, errors), color=style["color"], alpha=0.18, lw=0
        )


def show_image(
    axes, values, power: float = 1, vmin: float | None = 0, vmax: float | None = None, **options
):
    """Shows values [rows, columns] as colours by their power, from 0 by default; returns the image."""
    from matplotlib.colors import PowerNorm

    axes.grid(False)
    options |= {
        "norm": PowerNorm(power, vmin, vmax),
        "cmap": "viridis",
        "interpolation": "none",
        "gid": "cells",
    }
    return axes.imshow(values, **options)


def label_cells(axes, values, form: Callable[[float], str], bright: float, **options) -> None:
    """Writes the values of an image, none where there is none, dark on the colours of values above `bright`."""
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = (
                "#020202" if value > bright else "#fdfdfd"
            )  # on either ground: the page changes black and white
            axes.text(column, row, form(value), ha="center", va="center", color=colour, **options)


def cells(figure) -> list[dict]:
    """Lists the maps of a drawing for `cells.js`, which reads out a cell; values in three digits."""
    found, row = [], ""
    for axes in figure.axes:
        row = axes.get_ylabel() or row  # panels beside the first leave it out
        for image in (image for image in axes.images if image.get_gid() == "cells"):
            values, both = (
                image.get_array().astype(float).filled(math.nan),
                (axes.yaxis, axes.xaxis),
            )
            counted = [
                (axis.get_major_formatter(), range(n))
                for axis, n in zip(both, values.shape, strict=True)
            ]
            labels = [
                [text.replace(r"\$", "$") for text in form.format_ticks(n)] for form, n in counted
            ]
            rows = [
                " ".join("" if math.isnan(v) else f"{v:.3g}" for v in line).rstrip()
                for line in values.tolist()
            ]
            names = row, axes.get_xlabel().split(",")[0]
            found.append(
                {"title": axes.get_title("left"), "names": names, "labels": labels, "values": rows}
            )
    return found


def height(rows: int) -> float:
    """Returns the inches of a panel whose rows all have a label; of more than 64 rows, every other one has."""
    return _MARGIN + 0.165 * min(rows, 64)


def label_ticks(axis, labels: list, **options) -> None:
    """Labels the rows or the columns of an image, as many as have room."""
    grid, figure = axis.axes.get_gridspec(), axis.axes.figure
    inches = (
        figure.get_figheight() / grid.nrows
        if axis.axis_name == "y"
        else figure.get_figwidth() / grid.ncols
    )
    room = 72 * max(inches - _MARGIN, 1) / (1.15 * axis.label.get_size())  # for so many labels
    texts = [str(label).replace("$", r"\$") for label in labels]
    axis.set_ticks(range(0, len(labels), math.ceil(len(labels) / room)))
    axis.set_major_formatter(lambda place, _: texts[round(place)])  # `cells` asks for all of them
    axis.set_tick_params(**options)


def heat(axes, values, title: str, rows: str, labels: list, rotated: list[int] | None) -> None:
    """Draws a map of [rows, P] with its scale, and a line where every row's rotated pairs end."""
    axes.figure.colorbar(show_image(axes, values, aspect="auto"), ax=axes, pad=0.02, fraction=0.06)
    axes.set(xlabel="pair, fastest first", ylabel=rows, title=title)
    axes.locator_params(axis="x", integer=True)
    label_ticks(axes.yaxis, labels)
    if rotated is not None and min(rotated) < values.shape[1]:
        edges = np.arange(len(rotated) + 1) - 0.5
        axes.stairs(
            np.array(rotated) - 0.5,
            edges,
            orientation="horizontal",
            color=BORDER,
            lw=2,
            baseline=None,
        )


def legend(axes) -> None:
    """Adds a legend, below all panels where it is too long to stand in one."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= 6:
        axes.legend(loc="best")
    else:
        figure, inches = axes.figure, 0.7 + 0.1 * max(map(len, labels))  # of the widest entry
        columns = max(int(figure.get_figwidth() // inches), 1)
        figure.set_figheight(figure.get_figheight() + 0.25 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
