"""The pictures of one analysis: frequency usage, the census, the strongest heads, the channels.

They are drawn from what analysis.json says. Axes: L layers, N query heads, K key/value heads, P pairs.
"""

import numpy as np

from prope.html.drawing import MARKERS, Picture, Theme, styles

KINDS = {
    "diagonal": "mostly itself", "previous_token": "mostly the token before", "first_token": "mostly the first token",
    "semantic": "semantic", "": "none of these",
}  # fmt: skip
SCORES = {"diagonal": "itself", "previous_token": "the token before", "first_token": "the first token"}


def pictures(analysis: dict) -> list[Picture]:
    """Those that the analysis has numbers for, in the order of the page."""
    made = [usage(analysis), usage_by_head(analysis), census(analysis), heads(analysis)]
    return [*made, channels(analysis)] if analysis["channels"] else made


def norms(analysis: dict, name: str) -> np.ndarray:
    """A kind of norms of all measured layers: [L, N or K, P]."""
    return np.array([layer[name] for layer in analysis["layers"]])


def name_of(head: dict) -> str:
    """Layer and head, as --heads takes them."""
    return f"{head['layer']}.{head['head']}"


def heat(figure, axes, values: np.ndarray, title: str, rows: str, labels: list, border: list | None, theme) -> None:
    """A map of [rows, P] with its scale, and the border between turned and unturned pairs as a line."""
    shown = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set(xlabel="pair, fastest first", ylabel=rows, title=title)
    axes.grid(False)
    step = max(len(labels) // 12, 1)
    axes.set_yticks(range(0, len(labels), step), labels[::step])
    if border is not None and min(border) < values.shape[1]:
        edges = np.append(np.arange(len(border)) - 0.5, len(border) - 0.5)
        axes.stairs(
            [turned - 0.5 for turned in border], edges, orientation="horizontal", color="#ff4d4d", lw=2, baseline=None
        )
    figure.colorbar(shown, ax=axes, pad=0.02)


def usage(analysis: dict) -> Picture:
    """Figure 3: norms by layer and pair, means over heads."""
    layers = analysis["layers"]
    kinds = {"queries": "query_norms", "keys": "key_norms", "values (control)": "value_norms"}
    found = {kind: norms(analysis, name).mean(axis=1) for kind, name in kinds.items()}
    turned = [layer["turned"] for layer in layers]

    def draw(figure, theme: Theme) -> None:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (kind, values) in zip(panels, found.items(), strict=True):
            border = None if "values" in kind else turned
            heat(figure, axes, values, kind, "layer", [layer["layer"] for layer in layers], border, theme)
            axes.label_outer()

    quarter = max(found["queries"].shape[1] // 4, 1)
    ends = "; ".join(
        f"{kind}: {values[:, :quarter].mean():.2f} in the fastest quarter, "
        f"{values[:, -quarter:].mean():.2f} in the slowest"
        for kind, values in found.items()
    )
    caption = "Mean 2-norm of every pair of lanes, over tokens, sequences and heads (the paper's Figures 3 and 4)."
    if min(turned) < analysis["head_dim"] // 2:
        caption += " Right of the red line p-RoPE turns nothing."
    return Picture("usage", "Frequency usage by layer", f"Mean norms by pair. {ends}.", caption, draw, (12, 3.4))


def usage_by_head(analysis: dict) -> Picture:
    """Figures 6 and 11: norms of every head."""
    layers = analysis["layers"]

    def rows(name: str) -> tuple[np.ndarray, list[str], list[int]]:
        values = norms(analysis, name)
        labels = [f"{layer['layer']}.{head}" for layer in layers for head in range(values.shape[1])]
        return values.reshape(-1, values.shape[2]), labels, [layer["turned"] for layer in layers for _ in values[0]]

    def draw(figure, theme: Theme) -> None:
        for axes, (kind, name) in zip(
            figure.subplots(1, 2), {"queries": "query_norms", "keys": "key_norms"}.items(), strict=True
        ):
            values, labels, border = rows(name)
            heat(figure, axes, values, kind, "layer.head", labels, border, theme)

    count = len(rows("query_norms")[1])
    alt = f"Mean norms by pair, of the queries of {count} heads and of their keys."
    height = min(3 + 0.07 * count, 14)
    caption = "The same for every head; a key head may serve several query heads."
    return Picture("usage_by_head", "Frequency usage by head", alt, caption, draw, (12, height))


def census(analysis: dict) -> Picture:
    """Figures 5, 12, 13 in short: where every head looks, and whether the fast pairs tell."""
    found = analysis["heads"]
    layers = [layer["layer"] for layer in analysis["layers"]]
    shape = len(layers), len(found) // len(layers)

    def draw(figure, theme: Theme) -> None:
        panels = figure.subplots(1, 4, width_ratios=[1.6, 1, 1, 1])
        look = styles(list(KINDS), theme)
        for kind, words in KINDS.items():
            points = [(h["high_frequency_share"], h["positional"]) for h in found if h["kind"] == kind]
            if points:
                style = look[kind] | {"ls": "", "ms": 6, "marker": MARKERS[list(KINDS).index(kind)]}
                panels[0].plot(*zip(*points, strict=True), label=words, **style)
        panels[0].set(xlabel="high_frequency_share", ylabel="weight on itself or the token before", ylim=(-0.03, 1.03))
        panels[0].set_title("Do positional heads use the fast pairs?")
        panels[0].legend(fontsize=8)
        for axes, (score, words) in zip(panels[1:], SCORES.items(), strict=True):
            values = np.array([head[score] for head in found]).reshape(shape)
            image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xlabel="head", title=f"on {words}")
            axes.set_yticks(range(0, shape[0], max(shape[0] // 8, 1)), layers[:: max(shape[0] // 8, 1)])
            axes.set_xticks(range(0, shape[1], max(shape[1] // 8, 1)))
            axes.grid(False)
        panels[1].set_ylabel("layer")
        figure.colorbar(image, ax=panels[3], pad=0.04)

    best = {score: max(found, key=lambda head, score=score: head[score]) for score in SCORES}
    said = "; ".join(f"{words}: {best[s][s]:.2f}, of head {name_of(best[s])}" for s, words in SCORES.items())
    correlation = analysis["rank_correlation"]
    caption = "Mean weight of every head, over queries from the third token on."
    if correlation:
        caption += (
            f" Spearman's rank correlation on the left: {correlation['rho']:.2f} (p-value "
            f"{correlation['p_value']:.2g}, {correlation['heads']} heads)."
        )
    return Picture("census", "Where the heads look", f"Greatest mean weight on {said}.", caption, draw, (12, 3.6))


def heads(analysis: dict) -> Picture:
    """Figures 5, 12, 13: the chosen heads' maps, beside the frequencies that they use."""
    shown = analysis["shown"]
    rows = {layer["layer"]: layer for layer in analysis["layers"]}
    records = {(head["layer"], head["head"]): head for head in analysis["heads"]}

    def draw(figure, theme: Theme) -> None:
        panels = figure.subplots(2, len(shown), squeeze=False, height_ratios=[1.25, 1])
        look = styles(["query", "key"], theme)
        for (top, below), head in zip(panels.T, shown, strict=True):
            layer = rows[head["layer"]]
            keys = layer["key_norms"]
            record = records[head["layer"], head["head"]]
            top.imshow(np.array(head["map"]) ** 0.5, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            top.grid(False)
            score = head["why"] if head["why"] in SCORES else "positional"
            top.set(title=f"{name_of(head)}: {score} {record[score]:.2f}", xlabel="key", ylabel="query")
            own = keys[head["head"] * len(keys) // len(layer["query_norms"])]
            for name, values in (("query", layer["query_norms"][head["head"]]), ("key", own)):
                below.plot(values, label=name, **look[name] | {"marker": None})
            if layer["turned"] < len(own):
                below.axvline(layer["turned"] - 0.5, color="#ff4d4d", lw=1.5)
            below.set(xlabel="pair, fastest first", ylim=(0, None))
            below.set_ylabel("mean norm")
            top.label_outer()
        panels[1, 0].legend()

    said = "; ".join(
        f"head {name_of(head)}: diagonal {r['diagonal']:.2f}, previous token {r['previous_token']:.2f}, first token "
        f"{r['first_token']:.2f}"
        for head in shown
        for r in [records[head["layer"], head["head"]]]
    )
    tokens = len(shown[0]["map"])
    caption = (
        f"Above: weights among the first {tokens} tokens of the first sequence, as square roots, so that small ones "
        "are seen. Below: which pairs the head uses. Chosen are the strongest by their means over all sequences."
    )
    return Picture("heads", "Chosen heads", f"Attention maps. {said}.", caption, draw, (3.1 * len(shown), 5.4))


def channels(analysis: dict) -> Picture:
    """Figures 7, 9, 14 in short: the strongest channels, and what the loss is without them."""
    found = analysis["channels"]
    names = [f"{name_of(channel)}, pair {channel['pair']}" for channel in found]

    def draw(figure, theme: Theme) -> None:
        logits, losses = figure.subplots(1, 2, sharey=True)
        look = styles(["first", "others"], theme)
        at = np.arange(len(found))
        for shift, name, key in ((-0.2, "the first token", "to_first"), (0.2, "all others", "to_others")):
            colour = look[key.removeprefix("to_")]["color"]
            logits.barh(at + shift, [channel[key] for channel in found], 0.36, color=colour, label=f"to {name}")
        logits.set_yticks(at, names)
        logits.invert_yaxis()
        logits.set(xlabel="added to the logit, mean", title="What a channel adds")
        logits.legend()
        for shift, name, key in ((-0.2, "stopped", "first"), (0.2, "removed", "others")):
            there = [(i, channel[name]) for i, channel in enumerate(found) if channel[name]]
            if there:
                values, errors = [r["difference"] for _, r in there], [r["stderr"] or 0 for _, r in there]
                losses.barh([i + shift for i, _ in there], values, 0.36, xerr=errors, color=look[key]["color"],
                            ecolor=theme.text, label=f"rotation {name}" if name == "stopped" else name)  # fmt: skip
        losses.axvline(0, color=theme.text, lw=1)
        losses.set(xlabel="nats per token", title="Loss without it, minus loss as it is")
        losses.legend()

    said = "; ".join(
        f"{name}: {c['to_first']:.2f} to the first token, {c['to_others']:.2f} to others, loss "
        f"{c['removed']['difference']:+.4f} when removed"
        for name, c in zip(names, found, strict=True)
    )
    caption = (
        "Pairs of the slower half, or unturned, in which queries and keys are longest. Bars at the right: standard "
        "errors of the difference over sequences. A pair that is not turned cannot be stopped."
    )
    return Picture("channels", "Semantic channels", f"{said}.", caption, draw, (12, 1.6 + 0.6 * len(found)))
