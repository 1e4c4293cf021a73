"""Draws the long-context tasks: accuracy by length and depth, and by distance, of groups of runs.

Each picture shows a task as W/longcontext.jsonl has it for the last step, without controls and
rescaled encodings.
"""

import itertools
import math

import numpy as np
from scipy import stats

from prope.pages.drawing import (
    BORDER,
    PHONE,
    TEXT,
    Picture,
    arrange,
    label_cells,
    label_ticks,
    panels,
    show_image,
)
from prope.sweep.context import PASSED, answers_by_task, effective_lengths
from prope.sweep.runs import Run, groups


def maps(runs: list[Run]) -> list[Picture]:
    """Makes a picture of every task, with a map for each group of runs."""
    effective = effective_lengths(runs)
    tasks = next(iter(effective.values()))
    return [
        _picture(task, groups(run for run in runs if task in answers_by_task(run)), effective)
        for task in tasks
    ]


def _picture(task: str, by_group: dict[str, list[Run]], effective: dict) -> Picture:
    columns, blocks = arrange(len(by_group))
    asked = {  # records of every run
        group: [list(answers_by_task(run)[task].values()) for run in runs]
        for group, runs in by_group.items()
    }
    by_run = list(itertools.chain(*asked.values()))
    guess = max(record["guess"] for records in by_run for record in records)
    counts = [
        round(prompts) for records in by_run for _, prompts in _count_by_octave(records).values()
    ]

    def draw(figure):
        heights = (3, 2) * blocks
        axes = panels(figure, len(by_group), rows=2, wrap=columns, height_ratios=heights)
        for (above, below), (group, runs) in zip(axes.T, by_group.items(), strict=True):
            trained = runs[0].spec.data.seq_len
            _draw_map(above, list(itertools.chain(*asked[group])), trained, guess)
            # Lines are drawn at these distances, with these dashes.
            distances = {trained: "-", _slowest_period(runs[0]): ":"}
            _draw_distances(below, asked[group], distances, guess)
            above.set_title(f"{group}{warning}")

    warning = "\ncannot show retrieval" if guess == 1 else ""
    lengths = "; ".join(f"{group}: {effective[group][task]}" for group in by_group)
    result = (
        f"Effective length of each run (–: not asked at the training length), with {PASSED:.0%} or"
        f" more and the 95 % interval above the best guess: {lengths}."
    )
    caption = (
        "Share of prompts whose right answer is likelier than all foils, %, mean over seeds;"
        f" colours start at the best guess that reads the prompt and matches nothing, {guess:.0%}."
        " Hatched: not asked. Red: dashed, the training length. Below: the share by distance to the"
        f" evidence, in octaves; a line for each run, its 95 % interval (Wilson; {min(counts)} to"
        f" {max(counts)} prompts a point); red: full, the training length, dotted, as far back as"
        f" the slowest pair turns once, dash-dotted, the best guess. {result}"
    )
    alt = f"Right answers to {task} by length and depth. {result}"
    size = (max(2.4 * columns, PHONE), 0.4 + 5 * blocks)
    return Picture(f"task-{task}", f"Task {task}", alt, caption, draw, size)


def _slowest_period(run: Run) -> float:
    """Computes the number of tokens in which the slowest pair that rotates comes round."""
    freqs = np.concatenate([layer.frequencies.ravel() for layer in run.spec.model.layers])
    if not freqs.any():
        return math.inf
    return 2 * math.pi / freqs[freqs > 0].min()


def _draw_map(axes, records: list[dict], trained: int, guess: float) -> None:
    """Draws means by length, in equal steps, and by row."""
    rows, lengths, values = _average_cells(records)
    show_image(axes, values, vmin=guess, vmax=1, aspect="auto")
    bright = (guess + 1) / 2
    label_cells(axes, values, lambda share: f"{100 * share:.0f}", lambda share: share > bright)
    label_ticks(axes.xaxis, [f"{length:,}" for length in lengths], labelrotation=90)
    label_ticks(axes.yaxis, [f"{row:g}" for row in rows])
    # Lengths stand in equal steps; between them, columns are interpolated in octaves.
    octaves = np.log2(lengths)
    ends = {"left": np.nan, "right": np.nan}
    trained_column = np.interp(math.log2(trained), octaves, range(len(lengths)), **ends)
    axes.axvline(trained_column, color=BORDER, ls="--")
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth" if rows[-1] <= 1 else "places back")


def _average_cells(records: list[dict]) -> tuple[list, list, np.ndarray]:
    """Averages shares of right answers over seeds.

    Returns (rows, lengths, values [rows, lengths]), nan where nothing was run.
    """
    shares = {}
    for record in records:
        for cell in record["cells"]:
            place = (cell["row"], record["seq_len"])
            shares.setdefault(place, []).append(cell["accuracy"])
    rows = sorted({row for row, _ in shares})
    lengths = sorted({length for _, length in shares})
    values = [[np.mean(shares.get((row, T), np.nan)) for T in lengths] for row in rows]
    return rows, lengths, np.array(values)


def _draw_distances(axes, by_run: list[list[dict]], distances: dict, guess: float) -> None:
    """Draws every run's share of right answers by octave of distance, over all lengths."""
    farthest = 0
    for records in by_run:
        counts = _count_by_octave(records)
        octaves = sorted(counts)
        farthest = max(farthest, 2 * octaves[-1])
        middles = [1.5 * octave for octave in octaves]
        right, prompts = np.array([counts[octave] for octave in octaves]).T
        tests = map(stats.binomtest, np.rint(right).astype(int), np.rint(prompts).astype(int))
        low, high = zip(*[test.proportion_ci(method="wilson") for test in tests], strict=True)
        axes.fill_between(middles, low, high, color=TEXT, alpha=0.2 / len(by_run), lw=0)
        axes.plot(middles, right / prompts, color=TEXT, marker="o", ms=3)
    axes.axhline(guess, color=BORDER, ls="-.")
    for distance, dashes in distances.items():
        if distance <= farthest:
            axes.axvline(distance, color=BORDER, ls=dashes, lw=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens back, log scale")
    axes.set_ylabel("share right")
    axes.set_ylim(-0.03, 1.03)


def _count_by_octave(records: list[dict]) -> dict[int, np.ndarray]:
    """Counts (right answers, prompts) by the octave of their distance to the evidence."""
    counts = {}
    for record in records:
        for cell in record["cells"]:
            octave = 2 ** int(math.log2(cell["distance"]))
            new = record["trials"] * np.array([cell["accuracy"], 1])
            counts[octave] = counts.get(octave, 0) + new
    return counts
