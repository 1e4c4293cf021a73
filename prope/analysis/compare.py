"""Compares several analyses on one page: how frequency usage and the census change with p.

Axes: L layers, N heads, P pairs, R runs with the same p.
"""

import json
import os
import re
import statistics

import numpy as np
from etils import epath

from prope.analysis.census import rank_correlation
from prope.analysis.page import KINDS, SCORES, norms
from prope.html import page
from prope.html.drawing import TEXT, Picture, line, panels, styles

Groups = dict[str, list[dict]]  # analyses by "p = .."


def write(folder: epath.Path, analyses: list[dict]) -> dict:
    """Writes the page, its pictures and comparison.json; returns what the command prints."""
    groups, first = by_p(analyses), analyses[0]
    rows = [row(p, group) for p, group in groups.items()]
    pictures = [
        usage(groups),
        scores(groups),
        *([losses(groups)] if all(a["channels"] for a in analyses) else []),
    ]
    name = folder.resolve().parent.name
    pages = (epath.Path(analysis["workdir"], "analysis", "index.html") for analysis in analyses)
    data = {
        "links": [os.path.relpath(path, folder) for path in pages],
        "rows": rows,
        "kinds": KINDS,
    }
    output = page.write(folder, "comparison", pictures, name=name, analyses=analyses, **data)
    (folder / "comparison.json").write_text(json.dumps(rows))
    about = {
        "output": str(output),
        "sequences": first["sequences"],
        "seq_len": first["seq_len"],
        "comparison": rows,
    }
    heads = [{"run": a["workdir"]} | head for a in analyses for head in a["heads"]]
    return about | {"runs": [a["workdir"] for a in analyses], "heads": heads}


def by_p(analyses: list[dict]) -> Groups:
    """Groups analyses by p, the mean of p first to last; layers that differ in p are listed.

    Runs whose encodings differ in other fields of config.model are groups of their own, whose names list these.
    """
    groups: Groups = {}
    common = set.intersection(*({*map(str, a["encoding"].items())} for a in analyses))
    for analysis in sorted(analyses, key=lambda a: np.mean(a["rope_percentage"])):
        name = ", ".join(f"{p:g}" for p in np.atleast_1d(analysis["rope_percentage"]))
        others = [
            f"{field[0]} = {field[1]}"
            for field in analysis["encoding"].items()
            if str(field) not in common
        ]
        groups.setdefault(", ".join([f"p = {name}", *others]), []).append(analysis)
    return groups


def label(p: str) -> str:
    """Shortens the name of a group for a picture: "p = 0.25, rope_type = partial" to "p = 0.25, partial"."""
    return re.sub(r", \w+ = ", ", ", p)


def row(p: str, group: list[dict]) -> dict:
    """Summarises the runs of a p.

    loss, loss_sd                       of the sequences that were read; the standard deviation over runs
    kinds                               heads of each kind, in all runs together
    diagonal, previous_token, first_token   the greatest score of any head, mean over runs
    high_frequency_share                mean over the heads of all runs
    rank_correlation                    `census.rank_correlation` of the heads of all runs together
    removed, stopped                    the greatest rise of the loss by a channel, mean over runs; nats per token
    """
    heads = [head for analysis in group for head in analysis["heads"]]
    losses = [analysis["loss"]["loss"] for analysis in group if analysis["loss"]]
    rises = {
        name: [
            [c[name]["difference"] for c in analysis["channels"] if c[name]] for analysis in group
        ]
        for name in ("removed", "stopped")
    }
    return {
        "p": p,
        "rotated_pairs": group[0]["rotated_pairs"],
        "runs": len(group),
        "heads": len(heads),
        "loss": statistics.fmean(losses) if losses else None,
        "loss_sd": statistics.stdev(losses) if len(losses) > 1 else None,
        "kinds": {kind or "none": sum(head["kind"] == kind for head in heads) for kind in KINDS},
        **{
            name: statistics.fmean(max(head[name] for head in a["heads"]) for a in group)
            for name in SCORES
        },
        "high_frequency_share": statistics.fmean(head["high_frequency_share"] for head in heads),
        "rank_correlation": rank_correlation(group),
        **{
            name: statistics.fmean(map(max, by_run)) if all(by_run) else None
            for name, by_run in rises.items()
        },
    }


