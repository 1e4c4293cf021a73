"""Draws the long-context tasks: of each, for every group of runs, accuracy by length and depth, and by distance.

What is drawn is W/longcontext.jsonl of the last step, without controls and rescaled encodings.
"""

import itertools
import math

import numpy as np
from etils import epath

from prope.encodings import layer_frequencies
from prope.html.drawing import (
    BORDER,
    GRID,
    TEXT,
    Picture,
    label_cells,
    label_ticks,
    panels,
    show_image,
)
from prope.inference.longcontext import RECORDS
from prope.sweep.runs import P, Run, groups, read_run
from prope.workdir.records import find_evaluations
from prope.workdir.run import read_config

_PASSED, _COLUMNS = 0.85, 5  # share of right answers up to the effective length; panels in a row


def answers_by_task(run: Run) -> dict[str, dict[int, dict]]:
    """Selects the newest record of the last step, by task and length; in prose a task is another one."""
    tasks: dict[str, dict[int, dict]] = {}
    for record in find_evaluations(run.answers, control=None, step=run.step):
        tasks.setdefault(record["task"] + "-in-prose" * (record["form"] == "prose"), {})[
            record["seq_len"]
        ] = record
    return tasks


def effective_length(trained: int, by_length: dict[int, dict]) -> int | None:
    """Returns the length up to which a run answers 85 %, from its training length on; None if not even there."""
    lengths = [length for length in sorted(by_length) if length >= trained]
    passed = list(
        itertools.takewhile(lambda length: by_length[length]["rank_accuracy"] >= _PASSED, lengths)
    )
    return passed[-1] if passed and passed[0] == trained else None


def effective_lengths(runs: list[Run]) -> dict[str, dict[str, str]]:
    """Lists the effective lengths of every group's runs, by group and task."""
    names = dict.fromkeys(task for run in runs for task in answers_by_task(run))

    def of(group: list[Run], task: str) -> str:
        found = (
            effective_length(run.config.data.seq_len, answers_by_task(run).get(task, {}))
            for run in group
        )
        return ", ".join(str(length or "none") for length in found)

    return {name: {task: of(group, task) for task in names} for name, group in groups(runs).items()}


def draw_tasks(workdir: epath.Path) -> tuple[list[str], dict[str, str]]:
    """Draws the tasks that a run was asked, into W/longcontext/; returns the files, and effective lengths by task."""
    config, paths = read_config(workdir), []
    if config is None or not (workdir / RECORDS).exists():
        return paths, {}
    runs = [read_run(workdir, {P: config.model.rope_percentage}, config)]
    for picture in maps(runs):
        (workdir / "longcontext").mkdir(exist_ok=True)
        paths.append(workdir / "longcontext" / f"{picture.name}.png")
        paths[-1].write_bytes(picture.render()[0])
    (effective,) = effective_lengths(runs).values()
    return list(map(str, paths)), effective


def maps(runs: list[Run]) -> list[Picture]:
    """Makes a picture of every task, with a map for each group of runs."""
    effective = effective_lengths(runs)
    names = next(iter(effective.values()))
    return [
        _picture(task, groups(run for run in runs if task in answers_by_task(run)), effective)
        for task in names
    ]


def _picture(task: str, by_group: dict[str, list[Run]], effective: dict) -> Picture:
    columns = min(len(by_group), _COLUMNS)
    blocks = -(-len(by_group) // columns)

    def draw(figure) -> None:
        above, below = panels(
            figure, len(by_group), rows=2, wrap=columns, height_ratios=(3, 2) * blocks
        )
        for axes, curve, (group, runs) in zip(above, below, by_group.items(), strict=True):
            config, records = (
                runs[0].config,
                [r for run in runs for r in answers_by_task(run)[task].values()],
            )
            freqs = layer_frequencies(config.model)
            period = 2 * math.pi / freqs[freqs > 0].min() if freqs.any() else math.inf
            _draw_map(axes, records, config.data.seq_len, period)
            _draw_distances(curve, records, config.data.seq_len, period)
            axes.set_title(group)

    said = "; ".join(f"{group}: {effective[group][task]}" for group in by_group)
    caption = "Prompts whose right answer is likelier than all foils, mean % over seeds. Dashed: the training length."
    caption += " Evidence on the line is as far back as that, on the dotted one as the period of the slowest pair."
    caption += " Below: the share by distance to the evidence, in octaves, and its 95 % interval over prompts (Wilson)."
    said = f"Effective length of each run, with {_PASSED:.0%} or more: {said}."
    alt = f"Right answers to {task} by length and depth. {said}"
    size = (max(2.4 * columns, 4.8), 0.4 + 5 * blocks)
    return Picture(f"task-{task}", f"Task {task}", alt, f"{caption} {said}", draw, size)


def _draw_map(axes, records: list[dict], trained: int, period: float) -> None:
    """Draws means by length, in equal steps, and by row, with curves of equal distance."""
    cells: dict[tuple[float, int], list[float]] = {}
    for record in records:
        for cell in record["cells"]:
            cells.setdefault((cell["row"], record["seq_len"]), []).append(cell["rank_accuracy"])
    rows, lengths = (sorted(set(values)) for values in zip(*cells, strict=True))
    values = np.array(
        [[np.mean(cells.get((row, length), np.nan)) for length in lengths] for row in rows]
    )
    show_image(axes, values, vmin=records[0]["chance"], vmax=1, aspect="auto")
    label_cells(axes, values, lambda share: f"{100 * share:.0f}", bright=0.6)
    axes.patch.set(hatch="///", edgecolor=GRID)  # seen where nothing was run
    places = range(len(lengths))
    axes.axvline(np.interp(math.log2(trained), np.log2(lengths), places), color=BORDER, ls="--")
    x = np.linspace(0, len(lengths) - 1, 99)
    for distance, dashes in ((trained, "-"), (period, ":")):
        depths = 1 - distance / 2 ** np.interp(x, places, np.log2(lengths))
        if rows[-1] <= 1 < len(rows):
            axes.plot(
                x,
                np.interp(depths, rows, range(len(rows)), left=np.nan),
                color=BORDER,
                ls=dashes,
                lw=2,
            )
    label_ticks(axes.xaxis, [f"{length:,}" for length in lengths], labelrotation=90)
    label_ticks(axes.yaxis, [f"{row:g}" for row in rows])
    axes.set(xlabel="length (tokens)", ylabel="depth" if rows[-1] <= 1 else "places back")


def _draw_distances(axes, records: list[dict], trained: int, period: float) -> None:
    """Draws the share of right answers by octave of distance, over all lengths and seeds."""
    from scipy import stats

    octaves: dict[int, list[tuple[float, int]]] = {}
    for record in records:
        for cell in record["cells"]:
            hits = cell["rank_accuracy"] * record["trials"], record["trials"]
            octaves.setdefault(2 ** int(math.log2(cell["distance"])), []).append(hits)
    counts = {1.5 * low: np.sum(octaves[low], axis=0) for low in sorted(octaves)}
    intervals = [
        stats.binomtest(round(k), round(n)).proportion_ci(method="wilson")
        for k, n in counts.values()
    ]
    axes.fill_between(list(counts), *zip(*intervals, strict=True), color=TEXT, alpha=0.2, lw=0)
    axes.plot(list(counts), [k / n for k, n in counts.values()], color=TEXT, marker="o", ms=3)
    for distance, dashes in ((trained, "-"), (period, ":")):
        if distance <= 2 * max(octaves):
            axes.axvline(distance, color=BORDER, ls=dashes, lw=2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="distance (tokens)", ylabel="share right", ylim=(-0.03, 1.03))
