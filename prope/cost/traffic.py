"""Counts the collectives, the kernels and the memory traffic of a compiled module.

They are what one chip does in one step. Functions take a module from `prope.cost.hlo.parse` and
raise ValueError, which names the loop, for one whose length the module does not give.
"""

import math
import re
from collections import Counter

import numpy as np

from prope.cost.hlo import Computation, Instruction, runs

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# A start on a GPU has this where its done follows at once.
_SYNC = '"is_sync":true'
_BETWEEN_SLICES = r'_xla_megascale_target="\{([\d,:]+)\}.*?_xla_megascale_transfer_type="(\w+)"'
# These read from their first operand only what they result in.
_SLICES = ("dynamic-slice", "slice", "gather")
# These write into their first operand only the update.
_UPDATES = ("dynamic-update-slice", "scatter")
# These move no data by themselves; so do custom calls whose attributes match _FREE_CALLS.
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "async",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "send",
    "recv",
)
_FREE_CALLS = r"AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound|AsyncCollectiveDone"


def collectives(
    module: Computation, chips_per_node: int | None = None
) -> dict[str, dict[str, int]]:
    """Counts the collectives, {"all-gather": {"count", "bytes", "async"}, ..}.

    "bytes" is the larger of operand and result on one chip, doubled for an all-reduce: the traffic
    of each chip of a ring of n, without the factor (n - 1) / n; for an all-to-all, an upper bound.
    A start and its done count once. "async" counts those that the compiler has started apart, so
    that computation can run beside them.

    Those of a split sequence have kinds of their own, "all-gather of keys and values", where the
    compiler keeps them apart. What passes between slices has too, "all-reduce between slices", with
    that factor. libtpu compiles a slice's module alone, in which hosts send and receive for their
    chips. With `chips_per_node`, of GPUs, nodes are the slices: a collective over several counts
    the bytes that pass the network card of one chip.
    """
    counts = Counter()
    for x, times in runs(module):
        found = _collectives_of(x, chips_per_node)
        counts.update({key: times * number for key, number in found.items()})
    kinds = sorted({kind for kind, _ in counts})
    return {kind: {key: counts[kind, key] for key in ("count", "bytes", "async")} for kind in kinds}


def _collectives_of(x: Instruction, chips_per_node: int | None) -> dict:
    if x.opcode == "recv":
        return _received_from_slices(x)
    if x.kind in _COLLECTIVES:
        return _count_collective(x, chips_per_node)
    counts = Counter()
    if x.opcode == "fusion" or (x.opcode == "async-start" and _SYNC not in x.attributes):
        for part in x.called("calls").instructions.values():
            counts.update(_collectives_of(part, chips_per_node))
    if x.opcode == "async-start":  # what it wraps is counted where it stands
        return {(kind, "async"): counts[kind, "count"] for kind, _ in counts}
    return counts


