"""Writes the page of one analysis from analysis.json: usage of frequencies, census, strongest heads, channels.

Axes: L layers, N query heads, K key/value heads, P pairs.
"""

import numpy as np
from etils import epath

from prope.analysis.maps import SCORES, channel, heads, maps, name_of
from prope.html import page
from prope.html.drawing import TEXT, Picture, heat, label_ticks, panels, show_image, styles

KINDS = {kind: f"mostly {words}" for kind, words in SCORES.items()} | {
    "semantic": "semantic",
    "": "none of these",
}
NORMS = {"queries": "query_norms", "keys": "key_norms", "values (control)": "value_norms"}


def write(folder: epath.Path, analysis: dict) -> epath.Path:
    """Writes index.html and the pictures into a folder; returns the page's path."""
    run = analysis["workdir"].rstrip("/").split("/")[-1]
    pictures = [usage(analysis), usage_by_head(analysis), census(analysis), heads(analysis)]
    mapped = [
        head
        for head in analysis["shown"]
        if analysis["asked"]["paper"] or head["why"] not in SCORES
    ]
    pictures += [picture for head in mapped for picture in maps(analysis, head)]
    pictures += map(channel, analysis["shown_channels"])
    pictures += [channels(analysis)] if analysis["channels"] else []
    return page.write(
        folder, "analysis", pictures, run=run, lead=lead(analysis), a=analysis, kinds=KINDS
    )


def lead(analysis: dict) -> str:
    """Sums up the census in two sentences."""
    kinds = [head["kind"] for head in analysis["heads"]]
    named = [
        f"{kinds.count(kind)} {words}" for kind, words in KINDS.items() if kind and kind in kinds
    ]
    text = f"Of {len(analysis['heads'])} heads: {', '.join(named) or 'none of a kind that the census names'}."
    correlation = analysis["rank_correlation"]
    if correlation is None:
        return text
    if correlation["p_value"] >= 0.05:
        return f"{text} No relation found between how positional heads are and their use of the fastest frequencies."
    text += f" The more positional a head is, the {'more' if correlation['rho'] > 0 else 'less'} it uses the fastest"
    found = f"rank correlation {correlation['rho']:.2f} (p-value {correlation['p_value']:.1g})"
    return f"{text} quarter of the frequencies: {found}."


def norms(analysis: dict, name: str) -> np.ndarray:
    """Stacks one kind of norms of all measured layers: [L, N or K, P]."""
    return np.array([layer[name] for layer in analysis["layers"]])


