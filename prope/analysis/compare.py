"""Compares several analyses on one page: how frequency usage and the census change with p.

Axes: L layers, N heads, P pairs, R runs with the same p.
"""

import json
import os
import re
from statistics import fmean, stdev

import numpy as np
from etils import epath

from prope.analysis.census import rank_correlation
from prope.analysis.maps import FAST_SHARE, longest
from prope.analysis.page import KINDS, SCORES
from prope.html import page
from prope.html.drawing import TEXT, Picture, panels, styles

Groups = dict[str, list[dict]]  # analyses by "p = .."


def write(folder: epath.Path, analyses: list[dict], pages: list[epath.Path]) -> dict:
    """Writes the page, its pictures and comparison.json; returns what the command prints.

    `pages` are those of the analyses.
    """
    groups = by_p(analyses)
    rows = [row(p, group) for p, group in groups.items()]
    pictures = [usage(groups), scores(groups)]
    if all(analysis["channels"] for analysis in analyses):
        pictures.append(losses(groups))
    runs = [analysis["workdir"] for analysis in analyses]
    texts = [f"{a['sequences']} × {a['seq_len']} tokens of {a['source']}" for a in analyses]
    output = page.write(
        folder,
        "comparison",
        pictures,
        name=folder.resolve().parent.name,
        links=[os.path.relpath(path, folder) for path in pages],
        analyses=analyses,
        rows=rows,
        texts=list(dict.fromkeys(texts)),
        kinds=KINDS,
    )
    (folder / "comparison.json").write_text(json.dumps(rows))
    return {
        "output": str(output),
        "sequences": analyses[0]["sequences"],
        "seq_len": analyses[0]["seq_len"],
        "comparison": rows,
        "runs": runs,
        "heads": [{"run": a["workdir"]} | head for a in analyses for head in a["heads"]],
    }


def by_p(analyses: list[dict]) -> Groups:
    """Groups analyses by p, the mean of p first to last; layers that differ in p are listed.

    Runs whose encodings differ in other fields of config.model are groups of their own, whose names
    list these.
    """
    encodings = [{f"{name} = {v}" for name, v in a["encoding"].items()} for a in analyses]
    common = set.intersection(*encodings)
    groups: Groups = {}
    for analysis in sorted(analyses, key=lambda a: np.mean(a["rope_percentage"])):
        percentages = [f"{p:g}" for p in np.atleast_1d(analysis["rope_percentage"])]
        fields = [f"{name} = {value}" for name, value in analysis["encoding"].items()]
        others = [field for field in fields if field not in common]
        name = ", ".join([f"p = {', '.join(percentages)}", *others])
        groups.setdefault(name, []).append(analysis)
    return groups


def label(p: str) -> str:
    """Shortens the name of a group: "p = 0.25, rope_type = partial" to "p = 0.25, partial"."""
    return re.sub(r", \w+ = ", ", ", p)


def row(p: str, group: list[dict]) -> dict:
    """Summarises the runs of a p.

    loss, loss_sd           of the sequences that were read; the standard deviation over runs
    kinds                   heads of each kind, in all runs together
    diagonal, previous_token, first_token   the greatest score of any head, mean over runs
    high_frequency_share    mean over the heads of all runs
    rank_correlation        `census.rank_correlation` of the heads of all runs together
    removed, stopped        the greatest rise of the loss by a channel, mean over runs; nats per
                            token
    """
    heads = _pool(group, "heads")
    kinds = [head["kind"] for head in heads]
    losses = [analysis["loss"]["loss"] for analysis in group if analysis["loss"]]
    summary = {
        "p": p,
        "rotated_pairs": group[0]["rotated_pairs"],
        "runs": len(group),
        "heads": len(heads),
        "loss": fmean(losses) if losses else None,
        "loss_sd": stdev(losses) if len(losses) > 1 else None,
        "kinds": {kind or "none": kinds.count(kind) for kind in KINDS},
    }
    for score in SCORES:
        summary[score] = fmean(max(head[score] for head in a["heads"]) for a in group)
    summary["high_frequency_share"] = fmean(head["high_frequency_share"] for head in heads)
    summary["rank_correlation"] = rank_correlation(group)
    for change in ("removed", "stopped"):
        rises = [_changes(a["channels"], change, "difference") for a in group]
        summary[change] = fmean(map(max, rises)) if all(rises) else None
    return summary


def _pool(group: list[dict], name: str) -> list[dict]:
    """Joins the layers, heads or channels of several analyses."""
    return [record for analysis in group for record in analysis[name]]


