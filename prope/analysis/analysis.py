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
from prope.analysis.walk import Walk
from prope.encodings import layer_frequencies, layer_percentages, layer_wavelengths, rotated_pairs
from prope.errors import log, usage_error
from prope.inference.opening import check_folder, results_folder
from prope.inference.statistics import average_seeds
from prope.model import Captured
from prope.pages import analysis as page
from prope.runtime import processes
from prope.runtime.files import write_atomic
from prope.stack.layers import layer_windows
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
    config = run.config.model
    layers = parse_layers(options.layers, config)
    num_heads = [config.num_heads] * config.num_layers
    num_pairs = list(map(len, layer_frequencies(config)))
    heads = parse_places("heads", options.heads, layers, HEAD=num_heads)
    places = parse_places("channel", options.channel, layers, HEAD=num_heads, PAIR=num_pairs)
    start = time.monotonic()
    ids, names, text = processes.call_on_first(lambda: read_sequences(run, options))
    sequences = np.array(ids, np.int32)
    B, T = sequences.shape
    tokens = choose_tokens(options, np.array(names))

    def measure(run: Run) -> dict:
        begins = "%s, step %d: %d sequences of %d tokens of %s, in float32"
        log.info(begins, workdir, run.step, B, T, text["source"])
        walk = Walk(config, run, sequences)
        return _measure(walk, options, layers, heads, places, tokens)

    run, measured = run.first_undamaged(measure)
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
    result = json.loads(json.dumps(result), parse_float=_round)
    if processes.is_first():
        output = (folder or workdir / "analysis") / "analysis.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, json.dumps(result))
    return result


def _round(number: str) -> float:
    """Rounds to six digits, which is what float32 has."""
    return float(f"{float(number):.6g}")


def _describe_run(run: Run, T: int) -> dict:
    """Collects fields of a run's config that tell its encoding and its training.

    `frequencies` [L][P] are those of each layer in sequences of T tokens. `kinds` are the layers
    that have the same ones and the same window, in the order of their first layers.
    """
    config = run.config.model
    frequencies = [freqs.tolist() for freqs in layer_frequencies(config, T)]
    windows = layer_windows(config)
    wavelengths = layer_wavelengths(config)
    percentages = layer_percentages(config)
    kinds = {}
    for layer, freqs in enumerate(frequencies):
        values = {
            "layers": [],
            "sliding_window": windows[layer],
            "max_wavelength": wavelengths[layer],
            "rope_percentage": percentages[layer],
            "rotated_pairs": int(np.count_nonzero(freqs)),
        }
        kind = kinds.setdefault((windows[layer], *freqs), values)
        kind["layers"].append(layer)
    return {
        "step": run.step,
        "dtype": "float32",
        "rope_percentage": config.rope_percentage,
        "rotated_pairs": rotated_pairs(config),
        "head_dim": config.head_dim,
        "max_wavelength": config.max_wavelength,
        "seed": run.config.seed,
        "trained_on": run.config.data.seq_len,
        "frequencies": frequencies,
        "kinds": list(kinds.values()),
    }


def _measure(walk: Walk, options, layers, heads, places, tokens: Tokens) -> dict:
    """Measures the layers; describes the heads and the channels, or the strongest ones."""
    count = options.channels
    measured = measure_layers(walk, layers, count, tokens.positions(), tokens.after)
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

    def on_layer(scoring: measures.Scoring, batch: int, captured: Captured) -> tuple:
        values = walk.run(measures.measure, captured, after_batches[batch], scoring)
        view = walk.run(measures.view, captured, np.array(positions), scoring)
        return jax.device_get((values, view))

    x = walk.enter()
    end = max(layers) + 1
    for layer in range(end):
        if layer not in layers:
            x, _ = walk.layer(layer, x)
            continue
        scoring = walk.scoring[layer]
        x, batches = walk.layer(layer, x, on_layer=functools.partial(on_layer, scoring))
        values, views = zip(*batches, strict=True)
        mean = _mean_over_sequences(values, B)
        freqs = walk.frequencies[layer]
        result["layers"].append(_describe_layer(layer, freqs, mean, scoring))
        result["heads"] += census.score_heads(layer, freqs, mean, scoring, after)
        result["views"][layer] = views[0]
        strongest = channels.strongest_channels(layer, freqs, mean, scoring, T, count)
        result["channels"] += strongest
        log.info("layer %d of %d is measured", layer, walk.config.num_layers)
    if count:
        _ablate_strongest(walk, walk.losses(x, end), count, result)
    return result


def _mean_over_sequences(batches: tuple[measures.Measures, ...], B: int) -> measures.Measures:
    """Averages fields [b, ...] of batches, of which the last one may be filled up, over B."""
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:B].mean(axis=0), *batches)


def _describe_layer(
    layer: int, freqs: np.ndarray, mean: measures.Measures, scoring: measures.Scoring
) -> dict:
    norms = ("query_norms", "key_norms", "value_norms")
    return {
        "layer": layer,
        "sliding_window": scoring.sliding_window,
        "rotated_pairs": int(np.count_nonzero(freqs)),
        **{name: getattr(mean, name).tolist() for name in norms},
    }


def _ablate_strongest(walk: Walk, losses: np.ndarray, count: int, result: dict) -> None:
    """Leaves the strongest channels of all layers, with the loss without each."""
    loss, stderr, *_ = average_seeds(losses.tolist())
    result["loss"] = {"loss": loss, "stderr": stderr}
    by_strength = sorted(result["channels"], key=lambda channel: -channel["strength"])
    result["channels"] = by_strength[:count]
    log.info("loss %.4f; now without each of %d channels", loss, len(result["channels"]))
    channels.ablate(walk, result["channels"], losses)
