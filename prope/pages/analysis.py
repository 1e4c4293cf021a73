"""Writes the page of one analysis: usage of frequencies, census, strongest heads, channels.

Axes: L layers, N query heads, K key/value heads, P pairs.
"""

import numpy as np
from etils import epath

from prope.pages import page
from prope.pages.drawing import (
    Picture,
    draw_heatmap,
    label_ticks,
    legend,
    panels,
    show_image,
    styles,
)
from prope.pages.heads import FAST_SHARE, SCORES, channel, heads, longest, maps, rotated_of_head

KINDS = {kind: f"mostly on {words}" for kind, words in SCORES.items()}
KINDS |= {"semantic": "semantic", "": "none"}
NORMS = {"queries": "query_norms", "keys": "key_norms", "values (control)": "value_norms"}


def write(folder: epath.Path, analysis: dict) -> epath.Path:
    """Writes index.html and the pictures into a folder; returns the page's path."""
    run = analysis["workdir"].rstrip("/").split("/")[-1]
    pictures = [census(analysis)]
    if analysis["shown"]:
        pictures.append(heads(analysis))
    for head in analysis["shown"]:
        if analysis["asked"]["paper"] or head["why"] not in SCORES:
            pictures += maps(analysis, head)
    pictures += map(channel, analysis["shown_channels"])
    pictures.append(usage(analysis))
    drawn = drawn_heads(analysis)
    if drawn:
        pictures.append(usage_by_head(analysis, drawn))
    return page.write(
        folder,
        "analysis",
        pictures,
        run=run,
        lead=lead(analysis),
        a=analysis,
        kinds=KINDS,
        # Those of a kind first, by their greatest weight on one place.
        heads=sorted(
            analysis["heads"], key=lambda head: (not head["kind"], -max(map(head.get, SCORES)))
        ),
        drawn=drawn,
    )


def drawn_heads(analysis: dict) -> set[tuple[int, int]]:
    """Chooses the (layer, head) that pictures by head show: those of a kind, asked for, or all."""
    asked = analysis["asked"]
    is_all = asked["all_heads"] or asked["paper"]
    of_kind = [head for head in analysis["heads"] if head["kind"] or is_all]
    return {(head["layer"], head["head"]) for head in of_kind + analysis["shown"]}


def lead(analysis: dict) -> str:
    """Sums up the census in two sentences."""
    kinds = [head["kind"] for head in analysis["heads"]]
    counts = [f"{kinds.count(kind)} {KINDS[kind]}" for kind in KINDS if kind and kind in kinds]
    named = ", ".join(counts) or "none of a kind that the census names"
    text = f"Of {len(kinds)} heads: {named}."
    correlation = analysis["rank_correlation"]
    if correlation is None:
        return text
    if correlation["p_value"] >= 0.05:
        return (
            f"{text} No relation found between how positional heads are and their use of the "
            "fastest frequencies."
        )
    direction = "more" if correlation["rho"] > 0 else "less"
    return (
        f"{text} The more positional a head is, the {direction} it uses the fastest quarter of the "
        f"frequencies: rank correlation {correlation['rho']:.2f} "
        f"(p-value {correlation['p_value']:.1g})."
    )


def stack_rows(rows: list, mode: str = "constant", **options) -> np.ndarray:
    """Stacks rows of pairs; the ends of shorter ones are filled as `numpy.pad` does."""
    width = max(map(len, rows))
    return np.array([np.pad(row, (0, width - len(row)), mode, **options) for row in rows])


def rotated_by_layer(analysis: dict) -> np.ndarray:
    """Returns which pairs of the measured layers rotate, [L, P], those of any head.

    A layer with fewer pairs than others has no border where they end.
    """
    freqs = [analysis["frequencies"][layer["layer"]] for layer in analysis["layers"]]
    return stack_rows([np.array(row) > 0 for row in freqs], "edge")


