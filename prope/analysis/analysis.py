"""Analyses runs and writes their pages; `prope.analyze` is its command."""

import functools
import json
import time

import jax
import numpy as np
from etils import epath

from prope.analysis import census, channels, measures
from prope.analysis.choices import Tokens, choose_tokens, parse_layers, parse_places
from prope.analysis.sequences import read_sequences
from prope.analysis.walk import Walk, mean_over_sequences
from prope.errors import log, usage_error
from prope.inference.opening import check_folder, results_folder
from prope.inference.statistics import average_seeds
from prope.pages import analysis as page
from prope.runtime import processes
from prope.runtime.files import write_atomic
from prope.workdir.checkpoints import list_steps
from prope.workdir.run import Run, find_runs, open_run

# Flags that change the result.
_OPTIONS = ("sequences", "seq_len", "dataset", "data_dir", "text", "layers", "heads", "channels")
_OPTIONS += ("window", "tokens", "head_of", "channel", "all_heads", "paper")
# Fields of analysis.json that the command prints.
_PRINTED = ("source", "split", "sequences", "seq_len", "heads", "rank_correlation", "channels")
_PRINTED += ("loss", "dtype", "rope_percentage", "step", "workdir")


def analyse_all(workdir: epath.Path, options) -> dict:
    """Analyses the run in a directory, or all runs below it, and writes their pages.

    `options` are the flags of `prope.analyze`. Returns what the command prints.
    """
    workdirs = processes.call_on_first(lambda: list(map(str, find_runs(workdir))))
    is_single = workdirs == [str(workdir)]
    runs = [epath.Path(run) for run in workdirs if is_single or list_steps(run)]
    if not runs:
        problem = "no run there has a finished checkpoint"
        raise usage_error("--workdir", workdir, problem, "train one first")
    folders = []
    for run in runs:
        folder = results_folder(run, workdir, options.output)
        check_folder(folder, options.output)
        folders.append(folder / "analysis")
    analyses = []
    for run, folder in zip(runs, folders, strict=True):
        analysis = analyse(run, options, folder)
        analyses.append(analysis)
        if processes.is_first():
            page.write(folder, analysis)
    pages = [str(folder / "index.html") for folder in folders]
    if is_single:
        return {"output": pages[0]} | {name: analysis[name] for name in _PRINTED}
    return {
        "output": str(results_folder(workdir, workdir, options.output)),
        "pages": pages,
        "sequences": analyses[0]["sequences"],
        "seq_len": analyses[0]["seq_len"],
        "runs": [analysis["workdir"] for analysis in analyses],
        "heads": [{"run": one["workdir"]} | head for one in analyses for head in one["heads"]],
    }


