"""Looks inside checkpoints, as the paper does: python -m prope.analyze --workdir=W [--sequences=N] [--text=FILE].

W is a run, or a directory with runs below it, such as a sweep. Every run gets W/analysis/: index.html, one file that
opens without a network, its pictures as PNG, and analysis.json with every number; a directory of runs gets a page that
compares them. The model is run one layer at a time, in float32, over the beginnings of validation documents.

python -m prope.analyze --theory [--workdir=DIR] checks the paper's statements and draws Figures 2 and 8.

Axes: B sequences, T length, N query heads, P pairs.
"""

import hashlib
import json
import logging
import pathlib
import re
import time

import jax
import numpy as np
from ml_collections import ConfigDict

from prope.analysis import census, compare, page
from prope.analysis.layers import measure_layers
from prope.analysis.sequences import read_sequences
from prope.analysis.walk import Walk
from prope.errors import UsageError
from prope.rope import frequencies
from prope.runtime.files import read_json, write_atomic
from prope.workdir.checkpoints import list_steps
from prope.workdir.run import Run, find_runs, open_run

log = logging.getLogger("prope")

# Flags that change the result.
_ASKED = ("sequences", "seq_len", "text", "dataset", "data_dir", "layers", "heads", "channels")
# Of analysis.json, on the last line.
_SAID = ("sequences", "seq_len", "heads", "rank_correlation", "channels", "loss", "rope_percentage", "step", "workdir")


def analyse(workdir: pathlib.Path, given) -> dict:
    """Everything that the analysis of a run says, as it stands in analysis.json; from there if it was made before.

    Raises:
      UsageError: there is no such run, checkpoint, layer, head or text, or no document of three tokens.
    """
    asked = {name: getattr(given, name) for name in _ASKED} | {"text_hash": _hash(given.text)}
    run = open_run(workdir, given.step)
    config, step = run.config, run.step
    layers = parse_layers(given.layers, config.model)
    chosen = parse_heads(given.heads, layers, config.model)
    output = workdir / "analysis" / "analysis.json"
    if not given.again and (found := read_json(output)) and (found["step"], found["asked"]) == (step, asked):
        log.info("%s: step %d was analysed before (--again does it anew)", workdir, step)
        return found
    began = time.monotonic()
    tokens, names, source = read_sequences(config, given)
    B, T = tokens.shape

    def measure(run: Run) -> tuple[Walk, dict]:
        walk = Walk(config.model, run, tokens)
        log.info("%s, step %d: %d sequences of %d tokens of %s", workdir, run.step, B, T, source)
        return walk, measure_layers(walk, layers, given.channels)

    run, (walk, found) = run.first_undamaged(measure)
    heads, openings = found.pop("heads"), found.pop("openings")
    chosen = [(*place, "asked for") for place in chosen] or census.strongest(heads)
    p = config.model.rope_percentage
    result = {
        "workdir": str(workdir), "step": run.step, "asked": asked, "rope_percentage": p,
        "rotated_pairs": walk.pairs if len(set(walk.pairs)) > 1 else walk.pairs[0],
        "head_dim": config.model.head_dim, "max_wavelength": config.model.max_wavelength, "seed": config.seed,
        "source": source, "sequences": B, "seq_len": T, "trained_on": config.data.seq_len,
        "frequencies": frequencies(config.model.head_dim, config.model.max_wavelength).tolist(),
        "heads": heads, "rank_correlation": census.rank_correlation(heads),
        "shown": [
            {"layer": layer, "head": head, "why": why, "map": openings[layer].weights[head].tolist(),
             "table": census.bounds_table(openings[layer], head, config.model.head_dim, names)}
            for layer, head, why in chosen
        ],
        **found,
        "seconds": time.monotonic() - began, "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    result = rounded(result)
    output.parent.mkdir(exist_ok=True)
    write_atomic(output, json.dumps(result))
    return result


def analyse_all(workdir: pathlib.Path, given) -> dict:
    """Analyses the run in a directory, or all runs below it and compares them; returns what the command prints.

    Raises:
      UsageError: there is no run with a finished checkpoint; or as `analyse`.
    """
    runs = find_runs(workdir)
    if runs != [workdir]:
        runs = [run for run in runs if list_steps(run)]
    if not runs:
        raise UsageError(f"--workdir={workdir}: no run there has a finished checkpoint; train one first")
    analyses = []
    for run in runs:
        analyses.append(analyse(run, given))
        output = run / "analysis" / "index.html"
        if not output.exists() or output.stat().st_mtime < output.with_name("analysis.json").stat().st_mtime:
            page.write(output.parent, analyses[-1])
    if runs == [workdir]:
        return {"output": str(output)} | {name: analyses[0][name] for name in _SAID}
    return compare.write(workdir / "analysis", analyses)


def parse_layers(text: str | None, config: ConfigDict) -> list[int]:
    """The layers that --layers names, as in 0,3; all by default."""
    if text is None:
        return list(range(config.num_layers))
    for entry in text.split(","):
        if not entry.strip().isdecimal() or int(entry) >= config.num_layers:
            raise UsageError(
                f"--layers={text}: {entry!r} is not a layer of this model, which has 0 to {config.num_layers - 1}"
            )
    return sorted({int(entry) for entry in text.split(",")})


def parse_heads(text: str | None, layers: list[int], config: ConfigDict) -> list[tuple[int, int]]:
    """The (layer, head) that --heads names, as in 0.2,3.1; none by default."""
    found = []
    for entry in text.split(",") if text is not None else []:
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", entry)
        if match is None or int(match[1]) not in layers or int(match[2]) >= config.num_heads:
            raise UsageError(
                f"--heads={text}: {entry!r} is not LAYER.HEAD of this model, whose heads are 0 to "
                f"{config.num_heads - 1} and of which these layers are measured: {', '.join(map(str, layers))}"
            )
        found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def rounded(value):
    """A nested value with numbers of six digits, which is what float32 holds."""
    if isinstance(value, dict):
        return {name: rounded(below) for name, below in value.items()}
    if isinstance(value, list):
        return [rounded(below) for below in value]
    return float(f"{value:.6g}") if isinstance(value, float | np.floating) else value


def _hash(path: str | None) -> str | None:
    """Of the text's bytes; None where there is none, which `sequences` will say."""
    try:
        return path and hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None
