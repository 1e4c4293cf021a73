"""Draws the README's picture of the rotated lanes, launch/figures/lanes.svg.

    python launch/figures.py

The file is the same after every call.
"""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent / "figures"


def draw_lanes(head_dim: int = 32):
    """Returns a figure of the frequency of every lane of a head, for five values of p."""
    import matplotlib.figure
    import numpy as np

    from prope.rope import frequencies, num_rotated_pairs

    pairs, percentages = head_dim // 2, (0.0, 0.25, 0.5, 0.75, 1.0)
    figure = matplotlib.figure.Figure(figsize=(8, 3.1), layout="constrained")
    axes = figure.subplots()
    rows = []
    for p in percentages:
        freqs = frequencies(head_dim, rope_percentage=p)
        logarithm = np.log10(freqs, where=freqs > 0, out=np.full(pairs, np.nan))
        rows.append(np.concatenate([logarithm, logarithm]))
    colours = matplotlib.colormaps["viridis_r"].with_extremes(bad="#e6e6e6")
    image = axes.imshow(rows, cmap=colours, vmin=-4, vmax=0, aspect="auto")
    axes.set_xticks(np.arange(head_dim + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(percentages) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="both", length=0)
    axes.set_yticks(range(len(percentages)), [f"p = {p:g}" for p in percentages])
    for row, p in enumerate(percentages):
        rotated = num_rotated_pairs(head_dim, p)
        axes.text(head_dim - 0.2, row, f"{rotated} of {pairs} pairs", va="center", fontsize=9)
    axes.axvline(pairs - 0.5, color="black", lw=1.5)
    at = [0, 5, pairs, pairs + 5, head_dim - 1]
    axes.set_xticks(at, at)
    axes.set_xlabel(f"lane of the head; lane k and lane k + {pairs} are a pair and rotate together")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.12, ticks=[0, -1, -2, -3, -4])
    bar.ax.set_yticklabels(["1", "0.1", "0.01", "0.001", "0.0001"])
    bar.set_label("radians per token (grey: not rotated)", fontsize=9)
    return figure


def _main(arguments: list[str]) -> None:
    if {"--help", "-h"} & set(arguments):
        print(__doc__.strip())
        return
    if arguments:
        print(f"error: {arguments[0]!r}: unexpected argument; there are none", file=sys.stderr)
        sys.exit(2)
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "prope", "svg.fonttype": "none"})
    FOLDER.mkdir(exist_ok=True)
    draw_lanes().savefig(FOLDER / "lanes.svg", metadata={"Date": None})


if __name__ == "__main__":
    _main(sys.argv[1:])
