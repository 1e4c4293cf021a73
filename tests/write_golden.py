"""Writes the golden vectors by their formulas, in decimal arithmetic of 50 digits; it imports nothing of prope.

    python tests/write_golden.py prope/golden

Every machine writes the same bytes; prope/golden/README.md explains the files.
"""

import json
import pathlib
import sys
from decimal import Decimal, localcontext

TWO_PI = 2 * Decimal("3.14159265358979323846264338327950288419716939937511")
RANGE = [0, 1, 17, 257, 8191, 1048575]
# (encoding, head_dim, max_wavelength, rope_percentage, positions)
CASES = [
    *(("proportional", 16, 10_000, p, RANGE) for p in (0, 0.25, 0.5, 0.75, 1)),
    *(("proportional", 16, 1_000_000, p, RANGE) for p in (0.25, 0.75)),
    ("proportional", 16, 10_000, 0.75, [-8191, -1, 0, 2]),
    *(("proportional", 64, 10_000, p, [1, 257, 1048575]) for p in (0.3, 0.75)),
    ("proportional", 256, 1_000_000, 0.25, [257, 8191]),
    *(("partial", 16, 10_000, p, RANGE) for p in (0, 0.25, 0.5, 1)),
    ("partial", 16, 1_000_000, 0.5, RANGE),
    ("partial", 64, 10_000, 0.25, [1, 257, 1048575]),
]


def main(folder: pathlib.Path) -> None:
    files = {}
    for case in CASES:
        files.setdefault(f"{case[0]}.json", {}).update([compute(*case)])
    for name, cases in files.items():
        (folder / name).write_text(as_text(cases))


def compute(encoding: str, d: int, theta: int, p: float, positions: list[int]) -> tuple[str, dict]:
    """Returns the name and the numbers of a case."""
    pairs = int(p * d // 2) if encoding == "proportional" else int(p * d) // 2
    denominator, half = (d, d // 2) if encoding == "proportional" else (2 * pairs, pairs)
    queries = [
        [((5 * lane + 3 * t) % 13 - 6) / 4 for lane in range(d)] for t in range(len(positions))
    ]
    keys = [[((7 * lane + 2 * t) % 11 - 5) / 4 for lane in range(d)] for t in range(len(positions))]
    with localcontext(prec=50):
        freqs = [(Decimal(theta).ln() * (-2 * k) / denominator).exp() for k in range(pairs)]
        table = [
            [cos_sin(m * freq) for freq in freqs] + [(1, 0)] * (d // 2 - pairs) for m in positions
        ]
        rotated_queries, rotated_keys = (
            [rotate(row, angles[:pairs], half) for row, angles in zip(rows, table, strict=True)]
            for rows in (queries, keys)
        )
        scores = [[sum(map(Decimal.__mul__, q, k)) for k in rotated_keys] for q in rotated_queries]
    start = f"{encoding}_d{d}" + (f"_theta{theta}" if theta != 10_000 else "")
    numbers = {
        "encoding": encoding,
        "head_dim": d,
        "max_wavelength": theta,
        "rope_percentage": p,
        "rotated_pairs": pairs,
        "positions": positions,
        "frequencies": [float(freq) for freq in freqs] + [0.0] * (d // 2 - pairs),
    }
    values = {
        "queries": queries,
        "keys": keys,
        "cos": [[cos for cos, _ in row] for row in table],
        "sin": [[sin for _, sin in row] for row in table],
        "rotated_queries": rotated_queries,
        "rotated_keys": rotated_keys,
        "scores": scores,
    }
    numbers |= {
        name: [[round(float(x), 10) + 0.0 for x in row] for row in rows]
        for name, rows in values.items()
    }
    return f"{start}_p{p}" + ("_negative" if positions[0] < 0 else ""), numbers


def cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Computes cos and sin by their series, after whole turns are taken away."""
    x = angle % TWO_PI
    terms = [Decimal(1)]
    while abs(terms[-1]) > Decimal("1e-40") or len(terms) < 9:
        terms.append(terms[-1] * x / len(terms))
    signs = [1, 1, -1, -1]
    signed = [term * signs[n % 4] for n, term in enumerate(terms)]
    return sum(signed[0::2]), sum(signed[1::2])


def rotate(row: list[float], angles: list[tuple[Decimal, Decimal]], half: int) -> list[Decimal]:
    """Rotates lanes k and k + half by the angle k, given as its cos and sin."""
    out = [Decimal(x) for x in row]
    for k, (cos, sin) in enumerate(angles):
        first, second = out[k], out[k + half]
        out[k], out[k + half] = first * cos - second * sin, second * cos + first * sin
    return out


def as_text(cases: dict[str, dict]) -> str:
    """JSON with one array of a case on a line."""
    rows = {
        name: ",\n".join(
            f'"{key}":{json.dumps(value, separators=(",", ":"))}' for key, value in case.items()
        )
        for name, case in cases.items()
    }
    return "{\n" + ",\n\n".join(f'"{name}":{{\n{body}}}' for name, body in rows.items()) + "\n}\n"


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
