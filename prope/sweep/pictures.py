"""The pictures of a sweep: curves by p, each beside its distance from RoPE's, on a light and on a dark ground.

A curve is a dictionary from x to y. Curves come by group of runs that differ in their seed only, and within a group by
seed: {"p = 0.25": {0: {10: 5.1, 20: 4.9}}}. Seeds are averaged, and differences taken seed by seed, so that what
runs of one seed have in common (initial weights, batches, text) drops out.
"""

import statistics
from collections.abc import Callable

from prope.html.drawing import Picture, Theme, line, styles
from prope.sweep.runs import SEED, P, Run, group_name, groups, reference

Curves = dict[str, dict[int | None, dict[float, float]]]


def pictures(runs: list[Run]) -> list[Picture]:
    """Those that the runs have numbers for, in the order of the page."""
    final = {run.name: run.evaluation for run in runs}
    base = {group_name(run.values): reference(run.values) for run in runs}
    steps = curves(runs, lambda run: {r["step"]: r["loss"] for r in run.metrics})
    positions = curves(runs, lambda run: by_position(final[run.name]))
    lengths = curves(runs, by_length)
    made = [perplexity_picture(runs)] if any(final.values()) else []
    if steps:
        made.append(pair_picture("loss", "Training loss", "step", "loss (nats per token)", steps, base, robust=True))
    if positions:
        made.append(pair_picture("position", "Loss by position in the window", "position in the window (tokens)",
                                 "validation loss (nats per token)", positions, base))  # fmt: skip
    if any(len(curve) > 1 for seeds in lengths.values() for curve in seeds.values()):
        made.append(pair_picture("length", "Loss by context length", "tokens in a window",
                                 "validation loss (nats per token)", lengths, base, log=True))  # fmt: skip
    tasks = sorted({entry["task"] for run in runs for entry in accuracies(run)})
    found = {
        task: curves(runs, lambda run, task=task: {
            (r["from"] + r["to"]) / 2: r["accuracy"] for r in accuracies(run) if r["task"] == task
        })
        for task in tasks
    }  # fmt: skip
    return [*made, accuracy_picture(found)] if found else made


def curves(runs: list[Run], of: Callable[[Run], dict[float, float]]) -> Curves:
    """Curves of all runs that have any points, by group and seed."""
    found = {name: {run.values.get(SEED): of(run) for run in group} for name, group in groups(runs).items()}
    found = {name: {seed: curve for seed, curve in seeds.items() if curve} for name, seeds in found.items()}
    return {name: seeds for name, seeds in found.items() if seeds}


def by_position(record: dict | None) -> dict[float, float]:
    """Loss by the middle of a bucket of positions."""
    return {(r["from"] + r["to"]) / 2: r["loss"] for r in (record or {}).get("by_position", [])}


def by_length(run: Run) -> dict[float, float]:
    """Loss of the last step by length of the windows, of evaluations on as many of them; of several the newest."""
    wanted = {"step": run.config.num_steps, "dataset": run.config.data.dataset}
    found: dict[int | None, dict[float, float]] = {}
    for record in run.evaluations:
        if wanted.items() <= record.items():
            found.setdefault(record.get("max_windows"), {})[record["seq_len"]] = record["loss"]
    return max(found.values(), key=len, default={})


def accuracies(run: Run) -> list[dict]:
    """Accuracy by distance of the last step, in the longest windows."""
    found = [r for r in run.evaluations if r["step"] == run.config.num_steps and r.get("accuracy_by_distance")]
    return max(found, key=lambda r: r["seq_len"])["accuracy_by_distance"] if found else []


def mean(seeds: dict[int | None, dict[float, float]]) -> dict[float, tuple[float, float | None]]:
    """(mean, standard error) over seeds at every x that all of them have; no error for a single seed."""
    common = set.intersection(*map(set, seeds.values()))
    made = {}
    for x in sorted(common):
        values = [curve[x] for curve in seeds.values()]
        made[x] = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return made


def minus(seeds: dict, others: dict) -> dict[int | None, dict[float, float]]:
    """The differences of curves, seed by seed."""
    both = {seed: (seeds[seed], others[seed]) for seed in seeds if seed in others}
    return {seed: {x: a[x] - b[x] for x in a if x in b} for seed, (a, b) in both.items()}


