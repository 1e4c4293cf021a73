"""Prints which engines compute which exports: the table of prope/hf/README.md.

    python tests/engines.py [ENGINE ..]

ENGINE is transformers, mlx, llama.cpp or vllm; by default those that are installed. Models have
random numbers. A cell is the largest difference of log-probabilities from prope's, after six
prompts of up to 120 tokens; or why the export is refused.
"""

import importlib.metadata
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
    """Prints a row for every case."""
    names = names or [engine for engine in engines.PACKAGES if engines.is_there(engine)]
    versions = [f"{name} {importlib.metadata.version(engines.PACKAGES[name][0])}" for name in names]
    print(f"| class, p | {' | '.join(versions)} |\n|{'---|' * (len(names) + 1)}", flush=True)
    for case in CASES:
        print(f"| {case} | {' | '.join(measure(engine, case) for engine in names)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
