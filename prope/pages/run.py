"""Writes the page of one run: what it is, its losses, all of its evaluations, tasks and speed."""

import datetime

import numpy as np
from etils import epath

from prope import parameters
from prope.errors import usage_error
from prope.inference.opening import check_folder, results_folder
from prope.pages import interventions, page
from prope.pages.curves import loss_picture, pictures
from prope.pages.drawing import Picture, panels, styles
from prope.runtime.files import absolute
from prope.sweep.context import effective_lengths
from prope.sweep.interventions import list_changes
from prope.sweep.runs import P, Run, read_run
from prope.workdir.records import read_jsonl
from prope.workdir.run import read_config

# Records that differ in one of these are rows of their own, sorted by them.
_IDENTITY = (
    "step",
    "dataset",
    "seq_len",
    "encoding",
    "tokens",
    "factor",
    "window",
    "sinks",
    "split",
    "fingerprint",
    "changed",
)


def report_run(workdir: epath.Path, output: str | None = None) -> dict:
    """Writes the page of a run and its pictures; returns what the command prints.

    They are in W/report or, with `output`, in OUTPUT/report. A folder without a run, or with one
    that has no results yet, is a UsageError.
    """
    spec = read_config(workdir)
    if spec is None:
        problem = "no run there (no config.json)"
        raise usage_error("--workdir", workdir, problem, "give the --workdir that prope.train had")
    run = read_run(workdir, {P: spec.model.rope_percentage}, spec)
    if not (run.metrics or run.evaluations or run.answers):
        problem = "a run without metrics, evaluations or answers"
        raise usage_error("--workdir", workdir, problem, "train or evaluate it first")
    folder = results_folder(workdir, workdir, output)
    check_folder(folder, output)
    curves = [picture for picture in pictures([run], []) if picture.name != "loss"]
    changes = interventions.pictures(list_changes([run]))
    losses = [loss_picture(run)] if run.metrics else []
    (effective,) = effective_lengths([run]).values()
    path = page.write(
        folder / "report",
        "run",
        [*losses, encoding_picture(run), *curves, *changes],
        title=f"Run {workdir.resolve().name}",
        run=run,
        encoding=spec.model.describe_rotation(),
        parameters=parameters.count(spec.model),
        evaluations=list_evaluations(run),
        effective=effective,
        origin=origin(run),
        memory=max((one.get("peak_memory_bytes") or 0 for one in run.metrics), default=0),
        links=_links(workdir, folder / "report"),
        settings=spec.flat(),
    )
    printed = {"output": str(path), "runs": [str(workdir)]}
    if effective:
        printed["effective_lengths"] = effective
    return printed


def list_evaluations(run: Run) -> list[dict]:
    """Lists the run's evaluations by step, dataset, length and change; of equal ones the last."""
    rows = {}
    for record in run.evaluations:
        others = ("documents", "perplexity", "bits_per_byte")
        row = dict.fromkeys((*_IDENTITY, *others)) | record
        row["dataset"] = row["dataset"] or run.spec.data.dataset
        changed = record.get("changed", {}).items()
        row["changed"] = ", ".join(f"{name}={value}" for name, value in changed)
        key = tuple((row[name] is not None, row[name]) for name in _IDENTITY)  # None is first
        rows[key] = row
    return [rows[key] for key in sorted(rows)]


def encoding_picture(run: Run) -> Picture:
    """Draws the frequencies by pair, a line for each kind of layer."""
    model = run.spec.model
    kinds = {}
    for layer in model.layers:
        same = kinds.setdefault((layer.window, layer.frequencies.tobytes()), [])
        same.append(layer)
    curves = {}
    for (window, _), same in kinds.items():
        seen = f"window {window:,}" if window else "no window"
        count = "1 layer" if len(same) == 1 else f"{len(same)} layers"
        pairs = same[0].num_rotated
        rotated = f"{pairs} pairs rotate" if isinstance(pairs, int) else "pairs by key head"
        curves[f"{count}, {seen}, {rotated}"] = same[0].frequencies.max(axis=0)

    one_turn = 2 * np.pi / run.spec.data.seq_len

    def draw(figure) -> None:
        axes = panels(figure, 1)[0, 0]
        for name, style in styles(list(curves)).items():
            rotated = np.where(curves[name] > 0, curves[name], np.nan)
            axes.plot(rotated, label=name, markevery=4, **style)
        axes.set(
            xlabel="pair, fastest first",
            ylabel="radians a token, log scale",
            yscale="log",
            xlim=(-0.5, max(map(len, curves.values())) - 0.5),
        )
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
        axes.axhline(one_turn, color="#777777", ls="--", lw=1)

    caption = (
        "Pairs without a frequency do not rotate. Dashed: one turn in a window of training, "
        f"{one_turn:.3g} radians a token; pairs below it do not turn once."
    )
    alt = f"Frequencies: {'; '.join(curves)}."
    return Picture("frequencies", "Encoding", alt, caption, draw)


def origin(run: Run) -> dict:
    """Describes the starts of a run, and how long it trained."""
    seconds = training_seconds(run)
    return {
        "starts": read_jsonl(run.workdir / "starts.jsonl"),
        "pace": run.metrics[-1]["step"] * run.tokens_per_step / seconds if seconds else None,
        "training_time": duration(seconds) if seconds else "–",
    }


def training_seconds(run: Run) -> float:
    """Sums the tokens between logged steps over the logged speed."""
    seconds = 0.0
    last_step = 0
    for record in run.metrics:
        speed = record.get("tokens_per_second")
        if speed:
            seconds += (record["step"] - last_step) * run.tokens_per_step / speed
        last_step = record["step"]
    return seconds


def duration(seconds: float) -> str:
    """Formats seconds as hours:minutes:seconds, 0:03:20."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _links(workdir: epath.Path, folder: epath.Path) -> dict[str, str]:
    """Lists pages about the run that are there, by what they are called, relative to its own."""
    pages = {"what its heads do": workdir / "analysis" / "index.html"}
    parent = absolute(workdir).parent
    if (parent / "sweep.json").exists():
        pages["its sweep"] = parent / "report" / "index.html"
    links = {name: page.link_to(path, folder) for name, path in pages.items()}
    return {name: link for name, link in links.items() if link}
