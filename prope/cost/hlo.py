"""Parses the text of a compiled module, `compiled.as_text()`, and lists what it runs.

A loop counts as often as it runs; a loop of unknown length is an error. No device is touched.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_HEADER = r"(ENTRY )?%?([\w.\-]+) \(.*\{$"
_INSTRUCTION = r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, (.*))?$"
_ARRAY = r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\](?:\{[^}]*?(?:S\((\d+)\))?\})?"


class Array(NamedTuple):
    """An array that an instruction results in."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    in_hbm: bool  # else in VMEM, a flag, a scalar or on the host


@dataclasses.dataclass(eq=False)
class Instruction:
    """A line of a computation, linked with what it reads, who reads it, and what it calls."""

    name: str
    opcode: str
    arrays: list[Array]  # the result; a tuple's elements, flat
    operands: list["Instruction"]
    inside: str  # the text in the parentheses
    attributes: str  # the text after them
    computations: dict[str, "Computation"]  # all of the module
    users: list[tuple["Instruction", int]] = dataclasses.field(default_factory=list)

    def attribute(self, key: str) -> str | None:
        """Returns the value of key=value, of key=%value or, without quotes, of key="value"."""
        match = re.search(rf'\b{key}=(?:"([^"]*)|%?([\w.\-]+))', self.attributes)
        return match and (match[1] or match[2])

    @property
    def path(self) -> str:
        """The path in the source, op_name: of scopes, Flax's modules, einsums and primitives."""
        return self.attribute("op_name") or ""

    def called(self, key: str) -> "Computation":
        """Returns the computation that an attribute names, of the done of a start the start's."""
        return self.computations[self.start.attribute(key)]

    @property
    def bytes(self) -> int:
        """The size of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """The size of what of the result is in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    @property
    def kind(self) -> str:
        """The opcode; of the done of a start, that of both."""
        return self.opcode.removesuffix("-done")

    @property
    def start(self) -> "Instruction":
        """The instruction itself; of the done of a start, the start."""
        if self.opcode.endswith(("-done", "-update")) and self.operands:
            first = self.operands[0]
            return first.start if first.opcode.endswith(("-start", "-update")) else self
        return self


@dataclasses.dataclass
class Computation:
    """A function of the module; its last instruction, the root, is its result."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction | None = None


def parse(text: str) -> Computation:
    """Parses a module; returns the computation that runs, from which all others are reached."""
    computations = {}
    # A Pallas kernel's metadata is on lines of its own.
    for line in re.sub(r'/\*.*?\*/|\n(?="|}})', "", text).splitlines():
        header = re.match(_HEADER, line)
        instruction = re.match(_INSTRUCTION, line)
        if header:
            is_entry, name = header.groups()
            computation = Computation()
            computations["ENTRY" if is_entry else name] = computation
        elif instruction:
            _add_instruction(computation, instruction, computations)
    return computations["ENTRY"]


def _add_instruction(computation: Computation, line: re.Match, computations: dict) -> None:
    is_root, name, types, opcode, inside, attributes = line.groups(default="")
    known = computation.instructions
    names = re.findall(r"%([\w.\-]+)", inside)
    operands = [known[operand] for operand in names if operand in known]
    arrays = _parse_arrays(types)
    added = Instruction(name, opcode, arrays, operands, inside, attributes, computations)
    for index, operand in enumerate(operands):
        operand.users.append((added, index))
    known[name] = added
    if is_root:
        computation.root = added


def _parse_arrays(types: str) -> list[Array]:
    """Parses the arrays of a type such as (bf16[8,128]{1,0:T(8,128)S(1)}, u32[])."""
    arrays = []
    for dtype, sizes, space in re.findall(_ARRAY, types):
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
        size = math.ceil(math.prod(shape) * bits / 8)
        arrays.append(Array(dtype, shape, size, in_hbm=not int(space or 0)))
    return arrays


def runs(computation: Computation, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yields every instruction that runs and how often, once for every place that runs it.

    Of branches it is the one that calls cuDNN, or else the one whose results are the largest.
    """

    def weight(branch):
        calls_cudnn = any("__cudnn" in x.attributes for x, _ in branch)
        return calls_cudnn, sum(n * x.bytes for x, n in branch)

    for x in computation.instructions.values():
        yield x, times
        if x.opcode == "while":
            yield from runs(x.called("body"), times * _count_trips(x))
        elif x.opcode in ("call", "async-start"):
            key = "calls" if x.attribute("calls") else "to_apply"
            yield from runs(x.called(key), times)
        elif x.opcode == "conditional":
            branches = [list(runs(branch, times)) for branch in _branches(x)]
            yield from max(branches, key=weight)


