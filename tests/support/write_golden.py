"""Writes the golden vectors by their formulas, in decimals of 50 digits, without code of prope.

    python tests/support/write_golden.py prope/golden

Every machine writes the same bytes; prope/golden/README.md explains the files.
"""

import json
import pathlib
import sys
from decimal import Decimal, localcontext

TWO_PI = 2 * Decimal("3.14159265358979323846264338327950288419716939937511")
RANGE = [0, 1, 17, 257, 8191, 1048575]
SHORT = [1, 257, 1048575]
# (encoding, head_dim, max_wavelength, rope_percentage, positions)
CASES = [
    *[("proportional", 16, 10_000, p, RANGE) for p in (0, 0.25, 0.5, 0.75, 1)],
    *[("proportional", 16, 1_000_000, p, RANGE) for p in (0.25, 0.75)],
    ("proportional", 16, 10_000, 0.75, [-8191, -1, 0, 2]),
    *[("proportional", 64, 10_000, p, SHORT) for p in (0.3, 0.75)],
    ("proportional", 512, 1_000_000, 0.25, [257, 262143]),  # full layers of Gemma 4
    *[("partial", 16, 10_000, p, RANGE) for p in (0, 0.25, 0.5, 1)],
    ("partial", 16, 1_000_000, 0.5, RANGE),
    ("partial", 64, 10_000, 0.25, SHORT),
    ("linear", 16, 10_000, 1, RANGE),
    ("linear", 256, 1_000_000, 1, [257, 131071]),  # full layers of Gemma 3
]
FACTOR = 8  # of linear scaling


def main(folder):
    for encoding in ("proportional", "partial", "linear"):
        cases = {name_case(*case): compute(*case) for case in CASES if case[0] == encoding}
        file = folder / f"{encoding}.json"
        file.write_text(as_text(cases))


def name_case(encoding, d, theta, p, positions):
    name = f"{encoding}_d{d}"
    if theta != 10_000:
        name += f"_theta{theta}"
    name += f"_factor{FACTOR}" if encoding == "linear" else f"_p{p}"
    if positions[0] < 0:
        name += "_negative"
    return name


def compute(encoding, d, theta, p, positions):
    """Returns the numbers of a case."""
    pairs = int(p * d // 2)
    denominator = d
    half = d // 2
    if encoding == "partial":
        pairs = int(p * d) // 2
        denominator = 2 * pairs
        half = pairs
    with localcontext(prec=50):
        log_theta = Decimal(theta).ln()
        freqs = [(log_theta * (-2 * k) / denominator).exp() for k in range(pairs)]
        if encoding == "linear":
            freqs = [freq / FACTOR for freq in freqs]
        freqs += [Decimal(0)] * (d // 2 - pairs)
        table = [[cos_sin(m * freq) for freq in freqs] for m in positions]
        queries = draw(len(positions), d, 5, 3, 13)
        keys = draw(len(positions), d, 7, 2, 11)
        rotated_queries = [rotate(*row, half) for row in zip(queries, table, strict=True)]
        rotated_keys = [rotate(*row, half) for row in zip(keys, table, strict=True)]
        scores = [[dot(query, key) for key in rotated_keys] for query in rotated_queries]
    values = {
        "queries": queries,
        "keys": keys,
        "cos": [[cos for cos, _ in row] for row in table],
        "sin": [[sin for _, sin in row] for row in table],
        "rotated_queries": rotated_queries,
        "rotated_keys": rotated_keys,
        "scores": scores,
    }
    numbers = {
        "encoding": encoding,
        "head_dim": d,
        "max_wavelength": theta,
        "rope_percentage": p,
        "rotated_pairs": pairs,
        "positions": positions,
        **({"rope_scaling_factor": FACTOR} if encoding == "linear" else {}),
        "frequencies": [float(freq) for freq in freqs],
    }
    for name, rows in values.items():
        numbers[name] = [[as_number(x) for x in row] for row in rows]
    return numbers


def as_number(x):
    number = round(float(x), 10)
    return int(number) if number.is_integer() else number  # 0, not -0.0


def draw(T, d, lane_step, row_step, modulus):
    """Returns T rows of d quarters around 0."""
    rows = []
    for t in range(T):
        numbers = [(lane_step * lane + row_step * t) % modulus for lane in range(d)]
        rows.append([(number - modulus // 2) / 4 for number in numbers])
    return rows


def cos_sin(angle):
    """Computes cos and sin by their series, after whole turns are taken away."""
    x = angle % TWO_PI
    terms = [Decimal(1)]
    while abs(terms[-1]) > Decimal("1e-40") or len(terms) < 9:
        terms.append(terms[-1] * x / len(terms))
    cos = sum(terms[0::4]) - sum(terms[2::4])
    sin = sum(terms[1::4]) - sum(terms[3::4])
    return cos, sin


def rotate(row, angles, half):
    """Rotates lanes k and k + half by the angle k, which is its cos and sin."""
    out = [Decimal(x) for x in row]
    for k, (cos, sin) in enumerate(angles):
        first = out[k]
        second = out[k + half]
        out[k] = first * cos - second * sin
        out[k + half] = second * cos + first * sin
    return out


def dot(query, key):
    return sum(map(Decimal.__mul__, query, key))


def as_text(cases):
    """JSON with one array of a case on a line."""
    objects = []
    for name, case in cases.items():
        lines = [f'"{key}":{json.dumps(case[key], separators=(",", ":"))}' for key in case]
        body = ",\n".join(lines)
        objects.append(f'"{name}":{{\n{body}}}')
    text = ",\n\n".join(objects)
    return f"{{\n{text}\n}}\n"


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
