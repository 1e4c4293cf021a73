"""Writes the page of the paper's statements and of its Figures 2 and 8, for Gemma's head_dim."""

import functools
import json

import numpy as np
from etils import epath

from prope.analysis import theory
from prope.html import page
from prope.html.drawing import Picture, line, panels, styles
from prope.rope import frequencies

HEAD_DIM = 256
LENGTH = 1024
PERCENTAGES = (1.0, 0.75, 0.25, 0.0)
TOKENS = 256  # tokens in Figure 8
BOUNDS = (256, 1024, 4096, 16384)  # upper bounds of their random positions


def write(folder: str | epath.Path) -> dict:
    """Writes index.html, theory.json and the figures as PNG files into a folder that it makes.

    Returns `output`, the path of the page, and `statements`, which are `theory.STATEMENTS`.
    """
    folder = epath.Path(folder)
    picture_2, curves_2 = figure_2()
    picture_8, curves_8 = figure_8()
    shared = {"statements": theory.STATEMENTS, "head_dim": HEAD_DIM}
    output = page.write(folder, "theory", [picture_2, picture_8], **shared)
    figures = {"figure_2": curves_2, "figure_8": curves_8}
    written = shared | {"max_wavelength": 10_000, "figures": figures}
    (folder / "theory.json").write_text(json.dumps(written, indent=1) + "\n")
    return {"output": str(output), "statements": theory.STATEMENTS}


def figure_2() -> tuple[Picture, dict]:
    """Draws Figure 2 of the paper, with p-RoPE beside RoPE; returns its curves too, by distance."""
    distances = np.arange(LENGTH)
    ones = {}
    for p in PERCENTAGES:
        freqs = frequencies(HEAD_DIM, rope_percentage=p)
        ones[p] = theory.all_ones_curve(distances, freqs)
    gaussian = theory.gaussian_curve(distances, frequencies(HEAD_DIM))
    picture = Picture(
        "figure_2",
        "Figure 2: does RoPE decay with distance?",
        "Logits by distance: of ones they fall, less for a lower p; of Gaussian ones they do not.",
        "Vectors of ones decay with distance (a), the less the fewer pairs rotate; Gaussian ones "
        "do not (b: 4000 draws, the same at every distance, of standard deviation 1; the band is "
        "the standard error of their mean).",
        functools.partial(
            draw,
            {f"p = {p:g}": (curve, [None] * LENGTH) for p, curve in ones.items()},
            {"p = 1": gaussian},
            "distance (tokens)",
            "",
        ),
    )
    logits = [{"p": p, "logit": curve.tolist()} for p, curve in ones.items()]
    return picture, {"ones": logits, "gaussian": to_json(gaussian)}


def figure_8() -> tuple[Picture, dict]:
    """Draws Figure 8 of the paper; returns its curves too, by their upper bound of positions."""
    freqs = frequencies(HEAD_DIM)
    curves = {bound: theory.randomised_curves(TOKENS, bound, freqs) for bound in BOUNDS}
    ones = {f"L = {bound:,}": curve["ones"] for bound, curve in curves.items()}
    gaussian = {f"L = {bound:,}": curve["gaussian"] for bound, curve in curves.items()}
    picture = Picture(
        "figure_8",
        "Figure 8: random positions",
        "Logits at random positions: of ones they fall the sooner the higher the upper bound; of "
        "Gaussian ones they do not.",
        f"{TOKENS} tokens at sorted, distinct random positions below L: ones decay sooner with a "
        "higher L (a), Gaussian vectors still do not (b). Means over 256 draws; bands are their "
        "standard errors.",
        functools.partial(draw, ones, gaussian, "tokens from the key to the query", "upper bound"),
    )
    numbers = {
        kind: [{"bound": bound} | to_json(curve[kind]) for bound, curve in curves.items()]
        for kind in ("ones", "gaussian")
    }
    return picture, numbers


def to_json(curve: theory.Curve) -> dict:
    """Makes a mean and its standard error JSON."""
    mean, error = curve
    return {"mean": mean.tolist(), "standard_error": error.tolist()}


def draw(ones: dict, gaussian: dict, xlabel: str, legend: str, figure) -> None:
    """Draws two panels of curves (mean, error), by label."""
    style = styles(list(ones))
    left, right = panels(figure, 2)[0]
    left.set(title="(a) queries and keys of ones", ylabel="q · k / d", ylim=(-0.1, 1.1))
    right.set(
        title="(b) Gaussian queries and keys",
        ylabel="q · k / √d, mean over draws",
        ylim=(-0.6, 0.6),
    )
    for axes, curves in ((left, ones), (right, gaussian)):
        for label, (mean, error) in curves.items():
            points = dict(enumerate(zip(mean, error, strict=True)))
            line(axes, points, style[label] | {"lw": 1.2}, label)
        axes.set_xlabel(xlabel)
        axes.legend(loc="best", ncols=2, title=legend)