def _count_collective(x: Instruction, chips_per_node: int | None) -> dict:
    starts_fusion = any("AsyncCollectiveStart" in user.attributes for user, _ in x.users)
    if _is_chained(x) and not starts_fusion:
        return {}
    kind = x.kind
    size = max(x.bytes, sum(operand.bytes for operand in x.start.operands))
    if kind == "all-reduce":
        size *= 2
    if "/all_gather_sequence/" in x.attributes:
        kind += " of keys and values"
    if chips_per_node:
        group = _first_group(x.start.attributes)
        nodes = len({chip // chips_per_node for chip in group})
        if nodes > 1:
            # The chips of a node share the traffic of a gather or a sum, not of an exchange.
            is_exchange = "to-all" in kind or "permute" in kind
            sharing = 1 if is_exchange else len(group) // nodes
            kind += " between slices"
            size = size * (nodes - 1) // nodes // sharing
    is_async = starts_fusion or (x.start is not x and _SYNC not in x.start.attributes)
    return {(kind, "count"): 1, (kind, "bytes"): size, (kind, "async"): int(is_async)}


def _received_from_slices(x: Instruction) -> dict:
    """Counts what a TPU's host receives for its chip from those of other slices."""
    match = re.search(_BETWEEN_SLICES, x.attributes)
    if match is None:
        return {}
    targets, transfer = match.groups()
    ranges = [[int(number) for number in target.split(":")] for target in targets.split(",")]
    slices = sum(ends[-1] - ends[0] + 1 for ends in ranges)
    size = x.arrays[0].bytes
    if transfer == "ALL_REDUCE":
        size = 2 * size * (slices - 1) // slices
    kind = transfer.lower().replace("_", "-") + " between slices"
    return {(kind, "count"): 1, (kind, "bytes"): size, (kind, "async"): 1}


def _first_group(attributes: str) -> list[int]:
    """Returns the chips that take part in a collective together with the first one.

    Groups are written {{0,1},{2,3}}; [2,2]<=[4] and [2,2]<=[2,2]T(1,0), whose rows they are; or as
    axes of a mesh, mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}.
    """
    listed = re.search(r"(?:replica_groups|source_target_pairs)={{([\d,]+)}", attributes)
    if listed:
        return _integers(listed[1])
    text = re.search(r"replica_groups=(.*?)(?:, [a-z]\w+=(?<!device_ids=)|$)", attributes)[1]
    sizes = _integers(re.match(r"(?:mesh)?\[(.*?)\]", text)[1])
    order = re.search(r"(?:<=|\()\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    chips = np.arange(math.prod(sizes))
    if order:
        chips = chips.reshape(_integers(order[1]))
        if order[2]:
            chips = chips.transpose(_integers(order[2]))
    chips = chips.reshape(sizes)
    if not text.startswith("mesh"):
        return chips[0].ravel().tolist()
    axes = re.findall(r"'(\w+)'=", text)
    used = re.search(r" {(.*?)}", text)[1]
    index = tuple(slice(None) if f"'{axis}'" in used else 0 for axis in axes)
    return chips[index].ravel().tolist()


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"(?:^|,|=)(\d+)", text)]


def kernels(module: Computation) -> dict[str, int]:
    """Counts how often each library or custom kernel runs, {"__cudnn$fmhaSoftmax": 18, ..}."""

    counts = Counter()
    for x, times in runs(module):
        if x.opcode == "custom-call" and not _is_free(x):
            counts[x.attribute("custom_call_target")] += times
    return dict(sorted(counts.items()))


def hbm_bytes(module: Computation) -> int:
    """Estimates the bytes that are read from HBM and written to it.

    Every instruction and fusion reads its operands and writes its result once. Slices count the
    slice, updates in place the update, arrays in VMEM nothing. Padding and repeated reads of a
    kernel are not counted.
    """
    return sum(times * kernel_bytes(x) for x, times in runs(module) if is_kernel(x))


def is_kernel(x: Instruction) -> bool:
    """Returns whether an instruction is work of its own; a done stands for its start."""
    is_begun = x.opcode.endswith(("-start", "-update"))
    return x.opcode in ("send", "recv") or not (_is_free(x) or is_begun)


def kernel_bytes(x: Instruction) -> int:
    """Counts the bytes of HBM that a kernel reads and writes."""
    if x.opcode in ("send", "recv"):
        return x.arrays[0].bytes
    operands = enumerate(x.start.operands)
    read = sum(_bytes_read(x, i, operand.hbm_bytes) for i, operand in operands)
    return read + _bytes_written(x)


def _bytes_read(x: Instruction, i: int, size: int) -> int:
    """Counts the bytes that x reads of its operand i, which has `size` bytes in HBM."""
    if x.kind in _SLICES and i == 0:
        return x.bytes if size else 0
    if x.kind == "fusion":
        inner = x.called("calls").instructions.values()
        views = [p for p in inner if p.opcode == "parameter" and p.inside == str(i)]
    elif x.opcode == "bitcast":
        views = [x]
    else:
        is_updated = x.kind in _UPDATES and i == 0
        return 0 if is_updated or _is_free(x) or _is_chained(x) else size
    uses = [use for view in views for use in view.users]
    return min(size, sum(_bytes_read(user, index, size) for user, index in uses))


def _bytes_written(x: Instruction) -> int:
    """Counts the bytes of HBM that x writes; a fusion, those of its result."""
    operands = x.start.operands
    if x.opcode == "tuple":
        return sum(map(_bytes_written, operands))
    if x.kind == "fusion":
        return _bytes_written(x.called("calls").root)
    if x.opcode == "bitcast" and x.hbm_bytes:
        return _bytes_written(operands[0])
    if x.kind in _UPDATES and x.hbm_bytes:
        return operands[1 if x.kind == "dynamic-update-slice" else -1].bytes
    if _is_free(x) or _is_chained(x):
        return 0
    scratch = 0
    if x.opcode == "custom-call":  # a GPU library's is not counted
        scratch = sum(array.bytes for array in x.arrays if array.dtype in ("s8", "u8"))
    return x.hbm_bytes - scratch


def _is_free(x: Instruction) -> bool:
    """Returns whether an instruction moves no data by itself."""
    is_free_call = x.opcode == "custom-call" and re.search(_FREE_CALLS, x.attributes)
    return bool(is_free_call) or x.kind in _FREE


def _is_chained(x: Instruction) -> bool:
    """Returns whether a TPU runs a collective beside the fusions that repeat its text."""
    return "chain_id=" in x.attributes