def analyse(workdir: epath.Path, options, folder: epath.Path | None = None) -> dict:
    """Analyses a run, writes analysis.json into `folder`, by default W/analysis; returns it.

    All processes call it; the first one reads the text, and writes.
    """
    run = open_run(workdir, options.step)
    model = run.spec.model
    layers = parse_layers(options.layers, model.num_layers)
    num_heads = [model.num_heads] * model.num_layers
    num_pairs = [layer.head_dim // 2 for layer in model.layers]
    heads = parse_places("heads", options.heads, layers, HEAD=num_heads)
    places = parse_places("channel", options.channel, layers, HEAD=num_heads, PAIR=num_pairs)
    start = time.monotonic()
    ids, names, text = processes.call_on_first(lambda: read_sequences(run, options))
    sequences = np.array(ids, np.int32)
    B, T = sequences.shape
    tokens = choose_tokens(options, np.array(names))

    def measure(run):
        begins = "%s, step %d: %d sequences of %d tokens of %s, in float32"
        log.info(begins, workdir, run.step, B, T, text["source"])
        return _measure(Walk(run, sequences), options, layers, heads, places, tokens)

    run, measured = run.restore_newest_valid(measure)
    result = {
        "workdir": str(workdir),
        "asked": {name: getattr(options, name) for name in _OPTIONS},
        **_describe_run(run, T),
        **text,
        "sequences": B,
        "seq_len": T,
        "rank_correlation": census.rank_correlation(measured),
        "window": {
            "positions": tokens.window,
            "tokens": [tokens.names[position] for position in tokens.window],
        },
        **measured,
        "seconds": time.monotonic() - start,
        "device": jax.devices()[0].device_kind,
    }
    # Six digits are what float32 has.
    rounded = json.loads(json.dumps(result), parse_float=lambda x: float(f"{float(x):.6g}"))
    if processes.is_first():
        output = (folder or workdir / "analysis") / "analysis.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, json.dumps(rounded))
    return rounded


def _describe_run(run: Run, T: int) -> dict:
    """Collects fields of a run that tell its encoding and its training.

    `frequencies` [L][P] are those of each layer in sequences of T tokens, the largest over its key
    heads; where these differ, `head_frequencies` [L][K][P] are theirs. `kinds` are the layers that
    have the same ones and the same window, in the order of their first layers.
    """
    model = run.spec.model
    layers = model.layers_at(T)
    kinds = {}
    for layer in layers:
        values = {
            "layers": [],
            "sliding_window": layer.window,
            "max_wavelength": layer.max_wavelength,
            "rope_percentage": layer.rope_percentage,
            "rotated_pairs": layer.num_rotated,
        }
        kind = kinds.setdefault((layer.window, layer.frequencies.tobytes()), values)
        kind["layers"].append(layer.number)
    by_head = [layer.frequencies.tolist() for layer in layers]
    differ = any(row != rows[0] for rows in by_head for row in rows)
    return {
        "step": run.step,
        "dtype": "float32",
        "rope_percentage": model.rope_percentage,
        "rotated_pairs": model.rotated_pairs,
        "head_dim": model.head_dim,
        "max_wavelength": model.max_wavelength,
        "seed": run.spec.seed,
        "trained_on": run.spec.data.seq_len,
        "frequencies": [layer.frequencies.max(axis=0).tolist() for layer in layers],
        **({"head_frequencies": by_head} if differ else {}),
        "kinds": list(kinds.values()),
    }


def _measure(walk: Walk, options, layers, heads, places, tokens: Tokens) -> dict:
    """Measures the layers; describes the heads and the channels, or the strongest ones."""
    measured = measure_layers(walk, layers, options.channels, tokens.positions(), tokens.after)
    views = measured.pop("views")
    reasons = dict.fromkeys(heads, "asked for")
    if not heads:
        reasons = census.strongest(measured["heads"], options.paper, options.all_heads)
    measured["shown"] = []
    for (layer, head), why in reasons.items():
        record = {"layer": layer, "head": head, "why": why}
        record |= census.show_head(
            views[layer], walk.scoring[layer], head, tokens.window, tokens.table, tokens.names
        )
        measured["shown"].append(record)
    strongest = measured["channels"][:1] if options.paper else []
    places = places or [(c["layer"], c["head"], c["pair"]) for c in strongest]
    measured["shown_channels"] = channels.show_channels(walk, places, tokens.window)
    return measured


def measure_layers(
    walk: Walk, layers: list[int], count: int, positions: list[int], after: np.ndarray
) -> dict:
    """Runs the model layer by layer and measures the chosen layers.

    `count` channels are removed in turn; 0 saves the layers above the measured ones, and the loss.
    `after` is that of `choices.find_after`. Returns:

    layers      for each measured layer: `layer`, `sliding_window`, `rotated_pairs`, and norms by
                head and pair
    heads       scores of all their heads, from the census
    views       by layer: `measures.View` of the positions
    channels    the strongest `count` of all these layers, with the loss without them
    loss        {"loss", "stderr"} over the sequences; None without channels
    """
    B, T = walk.tokens.shape
    after_batches = walk.batches(after)
    result = {"layers": [], "heads": [], "views": {}, "channels": [], "loss": None}

    def on_layer(scoring, batch, captured):
        values = walk.run(measures.measure, captured, after_batches[batch], scoring)
        view = walk.run(measures.view, captured, np.array(positions), scoring)
        return jax.device_get((values, view))

    x = walk.enter()
    end = max(layers) + 1
    for layer in walk.layers[:end]:
        number = layer.number
        if number not in layers:
            x, _ = walk.layer(number, x)
            continue
        scoring = walk.scoring[number]
        x, batches = walk.layer(number, x, on_layer=functools.partial(on_layer, scoring))
        values, views = zip(*batches, strict=True)
        mean = mean_over_sequences(values, B)
        described = {
            "layer": number,
            "sliding_window": layer.window,
            "rotated_pairs": layer.num_rotated,
        }
        norms = ("query_norms", "key_norms", "value_norms")
        described |= {name: getattr(mean, name).tolist() for name in norms}
        result["layers"].append(described)
        result["heads"] += census.score_heads(layer, mean, scoring, after)
        result["views"][number] = views[0]
        result["channels"] += channels.strongest_channels(layer, mean, scoring, T, count)
        log.info("layer %d of %d is measured", number, len(walk.layers))
    if count:
        _ablate_strongest(walk, walk.losses(x, end), count, result)
    return result


def _ablate_strongest(walk: Walk, losses: np.ndarray, count: int, result: dict) -> None:
    """Leaves the strongest channels of all layers, with the loss without each."""
    loss, stderr, *_ = average_seeds(losses.tolist())
    result["loss"] = {"loss": loss, "stderr": stderr}
    strongest = sorted(result["channels"], key=lambda channel: -channel["strength"])[:count]
    result["channels"] = strongest
    log.info("loss %.4f; now without each of %d channels", loss, len(strongest))
    channels.ablate(walk, strongest, losses)
