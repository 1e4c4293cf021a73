"""Writes the page of one run: what it is, its losses, all of its evaluations, tasks and speed."""

import os
from typing import NamedTuple

import numpy as np
from etils import epath

from prope.config import flat
from prope.encodings import describe, layer_frequencies
from prope.errors import usage_error
from prope.html import page
from prope.html.drawing import Picture, draw_frequencies
from prope.inference.opening import check_folder, results_folder
from prope.runtime.files import absolute, is_url
from prope.stack import parameters
from prope.stack.layers import layer_windows
from prope.sweep import interventions
from prope.sweep.maps import effective_lengths
from prope.sweep.page import origin
from prope.sweep.pictures import loss_picture, pictures
from prope.sweep.runs import P, Run, group_name, read_run
from prope.workdir.run import read_config


class Evaluation(NamedTuple):
    """A record of eval.jsonl, as a row of the page's table."""

    step: int
    dataset: str
    seq_len: int
    changed: str  # what differs from the run itself: its encoding, a window
    tokens: int  # predicted; 0: not recorded
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None


def report_run(workdir: epath.Path, output: str | None = None) -> dict:
    """Writes the page of a run and its pictures; returns what the command prints.

    They are in W/report or, with `output`, in OUTPUT/report. A folder without a run, or with one
    that has no results yet, is a UsageError.
    """
    config = read_config(workdir)
    if config is None:
        problem = "no run there (no config.json)"
        raise usage_error("--workdir", workdir, problem, "give the --workdir that prope.train had")
    run = read_run(workdir, {P: config.model.rope_percentage}, config)
    if not (run.metrics or run.evaluations or run.answers):
        problem = "a run without metrics, evaluations or answers"
        raise usage_error("--workdir", workdir, problem, "train or evaluate it first")
    folder = results_folder(workdir, workdir, output)
    check_folder(folder, output)
    changes = interventions.changes([run])
    drawn = [encoding_picture(run), loss_picture(run), *_curves(run)]
    drawn = [picture for picture in drawn if picture] + interventions.pictures(changes)
    (effective,) = effective_lengths([run]).values()
    path = page.write(
        folder / "report",
        "run",
        drawn,
        title=f"Run {workdir.resolve().name}",
        run=run,
        encoding=describe(config.model),
        parameters=parameters.count(config.model),
        evaluations=list_evaluations(run),
        effective=effective,
        origin=origin(run),
        memory=_largest(run, "peak_memory_bytes"),
        links=_links(workdir, folder / "report"),
        settings=flat(config),
    )
    printed = {"output": str(path), "runs": [str(workdir)]}
    if effective:
        printed["effective_lengths"] = effective
    return printed


def list_evaluations(run: Run) -> list[Evaluation]:
    """Lists the run's evaluations by step, dataset, length and change; of equal ones the last."""
    rows = {}
    for record in run.evaluations:
        changed = record.get("encoding") or ""
        if record.get("factor") and record["factor"] != 1:
            changed += f" by {record['factor']:g}"
        if record.get("window"):
            changed += f" window {record['window']:,}, first {record['sinks'] or 0}"
        split = record.get("split") or "validation"
        if split != "validation":
            changed += f" split {split}"
        row = Evaluation(
            record["step"],
            record.get("dataset") or run.config.data.dataset,
            record["seq_len"],
            changed.strip(),
            record.get("tokens") or 0,
            record["loss"],
            record.get("perplexity"),
            record.get("bits_per_byte"),
        )
        rows[*row[:5], record.get("fingerprint") or ""] = row
    return [rows[key] for key in sorted(rows)]


def encoding_picture(run: Run) -> Picture:
    """Draws the frequencies by pair, a line for each kind of layer."""
    model = run.config.model
    kinds = {}
    by_layer = zip(layer_windows(model), layer_frequencies(model), strict=True)
    for layer, (window, freqs) in enumerate(by_layer):
        kinds.setdefault((window, freqs.tobytes()), (freqs, []))[1].append(layer)
    curves = {}
    for (window, _), (freqs, layers) in kinds.items():
        seen = f"window {window:,}" if window else "no window"
        count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
        rotated = f"{np.count_nonzero(freqs)} pairs rotate"
        curves[f"{count}, {seen}, {rotated}"] = freqs

    def draw(figure) -> None:
        axes = draw_frequencies(figure, curves)
        one_turn = 2 * np.pi / run.config.data.seq_len
        axes.axhline(one_turn, color="#777777", ls="--", lw=1)

    caption = "Pairs without a frequency do not rotate. Dashed: one turn in a window of training;"
    caption += " pairs below it do not turn once."
    alt = f"Frequencies by pair. {describe(model)}."
    return Picture("frequencies", "Encoding", alt, caption, draw)


def _curves(run: Run) -> list[Picture]:
    """Makes the pictures of one run that a sweep's page has too, without its training loss."""
    row = {"group": group_name(run.values), "reference": None}
    drawn = pictures([run], [row | {"values": run.values, "perplexity": None}])
    return [picture for picture in drawn if picture.name != "loss"]


def _largest(run: Run, name: str) -> float | None:
    """Returns the largest value of a field of the metrics, if it was logged."""
    values = [record[name] for record in run.metrics if record.get(name) is not None]
    return max(values, default=None)


def _links(workdir: epath.Path, folder: epath.Path) -> dict[str, str]:
    """Lists pages about the run that are there, by what they are called, relative to its own."""
    if is_url(workdir) != is_url(folder):
        return {}
    pages = {"what its heads do": workdir / "analysis" / "index.html"}
    parent = absolute(workdir).parent
    if (parent / "sweep.json").exists():
        pages["its sweep"] = parent / "report" / "index.html"
    links = {}
    for name, path in pages.items():
        if path.exists():
            links[name] = os.path.relpath(absolute(path), absolute(folder))
    return links
