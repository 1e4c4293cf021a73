"""Draws the loss curve of a run, and the curves of a sweep's runs by group."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prope.pages.drawing import (
    TEXT,
    Picture,
    escape_invisible,
    legend,
    line,
    panels,
    stacked_size,
    styles,
)
from prope.pages.page import number
from prope.pages.tasks import maps
from prope.sweep.curves import (
    Curve,
    Means,
    accuracies,
    average_curves,
    by_distance,
    by_length,
    by_octave,
    by_position,
    by_step,
    minus_reference,
    reach,
    read_curves,
)
from prope.sweep.recovery import WITHIN, Recovery, list_evaluations
from prope.sweep.runs import P, Run, group_name, have_same_seeds

LOSS = "loss (nats per token)"
VALIDATION = f"validation {LOSS}"
DIFFERENCE = "difference (nats per token)"
POSITION = "position (tokens)"
_DIFFERENT_SEEDS = "\nmeans over different seeds: not comparable"
_MEANS = "Means over seeds; bands are their 95 % intervals (Student’s t). "
_MINUS = "Below the difference from {}, seed by seed: what is hard for all drops out. "
_ONE_SEED = "The band of a single seed is its 95 % interval over documents"


def loss_picture(run: Run) -> Picture:
    """Makes a picture of the losses of a run by step, of which some are logged."""
    evaluations = list_evaluations(run)

    def draw(figure) -> None:
        axes = figure.subplots()
        losses = by_step(run)
        axes.plot(losses.keys(), losses.values(), color="#4477aa", lw=1.2, label="training batch")
        if evaluations:
            _draw_validation(axes, evaluations)
        axes.set(xlabel="step", ylabel=LOSS)
        axes.locator_params(axis="x", integer=True)
        axes.legend()

    caption = "Validation is made during training, on the same windows at every step."
    last = [run.metrics[-1], *evaluations[-1:]]
    ends = [f"{number(one['loss'])} at step {one['step']:,}" for one in last]
    alt = f"Last losses of training and validation: {', '.join(ends)}."
    return Picture("loss", "Loss", alt, caption, draw)


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


class Plot(NamedTuple):
    """What a picture of curves shows."""

    name: str
    title: str
    x: str
    y: str
    read: Callable[[Run], Curve]
    log: bool = False  # x in octaves
    note: str = ""  # ends the caption
    reach: Callable[[Run], Curve] = lambda run: {}  # half the 95 % intervals of a single run


PLOTS = [
    Plot("loss", "Training loss", "step", LOSS, by_step),
    Plot(
        "position",
        "Loss by position in the window",
        POSITION,
        VALIDATION,
        by_position,
        note=f"{_ONE_SEED}.",
        reach=functools.partial(by_position, read=reach),
    ),
    Plot(
        "length",
        "Loss by context length",
        "tokens in a window",
        VALIDATION,
        by_length,
        log=True,
        note="Where max_windows limits their number, longer windows hold other text: then compare "
        "lines, not their slopes.",
    ),
    Plot(
        "far",
        "Loss by position in the longest windows",
        POSITION,
        VALIDATION,
        by_octave,
        log=True,
        note=f"{_ONE_SEED}, the mean of those of its octave's parts: at least as wide as its own.",
        reach=functools.partial(by_octave, read=reach),
    ),
]
RECOVERY = Plot(
    "recovery",
    "Recovery after conversion",
    "tokens of training",
    DIFFERENCE,
    dict,
    note=f"Validation loss minus that of the control; back: at most {WITHIN:g}.",
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
            note=f"A point has {min(answers):,} to {max(answers):,} answers of a run.",
        )
        plots.append(plot)
    reference_of = {row["group"]: row["reference"] for row in rows}
    drawn = [perplexity_picture(rows)]
    other = next((row["compared_with"] for row in rows), None)
    drawn += [curves_picture(plot, runs, reference_of, other) for plot in plots]
    gaps = {recovery.run: dict(recovery.gaps) for recovery in recovered}
    recovery = RECOVERY._replace(read=lambda run: gaps.get(run.name, {}))
    drawn.append(curves_picture(recovery, runs, {}))
    return [picture for picture in drawn if picture] + maps(runs)


def curves_picture(
    plot: Plot, runs: list[Run], reference_of: dict, reference: str | None = None
) -> Picture | None:
    """Draws curves, and below their differences from those of the group in `reference_of`."""
    by_group = read_curves(runs, plot.read)
    means = average_curves(by_group, read_curves(runs, plot.reach))
    differences = average_curves(minus_reference(by_group, reference_of), {})
    if not means:
        return None
    are_equal = len(set(map(frozenset, by_group.values()))) == 1
    shown = {plot.title if are_equal else f"{plot.title}{_DIFFERENT_SEEDS}": means}
    if differences:
        shown[f"minus that of {reference}"] = differences

    def draw(figure) -> None:
        style = styles(list(by_group))
        row = panels(figure, len(shown), wrap=1)[0]
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
    size = stacked_size(len(shown), list(by_group))
    caption = plot.note
    if differences:
        caption = _MINUS.format(reference) + caption
    if max(map(len, by_group.values())) > 1:
        caption = _MEANS + caption
    return Picture(plot.name, plot.title, alt, caption, draw, size)


# --- Perplexity -----------------------------------------------------------------------------------


def perplexity_picture(rows: list[dict]) -> Picture | None:
    """Draws perplexity by p, else by group, above the paired differences of losses."""
    by_p = all(P in row["values"] for row in rows)
    rows = [row for row in rows if row["perplexity"] is not None]
    if not rows:
        return None
    perplexities, differences = read_means(rows, by_p)
    title = "Validation perplexity by p" if by_p else "Validation perplexity"
    are_equal = have_same_seeds(rows)
    shown = {title if are_equal else f"{title}{_DIFFERENT_SEEDS}": perplexities}
    if differences:
        shown[f"loss minus that of {rows[0]['compared_with']}"] = differences

    def draw(figure) -> None:
        style = styles(list(perplexities))
        row = panels(figure, len(shown), wrap=1, sharex=by_p)[0]
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
        "Means over seeds and their standard deviations. Where groups are compared, below the "
        "paired differences and their 95 % intervals, as in the table."
    )
    width, height = stacked_size(len(shown), list(perplexities))
    if not by_p:  # names of groups stand below each panel
        width = max(width, 0.8 + 0.2 * len(rows))
        height += 0.08 * len(shown) * max(len(row["group"]) for row in rows)
    return Picture("perplexity", title, alt, caption, draw, (width, height))


def read_means(rows: list[dict], by_p: bool) -> tuple[Means, Means]:
    """Reads perplexities and differences, by the swept fields other than p, and by x."""
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
            differences.setdefault(name, {})[x] = (difference.difference, difference.reach)
    return perplexities, differences


def _draw_points(axes, means: Means, style: dict, joined: bool) -> None:
    """Draws means with their errors, where they have any, as bars."""
    for name, points in means.items():
        options = style[name] if joined else style[name] | {"ls": ""}
        values, errors = zip(*points.values(), strict=True)
        bars = [math.nan if error is None else error for error in errors]
        axes.errorbar(list(points), values, bars, capsize=5, label=name, **options)
