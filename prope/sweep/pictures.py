"""Draws the loss curve of a run, and the pictures of a sweep: curves by p beside their differences from RoPE's.

A curve is a dictionary from x to y. Curves come by group of runs that differ in their seed only, and within a group by
seed: {"p = 0.25": {0: {10: 5.1, 20: 4.9}}}. Seeds are averaged, and differences taken seed by seed, so that what
runs of one seed have in common (initial weights, batches, text) drops out.
"""

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
from etils import epath

from prope.errors import UsageError
from prope.html.drawing import TEXT, Picture, legend, line, panels, styles
from prope.inference.paired import Difference, average_seeds
from prope.sweep.maps import maps
from prope.sweep.runs import SEED, P, Run, against_reference, group_name, groups, reference
from prope.workdir.records import (
    evaluations_of_training,
    find_evaluation,
    find_evaluations,
    read_jsonl,
)
from prope.workdir.run import read_config

Curves = dict[str, dict[int | None, dict[float, float]]]


def draw_loss(workdir: epath.Path) -> epath.Path:
    """Draws training and validation loss of a run by step, with the unigram baseline; returns the picture's path."""
    config = read_config(workdir)
    steps = read_jsonl(workdir / "metrics.jsonl")
    if config is None or not steps:
        raise UsageError(
            f"--workdir={workdir}: no metrics of a run there; give the --workdir that prope.train had"
        )
    records = read_jsonl(workdir / "eval.jsonl")
    by_step = (
        evaluations_of_training(records, config, step)
        for step in sorted({r["step"] for r in records})
    )
    evaluations = [find_evaluation(of_step) for of_step in by_step if of_step]

    def draw(figure) -> None:
        axes = figure.subplots()
        line(
            axes,
            {r["step"]: (r["loss"], None) for r in steps},
            {"color": "#4477aa", "lw": 1.2},
            "training batch",
        )
        if evaluations:
            last, style = evaluations[-1], {"color": "#cc3311", "lw": 1.2, "marker": "o", "ms": 4}
            label = f"validation, {last['loss']:.3f} at step {last['step']} ({last['bits_per_byte']:.2f} bits per byte)"
            line(axes, {r["step"]: (r["loss"], None) for r in evaluations}, style, label)
            unigram = last["loss"] * last["unigram_bits_per_byte"] / last["bits_per_byte"]
            axes.axhline(
                unigram,
                color="#777777",
                lw=1,
                ls="--",
                label=f"token frequencies alone, {unigram:.3f}",
            )
        axes.set(
            xlabel="step",
            ylabel="loss (nats per token)",
            xlim=(0, None),
            ylim=(0, math.ceil(steps[0]["loss"])),
        )
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"{config.data.dataset}, rope_percentage = {config.model.rope_percentage}")
        axes.legend(loc="best")

    output = workdir / "loss.png"
    output.write_bytes(Picture("loss", "", "", "", draw, (7, 4.2)).render()[0])
    return output


def pictures(runs: list[Run]) -> list[Picture]:
    """Makes the pictures that the runs have numbers for, in the order of the page."""
    by_name = groups(runs)
    base = {name: reference(group[0].values, by_name) for name, group in by_name.items()}
    steps = curves(runs, lambda run: {r["step"]: r["loss"] for r in run.metrics})
    positions = curves(
        runs, lambda run: by_middle((run.evaluation or {}).get("by_position", []), "loss")
    )
    longest = curves(runs, by_octave)
    answers = {run.name: accuracies(run) for run in runs}
    of_task = {
        task: curves(
            runs,
            lambda r, t=task: by_middle([e for e in answers[r.name] if e["task"] == t], "accuracy"),
        )
        for task in sorted({entry["task"] for entries in answers.values() for entry in entries})
    }
    nats, lengths = "validation loss (nats per token)", curves(runs, by_length)
    far = "Loss by position in the longest windows"
    drawn = (
        perplexity_picture(runs),
        curves_picture(
            "loss", "Training loss", "step", "loss (nats per token)", steps, base, robust=True
        ),
        curves_picture(
            "position", "Loss by position in the window", "position (tokens)", nats, positions, base
        ),
        curves_picture(
            "length", "Loss by context length", "tokens in a window", nats, lengths, base, log=True
        ),
        curves_picture("far", far, "position (tokens)", nats, longest, base, log=True),
        accuracy_picture(of_task),
    )
    return [picture for picture in drawn if picture] + maps(runs)


def curves(runs: list[Run], of: Callable[[Run], dict[float, float]]) -> Curves:
    """Collects the curves of all runs that have any points, by group and seed."""
    by_group = {
        name: {run.values.get(SEED): of(run) for run in group}
        for name, group in groups(runs).items()
    }
    by_group = {
        name: {seed: curve for seed, curve in seeds.items() if curve}
        for name, seeds in by_group.items()
    }
    return {name: seeds for name, seeds in by_group.items() if seeds}


def by_middle(buckets: list[dict], name: str) -> dict[float, float]:
    """Reads a measure by the middle of each bucket of positions or distances."""
    return {(bucket["from"] + bucket["to"]) / 2: bucket[name] for bucket in buckets}


