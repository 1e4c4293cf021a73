"""Has the peaks of chips, the FLOPs of a model by closed formulas, and the roofline."""

import pathlib
import tomllib
from collections.abc import Mapping
from typing import NamedTuple

from prope import parameters
from prope.spec.model import ModelSpec


class Chip(NamedTuple):
    """A chip's peaks; chips.toml has their units and sources."""

    device_kinds: list[str]
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float | None = None


_TABLE = tomllib.loads(pathlib.Path(__file__).with_name("chips.toml").read_text())
CHIPS = {name: Chip(**fields) for name, fields in _TABLE.items()}


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`; None for one not in the table."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def roofline_seconds(
    flops: float, hbm: float, traffic: Mapping[str, Mapping[str, int]], chip: Chip
) -> dict[str, float | None]:
    """Computes lower bounds of the step's seconds, by what takes them.

    "communication" is that within a slice or GPU node, over its links; "between_slices" that over
    the data-centre network, None where its speed is not known.

    Args:
      flops: of one chip, `prope.cost.traced.count_flops` / chips.
      hbm: bytes of one chip, from `prope.cost.traffic.hbm_bytes`.
      traffic: of one chip, from `prope.cost.traffic.collectives`.
      chip: from `CHIPS`.
    """
    sizes = {kind: counts["bytes"] for kind, counts in traffic.items()}
    between = sum(size for kind, size in sizes.items() if kind.endswith("between slices"))
    within = sum(sizes.values()) - between
    return {
        "compute": flops / chip.flops,
        "memory": hbm / chip.hbm_bandwidth,
        "communication": within / chip.ici_bandwidth,
        "between_slices": chip.dcn_bandwidth and between / chip.dcn_bandwidth,
    }


def model_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """Computes the FLOPs of training on one token, without recomputation, for MFU.

    6 per matmul parameter (layers and head, not norms or the lookup), and causal attention: a query
    sees T / 2 keys on average, or W - W^2 / 2T within a window, in two matmuls forward and four
    backward.
    """
    attention = 0.0
    for layer in model.layers:
        W = min(layer.window or seq_len, seq_len)
        twice_the_keys = 2 * W - W**2 / seq_len
        attention += 6.0 * model.num_heads * layer.head_dim * twice_the_keys
    return 6.0 * parameters.count(model, matrices_only=True) + attention
