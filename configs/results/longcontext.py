"""Prints the tables of configs/results/longcontext.md from the records of a sweep, W.

    python configs/results/longcontext.py W

W was trained by launch/sweep.py on configs/longcontext.py:table or :niah, and asked by prope.ask.
Only seeds that have every method count. Right answers are in %, means over seeds; contrasts are
shares, paired by seed: Student's t of their own differences, by Bonferroni and Holm over a family.
"""

import json
import pathlib
import re
import sys

import numpy as np

from prope.inference.statistics import average_seeds, holm

CONTRASTS = (
    ("p_rope_swa", "rope_swa"),
    ("p_rope_swa", "rnope_swa"),
    ("p_rope_0.25", "rope"),
    ("p_rope_0.75", "rope"),
)
JUDGED = ("niah", "lookup", "offset", "index")  # at 8 times the length of training


def read(work: pathlib.Path) -> dict[str, dict[str, dict]]:
    """Reads shares of right answers: by group (wavelength, or niah), method, (seed, task, times).

    The best guess that retrieves nothing is the method "guess", of seed 0.
    """
    shares = {}
    for place in sorted(work.glob("config=*,seed=*")):
        name, seed = re.fullmatch(r"config=(.+),seed=(\d+)", place.name).groups()
        method, _, size = name.partition("-")
        group = {"10000": "10,000", "niah": "niah alone"}.get(size, "100")
        trained = json.loads((place / "config.json").read_text())["data"]["seq_len"]
        of_group = shares.setdefault(group, {})
        for line in (place / "longcontext.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["control"] is None:
                asked = (record["task"], record["seq_len"] / trained)
                of_group.setdefault(method, {})[int(seed), *asked] = record["accuracy"]
                of_group.setdefault("guess", {})[0, *asked] = record["guess"]
    return shares


def whole_seeds(methods: dict[str, dict]) -> list[int]:
    """Returns the seeds that every method was asked with."""
    seeds = [{seed for seed, *_ in found} for name, found in methods.items() if name != "guess"]
    return sorted(set.intersection(*seeds))


def share_rows(shares: dict) -> list[str]:
    """By group and method: number of seeds, then every task at 1, 2 and 8 times the length."""
    rows = []
    for group, methods in shares.items():
        seeds = whole_seeds(methods)
        asked = sorted({(task, times) for found in methods.values() for _, task, times in found})
        asked = [(task, times) for task, times in asked if times in (1, 2, 8)]
        names = [f"{task} {times:g}x" for task, times in asked]
        rows.append(_row("wavelength", "method", "seeds", *names))
        for method, found in methods.items():
            of_method = [0] if method == "guess" else seeds
            means = [np.mean([found[seed, *place] for seed in of_method]) for place in asked]
            count = "" if method == "guess" else len(seeds)
            rows.append(_row(group, method, count, *(f"{100 * mean:.0f}" for mean in means)))
    return rows


def contrast_rows(shares: dict) -> list[str]:
    """The contrasts that were declared: a family for each group, of the methods that are there."""
    rows = []
    for group, methods in shares.items():
        seeds = whole_seeds(methods)
        pairs = [pair for pair in CONTRASTS if set(pair) <= methods.keys()]
        found = []
        for one, other in pairs:
            tasks = {task for _, task, _ in methods[one]} & set(JUDGED)
            by_seed = [
                np.mean(
                    [methods[one][seed, task, 8] - methods[other][seed, task, 8] for task in tasks]
                )
                for seed in seeds
            ]
            found.append(average_seeds(by_seed)._replace(comparisons=len(pairs)))
        adjusted = holm([1.0 if one.p_value is None else one.p_value for one in found])
        for pair, one, p in zip(pairs, found, adjusted, strict=True):
            low, high = one.interval() or (np.nan, np.nan)
            cells = (f"{one.difference:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{p:.3g}")
            rows.append(_row(group, " - ".join(pair), *cells, f"{one.sign_flip_p_value or 1:.3g}"))
    return rows


def _row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    found = read(pathlib.Path(sys.argv[1]))
    print("\n".join(share_rows(found) + contrast_rows(found)))