def by_length(run: Run) -> dict[float, float]:
    """Reads the last step's loss by window length, two at least: on the same text, else at the same max_windows."""
    by_text: dict[tuple, dict[float, float]] = {}
    for record in find_evaluations(
        run.evaluations, step=run.config.num_steps, dataset=run.config.data.dataset
    ):
        key = record.get("max_windows") or math.inf, record.get("fingerprint")
        by_text.setdefault(key, {})[record["seq_len"]] = record["loss"]
    lengths = [(key[0], len(losses), losses) for key, losses in by_text.items() if len(losses) > 1]
    return max(lengths, key=lambda entry: entry[:2], default=(0, 0, {}))[2]


def by_octave(run: Run) -> dict[float, float]:
    """Reads the last step's loss by octave of positions in the longest windows; {} if training's are as long."""
    records = find_evaluations(
        run.evaluations, step=run.config.num_steps, dataset=run.config.data.dataset
    )
    longer = [r for r in records if r["seq_len"] > run.config.data.seq_len and r.get("by_position")]
    buckets = max(longer, key=lambda record: record["seq_len"], default={"by_position": []})[
        "by_position"
    ]
    losses = {}
    for _, group in itertools.groupby(buckets, lambda bucket: bucket["from"].bit_length()):
        octave = list(group)
        middle = (octave[0]["from"] + octave[-1]["to"]) / 2
        losses[middle] = statistics.fmean(
            [b["loss"] for b in octave], [b["tokens"] for b in octave]
        )
    return losses


def accuracies(run: Run) -> list[dict]:
    """Reads accuracy by distance of the last step, of the fullest evaluation in the longest windows."""
    records = find_evaluations(run.evaluations, step=run.config.num_steps)
    records = [record for record in records if record.get("accuracy_by_distance")]
    fullest = find_evaluation(records, seq_len=max((r["seq_len"] for r in records), default=0))
    return fullest["accuracy_by_distance"] if fullest else []


def mean(seeds: dict[int | None, dict[float, float]]) -> dict[float, tuple[float, float | None]]:
    """Computes (mean, standard error) over seeds at every x that all of them have; no error for a single seed."""
    common = sorted(set.intersection(*map(set, seeds.values())))
    return {x: average_seeds([curve[x] for curve in seeds.values()])[:2] for x in common}


def subtract(seeds: dict, others: dict) -> dict[int | None, dict[float, float]]:
    """Subtracts curves, seed by seed."""
    both = {seed: (curve, others[seed]) for seed, curve in seeds.items() if seed in others}
    return {seed: {x: a[x] - b[x] for x in a if x in b} for seed, (a, b) in both.items()}


def curves_picture(
    name: str, title: str, x: str, y: str, by_group: Curves, base: dict, log=False, robust=False
) -> Picture | None:
    """Draws curves; on the right their differences from RoPE's, whose group `base` names for every group."""
    apart = {
        g: subtract(seeds, by_group[base[g]])
        for g, seeds in by_group.items()
        if base[g] in by_group
    }
    apart = {g: points for g, seeds in apart.items() if seeds and (points := mean(seeds))}
    means = {g: points for g, seeds in by_group.items() if (points := mean(seeds))}
    if not means:
        return None

    def draw(figure) -> None:
        left, *right = panels(figure, 2 if apart else 1)[0]
        style = styles(list(by_group))
        for group, points in means.items():
            line(left, points, style[group], group)
        left.set(xlabel=x, ylabel=y, title=title)
        legend(left)
        for axes in right:
            for group, points in apart.items():
                line(axes, points, style[group])
            axes.axhline(0, color=TEXT, lw=1.2)
            axes.set(xlabel=x, ylabel="difference (nats per token)", title="minus that of RoPE")
            if robust:  # the first steps would flatten all others
                low, high = np.quantile(
                    [v for points in apart.values() for v, _ in points.values()], [0.025, 0.975]
                )
                axes.set_ylim(low - 0.3 * (high - low) - 1e-4, high + 0.3 * (high - low) + 1e-4)
        for axes in figure.axes:
            axes.locator_params(axis="x", integer=True)
            if log:
                ticks = sorted({at for points in means.values() for at in points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks])

    ends = "; ".join(f"{g}: {list(points.values())[-1][0]:.4f}" for g, points in means.items())
    side, caption = "", "Means over seeds; bands are their standard errors."
    if apart:
        side = ", and its difference from RoPE’s"
        caption += " Second panel: the difference from RoPE, seed by seed, in which what is hard for all drops out."
    return Picture(name, title, f"{title}, by {x}{side}. At the right end: {ends}.", caption, draw)


