"""The page of the paper's statements: what each says, the numbers that bear it out, and Figures 2 and 8."""

import json
import pathlib

import numpy as np

from prope.analysis import theory
from prope.analysis.statements import BOUNDS, HEAD_DIM, LENGTH, statements
from prope.html.drawing import Picture, line, styles
from prope.html.page import document, e, figures, html_table, section
from prope.rope import frequencies

PERCENTAGES = (1.0, 0.75, 0.25, 0.0)

FOOT = """<p>Barbero et al., <cite>Round and Round We Go! What makes Rotary Positional Encodings useful?</cite>, ICLR
2025. The constructions are functions of <code>prope/theory.py</code>; every number is in <code>theory.json</code>,
beside this page. Made by <code>python -m prope.analyze --theory</code>.</p>
"""


def write(folder: str | pathlib.Path) -> dict:
    """Writes index.html, theory.json and the figures as PNG files into a folder that it makes.

    Returns:
      `output`, the path of the page, and `statements`, as `statements.statements` returns them.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tried, curves = statements(), {"figure_2": figure_2_curves(), "figure_8": figure_8_curves()}
    drawn = [figure_2(curves["figure_2"]), figure_8(curves["figure_8"])]
    shown_as = figures(folder, drawn)
    written = {"head_dim": HEAD_DIM, "max_wavelength": 10_000, "statements": tried, "figures": curves}
    (folder / "theory.json").write_text(json.dumps(written, indent=1) + "\n")
    held = sum(found["holds"] for found in tried)
    head = (
        "<h1>What rotation can do, and what it cannot</h1>\n"
        f'<p class="lead">{held} of {len(tried)} statements of the p-RoPE paper hold in the numbers below.</p>\n'
        f'<p class="soft">Heads as Gemma’s: d = {HEAD_DIM}, base wavelength 10 000; float64.</p>\n'
    )
    parts = [section(picture.title, shown_as[picture.name]) for picture in drawn]
    parts = [section("Statements", statement_table(tried)), *parts]
    output = folder / "index.html"
    output.write_text(document("The statements of the p-RoPE paper", head, parts, FOOT))
    return {"output": str(output), "statements": tried}


def statement_table(tried: list[dict]) -> str:
    """The statements, one a row."""
    rows = []
    for found in tried:
        numbers = "".join(f"<li>{e(name)}: {e(shown(value))}</li>" for name, value in found["numbers"].items())
        holds = '<span class="good">holds</span>' if found["holds"] else '<span class="bad">does not hold</span>'
        name = f"{e(found['statement'])}<br>{holds}"
        rows.append(("", [name, f'<span class="prose">{e(found["says"])}</span>', f'<ul class="prose">{numbers}</ul>']))
    head = ["statement", "what it says", "what was computed"]
    return html_table("Each is tried with the construction of its proof.", head, rows, text=[1, 2])


def shown(value) -> str:
    """A number, or several, in five digits."""
    if isinstance(value, list | tuple):
        return ", ".join(f"({shown(item)})" if isinstance(item, tuple) else shown(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.5g}".replace("-", "−")  # a sign at which no line breaks


def figure_2_curves() -> dict:
    """Logits at distances 0 .. LENGTH-1, of vectors of ones for several p, and of Gaussian ones for RoPE."""
    distances, turns = np.arange(LENGTH), {p: frequencies(HEAD_DIM, rope_percentage=p) for p in PERCENTAGES}
    ones = [{"p": p, "logit": theory.all_ones_curve(distances, turns[p]).tolist()} for p in PERCENTAGES]
    return {"ones": ones, "gaussian": listed(theory.gaussian_curve(distances, turns[1.0]))}


def figure_8_curves() -> dict:
    """Logits under random positions, by their upper bound."""
    found = {bound: theory.randomised_curves(BOUNDS[0], bound, frequencies(HEAD_DIM)) for bound in BOUNDS}
    return {kind: [{"bound": b, **listed(c[kind])} for b, c in found.items()] for kind in ("ones", "gaussian")}


def listed(curve: tuple[np.ndarray, np.ndarray]) -> dict:
    """A mean and its standard error, for JSON."""
    return {"mean": curve[0].tolist(), "standard_error": curve[1].tolist()}


def points(curve: dict) -> dict:
    """The same, for `pictures.line`."""
    return dict(enumerate(zip(curve["mean"], curve["standard_error"], strict=True)))


def figure_2(curves: dict) -> Picture:
    """Figure 2 of the paper, with p-RoPE beside RoPE."""

    def draw(made, theme) -> None:
        left, right = made.subplots(1, 2)
        look = styles([f"p = {curve['p']:g}" for curve in curves["ones"]], theme)
        for (name, style), curve in zip(look.items(), curves["ones"], strict=True):
            left.plot(curve["logit"], label=name, markevery=len(curve["logit"]) // 8, **style)
        line(right, points(curves["gaussian"]), look["p = 1"] | {"marker": ""}, "p = 1")
        left.set(title="(a) queries and keys of ones", ylabel="q · k / d", ylim=(-0.1, 1.1))
        right.set(title="(b) Gaussian queries and keys", ylabel="q · k / √d, mean over draws", ylim=(-0.6, 0.6))
        for axes in (left, right):
            axes.set_xlabel("distance (tokens)")
            axes.legend(ncols=2)

    alt = (
        f"Logits at distances 0 to {LENGTH - 1}. Of ones they fall, at the right end to "
        + ", ".join(f"{curve['logit'][-1]:.3f} for p = {curve['p']:g}" for curve in curves["ones"])
        + f"; the mean of Gaussian ones stays within {np.abs(curves['gaussian']['mean']).max():.3f} of 0."
    )
    caption = (
        "Vectors of ones decay with distance (a), the less the fewer pairs turn; Gaussian ones do not (b: 4000 draws, "
        "the same at every distance, of standard deviation 1; the band is the standard error of their mean)."
    )
    return Picture("figure_2", "Figure 2: does RoPE decay with distance?", alt, caption, draw)


def figure_8(curves: dict) -> Picture:
    """Figure 8 of the paper."""

    def draw(made, theme) -> None:
        panels = dict(zip(("ones", "gaussian"), made.subplots(1, 2), strict=True))
        look = styles([f"L = {bound:,}" for bound in BOUNDS], theme)
        for kind, axes in panels.items():
            for (name, style), curve in zip(look.items(), curves[kind], strict=True):
                line(axes, points(curve), style | {"lw": 1.2}, name)
            axes.set_xlabel("tokens from the key to the query")
        panels["ones"].set(title="(a) queries and keys of ones", ylabel="q · k / d", ylim=(-0.1, 1.1))
        panels["gaussian"].set(
            title="(b) Gaussian queries and keys", ylabel="q · k / √d, mean over draws", ylim=(-0.6, 0.6)
        )
        for axes in panels.values():
            axes.legend(ncols=2, title="upper bound")

    ends = ", ".join(f"{c['mean'][-1]:.3f} for {c['bound']}" for c in curves["ones"])
    largest = max(np.abs(curve["mean"]).max() for curve in curves["gaussian"])
    alt = (
        f"Logits of {BOUNDS[0]} tokens at random positions. Of ones they fall the sooner the higher the upper bound, "
        f"at the right end to {ends}; the means of Gaussian ones stay within {largest:.2f} of 0 for every bound."
    )
    caption = (
        f"{BOUNDS[0]} tokens at sorted, distinct random positions below L: ones decay sooner with a higher L (a), "
        "Gaussian vectors still do not (b). Means over 256 draws; bands are their standard errors."
    )
    return Picture("figure_8", "Figure 8: random positions", alt, caption, draw)
