"""Reads the text of a compiled module."""

import re

Shape = tuple[str, tuple[int, ...]]


def array_shapes(text: str, in_fusions: bool = True) -> set[Shape]:
    """Lists (dtype, dims) of the arrays of a compiled module.

    Those inside fusions, which are in no memory, may be left out.
    """
    fusions = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", text))
    shapes = set()
    counted = True
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            counted = in_fusions or header[1] not in fusions
        elif counted:
            result = line.partition(" = ")[2].partition("(%")[0]
            for dtype, sizes in re.findall(r"\b(pred|[a-z]+\d\w*)\[([\d,<=]*)\]", result):
                dims = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
                shapes.add((dtype, dims))
    return shapes
