"""Draws the long-context tasks: of each a map of accuracy by length and depth, for every group of runs.

What is drawn is W/longcontext.jsonl of the last step, without controls and rescaled encodings.
"""

import itertools
import math

import numpy as np
from etils import epath

from prope.encodings import layer_frequencies
from prope.html.drawing import BORDER, GRID, Picture, panels
from prope.inference.longcontext import RECORDS
from prope.sweep.runs import P, Run, groups, read_run
from prope.workdir.records import find_evaluations
from prope.workdir.run import read_config

_PASSED, _COLUMNS = 0.85, 5  # share of right answers up to the effective length; panels in a row


def answers_by_task(run: Run) -> dict[str, dict[int, dict]]:
    """Selects the newest record of the last step, by task and length; in prose a task is another one."""
    tasks: dict[str, dict[int, dict]] = {}
    for record in find_evaluations(run.answers, control=None, step=run.step):
        tasks.setdefault(record["task"] + "-in-prose" * (record["form"] == "prose"), {})[record["seq_len"]] = record
    return tasks


def effective_length(trained: int, by_length: dict[int, dict]) -> int | None:
    """Returns the length up to which a run answers 85 %, from its training length on; None if not even there."""
    lengths = [length for length in sorted(by_length) if length >= trained]
    passed = list(itertools.takewhile(lambda length: by_length[length]["rank_accuracy"] >= _PASSED, lengths))
    return passed[-1] if passed and passed[0] == trained else None


def effective_lengths(runs: list[Run]) -> dict[str, dict[str, str]]:
    """Lists the effective lengths of every group's runs, by group and task."""
    names = dict.fromkeys(task for run in runs for task in answers_by_task(run))

    def of(group: list[Run], task: str) -> str:
        found = (effective_length(run.config.data.seq_len, answers_by_task(run).get(task, {})) for run in group)
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
    return [_picture(task, groups(run for run in runs if task in answers_by_task(run)), effective) for task in names]


def _picture(task: str, by_group: dict[str, list[Run]], effective: dict) -> Picture:
    columns = min(len(by_group), _COLUMNS)

    def draw(figure) -> None:
        for axes, (group, runs) in zip(panels(figure, len(by_group), wrap=columns)[0], by_group.items(), strict=True):
            _draw_map(axes, [r for run in runs for r in answers_by_task(run)[task].values()], runs[0].config)
            axes.set_title(group)

    said = "; ".join(f"{group}: {effective[group][task]}" for group in by_group)
    caption = "Prompts whose right answer is likelier than all foils, mean % over seeds. Dashed: the training length."
    caption += " Evidence on the line is as far back as that, on the dotted one as the period of the slowest pair."
    size = (max(2.4 * columns, 4.8), 0.4 + 3 * -(-len(by_group) // columns))
    said = f"Effective length of each run, with {_PASSED:.0%} or more: {said}."
    alt = f"Right answers to {task} by length and depth. {said}"
    return Picture(f"task-{task}", f"Task {task}", alt, f"{caption} {said}", draw, size)


def _draw_map(axes, records: list[dict], config) -> None:
    """Draws means by length, in equal steps, and by row, with curves of equal distance."""
    cells: dict[tuple[float, int], list[float]] = {}
    for record in records:
        for cell in record["cells"]:
            cells.setdefault((cell["row"], record["seq_len"]), []).append(cell["rank_accuracy"])
    rows, lengths = (sorted(set(values)) for values in zip(*cells, strict=True))
    for (row, length), shares in cells.items():
        colour = "#fdfdfd" if np.mean(shares) < 0.6 else "#020202"
        place = {"x": lengths.index(length), "y": rows.index(row)}
        axes.text(**place, s=f"{100 * np.mean(shares):.0f}", ha="center", va="center", color=colour)
    values = [[np.mean(cells.get((row, length), np.nan)) for length in lengths] for row in rows]
    axes.imshow(values, cmap="viridis", vmin=records[0]["chance"], vmax=1, aspect="auto", interpolation="none")
    axes.patch.set(hatch="///", edgecolor=GRID)  # seen where nothing was run
    trained, freqs, places = config.data.seq_len, layer_frequencies(config.model), range(len(lengths))
    axes.axvline(np.interp(math.log2(trained), np.log2(lengths), places), color=BORDER, ls="--")
    x = np.linspace(0, len(lengths) - 1, 99)
    for distance, dashes in ((trained, "-"), (2 * math.pi / freqs[freqs > 0].min() if freqs.any() else math.inf, ":")):
        depths = 1 - distance / 2 ** np.interp(x, places, np.log2(lengths))
        if rows[-1] <= 1 < len(rows):
            axes.plot(x, np.interp(depths, rows, range(len(rows)), left=np.nan), color=BORDER, ls=dashes, lw=2)
    axes.set_xticks(places, [f"{length:,}" for length in lengths], rotation=90)
    axes.set_yticks(range(0, len(rows), 2), [f"{row:g}" for row in rows[::2]])
    axes.set(xlabel="length (tokens)", ylabel="depth" if rows[-1] <= 1 else "places back")
    axes.grid(False)
