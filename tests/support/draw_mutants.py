"""Draws small changes of `prope/` and says which ones the tests notice.

They are those of cosmic-ray (`pip install cosmic-ray`).

    python tests/support/draw_mutants.py --count=80 --seed=0 --output=mutants.jsonl

Each changed file is tested by the rooms below, first without the slow tests, then with them; the
first failure ends it. A position is drawn first, then one of the operators that change it.
Run it in a clone that nothing else uses: it edits files.
"""

import argparse
import collections
import json
import pathlib
import random
import sys

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test

ROOT = pathlib.Path(__file__).parents[2]
# Rooms of tests, by the path in prope/: the longest that fits.
ROOMS = {
    "": "commands train",
    "rope.py": "rope",
    "golden": "rope",
    "encodings.py": "model hf",
    "attention.py": "model",
    "model.py": "model",
    "loss.py": "model",
    "step.py": "model train",
    "sharding.py": "model e2e",
    "stack": "model",
    "kernels": "model",
    "sample.py": "evaluate",
    "evaluate.py": "evaluate",
    "ask.py": "tasks",
    "analyze.py": "analysis",
    "report.py": "report",
    "plan.py": "plan",
    "bench.py": "plan",
    "export_hf.py": "hf",
    "export_gguf.py": "hf",
    "import_hf.py": "hf",
    "check_port.py": "rope",
    "data": "data tasks",
    "workdir": "train e2e",
    "runtime": "train commands e2e",
    "inference": "evaluate tasks",
    "hf": "hf",
    "analysis": "analysis",
    "cost": "plan",
    "sweep": "report",
    "html": "report",
}


def tests_of(path: str) -> list[str]:
    """The folders of tests for a file of prope/, given by its path there."""
    fitting = [key for key in ROOMS if f"{path}/".startswith(f"{key}/" if key else "")]
    return [f"{ROOT}/tests/{room}" for room in ROOMS[max(fitting, key=len)].split()]


def draw(count: int, seed: int) -> list:
    """Draws `count` changes at different positions."""
    paths = sorted(ROOT.glob("prope/**/*.py"))
    by_position = collections.defaultdict(list)
    for item in _all_work_items([path.relative_to(ROOT) for path in paths], {}):
        (mutation,) = item.mutations
        if (
            "BinaryOperator_BitOr" not in mutation.operator_name
        ):  # mostly annotations, such as int | None
            by_position[str(mutation.module_path), mutation.start_pos].append(mutation)
    rng = random.Random(seed)
    return [
        rng.choice(by_position[position]) for position in rng.sample(sorted(by_position), count)
    ]


def main() -> None:
    """Tests each drawn change and appends a line of JSON: file, operator, outcome, difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=80, help="number of changes (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument(
        "--output", default="mutants.jsonl", help="lines are appended (default: mutants.jsonl)"
    )
    options = parser.parse_args()
    for number, mutation in enumerate(draw(options.count, options.seed)):
        path = pathlib.Path(mutation.module_path).relative_to("prope")
        folders = " ".join(tests_of(str(path)))
        for tier in ("not slow", ""):
            command = f"{sys.executable} -m pytest -q -x -m '{tier}' -p no:cacheprovider {folders}"
            result = mutate_and_test([mutation], command, timeout=1200)
            if result.test_outcome != "survived":
                break
        record = {
            "number": number,
            "file": str(mutation.module_path),
            "operator": mutation.operator_name,
        }
        record |= {"tier": tier, "outcome": str(result.test_outcome), "diff": result.diff}
        with open(options.output, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{number}: {record['file']} {record['operator']}: "
            f"{record['outcome']} ({tier or 'all'})",
            flush=True,
        )


if __name__ == "__main__":
    main()
