"""One walk through a model: every layer measured, its heads named, its channels tried."""

import logging

import jax
import numpy as np

from prope.analysis import census, channels, measures
from prope.analysis.sequences import SHOWN
from prope.analysis.walk import Walk
from prope.rope import frequencies

log = logging.getLogger("prope")


def look(walk: Walk, layers: list[int], count: int) -> dict:
    """Walks through the layers and measures some of them: what `analysis.json` has of the model itself.

    Returns:
      layers      for each that is measured: `layer, turned`, norms by head and pair, and `heads`, of the census
      openings    by layer: `measures.Opening`
      channels    the strongest `count` of all these layers, with what the loss is without them
      loss        {"loss", "stderr"} of the sequences, as far as channels are asked for; otherwise None
    """
    config, T = walk.config, walk.tokens.shape[1]
    turns = frequencies(config.head_dim, config.max_wavelength)
    found = {"layers": [], "openings": {}, "channels": [], "loss": None}
    x = walk.enter()
    for layer in range(config.num_layers if count else max(layers) + 1):
        out, parts, sizes = [], [], []
        for part, captured in walk.layer(layer, x):
            out.append(part)
            if layer in layers:
                parts.append(jax.tree.map(np.asarray, measures.measure(captured)))
                sizes.append(len(part))
                if layer not in found["openings"]:
                    opening = measures.opening(captured, min(SHOWN, T))
                    found["openings"][layer] = jax.tree.map(np.asarray, opening)
            del captured
        x = np.concatenate(out)
        if parts:
            made = jax.tree.map(lambda *values, w=sizes: np.average(values, axis=0, weights=w), *parts)
            norms = {name: getattr(made, name).tolist() for name in ("query_norms", "key_norms", "value_norms")}
            heads = census.heads_of(layer, walk.pairs[layer], made, config.head_dim)
            found["layers"].append({"layer": layer, "turned": walk.pairs[layer], **norms, "heads": heads})
            found["channels"] += channels.channels_of(layer, walk.pairs[layer], made, turns, T, count)
            log.info("layer %d of %d is measured", layer, config.num_layers)
    if count:
        losses = walk.losses(x)
        stderr = losses.std(ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else None
        found["loss"] = {"loss": losses.mean(), "stderr": stderr}
        found["channels"] = sorted(found["channels"], key=lambda channel: -channel["strength"])[:count]
        log.info("loss %.4f; without each of %d channels ..", losses.mean(), len(found["channels"]))
        channels.ablate(walk, found["channels"], losses)
    return found


def show(opening: measures.Opening, layer: int, head: int, why: str, head_dim: int, names: list[str]) -> dict:
    """What the page shows of a chosen head: its map of the first tokens, and its table."""
    table = census.table(opening, head, head_dim, names)
    return {"layer": layer, "head": head, "why": why, "map": opening.weights[head].tolist(), "table": table}