def usage(groups: Groups) -> Picture:
    """Draws mean norms by pair: a line for every p."""
    means = {
        kind: {
            p: np.mean([norms(a, key).mean(axis=(0, 1)) for a in group], axis=0)
            for p, group in groups.items()
        }
        for kind, key in {"queries": "query_norms", "keys": "key_norms"}.items()
    }

    def draw(figure) -> None:
        style = styles(list(groups))
        for axes, (kind, lines) in zip(panels(figure, 2)[0], means.items(), strict=True):
            for p, values in lines.items():
                line(
                    axes,
                    {pair: (value, None) for pair, value in enumerate(values)},
                    style[p],
                    label(p),
                )
                rotated = np.unique(groups[p][0]["rotated_pairs"])
                if len(rotated) == 1 and 0 < rotated[0] < len(values):
                    axes.axvline(rotated[0] - 0.5, color=style[p]["color"], lw=1, ls=":")
            axes.set(xlabel="pair, fastest first", ylabel="mean norm", title=kind, ylim=(0, None))
            axes.locator_params(axis="x", integer=True)
        figure.axes[0].legend(loc="best")

    ends = "; ".join(
        f"{p}: queries {v[0]:.2f} fastest, {v[-1]:.2f} slowest" for p, v in means["queries"].items()
    )
    caption = (
        "Means over tokens, heads, layers and runs. Dotted: where the rotated pairs of that p end."
    )
    return Picture("usage", "Frequency usage by p", f"Mean norms by pair. {ends}.", caption, draw)


def plot_by_p(
    axes, values: dict[str, list[float]], title: str, errors: dict[str, list[float]] | None = None
) -> None:
    """Plots values side by side above their p, with error bars."""
    for at, (p, style) in enumerate(styles(list(values)).items()):
        count = len(values[p])
        x = at + (np.linspace(-0.25, 0.25, count) if count > 1 else np.zeros(count))
        axes.errorbar(x, values[p], errors and errors[p], **style | {"ls": ""})
    names = [label(p).removeprefix("p = ") for p in values]
    axes.set_xticks(range(len(values)), names, rotation=90 if max(map(len, names)) > 8 else 0)
    axes.set(xlabel="p", title=title)


def scores(groups: Groups) -> Picture:
    """Draws every head of every run, by p."""
    heads = {
        p: [head for analysis in group for head in analysis["heads"]] for p, group in groups.items()
    }

    def draw(figure) -> None:
        *of_scores, last = panels(figure, 4, width_ratios=[1, 1, 1, 1.4])[0]
        for axes, (score, words) in zip(of_scores, SCORES.items(), strict=True):
            plot_by_p(
                axes,
                {p: sorted(head[score] for head in heads[p]) for p in heads},
                f"weight on {words}",
            )
        for p, style in styles(list(heads)).items():
            shares, positional = (
                [h[name] for h in heads[p]] for name in ("high_frequency_share", "positional")
            )
            if any(shares):  # nothing is fast where nothing rotates
                last.plot(shares, positional, label=label(p), **style | {"ls": ""})
        last.set(xlabel="high_frequency_share", title="positional by use of fast pairs")
        last.legend(loc="best")
        for axes in figure.axes:
            axes.set_ylim(-0.03, 1.03)

    greatest = "; ".join(f"{p}: {max(head['positional'] for head in heads[p]):.2f}" for p in heads)
    alt = f"Greatest weight on itself or the token before, {greatest}."
    caption = "Every mark is a head of a run, in order of its score."
    return Picture("scores", "Heads by p", alt, caption, draw, (12.9, 3.8))


def losses(groups: Groups) -> Picture:
    """Draws the changes of the loss without the channels, by p."""
    channels = {
        p: [channel for analysis in group for channel in analysis["channels"]]
        for p, group in groups.items()
    }

    def draw(figure) -> None:
        titles = {"removed": "a channel removed", "stopped": "a channel's rotation stopped"}
        for axes, (name, title) in zip(
            panels(figure, 2, sharey=True)[0], titles.items(), strict=True
        ):
            changes = {
                p: [channel[name] for channel in channels[p] if channel[name]] for p in channels
            }
            values = {p: [change["difference"] for change in changes[p]] for p in channels}
            plot_by_p(
                axes,
                values,
                title,
                {p: [change["stderr"] or 0 for change in changes[p]] for p in channels},
            )
            axes.axhline(0, color=TEXT, lw=1)
        figure.axes[0].set_ylabel("change of the loss (nats per token)")

    rises = "; ".join(
        f"{p}: {max(c['removed']['difference'] for c in of_p):+.4f}" for p, of_p in channels.items()
    )
    caption = (
        "The strongest slow or unrotated pairs of every run. Bars: standard errors over sequences."
    )
    alt = f"Greatest rise of the loss when removed, {rises}."
    return Picture("losses", "Loss without a channel", alt, caption, draw)
