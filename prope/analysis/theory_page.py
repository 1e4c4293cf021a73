"""Writes the page of the paper's statements: each with its numbers, and Figures 2 and 8."""

import json

import numpy as np
from etils import epath

from prope.analysis import theory
from prope.analysis.statements import BOUNDS, HEAD_DIM, LENGTH, statements
from prope.html import page
from prope.html.drawing import Picture, line, panels, styles
from prope.rope import frequencies

PERCENTAGES = (1.0, 0.75, 0.25, 0.0)


def write(folder: str | epath.Path) -> dict:
    """Writes index.html, theory.json and the figures as PNG files into a folder that it makes.

    Returns `output`, the path of the page, and `statements`, as `statements.statements` returns them.
    """
    folder, tried = epath.Path(folder), statements()
    (picture_2, curves_2), (picture_8, curves_8) = figure_2(), figure_8()
    output = page.write(
        folder, "theory", [picture_2, picture_8], statements=tried, head_dim=HEAD_DIM
    )
    written = {"head_dim": HEAD_DIM, "max_wavelength": 10_000, "statements": tried}
    written["figures"] = {"figure_2": curves_2, "figure_8": curves_8}
    (folder / "theory.json").write_text(json.dumps(written, indent=1) + "\n")
    return {"output": str(output), "statements": tried}


def figure_2() -> tuple[Picture, dict]:
    """Draws Figure 2 of the paper, with p-RoPE beside RoPE; returns its curves too, by distance."""
    distances, freqs = (
        np.arange(LENGTH),
        {p: frequencies(HEAD_DIM, rope_percentage=p) for p in PERCENTAGES},
    )
    ones = {p: theory.all_ones_curve(distances, freqs[p]) for p in PERCENTAGES}
    gaussian = theory.gaussian_curve(distances, freqs[1.0])
    ends = ", ".join(f"{curve[-1]:.3f} for p = {p:g}" for p, curve in ones.items())
    alt = f"Logits at distances 0 to {LENGTH - 1}. Of ones they fall, at the right end to {ends}; the mean of Gaussian"
    alt += f" ones stays within {np.abs(gaussian[0]).max():.3f} of 0."
    caption = "Vectors of ones decay with distance (a), the less the fewer pairs rotate; Gaussian ones do not (b: 4000"
    caption += " draws, the same at every distance, of standard deviation 1; the band is the standard error of their"
    caption += " mean)."
    curves = {
        "ones": {f"p = {p:g}": (curve, None) for p, curve in ones.items()},
        "gaussian": {"p = 1": gaussian},
    }
    title = "Figure 2: does RoPE decay with distance?"
    picture = curves_picture("figure_2", title, alt, caption, curves, "distance (tokens)", "")
    of_ones = [{"p": p, "logit": curve.tolist()} for p, curve in ones.items()]
    return picture, {"ones": of_ones, "gaussian": to_json(gaussian)}


def figure_8() -> tuple[Picture, dict]:
    """Draws Figure 8 of the paper; returns its curves too, by their upper bound of positions."""
    curves = {
        bound: theory.randomised_curves(BOUNDS[0], bound, frequencies(HEAD_DIM)) for bound in BOUNDS
    }
    ends = ", ".join(f"{curve['ones'][0][-1]:.3f} for {bound}" for bound, curve in curves.items())
    largest = max(np.abs(curve["gaussian"][0]).max() for curve in curves.values())
    alt = f"Logits of {BOUNDS[0]} tokens at random positions. Of ones they fall the sooner the higher the upper bound,"
    alt += f" at the right end to {ends}; the means of Gaussian ones stay within {largest:.2f} of 0 for every bound."
    caption = f"{BOUNDS[0]} tokens at sorted, distinct random positions below L: ones decay sooner with a higher L (a),"
    caption += (
        " Gaussian vectors still do not (b). Means over 256 draws; bands are their standard errors."
    )
    kinds = ("ones", "gaussian")
    of_kind = {
        kind: {f"L = {bound:,}": curve[kind] for bound, curve in curves.items()} for kind in kinds
    }
    xlabel, title = "tokens from the key to the query", "Figure 8: random positions"
    picture = curves_picture("figure_8", title, alt, caption, of_kind, xlabel, "upper bound")
    return picture, {
        kind: [{"bound": b, **to_json(curve[kind])} for b, curve in curves.items()]
        for kind in kinds
    }


def to_json(curve: tuple[np.ndarray, np.ndarray]) -> dict:
    """Makes a mean and its standard error JSON."""
    return {"mean": curve[0].tolist(), "standard_error": curve[1].tolist()}


def curves_picture(
    name: str, title: str, alt: str, caption: str, curves: dict, xlabel: str, legend: str
) -> Picture:
    """Draws curves, (mean, error or None) by label: of ones, and of Gaussian vectors."""
    labels = {
        "ones": {
            "title": "(a) queries and keys of ones",
            "ylabel": "q · k / d",
            "ylim": (-0.1, 1.1),
        },
        "gaussian": {
            "title": "(b) Gaussian queries and keys",
            "ylabel": "q · k / √d, mean over draws",
            "ylim": (-0.6, 0.6),
        },
    }

    def draw(figure) -> None:
        style = styles(list(curves["ones"]))
        for axes, (kind, of_kind) in zip(panels(figure, 2)[0], curves.items(), strict=True):
            for label, (mean, error) in of_kind.items():
                errors = [None] * len(mean) if error is None else error
                line(
                    axes,
                    dict(enumerate(zip(mean, errors, strict=True))),
                    style[label] | {"lw": 1.2},
                    label,
                )
            axes.set(xlabel=xlabel, **labels[kind])
            axes.legend(loc="best", ncols=2, title=legend)

    return Picture(name, title, alt, caption, draw)
