"""Counts collectives and memory traffic in the text of a compiled module, `compiled.as_text()`.

A loop counts as often as it runs; a loop of unknown length is an error. No device is touched.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
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
_BETWEEN_SLICES = r'_xla_megascale_target="\{([\d,:]+)\}.*?_xla_megascale_transfer_type="(\w+)"'
_SYNC = '"is_sync":true'  # of a start on a GPU whose done follows at once
_FREE_CALLS = (
    "AllocateBuffer",
    "ConcatBitcast",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
)


def collectives(text: str, chips_per_node: int | None = None) -> dict[str, dict[str, int]]:
    """Counts the collectives that one chip runs in one step, {"all-gather": {"count", "bytes", "async"}, ..}.

    "bytes" is the larger of operand and result on one chip, doubled for an all-reduce: the traffic of each chip of a
    ring of n, without the factor (n - 1) / n; for an all-to-all, an upper bound. A start and its done count once.
    "async" counts those that the compiler has started apart, so that computation can run beside them.
    Those of a split sequence have kinds of their own, "all-gather of keys and values", where the compiler keeps them
    apart. What passes between slices has too, "all-reduce between slices", with that factor. libtpu compiles a
    slice's module alone, in which hosts send and receive for their chips. With `chips_per_node`, of GPUs, nodes are
    the slices: a collective over several counts the bytes that pass the network card of one chip.

    Raises ValueError, which names the loop, for one whose length the text does not give.
    """
    counts = _total(
        _read(text), "ENTRY", functools.partial(_collectives_in, chips_per_node=chips_per_node)
    )
    kinds = sorted({kind for kind, _ in counts})
    return {kind: {key: counts[kind, key] for key in ("count", "bytes", "async")} for kind in kinds}


def hbm_bytes(text: str) -> int:
    """Estimates the bytes that one chip reads from and writes to its HBM in one step; raises as `collectives`.

    Every instruction and fusion reads its operands and writes its result once. Slices count the slice, updates in
    place the update, arrays in VMEM nothing. Padding and repeated reads of a kernel are not counted.
    """
    return _total(_read(text), "ENTRY", _hbm_in)["bytes"]


def kernels(text: str) -> dict[str, int]:
    """Counts how often one chip runs each library or custom kernel in one step, {"__cudnn$fmhaSoftmax": 18, ..}."""

    def count(module: dict, computation: _Computation) -> Counter:
        calls = [
            x for x in computation.instructions.values() if x.opcode == "custom-call" and not x.free
        ]
        return Counter(re.search(r'custom_call_target="([^"]*)"', x.attributes)[1] for x in calls)

    return dict(sorted(_total(_read(text), "ENTRY", count).items()))


class _Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int  # 0 is HBM; others are VMEM, flags, scalars and the host


class _Instruction(NamedTuple):
    name: str
    arrays: tuple[_Array, ...]  # the result; a tuple's elements, flat
    opcode: str
    operands: tuple[str, ...]
    inside: str  # the text in the parentheses
    attributes: str

    def attribute(self, key: str) -> str | None:
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match and match[1]

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm(self) -> int:
        return sum(array.bytes for array in self.arrays if array.space == 0)

    @property
    def kind(self) -> str:
        """The opcode; of the done of a start, that of both."""
        return self.opcode.removesuffix("-done")

    @property
    def free(self) -> bool:
        """Tells whether it moves no data by itself."""
        free_call = self.opcode == "custom-call" and any(
            name in self.attributes for name in _FREE_CALLS
        )
        return free_call or self.kind in _FREE

    @property
    def chained(self) -> bool:
        """Tells whether it is a collective that a TPU runs concurrently with the fusions that contain its text."""
        return "chain_id=" in self.attributes


@dataclasses.dataclass
class _Computation:
    instructions: dict[str, _Instruction] = dataclasses.field(default_factory=dict)
    root: _Instruction | None = None

    def uses(self, name: str) -> list[tuple[_Instruction, int]]:
        return [
            (x, i)
            for x in self.instructions.values()
            for i, operand in enumerate(x.operands)
            if operand == name
        ]

    def operands(self, x: _Instruction) -> list[_Instruction]:
        """Returns what x reads; for the done of a start, what the start reads."""
        operands = [self.instructions[name] for name in x.operands if name in self.instructions]
        started = x.opcode.endswith("-done") and operands and operands[0].opcode.endswith("-start")
        return self.operands(operands[0]) if started else operands


def _arrays(text: str) -> tuple[_Array, ...]:
    """Parses the arrays of a type such as (bf16[8,128]{1,0:T(8,128)S(1)}, u32[])."""
    arrays = []
    for dtype, sizes, space in re.findall(
        r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?", text
    ):
        dims = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        arrays.append(_Array(dtype, dims, math.ceil(math.prod(dims) * bits / 8), int(space or 0)))
    return tuple(arrays)


@functools.lru_cache(2)
def _read(text: str) -> dict[str, _Computation]:
    """Parses the computations of a module, by name; "ENTRY" is the one that runs."""
    module = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            module["ENTRY" if header[1] else header[2]] = computation = _Computation()
        elif match := re.match(
            r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, (.*))?$", line
        ):
            root, name, types, opcode, inside, attributes = match.groups(default="")
            operands = tuple(re.findall(r"%([\w.\-]+)", inside))
            computation.instructions[name] = _Instruction(
                name, _arrays(types), opcode, operands, inside, attributes
            )
            computation.root = computation.instructions[name] if root else computation.root
    if "ENTRY" not in module:
        raise ValueError("not the text of a compiled module: it has no ENTRY")
    return module


def _total(module: dict, name: str, count: Callable) -> Counter:
    """Sums count(module, computation) over a computation and those it runs; of branches, takes the largest."""
    total = Counter(count(module, module[name]))
    for x in module[name].instructions.values():
        if x.opcode == "while":
            trips, body = (
                _trips(module, module[name], x),
                _total(module, x.attribute("body"), count),
            )
            total.update({key: trips * value for key, value in body.items()})
        elif x.opcode in ("call", "async-start"):
            total.update(_total(module, x.attribute("calls") or x.attribute("to_apply"), count))
        elif x.opcode == "conditional":
            names = re.search(
                r"branch_computations=\{.*?\}|true_computation=.*?false_computation=\S+",
                x.attributes,
            )[0]
            branches = [
                _total(module, branch, count) for branch in re.findall(r"%([\w.\-]+)", names)
            ]
            total.update(functools.reduce(Counter.__or__, branches))
    return total


def _trips(module: dict, outside: _Computation, loop: _Instruction) -> int:
    """Returns how often a loop runs: the compiler's note or, on TPUs, derived from start, step and condition."""
    if note := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(note[1])
    body, condition = module[loop.attribute("body")], module[loop.attribute("condition")]
    first, test, inputs = outside.instructions[loop.operands[0]], condition.root, ()
    if test.opcode == "fusion":
        inputs = [_affine(module, condition, name) for name in test.operands]
        condition = module[test.attribute("calls")]
        test = condition.root
    sides = [_affine(module, condition, name, inputs) for name in test.operands]
    rounding = {"LT": 0, "LE": 1, "GT": 0, "GE": -1, "NE": 0}.get(test.attribute("direction"))
    if rounding is not None and all(sides) and first.opcode == body.root.opcode == "tuple":
        (i, shift), (other, limit) = sides
        if i is not None and other is None:
            start, after = (
                _affine(module, outside, first.operands[i]),
                _affine(module, body, body.root.operands[i]),
            )
            if start and start[0] is None and after and after[0] == i and after[1]:
                return max(0, math.ceil((limit + rounding - shift - start[1]) / after[1]))
    raise ValueError(f"how often the loop %{loop.name} runs cannot be read from the module's text")


