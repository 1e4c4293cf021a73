"""Measures the layers of a model on one walk through it, and the loss without its strongest channels."""

import logging

import jax
import numpy as np

from prope.analysis import census, channels, measures
from prope.analysis.sequences import SHOWN
from prope.analysis.walk import Walk
from prope.rope import frequencies

log = logging.getLogger("prope")


def measure_layers(walk: Walk, layers: list[int], count: int) -> dict:
    """Runs the model layer by layer and measures the chosen layers.

    Args:
      walk: the model and the sequences.
      layers: numbers of the layers to measure.
      count: how many channels to remove in turn; 0 saves the layers above the measured ones, and the loss.

    Returns:
      layers      for each measured layer: `layer`, `turned` (rotated pairs), and norms by head and pair
      heads       scores of all their heads, from the census
      openings    by layer: `measures.Opening`
      channels    the strongest `count` of all these layers, with the loss without them
      loss        {"loss", "stderr"} over the sequences; None without channels
    """
    config, T = walk.config, walk.tokens.shape[1]
    freqs = frequencies(config.head_dim, config.max_wavelength)
    result = {"layers": [], "heads": [], "openings": {}, "channels": [], "loss": None}
    x = walk.enter()
    for layer in range(config.num_layers if count else max(layers) + 1):
        outputs, means, sizes = [], [], []
        for output, captured in walk.layer(layer, x):
            outputs.append(output)
            if layer in layers:
                means.append(jax.tree.map(np.asarray, measures.measure(captured)))
                sizes.append(len(output))
                if layer not in result["openings"]:
                    opening = measures.opening(captured, min(SHOWN, T))
                    result["openings"][layer] = jax.tree.map(np.asarray, opening)
            del captured
        x = np.concatenate(outputs)
        if means:
            mean = jax.tree.map(lambda *values, sizes=sizes: np.average(values, axis=0, weights=sizes), *means)
            norms = {name: getattr(mean, name).tolist() for name in ("query_norms", "key_norms", "value_norms")}
            rotated = walk.pairs[layer]
            result["layers"].append({"layer": layer, "turned": rotated, **norms})
            result["heads"] += census.score_heads(layer, rotated, mean, config.head_dim)
            result["channels"] += channels.strongest_channels(layer, rotated, mean, freqs, T, count)
            log.info("layer %d of %d is measured", layer, config.num_layers)
    if count:
        losses = walk.losses(x)
        stderr = losses.std(ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else None
        result["loss"] = {"loss": losses.mean(), "stderr": stderr}
        result["channels"] = sorted(result["channels"], key=lambda channel: -channel["strength"])[:count]
        log.info("loss %.4f; now without each of %d channels", losses.mean(), len(result["channels"]))
        channels.ablate(walk, result["channels"], losses)
    return result
