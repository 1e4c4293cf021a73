"""The pictures of a sweep: curves by p, each beside its difference from RoPE's.

A curve is a dictionary from x to y. Curves come by group of runs that differ in their seed only, and within a group by
seed: {"p = 0.25": {0: {10: 5.1, 20: 4.9}}}. Seeds are averaged, and differences taken seed by seed, so that what
runs of one seed have in common (initial weights, batches, text) drops out.
"""

import math
import statistics
from collections.abc import Callable

from prope.html.drawing import TEXT, Picture, line, styles
from prope.sweep.runs import SEED, P, Run, group_name, groups, reference
from prope.workdir.records import find_evaluation, find_evaluations

Curves = dict[str, dict[int | None, dict[float, float]]]


def pictures(runs: list[Run]) -> list[Picture]:
    """Those that the runs have numbers for, in the order of the page."""
    base = {group_name(run.values): reference(run.values) for run in runs}
    steps = curves(runs, lambda run: {r["step"]: r["loss"] for r in run.metrics})
    positions = curves(runs, lambda run: by_middle((run.evaluation or {}).get("by_position", []), "loss"))
    lengths = curves(runs, by_length)
    nats, drawn = "validation loss (nats per token)", []
    if any(run.evaluation for run in runs):
        drawn.append(perplexity_picture(runs))
    if steps:
        drawn.append(curves_picture("loss", "Training loss", "step", "loss (nats per token)", steps, base, robust=True))
    if positions:
        x = "position in the window (tokens)"
        drawn.append(curves_picture("position", "Loss by position in the window", x, nats, positions, base))
    if any(len(curve) > 1 for seeds in lengths.values() for curve in seeds.values()):
        x = "tokens in a window"
        drawn.append(curves_picture("length", "Loss by context length", x, nats, lengths, base, log=True))
    answers = {run.name: accuracies(run) for run in runs}
    tasks = sorted({entry["task"] for entries in answers.values() for entry in entries})
    of_task = {
        task: curves(runs, lambda r, t=task: by_middle([e for e in answers[r.name] if e["task"] == t], "accuracy"))
        for task in tasks
    }
    return [*drawn, accuracy_picture(of_task)] if of_task else drawn


def curves(runs: list[Run], of: Callable[[Run], dict[float, float]]) -> Curves:
    """Curves of all runs that have any points, by group and seed."""
    by_group = {name: {run.values.get(SEED): of(run) for run in group} for name, group in groups(runs).items()}
    by_group = {name: {seed: curve for seed, curve in seeds.items() if curve} for name, seeds in by_group.items()}
    return {name: seeds for name, seeds in by_group.items() if seeds}


def by_middle(buckets: list[dict], name: str) -> dict[float, float]:
    """A measure by the middle of a bucket of positions or distances."""
    return {(bucket["from"] + bucket["to"]) / 2: bucket[name] for bucket in buckets}


def by_length(run: Run) -> dict[float, float]:
    """Loss of the last step by window length, for the max_windows with the most lengths; of several the largest."""
    by_windows: dict[float, dict[float, float]] = {}
    for record in find_evaluations(run.evaluations, step=run.config.num_steps, dataset=run.config.data.dataset):
        by_windows.setdefault(record.get("max_windows") or math.inf, {})[record["seq_len"]] = record["loss"]
    return max(by_windows.items(), key=lambda item: (len(item[1]), item[0]), default=(0, {}))[1]


def accuracies(run: Run) -> list[dict]:
    """Accuracy by distance of the last step, from the fullest evaluation in the longest windows."""
    records = [r for r in run.evaluations if r["step"] == run.config.num_steps and r.get("accuracy_by_distance")]
    fullest = find_evaluation(records, seq_len=max((r["seq_len"] for r in records), default=0))
    return fullest["accuracy_by_distance"] if fullest else []


def mean(seeds: dict[int | None, dict[float, float]]) -> dict[float, tuple[float, float | None]]:
    """(mean, standard error) over seeds at every x that all of them have; no error for a single seed."""
    means = {}
    for x in sorted(set.intersection(*map(set, seeds.values()))):
        values = [curve[x] for curve in seeds.values()]
        means[x] = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return means


def subtract(seeds: dict, others: dict) -> dict[int | None, dict[float, float]]:
    """The differences of curves, seed by seed."""
    both = {seed: (curve, others[seed]) for seed, curve in seeds.items() if seed in others}
    return {seed: {x: a[x] - b[x] for x in a if x in b} for seed, (a, b) in both.items()}


