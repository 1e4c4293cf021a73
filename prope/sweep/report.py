"""Reports on what was trained: the loss curve of one run, or the page of a sweep."""

import math
import pathlib

from prope.errors import UsageError
from prope.sweep.runs import read_sweep, table
from prope.workdir.records import evaluations_of_training, find_evaluation, read_jsonl
from prope.workdir.run import read_config


def draw_loss(workdir: pathlib.Path) -> pathlib.Path:
    """Draws training and validation loss by step, with the unigram baseline; returns the picture's path.

    Raises:
      UsageError: there is no run, or it has not logged a step yet.
    """
    import matplotlib.figure

    config = read_config(workdir)
    steps = read_jsonl(workdir / "metrics.jsonl")
    if config is None or not steps:
        raise UsageError(f"--workdir={workdir}: no metrics of a run there; give the --workdir that prope.train had")
    records = read_jsonl(workdir / "eval.jsonl")
    by_step = (evaluations_of_training(records, config, step) for step in sorted({r["step"] for r in records}))
    evaluations = [find_evaluation(of_step) for of_step in by_step if of_step]

    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    training = [r["step"] for r in steps], [r["loss"] for r in steps]
    axes.plot(*training, color="#4477aa", lw=1.2, label="training batch")
    if evaluations:
        last = evaluations[-1]
        marks = {"marker": "o", "ms": 4, "color": "#cc3311", "lw": 1.2}
        label = f"validation, {last['loss']:.3f} at step {last['step']} ({last['bits_per_byte']:.2f} bits per byte)"
        axes.plot([r["step"] for r in evaluations], [r["loss"] for r in evaluations], label=label, **marks)
        unigram = last["loss"] * last["unigram_bits_per_byte"] / last["bits_per_byte"]
        axes.axhline(unigram, color="#777777", lw=1, ls="--", label=f"token frequencies alone, {unigram:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", xlim=(0, None), ylim=(0, math.ceil(steps[0]["loss"])))
    axes.set_title(f"{config.data.dataset}, rope_percentage = {config.model.rope_percentage}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    output = workdir / "loss.png"
    figure.savefig(output, dpi=150)
    return output


def report_sweep(directory: pathlib.Path) -> dict:
    """Writes the page of a sweep and its pictures; returns what the command prints.

    Raises:
      UsageError: there is no sweep, or none of its runs has started.
    """
    from prope.sweep import page, pictures

    runs = read_sweep(directory)
    output = page.write(directory, runs, pictures.pictures(runs))
    return {"output": str(output), "runs": [run.record() for run in runs], "table": table(runs)}
