"""Draws chosen heads: their attention, token by token, and the frequencies that they use.

Axes: t tokens of the window, P pairs.
"""

import numpy as np

from prope.html.drawing import (
    BORDER,
    TEXT,
    Picture,
    heat,
    height,
    label_ticks,
    panels,
    show_image,
    styles,
)

SCORES = {
    "diagonal": "itself",
    "previous_token": "the token before",
    "first_token": "the first token",
}


def name_of(head: dict) -> str:
    """Formats layer and head as --heads takes them."""
    return f"{head['layer']}.{head['head']}"


def heads(analysis: dict) -> Picture:
    """Draws Figures 5, 12, 13: the chosen heads' maps, above the frequencies that they use."""
    shown, positions = analysis["shown"], analysis["window"]["positions"]
    layers = {layer["layer"]: layer for layer in analysis["layers"]}
    records = {name_of(head): head for head in analysis["heads"]}

    def draw(figure) -> None:
        both = panels(figure, len(shown), rows=2, height_ratios=[1.25, 1])
        style = styles(["query", "key"])
        for (top, below), head in zip(both.T, shown, strict=True):
            layer = layers[head["layer"]]
            query, keys = layer["query_norms"], layer["key_norms"]
            show_image(top, np.array(head["map"]), 0.5, vmax=1)
            label_ticks(top.xaxis, positions, rotation=90)
            label_ticks(top.yaxis, positions)
            score = head["why"] if head["why"] in records[name_of(head)] else "positional"
            top.set(
                title=f"{name_of(head)}: {score} {records[name_of(head)][score]:.2f}",
                xlabel="key",
                ylabel="query",
            )
            own = keys[head["head"] * len(keys) // len(query)]
            for name, values in (("query", query[head["head"]]), ("key", own)):
                below.plot(values, label=name, **style[name] | {"marker": None})
            if layer["turned"] < len(own):
                below.axvline(layer["turned"] - 0.5, color=BORDER, lw=1.5)
            below.set(xlabel="pair, fastest first", ylabel="mean norm", ylim=(0, None))
            below.locator_params(axis="x", integer=True)
        both[1, 0].legend(loc="best")

    scores = "; ".join(
        f"head {name_of(head)}: "
        + ", ".join(f"{words} {records[name_of(head)][s]:.2f}" for s, words in SCORES.items())
        for head in shown
    )
    caption = "Above: weights in --window of the first sequence, coloured by square root. Below: which pairs the head"
    caption += " uses. Chosen are the strongest by their means over all sequences."
    return Picture(
        "heads",
        "Chosen heads",
        f"Attention maps. {scores}.",
        caption,
        draw,
        (2.55 * len(shown), 5.0),
    )


def maps(analysis: dict, head: dict) -> list[Picture]:
    """Draws Figures 5, 9, 12, 13, a head's weights and logits by token, and Figures 6, 7: norms by token and pair."""
    name, window = name_of(head), analysis["window"]
    (turned,) = (layer["turned"] for layer in analysis["layers"] if layer["layer"] == head["layer"])
    tokens = [
        f"{i} {token}" for i, token in zip(window["positions"], window["tokens"], strict=True)
    ]
    weights, logits = (
        np.where(np.tri(len(tokens)), head[kind], np.nan) for kind in ("map", "logits")
    )
    norms = {kind: np.array(head[f"{kind}_norms"]) for kind in ("query", "key")}
    stacked = len(tokens) > 30  # labels of columns that have room in half the width
    least, most = np.nanmin(logits), np.nanmax(logits)

    def draw_attention(figure) -> None:
        both = {"weights": (weights, 0.5, 0, 1), "logits": (logits, 1, least, most)}
        axes_of = panels(figure, 2, wrap=1 if stacked else 2, sharey=True)
        for axes, (title, limits) in zip(axes_of.flat, both.items(), strict=True):
            figure.colorbar(
                show_image(axes, *limits, aspect="auto"), ax=axes, pad=0.02, fraction=0.06
            )
            axes.set(title=title, xlabel="key", ylabel="query")
            label_ticks(axes.xaxis, tokens, rotation=90)
            label_ticks(axes.yaxis, tokens)

    def draw_norms(figure) -> None:
        axes_of = panels(figure, 2, sharey=True)[0]
        for axes, (kind, values) in zip(axes_of, norms.items(), strict=True):
            heat(axes, values, f"norms of the {kind}", "token", tokens, [turned] * len(tokens))

    alt = f"Mean weight on the first token {weights[:, 0].mean():.2f}; logits from {least:.1f} to {most:.1f}."
    caption = "The first token and those of --window, of the first sequence. Weights are shares of all tokens before;"
    caption += " their colours are by square root."
    greatest = "; ".join(
        f"of the {kind}, pair {values.mean(axis=0).argmax()}" for kind, values in norms.items()
    )
    of, size = f"{head['layer']}_{head['head']}", (12, height(len(tokens)) * (1 + stacked))
    longest = f"Longest on average: {greatest}."
    return [
        Picture(
            f"head_{of}", f"Head {name}: weights and logits", alt, caption, draw_attention, size
        ),
        Picture(
            f"norms_{of}",
            f"Head {name}: norms by token",
            longest,
            longest,
            draw_norms,
            (12, height(len(tokens))),
        ),
    ]


def channel(record: dict) -> Picture:
    """Draws Figure 14 for a channel of `channels.show_channels`: what it adds to logits, its queries and keys."""
    name, (first, others) = (
        f"{name_of(record)}.{record['pair']}",
        styles(["first", "others"]).values(),
    )

    def draw(figure) -> None:
        added, *planes = panels(figure, 3)[0]
        for key, start, style in (("to_first", 1, first), ("to_others", 0, others)):
            distances = range(start, start + len(record[key]))
            added.plot(
                distances, record[key], label=key.replace("_", " "), **style | {"marker": None}
            )
        added.set(title="added to the logit", xlabel="distance (tokens)")
        for axes, kind in zip(planes, ("queries", "keys"), strict=True):
            axes.plot(0, 0, "+", color=TEXT)
            axes.plot(*np.transpose(record[kind][1:]), **others | {"ls": ""})
            if kind == "keys":
                axes.plot(*record[kind][0], **first | {"ls": "", "ms": 9})
            axes.set(
                title=kind,
                xlabel=f"lanes of pair {record['pair']}",
                aspect="equal",
                adjustable="datalim",
            )
        added.legend(loc="best")

    alt = f"Cosine of the mean query with the first key {record['first_alignment']:.2f}, with the mean of the others"
    alt += f" {record['others_alignment']:.2f}. The first token's advantage "
    rotation, distance = record["breaking_rotation"], record["breaking_distance"]
    alt += (
        f"ends after a rotation by {rotation:.2f} radians: "
        if rotation
        else "is none at distance 0."
    )
    alt += (
        f"{distance:,.0f} tokens."
        if distance
        else "never, as the pair does not rotate."
        if rotation
        else ""
    )
    caption = f"{alt} Vectors, before rotation: --window of the first sequence; the large mark is the first key."
    return Picture(
        f"channel_{name.replace('.', '_')}", f"Channel {name}", alt, caption, draw, (12, 3.9)
    )
