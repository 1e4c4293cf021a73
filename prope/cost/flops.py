"""Has the peaks of chips, the FLOPs of a model by closed formulas, and the roofline."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from prope.encodings import layer_windows
from prope.sharding import rank_positions


class Chip(NamedTuple):
    """A chip's peaks: bf16 FLOP/s, bytes of HBM, bytes/s to HBM, bytes/s that all its links together receive."""

    device_kinds: tuple[str, ...]  # values of jax.Device.device_kind
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    ici_bandwidth: float  # of GPUs: NVLink, one way
    dcn_bandwidth: float | None = (
        None  # bytes/s between slices or nodes: those of a host's network cards / its chips
    )


# TPU: peaks from Cloud TPU's page of each chip (v4: scaling-book, tpus.md); HBM is what XLA lets a program use; ICI
# is links x one-way bandwidth of scaling-book, tpus.md (4 links, v4 and v5p 6). Network cards of a host, Cloud TPU's
# pages: 200 Gbit/s for 8 chips of v5e and 4 of v5p, 800 for 8 of v6e. GPU: NVIDIA's data sheets, dense bf16, of DGX
# A100, H100, H200 and B200 with NVLink and one network card for each GPU, of 200 Gbit/s for A100 and 400 for the
# others; HBM is what CUDA reports (sources of gpus.toml).
CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, 30.75 * 2**30, 1.2e12, 6 * 4.5e10),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * 2**30, 819e9, 4 * 5e10, 25e9 / 8),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 95.74 * 2**30, 2765e9, 6 * 1e11, 25e9 / 4),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * 2**30, 1638e9, 4 * 1e11, 100e9 / 8),
    "a100-40gb": Chip(("NVIDIA A100-SXM4-40GB",), 312e12, 42331013120, 1555e9, 300e9, 25e9),
    "a100": Chip(("NVIDIA A100-SXM4-80GB",), 312e12, 85100068864, 2039e9, 300e9, 25e9),
    "h100": Chip(("NVIDIA H100 80GB HBM3",), 989e12, 84942979072, 3352e9, 450e9, 50e9),
    "h200": Chip(("NVIDIA H200",), 989e12, 151397597184, 4800e9, 450e9, 50e9),
    "b200": Chip(("NVIDIA B200",), 2250e12, 191514411008, 7672e9, 900e9, 50e9),
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bf16 FLOP/s of a `jax.Device.device_kind`; None for one not in the table."""
    return next((chip.flops for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def roofline_seconds(
    flops: float, hbm: float, traffic: Mapping[str, Mapping[str, int]], chip: Chip
) -> dict:
    """Computes lower bounds of the step's seconds: by what takes them, and "step", their maximum.

    "communication" is that within a slice or GPU node, over its links; "between_slices" that over the data-centre
    network.

    Args:
      flops: of one chip, `prope.cost.traced.count_flops` / chips.
      hbm: bytes of one chip, from `prope.cost.hlo.hbm_bytes`.
      traffic: of one chip, from `prope.cost.hlo.collectives`.
      chip: from `CHIPS`. What takes a network that is not known is None and not in the maximum.
    """
    bounds = {"compute": flops / chip.flops, "memory": hbm / chip.hbm_bandwidth}
    between = sum(
        counts["bytes"] for kind, counts in traffic.items() if kind.endswith("between slices")
    )
    within = sum(counts["bytes"] for counts in traffic.values()) - between
    rates = {
        "communication": (within, chip.ici_bandwidth),
        "between_slices": (between, chip.dcn_bandwidth),
    }
    bounds |= {name: bandwidth and size / bandwidth for name, (size, bandwidth) in rates.items()}
    return {"step": max(filter(None, bounds.values()), default=0.0)} | bounds


def num_parameters(params) -> int:
    """Counts the scalars in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def model_flops_per_token(model: ConfigDict, seq_len: int) -> float:
    """Computes the FLOPs of training on one token, forward and backward without recomputation, for MFU.

    6 per matmul parameter (layers and head, not norms or the lookup), and causal attention: a query sees T / 2 keys on
    average, or W - W^2 / 2T within a window, in two matmuls forward and four backward.
    """
    D, N, K, H, F = (
        model.embed_dim,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.hidden_dim,
    )
    layer = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F
    windows = [min(window or seq_len, seq_len) for window in layer_windows(model)]
    keys = sum(
        2 * window - window**2 / seq_len for window in windows
    )  # twice the mean, over all layers
    return 6.0 * (model.num_layers * layer + model.vocab_size * D) + 6.0 * N * H * keys


def busiest_part(model: ConfigDict, seq_len: int, C: int) -> float:
    """Computes the FLOPs of the part of a sequence split over C devices that has most, over the parts' mean."""
    tokens = rank_positions(C, seq_len)
    keys = sum(
        np.minimum(tokens + 1, window or seq_len).sum(axis=1) for window in layer_windows(model)
    )
    mean = model_flops_per_token(model, seq_len) * seq_len / C
    return float(1 + 12.0 * model.num_heads * model.head_dim * (keys.max() - keys.mean()) / mean)
