"""Draws pictures once, as PNG and as SVG whose colours the page's style sheet sets for light and dark."""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable

MARKERS = "osD^vP*X"
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))  # tell lines apart that lie on one another
TEXT, GRID, GROUND = "#24292f", "#d8dee4", "#ffffff"
BORDER = "#ff4d4d"  # seen on either ground and on viridis
_STEPS = 16  # colours of groups
_NARROW = 4.4  # inches, a phone's width at 72 pixels each
_SETTINGS = {
    "figure.facecolor": GROUND, "axes.facecolor": GROUND, "axes.edgecolor": GRID, "text.color": TEXT,
    "axes.labelcolor": TEXT, "axes.titlecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "grid.color": GRID,
    "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.linewidth": 0.8, "axes.titlesize": "medium", "axes.titlelocation": "left",
    "legend.frameon": False, "xtick.major.size": 0, "ytick.major.size": 0, "axes.formatter.useoffset": False,
    "svg.fonttype": "none", "svg.hashsalt": "prope",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing with its name, its texts and its size in inches."""

    name: str
    title: str
    alt: str
    caption: str
    draw: Callable  # of a matplotlib Figure
    size: tuple[float, float] = (9.6, 3.9)

    def render(self) -> tuple[bytes, str]:
        """Draws the picture: (a PNG file in light colours, <svg> elements for a page: one wide, one narrow)."""
        import matplotlib.figure

        png, elements = io.BytesIO(), ""
        for kind, size, points in (("wide", self.size, 10), ("narrow", (_NARROW, 0.8 * _NARROW), 11.5)):
            svg = io.StringIO()
            with matplotlib.rc_context(_SETTINGS | {"font.size": points}):
                figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
                self.draw(figure)
                if kind == "wide":
                    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
                figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            elements += self._inline(svg.getvalue(), kind)
        return png.getvalue(), elements

    def _inline(self, svg: str, kind: str) -> str:
        """Makes an SVG file part of a page: no header, ids of its own, colours as CSS variables."""
        box, content = re.search(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>(.*)', svg, re.DOTALL).groups()
        content = re.sub(r"<defs>\s*<style.*?</defs>", "", content, count=1, flags=re.DOTALL)
        referred = set(re.findall(r'(?:href="|url\()#([^")]+)', content))
        content = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in referred else "", content)
        content = content.replace("xlink:href=", "href=")
        content = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-{kind}-", content)
        variables = {light: f"var(--{name})" for name, (light, _) in palette().items()}
        least = round(1.11 * float(box.split()[2]))  # pixels at which its labels have 11
        style = f' style="min-width: {least}px"' if kind == "wide" else ""
        content = re.sub(r"#[0-9a-f]{6}\b", lambda m: variables.get(m[0], m[0]), content)
        return f'<svg class="{kind}"{style} {box}>{content}'


def panels(figure, columns: int, rows: int = 1, **options):
    """Adds axes [rows, columns]; in the narrow figure for a phone, columns lie one below the other."""
    if figure.get_figwidth() > _NARROW:
        return figure.subplots(rows, columns, squeeze=False, **options)
    figure.set_size_inches(_NARROW, 0.8 * _NARROW * columns / rows)
    shared = {name: value for name, value in options.items() if name.startswith("share")}
    return figure.subplots(columns, rows, squeeze=False, **shared).T


@functools.cache
def palette() -> dict[str, tuple[str, str]]:
    """Returns the colours of pictures by the name of their CSS variable: (light, dark)."""
    import matplotlib
    from matplotlib.colors import rgb2hex

    # Viridis reads in order with every kind of colour vision and in grey; its palest and darkest ends need contrast.
    viridis = matplotlib.colormaps["viridis"]
    shares = [i / (_STEPS - 1) for i in range(_STEPS)]
    groups = {f"group-{i}": (rgb2hex(viridis(0.76 * x)), rgb2hex(viridis(0.36 + 0.64 * x)))
              for i, x in enumerate(shares)}  # fmt: skip
    return {"text": (TEXT, "#d4dae1"), "line": (GRID, "#363d47"), "card": (GROUND, "#161b22"), **groups}


def styles(names: list[str]) -> dict[str, dict]:
    """Gives every group a colour, a marker and dashes, in their order, as keyword arguments of `axes.plot`."""
    last = len(names) - 1
    steps = [round((_STEPS - 1) * (i / last if last else 0.5)) for i in range(len(names))]
    groups = zip(names, steps, itertools.cycle(MARKERS), itertools.cycle(DASHES), strict=False)
    return {
        name: {"color": palette()[f"group-{step}"][0], "marker": marker, "lw": 1.7, "ms": 4.5, "ls": dashes}
        for name, step, marker, dashes in groups
    }


def line(axes, points: dict, style: dict, label: str | None = None) -> None:
    """Plots means with their standard errors as a band, from {x: (mean, error or None)}."""
    x, y = list(points), [value for value, _ in points.values()]
    apart = max(len(x) // 8, 1)  # points between markers, which start where those of other lines do not
    axes.plot(x, y, label=label, markevery=(len(axes.lines) % apart, apart), **style)
    if None not in (errors := [error for _, error in points.values()]):
        low, high = ([v + sign * e for v, e in zip(y, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)


def show_image(axes, values, **limits):
    """Shows values [rows, columns] as colours, from 0 by default; returns the image."""
    axes.grid(False)
    return axes.imshow(values, cmap="viridis", interpolation="none", **{"vmin": 0} | limits)


def label_ticks(axis, labels: list, **options) -> None:
    """Labels the rows or the columns of an image, as many as have room."""
    grid, figure = axis.axes.get_gridspec(), axis.axes.figure
    inches = figure.get_figheight() / grid.nrows if axis.axis_name == "y" else figure.get_figwidth() / grid.ncols
    step = max(math.ceil(0.155 * len(labels) / inches), 1)
    axis.set_ticks(range(0, len(labels), step), [str(label).replace("$", r"\$") for label in labels[::step]], **options)


def heat(axes, values, title: str, rows: str, labels: list, rotated: list[int] | None) -> None:
    """Draws a map of [rows, P] with its scale, and a line where every row's rotated pairs end."""
    axes.figure.colorbar(show_image(axes, values, aspect="auto"), ax=axes, pad=0.02)
    axes.set(xlabel="pair, fastest first", ylabel=rows, title=title)
    axes.locator_params(axis="x", integer=True)
    label_ticks(axes.yaxis, labels)
    if rotated is not None and min(rotated) < values.shape[1]:
        edges = [row - 0.5 for row in range(len(rotated) + 1)]
        ends = [end - 0.5 for end in rotated]
        axes.stairs(ends, edges, orientation="horizontal", color=BORDER, lw=2, baseline=None)


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