def pair_picture(name: str, title: str, x: str, y: str, found: Curves, base: dict, log=False, robust=False) -> Picture:
    """Curves on the left; on the right their differences from RoPE's, where `base` names that for a group."""
    apart = {g: minus(found[g], found[base[g]]) for g in found if base[g] in found}
    apart = {g: mean(seeds) for g, seeds in apart.items() if seeds and mean(seeds)}
    means = {g: points for g, seeds in found.items() if (points := mean(seeds))}

    def draw(figure, theme: Theme) -> None:
        panels = figure.subplots(1, 2 if apart else 1, squeeze=False)[0]
        look = styles(list(found), theme)
        for group, points in means.items():
            line(panels[0], points, look[group], group)
        panels[0].set(xlabel=x, ylabel=y, title=title)
        panels[0].legend()
        if apart:
            for group, points in apart.items():
                line(panels[1], points, look[group])
            panels[1].axhline(0, color=theme.text, lw=1.2)
            panels[1].set(xlabel=x, ylabel="difference (nats per token)", title="minus that of RoPE (p = 1)")
            if robust:  # the first steps would flatten all others
                low, high = statistics.quantiles([v for points in apart.values() for v, _ in points.values()], n=40)[
                    ::38
                ]
                panels[1].set_ylim(low - 0.3 * (high - low) - 1e-4, high + 0.3 * (high - low) + 1e-4)
        for axes in panels:
            if log:
                ticks = sorted({at for points in means.values() for at in points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks])

    ends = "; ".join(f"{g}: {list(points.values())[-1][0]:.4f}" for g, points in means.items())
    side = ", and its difference from RoPE's on the right" if apart else ""
    caption = "Means over seeds; bands are their standard errors."
    if apart:
        caption += " On the right the difference from RoPE, seed by seed, in which what is hard for all drops out."
    return Picture(name, title, f"{title}, by {x}{side}. At the right end: {ends}.", caption, draw)


def perplexity_picture(runs: list[Run]) -> Picture:
    """Perplexity against p: every run a dot, means over seeds with their spread, and the evaluation's own error."""
    lines: dict[str, list[list[Run]]] = {}  # by what is swept besides p and the seed
    for group in groups(runs).values():
        done = [run for run in group if run.state == "finished"]
        if done:
            others = {k: v for k, v in done[0].values.items() if k not in (P, SEED)}
            lines.setdefault(group_name(others) if others else "", []).append(done)

    def draw(figure, theme: Theme) -> None:
        axes = figure.subplots()
        look = styles(list(lines), theme)
        for name, members in lines.items():
            style = look[name]
            at = [run.config.model.rope_percentage if P in run.values else i for i, (run, *_) in enumerate(members)]
            means = [statistics.fmean(r.evaluation["perplexity"] for r in group) for group in members]
            for x, group, centre in zip(at, members, means, strict=True):
                values = [run.evaluation["perplexity"] for run in group]
                axes.plot([x] * len(values), values, ls="", marker="o", ms=4, mfc="none", mec=style["color"], alpha=0.8)
                if len(values) > 1:
                    spread = statistics.stdev(values)
                    axes.errorbar(x, centre, spread, color=style["color"], capsize=5, lw=1.6)
                own = [run.evaluation["loss_stderr"] for run in group if run.evaluation.get("loss_stderr")]
                if own:
                    wide = centre * statistics.fmean(own)  # of an exponential, to first order
                    axes.errorbar(x, centre, wide, color=theme.text, alpha=0.35, lw=5, zorder=1)
            axes.plot(at, means, **style | {"ms": 7}, label=name)
            if P not in members[0][0].values:
                axes.set_xticks(at, [group_name(group[0].values) for group in members])
            else:
                axes.set_xticks(sorted({run.values[P] for group in members for run in group}))
        axes.set(ylabel="validation perplexity", title="Validation perplexity by p")
        axes.set_xlabel("rope_percentage p (0: NoPE, 1: RoPE)" if P in runs[0].values else "")
        if len(lines) > 1:
            axes.legend()

    said = "; ".join(
        f"{group_name(group[0].values)}: {statistics.fmean(r.evaluation['perplexity'] for r in group):.4f}"
        for members in lines.values()
        for group in members
    )
    caption = (
        "Circles are runs, the line joins their means. Bars with ends: standard deviation over seeds. Wide pale bars: "
        "standard error of the evaluation over documents, which runs on the same ones largely share."
    )
    return Picture("perplexity", "Validation perplexity by p", f"Validation perplexity. {said}.", caption, draw)


def accuracy_picture(found: dict[str, Curves]) -> Picture:
    """Accuracy by distance: a panel for every task."""

    def draw(figure, theme: Theme) -> None:
        look = styles(sorted({group for task in found.values() for group in task}), theme)
        for axes, (task, groups_of_task) in zip(
            figure.subplots(1, len(found), squeeze=False, sharey=True)[0], found.items(), strict=True
        ):
            for group, seeds in groups_of_task.items():
                line(axes, mean(seeds), look[group], group)
            axes.set(xlabel="distance (tokens)", title=f"Accuracy: {task}", xscale="log", ylim=(-0.03, 1.03))
        figure.axes[0].set_ylabel("share of answers that are right")
        figure.axes[0].legend()

    ends = "; ".join(
        f"{task}, {group}: {list(mean(seeds).values())[-1][0]:.3f}"
        for task, groups_of_task in found.items()
        for group, seeds in groups_of_task.items()
    )
    alt = f"Accuracy by the distance at which the answer stands. At the greatest distance: {ends}."
    caption = "By the number of tokens between a question and its answer. Bands: standard errors over seeds."
    return Picture("accuracy", "Accuracy by distance", alt, caption, draw, (max(4.8 * len(found), 7.2), 3.9))
