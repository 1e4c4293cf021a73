"""Prints which engines compute which exports: the table of prope/hf/README.md.

    python tests/engines.py [ENGINE ..]

ENGINE is transformers, mlx, llama.cpp or vllm; by default those that are installed. Models have
random numbers. A cell is the largest difference of log-probabilities from prope's, after six
prompts of up to 120 tokens; or why the export is refused.
"""

import collections
import importlib.metadata
import importlib.util
import pathlib
import sys
import tempfile

from support.exports import CASES, distance, export_case

from prope.errors import RunFailed, UsageError
from prope.hf import engines


def measure(engine: str, name: str) -> str:
    """Exports a case and asks an engine; returns the difference, or who refuses it."""
    p, fields, _ = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            spec, params, result = export_case(pathlib.Path(folder), engine, p, fields)
        except UsageError:
            return "not exported"
        try:
            here = engine in ("mlx", "transformers")  # those that do not end their process
            found = distance(engine, spec, params, result["output"], here)
        except (ArithmeticError, LookupError, RunFailed, TypeError, ValueError) as error:
            return f"refused ({str(error)[:60]})"
        return f"{found:.0e}" if found < 0.1 else f"**{found:.1f}**"


def main(names: list[str]) -> None:
    """Prints a row for every class."""
    packages = {engine: package for engine, (package, _) in engines.PACKAGES.items()}
    names = names or [
        engine
        for engine, package in packages.items()
        if importlib.util.find_spec(package.replace("-", "_"))
    ]
    versions = [f"{name} {importlib.metadata.version(packages[name])}" for name in names]
    print(f"| class, p | {' | '.join(versions)} |\n|{'---|' * (len(names) + 1)}", flush=True)
    rows = collections.defaultdict(dict)
    for case in CASES:
        name, _, p = case.partition(", p=")
        rows[name][p] = [measure(engine, case) for engine in names]
        print(f"| {case} | {' | '.join(rows[name][p])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
