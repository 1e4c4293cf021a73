"""Draws the README's picture of the rotated lanes, launch/figures/lanes.svg.

    python launch/figures.py

The file is the same after every call.
"""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent / "figures"
HEAD_DIM = 32
PERCENTAGES = (0.0, 0.25, 0.5, 0.75, 1.0)
FREQUENCIES = {0: "1", -1: "0.1", -2: "0.01", -3: "0.001", -4: "0.0001"}  # by logarithm


def draw_lanes():
    """Returns a figure of the frequency of every lane of a head, for five values of p."""
    import matplotlib
    import matplotlib.figure
    import numpy as np

    from prope.rope import frequencies, num_rotated_pairs

    pairs = HEAD_DIM // 2
    rows = []
    for p in PERCENTAGES:
        freqs = frequencies(HEAD_DIM, rope_percentage=p)
        freqs = np.where(freqs > 0, freqs, np.nan)
        rows.append(np.tile(np.log10(freqs), 2))
    figure = matplotlib.figure.Figure(figsize=(8, 3.1), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["viridis_r"].with_extremes(bad="#e6e6e6")
    image = axes.imshow(rows, cmap=colours, vmin=-4, vmax=0, aspect="auto")
    _draw_grid(axes, np.arange(HEAD_DIM + 1), np.arange(len(rows) + 1))
    axes.set_yticks(range(len(rows)), [f"p = {p:g}" for p in PERCENTAGES])
    for row, p in enumerate(PERCENTAGES):
        rotated = num_rotated_pairs(HEAD_DIM, p)
        axes.text(HEAD_DIM - 0.2, row, f"{rotated} of {pairs} pairs", va="center", fontsize=9)
    axes.axvline(pairs - 0.5, color="black", lw=1.5)
    lanes = [0, 5, pairs, pairs + 5, HEAD_DIM - 1]
    axes.set_xticks(lanes, lanes)
    axes.set_xlabel(f"lane of the head; lane k and lane k + {pairs} are a pair and rotate together")
    bar = figure.colorbar(image, ax=axes, pad=0.12)
    bar.set_ticks(list(FREQUENCIES), labels=FREQUENCIES.values())
    bar.set_label("radians per token (grey: not rotated)", fontsize=9)
    return figure


def _draw_grid(axes, columns, rows) -> None:
    """Separates the cells by white lines."""
    axes.set_xticks(columns - 0.5, minor=True)
    axes.set_yticks(rows - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _main(arguments: list[str]) -> None:
    if {"--help", "-h"} & set(arguments):
        print(__doc__.strip())
        return
    if arguments:
        print(f"error: {arguments[0]!r}: unexpected argument; there are none", file=sys.stderr)
        sys.exit(2)
    os.environ["MPLBACKEND"] = "agg"  # a notebook names one that may not be installed here
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "prope", "svg.fonttype": "none"})
    FOLDER.mkdir(exist_ok=True)
    draw_lanes().savefig(FOLDER / "lanes.svg", metadata={"Date": None})


if __name__ == "__main__":
    _main(sys.argv[1:])