def usage(analysis: dict) -> Picture:
    """Draws Figure 3: norms by layer and pair, means over heads."""
    layers = analysis["layers"]
    means = {kind: norms(analysis, name).mean(axis=1) for kind, name in NORMS.items()}
    rotated = [layer["turned"] for layer in layers]

    def draw(figure) -> None:
        for axes, (kind, values) in zip(
            panels(figure, 3, sharey=True)[0], means.items(), strict=True
        ):
            ends = None if "values" in kind else rotated
            heat(axes, values, kind, "layer", [layer["layer"] for layer in layers], ends)
            axes.label_outer()

    quarter = max(means["queries"].shape[1] // 4, 1)
    ends = "; ".join(
        f"{kind}: {values[:, :quarter].mean():.2f} in the fastest quarter, "
        f"{values[:, -quarter:].mean():.2f} in the slowest"
        for kind, values in means.items()
    )
    caption = "Mean 2-norm of every pair of lanes, over tokens, sequences and heads (the paper's Figure 3)."
    if min(rotated) < analysis["head_dim"] // 2:
        caption += " Pairs right of the red line are not rotated."
    return Picture(
        "usage",
        "Frequency usage by layer",
        f"Mean norms by pair. {ends}.",
        caption,
        draw,
        (12, 3.4),
    )


def usage_by_head(analysis: dict) -> Picture:
    """Draws Figures 4 and 11: norms of every head, of its values too."""

    def draw(figure) -> None:
        for axes, (kind, name) in zip(panels(figure, 3)[0], NORMS.items(), strict=True):
            values = norms(analysis, name)
            count = values.shape[1]
            labels = [
                f"{layer['layer']}.{head}" for layer in analysis["layers"] for head in range(count)
            ]
            rotated = np.repeat([layer["turned"] for layer in analysis["layers"]], count)
            ends = None if "values" in kind else rotated
            heat(axes, values.reshape(-1, values.shape[2]), kind, "layer.head", labels, ends)

    count = len(analysis["heads"])
    alt = f"Mean norms by pair, of the queries of {count} heads, and of their keys and values."
    caption = "The same for every head; a head of keys and values may serve several query heads."
    return Picture(
        "usage_by_head",
        "Frequency usage by head",
        alt,
        caption,
        draw,
        (12, min(3 + 0.07 * count, 14)),
    )


def census(analysis: dict) -> Picture:
    """Draws where the heads look, and whether positional ones use fast pairs."""
    records = analysis["heads"]
    layers = [layer["layer"] for layer in analysis["layers"]]
    shape = len(layers), len(records) // len(layers)
    correlation = analysis[
        "rank_correlation"
    ]  # None where nothing rotates: then there is no scatter plot either

    def draw(figure) -> None:
        widths = [1.6, 1, 1, 1] if correlation else [1, 1, 1]
        *scatter, one, two, three = panels(figure, len(widths), width_ratios=widths)[0]
        for axes in scatter:
            for kind, style in styles(list(KINDS)).items():
                points = [
                    (h["high_frequency_share"], h["positional"])
                    for h in records
                    if h["kind"] == kind
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True), label=KINDS[kind], **style | {"ls": "", "ms": 6}
                    )
            axes.set(
                xlabel="high_frequency_share",
                ylabel="weight on itself or the token before",
                ylim=(-0.03, 1.03),
            )
            axes.set_title("Do positional heads use the fast pairs?")
            axes.legend(loc="best")
        for axes, (score, words) in zip((one, two, three), SCORES.items(), strict=True):
            image = show_image(
                axes, np.array([h[score] for h in records]).reshape(shape), vmax=1, aspect="auto"
            )
            axes.set(xlabel="head", title=f"on {words}")
            label_ticks(axes.yaxis, layers)
            label_ticks(axes.xaxis, range(shape[1]))
        one.set_ylabel("layer")
        figure.colorbar(image, ax=three, pad=0.04)

    best = {score: max(records, key=lambda head, score=score: head[score]) for score in SCORES}
    greatest = "; ".join(
        f"{words}: {best[s][s]:.2f}, of head {name_of(best[s])}" for s, words in SCORES.items()
    )
    caption = "Mean weight of every head, over queries from the third token on."
    if correlation:
        rho, p_value = f"{correlation['rho']:.2f}", f"{correlation['p_value']:.1g}"
        caption += f" Spearman's rank correlation in the scatter plot: {rho} (p-value {p_value}, by permuting the heads"
        caption += " of each key together)."
    return Picture(
        "census",
        "Where the heads look",
        f"Greatest mean weight on {greatest}.",
        caption,
        draw,
        (12, 3.6),
    )


def channels(analysis: dict) -> Picture:
    """Draws Figure 14 in short: the strongest channels, and the change of the loss without them."""
    records = analysis["channels"]
    names = [f"{name_of(channel)}, pair {channel['pair']}" for channel in records]

    def draw(figure) -> None:
        logits, losses = panels(figure, 2, sharey=True)[0]
        sides = list(
            zip(
                (-0.2, 0.2),
                (style["color"] for style in styles(["above", "below"]).values()),
                strict=True,
            )
        )
        for (shift, colour), key in zip(sides, ("to_first", "to_others"), strict=True):
            values, label = [channel[key] for channel in records], f"{key.replace('_', ' ')}, mean"
            logits.barh(np.arange(len(records)) + shift, values, 0.36, color=colour, label=label)
        for (shift, colour), key in zip(sides, ("stopped", "removed"), strict=True):
            if changes := {
                i + shift: channel[key] for i, channel in enumerate(records) if channel[key]
            }:
                values, errors = zip(
                    *((c["difference"], c["stderr"] or 0) for c in changes.values()), strict=True
                )
                losses.barh(
                    list(changes), values, 0.36, xerr=errors, color=colour, ecolor=TEXT, label=key
                )
        logits.set_yticks(range(len(records)), names)
        logits.invert_yaxis()
        logits.set(xlabel="added to the logit", title="What a channel adds")
        losses.axvline(0, color=TEXT, lw=1)
        losses.set(xlabel="nats per token", title="Loss without it, minus loss as it is")
        for axes in figure.axes:
            axes.legend(loc="best")

    alt = "; ".join(
        f"{name}: {c['to_first']:.2f} to the first token, {c['to_others']:.2f} to others, loss "
        f"{c['removed']['difference']:+.4f} when removed"
        for name, c in zip(names, records, strict=True)
    )
    caption = "Pairs of the slower half, or unrotated, in which queries and keys are longest. Thin lines: standard"
    caption += (
        " errors of the difference over sequences. A pair that is not rotated cannot be stopped."
    )
    return Picture(
        "channels", "Semantic channels", f"{alt}.", caption, draw, (12, 1.6 + 0.6 * len(records))
    )
