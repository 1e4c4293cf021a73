"""Analyses runs and writes their pages; `prope.analyze` is its command."""

import contextlib
import hashlib
import json
import time

import jax
import numpy as np
from etils import epath

from prope.analysis import census, channels, compare, measures, page, theory_page
from prope.analysis.choices import (
    find_after,
    parse_layers,
    parse_places,
    parse_tokens,
    parse_window,
)
from prope.analysis.sequences import read_sequences
from prope.analysis.walk import Walk
from prope.config import default_config
from prope.encodings import FIELDS, layer_frequencies, rotated_pairs
from prope.errors import UsageError, log
from prope.inference.paired import average_seeds
from prope.model import Captured
from prope.rope import frequencies
from prope.runtime import processes
from prope.runtime.files import read_json, write_atomic
from prope.workdir.checkpoints import list_steps
from prope.workdir.run import Run, find_runs, open_run

# Flags that change the result, and fields of analysis.json that the command prints.
_OPTIONS = (
    "sequences",
    "seq_len",
    "text",
    "dataset",
    "data_dir",
    "split",
    "layers",
    "heads",
    "channels",
    "window",
    "tokens",
    "head_of",
    "channel",
    "paper",
)
_PRINTED = (
    "source",
    "split",
    "sequences",
    "seq_len",
    "heads",
    "rank_correlation",
    "channels",
    "loss",
    "rope_percentage",
    "step",
    "workdir",
)


def analyse(workdir: epath.Path, options) -> dict:
    """Analyses a run; returns the content of its analysis.json, which is reused if it has the same options.

    `options` are the flags of `prope.analyze`. All processes call it; the first one reads the text, and writes.
    """
    asked = {name: getattr(options, name) for name in _OPTIONS}
    asked |= {"text_hash": None, "format": 3}  # older analyses are repeated
    with contextlib.suppress(OSError):  # which `read_sequences` reports
        asked["text_hash"] = (
            options.text and hashlib.sha256(epath.Path(options.text).read_bytes()).hexdigest()[:16]
        )
    run = open_run(workdir, options.step)
    config = run.config.model
    rotates = layer_frequencies(config) > 0
    if config.layer_types or (rotates[:, 1:] > rotates[:, :-1]).any():
        types = ", ".join(
            f"model.{name}={config[name]}"
            for name in ("layer_types", "rope_type", "rope_scaling_type")
        )
        allowed = "only layers without windows, whose rotated pairs are the first, can be analysed"
        raise UsageError(f"--workdir={workdir}: {types}: {allowed}")
    layers = parse_layers(options.layers, config)
    chosen = parse_places("heads", options.heads, layers, HEAD=config.num_heads)
    chosen_channels = parse_places(
        "channel", options.channel, layers, HEAD=config.num_heads, PAIR=config.head_dim // 2
    )
    output = workdir / "analysis" / "analysis.json"
    asked, saved = processes.call_on_first(
        lambda: [asked, None if options.again else read_json(output)]
    )
    if saved and (saved["step"], saved["asked"]) == (run.step, asked):
        log.info("%s: step %d was analysed before (--again does it anew)", workdir, run.step)
        return saved | {"workdir": str(workdir)}  # which may have moved
    start = time.monotonic()
    ids, names, text = processes.call_on_first(lambda: read_sequences(run, options))
    B, T = (tokens := np.array(ids, np.int32)).shape
    after = find_after("'" if options.paper else options.head_of, np.array(names), options.paper)
    if options.paper and not after.any():
        log.info(
            "%s: no apostrophe in these tokens; Figures 7 and 9 need a --text with some", workdir
        )
    window = parse_window(options.window, T, int(after[0].argmax()) if options.paper else 0)
    table, window = (
        parse_tokens(options.tokens, range(T) if options.paper else window, T),
        sorted({0, *window}),
    )
    positions = sorted({0, *window, *table, *(i - 1 for i in table if i)})

    def measure(run: Run) -> dict:
        walk = Walk(config, run, tokens)
        log.info(
            "%s, step %d: %d sequences of %d tokens of %s", workdir, run.step, B, T, text["source"]
        )
        measured = measure_layers(walk, layers, options.channels, positions, after)
        strongest = [
            (c["layer"], c["head"], c["pair"]) for c in measured["channels"][: int(options.paper)]
        ]
        measured["shown_channels"] = channels.show_channels(
            walk, chosen_channels or strongest, window
        )
        return measured

    run, measured = run.first_undamaged(measure)
    views = measured.pop("views")
    defaults, fields = default_config().model, sorted(FIELDS - {"rope_percentage"})
    chosen = [(*head, "asked for") for head in chosen] or census.strongest(
        measured["heads"], options.paper
    )
    result = {
        "workdir": str(workdir),
        "step": run.step,
        "asked": asked,
        "rope_percentage": config.rope_percentage,
        "encoding": {name: config[name] for name in fields if config[name] != defaults[name]},
        "rotated_pairs": rotated_pairs(config),
        "head_dim": config.head_dim,
        "max_wavelength": config.max_wavelength,
        "seed": run.config.seed,
        **text,
        "sequences": B,
        "seq_len": T,
        "trained_on": run.config.data.seq_len,
        "frequencies": frequencies(config.head_dim, config.max_wavelength).tolist(),
        "rank_correlation": census.rank_correlation([measured]),
        "window": {"positions": window, "tokens": [names[0][i] for i in window]},
        "shown": [
            {"layer": layer, "head": head, "why": why}
            | census.show_head(views[layer], head, window, table, names[0])
            for layer, head, why in chosen
        ],
        **measured,
        "seconds": time.monotonic() - start,
        "device": jax.devices()[0].device_kind,
    }
    result = json.loads(
        json.dumps(result), parse_float=lambda number: float(f"{float(number):.6g}")
    )  # as float32
    if processes.is_first():
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(output, json.dumps(result))
    return result