def _branches(conditional: Instruction) -> list[Computation]:
    keys = r"branch_computations=\{.*?\}|true_computation=.*?false_computation=\S+"
    names = re.search(keys, conditional.attributes)[0]
    return [conditional.computations[name] for name in re.findall(r"%([\w.\-]+)", names)]


class _Scalar(NamedTuple):
    """Element `index` of a loop's state, if it is not None, plus a constant."""

    index: int | None
    constant: float


_UNKNOWN = _Scalar(None, math.nan)
# By the direction of a comparison, what makes its limit that of one that excludes it.
_INCLUDED = {"LT": 0, "LE": 1, "GT": 0, "GE": -1, "NE": 0}
_FOLLOWED = ("add", "bitcast", "convert", "copy", "copy-start", "copy-done", "fusion")


def _count_trips(loop: Instruction) -> int:
    """Returns how often a loop runs: as the compiler notes, or, on TPUs, as is derived."""
    note = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if note:
        return int(note[1])
    trips = _derive_trips(loop)
    if math.isnan(trips):
        problem = "runs cannot be read from the module's text"
        raise ValueError(f"how often the loop %{loop.name} {problem}")
    return max(0, math.ceil(trips))


def _derive_trips(loop: Instruction) -> float:
    """Derives how often a loop runs, nan if that is not possible.

    An element of its state must start at a constant, grow by another, and be compared with a third.
    """
    initial = loop.operands[0]
    final = loop.called("body").root
    test = loop.called("condition").root
    inputs = ()
    if test.opcode == "fusion":
        inputs = [_resolve(operand) for operand in test.operands]
        test = test.called("calls").root
    direction = test.attribute("direction")
    if direction not in _INCLUDED or not initial.opcode == final.opcode == "tuple":
        return math.nan
    counter, limit = (_resolve(operand, inputs) for operand in test.operands)
    i = counter.index
    if i is None or limit.index is not None:
        return math.nan
    start = _resolve(initial.operands[i])
    after = _resolve(final.operands[i])
    if start.index is not None or after.index != i or after.constant == 0:
        return math.nan
    first = start.constant + counter.constant
    last = limit.constant + _INCLUDED[direction]
    return (last - first) / after.constant


def _resolve(x: Instruction, inputs: Sequence[_Scalar] = ()) -> _Scalar:
    """Resolves a scalar of a loop, or of a fusion in it with these inputs."""
    if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside):
        return _Scalar(None, int(x.inside))
    if x.opcode == "parameter" and int(x.inside) < len(inputs):
        return inputs[int(x.inside)]
    if x.opcode == "get-tuple-element" and x.operands[0].opcode == "parameter":
        return _Scalar(int(x.attribute("index")), 0)
    if x.opcode not in _FOLLOWED:
        return _UNKNOWN
    terms = [_resolve(operand, inputs) for operand in x.operands]
    if x.opcode == "fusion":
        return _resolve(x.called("calls").root, terms)
    indices = [term.index for term in terms if term.index is not None]
    if len(indices) > 1:
        return _UNKNOWN
    index = indices[0] if indices else None
    constant = sum(term.constant for term in terms)
    return _Scalar(index, constant)
