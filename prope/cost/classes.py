"""Sorts the kernels of a compiled step by what they are for: matmuls, attention, norms, .."""

import math
import pathlib
import re
import tomllib
from collections import Counter

from prope.cost import flops, traffic
from prope.cost.hlo import Computation, Instruction, runs

_RULES = tomllib.loads(pathlib.Path(__file__).with_name("classes.toml").read_text())
_MATMUL = r'^(dot|convolution) |custom_call_target="[^"]*(gemm|matmul)'
_MOVES = (
    "((dynamic-)?(update-)?slice|broadcast|concatenate|convert|copy|iota|pad|reverse|transpose"
    "|bitcast|constant|parameter|(get-)?tuple(-element)?|reshape| )+"
)


def count_classes(module: Computation, chip: flops.Chip) -> dict[str, Counter]:
    """Counts {class: {"milliseconds", "bytes", "flops", "kernels"}} of one chip's step.

    "bytes" are those of HBM, "flops" those of matmuls, without attention's. The roofline's
    "milliseconds" are those of one kernel after another, each as long as its bytes or its FLOPs
    take at the chip's peaks.
    """
    classes = {}
    for x, times in runs(module):
        if traffic.is_kernel(x):
            name = classify(x)
            size = times * traffic.kernel_bytes(x)
            work = times * sum(map(_matmul_flops, _find_matmuls(x))) if "matmul" in name else 0
            milliseconds = 1e3 * max(size / chip.hbm_bandwidth, work / chip.flops)
            amounts = classes.setdefault(name, Counter())
            amounts.update(milliseconds=milliseconds, bytes=size, flops=work, kernels=times)
    return classes


def classify(x: Instruction) -> str:
    """Returns the class of a kernel, or of the start of one."""
    parts = _parts(x)
    matmuls = _find_matmuls(x)
    opcodes = {re.sub("-(start|done)$", "", part.opcode) for part in parts if part.bytes > 8}
    what = " ".join(sorted(opcodes))  # without those of scalars
    kind = "matmul" if matmuls else "move" if re.fullmatch(_MOVES, what) else "work"
    paths = [y.path for y in (*matmuls, x, *parts)]
    if not any(paths):
        paths += [user.path for user, _ in x.users]
    for path in paths:
        for pattern, name in _RULES.items():
            if re.search(pattern, f"{kind} {what}: {path}"):
                return name
    return "matmul other" if matmuls else "other"


def _parts(x: Instruction) -> list[Instruction]:
    """Lists the instructions within a fusion or an asynchronous computation; of others, itself."""
    if not x.opcode.startswith(("fusion", "async")):
        return [x]
    return [part for y in x.start.called("calls").instructions.values() for part in _parts(y)]


def _find_matmuls(x: Instruction) -> list[Instruction]:
    return [part for part in _parts(x) if re.search(_MATMUL, f"{part.opcode} {part.attributes}")]


def _matmul_flops(x: Instruction) -> int:
    """Counts 2 m n k of a product of [m, k] and [k, n], not batched, from the three sizes."""
    arrays = [y.arrays[0].shape for y in (*x.operands[:2], x)]
    return 2 * math.isqrt(math.prod(map(math.prod, arrays)))
