"""Counts the matmul FLOPs of a traced step.

XLA's own cost analysis counts a loop's body once and a Pallas kernel as 0. Here a loop counts as
often as it runs, and what cannot be counted is an error. No device is touched.
"""

import math

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters import partial_eval

# Primitives that run their one jaxpr once, with their operands as its arguments.
_CALLS = (
    "jit",
    "checkpoint",
    "remat2",
    "closed_call",
    "eval_jaxpr",
    "custom_jvp_call",
    "custom_vjp_call",
    "shard_map",
)
# Primitives whose matmuls are in no jaxpr, by the start of their names.
_OPAQUE = (
    "conv_general_dilated",
    "custom_partitioning",
    "dot_product_attention",
    "ffi_call",
    "pallas_call",
    "ragged_dot",
    "scaled_",
)
# Matmuls of cuDNN's attention: the backward pass computes the scores again.
_CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}


def count_flops(closed: ClosedJaxpr) -> float:
    """Counts the FLOPs of all matmuls of `jax.jit(step).trace(..).jaxpr`, over all devices.

    Recomputation by remat counts. A scan counts its length times, a cond its costliest branch, a
    shard_map once per device. Work that the compiler replicates over devices counts once. Splash
    attention counts the blocks that its mask visits, cuDNN's half of all pairs of query and key.

    Raises ValueError, which names it, for a loop of unknown length or a kernel of unknown FLOPs.
    """
    # Remat repeats whole layers, of which the compiler drops what no result needs.
    results = [True] * len(closed.out_avals)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, results, instantiate=True)
    return _count(jaxpr, [], dict(zip(jaxpr.constvars, closed.consts, strict=True)))


def _count(jaxpr: Jaxpr, operands: list, constants: dict) -> float:
    """Counts a call of a jaxpr; `constants` holds the values of variables that are constant."""
    constants.update(zip(jaxpr.invars, operands, strict=False))
    return sum(_count_equation(eqn, constants) for eqn in jaxpr.eqns)


def _count_equation(eqn: JaxprEqn, constants: dict) -> float:
    name = eqn.primitive.name
    operands = [_value(atom, constants) for atom in eqn.invars]
    bodies = list(jaxprs_in_params(eqn.params))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        sizes = [eqn.invars[0].aval.shape[axis] for axis in contracted]
        return 2.0 * eqn.outvars[0].aval.size * math.prod(sizes)
    if name.startswith(_OPAQUE):
        return _count_kernel(eqn, operands, bodies)
    if name == "scan":  # a mask is the same in every round
        return eqn.params["length"] * _count(bodies[0], operands, constants)
    if name == "cond":
        return max(_count(branch, operands[1:], constants) for branch in bodies)
    if name in _CALLS:
        flops = _count(bodies[0], operands, constants)
        results = [_value(atom, constants) for atom in bodies[0].outvars]
        constants.update(zip(eqn.outvars, results, strict=True))
        for axis in eqn.params.get("newly_manual_axes", ()):  # a shard_map's
            flops *= eqn.params["mesh"].shape[axis]
        return flops
    if name == "dynamic_slice":
        # One device's share of a mask, for which the mean over all devices stands.
        constants[eqn.outvars[0]] = operands[0]
    if any(_count(body, [], constants) for body in bodies):
        problem = "how often it runs is not known"
        raise ValueError(f"the matmuls in a {name} cannot be counted: {problem}")
    return 0.0


def _value(atom, constants: dict):
    """Returns the value of a literal or of a constant variable; None for other variables."""
    if isinstance(atom, Literal):
        return atom.val
    return constants.get(atom)


def _count_kernel(eqn: JaxprEqn, operands: list, bodies: list[Jaxpr]) -> float:
    """Counts one call of an attention kernel on one device."""
    primitive = eqn.primitive.name
    name = str(eqn.params.get("name") or primitive)
    if primitive in _CUDNN:
        B, T, N, H = eqn.invars[0].aval.shape
        S = eqn.invars[1].aval.shape[1]
        window = min(eqn.params.get("sliding_window_length") or S, S)
        keys = window - window**2 / (2 * S)  # the mean over causal queries
        matmul = 2.0 * B * N * T * H * keys
        return _CUDNN[primitive] * matmul
    if primitive != "pallas_call" or not name.startswith("splash_"):
        raise ValueError(f"the FLOPs of the kernel {name} are not known")
    grid = eqn.params["grid_mapping"]
    share = 1.0
    if grid.num_index_operands:
        _, block_mask, *_ = operands  # a step of the grid computes nothing where it is 0
        if block_mask is None:
            raise ValueError(f"the blocks that the kernel {name} visits are not constant")
        share = float(np.count_nonzero(block_mask) / block_mask.size)
    return math.prod(grid.grid) * share * _count(bodies[0], [], {})
