"""Several analyses in one page: how frequency usage and the census move with p.

Axes: L layers, N heads, P pairs, R runs with the same p.
"""

import collections
import json
import pathlib
import statistics

import numpy as np

from prope.analysis.census import rank_correlation
from prope.analysis.pictures import KINDS, norms
from prope.html.drawing import Picture, Theme, styles
from prope.html.page import document, e, figures, html_table, section

FOOT = """<p>Every run’s own page is in its directory, analysis/index.html; comparison.json has the numbers. Made by
<code>python -m prope.analyze</code>.</p>
"""


def write(folder: pathlib.Path, analyses: list[dict]) -> dict:
    """Writes the page and its pictures; returns what the command prints."""
    folder.mkdir(exist_ok=True)
    groups = by_p(analyses)
    rows = [row(p, group) for p, group in groups.items()]
    (folder / "comparison.json").write_text(json.dumps(rows))
    drawn = [usage(groups), scores(groups), *([losses(groups)] if all(a["channels"] for a in analyses) else [])]
    shown = figures(folder, drawn)
    parts = [section("By p", table(rows)), *(section(picture.title, shown[picture.name]) for picture in drawn)]
    first = analyses[0]
    title = f"What the heads do: {folder.resolve().parent.name}"
    read = f"{first['sequences']} × {first['seq_len']} tokens of {first['source']}"
    about = f"{len(analyses)} runs; every one read {read}."
    head = f'<h1>{e(title)}</h1>\n<p class="lead">{e(lead(rows))}</p>\n<p class="soft">{e(about)}</p>\n'
    output = folder / "index.html"
    output.write_text(document(title, head, parts, FOOT))
    heads = [{"run": a["workdir"]} | head for a in analyses for head in a["heads"]]
    said = {"output": str(output), "sequences": first["sequences"], "seq_len": first["seq_len"], "comparison": rows}
    return said | {"runs": [a["workdir"] for a in analyses], "heads": heads}


def by_p(analyses: list[dict]) -> dict[str, list[dict]]:
    """Analyses by "p = .."; of layers that differ in p, by all of them."""
    found = collections.defaultdict(list)
    order = sorted(analyses, key=lambda a: np.mean(a["rope_percentage"]))
    for analysis in order:
        p = analysis["rope_percentage"]
        found[f"p = {p:g}" if isinstance(p, float | int) else f"p = {', '.join(f'{x:g}' for x in p)}"].append(analysis)
    return dict(found)


def row(p: str, group: list[dict]) -> dict:
    """A p in numbers: means over its runs, of all heads where nothing else is said.

    loss, loss_sd                       of the sequences that were read; the standard deviation over runs
    kinds                               heads of each kind, in all runs together
    diagonal, previous_token, first_token   the greatest score of any head, mean over runs
    high_frequency_share                mean over heads
    rank_correlation                    `census.rank_correlation` of the heads of all runs together
    removed, stopped                    the greatest rise of the loss by a channel, mean over runs; nats per token
    """
    heads = [head for analysis in group for head in analysis["heads"]]
    losses = [analysis["loss"]["loss"] for analysis in group if analysis["loss"]]
    found = {"p": p, "rotated_pairs": group[0]["rotated_pairs"], "runs": len(group), "heads": len(heads)}
    found["loss"] = statistics.fmean(losses) if losses else None
    found["loss_sd"] = statistics.stdev(losses) if len(losses) > 1 else None
    found["kinds"] = {kind or "none": sum(head["kind"] == kind for head in heads) for kind in KINDS}
    for score in ("diagonal", "previous_token", "first_token"):
        found[score] = statistics.fmean(max(head[score] for head in analysis["heads"]) for analysis in group)
    found["high_frequency_share"] = statistics.fmean(head["high_frequency_share"] for head in heads)
    found["rank_correlation"] = rank_correlation(heads)
    for name in ("removed", "stopped"):
        rises = [[c[name]["difference"] for c in analysis["channels"] if c[name]] for analysis in group]
        found[name] = statistics.fmean(map(max, rises)) if all(rises) else None
    return found


def lead(rows: list[dict]) -> str:
    """What changes from the smallest to the greatest p, in a sentence."""
    low, high = rows[0], rows[-1]
    if low is high:
        return f"All runs have {low['p']}."
    return (
        f"From {low['p']} to {high['p']}, the greatest weight that a head gives to the token before it goes from "
        f"{low['previous_token']:.2f} to {high['previous_token']:.2f}, and to itself from {low['diagonal']:.2f} to "
        f"{high['diagonal']:.2f}."
    )


