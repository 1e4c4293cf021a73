"""Draws the loss curve of a run, and the pictures of a sweep.

A curve is a dictionary from x to y. Curves come by group of runs that differ in their seed only,
and within a group by seed: {"p = 0.25": {0: {10: 5.1, 20: 4.9}}}. Seeds are averaged, and
differences from RoPE taken seed by seed, so that what runs of one seed have in common (initial
weights, batches, text) drops out.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from prope.html.drawing import TEXT, Picture, escape_invisible, legend, line, panels, styles
from prope.html.page import number
from prope.inference.statistics import average_seeds
from prope.sweep.maps import maps
from prope.sweep.recovery import WITHIN, Recovery, list_evaluations
from prope.sweep.runs import SEED, P, Run, group_name, groups, have_same_seeds, shown_fields
from prope.workdir.records import find_evaluation, find_evaluations

Curve = dict[float, float]
Curves = dict[str, dict[int | None, Curve]]
Points = dict[float, tuple[float, float | None]]  # mean and error by x
Means = dict[str, Points]

LOSS = "loss (nats per token)"
VALIDATION = f"validation {LOSS}"
DIFFERENCE = "difference (nats per token)"
POSITION = "position (tokens)"
_DIFFERENT_SEEDS = "\nmeans over different seeds: not comparable"
_MEANS = (
    "Means over seeds; bands, where there are several, are their standard errors. Where there is "
    "a RoPE, on the right the difference from it, seed by seed: what is hard for all drops out."
)


def loss_picture(run: Run) -> Picture | None:
    """Makes a picture of the losses of a run by step; None without logged steps."""
    config = run.config
    evaluations = list_evaluations(run)

    def draw(figure) -> None:
        axes = figure.subplots()
        losses = by_step(run)
        axes.plot(losses.keys(), losses.values(), color="#4477aa", lw=1.2, label="training batch")
        if evaluations:
            _draw_validation(axes, evaluations)
        axes.set(
            xlabel="step",
            ylabel=LOSS,
            title=f"{config.data.dataset}, rope_percentage = {config.model.rope_percentage}",
        )
        axes.locator_params(axis="x", integer=True)
        axes.legend()

    if not run.metrics:
        return None
    caption = "Validation is made during training, on the same windows at every step."
    last = [run.metrics[-1], *evaluations[-1:]]
    ends = [f"{number(one['loss'])} at step {one['step']:,}" for one in last]
    alt = f"Last losses of training and validation: {', '.join(ends)}."
    return Picture("loss", "Loss", alt, caption, draw, size=(7, 4.2))


def _draw_validation(axes, evaluations: list[dict]) -> None:
    """Draws validation losses, and the loss of predicting by token frequencies alone."""
    losses = {record["step"]: record["loss"] for record in evaluations}
    style = {"marker": "o", "ms": 4, "color": "#cc3311", "lw": 1.2}
    axes.plot(losses.keys(), losses.values(), label="validation", **style)
    last = evaluations[-1]
    if last["bits_per_byte"] is None:
        return
    unigram = last["loss"] * last["unigram_bits_per_byte"] / last["bits_per_byte"]
    label = f"token frequencies alone, {unigram:.3f}"
    axes.axhline(unigram, color="#777777", lw=1, ls="--", label=label)


# --- Curves ---------------------------------------------------------------------------------------


def by_step(run: Run) -> Curve:
    """Reads the training loss of every logged step."""
    return {record["step"]: record["loss"] for record in run.metrics}


def by_position(run: Run) -> Curve:
    """Reads the last step's loss by position in the window."""
    evaluation = run.evaluation or {}
    return curve_by_bucket_centre(evaluation.get("by_position", []), "loss")


def curve_by_bucket_centre(buckets: list[dict], name: str) -> Curve:
    """Reads a measure by the middle of each bucket of positions or distances."""
    return {(bucket["from"] + bucket["to"]) / 2: bucket[name] for bucket in buckets}


def last_evaluations(run: Run) -> list[dict]:
    """Selects the last step's evaluations on the data of training, of all window lengths."""
    records = find_evaluations(run.evaluations, **shown_fields(run))
    if not run.metrics:
        return records
    # Not those of documents trained on.
    return [record for record in records if record.get("split") in (None, "validation")]


def by_length(run: Run) -> Curve:
    """Reads the last step's loss by window length: on the same text, else at the same max_windows.

    Fewer than two lengths are no curve.
    """
    by_text: dict[tuple, Curve] = {}
    for record in last_evaluations(run):
        text = record.get("max_windows") or math.inf, record.get("fingerprint")
        if record["loss"] is not None:
            by_text.setdefault(text, {})[record["seq_len"]] = record["loss"]

    several = [(text[0], losses) for text, losses in by_text.items() if len(losses) > 1]
    _, fullest = max(several, key=lambda one: (one[0], len(one[1])), default=(0, {}))
    return fullest


