"""Writes the page of the paper's statements: each with its numbers, and Figures 2 and 8."""

import json
import pathlib

import numpy as np

from prope.analysis import theory
from prope.analysis.statements import BOUNDS, HEAD_DIM, LENGTH, statements
from prope.html import page
from prope.html.drawing import Picture, line, styles
from prope.rope import frequencies

PERCENTAGES = (1.0, 0.75, 0.25, 0.0)


def write(folder: str | pathlib.Path) -> dict:
    """Writes index.html, theory.json and the figures as PNG files into a folder that it makes.

    Returns:
      `output`, the path of the page, and `statements`, as `statements.statements` returns them.
    """
    folder = pathlib.Path(folder)
    tried, curves = statements(), {"figure_2": figure_2_curves(), "figure_8": figure_8_curves()}
    pictures = [figure_2(curves["figure_2"]), figure_8(curves["figure_8"])]
    output = page.write(folder, "theory", pictures, statements=tried, head_dim=HEAD_DIM)
    written = {"head_dim": HEAD_DIM, "max_wavelength": 10_000, "statements": tried, "figures": curves}
    (folder / "theory.json").write_text(json.dumps(written, indent=1) + "\n")
    return {"output": str(output), "statements": tried}


def figure_2_curves() -> dict:
    """Computes logits at distances 0 .. LENGTH-1, of ones for several p, and of Gaussian vectors for RoPE."""
    distances, freqs = np.arange(LENGTH), {p: frequencies(HEAD_DIM, rope_percentage=p) for p in PERCENTAGES}
    ones = [{"p": p, "logit": theory.all_ones_curve(distances, freqs[p]).tolist()} for p in PERCENTAGES]
    return {"ones": ones, "gaussian": to_json(theory.gaussian_curve(distances, freqs[1.0]))}


def figure_8_curves() -> dict:
    """Computes logits under random positions, by their upper bound."""
    curves = {bound: theory.randomised_curves(BOUNDS[0], bound, frequencies(HEAD_DIM)) for bound in BOUNDS}
    return {kind: [{"bound": b, **to_json(c[kind])} for b, c in curves.items()] for kind in ("ones", "gaussian")}


def to_json(curve: tuple[np.ndarray, np.ndarray]) -> dict:
    """Makes a mean and its standard error JSON."""
    return {"mean": curve[0].tolist(), "standard_error": curve[1].tolist()}


def curves_picture(name: str, title: str, alt: str, caption: str, panels: dict, xlabel: str, legend: str) -> Picture:
    """Draws curves, by label, for vectors of ones on the left and for Gaussian ones on the right."""
    labels = {
        "ones": {"title": "(a) queries and keys of ones", "ylabel": "q · k / d", "ylim": (-0.1, 1.1)},
        "gaussian": {"title": "(b) Gaussian queries and keys", "ylabel": "q · k / √d, mean over draws",
                     "ylim": (-0.6, 0.6)},
    }  # fmt: skip

    def draw(figure) -> None:
        style = styles(list(panels["ones"]))
        for axes, (kind, curves) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            for label, curve in curves.items():
                errors = curve.get("standard_error") or [None] * len(curve["mean"])
                line(axes, dict(enumerate(zip(curve["mean"], errors, strict=True))), style[label] | {"lw": 1.2}, label)
            axes.set(xlabel=xlabel, **labels[kind])
            axes.legend(ncols=2, title=legend)

    return Picture(name, title, alt, caption, draw)


def figure_2(curves: dict) -> Picture:
    """Draws Figure 2 of the paper, with p-RoPE beside RoPE."""
    ones = {f"p = {curve['p']:g}": {"mean": curve["logit"]} for curve in curves["ones"]}
    alt = (
        f"Logits at distances 0 to {LENGTH - 1}. Of ones they fall, at the right end to "
        + ", ".join(f"{curve['mean'][-1]:.3f} for {label}" for label, curve in ones.items())
        + f"; the mean of Gaussian ones stays within {np.abs(curves['gaussian']['mean']).max():.3f} of 0."
    )
    caption = (
        "Vectors of ones decay with distance (a), the less the fewer pairs rotate; Gaussian ones do not (b: 4000 "
        "draws, the same at every distance, of standard deviation 1; the band is the standard error of their mean)."
    )
    panels = {"ones": ones, "gaussian": {"p = 1": curves["gaussian"]}}
    title = "Figure 2: does RoPE decay with distance?"
    return curves_picture("figure_2", title, alt, caption, panels, "distance (tokens)", "")


def figure_8(curves: dict) -> Picture:
    """Draws Figure 8 of the paper."""
    panels = {kind: {f"L = {curve['bound']:,}": curve for curve in curves[kind]} for kind in ("ones", "gaussian")}
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
    xlabel, legend = "tokens from the key to the query", "upper bound"
    return curves_picture("figure_8", "Figure 8: random positions", alt, caption, panels, xlabel, legend)