def perplexity_picture(runs: list[Run]) -> Picture | None:
    """Draws perplexity by p: every run a dot, means over seeds with their spread, and the evaluation's own error."""
    swept, by_name, means = all(P in run.values for run in runs), groups(runs), {}
    title = "Validation perplexity" + (" by p" if swept else "")
    lines: dict[
        str, dict[float | str, list[dict]]
    ] = {}  # by the other swept fields, then by p: evaluations
    apart: dict[str, dict[float, Difference]] = {}  # from RoPE's, likewise
    for name, group in by_name.items():
        values, base = group[0].values, reference(group[0].values, by_name)
        x = values[P] if swept else name
        if evaluations := [run.evaluation for run in group if run.state == "finished"]:
            others = {k: v for k, v in values.items() if swept and k not in (P, SEED)}
            line_name = group_name(others) if others else ""
            lines.setdefault(line_name, {})[x] = evaluations
            means[name] = statistics.fmean(record["perplexity"] for record in evaluations)
            if base and (difference := against_reference(group, by_name[base])[0]):
                apart.setdefault(line_name, {})[x] = difference
    if not means:
        return None

    def draw(figure) -> None:
        from matplotlib import ticker

        axes, *right = panels(figure, 2 if apart else 1, sharex=True)[0]
        style_of = styles(list(lines))
        for name, points in lines.items():
            style, centres = style_of[name], []
            for x, evaluations in points.items():
                values = [record["perplexity"] for record in evaluations]
                centres.append(statistics.fmean(values))
                axes.plot(
                    [x] * len(values),
                    values,
                    ls="",
                    marker="o",
                    ms=4,
                    mfc="none",
                    mec=style["color"],
                    alpha=0.8,
                )
                if len(values) > 1:
                    axes.errorbar(
                        x,
                        centres[-1],
                        statistics.stdev(values),
                        color=style["color"],
                        capsize=5,
                        lw=1.6,
                    )
                if errors := [
                    record["loss_stderr"] for record in evaluations if record.get("loss_stderr")
                ]:
                    error = centres[-1] * statistics.fmean(
                        errors
                    )  # of an exponential, to first order
                    axes.errorbar(x, centres[-1], error, color=TEXT, alpha=0.35, lw=5, zorder=1)
            axes.plot(
                list(points),
                centres,
                **style | {"ms": 7} | ({} if swept else {"ls": ""}),
                label=name,
            )
        axes.set(ylabel="validation perplexity", title=title)
        axes.set_yscale("log")  # a run that learns nothing leaves room for the others
        for set_formatter in (
            axes.yaxis.set_major_formatter,
            axes.yaxis.set_minor_formatter,
        ):  # plain numbers
            set_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        for beside in right:
            for name, differences in apart.items():
                low = [d.difference - (d.interval() or d[:1])[0] for d in differences.values()]
                means_by_p = [d.difference for d in differences.values()]
                beside.errorbar(list(differences), means_by_p, low, **style_of[name] | {"ls": ""})
            beside.axhline(0, color=TEXT, lw=1.2)
            middle = statistics.median(
                abs(d.difference) for of_line in apart.values() for d in of_line.values()
            )
            beside.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(max(middle, 1e-4))))
            beside.yaxis.set_major_formatter("{x:g}")
            beside.set(ylabel="difference (nats per token)", title="loss minus that of RoPE")
        for each in figure.axes:
            each.tick_params(axis="x", labelbottom=True, labelrotation=0 if swept else 90)
            if swept:
                each.set_xticks(sorted({x for points in lines.values() for x in points}))
                each.set_xlabel("rope_percentage p (0: NoPE, 1: RoPE)")
        if len(lines) > 1:
            legend(axes)

    alt = f"Validation perplexity. {'; '.join(f'{name}: {mean:.4f}' for name, mean in means.items())}."
    caption = (
        "Circles are runs, filled marks their means. Bars with ends: standard deviation over seeds."
    )
    caption += " Wide pale bars: standard error of the evaluation over documents, which runs on the same ones largely"
    caption += " share. Second panel: 95 % intervals of the paired differences."
    return Picture("perplexity", title, alt, caption, draw)


def accuracy_picture(of_task: dict[str, Curves]) -> Picture | None:
    """Draws accuracy by distance: a panel for every task."""
    if not of_task:
        return None
    means = {
        task: {group: mean(seeds) for group, seeds in by_group.items()}
        for task, by_group in of_task.items()
    }
    columns, rows = min(len(means), 3), -(-len(means) // 3)

    def draw(figure) -> None:
        style = styles(sorted({group for by_group in means.values() for group in by_group}))
        every = panels(figure, len(means), wrap=columns, sharey=True)[0]
        for axes, (task, by_group) in zip(every, means.items(), strict=True):
            for group, points in by_group.items():
                line(axes, points, style[group], group)
            axes.set(xlabel="distance (tokens)", title=f"Accuracy: {task}", ylim=(-0.03, 1.03))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        figure.axes[0].set_ylabel("share of correct answers")
        legend(figure.axes[0])

    last = {
        f"{task}, {group}": list(points.values())[-1]
        for task, of in means.items()
        for group, points in of.items()
    }
    ends = "; ".join(f"{name}: {mean:.3f}" for name, (mean, _) in last.items())
    alt = f"Accuracy by the distance at which the answer stands. At the greatest distance: {ends}."
    caption = "By the number of tokens between a question and its answer. Bands: standard errors over seeds."
    return Picture(
        "accuracy",
        "Accuracy by distance",
        alt,
        caption,
        draw,
        (max(4.4 * columns, 7.2), 3.9 * rows),
    )
