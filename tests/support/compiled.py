"""Reads the text of a compiled module."""

import re

_FUSED = r" fusion\(.*calls=%?([\w.\-]+)"
_HEADER = r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$"
_ARRAY = r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\]"


def array_shapes(text: str, in_fusions: bool = True) -> set[tuple[str, tuple[int, ...]]]:
    """Lists (dtype, dims) of the arrays of a compiled module.

    Those inside fusions, which are in no memory, may be left out.
    """
    fused = set(re.findall(_FUSED, text))
    shapes = set()
    counted = True
    for line in text.splitlines():
        header = re.match(_HEADER, line)
        if header:
            counted = in_fusions or header[1] not in fused
        elif counted:
            _, _, instruction = line.partition(" = ")
            result, _, _ = instruction.partition("(%")
            for dtype, sizes in re.findall(_ARRAY, result):
                sizes = sizes.replace("<=", "").split(",")
                dims = tuple(int(size) for size in sizes if size)
                shapes.add((dtype, dims))
    return shapes