def table(rows: list[dict]) -> str:
    """The rows as they stand in the page."""

    def number(value: float | None, form: str = ".3f") -> str:
        return "–" if value is None else f"{value:{form}}"

    made = []
    for r in rows:
        kinds = ", ".join(
            f"{count} {KINDS['' if kind == 'none' else kind]}" for kind, count in r["kinds"].items() if count
        )
        found = r["rank_correlation"]
        correlation = "–" if found is None else f"{found['rho']:+.2f} <small>(p-value {found['p_value']:.2g})</small>"
        loss = number(r["loss"], ".4f") + (f" <small>± {r['loss_sd']:.4f}</small>" if r["loss_sd"] is not None else "")
        cells = [e(r["p"]), e(r["rotated_pairs"]), str(r["runs"]), loss, e(kinds)]
        cells += [number(r[name]) for name in ("diagonal", "previous_token", "first_token", "high_frequency_share")]
        made.append(("", [*cells, correlation, number(r["stopped"], "+.4f"), number(r["removed"], "+.4f")]))
    head = ["p", "pairs turned", "runs", "loss", "heads by kind", "diagonal", "previous token", "first token"]
    head += ["high-frequency share", "rank correlation", "loss, a channel stopped", "loss, a channel removed"]
    note = (
        "Loss: mean ± standard deviation over runs. Diagonal, previous and first token: the greatest mean weight of "
        "any head, mean over runs. Rank correlation: of high-frequency share and positional weight, over the heads of "
        "all runs. Channels: the greatest rise of the loss by one of them, mean over runs."
    )
    return html_table("Means over runs.", head, made, text=[4]) + f'<p class="soft">{e(note)}</p>\n'


def usage(groups: dict[str, list[dict]]) -> Picture:
    """Mean norms by pair: a line for every p."""
    found = {
        name: {p: np.mean([norms(a, key).mean(axis=(0, 1)) for a in group], axis=0) for p, group in groups.items()}
        for name, key in {"queries": "query_norms", "keys": "key_norms"}.items()
    }

    def draw(figure, theme: Theme) -> None:
        look = styles(list(groups), theme)
        for axes, (name, lines) in zip(figure.subplots(1, 2), found.items(), strict=True):
            for p, values in lines.items():
                axes.plot(values, label=p, markevery=max(len(values) // 8, 1), **look[p])
                turned = groups[p][0]["rotated_pairs"]
                if isinstance(turned, int) and 0 < turned < len(values):
                    axes.axvline(turned - 0.5, color=look[p]["color"], lw=1, ls=":")
            axes.set(xlabel="pair, fastest first", ylabel="mean norm", title=name, ylim=(0, None))
        figure.axes[0].legend()

    ends = "; ".join(f"{p}: queries {v[0]:.2f} fastest, {v[-1]:.2f} slowest" for p, v in found["queries"].items())
    caption = "Means over tokens, heads, layers and runs. Dotted: where the turned pairs of that p end."
    return Picture("usage", "Frequency usage by p", f"Mean norms by pair. {ends}.", caption, draw)


def scores(groups: dict[str, list[dict]]) -> Picture:
    """Every head of every run, by p."""
    names = {
        "diagonal": "weight on itself",
        "previous_token": "weight on the token before",
        "first_token": "on the first token",
    }

    def draw(figure, theme: Theme) -> None:
        look = styles(list(groups), theme)
        panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.4])
        for axes, (score, title) in zip(panels, names.items(), strict=False):
            for at, (p, group) in enumerate(groups.items()):
                values = [head[score] for analysis in group for head in analysis["heads"]]
                spread = at + np.linspace(-0.25, 0.25, len(values))
                axes.plot(spread, sorted(values), **look[p] | {"ls": ""})
            axes.set_xticks(range(len(groups)), [p.removeprefix("p = ") for p in groups])
            axes.set(xlabel="p", title=title, ylim=(-0.03, 1.03))
        for p, group in groups.items():
            heads = [head for analysis in group for head in analysis["heads"]]
            points = [(head["high_frequency_share"], head["positional"]) for head in heads]
            panels[3].plot(*zip(*points, strict=True), label=p, **look[p] | {"ls": ""})
        panels[3].set(xlabel="high_frequency_share", title="positional by use of fast pairs", ylim=(-0.03, 1.03))
        panels[3].legend(fontsize=8)

    said = "; ".join(f"{p}: {max(h['positional'] for a in g for h in a['heads']):.2f}" for p, g in groups.items())
    caption = "Every mark is a head of a run, in order of its score."
    return Picture(
        "scores", "Heads by p", f"Greatest weight on itself or the token before, {said}.", caption, draw, (13, 3.8)
    )


def losses(groups: dict[str, list[dict]]) -> Picture:
    """What the loss is without the channels, by p."""

    def draw(figure, theme: Theme) -> None:
        look = styles(list(groups), theme)
        for axes, name in zip(figure.subplots(1, 2, sharey=True), ("removed", "stopped"), strict=True):
            for at, (p, group) in enumerate(groups.items()):
                found = [c[name] for analysis in group for c in analysis["channels"] if c[name]]
                spread = at + np.linspace(-0.25, 0.25, len(found)) if len(found) > 1 else [at] * len(found)
                values, errors = [c["difference"] for c in found], [c["stderr"] or 0 for c in found]
                axes.errorbar(spread, values, errors, **look[p] | {"ls": ""})
            axes.axhline(0, color=theme.text, lw=1)
            axes.set_xticks(range(len(groups)), [p.removeprefix("p = ") for p in groups])
            axes.set(xlabel="p", title=f"a channel {name}" if name == "removed" else "a channel's rotation stopped")
        figure.axes[0].set_ylabel("change of the loss (nats per token)")

    said = "; ".join(
        f"{p}: {max(c['removed']['difference'] for a in g for c in a['channels']):+.4f}" for p, g in groups.items()
    )
    caption = "The strongest slow or unturned pairs of every run. Bars: standard errors over sequences."
    return Picture(
        "losses", "Loss without a channel", f"Greatest rise of the loss when removed, {said}.", caption, draw
    )