def analyse_all(workdir: epath.Path, options) -> dict:
    """Analyses the run in a directory, or all runs below it and compares them; returns what the command prints."""
    runs = [
        epath.Path(run)
        for run in processes.call_on_first(lambda: list(map(str, find_runs(workdir))))
    ]
    runs = [run for run in runs if runs == [workdir] or list_steps(run)]
    if not runs:
        raise UsageError(
            f"--workdir={workdir}: no run there has a finished checkpoint; train one first"
        )
    analyses = []
    for run in runs:
        analyses.append(analyse(run, options))
        output, made = run / "analysis" / "index.html", run / "analysis" / "analysis.json"
        if processes.is_first() and (
            not output.exists() or output.stat().mtime <= made.stat().mtime
        ):
            if options.paper:
                theory_page.write(output.parent / "theory")
            page.write(output.parent, analyses[-1])  # last: when it is there, all is
    if runs == [workdir]:
        return {"output": str(output)} | {name: analyses[0][name] for name in _PRINTED}
    return processes.call_on_first(lambda: compare.write(workdir / "analysis", analyses))


def measure_layers(
    walk: Walk, layers: list[int], count: int, positions: list[int], after: np.ndarray
) -> dict:
    """Runs the model layer by layer and measures the chosen layers.

    `count` channels are removed in turn; 0 saves the layers above the measured ones, and the loss. `after` is that of
    `choices.find_after`. Returns:

    layers      for each measured layer: `layer`, `turned` (rotated pairs), and norms by head and pair
    heads       scores of all their heads, from the census
    views       by layer: `measures.View` of the positions
    channels    the strongest `count` of all these layers, with the loss without them
    loss        {"loss", "stderr"} over the sequences; None without channels
    """
    B, T = walk.tokens.shape
    result = {"layers": [], "heads": [], "views": {}, "channels": [], "loss": None}
    follows, share, measured = walk.batches(after), after[:, measures.FROM :].mean(), []

    def look(layer: int, batch: int, captured: Captured) -> None:
        measured.append(jax.device_get(walk.run(measures.measure, captured, follows[batch])))
        if batch == 0:
            result["views"][layer] = jax.device_get(
                walk.run(measures.view, captured, np.array(positions))
            )

    x = walk.enter()
    for layer in range(max(layers) + 1):
        measured.clear()
        x = walk.layer(layer, x, look=look if layer in layers else None)
        if measured:
            mean = jax.tree.map(lambda *values: np.concatenate(values)[:B].mean(axis=0), *measured)
            norms = {
                name: getattr(mean, name).tolist()
                for name in ("query_norms", "key_norms", "value_norms")
            }
            freqs = walk.frequencies[layer]
            result["layers"].append(
                {"layer": layer, "turned": int(np.count_nonzero(freqs)), **norms}
            )
            result["heads"] += census.score_heads(layer, freqs, mean, share)
            result["channels"] += channels.strongest_channels(layer, freqs, mean, T, count)
            log.info("layer %d of %d is measured", layer, walk.config.num_layers)
    if count:
        losses = walk.losses(x, max(layers) + 1)
        loss, stderr, _ = average_seeds(losses.tolist())
        result["loss"] = {"loss": loss, "stderr": stderr}
        result["channels"] = sorted(result["channels"], key=lambda channel: -channel["strength"])[
            :count
        ]
        log.info("loss %.4f; now without each of %d channels", loss, len(result["channels"]))
        channels.ablate(walk, result["channels"], losses)
    return result