def by_octave(run: Run) -> Curve:
    """Reads the last step's loss by octave of positions, in windows longer than training's."""
    trained = run.config.data.seq_len
    records = [record for record in last_evaluations(run) if record.get("by_position")]
    longest = max(records, key=itemgetter("seq_len"), default={"seq_len": trained})
    if longest["seq_len"] <= trained:
        return {}
    losses = {}
    by_octave = itertools.groupby(longest["by_position"], lambda b: b["from"].bit_length())
    for _, octave in by_octave:
        buckets = list(octave)
        middle = (buckets[0]["from"] + buckets[-1]["to"]) / 2
        tokens = [bucket["tokens"] for bucket in buckets]
        values = [bucket["loss"] for bucket in buckets]
        losses[middle] = statistics.fmean(values, weights=tokens)
    return losses


def accuracies(run: Run) -> list[dict]:
    """Reads the last step's accuracy by task and distance, in the longest windows."""
    records = find_evaluations(run.evaluations, step=run.last_step)
    records = [record for record in records if record.get("accuracy_by_distance")]
    longest = max((record["seq_len"] for record in records), default=None)
    evaluation = find_evaluation(records, seq_len=longest) or {}
    return evaluation.get("accuracy_by_distance", [])


def by_distance(run: Run, task: str) -> Curve:
    """Reads the last step's accuracy in a task by the distance from question to answer."""
    entries = [entry for entry in accuracies(run) if entry["task"] == task]
    return curve_by_bucket_centre(entries, "accuracy")


class Plot(NamedTuple):
    """What a picture of curves shows."""

    name: str
    title: str
    x: str
    y: str
    read: Callable[[Run], Curve]
    log: bool = False  # x in octaves
    note: str = ""  # ends the caption


PLOTS = [
    Plot("loss", "Training loss", "step", LOSS, by_step),
    Plot("position", "Loss by position in the window", POSITION, VALIDATION, by_position),
    Plot(
        "length",
        "Loss by context length",
        "tokens in a window",
        VALIDATION,
        by_length,
        log=True,
        note=" Where max_windows limits their number, longer windows hold other text: then compare "
        "lines, not their slopes.",
    ),
    Plot(
        "far", "Loss by position in the longest windows", POSITION, VALIDATION, by_octave, log=True
    ),
]
RECOVERY = Plot(
    "recovery",
    "Recovery after conversion",
    "tokens of training",
    DIFFERENCE,
    dict,
    note=f" Validation loss minus that of the control; back: at most {WITHIN:g}.",
)


def pictures(
    runs: list[Run], rows: list[dict], recovered: Sequence[Recovery] = ()
) -> list[Picture]:
    """Makes the pictures that the runs have numbers for, in the order of the page.

    `rows` are those of the page's table, `recovered` of its table of recoveries.
    """
    plots = list(PLOTS)
    entries = [entry for run in runs for entry in accuracies(run)]
    for task in sorted({entry["task"] for entry in entries}):
        answers = [entry["answers"] for entry in entries if entry["task"] == task]
        plot = Plot(
            f"accuracy-{task}",
            f"Accuracy by distance: {task}",
            "distance (tokens)",
            "share of correct answers",
            functools.partial(by_distance, task=task),
            log=True,
            note=f" A point has {min(answers):,} to {max(answers):,} answers of a run.",
        )
        plots.append(plot)
    rope_of = {row["group"]: row["reference"] for row in rows}
    drawn = [perplexity_picture(rows)]
    drawn += [curves_picture(plot, read_curves(runs, plot.read), rope_of) for plot in plots]
    gaps = {recovery.run: dict(recovery.gaps) for recovery in recovered}
    by_group = read_curves(runs, lambda run: gaps.get(run.name, {}))
    drawn.append(curves_picture(RECOVERY, by_group, {}))
    return [picture for picture in drawn if picture] + maps(runs)


def read_curves(runs: list[Run], read: Callable[[Run], Curve]) -> Curves:
    """Reads the curves of all runs that have any points, by group and seed."""
    by_group: Curves = {}
    for name, group in groups(runs).items():
        for run in group:
            curve = read(run)
            if curve:
                by_group.setdefault(name, {})[run.values.get(SEED)] = curve
    return by_group


def average_curves(by_group: Curves) -> Means:
    """Averages the curves of each group over seeds, at every x that all of them have.

    A single seed has no standard error; groups without points are left out.
    """
    means: Means = {}
    for group, seeds in by_group.items():
        curves = list(seeds.values())
        points: Points = {}
        for x in sorted(set.intersection(*map(set, curves))):
            mean, error, *_ = average_seeds([curve[x] for curve in curves])
            points[x] = (mean, error)
        if points:
            means[group] = points
    return means