def usage(analysis: dict) -> Picture:
    """Draws Figure 3: norms by layer and pair, means over heads."""
    layers = [layer["layer"] for layer in analysis["layers"]]
    rotated = rotated_by_layer(analysis)
    norms = {}
    for kind, name in NORMS.items():
        means = [np.mean(layer[name], axis=0) for layer in analysis["layers"]]
        norms[kind] = stack_rows(means, constant_values=np.nan)

    def draw(figure):
        row = panels(figure, 3, sharey=True)[0]
        for axes, (kind, values) in zip(row, norms.items(), strict=True):
            ends = None if "values" in kind else rotated
            draw_heatmap(axes, values, kind, "layer", layers, ends)
            axes.label_outer()

    caption = (
        "Mean 2-norm of every pair of lanes, over tokens, sequences and heads (the paper's Figure "
        "3). Red lines border the pairs that are not rotated."
    )
    return Picture("usage", "Frequency usage by layer", longest(norms), caption, draw, (12, 3.4))


def usage_by_head(analysis: dict, drawn: set[tuple[int, int]]) -> Picture:
    """Draws Figures 4 and 11: norms of heads (layer, head), of their values too."""

    def draw(figure):
        row = panels(figure, 3)[0]
        for axes, (kind, name) in zip(row, NORMS.items(), strict=True):
            labels = []
            rows = []
            ends = []
            for layer in analysis["layers"]:
                sharing = len(layer["query_norms"]) // len(layer[name])
                for head in sorted({head // sharing for at, head in drawn if at == layer["layer"]}):
                    labels.append(f"{layer['layer']}.{head}")
                    rows.append(layer[name][head])
                    ends.append(rotated_of_head(analysis, layer, head, len(layer[name])))
            values = stack_rows(rows, constant_values=np.nan)
            borders = None if "values" in kind else stack_rows(ends, "edge")
            draw_heatmap(axes, values, kind, "layer.head", labels, borders)

    caption = (
        "The same for each head of a kind or asked for, or all; one of keys and values may serve "
        "several query heads."
    )
    alt = f"Norms by pair, of {len(drawn)} of {len(analysis['heads'])} heads."
    size = (12, min(3 + 0.07 * len(drawn), 14))
    return Picture("usage_by_head", "Frequency usage by head", alt, caption, draw, size)


def census(analysis: dict) -> Picture:
    """Draws where the heads attend, and whether positional ones use fast pairs."""
    records = analysis["heads"]
    correlation = analysis["rank_correlation"]  # None where nothing rotates

    def draw(figure):
        widths = [1.6, 1, 1, 1] if correlation else [1, 1, 1]
        axes = panels(figure, len(widths), width_ratios=widths)[0]
        if correlation:
            _scatter_heads(axes[0], records)
        _draw_scores(axes[-3:], analysis)

    caption = (
        "Mean weight of every head, over queries from the third token on; on the first token, over "
        "those that see it."
    )
    if correlation:
        values = f"{correlation['rho']:.2f}, p-value {correlation['p_value']:.1g}"
        caption += f" Rank correlation {values}, by permuting the heads of each key together."
    return Picture("census", "Where the heads look", lead(analysis), caption, draw, (12, 4))


def _scatter_heads(axes, records: list[dict]) -> None:
    """Plots how positional every head is by its use of fast pairs."""
    for kind, style in styles(list(KINDS)).items():
        heads = [head for head in records if head["kind"] == kind]
        if heads:
            shares = [head["high_frequency_share"] for head in heads]
            positional = [head["positional"] for head in heads]
            style |= {"ls": "", "ms": 6}
            axes.plot(shares, positional, label=KINDS[kind], **style)
    axes.set(
        xlabel=FAST_SHARE,
        ylabel="weight on itself or the token before",
        ylim=(-0.03, 1.03),
        title="Do positional heads use the fast pairs?",
    )
    legend(axes)


def _draw_scores(row, analysis: dict) -> None:
    """Draws every head's weight on each target as a map of layers and heads."""
    layers = [layer["layer"] for layer in analysis["layers"]]
    for axes, (score, words) in zip(row, SCORES.items(), strict=True):
        values = np.array([head[score] for head in analysis["heads"]])
        values = values.reshape(len(layers), -1)
        image = show_image(axes, values, vmax=1, aspect="auto")
        axes.set(xlabel="head", title=f"on {words}")
        label_ticks(axes.yaxis, layers)
        label_ticks(axes.xaxis, range(values.shape[1]))
    row[0].set_ylabel("layer")
    axes.figure.colorbar(image, ax=axes, pad=0.04, label="mean weight")
