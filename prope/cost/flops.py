"""What a training step costs: matmul FLOPs from its jaxpr, and what chips can do; `prope.cost.hlo` has its traffic.

XLA's own cost analysis counts the body of a loop once and a Pallas kernel as nothing; here a loop counts as often as it
runs, and what cannot be counted is an error, never 0. No device is touched.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters import partial_eval
from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip's peaks: bf16 FLOP/s, bytes of HBM, bytes/s to HBM, bytes/s that its links together receive."""

    device_kinds: tuple[str, ...]  # as jax.Device.device_kind says it
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    ici_bandwidth: float | None = None  # None: depends on how many chips share a node


# TPU: peaks from Cloud TPU's page of each chip (v4: scaling-book, tpus.md); HBM is what XLA says a program may use; ICI
# is links x one-way bandwidth of scaling-book, tpus.md (4 links, v4 and v5p 6). GPU: NVIDIA's data sheets, dense bf16.
CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, 30.75 * 2**30, 1.2e12, 6 * 4.5e10),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * 2**30, 819e9, 4 * 5e10),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 95.74 * 2**30, 2765e9, 6 * 1e11),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * 2**30, 1638e9, 4 * 1e11),
    "A100-40GB": Chip(("NVIDIA A100-SXM4-40GB",), 312e12, 40e9, 1555e9),
    "A100-80GB": Chip(("NVIDIA A100-SXM4-80GB",), 312e12, 80e9, 2039e9),
    "H100": Chip(("NVIDIA H100 80GB HBM3",), 989e12, 80e9, 3350e9),
    "H200": Chip(("NVIDIA H200",), 989e12, 141e9, 4800e9),
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`; None where it is not in the table, as for a CPU."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of a device kind, or None."""
    chip = find_chip(device_kind)
    return chip.flops if chip else None


def roofline_seconds(flops: float, hbm: float, traffic: Mapping[str, Mapping[str, int]], chip: Chip) -> dict:
    """The least seconds that a step can take, by what bounds it; "step" is the largest: everything overlaps.

    Args:
      flops: of one chip, as `count_flops` / chips.
      hbm: bytes of one chip, as `prope.cost.hlo.hbm_bytes` gives them.
      traffic: of one chip, as `prope.cost.hlo.collectives` gives it.
      chip: from `CHIPS`. Where its links are not known, "communication" is None and left out of the largest.
    """
    parts = {"compute": flops / chip.flops, "memory": hbm / chip.hbm_bandwidth, "communication": None}
    if chip.ici_bandwidth:
        parts["communication"] = sum(kind["bytes"] for kind in traffic.values()) / chip.ici_bandwidth
    return {"step": max(filter(None, parts.values()), default=0.0)} | parts


def model_flops_per_token(model: ConfigDict, seq_len: int) -> float:
    """FLOPs that training on one token needs, forward and backward, recomputation not counted: what MFU is made of.

    6 per parameter of a matmul (layers and head, not norms nor the lookup), and causal attention: a query sees T / 2
    keys on average, two matmuls forward and four backward.
    """
    D, N, K, H, F = model.embed_dim, model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_dim
    layer = D * N * H + 2 * D * K * H + N * H * D + 3 * D * F
    return 6.0 * (model.num_layers * layer + model.vocab_size * D) + 6.0 * model.num_layers * N * H * seq_len


# Primitives that run the one jaxpr they hold once, with their operands as its arguments.
_CALLS = ("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map")  # fmt: skip
# Primitives whose work no jaxpr shows.
_OPAQUE = re.compile(
    "pallas_call|ffi_call|custom_partitioning|dot_product_attention|ragged_dot|scaled_(dot|matmul)|.*wgmma"
)


def count_flops(jaxpr: ClosedJaxpr | Jaxpr, kernels: Mapping[str, float] | None = None) -> float:
    """FLOPs of all matmuls and convolutions that a jaxpr runs, over all devices, with what remat computes again.

    A scan counts its length times, a cond its costliest branch, a shard_map once per device. Work that the compiler
    replicates over devices is counted once. The splash attention kernels count the blocks that their mask visits.

    Args:
      jaxpr: as `jax.make_jaxpr(step)(..)` or `jax.jit(step).trace(..).jaxpr`.
      kernels: FLOPs of one call (on one device), by name, of kernels that are not splash attention's.

    Raises:
      ValueError: matmuls in a loop whose length is not known, or a kernel whose FLOPs are not; it is named.
    """
    # Without what no result needs: remat repeats whole layers, and the compiler drops the parts that are not used.
    body = getattr(jaxpr, "jaxpr", jaxpr)
    needed, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    needed = ClosedJaxpr(needed, getattr(jaxpr, "consts", ()))
    return _count(needed, [None] * len(body.invars), kernels or {})[0]


def _count(closed, arguments: list, kernels: Mapping[str, float]) -> tuple[float, list]:
    """FLOPs, and the values of those results that are constants; `arguments` that are not constants are None."""
    jaxpr = getattr(closed, "jaxpr", closed)
    known = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def value(atom):
        return atom.val if isinstance(atom, Literal) else known.get(atom)

    total = 0.0
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [value(atom) for atom in eqn.invars]
        inner = [p for v in eqn.params.values() for p in (v if isinstance(v, list | tuple) else [v])]
        inner = [p for p in inner if isinstance(p, ClosedJaxpr | Jaxpr)]
        if name == "dot_general":
            contracted = [eqn.invars[0].aval.shape[axis] for axis in eqn.params["dimension_numbers"][0][0]]
            total += 2.0 * eqn.outvars[0].aval.size * math.prod(contracted)
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * eqn.outvars[0].aval.size * kernel.size / features
        elif _OPAQUE.match(name):
            total += _kernel_flops(eqn, operands, kernels)
        elif name in _CALLS and len(inner) == 1:
            flops, results = _count(inner[0], operands, kernels)
            known |= zip(eqn.outvars, results, strict=True)
            devices = [eqn.params["mesh"].shape[axis] for axis in eqn.params.get("newly_manual_axes", ())]
            total += flops * math.prod(devices)  # of a shard_map; else one
        elif name == "scan":
            old = "num_consts" in eqn.params  # before JAX 0.11
            constants = operands[: eqn.params["num_consts"] if old else len(eqn.params["ft_in"].unpack()[0])]
            varying = [None] * (len(operands) - len(constants))
            total += eqn.params["length"] * _count(inner[0], constants + varying, kernels)[0]
        elif name == "cond":
            total += max(_count(branch, operands[1:], kernels)[0] for branch in inner)
        elif any(_count(part, [None] * len(getattr(part, "jaxpr", part).invars), kernels)[0] for part in inner):
            raise ValueError(f"the matmuls in a {name} cannot be counted: how often it runs is not known")
    return total, [value(atom) for atom in jaxpr.outvars]


def _kernel_flops(eqn: JaxprEqn, operands: list, kernels: Mapping[str, float]) -> float:
    """FLOPs of one call of a kernel on one device."""
    name = str(eqn.params.get("name") or eqn.params.get("name_and_src_info") or eqn.primitive.name).split(" ")[0]
    if name in kernels:
        return kernels[name]
    if not (eqn.primitive.name == "pallas_call" and name.startswith("splash_")):
        raise ValueError(f"the FLOPs of the kernel {name} are not known: give them as kernels={{{name!r}: ..}}")
    grid = eqn.params["grid_mapping"]
    share = 1.0
    if grid.num_index_operands:  # data_next, block_mask, ..: a step of the grid computes where block_mask is not 0
        if operands[1] is None:
            raise ValueError(f"the blocks that the kernel {name} visits are not known: its mask is no constant")
        share = float(np.count_nonzero(operands[1]) / operands[1].size)
    body = eqn.params["jaxpr"]
    return math.prod(grid.grid) * share * _count(body, [None] * len(body.invars), kernels)[0]