def curves_picture(
    name: str, title: str, x: str, y: str, by_group: Curves, base: dict, log=False, robust=False
) -> Picture:
    """Curves on the left; on the right their differences from RoPE's, whose group `base` names for every group."""
    apart = {g: subtract(seeds, by_group[base[g]]) for g, seeds in by_group.items() if base[g] in by_group}
    apart = {g: points for g, seeds in apart.items() if seeds and (points := mean(seeds))}
    means = {g: points for g, seeds in by_group.items() if (points := mean(seeds))}

    def draw(figure) -> None:
        panels = figure.subplots(1, 2 if apart else 1, squeeze=False)[0]
        style = styles(list(by_group))
        for group, points in means.items():
            line(panels[0], points, style[group], group)
        panels[0].set(xlabel=x, ylabel=y, title=title)
        panels[0].legend()
        if apart:
            for group, points in apart.items():
                line(panels[1], points, style[group])
            panels[1].axhline(0, color=TEXT, lw=1.2)
            panels[1].set(xlabel=x, ylabel="difference (nats per token)", title="minus that of RoPE (p = 1)")
            if robust:  # the first steps would flatten all others
                quantiles = statistics.quantiles([v for points in apart.values() for v, _ in points.values()], n=40)
                low, high = quantiles[0], quantiles[-1]
                panels[1].set_ylim(low - 0.3 * (high - low) - 1e-4, high + 0.3 * (high - low) + 1e-4)
        for axes in panels:
            if log:
                ticks = sorted({at for points in means.values() for at in points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks])

    ends = "; ".join(f"{g}: {list(points.values())[-1][0]:.4f}" for g, points in means.items())
    side, caption = "", "Means over seeds; bands are their standard errors."
    if apart:
        side = ", and its difference from RoPE’s on the right"
        caption += " On the right the difference from RoPE, seed by seed, in which what is hard for all drops out."
    return Picture(name, title, f"{title}, by {x}{side}. At the right end: {ends}.", caption, draw)


def perplexity_picture(runs: list[Run]) -> Picture:
    """Perplexity against p: every run a dot, means over seeds with their spread, and the evaluation's own error."""
    swept = P in runs[0].values
    lines: dict[str, dict[float | str, list[dict]]] = {}  # by the other swept fields, then by p: evaluations
    means = {}
    for name, group in groups(runs).items():
        evaluations = [run.evaluation for run in group if run.state == "finished"]
        if evaluations:
            others = {k: v for k, v in group[0].values.items() if swept and k not in (P, SEED)}
            points = lines.setdefault(group_name(others) if others else "", {})
            points[group[0].values[P] if swept else name] = evaluations
            means[name] = statistics.fmean(record["perplexity"] for record in evaluations)

    def draw(figure) -> None:
        axes = figure.subplots()
        for (name, points), style in zip(lines.items(), styles(list(lines)).values(), strict=True):
            centres = []
            for x, evaluations in points.items():
                values = [record["perplexity"] for record in evaluations]
                centres.append(statistics.fmean(values))
                axes.plot([x] * len(values), values, ls="", marker="o", ms=4, mfc="none", mec=style["color"], alpha=0.8)
                if len(values) > 1:
                    axes.errorbar(x, centres[-1], statistics.stdev(values), color=style["color"], capsize=5, lw=1.6)
                errors = [record["loss_stderr"] for record in evaluations if record.get("loss_stderr")]
                if errors:
                    error = centres[-1] * statistics.fmean(errors)  # of an exponential, to first order
                    axes.errorbar(x, centres[-1], error, color=TEXT, alpha=0.35, lw=5, zorder=1)
            axes.plot(list(points), centres, **style | {"ms": 7}, label=name)
        if swept:
            axes.set_xticks(sorted({x for points in lines.values() for x in points}))
        axes.set(ylabel="validation perplexity", title="Validation perplexity by p")
        axes.set_xlabel("rope_percentage p (0: NoPE, 1: RoPE)" if swept else "")
        if len(lines) > 1:
            axes.legend()

    alt = f"Validation perplexity. {'; '.join(f'{name}: {mean:.4f}' for name, mean in means.items())}."
    caption = (
        "Circles are runs, the line joins their means. Bars with ends: standard deviation over seeds. Wide pale bars: "
        "standard error of the evaluation over documents, which runs on the same ones largely share."
    )
    return Picture("perplexity", "Validation perplexity by p", alt, caption, draw)


def accuracy_picture(of_task: dict[str, Curves]) -> Picture:
    """Accuracy by distance: a panel for every task."""
    means = {task: {group: mean(seeds) for group, seeds in by_group.items()} for task, by_group in of_task.items()}

    def draw(figure) -> None:
        style = styles(sorted({group for by_group in means.values() for group in by_group}))
        panels = figure.subplots(1, len(means), squeeze=False, sharey=True)[0]
        for axes, (task, by_group) in zip(panels, means.items(), strict=True):
            for group, points in by_group.items():
                line(axes, points, style[group], group)
            axes.set(xlabel="distance (tokens)", title=f"Accuracy: {task}", xscale="log", ylim=(-0.03, 1.03))
        panels[0].set_ylabel("share of correct answers")
        panels[0].legend()

    ends = "; ".join(
        f"{task}, {group}: {list(points.values())[-1][0]:.3f}"
        for task, by_group in means.items()
        for group, points in by_group.items()
    )
    alt = f"Accuracy by the distance at which the answer stands. At the greatest distance: {ends}."
    caption = "By the number of tokens between a question and its answer. Bands: standard errors over seeds."
    return Picture("accuracy", "Accuracy by distance", alt, caption, draw, (max(4.8 * len(means), 7.2), 3.9))
