"""Draws chosen heads: their attention, token by token, and the frequencies that they use.

Axes: t tokens of the window, P pairs.
"""

import numpy as np

from prope.pages.drawing import (
    BORDER,
    TEXT,
    Picture,
    arrange,
    draw_heatmap,
    height,
    label_ticks,
    panels,
    show_image,
    styles,
)
from prope.pages.page import number

SCORES = {
    "diagonal": "itself",
    "previous_token": "the token before",
    "first_token": "the first token",
}
FAST_SHARE = "share of the fastest quarter of pairs"
_WEIGHTS = {score: f"on {words}" for score, words in SCORES.items()} | {
    "head_of": "by --head_of",
    "positional": "on itself or before",
}


def name_of(head: dict) -> str:
    """Formats layer and head as --heads takes them."""
    return f"{head['layer']}.{head['head']}"


def longest(norms: dict[str, np.ndarray]) -> str:
    """Names the pair with the greatest mean norm, of norms [.., P] by their name."""
    longest_pair = {name: np.nanmean(values, axis=0).argmax() for name, values in norms.items()}
    pairs = [f"{name}, pair {pair}" for name, pair in longest_pair.items()]
    return f"Longest on average: {'; '.join(pairs)}."


def heads(analysis: dict) -> Picture:
    """Draws Figures 5, 12, 13: the chosen heads' maps, above the frequencies that they use."""
    shown = analysis["shown"]
    positions = analysis["window"]["positions"]
    records = {name_of(head): head for head in analysis["heads"]}

    across, blocks = arrange(len(shown))

    def draw(figure):
        axes = panels(figure, len(shown), rows=2, wrap=across, height_ratios=[1.25, 1] * blocks)
        for top, below, head in zip(*axes, shown, strict=True):
            record = records[name_of(head)]
            score = head["why"] if head["why"] in record else "positional"
            show_image(top, np.array(head["map"]), 0.5, vmax=1)
            label_ticks(top.xaxis, positions, rotation=90)
            label_ticks(top.yaxis, positions)
            title = f"head {name_of(head)}:\n{_WEIGHTS[score]} {record[score]:.2f}"
            top.set(title=title, xlabel="key", ylabel="query")
            _draw_norms(below, analysis, head)
        axes[1, 0].legend()

    caption = (
        "Above: attention weights in a part of the first sequence (--window), coloured by square "
        "root. Below: which pairs the head uses. In titles: means over all sequences."
    )
    alt = f"Maps and norms of heads {', '.join(map(name_of, shown))}."
    return Picture("heads", "Chosen heads", alt, caption, draw, (2.55 * across, 5.0 * blocks))


def _layer_of(analysis: dict, head: dict) -> dict:
    return next(layer for layer in analysis["layers"] if layer["layer"] == head["layer"])


def rotated_of_head(analysis: dict, layer: dict, head: int, num_heads: int) -> np.ndarray:
    """Returns which pairs of a head rotate, [P]: of one of `num_heads` queries, or of keys."""
    if "head_frequencies" not in analysis:  # of files before these, too
        return np.array(analysis["frequencies"][layer["layer"]]) > 0
    key_head = head * len(layer["key_norms"]) // num_heads
    return np.array(analysis["head_frequencies"][layer["layer"]][key_head]) > 0