def _changes(channels: list[dict], change: str, field: str) -> list[float]:
    """Lists a field of `removed` or `stopped`, 0 for None, of the channels that have it."""
    return [channel[change][field] or 0 for channel in channels if channel[change]]


def usage(groups: Groups) -> Picture:
    """Draws mean norms by pair: a line for every p, or for every window of its layers."""
    curves = {}
    for p, group in groups.items():
        windows = dict.fromkeys(layer["sliding_window"] for layer in group[0]["layers"])
        for window in windows:
            kind = f"window {window}" if window else "no window"
            name = f"{p}, {kind}" if len(windows) > 1 else p
            curves[name] = _curve(group, window)

    def draw(figure):
        left, right = panels(figure, 2)[0]
        for axes, kind, title in ((left, "query", "queries"), (right, "key", "keys")):
            for name, style in styles(list(curves)).items():
                axes.plot(curves[name][kind], label=label(name), markevery=4, **style)
            axes.set(xlabel="pair, fastest first", ylabel="mean norm", title=title, ylim=(0, None))
        left.legend()

    caption = "Means over tokens, heads, layers of the same window, and runs."
    alt = longest({name: [curve["key"]] for name, curve in curves.items()})
    return Picture("usage", "Frequency usage by p", alt, caption, draw)


def _curve(group: list[dict], window: int | None) -> dict:
    """Averages "query" and "key" norms over runs and heads of layers with this window, [P]."""
    layers = _pool(group, "layers")
    layers = [layer for layer in layers if layer["sliding_window"] == window]
    return {
        kind: np.mean([layer[f"{kind}_norms"] for layer in layers], axis=(0, 1))
        for kind in ("query", "key")
    }


def plot_by_p(axes, values: dict[str, list[float]], title: str, errors=None) -> None:
    """Plots values side by side above their p, with error bars."""
    for place, (p, style) in enumerate(styles(list(values)).items()):
        count = len(values[p])
        offsets = np.linspace(-0.25, 0.25, count) * (count > 1)
        bars = errors and errors[p]
        axes.errorbar(place + offsets, values[p], bars, **style | {"ls": ""})
    names = [label(p).removeprefix("p = ") for p in values]
    rotation = 90 if max(map(len, names)) > 8 else 0
    axes.set_xticks(range(len(names)), names, rotation=rotation)
    axes.set(xlabel="p", title=title)


def scores(groups: Groups) -> Picture:
    """Draws every head of every run, by p."""
    heads = {p: _pool(group, "heads") for p, group in groups.items()}

    def draw(figure):
        *row, last = panels(figure, 4, width_ratios=[1, 1, 1, 1.4])[0]
        for axes, (score, words) in zip(row, SCORES.items(), strict=True):
            values = {p: sorted(head[score] for head in heads[p]) for p in heads}
            plot_by_p(axes, values, f"weight on {words}")
        for p, style in styles(list(heads)).items():
            shares = [head["high_frequency_share"] for head in heads[p]]
            positional = [head["positional"] for head in heads[p]]
            if any(shares):  # nothing is fast where nothing rotates
                last.plot(shares, positional, label=label(p), **style | {"ls": ""})
        last.set(xlabel=FAST_SHARE, title="positional by use of fast pairs")
        last.legend()
        for axes in figure.axes:
            axes.set_ylim(-0.03, 1.03)

    caption = "Every mark is a head of a run, in order of its score."
    most = [f"{max(head['previous_token'] for head in heads[p]):.2f} with {p}" for p in heads]
    alt = f"Greatest weight on the token before: {', '.join(most)}."
    return Picture("scores", "Heads by p", alt, caption, draw, (12.9, 3.8))


def losses(groups: Groups) -> Picture:
    """Draws the changes of the loss without the channels, by p."""
    channels = {p: _pool(group, "channels") for p, group in groups.items()}

    def draw(figure):
        left, right = panels(figure, 2, sharey=True)[0]
        for axes, change, title in (
            (left, "removed", "a channel removed"),
            (right, "stopped", "a channel's rotation stopped"),
        ):
            values = {p: _changes(channels[p], change, "difference") for p in channels}
            errors = {p: _changes(channels[p], change, "stderr") for p in channels}
            plot_by_p(axes, values, title, errors)
            axes.axhline(0, color=TEXT, lw=1)
        left.set_ylabel("change of the loss (nats per token)")

    caption = "The strongest slow or unrotated pairs of every run. "
    caption += "Bars: standard errors over sequences."
    rises = [
        f"{max(_changes(channels[p], 'removed', 'difference'), default=0):+.4f} with {p}"
        for p in channels
    ]
    alt = f"Greatest change with a channel removed: {', '.join(rises)}."
    return Picture("losses", "Loss without a channel", alt, caption, draw)