def _affine(
    module: dict, computation: _Computation, name: str, inputs=()
) -> tuple[int | None, int] | None:
    """Resolves a scalar to (i, c), element i of the loop's state plus c, or to (None, c), a constant; else None."""
    x = computation.instructions[name]
    if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside):
        return None, int(x.inside)
    if x.opcode == "parameter" and int(x.inside) < len(inputs):
        return inputs[int(x.inside)]
    if (
        x.opcode == "get-tuple-element"
        and computation.instructions[x.operands[0]].opcode == "parameter"
    ):
        return int(x.attribute("index")), 0
    if x.opcode not in ("add", "bitcast", "convert", "copy", "copy-start", "copy-done", "fusion"):
        return None
    sides = [_affine(module, computation, operand, inputs) for operand in x.operands]
    if x.opcode == "fusion":
        inner = module[x.attribute("calls")]
        return _affine(module, inner, inner.root.name, sides)
    if x.opcode != "add":
        return sides[0]
    if all(sides) and None in (sides[0][0], sides[1][0]):
        return sides[1][0] if sides[0][0] is None else sides[0][0], sides[0][1] + sides[1][1]
    return None


def _collectives_in(module: dict, computation: _Computation, chips_per_node: int | None) -> Counter:
    counts = Counter()
    for x in computation.instructions.values():
        kind = x.kind
        if x.opcode == "fusion":
            counts.update(_collectives_in(module, module[x.attribute("calls")], chips_per_node))
        elif (
            x.opcode == "async-start" and _SYNC not in x.attributes
        ):  # counted where they are wrapped
            wrapped = _collectives_in(module, module[x.attribute("calls")], chips_per_node)
            counts.update(
                {(kind, "async"): n for (kind, key), n in wrapped.items() if key == "count"}
            )
        elif kind in _COLLECTIVES:
            starts = any(
                "AsyncCollectiveStart" in user.attributes for user, _ in computation.uses(x.name)
            )
            if starts or not x.chained:
                size = max(x.bytes, sum(operand.bytes for operand in computation.operands(x)))
                size *= 2 if kind == "all-reduce" else 1
                kind += " of keys and values" if "/all_gather_sequence/" in x.attributes else ""
                apart = (
                    x.opcode.endswith("-done")
                    and _SYNC not in computation.instructions[x.operands[0]].attributes
                )
                group = _first_group(computation, x) if chips_per_node else [0]
                nodes = len({chip // (chips_per_node or 1) for chip in group})
                if (
                    nodes > 1
                ):  # those of a node share the traffic of a gather or a sum, not of a permutation
                    shared = 1 if "to-all" in kind or "permute" in kind else len(group) // nodes
                    kind, size = f"{kind} between slices", size * (nodes - 1) // nodes // shared
                counts.update(
                    {
                        (kind, "count"): 1,
                        (kind, "bytes"): size,
                        (kind, "async"): int(starts or apart),
                    }
                )
        elif x.opcode == "recv" and (match := re.search(_BETWEEN_SLICES, x.attributes)):
            ends = [list(map(int, numbers.split(":"))) for numbers in match[1].split(",")]
            slices, size = sum(end[-1] - end[0] + 1 for end in ends), x.arrays[0].bytes
            kind = f"{match[2].lower().replace('_', '-')} between slices"
            size = 2 * size * (slices - 1) // slices if match[2] == "ALL_REDUCE" else size
            counts.update({(kind, "count"): 1, (kind, "bytes"): size, (kind, "async"): 1})
    return counts


def _first_group(computation: _Computation, x: _Instruction) -> list[int]:
    """Returns the chips that take part in a collective together with the first one.

    Groups are written {{0,1},{2,3}}; [2,2]<=[4] and [2,2]<=[2,2]T(1,0), whose rows they are; or as axes of a mesh,
    mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}.
    """
    start = computation.instructions[x.operands[0]] if x.opcode.endswith("-done") else x
    if listed := re.search(r"(?:replica_groups|source_target_pairs)={{([\d,]+)}", start.attributes):
        return _integers(listed[1])
    text = re.search(r"replica_groups=(.*?)(?:, [a-z]\w+=(?<!device_ids=)|$)", start.attributes)[1]
    sizes = _integers(re.match(r"(?:mesh)?\[(.*?)\]", text)[1])
    order = re.search(r"(?:<=|\()\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    chips = np.arange(math.prod(sizes)).reshape(_integers(order[1]) if order else sizes)
    chips = chips.transpose(
        _integers(order[2]) if order and order[2] else range(chips.ndim)
    ).reshape(sizes)
    axes = re.findall(r"'(\w+)'=", text)  # of a mesh
    used = re.search(r" {(.*?)}", text)
    return (
        chips[tuple(slice(None) if used and f"'{axis}'" in used[1] else 0 for axis in axes or "0")]
        .ravel()
        .tolist()
    )


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"(?:^|,|=)(\d+)", text)]


def _hbm_in(module: dict, computation: _Computation) -> Counter:
    total = 0
    for x in computation.instructions.values():
        if x.opcode in ("send", "recv"):
            total += x.arrays[0].bytes
        elif not (x.free or x.opcode.endswith(("-start", "-update"))):
            sizes = [operand.hbm for operand in computation.operands(x)]
            total += sum(
                _bytes_read(module, computation, x, i, size) for i, size in enumerate(sizes)
            )
            total += _bytes_written(module, computation, x)
    return Counter(bytes=total)


def _bytes_read(module: dict, computation: _Computation, x: _Instruction, i: int, size: int) -> int:
    """Counts the bytes that x reads of its operand i, which has `size` bytes in HBM."""
    if x.kind in _SLICES and i == 0:
        return x.bytes if size else 0
    body, views = computation, [x]
    if x.opcode == "fusion":
        body = module[x.attribute("calls")]
        views = [
            p for p in body.instructions.values() if p.opcode == "parameter" and p.inside == str(i)
        ]
    elif x.opcode != "bitcast":
        return 0 if x.free or x.chained or (x.kind in _UPDATES and i == 0) else size
    uses = [use for view in views for use in body.uses(view.name)]
    return min(size, sum(_bytes_read(module, body, *use, size) for use in uses))


def _bytes_written(module: dict, computation: _Computation, x: _Instruction) -> int:
    """Counts the bytes of HBM that x writes, in a fusion as its result."""
    operands = computation.operands(x)
    if x.opcode == "tuple":
        return sum(_bytes_written(module, computation, operand) for operand in operands)
    if x.opcode == "fusion":
        body = module[x.attribute("calls")]
        return _bytes_written(module, body, body.root)
    if x.opcode == "bitcast" and x.hbm:
        return _bytes_written(module, computation, operands[0])
    if x.kind in _UPDATES and x.hbm:
        return operands[1 if x.kind == "dynamic-update-slice" else -1].bytes
    scratch = [
        a for a in x.arrays if x.opcode == "custom-call" and a.dtype in ("s8", "u8")
    ]  # of GPU libraries
    return 0 if x.free or x.chained else x.hbm - sum(array.bytes for array in scratch)