def _draw_norms(axes, analysis: dict, head: dict) -> None:
    """Draws the mean norms of a head's queries and keys by pair."""
    layer = _layer_of(analysis, head)
    N = len(layer["query_norms"])
    for name, style in styles(["query", "key"]).items():
        norms = layer[f"{name}_norms"]
        curve = norms[head["head"] * len(norms) // N]
        axes.plot(curve, label=name, **style | {"marker": None})
    rotated = rotated_of_head(analysis, layer, head["head"], N)
    for border in np.flatnonzero(np.diff(rotated, prepend=True)):
        axes.axvline(border - 0.5, color=BORDER, lw=1.5)
    axes.set(xlabel="pair, fastest first", ylabel="mean norm", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)


def maps(analysis: dict, head: dict) -> list[Picture]:
    """Draws a head's weights and logits by token, and its norms by token and pair.

    Figures 5, 9, 12, 13, and Figures 6, 7.
    """
    window = analysis["window"]
    tokens = zip(window["positions"], window["tokens"], strict=True)
    labels = [f"{position} {token}" for position, token in tokens]
    return [_attention_picture(analysis, head, labels), _norms_picture(analysis, head, labels)]


def _attention_picture(analysis: dict, head: dict, labels: list[str]) -> Picture:
    positions = np.array(analysis["window"]["positions"])
    distances = positions[:, None] - positions
    reach = _layer_of(analysis, head)["sliding_window"] or np.inf
    visible = (distances >= 0) & (distances < reach)
    weights = np.where(visible, head["map"], np.nan)
    logits = np.where(visible, head["logits"], np.nan)
    least = np.nanmin(logits)
    most = np.nanmax(logits)

    def draw(figure):
        row = panels(figure, 2, wrap=1, sharey=True)[0]
        images = {"weight": (weights, 0.5, 0, 1), "logit": (logits, 1, least, most)}
        for axes, (name, values) in zip(row, images.items(), strict=True):
            image = show_image(axes, *values, aspect="auto")
            figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, label=name)
            axes.set(title=f"{name}s", xlabel="key", ylabel="query")
            label_ticks(axes.xaxis, labels, rotation=90)
            label_ticks(axes.yaxis, labels)

    alt = f"Mean weight on the first token {np.nanmean(weights[:, 0]):.2f}; "
    alt += f"logits from {least:.1f} to {most:.1f}."
    caption = (
        "The first token and those of --window, of the first sequence. Weights are shares of all "
        "tokens that the layer sees; their colours are by square root."
    )
    name = f"head_{head['layer']}_{head['head']}"
    title = f"Head {name_of(head)}: weights and logits"
    return Picture(name, title, alt, caption, draw, (12, 2 * height(len(labels))))


def _norms_picture(analysis: dict, head: dict, labels: list[str]) -> Picture:
    layer = _layer_of(analysis, head)
    rotates = rotated_of_head(analysis, layer, head["head"], len(layer["query_norms"]))
    norms = {kind: np.array(head[f"{kind}_norms"]) for kind in ("query", "key")}

    def draw(figure):
        rotated = np.tile(rotates, (len(labels), 1))
        row = panels(figure, 2, sharey=True)[0]
        for axes, kind in zip(row, norms, strict=True):
            draw_heatmap(axes, norms[kind], f"norms of the {kind}", "token", labels, rotated)

    caption = "The 2-norm of every pair of lanes, by token; red lines border what does not rotate."
    name = f"norms_{head['layer']}_{head['head']}"
    title = f"Head {name_of(head)}: norms by token"
    return Picture(name, title, longest(norms), caption, draw, (12, height(len(labels))))


def channel(record: dict) -> Picture:
    """Draws Figure 14 for a channel of `channels.show_channels`.

    It shows what the channel adds to logits, its queries and its keys.
    """
    first, others = styles(["first", "others"]).values()

    def draw(figure):
        added, *planes = panels(figure, 3)[0]
        for key, start, style in (("to_first", 1, first), ("to_others", 0, others)):
            distances = range(start, start + len(record[key]))
            label = key.replace("_", " ")
            added.plot(distances, record[key], label=label, **style | {"marker": None})
        added.set(title="added to the logit", xlabel="distance (tokens)")
        added.legend()
        xlabel = f"lanes of pair {record['pair']}"
        for axes, kind in zip(planes, ("queries", "keys"), strict=True):
            axes.plot(0, 0, "+", color=TEXT)
            axes.plot(*np.transpose(record[kind][1:]), **others | {"ls": ""})
            if kind == "keys":
                axes.plot(*record[kind][0], **first | {"ls": "", "ms": 9})
            axes.set(title=kind, xlabel=xlabel, aspect="equal", adjustable="datalim")

    rotation = number(record["breaking_rotation"], ".2f")
    distance = number(record["breaking_distance"], ",.0f")
    alt = (
        f"Cosine of the mean query with the first key {record['first_alignment']:.2f}, with the "
        f"mean of the others {record['others_alignment']:.2f}. The first token's advantage ends "
        f"after a rotation by {rotation} radians, {distance} tokens; –: it has none, or the pair "
        "does not rotate."
    )
    caption = f"{alt} Vectors, before rotation: --window of the first sequence; "
    caption += "the large mark is the first key."
    place = f"{name_of(record)}.{record['pair']}"
    name = f"channel_{place.replace('.', '_')}"
    return Picture(name, f"Channel {place}", alt, caption, draw, (12, 3.9))