def minus_rope(by_group: Curves, rope_of: dict) -> Curves:
    """Subtracts RoPE's curves, seed by seed, from those of every other group."""
    differences: Curves = {}
    for group, seeds in by_group.items():
        rope_seeds = by_group.get(rope_of.get(group), {})
        for seed in seeds.keys() & rope_seeds.keys():
            curve = seeds[seed]
            rope = rope_seeds[seed]
            shared = {x: curve[x] - rope[x] for x in curve.keys() & rope.keys()}
            differences.setdefault(group, {})[seed] = shared
    return differences


def curves_picture(plot: Plot, by_group: Curves, rope_of: dict) -> Picture | None:
    """Draws curves, and on the right their differences from RoPE's, whose group `rope_of` names."""
    means = average_curves(by_group)
    differences = average_curves(minus_rope(by_group, rope_of))
    if not means:
        return None
    are_equal = len(set(map(frozenset, by_group.values()))) == 1
    shown = {plot.title if are_equal else f"{plot.title}{_DIFFERENT_SEEDS}": means}
    if differences:
        shown["minus that of RoPE"] = differences

    def draw(figure) -> None:
        style = styles(list(by_group))
        row = panels(figure, len(shown))[0]
        for axes, (title, lines) in zip(row, shown.items(), strict=True):
            for group, points in lines.items():
                line(axes, points, style[group], group)
            x = f"{plot.x}, log scale" if plot.log else plot.x
            y = plot.y if lines is means else "difference"
            axes.set(xlabel=x, ylabel=y, title=title)
            axes.locator_params(axis="x", integer=True)
            if plot.log:
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:,.0f}")
        legend(row[0])
        for axes in row[1:]:
            axes.axhline(0, color=TEXT, lw=1.2)

    last = {group: points[max(points)] for group, points in means.items()}
    ends = "; ".join(f"{group}: {mean:.4f}" for group, (mean, _) in last.items())
    alt = f"{plot.title}, by {plot.x}. At the right end: {ends}."
    return Picture(plot.name, plot.title, alt, f"{_MEANS}{plot.note}", draw)


# --- Perplexity -----------------------------------------------------------------------------------


def perplexity_picture(rows: list[dict]) -> Picture | None:
    """Draws perplexity by p, else by group, beside the paired differences of losses from RoPE's."""
    by_p = all(P in row["values"] for row in rows)
    rows = [row for row in rows if row["perplexity"] is not None]
    if not rows:
        return None
    perplexities, differences = read_means(rows, by_p)
    title = "Validation perplexity by p" if by_p else "Validation perplexity"
    are_equal = have_same_seeds(rows)
    shown = {title if are_equal else f"{title}{_DIFFERENT_SEEDS}": perplexities}
    if differences:
        shown["loss minus that of RoPE"] = differences

    def draw(figure) -> None:
        style = styles(list(perplexities))
        row = panels(figure, len(shown), sharex=True)[0]
        for axes, (name, means) in zip(row, shown.items(), strict=True):
            is_difference = means is differences
            joined = by_p and are_equal and not is_difference
            _draw_points(axes, means, style, joined)
            axes.set(ylabel=DIFFERENCE if is_difference else "validation perplexity", title=name)
            axes.tick_params(axis="x", labelrotation=0 if by_p else 90)
            if is_difference:
                axes.axhline(0, color=TEXT, lw=1.2)
            if by_p:
                axes.set_xticks(sorted({row[P] for row in rows}))
                axes.set_xlabel("rope_percentage p (0: NoPE, 1: RoPE)")
        if len(perplexities) > 1:
            legend(row[0])

    means = "; ".join(f"{row['group']}: {row['perplexity']:.4f}" for row in rows)
    alt = f"Validation perplexity. {means}."
    caption = (
        "Means over seeds and their standard deviations. Where there is a RoPE, on the right the "
        "paired differences from it and their 95 % intervals, as in the table."
    )
    return Picture("perplexity", title, alt, caption, draw)


def read_means(rows: list[dict], by_p: bool) -> tuple[Means, Means]:
    """Reads perplexities and differences from RoPE, by the swept fields other than p, and by x."""
    perplexities: Means = {}
    differences: Means = {}
    for row in rows:
        x = escape_invisible(row["group"])
        name = ""
        if by_p:
            values = dict(row["values"])
            x = values.pop(P)
            name = group_name(values)
        perplexities.setdefault(name, {})[x] = (row["perplexity"], row["perplexity_sd"])
        difference = row["difference"]
        if difference:
            interval = difference.interval()
            reach = interval and interval[1] - difference.difference
            differences.setdefault(name, {})[x] = (difference.difference, reach)
    return perplexities, differences


def _draw_points(axes, means: Means, style: dict, joined: bool) -> None:
    """Draws means with their errors, where they have any, as bars."""
    for name, points in means.items():
        options = style[name] if joined else style[name] | {"ls": ""}
        values, errors = zip(*points.values(), strict=True)
        bars = [math.nan if error is None else error for error in errors]
        axes.errorbar(list(points), values, bars, capsize=5, label=name, **options)
